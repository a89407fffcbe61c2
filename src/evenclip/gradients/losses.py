"""One loss per sample, from any loss.

The loss of sample i is the user's loss on a batch of that sample alone. So the loss may average,
sum or not reduce, and it cannot let the samples of a batch influence each other.

- A torch loss with a `reduction` is called with `reduction="none"`; its values are then averaged
  (or summed) within each sample.
- The values of a function that returns one value per sample are used directly; several values per
  sample are summed.
- A function that returns one number is mapped over the samples.

An averaging torch loss differs from this in two ways. Class weights here weigh the samples,
although the average over a batch of one would cancel them. A sample's average counts the positions
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

__all__ = ["Loss", "per_sample", "user_loss"]

Loss = Callable[[Any, Any], Tensor]


def per_sample(loss: Loss) -> Loss:
    """Return `loss` as a function (output, target) -> [sample].

    >>> each = per_sample(torch.nn.functional.mse_loss)
    >>> each(torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.zeros(2, 2))
    tensor([5., 0.])
    """
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        unreduced = copy.deepcopy(loss)
        unreduced.reduction = "none"  # type: ignore[assignment]  # nn.Module types all attributes
        return _Reduced(unreduced, loss.reduction == "mean", ())
    if not isinstance(loss, nn.Module) and "reduction" in _parameters(loss):
        return _Reduced(
            loss, _parameters(loss)["reduction"].default == "mean", (("reduction", "none"),)
        )
    return _Unknown(loss)


def user_loss(loss: Any) -> Any:
    """Return the loss that the user gave, without what this package put around it.

    >>> isinstance(user_loss(per_sample(nn.MSELoss())), nn.MSELoss)
    True
    """
    while type(loss).__module__.startswith("evenclip.") and hasattr(loss, "plain"):
        loss = loss.plain
    return loss


@dataclass(frozen=True)
class _Reduced:
    """A torch loss, reduced within each sample only."""

    plain: Callable[..., Tensor]
    _mean: bool
    _options: tuple[tuple[str, str], ...]

    def __call__(self, output: Any, target: Any) -> Tensor:
        values = self.plain(output, target, **dict(self._options))
        if values.ndim == 0 or values.shape[0] != _count(target):
            raise _wrong_shape(values, target)
        if values.ndim == 1:
            return values
        values = values.flatten(1)
        return values.mean(dim=1) if self._mean else values.sum(dim=1)


@dataclass(frozen=True)
class _Unknown:
    """A custom loss: values per sample are used directly, one number is mapped over samples."""

    plain: Loss

    def __call__(self, output: Any, target: Any) -> Tensor:
        values = self.plain(output, target)
        if values.ndim > 0 and values.shape[0] == _count(target):
            return values if values.ndim == 1 else values.flatten(1).sum(dim=1)
        if values.numel() != 1:
            raise _wrong_shape(values, target)
        return torch.func.vmap(self._alone)(output, target)

    def _alone(self, output: Any, target: Any) -> Tensor:
        """Return the loss of a batch of one."""
        batch = torch.utils._pytree.tree_map(_with_sample_axis, (output, target))
        return self.plain(*batch).reshape(())


def _count(target: Any) -> int:
    """Return the number of samples."""
    first = target if isinstance(target, Tensor) else torch.utils._pytree.tree_leaves(target)[0]
    return first.shape[0]  # not int(): it may be a symbolic size


def _wrong_shape(values: Tensor, target: Any) -> ValueError:
    return ValueError(
        f"The loss returned shape {list(values.shape)} for {_count(target)} samples; it must "
        "return one number, or one value per sample along the first axis."
    )


def _with_sample_axis(value: Any) -> Any:
    return value.unsqueeze(0) if isinstance(value, Tensor) else value


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function; none if it has no signature (builtins)."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}
