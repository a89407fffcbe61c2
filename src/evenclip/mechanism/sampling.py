"""Batches: Poisson samples for private training, shuffled batches for plain SGD.

Poisson sampling puts every record into the batch with probability q, independently of all others.
Batches vary in size and may be empty. The n records of several consecutive steps are one long
series of independent trials. Its successes are drawn by their gaps, which are geometric: the
distribution is the same, with |B| random numbers per step instead of n. Sums of gradients are
divided by the public expected size B, never by |B|.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Poisson", "Sampler", "Shuffled"]


# Approximate number of records, and maximum number of steps, per draw. For fewer records, the call
# takes longer than the drawing.
_RECORDS_PER_DRAW, _STEPS_PER_DRAW = 2**13, 2**9


class Sampler(Protocol):
    """A stream of batches, as indices into the data.

    Attributes:
        q: Poisson rate; None if the batches are not Poisson samples.
    """

    q: float | None

    def next(self) -> Tensor:
        """Return the indices of the records of the next batch.  # [sample], int64"""

    def expected_size(self, batch: Tensor) -> float:
        """Return the public number that the sum over the batch is divided by."""

    def state(self) -> dict[str, Any]:
        """Return the position in the stream. Secret; for the checkpoint only."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state."""


class Poisson:
    """Poisson samples of n records at rate q; sums are divided by the public B."""

    def __init__(self, n: int, q: float, B: float, seed: np.random.SeedSequence) -> None:
        self.q: float | None = q
        self._n, self._rate, self._B = n, q, B
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._steps = min(max(1, round(_RECORDS_PER_DRAW / (n * q))), _STEPS_PER_DRAW)
        self._batches: tuple[Tensor, ...] = ()  # those drawn together
        self._at = 0  # how many of them are used
        self._before = self._random.bit_generator.state  # before they were drawn

    def next(self) -> Tensor:
        """Return a fresh Poisson sample."""
        if self._at == len(self._batches):
            self._draw()
        self._at += 1
        return self._batches[self._at - 1]

    def _draw(self) -> None:
        """Draw the batches of the next steps."""
        self._at, self._before = 0, self._random.bit_generator.state
        places = self._successes(self._n * self._steps)
        ends = np.searchsorted(places, self._n * np.arange(self._steps + 1))
        sizes = np.diff(ends)
        places -= np.repeat(self._n * np.arange(self._steps), sizes)  # relative to the step
        self._batches = torch.split(torch.from_numpy(places), sizes.tolist())

    def _successes(self, trials: int) -> NDArray[np.int64]:
        """Return which of `trials` independent trials succeed, each with probability q."""
        expected = trials * self._rate
        places = np.cumsum(self._gaps(math.ceil(expected + 6 * math.sqrt(expected) + 6))) - 1
        while places[-1] < trials:
            more = np.cumsum(self._gaps(math.ceil(6 * math.sqrt(expected) + 6)))
            places = np.concatenate([places, places[-1] + more])
        return places[: np.searchsorted(places, trials)]

    def _gaps(self, size: int) -> NDArray[np.int64]:
        """Draw distances between successes by inversion of P(gap > k) = (1 − q)^k."""
        if self._rate == 1:
            return np.ones(size, dtype=np.int64)
        u = self._random.random(size)  # in [0, 1)
        return (np.log1p(-u) / math.log1p(-self._rate)).astype(np.int64) + 1

    def expected_size(self, batch: Tensor) -> float:
        """Return B, which does not depend on the batch."""
        del batch
        return self._B

    def state(self) -> dict[str, Any]:
        """Return the generator's state before the last draw, and how many steps of it are taken."""
        return {"at": self._at, **_plain(self._before)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._random.bit_generator.state = _numbers(state)
        self._batches = ()
        if state["at"]:
            self._draw()
        self._at = state["at"]


class Shuffled:
    """Consecutive batches of a new permutation in every epoch. Not private.

    The last batch of an epoch may be smaller.
    """

    def __init__(self, n: int, size: int, seed: np.random.SeedSequence) -> None:
        self.q: float | None = None
        self._n, self._size = n, size
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._order, self._at = torch.zeros(0, dtype=torch.int64), 0

    def next(self) -> Tensor:
        """Return the next batch of this epoch's permutation."""
        if self._at >= len(self._order):
            self._order, self._at = torch.from_numpy(self._random.permutation(self._n)), 0
        batch = self._order[self._at : self._at + self._size]
        self._at += self._size
        return batch

    def expected_size(self, batch: Tensor) -> float:
        """Return the size of the batch, which is public because batches have a fixed size."""
        return float(len(batch))

    def state(self) -> dict[str, Any]:
        """Return the generator's state, the permutation and the position in it."""
        return {"order": self._order, "at": self._at, **_plain(self._random.bit_generator.state)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        rest = dict(state)
        self._order, self._at = rest.pop("order"), rest.pop("at")
        self._random.bit_generator.state = _numbers(rest)


def _plain(state: Any) -> dict[str, Any]:
    """Return a PCG64 state as strings, because its 128-bit integers do not fit in a tensor."""
    return {
        "words": [f"{value:x}" for value in state["state"].values()],
        "buffer": [state["has_uint32"], state["uinteger"]],
    }


def _numbers(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the state that `_plain` wrote."""
    state, inc = (int(word, 16) for word in plain["words"])
    has, buffer = plain["buffer"]
    return {
        "bit_generator": "PCG64",
        "state": {"state": state, "inc": inc},
        "has_uint32": has,
        "uinteger": buffer,
    }
