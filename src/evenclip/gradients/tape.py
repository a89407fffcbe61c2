"""Record the forward passes of a model, and turn them into per-sample gradients.

The forward pass records (unit, inputs, outputs) for each unit: a layer with a formula, or any other
module with its own parameters. One `torch.autograd.grad(losses.sum(), outputs)` gives δ, the
gradient with respect to every output. No sample's loss depends on another sample's row, so row i of
δ belongs to sample i. The result is a `PerSample`.

On a CPU a batch with large activations passes in blocks that fit the cache. Each block forms the
gradients that are smaller than their operands (those of a convolution) and frees the operands.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from evenclip.gradients.anylayer import AnyLayer, Mode
from evenclip.gradients.axis import Axis
from evenclip.gradients.layout import Layout
from evenclip.gradients.losses import Loss
from evenclip.gradients.per_sample import Blocks, Padded, PerSample, Whole
from evenclip.gradients.tanh import pays, tanh
from evenclip.gradients.units import PendingRecord, Unit

__all__ = ["AnyTape", "LossOf", "Tape", "WholeTape", "call", "count"]


# Maximum size of a layer's input or output for one block: 8 MiB in float32.
_BLOCK = 2**21
# Minimum activations per block, as a multiple of the parameter count.
_WORTH = 4
# Fixed sizes of blocks are multiples of this.
_MULTIPLE = 16


class AnyTape(Protocol):
    """The interface of a tape: passes through the model inside `with tape.recording()`."""

    model: nn.Module
    layout: Layout
    rows: int | None
    cancels: bool

    def recording(self) -> AbstractContextManager[Any]:
        """Record forward passes inside the `with` block."""

    def __call__(self, x: Any, y: Any, group: Tensor | None = None) -> PerSample:
        """Return each sample's loss and gradient; most tapes ignore `group`."""


def call(model: nn.Module, x: Any) -> Any:
    """Call the model; x is its one input, a tuple of its inputs, or a dict of them by name."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def count(x: Any) -> int:
    """Return the number of samples in an input; a symbolic size while a step is traced."""
    samples: int = (x if isinstance(x, Tensor) else tree_leaves(x)[0]).shape[0]
    return samples


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
    """

    def __init__(self, model: nn.Module, loss: Loss, units: Sequence[Unit]) -> None:
        self.model, self.loss, self.units = model, loss, tuple(units)
        self.layout = Layout.of(model)
        self.rows: int | None = self._at_once()
        self.cancels = self.pads = False
        self.may_be_quick = True
        self.samples = 0  # in the current or the last pass
        self._pending: list[PendingRecord] | None = None  # None: do not record
        self.passing = False  # whether a forward or backward pass is running
        self._is_recording = False

    @contextmanager
    def recording(self) -> Iterator[Self]:
        """Temporarily replace each module's `forward` with a recorder.

        Replacing `forward` is faster than a hook.
        """
        tanhs = [module for module in self.model.modules() if type(module) is nn.Tanh]
        wrappers = [
            *(_Recorder(self, unit) for unit in self.units),
            *(_FastTanh(self, module) for module in tanhs),
        ]
        try:
            for wrapper in wrappers:
                wrapper.install()
            self._is_recording = True
            yield self
        finally:
            self._is_recording = False
            for wrapper in reversed(wrappers):
                wrapper.remove()

    def __call__(self, x: Any, y: Any, group: Tensor | None = None) -> PerSample:
        """Run one forward and one backward pass, on a CPU block by block."""
        del group
        if not self._is_recording:
            raise RuntimeError("Gradients are recorded only inside `with run.listening():`.")
        n = count(x)
        if not n:
            return PerSample(self.layout.blank, (), self.layout)
        if self.rows is None or (n <= self.rows and not self.pads):
            return self._pass(x, y)
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
        if not missing:
            return self._pass(x, y)
        return Padded(self._pass(*tree_map(partial(_fill, missing), (x, y))), n)

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

    def _pass(self, x: Any, y: Any) -> PerSample:
        self.samples, self._pending, self.passing = count(x), [], True
        try:
            losses = self._losses(x, y)  # [sample]
            pending, self._pending = self._pending, None
            edges = [edge for call in pending for edge in call.edges]
            # The derivative of Σ_i ℓ_i, without computing the sum.
            deltas = (
                torch.autograd.grad(losses, edges, torch.ones_like(losses), allow_unused=True)
                if edges
                else ()
            )
        finally:
            self._pending, self.passing = None, False
        if len(edges) == len(pending):  # every unit has one output
            pairs = zip(pending, deltas, strict=True)
            records = [call.with_deltas((delta,)) for call, delta in pairs if delta is not None]
        else:
            remaining = iter(deltas)
            by_call = [(call, [next(remaining) for _ in call.edges]) for call in pending]
            records = [
                call.with_deltas(own)
                for call, own in by_call
                if any(delta is not None for delta in own)
            ]
        quick = self.may_be_quick
        return PerSample(losses.detach(), records, self.layout, may_be_quick=quick)

    def outputs(self, x: Any) -> Any:
        """Return the model's outputs for these samples, passed in the blocks of `__call__`."""
        n = count(x)
        rows = self.rows if n and self.rows is not None and (self.pads or n > self.rows) else n
        parts, self.passing = [], True
        try:
            for at in range(0, max(n, 1), max(rows, 1)):
                part = tree_map(partial(_rows, at, at + rows), x)
                self.samples = size = count(part)
                if self.pads:
                    self.samples = rows
                    part = tree_map(partial(_fill, rows - size), part)
                output = call(self.model, part)
                parts.append(tree_map(partial(_rows, 0, size), output))
        finally:
            self.passing = False
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

    def _losses(self, x: Any, y: Any) -> Tensor:
        if torch.is_grad_enabled():
            return self.loss(call(self.model, x), y)
        with torch.enable_grad():
            return self.loss(call(self.model, x), y)

    def record(self, unit: Unit, args: Any, kwargs: Any, output: Any) -> Any:
        """Record a call of a unit: its inputs and the gradient edges of its outputs."""
        if self._pending is None:
            return output
        if unit.formula is not None and unit.outputs:
            a = args[0] if args else next(iter(kwargs.values()))
            if unit.outputs[0].at is None:
                # All samples share this output (positional embeddings). Each sample gets its own
                # view of it, and so its own δ.
                output = unit.outputs[0].first(output, self.samples)
                unit = replace(unit, outputs=(Axis(),))
            if output.requires_grad:
                edges = [get_gradient_edge(output)]
                self._pending.append(PendingRecord(unit, a.detach(), edges, [], []))
            return output
        outputs = [o for o in tree_leaves(output) if isinstance(o, Tensor) and o.requires_grad]
        if outputs and not unit.outputs:
            raise RuntimeError(
                f"{unit.path or 'the model'} ({type(unit.module).__name__}) was not called when "
                "the model was analysed and is called now, so its gradient would be missing. Call "
                "every layer in every forward pass."
            )
        if outputs:
            # The edge, not the tensor: overwriting the output in place (ReLU(inplace=True)) does
            # not change the edge.
            edges = [get_gradient_edge(o) for o in outputs]
            blanks = [o.detach().new_empty(0) for o in outputs]
            inputs, shapes = tree_map(_detached, (args, kwargs)), [o.shape for o in outputs]
            self._pending.append(PendingRecord(unit, inputs, edges, blanks, shapes))
        return output


