"""The accountants: ε of a ledger by RDP and by PLD, through dp-accounting.

Steps with the same rate and joint multiplier are merged first. Each kind of step is one Gaussian on
a Poisson sample, composed with itself. The grid of the PLD is chosen so that its ε exceeds the
exact one by a small fraction, and the rounding of double precision is subtracted from δ; see
`evenclip.mechanism.accounting` for the definitions and the citations.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from evenclip import check
from evenclip.mechanism.ledger import Ledger

if TYPE_CHECKING:
    import dp_accounting

__all__ = [
    "COARSE",
    "FINE",
    "LEAST_MULTIPLIER",
    "StepKind",
    "event_of",
    "few_kinds",
    "least_delta",
    "lost_delta",
    "pld",
    "rdp",
    "step_kinds",
]

# Largest excess of the PLD's ε over the exact ε due to the grid, as a fraction of ε: for a final
# result, and during a search.
FINE, COARSE = 1e-4, 1e-2
LEAST_MULTIPLIER = 1e-3
"""Smallest joint multiplier with an ε: a single step of a smaller one costs more than 500,000."""
# Most grid points for one step. dp-accounting takes about 4 µs per point and direction.
_MOST_POINTS = 150_000
# dp-accounting truncates the noise at this many standard deviations; the tail has mass e⁻⁵⁰.
_CUT = 10.0
# math.exp and math.expm1 overflow slightly above this exponent.
_LARGEST_EXPONENT = 700.0
# δ that double precision may lose per convolved step. The largest observed loss of the transform is
# two units of 2⁻⁵².
_ROUNDING = 2.0**-49
# Smallest rate, and largest multiplier, that the accountants tell from 0 and infinity.
_LEAST_RATE, _MOST_MULTIPLIER = 1e-9, 1e6
# Most kinds of steps, by multiplier, that are convolved: each takes about 0.1 s.
_MOST_KINDS = 32


class StepKind(NamedTuple):
    """`steps` steps, each one Gaussian of this multiplier on a sample of rate q."""

    q: float
    multiplier: float
    steps: int


StepKinds = tuple[StepKind, ...]


def step_kinds(ledger: Ledger) -> StepKinds:
    """Merge the equal steps of a private ledger, and drop those that cost nothing."""
    ledger.check()
    if ledger.steps > check.MOST_STEPS:
        raise ValueError(
            f"The ledger has {ledger.steps} steps; ε is computed for at most {check.MOST_STEPS}: "
            "train for fewer steps."
        )
    steps: Counter[tuple[float, float]] = Counter()
    for entry in ledger.entries:
        if entry.q is None:
            raise ValueError("The ledger has steps whose batches were not Poisson samples.")
        # ε grows with q and falls with m, so both limits are upper bounds where arithmetic ends.
        q = max(float(entry.q), _LEAST_RATE) if entry.q > 0 else 0.0
        m = entry.joint if entry.joint == math.inf else min(entry.joint, _MOST_MULTIPLIER)
        steps[q, float(m)] += int(entry.steps)
    return tuple(
        StepKind(q, m, n) for (q, m), n in steps.items() if q > 0 and m < math.inf and n > 0
    )


def few_kinds(ledger: Ledger) -> StepKinds:
    """Return the kinds of a ledger with at most `_MOST_KINDS` multipliers for each rate.

    If the noise of a rule changes with the step, there may be as many multipliers as steps. Nearly
    equal ones are rounded down to the smallest of them, so that ε only grows.
    """
    kinds = step_kinds(ledger)
    rates = dict.fromkeys(kind.q for kind in kinds)
    return tuple(
        kind for q in rates for kind in _rounded_down([kind for kind in kinds if kind.q == q])
    )


def _rounded_down(kinds: list[StepKind]) -> list[StepKind]:
    """Return steps of one rate with few multipliers, none of them larger than it was."""
    if len(kinds) <= _MOST_KINDS:
        return kinds
    least, most = (pick(kind.multiplier for kind in kinds) for pick in (min, max))
    width = math.log(most / least) / _MOST_KINDS * (1 + 1e-9)  # the largest is in the last bin
    bins: dict[int, list[StepKind]] = {}
    for kind in sorted(kinds, key=lambda kind: kind.multiplier):
        bins.setdefault(int(math.log(kind.multiplier / least) / width), []).append(kind)
    return [
        StepKind(some[0].q, some[0].multiplier, sum(kind.steps for kind in some))
        for some in bins.values()
    ]


def lost_delta(kinds: StepKinds) -> float:
    """Return the δ that double precision may lose."""
    return _ROUNDING * sum(_roundings(kind) for kind in kinds)


def least_delta(steps: int) -> float:
    """Return the δ that double precision may lose in steps with sampling."""
    return _ROUNDING * steps


def _roundings(kind: StepKind) -> int:
    """Count its discretised steps; Gaussians without sampling are composed exactly first."""
    return 1 if kind.q == 1 else kind.steps


def _variance(kind: StepKind) -> float:
    """Variance of its privacy loss, to first order in q; overestimated for small m."""
    per_step = kind.multiplier**-2
    if kind.q < 1:
        per_step = kind.q**2 * math.expm1(min(per_step, _LARGEST_EXPONENT))
    return kind.steps * per_step


def _width(kind: StepKind) -> float:
    """Length of the interval of discretised losses."""
    if kind.q == 1:
        return 2 * _CUT * math.sqrt(kind.steps) / kind.multiplier
    # Without sampling, the loss is truncated at ±end.
    end = (_CUT + 0.5 / kind.multiplier) / kind.multiplier
    top = math.log1p(kind.q * math.expm1(min(end, _LARGEST_EXPONENT))) + max(
        end - _LARGEST_EXPONENT, 0.0
    )
    return top - math.log1p(kind.q * math.expm1(-end))


# --- the accountants of dp-accounting -----------------------------------------------------------


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


def event_of(kinds: StepKinds) -> dp_accounting.DpEvent:
    """Compose all kinds into one event."""
    library = _library()
    return library.ComposedDpEvent([_composed(library, kind) for kind in kinds])


def _composed(library: Any, kind: StepKind) -> dp_accounting.DpEvent:
    """Return one kind as an event."""
    gaussian = library.GaussianDpEvent(kind.multiplier)
    step = gaussian if kind.q == 1 else library.PoissonSampledDpEvent(kind.q, gaussian)
    return library.SelfComposedDpEvent(step, kind.steps)


def rdp(ledger: Ledger, deltas: Sequence[float]) -> list[float]:
    """Return ε at each δ by RDP, at the default orders of dp-accounting."""
    kinds = few_kinds(ledger)
    epsilons = [epsilon for epsilon, _ in _rdp_optima(kinds, tuple(deltas))]
    if any(epsilon <= 0 for epsilon in epsilons) and kinds:
        # Divergences far below 1e-16 can round to a negative number, but a release never costs 0.
        return [max(both) for both in zip(epsilons, pld(ledger, deltas), strict=True)]
    return epsilons


@lru_cache(maxsize=256)
def _rdp_optima(kinds: StepKinds, deltas: tuple[float, ...]) -> tuple[tuple[float, float], ...]:
    """Return (ε, the optimal order) at each δ.

    (α − 1)·ε(α) is convex in the order α, so ε has a single minimum: whole orders, which take a
    quarter of the time, show where it is, and fractional ones are tried beside it only.
    """
    every = _library().rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS
    whole = tuple(order for order in every if order == every[0] or float(order).is_integer())
    found = list(_rdp_at(whole, kinds, deltas))
    for i, (delta, (_, best)) in enumerate(zip(deltas, found, strict=True)):
        near = tuple(order for order in every if abs(order - best) < 1)
        if len(near) > 1:
            found[i] = _rdp_at(near, kinds, (delta,))[0]
    return tuple(found)


def _rdp_at(
    orders: tuple[float, ...], kinds: StepKinds, deltas: tuple[float, ...]
) -> tuple[tuple[float, float], ...]:
    """Return (ε, the optimal order) at each δ, for these orders."""
    accountant = _library().rdp.RdpAccountant(orders)
    with _without_order_messages():
        accountant.compose(event_of(kinds))
    optima = [accountant.get_epsilon_and_optimal_order(delta) for delta in deltas]
    return tuple((float(epsilon), float(order)) for epsilon, order in optima)


def pld(
    ledger: Ledger,
    deltas: Sequence[float],
    tolerance: float = FINE,
    grid: Sequence[float] | None = None,
) -> list[float]:
    """Return ε at each δ by PLD.

    The result is pessimistic in the grid (the default of dp-accounting) and in its rounding.

    Args:
        ledger: the releases.
        deltas: each δ.
        tolerance: largest excess of ε due to the grid, as a fraction of ε.
        grid: the δ for which the grid is chosen; by default `deltas`. With one grid for several
            calls, the steps are convolved once.
    """
    chosen_for = tuple(deltas if grid is None else grid)
    return list(_pld_of(few_kinds(ledger), tuple(deltas), tolerance, chosen_for))


@lru_cache(maxsize=256)  # a comparison needs the same results several times
def _pld_of(
    kinds: StepKinds, deltas: tuple[float, ...], tolerance: float, grid: tuple[float, ...]
) -> tuple[float, ...]:
    if not kinds:
        return tuple(0.0 for _ in deltas)
    lost = lost_delta(kinds)
    if min(deltas) <= lost:
        raise ValueError(
            f"delta is {min(deltas):g}; PLD in double precision is a bound only above {lost:.1e} "
            "for these steps: give a larger delta, or use the accountant 'rdp'."
        )
    accountant = _convolved(kinds, _interval(kinds, grid, tolerance))
    return tuple(float(accountant.get_epsilon(delta - lost)) for delta in deltas)


@lru_cache(maxsize=8)  # some megabytes each
def _convolved(kinds: StepKinds, interval: float) -> Any:
    """Return the PLD accountant of these steps, on a grid of this spacing."""
    accountant = _library().pld.PLDAccountant(value_discretization_interval=interval)
    accountant.compose(event_of(kinds))
    return accountant


def _interval(kinds: StepKinds, deltas: tuple[float, ...], tolerance: float) -> float:
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
    roundings = sum(_roundings(kind) for kind in kinds)
    by_variance = math.sqrt(12 * tolerance * sum(_variance(kind) for kind in kinds) / roundings)
    by_order = [
        math.sqrt(8 * tolerance * epsilon / (order * roundings))
        for epsilon, order in _rdp_optima(kinds, deltas)
        if epsilon > 0
    ]
    return max(min([by_variance, *by_order]), max(_width(kind) for kind in kinds) / _MOST_POINTS)


@contextlib.contextmanager
def _without_order_messages() -> Iterator[None]:
    """Suppress dp-accounting's message that an order did not converge and was excluded.

    Excluding an order only makes RDP's ε larger.
    """
    logger = logging.getLogger("absl")
    logger.addFilter(_is_other_message)
    try:
        yield
    finally:
        logger.removeFilter(_is_other_message)


def _is_other_message(record: logging.LogRecord) -> bool:
    """Return whether the message is not about an excluded order."""
    return "Excluding this order" not in str(record.msg)
