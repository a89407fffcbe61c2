"""Statistics of a few seeds against scipy, enumeration and simulation."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st

from evenclip.audit import (
    LEAST_SEEDS,
    Paired,
    bootstrap_interval,
    corrected,
    holm,
    mean_se,
    paired,
    smallest_p,
    t_interval,
    wilcoxon,
)

# Whole numbers, so that ties and zeros are common and sums exact.
DIFFERENCES = st.lists(st.integers(-6, 6).map(float), min_size=1, max_size=9)


# Means and intervals


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30))
def test_scipy_agrees_on_means_errors_and_t_intervals(values):
    mean, se = mean_se(values)
    assert mean == pytest.approx(np.mean(values), abs=1e-9)
    assert se == pytest.approx(scipy.stats.sem(values), abs=1e-9)
    assume(se > 0)
    expected = scipy.stats.t.interval(0.9, len(values) - 1, mean, se)
    assert t_interval(values, 0.9) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_what_is_undefined_is_left_out_of_means():
    assert mean_se([1.0, None, 3.0, math.nan]) == mean_se([1.0, 3.0]) == (2.0, 1.0)
    assert mean_se([7.0]) == (7.0, None)
    assert mean_se([None]) == mean_se([]) == (None, None)
    assert t_interval([1.0, None]) is None
    assert bootstrap_interval([1.0, 2.0, None]) is None


def test_an_infinite_value_has_no_error_and_no_interval():
    assert mean_se([1.0, math.inf, 2.0]) == (math.inf, None)
    assert mean_se([1.0, -math.inf]) == (-math.inf, None)
    assert mean_se([math.inf, -math.inf]) == (None, None)
    for interval in (t_interval, bootstrap_interval):
        assert interval([1.0, math.inf, 2.0, 3.0]) is None


@pytest.mark.parametrize("n", [3, 4, 5])
def test_the_bootstrap_is_that_of_all_samples(n):
    """With n values there are nⁿ samples: their quantiles, taken at the level of the definition."""
    values = np.random.default_rng(n).normal(size=n)
    tail = scipy.stats.norm.cdf(-math.sqrt(n / (n - 1)) * scipy.stats.t.ppf(0.9, n - 1))
    every = [np.mean(sample) for sample in itertools.product(values, repeat=n)]
    low, high = bootstrap_interval(values, level=0.8, draws=200_000)
    near = 0.004  # three standard deviations of a share of 200,000 draws
    tails = [tail - near, tail + near, 1 - tail - near, 1 - tail + near]
    ends = np.quantile(every, np.clip(tails, 0, 1), method="inverted_cdf")
    assert ends[0] - 1e-9 <= low <= ends[1] + 1e-9
    assert ends[2] - 1e-9 <= high <= ends[3] + 1e-9


def coverage(interval, n, rounds, draw):
    hits = 0
    for _ in range(rounds):
        low, high = interval(draw(n))
        hits += low <= 0 <= high
    return hits / rounds


@pytest.mark.parametrize(
    ("n", "expected"), [(3, 0.75), (4, 0.87), (5, 0.93), (8, 0.95), (20, 0.95)]
)
def test_the_bootstrap_covers_what_the_module_says(n, expected):
    random = np.random.default_rng(n)
    covered = coverage(
        lambda v: bootstrap_interval(v, draws=500), n, 1200, lambda n: random.normal(size=n)
    )
    assert covered == pytest.approx(expected, abs=0.03)  # over three standard deviations


@pytest.mark.parametrize("n", [3, 5, 8])
def test_the_t_interval_keeps_its_level(n):
    random = np.random.default_rng(n)
    assert coverage(t_interval, n, 4000, lambda n: random.normal(size=n)) == pytest.approx(
        0.95, abs=0.012
    )
    skewed = coverage(t_interval, n, 4000, lambda n: random.exponential(size=n) - 1)
    assert 0.86 < skewed < 0.92


def test_the_bootstrap_goes_with_the_t_interval_where_values_are_many():
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    assert bootstrap_interval(values) == pytest.approx(t_interval(values), abs=0.01)


def test_the_bootstrap_depends_on_its_seed_and_on_nothing_else():
    values = [0.3, -1.0, 2.0, 0.7, 1.1]
    first = bootstrap_interval(values, draws=200)
    np.random.seed(3)  # noqa: NPY002 - numpy's global stream must not be used or changed
    following = np.random.random()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    assert bootstrap_interval(values, draws=200) == first
    assert np.random.random() == following  # noqa: NPY002
    assert bootstrap_interval(values, draws=200, seed=1) != first


@given(st.lists(st.floats(-100, 100), min_size=3, max_size=8))
def test_the_bootstrap_stays_in_the_range_and_moves_with_the_values(values):
    low, high = bootstrap_interval(values, draws=100)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    moved = bootstrap_interval([-2 * value + 1 for value in values], draws=100)
    assert moved == pytest.approx((1 - 2 * high, 1 - 2 * low), abs=1e-9)
    inner = bootstrap_interval(values, level=0.5, draws=100)
    assert low <= inner[0] <= inner[1] <= high


# Wilcoxon


def by_enumeration(differences, alternative):
    """Count over all assignments of signs to the ranks."""
    d = [value for value in differences if value]
    ranks = scipy.stats.rankdata(np.abs(d)) if d else []
    seen = sum(rank for rank, value in zip(ranks, d, strict=True) if value > 0)
    sums = [
        sum(itertools.compress(ranks, signs)) for signs in itertools.product([0, 1], repeat=len(d))
    ]
    less = sum(s <= seen for s in sums) / len(sums)
    greater = sum(s >= seen for s in sums) / len(sums)
    return {"less": less, "greater": greater, "two-sided": min(1, 2 * min(less, greater))}[
        alternative
    ]


@pytest.mark.parametrize("alternative", ["less", "greater", "two-sided"])
@given(differences=DIFFERENCES)
def test_wilcoxon_is_the_enumeration_of_all_signs(alternative, differences):
    assert wilcoxon(differences, alternative) == pytest.approx(
        by_enumeration(differences, alternative), rel=1e-12
    )


@pytest.mark.parametrize("alternative", ["less", "greater", "two-sided"])
@pytest.mark.parametrize("n", [1, 2, 5, 12, 25, 40])
def test_scipy_agrees_where_there_are_no_ties(n, alternative):
    d = np.random.default_rng(n).normal(-0.2, 1, n)
    expected = scipy.stats.wilcoxon(d, alternative=alternative, method="exact").pvalue
    assert wilcoxon(d, alternative) == pytest.approx(expected, rel=1e-9)


@given(DIFFERENCES)
def test_the_alternatives_mirror_each_other(differences):
    mirrored = [-value for value in differences]
    assert wilcoxon(differences, "less") == pytest.approx(wilcoxon(mirrored, "greater"))
    assert wilcoxon(differences, "two-sided") == pytest.approx(wilcoxon(mirrored, "two-sided"))


@given(DIFFERENCES)
def test_no_p_falls_below_the_smallest(differences):
    assert smallest_p(len(differences)) <= wilcoxon(differences) <= 1


@pytest.mark.parametrize("n", range(1, 12))
def test_the_smallest_p_is_reached_when_all_are_below(n):
    assert wilcoxon([-float(k) for k in range(1, n + 1)]) == smallest_p(n) == 1 / 2**n
    assert wilcoxon([-1.0] * n) == smallest_p(n)  # ties do not change that


def test_five_seeds_reach_one_in_thirty_two():
    assert smallest_p(5) == 1 / 32
    assert smallest_p(0) == 1.0
    with pytest.raises(ValueError, match=r"^n is -1; it must be a whole number of at least 0\.$"):
        smallest_p(-1)


def test_zeros_are_left_out_before_ranking():
    assert wilcoxon([0.0, -1.0, 0.0, -2.0, 3.0]) == wilcoxon([-1.0, -2.0, 3.0])
    assert wilcoxon([0.0, 0.0]) == 1.0
    assert wilcoxon([]) is None
    assert wilcoxon([None, math.nan]) is None
    assert wilcoxon([None, -1.0, -2.0]) == 0.25


def test_wilcoxon_keeps_its_level():
    """P(p ≤ α) ≤ α for symmetric differences, and nearly equal for α = 1/16 with six seeds."""
    random = np.random.default_rng(0)
    p = np.array([wilcoxon(random.normal(size=6)) for _ in range(4000)])
    for k in (1, 2, 4, 8):
        assert np.mean(p <= k / 64 + 1e-12) <= k / 64 + 3 * math.sqrt(k / 64 / 4000)
    assert np.mean(p <= 1 / 64 + 1e-12) == pytest.approx(1 / 64, abs=0.006)


def test_an_unknown_alternative_is_refused():
    with pytest.raises(
        ValueError, match=r"^alternative is 'lower'; it must be one of less, greater, two-sided\.$"
    ):
        wilcoxon([1.0], "lower")


# Holm


P_VALUES = st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.floats(0, 1), max_size=8)


@given(P_VALUES, st.floats(0.001, 0.999))
def test_holm_rejects_what_stepping_down_rejects(p_values, alpha):
    """Holm's procedure: from the smallest p, reject while p ≤ α/(number of remaining tests)."""
    corrected = holm(p_values)
    assert list(corrected) == list(p_values)
    left = sorted(p_values.items(), key=lambda item: item[1])
    margin = [len(left) - i for i in range(len(left))]
    assume(all(abs(m * p - alpha) > 1e-9 for m, (_, p) in zip(margin, left, strict=True)))
    rejected = set()
    while left and left[0][1] <= alpha / len(left):
        rejected.add(left.pop(0)[0])
    assert {name for name, p in corrected.items() if p <= alpha} == rejected


