"""How a model is taken apart, and whether it may be trained privately at all.

Before training, a few samples go through the model to learn, and to check, what cannot be read off
it:

1. which modules are units (a layer with a formula; any other module with parameters of its own,
   through `torch.func`);
2. where the samples lie in each unit's inputs and outputs: the axis that differs between a batch of
three and one of two;
3. that no sample influences another: one sample is changed, no other sample's loss may move;
4. that the gradients taken apart are those of autograd, sample by sample. If not (a parameter used
behind its layer's back),
   the whole model goes through `torch.func` instead; if that fails too, the model is refused.

A model is refused in a sentence that names the module and what to do instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from evenclip.gradients.anylayer import Mode
from evenclip.gradients.axis import Axis
from evenclip.gradients.layers import formula
from evenclip.gradients.losses import Loss, per_sample
from evenclip.gradients.precision import precision
from evenclip.gradients.tape import Layout, Tape, Unit, WholeTape, call, count

__all__ = ["ModelError", "plan"]


class ModelError(ValueError):
    """A model that cannot be trained privately as it is; the message says why and what to do."""


def plan(model: nn.Module, loss: Loss, x: Any, y: Any) -> Tape | WholeTape:
    """The tape for this model and loss, chosen and checked on a few samples.

    Args:
        model: in the mode (train or eval) in which it will be used.
        loss: see `evenclip.gradients.losses`.
        x: some samples' inputs, at least one. Three are used; the more there are to choose from,
            the surer it is that changing a sample changes something.
        y: their targets.
    """
    refuse_stateful(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            "The model has no trainable parameter; set requires_grad=True on what is to be trained."
        )
    if not count(x):
        raise ModelError("There is no sample to take the model apart with; give at least one.")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ModelError(
            "torch.autocast is on: products of fewer bits than the parameters have would make "
            "norms too small. "
            "Switch it off, or give the model itself that precision (model.bfloat16())."
        )
    loss = per_sample(loss)
    x, y = _three((x, y))
    with _undisturbed(model):
        reference = _forward_without_traces(model, loss, x, y)
        _refuse_mixing(model, loss, x, y, reference)
        for tape in _candidates(model, loss, x, y):
            with tape.listening(), _checkable(tape, model):
                if _agrees(tape, model, loss, x, y):
                    return tape
    raise ModelError(
        f"The per-sample gradients of {type(model).__name__} could not be verified against "
        "autograd on three samples. "
        "Is its forward pass random in a way that does not come from torch's generator, does it "
        "change its own state, "
        "or are its gradients not finite?"
    )


# --- what is refused outright -------------------------------------------------------------------


def refuse_stateful(model: nn.Module) -> None:
    """Raise for layers that are known to mix samples or to keep statistics of the data."""
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ModelError(
                f"{where} computes its statistics over the batch, so every sample influences "
                "every other and "
                "no per-sample "
                "gradient exists. Replace it by nn.GroupNorm, nn.LayerNorm or nn.InstanceNorm "
                "(without "
                "running statistics)."
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            raise ModelError(
                f"{where} keeps running statistics of the data, which leave the training without "
                "noise. "
                "Build it with track_running_stats=False."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ModelError(
                f"{where} rewrites its weights on every look-up (max_norm). Build it without "
                "max_norm."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
            raise ModelError(
                f"{where} scales gradients by how often a token occurs in the batch, so samples "
                "influence each other. "
                "Build it without scale_grad_by_freq."
            )


def _forward_without_traces(model: nn.Module, loss: Loss, x: Any, y: Any) -> Tensor:
    """The losses; raises if computing them leaves a trace in a buffer."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    losses = _forward(model, loss, x, y)
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise ModelError(
                f"The forward pass changes the buffer {name!r}: what it keeps of the data leaves "
                "the training without "
                "noise. Build that layer without running statistics."
            )
    return losses


