"""Every sample's gradient of a convolution's weight on a GPU, by a kernel of our own.

Of sample i it is the matrix product δ_i [out, position] · windows_i [position, in · offset]. Libraries want the windows
in memory, nine times the activations for a 3×3 kernel, and reading them back is most of the time that takes. Here they
are addressed in place, as the library's own convolutions do for the summed gradient. Products are taken on the tensor
cores in three parts (3xTF32), which is as exact as float32: both operands are split into two numbers of 11 bits. Where
the user has allowed TF32, in one: what is measured and summed afterwards are the gradients that come out, so that no
norm is too small for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["weight_gradients"]


def weight_gradients(
    a: Tensor, delta: Tensor, kernel: list[int], stride: list[int], dilation: list[int], *, exact: bool
) -> Tensor:
    """Every sample's gradient of the weight, as `operations.weight_gradients` has it."""
    a, delta = a.contiguous(), delta.contiguous()
    n, c, height, width = a.shape
    _, p, rows, columns = delta.shape
    size = c * kernel[0] * kernel[1]
    out = a.new_empty(n, p, size)
    block_p, block_size = max(16, min(64, triton.next_power_of_2(p))), max(16, min(64, triton.next_power_of_2(size)))
    grid = (n, triton.cdiv(size, block_size), triton.cdiv(p, block_p))
    _weight_gradient[grid](
        a, delta, out, c, height, width, p, rows, columns, kernel[0], kernel[1], stride[0], stride[1], dilation[0],
        dilation[1], block_p, block_size, 32, "tf32x3" if exact else "tf32", num_warps=2, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _weight_gradient(  # type: ignore[no-untyped-def]  # noqa: ANN202
    a, delta, out, c: tl.constexpr,  # noqa: ANN001
    height: tl.constexpr, width: tl.constexpr, p: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, kernel_h: tl.constexpr, kernel_w: tl.constexpr,
    stride_h: tl.constexpr, stride_w: tl.constexpr, dilation_h: tl.constexpr, dilation_w: tl.constexpr,
    block_p: tl.constexpr, block_size: tl.constexpr, block_t: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    # One block of one sample's gradient: [block_p of out, block_size of in · offset].
    sample = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * block_size + tl.arange(0, block_size)
    outs = tl.program_id(2) * block_p + tl.arange(0, block_p)
    size: tl.constexpr = c * kernel_h * kernel_w
    positions: tl.constexpr = rows * columns
    offset = places % (kernel_h * kernel_w)
    shift = (offset // kernel_w) * dilation_h * width + (offset % kernel_w) * dilation_w
    window = a + sample * c * height * width + (places // (kernel_h * kernel_w)) * height * width + shift
    signal = delta + sample * p * positions + outs * positions
    total = tl.zeros([block_p, block_size], dtype=tl.float32)
    for start in range(0, positions, block_t):
        t = start + tl.arange(0, block_t)
        there = t < positions
        at = (t // columns) * stride_h * width + (t % columns) * stride_w
        d = tl.load(signal[:, None] + t[None, :], mask=(outs < p)[:, None] & there[None, :], other=0.0)
        # Positions along the last axis, as in d: neighbours lie side by side in memory.
        x = tl.load(window[:, None] + at[None, :], mask=there[None, :] & (places < size)[:, None], other=0.0)
        total = tl.dot(d, tl.trans(x), total, input_precision=precision)
    target = out + sample * p * size + outs[:, None] * size + places[None, :]
    tl.store(target, total, mask=(outs < p)[:, None] & (places < size)[None, :])
