"""Public constants that depend on the number of records: the noise's width, and q, T and δ.

The attacker knows a dataset and one more record, and chooses σ. A larger batch rounds more, so a
bound on rounding that is computed from the number of records is larger with the record, if only in
the fifteenth digit. There is a σ at which the cells of the published numbers are then twice as
wide, and one odd number says that the record is not in the data.

The bound must be a function of q and B, which are the same for both datasets. These are computed
from a declared number of records, if there is one; a number that was counted tells the attacker.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenclip import DPSGD, NonPrivate, fit, prepare
from evenclip.data import Dataset
from evenclip.mechanism.grid import Grid
from evenclip.mechanism.rounding import most_records, sum_rounding

N, D, CLASSES, B, ROUNDS = 24, 30, 4, 16, 8
SIZE = D * CLASSES + CLASSES


def settings(sigma):
    rule = DPSGD(C0=1.0, sigma=sigma)
    return {"rule": rule, "batch_size": B, "q": 1.0, "steps": 1, "lr": 1.0, "delta": 1e-5}


def model():
    """Return softmax regression that starts at zero, so that the model is the gradient."""
    layer = nn.Linear(D, CLASSES)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    return layer


@pytest.fixture
def neighbours():
    """Return a dataset with the record in question, and one without it."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(N + 1, D, generator=random), torch.arange(N + 1) % CLASSES
    return {"with": (x, y), "without": (x[:-1], y[:-1])}


def roundings(neighbours):
    """Return ρ of a run on each dataset."""
    runs = {name: prepare(model(), data, **settings(64.0)) for name, data in neighbours.items()}
    return {name: (run.mechanism.rounding, run.tape.rows) for name, run in runs.items()}


def chosen_sigma(rho):
    """Return the smallest σ at which cells are 8 wide for this ρ."""
    low, high = 60.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if Grid.of(1.0, middle, SIZE, rho).std >= 64 else (middle, high)
    return high


def test_one_record_changes_neither_the_bound_nor_the_blocks(neighbours):
    with_it, without = roundings(neighbours).values()
    assert with_it == without


@pytest.mark.parametrize("q", [1.0, 0.5])
def test_more_records_than_the_bound_covers_are_refused(neighbours, q):
    given = settings(1.0) | {"q": q, "batch_size": 6}
    most = round(2 * 6 / q)
    x, y = torch.randn(most + 1, D), torch.arange(most + 1) % CLASSES
    assert prepare(model(), (x[:most], y[:most]), **given).mechanism.rounding > 0
    with pytest.raises(ValueError, match=f"cover at most {most} records"):
        prepare(model(), (x, y), **given)


def constants(data, **given):
    """Return what a run publishes before its first step."""
    settings = {"rule": DPSGD(C0=1.0, sigma=1.0), "batch_size": 8, "epochs": 2, "seed": None}
    return prepare(model(), data, **settings, **given).settings


def test_one_record_changes_no_constant_if_their_number_is_declared(neighbours):
    with_it, without = (constants(data, records=24) for data in neighbours.values())
    assert with_it == without
    assert (with_it.n, with_it.q, with_it.steps, with_it.declared) == (24, 8 / 24, 6, True)
    of_data = [
        constants(Dataset(*data, class_names=tuple("abcd"), records=24))
        for data in neighbours.values()
    ]
    assert of_data == [with_it, with_it]


def test_the_attack_wins_against_a_number_that_was_counted(neighbours):
    with_it, without = (constants(data) for data in neighbours.values())
    assert (with_it.n, without.n, with_it.declared) == (N + 1, N, False)
    assert with_it.q != without.q
    assert with_it.steps != without.steps


def test_a_number_that_was_counted_is_listed_and_a_declared_one_is_not(neighbours):
    data = neighbours["with"]
    for given, counted in (({}, True), ({"records": 30}, False)):
        report = fit(model(), data, **settings(1.0), **given).privacy
        listed = "the number of records n, from which q and T are computed"
        assert (listed in report["not_covered"]) == counted
        assert report["n"] == (N + 1 if counted else 30)


def test_all_records_are_drawn_whatever_number_is_declared(neighbours):
    data = neighbours["with"]
    run = prepare(model(), data, rule=DPSGD(), batch_size=16, records=16)
    assert len(run.batches.sampler.batch(0)) == N + 1
    shuffled = prepare(model(), data, rule=NonPrivate(), batch_size=5, records=16)
    assert (shuffled.settings.n, shuffled.settings.declared) == (N + 1, False)


def test_more_than_twice_the_declared_records_are_refused(neighbours):
    with pytest.raises(ValueError, match="twice as many; there are more: declare a number"):
        constants(neighbours["with"], records=12)
    assert constants(neighbours["with"], records=13).n == 13
    with pytest.raises(ValueError, match="records is 0; it must be a whole number of at least 1"):
        constants(neighbours["with"], records=0)


def test_the_attack_wins_against_a_bound_for_the_number_of_records(neighbours, monkeypatch):
    def for_n(tape, settings, performance, ranks):
        return sum_rounding(most_records(settings.q, settings.n), tape.rows)

    monkeypatch.setattr("evenclip.training.run.rounding", for_n)
    sigma = chosen_sigma(roundings(neighbours)["with"][0])
    for name, data in neighbours.items():
        for _ in range(ROUNDS):
            result = fit(model(), data, **settings(sigma))
            assert result.epsilon("pld", 1e-5) < 0.05
            published = -B * nn.utils.parameters_to_vector(result.model.parameters()).detach()
            is_even = bool((published / 8 == (published / 8).round()).all())
            assert is_even == (name == "with")
