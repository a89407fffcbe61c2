"""Training of a model that is too large for one device.

Each rank holds a piece of every parameter, of the noise and of the optimiser's state. torch's
`fully_shard` (FSDP2) cuts parameters along their first axis; a layer's parameters are whole on a
rank only during a pass through the layer. Each rank computes the norms and weights of its own
samples, and the step is that of `evenclip.training.step`. The difference is how the sum is formed:

    gradient      Σ γ_i g_i over a rank's samples.  # [parameter]
                  The owner of each piece sums it over the ranks, and releases it with the noise
                  that a single process would add there.
    update        The owner updates its piece; only the owner has the optimiser's state for it.

So every number gets its noise exactly once, from its owner. A pass is collective: every rank makes
the same number of passes. A rank without samples makes one with a record of weight 0.
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
from evenclip.training.update import constructed

__all__ = ["Pieces", "Sharded"]


class Team(Protocol):
    """The ranks that own the pieces; see `evenclip.distributed.ranks.Ranks`."""

    rank: int
    world: int

    def collective(self) -> AbstractContextManager[None]:
        """Return a context that raises if another rank does not answer."""

    def scattered(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the sum over the ranks of the piece for this rank."""

    def each(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""


class Pieces:
    """The numbers of a vector [parameter] that each rank owns: some rows of every parameter.

    Attributes:
        world: number of ranks.
        longest: length of the longest piece.
    """

    def __init__(self, layout: Layout, world: int) -> None:
        self._layout, self.world = layout, world
        self._ranges = [self._of(rank) for rank in range(world)]
        self.longest = max(self.size(rank) for rank in range(world))

    def _of(self, rank: int) -> list[tuple[int, int]]:
        """Return a rank's range (first, end) of each parameter, cut as by `torch.chunk`."""
        ranges, at = [], 0
        for shape, size in zip(self._layout.shapes, self._layout.sizes, strict=True):
            rows = shape[0] if shape else 1
            rows_each, row_size = -(-rows // self.world), size // max(rows, 1)
            first, end = min(rank * rows_each, rows), min((rank + 1) * rows_each, rows)
            ranges.append((at + first * row_size, at + end * row_size))
            at += size
        return ranges

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the range (first, end) of each parameter that a rank owns; some may be empty."""
        return self._ranges[rank]

    def size(self, rank: int) -> int:
        """Return how many numbers a rank owns."""
        return sum(end - first for first, end in self._ranges[rank])

    def take(self, vector: Tensor, rank: int) -> Tensor:
        """Return the piece of a rank.  vector: [parameter] -> [piece]"""
        return torch.cat([vector[first:end] for first, end in self._ranges[rank]])

    def cut(self, vector: Tensor) -> list[Tensor]:
        """Return the pieces of all ranks, padded with zeros.  # rank -> [longest]"""
        pieces = vector.new_zeros(self.world, self.longest)
        for row, ranges in zip(pieces, self._ranges, strict=True):
            at = 0
            for first, end in ranges:
                row[at : at + end - first] = vector[first:end]
                at += end - first
        return list(pieces.unbind())

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the vector that consists of the pieces.  # [parameter]"""
        vector = pieces[0].new_empty(self._layout.size)
        for ranges, piece in zip(self._ranges, pieces, strict=True):
            at = 0
            for first, end in ranges:
                vector[first:end] = piece[at : at + end - first]
                at += end - first
        return vector


class Sharded:
    """The parameters of a run in pieces, and the optimiser of this rank's piece.

    Attributes:
        optimizer: the optimiser of this rank's piece.
        is_plain: always False; the optimiser takes the step.
        pieces: the pieces of all ranks.
        ranges: this rank's piece, (first, end) of each parameter in a vector [parameter].
    """

    is_plain = False

    def __init__(
        self, tape: AnyTape, make: Callable[..., Optimizer], lr: float, ranks: Team
    ) -> None:
        _check(tape)
        self._ranks, self._model, self._layout = ranks, tape.model, tape.layout
        self.pieces = Pieces(tape.layout, ranks.world)
        self.ranges = self.pieces.ranges(ranks.rank)
        self._shell = _shell(tape.model)
        with ranks.collective():
            _shard(tape, ranks)  # type: ignore[arg-type]  # `_check` raises unless it is a Tape
        own = {name: p for name, p in tape.model.named_parameters() if p.requires_grad}
        self._locals = [
            own[name].detach().to_local()  # type: ignore[attr-defined]
            for name in tape.layout.names
        ]
        self._piece = nn.Parameter(torch.cat([p.reshape(-1) for p in self._locals]))  # [piece]
        assert len(self._piece) == self.pieces.size(ranks.rank), (
            "fully_shard cuts parameters differently from Pieces"
        )
        called = "optimizer(parameters, lr=lr)"
        self.optimizer: Optimizer = constructed("optimizer", called, make, [self._piece], lr=lr)

    # --- a step ---

    def total(self, value: Tensor) -> Tensor:
        """Return this rank's piece of the sum over the ranks.  value: [parameter] -> [piece]"""
        return self._ranks.scattered(self.pieces.cut(value))[: len(self._piece)]

    def whole(self, released: Tensor) -> Tensor:
        """Return the released piece, which is all that this rank needs."""
        return released

    def __call__(self, gradient: Tensor) -> None:
        """Update this rank's piece with its piece of the gradient [piece]."""
        self._piece.grad = gradient.to(self._piece.dtype)
        self.optimizer.step()
        self._copy_to_layers()

    def _copy_to_layers(self) -> None:
        """Copy this rank's piece to the sharded parameters of the layers."""
        with torch.no_grad():
            parts = torch.split(self._piece, [part.numel() for part in self._locals])
            for part, numbers in zip(self._locals, parts, strict=True):
                part.copy_(numbers.view(part.shape))

    @property
    def vector(self) -> Tensor:
        """This rank's piece; read-only.  # [piece]"""
        return self._piece.detach()

    @property
    def common(self) -> Tensor | None:
        """None, because no numbers must be equal on all ranks."""
        return None

    def set(self, vector: Tensor) -> None:
        """Set the parameters.  vector: [parameter]"""
        with torch.no_grad():
            self._piece.copy_(self.pieces.take(vector, self._ranks.rank))
        self._copy_to_layers()

    # --- the whole model ---

    def close(self) -> nn.Module:
        """Return the whole model, on the CPU of every rank."""
        self._shell.load_state_dict(self.state()[0], assign=True)
        return self._shell

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return model and optimiser states as in a single process; all ranks must call it."""
        with self._ranks.collective():
            model = {name: _whole(value) for name, value in self._model.state_dict().items()}
        optimizer = self.optimizer.state_dict()
        own = {name: self._gathered(value) for name, value in optimizer["state"].get(0, {}).items()}
        return model, optimizer | {"state": {0: own} if own else {}}

    def set_state(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Restore the state of model and optimiser."""
        self._shell.load_state_dict(model, assign=True)  # raises for another model
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
        """Return the whole of a tensor [piece]; other values are the same on all ranks."""
        if not isinstance(value, Tensor) or value.shape != self._piece.shape:
            return value
        return self.pieces.join(self._ranks.each(value.cpu()))


def _check(tape: AnyTape) -> None:
    """Raise unless the model can be trained in pieces."""
    if not isinstance(tape, Tape):
        raise ValueError(
            "This model cannot be split into layers, so it cannot be sharded; leave sharded out of "
            "Ranks(), so that every rank holds the whole model."
        )
    for unit in tape.units:
        if unit.formula is None:
            raise ValueError(
                f"{unit.path or 'The model'} ({type(unit.module).__name__}) has no formula for its "
                "gradients, so it needs its whole parameters; leave sharded out of Ranks(), or "
                "build it from linear, convolutional, embedding and normalisation layers."
            )
    names = [full for unit in tape.units for full in unit.parameters.values()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None or len({id(unit.module) for unit in tape.units}) < len(tape.units):
        raise ValueError(
            f"{twice or 'A layer'} is used more than once, which sharding does not support; leave "
            "sharded out of Ranks(), or give each layer its own parameters."
        )


def _shard(tape: Tape, ranks: Team) -> None:
    """Shard the model's parameters, layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(tape.layout.blank.device.type, (ranks.world,))
    for unit in tape.units:
        fully_shard(unit.module, mesh=mesh)
    if not any(unit.module is tape.model for unit in tape.units):
        fully_shard(tape.model, mesh=mesh)
    tape.pass_at_once()


def _shell(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the CPU, whose parameters have no storage."""
    empty = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    buffers = {id(b): b.detach().cpu() for b in model.buffers()}
    return copy.deepcopy(model, memo={**empty, **buffers})


def _whole(value: Any) -> Any:
    """Return the whole of a sharded tensor, on the CPU; other values are unchanged."""
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.cpu() if isinstance(whole, Tensor) else whole
