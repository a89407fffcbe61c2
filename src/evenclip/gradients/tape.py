"""One forward pass, one backward pass, every sample's gradient.

The forward pass records (unit, inputs, outputs) for each unit: a layer with a formula, or any other
module that has parameters of its own. One `torch.autograd.grad(losses.sum(), outputs)` gives δ, the
gradient with respect to every output; no sample's loss reaches another sample's row, so row i of δ
belongs to sample i. What comes back is a value, `PerSample`, from which norms and weighted sums are
taken any number of times:

    norms()            ‖g_i‖               what the rule clips by
    weighted_sum(w)    Σ_i w_i g_i         what is trained on; with indicators as weights, g_B and the group gradients

so what is audited is what was trained. On a CPU a batch with large activations passes in blocks
that fit the cache, and what a layer can form its gradients of (a convolution's input and δ, which
are far larger) is let go with its block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from evenclip.gradients.anylayer import AnyLayer, Mode
from evenclip.gradients.axis import Axis
from evenclip.gradients.layers import Formed, LayerGradient, recurrent
from evenclip.gradients.layers.linear import OnePosition, operands, quick_square_norms
from evenclip.gradients.losses import Loss
from evenclip.gradients.tanh import pays, tanh

__all__ = [
    "AnyTape",
    "Layout",
    "LossOf",
    "PerSample",
    "Record",
    "Tape",
    "Unit",
    "WholeTape",
    "call",
    "count",
    "detached",
]


# Numbers that go into or come out of a layer for a block of samples, at the most: 8 MiB in float32.
_BLOCK = 2**21
# So many times the parameters are the numbers that go through all layers for a block, at the least.
_WORTH = 4
_ALL = 2**62


class AnyTape(Protocol):
    """What a step needs of a tape: passes through the model, while listening."""

    model: nn.Module
    layout: Layout

    def listening(self) -> AbstractContextManager[Any]:
        """Switched on, and off again."""

    def __call__(self, x: Any, y: Any, group: Tensor | None = None) -> PerSample:
        """Every sample's loss and gradient; the group matters to few."""


