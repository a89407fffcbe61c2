"""Choose how to compute a model's per-sample gradients, and check that the model allows them.

Before training, `plan` runs a few samples through the model. It determines and checks:

1. why the samples are independent: by the types of layers and loss; by construction, because each
   sample passes by itself, mapped over the batch; or as far as a test shows, for models that cannot
   be mapped;
2. the units: layers with a formula; other parameters are differentiated directly;
3. that a sample's numbers are the same alone and in company (`evenclip.gradients.mixing`). A model
   of which each sample passes by itself would be private without that, but it would not be the
   model that its author meant; so a quicker test is enough (`evenclip.gradients.consistency`);
4. that the per-sample gradients equal those of autograd. If they do not (for example if a parameter
   is used outside its layer), the next way is tried. If all fail, the model is refused.

The error message names the module and says what to do instead.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from evenclip.gradients.calls import call, count
from evenclip.gradients.consistency import is_consistent
from evenclip.gradients.draws import foreign_draws
from evenclip.gradients.errors import ModelError, no_batch_of_one
from evenclip.gradients.foreign import foreign_operator
from evenclip.gradients.known_layers import independent_by_layers
from evenclip.gradients.losses import Loss, per_sample
from evenclip.gradients.mixing import mixing_module
from evenclip.gradients.partition import alone, at_once, mapped
from evenclip.gradients.state import ModelState
from evenclip.gradients.tape import Independence, Tape, WholeTape
from evenclip.gradients.trial import (
    first_sample,
    repeated,
    same_draws,
    three_samples,
    undisturbed,
    varied,
)
from evenclip.gradients.verification import checkable, disagreement, first_right

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
    with undisturbed(model, each) as put_back:
        _refuse_draws(model, each, x3, y3)
        _stateless_forward(model, each, x3, y3)
        if independence is None and independent_by_layers(model, loss, x3, y3):
            ways = at_once(model, each, x3, Independence.LAYERS)
            tape, _ = first_right(model, each, x3, y3, ways)
            if tape is not None:
                return tape
        _try_one_sample(model, each, x3, y3)
        company = _company(model, each, x, y)
        why = _why_at_once(model, each, x3, y3) if maps else "its parameters are sharded"
        put_back()
        tape = _other_tape(model, each, (x3, y3), company, independence, why)
    if tape is None:
        raise _unverified(model)
    return tape


def _other_tape(
    model: nn.Module, loss: Loss, three: Any, company: Any, independence: str | None, why: str
) -> Tape | WholeTape | None:
    """Choose the tape for a model that is not of known layers; None if no gradients are right.

    Args:
        model: the model.
        loss: a loss per sample.
        three: inputs and targets of three samples.
        company: those of many samples.
        independence: "tested" if it was chosen that samples pass at once.
        why: why passes cannot be mapped; empty if they may be.
    """
    (x, y), tape, maps = three, None, not why
    if independence is not None:
        why = "this was chosen"
    elif maps:
        tape, why = first_right(model, loss, x, y, mapped(model, loss, x))
        if tape is not None and is_consistent(model, loss, *company):
            return tape
    if tape is None:
        ways = at_once(model, loss, x, Independence.TESTED)
        further = alone(model, loss, x, y, maps=maps)
        tape, _ = first_right(model, loss, x, y, itertools.chain(ways, further))
    tested = tape is not None and tape.independence is Independence.TESTED
    _refuse_mixing(model, loss, *company, alone=_COMPANY if tested else _ALONE)
    if tape is not None and tested:
        tape.why_at_once = why
    return tape


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
        with tape.recording(), checkable(tape, model):
            if disagreement(tape, model, loss, x3, y3, longest=math.inf):
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


def _try_one_sample(model: nn.Module, loss: Loss, x: Any, y: Any) -> None:
    """Raise if the model does not take a batch of one."""
    try:
        _forward(model, loss, *tree_map(first_sample, (x, y)))
    except Exception as error:  # anything that a model may raise
        raise no_batch_of_one(error) from error


def _why_at_once(model: nn.Module, loss: Loss, x: Any, y: Any) -> str:
    """Return the reason not to map passes: an operator that is not torch's own; empty if none."""
    both = partial(_both_ways, model, loss)
    alone = tree_map(first_sample, (x, y))
    names = (foreign_operator(partial(both, *given)) for given in ((x, y), alone))
    name = next(filter(None, names), None)
    return "" if name is None else f"{name} may see the whole batch"


def _both_ways(model: nn.Module, loss: Loss, x: Any, y: Any) -> None:
    """Pass samples forward and back."""
    same_draws()
    with torch.enable_grad():
        losses = loss(call(model, x), y)
        if losses.requires_grad:
            leaves = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(losses.sum(), leaves, allow_unused=True)


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


def _forward(model: nn.Module, loss: Loss, x: Any, y: Any) -> Tensor:
    same_draws()
    with torch.no_grad():
        return loss(call(model, x), y)
