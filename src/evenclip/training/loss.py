"""The loss of a rule that changes it: one sample at a time, with public coefficients.

`Rule.loss` gets a sample's plain loss, output, target and group, and the rule's public state. It is
mapped over the batch, so that no sample's loss depends on another sample. `Labelled` targets hold
these values, and pass through the tape like other targets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenclip.gradients.errors import ModelError
from evenclip.gradients.losses import Loss, per_sample
from evenclip.mechanism import Mechanism
from evenclip.rules import Rule

__all__ = ["Labelled", "RuleLoss", "changes_loss", "targets"]


def changes_loss(rule: Rule) -> bool:
    """Return whether the rule changes the user's loss."""
    return type(rule).loss is not Rule.loss


class Labelled(NamedTuple):
    """Targets, with the other values that a rule's loss uses.

    Attributes:
        y: the targets.  # [sample, ...]
        group: [sample]
        state: the rule's public state, once for each sample.  # [sample, ...]
    """

    y: Any
    group: Tensor
    state: Tensor

    @classmethod
    def of(cls, y: Any, group: Tensor, state: Tensor) -> Labelled:
        """Return the targets with a view of the state for each of them."""
        return cls(y, group, state.expand(group.shape[0], *state.shape))


def targets(rule: Rule, y: Any, group: Tensor, state: Tensor) -> Any:
    """Return the targets that the rule's loss needs: y itself, or y with group and state."""
    return Labelled.of(y, group, state) if changes_loss(rule) else y


class RuleLoss:
    """The user's loss, changed by the rule if the targets are `Labelled`."""

    def __init__(self, loss: Loss, mechanism: Mechanism) -> None:
        self.plain, self._rule, self._guard = per_sample(loss), mechanism.rule, mechanism.guard

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss of every sample.  # [sample]

        Raises:
            ValueError: if the rule's loss cannot be mapped over samples, or is not one number.
        """
        if not isinstance(target, Labelled):
            return self.plain(output, target)
        losses: Tensor = self.plain(output, target.y)
        try:
            with self._guard:
                changed: Tensor = torch.func.vmap(self._one)(losses, output, *target)
        except ModelError:
            raise
        except Exception as error:  # anything that a custom rule may raise
            said = " ".join(str(error).split())[:120]
            raise ValueError(
                f"loss of {self._rule.name} cannot be mapped over samples ({said}). It is given "
                "one sample's loss, output, target and group, and must return a tensor; write "
                "torch.where instead of if, and read no value by float() or .item()."
            ) from error
        if changed.shape != losses.shape:
            raise ValueError(
                f"loss of {self._rule.name} returned {changed.shape[1:].numel()} numbers for one "
                "sample; it must return one."
            )
        return changed

    def _one(self, loss: Tensor, output: Any, y: Any, group: Tensor, state: Tensor) -> Any:
        return type(self._rule).loss(self._rule, loss, output, y, group, state)
