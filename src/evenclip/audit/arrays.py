"""Numbers that callers give as arrays or lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenclip.arguments import shown

__all__ = ["array_of", "dense"]


def array_of(name: str, values: Any) -> NDArray[np.float64]:
    """Return a copy of the values as an array, with NaN for None; `name` is for messages.

    Raises:
        TypeError: they are not numbers.
    """
    try:
        if isinstance(values, np.ma.MaskedArray):
            return np.array(values.astype(np.float64).tolist(), np.float64)  # None where masked
        return np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(
            f"{name} is {shown(values)}; it must hold numbers, in rows of equal length."
        ) from None


def dense(name: str, values: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor on the CPU; raise if it is no ordinary one."""
    if values.is_meta or values.layout != torch.strided or values.is_complex():
        raise ValueError(
            f"{name} is {'on the device meta' if values.is_meta else 'sparse or complex'}; give an "
            "ordinary tensor of real numbers."
        )
    return values.detach().to("cpu", dtype)
