"""Steps on a GPU as CUDA graphs, each one launch.

A `Recorder` records what is done to tensors that stay in their places. A `Reel` holds the batches of many steps on the
device, and what was seen of them until it is asked for, so that the host neither sends nor fetches anything in between
and the device never waits for it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["Batches", "Feed", "Recorder", "Recording", "Reel", "Seen", "aside", "fetched", "sent"]

T = TypeVar("T")
F = TypeVar("F", bound="Found")

# Times that something is tried out before it is recorded: libraries choose their algorithms then, and allocate.
_TRIES = 3
# Numbers before the places of a batch: its size, and at _B the bits of B. Compiled code wants everything at a multiple
# of 16 bytes.
_HEAD, _B = 4, 2


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for what the device is doing: that needs pinned memory."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def fetched(x: Tensor) -> Tensor:
    """A copy on its way to the host: there when the device has done what it was told until now."""
    if not x.is_cuda:
        return x.clone()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


# Streams that nobody uses at the moment. Libraries keep a workspace of 32 MiB or two for each that they were used on.
_FREE: dict[int, list[Any]] = {}


def _stream(device: torch.device) -> Any:
    """One that nobody else has, until it is put back."""
    free = _free(device)
    return free.pop() if free else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _free(device: torch.device) -> list[Any]:
    return _FREE.setdefault(torch.cuda.current_device() if device.index is None else device.index, [])


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Where a GPU computes something that leaves nothing behind, on a stream that a `Recorder` may have next.

    Backward passes have no thread of their own there, as libraries have workspaces for each thread too.
    """
    stream = _stream(device)
    try:
        with _on(stream), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _free(device).append(stream)


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    """Where a GPU works on this stream, which begins when the current one is done and is waited for by it."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


class Recording(Generic[T]):
    """Something that was recorded."""

    def __init__(self, graph: torch.cuda.CUDAGraph, found: T) -> None:
        self._graph, self._found = graph, found

    def __call__(self) -> T:
        """Do it again, on the stream that is current; what comes out is overwritten by the recorder's next replay."""
        self._graph.replay()
        return self._found


class Record(Protocol):
    """What a `Recorder` does."""

    def __call__(self, act: Callable[[], T], moved: Sequence[Tensor]) -> Callable[[], T]: ...


