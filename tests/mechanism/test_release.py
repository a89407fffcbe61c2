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
from evenclip.mechanism.grid import Grid, published
from evenclip.mechanism.noise import Noise
from evenclip.rules import Constants, FairLens

# Release
# --------------------------------------------------------------------------------------------------

KEY = bytes(range(32))


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def released(noise, value, sensitivity=1.0, multiplier=1.0, rounding=0.0, **how):
    """Release a value called "gradient" with this noise."""
    release = Release({"gradient": noise})
    bounds = {"sensitivity": sensitivity, "multiplier": multiplier, "rounding": rounding}
    return release("gradient", value, **bounds, **how)


@pytest.mark.parametrize("form", [float, tensor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_release_is_the_sum_and_the_noise_on_the_grids_of_the_sum(form, dtype):
    """Scaled afterwards by a public factor, and then of the given dtype."""
    value, noise = tensor(3.0, 4.0, 0.0, -1.1), tensor(1.0, -2.0, 8.0, 0.25)
    S = 0.5 if form is float else torch.tensor(0.5, dtype=torch.float64)
    out = released(noise, value, S, 6.0, 1e-3, scale=1 / 7, dtype=dtype)
    expected = published(value, noise, Grid.of(0.5, 6.0, 4, 1e-3)) * (1 / 7)
    assert torch.equal(out, expected.to(dtype))
    assert torch.allclose(7 * out.double(), value + 3 * noise, atol=0.25)


def test_the_standard_deviation_is_rounded_up_from_sensitivity_times_multiplier():
    """With one pair of noise at 2⁴⁰ it is visible in ten digits."""
    for rounding in (0.0, 0.25):
        out = released(tensor(2.0**40), tensor(0.0), 0.5, 6.0, rounding)
        std = float(out) / 2.0**40
        assert 3.0 * (1 + rounding + 2.0**-18) < std < 3.0 * (1 + rounding + 2.0**-15)


def test_a_sum_in_single_precision_is_released_in_double():
    value, noise = torch.tensor([0.1, 2.0**-30]), tensor(0.5, -0.25)
    assert torch.equal(released(noise, value), released(noise, value.double()))


def test_each_name_is_released_once():
    release = Release({"gradient": tensor(1.0, 1.0)})
    bounds = {"sensitivity": 1.0, "multiplier": 1.0, "rounding": 0.0}
    release("gradient", tensor(0.0, 0.0), **bounds)
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the whole text is compared
        release("gradient", tensor(0.0, 0.0), **bounds)
    assert str(refused.value) == "This step has released 'gradient' already; noise is used once."


def test_each_name_is_released_once_even_in_clear():
    release = Release({})
    release("gradient", tensor(0.0), sensitivity=1.0, multiplier=0.0, rounding=0.0)
    with pytest.raises(ValueError, match="released 'gradient' already"):
        release("gradient", tensor(0.0), sensitivity=1.0, multiplier=0.0, rounding=0.0)


def test_a_name_without_noise_is_refused():
    with pytest.raises(KeyError):
        Release({"gradient": tensor(1.0)})(
            "count", tensor(0.0), sensitivity=1.0, multiplier=1.0, rounding=0.0
        )


@pytest.mark.parametrize("size", [1, 3])
def test_one_number_of_noise_for_each_number_released(size):
    with pytest.raises(ValueError, match=f"2 numbers was given {size} numbers of noise"):
        released(torch.ones(size).double(), tensor(0.0, 0.0))  # never spread over several


def test_an_empty_value_needs_no_noise_and_is_not_in_the_ledger():
    release = Release({})
    empty = release("count", torch.zeros(0), sensitivity=1.0, multiplier=10.0, rounding=0.0)
    assert empty.shape == (0,)
    assert Mechanism(DPSGD(sigma=2.0)).multipliers == {"gradient": 2.0}


def test_multiplier_0_is_in_clear_and_the_ledger_says_so():
    value = tensor(1.0, 2.0)
    assert torch.equal(released(tensor(9.0, 9.0), value, math.inf, 0.0), value)
    ledger = Ledger()
    ledger.write(0.01, Mechanism(NonPrivate()).multipliers)
    assert ledger.entries == [Entry(0.01, (("gradient", 0.0),), 1)]
    assert not ledger.is_private


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sum_that_is_not_finite_shows_in_no_other_number(bad):
    """Nor is its own number infinite or NaN: it is at most 2⁵¹ grid points."""
    noise = Noise(KEY, {"gradient": 3}, torch.device("cpu")).of(0)["gradient"][0:3]
    one, other = (released(noise, tensor(1.0, x, 2.0)) for x in (bad, 0.0))
    assert one.isfinite().all()
    assert torch.equal(one[[0, 2]], other[[0, 2]])


def test_released_values_have_the_spread_that_the_ledger_claims():
    """Over 200,000 numbers of one release, standard deviation ÷ sensitivity equals the multiplier
    in the ledger.
    """
    n = 200_000
    noise = Noise(KEY, {"gradient": n}, torch.device("cpu")).of(0)["gradient"]
    out = released(noise, torch.full((n,), 7.0, dtype=torch.float64), 0.3, 2.5)
    spread = float((out - 7.0).std()) / 0.3
    assert abs(spread / 2.5 - 1) < 4 / math.sqrt(2 * n)


class Part:
    """The part of one of two processes that hold the same."""

    ranges = ((1, 2), (3, 4))

    def total(self, value):
        return torch.cat([2 * value[first:end] for first, end in self.ranges])

    def whole(self, released):
        return torch.cat([torch.zeros(1).to(released), released])


def test_a_part_has_the_grids_and_the_noise_of_the_whole():
    """Its own range of the noise, and h√d for all numbers of the release."""
    value, noise = torch.arange(16).double(), 2.0**30 * torch.arange(16).double()
    release = Release({"gradient": noise}, {"gradient": Part()})
    out = release("gradient", value, sensitivity=1.0, multiplier=1.0, rounding=0.0)
    own, its_noise = tensor(2.0, 6.0), 2.0**30 * tensor(1.0, 3.0)
    expected = published(own, its_noise, Grid.of(1.0, 1.0, 16, 0.0))
    assert torch.equal(out, torch.cat([tensor(0.0), expected]))
    with pytest.raises(ValueError, match="already"):
        release("gradient", value, sensitivity=1.0, multiplier=1.0, rounding=0.0)


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
        st.sampled_from(["count", "gradient", "other"]),
        st.just(0.0) | st.floats(1e-3, 100),
        min_size=1,
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
    noisy = mechanism.publish(
        torch.zeros(3), 2.0, 1.0, Release({"gradient": tensor(1.0, 1.0, 1.0)})
    )
    assert noisy.tolist() == pytest.approx([6.0] * 3, abs=0.25)
    assert mechanism.multipliers == {"gradient": 0.0}
    ledger = Ledger()
    ledger.write(0.01, mechanism.multipliers)
    assert not ledger.is_private
