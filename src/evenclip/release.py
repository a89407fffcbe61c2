"""Release: the only road from private to public, and the ledger it writes.

A value computed from the batch becomes public as

    released = value + sensitivity · multiplier · N(0, I),

and the multiplier m = noise standard deviation ÷ sensitivity goes into the ledger. All releases of one step see the
same Poisson batch; a later one may depend on the noisy value of an earlier one and on nothing else. They are then one
sampled Gaussian mechanism with the joint multiplier (Σ_j m_j⁻²)^(-1/2): stack the values, each divided by its
sensitivity and multiplied by m_j⁻¹; one record moves that vector by at most (Σ_j m_j⁻²)^(1/2), under unit noise, and
adaptivity costs a Gaussian mechanism nothing (Dong, Roth, Su 2022, "Gaussian differential privacy").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Ahead", "Entry", "Ledger", "Noise", "Releases", "joint_multiplier"]

# Numbers that are drawn at once, at the least: fewer, and the calls would take longer than the drawing.
_AT_ONCE = 2**15


def joint_multiplier(multipliers: Iterable[float]) -> float:
    """(Σ_j m_j⁻²)^(-1/2), the multiplier of several releases on one batch taken as one; 0 if any of them is 0.

    >>> joint_multiplier([3.0, 4.0])
    2.4
    >>> joint_multiplier([])
    inf
    """
    # float(): a numpy or integer multiplier must not travel further; dp-accounting drops such values silently.
    values = [float(m) for m in multipliers]
    if any(m == 0 for m in values):
        return 0.0
    precision = sum(m**-2 for m in values)
    return math.inf if precision == 0 else precision**-0.5


@dataclass(frozen=True)
class Entry:
    """`steps` consecutive steps that released the same things in the same way.

    Attributes:
        q: Poisson rate of the batches; None where the batch was not a Poisson sample, so that no ε can be stated.
        multipliers: name of each release of a step -> noise standard deviation ÷ sensitivity; 0 is a release in clear.
        steps: how many steps in a row.
    """

    q: float | None
    multipliers: tuple[tuple[str, float], ...]
    steps: int = 1

    @property
    def joint(self) -> float:
        """The multiplier of all releases of one step taken as one."""
        return joint_multiplier(m for _, m in self.multipliers)

    @property
    def is_private(self) -> bool:
        """Whether these steps have an ε at all: Poisson batches, and noise on everything released."""
        return self.q is not None and self.joint > 0


@dataclass
class Ledger:
    """What was released, in order: the truth about ε. `evenclip.accounting` turns it into numbers.

    >>> ledger = Ledger()
    >>> for _ in range(3):
    ...     ledger.write(0.01, {"count": 10.0, "gradient": 1.0})
    >>> ledger.steps, len(ledger.entries)
    (3, 1)
    >>> Ledger.from_json(ledger.to_json()) == ledger
    True
    """

    entries: list[Entry] = field(default_factory=list)

    def write(self, q: float | None, multipliers: Mapping[str, float]) -> None:
        """Add one step that released under these multipliers on one batch of rate q."""
        last = self.entries[-1] if self.entries else None
        if last is not None and last.q == q and last.multipliers == tuple(multipliers.items()):
            self.entries[-1] = Entry(last.q, last.multipliers, last.steps + 1)
        else:
            self.entries.append(_entry(q, multipliers, 1))

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return sum(entry.steps for entry in self.entries)

    @property
    def is_private(self) -> bool:
        """Whether an ε can be stated for everything in here."""
        return all(entry.is_private for entry in self.entries)

    def to_json(self) -> list[dict[str, Any]]:
        """The entries as plain values."""
        return [{"q": e.q, "multipliers": dict(e.multipliers), "steps": e.steps} for e in self.entries]

    @staticmethod
    def from_json(rows: Iterable[Mapping[str, Any]]) -> Ledger:
        """The ledger that `to_json` wrote."""
        return Ledger([_entry(r["q"], r["multipliers"], int(r["steps"])) for r in rows])


def _entry(q: float | None, multipliers: Mapping[str, float], steps: int) -> Entry:
    """An entry of Python's own floats: dp-accounting drops others silently."""
    return Entry(None if q is None else float(q), tuple((name, float(m)) for name, m in multipliers.items()), steps)


