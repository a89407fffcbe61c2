"""Statistics over a few seeds: means with errors, intervals, and exact tests of paired differences.

Runs are repeated with a few seeds, usually five. The methods are chosen for that:

* A verdict needs five seeds. It is by the paired t test of the differences, and its interval is
  Student's. On normal differences both keep their level with as few as three seeds; on differences
  as skewed as an exponential a 95 % interval covers 88 to 90 % up to eight seeds.
* The bootstrap assumes no shape. But resampled means stay in the range of the n values, and that
  range covers their median with probability 1 − 2^(1−n) only: 75 % for three seeds, 94 % for five.
  Its percentiles are widened for small n; measured on normal differences, 95 % intervals then cover
  75, 87, 93, 95 % with 3, 4, 5, 8 seeds (plain percentiles: 75, 80, 85, 89 %).
* The signed-rank test (Wilcoxon) is exact for every n, ties included. n pairs cannot give a p below
  2⁻ⁿ: 1/32 for five.
* Several comparisons at once are corrected by Holm's method. With five seeds and three rules a
  corrected signed-rank p is never below 3/32, so it cannot make a verdict; it stands beside it.

An undefined value (None or NaN) is left out, with its pair; counts give the number of remaining
values. Infinite values (the loss of a run that diverged) are not left out: then there is no
interval, and the verdict says so.

Wilcoxon 1945, "Individual comparisons by ranking methods", Biometrics Bulletin 1; Holm 1979, "A
simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6;
Hesterberg 2014, "What teachers should know about the bootstrap", arXiv:1411.5279 (expanded
percentiles).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenclip import check
from evenclip.arguments import check_kinds
from evenclip.audit.arrays import array_of

__all__ = [
    "ALTERNATIVES",
    "LEAST_SEEDS",
    "LEVEL",
    "Paired",
    "bootstrap_interval",
    "corrected",
    "holm",
    "mean_se",
    "paired",
    "smallest_p",
    "student",
    "t_interval",
    "wilcoxon",
]

ALTERNATIVES = ("less", "greater", "two-sided")

LEAST_SEEDS = 5
"""Minimum number of seeds for a verdict."""

LEVEL = 0.05
"""Largest corrected p of a verdict that there is a difference."""

_MOST_DRAWS = 10**6
# Minimum number of values for an interval.
_LEAST = 3
# Separates this stream from other streams with the same seed.
_STREAM = int.from_bytes(b"bootstrap", "big")

Values: TypeAlias = NDArray[np.float64] | Sequence[float | None]


def mean_se(values: Values) -> tuple[float | None, float | None]:
    """Return the mean of the defined values and its standard error.

    The error is s/√n with s² = Σ(v − mean)²/(n − 1). It is None with one value or an infinite
    value. The mean is None with no value, or with both ∞ and −∞.

    >>> mean_se([1.0, 2.0, 3.0, None])
    (2.0, 0.5773502691896258)
    >>> mean_se([4.0]), mean_se([])
    ((4.0, None), (None, None))
    """
    defined = _defined(values)
    if len(defined) == 0:
        return None, None
    if not np.isfinite(defined).all():
        infinities = set(defined[np.isinf(defined)].tolist())
        return (infinities.pop() if len(infinities) == 1 else None), None
    if len(defined) == 1:
        return float(defined[0]), None
    return float(defined.mean()), float(defined.std(ddof=1) / math.sqrt(len(defined)))


def t_interval(values: Values, level: float = 0.95) -> tuple[float, float] | None:
    """Return mean ± t·s/√n, Student's interval for the mean.

    Return None with fewer than two values or an infinite value.

    >>> low, high = t_interval([1.0, 2.0, 3.0])  # 2 ± 4.3027/√3
    >>> round(low, 4), round(high, 4)
    (-0.4841, 4.4841)
    """
    check_kinds(t_interval, {"level": level})
    _check_level(level)
    mean, se = mean_se(values)
    if mean is None or se is None:
        return None
    half = student(len(_defined(values)) - 1, float(level)) * se
    return mean - half, mean + half


def bootstrap_interval(
    values: Values, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> tuple[float, float] | None:
    """Return expanded percentiles of the mean of n values drawn with replacement.

    Plain percentiles are too narrow by the factor √((n − 1)/n), and because they use the normal
    quantile instead of Student's. So with α/2 = (1 − level)/2 the percentiles are
    α'/2 = Φ(−√(n/(n − 1))·t_{α/2, n−1}) and 1 − α'/2. For normal means they coincide with
    `t_interval`. The draws depend on `seed` and n only, and come from their own stream.

    Return None if n < 3 or a value is infinite.

    >>> bootstrap_interval([1.0, 1.0, 1.0]), bootstrap_interval([1.0, 2.0]) is None
    ((1.0, 1.0), True)

    Raises:
        ValueError: if the level is not between 0 and 1, or draws or seed are out of range.
    """
    check_kinds(bootstrap_interval, {"level": level, "draws": draws, "seed": seed})
    _check_level(level)
    check.at_most(_MOST_DRAWS, draws=draws)
    check.whole(seed=seed)
    defined = _defined(values)
    n = len(defined)
    if n < _LEAST or not np.isfinite(defined).all():
        return None
    from scipy.special import ndtr

    stream = np.random.Generator(np.random.PCG64(np.random.SeedSequence([int(seed), _STREAM])))
    means = defined[stream.integers(n, size=(int(draws), n))].mean(axis=1)  # [draw]
    tail = float(ndtr(-math.sqrt(n / (n - 1)) * student(n - 1, float(level))))
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def wilcoxon(differences: Values, alternative: str = "less") -> float | None:
    """Return the p of the signed-rank test that the differences are symmetric around 0.

    W⁺ is the sum of the ranks of |d_i| over d_i > 0. Given the |d_i|, every sign is + with
    probability ½, so W⁺ has a known distribution: p = P(W⁺ ≤ w) against "less" (the differences are
    below 0), P(W⁺ ≥ w) against "greater", and twice the smaller one, at most 1, against
    "two-sided". The test is exact for every n.

    Differences of 0 are left out before ranking, as in Wilcoxon's paper; if all are 0, p is 1.
    Equal |d_i| share the mean of their ranks, and the distribution is that of the shared ranks.
    Return None without a difference.

    >>> wilcoxon([-1.0, -2.0, -0.5, -3.0, -1.5])  # all five below 0
    0.03125
    >>> wilcoxon([-1.0, -2.0, 0.5], "less"), wilcoxon([-1.0, -2.0, 0.5], "two-sided")
    (0.25, 0.5)

    Raises:
        ValueError: if the alternative is unknown.
    """
    check_kinds(wilcoxon, {"alternative": alternative})
    if alternative not in ALTERNATIVES:
        raise ValueError(
            f"alternative is {alternative!r}; it must be one of {', '.join(ALTERNATIVES)}."
        )
    defined = _defined(differences, "differences")
    if len(defined) == 0:
        return None
    d = defined[defined != 0]
    doubled = _doubled_ranks(np.abs(d))
    chance = _sums(doubled)
    w = int(doubled[d > 0].sum())
    less, greater = float(chance[: w + 1].sum()), float(chance[w:].sum())
    p = {"less": less, "greater": greater, "two-sided": 2 * min(less, greater)}[alternative]
    return min(1.0, p)


def smallest_p(n: int) -> float:
    """Return 2⁻ⁿ, the smallest one-sided p of `wilcoxon` with n pairs; 1/32 for five seeds.

    >>> smallest_p(5)
    0.03125

    Raises:
        ValueError: if n is negative.
    """
    check_kinds(smallest_p, locals())
    check.whole(n=n)
    return 0.5 ** int(n)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Correct m p-values for multiple comparisons by Holm's method.

    The corrected p is the maximum over j ≤ i of (m − j + 1)·p_(j), at most 1. Rejecting every
    hypothesis with a corrected p of at most α makes any false rejection with probability at most α,
    for any dependence between the tests.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'b': 0.06, 'c': 0.06}

    Raises:
        ValueError: if a p is not between 0 and 1.
    """
    check_kinds(holm, locals())
    for name, p in p_values.items():
        if not 0 <= p <= 1:
            raise ValueError(
                f"The p of {name} is {p}; it must lie between 0 and 1: leave out what has no p."
            )
    corrected: dict[str, float] = {}
    least = 0.0
    for i, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - i) * p_values[name]))
        corrected[name] = least
    return {name: corrected[name] for name in p_values}


