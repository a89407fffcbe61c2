"""Releases, the only way in which a private value becomes public, and the ledger of releases.

A value computed from the batch becomes public as

    released = value + sensitivity · multiplier · N(0, I),

and the multiplier m = noise standard deviation ÷ sensitivity is written to the ledger. All releases
of one step use the same Poisson batch. A later release may depend on the noisy value of an earlier
one, and on no other result of the step. Together they are one sampled Gaussian mechanism with the
joint multiplier (Σ_j m_j⁻²)^(-1/2). Proof: stack the values, each divided by its sensitivity and
multiplied by m_j⁻¹. One record moves this vector by at most (Σ_j m_j⁻²)^(1/2), under unit noise,
and adaptivity does not change the guarantee of a Gaussian mechanism (Dong, Roth, Su 2022, "Gaussian
differential privacy").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from evenclip.mechanism.grid import Grid, on_grid
from evenclip.mechanism.noise import Values

__all__ = ["Entry", "Ledger", "Release", "Share", "joint_multiplier"]


def joint_multiplier(multipliers: Iterable[float]) -> float:
    """Return (Σ_j m_j⁻²)^(-1/2), the multiplier of several releases on one batch taken as one.

    It is 0 if any of the multipliers is 0.

    >>> joint_multiplier([3.0, 4.0])
    2.4
    >>> joint_multiplier([])
    inf
    """
    # float(): dp-accounting silently drops multipliers that are integers or numpy numbers.
    values = [float(m) for m in multipliers]
    if any(m == 0 for m in values):
        return 0.0
    precision = sum(m**-2 for m in values)
    return math.inf if precision == 0 else precision**-0.5


@dataclass(frozen=True)
class Entry:
    """Consecutive steps with the same releases and the same multipliers.

    Attributes:
        q: Poisson rate of the batches; None if the batches were not Poisson samples, so that no ε
            can be stated.
        multipliers: name of each release of a step -> noise standard deviation ÷ sensitivity; 0 is
            a release in clear.
        steps: number of consecutive steps.
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
        """Whether these steps have an ε: Poisson batches, and noise on every released value."""
        return self.q is not None and self.joint > 0


@dataclass
class Ledger:
    """Every release of a run, in order. `evenclip.mechanism.accounting` computes ε from it.

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
        """Add one step: its releases had these multipliers, on one batch drawn at rate q."""
        last = self.entries[-1] if self.entries else None
        if last is not None and last.q == q and last.multipliers == tuple(multipliers.items()):
            self.entries[-1] = Entry(last.q, last.multipliers, last.steps + 1)
        else:
            self.entries.append(_entry(q, multipliers, 1))

    @property
    def steps(self) -> int:
        """Number of steps."""
        return sum(entry.steps for entry in self.entries)

    @property
    def is_private(self) -> bool:
        """Whether an ε can be stated for all entries."""
        return all(entry.is_private for entry in self.entries)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the entries as plain values."""
        return [
            {"q": e.q, "multipliers": dict(e.multipliers), "steps": e.steps} for e in self.entries
        ]

    @staticmethod
    def from_json(rows: Iterable[Mapping[str, Any]]) -> Ledger:
        """Return the ledger that `to_json` wrote."""
        return Ledger([_entry(r["q"], r["multipliers"], int(r["steps"])) for r in rows])


def _entry(q: float | None, multipliers: Mapping[str, float], steps: int) -> Entry:
    """Return an entry with Python floats; dp-accounting silently drops other numbers."""
    return Entry(
        None if q is None else float(q),
        tuple((name, float(m)) for name, m in multipliers.items()),
        steps,
    )


class Share(Protocol):
    """The part of a released vector that one of several processes releases.

    Attributes:
        ranges: the slices (first, end) of the vector that this process adds noise to.
    """

    ranges: Sequence[tuple[int, int]]

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over the processes, of these ranges; keep `value` unchanged."""

    def whole(self, released: Tensor) -> Tensor:
        """Return what this process needs of the released vector, given its own ranges."""


class Release:
    """The releases of one step. The noise is drawn before the step, and each value is used once.

    Args:
        noise: name of a release -> N(0, 1), float64.
        shares: name of a release -> the part of this process; empty in a single process.

    >>> release = Release({"gradient": torch.zeros(2, dtype=torch.float64)})
    >>> total = torch.tensor([3.0, 4.0], dtype=torch.float64)
    >>> release("gradient", total, sensitivity=0.5, multiplier=2.0, rounding=0.0, scale=0.5)
    tensor([1.5000, 2.0000], dtype=torch.float64)
    >>> release("gradient", total, sensitivity=0.5, multiplier=2.0, rounding=0.0)
    Traceback (most recent call last):
    ...
    ValueError: This step has released 'gradient' already; noise is used once.
    """

    def __init__(
        self, noise: Mapping[str, Values], shares: Mapping[str, Share] | None = None
    ) -> None:
        self._noise, self._released = dict(noise), set[str]()
        self._shares = shares or {}

    def __call__(
        self,
        name: str,
        value: Tensor,
        *,
        sensitivity: float | Tensor,
        multiplier: float,
        rounding: float,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Release `value` with noise of standard deviation sensitivity · multiplier.

        A multiplier of 0 publishes the value in clear.

        Args:
            name: name of the release.
            value: the private sum.  # [number]
            sensitivity: S, the most that one record adds to the sum.
            multiplier: noise standard deviation ÷ S.
            rounding: ρ, by which the rounding of the sum exceeds S.
            scale: public factor of the result.
            dtype: dtype of the result.
        """
        if value.numel() == 0:
            return value
        if name in self._released:
            raise ValueError(f"This step has released {name!r} already; noise is used once.")
        self._released.add(name)
        share = self._shares.get(name)
        total = value if share is None else share.total(value)
        if multiplier == 0:
            released = (total * scale).to(dtype)
        else:
            fresh = self._noise.pop(name)
            if share is not None:
                fresh = torch.cat([fresh[first:end] for first, end in share.ranges])
            grid = Grid.of(sensitivity, multiplier, value.numel(), rounding)
            released = on_grid(total.to(torch.float64), fresh, grid, scale, dtype)
        return released if share is None else share.whole(released)
