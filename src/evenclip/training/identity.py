"""The identity of a run: the fingerprint of its data, and its random streams."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from evenclip.data import Dataset, MapDataset, Streamed
from evenclip.data.streamed import Bits, fingerprint
from evenclip.mechanism.settings import Settings
from evenclip.training.processes import Processes

__all__ = ["digest", "mark", "streams"]


def mark(data: Dataset | Streamed, ranks: Processes, digested: int) -> str | None:
    """Return the data fingerprint for checkpoints.

    Resuming one checkpoint on two neighbouring datasets would reuse the noise. The result is None
    if ranks hold different records, because the digest then depends on how they are divided.
    """
    if ranks.local:
        return None
    return f"{'some' if isinstance(data, MapDataset) else 'all'} {digested:032x}"


def streams(
    settings: Settings, model: nn.Module, digested: int, ranks: Processes
) -> dict[str, np.random.SeedSequence]:
    """Return a random stream for each purpose: name -> seed sequence.

    Data, initial model, rule, settings and seed are mixed into the streams. So two runs that differ
    in any of them draw different numbers, also on data with one record more or less; the difference
    of two models trained with the same noise would not contain it. The ranks of a run have the same
    streams.
    """
    entropy = (
        ranks.first(np.random.SeedSequence().entropy) if settings.seed is None else settings.seed
    )
    assert isinstance(entropy, int)
    words = [entropy, int(settings.specification[:32], 16), digest(model.state_dict()), digested]
    purposes = ("batches", "noise", "dropout")
    return {
        purpose: np.random.SeedSequence(words, spawn_key=(i,)) for i, purpose in enumerate(purposes)
    }


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
