"""Choose how to compute a model's per-sample gradients, and check that the model allows them.

Before training, `plan` runs a few samples through the model. It determines and checks:

1. the units: layers with a formula, and other modules with their own parameters, which go through
   `torch.func`;
2. the sample axis of each unit's inputs and outputs: the axis that differs between a batch of
   three samples and a batch of two;
3. that no sample influences another: changing one sample must not change another sample's loss;
4. that the per-sample gradients equal those of autograd. If they do not (for example if a parameter
   is used outside its layer), the whole model goes through `torch.func`. If that fails too, the
   model is refused.

The error message names the module and says what to do instead.
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
    """A model that cannot be trained privately; the message says why and what to do."""


def plan(model: nn.Module, loss: Loss, x: Any, y: Any) -> Tape | WholeTape:
    """Choose the tape for this model and loss, and check it on a few samples.

    Args:
        model: in the mode (train or eval) in which it will be used.
        loss: see `evenclip.gradients.losses`.
        x: inputs of at least one sample. Three samples are used. With more to choose from, it is
            more likely that exchanging two of them changes the loss.
        y: their targets.
    """
    refuse_stateful(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            "The model has no trainable parameter; set requires_grad=True on what is to be trained."
        )
    if not count(x):
        raise ModelError("No sample was given to analyse the model with; give at least one.")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ModelError(
            "torch.autocast is on: its products have fewer bits than the parameters, so norms "
            "would be too small. Switch it off, or convert the model itself (model.bfloat16())."
        )
    loss = per_sample(loss)
    x, y = _three((x, y))
    with _undisturbed(model):
        reference = _stateless_forward(model, loss, x, y)
        _refuse_mixing(model, loss, x, y, reference)
        for tape in _candidates(model, loss, x, y):
            with tape.listening(), _checkable(tape, model):
                if _agrees(tape, model, loss, x, y):
                    return tape
    raise ModelError(
        f"The per-sample gradients of {type(model).__name__} could not be verified against "
        "autograd on three samples. Is its forward pass random in a way that does not come from "
        "torch's generator, does it change its own state, or are its gradients not finite?"
    )


# --- models that are refused --------------------------------------------------------------------


def refuse_stateful(model: nn.Module) -> None:
    """Raise for layers that mix samples or keep statistics of the data."""
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ModelError(
                f"{where} computes its statistics over the batch, so every sample influences every "
                "other and no per-sample gradient exists. Replace it by nn.GroupNorm, nn.LayerNorm "
                "or nn.InstanceNorm (without running statistics)."
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            raise ModelError(
                f"{where} keeps running statistics of the data, and these are published without "
                "noise. Build it with track_running_stats=False."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ModelError(
                f"{where} rewrites its weights on every look-up (max_norm). Build it without "
                "max_norm."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
            raise ModelError(
                f"{where} scales gradients by how often a token occurs in the batch, so samples "
                "influence each other. Build it without scale_grad_by_freq."
            )


def _stateless_forward(model: nn.Module, loss: Loss, x: Any, y: Any) -> Tensor:
    """Return the losses; raise if the forward pass changes a buffer."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    losses = _forward(model, loss, x, y)
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise ModelError(
                f"The forward pass changes the buffer {name!r}: the buffer would publish data "
                "without noise. Build that layer without running statistics."
            )
    return losses


def _refuse_mixing(model: nn.Module, loss: Loss, x: Any, y: Any, reference: Tensor) -> None:
    """Raise if changing one sample changes the loss of another."""
    changed = _forward(model, loss, tree_map(_first_changed, x), tree_map(_first_changed_target, y))
    if _same(changed[1:], reference[1:]):
        return
    path = _mixing_module(model, x)
    raise ModelError(
        f"The samples of a batch influence each other in {path}: changing one sample changed "
        "another's loss. Private training needs samples that are computed independently; use "
        "layers that normalise or attend within one sample, and a loss of one sample at a time."
    )


