"""Convolutions in one, two and three dimensions.

Any stride, padding, dilation and number of channel groups is supported. A convolution is a linear
layer over output positions. For each offset of the kernel, its input is the padded input shifted by
that offset. So the gradient of one sample is, for each offset o,

    G_i[:, :, o] = Σ_t δ_i[:, t] · a_i[:, t shifted by o]ᵀ

These gradients are formed if they are smaller than the activations. Otherwise (deep layers)
`linear.product_square_norms` computes the norms from the unfolded input, and one product per offset
computes the sum. There are three ways to form the gradients, the fastest
first:

    few input channels, CUDA   unfold the input, then one product for all offsets
    a CPU with oneDNN          weight gradient of one convolution with samples as channel groups
    anything else              one batched product per offset, without storing the unfolded input
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
    sum_square_norms,
)
from evenclip.gradients.layers.linear import product_square_norms

__all__ = ["FORMULAS", "Convolution", "gradient"]

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

# With fewer input channels than this, a product per offset is too small for its own call.
_THIN = 8


def gradient(
    module: Convolution, a: Tensor, delta: Tensor, names: Collection[str]
) -> LayerGradient:
    """Return the gradients of a convolution.

    a: [sample, in, *space], delta: [sample, out, *space]
    """
    if a.shape[0] * math.prod(module.weight.shape) <= a.numel() + delta.numel():
        return Formed(Shifts(module, a, delta).per_sample(names))
    return LargeConvolution(Shifts(module, a, delta), names)


class Shifts:
    """The padded input and the δ of a convolution, with the kernel's offsets."""

    def __init__(self, module: Convolution, a: Tensor, delta: Tensor) -> None:
        self.module = module
        self.a, self.delta = _padded(module, a), delta
        self.n, self.g = a.shape[0], module.groups
        self.space = delta.shape[2:]  # output positions along each axis
        self.c, self.p = module.in_channels // self.g, module.out_channels // self.g

    def masked(self, keep: Tensor) -> Shifts:
        """Return a copy with 0 for all other samples."""
        masked = copy.copy(self)
        masked.a, masked.delta = kept(self.a, keep), kept(self.delta, keep)
        for name in ("outputs", "unfolded"):  # cached values of the unmasked samples
            vars(masked).pop(name, None)
        return masked

    @property
    def windows(self) -> Tensor:
        """View of the input for each kernel offset.  # [sample, in, *kernel, *space]"""
        module, view = self.module, self.a
        for axis, size in enumerate(self.space):
            stride = module.stride[axis]
            view = view.unfold(axis + 2, (size - 1) * stride + 1, module.dilation[axis])
            view = view.narrow(axis + 2, 0, module.kernel_size[axis])[..., ::stride]
        return view

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the windows offset by offset.  # [sample · group, c, position]"""
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
        """Return name -> per-sample gradients of these parameters.  # [sample, *parameter]"""
        out = {}
        if "weight" in names:
            out["weight"] = self.weight_gradients
        if "bias" in names:
            out["bias"] = self.delta.flatten(2).sum(dim=2)
        return out

    @property
    def weight_gradients(self) -> Tensor:
        """Per-sample gradients of the weight.  # [sample, out, c, *kernel]"""
        if _is_thin(self.module) or self.a.is_cuda:
            return self.by_unfolding()
        # The number of groups must be an int; while shapes are traced, n is symbolic.
        if isinstance(self.n, int) and _has_onednn(self.a):
            return self.by_groups()
        return self.by_offsets()

    def by_unfolding(self) -> Tensor:
        """Compute `weight_gradients` with one product for all offsets."""
        each = self.unfolded @ self.outputs.mT  # [sample · group, c · offset, p]
        return each.mT.reshape(self.n, *self.module.weight.shape)

    def by_groups(self) -> Tensor:
        """Compute `weight_gradients` with one convolution with samples as channel groups."""
        module, groups = self.module, self.n * self.g
        delta, a = self.delta.reshape(1, -1, *self.space), self.a.reshape(1, -1, *self.a.shape[2:])
        # Only the shape of `weight` is used.
        weight = a.new_empty(()).expand(groups * self.p, *module.weight.shape[1:])
        each = _weight_gradient(module, a, delta, weight, groups)
        return each.reshape(self.n, *module.weight.shape)

    def by_offsets(self) -> Tensor:
        """Compute `weight_gradients` with one product per offset."""
        products = [self.outputs @ window.mT for window in self]  # offset of [sample · group, p, c]
        return torch.stack(products, dim=3).reshape(self.n, *self.module.weight.shape)