def _refuse_mixing(model: nn.Module, loss: Loss, x: Any, y: Any, reference: Tensor) -> None:
    """Change one sample; no other sample's loss may move, and no buffer either."""
    changed = _forward(model, loss, tree_map(_first_changed, x), tree_map(_first_changed_target, y))
    if _same(changed[1:], reference[1:]):
        return
    path = _mixing_module(model, x)
    raise ModelError(
        f"The samples of a batch influence each other in {path}: changing one sample changed "
        "another's loss. "
        "Private training needs samples that are computed independently; use layers that "
        "normalise or attend within "
        "one sample, and a loss of one sample at a time."
    )


def _mixing_module(model: nn.Module, x: Any) -> str:
    """The innermost module that the unchanged samples enter as before and leave moved; without one,
    the loss.
    """
    before, after = _calls(model, x), _calls(model, tree_map(_first_changed, x))
    n = count(x)
    for one, other in zip(before, after, strict=False):
        if _moved(one.outputs, other.outputs, n) and not _moved(one.inputs, other.inputs, n):
            return f"{one.path or 'the model itself'} ({type(one.module).__name__})"
    if all(o.ndim and len(o) == n for o in before[-1].outputs):
        return "the loss"
    return f"the model itself ({type(model).__name__})"


def _moved(one: Sequence[Tensor], other: Sequence[Tensor], n: int) -> bool:
    """Whether any sample but the first differs, in tensors that have the n samples first."""
    pairs = zip(one, other, strict=False)
    return any(
        a.shape == b.shape and a.ndim and len(a) == n and not _same(a[1:], b[1:]) for a, b in pairs
    )


# --- taking apart -------------------------------------------------------------------------------


def _candidates(model: nn.Module, loss: Loss, x: Any, y: Any) -> Iterator[Tape | WholeTape]:
    """Ways to take the model apart, fastest first."""
    units = {
        id(unit.module): unit for unit in _partition(model, "")
    }  # a module may lie at two places
    found = _located(model, list(units.values()), x, y)
    if found is not None:
        opaque = [unit for unit in found if unit.formula is None and unit.outputs]
        for mode in Mode if opaque else (Mode.SHARED,):
            yield Tape(model, loss, [replace(unit, mode=mode) for unit in found])
    for mode in Mode:
        yield WholeTape(model, loss, len(tree_leaves((x, y))), mode)


def _partition(module: nn.Module, path: str) -> list[Unit]:
    """The units below this module: layers with a formula, and modules with parameters of their own."""
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


