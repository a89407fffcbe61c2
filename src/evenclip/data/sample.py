"""Seeded selection of rows: random thinning of groups, and random splits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["balanced", "cut", "stream", "thinned"]

Rows = NDArray[np.int64]


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the random generator of a dataset and a seed.

    The name separates it from other generators that are derived from the same seed.

    Raises:
        ValueError: the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be a whole number of at least 0.")
    sequence = np.random.SeedSequence([seed, int.from_bytes(name.encode(), "big")])
    return np.random.Generator(np.random.PCG64(sequence))


def balanced(group: Rows, groups: int, stream: np.random.Generator) -> Rows:
    """Keep each row of group k with probability (size of the smallest group) ÷ (size of k).

    Return the positions of the kept rows. The smallest group is kept whole. The sizes are read from
    the data; ε does not cover that.
    """
    sizes = np.bincount(group, minlength=groups)  # [group]
    probability = sizes.min() / np.maximum(sizes, 1)  # [group]; an empty group has no rows to keep
    return np.flatnonzero(stream.random(len(group)) < probability[group])


def thinned(group: Rows, code: int, probability: float, stream: np.random.Generator) -> Rows:
    """Keep each row of group `code` with the given probability, and every other row.

    Return the positions of the kept rows.
    """
    return np.flatnonzero((group != code) | (stream.random(len(group)) < probability))


def cut(rows: Rows, stream: np.random.Generator, share: float = 0.8) -> tuple[Rows, Rows]:
    """Shuffle the rows and split them in two: a share of them, and the rest."""
    first, rest = np.split(stream.permutation(rows), [round(share * len(rows))])
    return first, rest
