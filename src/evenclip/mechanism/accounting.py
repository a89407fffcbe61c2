"""Accounting: from the ledger of releases to ε.

Every step of the ledger is ONE sampled Gaussian mechanism, whatever it released: all its releases
see the same Poisson batch, so they count as one release with the joint multiplier (see
`evenclip.mechanism.release`), sampled once. With q the Poisson rate and m the joint multiplier, the
worst pair of neighbours (add or remove one record) is

    P = (1 − q)·N(0, m²) + q·N(1, m²)   against   Q = N(0, m²),   in both directions,

and steps compose. Two accountants put a number on that, both through dp-accounting, and both are
upper bounds:

* RDP: the Rényi divergences of (P, Q) add up over the steps and are then turned into (ε, δ). Quick
  and a little loose. Mironov, Talwar, Zhang 2019, "Rényi differential privacy of the sampled
  Gaussian mechanism", arXiv:1908.10530.
* PLD: the distribution of the privacy loss ln P/Q, on a grid, convolved over the steps. Tight.
  Koskela, Jälkö, Honkela 2020, "Computing tight differential privacy guarantees using FFT",
  arXiv:1906.03049; Gopi, Lee, Wutschitz 2021, "Numerical composition of differential privacy",
  arXiv:2106.02848; Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, "Connect the dots: tighter
  discrete approximations of privacy loss distributions", arXiv:2207.04380, whose discretisation is
  used here: it never rounds a cost down.

Where the ledger has no ε (something was released in clear, or a batch was not a Poisson sample),
the answer is None and never a number.
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

# How much larger than the exact ε the grid of the PLD may make it, as a fraction of ε: for an
# answer, and for a search.
_FINE, _COARSE = 1e-4, 1e-2
# Points of the grid of one step. dp-accounting takes about 4 µs for each of them, in each of the
# two directions.
_MOST_POINTS = 150_000
# dp-accounting cuts the noise off at this many standard deviations, where a mass of e⁻⁵⁰ is left.
_CUT = 10.0
# math.exp and its kin overflow a little beyond.
_LARGEST_EXPONENT = 700.0
# δ that double precision may lose per convolved step: the transform was seen to lose up to two
# units of 2⁻⁵².
_ROUNDING = 2.0**-49
# Calibration ends with an ε in [1 − 5e-4, 1 − 1e-5] times the target: the upper margin leaves room
# for whoever computes the multipliers in another order and rounds differently.
_WINDOW, _MARGIN = 5e-4, 1e-5
# Below this joint multiplier one step alone costs an ε of half a million: nobody means that.
_LEAST_MULTIPLIER = 1e-3
# The smallest ε that can be asked for: below it, the accountants' arithmetic cannot tell it from 0.
_LEAST_EPSILON = 1e-6
_MOST_ROUNDS = 100


def event(ledger: Ledger) -> dp_accounting.DpEvent:
    """What the ledger holds, as an event of dp-accounting: the one place where such an event is
    made.

    Steps that are alike are taken together, wherever they stand (composition does not depend on the
    order); steps that released nothing cost nothing; q = 1 is a Gaussian without sampling. Every
    number is a float or an int of Python's own: dp-accounting 0.6 drops others from composed events
    without a word.

    >>> ledger = Ledger()
    >>> ledger.write(0.01, {"gradient": 3, "count": 4})
    >>> event(ledger).events[0].event.event
    GaussianDpEvent(noise_multiplier=2.4)

    Raises:
        ValueError: if the ledger has no ε.
    """
    if not ledger.is_private:
        raise ValueError(
            "This ledger has no ε: something was released in clear, or a batch was not a Poisson "
            "sample. "
            "`epsilon` answers None for it; to have an ε, add noise to every release and sample "
            "by Poisson."
        )
    return _event(_parts(ledger))


def epsilon(ledger: Ledger, delta: float, accountant: str = "pld") -> float | None:
    """ε at δ of everything in the ledger, by "rdp" or "pld"; None where there is none; 0 where
    nothing was released.

    Guarantee: an upper bound, for adding or removing one record. PLD is within about 1e-4·ε of the
    exact value (some per cent where q is 1e-5 or less) and needs δ above `smallest_delta`.

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
    """(δ, ε by RDP, ε by PLD) for each δ; both are None where the ledger has no ε.

    >>> ledger = Ledger([Entry(1.0, (("gradient", 1.0),), 1)])  # one Gaussian: δ(1) = Φ(-1/2) − e·Φ(-3/2) = 0.1269
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
    """ε at δ if every record had been in every batch, q = 1: what is left if the sampling were
    known.

    Exact: Gaussians compose to one Gaussian with the joint multiplier of all steps, m = (Σ_t
    m_t⁻²)^(-1/2), and with μ = 1/m its δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) (Balle, Wang 2018,
    arXiv:1805.06530, Eq. 6).

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
    """The smallest s for which `steps` steps of rate q with the multipliers {name: s·m} cost at
    most ε at δ, by PLD.

    Guarantee: the ε of that ledger is never above the target, and at most 0.05 % below it.

    >>> s = scale_for({"gradient": 1.0, "count": 10.0}, epsilon=3.0, delta=1e-6, q=1 / 92, steps=1840)
    >>> ledger = Ledger([Entry(1 / 92, (("gradient", s), ("count", 10 * s)), 1840)])
    >>> 0.9995 * 3.0 <= epsilon(ledger, 1e-6) <= 3.0
    True

    Raises:
        ValueError: if a value is out of range, or no multiplier is the smallest one because even
            without noise the target holds (δ is at least the probability that a record is sampled
            at all).
    """
    check.positive(epsilon=epsilon)
    check_delta(delta)
    check.fraction(q=q)
    check.natural(steps=steps)
    check.positive(**multipliers)
    if epsilon < _LEAST_EPSILON:
        raise ValueError(
            f"epsilon is {epsilon:g}; below {_LEAST_EPSILON:g} it cannot be told from 0, and its "
            "noise would leave "
            "nothing to learn: give a larger epsilon."
        )
    unit = joint_multiplier(multipliers.values())
    if unit == math.inf:
        raise ValueError("multipliers is empty; give the multiplier of at least one release.")
    sampled = 1.0 if q == 1 else -math.expm1(steps * math.log1p(-q))
    if sampled <= delta:
        raise ValueError(
            f"delta is {delta:g}, and {steps} steps at q = {q:g} sample a record with probability "
            f"{sampled:.3g} only: "
            "no noise is needed for any ε, which protects nobody; give a smaller delta."
        )
    scale = _first_guess(epsilon, delta, q, steps) / unit
    for tolerance in (_COARSE, _FINE):
        cost = partial(_cost, multipliers, q, int(steps), delta, tolerance)
        scale = _solve(cost, epsilon, scale, least=_LEAST_MULTIPLIER / unit)
    return scale


