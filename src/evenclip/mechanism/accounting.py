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
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from evenclip.mechanism.release import Ledger

if TYPE_CHECKING:
    import dp_accounting

__all__ = [
    "curve",
    "epsilon",
    "epsilon_without_amplification",
    "event",
    "pld",
    "rounded_up",
    "smallest_delta",
]

# Largest excess of the PLD's ε over the exact ε due to the grid, as a fraction of ε: for a final
# result, and during a search.
FINE, COARSE = 1e-4, 1e-2
# Most grid points for one step. dp-accounting takes about 4 µs per point and direction.
_MOST_POINTS = 150_000
# dp-accounting truncates the noise at this many standard deviations; the tail has mass e⁻⁵⁰.
_CUT = 10.0
# math.exp and math.expm1 overflow slightly above this exponent.
_LARGEST_EXPONENT = 700.0
# δ that double precision may lose per convolved step. The largest observed loss of the transform is
# two units of 2⁻⁵².
_ROUNDING = 2.0**-49
# Most kinds of steps, by multiplier, that are convolved: each takes about 0.1 s.
_MOST_KINDS = 32


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

    >>> from evenclip.mechanism.release import Entry
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

    >>> from evenclip.mechanism.release import Entry
    >>> ledger = Ledger([Entry(1.0, (("gradient", 1.0),), 1)])
    >>> [(delta, round(rdp, 2), round(pld, 2)) for delta, rdp, pld in curve(ledger, [0.12693674])]
    [(0.12693674, 1.5, 1.0)]
    """
    deltas = list(deltas)
    for delta in deltas:
        check_delta(delta)
    if not ledger.is_private:
        return [(delta, None, None) for delta in deltas]
    return list(zip(deltas, _rdp(ledger, deltas), pld(ledger, deltas), strict=True))


def epsilon_without_amplification(ledger: Ledger, delta: float) -> float | None:
    """Return ε at δ as if every record had been in every batch (q = 1).

    This is the guarantee that remains if the sampling were known. It is exact: Gaussians compose to
    one Gaussian with the joint multiplier of all steps, m = (Σ_t m_t⁻²)^(-1/2), and with μ = 1/m
    its δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) (Balle, Wang 2018, arXiv:1805.06530, Eq. 6).

    >>> from evenclip.mechanism.release import Entry
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

    >>> from evenclip.mechanism.release import Entry
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


def _few_parts(ledger: Ledger) -> _Parts:
    """Return the parts of a ledger with at most `_MOST_KINDS` multipliers for each rate.

    If the noise of a rule changes with the step, there may be as many multipliers as steps. Nearly
    equal ones are rounded down to the smallest of them, so that ε only grows.
    """
    parts = _parts(ledger)
    rates = dict.fromkeys(part.q for part in parts)
    return tuple(
        kind for q in rates for kind in _rounded_down([part for part in parts if part.q == q])
    )


def _rounded_down(parts: list[_Part]) -> list[_Part]:
    """Return steps of one rate with few multipliers, none of them larger than it was."""
    if len(parts) <= _MOST_KINDS:
        return parts
    least, most = (pick(part.multiplier for part in parts) for pick in (min, max))
    width = math.log(most / least) / _MOST_KINDS * (1 + 1e-9)  # the largest is in the last bin
    bins: dict[int, list[_Part]] = {}
    for part in sorted(parts, key=lambda part: part.multiplier):
        bins.setdefault(int(math.log(part.multiplier / least) / width), []).append(part)
    return [
        _Part(some[0].q, some[0].multiplier, sum(part.steps for part in some))
        for some in bins.values()
    ]


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
    parts = _few_parts(ledger)
    epsilons = [epsilon for epsilon, _ in _rdp_optima(parts, tuple(deltas))]
    if any(epsilon <= 0 for epsilon in epsilons) and parts:
        # Divergences far below 1e-16 can round to a negative number, but a release never costs 0.
        return [max(both) for both in zip(epsilons, pld(ledger, deltas), strict=True)]
    return epsilons


@lru_cache(maxsize=256)
def _rdp_optima(parts: _Parts, deltas: tuple[float, ...]) -> tuple[tuple[float, float], ...]:
    """Return (ε, the optimal order) at each δ."""
    accountant = _library().rdp.RdpAccountant()
    with _without_news_of_orders():
        accountant.compose(_event(parts))
    optima = [accountant.get_epsilon_and_optimal_order(delta) for delta in deltas]
    return tuple((float(epsilon), float(order)) for epsilon, order in optima)


def pld(ledger: Ledger, deltas: Sequence[float], tolerance: float = FINE) -> list[float]:
    """Return ε at each δ by PLD.

    The result is pessimistic in the grid (the default of dp-accounting) and in its rounding.
    """
    return list(_pld_of(_few_parts(ledger), tuple(deltas), tolerance))


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
    "pld": pld,
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
