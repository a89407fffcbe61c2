"""Standard normal noise with a true tail: number i of the n of step t is a function of (key, t, n,
i) alone.

The bits are Philox 4×64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
which turns a counter and the run's key into four words. So a run draws the same noise on every
device, in any number of processes, and after a resume; and no two steps share any. It is drawn by
numpy, for many steps at once where steps are small.

One word makes a pair by Box–Muller: 32 bits for the angle, 32 for u in the radius r = √(−2 ln u).
Where u < 2⁻²⁰, which is where the tail begins, 32 more bits from a second stream go into it: u ∈
{2⁻⁶⁴, …} reaches 9.4 standard deviations, and what is missing has probability 2⁻⁶⁴ ≈ 5e-20 a pair.
In float32, where u > 1 − 2⁻⁸, r is taken from 1 − u, so that it is never rounded to 0. (torch's
float32 `randn` uses 24-bit uniforms and ends at 5.77, which alone is a δ of 8e-9 for each
coordinate and step: about 2e-5 for the Adult MLP instead of the promised 1e-6.) Not cryptographic:
whoever knows the key knows the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Ahead", "Noise"]

# Numbers that are drawn at once, at the least: fewer, and the calls would take longer than the
# drawing.
_AT_ONCE = 2**15
_IN_CACHE = 2**16  # pairs
_TAIL = 2**12  # a 32-bit u below this takes 32 bits more
_FLAT = 2**32 - 2**24  # from this on it is too near 1 for its logarithm in float32


class Noise:
    """The noise of one run, on the CPU.

    Attributes:
        key: two words, secret: for the checkpoint only.  # [2], int64
    """

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self.key = torch.from_numpy(seed.generate_state(2, np.uint64).view(np.int64))
        self._words = (_Words(self, 0), _Words(self, 1))
        self._polar = np.empty((2, 0, 0))

    def normal(
        self, t: int, size: int, dtype: torch.dtype = torch.float32, steps: int = 1
    ) -> Tensor:
        """The numbers of so many steps from step t on, N(0, 1).  # [steps, size]

        In numpy and on one core: handing the work to a second one takes longer.
        """
        half, kind = (size + 1) // 2, np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        words = (
            self._words[0]
            .of(t, steps, size, _blocks(half, 4))[:, :half]
            .view(np.uint32)
            .reshape(steps, half, 2)
        )
        if self._polar.shape != (2, steps, half) or self._polar.dtype != kind:
            self._polar = np.empty((2, steps, half), kind)  # written again and again: it stays
        (radius, angle), out = self._polar, np.empty((steps, size), kind)
        radius[:] = words[:, :, 0]
        self._refine(radius, t, size)
        _finish(radius, words.reshape(-1, 2)[:, 0])
        angle[:] = words[:, :, 1].view(np.int32)
        angle *= math.pi * 2.0**-31
        np.multiply(np.cos(angle, out=out[:, :half]), radius, out=out[:, :half])
        rest = size - half
        np.multiply(np.sin(angle[:, :rest], out=out[:, half:]), radius[:, :rest], out=out[:, half:])
        return torch.from_numpy(out).to(dtype)

    def part(
        self, t: int, size: int, first: int, end: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Numbers first to end − 1 of the `size` of step t, for whoever has use for these alone.  #
        [end − first]
        """
        half, kind = (size + 1) // 2, np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        out = np.empty(end - first, kind)
        for low, high, turn in ((first, min(end, half), np.cos), (max(first, half), end, np.sin)):
            for at in range(low, high, _IN_CACHE):
                stop, pair = min(at + _IN_CACHE, high), at if turn is np.cos else at - half
                radius, angle = self._polar_of(t, size, pair, pair + stop - at, kind)
                np.multiply(turn(angle, out=angle), radius, out=out[at - first : stop - first])
        return torch.from_numpy(out).to(dtype)

    def _polar_of(
        self, t: int, size: int, first: int, end: int, kind: np.dtype[Any]
    ) -> tuple[NDArray[Any], ...]:
        """Radius and angle of pairs first to end − 1.  # [pair], twice"""
        half = (size + 1) // 2
        words = (
            self._words[0]
            .some(t, size, _blocks(half, 4), first, end)
            .view(np.uint32)
            .reshape(-1, 2)
        )
        radius = words[:, 0].astype(kind)
        if kind == np.float64:
            radius += self._more(t, size, first, end)
        else:
            for j in np.flatnonzero(words[:, 0] < _TAIL):
                radius[j] += self._more(t, size, first + int(j), first + int(j) + 1)[0]
        _finish(radius, words[:, 0])
        return radius, words[:, 1].view(np.int32).astype(kind) * kind.type(math.pi * 2.0**-31)

    def _more(self, t: int, size: int, first: int, end: int) -> NDArray[np.float64]:
        """What 32 bits more add to u of pairs first to end − 1, in units of 2⁻³².  # [pair]"""
        words = (
            self._words[1]
            .some(t, size, _blocks((size + 1) // 2, 8), first // 2, (end + 1) // 2)
            .view(np.uint32)
        )
        more: NDArray[np.float64] = (words[first % 2 :][: end - first] + np.float64(1)) * 2.0**-32
        return more

    def _refine(self, u: NDArray[Any], t: int, size: int) -> None:
        """32 bits more where u [step, pair], in units of 2⁻³², lies in the tail; everywhere in
        float64.
        """
        steps, half = u.shape
        if u.dtype == np.float64:
            extra = self._words[1].of(t, steps, size, _blocks(half, 8)).view(np.uint32)[:, :half]
            u += (extra + 1.0) * 2.0**-32
        else:
            for s, j in _in_tail(u):
                u[s, j] += self._further(t + s, size, j)

    def _further(self, t: int, size: int, pair: int) -> float:
        """What 32 bits more add to u in the tail, in units of 2⁻³²."""
        blocks = _blocks((size + 1) // 2, 8)
        return (
            float(self._words[1].of(t, 1, size, blocks).view(np.uint32)[0, pair]) + 1.0
        ) * 2.0**-32

    def state(self) -> Tensor:
        """What the stream hangs on: secret, for the checkpoint only."""
        return self.key.clone()

    def set_state(self, state: Tensor) -> None:
        """Be the stream that `state` was taken from."""
        self.key = state.cpu().clone()
        self._words = (_Words(self, 0), _Words(self, 1))


def _finish(u: NDArray[Any], low: NDArray[np.uint32]) -> None:
    """u, in units of 2⁻³², becomes r = √(−2 ln u); low: what it was made of, side by side."""
    np.log(np.multiply(u, 2.0**-32, out=u), out=u)
    if u.dtype == np.float32:
        flat = u.reshape(-1)
        near = np.flatnonzero(flat > -(2.0**-7))  # a few too many: what counts is the word
        words = low[near]
        exact = np.log1p(-(np.float64(2.0**32 - 0.5) - words) * 2.0**-32)
        flat[near] = np.where(words >= _FLAT, exact, flat[near])
    np.sqrt(np.multiply(u, -2.0, out=u), out=u)


class _Words:
    """One of a run's streams of Philox words, by numpy. Going on where it stopped is quicker than
    jumping.
    """

    def __init__(self, noise: Noise, stream: int) -> None:
        self._key, self._stream = noise.key.numpy().view(np.uint64), stream
        self._bits, self._at = np.random.Philox(0), (-1, -1)

    def of(self, t: int, steps: int, size: int, blocks: int) -> NDArray[np.uint64]:
        """The words of so many steps of `size` numbers from t on, in so many blocks each.  #
        [steps, 4 · blocks]
        """
        if self._at != (size, t * blocks):
            counter = np.array([t * blocks, self._stream, size, 0], dtype=np.uint64)
            self._bits = np.random.Philox(key=self._key, counter=counter)
        self._at = size, (t + steps) * blocks
        return self._bits.random_raw(4 * blocks * steps).reshape(steps, 4 * blocks)

    def some(self, t: int, size: int, blocks: int, first: int, end: int) -> NDArray[np.uint64]:
        """Words first to end − 1 of those of step t."""
        counter = np.array([t * blocks + first // 4, self._stream, size, 0], dtype=np.uint64)
        drawn = np.random.Philox(key=self._key, counter=counter).random_raw(
            4 * _blocks(end - first + first % 4, 4)
        )
        return drawn[first % 4 :][: end - first]


def _in_tail(u: NDArray[Any]) -> list[tuple[int, int]]:
    """Where u [step, pair], in units of 2⁻³², takes further bits."""
    if u.min(initial=_TAIL) >= _TAIL:
        return []
    return [(int(s), int(j)) for s, j in zip(*np.nonzero(u < _TAIL), strict=True)]


def _blocks(pairs: int, each: int) -> int:
    return -(-pairs // each)


class Ahead:
    """The noise of one step after the other, drawn for many steps at once where steps are small.

    sizes: name of each release of a step -> how many numbers it needs.
    """

    def __init__(
        self, noise: Noise, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.noise, self.sizes, self.dtype, self._device = noise, dict(sizes), dtype, device
        self._steps = max(1, _AT_ONCE // max(self.size, 1))
        self._rows, self._first = list[Tensor](), 0

    @property
    def size(self) -> int:
        """Numbers a step."""
        return sum(self.sizes.values())

    def of(self, t: int) -> dict[str, Tensor]:
        """The noise of step t.  # name -> [size]"""
        if not 0 <= t - self._first < len(self._rows):
            drawn = self.noise.normal(t, self.size, self.dtype, self._steps).to(self._device)
            self._rows, self._first = list(drawn.unbind()), t
        parts = torch.split(self._rows[t - self._first], list(self.sizes.values()))
        return dict(zip(self.sizes, parts, strict=True))

    def pieces(self, t: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Some ranges (first, end) of the noise of step t, side by side, and nothing else drawn."""
        parts = [self.noise.part(t, self.size, first, end, self.dtype) for first, end in ranges]
        return torch.cat([torch.empty(0, dtype=self.dtype), *parts]).to(self._device)

    def state(self) -> Tensor:
        """What it all hangs on: secret, for the checkpoint only."""
        return self.noise.state()

    def set_state(self, state: Tensor) -> None:
        """Be the noise that `state` was taken from."""
        self.noise.set_state(state)
        self._rows = []