def _mixing_module(model: nn.Module, x: Any) -> str:
    """Return the innermost module that changes unchanged samples, or "the loss" if there is none.

    For such a module, the inputs of the unchanged samples are the same and their outputs differ.
    """
    before, after = _calls(model, x), _calls(model, tree_map(_first_changed, x))
    n = count(x)
    for old, new in zip(before, after, strict=False):
        if _moved(old.outputs, new.outputs, n) and not _moved(old.inputs, new.inputs, n):
            return f"{old.path or 'the model itself'} ({type(old.module).__name__})"
    if all(o.ndim and len(o) == n for o in before[-1].outputs):
        return "the loss"
    return f"the model itself ({type(model).__name__})"


def _moved(old: Sequence[Tensor], new: Sequence[Tensor], n: int) -> bool:
    """Return whether a sample other than the first differs, in tensors with n samples first."""
    pairs = zip(old, new, strict=False)
    return any(
        a.shape == b.shape and a.ndim and len(a) == n and not _same(a[1:], b[1:]) for a, b in pairs
    )


# --- splitting a model into units ---------------------------------------------------------------


def _candidates(model: nn.Module, loss: Loss, x: Any, y: Any) -> Iterator[Tape | WholeTape]:
    """Yield the possible tapes for the model, fastest first."""
    # Keyed by identity: a module may occur twice in the model.
    units = {id(unit.module): unit for unit in _partition(model, "")}
    located = _located(model, list(units.values()), x, y)
    if located is not None:
        opaque = [unit for unit in located if unit.formula is None and unit.outputs]
        for mode in Mode if opaque else (Mode.SHARED,):
            yield Tape(model, loss, [replace(unit, mode=mode) for unit in located])
    for mode in Mode:
        yield WholeTape(model, loss, len(tree_leaves((x, y))), mode)


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


