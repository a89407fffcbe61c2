"""Release: the only road from private to public, and the ledger it writes.

A value computed from the batch becomes public as

    released = value + sensitivity · multiplier · N(0, I),

and the multiplier m = noise standard deviation ÷ sensitivity goes into the ledger. All releases of
one step see the same Poisson batch; a later one may depend on the noisy value of an earlier one and
on nothing else. They are then one sampled Gaussian mechanism with the joint multiplier (Σ_j
m_j⁻²)^(-1/2): stack the values, each divided by its sensitivity and multiplied by m_j⁻¹; one record
moves that vector by at most (Σ_j m_j⁻²)^(1/2), under unit noise, and adaptivity costs a Gaussian
mechanism nothing (Dong, Roth, Su 2022, "Gaussian differential privacy").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Entry", "Here", "Ledger", "Release", "Total", "joint_multiplier"]


def joint_multiplier(multipliers: Iterable[float]) -> float:
    """(Σ_j m_j⁻²)^(-1/2), the multiplier of several releases on one batch taken as one; 0 if any of
    them is 0.

    >>> joint_multiplier([3.0, 4.0])
    2.4
    >>> joint_multiplier([])
    inf
    """
    # float(): a numpy or integer multiplier must not travel further; dp-accounting drops such
    # values silently.
    values = [float(m) for m in multipliers]
    if any(m == 0 for m in values):
        return 0.0
    precision = sum(m**-2 for m in values)
    return math.inf if precision == 0 else precision**-0.5


@dataclass(frozen=True)
class Entry:
    """`steps` consecutive steps that released the same things in the same way.

    Attributes:
        q: Poisson rate of the batches; None where the batch was not a Poisson sample, so that no ε
            can be stated.
        multipliers: name of each release of a step -> noise standard deviation ÷ sensitivity; 0 is
            a release in clear.
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
    """What was released, in order: the truth about ε. `evenclip.mechanism.accounting` turns it into
    numbers.

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
        return [
            {"q": e.q, "multipliers": dict(e.multipliers), "steps": e.steps} for e in self.entries
        ]

    @staticmethod
    def from_json(rows: Iterable[Mapping[str, Any]]) -> Ledger:
        """The ledger that `to_json` wrote."""
        return Ledger([_entry(r["q"], r["multipliers"], int(r["steps"])) for r in rows])


def _entry(q: float | None, multipliers: Mapping[str, float], steps: int) -> Entry:
    """An entry of Python's own floats: dp-accounting drops others silently."""
    return Entry(
        None if q is None else float(q),
        tuple((name, float(m)) for name, m in multipliers.items()),
        steps,
    )


class Total(Protocol):
    """How the parts of a released value are added up, where several processes take a step together.

    Attributes:
        adds_noise: whether this process adds noise to it.
    """

    adds_noise: bool

    def total(self, value: Tensor) -> Tensor:
        """The sum over the processes, without this one's noise; `value` is not changed."""

    def noisy_total(self, value: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        """The same with its noise, which `add` adds to a value of the noise's size."""


class Here:
    """In one process the value is the sum."""

    adds_noise = True

    def total(self, value: Tensor) -> Tensor:
        """The value itself."""
        return value

    def noisy_total(self, value: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        """With its noise."""
        return add(value)


_HERE = Here()


class Release:
    """The releases of one step, on noise that was drawn before the step began and is used once.

    >>> release = Release({"count": torch.zeros(1), "gradient": torch.ones(2)})
    >>> release("gradient", torch.tensor([3.0, 4.0]), sensitivity=0.5, multiplier=2.0)
    tensor([4., 5.])
    >>> release("gradient", torch.tensor([3.0, 4.0]), sensitivity=0.5, multiplier=2.0)
    Traceback (most recent call last):
    ...
    ValueError: This step has released 'gradient' already; noise is used once.
    """

    def __init__(
        self, noise: Mapping[str, Tensor], totals: Mapping[str, Total] | None = None
    ) -> None:
        self._noise, self._released = dict(noise), set[str]()  # name of the release -> N(0, I)
        self._totals = (
            totals or {}
        )  # name of the release -> how it is added up, where there are several processes

    def __call__(
        self, name: str, value: Tensor, *, sensitivity: float | Tensor, multiplier: float
    ) -> Tensor:
        """`value` plus sensitivity · multiplier · N(0, I). A multiplier of 0 publishes it in clear."""
        if value.numel() == 0:
            return value
        if name in self._released:
            raise ValueError(f"This step has released {name!r} already; noise is used once.")
        self._released.add(name)
        total = self._totals.get(name, _HERE)
        if multiplier == 0 or not total.adds_noise:
            return total.total(value)
        return total.noisy_total(value, partial(self._noisy, name, sensitivity, multiplier))

    def _noisy(
        self, name: str, sensitivity: float | Tensor, multiplier: float, value: Tensor
    ) -> Tensor:
        """The value with its noise."""
        fresh = self._noise.pop(name)
        fresh = fresh if fresh.shape == value.shape else fresh.view(value.shape)
        if isinstance(sensitivity, Tensor):
            return value + (sensitivity * multiplier) * fresh
        return torch.add(value, fresh, alpha=sensitivity * multiplier)
