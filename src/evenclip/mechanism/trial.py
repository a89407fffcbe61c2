"""A trial of a custom rule before training: numbers that are not finite are reported at once.

The mechanism would use the weight 0 for such samples, and the model would learn from noise alone.
A rule that reads group labels without declaring it is refused, because the privacy statement would
say that it did not use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from evenclip.mechanism.mechanism import Mechanism
from evenclip.rules import RULES, Rule

__all__ = ["try_rule"]

_NORMS = (0.01, 1.0, 100.0)
_LONGEST = 1 + 1e-6  # lengths of statistics are rounded
# Norms and largest number of groups for which the groups are exchanged.
_GRID, _GROUPS = tuple(10.0 ** (k / 2) for k in range(-6, 7)), 100


def try_rule(mechanism: Mechanism, records: Mapping[str, Any] | None = None) -> None:
    """Take one step of a custom rule with samples of ordinary norms, one of each group.

    Args:
        mechanism: the rule with its bounds enforced.
        records: `loss`, `output` and `y` of a few records, to try the rule's loss with; None: it is
            not tried.  # [sample, ...]

    Raises:
        ValueError: if a method fails or returns a number that is not finite, if a statistic is
            longer than 1, or if a method reads the group and `uses_groups` does not declare it. A
            weight above its bound is clamped and counted in training.
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
    if groups > 1 and not mechanism.rule.uses_groups:
        _exchange_groups(mechanism, state, now, records)
        # Groups with equal thresholds cannot be told apart, so try different ones too.
        _exchange_groups(mechanism, _spread(state), _spread(now), records)


def _exchange_groups(
    mechanism: Mechanism, state: Tensor, now: Tensor, records: Mapping[str, Any] | None
) -> None:
    """Raise if a method returns other values for the same samples in other groups.

    A method that fails is passed over: it need not take these values, and a failure in training is
    reported there.
    """
    records = records or {}
    further = dict(records) if mechanism.wants and records else dict(mechanism.like)
    rows = max([len(_GRID), *(len(leaf) for leaf in tree_leaves([further, records]))])
    groups = min(mechanism.groups, _GROUPS)
    norms = torch.tensor(_GRID, dtype=torch.float64).repeat(-(-rows // len(_GRID)))[:rows]
    norms, group = norms.repeat(groups), torch.arange(groups).repeat_interleave(rows)
    further = {name: _cycled(further[name], rows, groups) for name in mechanism.wants if further}
    records = {name: _cycled(value, rows, groups) for name, value in records.items()}
    tries: dict[str, Callable[[], Any]] = {
        "statistic": lambda: mechanism.each_statistic(norms, group, state, further),
        "weight": lambda: mechanism.each_weight(norms, group, now),
    }
    if records and type(mechanism.rule).loss is not Rule.loss:
        tries["loss"] = lambda: _losses(mechanism, records, group, state)
    for method, evaluate in tries.items():
        try:
            values = tree_leaves(evaluate())
        except Exception:  # anything that a custom rule may raise
            continue
        if not all(_equal(value.reshape(groups, rows, -1)) for value in values):
            raise ValueError(
                f"{method} of {mechanism.rule.name} reads the group, and the class does not "
                "declare it; write uses_groups: ClassVar[bool] = True in the class, so that the "
                "privacy statement says that group labels entered training."
            )


def _losses(
    mechanism: Mechanism, records: Mapping[str, Any], group: Tensor, state: Tensor
) -> Tensor:
    """Return the rule's loss of every record.  # [sample]"""

    def one(loss: Tensor, output: Any, y: Any, k: Tensor) -> Tensor:
        changed: Tensor = mechanism.rule.loss(loss, output, y, k, state)
        return changed

    with mechanism.guard:
        return torch.func.vmap(one)(records["loss"], records["output"], records["y"], group)


def _cycled(value: Any, rows: int, groups: int) -> Any:
    """Return the samples repeated in turn up to `rows`, once for each group, on the CPU."""

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().cpu()[(torch.arange(rows) % len(leaf)).repeat(groups)]

    return tree_map(repeated, value)


def _spread(value: Tensor) -> Tensor:
    """Return the values, each changed by another factor of 1 to 2."""
    if not value.is_floating_point():
        return value
    factor = torch.linspace(1, 2, value.numel(), dtype=value.dtype).reshape(value.shape)
    return torch.where(value == 0, factor - 1, value * factor)


def _equal(values: Tensor) -> bool:
    """Return whether the values are those of the first group, up to rounding.

    values: [group, sample, ...]
    """
    values = values.to(torch.float64)
    return torch.allclose(
        values, values[:1].expand_as(values), rtol=1e-5, atol=1e-9, equal_nan=True
    )


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
