"""Standard normal noise with a true tail: number i of the n of step t is a function of (key, t, n, i) alone.

The bits are Philox 4×64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), which turns a counter
and the run's key into four words. So a run draws the same noise on a CPU (numpy's Philox) and on a GPU (the same in
tensor operations, inside a compiled step), alone, in a stack of runs, or resumed; and no two steps share any.

One word makes a pair by Box–Muller: 32 bits for the angle, 32 for u in the radius r = √(−2 ln u). Where u < 2⁻²⁰, which
is where the tail begins, 32 more bits from a second stream go into it: u ∈ {2⁻⁶⁴, …} reaches 9.4 standard deviations,
and what is missing has probability 2⁻⁶⁴ ≈ 5e-20 a pair. In float32, where u > 1 − 2⁻⁸, r is taken from 1 − u, so that
it is never rounded to 0. (torch's float32 `randn` uses 24-bit uniforms and ends at 5.77, which alone is a δ of 8e-9 for
each coordinate and step: about 2e-5 for the Adult MLP instead of the promised 1e-6.)
Not cryptographic: whoever knows the key knows the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Ahead", "Noise", "normal", "normals"]

# Numbers that are drawn at once, at the least: fewer, and the calls would take longer than the drawing.
_AT_ONCE = 2**15
_IN_CACHE = 2**16  # pairs
# Philox: multipliers, and what is added to the key after every round.
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS, _LOW = 10, 0xFFFFFFFF
_TAIL = 2**12  # a 32-bit u below this takes 32 bits more
_FLAT = 2**32 - 2**24  # from this on it is too near 1 for its logarithm in float32


class Noise:
    """The noise of one run, on the CPU.

    Attributes:
        key: two words, secret: for the checkpoint and for `normal`.  # [2], int64
    """

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self.key = torch.from_numpy(seed.generate_state(2, np.uint64).view(np.int64))
        self._words = (_Words(self, 0), _Words(self, 1))
        self._polar, self._zeros = np.empty((2, 0, 0)), np.empty((0, 0), np.float32)

    def normal(self, t: int, size: int, dtype: torch.dtype = torch.float32, steps: int = 1) -> Tensor:
        """The numbers of so many steps from step t on, N(0, 1).  # [steps, size]

        In numpy and on one core: handing the work to a second one takes longer.
        """
        half, kind = (size + 1) // 2, np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        words = self._words[0].of(t, steps, size, _blocks(half, 4))[:, :half].view(np.uint32).reshape(steps, half, 2)
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

    def part(self, t: int, size: int, first: int, end: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers first to end − 1 of the `size` of step t, for whoever has use for these alone.  # [end − first]"""
        half, kind = (size + 1) // 2, np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        out = np.empty(end - first, kind)
        for low, high, turn in ((first, min(end, half), np.cos), (max(first, half), end, np.sin)):
            for at in range(low, high, _IN_CACHE):
                stop, pair = min(at + _IN_CACHE, high), at if turn is np.cos else at - half
                radius, angle = self._polar_of(t, size, pair, pair + stop - at, kind)
                np.multiply(turn(angle, out=angle), radius, out=out[at - first : stop - first])
        return torch.from_numpy(out).to(dtype)

    def _polar_of(self, t: int, size: int, first: int, end: int, kind: np.dtype[Any]) -> tuple[NDArray[Any], ...]:
        """Radius and angle of pairs first to end − 1.  # [pair], twice"""
        half = (size + 1) // 2
        words = self._words[0].some(t, size, _blocks(half, 4), first, end).view(np.uint32).reshape(-1, 2)
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
        words = self._words[1].some(t, size, _blocks((size + 1) // 2, 8), first // 2, (end + 1) // 2).view(np.uint32)
        more: NDArray[np.float64] = (words[first % 2 :][: end - first] + np.float64(1)) * 2.0**-32
        return more

    def _refine(self, u: NDArray[Any], t: int, size: int) -> None:
        """32 bits more where u [step, pair], in units of 2⁻³², lies in the tail; everywhere in float64."""
        steps, half = u.shape
        if u.dtype == np.float64:
            extra = self._words[1].of(t, steps, size, _blocks(half, 8)).view(np.uint32)[:, :half]
            u += (extra + 1.0) * 2.0**-32
        else:
            for s, j in _in_tail(u):
                u[s, j] += self._further(t + s, size, j)

    def words(self, t: int, size: int, steps: int = 1) -> tuple[Tensor, Tensor]:
        """What `normals` makes the float32 numbers of so many steps of: words, more.  # [steps, pair], twice"""
        half = (size + 1) // 2
        words = self._words[0].of(t, steps, size, _blocks(half, 4))[:, :half]
        more = self._zeros
        if more.shape != words.shape:
            more = self._zeros = np.zeros(words.shape, np.float32)  # read again and again: it stays
        for s, j in _in_tail(words.view(np.uint32)[:, ::2]):
            more = more.copy() if more is self._zeros else more
            more[s, j] = self._further(t + s, size, j)
        return torch.from_numpy(words.view(np.int64)), torch.from_numpy(more)

    def _further(self, t: int, size: int, pair: int) -> float:
        """What 32 bits more add to u in the tail, in units of 2⁻³²."""
        blocks = _blocks((size + 1) // 2, 8)
        return (float(self._words[1].of(t, 1, size, blocks).view(np.uint32)[0, pair]) + 1.0) * 2.0**-32

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
    """One of a run's streams of Philox words, by numpy. Going on where it stopped is quicker than jumping."""

    def __init__(self, noise: Noise, stream: int) -> None:
        self._key, self._stream = noise.key.numpy().view(np.uint64), stream
        self._bits, self._at = np.random.Philox(0), (-1, -1)

    def of(self, t: int, steps: int, size: int, blocks: int) -> NDArray[np.uint64]:
        """The words of so many steps of `size` numbers from t on, in so many blocks each.  # [steps, 4 · blocks]"""
        if self._at != (size, t * blocks):
            counter = np.array([t * blocks, self._stream, size, 0], dtype=np.uint64)
            self._bits = np.random.Philox(key=self._key, counter=counter)
        self._at = size, (t + steps) * blocks
        return self._bits.random_raw(4 * blocks * steps).reshape(steps, 4 * blocks)

    def some(self, t: int, size: int, blocks: int, first: int, end: int) -> NDArray[np.uint64]:
        """Words first to end − 1 of those of step t."""
        counter = np.array([t * blocks + first // 4, self._stream, size, 0], dtype=np.uint64)
        drawn = np.random.Philox(key=self._key, counter=counter).random_raw(4 * _blocks(end - first + first % 4, 4))
        return drawn[first % 4 :][: end - first]


def normal(key: Tensor, t: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of step t of the run with this key, as `Noise.normal` has them, in tensor operations alone.

    For a GPU. Not to be compiled for a CPU: products wrap around here, and in C++ they must not. (torch 2.13's compiler
    makes some of the last few numbers wrong then.)

    Args:
        key: [2], int64
        t: [], int64
        size: how many.
        dtype: of what.

    Returns:
        [size]
    """
    half = (size + 1) // 2
    words = _philox(key, t, size, _blocks(half, 4), 0)[:half]
    extra = _philox(key, t, size, _blocks(half, 8), 1)
    extra = torch.stack([extra & _LOW, (extra >> 32) & _LOW], dim=1).flatten()[:half]
    more = (extra.to(_exact(dtype)) + 1.0) * 2.0**-32
    if dtype != torch.float64:
        more = torch.where(words & _LOW < _TAIL, more, 0.0)
    return normals(words, more, size, dtype)


def normals(words: Tensor, more: Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that these words make, in tensor operations that may be compiled for a CPU as well.

    Args:
        words: [pair], int64
        more: what further bits add to each u, in units of 2⁻³²; 0 where there are none.  # [pair]
        size: how many numbers.
        dtype: of what.

    Returns:
        [size]
    """
    exact = _exact(dtype)
    low = words & _LOW
    logarithm = ((low.to(exact) + more) * 2.0**-32).log()
    if exact == torch.float32:
        rest = (_LOW - low).to(exact) + 0.5
        logarithm = torch.where(low >= _FLAT, torch.log1p(rest * -(2.0**-32)), logarithm)
    radius = (logarithm * -2.0).sqrt()
    angle = (words >> 32).to(exact) * (math.pi * 2.0**-31)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:size].to(dtype)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What numbers of this kind are computed in."""
    return dtype if dtype == torch.float64 else torch.float32


def _philox(key: Tensor, t: Tensor, size: int, blocks: int, stream: int) -> Tensor:
    """The words of step t, as numpy's Philox gives them.  # [4 · blocks], int64"""
    c0 = torch.arange(1, blocks + 1, device=key.device) + t * blocks  # numpy counts before it draws
    c1, c2, c3 = torch.full_like(c0, stream), torch.full_like(c0, size), torch.zeros_like(c0)
    k0, k1 = key[0], key[1]
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _signed(_WEYL[0]), k1 + _signed(_WEYL[1])
    return torch.stack([c0, c1, c2, c3], dim=1).flatten()


def _product(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 64 bits of an unsigned product: of 32-bit halves, as sums and products wrap around."""
    x1, x0, m1, m0 = (x >> 32) & _LOW, x & _LOW, m >> 32, m & _LOW
    middle = x1 * m0 + (((x0 * m0) >> 32) & _LOW)
    other = x0 * m1 + (middle & _LOW)
    return x1 * m1 + ((middle >> 32) & _LOW) + ((other >> 32) & _LOW), x * _signed(m)


def _signed(word: int) -> int:
    """The same 64 bits as a signed number."""
    return word - 2**64 if word >= 2**63 else word


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

    def __init__(self, noise: Noise, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> None:
        self.noise, self.sizes, self.dtype, self._device = noise, dict(sizes), dtype, device
        self._steps = max(1, _AT_ONCE // max(self.size, 1))
        self._rows, self._first = list[Tensor](), 0
        self._words, self._first_words = list[tuple[Tensor, Tensor]](), 0

    @property
    def size(self) -> int:
        """Numbers a step."""
        return sum(self.sizes.values())

    def of(self, t: int) -> dict[str, Tensor]:
        """The noise of step t.  # name -> [size]"""
        return self.split(self.row(t))

    def pieces(self, t: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Some ranges (first, end) of the noise of step t, side by side, and nothing else drawn."""
        parts = [self.noise.part(t, self.size, first, end, self.dtype) for first, end in ranges]
        return torch.cat([torch.empty(0, dtype=self.dtype), *parts]).to(self._device)

    def row(self, t: int) -> Tensor:
        """The same side by side.  # [size]"""
        if not 0 <= t - self._first < len(self._rows):
            drawn = self.noise.normal(t, self.size, self.dtype, self._steps).to(self._device)
            self._rows, self._first = list(drawn.unbind()), t
        return self._rows[t - self._first]

    def words(self, t: int) -> tuple[Tensor, Tensor]:
        """What `normals` makes the float32 numbers of step t of.  # [pair], [pair]"""
        if not 0 <= t - self._first_words < len(self._words):
            words, more = self.noise.words(t, self.size, self._steps)
            self._words, self._first_words = list(zip(words.unbind(), more.unbind(), strict=True)), t
        return self._words[t - self._first_words]

    def state(self) -> Tensor:
        """What it all hangs on: secret, for the checkpoint only."""
        return self.noise.state()

    def set_state(self, state: Tensor) -> None:
        """Be the noise that `state` was taken from."""
        self.noise.set_state(state)
        self._rows, self._words = [], []

    def split(self, row: Tensor) -> dict[str, Tensor]:
        """A row by the names of the releases."""
        parts: Iterator[Tensor] = iter(torch.split(row, list(self.sizes.values())))
        return dict(zip(self.sizes, parts, strict=True))
