"""One training over several processes: what they share out, and what they add up.

Every process (a rank) runs the same script, holds the same parameters and takes the same T steps:

    batch         every rank draws the whole Poisson batch, from the one stream of the run, and computes a part of it
    count         Σ statistic_i over its part; rank 0 adds the noise; the sum over the ranks is public, the same on each
    gradient      Σ γ_i g_i over its part; rank r adds the noise of the r-th slice of the parameters to that slice; the
                  sum over the ranks is public, the same on each
    update        each rank moves its own parameters along it

So the batch and the noise of step t do not know how many ranks there are: the sum that is released
is that of a single process but for the order of addition, and so are sensitivity, ledger, ε and
checkpoint. Each number gets its noise from one rank alone: were it from each, the sum would have
`world` times the variance (from equal generators, world² times). Before it is added up, a rank's
sum carries no noise: the ranks, and the wires between them, are one trusted party.

All ranks add the same bits to the same bits, so their parameters stay equal to the last one; that
is looked at after every epoch and before every checkpoint, and a difference ends the run.
"""

from __future__ import annotations

import atexit
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
from evenclip.distributed.sharded import Sharded
from evenclip.gradients import AnyTape
from evenclip.training.processes import AnyUpdate, Processes, Rows, Share
from evenclip.training.update import Update, check_pieces

__all__ = ["RankError", "Ranks", "Spread", "Summed"]


class RankError(RuntimeError):
    """The ranks are no longer together; the message says why and what to do."""


class Summed:
    """Every rank gets the sum of all; the one that leads adds the noise, to its own part and before
    it is added up.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        self._ranks, self.adds_noise = ranks, ranks.leads
        self.ranges = [(0, size)] if ranks.leads else []

    def total(self, value: Tensor) -> Tensor:
        """The sum."""
        return self._ranks.sum(value)

    def noisy_total(self, value: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum, with noise on one of its terms."""
        return self._ranks.sum(add(value))


