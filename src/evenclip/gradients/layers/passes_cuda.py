"""A convolution's passes through the model on a GPU, forward and back to its input, by a kernel of our own.

In full float32 the library takes them on the ordinary cores, with tiles that are half empty where there are few output
channels. Here they are products on the tensor cores in three parts (3xTF32), as exact as float32, with the windows
addressed where they lie. It pays where images are large and channels few (`lowering` says where). Both passes are one
product of windows [position, channel · offset] with a matrix:

    forward     window at  y·stride + offset·dilation − padding     of the input,  times w[out, in, offset]
    back        window at  y + padding − offset·dilation            of δ,          times w[out, in, offset] over `out`
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward", "forward"]

# Whether there are edges to look out for -> positions and depth of a block, and warps that compute it: the quickest of
# those that were tried on CelebA's layers on an H200.
_BLOCKS = {False: (64, 32, 2), True: (128, 16, 4)}


@torch.library.custom_op("evenclip::convolution", mutates_args=())
def forward(a: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """The convolution, without its bias.

    Args:
        a: [sample, in, height, width], float32
        weight: [out, in, kernel height, kernel width]
        stride: along both axes.
        padding: with zeros, along both.
        dilation: along both.

    Returns:
        [sample, out, height, width]
    """
    weight = weight.contiguous()
    out = a.new_empty(_size(a, weight, stride, padding, dilation))
    _launch(a, weight, out, weight.shape[1], (weight.stride(0), weight.stride(1)), stride, padding, dilation, 1)
    return out


@forward.register_fake
def _(a: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    return a.new_empty(_size(a, weight, stride, padding, dilation))


@torch.library.custom_op("evenclip::convolution_back", mutates_args=())
def backward(delta: Tensor, weight: Tensor, size: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """The gradient with respect to the input of a convolution of stride 1.

    Args:
        delta: [sample, out, height, width], float32
        weight: [out, in, kernel height, kernel width]
        size: height and width of the input.
        padding: with zeros, along both axes.
        dilation: along both.

    Returns:
        [sample, in, height, width]
    """
    weight = weight.contiguous()
    out = delta.new_empty(delta.shape[0], weight.shape[1], size[0], size[1])
    strides = weight.stride(1), weight.stride(0)
    _launch(delta, weight, out, weight.shape[0], strides, [1, 1], [-padding[0], -padding[1]], dilation, -1)
    return out


@backward.register_fake
def _(delta: Tensor, weight: Tensor, size: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    del padding, dilation
    return delta.new_empty(delta.shape[0], weight.shape[1], size[0], size[1])


def _size(a: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> list[int]:
    """Of what comes out."""
    sides = [
        (a.shape[2 + i] + 2 * padding[i] - dilation[i] * (weight.shape[2 + i] - 1) - 1) // stride[i] + 1 for i in (0, 1)
    ]
    return [a.shape[0], weight.shape[0], *sides]


def _launch(
    a: Tensor, weight: Tensor, out: Tensor, channels: int, strides: tuple[int, int], stride: list[int],
    padding: list[int], dilation: list[int], sign: int,
) -> None:  # fmt: skip
    a, kernel = a.contiguous(), weight.shape[2:]
    n, outs, rows, columns = out.shape
    has_edges = sign < 0 or any(padding)
    block_positions, block_depth, warps = _BLOCKS[has_edges]
    block_outs = max(16, min(64, triton.next_power_of_2(outs)))
    grid = (triton.cdiv(n * rows * columns, block_positions), triton.cdiv(outs, block_outs))
    _windows_times[grid](
        a, weight, out, n, channels, a.shape[2], a.shape[3], outs, rows, columns, kernel[0], kernel[1], stride[0],
        stride[1], padding[0], padding[1], sign * dilation[0], sign * dilation[1], strides[0], strides[1], has_edges,
        block_positions, block_outs, block_depth, num_warps=warps, num_stages=3,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _windows_times(  # type: ignore[no-untyped-def]  # noqa: ANN202
    a, weight, out, n, channels: tl.constexpr,  # noqa: ANN001
    height: tl.constexpr, width: tl.constexpr, outs: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    kernel_h: tl.constexpr, kernel_w: tl.constexpr, stride_h: tl.constexpr, stride_w: tl.constexpr,
    padding_h: tl.constexpr, padding_w: tl.constexpr, dilation_h: tl.constexpr, dilation_w: tl.constexpr,
    stride_out: tl.constexpr, stride_channel: tl.constexpr, has_edges: tl.constexpr,
    block_positions: tl.constexpr, block_outs: tl.constexpr, block_depth: tl.constexpr,
):  # fmt: skip
    # Some positions of some samples, times a block of output channels; with edges to look out for, the other way round.
    positions: tl.constexpr = rows * columns
    offsets: tl.constexpr = kernel_h * kernel_w
    depth: tl.constexpr = channels * offsets
    place = tl.program_id(0) * block_positions + tl.arange(0, block_positions)
    there = place < n * positions
    sample, position = (place // positions).to(tl.int64), place % positions
    y, x = (position // columns) * stride_h - padding_h, (position % columns) * stride_w - padding_w
    corner = a + sample * (channels * height * width) + y * width + x
    o = tl.program_id(1) * block_outs + tl.arange(0, block_outs)
    target = out + sample * (outs * positions) + position
    if has_edges:
        total = tl.zeros([block_outs, block_positions], dtype=tl.float32)
    else:
        total = tl.zeros([block_positions, block_outs], dtype=tl.float32)
    for start in range(0, depth, block_depth):
        k = start + tl.arange(0, block_depth)
        channel, offset = k // offsets, k % offsets
        down, right = (offset // kernel_w) * dilation_h, (offset % kernel_w) * dilation_w
        shift, matrix = channel * (height * width) + down * width + right, channel * stride_channel + offset
        if has_edges:
            at_y, at_x = y[None, :] + down[:, None], x[None, :] + right[:, None]
            inside = (
                (k < depth)[:, None] & there[None, :] & (at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width)
            )
            window = tl.load(corner[None, :] + shift[:, None], mask=inside, other=0.0)
            known = (o < outs)[:, None] & (k < depth)[None, :]
            w = tl.load(weight + (o * stride_out)[:, None] + matrix[None, :], mask=known, other=0.0)
            total = tl.dot(w, window, total, input_precision="tf32x3")
        else:
            inside = there[:, None] & (k < depth)[None, :]
            window = tl.load(corner[:, None] + shift[None, :], mask=inside, other=0.0)
            known = (k < depth)[:, None] & (o < outs)[None, :]
            w = tl.load(weight + (o * stride_out)[None, :] + matrix[:, None], mask=known, other=0.0)
            total = tl.dot(window, w, total, input_precision="tf32x3")
    if has_edges:
        tl.store(target[None, :] + (o * positions)[:, None], total, mask=(o < outs)[:, None] & there[None, :])
    else:
        tl.store(target[:, None] + (o * positions)[None, :], total, mask=there[:, None] & (o < outs)[None, :])
