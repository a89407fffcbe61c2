"""Convolutions in one, two and three dimensions: any stride, padding, dilation and number of channel groups.

A convolution is a linear layer over output positions whose input is, for each offset of the kernel, the padded input
shifted by that offset. So the gradient of one sample is, for each offset o,

    G_i[:, :, o] = Σ_t δ_i[:, t] · a_i[:, t shifted by o]ᵀ

one batched product an offset, without the unfolded input ever being written. These are formed: they are tiny beside the
activations in the networks this is for. Where they are not (deep layers), norms go through
`linear.product_square_norms` on the unfolded input and the sum through the ordinary weight gradient of a convolution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenclip.gradients.layers.layer import Formed, LayerGradient, operand_roundoff, sum_square_norms, wanted
from evenclip.gradients.layers.linear import product_square_norms

__all__ = ["gradient"]

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

# Below this many input channels an offset's product is too thin to be worth a call: unfold, then one product for all
# offsets.
_THIN = 8


def gradient(module: Convolution, a: Tensor, delta: Tensor, names: Collection[str]) -> LayerGradient:
    """The gradients of a convolution.  a: [sample, in, *space], delta: [sample, out, *space]"""
    shifts = Shifts(module, a, delta)
    if len(a) * math.prod(module.weight.shape) <= a.numel() + delta.numel():
        return Formed(wanted({"weight": shifts.weight_gradients, "bias": shifts.bias_gradients}, names))
    return LargeConvolution(shifts, names)


class Shifts:
    """The padded input of a convolution beside its δ, with the kernel's offsets."""

    def __init__(self, module: Convolution, a: Tensor, delta: Tensor) -> None:
        self.module = module
        self.a, self.delta = _padded(module, a), delta
        self.n, self.g = len(a), module.groups
        self.space = delta.shape[2:]  # output positions along each axis
        self.c, self.p = module.in_channels // self.g, module.out_channels // self.g

    def __iter__(self) -> Iterator[Tensor]:
        """The input that each offset of the kernel sees.  # [sample · group, c, position]"""
        module = self.module
        for offset in itertools.product(*(range(k) for k in module.kernel_size)):
            window = self.a
            for axis, (o, size) in enumerate(zip(offset, self.space, strict=True), start=2):
                start = o * module.dilation[axis - 2]
                stop = start + (size - 1) * module.stride[axis - 2] + 1
                window = window.narrow(axis, start, stop - start)
                window = window[(slice(None),) * axis + (slice(None, None, module.stride[axis - 2]),)]
            yield window.reshape(self.n * self.g, self.c, -1)

    @cached_property
    def outputs(self) -> Tensor:
        """δ over positions.  # [sample · group, p, position]"""
        return self.delta.reshape(self.n * self.g, self.p, -1)

    @cached_property
    def unfolded(self) -> Tensor:
        """All offsets side by side.  # [sample · group, position, c · offset]"""
        stacked = torch.stack(list(self), dim=2)  # [sample · group, c, offset, position]
        return stacked.flatten(1, 2).mT

    @cached_property
    def weight_gradients(self) -> Tensor:
        """Every sample's gradient of the weight.  # [sample, out, c, *kernel]"""
        if self.c < _THIN:
            each = self.outputs @ self.unfolded  # [sample · group, p, c · offset]
        else:
            products = [self.outputs @ window.mT for window in self]  # offset of [sample · group, p, c]
            each = torch.stack(products, dim=3)
        return each.reshape(self.n, *self.module.weight.shape)

    @cached_property
    def bias_gradients(self) -> Tensor:
        """Every sample's gradient of the bias.  # [sample, out]"""
        return self.delta.flatten(2).sum(dim=2)


class LargeConvolution(LayerGradient):
    """A convolution with more parameters a sample than activations: its gradients are not kept."""

    def __init__(self, shifts: Shifts, names: Collection[str]) -> None:
        self._shifts, self._names = shifts, frozenset(names)

    def square_norms(self) -> Tensor:
        shifts = self._shifts
        total = shifts.a.new_zeros(shifts.n, dtype=torch.float64)
        if "weight" in self._names:
            each = product_square_norms(shifts.unfolded, shifts.outputs.mT, _operands(shifts.a))  # [sample · group]
            total = each.reshape(shifts.n, shifts.g).sum(dim=1)
        if "bias" in self._names:
            total = total + sum_square_norms(shifts.delta.flatten(2).mT)
        return total

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        shifts, module = self._shifts, self._shifts.module
        weighted = shifts.delta * weights.to(shifts.delta.dtype).view(-1, *(1 for _ in shifts.delta.shape[1:]))
        out = {}
        if "weight" in self._names:
            out["weight"] = torch.ops.aten.convolution_backward(
                weighted, shifts.a, module.weight.detach(), None,
                module.stride, [0] * len(shifts.space), module.dilation, False, [0], module.groups,
                [False, True, False],
            )[1]  # fmt: skip
        if "bias" in self._names:
            out["bias"] = weighted.transpose(0, 1).flatten(1).sum(dim=1)
        return out

    def per_sample(self) -> dict[str, Tensor]:
        return wanted({"weight": self._shifts.weight_gradients, "bias": self._shifts.bias_gradients}, self._names)


def _operands(like: Tensor) -> float:
    """What a convolution rounds its operands to; on a GPU that is TF32 unless somebody has forbidden it."""
    backend = torch.backends.cudnn if like.is_cuda else torch.backends.mkldnn
    return operand_roundoff(like, backend.conv.fp32_precision)


def _padded(module: Convolution, a: Tensor) -> Tensor:
    """The input as the kernel sees it, padded in the layer's own way."""
    if isinstance(module.padding, str):
        sides = list(module._reversed_padding_repeated_twice)
    else:
        sides = [p for p in reversed(module.padding) for _ in range(2)]
    if not any(sides):
        return a
    return F.pad(a, sides, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