class _ForwardWrapper(ABC):
    """A replacement for a module's `forward`."""

    def __init__(self, tape: Tape, module: nn.Module) -> None:
        self._tape, self._module = tape, module
        self._own = module.forward
        self._replaced = vars(module).get("forward")  # a custom `forward` set on the instance

    def install(self) -> None:
        self._module.forward = self

    def remove(self) -> None:
        vars(self._module).pop("forward", None)
        if self._replaced is not None:
            self._module.forward = self._replaced

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""


class _Recorder(_ForwardWrapper):
    """Call a unit's own `forward` and record the call on the tape."""

    def __init__(self, tape: Tape, unit: Unit) -> None:
        super().__init__(tape, unit.module)
        self._unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tape.record(self._unit, args, kwargs, self._own(*args, **kwargs))


class _FastTanh(_ForwardWrapper):
    """Use numpy's tanh if it is faster, during the passes of the tape only.

    Other callers may trace or map the module.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_ours = self._tape.passing and self._replaced is None and len(args) == 1 and not kwargs
        if is_ours and pays(args[0], self._tape.samples):
            # numpy cannot read the tensor if the model uses vmap or lazy negation.
            with suppress(RuntimeError):
                return tanh(args[0])
        return self._own(*args, **kwargs)


class WholeTape:
    """A tape for models that cannot be split into units.

    `torch.func` forms every gradient of the whole model.
    """

    rows, cancels = None, False

    def __init__(self, model: nn.Module, loss: Loss, inputs: int, mode: Mode) -> None:
        self.model, self.layout = model, Layout.of(model)
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
        ones = torch.ones(n, device=tree_leaves(x)[0].device)
        names = [f"model.{name}" for name in self.layout.names]
        each, losses = self._layer(((x, y), {}), [ones], names, n)
        formed = {name: each[f"model.{name}"] for name in self.layout.names}
        return PerSample(losses.detach(), [Whole(formed)], self.layout)


class LossOf(nn.Module):
    """A model and its loss as one module: (x, y) -> losses."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Any, y: Any) -> Tensor:
        """Return the losses.  # [sample]"""
        return self.loss(call(self.model, x), y)


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


def _detached(value: Any) -> Any:
    """Detach a tensor; return other values unchanged."""
    return value.detach() if isinstance(value, Tensor) else value
