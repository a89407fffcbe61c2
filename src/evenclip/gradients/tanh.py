"""tanh on a CPU by numpy's kernel, which needs a seventh of the time of torch's and is as exact to
a rounding.

torch 2.13 takes 2.6 ns a number on one core, numpy 2 0.4 ns (AVX-512). In a step of Adult's MLP two
of them are a tenth of the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["pays", "tanh"]

# Fewer numbers a sample than this, and going through Python may take longer than torch does, which
# shares them among its threads. Not the numbers of a batch: how many samples it has is private, and
# which kernel is taken must not tell.
_FEW = 128
# With more threads than this torch is quicker: numpy has one.
_THREADS = 4


def pays(x: Any, samples: int) -> bool:
    """Whether `tanh` takes this, which is of so many samples, and is quicker; the same for any
    number of them.
    """
    if type(x) is not Tensor or x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    threads = torch.get_num_threads()
    return threads <= _THREADS and x.numel() >= _FEW * threads * samples


def tanh(x: Tensor) -> Tensor:
    """The same numbers as torch's, to a rounding, and the same gradient."""
    found: Tensor = _Tanh.apply(x)  # type: ignore[no-untyped-call]
    return found


class _Tanh(torch.autograd.Function):
    """Backward it is torch's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x)  # torch's memory, so that whoever counts it finds it
        np.tanh(x.numpy(), out=y.numpy())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.tanh_backward(delta, *ctx.saved_tensors)
        return found
