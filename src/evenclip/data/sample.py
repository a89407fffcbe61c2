"""Which rows of a dataset are used: random thinning of groups, and random splits, decided by a
seed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["balanced", "cut", "stream", "thinned"]

Rows = NDArray[np.int64]


def stream(seed: int, name: str) -> np.random.Generator:
    """The random numbers of one dataset and seed; no other user of the same seed draws the same
    ones.

    Raises:
        ValueError: a negative seed.
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be a whole number of at least 0.")
    return np.random.Generator(
        np.random.PCG64(np.random.SeedSequence([seed, int.from_bytes(name.encode(), "big")]))
    )


def balanced(group: Rows, groups: int, stream: np.random.Generator) -> Rows:
    """The rows that are left when each of group k is kept with probability (size of the smallest) ÷
    (size of k).

    The smallest group is kept whole. The sizes are those of the data, which ε does not cover.
    """
    sizes = np.bincount(group, minlength=groups)  # [group]
    kept = sizes.min() / np.maximum(sizes, 1)  # [group]; one with nobody has nobody to keep
    return np.flatnonzero(stream.random(len(group)) < kept[group])


def thinned(group: Rows, code: int, probability: float, stream: np.random.Generator) -> Rows:
    """The rows that are left when each of one group is kept with this probability, and everybody
    else.
    """
    return np.flatnonzero((group != code) | (stream.random(len(group)) < probability))


def cut(rows: Rows, stream: np.random.Generator, share: float = 0.8) -> tuple[Rows, Rows]:
    """The rows in random order, cut in two: this share of them, and the rest."""
    first, rest = np.split(stream.permutation(rows), [round(share * len(rows))])
    return first, rest
