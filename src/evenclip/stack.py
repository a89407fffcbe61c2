"""Many runs as one computation: seeds, rules and settings, each with its own data, batches, noise and state.

A stack takes one step of all its runs at once. A run in a stack is the run it would be alone: it draws the same batches
and the same noise, clips by its own rule, and ends with the same ledger; numbers agree to rounding.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map

from evenclip.data import Dataset
from evenclip.data.dataset import Samples
from evenclip.gradients import Tape
from evenclip.gradients.functional import FunctionalTape
from evenclip.program import Engine, Inputs, Kind, NoProgram, Program
from evenclip.recording import Batches, Feed, Recorder, Reel, Seen, fetched
from evenclip.run import Run
from evenclip.sampling import roomy
from evenclip.step import Columns
from evenclip.trace import Steps

__all__ = ["Stack", "together"]


def together(runs: Sequence[Run]) -> str | None:
    """Why these runs cannot be a stack, in a sentence; None: they can."""
    first = runs[0]
    for run in runs:
        if not isinstance(run.tape, Tape) or not isinstance(run.data, Dataset):
            return "a model that is not taken apart, or data that are read row by row, are trained alone"
        if not run.is_plain:
            return "only plain SGD without a schedule is stacked"
        if run.tape.layout.shapes != first.tape.layout.shapes or not alike(run.model, first.model):
            return "the models differ in more than their trainable parameters"
        if not isinstance(first.tape, Tape) or run.tape.loss != first.tape.loss or run.state.dtype != first.state.dtype:
            return "the losses differ"
        if run.kind == first.kind and run.state.shape != first.state.shape:
            return "the states of the rule differ in size"
        if (run.settings.steps, run.settings.epoch) != (first.settings.steps, first.settings.epoch):
            return "the numbers of steps differ"
        if run.t != first.t or run.device != first.device or run.performance != first.performance:
            return "the runs are not at the same step, on the same device, or computed in the same way"
        if (run.data.group is None) != (getattr(first.data, "group", None) is None):
            return "some have groups and some have none"
    return None


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models compute the same but for their trainable parameters: classes, constants, frozen numbers."""
    pairs = list(zip_longest(one.named_modules(), other.named_modules()))
    if any(a is None or b is None or a[0] != b[0] or type(a[1]) is not type(b[1]) for a, b in pairs):
        return False
    fixed = [
        {**dict(model.named_buffers()), **{name: p for name, p in model.named_parameters() if not p.requires_grad}}
        for model in (one, other)
    ]
    return _same(fixed[0], fixed[1]) and all(_same(_own(a[1]), _own(b[1])) for a, b in pairs)


def _own(module: nn.Module) -> dict[str, Any]:
    """What a module keeps beside parameters, buffers and parts: sizes, rates, whatever its author put there."""
    known = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "forward"}
    known |= {"_flat_weights", "_flat_weight_refs"}  # where torch's recurrent layers have their parameters again
    return {name: value for name, value in vars(module).items() if name not in known and not name.endswith("_hooks")}


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal; not, where that cannot be told."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)
    except Exception:
        return False


