"""From the ε of ideal Gaussian noise to the ε of the noise that is drawn.

Accountants assume Gaussian noise of real numbers, and a bound on the rounding of every sum. The
noise is drawn in pairs by a sampler in floating point, and the bound holds unless a batch has more
records than assumed. Let M be the ideal mechanism and M̃ the real one.

*One pair.* Given the batches and everything before it, the pair's result has the law p in M and p̃
in M̃. Except on an event of mass β, |ln p̃/p| ≤ λ. Then the mean of ln p̃/p under p̃ is at most
λ²/2: it is largest where the ratio is e^±λ, and there it is λ·tanh(λ/2).

*All pairs.* L = Σ ln p̃/p over the n pairs of all steps is a sum of n differences of a martingale,
each within ±λ, plus at most nλ²/2. By Azuma's inequality L exceeds

    ε_s = nλ²/2 + λ·√(2n·ln(1/δ_s))

with probability at most δ_s. A pair outside of its event occurs with probability at most nβ. So on
the same data, in both directions and for any set A of results,

    P[M̃ ∈ A] ≤ e^ε_s·P[M ∈ A] + δ_s + nβ.

For several λ, nλ² becomes Σ_j n_j λ_j².

*Neighbours.* Go from M̃(D) to M(D), to M(D'), to M̃(D'). If M is (ε, δ')-private, M̃ is private for

    ε + 2ε_s   and   e^ε_s·δ' + (1 + e^(ε + ε_s))·(δ_s + nβ).

*Large batches.* Replace M̃ by the mechanism that keeps the bound in every step. On D as on D' it
gives another result with probability at most Στ, because the larger dataset has the larger batches.
One of the two is on the right-hand side, so δ grows by (1 + e^(ε + 2ε_s))·Στ. (Without the factor
if τ bounds the batches of the *other* records, whose event is the same for both neighbours. The
ledger does not say which, so the factor stays.)

To state ε at a given δ, choose E, set δ_s = 2⁻¹⁰·δ/(1 + e^E), and

    δ' = e^−ε_s·(δ − (1 + e^(E + 2ε_s))·(δ_s + nβ + Στ)).

If the ideal ε at δ' is at most E, it is valid to state it plus 2ε_s. `real_epsilon` finds nearly
the least such E. If δ' is not positive for any of them, no ε is valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from evenclip.mechanism.entry import Entry

__all__ = ["Real", "SamplerError", "Terms", "real_epsilon"]

# δ_s is this share of what δ allows.
_SHARE = 2.0**-10
# Relative rounding of the formulas below; every result is moved to the safe side by it.
_UP, _DOWN = 1 + 2.0**-40, 1 - 2.0**-40
# First step of the search for E; it doubles.
_FIRST_STEP = 2.0**-10
_MOST_ROUNDS = 60
# The search for a smaller E ends where it gains less than this fraction.
_GAIN = 1e-9


class Terms(NamedTuple):
    """What the sampler takes from ε and δ.

    Attributes:
        epsilon_s: ε_s.
        delta_s: δ_s.
        delta: δ', at which the ideal ε is computed.
    """

    epsilon_s: float
    delta_s: float
    delta: float


class Real(NamedTuple):
    """An ε of the real mechanism.

    Attributes:
        epsilon: ε, at the δ that was asked for.
        ideal: ε of the ideal mechanism at `terms.delta`.
        terms: what the sampler took.
    """

    epsilon: float
    ideal: float
    terms: Terms


@dataclass(frozen=True)
class SamplerError:
    """How far the drawn noise may be from the ideal one, over all steps.

    Attributes:
        pairs: n, the number of pairs of draws.
        squares: Σ n_j λ_j².
        outside: Σ n_j β_j.
        tau: Σ τ.
    """

    pairs: int = 0
    squares: float = 0.0
    outside: float = 0.0
    tau: float = 0.0

    @staticmethod
    def of(entries: Iterable[Entry]) -> SamplerError:
        """Return the error of these steps; entries without sizes have ideal noise."""
        entries = list(entries)
        return SamplerError(
            sum(entry.pairs for entry in entries),
            math.fsum(entry.pairs * entry.lam**2 for entry in entries) * _UP,
            math.fsum(entry.pairs * entry.beta for entry in entries) * _UP,
            math.fsum(entry.steps * entry.tau for entry in entries) * _UP,
        )

    @property
    def is_none(self) -> bool:
        """Whether the noise is ideal and every batch is within its bound."""
        return self.pairs == 0 and self.tau == 0

    def terms(self, delta: float, bound: float) -> Terms | None:
        """Return ε_s, δ_s and δ' where `bound` is E; None if δ' is not positive.

        >>> SamplerError(10**8, 10**8 * 2.0**-74, 10**8 * 2.0**-75).terms(1e-6, 30.0) is None
        True
        """
        # Logarithms, because e^E may overflow.
        share = math.log(delta) + math.log(_SHARE) - _softplus(bound) if self.pairs else -math.inf
        epsilon_s = self.squares / 2
        if self.squares:
            epsilon_s = (epsilon_s + math.sqrt(-2 * self.squares * share)) * _UP
        beyond = self.outside + self.tau
        mass = _log_sum(share, math.log(beyond) if beyond else -math.inf)
        lost = _softplus(bound + 2 * epsilon_s) + mass - math.log(delta)  # as a share of δ
        if lost >= math.log(_DOWN):
            return None
        left = math.log(delta) - epsilon_s + math.log1p(-math.exp(lost) * _UP)
        return Terms(epsilon_s, math.exp(share), math.exp(left) * _DOWN)


def real_epsilon(
    ideal: Callable[[float], float], delta: float, error: SamplerError, least: float = 0.0
) -> Real | None:
    """Return the ε of the real mechanism at δ; None if there is no valid one.

    Args:
        ideal: δ' -> ε of the ideal mechanism; it falls as δ' grows.
        delta: δ.
        error: how far the drawn noise may be from the ideal one.
        least: δ' must lie above it.

    >>> error = SamplerError.of([Entry(1.0, (("a", 1.0),), 1000, sizes=(("a", 10**6),))])
    >>> real = real_epsilon(lambda delta: -math.log(delta) / 10, 1e-6, error)
    >>> real.ideal, real.epsilon == real.ideal + 2 * real.terms.epsilon_s
    (1.3816..., True)
    """
    start = ideal(delta)
    if error.is_none:
        return Real(start, start, Terms(0.0, 0.0, delta))
    at = partial(_at, ideal, delta, error, least)
    for k in range(_MOST_ROUNDS):
        bound = start + _FIRST_STEP * 2.0**k
        found = at(bound)
        if found is None:
            return None
        start = found[0]
        if start <= bound:
            break
    else:
        return None
    for _ in range(_MOST_ROUNDS):  # the ideal ε is itself a bound E, and a smaller one
        closer = at(found[0])
        if closer is None or closer[0] >= found[0] * (1 - _GAIN):
            break
        found = closer
    epsilon, terms = found
    return Real(epsilon + 2 * terms.epsilon_s, epsilon, terms)


def _at(
    ideal: Callable[[float], float], delta: float, error: SamplerError, least: float, bound: float
) -> tuple[float, Terms] | None:
    """Return the ideal ε at δ', and the terms, where `bound` is E; None if δ' is too small."""
    terms = error.terms(delta, bound)
    if terms is None or terms.delta <= least:
        return None
    return ideal(terms.delta), terms


def _softplus(x: float) -> float:
    """Return ln(1 + e^x)."""
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


def _log_sum(x: float, y: float) -> float:
    """Return ln(e^x + e^y)."""
    high, low = max(x, y), min(x, y)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
