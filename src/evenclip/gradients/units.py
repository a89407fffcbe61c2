"""The units of a model, and the records of their calls.

A unit is a layer with a formula, or any other module with its own parameters. A record of one call
of a unit holds its inputs and δ, the gradient with respect to its outputs; together they give the
unit's part of each sample's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from evenclip.gradients.anylayer import AnyLayer, Mode
from evenclip.gradients.axis import Axis
from evenclip.gradients.layers import Formed, LayerGradient, recurrent

__all__ = ["PendingRecord", "Record", "Unit"]


@dataclass(frozen=True)
class Unit:
    """A layer with a formula, or another module with its own parameters.

    Attributes:
        path: name of the module in the model, "" for the model itself.
        module: the module.
        formula: gradient(module, a, delta, names), or None to use `torch.func`.
        parameters: the module's name of each trainable parameter -> the model's name.
        inputs: sample axis of each tensor among the inputs, in `tree_flatten` order.
        outputs: sample axis of each output that takes a gradient.
        picks: indices of these outputs among the output tensors.
        mode: how `torch.func` maps the module, if there is no formula.
        numbers: size of the largest input or output for one sample.
    """

    path: str
    module: nn.Module
    formula: Callable[..., LayerGradient] | None
    parameters: dict[str, str]
    inputs: tuple[Axis, ...] = ()
    outputs: tuple[Axis, ...] = ()
    picks: tuple[int, ...] = ()
    mode: Mode = Mode.SHARED
    numbers: int = 0


class Record(NamedTuple):
    """One call of a unit: its inputs, and δ for its outputs."""

    unit: Unit
    inputs: Any  # the layer's input if there is a formula, else the (args, kwargs) of the call
    deltas: tuple[Tensor, ...]  # one for each output that takes a gradient

    @property
    def parameters(self) -> dict[str, str]:
        """The unit's names of its trainable parameters -> the model's names."""
        return self.unit.parameters

    def gradient(self, n: int, names: Collection[str]) -> LayerGradient:
        """Return this call's part of each sample's gradient; `names` are the unit's names."""
        unit = self.unit
        if unit.formula is not None:
            a = at_least_single(unit.inputs[0].first(self.inputs, n))
            delta = at_least_single(unit.outputs[0].first(self.deltas[0], n))
            return unit.formula(unit.module, a, delta, names)
        if recurrent.takes(unit.module, self.inputs[0]):
            return self._recurrent(n, names)
        layer = AnyLayer(unit.module, unit.inputs, unit.outputs, unit.picks, unit.mode)
        return Formed(layer(self.inputs, self.deltas, list(names), n)[0])

    def _recurrent(self, n: int, names: Collection[str]) -> LayerGradient:
        """Return the gradient of a recurrent layer, which has several inputs and outputs."""
        unit = self.unit
        tensors = [leaf for leaf in tree_leaves(self.inputs) if isinstance(leaf, Tensor)]
        x, *state = (
            at_least_single(axis.first(tensor, n))
            for axis, tensor in zip(unit.inputs, tensors, strict=True)
        )
        deltas: list[Tensor | None] = [None] * (3 if isinstance(unit.module, nn.LSTM) else 2)
        for pick, axis, delta in zip(unit.picks, unit.outputs, self.deltas, strict=True):
            deltas[pick] = at_least_single(axis.first(delta, n))
        return recurrent.gradient(unit.module, x, state, deltas, names)  # type: ignore[arg-type]  # `takes` checked it


class PendingRecord(NamedTuple):
    """A call of a unit during the forward pass, before δ is known."""

    unit: Unit
    inputs: Any
    edges: list[Any]  # gradient edges of the outputs, for δ
    blanks: list[Tensor]  # empty tensors with the dtype and device of the outputs
    shapes: list[torch.Size]  # shapes of the outputs

    def with_deltas(self, deltas: Sequence[Tensor | None]) -> Record:
        """Return the finished record; δ = 0 for outputs that the loss does not depend on."""
        if len(deltas) == 1:
            # A single δ is never None: then there is no record.
            return Record(self.unit, self.inputs, tuple(deltas))  # type: ignore[arg-type]
        filled = [
            blank.new_zeros(shape) if delta is None else delta
            for delta, blank, shape in zip(deltas, self.blanks, self.shapes, strict=True)
        ]
        return Record(self.unit, self.inputs, tuple(filled))


def at_least_single(x: Tensor) -> Tensor:
    """Return 16-bit floating-point numbers as float32, which is exact; return others unchanged."""
    return x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x
