"""Split a model into units, and find the ways in which its gradients can be computed.

Where each sample passes by itself, a unit is a layer with a formula that the model calls; all other
parameters are differentiated directly. Where samples pass at once, a unit may also be a module with
own parameters, and the sample axes of its inputs and outputs are needed: the axis whose size
differs between a batch of three samples and a batch of two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from evenclip.gradients.anylayer import Mode
from evenclip.gradients.axis import Axis
from evenclip.gradients.calls import call
from evenclip.gradients.layers import formula
from evenclip.gradients.losses import Loss
from evenclip.gradients.tape import Independence, Tape, WholeTape
from evenclip.gradients.trial import first_sample, first_two, same_draws
from evenclip.gradients.units import Unit

__all__ = ["alone", "at_once", "mapped"]


def mapped(model: nn.Module, loss: Loss, x: Any) -> Iterator[Tape]:
    """Yield the tapes in which each sample passes by itself, fastest first."""
    units = _called(model, tree_map(first_sample, x))
    for chosen in (units, []) if units else ([],):
        yield Tape(model, loss, _with_rest(model, chosen), Independence.CONSTRUCTION)


def at_once(model: nn.Module, loss: Loss, x: Any, independence: Independence) -> Iterator[Tape]:
    """Yield the tapes in which the samples of a block pass at once, fastest first."""
    # Keyed by identity: a module may occur twice in the model.
    units = {id(unit.module): unit for unit in _partition(model, "")}
    located = _located(model, list(units.values()), x)
    if located is not None:
        opaque = [unit for unit in located if unit.formula is None and unit.outputs]
        for mode in Mode if opaque else (Mode.SHARED,):
            chosen = [replace(unit, mode=mode) for unit in located]
            yield Tape(model, loss, chosen, independence)


def alone(model: nn.Module, loss: Loss, x: Any, y: Any, *, maps: bool) -> Iterator[WholeTape]:
    """Yield the tapes in which each sample passes by itself, with its own parameters or in a loop.

    They are for models that neither can be mapped otherwise nor split into units.

    Args:
        model: the model.
        loss: a loss per sample.
        x: inputs of a few samples.
        y: their targets.
        maps: whether passes may be mapped.
    """
    for mode in (Mode.COPIES, Mode.LOOP) if maps else (Mode.LOOP,):
        yield WholeTape(model, loss, len(tree_leaves((x, y))), mode)


def _called(model: nn.Module, x: Any) -> list[Unit]:
    """Return the layers with a formula that the model calls for one sample."""
    first = {id(p): name for name, p in reversed(list(model.named_parameters()))}
    found: dict[int, Unit] = {}
    for path, module in model.named_modules():
        known = None if hasattr(module, "parametrizations") else formula(module)
        own = {name: first[id(p)] for name, p in module.named_parameters() if p.requires_grad}
        if known is not None and own:
            found[id(module)] = Unit(path, module, known, own)
    shapes = _Shapes(model, list(found.values())).of(x)
    pairs = zip(found.values(), shapes, strict=True)
    return [replace(unit, numbers=_numbers(calls, 1)) for unit, calls in pairs if calls]


def _with_rest(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Return the units, and one of all other parameters; a parameter in both is in the rest.

    A parameter in two units stays there: their gradients are added before they are measured.
    """
    own = {name for unit in units for name in unit.parameters.values()}
    rest = {n: n for n, p in model.named_parameters() if p.requires_grad and n not in own}
    return [*units, Unit("", model, None, rest)] if rest else list(units)


def _numbers(calls: Sequence[Any], samples: int) -> int:
    """Return the size of the largest input or output for one sample."""
    shapes = [shape for inputs, outputs, _ in calls for shape in (*inputs, *outputs)]
    return max((math.prod(shape) // samples for shape in shapes), default=0)


def _partition(module: nn.Module, path: str) -> list[Unit]:
    """Return the units in this module: layers with a formula, modules with own parameters."""
    own = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    known = formula(module)
    if not own and known is None and not hasattr(module, "parametrizations"):
        children = module.named_children()
        return list(
            itertools.chain.from_iterable(
                _partition(m, f"{path}.{name}".lstrip(".")) for name, m in children
            )
        )
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    parameters = {name: f"{path}.{name}".lstrip(".") for name in names}
    return [Unit(path, module, known, parameters)] if names else []


def _located(model: nn.Module, units: Sequence[Unit], x: Any) -> list[Unit] | None:
    """Return the units with their sample axes and with one name per parameter.

    Return None if the axes cannot be determined.
    """
    three, two = _Shapes(model, units).of(x), _Shapes(model, units).of(tree_map(first_two, x))
    located = []
    for unit, calls, fewer in zip(units, three, two, strict=True):
        seen = {_located_call(a, b) for a, b in zip(calls, fewer, strict=False)}
        if len(calls) != len(fewer) or None in seen or len(seen) > 1:
            return None  # the calls differ from each other
        if not seen:
            located.append(unit)  # without axes: the tape raises if the unit is called later
        for inputs, outputs, picks in filter(None, seen):
            folded = any(axis.each > 1 for axis in inputs + outputs)
            if unit.formula is None and (folded or any(axis.at is None for axis in outputs)):
                return None
            if unit.formula is not None and (not inputs or len(outputs) != 1):
                return None
            numbers = _numbers(calls, 3)
            located.append(
                replace(unit, inputs=inputs, outputs=outputs, picks=picks, numbers=numbers)
            )
    return _named_once(model, located)


def _located_call(
    three: Any, two: Any
) -> tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[int, ...]] | None:
    """Return the axes of a call's inputs and outputs, from its shapes for 3 and for 2 samples."""
    (inputs3, outputs3, picks), (inputs2, outputs2, _) = three, two
    if len(inputs3) != len(inputs2) or len(outputs3) != len(outputs2):
        return None
    inputs = [Axis.between(a, b) for a, b in zip(inputs3, inputs2, strict=True)]
    outputs = [Axis.between(a, b) for a, b in zip(outputs3, outputs2, strict=True)]
    if None in inputs or None in outputs:
        return None
    return tuple(a for a in inputs if a), tuple(a for a in outputs if a), picks


def _named_once(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Name each shared parameter by the first of its names, the one `named_parameters` lists."""
    first = {id(p): name for name, p in model.named_parameters()}
    every = dict(model.named_parameters(remove_duplicate=False))
    return [
        replace(
            unit, parameters={own: first[id(every[full])] for own, full in unit.parameters.items()}
        )
        for unit in units
    ]


class _Shapes:
    """The shapes of each unit's inputs and outputs, call by call."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model, self._units = model, units
        self._calls: list[list[Any]] = [[] for _ in units]

    def of(self, x: Any) -> list[list[Any]]:
        """Run the model on `x` and return, for each unit, a list of its calls.

        A call is (shapes of inputs, shapes of outputs with a gradient, indices of these outputs).
        """
        handles = [
            unit.module.register_forward_hook(_ShapeHook(calls), with_kwargs=True)
            for unit, calls in zip(self._units, self._calls, strict=True)
        ]
        try:
            same_draws()
            with torch.enable_grad():
                call(self._model, x)
        finally:
            for handle in handles:
                handle.remove()
        return self._calls


class _ShapeHook:
    """A forward hook that records shapes."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outputs = [o for o in tree_leaves(output) if isinstance(o, Tensor)]
        picks = tuple(i for i, o in enumerate(outputs) if o.requires_grad)
        inputs = [leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._calls.append((inputs, [outputs[i].shape for i in picks], picks))
