"""Many runs as one computation: seeds, rules and settings, each with its own data, batches, noise and state.

A stack takes one step of all its runs at once. A run in a stack is the run it would be alone: it draws the same batches
and the same noise, clips by its own rule, and ends with the same ledger; numbers agree to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from evenclip.data import Dataset
from evenclip.data.dataset import Samples
from evenclip.gradients import Tape
from evenclip.gradients.functional import FunctionalTape
from evenclip.program import Engine, Inputs, Kind, NoProgram, Program
from evenclip.run import Run
from evenclip.sampling import roomy
from evenclip.step import Columns

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

    At the end of an epoch, and when `listening` ends, every run has its parameters, state, ledger and trace.
    """

    def __init__(self, runs: Sequence[Run], *, compile: bool) -> None:
        """Trace the step of all of them.

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
        self.steps, self.t, self._device = runs[0].settings.steps, runs[0].t, runs[0].device
        self._epoch = runs[0].settings.epoch
        data, offsets = _joined(self.runs)
        members = groupby(zip(self.runs, offsets, strict=True), key=lambda pair: _shared(pair[0]))
        self._members = [_Members(list(some), self._device) for _, some in members]
        few = data.take(torch.arange(min(3, data.y.shape[0]), device=self._device))
        tape = self.runs[0].tape
        assert isinstance(tape, Tape)
        program = Program(FunctionalTape(tape, few.x, few.y), [members.kind for members in self._members])
        self._room = max(_rows_at_most(run) for run in runs)
        batches = [[torch.arange(min(self._room - 1, run.settings.n)) for run in m.runs] for m in self._members]
        with self.runs[0].precision():
            self._engine = Engine(
                program, data, self._inputs(batches, self._room), compile=compile, finish=self._finish
            )
        self._multipliers = self._engine.multipliers
        self._open = list[_Seen]()

    @contextmanager
    def listening(self) -> Iterator[Stack]:
        """Where steps can be taken; afterwards the runs have what they have learned."""
        with self.runs[0].precision():
            try:
                yield self
            finally:
                self._settle()

    def step(self) -> None:
        """One step of every run."""
        batches = [[run.sampler.next() for run in members.runs] for members in self._members]
        longest = max(batch.shape[0] for some in batches for batch in some)
        for members, multipliers in zip(self._members, self._multipliers, strict=True):
            for run in members.runs:  # first of all: whatever interrupts the step, nothing is public without this
                run.ledger.write(run.sampler.q, multipliers)
        with torch.no_grad():
            # A batch larger than the room there is (one in a million) is given more, operation by operation.
            found = self._engine(self.t, self._inputs(batches, max(self._room, longest)))
            kept = [columns._replace(gradient=_NOTHING, clipped_sum=_NOTHING, state=_NOTHING) for columns in found]
            if self._device.type == "cuda":  # the next step overwrites them
                kept = [
                    columns._replace(now=columns.now.clone(), seen=columns.seen.clone(), flags=columns.flags.clone())
                    for columns in kept
                ]
        self._open.append(_Seen(batches, kept))
        self.t += 1
        if self.t % self._epoch == 0 or self.t == self.steps:
            self._settle()

    def _inputs(self, batches: Sequence[Sequence[Tensor]], rows: int) -> list[Inputs]:
        pairs = zip(self._members, batches, strict=True)
        return [members.inputs(self.t, some, rows) for members, some in pairs]

    def _finish(self, found: list[Columns]) -> None:
        """Move every run's parameters along its noisy gradient, and its state to the next."""
        for members, columns in zip(self._members, found, strict=True):
            members.vector.addcmul_(columns.gradient, members.lr)
            members.state.copy_(columns.state)

    def _settle(self) -> None:
        """Hand every run what was computed for it since the last time."""
        if not self._open:
            return
        for i, members in enumerate(self._members):
            columns = [Columns(*(column.cpu() for column in seen.columns[i])) for seen in self._open]
            for r, run in enumerate(members.runs):
                rows = []
                for seen, of in zip(self._open, columns, strict=True):
                    batch = seen.batches[i][r]
                    numbers, flags = of.seen[r, :, : len(batch)], of.flags[r, :, : len(batch)]
                    rows.append((batch, *numbers.unbind(), *flags.unbind(), of.now[r]))
                run.take_over(self.t, members.vector[r], members.state[r], rows)
        self._open = []


_NOTHING = torch.zeros(0)


class _Seen(NamedTuple):
    """One step: the batches of every kind and run, and what was computed of every kind."""

    batches: list[list[Tensor]]
    columns: list[Columns]


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

    def inputs(self, t: int, batches: Sequence[Tensor], length: int) -> Inputs:
        """What the next step starts from, every batch filled up to this length."""
        rows = np.zeros((len(batches), length), dtype=np.int64)  # any row will do: those that fill up count for nothing
        for row, batch, offset in zip(rows, batches, self._offsets, strict=True):
            np.add(batch.numpy(), offset, out=row[: batch.shape[0]])
        sizes = torch.tensor([[batch.shape[0]] for batch in batches])
        B = self._nothing
        if self.kind.B is None:
            expected = [run.sampler.expected_size(batch) for run, batch in zip(self.runs, batches, strict=True)]
            B = torch.tensor(expected, dtype=torch.float64, device=self._device).clamp(min=1.0).unsqueeze(1)
        places, sizes = (part.to(self._device, non_blocking=True) for part in (torch.from_numpy(rows), sizes))
        return Inputs(self.vector, self.state, places, sizes, B, self._noise(t), self._nothing)

    def _noise(self, t: int) -> Tensor:
        if not self.kind.is_noisy:
            return self._nothing
        return self._keys if self._device.type != "cpu" else torch.stack([run.noise.row(t) for run in self.runs])


def _shared(run: Run) -> tuple[Any, ...]:
    """The same for runs that one mapped step serves: equal rules of this package; somebody's own may hide a number."""
    return (run.kind, None if run.guard.is_ours else id(run))


def _rows_at_most(run: Run) -> int:
    """Rows of a batch, but for one Poisson batch in a million."""
    return roomy(run.settings.B) if run.settings.q is not None else int(run.settings.B)


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