def calibrate(rule: AnyRule, *, epsilon: float, delta: float, q: float, steps: int) -> AnyRule:
    """The rule with all its noise scaled so that `steps` steps at rate q cost ε at δ, its counts
    included.

    Guarantee: by PLD, never above the target and at most 0.05 % below it.

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
    return rule.scaled(
        scale_for(rule.multipliers(), epsilon=epsilon, delta=delta, q=q, steps=steps)
    )


def gradient_multiplier(joint: float, count: float, s: float = 1.0) -> float:
    """σ_grad = (σ⁻² − s²·σ_count⁻²)^(-1/2): with it, gradient and count together cost what σ =
    `joint` alone costs.

    `count` is the count's noise standard deviation, and s its sensitivity: 1, or ½ for the centred
    count.

    >>> round(gradient_multiplier(2.4, 4.0), 9)
    3.0

    Raises:
        ValueError: if count ≤ s·joint, so that the count alone costs as much.
    """
    check.positive(joint=joint, count=count, s=s)
    if count <= s * joint:
        raise ValueError(
            f"count is {count}; it must be above s·joint = {s * joint:g}, because the count alone "
            "costs as much as the "
            "whole already: give the count more noise."
        )
    return float((joint**-2 - (s / count) ** 2) ** -0.5)


def rounded_up(value: float, digits: int = 4) -> str:
    """The value to so many digits and never less: a printed ε is not below the true one, nor a
    printed σ below its own.

    >>> rounded_up(3.13501), rounded_up(0.25), rounded_up(12345.6)
    ('3.136', '0.25', '12350')
    """
    up = Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(value)
    return f"{up.normalize():f}"


def smallest_delta(ledger: Ledger) -> float:
    """The δ down to which PLD in double precision is a bound: 2⁻⁴⁹ for each step; only a δ above it
    is answered.

    dp-accounting convolves by Fourier transform and does not count its rounding: for δ ≤ 1e-12 it
    can fall short of the exact ε. Here that much is taken off δ before the question is put, which
    keeps the answer an upper bound.

    >>> smallest_delta(Ledger([Entry(0.01, (("gradient", 1.0),), 1024)])) == 2.0**-39
    True
    """
    return _lost(_parts(ledger))


def default_delta(n: int) -> float:
    """The largest power of ten below 1/(2n): δ where none is given.

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


