"""Turn batches into per-sample gradients, block by block.

A tape knows how the samples of a block pass through the model: all at once, where their
independence is known or tested (`evenclip.gradients.batched`), or each by itself
(`evenclip.gradients.mapped`).

On a CPU a batch with large activations passes in blocks that fit the cache. Each block forms the
gradients that are smaller than their operands (those of a convolution) and frees the operands.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from evenclip.gradients.anylayer import AnyLayer, Mode
from evenclip.gradients.axis import Axis
from evenclip.gradients.batched import BatchedPass
from evenclip.gradients.calls import call, count
from evenclip.gradients.foreign import no_batch_rules
from evenclip.gradients.layout import Layout
from evenclip.gradients.losses import Loss
from evenclip.gradients.mapped import MappedPass
from evenclip.gradients.per_sample import Blocks, Padded, PerSample, Whole
from evenclip.gradients.units import Unit

__all__ = ["AnyTape", "Independence", "LossOf", "Tape", "WholeTape"]


# Maximum size of a layer's input or output for one block: 8 MiB in float32.
_BLOCK = 2**21
# Minimum activations per block, as a multiple of the parameter count.
_WORTH = 4
# Fixed sizes of blocks are multiples of this.
_MULTIPLE = 16


class Independence(enum.Enum):
    """Why a sample's gradient does not depend on the other samples of its batch."""

    LAYERS = "by layer types"
    CONSTRUCTION = "by construction"
    TESTED = "tested"


class AnyTape(Protocol):
    """The interface of a tape: passes through the model inside `with tape.recording()`."""

    model: nn.Module
    layout: Layout
    rows: int | None
    cancels: bool
    between: Callable[[], None] | None

    def recording(self) -> AbstractContextManager[Any]:
        """Record forward passes inside the `with` block."""

    def __call__(self, x: Any, y: Any, group: Tensor | None = None) -> PerSample:
        """Return each sample's loss and gradient; most tapes ignore `group`."""


class Tape:
    """Record the forward passes of a model and turn each into a `PerSample`.

    The model's modules are wrapped only inside `with tape.recording()`.

    Attributes:
        rows: largest number of samples that pass at once; None: any number.
        pads: whether every pass has exactly `rows` samples, filled up with copies.
        cancels: whether a layer's sums add several terms of a sample; see `LayerGradient`. It is
            found out by the first pass of the model's analysis.
        may_be_quick: whether norms may be computed in fewer operations, which makes them slightly
            larger. All norms of a run are computed in one way, because another one would move every
            sample that lies between the two.
        independence: why a sample's gradient does not depend on the others. By construction, each
            sample passes by itself; otherwise all samples of a block pass at once.
        between: called before every pass, to put back what the last one changed.
        why_at_once: why samples that are independent as far as tested pass at once.
    """

    between: Callable[[], None] | None = None
    why_at_once = ""

    def __init__(
        self, model: nn.Module, loss: Loss, units: Sequence[Unit], independence: Independence
    ) -> None:
        self.model, self.loss, self.units = model, loss, tuple(units)
        self.independence = independence
        self.layout = Layout.of(model)
        self.rows: int | None = self._at_once()
        self.cancels = self.pads = False
        self.may_be_quick = True
        mapped = independence is Independence.CONSTRUCTION
        self._pass: BatchedPass | MappedPass = (MappedPass if mapped else BatchedPass)(
            model, loss, units
        )
        self._is_recording = False

    @contextmanager
    def recording(self) -> Iterator[Self]:
        """Record the calls of the model's units inside the `with` block."""
        with self._pass.recording():
            self._is_recording = True
            try:
                yield self
            finally:
                self._is_recording = False

    def __call__(self, x: Any, y: Any, group: Tensor | None = None) -> PerSample:
        """Run one forward and one backward pass, on a CPU block by block."""
        del group
        if not self._is_recording:
            raise RuntimeError("Gradients are recorded only inside `with run.listening():`.")
        n = count(x)
        if not n:
            return PerSample(self.layout.blank, (), self.layout)
        if self.rows is None or (n <= self.rows and not self.pads):
            _call(self.between)
            return self._pass(x, y, may_be_quick=self.may_be_quick)
        starts = range(0, n, self.rows)
        if len(starts) == 1:
            return self._block(x, y, 0)
        return Blocks([self._block(x, y, at).formed() for at in starts], self.layout)

    def _block(self, x: Any, y: Any, at: int) -> PerSample:
        """Pass the block of samples from `at` on, filled up to its fixed size."""
        assert self.rows is not None
        x, y = tree_map(partial(_rows, at, at + self.rows), (x, y))
        n = count(x)
        missing = self.rows - n if self.pads else 0
        if missing:
            x, y = tree_map(partial(_fill, missing), (x, y))
        _call(self.between)
        passed = self._pass(x, y, may_be_quick=self.may_be_quick)
        return Padded(passed, n) if missing else passed

    def fix_rows(self, q: float, mean: float) -> None:
        """Pass samples of batches of any size in padded blocks of one fixed size.

        So a sample's numbers do not depend on how many others are in its batch. The size is public:
        it is exceeded by one batch in forty, which then takes two blocks.

        Args:
            q: Poisson rate.
            mean: expected size of a batch, or of what passes at once.
        """
        size = mean + 2 * math.sqrt(mean * (1 - q))
        size = max(_MULTIPLE, math.ceil(size / _MULTIPLE) * _MULTIPLE)
        self.rows, self.pads = min(size, self.rows or size), True

    def outputs(self, x: Any) -> Any:
        """Return the model's outputs for these samples, passed in the blocks of `__call__`."""
        n = count(x)
        rows = self.rows if n and self.rows is not None and (self.pads or n > self.rows) else n
        parts = []
        for at in range(0, max(n, 1), max(rows, 1)):
            part = tree_map(partial(_rows, at, at + rows), x)
            size = count(part)
            if self.pads:
                part = tree_map(partial(_fill, rows - size), part)
            _call(self.between)
            parts.append(tree_map(partial(_rows, 0, size), self._pass.output(part)))
        return parts[0] if len(parts) == 1 else tree_map(_joined, *parts)

    def _at_once(self) -> int | None:
        """Return the number of samples per block; None: all.

        A block fits the cache, and is large enough that reading the parameters and adding their
        gradients once per block costs little. The number is the same on every machine, because
        rounding depends on it.
        """
        if self.layout.blank.device.type != "cpu" or not self.units:
            return None
        fit = _BLOCK // max(1, *(unit.numbers for unit in self.units))
        worth = _WORTH * self.layout.size // max(1, sum(unit.numbers for unit in self.units))
        return max(1, fit, worth)

    def pass_at_once(self) -> None:
        """Use one block for any number of samples, so that each call makes one pass."""
        self.rows, self.pads = None, False


