"""Call a rule sample by sample, so that it cannot see the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from evenclip.mechanism.calls import failure
from evenclip.rules import Rule

__all__ = ["map_over_samples"]

_NO_TENSOR = "not a tensor"
Method = Callable[..., Any]  # (norm, group, public) -> one sample's value


def map_over_samples(
    rule: Rule,
    name: str,
    norms: Tensor,
    group: Tensor,
    public: Tensor,
    further: Mapping[str, Any],
) -> Any:
    """Return `rule.NAME(norm, group, public, **further)` of every sample, by `torch.func.vmap`.

    Args:
        rule: the rule.
        name: "statistic" or "weight".
        norms: [sample], float64
        group: [sample], int64
        public: the rule's state or `now`, the same for every sample.
        further: further keyword arguments.  # [sample, ...]

    Raises:
        ValueError: if the method cannot be mapped.
    """
    method: Method = getattr(rule, name)
    public = public.clone()  # a custom rule may change it in place
    try:
        if norms.shape[0] == 0:  # vmap refuses an empty axis; len() would fix a traced size
            one = tree_map(_first, further)
            value = method(norms.new_zeros(()), group.new_zeros(()), public, **one)
            return tree_map(_none_of, value)
        if not further:
            return torch.func.vmap(method, in_dims=(0, 0, None))(norms, group, public)
        return torch.func.vmap(
            lambda norm, k, more: method(norm, k, public, **more), in_dims=(0, 0, 0)
        )(norms, group, further)
    except Exception as error:  # anything that a custom rule may raise
        if not str(error).startswith(("vmap", _NO_TENSOR)):
            raise failure(rule, name, error) from error
        raise ValueError(
            f"{name} of {rule.name} cannot be mapped over samples. It is given one sample's norm "
            "and group as tensors without axes and must return a tensor; write torch.where instead "
            "of if, torch.arange(m) == index instead of h[index] = 1, and read no value by float() "
            "or .item()."
        ) from error


def _first(value: Any) -> Any:
    """Return the first sample of a tensor."""
    return value.select(0, 0) if isinstance(value, Tensor) else value


def _none_of(value: Any) -> Tensor:
    """Return the result for no samples, given that for one.  # [0, ...]"""
    if not isinstance(value, Tensor):
        raise TypeError(_NO_TENSOR)
    return value.new_zeros((0, *value.shape))
