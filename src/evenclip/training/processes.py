"""The processes that take the steps of a run together: what a run needs of them, and `Alone`, the
single process.

Several processes are `evenclip.distributed.Ranks`, which the caller passes in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from evenclip.gradients import AnyTape
from evenclip.mechanism import Total
from evenclip.training.update import Update

__all__ = ["Alone", "AnyUpdate", "Processes", "Rows", "Share"]


@dataclass(frozen=True)
class Rows:
    """Which records a rank has: numbers first to end − 1 of n."""

    first: int
    end: int
    n: int


class Share(Total, Protocol):
    """How a released vector is added up over the processes, and whose noise is whose.

    Attributes:
        ranges: the slices of the vector that this process adds noise to, (first, end).
    """

    ranges: list[tuple[int, int]]


class AnyUpdate(Protocol):
    """What moves the parameters of a run, or this process's piece of them; see
    `evenclip.training.update`.

    Attributes:
        is_plain: whether they are moved by θ ← θ − lr·g̃ and nothing else.
    """

    is_plain: bool

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser."""

    @property
    def common(self) -> Tensor | None:
        """The numbers that are equal on all processes."""

    def __call__(self, gradient: Tensor) -> None:
        """Move the parameters along the gradient."""

    def close(self) -> nn.Module:
        """The model with parameters of its own."""

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's and the optimiser's state."""

    def set_state(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Go on from there."""


class Processes(ABC):
    """What a run needs of the processes that it is trained by.

    Attributes:
        rank: number of this process, from 0.
        world: number of processes.
        local: whether each has records of its own.
        sharded: whether each has a piece of every parameter only.
    """

    rank: int
    world: int
    local: bool
    sharded: bool

    @property
    def leads(self) -> bool:
        """Whether this process writes checkpoints and shows progress."""
        return self.rank == 0

    @abstractmethod
    def rows(self, own: int) -> Rows:
        """Which records this process has, given how many it was handed."""

    @abstractmethod
    def share(self, batch: Tensor, rows: Rows) -> Tensor:
        """Its part of a batch, as places in its own data.  batch: [sample] -> [sample]"""

    @abstractmethod
    def sum(self, value: Tensor) -> Tensor:
        """Σ over the processes, the same bits on each; `value` is not changed."""

    @abstractmethod
    def each(self, value: Any) -> list[Any]:
        """Every process's value, in their order."""

    @abstractmethod
    def first(self, value: Any) -> Any:
        """The value of the process that leads."""

    @abstractmethod
    def together(self) -> AbstractContextManager[None]:
        """A context in which a process that does not answer becomes an error that says so."""

    @abstractmethod
    def digest(self, own: int) -> int:
        """One number for the data of all, from each one's own; raises where they are not as they
        should be.
        """

    @abstractmethod
    def stops(self, asked: bool, t: int) -> bool:
        """Whether all stop after step t, where some were asked to."""

    @abstractmethod
    def update(self, tape: AnyTape, make: Callable[..., Optimizer], lr: float) -> AnyUpdate:
        """What moves the parameters."""

    @abstractmethod
    def totals(self, update: AnyUpdate, sizes: Mapping[str, int]) -> Mapping[str, Share]:
        """Name of a release -> how it is added up, given its size; empty in a single process."""

    @abstractmethod
    def check_given(self, given: Mapping[str, Any]) -> None:
        """Raise on every process unless all were given the same."""

    @abstractmethod
    def check_equal(self, digest: int, t: int) -> None:
        """Raise unless all have the same parameters and state after step t, by their digest."""


class Alone(Processes):
    """A single process."""

    rank, world, local, sharded = 0, 1, False, False

    def rows(self, own: int) -> Rows:
        """All of them."""
        return Rows(0, own, own)

    def share(self, batch: Tensor, rows: Rows) -> Tensor:
        """All of it."""
        del rows
        return batch

    def sum(self, value: Tensor) -> Tensor:
        """The value itself."""
        return value

    def each(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]

    def first(self, value: Any) -> Any:
        """The value itself."""
        return value

    def together(self) -> AbstractContextManager[None]:
        """Nothing to wait for."""
        return nullcontext()

    def digest(self, own: int) -> int:
        """Its own."""
        return own

    def stops(self, asked: bool, t: int) -> bool:
        """At once."""
        del t
        return asked

    def update(self, tape: AnyTape, make: Callable[..., Optimizer], lr: float) -> Update:
        """Of all parameters."""
        return Update(tape.model, tape.layout, make, lr)

    def totals(self, update: AnyUpdate, sizes: Mapping[str, int]) -> Mapping[str, Share]:
        """None: the value is the sum."""
        del update, sizes
        return {}

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Nothing to compare with."""

    def check_equal(self, digest: int, t: int) -> None:
        """Nothing to compare with."""
