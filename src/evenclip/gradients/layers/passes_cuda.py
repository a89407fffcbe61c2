"""A small convolution's passes on a GPU, by a kernel of our own.

cuDNN takes float32 convolutions of few channels at a tenth to a third of what the cores can do, and writes its result
for the tanh that follows to read again. Here every thread holds the sums of eight positions and eight channels, the
windows are read where they lie, mostly from the cache, and tanh, or its derivative on the way back, is taken before
anything is written. All in float32: operands of eleven bits are left to cuDNN, which has tensor cores for them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

__all__ = ["windows_times"]

# Output channels of a block; and positions, by whether there are few channels to sum over.
_OUTS, _POSITIONS = 8, {True: 512, False: 1024}
_FEW = 8


def windows_times(
    a: Tensor, weight: Tensor, bias: Tensor | None, padding: list[int], after: Tensor | None, out: Tensor, *, tanh: bool
) -> None:
    """Write the convolution of a with the weight, plus the bias; then its tanh, or times (1 − after²).

    Args:
        a: [sample, in, height, width], float32, contiguous
        weight: [in, kernel height, kernel width, out], contiguous; a number of outputs that eight divides
        bias: [out]
        padding: zeros around the input, along height and width.
        after: as out, and may be the same memory.
        out: [sample, out, height, width], contiguous
        tanh: whether to take it.
    """
    n, c, height, width = a.shape
    p, rows, columns = out.shape[1:]
    total, block = n * rows * columns, _POSITIONS[c < _FEW]
    _windows_times[(triton.cdiv(total, block), p // _OUTS)](
        a, weight, bias, after, out, total, 0, c, height, width, p, rows, columns, weight.shape[1], weight.shape[2],
        padding[0], padding[1], bias is not None, after is not None, tanh, block, _OUTS, num_warps=4,
    )  # fmt: skip


# `nothing` is 0. The compiler must not know that places in memory are multiples of anything: it would give each thread
# four neighbours, to write them at once, and then reads of the windows would not lie side by side.
@triton.jit(do_not_specialize=["nothing"])  # type: ignore[untyped-decorator]
def _windows_times(  # type: ignore[no-untyped-def]  # noqa: ANN202
    a, weight, bias, after, out, total, nothing, c: tl.constexpr,  # noqa: ANN001
    height: tl.constexpr, width: tl.constexpr, p: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    kernel_h: tl.constexpr, kernel_w: tl.constexpr, pad_h: tl.constexpr, pad_w: tl.constexpr,
    has_bias: tl.constexpr, has_after: tl.constexpr, tanh: tl.constexpr, block: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    # Positions of all samples are one axis. Everything has two axes from the start: one layout, and no conversions.
    positions: tl.constexpr = rows * columns
    t = (tl.program_id(0) * block + tl.arange(0, block))[:, None]
    outs = (tl.program_id(1) * block_p + tl.arange(0, block_p))[None, :]
    there = t < total
    t = tl.minimum(t, total - 1)  # the last ones read what is there, and write nothing
    sample = (t // positions).to(tl.int64)
    t = t % positions
    row = t // columns - pad_h
    column = t % columns - pad_w
    window = a + sample * (c * height * width) + row * width + column
    part = weight + outs
    sums = tl.zeros([block, block_p], dtype=tl.float32)
    for _ in range(c):
        for h in tl.static_range(kernel_h):
            for w in tl.static_range(kernel_w):
                if pad_h + pad_w > 0:
                    inside = (row >= -h) & (row < height - h) & (column >= -w) & (column < width - w)
                    x = tl.load(window + (h * width + w), mask=inside, other=0.0)
                else:
                    x = tl.load(window + (h * width + w))
                sums += x * tl.load(part + (h * kernel_w + w) * p)
        window += height * width
        part += kernel_h * kernel_w * p
    if has_bias:
        sums += tl.load(bias + outs)
    if tanh:
        sums = libdevice.tanh(sums)
    at = sample * (p * positions) + t + nothing + outs * positions
    if has_after:
        y = tl.load(after + at, mask=there, other=0.0)
        sums *= 1.0 - y * y
    tl.store(out + at, sums, mask=there)