class Stack:
    """Runs that are trained together.

    with stack.listening():
        while stack.t < stack.steps:
            stack.step()

    When `listening` ends, every run has its parameters, state, ledger and trace. On a GPU a stack has a stream of its
    own: several that take turns are computed at the same time, where there is room for more than one.
    """

    def __init__(self, runs: Sequence[Run], *, compile: bool) -> None:
        """Trace the step of all of them; on a GPU, record it for the sizes that batches are likely to have.

        Args:
            runs: prepared and not begun, or all at the same step.
            compile: whether to compile the step, if that is possible.

        Raises:
            NoProgram: if they cannot be computed together; the message says why.
        """
        why = together(runs)
        if why is not None:
            raise NoProgram(why)
        self.runs = tuple(sorted(runs, key=lambda run: repr(run.kind)))
        self.steps, self.t = runs[0].settings.steps, runs[0].t
        self._epoch, device = runs[0].settings.epoch, runs[0].device
        self._recorder = None if device.type == "cpu" else Recorder(device)
        with self.runs[0].precision(), nullcontext() if self._recorder is None else self._recorder.apart():
            data, self._offsets = _joined(self.runs)
            members = groupby(zip(self.runs, self._offsets, strict=True), key=lambda pair: _shared(pair[0]))
            self._members = [_Members(list(some), device) for _, some in members]
            room = max(_rows_at_most(run) for run in runs)
            self._engine = self._traced(data, room, compile=compile)
            self._multipliers = self._engine.multipliers
            self._feeder: _Handed | _Reeled = (
                _Handed(self) if self._recorder is None else _Reeled(self, self._recorder, room)
            )
        with self.runs[0].precision(), self._on():
            self._feeder.ready({self._engine.rows(size) for run in self.runs for size in _likely(run)})
        self._block, self._at = list[list[Tensor]](), 0  # batches of the next steps [step][run], and which comes next
        self._done = 0  # steps of the block that were not interrupted
        self._before = list[dict[str, Any]]()  # the samplers' states before them
        self._open = deque[_Taken]()  # what the runs were not told yet

    def _traced(self, data: Samples, room: int, *, compile: bool) -> Engine:
        """The step of all of them, with batches of up to so many rows."""
        few, tape = data.take(torch.arange(min(3, data.y.shape[0]), device=data.y.device)), self.runs[0].tape
        assert isinstance(tape, Tape)
        program = Program(FunctionalTape(tape, few.x, few.y), [members.kind for members in self._members])
        batches = [[torch.arange(min(room - 1, run.settings.n)) for run in m.runs] for m in self._members]
        inputs = [m.inputs(self.t, some, room) for m, some in zip(self._members, batches, strict=True)]
        return Engine(program, data, inputs, compile=compile)

    @contextmanager
    def listening(self) -> Iterator[Stack]:
        """Where steps can be taken; afterwards the runs have what they have learned."""
        with self._on():
            pass  # the first step waits for what the device was told until now
        with self.runs[0].precision():
            try:
                yield self
            finally:
                self.hand_over()

    def step(self) -> None:
        """One step of every run."""
        with nullcontext() if self._recorder is None else torch.cuda.stream(self._recorder.stream):
            if not self._block:
                self._draw()
            for members, multipliers in zip(self._members, self._multipliers, strict=True):
                for run in members.runs:  # first of all: whatever interrupts the step, nothing is public without this
                    run.ledger.write(run.sampler.q, multipliers)
            self._at += 1
            self.t += 1  # its noise is spent from here on: a step that is interrupted is never taken again
            self._feeder.step(self.t - 1, self._block[self._at - 1])
            self._done += 1
            if self._at == len(self._block):
                self._settle()
                self._tell(0 if self._recorder is None else 1)  # by the next time that is done the device has sent it

    def hand_over(self) -> None:
        """Every run gets what it has learned up to here."""
        with self._on():
            self._settle()
            self._tell(0)

    def _on(self) -> AbstractContextManager[None]:
        """Where a GPU works on the stack's own stream, after what it was told before and before what it will be."""
        return nullcontext() if self._recorder is None else self._recorder.on()

    def _draw(self) -> None:
        """The batches of the next steps of this epoch."""
        left = min(self._epoch - self.t % self._epoch, self.steps - self.t, _AT_ONCE)
        self._before = [run.sampler.state() for run in self.runs]
        self._block, self._at, self._done = [[run.sampler.next() for run in self.runs] for _ in range(left)], 0, 0
        self._feeder.load(self._block)

    def _finish(self, found: Sequence[Columns]) -> None:
        """Move every run's parameters along its noisy gradient, and its state to the next."""
        for members, columns in zip(self._members, found, strict=True):
            members.vector.addcmul_(columns.gradient, members.lr)
            members.state.copy_(columns.state)

    def _settle(self) -> None:
        """The steps that were taken of the block are to be told; of the others the batches were never drawn.

        One that was interrupted counts, although nobody knows what it did: it may have moved the parameters.
        """
        block, taken, done = self._block, self._at, self._done
        self._block, self._at = [], 0
        if not block:
            return
        if taken < len(block):
            for run, before in zip(self.runs, self._before, strict=True):
                run.sampler.set_state(before)
                for _ in range(taken):
                    run.sampler.next()
        if taken:
            moved = [(members.vector.clone(), fetched(members.state)) for members in self._members]
            self._open.append(_Taken(self.t, block[:done], moved, self._feeder.seen(done)))

    def _tell(self, left: int) -> None:
        """Hand every run what was computed for it, but for so many of the last blocks."""
        while len(self._open) > left:
            t, batches, moved, seen = self._open.popleft()
            kinds, place = seen(), 0
            for i, (members, (vector, state)) in enumerate(zip(self._members, moved, strict=True)):
                for r, run in enumerate(members.runs):
                    own = [step[place + r] for step in batches]
                    run.take_over(t, vector[r], state[r], own, _of_run(kinds[i], r, own) if own else None)
                place += len(members.runs)


