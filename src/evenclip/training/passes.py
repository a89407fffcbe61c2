"""The passes of a batch through the model: losses, norms and gradients, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenclip.gradients import AnyTape, PerSample, Tape, WholeTape
from evenclip.gradients.calls import call
from evenclip.gradients.errors import ModelError
from evenclip.mechanism.generators import fill_generators
from evenclip.mechanism.words import KEY_BYTES
from evenclip.training.loss import Labelled

__all__ = ["Chunk", "ChunkPass", "Passes"]


class Chunk(NamedTuple):
    """Samples of a batch that pass through the model at once.

    Attributes:
        x: inputs.  # [sample, ...]
        y: targets.  # [sample, ...]
        group: the samples' groups.  # [sample], int64
        real: which rows are samples; other rows are padding and count for nothing. None: all rows
            are samples.  # [sample], bool
        key: key of the model's random draws (dropout), so that a second pass repeats them.
    """

    x: Any
    y: Any
    group: Tensor
    real: Tensor | None = None
    key: bytes = bytes(KEY_BYTES)


class ChunkPass(NamedTuple):
    """A chunk after its forward and backward pass. Private.

    Attributes:
        chunk: the samples.
        gradients: g_i, most of them unformed; 0 where loss or gradient is not finite.
        losses: ℓ_i.  # [sample]
        norms: ‖g_i‖; 0 where loss or gradient is not finite.  # [sample]
        finite: where loss and gradient are finite; None: everywhere.  # [sample], bool
        further: what else the rule's statistic uses: `loss`, `output`, `y`.
    """

    chunk: Chunk
    gradients: PerSample
    losses: Tensor
    norms: Tensor
    finite: Tensor | None
    further: dict[str, Any]

    @property
    def keep(self) -> Tensor | None:
        """Which rows count; None: all.  # [sample], bool"""
        if self.finite is None or self.chunk.real is None:
            return self.chunk.real if self.finite is None else self.finite
        return self.finite & self.chunk.real


class Passes:
    """The passes of a batch's chunks, computed one at a time.

    Each iteration computes them again, so that only one chunk is in memory; the pass of a single
    chunk is kept.

    Args:
        tape: the model and its loss, recording.
        chunks: the batch.
        traceable: whether the step is being traced, so that no tensor value may be read.
        wants: what else the rule's statistic uses: `loss`, `output`, `y`.
    """

    def __init__(
        self,
        tape: AnyTape,
        chunks: Sequence[Chunk],
        *,
        traceable: bool = False,
        wants: Sequence[str] = (),
    ) -> None:
        self.tape, self._chunks, self._wants = tape, chunks, wants
        self._pass = _traceable_pass if traceable else _pass
        self._only: ChunkPass | None = None

    @property
    def samples(self) -> int:
        """Number of samples, without padding."""
        return sum(c.group.shape[0] if c.real is None else int(c.real.sum()) for c in self._chunks)

    def __iter__(self) -> Iterator[ChunkPass]:
        if len(self._chunks) != 1:
            return (self._pass(self.tape, chunk, self._wants) for chunk in self._chunks)
        if self._only is None:
            self._only = self._pass(self.tape, self._chunks[0], self._wants)
        return iter((self._only,))


def _pass(tape: AnyTape, chunk: Chunk, wants: Sequence[str]) -> ChunkPass:
    """Run the forward and backward pass; mask out samples with a non-finite loss or gradient."""
    _fill_generators(chunk)
    seed = torch.initial_seed()
    gradients = tape(chunk.x, chunk.y, chunk.group)
    losses, norms, finite = gradients.losses, gradients.norms(quick=True), None
    _check_seed(seed)
    magnitude = float(torch.dot(norms, norms)) + float(torch.dot(losses, losses))  # synchronises
    if not math.isfinite(magnitude):
        # Exact norms where float32 overflowed and nowhere else: a sample's norm must not depend on
        # other samples.
        norms = torch.where(torch.isfinite(norms), norms, gradients.norms())
        finite = torch.isfinite(norms) & torch.isfinite(losses)
        gradients, norms = gradients.masked(finite), torch.where(finite, norms, 0.0)
    return ChunkPass(chunk, gradients, losses, norms, finite, _further(tape, chunk, losses, wants))


def _traceable_pass(tape: AnyTape, chunk: Chunk, wants: Sequence[str]) -> ChunkPass:
    """Do the same without reading a tensor value: always mask."""
    gradients = tape(chunk.x, chunk.y, chunk.group)
    losses, norms = gradients.losses, gradients.norms()
    finite = torch.isfinite(norms) & torch.isfinite(losses)
    norms = torch.where(finite, norms, 0.0)
    further = _further(tape, chunk, losses, wants)
    return ChunkPass(chunk, gradients.masked(finite), losses, norms, finite, further)


def _further(tape: AnyTape, chunk: Chunk, losses: Tensor, wants: Sequence[str]) -> dict[str, Any]:
    """Return what else a rule's statistic uses of these samples: `loss`, `output`, `y`.

    The output takes a second forward pass, in the same blocks and with the same dropout.
    """
    further: dict[str, Any] = {}
    if "loss" in wants:
        further["loss"] = losses
    if "output" in wants:
        _fill_generators(chunk)
        with torch.no_grad():
            further["output"] = (
                tape.outputs(chunk.x)
                if isinstance(tape, Tape | WholeTape)
                else call(tape.model, chunk.x)
            )
    if "y" in wants:
        further["y"] = chunk.y.y if isinstance(chunk.y, Labelled) else chunk.y
    return further


def _check_seed(seed: int) -> None:
    """Raise if a pass has set another seed than this one.

    Raises:
        ModelError: it has.
    """
    if torch.initial_seed() != seed:
        raise ModelError(
            "A pass through the model or its loss set the seed of torch's generator. The masks of "
            "the samples that pass next would not be random. Nothing of this step is published; "
            "draw from the generator as it is, or keep fixed numbers in a buffer."
        )


def _fill_generators(chunk: Chunk) -> None:
    """Fill torch's global generators, which dropout uses, from the chunk's key."""
    fill_generators(chunk.key, cuda=chunk.group.is_cuda)
