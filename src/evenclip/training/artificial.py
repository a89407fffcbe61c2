"""Artificial records, with which a run is planned, tested and compiled.

They have the shapes and dtypes of the data, and numbers from a fixed generator. So nothing that
follows from them, such as how gradients are computed or how large a block is, depends on a record.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from evenclip.data.dataset import Samples

__all__ = ["artificial"]

_SEED = 30_103


def artificial(like: Samples, n: int, groups: int) -> Samples:
    """Return n records of the shapes and dtypes of `like`.

    Inputs are standard normal, targets lie in [0, 1), whole numbers and truth values are 0 or 1,
    which most models accept as tokens, masks and classes.

    Args:
        like: some records, of which only shapes, dtypes and device are used.
        n: number of records.
        groups: number of groups K.
    """
    random = torch.Generator().manual_seed(_SEED)
    x = tree_map(partial(_numbers, n, random, torch.randn), like.x)
    y = tree_map(partial(_numbers, n, random, torch.rand), like.y)
    group = None if like.group is None else (torch.arange(n) % max(groups, 1)).to(like.group)
    return Samples(x, y, group)


def _numbers(n: int, random: torch.Generator, draw: Any, like: Any) -> Any:
    """Return numbers for n records; return what is not a tensor unchanged."""
    if not isinstance(like, Tensor):
        return like
    shape = (n, *like.shape[1:])
    if like.is_floating_point():
        return draw(shape, generator=random).to(like)
    return torch.randint(2, shape, generator=random).to(like)