@dataclass(frozen=True)
class Paired:
    """The paired difference a − b of two methods over seeds.

    Attributes:
        n: number of pairs in which both are defined.
        mean: mean difference; None with no pair, or a difference that is not finite.
        se: standard error of the mean; None with fewer than two pairs.
        low: lower end of Student's 95 % interval, `t_interval`; None with fewer than three pairs.
        high: upper end.
        p: two-sided paired t test, of which the verdict is made; None with fewer than five pairs.
        p_rank: one-sided `wilcoxon`, against "a is smaller"; never below `smallest_p(n)`. None with
            fewer than five pairs.
        reads: the verdict in words.
    """

    n: int
    mean: float | None
    se: float | None
    low: float | None
    high: float | None
    p: float | None
    p_rank: float | None
    reads: str


def paired(a: Values, b: Values) -> Paired:
    """Compare a with b pair by pair: interval, p and verdict in words.

    The verdict is "smaller by x (low to high)" or "larger by" if p is at most 0.05, and otherwise
    "no difference shown". With fewer than five pairs there is no verdict and no p, only the
    interval. With a run that diverged it reads "not finite in k of n seeds". For several
    comparisons, `corrected` gives the verdicts.

    >>> paired([1.0, 2.0, 3.0, 2.0, 2.5], [5.0, 6.5, 6.5, 6.0, 6.5]).reads
    'smaller by 4 (3.56 to 4.44)'
    >>> paired([1.0, 2.0, 3.0, 2.0, 2.5], [1.5, 1.5, 3.5, 1.5, 3.0]).reads
    'no difference shown'
    >>> paired([1.0, 2.0, 3.0], [5.0, 6.5, 6.5]).reads
    'no verdict below 5 seeds; the difference is -4 (-5.24 to -2.76)'

    Raises:
        ValueError: if a and b are not equally long.
    """
    first, second = array_of("a", a), array_of("b", b)
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(
            f"a is {list(first.shape)} and b is {list(second.shape)}; give both for the same "
            "seeds, in order."
        )
    both = ~(np.isnan(first) | np.isnan(second))
    infinite = np.count_nonzero(np.isinf(first[both]) | np.isinf(second[both]))
    n = int(np.count_nonzero(both))
    if infinite:
        reads = f"not finite in {infinite} of {n} seeds"
        return Paired(n, None, None, None, None, None, None, reads)
    d = first[both] - second[both]
    mean, se = mean_se(d)
    low, high = (t_interval(d) if n >= _LEAST else None) or (None, None)
    p, p_rank = (_t_test(mean, se, n), wilcoxon(d, "less")) if n >= LEAST_SEEDS else (None, None)
    pair = Paired(n, mean, se, low, high, p, p_rank, "")
    return replace(pair, reads=_words(pair))


