"""Privacy cost, excessive risk and gaps against loops over seeds, groups and pairs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from evenclip.audit import excessive_risk, gap, left_out, privacy_cost

TABLES = arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    elements=st.one_of(st.floats(-100, 100), st.just(math.nan)),
)


def test_the_published_costs_of_adult():
    """The paper's table for Adult (men, women) and DPSGD.

    It prints one digit after the point, so a difference may be off by 0.1.
    """
    cost = privacy_cost([[80.5, 92.2]], [[69.9, 88.5]])
    np.testing.assert_allclose(cost, [[10.6, 3.6]], atol=0.11)
    np.testing.assert_allclose(gap(cost), [6.9], atol=0.11)
    risk = excessive_risk([[0.40, 0.19]], [[0.78, 0.40]])
    np.testing.assert_allclose(risk, [[0.39, 0.21]], atol=0.011)
    np.testing.assert_allclose(gap(risk), [0.17], atol=0.011)


def test_a_cost_is_what_is_lost_and_a_risk_is_what_is_gained():
    reference, private = (
        np.array([[90.0, 80.0], [91.0, 79.0]]),
        np.array([[85.0, 81.0], [91.0, 70.0]]),
    )
    np.testing.assert_array_equal(privacy_cost(reference, private), [[5.0, -1.0], [0.0, 9.0]])
    np.testing.assert_array_equal(excessive_risk(reference, private), [[-5.0, 1.0], [0.0, -9.0]])


@given(TABLES)
def test_the_gap_is_the_largest_of_all_pairs(table):
    for actual, row in zip(gap(table), table, strict=True):
        defined = [value for value in row if not math.isnan(value)]
        pairs = [abs(a - b) for a, b in itertools.combinations(defined, 2)]
        assert actual == max(pairs) if pairs else math.isnan(actual)


@given(TABLES)
def test_the_gap_of_a_pair_is_that_of_the_two(table):
    for a, b in itertools.permutations(range(table.shape[1]), 2):
        np.testing.assert_array_equal(gap(table, (a, b)), np.abs(table[:, a] - table[:, b]))
        assert np.all(np.isnan(gap(table, (a, b))) | (gap(table, (a, b)) <= gap(table)))


@given(TABLES, st.floats(-10, 10))
def test_what_all_groups_pay_alike_is_no_gap(table, everybody):
    np.testing.assert_allclose(gap(table + everybody), gap(table), atol=1e-9)


@given(TABLES)
def test_none_is_nan_and_is_said(table):
    listed = [[None if math.isnan(value) else value for value in row] for row in table]
    np.testing.assert_array_equal(gap(listed), gap(table))
    np.testing.assert_array_equal(privacy_cost(listed, np.zeros_like(table)), table)
    assert left_out(listed) == [
        k for k in range(table.shape[1]) if any(math.isnan(v) for v in table[:, k])
    ]


@given(TABLES)
def test_the_gap_of_the_means_is_at_most_the_mean_of_the_gaps(table):
    if not np.isnan(table).any() and table.shape[1] > 1:
        assert gap(table.mean(0, keepdims=True))[0] <= gap(table).mean() + 1e-9


def test_one_group_has_no_gap():
    assert np.isnan(gap([[1.0], [2.0]])).all()


def test_an_infinite_loss_is_not_left_out():
    risk = excessive_risk([[0.3, 0.4], [0.3, 0.4]], [[math.inf, 0.5], [math.inf, math.inf]])
    assert risk[0].tolist() == [math.inf, pytest.approx(0.1)]
    assert left_out(risk) == []
    assert gap(risk)[0] == gap(risk, (1, 0))[0] == math.inf
    assert np.isnan(gap(risk)[1])  # ∞ − ∞ is undefined


def test_what_does_not_fit_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^reference is \[1, 2\] and private is \[2, 2\], \[seed, group\]; they must be of "
        r"the same seeds "
        r"and groups: train the reference with every seed\.$",
    ):
        privacy_cost([[1.0, 2.0]], [[1.0, 2.0], [3.0, 4.0]])
    with pytest.raises(ValueError, match=r"^reference is \[1, 2\] and private is \[2, 2\]"):
        excessive_risk([[1.0, 2.0]], [[1.0, 2.0], [3.0, 4.0]])
    with pytest.raises(
        ValueError,
        match=r"^values is \[2\]; expected \[seed, group\]: give one row for each seed\.$",
    ):
        gap([1.0, 2.0])
    for pair in ((0, 2), (1, 1)):
        with pytest.raises(
            ValueError,
            match=rf"^pair is \({pair[0]}, {pair[1]}\) and there are 2 groups; give two diff",
        ):
            gap([[1.0, 2.0]], pair)
