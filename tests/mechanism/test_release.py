"""Releases, and the ledger that records them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenclip import DPSGD, NonPrivate
from evenclip.mechanism import Entry, Ledger, Mechanism, Release, joint_multiplier
from evenclip.mechanism.noise import Noise
from evenclip.rules import Constants, FairLens

# Release
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sensitivity", [0.5, torch.tensor(0.5, dtype=torch.float64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_release_adds_exactly_sensitivity_times_multiplier_times_noise(sensitivity, dtype):
    value, noise = (
        torch.tensor([[3.0, 4.0], [0.0, -1.0]], dtype=dtype),
        torch.tensor([1.0, -2.0, 8.0, 0.25], dtype=dtype),
    )
    release = Release({"count": torch.zeros(1), "gradient": noise})
    released = release("gradient", value, sensitivity=sensitivity, multiplier=6.0)
    assert released.tolist() == [
        [6.0, -2.0],
        [24.0, -0.25],
    ]  # value + 3·noise, in powers of two: no rounding
    assert released.dtype == dtype


def test_each_name_is_released_once():
    release = Release({"gradient": torch.ones(2)})
    release("gradient", torch.zeros(2), sensitivity=1.0, multiplier=1.0)
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the whole text is compared
        release("gradient", torch.zeros(2), sensitivity=1.0, multiplier=1.0)
    assert str(refused.value) == "This step has released 'gradient' already; noise is used once."


def test_each_name_is_released_once_even_in_clear():
    release = Release({})
    release("gradient", torch.zeros(2), sensitivity=1.0, multiplier=0.0)
    with pytest.raises(ValueError, match="released 'gradient' already"):
        release("gradient", torch.zeros(2), sensitivity=1.0, multiplier=0.0)


def test_a_name_without_noise_is_refused():
    with pytest.raises(KeyError):
        Release({"gradient": torch.ones(2)})(
            "count", torch.zeros(1), sensitivity=1.0, multiplier=1.0
        )


@pytest.mark.parametrize("size", [1, 3])
def test_one_number_of_noise_for_each_number_released(size):
    with pytest.raises(RuntimeError):  # never spread over several
        Release({"gradient": torch.ones(size)})(
            "gradient", torch.zeros(2), sensitivity=1.0, multiplier=1.0
        )


def test_an_empty_value_needs_no_noise_and_is_not_in_the_ledger():
    release = Release({})
    assert release("count", torch.zeros(0), sensitivity=1.0, multiplier=10.0).shape == (0,)
    assert Mechanism(DPSGD(sigma=2.0)).multipliers == {"gradient": 2.0}


def test_multiplier_0_is_in_clear_and_the_ledger_says_so():
    release, value = Release({"gradient": torch.full((2,), 9.0)}), torch.tensor([1.0, 2.0])
    assert torch.equal(release("gradient", value, sensitivity=math.inf, multiplier=0.0), value)
    ledger = Ledger()
    ledger.write(0.01, Mechanism(NonPrivate()).multipliers)
    assert ledger.entries == [Entry(0.01, (("gradient", 0.0),), 1)]
    assert not ledger.is_private


def test_released_values_have_the_spread_that_the_ledger_claims():
    """Over 200,000 releases of one number, standard deviation ÷ sensitivity equals the multiplier
    in the ledger.
    """
    noise, n = Noise(np.random.SeedSequence(0)), 200_000
    release = Release({"gradient": noise.normal(0, n, torch.float64)[0]})
    released = release(
        "gradient", torch.full((n,), 7.0, dtype=torch.float64), sensitivity=0.3, multiplier=2.5
    )
    spread = float((released - 7.0).std()) / 0.3
    assert abs(spread / 2.5 - 1) < 4 / math.sqrt(2 * n)


# The ledger
# --------------------------------------------------------------------------------------------------


def test_equal_steps_in_a_row_are_one_entry():
    ledger = Ledger()
    one, other = {"count": 10.0, "gradient": 1.0}, {"gradient": 1.0}
    for q, step in (
        (0.1, one),
        (0.1, one),
        (0.1, other),
        (0.1, one),
        (0.2, one),
        (0.2, one),
        (None, one),
    ):
        ledger.write(q, step)
    assert [(e.q, dict(e.multipliers), e.steps) for e in ledger.entries] == [
        (0.1, one, 2),
        (0.1, other, 1),
        (0.1, one, 1),
        (0.2, one, 2),
        (None, one, 1),
    ]
    assert ledger.steps == 7


STEPS = st.tuples(
    st.none() | st.floats(0, 1, exclude_min=True),
    st.dictionaries(
        st.sampled_from(["count", "gradient", "other"]), st.just(0.0) | st.floats(1e-3, 100)
    ),
)


@given(st.lists(STEPS, max_size=8))
@settings(derandomize=True, deadline=None, database=None)
def test_json_round_trip(steps):
    ledger = Ledger()
    for q, multipliers in [step for step in steps for _ in range(2)]:
        ledger.write(q, multipliers)
    again = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
    assert again == ledger
    assert again.steps == 2 * len(steps)
    assert again.is_private == all(q is not None and 0 not in m.values() for q, m in steps)


@pytest.mark.parametrize("number", [int, np.float32, np.float64, np.int64])
def test_every_number_becomes_a_float_of_python(number):
    """dp-accounting 0.6 silently drops other types from composed events."""
    ledger = Ledger()
    ledger.write(number(1), {"count": number(4), "gradient": number(3)})
    read = Ledger.from_json(
        [{"q": number(1), "multipliers": {"count": number(4), "gradient": number(3)}, "steps": 1}]
    )
    for entry in (*ledger.entries, *read.entries):
        assert entry == Entry(1.0, (("count", 4.0), ("gradient", 3.0)), 1)
        assert [type(m) for _, m in entry.multipliers] == [float, float]
        assert type(entry.q) is float
        assert type(entry.joint) is float
        assert entry.joint == pytest.approx(2.4)


@pytest.mark.parametrize(
    ("q", "multipliers", "private"),
    [
        (0.1, {"gradient": 1.0}, True),
        (None, {"gradient": 1.0}, False),
        (0.1, {"gradient": 0.0}, False),
        (0.1, {"count": 10.0, "gradient": 0.0}, False),
        (0.1, {"count": 0.0, "gradient": 10.0}, False),
        (0.1, {"gradient": math.nan}, False),
        (0.1, {}, True),
    ],
)
def test_private_only_with_poisson_batches_and_noise_on_everything(q, multipliers, private):
    ledger = Ledger()
    ledger.write(0.5, {"gradient": 1.0})
    ledger.write(q, multipliers)
    assert ledger.entries[-1].is_private is private
    assert ledger.is_private is private


# The joint multiplier
# --------------------------------------------------------------------------------------------------

SEVERAL = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6)


@given(SEVERAL, st.randoms(use_true_random=False))
@settings(derandomize=True, deadline=None, database=None)
def test_joint_multiplier_forgets_order_and_nesting(several, random):
    whole = joint_multiplier(several)
    mixed = random.sample(several, len(several))
    assert joint_multiplier(mixed) == pytest.approx(whole, rel=1e-12)
    cut = random.randint(0, len(several))
    nested = joint_multiplier([joint_multiplier(mixed[:cut]), joint_multiplier(mixed[cut:])])
    assert nested == pytest.approx(whole, rel=1e-12)
    assert whole <= min(several) * (1 + 1e-12)


@given(SEVERAL)
@settings(derandomize=True, deadline=None, database=None)
def test_joint_multiplier_is_that_of_the_best_estimate(several):
    """The precision-weighted mean of all x + m_j·N_j has the smallest variance: the square of the
    joint multiplier.
    """
    variances = np.square(several)
    shares = (1 / variances) / np.sum(1 / variances)
    assert joint_multiplier(several) == pytest.approx(
        math.sqrt(np.sum(shares**2 * variances)), rel=1e-12
    )


def test_joint_multiplier_at_the_ends():
    assert joint_multiplier([]) == math.inf
    assert joint_multiplier([math.inf, math.inf]) == math.inf
    assert joint_multiplier([3.0, math.inf]) == pytest.approx(3.0)
    assert joint_multiplier([3.0, 0.0]) == 0.0
    assert joint_multiplier([np.float32(3), 4]) == pytest.approx(2.4)
    assert type(joint_multiplier([np.float32(3)])) is float


def test_a_value_without_a_bound_has_its_noise_and_is_in_clear_for_the_ledger():
    """One record may change it by more than the noise covers, so no noise makes it private."""
    mechanism = Mechanism(FairLens(C0=2.0, sigma=3.0), Constants(groups=2))
    noisy = mechanism.publish(torch.zeros(3), 2.0, 1.0, Release({"gradient": torch.ones(3)}))
    assert noisy.tolist() == [6.0, 6.0, 6.0]
    assert mechanism.multipliers == {"gradient": 0.0}
    ledger = Ledger()
    ledger.write(0.01, mechanism.multipliers)
    assert not ledger.is_private
