"""The cost of a step to each group: identities, actual losses, and no effect on the run."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from evenclip import DPSGD, DPSGDF, DPSGDGlobal, DPSGDGlobalAdapt, NonPrivate, fit
from evenclip.audit.decomposition import BatchGradients, RiskTerms, terms

FLOATS = arrays(np.float64, 4, elements=st.floats(-100, 100))
RULES = [
    NonPrivate(),
    DPSGD(C0=0.3, sigma=0.5),
    DPSGDF(C0=0.3, sigma=0.5),
    DPSGDGlobal(C0=0.3, sigma=0.5, Z=2.0),
    DPSGDGlobalAdapt(C0=0.3, sigma=0.5, Z0=1.0),
]
named = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def toy(n=120, seed=0):
    """Two groups; the smaller one has other samples with larger norms.  (x, y, group)"""
    random = torch.Generator().manual_seed(seed)
    group = (torch.arange(n) % 4 == 0).long()
    x = torch.randn(n, 3, generator=random, dtype=torch.float64) * (
        1 + 2 * group.unsqueeze(1)
    ) + group.unsqueeze(1)
    return x, torch.randint(2, (n,), generator=random), group


def model(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


# --- identities ---


@given(
    FLOATS,
    FLOATS,
    FLOATS,
    FLOATS,
    arrays(np.float64, 4, elements=st.floats(0.01, 100)),
    st.floats(0.001, 10),
)
@settings(derandomize=True, deadline=None, database=None)
def test_magnitude_and_direction_make_up_clipping(s, f, clipped_s, clipped_f, rho, lr):
    values = terms(s, f, clipped_s, clipped_f, rho, lr)
    size = sum(np.abs(values[name]) for name in values) + 1
    assert (np.abs(values["mag"] + values["dir"] - values["clip"]) <= 1e-9 * size).all()
    assert (np.abs(values["mag_star"] + values["dir_star"] - values["clip"]) <= 1e-9 * size).all()


@given(FLOATS, FLOATS, st.floats(0.01, 3), st.floats(0.001, 10))
@settings(derandomize=True, deadline=None, database=None)
def test_scaling_alone_turns_nothing(s, f, scale, lr):
    values = terms(s, f, scale * s, scale**2 * f, np.full(4, scale), lr)
    for name in ("dir", "dir_star"):
        assert np.abs(values[name]).max() <= 1e-9 * (
            lr * np.abs(s).max() + lr**2 * np.abs(f).max() + 1
        )


def test_turning_alone_changes_no_length():
    values = terms(np.ones(4), np.ones(4), np.zeros(4), 2 * np.ones(4), np.ones(4), 0.5)
    assert not values["mag"].any()
    assert not values["mag_star"].any()
    assert np.array_equal(values["dir"], values["clip"])


def test_no_gradient_has_length_ratio_one():
    zero, v = torch.zeros(2, dtype=torch.float64), torch.tensor([3.0, 4.0], dtype=torch.float64)
    batches = BatchGradients(torch.stack([zero, v, v, zero]), torch.stack([zero, v / 2, zero, v]))
    assert batches.rho.tolist() == [1.0, 0.5, 1.0, 1.0]


# --- as an observer ---


def observed(rule, *, lr=0.1, steps=5, data=None, **options):
    data = toy() if data is None else data
    options = {"every": 2, "probes": 8, **options}
    return fit(
        model(),
        data,
        rule=rule,
        batch_size=20,
        steps=steps,
        lr=lr,
        seed=1,
        observers=[RiskTerms(data, lr, **options)],
    )


@named
def test_every_rule_has_its_terms(rule):
    seen = [record for record in observed(rule).records if "risk" in record]
    assert [record["t"] for record in seen] == [0, 2, 4]
    assert json.loads(json.dumps(seen)) == seen
    for record in seen:
        assert [group["group"] for group in record["risk"]] == [0, 1]
        assert [group["n"] for group in record["risk"]] == [90, 30]
        for group in record["risk"]:
            values = {name: value for name, (value, _) in group["terms"].items()}
            assert values["mag"] + values["dir"] == pytest.approx(values["clip"], abs=1e-12)
            if rule.name == "non-private":
                assert values["clip"] == pytest.approx(0, abs=1e-12)
            if rule.name in ("non-private", "dpsgd-global"):
                expected = 0.0 if rule.name == "non-private" else None
                assert expected is None or values["dir"] == pytest.approx(expected, abs=1e-12)
            if rule.sigma:
                ideal = (
                    0.1**2 / 2 * group["trace"][0] * (rule.sigma * record["sensitivity"] / 20) ** 2
                )
                # The released noise is slightly larger; see test_noise_variance.py.
                assert values["noise"] == pytest.approx(ideal, rel=2e-3)
            else:
                assert values["noise"] == 0


@named
def test_looking_changes_nothing(rule):
    seen = observed(rule, batches=3, eigenvalues=True)
    alone = fit(model(), toy(), rule=rule, batch_size=20, steps=5, lr=0.1, seed=1)
    assert all(
        torch.equal(a, b)
        for a, b in zip(seen.model.parameters(), alone.model.parameters(), strict=True)
    )
    assert seen.ledger == alone.ledger
    assert seen.trace == alone.trace


def test_a_rule_that_scales_all_alike_turns_nothing():
    """DPSGD-Global with a Z above every gradient norm."""
    for record in observed(DPSGDGlobal(C0=0.3, sigma=0.5, Z=1000.0)).records:
        for group in record.get("risk", ()):
            assert group["terms"]["dir"][0] == pytest.approx(0, abs=1e-12)
            assert group["cosine"] == pytest.approx(group["clipped_cosine"])
            assert abs(group["terms"]["mag"][0]) > 1e-6


def after_a_step(start, data, rule, lr, q, draws):
    """Each group's loss after one DPSGD step, repeated from the same start.  # [draw, group]"""
    x, y, group = data
    names, B, random = (
        list(dict(start.named_parameters())),
        q * len(y),
        torch.Generator().manual_seed(5),
    )
    theta = torch.nn.utils.parameters_to_vector(start.parameters()).detach()

    def split(vector):
        pieces = torch.split(vector, [p.numel() for p in start.parameters()])
        return {
            name: piece.view(p.shape)
            for name, piece, p in zip(names, pieces, start.parameters(), strict=True)
        }

    def loss(vector, x, y):
        return cross_entropy(
            functional_call(start, split(vector), (x.unsqueeze(0),)), y.unsqueeze(0)
        )

    each = vmap(grad(loss), in_dims=(None, 0, 0))(theta, x, y)
    each = each * (rule.C0 / each.norm(dim=1, keepdim=True)).clamp(max=1)
    picked = (torch.rand(draws, len(y), generator=random) < q).double()
    noise = (
        rule.sigma * rule.C0 * torch.randn(draws, len(theta), generator=random, dtype=torch.float64)
    )
    moved = theta - lr * (picked @ each + noise) / B
    losses = vmap(vmap(loss, in_dims=(None, 0, 0)), in_dims=(0, None, None))(moved, x, y)
    return torch.stack([losses[:, group == k].mean(dim=1) for k in (0, 1)], dim=1).numpy()


