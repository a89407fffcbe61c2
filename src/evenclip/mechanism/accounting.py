"""Accounting: from the ledger of releases to ε.

Every step of the ledger is ONE sampled Gaussian mechanism. All releases of a step see the same
Poisson batch, so they count as one release with the joint multiplier (see
`evenclip.mechanism.release`), sampled once. With q the Poisson rate and m the joint multiplier, the
worst pair of neighbours (add or remove one record) is

    P = (1 − q)·N(0, m²) + q·N(1, m²)   against   Q = N(0, m²),   in both directions,

and steps compose. Two accountants compute ε, both through dp-accounting. Both are upper bounds:

* RDP: the Rényi divergences of (P, Q) add up over the steps and are converted to (ε, δ). It is fast
  and slightly loose. Mironov, Talwar, Zhang 2019, "Rényi differential privacy of the sampled
  Gaussian mechanism", arXiv:1908.10530.
* PLD: the distribution of the privacy loss ln P/Q, on a grid, is convolved over the steps. It is tight.
  Koskela, Jälkö, Honkela 2020, "Computing tight differential privacy guarantees using FFT",
  arXiv:1906.03049; Gopi, Lee, Wutschitz 2021, "Numerical composition of differential privacy",
  arXiv:2106.02848; Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, "Connect the dots: tighter
  discrete approximations of privacy loss distributions", arXiv:2207.04380, whose discretisation is
  used here. It never rounds a cost down.

If the ledger has no ε (a value was released in clear, or a batch was not a Poisson sample), the
result is None and never a number.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, Context
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from evenclip import check
from evenclip.mechanism.release import Entry, Ledger, joint_multiplier

if TYPE_CHECKING:
    import dp_accounting

    from evenclip.rules import Rule

AnyRule = TypeVar("AnyRule", bound="Rule")

__all__ = [
    "calibrate",
    "curve",
    "epsilon",
    "epsilon_without_amplification",
    "event",
    "gradient_multiplier",
    "rounded_up",
    "scale_for",
    "smallest_delta",
]

# Largest excess of the PLD's ε over the exact ε due to the grid, as a fraction of ε: for a final
# result, and during a search.
_FINE, _COARSE = 1e-4, 1e-2
# Most grid points for one step. dp-accounting takes about 4 µs per point and direction.
_MOST_POINTS = 150_000
# dp-accounting truncates the noise at this many standard deviations; the tail has mass e⁻⁵⁰.
_CUT = 10.0
# math.exp and math.expm1 overflow slightly above this exponent.
_LARGEST_EXPONENT = 700.0
# δ that double precision may lose per convolved step. The largest observed loss of the transform is
# two units of 2⁻⁵².
_ROUNDING = 2.0**-49
# Calibration ends with an ε in [1 − 5e-4, 1 − 1e-5] times the target: the upper margin allows
# for different rounding when the multipliers are computed in another order.
_WINDOW, _MARGIN = 5e-4, 1e-5
# Below this joint multiplier a single step costs an ε of half a million.
_LEAST_MULTIPLIER = 1e-3
# Smallest supported target ε. The accountants' arithmetic cannot distinguish smaller ones from 0.
_LEAST_EPSILON = 1e-6
_MOST_ROUNDS = 100


def event(ledger: Ledger) -> dp_accounting.DpEvent:
    """Return the ledger as an event of dp-accounting.

    Equal steps are merged, because composition does not depend on their order. Steps that released
    nothing cost nothing. q = 1 is a Gaussian without sampling. Every number is a built-in float or
    int: dp-accounting 0.6 silently drops other types from composed events.

    >>> ledger = Ledger()
    >>> ledger.write(0.01, {"gradient": 3, "count": 4})
    >>> event(ledger).events[0].event.event
    GaussianDpEvent(noise_multiplier=2.4)

    Raises:
        ValueError: if the ledger has no ε.
    """
    if not ledger.is_private:
        raise ValueError(
            "This ledger has no ε: a value was released in clear, or a batch was not a Poisson "
            "sample. `epsilon` returns None for it. To obtain an ε, add noise to every release and "
            "sample by Poisson."
        )
    return _event(_parts(ledger))


def epsilon(ledger: Ledger, delta: float, accountant: str = "pld") -> float | None:
    """Return ε at δ of everything in the ledger, by the accountant "rdp" or "pld".

    Return None if the ledger has no ε, and 0 if nothing was released. Guarantee: an upper bound,
    for adding or removing one record. PLD is within about 1e-4·ε of the exact value (some per cent
    where q is 1e-5 or less) and needs δ above `smallest_delta`.

    >>> steps = 20 * 92  # 20 epochs on Adult: (3.41, 3.10) at δ = 1e-6
    >>> ledger = Ledger([Entry(1 / 92, (("gradient", 1.0),), steps)])
    >>> round(epsilon(ledger, 1e-6, "rdp"), 2), round(epsilon(ledger, 1e-6), 2)
    (3.41, 3.1)
    >>> epsilon(Ledger([Entry(1 / 92, (("gradient", 0.0),), steps)]), 1e-6) is None
    True

    Raises:
        ValueError: if δ is not between 0 and 1, is too small for PLD, or the accountant is unknown.
    """
    check_delta(delta)
    if accountant not in _ACCOUNTANTS:
        raise ValueError(
            f"accountant is {accountant!r}; it must be one of {', '.join(_ACCOUNTANTS)}."
        )
    return _ACCOUNTANTS[accountant](ledger, [delta])[0] if ledger.is_private else None


def curve(
    ledger: Ledger, deltas: Iterable[float]
) -> list[tuple[float, float | None, float | None]]:
    """Return (δ, ε by RDP, ε by PLD) for each δ; both ε are None if the ledger has none.

    One Gaussian with multiplier 1 has δ(1) = Φ(-1/2) − e·Φ(-3/2) = 0.1269:

    >>> ledger = Ledger([Entry(1.0, (("gradient", 1.0),), 1)])
    >>> [(delta, round(rdp, 2), round(pld, 2)) for delta, rdp, pld in curve(ledger, [0.12693674])]
    [(0.12693674, 1.5, 1.0)]
    """
    deltas = list(deltas)
    for delta in deltas:
        check_delta(delta)
    if not ledger.is_private:
        return [(delta, None, None) for delta in deltas]
    return list(zip(deltas, _rdp(ledger, deltas), _pld(ledger, deltas), strict=True))


def epsilon_without_amplification(ledger: Ledger, delta: float) -> float | None:
    """Return ε at δ as if every record had been in every batch (q = 1).

    This is the guarantee that remains if the sampling were known. It is exact: Gaussians compose to
    one Gaussian with the joint multiplier of all steps, m = (Σ_t m_t⁻²)^(-1/2), and with μ = 1/m
    its δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) (Balle, Wang 2018, arXiv:1805.06530, Eq. 6).

    >>> ledger = Ledger([Entry(0.01, (("gradient", 10.0),), 100)])  # μ = √100 / 10 = 1
    >>> round(epsilon_without_amplification(ledger, 0.12693674), 6)  # δ(1) = Φ(-1/2) − e·Φ(-3/2)
    1.0
    """
    check_delta(delta)
    if not ledger.is_private:
        return None
    return _gaussian_epsilon(
        math.sqrt(sum(part.steps * part.multiplier**-2 for part in _parts(ledger))), delta
    )


def scale_for(
    multipliers: Mapping[str, float], *, epsilon: float, delta: float, q: float, steps: int
) -> float:
    """Return the smallest scale s of the multipliers that reaches the target ε at δ, by PLD.

    `steps` steps of rate q with the multipliers {name: s·m} then cost at most ε. Guarantee: the ε
    of that ledger is never above the target, and at most 0.05 % below it.

    >>> unit = {"gradient": 1.0, "count": 10.0}
    >>> s = scale_for(unit, epsilon=3.0, delta=1e-6, q=1 / 92, steps=1840)
    >>> ledger = Ledger([Entry(1 / 92, (("gradient", s), ("count", 10 * s)), 1840)])
    >>> 0.9995 * 3.0 <= epsilon(ledger, 1e-6) <= 3.0
    True

    Raises:
        ValueError: if a value is out of range, or the target holds even without noise, so that no
            multiplier is the smallest (δ is at least the probability that a record is sampled).
    """
    check.natural(steps=steps)
    return _scale_for([(multipliers, int(steps))], epsilon=epsilon, delta=delta, q=q)


def _scale_for(
    plan: Sequence[tuple[Mapping[str, float], int]], *, epsilon: float, delta: float, q: float
) -> float:
    """Return `scale_for` for several kinds of steps, each with its number."""
    check.positive(epsilon=epsilon)
    check_delta(delta)
    check.fraction(q=q)
    for multipliers, _ in plan:
        check.positive(**multipliers)
    if epsilon < _LEAST_EPSILON:
        raise ValueError(
            f"epsilon is {epsilon:g}; below {_LEAST_EPSILON:g} it cannot be distinguished from 0, "
            "and its noise would leave nothing to learn; give a larger epsilon."
        )
    steps = sum(n for _, n in plan)
    precision = sum(n * joint_multiplier(m.values()) ** -2 for m, n in plan) / steps
    if precision == 0:
        raise ValueError("multipliers is empty; give the multiplier of at least one release.")
    sampled = 1.0 if q == 1 else -math.expm1(steps * math.log1p(-q))
    if sampled <= delta:
        raise ValueError(
            f"delta is {delta:g}, and {steps} steps at q = {q:g} sample a record with probability "
            f"{sampled:.3g} only. Any ε holds without noise, so no record is protected; give a "
            "smaller delta."
        )
    unit = precision**-0.5  # of one kind of step that costs about as much as all
    scale: float = _first_guess(epsilon, delta, q, steps) / unit
    for tolerance in (_COARSE, _FINE):
        cost = partial(_cost, plan, q, delta, tolerance)
        scale = _solve(cost, epsilon, scale, least=_LEAST_MULTIPLIER / unit)
    return scale


def calibrate(rule: AnyRule, *, epsilon: float, delta: float, q: float, steps: int) -> AnyRule:
    """Return the rule with its noise scaled so that `steps` steps at rate q cost ε at δ.

    The cost includes the rule's counts. Guarantee: by PLD, never above the target and at most 0.05
    % below it.

    >>> from evenclip import DPSGDGlobalAdapt
    >>> rule = calibrate(DPSGDGlobalAdapt(sigma=1.0), epsilon=3.0, delta=1e-6, q=1 / 92, steps=1840)
    >>> round(rule.sigma, 2), round(rule.sigma_count, 1)
    (1.02, 10.2)

    Raises:
        ValueError: if a value is out of range, or the rule adds no noise that could be scaled.
    """
    if rule.sigma == 0:
        raise ValueError(
            f"{rule.name} adds no noise, so no ε can be reached with it; choose a private rule."
        )
    if not rule.bounded:
        raise ValueError(
            f"{rule.name} has no valid ε with any noise ({rule.why}); choose a private rule."
        )
    plan = Counter(tuple(rule.multipliers(t).items()) for t in range(steps))
    scale = _scale_for(
        [(dict(row), n) for row, n in plan.items()], epsilon=epsilon, delta=delta, q=q
    )
    scaled = rule.scaled(scale)
    for t in range(steps):
        expected, given = rule.multipliers(t), scaled.multipliers(t)
        if any(not math.isclose(given[name], scale * expected[name]) for name in expected):
            raise ValueError(
                f"scaled({scale:.3g}) of {rule.name} does not multiply its noise of step {t} by "
                "that factor; compute multipliers(t) from sigma and sigma_count."
            )
    return scaled


def gradient_multiplier(joint: float, count: float, s: float = 1.0) -> float:
    """Return σ_grad = (σ⁻² − s²·σ_count⁻²)^(-1/2), with σ = `joint` and σ_count = `count`.

    With it, gradient and count jointly cost what a single release with multiplier σ costs. `count`
    is the count's noise standard deviation, and s its sensitivity: 1, or ½ for the centred count.

    >>> round(gradient_multiplier(2.4, 4.0), 9)
    3.0

    Raises:
        ValueError: if count ≤ s·joint, so that the count alone costs as much.
    """
    check.positive(joint=joint, count=count, s=s)
    if count <= s * joint:
        raise ValueError(
            f"count is {count}; it must be above s·joint = {s * joint:g}, because the count alone "
            "already costs as much as both releases may; give the count more noise."
        )
    return float((joint**-2 - (s / count) ** 2) ** -0.5)


def rounded_up(value: float, digits: int = 4) -> str:
    """Format a value to `digits` significant digits, rounded up.

    A printed ε or σ is therefore never below the true one.

    >>> rounded_up(3.13501), rounded_up(0.25), rounded_up(12345.6)
    ('3.136', '0.25', '12350')
    """
    up = Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(value)
    return f"{up.normalize():f}"


def smallest_delta(ledger: Ledger) -> float:
    """Return the δ above which PLD in double precision is a bound: 2⁻⁴⁹ for each step.

    dp-accounting convolves by Fourier transform and does not account for its rounding: for
    δ ≤ 1e-12 its ε can be below the exact one. This amount is subtracted from δ before ε is
    computed, so that the result remains an upper bound. A smaller δ is rejected.

    >>> smallest_delta(Ledger([Entry(0.01, (("gradient", 1.0),), 1024)])) == 2.0**-39
    True
    """
    return _lost(_parts(ledger))


def default_delta(n: int) -> float:
    """Return the default δ: the largest power of ten below 1/(2n).

    >>> default_delta(23_484), default_delta(50)
    (1e-05, 0.001)
    """
    return float(10.0 ** (math.ceil(math.log10(1 / (2 * n))) - 1))


def check_delta(delta: float, name: str = "delta") -> None:
    """Raise unless δ lies strictly between 0 and 1."""
    if not 0 < delta < 1:
        raise ValueError(
            f"{name} is {delta}; it must lie above 0 and below 1, well below 1/n for n records."
        )


# Distinct steps of a ledger
# --------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """`steps` steps, each one Gaussian of this multiplier on a sample of rate q."""

    q: float
    multiplier: float
    steps: int


_Parts = tuple[_Part, ...]


def _parts(ledger: Ledger) -> _Parts:
    """Merge the equal steps of a private ledger, and drop those that cost nothing."""
    steps: Counter[tuple[float, float]] = Counter()
    for entry in ledger.entries:
        if entry.q is None or not 0 <= entry.q <= 1:
            raise ValueError(
                f"The ledger has a step of rate q = {entry.q}; a Poisson rate lies between 0 and 1."
            )
        steps[float(entry.q), float(entry.joint)] += int(entry.steps)
    return tuple(_Part(q, m, n) for (q, m), n in steps.items() if q > 0 and m < math.inf and n > 0)


def _lost(parts: _Parts) -> float:
    """Return the δ that double precision may lose."""
    return _ROUNDING * sum(_roundings(part) for part in parts)


def _roundings(part: _Part) -> int:
    """Count its discretised steps; Gaussians without sampling are composed exactly first."""
    return 1 if part.q == 1 else part.steps


def _variance(part: _Part) -> float:
    """Variance of its privacy loss, to first order in q; overestimated for small m."""
    per_step = part.multiplier**-2
    if part.q < 1:
        per_step = part.q**2 * math.expm1(min(per_step, _LARGEST_EXPONENT))
    return part.steps * per_step


def _width(part: _Part) -> float:
    """Length of the interval of discretised losses."""
    if part.q == 1:
        return 2 * _CUT * math.sqrt(part.steps) / part.multiplier
    # Without sampling, the loss is truncated at ±end.
    end = (_CUT + 0.5 / part.multiplier) / part.multiplier
    top = math.log1p(part.q * math.expm1(min(end, _LARGEST_EXPONENT))) + max(
        end - _LARGEST_EXPONENT, 0.0
    )
    return top - math.log1p(part.q * math.expm1(-end))


# The accountants
# --------------------------------------------------------------------------------------------------


def _library() -> Any:
    """Import dp_accounting on first use; the core of the package works without it."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as missing:
        raise ImportError(
            "ε is computed by dp-accounting, which is not installed; run `pip install "
            "'dp-accounting>=0.6,<0.7'`."
        ) from missing
    return dp_accounting


