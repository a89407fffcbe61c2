"""Whether a model computes the same for samples in one batch as for each by itself.

A model of which each sample passes by itself is private whatever it would do with a batch. If it
would do something else, it is not the model that its author meant. The losses of all samples of a
batch are compared with those of mapped passes, with the given parameters and with changed ones, in
float64 where the model allows it; and so are a few samples' gradients, with changed parameters. So
a head that starts at zero hides nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from evenclip.gradients.losses import Loss
from evenclip.gradients.mapped import MappedPass
from evenclip.gradients.partition import mapped
from evenclip.gradients.tape import LossOf
from evenclip.gradients.trial import first_three, generator_states, same_draws
from evenclip.gradients.verification import first_right
from evenclip.gradients.wide import change, differ, least_tolerance, wide, without_dropout

__all__ = ["is_consistent"]


def is_consistent(model: nn.Module, loss: Loss, x: Any, y: Any) -> bool:
    """Return whether samples have the same losses and gradients together and each by itself.

    False for a model that draws random numbers also in evaluation mode, as nothing is seen then.

    Args:
        model: a model whose passes can be mapped; it is not changed.
        loss: a loss per sample.
        x: inputs of some samples.
        y: their targets.
    """
    tried, given = wide(model, loss, x, y)
    if not _same_losses(tried, loss, *given):
        return False
    change(tried)
    few, targets = tree_map(first_three, given)
    right, _ = first_right(tried, loss, few, targets, mapped(tried, loss, few))
    return right is not None and _same_losses(tried, loss, *given)


def _same_losses(tried: nn.Module, loss: Loss, x: Any, y: Any) -> bool:
    """Return whether samples have the same losses; False if these are random."""
    losses = _losses(LossOf(tried, loss), x, y)
    return losses is not None and not differ(*losses, least_tolerance(tried))


def _losses(model: LossOf, x: Any, y: Any) -> tuple[Tensor, Tensor] | None:
    """Return the losses of samples together, and of each by itself; None if they are random."""
    for everywhere in (False, True):
        with without_dropout(model, everywhere=everywhere), torch.no_grad():
            same_draws()
            before = generator_states()
            together = model(x, y)
            if all(map(torch.equal, before, generator_states())):
                return together, MappedPass(model, model.loss, ()).output((x, y))
    return None
