"""The passes through the model as one compiled graph.

Forward and backward pass are traced once for a shape of batch into one graph of tensor operations, and `torch.compile`
makes that fast. For tracing, the backward pass has to be a function: zeros ("taps") are added to every unit's output,
and δ is the derivative with respect to the taps. Norms and weighted sums are taken from what comes out as ever:
compiled apart from each other they would round differently, and a norm must not be below what is added.

Everything falls back to the plain tape, without a word, where there is no compiler or the model cannot be traced.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from evenclip.gradients.anylayer import call_with
from evenclip.gradients.tape import LossOf, PerSample, Record, Tape, Unit, detached

__all__ = ["CompiledTape"]

_log = logging.getLogger(__name__)


class CompiledTape:
    """A tape whose passes are compiled, once for each shape of batch."""

    def __init__(self, tape: Tape) -> None:
        self._plain = tape
        self.model, self.layout = tape.model, tape.layout
        self._graphs: dict[Any, _Graph | None] = {}

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """The plain tape listens, for what cannot be compiled."""
        with self._plain.listening():
            yield self

    def __call__(self, x: Any, y: Any) -> PerSample:
        """One forward and one backward pass over these samples."""
        shape = tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves((x, y)))
        if shape not in self._graphs:
            self._graphs[shape] = self._compiled(x, y)
        graph = self._graphs[shape]
        return self._plain(x, y) if graph is None else graph(x, y)

    def _compiled(self, x: Any, y: Any) -> _Graph | None:
        device = self.layout.blank.device
        try:
            # Trying it out must not use up the dropout masks of the step under way.
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                graph = _Graph(self._plain, x, y)
                graph(x, y)
        except Exception as error:  # whatever the compiler stumbles over, the plain tape does the same work
            _log.debug("not compiled: %s", error)
            return None
        return graph


class _Graph:
    """The graph for one shape of batch."""

    def __init__(self, tape: Tape, x: Any, y: Any) -> None:
        self._tape = tape
        first = tape(x, y)
        self._records = [record for record in first.records if isinstance(record, Record)]
        self._template = [_Template(record) for record in self._records]
        with torch.no_grad():
            self._run = torch.compile(make_fx(lambda p, x, y: self._passes(p, x, y))(self._parameters(), x, y))

    def __call__(self, x: Any, y: Any) -> PerSample:
        with torch.no_grad():
            losses, flat = self._run(self._parameters(), x, y)
        return PerSample(losses, self._filled(flat), self._tape.layout)

    def _parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._tape.model.named_parameters()}

    def _passes(self, parameters: dict[str, Tensor], x: Any, y: Any) -> tuple[Tensor, list[Tensor]]:
        """Losses, and the tensors of all records: inputs first, then δ."""
        taps = [torch.zeros_like(delta) for record in self._records for delta in record.deltas]
        run = partial(self._tapped, parameters, x, y)
        losses, pull, inputs = vjp(run, taps, has_aux=True)  # type: ignore[misc]  # typed for has_aux=False
        (deltas,) = pull(torch.ones_like(losses))
        return losses, [*inputs, *deltas]

    def _tapped(self, parameters: dict[str, Tensor], x: Any, y: Any, taps: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The losses as a function of the taps, and the tensors that went into the units."""
        whole = LossOf(self._tape.model, self._tape.loss)
        listener = _Taps(self._template, iter(taps), len(tree_leaves(y)[0]))
        handles = [u.module.register_forward_hook(partial(listener, u), with_kwargs=True) for u in self._tape.units]
        try:
            losses = call_with(whole, {f"model.{name}": p for name, p in parameters.items()}, (x, y))
        finally:
            for handle in handles:
                handle.remove()
        return losses, listener.inputs

    def _filled(self, flat: Sequence[Tensor]) -> list[Record]:
        """Records with these tensors in them: all inputs first, then all δ."""
        inputs = iter(flat[: sum(t.inputs for t in self._template)])
        deltas = iter(flat[sum(t.inputs for t in self._template) :])
        return [template.record(inputs, deltas) for template in self._template]


class _Template:
    """A record without its tensors."""

    def __init__(self, record: Record) -> None:
        leaves, self._spec = tree_flatten(record.inputs)
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self.unit: Unit = record.unit
        self.inputs, self.outputs = sum(self._is_tensor), len(record.deltas)

    def record(self, inputs: Iterator[Tensor], deltas: Iterator[Tensor]) -> Record:
        """The record with the next tensors of each."""
        pairs = zip(self._constants, self._is_tensor, strict=True)
        leaves = [next(inputs) if is_tensor else constant for constant, is_tensor in pairs]
        spec: TreeSpec = self._spec
        return Record(self.unit, tree_unflatten(leaves, spec), tuple(next(deltas) for _ in range(self.outputs)))


class _Taps:
    """The forward hook of all units: keeps inputs, adds the next taps to the outputs."""

    def __init__(self, templates: Sequence[_Template], taps: Iterator[Tensor], n: int) -> None:
        self._templates, self._taps, self._n = iter(templates), taps, n
        self.inputs: list[Tensor] = []

    def __call__(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        template = next(self._templates)
        if template.unit.module is not unit.module:
            raise RuntimeError(f"{unit.path} was called out of turn")
        self.inputs += [detached(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if unit.formula is not None and unit.outputs and unit.outputs[0].at is None:
            output = unit.outputs[0].first(output, self._n)
        leaves, spec = tree_flatten(output)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for pick in unit.picks:
            leaves[tensors[pick]] = leaves[tensors[pick]] + next(self._taps)
        return tree_unflatten(leaves, spec)