def _event(parts: _Parts) -> dp_accounting.DpEvent:
    """Compose all parts into one event."""
    library = _library()
    return library.ComposedDpEvent([_composed(library, part) for part in parts])


def _composed(library: Any, part: _Part) -> dp_accounting.DpEvent:
    """Return one part as an event."""
    gaussian = library.GaussianDpEvent(part.multiplier)
    step = gaussian if part.q == 1 else library.PoissonSampledDpEvent(part.q, gaussian)
    return library.SelfComposedDpEvent(step, part.steps)


def _rdp(ledger: Ledger, deltas: Sequence[float]) -> list[float]:
    """Return ε at each δ by RDP, at the default orders of dp-accounting."""
    parts = _parts(ledger)
    epsilons = [epsilon for epsilon, _ in _rdp_optima(parts, tuple(deltas))]
    if any(epsilon <= 0 for epsilon in epsilons) and parts:
        # Divergences far below 1e-16 can round to a negative number, but a release never costs 0.
        return [max(rdp, pld) for rdp, pld in zip(epsilons, _pld(ledger, deltas), strict=True)]
    return epsilons


@lru_cache(maxsize=256)
def _rdp_optima(parts: _Parts, deltas: tuple[float, ...]) -> tuple[tuple[float, float], ...]:
    """Return (ε, the optimal order) at each δ."""
    accountant = _library().rdp.RdpAccountant()
    with _without_news_of_orders():
        accountant.compose(_event(parts))
    optima = [accountant.get_epsilon_and_optimal_order(delta) for delta in deltas]
    return tuple((float(epsilon), float(order)) for epsilon, order in optima)