@given(P_VALUES)
def test_holm_keeps_the_order_and_lies_between_p_and_bonferroni(p_values):
    corrected = holm(p_values)
    for name, p in p_values.items():
        assert p <= corrected[name] <= min(1, len(p_values) * p) + 1e-12
        assert all(corrected[name] <= corrected[other] for other, q in p_values.items() if p <= q)


def test_holm_by_hand():
    assert holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.5}) == pytest.approx(
        {"a": 0.09, "b": 0.04, "c": 0.09, "d": 0.5}
    )
    assert holm({}) == {}
    assert holm({"a": 0.2}) == {"a": 0.2}
    with pytest.raises(
        ValueError,
        match=r"^The p of a is nan; it must lie between 0 and 1: leave out what has no p\.$",
    ):
        holm({"a": math.nan})
    with pytest.raises(ValueError, match=r"^The p of a is 1\.5; it must lie between 0 and 1"):
        holm({"a": 1.5})


# Pairs and words


def test_a_pair_in_numbers_and_words():
    a, b = [1.0, 2.5, 2.0, 3.0, 1.5], [3.0, 4.0, 4.5, 5.5, 3.0]
    verdict, expected = paired(a, b), scipy.stats.ttest_rel(a, b)
    low, high = expected.confidence_interval(0.95)
    assert (verdict.n, verdict.mean) == (5, pytest.approx(-2.0))
    assert (verdict.low, verdict.high) == (pytest.approx(low), pytest.approx(high))
    assert verdict.se == pytest.approx(verdict.mean / expected.statistic)
    assert verdict.p == pytest.approx(expected.pvalue)
    assert verdict.p_rank == 1 / 32
    assert verdict.reads == "smaller by 2 (1.38 to 2.62)"
    mirrored = paired(b, a)
    assert mirrored.reads == "larger by 2 (1.38 to 2.62)"
    assert (mirrored.p, mirrored.p_rank) == (verdict.p, 1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict.n = 6


@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), min_size=3, max_size=8))
def test_the_words_follow_the_interval(pairs):
    a, b = zip(*pairs, strict=True)
    verdict = paired(a, b)
    if verdict.n < LEAST_SEEDS:
        assert verdict.reads.startswith("no verdict below 5 seeds; the difference is ")
        assert verdict.p is verdict.p_rank is None
    elif verdict.low <= 0 <= verdict.high:
        assert verdict.reads == "no difference shown"
        assert verdict.p >= 0.05 - 1e-9
    else:
        assert verdict.reads.startswith("smaller by" if verdict.mean < 0 else "larger by")
        number, low, _, high = (
            verdict.reads.split(" by ")[1].replace("(", "").replace(")", "").split()
        )
        assert 0 < float(low) <= float(number) <= float(high)


