"""What small convolutions are made of in a graph: operations of our own, which kernels do on a GPU.

    weight_gradients   every sample's gradient of the weight (`convolution_cuda`)
    convolved          the forward pass, with the tanh after it; and δ on its way back (`passes_cuda`)
    pulled_back        both for a layer whose input was a tanh

Elsewhere torch does the same, so that graphs can be tried on any machine.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from evenclip.gradients.layers.layer import has_kernels

__all__ = ["convolved", "fits", "pulled_back", "weight_gradients"]

# Channels on either side and offsets up to which `passes_cuda` was measured, and was quicker; beyond, nobody knows.
_MOST_CHANNELS, _MOST_OFFSETS, _OUTS = 32, 9, 8
# Positions are counted in 32 bits.
_MOST_POSITIONS = 2**31 - 2**12


@torch.library.custom_op("evenclip::weight_gradients", mutates_args=())
def weight_gradients(
    a: Tensor, delta: Tensor, kernel: list[int], stride: list[int], dilation: list[int], exact: bool
) -> Tensor:
    """Every sample's gradient of the weight of a convolution in two dimensions, without channel groups.

    Args:
        a: the padded input.  # [sample, in, height, width], float32
        delta: [sample, out, height, width], float32
        kernel: its height and width.
        stride: along both.
        dilation: along both.
        exact: whether operands have all their bits, or eleven.

    Returns:
        [sample, out, in · kernel height · kernel width]
    """
    if not has_kernels(a):
        rows, columns = (a.shape[i + 2] - (kernel[i] - 1) * dilation[i] for i in (0, 1))
        view = a.unfold(2, rows, dilation[0]).unfold(3, columns, dilation[1])  # [sample, in, *kernel, *space]
        windows = view[..., :: stride[0], :: stride[1]].flatten(4).flatten(1, 3)
        return delta.flatten(2) @ windows.mT
    from evenclip.gradients.layers import convolution_cuda  # triton comes with torch for CUDA

    return convolution_cuda.weight_gradients(a, delta, kernel, stride, dilation, exact=exact)


@weight_gradients.register_fake
def _(a: Tensor, delta: Tensor, kernel: list[int], stride: list[int], dilation: list[int], exact: bool) -> Tensor:
    del stride, dilation, exact
    return a.new_empty(a.shape[0], delta.shape[1], a.shape[1] * kernel[0] * kernel[1])


def fits(inputs: int, outputs: int, kernel: tuple[int, int]) -> bool:
    """Whether a convolution of so many channels is small enough for `convolved`."""
    return max(inputs, outputs) <= _MOST_CHANNELS and outputs % _OUTS == 0 and kernel[0] * kernel[1] <= _MOST_OFFSETS


@torch.library.custom_op("evenclip::convolved", mutates_args=())
def convolved(a: Tensor, weight: Tensor, bias: Tensor | None, padding: list[int], tanh: bool) -> Tensor:
    """A convolution without strides, and perhaps its tanh.

    Args:
        a: [sample, in, height, width], float32
        weight: [in, kernel height, kernel width, out]
        bias: [out]
        padding: zeros around the input, along height and width.
        tanh: whether to take it.

    Returns:
        [sample, out, height, width]
    """
    if has_kernels(a):
        return _by_kernel(a, weight, bias, padding, None, tanh=tanh)
    found = F.conv2d(a, weight.permute(3, 0, 1, 2), bias, padding=padding)
    return found.tanh() if tanh else found


@convolved.register_fake
def _(a: Tensor, weight: Tensor, bias: Tensor | None, padding: list[int], tanh: bool) -> Tensor:
    del bias, tanh
    return _room(a, weight, padding)


@torch.library.custom_op("evenclip::pulled_back", mutates_args=["a"])
def pulled_back(a: Tensor, delta: Tensor, weight: Tensor, exact: bool) -> Tensor:
    """What the backward pass of a convolution is for: every sample's gradient of its weight, and δ before it.

    The input was a tanh, of which the derivative is taken too. δ is put in its place: it is the largest piece of memory
    that a step has, and the gradients are the last that need it.

    Args:
        a: the input; afterwards, δ before the tanh.  # [sample, in, height, width], float32
        delta: [sample, out, height, width]
        weight: turned round, [out, kernel height, kernel width, in]
        exact: as for `weight_gradients`.

    Returns:
        [sample, out, in · kernel height · kernel width]
    """
    _, *kernel, _ = weight.shape
    each: Tensor = weight_gradients(a, delta, kernel, [1, 1], [1, 1], exact)
    around = [side - 1 for side in kernel]
    if has_kernels(a) and a.is_contiguous():
        _by_kernel(delta, weight, None, around, a, tanh=False)
    else:
        a.copy_(convolved(delta, weight, None, around, False) * (1 - a.square()))
    return each


@pulled_back.register_fake
def _(a: Tensor, delta: Tensor, weight: Tensor, exact: bool) -> Tensor:
    del exact
    return a.new_empty(a.shape[0], delta.shape[1], a.shape[1] * weight.shape[1] * weight.shape[2])


def _room(a: Tensor, weight: Tensor, padding: list[int]) -> Tensor:
    """Room for what comes out."""
    sides = (a.shape[i] + 2 * padding[i - 2] - weight.shape[i - 1] + 1 for i in (2, 3))
    return a.new_empty(a.shape[0], weight.shape[3], *sides)


def _by_kernel(
    a: Tensor, weight: Tensor, bias: Tensor | None, padding: list[int], after: Tensor | None, *, tanh: bool
) -> Tensor:
    """In parts, if there are more samples than it can count positions of."""
    from evenclip.gradients.layers.passes_cuda import windows_times  # triton comes with torch for CUDA

    a, weight = a.contiguous(), weight.contiguous()
    out = _room(a, weight, padding) if after is None else after
    each = max(1, _MOST_POSITIONS // (out.shape[2] * out.shape[3]))
    for start in range(0, a.shape[0], each):
        part = slice(start, start + each)
        windows_times(a[part], weight, bias, padding, None if after is None else after[part], out[part], tanh=tanh)
    return out