def _pld(ledger: Ledger, deltas: Sequence[float], tolerance: float = _FINE) -> list[float]:
    """Return ε at each δ by PLD.

    The result is pessimistic in the grid (the default of dp-accounting) and in its rounding.
    """
    return list(_pld_of(_parts(ledger), tuple(deltas), tolerance))


@lru_cache(maxsize=256)  # a comparison needs the same results several times
def _pld_of(parts: _Parts, deltas: tuple[float, ...], tolerance: float) -> tuple[float, ...]:
    if not parts:
        return tuple(0.0 for _ in deltas)
    lost = _lost(parts)
    if min(deltas) <= lost:
        raise ValueError(
            f"delta is {min(deltas):g}; PLD in double precision is a bound only above {lost:.1e} "
            "for these steps: give a larger delta, or use the accountant 'rdp'."
        )
    accountant = _library().pld.PLDAccountant(
        value_discretization_interval=_interval(parts, deltas, tolerance)
    )
    accountant.compose(_event(parts))
    return tuple(float(accountant.get_epsilon(delta - lost)) for delta in deltas)


_ACCOUNTANTS: Mapping[str, Callable[[Ledger, Sequence[float]], list[float]]] = {
    "rdp": _rdp,
    "pld": _pld,
}


def _interval(parts: _Parts, deltas: tuple[float, ...], tolerance: float) -> float:
    """Return the grid spacing h that makes ε too large by about `tolerance`·ε.

    h is bounded below, so that a step has at most `_MOST_POINTS` points.

    Connecting the dots moves each loss to the two grid points around it. Over N steps that adds at
    most N·h²/4 to the variance of the loss (N·h²/6 on average), hence α·N·h²/8 to ε, where α is the
    order at which RDP is tightest. Two choices of h follow: from RDP's ε and α, and from the
    relative growth of the variance. RDP covers heavy tails (small multipliers); the variance covers
    an ε so small that its α exceeds the orders of the accountant. The smaller h is valid in both
    cases. A fixed h is not: 1e-4 is coarser than a whole step's loss for a target of ε = 0.01, and
    gives a million points for one of ε = 100.
    """
    roundings = sum(_roundings(part) for part in parts)
    by_variance = math.sqrt(12 * tolerance * sum(_variance(part) for part in parts) / roundings)
    by_order = [
        math.sqrt(8 * tolerance * epsilon / (order * roundings))
        for epsilon, order in _rdp_optima(parts, deltas)
        if epsilon > 0
    ]
    return max(min([by_variance, *by_order]), max(_width(part) for part in parts) / _MOST_POINTS)