def call(model: nn.Module, x: Any) -> Any:
    """The model's output: x is its one input, a tuple of its inputs, or a dict of them by name."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def count(x: Any) -> int:
    """Number of samples in an input; a symbol while a step is traced, so it is not made an int."""
    found: int = (x if isinstance(x, Tensor) else tree_leaves(x)[0]).shape[0]
    return found


@dataclass(frozen=True)
class Layout:
    """The trainable parameters of a model, side by side in one vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    blank: Tensor  # empty, of the parameters' dtype and device

    @staticmethod
    def of(model: nn.Module) -> Layout:
        """All parameters that want a gradient, in the model's order, each once."""
        found = {name: p for name, p in model.named_parameters() if p.requires_grad}
        blank = next(iter(found.values())).detach().new_empty(0) if found else torch.empty(0)
        return Layout(tuple(found), tuple(p.shape for p in found.values()), blank)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Numbers in each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """Numbers in all of them."""
        return sum(self.sizes)

    @cached_property
    def roundoff(self) -> float:
        """The unit roundoff of the parameters."""
        return torch.finfo(self.blank.dtype).eps / 2

    @property
    def rounding_up(self) -> float:
        """What makes a norm an upper bound on what the sum adds: the roundings of weight · input ·
        δ, sixteen unit roundoffs.

        Where somebody has allowed products of fewer bits (TF32), it is sixteen of theirs.
        """
        return 1 + 16 * max(self.roundoff, operands(self.blank))

    def join(self, parts: dict[str, Tensor]) -> Tensor:
        """One vector; a parameter that no sample touched is 0.  # [size]"""
        if len(parts) == len(self.names):
            return (
                torch.cat([parts[name].reshape(-1) for name in self.names]) if parts else self.blank
            )
        pieces = [
            parts[name].reshape(-1) if name in parts else self.blank.new_zeros(size)
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return torch.cat(pieces) if pieces else self.blank

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of the vector, parameter by parameter."""
        pieces = torch.split(vector, list(self.sizes))
        return {name: v.view(s) for name, s, v in zip(self.names, self.shapes, pieces, strict=True)}


@dataclass(frozen=True)
class Unit:
    """A module whose gradients are taken as one: a layer with a formula, or any module with
    parameters of its own.

    Attributes:
        path: its name in the model, "" for the model itself.
        module: the module.
        formula: its gradient(module, a, delta, names), or None: through `torch.func` then.
        parameters: its own name of each trainable parameter -> the model's name of it.
        inputs: where the samples lie in each tensor among its inputs, in `tree_flatten` order.
        outputs: the same for each output that takes a gradient.
        picks: which of the tensors among its outputs those are.
        mode: how `torch.func` maps it, where there is no formula.
        numbers: that go in or come out for one sample, at the most.
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
    """One call of a unit: what went in, and δ for what came out, both with the samples first."""

    unit: Unit
    inputs: Any  # the layer's input where there is a formula, else the (args, kwargs) of the call
    deltas: tuple[Tensor, ...]  # one for each output that takes a gradient

    @property
    def parameters(self) -> dict[str, str]:
        """The unit's own names of its trainable parameters -> the model's."""
        return self.unit.parameters

    def gradient(self, n: int, names: Collection[str]) -> LayerGradient:
        """This call's part of every sample's gradient, for those parameters (the unit's own names)."""
        unit = self.unit
        if unit.formula is not None:
            a, delta = (
                unit.inputs[0].first(self.inputs, n),
                unit.outputs[0].first(self.deltas[0], n),
            )
            return unit.formula(unit.module, a, delta, names)
        if recurrent.takes(unit.module, self.inputs[0]):
            return self._recurrent(n, names)
        layer = AnyLayer(unit.module, unit.inputs, unit.outputs, unit.picks, unit.mode)
        return Formed(layer(self.inputs, self.deltas, list(names), n)[0])

    def _recurrent(self, n: int, names: Collection[str]) -> LayerGradient:
        """Of a layer with several inputs and outputs that has a formula all the same."""
        unit, tensors = (
            self.unit,
            [leaf for leaf in tree_leaves(self.inputs) if isinstance(leaf, Tensor)],
        )
        x, *state = (
            axis.first(tensor, n) for axis, tensor in zip(unit.inputs, tensors, strict=True)
        )
        deltas: list[Tensor | None] = [None] * (3 if isinstance(unit.module, nn.LSTM) else 2)
        for pick, axis, delta in zip(unit.picks, unit.outputs, self.deltas, strict=True):
            deltas[pick] = axis.first(delta, n)
        return recurrent.gradient(unit.module, x, state, deltas, names)  # type: ignore[arg-type]  # `takes` has looked


@dataclass(frozen=True)
class Whole:
    """Every sample's gradient of the whole model or of one call of a layer, formed."""

    each: dict[str, Tensor]  # the model's name -> [sample, *parameter]

    @property
    def parameters(self) -> dict[str, str]:
        """The model's names, twice."""
        return {name: name for name in self.each}

    def gradient(self, n: int, names: Collection[str]) -> LayerGradient:
        """The formed gradients of those parameters."""
        del n
        return Formed({name: self.each[name] for name in names})


class Part(NamedTuple):
    """A layer's gradients with the model's names for its parameters."""

    gradient: LayerGradient
    names: dict[str, str]


class PerSample:
    """Every sample's loss and gradient, the gradients mostly unformed. Private: for the step and
    for auditors.

    Attributes:
        losses: ℓ_i.  # [sample]
        layout: the parameters, in the order of every vector that is returned.
    """

    def __init__(self, losses: Tensor, records: Sequence[Record | Whole], layout: Layout) -> None:
        self.losses, self.layout, self.records = losses, layout, tuple(records)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The layers' gradients; a parameter that several calls use is formed and added up first,
        for its cross terms.
        """
        n, uses = self.losses.shape[0], _uses(self.records)
        if max(uses.values(), default=1) == 1:
            return tuple([Part(r.gradient(n, r.parameters), r.parameters) for r in self.records])
        parts, shared = [], dict[str, Tensor]()
        for record in self.records:
            names = record.parameters
            alone = [own for own, full in names.items() if uses[full] == 1]
            again = [own for own, full in names.items() if uses[full] > 1]
            if alone:
                parts.append(Part(record.gradient(n, alone), names))
            if again:
                for own, each in record.gradient(n, again).per_sample().items():
                    full = names[own]
                    shared[full] = shared[full] + each if full in shared else each
        parts.append(Part(Formed(shared), {name: name for name in shared}))
        return tuple(parts)

    def norms(self, *, quick: bool = False) -> Tensor:
        """‖g_i‖ over all trainable parameters, rounded up.  # [sample], float64

        Args:
            quick: in fewer operations, where that is possible: longer by a hair, and infinite where
                float32 overflows.
        """
        if not self.parts:
            return torch.zeros_like(self.losses, dtype=torch.float64)
        layers = [part.gradient for part in self.parts]
        # For one layer it would not be quicker. How many there are is asked of the model, not of
        # what this batch used.
        quick = quick and len(self.layout.names) > 2
        together = [g for g in layers if isinstance(g, OnePosition) and g.is_quick] if quick else []
        squares = [quick_square_norms(together)] if together else []
        if len(together) < len(layers):
            squares += [g.square_norms() for g in layers if g not in together]
        total = squares[0] if len(squares) == 1 else torch.stack(squares).sum(dim=0)
        return total.sqrt_().mul_(self.layout.rounding_up)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_i weights_i · g_i as one vector.  weights: [sample] -> [parameter]"""
        weights = weights.to(self.layout.blank.dtype)
        total: dict[str, Tensor] = {}
        for gradient, names in self.parts:
            for own, summed in gradient.weighted_sum(weights).items():
                total[names[own]] = summed
        return self.layout.join(total)

    def per_sample(self) -> Tensor:
        """Every gradient, formed. For tests and small diagnostics.  # [sample, parameter]"""
        eye = torch.eye(len(self.losses), dtype=torch.float64, device=self.losses.device)
        return torch.stack([self.weighted_sum(one) for one in eye])

    def masked(self, keep: Tensor) -> PerSample:
        """The same with the gradients of the samples that are not kept set to exactly 0 (a NaN
        times 0 is not).  keep: [sample]
        """
        found = PerSample(torch.where(keep, self.losses, 0.0), (), self.layout)
        found.parts = tuple(Part(part.gradient.masked(keep), part.names) for part in self.parts)
        return found

    def formed(self) -> PerSample:
        """The same; what the layers have formed their gradients of is let go."""
        found = PerSample(self.losses, (), self.layout)
        found.parts = self.parts
        return found


class _Blocks(PerSample):
    """Blocks of samples, one after the other."""

    def __init__(self, blocks: Sequence[PerSample], layout: Layout) -> None:
        super().__init__(torch.cat([block.losses for block in blocks]), (), layout)
        self._blocks, self._sizes = tuple(blocks), [len(block.losses) for block in blocks]

    def norms(self, *, quick: bool = False) -> Tensor:
        """As of each."""
        return torch.cat([block.norms(quick=quick) for block in self._blocks])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """One sum over all of them."""
        first, *others = zip(self._blocks, torch.split(weights, self._sizes), strict=True)
        total = first[0].weighted_sum(first[1])
        for block, some in others:
            total += block.weighted_sum(some)
        return total

    def masked(self, keep: Tensor) -> PerSample:
        """Each with what is kept of it."""
        pairs = zip(self._blocks, torch.split(keep, self._sizes), strict=True)
        return _Blocks([block.masked(some) for block, some in pairs], self.layout)


def _uses(records: Sequence[Record | Whole]) -> dict[str, int]:
    """How often each parameter (the model's name) was used."""
    uses: dict[str, int] = {}
    for record in records:
        for full in record.parameters.values():
            uses[full] = uses.get(full, 0) + 1
    return uses


class _Heard(NamedTuple):
    """A call of a unit during the forward pass."""

    unit: Unit
    inputs: Any
    edges: list[Any]  # where δ will arrive
    blanks: list[Tensor]  # empty tensors of the outputs' kind, and
    shapes: list[torch.Size]  # their shapes: for a δ that never arrives

    def record(self, deltas: Sequence[Tensor | None]) -> Record:
        """The finished record; an output that the loss does not depend on has δ = 0."""
        if len(deltas) == 1:
            return Record(self.unit, self.inputs, tuple(deltas))  # type: ignore[arg-type]  # it arrived, or no record
        filled = [
            blank.new_zeros(shape) if delta is None else delta
            for delta, blank, shape in zip(deltas, self.blanks, self.shapes, strict=True)
        ]
        return Record(self.unit, self.inputs, tuple(filled))


class Tape:
    """Records a model's forward passes and turns each into a `PerSample`. It has its ears on the
    model only while `listening`.
    """

    def __init__(self, model: nn.Module, loss: Loss, units: Sequence[Unit]) -> None:
        self.model, self.loss, self.units = model, loss, tuple(units)
        self.layout = Layout.of(model)
        self._rows = self._at_once()
        self.samples = 0  # of the pass under way, or the last
        self._heard: list[_Heard] | None = None
        self.passing = False  # on the way through the model or back
        self._is_listening = False

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Ears on, and off again. An ear stands in for a module's `forward`: nearer than a hook,
        and quicker.
        """
        tanhs = [module for module in self.model.modules() if type(module) is nn.Tanh]
        ears = [
            *(_Ear(self, unit) for unit in self.units),
            *(_Quicker(self, module) for module in tanhs),
        ]
        try:
            for ear in ears:
                ear.put_on()
            self._is_listening = True
            yield self
        finally:
            self._is_listening = False
            for ear in reversed(ears):
                ear.take_off()

    def __call__(self, x: Any, y: Any, group: Tensor | None = None) -> PerSample:
        """One forward and one backward pass over these samples, on a CPU a block of them after the
        other.
        """
        del group
        if not self._is_listening:
            raise RuntimeError("Gradients are recorded only inside `with run.listening():`.")
        n = count(x)
        if not n:
            return PerSample(self.layout.blank, (), self.layout)
        blocks = -(-n // self._rows)
        if blocks == 1:
            return self._pass(x, y)
        size = -(-n // blocks)
        some = [tree_map(partial(_rows, at, at + size), (x, y)) for at in range(0, n, size)]
        return _Blocks([self._pass(*block).formed() for block in some], self.layout)

    def _pass(self, x: Any, y: Any) -> PerSample:
        self.samples, self._heard, self.passing = count(x), [], True
        try:
            losses = self._losses(x, y)  # [sample]
            heard, self._heard = self._heard, None
            edges = [edge for h in heard for edge in h.edges]
            # Each sample's loss counts once: the derivative of Σ_i ℓ_i, without adding them up.
            deltas = (
                torch.autograd.grad(losses, edges, torch.ones_like(losses), allow_unused=True)
                if edges
                else ()
            )
        finally:
            self._heard, self.passing = None, False
        if len(edges) == len(heard):  # layers with one output each, all of them or nearly
            records = [h.record((d,)) for h, d in zip(heard, deltas, strict=True) if d is not None]
        else:
            coming = iter(deltas)
            arrived = [(h, [next(coming) for _ in h.edges]) for h in heard]
            records = [
                h.record(mine) for h, mine in arrived if any(delta is not None for delta in mine)
            ]
        return PerSample(losses.detach(), records, self.layout)

    def _at_once(self) -> int:
        """Samples that pass at a time: as many as fit the cache, yet so many that reading the
        parameters and adding up their gradients once a block is no work beside it. The same on
        every machine, as rounding depends on it.
        """
        if self.layout.blank.device.type != "cpu" or not self.units:
            return _ALL
        fit = _BLOCK // max(1, *(unit.numbers for unit in self.units))
        worth = _WORTH * self.layout.size // max(1, sum(unit.numbers for unit in self.units))
        return max(1, fit, worth)

    def pass_at_once(self) -> None:
        """From now on samples pass in one block, however many: where passes are counted."""
        self._rows = _ALL

    def _losses(self, x: Any, y: Any) -> Tensor:
        if torch.is_grad_enabled():
            return self.loss(call(self.model, x), y)
        with torch.enable_grad():
            return self.loss(call(self.model, x), y)

    def hear(self, unit: Unit, args: Any, kwargs: Any, output: Any) -> Any:
        """A unit was called: note what went in and where δ will arrive."""
        if self._heard is None:
            return output
        if unit.formula is not None and unit.outputs:
            a = args[0] if args else next(iter(kwargs.values()))
            if unit.outputs[0].at is None:
                # All samples share this output (a table of positions). Each gets its own view of
                # it, and so its own δ.
                output = unit.outputs[0].first(output, self.samples)
                unit = replace(unit, outputs=(Axis(),))
            if output.requires_grad:
                self._heard.append(_Heard(unit, a.detach(), [get_gradient_edge(output)], [], []))
            return output
        found = [o for o in tree_leaves(output) if isinstance(o, Tensor) and o.requires_grad]
        if found and not unit.outputs:
            raise RuntimeError(
                f"{unit.path or 'the model'} ({type(unit.module).__name__}) was not called when "
                "the model was taken "
                "apart and is called now, so its gradient would be missing. Call every layer in "
                "every forward pass."
            )
        if found:
            # The edge, not the tensor: whoever overwrites the output in place (ReLU(inplace=True))
            # does not move the edge.
            edges = [get_gradient_edge(o) for o in found]
            blanks = [o.detach().new_empty(0) for o in found]
            inputs = tree_map(detached, (args, kwargs))
            self._heard.append(_Heard(unit, inputs, edges, blanks, [o.shape for o in found]))
        return output


class _StandIn(ABC):
    """Stands in for a module's `forward`."""

    def __init__(self, tape: Tape, module: nn.Module) -> None:
        self._tape, self._module = tape, module
        self._own = module.forward
        self._replaced = vars(module).get("forward")  # somebody's own, in place of the class's

    def put_on(self) -> None:
        self._module.forward = self

    def take_off(self) -> None:
        vars(self._module).pop("forward", None)
        if self._replaced is not None:
            self._module.forward = self._replaced

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module answers."""


class _Ear(_StandIn):
    """Calls a unit's own `forward` and tells the tape about it."""

    def __init__(self, tape: Tape, unit: Unit) -> None:
        super().__init__(tape, unit.module)
        self._unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tape.hear(self._unit, args, kwargs, self._own(*args, **kwargs))


class _Quicker(_StandIn):
    """A tanh that is quicker where that pays, and only when the tape calls the model: others may
    trace or map it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_ours = self._tape.passing and self._replaced is None and len(args) == 1 and not kwargs
        if is_ours and pays(args[0], self._tape.samples):
            with suppress(
                RuntimeError
            ):  # numbers that numpy cannot have: the model itself maps, or negates by a bit
                return tanh(args[0])
        return self._own(*args, **kwargs)


class WholeTape:
    """The same service for a model that cannot be taken apart into units: every gradient is formed
    through `torch.func`.
    """

    def __init__(self, model: nn.Module, loss: Loss, inputs: int, mode: Mode) -> None:
        self.model, self.layout = model, Layout.of(model)
        self._layer = AnyLayer(LossOf(model, loss), (Axis(),) * inputs, (Axis(),), (0,), mode)

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Nothing to switch on."""
        yield self

    def __call__(self, x: Any, y: Any, group: Tensor | None = None) -> PerSample:
        """Every sample's loss and gradient."""
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
    """A model and its loss as one module (x, y) -> losses."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Any, y: Any) -> Tensor:
        """The losses.  # [sample]"""
        return self.loss(call(self.model, x), y)


def _rows(first: int, end: int, value: Any) -> Any:
    """Some samples of a tensor; anything else as it is."""
    return value[first:end] if isinstance(value, Tensor) else value


def detached(value: Any) -> Any:
    """A tensor without its history; anything else as it is."""
    return value.detach() if isinstance(value, Tensor) else value
