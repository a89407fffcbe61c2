"""Batches: Poisson samples for private training, shuffled batches for plain SGD.

Poisson sampling puts every record into the batch with probability q, independently of all others.
Record i is in the batch of draw `index` if its coin, a 64-bit word that is a function of (key,
index, i), is below Q = ⌈q·2⁶⁴⌉. So the rate is exactly Q·2⁻⁶⁴, and the ledger keeps that. Batches
vary in size and may be empty. Sums of gradients are divided by the public expected size B, never by
|B|.

The first 8 bits of a coin decide in all but 2⁻⁸ of the cases, so only they are drawn for every
record; the other 56 bits come from a second key, for the records whose 8 bits equal those of Q.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenclip.mechanism.words import Keyed, Words, derive

__all__ = ["Poisson", "Sampler", "Shuffled", "drawn_rate"]

# Approximate number of coins, and maximum number of draws, that are tossed at once. For fewer, the
# calls take longer than the tossing.
_COINS_AT_ONCE, _DRAWS_AT_ONCE = 2**18, 2**6
_COIN, _FURTHER = 8, 56  # bits


def drawn_rate(q: float) -> float:
    """Return Q·2⁻⁶⁴, the rate at which records are drawn for a rate q, rounded up to a float.

    >>> drawn_rate(0.25), drawn_rate(1e-9) >= 1e-9
    (0.25, True)
    """
    exact, power = threshold(q), 2**_COIN * 2**_FURTHER
    rate = exact / power  # true division of integers rounds correctly, to the nearest
    return rate if rate * power >= exact else math.nextafter(rate, math.inf)


def threshold(q: float) -> int:
    """Return Q = ⌈q·2⁶⁴⌉."""
    mantissa, exponent = q.as_integer_ratio()
    return -((-mantissa << (_COIN + _FURTHER)) // exponent)


class Sampler(Protocol):
    """Batches by the number of the draw, as indices into the data.

    Attributes:
        q: Poisson rate; None if the batches are not Poisson samples.
    """

    q: float | None

    def batch(self, index: int) -> Tensor:
        """Return the indices of the records of draw `index`.  # [sample], int64"""

    def expected_size(self, batch: Tensor) -> float:
        """Return the public number that the sum over the batch is divided by."""


class Poisson(Keyed):
    """Poisson samples of n records at rate q; sums are divided by the public B.

    Args:
        n: number of records.
        q: Poisson rate, in (0, 1].
        B: expected batch size.
        key: secret key for the coins.
    """

    def __init__(self, n: int, q: float, B: float, key: bytes) -> None:
        self.q: float | None = drawn_rate(q)
        self._n, self._B, self._threshold = n, B, threshold(q)
        self._coins, self._further = Words(derive(key, "coins")), Words(derive(key, "further"))
        self._words = -(-n * _COIN // 64)  # for each draw
        self._at_once = min(max(1, _COINS_AT_ONCE // n), _DRAWS_AT_ONCE)
        self._first, self._drawn = -1, tuple[Tensor, ...]()

    def batch(self, index: int) -> Tensor:
        """Return the Poisson sample of draw `index`."""
        first = index - index % self._at_once
        if first != self._first:
            self._first, self._drawn = first, self._draws(first)
        return self._drawn[index - first]

    def _draws(self, first: int) -> tuple[Tensor, ...]:
        """Toss the coins of several draws."""
        if self._threshold == 2 ** (_COIN + _FURTHER):
            return (torch.arange(self._n),) * self._at_once
        words = self._coins.span(first * self._words, self._at_once * self._words)
        coins = words.view(np.uint8)
        high, low = divmod(self._threshold, 2**_FURTHER)
        places = np.flatnonzero(coins <= high)
        draw, record = np.divmod(places, 64 // _COIN * self._words)
        keep = record < self._n  # the last word may have more coins than there are records
        undecided = np.flatnonzero(keep & (coins[places] == high))
        keep[undecided] = self._below(draw[undecided] + first, record[undecided], low)
        draw, record = draw[keep], record[keep]
        sizes = np.bincount(draw, minlength=self._at_once)
        return torch.split(torch.from_numpy(record), sizes.tolist())

    def _below(
        self, index: NDArray[np.int64], record: NDArray[np.int64], low: int
    ) -> NDArray[np.bool_]:
        """Return whether the further 56 bits of these coins are below `low`."""
        counters = np.stack([index, record], axis=1).astype(np.uint64)
        below: NDArray[np.bool_] = self._further.at(counters) >> np.uint64(_COIN) < np.uint64(low)
        return below

    def expected_size(self, batch: Tensor) -> float:
        """Return B, which does not depend on the batch."""
        del batch
        return self._B


class Shuffled(Keyed):
    """Consecutive batches of a new permutation in every epoch. Not private.

    The last batch of an epoch may be smaller.
    """

    def __init__(self, n: int, size: int, key: bytes) -> None:
        self.q: float | None = None
        self._n, self._size, self._key = n, size, key
        self._epoch, self._order = -1, torch.zeros(0, dtype=torch.int64)

    def batch(self, index: int) -> Tensor:
        """Return a batch of its epoch's permutation."""
        epoch, place = divmod(index, math.ceil(self._n / self._size))
        if epoch != self._epoch:
            words = Words(derive(self._key, f"epoch {epoch}")).span(0, 4)
            random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(words.tolist())))
            self._epoch, self._order = epoch, torch.from_numpy(random.permutation(self._n))
        return self._order[place * self._size : (place + 1) * self._size]

    def expected_size(self, batch: Tensor) -> float:
        """Return the size of the batch, which is public because batches have a fixed size."""
        return float(len(batch))
