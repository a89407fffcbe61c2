"""Hold what a rule returns to its bounds: statistics of length 1, weights up to S/‖g‖.

The bounds hold for any values, also for those that are not finite:

| the rule returns | becomes |
|---|---|
| a weight that is NaN or infinite | 0, and it is counted |
| |γ| · ‖g‖ > S | ±S/‖g‖, and it is counted |
| |γ| > 2¹⁰⁰ · S, however small ‖g‖ is | ±2¹⁰⁰ · S, and it is counted |
| a statistic longer than 1 | the same direction, length 1 |
| a statistic with a NaN or infinite entry | 0 in that place |

A sample that is not kept contributes exactly nothing. `reads` says whether tensor values may be
read, which saves work if no bound is exceeded; the result is the same.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

__all__ = ["bounded_sum", "bounded_weights"]

# C0/‖g‖ · ‖g‖ may come out a few units in the last place above C0. Norms are rounded up by far more
# than that, so such a weight is neither clamped nor counted.
_ROUNDING = 1 + 2.0**-50
# The same for statistics, in which more squares are added up; ρ covers both.
_UNIT_LENGTH = 1 + 2.0**-46
# Weights are finite even for a rule without a bound (S = ∞).
_FINITE = sys.float_info.max
# A shorter gradient is clamped as if it had this length, so that its weight stays finite in
# float32, where 0 · ∞ would be NaN.
_SHORTEST = 2.0**-100


def bounded_sum(each: Tensor, keep: Tensor | None, *, reads: bool) -> Tensor:
    """Sum one statistic of the kept samples, each of length at most 1.  # [m], float64

    Args:
        each: every sample's statistic.  # [sample, ...]
        keep: [sample], bool; None keeps all.
        reads: whether tensor values may be read.
    """
    if each.dtype == torch.bool and each.ndim == 1:  # True has length 1
        return (each if keep is None else each & keep).sum(dim=0, keepdim=True, dtype=torch.float64)
    if each.ndim != 2:
        each = each.unsqueeze(1) if each.ndim == 1 else each.flatten(1)
    each = each.to(torch.float64)  # [sample, m]
    if each.numel() == 0:
        return each.new_zeros(each.shape[1])
    # A length is off by as many roundings as there are numbers, of which ρ covers 64.
    up = 1 + max(each.shape[1] - 64, 0) * 2.0**-53
    lengths: Tensor = torch.linalg.vector_norm(each, dim=1, keepdim=True)
    if not (reads and float(lengths.max()) * up <= _UNIT_LENGTH):  # also true for NaN
        each = each.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        lengths = torch.linalg.vector_norm(each, dim=1, keepdim=True)
        each = each / (lengths * up).clamp(min=1.0)
    if keep is not None:
        each = torch.where(keep.unsqueeze(1), each, 0.0)
    return each.sum(dim=0)


def bounded_weights(
    raw: Tensor, norms: Tensor, S: float | Tensor, keep: Tensor | None, *, reads: bool
) -> tuple[Tensor, Tensor | None]:
    """Return γ_i with |γ_i| · norms_i ≤ S, and which of them were clamped (None: none).

    Both have the shape [sample], float64 and bool.

    Args:
        raw: every sample's weight, as the rule returns it.  # [sample], float64
        norms: ‖g_i‖.  # [sample], float64
        S: the sensitivity.
        keep: [sample], bool; None keeps all.
        reads: whether tensor values may be read.
    """
    lengths = norms.clamp(min=_SHORTEST)
    if (
        reads
        and raw.shape[0]
        and _longest(raw * lengths) <= min(S * _ROUNDING, _FINITE)  # false for NaN
    ):
        return (raw if keep is None else torch.where(keep, raw, 0.0)), None
    finite = raw.isfinite()
    raw = torch.where(finite, raw, 0.0)
    longer = (raw * lengths).abs() > S * _ROUNDING
    held, clamped = torch.where(longer, raw.sign() * (S / lengths), raw), longer | ~finite
    return (held, clamped) if keep is None else (torch.where(keep, held, 0.0), clamped & keep)


def _longest(x: Tensor) -> float:
    """Return the largest |x|."""
    return float(torch.linalg.vector_norm(x, ord=math.inf))