def test_the_prediction_is_the_loss_that_comes_of_it():
    """Proposition 1 against six thousand steps: batch, clipping and noise drawn anew each time."""
    data, rule, lr, start = toy(), DPSGD(C0=0.1, sigma=1.0), 0.2, model()
    x, y, group = data
    looking = RiskTerms(data, lr, batches=600, probes=1000, every=1)
    (record,) = fit(
        start, data, rule=rule, batch_size=20, steps=1, lr=lr, seed=0, observers=[looking]
    ).records
    losses = after_a_step(start, data, rule, lr, 20 / len(y), 6_000)
    before = cross_entropy(start(x), y, reduction="none").detach()
    for k, risk in enumerate(record["risk"]):
        step = {name: risk["terms"][name] for name in ("non_private", "clip", "noise")}
        predicted = float(before[group == k].mean()) + sum(value for value, _ in step.values())
        spread = losses[:, k].std() / math.sqrt(len(losses))
        # The first two terms use the same batches: their sum varies by η⟨g_a, ḡ_B⟩, far less than
        # either.
        batches = lr * float(np.std(risk["clipped_slopes"])) / math.sqrt(600)
        error = math.hypot(batches, step["noise"][1], spread)
        assert abs(losses[:, k].mean() - predicted) < 3 * error
        assert (
            abs(step["clip"][0]) > 4 * error
        )  # the test has power: without the clipping term it would fail