# Most steps whose batches are drawn at once.
_AT_ONCE = 256


class _Taken(NamedTuple):
    """Steps that were taken.

    Attributes:
        t: up to which.
        batches: [step][run]
        moved: parameters, and states on the CPU, that they led to, of every kind; there when `seen` is.
        seen: asks for what was seen of every kind.
    """

    t: int
    batches: list[list[Tensor]]
    moved: list[tuple[Tensor, Tensor]]
    seen: Callable[[], list[Seen]]


class _Handed:
    """Steps on a CPU: each is handed its batches."""

    def __init__(self, stack: Stack) -> None:
        self._stack, self._seen = stack, list[list[Seen]]()  # of each step and kind, without the axis of steps

    def ready(self, sizes: Iterable[int]) -> None:
        del sizes

    def load(self, block: Sequence[Batches]) -> None:
        del block
        self._seen = []

    def step(self, t: int, batches: Batches) -> None:
        stack, given, place = self._stack, [], 0
        rows = stack._engine.rows(max(batch.shape[0] for batch in batches))
        for members in stack._members:
            given.append(members.inputs(t, batches[place : place + len(members.runs)], rows))
            place += len(members.runs)
        with torch.no_grad():
            found = stack._engine(t, given)
            stack._finish(found)
        self._seen.append([Seen(of.now, of.seen, of.flags) for of in found])

    def seen(self, steps: int) -> Callable[[], list[Seen]]:
        kinds = list(zip(*self._seen[:steps], strict=True))
        return lambda: [Seen(*map(_stacked, zip(*kind, strict=True))) for kind in kinds]


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Of several steps, whose batches may be filled up to different lengths."""
    longest = max(part.shape[-1] for part in parts) if parts[0].ndim else 0
    return torch.stack(
        [part if part.shape[-1] == longest else pad(part, (0, longest - part.shape[-1])) for part in parts]
    )


class _Reeled:
    """Steps on a GPU: their batches lie there."""

    def __init__(self, stack: Stack, recorder: Recorder, room: int) -> None:
        self._stack, members = stack, stack._members
        moved = [part for m in members for part in (m.vector, m.state)]
        steps = min(stack._epoch, stack.steps, _AT_ONCE)
        sizes = [len(m.runs) for m in members]
        engine = stack._engine
        self.reel = Reel(self._act, sizes, moved, engine.clock, steps, engine.rows(room), recorder)

    def ready(self, sizes: Iterable[int]) -> None:
        for rows in sorted(sizes, reverse=True):  # what a large one is done in has room for all others
            self.reel.recorded(rows)

    def load(self, block: Sequence[Batches]) -> None:
        runs = self._stack.runs
        B = [[max(1.0, r.sampler.expected_size(b)) for r, b in zip(runs, step, strict=True)] for step in block]
        self.reel.load(self._stack.t, block, self._stack._offsets, B)

    def step(self, t: int, batches: Batches) -> None:
        del t  # the recording counts
        self.reel.step(self._stack._engine.rows(max(batch.shape[0] for batch in batches)))

    def seen(self, steps: int) -> Callable[[], list[Seen]]:
        return self.reel.seen(steps)

    def _act(self, feeds: Sequence[Feed]) -> list[Columns]:
        """One step, as it is recorded."""
        members = self._stack._members
        found = self._stack._engine.run([m.fed(feed) for m, feed in zip(members, feeds, strict=True)])
        self._stack._finish(found)
        return found


class _Members:
    """The runs of one kind, side by side."""

    def __init__(self, pairs: Sequence[tuple[Run, int]], device: torch.device) -> None:
        runs, self._offsets = zip(*pairs, strict=True)
        self.runs, one = tuple(runs), runs[0].kind
        self.kind = Kind(one.rule, one.B, one.sizes, len(runs))
        self.vector = torch.stack([run.vector for run in runs])
        self.state = torch.stack([run.state for run in runs])
        self._device = device
        self.lr = torch.tensor([-run.settings.lr for run in runs], dtype=self.vector.dtype, device=device).unsqueeze(1)
        self._keys = torch.stack([run.noise.noise.key for run in runs]).to(device)
        self._nothing = torch.zeros(len(runs), 0, device=device)

    def inputs(self, t: int, batches: Batches, length: int) -> Inputs:
        """What the next step starts from, every batch filled up to this length."""
        rows = np.zeros((len(batches), length), dtype=np.int64)  # any row will do: those that fill up count for nothing
        for row, batch, offset in zip(rows, batches, self._offsets, strict=True):
            np.add(batch.numpy(), offset, out=row[: batch.shape[0]])
        sizes = torch.tensor([[batch.shape[0]] for batch in batches])
        expected = [[max(1.0, run.sampler.expected_size(b))] for run, b in zip(self.runs, batches, strict=True)]
        parts = torch.from_numpy(rows), sizes, torch.tensor(expected, dtype=torch.float64)
        return self.fed(Feed(*(part.to(self._device) for part in parts)), t)

    def fed(self, feed: Feed, t: int = 0) -> Inputs:
        """The same of what lies on the device."""
        B = self._nothing if self.kind.B is not None else feed.B
        return Inputs(self.vector, self.state, feed.rows, feed.size, B, self._noise(t), self._nothing)

    def _noise(self, t: int) -> Tensor:
        """On a CPU the noise itself, on a GPU what it is drawn by."""
        if not self.kind.is_noisy:
            return self._nothing
        return self._keys if self._device.type != "cpu" else torch.stack([run.noise.row(t) for run in self.runs])


def _shared(run: Run) -> tuple[Any, ...]:
    """The same for runs that one mapped step serves: equal rules of this package; somebody's own may hide a number."""
    return (run.kind, None if run.guard.is_ours else id(run))


