"""The two public grids of a release, which make a sum plus noise a Gaussian mechanism.

A sum in floating point plus noise in floating point is not a Gaussian mechanism: which numbers can
come out depends on the data, and one output can decide between two neighbours (Mironov 2012, "On
significance of the least significant bits for differential privacy"). So a release with the
sensitivity S, the multiplier σ and d numbers does this instead:

    fine grid     h, a power of two with h√d ≤ 2⁻¹⁶ S and h ≤ σS/32
                  The sum, rounded to multiples of h, is an integer k in units of h.
    noise         σ' = σ(S_fl + h√d), rounded up
                  S_fl = S(1 + ρ) bounds how far one record moves the sum as computed; rounding to
                  h adds at most h√d. So k·h + N(0, σ'²) is a Gaussian mechanism of multiplier σ.
    coarse grid   H, the largest power of two ≤ σ'/8
                  With k·h + H/2 = H·hi + lo, the number published is H·(hi + ⌊(lo + Z)/H⌋).
                  For real-valued Z this is k·h + Z rounded to a multiple of H, which is
                  post-processing. `evenclip.mechanism.noise` says how far the Z as computed is
                  from real-valued.

hi and lo are computed exactly: they are integers and multiples of h far below 2⁵³ in units of h, so
float64 holds them without rounding. lo lies in [0, H), so the sum lo + Z rounds alike wherever hi
is. Rounding to H adds H²/12 to the variance, at most 0.13 %: the variance of every number released
is σ'² + H²/12 (`Grid.variance`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from evenclip.mechanism.noise import BLOCK, Values

__all__ = ["Grid", "inflation", "on_grid", "published"]

# h√d ≤ _FINE · S: the share of the sensitivity that rounding the sum may add.
_FINE = 2.0**-16
# Bound on |k|: with it, k + 2^(m−1) and every intermediate value are exact in float64.
_MOST = 2.0**51
_EXPONENT = 0x7FF0 << 48  # the exponent's bits of a float64
# A smaller S is raised to this: more noise than needed, and no number underflows.
_LEAST = 2.0**-400

Number = float | Tensor


class Grid(NamedTuple):
    """The grids and the noise of one release; all public.

    Attributes:
        fine: h.
        coarse: H.
        std: σ', the standard deviation of the noise.
    """

    fine: Number
    coarse: Number
    std: Number

    @staticmethod
    def of(S: Number, multiplier: float, size: int, rounding: float) -> Grid:
        """Return the grids for a sensitivity S, a multiplier σ > 0 and `size` numbers.

        Args:
            S: bound on one record's share of the exact sum.
            multiplier: σ.
            size: d, all numbers of the release, on all processes.
            rounding: ρ, the relative amount by which the rounding of the sum exceeds S.

        >>> grid = Grid.of(1.0, 1.0, 65536, 0.0)
        >>> grid.fine == 2.0**-24, grid.coarse, round(grid.std - 1.0, 7)
        (True, 0.125, 1.53e-05)
        """
        S = S.double().clamp(min=_LEAST) if isinstance(S, Tensor) else max(float(S), _LEAST)
        root = math.sqrt(size)
        fine = power_below(S * min(_FINE / root, multiplier / 32))
        std = (S * (1 + rounding) + fine * root) * (multiplier * (1 + 2.0**-48))
        return Grid(fine, power_below(std * 0.125), std)

    @property
    def variance(self) -> Number:
        """σ'² + H²/12, the variance of a released number; rounding to H adds the second term.

        The rounding errors left out are below e⁻¹⁰⁰⁰, because σ' ≥ 8H.
        """
        return self.std**2 + self.coarse**2 / 12


def inflation(rounding: float) -> float:
    """Return the most that (S_fl + h√d)/S − 1 can be: ρ + 2⁻¹⁶.

    The noise exceeds σS by at most this share.

    Args:
        rounding: ρ.

    >>> grid = Grid.of(0.7, 1.0, 91_650, 1e-4)
    >>> grid.std / 0.7 - 1 <= inflation(1e-4)
    True
    """
    return rounding + _FINE


def on_grid(total: Tensor, noise: Values, grid: Grid, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the published numbers times `scale`, which is public, as `dtype`.  # [number]

    Noise that is not in memory is drawn in blocks, so that it never takes more than a block.

    Args:
        total: the private sum.  # [number], float64
        noise: N(0, 1), used once.
        grid: the grids of the release.
        scale: factor of the published numbers, such as 1/B.
        dtype: dtype of the result.
    """
    size = total.shape[0]
    if isinstance(noise, Tensor):
        return published(total, noise, grid).mul_(scale).to(dtype)
    if size <= BLOCK:
        return published(total, noise[0:size], grid).mul_(scale).to(dtype)
    out = torch.empty(size, dtype=dtype, device=total.device)
    for first in range(0, size, BLOCK):
        part = slice(first, min(first + BLOCK, size))
        out[part] = published(total[part], noise[part], grid).mul_(scale)
    return out


def published(total: Tensor, z: Tensor, grid: Grid) -> Tensor:
    """Return H·(hi + ⌊(lo + σ'z)/H⌋) with H·hi + lo = h·round(total/h) + H/2.  # [number], float64

    Raises:
        ValueError: unless there is one number of noise for each; torch would repeat a single one.
    """
    if z.shape != total.shape:
        raise ValueError(
            f"A sum of {total.numel()} numbers was given {z.numel()} numbers of noise; give one "
            "for each."
        )
    h, H, std = grid
    # A projection: harmless to the sensitivity, and never taken by a sum within its bounds.
    k = (total * (1 / h)).nan_to_num_(nan=0.0).clamp(-_MOST, _MOST).round_()
    k = k.mul_(h / H).add_(0.5)  # in units of H; exact, because h/H is a power of two
    hi = k.floor()
    lo = k.sub_(hi)
    ratio = std / H
    noisy = torch.addcmul(lo, z, ratio) if isinstance(ratio, Tensor) else lo.add(z, alpha=ratio)
    return noisy.floor_().add_(hi).mul_(H)


def power_below(x: Number) -> Number:
    """Return the largest power of two that is at most x > 0.

    >>> power_below(0.3), power_below(0.25), float(power_below(torch.tensor(5.0).double()))
    (0.25, 0.25, 4.0)
    """
    if isinstance(x, Tensor):  # of float64, of which this keeps the exponent only
        return (x.view(torch.int64) & _EXPONENT).view(torch.float64)
    return math.ldexp(1.0, math.frexp(x)[1] - 1)
