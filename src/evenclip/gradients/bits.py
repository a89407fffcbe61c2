"""Sums of the bits of tensors, to see whether a tensor has changed.

torch counts changes in place, but not those through `tensor.data` or a numpy view.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["sums"]

_BLOCK = 1024  # words that are added without weights


def sums(tensors: Iterable[Tensor]) -> list[int | None]:
    """Return a number for each tensor, which is another one if a word of 8 bytes changes.

    Return None for a tensor without plain bits.

    >>> before = torch.zeros(3)
    >>> after = before.clone()
    >>> after[1] = 1e-30
    >>> sums([before]) == sums([before.clone()]), sums([before]) == sums([after])
    (True, False)
    """
    each = [_sum(tensor) for tensor in tensors]
    found: list[int | None] = [None] * len(each)
    for device in {total.device for total in each if total is not None}:
        places = [i for i, total in enumerate(each) if total is not None and total.device == device]
        together = torch.stack([total for total in each if total is not None and
                                total.device == device])  # fmt: skip
        for i, number in zip(places, together.tolist(), strict=True):  # synchronises once
            found[i] = number
    return found


def _dense(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the indices and the values of a sparse tensor; nothing for another one."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout == torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return ()


def _sum(tensor: Tensor) -> Tensor | None:
    """Return the weighted sum of the words of a tensor; None if it has no plain bits."""
    try:
        parts = [_sum(part) for part in _dense(tensor)]
        if parts:
            return torch.stack([part for part in parts if part is not None]).sum()
        plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        plain = plain.clone() if plain.storage_offset() % 8 else plain  # words are aligned
        whole = len(plain) // (8 * _BLOCK) * (8 * _BLOCK)
        blocks = plain[:whole].view(torch.int64).view(-1, _BLOCK).sum(dim=1)
        rest = plain[whole:].to(torch.int64)
        words = torch.cat([blocks, rest])
        odd = torch.arange(1, 2 * len(words), 2, device=words.device)
        return (words * odd).sum()
    except (RuntimeError, TypeError, NotImplementedError):
        return None
