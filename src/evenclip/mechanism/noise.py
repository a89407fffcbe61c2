"""Standard normal noise with an accurate tail.

Value i of the n values of step t is a function of (key, t, n, i) alone.

The bits come from Philox 4×64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
3"), which maps a counter and the run's key to four words. So a run draws the same noise on every
device, in any number of processes, and after a resume; and no two steps share noise. numpy draws
it, for many steps at once if steps are small.

The Box–Muller transform turns one word into a pair of values: 32 bits give the angle, and 32 bits
give u in the radius r = √(−2 ln u). For u < 2⁻²⁰, in the tail, 32 more bits from a second stream
are added. The smallest u is then 2⁻⁶⁴, and r reaches 9.4 standard deviations; the part of the tail
that is cut off has probability 2⁻⁶⁴ ≈ 5e-20 per pair. In float32, for u > 1 − 2⁻⁸, r is computed
from 1 − u, so that it is never rounded to 0. (torch's float32 `randn` uses 24-bit uniforms and ends
at 5.77. This alone is a δ of 8e-9 for each coordinate and step: about 2e-5 for the Adult MLP
instead of the promised 1e-6.)

The generator is not cryptographic: the key determines the noise, so the key must stay secret.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Noise", "StepNoise"]

# Minimum number of values drawn per call; for fewer, the call takes longer than the drawing.
_VALUES_PER_DRAW = 2**15
_PAIRS_PER_BLOCK = 2**16  # few enough for the processor's cache
_TAIL = 2**12  # a 32-bit u below this is in the tail and takes 32 more bits
_FLAT = 2**32 - 2**24  # a 32-bit u from here on is too close to 1 for a logarithm in float32


class Noise:
    """The noise of one run, on the CPU.

    Attributes:
        key: two words. Secret; only the checkpoint may hold it.  # [2], int64
    """

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self.key = torch.from_numpy(seed.generate_state(2, np.uint64).view(np.int64))
        self._words = (_Words(self, 0), _Words(self, 1))
        self._polar = np.empty((2, 0, 0))

    def normal(
        self, t: int, size: int, dtype: torch.dtype = torch.float32, steps: int = 1
    ) -> Tensor:
        """Return the N(0, 1) values of steps t to t + steps − 1.  # [steps, size]

        It runs on one core; a second one would take longer to start than it saves.
        """
        half, kind = (size + 1) // 2, np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        words = (
            self._words[0]
            .of(t, steps, size, _blocks(half, 4))[:, :half]
            .view(np.uint32)
            .reshape(steps, half, 2)
        )
        if self._polar.shape != (2, steps, half) or self._polar.dtype != kind:
            self._polar = np.empty((2, steps, half), kind)  # a buffer, reused by later calls
        (radius, angle), out = self._polar, np.empty((steps, size), kind)
        radius[:] = words[:, :, 0]
        self._refine(radius, t, size)
        _to_radius(radius, words.reshape(-1, 2)[:, 0])
        angle[:] = words[:, :, 1].view(np.int32)
        angle *= math.pi * 2.0**-31
        np.multiply(np.cos(angle, out=out[:, :half]), radius, out=out[:, :half])
        rest = size - half
        np.multiply(np.sin(angle[:, :rest], out=out[:, half:]), radius[:, :rest], out=out[:, half:])
        return torch.from_numpy(out).to(dtype)

    def part(
        self, t: int, size: int, first: int, end: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return values first to end − 1 of the `size` values of step t, without drawing the rest.

        The result is [end − first].
        """
        half, kind = (size + 1) // 2, np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        out = np.empty(end - first, kind)
        for low, high, turn in ((first, min(end, half), np.cos), (max(first, half), end, np.sin)):
            for start in range(low, high, _PAIRS_PER_BLOCK):
                stop = min(start + _PAIRS_PER_BLOCK, high)
                pair = start if turn is np.cos else start - half
                radius, angle = self._radius_and_angle(t, size, pair, pair + stop - start, kind)
                np.multiply(turn(angle, out=angle), radius, out=out[start - first : stop - first])
        return torch.from_numpy(out).to(dtype)

    def _radius_and_angle(
        self, t: int, size: int, first: int, end: int, kind: np.dtype[Any]
    ) -> tuple[NDArray[Any], ...]:
        """Return the radius and the angle of pairs first to end − 1.  # [pair], [pair]"""
        half = (size + 1) // 2
        words = (
            self._words[0]
            .span(t, size, _blocks(half, 4), first, end)
            .view(np.uint32)
            .reshape(-1, 2)
        )
        radius = words[:, 0].astype(kind)
        if kind == np.float64:
            radius += self._refinements(t, size, first, end)
        else:
            for j in np.flatnonzero(words[:, 0] < _TAIL):
                radius[j] += self._refinements(t, size, first + int(j), first + int(j) + 1)[0]
        _to_radius(radius, words[:, 0])
        return radius, words[:, 1].view(np.int32).astype(kind) * kind.type(math.pi * 2.0**-31)

    def _refinements(self, t: int, size: int, first: int, end: int) -> NDArray[np.float64]:
        """Return what 32 more bits add to u of pairs first to end − 1.  # [pair], in 2⁻³²"""
        words = (
            self._words[1]
            .span(t, size, _blocks((size + 1) // 2, 8), first // 2, (end + 1) // 2)
            .view(np.uint32)
        )
        bits = words[first % 2 :][: end - first]
        refinements: NDArray[np.float64] = (bits + np.float64(1)) * 2.0**-32
        return refinements

    def _refine(self, u: NDArray[Any], t: int, size: int) -> None:
        """Add 32 more bits to u [step, pair], given in units of 2⁻³².

        In float32 only a u in the tail is refined; in float64 every u is.
        """
        steps, half = u.shape
        if u.dtype == np.float64:
            extra = self._words[1].of(t, steps, size, _blocks(half, 8)).view(np.uint32)[:, :half]
            u += (extra + 1.0) * 2.0**-32
        else:
            for s, j in _in_tail(u):
                u[s, j] += self._refinement(t + s, size, j)

    def _refinement(self, t: int, size: int, pair: int) -> float:
        """Return what 32 more bits add to the u of one pair, in units of 2⁻³²."""
        blocks = _blocks((size + 1) // 2, 8)
        return (
            float(self._words[1].of(t, 1, size, blocks).view(np.uint32)[0, pair]) + 1.0
        ) * 2.0**-32

    def state(self) -> Tensor:
        """Return the key, which determines the stream. Secret; for the checkpoint only."""
        return self.key.clone()

    def set_state(self, state: Tensor) -> None:
        """Continue the stream that `state` was taken from."""
        self.key = state.cpu().clone()
        self._words = (_Words(self, 0), _Words(self, 1))


def _to_radius(u: NDArray[Any], low: NDArray[np.uint32]) -> None:
    """Replace u, in units of 2⁻³², by r = √(−2 ln u), in place.

    `low` holds the 32-bit words that u was made from, as one flat array.
    """
    np.log(np.multiply(u, 2.0**-32, out=u), out=u)
    if u.dtype == np.float32:
        flat = u.reshape(-1)
        near = np.flatnonzero(flat > -(2.0**-7))  # candidates; the comparison of words decides
        words = low[near]
        exact = np.log1p(-(np.float64(2.0**32 - 0.5) - words) * 2.0**-32)
        flat[near] = np.where(words >= _FLAT, exact, flat[near])
    np.sqrt(np.multiply(u, -2.0, out=u), out=u)


class _Words:
    """One of a run's streams of Philox words.

    A generator that is already at the right counter is reused; constructing one takes longer.
    """

    def __init__(self, noise: Noise, stream: int) -> None:
        self._key, self._stream = noise.key.numpy().view(np.uint64), stream
        self._bits, self._at = np.random.Philox(0), (-1, -1)

    def of(self, t: int, steps: int, size: int, blocks: int) -> NDArray[np.uint64]:
        """Return the words of steps t to t + steps − 1.  # [steps, 4 · blocks]

        Each step has `size` values and uses `blocks` blocks of four words.
        """
        if self._at != (size, t * blocks):
            counter = np.array([t * blocks, self._stream, size, 0], dtype=np.uint64)
            self._bits = np.random.Philox(key=self._key, counter=counter)
        self._at = size, (t + steps) * blocks
        return self._bits.random_raw(4 * blocks * steps).reshape(steps, 4 * blocks)

    def span(self, t: int, size: int, blocks: int, first: int, end: int) -> NDArray[np.uint64]:
        """Return words first to end − 1 of step t.  # [end − first]"""
        counter = np.array([t * blocks + first // 4, self._stream, size, 0], dtype=np.uint64)
        drawn = np.random.Philox(key=self._key, counter=counter).random_raw(
            4 * _blocks(end - first + first % 4, 4)
        )
        return drawn[first % 4 :][: end - first]


def _in_tail(u: NDArray[Any]) -> list[tuple[int, int]]:
    """Return the (step, pair) of every u in the tail; u [step, pair] is in units of 2⁻³²."""
    if u.min(initial=_TAIL) >= _TAIL:
        return []
    return [(int(s), int(j)) for s, j in zip(*np.nonzero(u < _TAIL), strict=True)]


def _blocks(pairs: int, each: int) -> int:
    """Return the number of blocks for these pairs, at `each` pairs per block."""
    return -(-pairs // each)


class StepNoise:
    """The noise of consecutive steps, drawn for many steps at once if steps are small.

    Attributes:
        noise: the run's noise.
        sizes: name of each release of a step -> number of values it needs.
        dtype: dtype of the values.
    """

    def __init__(
        self, noise: Noise, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.noise, self.sizes, self.dtype, self._device = noise, dict(sizes), dtype, device
        self._steps = max(1, _VALUES_PER_DRAW // max(self.size, 1))
        self._rows, self._first = list[Tensor](), 0

    @property
    def size(self) -> int:
        """Number of values per step."""
        return sum(self.sizes.values())

    def of(self, t: int) -> dict[str, Tensor]:
        """Return the noise of step t.  # name -> [size]"""
        if not 0 <= t - self._first < len(self._rows):
            drawn = self.noise.normal(t, self.size, self.dtype, self._steps).to(self._device)
            self._rows, self._first = list(drawn.unbind()), t
        parts = torch.split(self._rows[t - self._first], list(self.sizes.values()))
        return dict(zip(self.sizes, parts, strict=True))

    def pieces(self, t: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Return the values of the ranges (first, end) of step t, concatenated.

        Only these values are drawn.
        """
        parts = [self.noise.part(t, self.size, first, end, self.dtype) for first, end in ranges]
        return torch.cat([torch.empty(0, dtype=self.dtype), *parts]).to(self._device)

    def state(self) -> Tensor:
        """Return the key of the noise. Secret; for the checkpoint only."""
        return self.noise.state()

    def set_state(self, state: Tensor) -> None:
        """Continue the noise that `state` was taken from."""
        self.noise.set_state(state)
        self._rows = []
