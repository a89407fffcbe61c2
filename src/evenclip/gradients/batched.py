"""Passes of a batch through the model, all samples at once, and their per-sample gradients.

The forward pass records (unit, inputs, outputs) for each unit: a layer with a formula, or any other
module with its own parameters. One `torch.autograd.grad(losses.sum(), outputs)` gives δ, the
gradient with respect to every output. No sample's loss depends on another sample's row, so row i of
δ belongs to sample i. The result is a `PerSample`.

That holds if the samples are independent: by the types of the layers
(`evenclip.gradients.known_layers`), or as far as tests show (`evenclip.gradients.mixing`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from evenclip.gradients.axis import Axis
from evenclip.gradients.calls import call, count
from evenclip.gradients.layout import Layout
from evenclip.gradients.losses import Loss
from evenclip.gradients.per_sample import PerSample
from evenclip.gradients.tanh import pays, tanh
from evenclip.gradients.units import PendingRecord, Unit

__all__ = ["BatchedPass"]


class BatchedPass:
    """One forward and one backward pass of a batch.

    Attributes:
        samples: number of samples in the current or the last pass.
        is_passing: whether a forward or backward pass is running.
    """

    def __init__(self, model: nn.Module, loss: Loss, units: Sequence[Unit]) -> None:
        self._model, self._loss, self._units = model, loss, tuple(units)
        self._layout = Layout.of(model)
        self._pending: list[PendingRecord] | None = None  # None: do not record
        self.samples, self.is_passing = 0, False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Temporarily replace each module's `forward` with a recorder.

        Replacing `forward` is faster than a hook.
        """
        tanhs = [module for module in self._model.modules() if type(module) is nn.Tanh]
        wrappers = [
            *(_Recorder(self, unit) for unit in self._units),
            *(_FastTanh(self, module) for module in tanhs),
        ]
        try:
            for wrapper in wrappers:
                wrapper.install()
            yield
        finally:
            for wrapper in reversed(wrappers):
                wrapper.remove()

    def __call__(self, x: Any, y: Any, *, may_be_quick: bool) -> PerSample:
        """Return each sample's loss and gradient."""
        self.samples, self._pending, self.is_passing = count(x), [], True
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
            self._pending, self.is_passing = None, False
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
        return PerSample(losses.detach(), records, self._layout, may_be_quick=may_be_quick)

    def output(self, x: Any) -> Any:
        """Return the model's output for these samples."""
        self.samples, self.is_passing = count(x), True
        try:
            return call(self._model, x)
        finally:
            self.is_passing = False

    def _losses(self, x: Any, y: Any) -> Tensor:
        if torch.is_grad_enabled():
            return self._loss(call(self._model, x), y)
        with torch.enable_grad():
            return self._loss(call(self._model, x), y)

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

    def __init__(self, passes: BatchedPass, module: nn.Module) -> None:
        self._passes, self._module = passes, module
        self._own = module.forward
        self.replaced = vars(module).get("forward")  # a custom `forward` set on the instance

    def install(self) -> None:
        self._module.forward = self

    def remove(self) -> None:
        vars(self._module).pop("forward", None)
        if self.replaced is not None:
            self._module.forward = self.replaced

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""


class _Recorder(_ForwardWrapper):
    """Call a unit's own `forward` and record the call."""

    def __init__(self, passes: BatchedPass, unit: Unit) -> None:
        super().__init__(passes, unit.module)
        self._unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._passes.record(self._unit, args, kwargs, self._own(*args, **kwargs))


class _FastTanh(_ForwardWrapper):
    """Use numpy's tanh if it is faster, during recorded passes only.

    Other callers may trace or map the module.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_ours = self._passes.is_passing and self.replaced is None
        if is_ours and len(args) == 1 and not kwargs and pays(args[0], self._passes.samples):
            # numpy cannot read the tensor if the model uses vmap or lazy negation.
            with suppress(RuntimeError):
                return tanh(args[0])
        return self._own(*args, **kwargs)


def _detached(value: Any) -> Any:
    """Detach a tensor; return other values unchanged."""
    return value.detach() if isinstance(value, Tensor) else value
