"""A trial of a custom rule before training: numbers that are not finite are reported at once.

The mechanism would use the weight 0 for such samples, and the model would learn from noise alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from evenclip.mechanism.mechanism import Mechanism
from evenclip.rules import RULES

__all__ = ["try_rule"]

_NORMS = (0.01, 1.0, 100.0)
_LONGEST = 1 + 1e-6  # lengths of statistics are rounded


def try_rule(mechanism: Mechanism) -> None:
    """Take one step of a custom rule with samples of ordinary norms, one of each group.

    Raises:
        ValueError: if a method fails or returns a number that is not finite, or if a statistic is
            longer than 1. A weight above its bound is clamped and counted in training.
    """
    if type(mechanism.rule) in RULES.values():
        return
    state, groups = mechanism.start(), mechanism.groups
    norms = torch.tensor(_NORMS, dtype=torch.float64).repeat_interleave(groups)
    group = torch.arange(groups).repeat(len(_NORMS))
    further = tree_map(lambda value: _repeated(value, len(norms)), dict(mechanism.like))
    for name, each in mechanism.each_statistic(norms, group, state, further).items():
        flat = each.reshape(len(norms), -1).to(torch.float64)
        lengths = torch.linalg.vector_norm(flat, dim=1)
        what = "statistic" if name == "count" else f"statistic {name!r}"
        _check(mechanism, f"the length of {what}", lengths, norms, group, most=_LONGEST)
    count = mechanism.count(norms, group, state, None, further)
    now, following = mechanism.observe(count, mechanism.constants.B, state, _in_clear)
    mechanism.sensitivity(now)
    _check(mechanism, "weight", mechanism.each_weight(norms, group, now), norms, group)
    mechanism.sensitivity(following)


def _check(
    mechanism: Mechanism, what: str, values: Tensor, norms: Tensor, group: Tensor,
    most: float = torch.inf,
) -> None:  # fmt: skip
    """Raise unless every sample's value is finite and at most `most`."""
    wrong = ~(values.isfinite() & (values <= most))
    if not bool(wrong.any()):
        return
    i = int(wrong.nonzero()[0, 0])
    expected = "a finite number" if most == torch.inf else "at most 1"
    raise ValueError(
        f"{what} of {mechanism.rule.name} is {float(values[i]):g} for a sample of norm "
        f"{float(norms[i]):g} and group {int(group[i])}; it must be {expected}."
    )


def _in_clear(
    name: str, value: Tensor, *, sensitivity: float, multiplier: float, rounding: float
) -> Tensor:
    """Return the value without noise: the samples of a trial are artificial."""
    del name, sensitivity, multiplier, rounding
    return value


def _repeated(value: Any, n: int) -> Any:
    """Return the one sample of a tensor n times."""
    return value.expand(n, *value.shape[1:]) if isinstance(value, Tensor) else value