class Spread:
    """The same for a long vector [parameter]: each rank adds the noise of its own slice, `world`
    times less to draw.

    Attributes:
        ranges: the slice, (first, end).
    """

    adds_noise = True

    def __init__(self, ranks: Ranks, size: int) -> None:
        first, end = (size * r // ranks.world for r in (ranks.rank, ranks.rank + 1))
        self._ranks, self.ranges = ranks, [(first, end)]

    def total(self, value: Tensor) -> Tensor:
        """The sum."""
        return self._ranks.sum(value)

    def noisy_total(self, value: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum; each number has noise on one of its terms."""
        ((first, end),) = self.ranges
        return self._ranks.sum(torch.cat([value[:first], add(value[first:end]), value[end:]]))


class Ranks(Processes):
    """The processes that `torchrun` started, for `fit(..., ranks=Ranks())`.

    Uses the process group that is there, or makes one from what `torchrun` left in the environment:
    gloo, and nccl for GPUs, of which rank r of a machine takes number r (`device`).

    Args:
        local: every rank hands `fit` records of its own, which no other has: n is their sum.
            Otherwise every rank hands it the same data, and takes an equal part of every batch.
        sharded: every rank keeps a piece of every parameter, for a model that is too large for one
            device; see `evenclip.distributed.sharded`. Otherwise every rank has the whole model.
        timeout: seconds that a rank waits for the others before it gives up.

    Attributes:
        rank: number of this process, from 0.
        world: number of processes.
        local: as given.
        sharded: as given.

    Raises:
        RankError: where nobody has started several processes.

    >>> Ranks()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    evenclip.distributed.ranks.RankError: ranks=Ranks() is for several processes, and this one was not started as ...
    """

    # Whether to stop is asked every so many steps: another message a step would cost small models
    # dearly.
    _ASKED = 8

    def __init__(
        self, *, local: bool = False, sharded: bool = False, timeout: float = 600.0
    ) -> None:
        check.positive(timeout=timeout)
        if not dist.is_available():
            raise RankError(
                "This torch was built without torch.distributed; leave ranks out, or install "
                "another build."
            )
        self._timeout, self.local = timedelta(seconds=timeout), local
        self.sharded, self.rank = sharded, int(os.environ.get("RANK", "0"))
        with self.together():
            if not dist.is_initialized():
                _begin(self._timeout)
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self._host = dist.new_group(
                backend="gloo", timeout=self._timeout
            )  # what lies on the CPU

    @property
    def device(self) -> torch.device:
        """Where this rank should train: a GPU of its own, or the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device(
            "cuda", int(os.environ.get("LOCAL_RANK", self.rank)) % torch.cuda.device_count()
        )

    def rows(self, own: int) -> Rows:
        """Records of its own after those of the ranks before it, or all."""
        if not self.local:
            return Rows(0, own, own)
        lengths = self.each(own)
        first = sum(lengths[: self.rank])
        return Rows(first, first + own, sum(lengths))

    def share(self, batch: Tensor, rows: Rows) -> Tensor:
        """Those of the batch that it has, or an equal part."""
        if not self.local:
            return torch.tensor_split(batch, self.world)[self.rank]
        return batch[(batch >= rows.first) & (batch < rows.end)] - rows.first

    def sum(self, value: Tensor) -> Tensor:
        """Σ over the ranks.

        gloo and nccl add each number up in one place and hand it round, so that all ranks get the
        same bits.
        """
        total = value.contiguous().clone()
        with self.together():
            dist.all_reduce(total, group=self._host if total.device.type == "cpu" else None)
        return total

    def scattered(self, pieces: Sequence[Tensor]) -> Tensor:
        """Σ over the ranks of their piece for this one; the pieces are equally long, one for each
        rank.
        """
        mine = torch.empty_like(pieces[0])
        with self.together():
            dist.reduce_scatter(
                mine, list(pieces), group=self._host if mine.device.type == "cpu" else None
            )
        return mine

    def each(self, value: Any) -> list[Any]:
        """Every rank's value."""
        found: list[Any] = [None] * self.world
        with self.together():
            dist.all_gather_object(found, value, group=self._host)
        return found

    def first(self, value: Any) -> Any:
        """Rank 0's value."""
        found = [value]
        with self.together():
            dist.broadcast_object_list(found, group=self._host)
        return found[0]

    def digest(self, own: int) -> int:
        """The one that all have; or, of records of their own, all of them mixed."""
        found = self.each(own)
        if not self.local:
            others = [r for r, value in enumerate(found) if value != found[0]]
            if others:
                raise ValueError(
                    f"Rank {others[0]} was given other data than rank 0; give every rank the same "
                    "data, or, where each "
                    "has records that no other has, pass ranks=Ranks(local=True)."
                )
            return own
        twice = next((r for r, value in enumerate(found) if value in found[:r]), None)
        if twice is not None:
            raise ValueError(
                f"Ranks {found.index(found[twice])} and {twice} were given the same data, and "
                "local=True: every record "
                "would count twice, and ε would be wrong. Give each rank records of its own, or "
                "leave local out."
            )
        return sum(value << (128 * r) for r, value in enumerate(found))

    def stops(self, asked: bool, t: int) -> bool:
        """All together, after one of the next few steps."""
        return t % self._ASKED == 0 and any(self.each(asked))

    def update(self, tape: AnyTape, make: Callable[..., Optimizer], lr: float) -> Update | Sharded:
        """Of whole parameters on every rank, or of this rank's piece of them."""
        if not self.sharded:
            return Update(tape.model, tape.layout, make, lr)
        check_pieces(make, [p for p in tape.model.parameters() if p.requires_grad])
        return Sharded(tape, make, lr, self)

    def totals(self, update: AnyUpdate, sizes: Mapping[str, int]) -> Mapping[str, Share]:
        """The count is summed on every rank; of the gradient each adds the noise of its own slice
        or piece.
        """
        if self.world == 1 and not self.sharded:
            return {}
        gradient = update if isinstance(update, Sharded) else Spread(self, sizes["gradient"])
        return {"count": Summed(self, sizes["count"]), "gradient": gradient}

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Raise on every rank unless all were given the same settings and the same model."""
        theirs = self.each(dict(given))
        for r, other in enumerate(theirs):
            differ = [name for name in theirs[0] if other[name] != theirs[0][name]]
            if differ:
                said = [
                    _DIFFERENT.get(name, f"{name} {other[name]!r} instead of {theirs[0][name]!r}")
                    for name in differ
                ]
                raise ValueError(
                    f"Rank {r} was given {', '.join(said)}: all ranks train one model, so give "
                    "each the arguments that "
                    "rank 0 has; make the model from the same seed on every rank, or load it from "
                    "the same file."
                )

    def check_equal(self, digest: int, t: int) -> None:
        """Raise unless all ranks have the same parameters and the same state, bit by bit."""
        found = self.each(digest)
        others = [r for r, value in enumerate(found) if value != found[0]]
        if others:
            raise RankError(
                f"After step {t} rank {others[0]} has other parameters than rank 0, so they no "
                "longer train one "
                "model. Was the model changed on one of them, or do they compute on machines of "
                "different kinds? Go on "
                "from the last checkpoint with resume=True, on machines of one kind."
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Where torch's complaint about a rank that does not answer becomes a sentence."""
        try:
            yield
        except RuntimeError as error:
            ours = isinstance(error, RankError)  # said already
            if ours or not (isinstance(error, dist.DistError) or "gloo" in str(error).lower()):
                raise
            said = " ".join(str(error).split())[:200]
            raise RankError(
                f"Rank {self.rank} cannot reach the others: one has ended, which will have said "
                "why, or did not answer "
                f"for {self._timeout.total_seconds():g} s. Start the same command again with "
                "resume=True to go on from "
                f"the last checkpoint, on as many ranks as you like. (torch says: {said})"
            ) from error


# What differs, where the value itself must not be printed.
_DIFFERENT = {"seed": "another seed", "model": "another model, or the same from another start"}


def _begin(timeout: timedelta) -> None:
    """A process group from what torchrun left in the environment."""
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise RankError(
            "ranks=Ranks() is for several processes, and this one was not started as one of them "
            f"({missing[0]} is not "
            "set); start it with `torchrun --nproc-per-node 2 SCRIPT.py`, or leave ranks out."
        )
    # When torchrun starts ranks again, its store still has the addresses of those that are gone.
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"start {again}", store)  # type: ignore[attr-defined]
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    atexit.register(_end)


def _end() -> None:
    """Without it torch complains when Python ends."""
    if dist.is_initialized():
        dist.destroy_process_group()
