"""`noise.normal` on a GPU by a kernel of our own: one launch for the noise of all runs.

In tensor operations it is six kernels, of some three microseconds each for a hundred thousand numbers. Here a thread
computes a block of Philox, four pairs of numbers, and keeps everything in registers. 64-bit products have the
hardware's upper half, and u is kept in float64 until its logarithm is taken, so that neither end of it needs a case of
its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["normal"]

_BLOCK = 128


def normal(keys: Tensor, t: Tensor, size: int) -> Tensor:
    """The numbers of step t of every run, as `noise.normal` has them.

    Args:
        keys: [run, 2], int64
        t: [], int64
        size: how many for each.

    Returns:
        [run, size], float32
    """
    out = torch.empty(keys.shape[0], size, dtype=torch.float32, device=keys.device)
    pairs = (size + 1) // 2
    blocks = triton.cdiv(pairs, 4)
    _normal[(triton.cdiv(blocks, _BLOCK), keys.shape[0])](keys, t, out, size, pairs, blocks, _BLOCK)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _normal(  # type: ignore[no-untyped-def]  # noqa: ANN202
    keys, t, out, size: tl.constexpr, pairs: tl.constexpr, blocks: tl.constexpr, block: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    run = tl.program_id(1).to(tl.int64)
    k0, k1 = tl.load(keys + 2 * run).to(tl.uint64), tl.load(keys + 2 * run + 1).to(tl.uint64)
    step = tl.load(t).to(tl.uint64)
    b = (tl.program_id(0) * block + tl.arange(0, block)).to(tl.uint64)
    zero = b * 0
    w0, w1, w2, w3 = _philox(b + 1 + step * blocks, zero, zero + size, k0, k1)
    # The second stream has 32 bits for each pair, so that two blocks of the first share one of it.
    further: tl.constexpr = (pairs + 7) // 8
    m0, m1, m2, m3 = _philox(b // 2 + 1 + step * further, zero + 1, zero + size, k0, k1)
    odd = b % 2 == 1
    more0, more1 = tl.where(odd, m2, m0), tl.where(odd, m3, m1)
    first = 4 * b.to(tl.int64)
    _pair(out + run * size, first, w0, more0, size, pairs)
    _pair(out + run * size, first + 1, w1, more0 >> 32, size, pairs)
    _pair(out + run * size, first + 2, w2, more1, size, pairs)
    _pair(out + run * size, first + 3, w3, more1 >> 32, size, pairs)


@triton.jit
def _philox(c0, c1, c2, k0, k1):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    # Four words of Philox 4×64-10 for the counter (c0, c1, c2, 0).
    c3 = c0 * 0
    for _ in tl.static_range(10):
        x0, x2 = c0, c2
        c0 = tl.umulhi(x2, c3 * 0 + 0xCA5A826395121157) ^ c1 ^ k0
        c1 = x2 * 0xCA5A826395121157
        c2 = tl.umulhi(x0, c3 * 0 + 0xD2E7470EE14C6C93) ^ c3 ^ k1
        c3 = x0 * 0xD2E7470EE14C6C93
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    return c0, c1, c2, c3


@triton.jit  # type: ignore[untyped-decorator]
def _pair(out, j, word, more, size: tl.constexpr, pairs: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    # Number j and number pairs + j, of one word and, in the tail, 32 bits more.
    low = word & 0xFFFFFFFF
    tail = ((more & 0xFFFFFFFF).to(tl.float64) + 1.0) * 2.3283064365386963e-10
    near_one = low >= 0xFF000000
    added = tl.where(low < 4096, tail, tl.where(near_one, 0.5, 0.0))
    radius = tl.sqrt((tl.log((low.to(tl.float64) + added) * 2.3283064365386963e-10) * -2.0).to(tl.float32))
    angle = (word >> 32).to(tl.int32, bitcast=False).to(tl.float32) * 1.4629180792671596e-09
    tl.store(out + j, radius * tl.cos(angle), mask=j < pairs)
    tl.store(out + pairs + j, radius * tl.sin(angle), mask=pairs + j < size)