def _located(model: nn.Module, units: Sequence[Unit], x: Any, y: Any) -> list[Unit] | None:
    """Return the units with their sample axes and with one name per parameter.

    Return None if the axes cannot be determined.
    """
    three, two = _Shapes(model, units).of(x), _Shapes(model, units).of(tree_map(_first_two, x))
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
            shapes = [shape for given, out, _ in calls for shape in (*given, *out)]
            numbers = max((math.prod(shape) // 3 for shape in shapes), default=0)
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
            _same_draws()
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


# --- checking -----------------------------------------------------------------------------------


@precision(tf32=False)
def _agrees(tape: Tape | WholeTape, model: nn.Module, loss: Loss, x: Any, y: Any) -> bool:
    """Return whether the tape's per-sample gradients equal autograd's on the same forward pass.

    Full float32 precision is needed: with the eleven bits of TF32 a wrong formula could pass.
    """
    expected = _autograd(model, loss, x, y, tape.layout)
    try:
        _same_draws()
        gradients = tape(x, y)
        before = _generators()
        each, norms = gradients.per_sample(), gradients.norms()
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        return False  # PyTorch does not support this tape; the next candidate may work
    if not all(map(torch.equal, before, _generators())):
        # A second run of a unit drew new random numbers, so its dropout masks differ from those
        # of the forward pass.
        return False
    tolerance = _tolerance(each.dtype)
    off = float(expected.abs().max()) * tolerance
    sizes: Tensor = torch.linalg.vector_norm(expected, dim=1, dtype=torch.float64)
    # A norm includes its rounding bound: some percent where thousands of positions are summed.
    # It must never be too small.
    norms_agree = (norms >= (1 - 10 * tolerance) * sizes - off) & (norms <= 1.1 * sizes + off)
    return torch.allclose(each, expected, rtol=0.0, atol=off) and bool(norms_agree.all())


@contextmanager
def _checkable(tape: Tape | WholeTape, model: nn.Module) -> Iterator[None]:
    """Switch dropout off while a `WholeTape` is compared with autograd.

    A whole model draws different dropout masks for single samples than for a batch. A tape of units
    is compared with dropout on: a unit that went through `torch.func` with other masks than in the
    forward pass has a wrong gradient and must fail here.
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
    """Return the gradient of each sample by its own backward pass.  # [sample, parameter]"""
    _same_draws()
    parameters = dict(model.named_parameters())
    leaves = [parameters[name] for name in layout.names]
    with torch.enable_grad():
        losses = loss(call(model, x), y)
    if not losses.requires_grad:
        return layout.blank.new_zeros(len(losses), layout.size)
    rows = []
    for sample_loss in losses:
        gradients = torch.autograd.grad(sample_loss, leaves, retain_graph=True, allow_unused=True)
        pairs = zip(layout.names, gradients, strict=True)
        rows.append(layout.join({name: g.to_dense() for name, g in pairs if g is not None}))
    return torch.stack(rows)


def _tolerance(dtype: torch.dtype) -> float:
    """Return how far two orders of the same operations may differ, relative to the maximum."""
    return math.sqrt(torch.finfo(dtype).eps) / 3


def _forward(model: nn.Module, loss: Loss, x: Any, y: Any) -> Tensor:
    _same_draws()
    with torch.no_grad():
        return loss(call(model, x), y)


@dataclass(frozen=True)
class _Called:
    """The inputs and outputs of one call of a module."""

    path: str
    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


def _calls(model: nn.Module, x: Any) -> list[_Called]:
    """Return every call of every module, innermost first."""
    calls: list[_Called] = []
    handles = [
        module.register_forward_hook(_CallHook(calls, path), with_kwargs=True)
        for path, module in model.named_modules()
    ]
    try:
        _same_draws()
        with torch.no_grad():
            call(model, x)
    finally:
        for handle in handles:
            handle.remove()
    return calls


class _CallHook:
    """A forward hook that copies inputs and outputs."""

    def __init__(self, calls: list[_Called], path: str) -> None:
        self._calls, self._path = calls, path

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = [leaf.clone() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf.clone() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self._calls.append(_Called(self._path, module, inputs, outputs))


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore torch's generators and the model's buffers on exit."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    try:
        with torch.random.fork_rng(devices=_gpus()):
            yield
    finally:
        for name, buffer in model.named_buffers():
            if not torch.equal(buffer, before[name]):
                buffer.data.copy_(before[name])


def _same_draws() -> None:
    """Reset torch's generators, so that every pass draws the same random numbers.

    `torch.manual_seed` would also initialise GPUs that are not in use.
    """
    torch.default_generator.manual_seed(0)
    if _gpus():
        torch.cuda.manual_seed_all(0)


def _generators() -> list[Tensor]:
    """Return the states of torch's generators."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in _gpus())]


def _gpus() -> Sequence[int]:
    """Return the indices of the GPUs if CUDA is in use."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]


def _three(value: Any) -> Any:
    """Return three samples, finite ones if there are any; repeat samples if there are fewer.

    The second sample differs from the first in as many tensors as possible, so that exchanging the
    two changes the batch.
    """
    leaves = [leaf.reshape(len(leaf), -1) for leaf in tree_leaves(value)]
    finite = torch.stack([leaf.isfinite().all(dim=1).cpu() for leaf in leaves]).all(dim=0)
    rows = finite.nonzero().flatten().tolist() or list(range(len(finite)))
    differences = [(leaf != leaf[rows[0]]).any(dim=1).cpu() for leaf in leaves]
    differ = torch.stack(differences).sum(dim=0)  # [sample]
    second = max(rows, key=differ.tolist().__getitem__)
    rows = [rows[0], second, *(i for i in rows if i not in (rows[0], second)), rows[0]][:3]
    return tree_map(lambda t: t[torch.tensor(rows, device=t.device)], value)


def _first_two(value: Any) -> Any:
    return value[:2]


def _first_changed(value: Tensor) -> Tensor:
    """Return the samples with the first one changed.

    Floating-point values are scaled and shifted. Tokens are replaced by those of the second sample.
    If these are equal, every token becomes the smallest of the batch, which is valid at every
    position.
    """
    changed = value.clone()
    if value.is_floating_point():
        shift = torch.linspace(-2, 2, value[0].numel()).reshape(value[0].shape).to(value)
        changed[0] = 3 * value[0] + shift
    else:
        changed[0] = value.amin() if torch.equal(value[0], value[1]) else value[1]
    return changed


def _first_changed_target(value: Tensor) -> Tensor:
    """Return the targets with the first one replaced by the second, which is a valid value."""
    changed = value.clone()
    changed[0] = value[1]
    return changed


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether the tensors are equal up to rounding; NaN equals NaN."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = 1e3 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
