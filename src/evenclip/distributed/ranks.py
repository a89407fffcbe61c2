"""One training over several processes, each with the whole model.

Every process (a rank) runs the same script, holds the same parameters and takes the same T steps:

    batch         Every rank draws the whole Poisson batch with the run's key, and computes a part
                  of it.
    count         Σ statistic_i over the part, summed over the ranks. Each rank releases the sum
                  with the same noise, so all have the same public count.
    gradient      Σ γ_i g_i over the part. Rank r sums the r-th slice of the parameters over the
                  ranks and releases it. All ranks receive all released slices.
    update        Each rank updates its own parameters with the gradient.

The batch and the noise of step t do not depend on the number of ranks. So the released sum is that
of a single process, except for the order of addition; sensitivity, ledger, ε and checkpoints are
the same. Sums are complete before they are rounded and released, so each number is rounded and gets
its noise once.

A rank's sum carries no noise before it is added up. So all ranks and the network between them must
be trusted.

All ranks compute the same updates, so their parameters stay equal bit by bit. This is checked after
every epoch and before every checkpoint; a difference ends the run.
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from evenclip import check
from evenclip.arguments import check_kinds
from evenclip.distributed.sharded import Sharded
from evenclip.gradients import AnyTape
from evenclip.mechanism import Share
from evenclip.training.processes import AnyUpdate, Processes, Rows
from evenclip.training.update import Update, check_pieces

__all__ = ["RankError", "Ranks", "Spread", "Summed"]

_LONGEST = 10**7  # seconds


class RankError(RuntimeError):
    """A failure of a run over several ranks; the message says why and what to do."""


class Summed:
    """A short vector: every rank sums it over the ranks and releases the whole with equal noise.

    Attributes:
        ranges: the whole vector.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        self._ranks, self.ranges = ranks, [(0, size)]

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        return self._ranks.sum(value)

    def whole(self, released: Tensor) -> Tensor:
        """Return the released vector."""
        return released


class Spread:
    """A long vector: each rank sums and releases a slice, and all ranks receive all slices.

    Attributes:
        ranges: the slice of this rank, (first, end).
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        self._ranks, self._each = ranks, -(-size // ranks.world)
        self._size = size
        first = min(ranks.rank * self._each, size)
        self.ranges = [(first, min(first + self._each, size))]

    def total(self, value: Tensor) -> Tensor:
        """Return this rank's slice of the sum over the ranks."""
        padded = torch.nn.functional.pad(value, (0, self._each * self._ranks.world - self._size))
        ((first, end),) = self.ranges
        return self._ranks.scattered(torch.split(padded, self._each))[: end - first]

    def whole(self, released: Tensor) -> Tensor:
        """Return the slices of all ranks, end to end."""
        padded = torch.nn.functional.pad(released, (0, self._each - len(released)))
        return self._ranks.gathered(padded)[: self._size]


