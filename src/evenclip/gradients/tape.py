"""Per-sample gradients from one forward pass and one backward pass.

The forward pass records (unit, inputs, outputs) for each unit: a layer with a formula, or any other
module with its own parameters. One `torch.autograd.grad(losses.sum(), outputs)` gives δ, the
gradient with respect to every output. No sample's loss depends on another sample's row, so row i of
δ belongs to sample i. The result is a `PerSample`, which computes norms and weighted sums any
number of times:

    norms()            ‖g_i‖           the norms that the rule clips
    weighted_sum(w)    Σ_i w_i g_i     the update; with indicators as weights, g_B and group sums

So the audit reads the same gradients as the training step. On a CPU a batch with large activations
passes in blocks that fit the cache. Each block forms the gradients that are smaller than their
operands (those of a convolution) and frees the operands.
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


# Maximum size of a layer's input or output for one block: 8 MiB in float32.
_BLOCK = 2**21
# Minimum activations per block, as a multiple of the parameter count.
_WORTH = 4
_ALL = 2**62


class AnyTape(Protocol):
    """The interface of a tape: passes through the model inside `with tape.listening()`."""

    model: nn.Module
    layout: Layout

    def listening(self) -> AbstractContextManager[Any]:
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


@dataclass(frozen=True)
class Layout:
    """The trainable parameters of a model, concatenated into one vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    blank: Tensor  # empty, of the parameters' dtype and device

    @staticmethod
    def of(model: nn.Module) -> Layout:
        """Return the layout of all parameters with `requires_grad`, in the model's order."""
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            return Layout((), (), torch.empty(0))
        blank = next(iter(trainable.values())).detach().new_empty(0)
        return Layout(tuple(trainable), tuple(p.shape for p in trainable.values()), blank)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """Number of elements of all parameters."""
        return sum(self.sizes)

    @cached_property
    def roundoff(self) -> float:
        """The unit roundoff of the parameters."""
        return torch.finfo(self.blank.dtype).eps / 2

    @property
    def rounding_up(self) -> float:
        """Factor that makes a norm an upper bound on the norm of the term in the weighted sum.

        It covers the roundings of weight · input · δ with sixteen unit roundoffs. If products with
        fewer bits (TF32) are enabled, their roundoff is used.
        """
        return 1 + 16 * max(self.roundoff, operands(self.blank))

    def join(self, tensors: dict[str, Tensor]) -> Tensor:
        """Concatenate into one vector; missing parameters are 0.  # [size]"""
        if len(tensors) == len(self.names):
            if not tensors:
                return self.blank
            return torch.cat([tensors[name].reshape(-1) for name in self.names])
        pieces = [
            tensors[name].reshape(-1) if name in tensors else self.blank.new_zeros(size)
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return torch.cat(pieces) if pieces else self.blank

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of the vector by parameter name."""
        pieces = torch.split(vector, list(self.sizes))
        return {name: v.view(s) for name, s, v in zip(self.names, self.shapes, pieces, strict=True)}


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
            a = unit.inputs[0].first(self.inputs, n)
            delta = unit.outputs[0].first(self.deltas[0], n)
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
            axis.first(tensor, n) for axis, tensor in zip(unit.inputs, tensors, strict=True)
        )
        deltas: list[Tensor | None] = [None] * (3 if isinstance(unit.module, nn.LSTM) else 2)
        for pick, axis, delta in zip(unit.picks, unit.outputs, self.deltas, strict=True):
            deltas[pick] = axis.first(delta, n)
        return recurrent.gradient(unit.module, x, state, deltas, names)  # type: ignore[arg-type]  # `takes` checked it


@dataclass(frozen=True)
class Whole:
    """Formed per-sample gradients of the whole model or of one call of a layer."""

    each: dict[str, Tensor]  # the model's name -> [sample, *parameter]

    @property
    def parameters(self) -> dict[str, str]:
        """The identity map of the model's names."""
        return {name: name for name in self.each}

    def gradient(self, n: int, names: Collection[str]) -> LayerGradient:
        """Return the formed gradients of these parameters."""
        del n
        return Formed({name: self.each[name] for name in names})


class Part(NamedTuple):
    """A layer's gradients with the model's names for its parameters."""

    gradient: LayerGradient
    names: dict[str, str]


class PerSample:
    """The loss and gradient of each sample, most gradients unformed.

    The values are private: only the training step and audits may use them.

    Attributes:
        losses: ℓ_i.  # [sample]
        layout: the parameters, in the order of every returned vector.
    """

    def __init__(self, losses: Tensor, records: Sequence[Record | Whole], layout: Layout) -> None:
        self.losses, self.layout, self.records = losses, layout, tuple(records)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The gradients of the layers.

        Gradients of a parameter that several calls use are formed and added first, because the norm
        of their sum has cross terms.
        """
        n, uses = self.losses.shape[0], _uses(self.records)
        if max(uses.values(), default=1) == 1:
            return tuple([Part(r.gradient(n, r.parameters), r.parameters) for r in self.records])
        parts, shared = [], dict[str, Tensor]()
        for record in self.records:
            names = record.parameters
            used_once = [own for own, full in names.items() if uses[full] == 1]
            used_again = [own for own, full in names.items() if uses[full] > 1]
            if used_once:
                parts.append(Part(record.gradient(n, used_once), names))
            if used_again:
                for own, each in record.gradient(n, used_again).per_sample().items():
                    full = names[own]
                    shared[full] = shared[full] + each if full in shared else each
        parts.append(Part(Formed(shared), {name: name for name in shared}))
        return tuple(parts)

    def norms(self, *, quick: bool = False) -> Tensor:
        """Return ‖g_i‖ over all trainable parameters, rounded up.  # [sample], float64

        Args:
            quick: use fewer operations if possible. The norms are then slightly larger, and
                infinite if float32 overflows.
        """
        if not self.parts:
            return torch.zeros_like(self.losses, dtype=torch.float64)
        layers = [part.gradient for part in self.parts]
        # One layer gains nothing. The choice depends on the model only, not on the layers that this
        # batch used.
        quick = quick and len(self.layout.names) > 2
        quick_layers = [g for g in layers if quick and isinstance(g, OnePosition) and g.is_quick]
        squares = [quick_square_norms(quick_layers)] if quick_layers else []
        if len(quick_layers) < len(layers):
            squares += [g.square_norms() for g in layers if g not in quick_layers]
        total = squares[0] if len(squares) == 1 else torch.stack(squares).sum(dim=0)
        return total.sqrt_().mul_(self.layout.rounding_up)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i weights_i · g_i as one vector.  weights: [sample] -> [parameter]"""
        weights = weights.to(self.layout.blank.dtype)
        total: dict[str, Tensor] = {}
        for gradient, names in self.parts:
            for own, summed in gradient.weighted_sum(weights).items():
                total[names[own]] = summed
        return self.layout.join(total)

    def per_sample(self) -> Tensor:
        """Form every gradient, for tests and small diagnostics.  # [sample, parameter]"""
        eye = torch.eye(len(self.losses), dtype=torch.float64, device=self.losses.device)
        return torch.stack([self.weighted_sum(indicator) for indicator in eye])

    def masked(self, keep: Tensor) -> PerSample:
        """Return a copy with the gradients of all other samples set to 0.  keep: [sample]

        They are exactly 0, also if they were NaN.
        """
        masked = PerSample(torch.where(keep, self.losses, 0.0), (), self.layout)
        masked.parts = tuple(Part(part.gradient.masked(keep), part.names) for part in self.parts)
        return masked

    def formed(self) -> PerSample:
        """Return a copy without the operands of gradients that are formed."""
        formed = PerSample(self.losses, (), self.layout)
        formed.parts = self.parts
        return formed


class _Blocks(PerSample):
    """The per-sample gradients of several blocks of samples."""

    def __init__(self, blocks: Sequence[PerSample], layout: Layout) -> None:
        super().__init__(torch.cat([block.losses for block in blocks]), (), layout)
        self._blocks, self._sizes = tuple(blocks), [len(block.losses) for block in blocks]

    def norms(self, *, quick: bool = False) -> Tensor:
        """Return the norms of all blocks."""
        return torch.cat([block.norms(quick=quick) for block in self._blocks])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over all blocks."""
        first, *others = zip(self._blocks, torch.split(weights, self._sizes), strict=True)
        total = first[0].weighted_sum(first[1])
        for block, some in others:
            total += block.weighted_sum(some)
        return total

    def masked(self, keep: Tensor) -> PerSample:
        """Return a copy with every block masked."""
        pairs = zip(self._blocks, torch.split(keep, self._sizes), strict=True)
        return _Blocks([block.masked(some) for block, some in pairs], self.layout)


def _uses(records: Sequence[Record | Whole]) -> dict[str, int]:
    """Count the uses of each parameter, by the model's names."""
    uses: dict[str, int] = {}
    for record in records:
        for full in record.parameters.values():
            uses[full] = uses.get(full, 0) + 1
    return uses


class _PendingRecord(NamedTuple):
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


class Tape:
    """Record the forward passes of a model and turn each into a `PerSample`.

    The model's modules are wrapped only inside `with tape.listening()`.
    """

    def __init__(self, model: nn.Module, loss: Loss, units: Sequence[Unit]) -> None:
        self.model, self.loss, self.units = model, loss, tuple(units)
        self.layout = Layout.of(model)
        self._rows = self._at_once()
        self.samples = 0  # in the current or the last pass
        self._pending: list[_PendingRecord] | None = None  # None: do not record
        self.passing = False  # whether a forward or backward pass is running
        self._is_listening = False

    @contextmanager
    def listening(self) -> Iterator[Self]:
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
            self._is_listening = True
            yield self
        finally:
            self._is_listening = False
            for wrapper in reversed(wrappers):
                wrapper.remove()

    def __call__(self, x: Any, y: Any, group: Tensor | None = None) -> PerSample:
        """Run one forward and one backward pass, on a CPU block by block."""
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
        split = [tree_map(partial(_rows, at, at + size), (x, y)) for at in range(0, n, size)]
        return _Blocks([self._pass(*block).formed() for block in split], self.layout)

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
        return PerSample(losses.detach(), records, self.layout)

    def _at_once(self) -> int:
        """Return the number of samples per block.

        A block fits the cache, and is large enough that reading the parameters and adding their
        gradients once per block costs little. The number is the same on every machine, because
        rounding depends on it.
        """
        if self.layout.blank.device.type != "cpu" or not self.units:
            return _ALL
        fit = _BLOCK // max(1, *(unit.numbers for unit in self.units))
        worth = _WORTH * self.layout.size // max(1, sum(unit.numbers for unit in self.units))
        return max(1, fit, worth)

    def pass_at_once(self) -> None:
        """Use one block for any number of samples, so that each call makes one pass."""
        self._rows = _ALL

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
                self._pending.append(_PendingRecord(unit, a.detach(), edges, [], []))
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
            inputs, shapes = tree_map(detached, (args, kwargs)), [o.shape for o in outputs]
            self._pending.append(_PendingRecord(unit, inputs, edges, blanks, shapes))
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

    def __init__(self, model: nn.Module, loss: Loss, inputs: int, mode: Mode) -> None:
        self.model, self.layout = model, Layout.of(model)
        self._layer = AnyLayer(LossOf(model, loss), (Axis(),) * inputs, (Axis(),), (0,), mode)

    @contextmanager
    def listening(self) -> Iterator[Self]:
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
    return value[first:end] if isinstance(value, Tensor) else value


def detached(value: Any) -> Any:
    """Detach a tensor; return other values unchanged."""
    return value.detach() if isinstance(value, Tensor) else value