def test_the_noise_term_is_what_noise_does_to_the_loss():
    """Steps of pure noise, each with its opposite, so that terms linear in the noise cancel."""
    data, rule, lr, start = toy(), DPSGD(C0=0.1, sigma=2.0), 0.2, model()
    x, y, group = data
    looking = RiskTerms(data, lr, probes=300, every=1)
    (record,) = fit(
        start, data, rule=rule, batch_size=20, steps=1, lr=lr, seed=0, observers=[looking]
    ).records
    theta = torch.nn.utils.parameters_to_vector(start.parameters()).detach()
    half = torch.randn(
        500, len(theta), dtype=theta.dtype, generator=torch.Generator().manual_seed(3)
    )
    half *= rule.sigma * rule.C0 / 20
    losses = []  # [draw, group]
    moved = model()
    for noise in torch.stack([half, -half], dim=1).flatten(0, 1):
        torch.nn.utils.vector_to_parameters(theta - lr * noise, moved.parameters())
        each = cross_entropy(moved(x), y, reduction="none").detach()
        losses.append([float(each[group == k].mean()) for k in (0, 1)])
    before = cross_entropy(start(x), y, reduction="none").detach()
    pairs = np.array(losses).reshape(500, 2, 2).mean(axis=1)  # [pair, group]
    for k, risk in enumerate(record["risk"]):
        value, se = risk["terms"]["noise"]
        error = math.hypot(se, pairs[:, k].std() / math.sqrt(500))
        assert abs(pairs[:, k].mean() - float(before[group == k].mean()) - value) < 4 * error
        assert value > 10 * error  # the test has power


def test_the_error_of_one_batch_is_unknown():
    """Not 0: the terms are expectations over batches."""
    for sample in (None, 64):
        one = observed(DPSGD(), data=toy(300), steps=1, every=1, sample=sample).records[0]
        for group in one["risk"]:
            errors = {name: se for name, (_, se) in group["terms"].items()}
            assert errors.pop("noise") > 0  # that of the trace
            assert set(errors.values()) == {None}


def test_a_sample_of_a_group_is_right_within_its_error():
    data = toy(4000)
    given = {"data": data, "steps": 1, "every": 1, "probes": 0, "batches": 24}
    rule = DPSGD(C0=0.3, sigma=0.5)
    whole = observed(rule, **given).records[0]["risk"]
    far = []
    for seed in range(1, 13):
        some = observed(rule, **given, sample=256, seed=seed).records[0]["risk"]
        for group, exact in zip(some, whole, strict=True):
            assert group["n"] == 256
            assert group["of"] == exact["of"]
            value, se = group["terms"]["dir"]
            other, error = exact["terms"]["dir"]
            far.append((value - other) / math.hypot(se, error))
    assert 0.5 < float(np.std(far)) < 2
    assert max(map(abs, far)) < 5


def test_eigenvalues_and_chosen_groups():
    (record,) = (
        fit(
            model(), toy(), rule=NonPrivate(), batch_size=20, steps=1, lr=0.1, seed=1,
            observers=[RiskTerms(toy(), 0.1, groups=[1], eigenvalues=True)],
        ).records
    )  # fmt: skip
    (group,) = record["risk"]
    low, high = group["extremes"]
    assert group["group"] == 1
    assert low < high
    assert low < group["trace"][0] < 26 * high


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0"),
        ({"batches": 0}, "batches is 0"),
        ({"probes": -1}, "probes is -1"),
        ({"sample": 3}, "at least 32"),
        ({"groups": [0, 7]}, "no sample of group 7"),
    ],
)
def test_what_cannot_be_asked_for(options, message):
    with pytest.raises(ValueError, match=message):
        RiskTerms(toy(), 0.1, **options)


def test_data_without_groups():
    with pytest.raises(ValueError, match="by group"):
        RiskTerms(toy()[:2], 0.1)