# The parts of a ledger
# --------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """`steps` steps, each one Gaussian of this multiplier on a sample of rate q."""

    q: float
    multiplier: float
    steps: int


_Parts = tuple[_Part, ...]


def _parts(ledger: Ledger) -> _Parts:
    """The steps of a private ledger that cost anything, equal ones together."""
    steps: Counter[tuple[float, float]] = Counter()
    for entry in ledger.entries:
        if entry.q is None or not 0 <= entry.q <= 1:
            raise ValueError(
                f"The ledger has a step of rate q = {entry.q}; a Poisson rate lies between 0 and 1."
            )
        steps[float(entry.q), float(entry.joint)] += int(entry.steps)
    return tuple(_Part(q, m, n) for (q, m), n in steps.items() if q > 0 and m < math.inf and n > 0)


def _lost(parts: _Parts) -> float:
    """What double precision may lose of δ."""
    return _ROUNDING * sum(_roundings(part) for part in parts)


def _roundings(part: _Part) -> int:
    """How many times its loss is put on the grid: plain Gaussians are taken together before."""
    return 1 if part.q == 1 else part.steps


def _variance(part: _Part) -> float:
    """Variance of its privacy loss, to first order in q; too large where m is small."""
    per_step = part.multiplier**-2
    if part.q < 1:
        per_step = part.q**2 * math.expm1(min(per_step, _LARGEST_EXPONENT))
    return part.steps * per_step


def _width(part: _Part) -> float:
    """Length of the interval in which the loss lies that is put on the grid."""
    if part.q == 1:
        return 2 * _CUT * math.sqrt(part.steps) / part.multiplier
    end = (
        _CUT + 0.5 / part.multiplier
    ) / part.multiplier  # without sampling, the loss is cut off at ±end
    top = math.log1p(part.q * math.expm1(min(end, _LARGEST_EXPONENT))) + max(
        end - _LARGEST_EXPONENT, 0.0
    )
    return top - math.log1p(part.q * math.expm1(-end))


# The accountants
# --------------------------------------------------------------------------------------------------


def _library() -> Any:
    """dp_accounting, imported when first used: the core of the package works without it."""
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
    """All of it as one event."""
    library = _library()
    return library.ComposedDpEvent([_composed(library, part) for part in parts])


def _composed(library: Any, part: _Part) -> dp_accounting.DpEvent:
    """One part as an event."""
    gaussian = library.GaussianDpEvent(part.multiplier)
    step = gaussian if part.q == 1 else library.PoissonSampledDpEvent(part.q, gaussian)
    return library.SelfComposedDpEvent(step, part.steps)


def _rdp(ledger: Ledger, deltas: Sequence[float]) -> list[float]:
    """ε at each δ by RDP, at the default orders of dp-accounting."""
    parts = _parts(ledger)
    found = [epsilon for epsilon, _ in _rdp_optima(parts, tuple(deltas))]
    if any(epsilon <= 0 for epsilon in found) and parts:
        # Divergences far below 1e-16 round to less than nothing, and no ε is 0 where something was
        # released.
        return [
            max(epsilon, exact) for epsilon, exact in zip(found, _pld(ledger, deltas), strict=True)
        ]
    return found


@lru_cache(maxsize=256)
def _rdp_optima(parts: _Parts, deltas: tuple[float, ...]) -> tuple[tuple[float, float], ...]:
    """(ε, the order that gives it) at each δ."""
    accountant = _library().rdp.RdpAccountant()
    with _without_news_of_orders():
        accountant.compose(_event(parts))
    optima = [accountant.get_epsilon_and_optimal_order(delta) for delta in deltas]
    return tuple((float(epsilon), float(order)) for epsilon, order in optima)


def _pld(ledger: Ledger, deltas: Sequence[float], tolerance: float = _FINE) -> list[float]:
    """ε at each δ by PLD: pessimistic on the grid (the default of dp-accounting) and in its
    rounding.
    """
    return list(_pld_of(_parts(ledger), tuple(deltas), tolerance))


