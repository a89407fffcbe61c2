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

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from evenclip.gradients.layout import Layout
from evenclip.gradients.losses import Loss, per_sample
from evenclip.gradients.partition import candidates
from evenclip.gradients.precision import precision
from evenclip.gradients.tape import Tape, WholeTape, call, count
from evenclip.gradients.trial import (
    change_first,
    change_first_target,
    generator_states,
    same,
    same_draws,
    three_samples,
    undisturbed,
)

__all__ = ["ModelError", "check_plan", "plan"]


class ModelError(ValueError):
    """A model that cannot be trained privately; the message says why and what to do.

    Attributes:
        unverified: whether no way to compute its gradients agreed with autograd on some samples;
            on others one may.
    """

    unverified = False


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
    _refuse_parameters(model)
    if not count(x):
        raise ModelError("No sample was given to analyse the model with; give at least one.")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ModelError(
            "torch.autocast is on: its products have fewer bits than the parameters, so norms "
            "would be too small. Switch it off, or convert the model itself (model.bfloat16())."
        )
    loss = per_sample(loss)
    x, y = three_samples((x, y))
    with undisturbed(model):
        reference = _stateless_forward(model, loss, x, y)
        _refuse_mixing(model, loss, x, y, reference)
        for tape in candidates(model, loss, x, y):
            with tape.recording(), _checkable(tape, model):
                if _agrees(tape, model, loss, x, y):
                    same_draws()
                    tape.cancels = tape(x, y).cancels
                    return tape
    raise _unverified(model)


def check_plan(tape: Tape | WholeTape, loss: Loss, x: Any, y: Any) -> None:
    """Check on three samples a tape that was planned on others; samples of no use are skipped.

    Raises:
        ModelError: the samples influence each other, or their gradients are not autograd's.
    """
    model, loss = tape.model, per_sample(loss)
    x, y = three_samples((x, y))
    with undisturbed(model):
        reference = _stateless_forward(model, loss, x, y)
        if not bool(reference.isfinite().all()):
            return
        _refuse_mixing(model, loss, x, y, reference)
        with tape.recording(), _checkable(tape, model):
            if not _agrees(tape, model, loss, x, y, longest=math.inf):
                raise _unverified(model)


def _unverified(model: nn.Module) -> ModelError:
    error = ModelError(
        f"The per-sample gradients of {type(model).__name__} could not be verified against "
        "autograd on three samples. Is its forward pass random in a way that does not come from "
        "torch's generator, does it change its own state, or are its gradients not finite?"
    )
    error.unverified = True
    return error


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


def _refuse_parameters(model: nn.Module) -> None:
    """Raise for a model without trainable parameters, or with parameters in float16."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            "The model has no trainable parameter; set requires_grad=True on what is to be trained."
        )
    small = next((n for n, p in model.named_parameters() if p.dtype == torch.float16), None)
    if small is not None:
        raise ModelError(
            f"The parameter {small!r} has the dtype float16, in which gradients underflow to 0 and "
            "overflow to ∞. Use the range of float32: model.float() or model.bfloat16()."
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
    changed = _forward(model, loss, tree_map(change_first, x), tree_map(change_first_target, y))
    if same(changed[1:], reference[1:]):
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
    before, after = _calls(model, x), _calls(model, tree_map(change_first, x))
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
        a.shape == b.shape and a.ndim and len(a) == n and not same(a[1:], b[1:]) for a, b in pairs
    )


# --- checking -----------------------------------------------------------------------------------


@precision(tf32=False)
def _agrees(
    tape: Tape | WholeTape, model: nn.Module, loss: Loss, x: Any, y: Any, longest: float = 1.1
) -> bool:
    """Return whether the tape's per-sample gradients equal autograd's on the same forward pass.

    A norm may be `longest` times as long, because it includes a bound on its rounding: some percent
    where thousands of positions are summed, and any amount where they cancel. It must never be too
    small.

    Full float32 precision is needed: with the eleven bits of TF32 a wrong formula could pass.
    """
    expected = _autograd(model, loss, x, y, tape.layout).double()
    try:
        same_draws()
        gradients = tape(x, y)
        before = generator_states()
        each, norms = gradients.per_sample(), gradients.norms()
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        return False  # PyTorch does not support this tape; the next candidate may work
    if not all(map(torch.equal, before, generator_states())):
        # A second run of a unit drew new random numbers, so its dropout masks differ from those
        # of the forward pass.
        return False
    tolerance = _tolerance(tape.layout.blank.dtype)
    off = float(expected.abs().max()) * tolerance
    sizes: Tensor = torch.linalg.vector_norm(expected, dim=1, dtype=torch.float64)
    if not torch.allclose(each, expected, rtol=0.0, atol=off):
        return False
    if bool((norms < (1 - 10 * tolerance) * sizes - off).any()):
        return False
    return not bool((norms > longest * (sizes + off)).any())


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
    same_draws()
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
    same_draws()
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
        same_draws()
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
