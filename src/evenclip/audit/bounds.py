"""Lower bounds on the difference in the cost of clipping between two groups.

The bounds use slopes and norms only. They bound differences of the terms of
`evenclip.audit.decomposition` between groups a and b:

- `direction_bound`: R_dir_a − R_dir_b, by Proposition 3 of Esipova et al. 2023. It holds if the
  losses are convex and η ≤ 1/max λ_k.
- `direction_bound_star`: R_dir*_a − R_dir*_b, by Proposition 3*, with E‖g_B‖² where the paper
  prints ‖g_B‖ without the square. It holds under the same conditions.
- `unconditional_bound`: R_dir_a − R_dir_b without either condition, from the extreme eigenvalues of
  H^a − H^b. It always holds.
- `clipping_bound`: R_clip_a − R_clip_b for two groups, from norms only. We derived it along the
  proof of Theorem 3 of Tran et al. 2021. It holds in expectation under the conditions of the first.

The paper states the bound for convex losses and plots it for networks that are not convex. So the
conditions are checked, not assumed: λ_min ≥ 0 up to rounding and η λ_max ≤ 1, for both groups
(`Conditions`).

Proof of the first: with s = ⟨g_a, g_B⟩, s̄ = ⟨g_a, ḡ_B⟩, R_dir_a − R_dir_b is the expectation of
η[(ρs_a − s̄_a) − (ρs_b − s̄_b)] + η²/2 [ḡᵀH^aḡ − ρ²gᵀH^ag − ḡᵀH^bḡ + ρ²gᵀH^bg]. The first and the
last of the four forms are not negative. Each of the others is at most λ‖ḡ_B‖² ≤ ‖ḡ_B‖²/η, because
ρ‖g_B‖ = ‖ḡ_B‖. So the second bracket is at least −2‖ḡ_B‖²/η.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenclip import check
from evenclip.arguments import check_kinds

__all__ = [
    "Conditions",
    "clipping_bound",
    "direction_bound",
    "direction_bound_star",
    "unconditional_bound",
]

# A λ_min above −_ROUNDING times the largest absolute eigenvalue counts as 0: its accuracy.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Conditions:
    """The conditions of the bounds.

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
        """Whether both conditions hold."""
        return self.convex and self.small_steps

    @staticmethod
    def of(extremes: list[tuple[float, float]], lr: float) -> Conditions:
        """Check the conditions from (λ_min, λ_max) of every group.

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
    """Return the lower bound on R_dir_a − R_dir_b of Proposition 3.

    In the paper's notation it is η(‖g_a‖E[‖ḡ_B‖(cos θ_a − cos θ̄_a)]
    − ‖g_b‖E[‖ḡ_B‖(cos θ_b − cos θ̄_b)] − E‖ḡ_B‖²), where ‖g_a‖‖ḡ_B‖cos θ_a = ρ⟨g_a, g_B⟩.
    """
    return float(lr * np.mean(_turned(a, rho) - _turned(b, rho) - clipped_norms**2))


def direction_bound_star(
    a: Slopes, b: Slopes, rho: NDArray[np.float64], norms: NDArray[np.float64], lr: float
) -> float:
    """Return the lower bound on R_dir*_a − R_dir*_b of Proposition 3*, corrected."""
    return float(lr * np.mean(_turned(a, rho) / rho - _turned(b, rho) / rho - norms**2))


def unconditional_bound(
    a: Slopes, b: Slopes, rho: NDArray[np.float64], clipped_norms: NDArray[np.float64], lr: float,
    difference: tuple[float, float],
) -> float:  # fmt: skip
    """Return a lower bound on R_dir_a − R_dir_b without convexity and for any step size.

    Args:
        a: slopes of the group that pays more.
        b: slopes of the other group.
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
    """Return a lower bound on R_clip_a − R_clip_b for data with exactly two groups.

    It holds in expectation over Poisson batches. With A = ‖g_a‖ and D = ‖g_b‖ the bound is
    η[p_a A² − p_b D² − |p_a − p_b|AD − S(A + D) − ½E‖g_B‖² − ½S²(1 + (1−q)/B)]. It follows from
    ⟨g_a − g_b, g_D − ḡ_D⟩ with g_D = p_a g_a + p_b g_b and ‖ḡ_D‖ ≤ S. The second-order terms are at
    least −η/2 (E‖g_B‖² + E‖ḡ_B‖²), as in the proof above.

    Args:
        norm_a: A.
        norm_b: D.
        share_a: p_a, the group's share of the data.
        share_b: p_b.
        S: bound on every clipped gradient.
        mean_square: E‖g_B‖².
        spread: (1 − q)/B, the variance of a Poisson batch relative to a squared mean.
        lr: η.

    Raises:
        ValueError: if the shares do not add up to 1.
    """
    given = locals()
    check_kinds(clipping_bound, given)
    check.finite(**given)
    norm_a, norm_b, share_a, share_b = map(float, (norm_a, norm_b, share_a, share_b))
    S, mean_square, spread, lr = map(float, (S, mean_square, spread, lr))
    if abs(share_a + share_b - 1) > 1e-9:
        raise ValueError(
            f"share_a is {share_a} and share_b is {share_b}; this bound is for data with exactly "
            "two groups, so give shares that add up to 1."
        )
    first = share_a * norm_a**2 - share_b * norm_b**2 - abs(share_a - share_b) * norm_a * norm_b
    return lr * (first - S * (norm_a + norm_b) - mean_square / 2 - S**2 * (1 + spread) / 2)


def _turned(group: Slopes, rho: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ⟨g_k, ρg_B − ḡ_B⟩.  # [batch]"""
    slopes, clipped = group
    return rho * slopes - clipped
