"""Σ_i weights_i · g_i of gradients that stand in memory, on a GPU by a kernel of our own.

In tensor operations it is three kernels for each parameter: gradients that are not finite are blanked out in a copy,
and the sum is taken in two halves. Here a row of weight 0 is not read at all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["weighted_rows"]

_ROWS, _COLUMNS = 32, 32


@torch.library.custom_op("evenclip::weighted_rows", mutates_args=())
def weighted_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Σ_i weights_i · rows_i; rows of weight 0 count for nothing, whatever stands in them.

    Args:
        rows: [row, column], float32
        weights: [row], float32

    Returns:
        [column]
    """
    rows, weights = rows.contiguous(), weights.contiguous()
    n, size = rows.shape
    out = rows.new_empty(size)
    _weighted_rows[(triton.cdiv(size, _COLUMNS),)](rows, weights, out, n, size, _ROWS, _COLUMNS)
    return out


@weighted_rows.register_fake
def _(rows: Tensor, weights: Tensor) -> Tensor:
    del weights
    return rows.new_empty(rows.shape[1])


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_rows(  # type: ignore[no-untyped-def]  # noqa: ANN202
    rows, weights, out, n, size, block_rows: tl.constexpr, block_columns: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    total = tl.zeros([block_rows, block_columns], dtype=tl.float32)
    for start in range(0, n, block_rows):
        row = (start + tl.arange(0, block_rows)).to(tl.int64)
        weight = tl.load(weights + row, mask=row < n, other=0.0)
        read = (weight != 0.0)[:, None] & (column < size)[None, :]
        total += weight[:, None] * tl.load(rows + row[:, None] * size + column[None, :], mask=read, other=0.0)
    tl.store(out + column, tl.sum(total, axis=0), mask=column < size)
