"""The steps of one run by its program: compiled, and on a GPU one launch a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from evenclip.data.dataset import Samples
from evenclip.gradients import Tape
from evenclip.gradients.functional import FunctionalTape
from evenclip.noise import Ahead
from evenclip.program import Engine, Inputs, Kind, Program
from evenclip.recording import Recorder, Recording
from evenclip.step import Columns

__all__ = ["Quick"]

# Rows to trace a graph with that holds for any number of them: a size that nothing else is likely to have.
_ANY = 251


class Quick:
    """A program of one run, handed a batch at a time.

    The graph takes batches of any size from two on. On a GPU there is a recording for every size, so batches are filled
    up to a few sizes, and rows that only fill up count for nothing.

    Attributes:
        multipliers: name of each release -> its multiplier, for the ledger.
    """

    def __init__(self, tape: Tape, kind: Kind, data: Samples, noise: Ahead, vector: Tensor, state: Tensor) -> None:
        self._device, self._noise, self._kind = vector.device, noise, replace(kind, runs=0)
        recorder = None if self._device.type == "cpu" else Recorder(self._device)
        with nullcontext() if recorder is None else recorder.apart():
            few = data.take(torch.arange(min(3, data.y.shape[0]), device=vector.device))
            program = Program(FunctionalTape(tape, few.x, few.y), [self._kind])
            self._key = noise.noise.key.to(vector.device)
            self._nothing = torch.zeros(0, device=vector.device)
            rows = (torch.arange(_ANY) % len(data.y)).to(self._device)
            size = self._nothing if recorder is None else torch.full((1,), _ANY, device=self._device)
            B = self._nothing if kind.B is not None else torch.ones(1, dtype=torch.float64, device=self._device)
            self._engine = Engine(program, data, [Inputs(vector, state, rows, size, B, *self._given(0))], compile=True)
            (self.multipliers,) = self._engine.multipliers
            self._recorded = (
                None if recorder is None else _Recorded(self._engine, recorder, vector, state, B, self._key)
            )

    @property
    def compiled(self) -> bool:
        """Whether there was a compiler."""
        return self._engine.compiled

    def takes(self, batch: Tensor) -> bool:
        """Whether the graph has room for this batch."""
        return self._engine.takes(batch.shape[0])

    def __call__(self, t: int, batch: Tensor, vector: Tensor, state: Tensor, B: float) -> tuple[Columns, Tensor]:
        """One step on this batch: one row for each of its records and perhaps some more, and which those are."""
        with torch.no_grad():
            if self._recorded is not None:
                return self._recorded(t, batch, vector, state, B)
            divisor = (
                self._nothing if self._kind.B is not None else self._nothing.new_full((1,), B, dtype=torch.float64)
            )
            given = Inputs(vector, state, batch, self._nothing, divisor, *self._given(t))
            return self._engine(t, [given])[0], batch

    def _given(self, t: int) -> tuple[Tensor, Tensor]:
        """What the noise is made of: on a CPU words, as the compiler makes normal numbers of them on all cores."""
        if not self._kind.is_noisy:
            return self._nothing, self._nothing
        if self._device.type != "cpu":
            return self._key, self._nothing
        if self._noise.dtype == torch.float64:
            return self._noise.row(t), self._nothing
        return self._noise.words(t)


class _Recorded:
    """The step on a GPU: one copy in, one launch, two copies out."""

    def __init__(
        self, engine: Engine, recorder: Recorder, vector: Tensor, state: Tensor, B: Tensor, key: Tensor
    ) -> None:
        self._engine, self._recorder = engine, recorder
        self._vector, self._state, self._B, self._key = vector, state.clone(), B.clone(), key
        self._nothing = torch.zeros(0, device=vector.device)
        self._steps: dict[int, tuple[Tensor, Recording[_Packed]]] = {}

    def __call__(self, t: int, batch: Tensor, vector: Tensor, state: Tensor, B: float) -> tuple[Columns, Tensor]:
        rows = self._engine.rows(len(batch))
        fed, replay = self._steps.get(rows) or self._record(rows)
        self._feed(fed, t, batch)
        self._state.copy_(state)
        if self._B.numel():
            self._B.fill_(B)
        if vector.data_ptr() != self._vector.data_ptr():  # an optimiser that has parameters one by one
            self._vector.copy_(vector)
        packed = replay()
        # What is given away must not be overwritten by the next replay.
        return _unpacked(packed._replace(numbers=packed.numbers.clone(), vectors=packed.vectors.clone())), fed[2:]

    def _feed(self, fed: Tensor, t: int, batch: Tensor) -> None:
        """Size, number of the step, rows; any row will do to fill up."""
        host = torch.empty(fed.shape, dtype=torch.int64, pin_memory=True)
        words, n = host.numpy(), len(batch)
        words[0], words[1], words[2 : 2 + n], words[2 + n :] = n, t, batch.numpy(), 0
        fed.copy_(host, non_blocking=True)

    def _record(self, rows: int) -> tuple[Tensor, Recording[_Packed]]:
        fed = torch.zeros(2 + rows, dtype=torch.int64, device=self._vector.device)
        found = fed, self._recorder(lambda: self._act(fed), [])
        self._steps[rows] = found
        return found

    def _act(self, fed: Tensor) -> _Packed:
        """What is recorded."""
        self._engine.t.copy_(fed[1])
        rows, size = fed[2:].clone(), fed[:1].clone()
        given = Inputs(self._vector, self._state, rows, size, self._B, self._key, self._nothing)
        (of,) = self._engine.run([given])
        parts = of.now, of.state, of.seen, of.flags.double()
        vectors = torch.stack([of.gradient, of.clipped_sum])
        return _Packed(torch.cat([part.flatten() for part in parts]), vectors, [part.shape for part in parts])


class _Packed(NamedTuple):
    """What a step computed, in two tensors.

    Attributes:
        numbers: now, state, seen, flags, one after the other; float64.
        vectors: noisy gradient, clipped sum.  # [2, parameter]
        shapes: of the numbers.
    """

    numbers: Tensor
    vectors: Tensor
    shapes: Sequence[torch.Size]


def _unpacked(packed: _Packed) -> Columns:
    parts = torch.split(packed.numbers, [shape.numel() for shape in packed.shapes])
    now, state, seen, flags = (part.view(shape) for part, shape in zip(parts, packed.shapes, strict=True))
    gradient, clipped_sum = packed.vectors.unbind()
    return Columns(gradient, now, state, clipped_sum, seen, flags.bool())
