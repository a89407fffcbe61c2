"""Which run this is: the fingerprint of its data, and the random streams that are its own."""

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
    """Data fingerprint for checkpoints. Resuming one checkpoint on two neighbouring datasets would
    reuse the noise.

    None where there is none: of records that ranks have of their own, how they are cut counts too.
    """
    if ranks.local:
        return None
    return f"{'some' if isinstance(data, MapDataset) else 'all'} {digested:032x}"


def streams(
    settings: Settings, model: nn.Module, digested: int, ranks: Processes
) -> dict[str, np.random.SeedSequence]:
    """A random stream for each purpose, of this run alone: two models that shared noise would
    cancel it.

    A run is data, model, rule, settings and seed. All are mixed into the streams, so that no two
    runs draw the same numbers: not with another rule, not from another start, and not on the data
    with one record more or less. The ranks of a run have the same streams.
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
    """A number that changes with every bit of these tensors, the same on every device and number of
    threads.

    Of a map-style dataset only the first few rows count. Secret, like the streams it goes into.
    """
    if isinstance(value, Dataset):
        value = (value.x, value.y, value.group)
    lines = value.fingerprints() if isinstance(value, Streamed) else _fingerprints(value)
    return int.from_bytes(hashlib.sha256("".join(lines).encode()).digest()[:16])


def _fingerprints(value: Any) -> Iterator[str]:
    """A line for each tensor in there."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            bits = Bits(leaf.numel() * leaf.element_size())
            bits.add(leaf)
            yield fingerprint(leaf.dtype, leaf.shape, bits)