class LargeConvolution(LayerGradient):
    """A convolution with more parameters than activations per sample; not formed."""

    cancels = True

    def __init__(self, shifts: Shifts, names: Collection[str]) -> None:
        self._shifts, self._names = shifts, frozenset(names)

    def square_norms(self) -> Tensor:
        shifts = self._shifts
        total = shifts.a.new_zeros(shifts.n, dtype=torch.float64)
        if "weight" in self._names:
            a, delta = shifts.unfolded.mT, shifts.outputs.mT
            each = product_square_norms(a, delta)  # [sample · group]
            total = each.reshape(shifts.n, shifts.g).sum(dim=1)
        if "bias" in self._names:
            total = total + sum_square_norms(shifts.delta.flatten(2).mT)
        return total

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        shifts, module = self._shifts, self._shifts.module
        weights = weights.to(torch.promote_types(weights.dtype, shifts.delta.dtype))
        weighted = shifts.delta * weights.view(-1, *(1 for _ in shifts.delta.shape[1:]))
        out = {}
        if "weight" in self._names:
            if weighted.dtype == shifts.a.dtype:
                weight = shifts.a.new_empty(()).expand(module.weight.shape)
                out["weight"] = _weight_gradient(module, shifts.a, weighted, weight, module.groups)
            else:
                out["weight"] = _wider_weight_gradient(shifts, weighted)
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
    """Return the gradient of a convolution's weight, summed over samples; `a` is padded."""
    none, wanted = [0] * len(module.kernel_size), [False, True, False]  # input, weight, bias
    total: Tensor = torch.ops.aten.convolution_backward(
        delta, a, weight, None, module.stride, none, module.dilation, False, none, groups, wanted
    )[1]
    return total


def _wider_weight_gradient(shifts: Shifts, weighted: Tensor) -> Tensor:
    """Return the same in the wider dtype of `weighted`, with one product per offset.

    torch's own convolutions are slow in float64.
    """
    n, g = shifts.n, shifts.g
    outputs = weighted.reshape(n, g, shifts.p, -1).permute(1, 2, 0, 3).reshape(g, shifts.p, -1)
    inputs = (  # [group, sample · position, c]
        window.reshape(n, g, shifts.c, -1).permute(1, 0, 3, 2).reshape(g, -1, shifts.c)
        for window in shifts
    )
    # [group, p, sample · position] @ [group, sample · position, c]
    products = [outputs @ window.to(outputs) for window in inputs]
    return torch.stack(products, dim=3).reshape(shifts.module.weight.shape)


def _is_thin(module: Convolution) -> bool:
    """Return whether each group of the convolution has few input channels."""
    return module.in_channels // module.groups < _THIN


def _has_onednn(like: Tensor) -> bool:
    """Return whether oneDNN supports such tensors; other backends loop over thousands of groups."""
    return (
        like.device.type == "cpu"
        and like.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.backends.mkldnn.enabled)
    )


def _padded(module: Convolution, a: Tensor) -> Tensor:
    """Return the input padded in the layer's padding mode."""
    if isinstance(module.padding, str):
        sides = list(module._reversed_padding_repeated_twice)
    else:
        sides = [p for p in reversed(module.padding) for _ in range(2)]
    if not any(sides):
        return a
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(a, sides, mode=mode)


FORMULAS = {
    nn.Conv1d: gradient,
    nn.Conv2d: gradient,
    nn.Conv3d: gradient,
}