class WholeTape:
    """A tape for models that cannot be split into units.

    `torch.func` forms every gradient of the whole model.
    """

    rows, cancels = None, False
    independence = Independence.CONSTRUCTION
    why_at_once = ""
    between: Callable[[], None] | None = None

    def __init__(self, model: nn.Module, loss: Loss, inputs: int, mode: Mode) -> None:
        self.model, self.loss, self.layout = model, loss, Layout.of(model)
        self._layer = AnyLayer(LossOf(model, loss), (Axis(),) * inputs, (Axis(),), (0,), mode)

    @contextmanager
    def recording(self) -> Iterator[Self]:
        """Do nothing; this tape needs no recorders."""
        yield self

    def __call__(self, x: Any, y: Any, group: Tensor | None = None) -> PerSample:
        """Return each sample's loss and gradient."""
        del group
        n = count(x)
        if not n:
            return PerSample(self.layout.blank, (), self.layout)
        together = [(0, n)] if self._layer.mode is not Mode.LOOP else [(i, i + 1) for i in range(n)]
        parts = [self._passed(*tree_map(partial(_rows, *rows), (x, y))) for rows in together]
        losses = torch.cat([losses for losses, _ in parts])
        names = self.layout.names
        formed = {name: torch.cat([each[name] for _, each in parts]) for name in names}
        return PerSample(losses.detach(), [Whole(formed)], self.layout)

    def _passed(self, x: Any, y: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses and gradients of samples that pass in one call."""
        _call(self.between)
        n, names = count(x), [f"model.{name}" for name in self.layout.names]
        with no_batch_rules():
            each, losses = self._layer(
                ((x, y), {}), [torch.ones(n, device=tree_leaves(x)[0].device)], names, n
            )
        return losses, {name: each[f"model.{name}"] for name in self.layout.names}

    def outputs(self, x: Any) -> Any:
        """Return the model's outputs for these samples, each passed by itself."""
        alone = [tree_map(partial(_rows, i, i + 1), x) for i in range(count(x))]
        parts = [self._output(sample) for sample in alone or [x]]
        return parts[0] if len(parts) == 1 else tree_map(_joined, *parts)

    def _output(self, x: Any) -> Any:
        _call(self.between)
        return call(self.model, x)


class LossOf(nn.Module):
    """A model and its loss as one module: (x, y) -> losses."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Any, y: Any) -> Tensor:
        """Return the losses.  # [sample]"""
        return self.loss(call(self.model, x), y)


def _call(function: Callable[[], None] | None) -> None:
    if function is not None:
        function()


def _rows(first: int, end: int, value: Any) -> Any:
    """Return the samples from `first` to `end` of a tensor; return other values unchanged."""
    return value[first:end] if isinstance(value, Tensor) and value.ndim else value


def _joined(*parts: Any) -> Any:
    """Return the tensors of several blocks end to end; return another value of the first block."""
    return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]


def _fill(missing: int, value: Any) -> Any:
    """Append copies of the first sample to a tensor; return other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    return torch.cat([value, value[:1].expand(missing, *value.shape[1:])])