class Recorder:
    """Makes recordings of which one at a time is replayed: they share their memory.

    Libraries have one workspace for each stream, which goes into what is recorded on it. Recordings that are replayed
    at the same time must not share it: two kernels that count in the same memory wait for each other for ever. So a
    recorder has a stream, and memory. What is tried out before should be in both (`apart`): memory that a GPU was once
    asked for is kept, and serves the recordings then.

    Attributes:
        stream: nobody else's.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _stream(device)
        weakref.finalize(self, _free(device).append, self.stream)
        torch.cuda.empty_cache()  # what is free elsewhere cannot be had while recording
        self._memory = _Memory(torch.cuda.graph_pool_handle())
        # Not torch's MemPool: one that goes while something is recorded, wherever, takes the process with it. Memory
        # stays, and can be used, as long as there is a recording in it: this one.
        self._stays, _ = self._captured(partial(torch.zeros, 1, device=device))

    def on(self) -> AbstractContextManager[None]:
        """Where the GPU works on the recorder's stream, after what it was told before and before what it will be."""
        return _on(self.stream)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """The same, and in its memory. Nothing is recorded there."""
        memory: Any = self._memory
        native = torch.cuda.memory.get_allocator_backend() == "native"
        with self.on(), torch.cuda.use_mem_pool(memory) if native else nullcontext():
            yield

    def __call__(self, act: Callable[[], T], moved: Sequence[Tensor]) -> Recording[T]:
        """Record this; what needs most memory best first.

        Args:
            act: what is done.
            moved: what it changes in place; put back after each time that it is tried out.
        """
        with self.apart(), torch.no_grad():
            before = [part.clone() for part in moved]
            for _ in range(_TRIES):
                act()
                _put_back(moved, before)
        return Recording(*self._captured(act))

    def _captured(self, act: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph: Any = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which first waits for everything on the device and gives its free memory back: there
        # is a recording for every size of batch and every run.
        with torch.cuda.stream(self.stream), torch.no_grad(), _nothing_collected():
            graph.capture_begin(pool=self._memory.id)
            try:
                found = act()
            finally:
                graph.capture_end()
        return graph, found


class _Memory(NamedTuple):
    """What torch knows memory of recordings by."""

    id: Any


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """No garbage is collected meanwhile: what holds something of the device must not go while it is recorded."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _put_back(moved: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for part, was in zip(moved, before, strict=True):
        part.copy_(was)


Batches = Sequence[Tensor]  # of one step: every run's


class Seen(NamedTuple):
    """What was seen of some steps, on the host.

    Attributes:
        now: what each step clipped with.  # [step, run, ...]
        seen: losses, norms, weights.  # [step, run, 3, row]
        flags: clamped, finite.  # [step, run, 2, row]
    """

    now: Tensor
    seen: Tensor
    flags: Tensor


class Found(Protocol):
    """What a step computes of the runs of one kind: the columns of `step.Columns` that are kept."""

    @property
    def now(self) -> Tensor: ...
    @property
    def seen(self) -> Tensor: ...
    @property
    def flags(self) -> Tensor: ...


class Feed(NamedTuple):
    """What the step of one kind's runs reads.

    Attributes:
        rows: places in the data.  # [run, row]
        size: how many of them are samples.  # [run, 1]
        B: what sums are divided by.  # [run, 1], float64
    """

    rows: Tensor
    size: Tensor
    B: Tensor


class Reel(Generic[F]):
    """Steps that follow each other on a GPU.

    Attributes:
        last: what the last step computed, until the next does.
    """

    def __init__(
        self, act: Callable[[Sequence[Feed]], Sequence[F]], runs: Sequence[int], moved: Sequence[Tensor], clock: Tensor,
        steps: int, width: int, record: Record,
    ) -> None:  # fmt: skip
        """Nothing is recorded yet.

        Args:
            act: one step of all runs; reads the number of the step from `clock`.
            runs: how many, of each kind.
            moved: what it changes in place.
            clock: number of the step, and its place among the loaded ones: counted on by the recording.  # [2], int64
            steps: most that are loaded at once.
            width: most rows that a batch is expected to have.
            record: makes recordings.
        """
        self._act, self._runs, self._moved, self._clock = act, list(runs), list(moved), clock
        self._at, self._steps, self._device, self._record = clock[1:], steps, clock.device, record
        self.last: Sequence[F] = ()
        self._make(width)

    def _make(self, width: int) -> None:
        """The tables that recordings read and write: whoever makes new ones records anew."""
        total, device = sum(self._runs), self._device
        self.width = width
        self._recorded: dict[int, Callable[[], Sequence[F]]] = {}
        # Size, B, places: in one table, which is read at once.
        self._fed = torch.zeros(self._steps, total, _HEAD + width, dtype=torch.int64, device=device)
        self._seen: list[list[Tensor]] = []  # of each kind: now, seen, flags  [step, run, ...]

    def load(self, t: int, batches: Sequence[Batches], offsets: Sequence[int], B: Sequence[Sequence[float]]) -> None:
        """The batches of the next steps.

        Args:
            t: number of the first.
            batches: [step][run]
            offsets: where each run's data begin.
            B: what each sum is divided by.  # [step][run]
        """
        longest = max(len(batch) for step in batches for batch in step)
        if longest > self.width:  # one batch in a million
            self._make(longest)
        fed = np.zeros((len(batches), len(offsets), _HEAD + self.width), dtype=np.int64)
        fed[:, :, 0] = [[len(batch) for batch in step] for step in batches]
        fed[:, :, _B] = np.array(B, dtype=np.float64).view(np.int64)
        for step, places in zip(batches, fed[:, :, _HEAD:], strict=True):
            for batch, row, offset in zip(step, places, offsets, strict=True):
                np.add(batch.numpy(), offset, out=row[: len(batch)])
        self._fed[: len(batches)].copy_(sent(torch.from_numpy(fed), self._device))
        self._clock.copy_(sent(torch.tensor([t, 0]), self._device))

    def step(self, rows: int) -> None:
        """The next of the loaded steps, with so many rows of every batch."""
        self.last = self.recorded(rows)()

    def recorded(self, rows: int) -> Callable[[], Sequence[F]]:
        """The step with so many rows, recorded when it is first asked for; that takes no step."""
        rows = min(rows, self.width)
        if rows not in self._recorded:
            self._recorded[rows] = self._record(lambda: self._one(rows), [self._clock, *self._moved])
        return self._recorded[rows]

    def seen(self, steps: int) -> Callable[[], list[Seen]]:
        """What was seen of the first of the loaded steps, of every kind: on its way to the host, who may ask later."""
        there = [[fetched(table[:steps]) for table in tables] for tables in self._seen]
        wait = _now(self._device)

        def later() -> list[Seen]:
            wait()
            return [Seen(*tables) for tables in there]

        return later

    def _one(self, rows: int) -> Sequence[F]:
        """What is recorded: read the step's batches, take it, write down what was seen, count on."""
        fed = torch.split(self._fed.index_select(0, self._at)[0], self._runs)
        places = [of[:, _HEAD : _HEAD + rows].contiguous() for of in fed]
        heads = [(of[:, :1].contiguous(), of[:, _B : _B + 1].contiguous().view(torch.float64)) for of in fed]
        found = self._act([Feed(own, *head) for own, head in zip(places, heads, strict=True)])
        if not self._seen:
            self._seen = [self._tables(of) for of in found]  # when it is first tried out
        for seen, of in zip(self._seen, found, strict=True):
            for table, part in zip(seen, (of.now, of.seen, of.flags), strict=True):
                where = table if table.shape[1:] == part.shape else table.narrow(-1, 0, part.shape[-1])
                where.index_copy_(0, self._at, part.unsqueeze(0))
        self._clock.add_(1)
        return found

    def _tables(self, of: F) -> list[Tensor]:
        """For what is seen of every step, of the shapes that one has."""
        return [
            of.now.new_zeros(self._steps, *of.now.shape),
            of.seen.new_zeros(self._steps, *of.seen.shape[:-1], self.width),
            of.flags.new_zeros(self._steps, *of.flags.shape[:-1], self.width),
        ]


def _now(device: torch.device) -> Callable[[], None]:
    """A function that waits for what the device was told until now."""
    if device.type == "cpu":
        return lambda: None
    ended: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ended.record()
    return ended.synchronize  # type: ignore[no-any-return]
