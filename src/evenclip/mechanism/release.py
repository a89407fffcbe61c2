"""Releases, the only way in which a private value becomes public.

A value computed from the batch becomes public as

    released = value + sensitivity · multiplier · N(0, I),

and the multiplier m = noise standard deviation ÷ sensitivity is written to the ledger
(`evenclip.mechanism.ledger`). All releases of one step use the same Poisson batch. A later release
may depend on the noisy value of an earlier one, and on no other result of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from evenclip.mechanism.ledger import Entry, Ledger, joint_multiplier

__all__ = ["Entry", "Ledger", "LocalTotal", "Release", "Total", "joint_multiplier"]


class Total(Protocol):
    """How the parts of a released value are summed over the processes of a run.

    Attributes:
        adds_noise: whether this process adds noise to the value.
    """

    adds_noise: bool

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over the processes, without noise of this one; keep `value` unchanged."""

    def noisy_total(self, value: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum with this process's noise; `add` adds it to a value of the same size."""


class LocalTotal:
    """The sum in a single process: the value itself."""

    adds_noise = True

    def total(self, value: Tensor) -> Tensor:
        """Return the value."""
        return value

    def noisy_total(self, value: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the value with its noise."""
        return add(value)


_LOCAL = LocalTotal()


class Release:
    """The releases of one step. The noise is drawn before the step, and each value is used once.

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
        self._totals = totals or {}  # name of the release -> its sum; empty in a single process

    def __call__(
        self, name: str, value: Tensor, *, sensitivity: float | Tensor, multiplier: float
    ) -> Tensor:
        """Return `value` + sensitivity · multiplier · N(0, I).

        A multiplier of 0 publishes the value in clear.
        """
        if value.numel() == 0:
            return value
        if name in self._released:
            raise ValueError(f"This step has released {name!r} already; noise is used once.")
        self._released.add(name)
        total = self._totals.get(name, _LOCAL)
        if multiplier == 0 or not total.adds_noise:
            return total.total(value)
        return total.noisy_total(value, partial(self._noisy, name, sensitivity, multiplier))

    def _noisy(
        self, name: str, sensitivity: float | Tensor, multiplier: float, value: Tensor
    ) -> Tensor:
        """Return the value with its noise."""
        fresh = self._noise.pop(name)
        fresh = fresh if fresh.shape == value.shape else fresh.view(value.shape)
        if isinstance(sensitivity, Tensor):
            return value + (sensitivity * multiplier) * fresh
        return torch.add(value, fresh, alpha=sensitivity * multiplier)