class Ranks(Processes):
    """The processes that `torchrun` started, for `fit(..., ranks=Ranks())`.

    Uses the existing process group, or creates one from the environment variables of `torchrun`.
    The backend is gloo, and nccl for GPUs; local rank r uses GPU r (`device`).

    Args:
        local: if True, every rank gives `fit` different records, and n is their total. If False,
            every rank gives `fit` the same data and computes an equal part of every batch.
        sharded: if True, every rank holds a piece of every parameter, for models that are too large
            for one device; see `evenclip.distributed.sharded`. If False, every rank holds the whole
            model.
        timeout: seconds to wait for the other ranks.

    Attributes:
        rank: number of this process, from 0.
        world: number of processes.
        local: as given.
        sharded: as given.

    Raises:
        RankError: if this process was not started by `torchrun`.

    >>> Ranks()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    evenclip.distributed.ranks.RankError: ranks=Ranks() is for several processes, ...
    """

    # Steps between two exchanges of requests to stop. One exchange per step would be slow for small
    # models.
    _STOP_EVERY = 8

    def __init__(
        self, *, local: bool = False, sharded: bool = False, timeout: float = 600.0
    ) -> None:
        check_kinds(Ranks.__init__, locals())
        check.positive(timeout=timeout)
        check.at_most(_LONGEST, timeout=math.ceil(timeout))
        timeout = float(timeout)
        if not dist.is_available():
            raise RankError(
                "This build of torch has no torch.distributed; leave ranks out, or install another "
                "build."
            )
        self._timeout, self.local = timedelta(seconds=timeout), local
        self.sharded, self.rank = sharded, int(os.environ.get("RANK", "0"))
        with self.collective():
            if not dist.is_initialized():
                _begin(self._timeout)
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self._cpu_group = dist.new_group(backend="gloo", timeout=self._timeout)

    @property
    def device(self) -> torch.device:
        """The device of this rank: its GPU, or the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device(
            "cuda", int(os.environ.get("LOCAL_RANK", self.rank)) % torch.cuda.device_count()
        )

    def rows(self, own: int) -> Rows:
        """Return the rows of this rank; if `local`, they follow those of the lower ranks."""
        if not self.local:
            return Rows(0, own, own)
        lengths = self.each(own)
        first = sum(lengths[: self.rank])
        return Rows(first, first + own, sum(lengths))

    def share(self, batch: Tensor, rows: Rows) -> Tensor:
        """Return this rank's part of a batch: the records it holds if `local`, or an equal part."""
        if not self.local:
            return torch.tensor_split(batch, self.world)[self.rank]
        return batch[(batch >= rows.first) & (batch < rows.end)] - rows.first

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks.

        gloo and nccl add up each number on one rank and send the result to the others, so all ranks
        get the same bits.
        """
        total = value.contiguous().clone()
        with self.collective():
            dist.all_reduce(total, group=self._cpu_group if total.device.type == "cpu" else None)
        return total

    def scattered(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the sum over the ranks of the piece for this rank.

        Args:
            pieces: one piece for each rank, all of the same length.
        """
        total = torch.empty_like(pieces[0])
        group = self._cpu_group if total.device.type == "cpu" else None
        with self.collective():
            dist.reduce_scatter(total, list(pieces), group=group)
        return total

    def gathered(self, piece: Tensor) -> Tensor:
        """Return the pieces of all ranks, end to end; all have the same length."""
        pieces = [torch.empty_like(piece) for _ in range(self.world)]
        with self.collective():
            dist.all_gather(
                pieces,
                piece.contiguous(),
                group=self._cpu_group if piece.device.type == "cpu" else None,
            )
        return torch.cat(pieces)

    def each(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        values: list[Any] = [None] * self.world
        with self.collective():
            dist.all_gather_object(values, value, group=self._cpu_group)
        return values

    def first(self, value: Any) -> Any:
        """Return the value of rank 0."""
        values = [value]
        with self.collective():
            dist.broadcast_object_list(values, group=self._cpu_group)
        return values[0]

    def digest(self, own: str) -> str:
        """Return a digest of the data: the common one, or a combination of all if `local`.

        Raises:
            ValueError: if the data differs between ranks, or agrees although `local` is True.
        """
        digests = self.each(own)
        if not self.local:
            different = [r for r, value in enumerate(digests) if value != digests[0]]
            if different:
                raise ValueError(
                    f"Rank {different[0]} was given other data than rank 0; give every rank the "
                    "same data, or pass ranks=Ranks(local=True) if the ranks have different "
                    "records."
                )
            return own
        twice = next((r for r, value in enumerate(digests) if value in digests[:r]), None)
        if twice is not None:
            raise ValueError(
                f"Ranks {digests.index(digests[twice])} and {twice} were given the same data, and "
                "local=True: every record would count twice, and ε would be wrong. Give each rank "
                "different records, or leave local out."
            )
        return " ".join(digests)

    def stops(self, requested: bool, t: int) -> bool:
        """Return whether to stop after step t: in every eighth step, if any rank requests it."""
        return t % self._STOP_EVERY == 0 and any(self.each(requested))

    def update(self, tape: AnyTape, make: Callable[..., Optimizer], lr: float) -> Update | Sharded:
        """Return the update of the whole parameters, or of this rank's piece of them."""
        if not self.sharded:
            return Update(tape.model, tape.layout, make, lr)
        check_pieces(make, [p for p in tape.model.parameters() if p.requires_grad])
        return Sharded(tape, make, lr, self)

    def shares(self, update: AnyUpdate, sizes: Mapping[str, int]) -> Mapping[str, Share]:
        """Return this rank's share of each release.

        Every rank releases the summed count, with the same noise. Each rank releases its own slice
        or piece of the gradient.
        """
        if self.world == 1 and not self.sharded:
            return {}
        shares: dict[str, Share] = {name: Summed(self, n) for name, n in sizes.items()}
        spread = Spread(self, sizes["gradient"])
        shares["gradient"] = update if isinstance(update, Sharded) else spread
        return shares

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Raise on every rank unless all were given the same settings and the same model."""
        first, *others = self.each(dict(given))
        for r, other in enumerate(others, start=1):
            differences = [
                _DIFFERENT.get(name, f"{name} {other[name]!r} instead of {first[name]!r}")
                for name in first
                if other[name] != first[name]
            ]
            if differences:
                raise ValueError(
                    f"Rank {r} was given {', '.join(differences)}: all ranks train one model, so "
                    "give each the arguments of rank 0; create the model from the same seed on "
                    "every rank, or load it from the same file."
                )

    def check_equal(self, digest: str, t: int) -> None:
        """Raise unless all ranks have the same parameters and the same state, bit by bit."""
        digests = self.each(digest)
        different = [r for r, value in enumerate(digests) if value != digests[0]]
        if different:
            raise RankError(
                f"After step {t} rank {different[0]} has other parameters than rank 0, so they no "
                "longer train one model. Either the model was changed on one of them, or the "
                "machines compute differently. Continue from the last checkpoint with resume=True, "
                "on machines of the same kind."
            )

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Raise a `RankError` in place of torch's error if another rank does not answer."""
        try:
            yield
        except RuntimeError as error:
            is_ours = isinstance(error, RankError)  # from a nested call
            of_gloo = any(words in str(error).lower() for words in _OF_GLOO)
            if is_ours or not (isinstance(error, dist.DistError) or of_gloo):
                raise
            message = " ".join(str(error).split())[:200]
            raise RankError(
                f"Rank {self.rank} cannot reach the others: one has ended (see its error message) "
                f"or did not answer for {self._timeout.total_seconds():g} s. Start the same "
                "command again with resume=True to continue from the last checkpoint; the number "
                f"of ranks may change. (torch says: {message})"
            ) from error


# In the messages of plain RuntimeErrors that gloo raises.
_OF_GLOO = ("gloo", "pair closure")
# Descriptions of settings whose values must not be printed.
_DIFFERENT = {
    "seed": "another seed",
    "model": "another model, or the same model with other initial parameters",
}


def _begin(timeout: timedelta) -> None:
    """Create a process group from the environment variables of `torchrun`."""
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise RankError(
            "ranks=Ranks() is for several processes, and this one was not started as one of them "
            f"({missing[0]} is not set); start it with `torchrun --nproc-per-node 2 SCRIPT.py`, or "
            "leave ranks out."
        )
    # When torchrun restarts ranks, its store still has the addresses of the old ones. So every
    # start gets its own prefix.
    rendezvous = dist.rendezvous("env://", timeout=timeout)  # type: ignore[attr-defined]
    store, rank, world = next(rendezvous)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"start {restarts}", store)  # type: ignore[attr-defined]
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    atexit.register(_end)


def _end() -> None:
    """Destroy the process group; otherwise torch warns when Python exits."""
    if dist.is_initialized():
        dist.destroy_process_group()
