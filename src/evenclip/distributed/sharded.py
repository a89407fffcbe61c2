"""A model too large for one device: each rank has a part of every parameter, of the noise and of
the optimiser's state.

Parameters are cut along their first axis by torch's `fully_shard` (FSDP2); a layer's are whole on a
rank only while a pass goes through it. Each rank passes its own samples, so norms and weights are
its own business, and the step is that of `evenclip.training.step`. What differs is where the sum
goes:

    gradient      Σ γ_i g_i over a rank's samples  # [parameter]; each piece is added up on the rank that owns it, which
                  adds its own piece of the step's noise, the same numbers as a single process would add there
    update        the owner moves its piece; nobody else has its optimiser's state

So every number gets its noise exactly once, from its owner. A pass is a conversation: every rank
takes as many as the others, and one without samples takes one with a record that counts for
nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenclip.gradients import AnyTape, Layout, Tape

__all__ = ["Pieces", "Sharded"]


class Team(Protocol):
    """What pieces need of the ranks that own them; see `evenclip.distributed.ranks.Ranks`."""

    rank: int
    world: int

    def together(self) -> AbstractContextManager[None]:
        """Where a rank that does not answer becomes an error."""

    def scattered(self, pieces: Sequence[Tensor]) -> Tensor:
        """Σ over the ranks of their piece for this one."""

    def each(self, value: Any) -> list[Any]:
        """Every rank's value."""


