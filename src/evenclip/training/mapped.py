"""Operations that `torch.func.vmap` maps without fixing the number of samples in a trace.

When a function is traced with a symbol for the number of samples, some operations that vmap maps
read this number, and the trace is then valid for it alone. Inside `SizeFree`, the ones that losses
and rules use most are computed by a comparison instead:

| operation on one sample | as |
|---|---|
| `F.cross_entropy`, `F.nll_loss` of classes, no weights or smoothing | −Σ_c [c = y] log p_c |
| `torch.gather` from a vector | Σ_c [c = index] x_c |

Where an index is out of range, the result is NaN; the operation itself would raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["SizeFree"]


class SizeFree(TorchFunctionMode):
    """Replace these operations where they are mapped over samples."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return func(*args, **kwargs)."""
        del types
        kwargs = kwargs or {}
        replacement = _REPLACED.get(func)
        if replacement is not None:
            value = replacement(*args, **kwargs)
            if value is not None:
                return value
        return func(*args, **kwargs)


def _cross_entropy(
    input: Tensor, target: Tensor, *rest: Any, label_smoothing: float = 0.0, **options: Any
) -> Tensor | None:
    """Return the cross-entropy; None where it is not replaced."""
    if rest or label_smoothing or not _is_mapped(input, target):
        return None
    return _nll(input.log_softmax(-1), target, **options)


def _nll_loss(input: Tensor, target: Tensor, *rest: Any, **options: Any) -> Tensor | None:
    """Return the negative log-likelihood; None where it is not replaced."""
    if rest or not _is_mapped(input, target):
        return None
    return _nll(input, target, **options)


def _nll(
    log_p: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean", **rest: Any
) -> Tensor | None:
    """Return −log p of the class, for one sample or a batch of one; None with other options."""
    fits = log_p.ndim in (1, 2) and log_p.ndim == target.ndim + 1
    if not fits or target.is_floating_point() or any(v is not None for v in rest.values()):
        return None
    counts = target != ignore_index
    each = torch.where(counts, -_chosen(log_p, target), 0.0)
    if reduction == "mean":
        return each.sum() / counts.sum()
    return each.sum() if reduction == "sum" else each


def _gather(input: Tensor, dim: int, index: Tensor, **rest: Any) -> Tensor | None:
    """Return the chosen entries of a vector; None where it is not replaced."""
    if rest or input.ndim != 1 or index.ndim > 1 or not _is_mapped(input, index):
        return None
    return _chosen(input, index)


def _chosen(values: Tensor, index: Tensor) -> Tensor:
    """Return values[..., index], or NaN if the index is out of range.

    values: [class] or [..., class]; index: [...]
    """
    is_it = torch.arange(values.shape[-1], device=values.device) == index.unsqueeze(-1)
    chosen = torch.where(is_it, values, torch.zeros_like(values)).sum(-1, dtype=values.dtype)
    if not values.is_floating_point():
        return chosen
    return torch.where(is_it.any(-1), chosen, torch.nan)


def _is_mapped(*values: Any) -> bool:
    """Return whether a value is one sample's, of a batch that `vmap` maps over."""
    return any(
        isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)
        for value in values
    )


_REPLACED: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    torch.gather: _gather,
    Tensor.gather: _gather,
}
