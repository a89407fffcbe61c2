"""Copies of a model in which passes can be compared up to little more than rounding.

The numbers of a copy are wide, so that two orders of the same operations nearly agree, and they may
be changed, so that no factor of zero hides anything.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from evenclip.gradients.calls import call
from evenclip.gradients.losses import Loss

__all__ = ["change", "differ", "least_tolerance", "rows_of", "wide", "without_dropout"]

# Relative to the largest number of a tensor; two orders of the same operations differ by less.
_TOLERANCE = {
    torch.float64: 1e-7, torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2,
}  # fmt: skip
_SEED = 40_087


def wide(model: nn.Module, loss: Loss, x: Any, y: Any) -> tuple[nn.Module, tuple[Any, Any]]:
    """Return a copy of the model and the samples in float64, or float32; else as they are."""
    for dtype in (torch.float64, torch.float32):
        tried = copy.deepcopy(model).to(dtype)
        given = tree_map(partial(_as_dtype, dtype), (x, y))
        try:
            with torch.no_grad():
                loss(call(tried, rows_of([0, 1], given[0])), rows_of([0, 1], given[1]))
        except Exception:  # anything that a model may raise for numbers of another kind
            continue
        return tried, given
    return copy.deepcopy(model), (x, y)  # its layers have several dtypes


def least_tolerance(model: nn.Module) -> float:
    """Return the tolerance of the narrowest dtype of a model that has several."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max((_TOLERANCE[kind] for kind in kinds), default=0.0) if len(kinds) > 1 else 0.0


def _as_dtype(dtype: torch.dtype, value: Any) -> Any:
    """Convert floating-point tensors; return other values unchanged."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def change(model: nn.Module) -> None:
    """Add noise to all parameters, so that none is 0 and no two are equal."""
    random = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for p in model.parameters():
            scale = 0.02 + float(p.abs().mean()) if p.numel() else 0.0
            p.add_(torch.randn(p.shape, generator=random, dtype=torch.float64).to(p), alpha=scale)


@contextmanager
def without_dropout(model: nn.Module, *, everywhere: bool) -> Iterator[None]:
    """Switch dropout modules off, or put the whole model into evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        if everywhere or isinstance(module, nn.modules.dropout._DropoutNd):
            module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def differ(a: Tensor, b: Tensor, least: float, floor: float = 0.0) -> bool:
    """Return whether tensors differ by more than rounding, relative to their largest number.

    Args:
        a: a tensor.
        b: another one.
        least: least tolerance, relative to the largest number.
        floor: a difference that is always rounding, as where all numbers are differences of larger
            ones.
    """
    if a.shape != b.shape:
        return True
    if not a.is_floating_point():
        return not torch.equal(a, b)
    a, b = a.nan_to_num(), b.nan_to_num()
    scale = max(float(a.abs().amax()), float(b.abs().amax())) if a.numel() else 0.0
    tolerance = max(least, _TOLERANCE[a.dtype]) * scale
    return scale > 0 and float((a - b).abs().amax()) > max(tolerance, floor)


def rows_of(rows: Sequence[int], value: Any) -> Any:
    """Return these samples."""
    return tree_map(partial(_some, torch.tensor(rows)), value)


def _some(rows: Tensor, value: Any) -> Any:
    """Return these samples of a tensor; return other values unchanged."""
    return value[rows.to(value.device)] if isinstance(value, Tensor) and value.ndim else value
