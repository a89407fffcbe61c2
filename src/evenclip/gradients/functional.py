"""The passes through the model as a function of tensors, which can be traced, compiled and mapped over runs.

The backward pass has to be a function for that: zeros ("taps") are added to every unit's output, and δ is the
derivative with respect to the taps. Parameters are whatever tensors stand in the model's places for them while this is
called (`call_with`), so that one model serves many runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import vjp
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from evenclip.gradients.axis import Axis
from evenclip.gradients.tape import LossOf, PerSample, Record, Tape, Unit, count, detached

__all__ = ["FunctionalTape"]


class FunctionalTape:
    """What `tape` does, without leaving a trace on the model. It never looks at a number."""

    def __init__(self, tape: Tape, x: Any, y: Any) -> None:
        self.model, self.layout = tape.model, tape.layout
        self._units, self.loss = tape.units, tape.loss
        self._whole = LossOf(tape.model, tape.loss)
        noting = _Noting(count(x))
        with torch.no_grad():
            self._run(noting, x, y)
        self._calls = noting.calls

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Nothing to switch on."""
        yield self

    def __call__(self, x: Any, y: Any, group: Tensor | None = None) -> PerSample:
        """One forward and one backward pass over these samples."""
        del group
        first = tree_leaves(x)[0]
        taps = [tap.zeros(first) for call in self._calls for tap in call.taps]
        losses, pull, inputs = vjp(partial(self._tapped, x, y), taps, has_aux=True)  # type: ignore[misc]  # typed for has_aux=False
        (deltas,) = pull(torch.ones_like(losses))
        tensors, signals = iter(inputs), iter(deltas)
        return PerSample(losses, [call.record(tensors, signals) for call in self._calls], self.layout)

    def _tapped(self, x: Any, y: Any, taps: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The losses as a function of the taps, and the tensors that went into the units."""
        adding = _Adding(self._calls, taps, tree_leaves(x)[0].shape[0])
        return self._run(adding, x, y), adding.inputs

    def _run(self, listener: Any, x: Any, y: Any) -> Tensor:
        handles = [u.module.register_forward_hook(partial(listener, u), with_kwargs=True) for u in self._units]
        try:
            losses: Tensor = self._whole(x, y)
        finally:
            for handle in handles:
                handle.remove()
        return losses


class _Tap(NamedTuple):
    """An output of a unit: its shape for no samples, where they go, and what it is made of."""

    shape: tuple[int, ...]
    axis: Axis
    dtype: torch.dtype

    def zeros(self, x: Tensor) -> Tensor:
        """Zeros of this output's shape, for the samples of x; made by x, which knows whether its size is a symbol."""
        shape = list(self.shape)
        if self.axis.at is not None:
            shape[self.axis.at] = x.shape[0] * self.axis.each
        return x.new_zeros(shape, dtype=self.dtype)


class _Call(NamedTuple):
    """A record without its tensors."""

    unit: Unit
    spec: TreeSpec
    constants: list[Any]  # what is no tensor among the inputs
    is_tensor: list[bool]
    taps: list[_Tap]

    def record(self, inputs: Iterator[Tensor], deltas: Iterator[Tensor]) -> Record:
        """The record with the next tensors of each."""
        pairs = zip(self.constants, self.is_tensor, strict=True)
        leaves = [next(inputs) if is_tensor else constant for constant, is_tensor in pairs]
        return Record(self.unit, tree_unflatten(leaves, self.spec), tuple(next(deltas) for _ in self.taps))


def _inputs(unit: Unit, args: Any, kwargs: Any) -> Any:
    """What a record keeps of a call."""
    if unit.formula is None:
        return args, kwargs
    return args[0] if args else next(iter(kwargs.values()))


class _Noting:
    """The forward hook of all units that notes what is called, in which order, and with what shapes."""

    def __init__(self, n: int) -> None:
        self._n, self.calls = n, list[_Call]()

    def __call__(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        del module
        leaves, spec = tree_flatten(_inputs(unit, args, kwargs))
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        output, unit = _each_its_own(unit, output, self._n)
        found = [o for o in tree_leaves(output) if isinstance(o, Tensor)]
        picks = zip(unit.picks, unit.outputs, strict=True)
        taps = [_Tap(tuple(found[pick].shape), axis, found[pick].dtype) for pick, axis in picks]
        self.calls.append(_Call(unit, spec, constants, is_tensor, taps))
        return output


class _Adding:
    """The forward hook of all units that keeps inputs and adds the next taps to the outputs."""

    def __init__(self, calls: Sequence[_Call], taps: Sequence[Tensor], n: int) -> None:
        self._calls, self._taps, self._n = iter(calls), iter(taps), n
        self.inputs: list[Tensor] = []

    def __call__(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = next(self._calls)
        if call.unit.module is not module:
            raise RuntimeError(f"{unit.path} was called out of turn")
        kept = tree_leaves(_inputs(unit, args, kwargs))
        self.inputs += [detached(leaf) for leaf in kept if isinstance(leaf, Tensor)]
        output, unit = _each_its_own(unit, output, self._n)
        leaves, spec = tree_flatten(output)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for pick in unit.picks:
            leaves[tensors[pick]] = leaves[tensors[pick]] + next(self._taps)
        return tree_unflatten(leaves, spec)


def _each_its_own(unit: Unit, output: Any, n: int) -> tuple[Any, Unit]:
    """Where all samples share an output (a table of positions), each gets its own view of it, and so its own δ."""
    if unit.formula is not None and unit.outputs and unit.outputs[0].at is None:
        return unit.outputs[0].first(output, n), replace(unit, outputs=(Axis(),))
    return output, unit