class Noise:
    """Standard normal noise with a true tail, from one stream of random numbers that belongs to one run.

    Box–Muller on 53-bit uniforms: r = √(−2 ln u), u ∈ {2⁻⁵³, …, 1}, reaches 8.57 standard deviations, so what is
    missing has probability 2⁻⁵³ ≈ 1.1e-16 a pair. (torch's float32 `randn` uses 24-bit uniforms and ends at 5.77, which
    alone is a δ of 8e-9 for each coordinate and step: about 2e-5 for the Adult MLP instead of the promised 1e-6.)
    Not cryptographic: whoever knows the seed or the state knows the noise.
    """

    def __init__(self, seed: np.random.SeedSequence) -> None:
        self._uniform = np.random.Generator(np.random.SFC64(seed))
        self._u, self._polar = np.empty(0), np.empty((2, 0))

    def normal(self, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The next `size` numbers of the stream, N(0, 1), on the CPU.  # [size]

        In numpy and on one core: handing the work to a second one takes longer.
        """
        half, kind = (size + 1) // 2, np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        if self._polar.shape[1] != half or self._polar.dtype != kind:
            self._u, self._polar = np.empty(half), np.empty((2, half), kind)  # written again and again: they stay
        u, (radius, angle) = self._u, self._polar
        # The tail is in the radius; beyond that the numbers need no more precision than what they are added to.
        self._uniform.random(out=u)
        np.log(np.subtract(1.0, u, out=u), out=u)  # 1 − u is exact, and never 0
        np.sqrt(np.multiply(u, -2.0, out=radius, casting="same_kind"), out=radius)
        angle[:] = self._bits(half, kind.itemsize)
        angle *= math.pi * 2.0 ** (1 - 8 * kind.itemsize)
        out = np.empty((2, half), kind)
        np.multiply(np.cos(angle, out=out[0]), radius, out=out[0])
        np.multiply(np.sin(angle, out=out[1]), radius, out=out[1])
        return torch.from_numpy(out).view(-1)[:size].to(dtype)

    def _bits(self, count: int, size: int) -> NDArray[np.signedinteger[Any]]:
        """Integers of so many bytes, every one as likely as every other.  # [count]"""
        words = self._uniform.bit_generator.random_raw(-(-count * size // 8))
        return words.view(f"i{size}")[:count]

    def state(self) -> Tensor:
        """Where the stream stands: secret, for the checkpoint only."""
        state = self._uniform.bit_generator.state["state"]["state"]
        return torch.from_numpy(np.asarray(state, dtype=np.uint64).view(np.int64).copy())

    def set_state(self, state: Tensor) -> None:
        """Go on from a state that `state` returned."""
        whole: dict[str, Any] = dict(self._uniform.bit_generator.state)
        whole["state"] = {"state": state.numpy().view(np.uint64).copy()}
        whole["has_uint32"], whole["uinteger"] = 0, 0  # this class draws 64 bits at a time
        self._uniform.bit_generator.state = whole


class Ahead:
    """Noise for one step after the other, drawn for many steps at once where steps are small.

    sizes: name of each release of a step -> how many numbers it needs.
    """

    def __init__(self, noise: Noise, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> None:
        self._noise, self._sizes, self._dtype, self._device = noise, dict(sizes), dtype, device
        self._steps = max(1, _AT_ONCE // max(sum(sizes.values()), 1))
        self._rows: list[dict[str, Tensor]] = []
        self._at, self._before = 0, noise.state()  # where in the block, and the stream's state before the block

    def next(self) -> dict[str, Tensor]:
        """The next step's noise.  # name -> [size]"""
        if self._at == len(self._rows):
            self._draw()
        self._at += 1
        return self._rows[self._at - 1]

    def _draw(self) -> None:
        self._at, self._before = 0, self._noise.state()
        sizes = list(self._sizes.values())
        drawn = self._noise.normal(self._steps * sum(sizes), self._dtype).to(self._device).view(self._steps, sum(sizes))
        columns = (part.unbind() for part in torch.split(drawn, sizes, dim=1))
        self._rows = [dict(zip(self._sizes, row, strict=True)) for row in zip(*columns, strict=True)]

    def state(self) -> dict[str, Any]:
        """Where this stands: secret, for the checkpoint only."""
        return {"before": self._before, "at": self._at}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state` returned."""
        self._noise.set_state(state["before"])
        self._rows = []
        if state["at"]:
            self._draw()
        self._at = state["at"]


class Releases:
    """The releases of one step, on noise that was drawn before the step began.

    Taking the noise as an argument keeps the step a pure function of tensors, which can be mapped and compiled.

    >>> release = Releases({"count": torch.zeros(1), "gradient": torch.ones(2)})
    >>> release("gradient", torch.tensor([3.0, 4.0]), sensitivity=0.5, multiplier=2.0)
    tensor([4., 5.])
    >>> release.multipliers
    {'gradient': 2.0}
    """

    def __init__(self, noise: Mapping[str, Tensor]) -> None:
        self._noise = dict(noise)  # name of the release -> N(0, I), used once
        self.multipliers: dict[str, float] = {}

    def __call__(self, name: str, value: Tensor, *, sensitivity: float | Tensor, multiplier: float) -> Tensor:
        """`value` made public: plus sensitivity · multiplier · N(0, I).

        A multiplier of 0 publishes it in clear, and the ledger will say so. Nothing is written for a value without
        numbers.
        """
        if value.numel() == 0:
            return value
        if name in self.multipliers:
            raise ValueError(f"This step has released {name!r} already; noise is used once.")
        self.multipliers[name] = multiplier
        if multiplier == 0:
            return value
        fresh = self._noise.pop(name)
        fresh = fresh if fresh.shape == value.shape else fresh.view(value.shape)
        if isinstance(sensitivity, Tensor):
            return value + (sensitivity * multiplier) * fresh
        return torch.add(value, fresh, alpha=sensitivity * multiplier)
