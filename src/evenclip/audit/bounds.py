"""Lower bounds on how much more clipping costs one group than another, from slopes and norms alone.

All are bounds on differences of the terms of `evenclip.audit.decomposition` between groups a and b.

| bound on | from | holds if |
|---|---|---|
| R_dir_a − R_dir_b | Proposition 3 of Esipova et al. 2023 | the losses are convex and η ≤ 1/max λ_k |
| R_dir*_a − R_dir*_b | Proposition 3*, with E‖g_B‖² where ‖g_B‖ is printed without the square | likewise |
| R_dir_a − R_dir_b | the same without either condition, from the extreme eigenvalues of H^a − H^b | always |
| R_clip_a − R_clip_b | as in Theorem 3 of Tran et al. 2021: two groups, norms only | like the first, in expectation |

The paper asks for convexity in its statement and then plots the bound for networks that are not
convex. So each bound comes with its conditions, looked at and not assumed: λ_min ≥ 0 up to
rounding, and η λ_max ≤ 1, for both groups.

Proof of the first: with s = ⟨g_a, g_B⟩, s̄ = ⟨g_a, ḡ_B⟩, R_dir_a − R_dir_b is the expectation of
η[(ρs_a − s̄_a) − (ρs_b − s̄_b)] + η²/2 [ḡᵀH^aḡ − ρ²gᵀH^ag − ḡᵀH^bḡ + ρ²gᵀH^bg]. Of the four forms
the first and the last are not negative, each of the others is at most λ‖ḡ_B‖² ≤ ‖ḡ_B‖²/η, as ρ‖g_B‖
= ‖ḡ_B‖. So the bracket is at least −2‖ḡ_B‖²/η.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Conditions",
    "clipping_bound",
    "direction_bound",
    "direction_bound_star",
    "unconditional_bound",
]

# λ_min may be this far below 0, relative to the largest eigenvalue, and be called 0: how well it is
# known.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Conditions:
    """Whether the bounds that ask for it hold.

    Attributes:
        convex: no group's Hessian has a negative eigenvalue.
        small_steps: η ≤ 1/λ_max for every group.
        largest: the largest λ_max.
        smallest: the smallest λ_min.
    """

    convex: bool
    small_steps: bool
    largest: float
    smallest: float

    @property
    def hold(self) -> bool:
        """Both of them."""
        return self.convex and self.small_steps

    @staticmethod
    def of(extremes: list[tuple[float, float]], lr: float) -> Conditions:
        """From (λ_min, λ_max) of every group.

        >>> Conditions.of([(0.0, 4.0), (0.5, 2.0)], lr=0.25).hold
        True
        >>> Conditions.of([(-1.0, 4.0)], lr=0.25).convex
        False
        """
        smallest, largest = min(low for low, _ in extremes), max(high for _, high in extremes)
        return Conditions(
            smallest >= -_ROUNDING * max(abs(largest), abs(smallest)),
            lr * largest <= 1,
            largest,
            smallest,
        )


Slopes = tuple[NDArray[np.float64], NDArray[np.float64]]
"""⟨g_k, g_B⟩ and ⟨g_k, ḡ_B⟩ of one group.  # [batch], [batch]"""


def direction_bound(
    a: Slopes, b: Slopes, rho: NDArray[np.float64], clipped_norms: NDArray[np.float64], lr: float
) -> float:
    """Proposition 3: R_dir_a − R_dir_b is at least this.

    In the paper's words η(‖g_a‖E[‖ḡ_B‖(cos θ_a − cos θ̄_a)] − ‖g_b‖E[‖ḡ_B‖(cos θ_b − cos θ̄_b)] −
    E‖ḡ_B‖²), and ‖g_a‖‖ḡ_B‖cos θ_a = ρ⟨g_a, g_B⟩.
    """
    return float(lr * np.mean(_turned(a, rho) - _turned(b, rho) - clipped_norms**2))


def direction_bound_star(
    a: Slopes, b: Slopes, rho: NDArray[np.float64], norms: NDArray[np.float64], lr: float
) -> float:
    """Proposition 3*, corrected: R_dir*_a − R_dir*_b is at least this."""
    return float(lr * np.mean(_turned(a, rho) / rho - _turned(b, rho) / rho - norms**2))


def unconditional_bound(
    a: Slopes, b: Slopes, rho: NDArray[np.float64], clipped_norms: NDArray[np.float64], lr: float,
    difference: tuple[float, float],
) -> float:  # fmt: skip
    """The first bound where nothing is convex and steps are long.

    Args:
        a: slopes of the group that pays more.
        b: of the other.
        rho: ‖ḡ_B‖/‖g_B‖.  # [batch]
        clipped_norms: ‖ḡ_B‖.  # [batch]
        lr: η.
        difference: (λ_min, λ_max) of H^a − H^b.
    """
    low, high = difference
    second = lr * lr / 2 * (high - low) * clipped_norms**2
    return float(np.mean(lr * (_turned(a, rho) - _turned(b, rho)) - second))


def clipping_bound(
    norm_a: float,
    norm_b: float,
    share_a: float,
    share_b: float,
    S: float,
    mean_square: float,
    spread: float,
    lr: float,
) -> float:
    """R_clip_a − R_clip_b is at least this, in expectation over Poisson batches, for two groups
    that are all there is.

    η[p_a A² − p_b D² − |p_a − p_b|AD − S(A + D) − ½E‖g_B‖² − ½S²(1 + (1−q)/B)] with A = ‖g_a‖ and D
    = ‖g_b‖: in ⟨g_a − g_b, g_D − ḡ_D⟩, g_D = p_a g_a + p_b g_b and ‖ḡ_D‖ ≤ S; the second-order
    terms are at least −η/2 (E‖g_B‖² + E‖ḡ_B‖²) as above.

    Args:
        norm_a: A.
        norm_b: D.
        share_a: p_a, the group's share of the data.
        share_b: p_b.
        S: what every clipped gradient is held to.
        mean_square: E‖g_B‖².
        spread: (1 − q)/B, what a Poisson batch adds to the square of a mean.
        lr: η.

    Raises:
        ValueError: the shares do not add up to 1.
    """
    if abs(share_a + share_b - 1) > 1e-9:
        raise ValueError(
            f"The shares are {share_a} and {share_b}; this bound is for two groups that are all "
            "of the data."
        )
    first = share_a * norm_a**2 - share_b * norm_b**2 - abs(share_a - share_b) * norm_a * norm_b
    return lr * (first - S * (norm_a + norm_b) - mean_square / 2 - S**2 * (1 + spread) / 2)


def _turned(group: Slopes, rho: NDArray[np.float64]) -> NDArray[np.float64]:
    """⟨g_k, ρg_B − ḡ_B⟩.  # [batch]"""
    slopes, clipped = group
    return rho * slopes - clipped