def _located(model: nn.Module, units: Sequence[Unit], x: Any, y: Any) -> list[Unit] | None:
    """The units with their sample axes filled in and parameters by one name each; None where that
    cannot be told.
    """
    three, two = _Shapes(model, units).of(x), _Shapes(model, units).of(tree_map(_first_two, x))
    located = []
    for unit, calls, fewer in zip(units, three, two, strict=True):
        seen = {_located_call(a, b) for a, b in zip(calls, fewer, strict=False)}
        if len(calls) != len(fewer) or None in seen or len(seen) > 1:
            return None  # called differently from call to call
        if not seen:
            located.append(unit)  # without axes: the tape will say so if it is called after all
        for inputs, outputs, picks in filter(None, seen):
            folded = any(axis.each > 1 for axis in inputs + outputs)
            if unit.formula is None and (folded or any(axis.at is None for axis in outputs)):
                return None
            if unit.formula is not None and (not inputs or len(outputs) != 1):
                return None
            shapes = [shape for into, out, _ in calls for shape in (*into, *out)]
            numbers = max((math.prod(shape) // 3 for shape in shapes), default=0)
            located.append(
                replace(unit, inputs=inputs, outputs=outputs, picks=picks, numbers=numbers)
            )
    return _named_once(model, located)


def _located_call(
    three: Any, two: Any
) -> tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[int, ...]] | None:
    """The axes of one call's inputs and outputs, from its shapes for three samples and for two."""
    (inputs3, outputs3, picks), (inputs2, outputs2, _) = three, two
    if len(inputs3) != len(inputs2) or len(outputs3) != len(outputs2):
        return None
    inputs = [Axis.between(a, b) for a, b in zip(inputs3, inputs2, strict=True)]
    outputs = [Axis.between(a, b) for a, b in zip(outputs3, outputs2, strict=True)]
    if None in inputs or None in outputs:
        return None
    return tuple(a for a in inputs if a), tuple(a for a in outputs if a), picks


def _named_once(model: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """A parameter that several modules share goes by the first of its names, which is the one the
    model lists.
    """
    first = {id(p): name for name, p in model.named_parameters()}
    every = dict(model.named_parameters(remove_duplicate=False))
    return [
        replace(
            unit, parameters={own: first[id(every[full])] for own, full in unit.parameters.items()}
        )
        for unit in units
    ]


class _Shapes:
    """The shapes that go in and out of each unit, call by call."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model, self._units = model, units
        self._found: list[list[Any]] = [[] for _ in units]

    def of(self, x: Any) -> list[list[Any]]:
        """Unit by unit, call by call: (shapes of inputs, shapes of outputs with a gradient, which
        outputs those are).
        """
        handles = [
            unit.module.register_forward_hook(_Noting(calls), with_kwargs=True)
            for unit, calls in zip(self._units, self._found, strict=True)
        ]
        try:
            _same_draws()
            with torch.enable_grad():
                call(self._model, x)
        finally:
            for handle in handles:
                handle.remove()
        return self._found


class _Noting:
    """A forward hook that notes shapes."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outputs = [o for o in tree_leaves(output) if isinstance(o, Tensor)]
        picks = tuple(i for i, o in enumerate(outputs) if o.requires_grad)
        inputs = [leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._calls.append((inputs, [outputs[i].shape for i in picks], picks))


# --- checking -----------------------------------------------------------------------------------


@precision(tf32=False)
def _agrees(tape: Tape | WholeTape, model: nn.Module, loss: Loss, x: Any, y: Any) -> bool:
    """Whether the tape's gradients are autograd's, sample by sample, on the same forward pass.

    With all the bits of float32: what is compared are formulas, and eleven bits would not tell a
    wrong one.
    """
    expected = _autograd(model, loss, x, y, tape.layout)
    try:
        _same_draws()
        found = tape(x, y)
        before = _generators()
        each, norms = found.per_sample(), found.norms()
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        return False  # PyTorch refused this way of taking the model apart; the next one may do
    if not all(map(torch.equal, before, _generators())):
        # a unit that was run again drew again: other dropout masks than in the forward pass
        return False
    tolerance = _tolerance(each.dtype)
    off = float(expected.abs().max()) * tolerance
    sizes: Tensor = torch.linalg.vector_norm(expected, dim=1, dtype=torch.float64)
    # A norm has its rounding bound in it, percents where thousands of positions are summed. Too
    # small it must not be.
    norms_agree = (norms >= (1 - 10 * tolerance) * sizes - off) & (norms <= 1.1 * sizes + off)
    return torch.allclose(each, expected, rtol=0.0, atol=off) and bool(norms_agree.all())


@contextmanager
def _checkable(tape: Tape | WholeTape, model: nn.Module) -> Iterator[None]:
    """A whole model draws other dropout masks sample by sample than in a batch, so it is compared
    with dropout off.

    A tape of units is compared as it is: a unit that went through `torch.func` with other masks
    than in the forward pass would have the wrong gradient, and must fail here.
    """
    modes = [(module, module.training) for module in model.modules()]
    if isinstance(tape, WholeTape):
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _autograd(model: nn.Module, loss: Loss, x: Any, y: Any, layout: Layout) -> Tensor:
    """Every sample's gradient, one backward pass each.  # [sample, parameter]"""
    _same_draws()
    parameters = dict(model.named_parameters())
    leaves = [parameters[name] for name in layout.names]
    with torch.enable_grad():
        losses = loss(call(model, x), y)
    if not losses.requires_grad:
        return layout.blank.new_zeros(len(losses), layout.size)
    rows = []
    for one in losses:
        gradients = torch.autograd.grad(one, leaves, retain_graph=True, allow_unused=True)
        pairs = zip(layout.names, gradients, strict=True)
        rows.append(layout.join({name: g.to_dense() for name, g in pairs if g is not None}))
    return torch.stack(rows)


def _tolerance(dtype: torch.dtype) -> float:
    """How far two orders of the same float operations may lie apart, relative to the largest
    number.
    """
    return math.sqrt(torch.finfo(dtype).eps) / 3


def _forward(model: nn.Module, loss: Loss, x: Any, y: Any) -> Tensor:
    _same_draws()
    with torch.no_grad():
        return loss(call(model, x), y)


@dataclass(frozen=True)
class _Called:
    """What went into a module and what came out."""

    path: str
    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


def _calls(model: nn.Module, x: Any) -> list[_Called]:
    """Every call of every module, innermost first."""
    found: list[_Called] = []
    handles = [
        module.register_forward_hook(_Keeping(found, path), with_kwargs=True)
        for path, module in model.named_modules()
    ]
    try:
        _same_draws()
        with torch.no_grad():
            call(model, x)
    finally:
        for handle in handles:
            handle.remove()
    return found


class _Keeping:
    """A forward hook that keeps inputs and outputs."""

    def __init__(self, found: list[_Called], path: str) -> None:
        self._found, self._path = found, path

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = [leaf.clone() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf.clone() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self._found.append(_Called(self._path, module, inputs, outputs))


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave torch's generators and the model's buffers as they were."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    try:
        with torch.random.fork_rng(devices=_gpus()):
            yield
    finally:
        for name, buffer in model.named_buffers():
            if not torch.equal(buffer, before[name]):
                buffer.data.copy_(before[name])


def _same_draws() -> None:
    """Put torch's generators where every pass begins. (`torch.manual_seed` would seed GPUs that are
    not in use yet.)
    """
    torch.default_generator.manual_seed(0)
    if _gpus():
        torch.cuda.manual_seed_all(0)


def _generators() -> list[Tensor]:
    """Where torch's generators stand."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in _gpus())]


def _gpus() -> Sequence[int]:
    """The GPUs, if any is in use."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]


def _three(value: Any) -> Any:
    """Three samples, repeated where there are fewer; finite ones, if there are any.

    The second differs from the first in as many tensors as any: exchanging one for the other has to
    change something.
    """
    leaves = [leaf.reshape(len(leaf), -1) for leaf in tree_leaves(value)]
    finite = torch.stack([leaf.isfinite().all(dim=1).cpu() for leaf in leaves]).all(dim=0)
    rows = finite.nonzero().flatten().tolist() or list(range(len(finite)))
    differ = torch.stack([(leaf != leaf[rows[0]]).any(dim=1).cpu() for leaf in leaves]).sum(
        dim=0
    )  # [sample]
    second = max(rows, key=differ.tolist().__getitem__)
    rows = [rows[0], second, *(i for i in rows if i not in (rows[0], second)), rows[0]][:3]
    return tree_map(lambda t: t[torch.tensor(rows, device=t.device)], value)


def _first_two(value: Any) -> Any:
    return value[:2]


def _first_changed(value: Tensor) -> Tensor:
    """The samples with the first one changed: beyond recognition if it is numbers, for its
    neighbour's if it is tokens.

    Where the neighbour has the same, the smallest of all tokens takes their place: it is valid
    wherever they are.
    """
    changed = value.clone()
    if value.is_floating_point():
        changed[0] = 3 * value[0] + torch.linspace(-2, 2, value[0].numel()).reshape(
            value[0].shape
        ).to(value)
    else:
        changed[0] = value.amin() if torch.equal(value[0], value[1]) else value[1]
    return changed


def _first_changed_target(value: Tensor) -> Tensor:
    """The targets with the first one exchanged for its neighbour's: any value of one sample is
    possible for another.
    """
    changed = value.clone()
    changed[0] = value[1]
    return changed


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding; NaN is the same as NaN."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = 1e3 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
