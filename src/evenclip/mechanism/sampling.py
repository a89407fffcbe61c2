"""Batches: Poisson samples for private training, shuffled ones for plain SGD.

Poisson: every record is in the batch with probability q, independently of all others; batches vary
in size and may be empty. The n records of several steps in a row are one long series of independent
trials, whose successes are found by their geometric gaps: the same distribution at the cost of |B|
random numbers a step instead of n. The number that gradients are divided by is the public expected
size B, never |B|.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Poisson", "Sampler", "Shuffled"]


# Records that are drawn at once, about: fewer, and the calls would take longer than the drawing.
_AT_ONCE, _STEPS_AT_ONCE = 2**13, 2**9


class Sampler(Protocol):
    """A stream of batches, as indices into the data, and what is public about them."""

    q: float | None  # Poisson rate, None if the batches are no Poisson samples

    def next(self) -> Tensor:
        """The records of the next batch.  # [sample], int64"""

    def expected_size(self, batch: Tensor) -> float:
        """What the sum over the batch is divided by: a public number."""

    def state(self) -> dict[str, Any]:
        """Where the stream stands: secret, for the checkpoint only."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class Poisson:
    """Poisson samples of n records at rate q; sums are divided by the public B."""

    def __init__(self, n: int, q: float, B: float, seed: np.random.SeedSequence) -> None:
        self.q: float | None = q
        self._n, self._rate, self._B = n, q, B
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._steps = min(max(1, round(_AT_ONCE / (n * q))), _STEPS_AT_ONCE)
        self._batches: tuple[Tensor, ...] = ()
        self._at, self._before = (
            0,
            self._random.bit_generator.state,
        )  # where in the block; the state before the block

    def next(self) -> Tensor:
        """A fresh Poisson sample."""
        if self._at == len(self._batches):
            self._draw()
        self._at += 1
        return self._batches[self._at - 1]

    def _draw(self) -> None:
        """The batches of the next steps."""
        self._at, self._before = 0, self._random.bit_generator.state
        places = self._successes(self._n * self._steps)
        ends = np.searchsorted(places, self._n * np.arange(self._steps + 1))
        sizes = np.diff(ends)
        places -= np.repeat(self._n * np.arange(self._steps), sizes)  # within its own step
        self._batches = torch.split(torch.from_numpy(places), sizes.tolist())

    def _successes(self, trials: int) -> NDArray[np.int64]:
        """Which of so many independent trials succeed, each with probability q."""
        expected = trials * self._rate
        places = np.cumsum(self._gaps(math.ceil(expected + 6 * math.sqrt(expected) + 6))) - 1
        while places[-1] < trials:
            more = np.cumsum(self._gaps(math.ceil(6 * math.sqrt(expected) + 6)))
            places = np.concatenate([places, places[-1] + more])
        return places[: np.searchsorted(places, trials)]

    def _gaps(self, size: int) -> NDArray[np.int64]:
        """From each success to the next: P(gap > k) = (1 − q)^k, by inversion."""
        if self._rate == 1:
            return np.ones(size, dtype=np.int64)
        u = self._random.random(size)  # in [0, 1)
        return (np.log1p(-u) / math.log1p(-self._rate)).astype(np.int64) + 1

    def expected_size(self, batch: Tensor) -> float:
        """B, whatever the batch."""
        del batch
        return self._B

    def state(self) -> dict[str, Any]:
        """The generator's before the block under way, and how many of its steps are taken."""
        return {"at": self._at, **_plain(self._before)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._random.bit_generator.state = _numbers(state)
        self._batches = ()
        if state["at"]:
            self._draw()
        self._at = state["at"]


class Shuffled:
    """Consecutive batches of a new permutation every epoch; the last, smaller one is kept. Not
    private.
    """

    def __init__(self, n: int, size: int, seed: np.random.SeedSequence) -> None:
        self.q: float | None = None
        self._n, self._size = n, size
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._order, self._at = torch.zeros(0, dtype=torch.int64), 0

    def next(self) -> Tensor:
        """The next batch of this epoch's permutation."""
        if self._at >= len(self._order):
            self._order, self._at = torch.from_numpy(self._random.permutation(self._n)), 0
        batch = self._order[self._at : self._at + self._size]
        self._at += self._size
        return batch

    def expected_size(self, batch: Tensor) -> float:
        """The batch's own size: public here, since batches are cut by count and not drawn."""
        return float(len(batch))

    def state(self) -> dict[str, Any]:
        """The generator's, and the rest of the permutation."""
        return {"order": self._order, "at": self._at, **_plain(self._random.bit_generator.state)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        rest = dict(state)
        self._order, self._at = rest.pop("order"), rest.pop("at")
        self._random.bit_generator.state = _numbers(rest)


def _plain(state: Any) -> dict[str, Any]:
    """A PCG64 state as strings: its 128-bit integers fit no tensor."""
    return {
        "words": [f"{value:x}" for value in state["state"].values()],
        "buffer": [state["has_uint32"], state["uinteger"]],
    }


def _numbers(plain: dict[str, Any]) -> dict[str, Any]:
    """The state that `_plain` wrote."""
    state, inc = (int(word, 16) for word in plain["words"])
    has, buffer = plain["buffer"]
    return {
        "bit_generator": "PCG64",
        "state": {"state": state, "inc": inc},
        "has_uint32": has,
        "uinteger": buffer,
    }
