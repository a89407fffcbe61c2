"""Choose how to compute a model's per-sample gradients, and check that the model allows them.

Before training, `plan` runs a few samples through the model. It determines and checks:

1. why the samples are independent: by the types of layers and loss; by construction, because each
   sample passes by itself, mapped over the batch; or as far as a test shows, for models that cannot
   be mapped;
2. the units: layers with a formula; other parameters are differentiated directly;
3. that a sample's numbers are the same alone and in company (`evenclip.gradients.mixing`). A model
   of which each sample passes by itself would be private without that, but it would not be the
   model that its author meant;
4. that the per-sample gradients equal those of autograd. If they do not (for example if a parameter
   is used outside its layer), the next way is tried. If all fail, the model is refused.

The error message names the module and says what to do instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from evenclip.gradients.calls import call, count
from evenclip.gradients.draws import foreign_draws
from evenclip.gradients.errors import ModelError
from evenclip.gradients.foreign import foreign_operator
from evenclip.gradients.known_layers import independent_by_layers
from evenclip.gradients.layout import Layout
from evenclip.gradients.losses import Loss, per_sample
from evenclip.gradients.mixing import mixing_module
from evenclip.gradients.partition import alone, at_once, mapped
from evenclip.gradients.precision import precision
from evenclip.gradients.state import ModelState
from evenclip.gradients.tape import Independence, Tape, WholeTape
from evenclip.gradients.trial import (
    generator_states,
    repeated,
    same_draws,
    three_samples,
    undisturbed,
    varied,
)

__all__ = ["ModelError", "check_plan", "plan"]

# Samples that pass together in the test that they are independent, and how many pass alone if each
# of them will pass by itself. A model may behave in another way above 64.
_COMPANY, _ALONE = 66, 3


def plan(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Any,
    independence: str | None = None,
    *,
    maps: bool = True,
) -> Tape | WholeTape:
    """Choose the tape for this model and loss, and check it on a few samples.

    Args:
        model: in the mode (train or eval) in which it will be used.
        loss: see `evenclip.gradients.losses`.
        x: inputs of at least one sample. Three samples are used. With more to choose from, it is
            more likely that exchanging two of them changes the loss.
        y: their targets.
        independence: "tested" passes the samples of a block at once, and tests that they do not
            influence each other; by default they pass by themselves wherever that is possible,
            unless the types of the layers show that they are independent.
        maps: whether passes may be mapped, which torch cannot do where parameters are sharded.
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
    each = per_sample(loss)
    x3, y3 = three_samples((x, y))
    with undisturbed(model, each):
        _refuse_draws(model, each, x3, y3)
        _stateless_forward(model, each, x3, y3)
        if independence is None and independent_by_layers(model, loss, x3, y3):
            tape = _first_right(model, each, x3, y3, at_once(model, each, x3, Independence.LAYERS))
            if tape is not None:
                return tape
        company = _company(model, each, x, y)
        _refuse_mixing(model, each, *company, alone=_ALONE)
        ways = at_once(model, each, x3, Independence.TESTED)
        maps = maps and not _calls_foreign(model, each, x3, y3)
        if independence is None and maps:
            tape = _first_right(model, each, x3, y3, mapped(model, each, x3))
            if tape is not None:
                return tape
        further = alone(model, each, x3, y3, maps=maps)
        tape = _first_right(model, each, x3, y3, itertools.chain(ways, further))
        if tape is not None:
            if tape.independence is Independence.TESTED:
                _refuse_mixing(model, each, *company, alone=_COMPANY)
            return tape
    raise _unverified(model)


def _first_right(
    model: nn.Module, loss: Loss, x: Any, y: Any, tapes: Iterable[Tape | WholeTape]
) -> Tape | WholeTape | None:
    """Return the first tape whose gradients are those of autograd; None if there is none."""
    for tape in tapes:
        with tape.recording(), _checkable(tape, model):
            if _agrees(tape, model, loss, x, y):
                same_draws()
                tape.cancels = tape(x, y).cancels
                return tape
    return None


def check_plan(tape: Tape | WholeTape, loss: Loss, x: Any, y: Any) -> None:
    """Check on given samples a tape that was planned on others, and that they do not mix.

    Samples of no use are skipped.

    Raises:
        ModelError: the samples influence each other, or their gradients are not autograd's.
    """
    model, loss = tape.model, per_sample(loss)
    x3, y3 = three_samples((x, y))
    with undisturbed(model, loss):
        reference = _stateless_forward(model, loss, x3, y3)
        if not bool(reference.isfinite().all()):
            return
        _refuse_mixing(model, loss, x3, y3, alone=3)
        with tape.recording(), _checkable(tape, model):
            if not _agrees(tape, model, loss, x3, y3, longest=math.inf):
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
    """Return the losses; raise if the forward pass changes the model."""
    state = ModelState(model)
    losses = _forward(model, loss, x, y)
    state.check()
    return losses


def _company(model: nn.Module, loss: Loss, x: Any, y: Any) -> tuple[Any, Any]:
    """Return as many samples as are tested together, different ones if the model takes them."""
    company = varied(x, y, _COMPANY)
    try:
        _forward(model, loss, *company)
    except Exception:  # anything that a model may raise for numbers that it does not expect
        return repeated(x, y, _COMPANY)
    return company


def _refuse_draws(model: nn.Module, loss: Loss, x: Any, y: Any) -> None:
    """Raise if a pass draws random numbers that are not fresh."""

    def compute() -> None:
        with torch.no_grad():
            loss(call(model, x), y)

    drawn = foreign_draws(compute)
    if drawn is not None:
        raise ModelError(
            f"A pass through the model or its loss draws random numbers {drawn}, which may depend "
            "on other records: on the place of a sample in its batch, or on how many passed "
            "before. Draw them from torch's generator as it is, or keep fixed numbers in a buffer."
        )


def _calls_foreign(model: nn.Module, loss: Loss, x: Any, y: Any) -> bool:
    """Return whether operators outside of torch's own are called, for a batch or for one sample."""
    both = partial(_both_ways, model, loss)
    alone = tree_map(_first_sample, (x, y))
    return any(foreign_operator(partial(both, *given)) is not None for given in ((x, y), alone))


def _both_ways(model: nn.Module, loss: Loss, x: Any, y: Any) -> None:
    """Pass samples forward and back."""
    same_draws()
    with torch.enable_grad():
        losses = loss(call(model, x), y)
        if losses.requires_grad:
            leaves = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(losses.sum(), leaves, allow_unused=True)


def _first_sample(value: Any) -> Any:
    """Return a batch of the first sample; return other values unchanged."""
    return value[:1] if isinstance(value, Tensor) and value.ndim else value


def _refuse_mixing(model: nn.Module, loss: Loss, x: Any, y: Any, *, alone: int) -> None:
    """Raise if the samples influence each other."""
    where = mixing_module(model, loss, x, y, alone=alone)
    if where is not None:
        raise ModelError(
            f"The samples of a batch influence each other in {where}: a sample's numbers depend on "
            "the other samples of its batch. Private training needs samples that are computed "
            "independently; use layers that normalise or attend within one sample, and a loss of "
            "one sample at a time."
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
    """Switch dropout off while a tape that passes single samples is compared with autograd.

    A model draws different dropout masks for single samples than for a batch. A tape of units
    is compared with dropout on: a unit that went through `torch.func` with other masks than in the
    forward pass has a wrong gradient and must fail here.
    """
    modes = [(module, module.training) for module in model.modules()]
    if isinstance(tape, WholeTape) or tape.independence is Independence.CONSTRUCTION:
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
