"""One loss per sample, from any loss.

The loss of sample i is the user's loss on a batch of that sample alone. So it does not matter
whether a loss averages, sums or does not reduce; and a loss cannot let the samples of a batch
influence each other.

| the loss is | how it is taken apart |
|---|---|
| a torch loss with a `reduction` | asked for `reduction="none"`, then averaged (or summed) within the sample |
| a function that returns one value per sample | used as it is (several values a sample are summed) |
| a function that returns one number | mapped over samples |

Two things a torch loss does when it averages do not survive that: class weights weigh the samples
(the average over a batch of one would cancel them), and a sample's average counts the positions
that `ignore_index` leaves out as 0.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Loss", "per_sample"]

Loss = Callable[[Any, Any], Tensor]


def per_sample(loss: Loss) -> Loss:
    """`loss` as a function (output, target) -> [sample].

    >>> each = per_sample(torch.nn.functional.mse_loss)
    >>> each(torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.zeros(2, 2))
    tensor([5., 0.])
    """
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        apart = copy.deepcopy(loss)
        apart.reduction = "none"  # type: ignore[assignment]  # torch types every attribute of a module
        return _Reduced(apart, loss.reduction == "mean", ())
    if not isinstance(loss, nn.Module) and "reduction" in _parameters(loss):
        return _Reduced(
            loss, _parameters(loss)["reduction"].default == "mean", (("reduction", "none"),)
        )
    return _Unknown(loss)


@dataclass(frozen=True)
class _Reduced:
    """A torch loss, reduced within each sample only."""

    _loss: Callable[..., Tensor]
    _mean: bool
    _options: tuple[tuple[str, str], ...]

    def __call__(self, output: Any, target: Any) -> Tensor:
        values = self._loss(output, target, **dict(self._options))
        if values.ndim == 0 or values.shape[0] != _count(target):
            raise _wrong_shape(values, target)
        if values.ndim == 1:
            return values
        values = values.flatten(1)
        return values.mean(dim=1) if self._mean else values.sum(dim=1)


@dataclass(frozen=True)
class _Unknown:
    """Somebody's own loss: one value per sample as it is, one number by mapping."""

    _loss: Loss

    def __call__(self, output: Any, target: Any) -> Tensor:
        values = self._loss(output, target)
        if values.ndim > 0 and values.shape[0] == _count(target):
            return values if values.ndim == 1 else values.flatten(1).sum(dim=1)
        if values.numel() != 1:
            raise _wrong_shape(values, target)
        return torch.func.vmap(self._alone)(output, target)

    def _alone(self, output: Any, target: Any) -> Tensor:
        """The loss of a batch of one."""
        one = torch.utils._pytree.tree_map(_with_sample_axis, (output, target))
        return self._loss(*one).reshape(())


def _count(target: Any) -> int:
    """Number of samples."""
    first = target if isinstance(target, Tensor) else torch.utils._pytree.tree_leaves(target)[0]
    return first.shape[0]  # not int(): it may be the name of a size


def _wrong_shape(values: Tensor, target: Any) -> ValueError:
    return ValueError(
        f"The loss returned shape {list(values.shape)} for {_count(target)} samples; it must "
        "return one number, or one "
        "value per sample along the first axis."
    )


def _with_sample_axis(value: Any) -> Any:
    return value.unsqueeze(0) if isinstance(value, Tensor) else value


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function; none where Python cannot tell (builtins)."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}
