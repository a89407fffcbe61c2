"""Releases, the only way in which a private value becomes public.

A value computed from the batch becomes public as

    released = value + sensitivity · multiplier · N(0, I),

rounded to public grids, which make this formula a Gaussian mechanism on a computer
(`evenclip.mechanism.grid`). The multiplier m = noise standard deviation ÷ sensitivity is written to
the ledger (`evenclip.mechanism.ledger`). All releases of one step use the same Poisson batch. A
later release may depend on the noisy value of an earlier one, and on no other result of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from evenclip.mechanism.grid import Grid, on_grid
from evenclip.mechanism.ledger import Entry, Ledger, joint_multiplier
from evenclip.mechanism.noise import Values, part

__all__ = ["Entry", "Ledger", "Release", "Share", "joint_multiplier"]


class Share(Protocol):
    """The part of a released vector that one of several processes releases."""

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """The slices (first, end) of the vector that this process adds noise to."""

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
            fresh, total = self._noise.pop(name), total.to(torch.float64)
            grid = Grid.of(sensitivity, multiplier, value.numel(), rounding)
            if share is None:
                released = on_grid(total, fresh, grid, scale, dtype)
            else:
                pieces = torch.split(total, [end - first for first, end in share.ranges])
                parts = [part(fresh, first, end) for first, end in share.ranges]
                pairs = zip(pieces, parts, strict=True)
                released = torch.cat([on_grid(*pair, grid, scale, dtype) for pair in pairs])
        return released if share is None else share.whole(released)
