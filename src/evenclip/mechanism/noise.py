"""Standard normal noise, accurate enough for a release on a public grid.

Value i of a release in draw `index` of a run is a function of (key, release, index, i) alone.

The Box–Muller transform turns two words into two values (r cos θ, r sin θ) with r = √(−2 ln u). In
float64, u has full relative precision: where its word of 63 bits is below 2⁵² (one pair in 2048),
another word extends it to 127 bits. θ has 53 bits. So the computed pair differs from the pair of a
real-valued Box–Muller transform by at most c/r along the radius, and each value by at most
c·(r + 2H/σ'), where c = 2⁻⁴⁸ covers every rounding up to the division by the grid's spacing H (log,
sin and cos within 4 units in the last place). `evenclip.mechanism.grid` publishes only the cell of
width H that a value lies in. For a pair with u ≥ 2⁻⁷⁵, the probability of every cell is that of
real-valued noise up to a factor e^±λ with λ = 8(σ'/H)²c, and H ≥ σ'/16. The other pairs have
probability β = 2⁻⁷⁵.
`evenclip.mechanism.correction` adds both to ε and δ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenclip.mechanism.words import Keyed, Words, derive

__all__ = ["BETA", "BLOCK", "LAMBDA", "Noise", "NormalStream", "Values", "box_muller", "part"]

C = 2.0**-48
RATIO = 16.0  # σ'/H is below this
LAMBDA = 8 * RATIO**2 * C
BETA = 2.0**-75

# Values per block: few enough for the cache, and for memory that does not grow with the model.
BLOCK = 2**15
# Small releases are drawn for this many values at once, because a call takes longer than they do.
_AT_ONCE = 2**13
_SHORT = np.uint64(2**52)  # a word of 63 bits below this is extended by another one


class Values(Protocol):
    """The noise of one release in one step; a tensor [size] is one."""

    def __getitem__(self, part: slice, /) -> Tensor:
        """Return the values of a range.  # [end − first], float64"""


class Noise(Keyed):
    """The noise of all releases of a run.

    Args:
        key: secret key for this noise.
        sizes: name of each release of a step -> number of values.
        device: where the values are computed.
    """

    def __init__(self, key: bytes, sizes: Mapping[str, int], device: torch.device) -> None:
        self.sizes = dict(sizes)
        self._streams = {
            name: NormalStream(derive(key, f"{name} of {size}"), size, device)
            for name, size in sizes.items()
        }

    def of(self, index: int) -> dict[str, Values]:
        """Return the noise of draw `index`, by the names of the releases."""
        return {name: stream.of(index) for name, stream in self._streams.items()}


class NormalStream(Keyed):
    """N(0, 1) values of one release: `size` values for each draw of the run.

    Block b of a draw has the values from b·BLOCK on: the cosines of its pairs, then their sines.
    """

    def __init__(self, key: bytes, size: int, device: torch.device | None = None) -> None:
        self._words, self._further = Words(derive(key, "words")), Words(derive(key, "further"))
        self._size, self._pairs = size, (size + 1) // 2
        self._device = device or torch.device("cpu")
        # Aligned, so that a value never depends on which draws were computed before.
        self._at_once = max(1, _AT_ONCE // max(size, 1))
        self._rows: tuple[int, Tensor] | None = None  # first draw -> values  [draw, size]

    def of(self, index: int) -> Values:
        """Return the values of draw `index`."""
        if self._size > _AT_ONCE:
            return _Blocks(self, index)
        first = index - index % self._at_once
        if self._rows is None or self._rows[0] != first:
            self._rows = first, self._draws(first)
        return self._rows[1][index - first]

    def _draws(self, first: int) -> Tensor:
        """Return the values of several draws.  # [draw, size]"""
        draws, pairs = self._at_once, self._pairs
        words = self._words.span(2 * pairs * first, 2 * pairs * draws).reshape(draws, 2, pairs)
        return self._values(words[:, 0], words[:, 1], first, 0)[:, : self._size]

    def block(self, index: int, b: int) -> Tensor:
        """Return block b of draw `index`.  # [value]"""
        start, size = b * BLOCK // 2, min(BLOCK, self._size - b * BLOCK)
        pairs = (size + 1) // 2
        words = self._words.span(2 * (self._pairs * index + start), 2 * pairs).reshape(1, 2, pairs)
        return self._values(words[:, 0], words[:, 1], index, start)[0, :size]

    def _values(
        self, radius: NDArray[np.uint64], angle: NDArray[np.uint64], index: int, start: int
    ) -> Tensor:
        """Return the values of pairs given by their words.  # [draw, 2 · pair]

        Args:
            radius: words for the radius.  # [draw, pair]
            angle: words for the angle.  # [draw, pair]
            index: number of the first draw.
            start: number of the first pair.
        """
        radius = radius >> np.uint64(1)
        u = self._tensor(radius).mul_(2.0**-63)
        draw, pair = np.divmod(np.flatnonzero(radius < _SHORT), radius.shape[1])
        if len(draw):
            counters = np.stack([draw + index, pair + start], axis=1).astype(np.uint64)
            further = (self._further.at(counters).astype(np.float64) + 0.5) * 2.0**-127
            u[torch.from_numpy(draw), torch.from_numpy(pair)] += torch.from_numpy(further).to(u)
        return box_muller(u, self._tensor(angle))

    def _tensor(self, words: NDArray[np.uint64]) -> Tensor:
        """Return words as numbers; above 2⁶³ they are negative.  # float64"""
        return torch.from_numpy(words.view(np.int64)).to(self._device, torch.float64)


class _Blocks(Keyed):
    """The values of one draw of a large release, computed block by block on use."""

    def __init__(self, stream: NormalStream, index: int) -> None:
        self._stream, self._index = stream, index
        self._last: tuple[int, Tensor] | None = None  # a block, for the next range

    def _block(self, b: int) -> Tensor:
        if self._last is None or self._last[0] != b:
            self._last = b, self._stream.block(self._index, b)
        return self._last[1]

    def __getitem__(self, part: slice) -> Tensor:
        first, end, _ = part.indices(self._stream._size)
        if first >= end:
            return torch.empty(0, dtype=torch.float64, device=self._stream._device)
        blocks = range(first // BLOCK, (end - 1) // BLOCK + 1)
        drawn = [self._block(b) for b in blocks]
        whole = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
        at = blocks.start * BLOCK
        return whole[first - at : end - at]


class _Part:
    """A range of the values of a release."""

    def __init__(self, whole: Values, first: int) -> None:
        self._whole, self._first = whole, first

    def __getitem__(self, part: slice) -> Tensor:
        return self._whole[self._first + part.start : self._first + part.stop]


def part(noise: Values, first: int, end: int) -> Values:
    """Return the values of a range, which are drawn on use if they are not in memory."""
    return noise[first:end] if isinstance(noise, Tensor) else _Part(noise, first)


def box_muller(u: Tensor, angle: Tensor) -> Tensor:
    """Return r cos θ, then r sin θ, with r = √(−2 ln u); the arguments are overwritten.

    Args:
        u: in (0, 1].  # [..., pair], float64
        angle: θ in units of 2⁻⁶³ π.  # [..., pair], float64
    """
    radius = u.log_().mul_(-2.0).sqrt_()
    angle.mul_(math.pi * 2.0**-63)
    out = torch.empty((*u.shape[:-1], 2 * u.shape[-1]), dtype=u.dtype, device=u.device)
    half = u.shape[-1]
    torch.mul(torch.cos(angle), radius, out=out[..., :half])
    torch.mul(torch.sin(angle), radius, out=out[..., half:])
    return out
