"""Accounting: from the ledger of releases to ε.

Every step of the ledger is ONE sampled Gaussian mechanism. All releases of a step see the same
Poisson batch, so they count as one release with the joint multiplier (see
`evenclip.mechanism.entry`), sampled once. With q the Poisson rate and m the joint multiplier, the
worst pair of neighbours (add or remove one record) is

    P = (1 − q)·N(0, m²) + q·N(1, m²)   against   Q = N(0, m²),   in both directions,

and steps compose. Two accountants compute ε, both through dp-accounting. Both are upper bounds:

* RDP: the Rényi divergences of (P, Q) add up over the steps and are converted to (ε, δ). It is fast
  and slightly loose. Mironov, Talwar, Zhang 2019, "Rényi differential privacy of the sampled
  Gaussian mechanism", arXiv:1908.10530.
* PLD: the distribution of the privacy loss ln P/Q, on a grid, is convolved over the steps. It is
  tight. Koskela, Jälkö, Honkela 2020, "Computing tight differential privacy guarantees using FFT",
  arXiv:1906.03049; Gopi, Lee, Wutschitz 2021, "Numerical composition of differential privacy",
  arXiv:2106.02848; Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, "Connect the dots: tighter
  discrete approximations of privacy loss distributions", arXiv:2207.04380, whose discretisation is
  used here. It never rounds a cost down.

Both assume ideal noise. If the ledger says how many numbers were drawn, every ε stated here is that
of the noise as it was drawn, see `evenclip.mechanism.correction`; ledgers made by hand have ideal
noise.

If the ledger has no ε (a value was released in clear, a batch was not a Poisson sample, a
multiplier is below 0.001, or ε is too large for the sampler of the noise), the result is None and
never a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_CEILING, Context
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from evenclip import check
from evenclip.arguments import check_kinds, plain, shown
from evenclip.mechanism.accountants import (
    LEAST_MULTIPLIER,
    StepKind,
    event_of,
    least_delta,
    lost_delta,
    pld,
    rdp,
    step_kinds,
)
from evenclip.mechanism.correction import Real, SamplerError, real_epsilon
from evenclip.mechanism.ledger import Ledger

if TYPE_CHECKING:
    import dp_accounting

__all__ = [
    "curve",
    "epsilon",
    "epsilon_without_amplification",
    "event",
    "real",
    "rounded_up",
    "smallest_delta",
]


_MOST_DIGITS = 1000


def _by_rdp(ledger: Ledger, grid: Sequence[float], delta: float) -> float:
    """Return the ideal ε by RDP, which needs no grid."""
    del grid
    return rdp(ledger, [delta])[0]


def _by_pld(ledger: Ledger, grid: Sequence[float], delta: float) -> float:
    """Return the ideal ε by PLD, on the grid for these δ."""
    return pld(ledger, [delta], grid=grid)[0]


# name -> (ledger, every δ that is needed, δ') -> ideal ε
_ACCOUNTANTS: Mapping[str, Callable[[Ledger, Sequence[float], float], float]] = {
    "rdp": _by_rdp,
    "pld": _by_pld,
}


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
    check_kinds(event, locals())
    if not ledger.is_private:
        raise ValueError(
            "This ledger has no ε: a value was released in clear, or a batch was not a Poisson "
            "sample. `epsilon` returns None for it. To obtain an ε, add noise to every release and "
            "sample by Poisson."
        )
    return event_of(step_kinds(ledger))


def epsilon(ledger: Ledger, delta: float, accountant: str = "pld") -> float | None:
    """Return ε at δ of everything in the ledger, by the accountant "rdp" or "pld".

    Return None if the ledger has no ε, and 0 if nothing was released. Guarantee: an upper bound,
    for adding or removing one record, of the noise as it was drawn. PLD is within about 1e-4·ε of
    the exact value (some per cent where q is 1e-5 or less) and needs δ above `smallest_delta`.

    >>> from evenclip.mechanism.ledger import Entry
    >>> steps = 20 * 92  # 20 epochs on Adult: (3.41, 3.10) at δ = 1e-6
    >>> ledger = Ledger([Entry(1 / 92, (("gradient", 1.0),), steps)])
    >>> round(epsilon(ledger, 1e-6, "rdp"), 2), round(epsilon(ledger, 1e-6), 2)
    (3.41, 3.1)
    >>> epsilon(Ledger([Entry(1 / 92, (("gradient", 0.0),), steps)]), 1e-6) is None
    True

    Raises:
        ValueError: if δ is not between 0 and 1, is too small for PLD, or the accountant is unknown.
    """
    check_kinds(epsilon, locals())
    return _stated(real(ledger, delta, accountant))


def real(ledger: Ledger, delta: float, accountant: str = "pld") -> Real | None:
    """Return ε as `epsilon` does, with the ε_s and δ_s of the sampler that it holds."""
    check_kinds(real, locals())
    check_delta(delta)
    delta = plain(delta)
    if accountant not in _ACCOUNTANTS:
        raise ValueError(
            f"accountant is {accountant!r}; it must be one of {', '.join(_ACCOUNTANTS)}."
        )
    ledger.check()
    return _real(ledger, delta, accountant, [delta]) if ledger.is_private else None


def _real(ledger: Ledger, delta: float, accountant: str, grid: Sequence[float]) -> Real | None:
    """Return the ε of a private ledger at δ, on the grid for these δ."""
    kinds = step_kinds(ledger)
    if _is_too_much(kinds):
        return None
    least = lost_delta(kinds) if accountant == "pld" else 0.0
    ideal = partial(_ACCOUNTANTS[accountant], ledger, grid)
    return real_epsilon(ideal, delta, SamplerError.of(ledger.entries), least)


def curve(
    ledger: Ledger, deltas: Iterable[float]
) -> list[tuple[float, float | None, float | None]]:
    """Return (δ, ε by RDP, ε by PLD) for each δ; both ε are None if the ledger has none.

    One Gaussian with multiplier 1 has δ(1) = Φ(-1/2) − e·Φ(-3/2) = 0.1269:

    >>> from evenclip.mechanism.ledger import Entry
    >>> ledger = Ledger([Entry(1.0, (("gradient", 1.0),), 1)])
    >>> [(delta, round(rdp, 2), round(pld, 2)) for delta, rdp, pld in curve(ledger, [0.12693674])]
    [(0.12693674, 1.5, 1.0)]
    """
    check_kinds(curve, locals())
    deltas = [plain(delta) for delta in deltas]
    for delta in deltas:
        check_delta(delta)
    ledger.check()
    if not ledger.is_private:
        return [(delta, None, None) for delta in deltas]
    by_rdp, by_pld = (
        [_stated(_real(ledger, delta, accountant, deltas)) for delta in deltas]
        for accountant in ("rdp", "pld")
    )
    return list(zip(deltas, by_rdp, by_pld, strict=True))


def epsilon_without_amplification(ledger: Ledger, delta: float) -> float | None:
    """Return ε at δ as if every record had been in every batch (q = 1).

    This is the guarantee that remains if the sampling were known. It is exact: Gaussians compose to
    one Gaussian with the joint multiplier of all steps, m = (Σ_t m_t⁻²)^(-1/2), and with μ = 1/m
    its δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) (Balle, Wang 2018, arXiv:1805.06530, Eq. 6).

    >>> from evenclip.mechanism.ledger import Entry
    >>> ledger = Ledger([Entry(0.01, (("gradient", 10.0),), 100)])  # μ = √100 / 10 = 1
    >>> round(epsilon_without_amplification(ledger, 0.12693674), 6)  # δ(1) = Φ(-1/2) − e·Φ(-3/2)
    1.0
    """
    check_kinds(epsilon_without_amplification, locals())
    check_delta(delta)
    delta = plain(delta)
    ledger.check()
    if not ledger.is_private:
        return None
    kinds = step_kinds(ledger)
    if _is_too_much(kinds):
        return None
    mu = math.sqrt(sum(kind.steps * kind.multiplier**-2 for kind in kinds))
    ideal = partial(_gaussian_epsilon, mu)
    return _stated(real_epsilon(ideal, delta, SamplerError.of(ledger.entries)))


def _is_too_much(kinds: Sequence[StepKind]) -> bool:
    """Return whether ε is too large to be computed, and to mean anything."""
    return any(kind.multiplier < LEAST_MULTIPLIER for kind in kinds)


def _stated(found: Real | None) -> float | None:
    """Return ε, or None if there is no valid one."""
    return None if found is None else found.epsilon


def rounded_up(value: float | None, digits: int = 4) -> str:
    """Format a value to `digits` significant digits, rounded up; "none" for None.

    A printed ε or σ is therefore never below the true one.

    >>> rounded_up(3.13501), rounded_up(0.25), rounded_up(12345.6), rounded_up(None)
    ('3.136', '0.25', '12350', 'none')
    """
    check_kinds(rounded_up, locals())
    check.at_most(_MOST_DIGITS, digits=digits)
    if value is None:
        return "none"
    check.real(value=value)
    value, digits = float(value), int(digits)
    up = Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(value)
    return f"{up.normalize():f}"


def smallest_delta(ledger: Ledger) -> float:
    """Return the δ above which PLD in double precision is a bound: 2⁻⁴⁹ for each step.

    dp-accounting convolves by Fourier transform and does not account for its rounding: for
    δ ≤ 1e-12 its ε can be below the exact one. This amount is subtracted from δ before ε is
    computed, so that the result remains an upper bound. A smaller δ is rejected.

    >>> from evenclip.mechanism.ledger import Entry
    >>> smallest_delta(Ledger([Entry(0.01, (("gradient", 1.0),), 1024)])) == 2.0**-39
    True
    """
    check_kinds(smallest_delta, locals())
    return lost_delta(step_kinds(ledger))


def default_delta(n: int) -> float:
    """Return the default δ: the largest power of ten below 1/(2n).

    >>> default_delta(23_484), default_delta(50)
    (1e-05, 0.001)
    """
    return float(10.0 ** (math.ceil(math.log10(1 / (2 * n))) - 1))


def check_delta(delta: float, name: str = "delta") -> None:
    """Raise unless δ lies strictly between 0 and 1."""
    if not _is_between(delta):
        raise ValueError(
            f"{name} is {shown(delta)}; it must lie above 0 and below 1, well below 1/n for n "
            "records."
        )


def check_delta_of_steps(delta: float, steps: int) -> None:
    """Raise if the PLD of this many steps is no bound at δ; see `smallest_delta`."""
    least = least_delta(steps)
    if delta <= least:
        raise ValueError(
            f"delta is {delta:g}; the ε of {steps} steps is computed for a delta above "
            f"{least:.1e} only: give a larger delta."
        )


def _is_between(delta: object) -> bool:
    if isinstance(delta, bool) or not isinstance(delta, int | float | np.number):
        return False
    return bool(0 < delta < 1)


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