def test_the_same_twice_shows_no_difference():
    values = [1.0, 2.0, 4.0, 3.0, 5.0]
    same = paired(values, values)
    assert same == Paired(5, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, "no difference shown")
    assert paired(values, [value + 1 for value in values]).p == 0.0


def test_an_end_near_zero_is_not_printed_as_zero():
    a = [-4.0, -2.0, -3.0, -1.0, -2.5]
    shift = paired(a, [0.0] * 5).high + 1e-4
    assert paired([value - shift for value in a], [0.0] * 5).reads.endswith("(0.0001 to 2.78)")


@pytest.mark.parametrize("n", [0, 1, 2])
def test_too_few_seeds_tell_nothing(n):
    verdict = paired([1.0] * n, [5.0] * n)
    assert (verdict.n, verdict.reads) == (n, "too few seeds to tell")
    assert verdict.low is None
    assert verdict.high is None
    assert verdict.mean == (-4.0 if n else None)
    assert verdict.se == (0.0 if n == 2 else None)
    assert verdict.p_rank is None
    assert verdict.p is None


def test_pairs_with_something_undefined_are_left_out():
    verdict = paired([1.0, None, 2.5, 2.0, math.nan], [3.0, 9.0, 4.0, 4.5, 9.0])
    assert verdict == paired([1.0, 2.5, 2.0], [3.0, 4.0, 4.5])
    assert verdict.n == 3


