"""DPSGD-F compared with our documented repair of Algorithm 3, and with the box where both agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenclip.mechanism import Mechanism
from evenclip.rules import DPSGDF, Constants


def algorithm_3(noisy, C0):
    """Return the C_k as the rule documents them."""
    shares = []
    for k in range(len(noisy) // 2):
        o, m = max(math.floor(noisy[2 * k]), 0), max(math.floor(noisy[2 * k + 1]), 0)
        shares.append(m / (m + o) if m + o > 0 else 1.0)
    if not any(shares):
        return [C0 for _ in shares]
    mean = sum(shares) / len(shares)
    return [C0 * (1 + share / mean) for share in shares]


def box(above, below, C0):
    """Return the C_k as printed in the box: relative to m/|B|."""
    size = sum(above) + sum(below)
    return [
        C0 * (1 + (m / (m + o)) / (sum(above) / size)) for m, o in zip(above, below, strict=True)
    ]


def bounds(noisy, C0=1.0):
    rule = DPSGDF(C0=C0)
    now, following = rule.observe(
        torch.tensor(noisy, dtype=torch.float64),
        256.0,
        rule.init(Constants(groups=len(noisy) // 2)),
    )
    assert now is following
    return now


COUNTS = {  # (not above, above) of each group, noisy
    "ordinary": [90.3, 10.9, 70.0, 30.2, 55.5, 1.1],
    "negative": [-3.0, 10.0, 5.0, -0.1, 0.9, 20.0],
    "nothing above": [100.0, 0.7, 50.0, -4.0],
    "an empty group": [0.0, 0.0, 70.0, 30.0],
    "a group that is empty after rounding": [0.99, 0.99, 70.0, 30.0],
    "all empty": [-1.0, -1.0, 0.2, 0.3, -9.0, 0.0],
    "everything above": [0.0, 40.0, 0.0, 1.0],
    "one group": [5.0, 3.0],
}


@pytest.mark.parametrize("noisy", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("C0", [0.1, 1.0])
def test_bounds_of_the_groups(noisy, C0):
    torch.testing.assert_close(
        bounds(noisy, C0),
        torch.tensor(algorithm_3(noisy, C0), dtype=torch.float64),
        rtol=1e-14,
        atol=0,
    )


def test_repairs_by_hand():
    assert bounds([90.0, 0.0, 50.0, 0.9], C0=0.5).tolist() == [
        0.5,
        0.5,
    ]  # nothing above C0: C0 for all
    assert bounds([-3.0, 0.5, 10.0, 0.0]).tolist() == [
        3.0,
        1.0,
    ]  # shares 1 (empty group) and 0, mean 1/2
    assert bounds([-3.0, -0.5, 0.0, 0.1]).tolist() == [2.0, 2.0]  # all empty: shares 1, 1
    assert bounds([9.0, 0.0, 9.0, 0.0, 9.0, 0.0, 3.0, 1.0]).tolist() == [
        1.0,
        1.0,
        1.0,
        5.0,
    ]  # (1 + K)·C0, K = 4


@given(
    st.integers(1, 6).flatmap(
        lambda K: st.lists(st.floats(-50, 300), min_size=2 * K, max_size=2 * K)
    )
)
@settings(derandomize=True, deadline=None, database=None)
def test_bounds_lie_between_C0_and_1_plus_K_times_it_and_are_twice_it_on_average(noisy):
    C = bounds(noisy)
    K = len(noisy) // 2
    assert ((C >= 1) & (C <= (1 + K) * (1 + 1e-14))).all()
    mean = float(C.mean())
    # r_k/mean r is 1 on average, for any shares
    assert mean == 1.0 if max(C) == 1 else mean == pytest.approx(2.0, rel=1e-14)


def test_with_groups_of_one_size_it_is_the_box():
    above, below = [10, 30, 70], [90, 70, 30]
    noisy = [float(v) for pair in zip(below, above, strict=True) for v in pair]
    torch.testing.assert_close(
        bounds(noisy, 0.5), torch.tensor(box(above, below, 0.5), dtype=torch.float64)
    )


def test_each_sample_is_in_exactly_one_of_the_2K_counts(norms_around):
    norms = norms_around(0.7)
    group = torch.from_numpy(np.random.default_rng(0).integers(0, 3, len(norms)))
    expected = [0.0] * 6
    for norm, k in zip(norms.tolist(), group.tolist(), strict=True):
        expected[2 * k + (1 if norm > 0.7 else 0)] += 1
    rule = DPSGDF(C0=0.7)
    assert (
        Mechanism(rule).count(norms, group, rule.init(Constants(groups=3)), None).tolist()
        == expected
    )


def test_weights(norms_around):
    C = [0.7, 1.9, 3.5]
    now = torch.tensor(C, dtype=torch.float64)
    norms = norms_around(*C)
    for k in range(3):
        weights, held = Mechanism(DPSGDF(C0=0.7)).weights(
            norms, torch.full_like(norms, k).long(), now, now.max(), None
        )
        assert weights.tolist() == [1.0 if n <= C[k] else C[k] / n for n in norms.tolist()]
        assert held is None


def test_steps(take_step, batch):
    gradients, group = batch
    random = np.random.default_rng(0)
    rule = DPSGDF(C0=0.7, sigma=0.8, sigma_count=2.0)
    state = rule.init(Constants(groups=3))
    for _ in range(5):
        noise, count_noise = random.normal(size=3), random.normal(size=6)
        given_noise = {"gradient": torch.from_numpy(noise), "count": torch.from_numpy(count_noise)}
        gradient, now, state, multipliers = take_step(
            rule, gradients, group, state, 38.0, given_noise
        )
        counts = [2.0 * z for z in count_noise]
        lengths = [math.sqrt(sum(x * x for x in g)) for g in gradients.tolist()]
        for length, k in zip(lengths, group.tolist(), strict=True):
            counts[2 * k + (length > 0.7)] += 1
        C = algorithm_3(counts, 0.7)
        total = [0.8 * max(C) * z for z in noise]
        for g, length, k in zip(gradients.tolist(), lengths, group.tolist(), strict=True):
            for j in range(3):
                total[j] += g[j] * (1.0 if length <= C[k] else C[k] / length)
        assert now.tolist() == pytest.approx(C, rel=1e-13)
        assert gradient.tolist() == pytest.approx([t / 38.0 for t in total], rel=1e-12)
        assert multipliers == {"count": 2.0, "gradient": 0.8}


def test_the_noise_is_for_the_largest_bound_of_all_groups_even_those_that_are_absent(take_step):
    """Only group 0 is in the batch; noise on the counts makes group 2's bound the largest."""
    rule = DPSGDF(C0=1.0, sigma=1.0, sigma_count=1.0)
    gradients = torch.zeros(10, 3, dtype=torch.float64)
    noise = {
        "count": torch.tensor(
            [0.0, 0.0, 5.0, 0.0, 0.0, 7.0], dtype=torch.float64
        ),  # group 2: 7 of 7 above
        "gradient": torch.ones(3, dtype=torch.float64),
    }
    gradient, now, *_ = take_step(
        rule,
        gradients,
        torch.zeros(10, dtype=torch.int64),
        rule.init(Constants(groups=3)),
        1.0,
        noise,
    )
    assert now.tolist() == [1.0, 1.0, 4.0]
    assert gradient.tolist() == [4.0, 4.0, 4.0]


def test_the_state_is_only_looked_at():
    rule, noisy = DPSGDF(), torch.tensor([9.0, 3.0, 4.0, 2.0], dtype=torch.float64)
    one, other = rule.init(Constants(groups=2)), 100 * rule.init(Constants(groups=2))
    assert torch.equal(rule.observe(noisy, 10.0, one)[0], rule.observe(noisy, 99.0, other)[0])
    assert rule.init(Constants(groups=2)).tolist() == [1.0, 1.0]
