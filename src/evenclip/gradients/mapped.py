"""Passes of one sample, mapped over a batch: the model is never given a second sample.

A sample's forward and backward pass is a function of that sample and of the parameters: the sample
enters the model as a batch of one. `torch.func.vmap` maps it over the batch, so its gradient cannot
depend on another sample, for any code of the model. (Code with a mapping rule of its own, an
`autograd.Function` with `vmap` or a custom operator, would get the whole batch; it is refused here,
see `evenclip.gradients.foreign`.)

Inside, a zero is added to the output of every layer with a formula: a tap. The derivative with
respect to the tap is δ, which with the layer's input gives the layer's part of the gradient, as in
a batched pass. Parameters of other modules are differentiated directly, so their gradients are
formed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from evenclip.gradients.anylayer import call_with
from evenclip.gradients.axis import Axis
from evenclip.gradients.calls import arguments, call
from evenclip.gradients.foreign import no_batch_rules
from evenclip.gradients.layout import Layout
from evenclip.gradients.losses import Loss
from evenclip.gradients.per_sample import PerSample, Whole
from evenclip.gradients.trial import first_sample
from evenclip.gradients.units import Record, Unit

__all__ = ["MappedPass"]

Shape = tuple[tuple[int, ...], torch.dtype]


class MappedPass:
    """One forward and one backward pass of each sample of a batch.

    Args:
        model: the model.
        loss: a loss per sample; it is given batches of one.
        units: layers with a formula, and other modules with parameters.
    """

    def __init__(self, model: nn.Module, loss: Loss, units: Sequence[Unit]) -> None:
        self._model, self._loss = model, loss
        self._units = [unit for unit in units if unit.formula is not None]
        self._formed = [
            name for unit in units if unit.formula is None for name in unit.parameters.values()
        ]
        self._layout = Layout.of(model)
        self._taps: list[Tensor] | None = None  # of the running pass; None: shapes are recorded
        self._inputs: list[Tensor] | None = None  # of the calls in the running pass; None: no pass
        self._called: list[Unit] = []  # in the running or the last pass
        self._shapes: list[Shape] = []
        self._known: dict[Any, list[Shape]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Temporarily replace each unit's `forward` with one that has a tap."""
        taps = [_Tap(self, unit) for unit in self._units]
        try:
            for tap in taps:
                tap.install()
            yield
        finally:
            for tap in reversed(taps):
                tap.remove()

    def __call__(self, x: Any, y: Any, *, may_be_quick: bool) -> PerSample:
        """Return each sample's loss and gradient."""
        taps = self._taps_for(x, y)
        own = dict(self._model.named_parameters())
        formed = {name: own[name].detach() for name in self._formed}
        losses, inputs, deltas, gradients = self._map(partial(self._passed, taps, formed), x, y)
        records: list[Record | Whole] = [
            _record(*call) for call in zip(self._called, inputs, deltas, strict=True)
        ]
        if gradients:
            records.append(Whole(gradients))
        return PerSample(losses.detach(), records, self._layout, may_be_quick=may_be_quick)

    def output(self, x: Any) -> Any:
        """Return the model's output for these samples."""
        return self._map(self._output, x)

    def _map(self, function: Any, *given: Any) -> Any:
        """Map a function of one sample over the batch."""
        dims = tuple(tree_map(_sample_axis, value) for value in given)
        with torch.no_grad(), warnings.catch_warnings():
            # torch maps some operations with an internal loop. This is slow but correct.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            with no_batch_rules():
                return vmap(function, in_dims=dims, randomness="different")(*given)

    def _passed(
        self, taps: list[Tensor], formed: dict[str, Tensor], x: Any, y: Any
    ) -> tuple[Tensor, list[Tensor], list[Tensor], dict[str, Tensor]]:
        """Return loss, inputs and δ of the units' calls, and formed gradients, of one sample."""
        forward = partial(self._forward, *tree_map(_batch_of_one, (x, y)))
        loss, pull, inputs = vjp(forward, taps, formed, has_aux=True)  # type: ignore[misc]  # typed for has_aux=False
        deltas, gradients = pull(torch.ones_like(loss))
        return loss, inputs, deltas, gradients

    def _forward(
        self, x: Any, y: Any, taps: list[Tensor], formed: dict[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of a batch of one, and the inputs of the units' calls."""
        self._taps, self._inputs, self._called = taps, [], []
        try:
            output = call_with(self._model, formed, *arguments(x))
            return self._loss(output, y).reshape(()), self._inputs
        finally:
            self._taps = self._inputs = None

    def _output(self, x: Any) -> Any:
        return tree_map(_without_batch, call(self._model, tree_map(_batch_of_one, x)))

    def _taps_for(self, x: Any, y: Any) -> list[Tensor]:
        """Return a zero for every call of a unit, in the shape of its output for one sample.

        The shapes are recorded once for each shape of a sample.
        """
        leaves = [leaf for leaf in tree_leaves((x, y)) if isinstance(leaf, Tensor)]
        # int() of a size that is symbolic while a step is traced; that of the samples is left out.
        shapes = [tuple(int(size) for size in leaf.shape[1:]) for leaf in leaves]
        key = (self._model.training, *shapes, *(leaf.dtype for leaf in leaves))
        if key not in self._known:
            self._shapes = []
            with torch.random.fork_rng(devices=[]):
                self._map(self._recorded, *tree_map(first_sample, (x, y)))
            self._known[key] = self._shapes
        device = self._layout.blank.device
        return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in self._known[key]]

    def _recorded(self, x: Any, y: Any) -> Tensor:
        """Record the shapes of the units' outputs."""
        del y
        self._inputs, self._called = [], []
        try:
            call(self._model, tree_map(_batch_of_one, x))
        finally:
            self._inputs = None
        return self._layout.blank.new_zeros(())

    def tap(self, unit: Unit, args: Any, kwargs: Any, output: Any) -> Any:
        """Record a call of a unit, and add its tap to the output."""
        if self._inputs is None:
            return output
        at, a = len(self._called), args[0] if args else next(iter(kwargs.values()))
        self._called.append(unit)
        if self._taps is None:
            self._shapes.append((tuple(int(size) for size in output.shape), output.dtype))
            return output
        if at == len(self._taps) or self._taps[at].shape != output.shape:
            raise RuntimeError(
                f"{unit.path or 'the model'} ({type(unit.module).__name__}) was called differently "
                "than in the first pass of samples of this shape, so its gradient would be wrong. "
                "Call every layer in every forward pass."
            )
        self._inputs.append(a)
        return output + self._taps[at]


class _Tap:
    """A replacement for a unit's `forward`, which adds a tap to its output."""

    def __init__(self, passes: MappedPass, unit: Unit) -> None:
        self._passes, self._unit = passes, unit
        self._own = unit.module.forward
        self.replaced = vars(unit.module).get("forward")  # a custom `forward` set on the instance

    def install(self) -> None:
        self._unit.module.forward = self

    def remove(self) -> None:
        vars(self._unit.module).pop("forward", None)
        if self.replaced is not None:
            self._unit.module.forward = self.replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._passes.tap(self._unit, args, kwargs, self._own(*args, **kwargs))


def _record(unit: Unit, a: Tensor, delta: Tensor) -> Record:
    """Return the record of a call; its batch of one, if it has that axis, is left out."""
    if a.ndim > 2 and delta.ndim > 2 and a.shape[1] == delta.shape[1] == 1:
        a, delta = a.squeeze(1), delta.squeeze(1)
    return Record(replace(unit, inputs=(Axis(),), outputs=(Axis(),)), a, (delta,))


def _sample_axis(value: Any) -> int | None:
    """Return the axis that a value is mapped over; None: every sample gets the same."""
    return 0 if isinstance(value, Tensor) and value.ndim else None


def _batch_of_one(value: Any) -> Any:
    """Return one sample as a batch of one; return other values unchanged."""
    return value.unsqueeze(0) if isinstance(value, Tensor) else value


def _without_batch(value: Any) -> Any:
    """Return the one sample of a batch; return other values unchanged."""
    return value.squeeze(0) if isinstance(value, Tensor) and value.ndim else value