def corrected(pairs: Mapping[str, Paired]) -> dict[str, Paired]:
    """Correct several comparisons together: each p by `holm`, and the verdicts by the new p.

    Any verdict of a difference where there is none then has a probability of at most 5 %, for
    normal differences.

    >>> pair = paired([1.0, 2.0, 1.0, 2.5, 0.5], [2.0, 2.2, 2.0, 2.7, 2.0])
    >>> pair.reads
    'smaller by 0.78 (0.0754 to 1.48)'
    >>> corrected({"a": pair, "b": pair})["a"].reads
    'no difference shown'
    """
    check_kinds(corrected, locals())
    tested, ranked = (
        holm({name: p for name, pair in pairs.items() if (p := getattr(pair, kind)) is not None})
        for kind in ("p", "p_rank")
    )
    both = {
        name: replace(pair, p=tested.get(name), p_rank=ranked.get(name))
        for name, pair in pairs.items()
    }
    return {
        name: pair if pair.mean is None else replace(pair, reads=_words(pair))
        for name, pair in both.items()
    }


def _t_test(mean: float | None, se: float | None, n: int) -> float | None:
    """Return the two-sided p of the paired t test; None with fewer than two pairs."""
    if mean is None or se is None:
        return None
    if se == 0:
        return 1.0 if mean == 0 else 0.0
    from scipy.special import stdtr

    return min(1.0, 2 * float(stdtr(n - 1, -abs(mean / se))))


def _words(pair: Paired) -> str:
    """Return the verdict; with three digits each, the end of an interval never rounds to 0."""
    mean, low, high = pair.mean, pair.low, pair.high
    if mean is None or low is None or high is None:
        return "too few seeds to tell"
    if pair.n < LEAST_SEEDS:
        return (
            f"no verdict below {LEAST_SEEDS} seeds; the difference is {mean:.3g} ({low:.3g} to "
            f"{high:.3g})"
        )
    if pair.p is None or pair.p > LEVEL or low <= 0 <= high:
        return "no difference shown"
    if high < 0:
        return f"smaller by {-mean:.3g} ({-high:.3g} to {-low:.3g})"
    return f"larger by {mean:.3g} ({low:.3g} to {high:.3g})"


def _defined(values: Values, name: str = "values") -> NDArray[np.float64]:
    """Return the values that are not NaN, in order.  # [value]"""
    array = array_of(name, values)
    if array.ndim != 1:
        raise ValueError(
            f"{name} is {list(array.shape)}; expected one value for each seed: give [seed]."
        )
    return array[~np.isnan(array)]


def student(freedom: int, level: float = 0.95) -> float:
    """Return the quantile of Student's t with (1 − level)/2 above it."""
    from scipy.special import stdtrit

    return -float(stdtrit(freedom, (1 - level) / 2))


def _check_level(level: float) -> None:
    """Raise unless the level lies strictly between 0 and 1."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie above 0 and below 1, 0.95 as a rule.")


def _doubled_ranks(sizes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return twice the rank of each value; equal values share the mean of their ranks.

    Ranks are doubled because that mean may be a half-integer.
    """
    _, level, count = np.unique(sizes, return_inverse=True, return_counts=True)
    return (2 * np.cumsum(count) - count + 1)[level]


def _sums(weights: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return P(Σ_i weight_i·sign_i = w) for w = 0, 1, …; signs are 0 or 1 with p = ½.  # [w]"""
    chance = np.zeros(int(weights.sum()) + 1)
    chance[0] = 1.0
    for weight in weights:
        chance[weight:] = (chance[weight:] + chance[:-weight]) / 2
        chance[:weight] /= 2
    return chance
