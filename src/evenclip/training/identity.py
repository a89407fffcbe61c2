"""The identity of a run: the fingerprint of its data, and its random streams."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from evenclip.data import Dataset, MapDataset, Streamed
from evenclip.data.streamed import Bits, fingerprint
from evenclip.mechanism.settings import Settings
from evenclip.mechanism.words import KEY_BYTES
from evenclip.training.processes import Processes

__all__ = ["digest", "mark", "secret_key"]


def mark(data: Dataset | Streamed, ranks: Processes, digested: int) -> str | None:
    """Return the data fingerprint for checkpoints.

    Resuming one checkpoint on two neighbouring datasets would reuse the noise. The result is None
    if ranks hold different records, because the digest then depends on how they are divided.
    """
    if ranks.local:
        return None
    return f"{'some' if isinstance(data, MapDataset) else 'all'} {digested:032x}"


def secret_key(settings: Settings, model: nn.Module, digested: int, ranks: Processes) -> bytes:
    """Return the secret key of a run, from which its batches, noise and dropout are derived.

    Data, initial model, rule, settings and seed are mixed into a key from a seed. So two runs that
    differ in any of them draw different numbers, also on data with one record more or less; the
    difference of two models trained with the same noise would not contain it. The ranks of a run
    have the same key.
    """
    if settings.seed is None:
        key: bytes = ranks.first(os.urandom(KEY_BYTES))
        return key
    words = [settings.seed, settings.specification, digest(model.state_dict()), digested]
    return hashlib.blake2b(repr(words).encode(), digest_size=KEY_BYTES).digest()


def digest(value: Any) -> int:
    """Return a number that depends on every bit of the tensors.

    It is the same on every device and for any number of threads. For a map-style dataset it depends
    only on the first few rows. Secret, because the streams are derived from it.
    """
    if isinstance(value, Dataset):
        value = (value.x, value.y, value.group)
    lines = value.fingerprints() if isinstance(value, Streamed) else _fingerprints(value)
    return int.from_bytes(hashlib.sha256("".join(lines).encode()).digest()[:16])


def _fingerprints(value: Any) -> Iterator[str]:
    """Yield one line for each tensor in a nested value."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            bits = Bits(leaf.numel() * leaf.element_size())
            bits.add(leaf)
            yield fingerprint(leaf.dtype, leaf.shape, bits)