class Pieces:
    """Which numbers of a vector [parameter] each rank owns: of every parameter, some of its rows."""

    def __init__(self, layout: Layout, world: int) -> None:
        self._layout, self.world = layout, world
        self._ranges = [self._of(rank) for rank in range(world)]
        self.longest = max(self.size(rank) for rank in range(world))

    def _of(self, rank: int) -> list[tuple[int, int]]:
        """(first, end) in the vector, parameter by parameter, as `torch.chunk` cuts the rows."""
        found, at = [], 0
        for shape, size in zip(self._layout.shapes, self._layout.sizes, strict=True):
            rows = shape[0] if shape else 1
            each, row = -(-rows // self.world), size // max(rows, 1)
            first, end = min(rank * each, rows), min((rank + 1) * each, rows)
            found.append((at + first * row, at + end * row))
            at += size
        return found

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Its ranges of the vector, one for each parameter; some may be empty."""
        return self._ranges[rank]

    def size(self, rank: int) -> int:
        """How many numbers it owns."""
        return sum(end - first for first, end in self._ranges[rank])

    def take(self, vector: Tensor, rank: int) -> Tensor:
        """Its piece.  vector: [parameter] -> [piece]"""
        return torch.cat([vector[first:end] for first, end in self._ranges[rank]])

    def cut(self, vector: Tensor) -> list[Tensor]:
        """All pieces, filled up with zeros to one length.  # rank -> [longest]"""
        pieces = vector.new_zeros(self.world, self.longest)
        for row, ranges in zip(pieces, self._ranges, strict=True):
            at = 0
            for first, end in ranges:
                row[at : at + end - first] = vector[first:end]
                at += end - first
        return list(pieces.unbind())

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The vector that all pieces make.  # [parameter]"""
        vector = pieces[0].new_empty(self._layout.size)
        for ranges, piece in zip(self._ranges, pieces, strict=True):
            at = 0
            for first, end in ranges:
                vector[first:end] = piece[at : at + end - first]
                at += end - first
        return vector


class Sharded:
    """The parameters of a run in pieces, and the optimiser that moves this rank's.

    Attributes:
        optimizer: of this rank's piece.
        is_plain: Always False; the optimiser takes the step.
        adds_noise: every rank does, to its own piece.
        ranges: that piece, (first, end) of each parameter in a vector [parameter].
    """

    is_plain, adds_noise = False, True

    def __init__(
        self, tape: AnyTape, make: Callable[..., Optimizer], lr: float, ranks: Team
    ) -> None:
        _check(tape)
        self._ranks, self._model, self._layout = ranks, tape.model, tape.layout
        self.pieces = Pieces(tape.layout, ranks.world)
        self.ranges = self.pieces.ranges(ranks.rank)
        self._shell = _shell(tape.model)
        with ranks.together():
            _shard(tape, ranks)  # type: ignore[arg-type]  # a Tape, as `_check` has seen
        own = {name: p for name, p in tape.model.named_parameters() if p.requires_grad}
        self._locals = [own[name].detach().to_local() for name in tape.layout.names]  # type: ignore[attr-defined]
        self._piece = nn.Parameter(
            torch.cat([part.reshape(-1) for part in self._locals])
        )  # [piece]
        assert len(self._piece) == self.pieces.size(ranks.rank), (
            "torch cuts parameters in another way"
        )
        self.optimizer = make([self._piece], lr=lr)

    # --- a step ---

    def total(self, value: Tensor) -> Tensor:
        """This rank's piece of the sum over the ranks.  value: [parameter] -> [piece]"""
        return self._ranks.scattered(self.pieces.cut(value))[: len(self._piece)]

    def noisy_total(self, value: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        """The same with its noise."""
        return add(self.total(value))

    def __call__(self, gradient: Tensor) -> None:
        """Move this rank's piece along its piece of the gradient [piece]."""
        self._piece.grad = gradient
        self.optimizer.step()
        self._spread()

    def _spread(self) -> None:
        """Put the piece where the layers' parameters are gathered from."""
        with torch.no_grad():
            parts = torch.split(self._piece, [part.numel() for part in self._locals])
            for part, numbers in zip(self._locals, parts, strict=True):
                part.copy_(numbers.view(part.shape))

    @property
    def vector(self) -> Tensor:
        """This rank's piece, not to be changed.  # [piece]"""
        return self._piece.detach()

    @property
    def common(self) -> Tensor | None:
        """What all ranks must have the same of: nothing."""
        return None

    def set(self, vector: Tensor) -> None:
        """Put the parameters there.  vector: [parameter]"""
        with torch.no_grad():
            self._piece.copy_(self.pieces.take(vector, self._ranks.rank))
        self._spread()

    # --- whole again ---

    def close(self) -> nn.Module:
        """The whole model, on the CPU of every rank."""
        self._shell.load_state_dict(self.state()[0], assign=True)
        return self._shell

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's and the optimiser's state, as a single process has them; every rank takes
        part.
        """
        with self._ranks.together():
            model = {name: _whole(value) for name, value in self._model.state_dict().items()}
        optimizer = self.optimizer.state_dict()
        own = {name: self._gathered(value) for name, value in optimizer["state"].get(0, {}).items()}
        return model, optimizer | {"state": {0: own} if own else {}}

    def set_state(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Go on from there."""
        self._shell.load_state_dict(model, assign=True)  # raises for another model's
        given = dict(self._shell.named_parameters())
        self.set(
            torch.cat([given[name].detach().reshape(-1) for name in self._layout.names]).to(
                self._piece
            )
        )
        self._shell = _shell(self._shell)
        rank, P = self._ranks.rank, self._layout.size
        own = {
            name: self.pieces.take(value, rank)
            if isinstance(value, Tensor) and value.shape == (P,)
            else value
            for name, value in optimizer["state"].get(0, {}).items()
        }
        self.optimizer.load_state_dict(optimizer | {"state": {0: own} if own else {}})

    def _gathered(self, value: Any) -> Any:
        """Of a tensor [piece] the whole; anything else is the same on all ranks."""
        if not isinstance(value, Tensor) or value.shape != self._piece.shape:
            return value
        return self.pieces.join(self._ranks.each(value.cpu()))


def _check(tape: AnyTape) -> None:
    """Raise for what cannot be trained in pieces."""
    if not isinstance(tape, Tape):
        raise ValueError(
            "This model cannot be taken apart into layers, so it cannot be cut into pieces; leave "
            "sharded out of "
            "Ranks(), and every rank has the whole of it."
        )
    for unit in tape.units:
        if unit.formula is None:
            raise ValueError(
                f"{unit.path or 'The model'} ({type(unit.module).__name__}) has no formula for "
                "its gradients, which "
                "needs its parameters whole; leave sharded out of Ranks(), or build it of linear, "
                "convolutional, "
                "embedding and normalisation layers."
            )
    names = [full for unit in tape.units for full in unit.parameters.values()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None or len({id(unit.module) for unit in tape.units}) < len(tape.units):
        raise ValueError(
            f"{twice or 'A layer'} is used by several layers, and a piece has one owner; leave "
            "sharded out of Ranks(), "
            "or give each layer parameters of its own."
        )


def _shard(tape: Tape, ranks: Team) -> None:
    """Cut the model's parameters, layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(tape.layout.blank.device.type, (ranks.world,))
    for unit in tape.units:
        fully_shard(unit.module, mesh=mesh)
    if not any(unit.module is tape.model for unit in tape.units):
        fully_shard(tape.model, mesh=mesh)
    tape.pass_at_once()


def _shell(model: nn.Module) -> nn.Module:
    """The model without the numbers of its parameters, and on the CPU."""
    empty = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    buffers = {id(b): b.detach().cpu() for b in model.buffers()}
    return copy.deepcopy(model, memo={**empty, **buffers})


def _whole(value: Any) -> Any:
    """A parameter of all ranks' pieces, on the CPU."""
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.cpu() if isinstance(whole, Tensor) else whole
