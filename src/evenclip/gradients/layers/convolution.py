"""Convolutions in one, two and three dimensions: any stride, padding, dilation and number of
channel groups.

A convolution is a linear layer over output positions whose input is, for each offset of the kernel,
the padded input shifted by that offset. So the gradient of one sample is, for each offset o,

    G_i[:, :, o] = Σ_t δ_i[:, t] · a_i[:, t shifted by o]ᵀ

These are formed: they are tiny beside the activations in the networks this is for. Where they are
not (deep layers), norms go through `linear.product_square_norms` on the unfolded input and the sum
through the ordinary weight gradient of a convolution. There are three ways to form them, quickest
first where they apply:

    few input channels, CUDA   unfold the input, then one product for all offsets
    a CPU with oneDNN          the weight gradient of one convolution that has the samples as channel groups
    anything else              one batched product an offset, without the unfolded input ever being written
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterator
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenclip.gradients.layers.layer import (
    Formed,
    LayerGradient,
    kept,
    operand_roundoff,
    sum_square_norms,
)
from evenclip.gradients.layers.linear import product_square_norms

__all__ = ["Convolution", "gradient"]

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

# Below this many input channels an offset's product is too thin to be worth a call.
_THIN = 8


def gradient(
    module: Convolution, a: Tensor, delta: Tensor, names: Collection[str]
) -> LayerGradient:
    """The gradients of a convolution.  a: [sample, in, *space], delta: [sample, out, *space]"""
    if a.shape[0] * math.prod(module.weight.shape) <= a.numel() + delta.numel():
        return Formed(Shifts(module, a, delta).per_sample(names))
    return LargeConvolution(Shifts(module, a, delta), names)


class Shifts:
    """The padded input of a convolution beside its δ, with the kernel's offsets."""

    def __init__(self, module: Convolution, a: Tensor, delta: Tensor) -> None:
        self.module = module
        self.a, self.delta = _padded(module, a), delta
        self.n, self.g = a.shape[0], module.groups
        self.space = delta.shape[2:]  # output positions along each axis
        self.c, self.p = module.in_channels // self.g, module.out_channels // self.g

    def masked(self, keep: Tensor) -> Shifts:
        """The same with 0 for samples that are not kept."""
        found = copy.copy(self)
        found.a, found.delta = kept(self.a, keep), kept(self.delta, keep)
        for name in ("outputs", "unfolded"):  # remembered of the old ones
            vars(found).pop(name, None)
        return found

    @property
    def windows(self) -> Tensor:
        """The input that each offset of the kernel sees, as a view.  # [sample, in, *kernel,
        *space]
        """
        module, view = self.module, self.a
        for axis, size in enumerate(self.space):
            stride = module.stride[axis]
            view = view.unfold(axis + 2, (size - 1) * stride + 1, module.dilation[axis])
            view = view.narrow(axis + 2, 0, module.kernel_size[axis])[..., ::stride]
        return view

    def __iter__(self) -> Iterator[Tensor]:
        """The windows, offset by offset.  # [sample · group, c, position]"""
        windows = self.windows
        for offset in itertools.product(*(range(k) for k in self.module.kernel_size)):
            window = windows
            for o in offset:
                window = window.select(2, o)
            yield window.reshape(self.n * self.g, self.c, -1)

    @cached_property
    def outputs(self) -> Tensor:
        """δ over positions.  # [sample · group, p, position]"""
        return self.delta.reshape(self.n * self.g, self.p, -1)

    @cached_property
    def unfolded(self) -> Tensor:
        """All offsets side by side.  # [sample · group, c · offset, position]"""
        return self.windows.reshape(self.n * self.g, -1, math.prod(self.space))

    def per_sample(self, names: Collection[str]) -> dict[str, Tensor]:
        """Name -> every sample's gradient, for those parameters.  # [sample, *parameter]"""
        out = {}
        if "weight" in names:
            out["weight"] = self.weight_gradients
        if "bias" in names:
            out["bias"] = self.delta.flatten(2).sum(dim=2)
        return out

    @property
    def weight_gradients(self) -> Tensor:
        """Every sample's gradient of the weight.  # [sample, out, c, *kernel]"""
        if _is_thin(self.module) or self.a.is_cuda:
            return self.by_unfolding()
        # A number of groups must be a number: where the number of samples is a symbol, there are
        # none.
        return (
            self.by_groups()
            if isinstance(self.n, int) and _has_onednn(self.a)
            else self.by_offsets()
        )

    def by_unfolding(self) -> Tensor:
        """One product for all offsets."""
        each = self.unfolded @ self.outputs.mT  # [sample · group, c · offset, p]
        return each.mT.reshape(self.n, *self.module.weight.shape)

    def by_groups(self) -> Tensor:
        """The weight gradient of a convolution of one large sample, in which ours are groups of
        channels.
        """
        module, groups = self.module, self.n * self.g
        delta, a = self.delta.reshape(1, -1, *self.space), self.a.reshape(1, -1, *self.a.shape[2:])
        weight = a.new_empty(()).expand(
            groups * self.p, *module.weight.shape[1:]
        )  # only its shape is looked at
        return _weight_gradient(module, a, delta, weight, groups).reshape(
            self.n, *module.weight.shape
        )

    def by_offsets(self) -> Tensor:
        """A product for each offset."""
        products = [self.outputs @ window.mT for window in self]  # offset of [sample · group, p, c]
        return torch.stack(products, dim=3).reshape(self.n, *self.module.weight.shape)


