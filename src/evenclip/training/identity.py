"""Digests of a run's data and of its values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from evenclip.data import Dataset, MapDataset, Streamed
from evenclip.data.streamed import Bits, fingerprint
from evenclip.mechanism.words import derive
from evenclip.training.processes import Processes

__all__ = ["digest", "mark"]


def mark(data: Dataset | Streamed, ranks: Processes, digested: str, key: bytes) -> str | None:
    """Return the data fingerprint for checkpoints: BLAKE2b over all bits, under a secret key.

    Without the key, it says nothing about the data. With a plain digest, an attacker who guesses a
    record can test whether the data contain it. The result is None if ranks hold different records,
    because the digest then depends on how they are divided.
    """
    if ranks.local:
        return None
    kind = "some" if isinstance(data, MapDataset) else "all"
    return f"{kind} {derive(key, f'data {digested}').hex()}"


def digest(value: Any) -> str:
    """Return a digest of every bit of a dataset or of nested tensors; never publish it.

    It is the same on every device and for any number of threads. For a map-style dataset it depends
    only on the first few rows.
    """
    is_data = isinstance(value, Dataset | Streamed)
    lines = value.fingerprints() if is_data else _fingerprints(value)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=32).hexdigest()


def _fingerprints(value: Any) -> Iterator[str]:
    """Yield one line for each tensor in a nested value."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            bits = Bits()
            bits.add(leaf)
            yield fingerprint("", leaf.dtype, leaf.shape, bits)