@lru_cache(maxsize=256)  # half a second each, and a comparison asks for the same ones several times
def _pld_of(parts: _Parts, deltas: tuple[float, ...], tolerance: float) -> tuple[float, ...]:
    if not parts:
        return tuple(0.0 for _ in deltas)
    lost = _lost(parts)
    if min(deltas) <= lost:
        raise ValueError(
            f"delta is {min(deltas):g}; PLD in double precision is a bound only above {lost:.1e} "
            "for these "
            "steps: give a larger delta, or ask the accountant 'rdp'."
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
    """The spacing h of the grid of losses that makes ε too large by about `tolerance`·ε, and no
    finer than is quick.

    Connecting the dots moves each loss to the two grid points around it. Over N steps that adds at
    most N·h²/4 to the variance of the loss (N·h²/6 on average), hence α·N·h²/8 to ε, where α is the
    order at which RDP is tightest. Two choices of h follow: from RDP's ε and α, and from the
    relative growth of the variance. RDP knows heavy tails (small multipliers), the variance knows
    an ε so small that its α exceeds the orders of the accountant: the smaller h is right in both. A
    fixed h is not: 1e-4 is coarser than a whole step's loss for a target of ε = 0.01, and gives a
    million points for one of ε = 100.
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
    """Keep one log message back: that an order did not converge and was left out, which only makes
    RDP's ε larger.
    """
    logger = logging.getLogger("absl")
    logger.addFilter(_is_news)
    try:
        yield
    finally:
        logger.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether the record is about anything else than an order left out."""
    return "Excluding this order" not in str(record.msg)


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """ε at δ of the Gaussian mechanism of multiplier 1/μ, exact."""
    if math.erf(mu / math.sqrt(8)) <= delta:  # δ(0), the total variation distance
        return 0.0
    from scipy.optimize import brentq

    # δ(ε) ≤ Φ(μ/2 − ε/μ) ≤ exp(−(ε/μ − μ/2)²/2)/2 < δ at the upper end.
    most = mu**2 / 2 + mu * math.sqrt(-2 * math.log(delta))
    return float(brentq(_log_gaussian_delta, 0.0, most, args=(mu, math.log(delta))))


def _log_gaussian_delta(epsilon: float, mu: float, minus: float = 0.0) -> float:
    """The logarithm of δ(ε) for the Gaussian mechanism of multiplier 1/μ, less `minus`; e^ε itself
    would overflow.
    """
    from scipy.special import log_ndtr

    log_p = log_ndtr(mu / 2 - epsilon / mu)
    log_q = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(log_p) + math.log(-math.expm1(log_q - log_p)) - minus


# Calibration
# --------------------------------------------------------------------------------------------------


_Point = tuple[float, float] | None  # (scale, cost)


def _cost(
    multipliers: Mapping[str, float],
    q: float,
    steps: int,
    delta: float,
    tolerance: float,
    scale: float,
) -> float:
    """ε by PLD of `steps` steps with the multipliers times `scale`."""
    scaled = tuple((name, scale * float(m)) for name, m in multipliers.items())
    return _pld(Ledger([Entry(float(q), scaled, steps)]), [delta], tolerance)[0]


def _first_guess(epsilon: float, delta: float, q: float, steps: int) -> float:
    """A joint multiplier of about the right size: steps as one Gaussian of μ² = T·q²·(e^(m⁻²) − 1),
    the limit of many.

    μ solves ε = μ²/2 + μ·√(2 ln 1/δ), an upper bound of the Gaussian's ε.
    """
    tail = -2 * math.log(delta)
    mu = math.sqrt(tail + 2 * epsilon) - math.sqrt(tail)
    return float(math.log1p((mu / q) ** 2 / steps) ** -0.5)


def _solve(cost: Callable[[float], float], target: float, scale: float, least: float) -> float:
    """A scale ≥ `least` whose cost, which falls as the scale grows, lies just below the target;
    starts at `scale`.
    """
    aim = target * (1 - _WINDOW / 2)
    dear: _Point = None  # above the aim, and
    cheap: _Point = None  # not above it: the closest ones so far
    for _ in range(_MOST_ROUNDS):
        if scale < least:
            raise ValueError(
                f"epsilon is {target:g}; it is reached with next to no noise (a multiplier below "
                f"{_LEAST_MULTIPLIER:g}), which is no privacy: give a smaller epsilon."
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
    """Whether the bracket lost less than half of its length, in logarithms, in this round."""
    if before[0] is None or before[1] is None or now[0] is None or now[1] is None:
        return False
    return (now[1][0] / now[0][0]) ** 2 > before[1][0] / before[0][0]


def _next_scale(dear: _Point, cheap: _Point, aim: float, *, halve: bool) -> float:
    """Where to look next: outside while one side is missing, else on the line between both, in
    logarithms.
    """
    if cheap is None or dear is None:
        scale, price = dear or cheap or (math.nan, math.nan)
        # ε falls at least like 1/m, so this step goes beyond the aim or nearly so.
        return scale * min(max(price / aim, 0.25), 4.0)
    share = 0.5
    if not halve and cheap[1] > 0:
        share = math.log(dear[1] / aim) / math.log(dear[1] / cheap[1])
    return float(dear[0] * (cheap[0] / dear[0]) ** share)
