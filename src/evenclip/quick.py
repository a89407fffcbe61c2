"""The steps of one run by its program: compiled, and on a GPU one launch a step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from evenclip.data.dataset import Samples
from evenclip.gradients import Tape
from evenclip.gradients.functional import FunctionalTape
from evenclip.noise import Ahead
from evenclip.program import Engine, Inputs, Kind, Program
from evenclip.recording import sent
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
        few = data.take(torch.arange(min(3, data.y.shape[0]), device=vector.device))
        program = Program(FunctionalTape(tape, few.x, few.y), [self._kind])
        self._key = noise.noise.key.to(vector.device)
        self._nothing = torch.zeros(0, device=vector.device)
        example = self._inputs(-1, torch.arange(_ANY) % len(data.y), vector, state, 1.0)
        self._engine = Engine(program, data, [example], compile=True)
        (self.multipliers,) = self._engine.multipliers

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
            inputs = self._inputs(t, batch, vector, state, B)
            (found,) = self._engine(t, [inputs])
            return found if self._device.type == "cpu" else Columns(*(column.clone() for column in found)), inputs.rows

    def _inputs(self, t: int, batch: Tensor, vector: Tensor, state: Tensor, B: float) -> Inputs:
        rows, size = batch, self._nothing
        if self._device.type != "cpu":
            more = 0 if t < 0 else self._engine.rows(len(batch)) - len(batch)  # any will do: they count for nothing
            rows = sent(F.pad(batch, (0, more)), self._device)
            size = torch.full((1,), batch.shape[0], device=self._device)
        divisor = self._nothing if self._kind.B is not None else self._nothing.new_full((1,), B, dtype=torch.float64)
        return Inputs(vector, state, rows, size, divisor, *self._given(t))

    def _given(self, t: int) -> tuple[Tensor, Tensor]:
        """What the noise is made of: on a CPU words, as the compiler makes normal numbers of them on all cores."""
        if not self._kind.is_noisy:
            return self._nothing, self._nothing
        if self._device.type != "cpu":
            return self._key, self._nothing
        if self._noise.dtype == torch.float64:
            return self._noise.row(max(t, 0)), self._nothing
        return self._noise.words(max(t, 0))
