"""The interface between a run and the processes that train it, and one for a single process.

`evenclip.distributed.Ranks` implements it for several processes; the caller passes it in.
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
from evenclip.mechanism import Share
from evenclip.training.update import Update

__all__ = ["AnyUpdate", "Processes", "Rows", "SingleProcess"]


@dataclass(frozen=True)
class Rows:
    """The records that a rank holds: numbers first to end − 1 of n."""

    first: int
    end: int
    n: int


class AnyUpdate(Protocol):
    """The optimiser of a run with its parameters, or with this process's piece of them.

    See `evenclip.training.update`.

    Attributes:
        is_plain: whether the update is exactly θ ← θ − lr·g̃.
    """

    is_plain: bool

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser."""

    @property
    def common(self) -> Tensor | None:
        """The parameters that must be equal on all processes."""

    def __call__(self, gradient: Tensor) -> None:
        """Update the parameters with the gradient."""

    def close(self) -> nn.Module:
        """Return the model; its parameters have separate memory again."""

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the model's and the optimiser's state."""

    def set_state(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Continue from a state of the model and of the optimiser."""


class Processes(ABC):
    """The processes that train one run.

    Attributes:
        rank: number of this process, from 0.
        world: number of processes.
        local: whether each process holds different records.
        sharded: whether each process holds only a piece of every parameter.
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
        """Return which records this process holds, given their number `own`."""

    @abstractmethod
    def share(self, batch: Tensor, rows: Rows) -> Tensor:
        """Return this process's part of a batch, as indices into its own data.

        Both are [sample].
        """

    @abstractmethod
    def sum(self, value: Tensor) -> Tensor:
        """Return Σ over the processes, with the same bits on each; keep `value` unchanged."""

    @abstractmethod
    def each(self, value: Any) -> list[Any]:
        """Return the values of all processes, in order of rank."""

    @abstractmethod
    def first(self, value: Any) -> Any:
        """Return the value of the leading process."""

    @abstractmethod
    def collective(self) -> AbstractContextManager[None]:
        """Return a context that explains the error raised if another process does not respond."""

    @abstractmethod
    def digest(self, own: str) -> str:
        """Combine the digests of all processes' data into one.

        Raises:
            ValueError: if processes hold different data where it must be equal, or the reverse.
        """

    @abstractmethod
    def stops(self, requested: bool, t: int) -> bool:
        """Return whether all processes stop after step t, if some process requests it."""

    @abstractmethod
    def update(self, tape: AnyTape, make: Callable[..., Optimizer], lr: float) -> AnyUpdate:
        """Return the optimiser of the run with the parameters it updates."""

    @abstractmethod
    def shares(self, update: AnyUpdate, sizes: Mapping[str, int]) -> Mapping[str, Share]:
        """Return name of a release -> this process's share of it; empty in a single process."""

    @abstractmethod
    def check_given(self, given: Mapping[str, Any]) -> None:
        """Raise on every process unless all were given the same values."""

    @abstractmethod
    def check_equal(self, digest: str, t: int) -> None:
        """Raise unless the digest of parameters and state after step t is equal on all of them."""


class SingleProcess(Processes):
    """A single process."""

    rank, world, local, sharded = 0, 1, False, False

    def rows(self, own: int) -> Rows:
        """Return all records."""
        return Rows(0, own, own)

    def share(self, batch: Tensor, rows: Rows) -> Tensor:
        """Return the whole batch."""
        del rows
        return batch

    def sum(self, value: Tensor) -> Tensor:
        """Return the value."""
        return value

    def each(self, value: Any) -> list[Any]:
        """Return a list of the one value."""
        return [value]

    def first(self, value: Any) -> Any:
        """Return the value."""
        return value

    def collective(self) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()

    def digest(self, own: str) -> str:
        """Return the digest."""
        return own

    def stops(self, requested: bool, t: int) -> bool:
        """Return whether this process is requested to stop."""
        del t
        return requested

    def update(self, tape: AnyTape, make: Callable[..., Optimizer], lr: float) -> Update:
        """Return an update of all parameters."""
        return Update(tape.model, tape.layout, make, lr)

    def shares(self, update: AnyUpdate, sizes: Mapping[str, int]) -> Mapping[str, Share]:
        """Return an empty mapping, because the process releases everything."""
        del update, sizes
        return {}

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Do nothing; there is no other process."""

    def check_equal(self, digest: str, t: int) -> None:
        """Do nothing; there is no other process."""