@contextlib.contextmanager
def _without_news_of_orders() -> Iterator[None]:
    """Suppress dp-accounting's message that an order did not converge and was excluded.

    Excluding an order only makes RDP's ε larger.
    """
    logger = logging.getLogger("absl")
    logger.addFilter(_is_news)
    try:
        yield
    finally:
        logger.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether the record is not about an excluded order."""
    return "Excluding this order" not in str(record.msg)


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact ε at δ of the Gaussian mechanism of multiplier 1/μ."""
    if math.erf(mu / math.sqrt(8)) <= delta:  # δ(0), the total variation distance
        return 0.0
    from scipy.optimize import brentq

    # δ(ε) ≤ Φ(μ/2 − ε/μ) ≤ exp(−(ε/μ − μ/2)²/2)/2 < δ at the upper end.
    most = mu**2 / 2 + mu * math.sqrt(-2 * math.log(delta))
    return float(brentq(_log_gaussian_delta, 0.0, most, args=(mu, math.log(delta))))


def _log_gaussian_delta(epsilon: float, mu: float, minus: float = 0.0) -> float:
    """Return ln δ(ε) − `minus` for the Gaussian mechanism of multiplier 1/μ.

    Logarithms are used because e^ε would overflow.
    """
    from scipy.special import log_ndtr

    log_p = log_ndtr(mu / 2 - epsilon / mu)
    log_q = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(log_p) + math.log(-math.expm1(log_q - log_p)) - minus