def _of_run(of: Seen, r: int, batches: Batches) -> Steps:
    """What was seen of one run, end to end and without the rows that only fill up."""
    sizes = [batch.shape[0] for batch in batches]
    real = (torch.arange(of.seen.shape[-1]) < torch.tensor(sizes).unsqueeze(1)).flatten().nonzero().squeeze(1)
    losses, norms, weights, clamped, finite = (
        column.flatten().index_select(0, real) for part in (of.seen, of.flags) for column in part[:, r].unbind(1)
    )
    return Steps(sizes, losses, norms, weights, None, clamped, finite, of.now[:, r])


def _rows_at_most(run: Run) -> int:
    """Rows of a batch, but for one Poisson batch in a million."""
    return roomy(run.settings.B) if run.settings.q is not None else int(run.settings.B)


def _likely(run: Run) -> range:
    """Rows that most batches have: of Poisson batches, all but one in a hundred."""
    B = int(run.settings.B)
    around = math.ceil(2.6 * math.sqrt(B)) if run.settings.q is not None else 0
    return range(max(1, B - around), B + around + 1)


def _joined(runs: Sequence[Run]) -> tuple[Samples, list[int]]:
    """All their data one after the other, each once, and where each run's begin."""
    places, parts, offsets, end = dict[tuple[int, ...], int](), list[Samples](), list[int](), 0
    for run in runs:
        assert isinstance(run.data, Dataset)
        part = Samples(run.data.x, run.data.y, run.data.group)
        memory = tuple(leaf.data_ptr() for leaf in tree_leaves(part) if isinstance(leaf, Tensor))
        if memory not in places:
            places[memory] = end
            parts.append(part)
            end += len(run.data)
        offsets.append(places[memory])
    return (parts[0] if len(parts) == 1 else tree_map(_end_to_end, *parts)), offsets


def _end_to_end(*parts: Tensor | None) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return torch.cat(there) if there else None