class LargeConvolution(LayerGradient):
    """A convolution with more parameters a sample than activations: its gradients are not kept."""

    def __init__(self, shifts: Shifts, names: Collection[str]) -> None:
        self._shifts, self._names = shifts, frozenset(names)

    def square_norms(self) -> Tensor:
        shifts = self._shifts
        total = shifts.a.new_zeros(shifts.n, dtype=torch.float64)
        if "weight" in self._names:
            each = product_square_norms(
                shifts.unfolded.mT, shifts.outputs.mT, _operands(shifts.a)
            )  # [sample · group]
            total = each.reshape(shifts.n, shifts.g).sum(dim=1)
        if "bias" in self._names:
            total = total + sum_square_norms(shifts.delta.flatten(2).mT)
        return total

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        shifts, module = self._shifts, self._shifts.module
        weighted = shifts.delta * weights.to(shifts.delta.dtype).view(
            -1, *(1 for _ in shifts.delta.shape[1:])
        )
        out = {}
        if "weight" in self._names:
            out["weight"] = _weight_gradient(
                module,
                shifts.a,
                weighted,
                shifts.a.new_empty(()).expand(module.weight.shape),
                module.groups,
            )
        if "bias" in self._names:
            out["bias"] = weighted.transpose(0, 1).flatten(1).sum(dim=1)
        return out

    def per_sample(self) -> dict[str, Tensor]:
        return self._shifts.per_sample(self._names)

    def masked(self, keep: Tensor) -> LargeConvolution:
        return LargeConvolution(self._shifts.masked(keep), self._names)


def _weight_gradient(
    module: Convolution, a: Tensor, delta: Tensor, weight: Tensor, groups: int
) -> Tensor:
    """The ordinary gradient of a convolution's weight, summed over the samples; `a` is padded
    already.
    """
    none, wanted = [0] * len(module.kernel_size), [False, True, False]  # of input, weight and bias
    found: Tensor = torch.ops.aten.convolution_backward(
        delta, a, weight, None, module.stride, none, module.dilation, False, none, groups, wanted
    )[1]
    return found


def _is_thin(module: Convolution) -> bool:
    """Whether the convolution has few input channels, in each of its groups."""
    return module.in_channels // module.groups < _THIN


def _has_onednn(like: Tensor) -> bool:
    """Whether oneDNN takes convolutions of such numbers: elsewhere, thousands of groups are taken
    one by one.
    """
    return (
        like.device.type == "cpu"
        and like.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.backends.mkldnn.enabled)
    )


def _operands(like: Tensor) -> float:
    """What a convolution rounds its operands to; on a GPU that is TF32 unless somebody has
    forbidden it.
    """
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
    return F.pad(
        a, sides, mode="constant" if module.padding_mode == "zeros" else module.padding_mode
    )