# Calibration
# --------------------------------------------------------------------------------------------------


_Point = tuple[float, float] | None  # (scale, cost)


def _cost(
    plan: Sequence[tuple[Mapping[str, float], int]],
    q: float,
    delta: float,
    tolerance: float,
    scale: float,
) -> float:
    """Return ε by PLD of the planned steps with all multipliers times `scale`."""
    entries = [
        Entry(float(q), tuple((name, scale * float(m)) for name, m in multipliers.items()), steps)
        for multipliers, steps in plan
    ]
    return _pld(Ledger(entries), [delta], tolerance)[0]


def _first_guess(epsilon: float, delta: float, q: float, steps: int) -> float:
    """Estimate the joint multiplier m of T = `steps` steps that cost ε at δ.

    Many steps approach one Gaussian with μ² = T·q²·(e^(m⁻²) − 1). μ solves ε = μ²/2 + μ·√(2 ln
    1/δ), an upper bound of the Gaussian's ε.
    """
    tail = -2 * math.log(delta)
    mu = math.sqrt(tail + 2 * epsilon) - math.sqrt(tail)
    return float(math.log1p((mu / q) ** 2 / steps) ** -0.5)


def _solve(cost: Callable[[float], float], target: float, scale: float, least: float) -> float:
    """Search, starting from `scale`, for a scale ≥ `least` whose cost is just below the target.

    The cost must decrease as the scale grows.
    """
    aim = target * (1 - _WINDOW / 2)
    dear: _Point = None  # closest point above the aim
    cheap: _Point = None  # closest point not above it
    for _ in range(_MOST_ROUNDS):
        if scale < least:
            raise ValueError(
                f"epsilon is {target:g}; it is reached with next to no noise (a multiplier below "
                f"{_LEAST_MULTIPLIER:g}), so it gives no privacy; give a smaller epsilon."
            )
        price = cost(scale)
        if target * (1 - _WINDOW) <= price <= target * (1 - _MARGIN):
            return scale
        before = (dear, cheap)
        dear, cheap = ((scale, price), cheap) if price > aim else (dear, (scale, price))
        scale = _next_scale(dear, cheap, aim, halve=_shrank_little(before, (dear, cheap)))
    raise ArithmeticError(
        f"No noise multiplier was found for epsilon = {target:g}; please report the settings."
    )


def _shrank_little(before: tuple[_Point, _Point], now: tuple[_Point, _Point]) -> bool:
    """Whether this round cut the bracket by less than half of its logarithmic length."""
    if before[0] is None or before[1] is None or now[0] is None or now[1] is None:
        return False
    return (now[1][0] / now[0][0]) ** 2 > before[1][0] / before[0][0]


def _next_scale(dear: _Point, cheap: _Point, aim: float, *, halve: bool) -> float:
    """Return the scale to try next.

    Extrapolate while one side of the bracket is missing; otherwise interpolate in logarithms.
    """
    if cheap is None or dear is None:
        scale, price = dear or cheap or (math.nan, math.nan)
        # ε falls at least like 1/m, so this step reaches the aim or nearly does.
        return scale * min(max(price / aim, 0.25), 4.0)
    share = 0.5
    if not halve and cheap[1] > 0:
        share = math.log(dear[1] / aim) / math.log(dear[1] / cheap[1])
    return float(dear[0] * (cheap[0] / dear[0]) ** share)