def test_a_run_that_diverged_is_said():
    verdict = paired([1.0, math.inf, 2.0, 2.0], [3.0, math.inf, 4.0, None])
    assert verdict == Paired(3, None, None, None, None, None, None, "not finite in 1 of 3 seeds")


def test_several_comparisons_are_corrected_by_holm():
    generator = np.random.default_rng(3)
    pairs = {
        name: paired(generator.normal(shift, 1, 6), np.zeros(6))
        for name, shift in (("a", -9.0), ("b", -1.2), ("c", 0.0))
    }
    pairs["d"] = paired([1.0, math.inf], [1.0, 1.0])
    both = corrected(pairs)
    for kind in ("p", "p_rank"):
        raw = {name: getattr(pairs[name], kind) for name in "abc"}
        assert {name: getattr(both[name], kind) for name in "abc"} == holm(raw)
    assert both["a"].reads.startswith("smaller by")
    assert both["c"].reads == "no difference shown"
    assert both["d"] == pairs["d"]
    assert corrected({}) == {}


@pytest.mark.parametrize("seeds", [5, 8])
def test_where_there_is_no_difference_at_most_one_comparison_in_twenty_announces_one(seeds):
    """Gaps of three rules against DPSGD's, all of one distribution, with shared split effects.

    The rate is estimated from a number of simulations, so it is compared with 0.05 plus three
    standard deviations of such an estimate. Their number is chosen so that this is below 0.06.
    """
    generator = np.random.default_rng(0)
    trials, announced = 4500, 0
    for _ in range(trials):
        split = generator.normal(0, 1, seeds)
        gaps = np.abs(3 + split + generator.normal(0, 1, (4, seeds)))  # [rule, seed]
        verdicts = corrected({str(k): paired(gaps[k], gaps[0]) for k in (1, 2, 3)})
        announced += any(" by " in verdict.reads for verdict in verdicts.values())
    bound = 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)
    assert announced / trials <= bound < 0.06
    alone = sum(
        any(" by " in paired(gaps[k], gaps[0]).reads for k in (1, 2, 3))
        for gaps in np.abs(3 + generator.normal(0, 1, (300, 4, seeds)))
    )
    assert alone / 300 > 0.07  # without the correction there are more


def test_mistakes_are_refused():
    with pytest.raises(
        ValueError, match=r"^a is \[2\] and b is \[3\]; give both for the same seeds, in order\.$"
    ):
        paired([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(
        ValueError, match=r"^values is \[1, 2\]; expected one value for each seed: give \[seed\]\.$"
    ):
        mean_se([[1.0, 2.0]])
    for interval in (t_interval, bootstrap_interval):
        for level in (0.0, 1.0, 95, math.nan):
            with pytest.raises(
                ValueError, match=rf"^level is {level}; it must lie above 0 and below 1, 0\.95 as a"
            ):
                interval([1.0, 2.0, 3.0], level)
    with pytest.raises(
        ValueError, match=r"^draws is 0; it must be a whole number of at least 1\.$"
    ):
        bootstrap_interval([1.0, 2.0, 3.0], draws=0)
    with pytest.raises(
        ValueError, match=r"^seed is -1; it must be a whole number of at least 0\.$"
    ):
        bootstrap_interval([1.0, 2.0, 3.0], seed=-1)
