"""Whether the samples of a batch influence each other, as far as a test can show.

A batch passes together and in other companies: samples alone; the first half of the samples with
others in the place of the second half; and the reverse. A sample's loss, the outputs of every
module and their derivatives δ must be the same in all of them, relative to the largest number of
each tensor. So a loss with a small factor, a head that starts at zero, or a module that looks at
later samples only does not hide anything. This is done with the given parameters and with changed
ones, in float64 where the model allows it.

A test cannot exclude that samples influence each other for other numbers than those tried; a branch
on a value of the batch is an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped
from torch.utils._pytree import tree_leaves

from evenclip.gradients.calls import call, count
from evenclip.gradients.errors import no_batch_of_one
from evenclip.gradients.losses import Loss
from evenclip.gradients.trial import generator_states, same_draws
from evenclip.gradients.wide import (
    change,
    differ,
    least_tolerance,
    rows_of,
    wide,
    without_dropout,
)

__all__ = ["mixing_module"]

_ROUNDINGS = 16  # of the largest δ that a smaller one may hold


class _Called(NamedTuple):
    """A call of a module in a pass."""

    path: str
    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    deltas: list[Tensor]

    @property
    def name(self) -> str:
        """Path and class of the module."""
        return f"{self.path or 'the model itself'} ({self.kind})"


class _Pass(NamedTuple):
    """The losses of a batch, and the calls of modules, innermost first."""

    losses: Tensor
    calls: list[_Called]
    is_random: bool


def mixing_module(
    model: nn.Module, loss: Loss, x: Any, y: Any, *, alone: int, changed: bool = True
) -> str | None:
    """Return the module in which samples influence each other, or "the loss"; None if none is seen.

    Args:
        model: the model; it is not changed.
        loss: a loss per sample.
        x: inputs of at least two samples.
        y: their targets.
        alone: how many of the samples also pass alone.
        changed: whether the test is repeated with changed parameters.
    """
    for is_changed in (False, True)[: 1 + changed]:
        tried, given = wide(model, loss, x, y)
        if is_changed:
            change(tried)
        found = _mixing(tried, loss, *given, min(alone, count(x)))
        if found is not None:
            return found
    return None


def _mixing(model: nn.Module, loss: Loss, x: Any, y: Any, alone: int) -> str | None:
    """Return what mixes samples in this model; None if nothing is seen."""
    n, run, least = count(x), partial(_passed, model, loss), least_tolerance(model)
    together = run(x, y)
    try:
        one = run(*rows_of([0], (x, y)))
    except Exception as error:  # anything that a model may raise
        raise no_batch_of_one(error) from error
    for kept in (list(range(n // 2)), list(range(n // 2, n))):
        others = [i if i in kept else kept[i % len(kept)] for i in range(n)]
        pair = _Pair(together, run(*rows_of(others, (x, y))), one, kept, kept, n, least)
        if pair.differing is not None:
            return pair.differing
    for everywhere in (False, True):  # a model that is random in evaluation is not tried alone
        with without_dropout(model, everywhere=everywhere):
            together = run(x, y)
            if not together.is_random:
                return _alone(run, together, x, y, alone, least)
    return None


def _alone(
    run: Callable[..., _Pass], together: _Pass, x: Any, y: Any, alone: int, least: float
) -> str | None:
    """Return what makes the first samples differ from what they are alone; None if nothing."""
    for i in range(alone):
        one = run(*rows_of([i], (x, y)))
        pair = _Pair(together, one, one, [i], [0], count(x), least)
        if pair.differing is not None:
            return pair.differing
    return None


@dataclass(frozen=True)
class _Pair:
    """Two passes in which some samples are the same.

    Attributes:
        a: a pass of n samples.
        b: another pass.
        one: a pass of one sample, whose shapes show where the samples are.
        kept: these samples of `a` ...
        places: ... are at these places of `b`.
        n: number of samples of `a`.
        least: least tolerance of a difference, relative to the largest number of a tensor.
    """

    a: _Pass
    b: _Pass
    one: _Pass
    kept: list[int]
    places: list[int]
    n: int
    least: float

    @property
    def differing(self) -> str | None:
        """What makes the samples differ: a module, "the loss" or the model; None if nothing."""
        calls = self._calls
        changed = [(p, q, like) for p, q, like in calls if self._differ("outputs", p, q, like)]
        for p, q, like in changed:
            if not self._differ("inputs", p, q, like):
                return p.name
        losses = self._differs(self.a.losses, self.b.losses, self.one.losses)
        if changed or (losses and not calls):
            return "the model itself" + (f" ({calls[-1][0].kind})" if calls else "")
        if losses:
            return "the loss"
        for p, q, like in reversed(calls):
            if self._differ("deltas", p, q, like):
                return f"the backward pass behind {p.name}"
        return None

    @property
    def _calls(self) -> list[tuple[_Called, _Called, _Called]]:
        """The calls of the three passes; none where they are not of the same modules."""
        a, b, one = self.a.calls, self.b.calls, self.one.calls
        paths = [[call.path for call in calls] for calls in (a, b, one)]
        return list(zip(a, b, one, strict=True)) if paths[0] == paths[1] == paths[2] else []

    def _differ(self, named: str, a: _Called, b: _Called, one: _Called) -> bool:
        """Return whether a kept sample has other numbers in these tensors of a call."""
        tensors: list[list[Tensor]] = [getattr(call, named) for call in (a, b, one)]
        pairs = list(zip(*tensors, strict=False))
        floor = self._floor if named == "deltas" else 0.0
        return any(self._differs(*pair, shared=named != "deltas", floor=floor) for pair in pairs)

    @cached_property
    def _floor(self) -> float:
        """The rounding of the largest δ, of which one that is 0 by cancelling may consist."""
        deltas = [d.nan_to_num() for c in self.a.calls for d in c.deltas if d.numel()]
        return max(
            (_ROUNDINGS * torch.finfo(d.dtype).eps * float(d.abs().amax()) for d in deltas),
            default=0.0,
        )

    def _differs(
        self, a: Tensor, b: Tensor, one: Tensor, *, shared: bool = True, floor: float = 0.0
    ) -> bool:
        """Return whether a kept sample has other numbers; False where the samples are not found.

        Args:
            a: a tensor of n samples.
            b: the tensor of the other pass.
            one: the tensor of one sample.
            shared: whether a tensor of all samples is compared as a whole.
            floor: a difference that is always rounding.
        """
        if not a.ndim == b.ndim == one.ndim:
            return False
        axes = [i for i in range(a.ndim) if a.shape[i] != one.shape[i]]
        if not axes:
            return shared and a.shape == b.shape and differ(a, b, self.least)
        at = axes[0]
        each = one.shape[at]
        if len(axes) > 1 or a.shape[at] != self.n * each or b.shape[at] % max(each, 1):
            return False
        rows, places = (_entries(chosen, each).to(a.device) for chosen in (self.kept, self.places))
        if each == 0 or b.shape[at] <= int(places.max()):
            return False
        return differ(a.index_select(at, rows), b.index_select(at, places), self.least, floor)


def _entries(samples: Sequence[int], each: int) -> Tensor:
    """Return the entries of these samples along an axis that has `each` of them for a sample."""
    return torch.tensor([i * each + j for i in samples for j in range(each)])


def _passed(model: nn.Module, loss: Loss, x: Any, y: Any) -> _Pass:
    """Pass a batch forward and back."""
    hooks = [_Hook(path, module) for path, module in model.named_modules()]
    calls: list[tuple[_Hook, list[Tensor], list[Tensor]]] = []
    for hook in hooks:
        hook.install(calls)
    same_draws()
    before = generator_states()
    try:
        with torch.enable_grad():
            losses = loss(call(model, x), y)
    finally:
        for hook in hooks:
            hook.remove()
    is_random = not all(map(torch.equal, before, generator_states()))
    outputs = [o for _, _, given in calls for o in given if o.requires_grad]
    found: list[Tensor | None] = []
    if losses.requires_grad and outputs:
        with suppress(RuntimeError):  # of outputs that were changed in place
            found = list(torch.autograd.grad(losses.sum(), outputs, allow_unused=True))
    deltas = iter(found)
    called = []
    for hook, inputs, given in calls:
        own = [next(deltas, None) for o in given if o.requires_grad]
        seen = [delta for delta in own if delta is not None]
        kept = [o.detach() for o in given]
        called.append(_Called(hook.path, type(hook.module).__name__, inputs, kept, seen))
    return _Pass(losses.detach(), called, is_random)


class _Hook:
    """A forward hook that keeps the inputs and outputs of a module."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module

    def install(self, calls: list[Any]) -> None:
        self._calls = calls
        self._handle = self.module.register_forward_hook(self, with_kwargs=True)

    def remove(self) -> None:
        self._handle.remove()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = [leaf.detach().clone() for leaf in _tensors((args, kwargs))]
        self._calls.append((self, inputs, _tensors(output)))


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a value; none inside a mapping of the model's own."""
    return [
        leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and not is_wrapped(leaf)
    ]
