"""A rule over a whole batch, held to its word.

The rule is mapped sample by sample (`torch.func.vmap`); those of this package that declare themselves elementwise are
called on the batch at once. Whatever comes back, these hold, because here they are enforced and not believed:

    ‖statistic_i‖ ≤ 1,   |γ_i| · ‖g_i‖ ≤ S,   a sample that is not kept contributes exactly nothing.

| the rule returns | becomes |
|---|---|
| a weight that is NaN or infinite | 0 |
| |γ| · ‖g‖ > S | ±S/‖g‖, and it is counted |
| |γ| > 2¹⁰⁰ · S, however small ‖g‖ is | ±2¹⁰⁰ · S, and it is counted |
| a statistic longer than 1 | the same direction, length 1 |
| a statistic with a NaN or infinite entry | 0 in that place |
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from evenclip.rules.rule import Rule

__all__ = ["Guarded"]

Method = Callable[[Tensor, Tensor, Tensor], Tensor]  # (norm, group, public) -> one sample's value

# C0/‖g‖ · ‖g‖ may come out a few units in the last place above C0. Norms are rounded up by far more than that, so it is
# neither held nor counted as a lie.
_ROUNDING = 1 + 2.0**-50
# A rule may claim no bound at all (S = ∞); its weights are numbers all the same.
_FINITE = sys.float_info.max
# A shorter gradient is held as if it were this long: its weight stays a number in float32, where 0 · ∞ would be NaN.
_SHORTEST = 2.0**-100


@dataclass(frozen=True)
class Guarded:
    """`rule`, mapped over batches and held to its bounds.

    Attributes:
        rule: the rule.
        blind: whether no number may be looked at while computing, because the step is traced or mapped over runs.
    """

    rule: Rule
    blind: bool = False

    def statistics(self, norms: Tensor, group: Tensor, state: Tensor, keep: Tensor | None) -> Tensor:
        """The sum over the kept samples of their statistics, each of length at most 1.  # [m], float64

        Args:
            norms: [sample], float64
            group: [sample], int64
            state: the rule's public state
            keep: [sample], bool; None keeps all
        """
        each = self._map(self.rule.statistic, norms, group, state)
        if each.dtype == torch.bool and each.ndim == 1:  # a yes or no is no longer than 1
            return (each if keep is None else each & keep).sum(dim=0, keepdim=True, dtype=torch.float64)
        each = each.unsqueeze(1) if each.ndim == 1 else each if each.ndim == 2 else each.flatten(1)  # [sample, m]
        each = each.to(torch.float64)
        if each.numel() == 0:
            return each.new_zeros(each.shape[1])
        lengths: Tensor = torch.linalg.vector_norm(each, dim=1, keepdim=True)
        if not (self._sees(lengths) and float(lengths.max()) <= _ROUNDING):  # NaN is not
            each = each.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            each = each / torch.linalg.vector_norm(each, dim=1, keepdim=True).clamp(min=1.0)
        if keep is not None:
            each = torch.where(keep.unsqueeze(1), each, 0.0)
        return each.sum(dim=0)

    def weights(
        self, norms: Tensor, group: Tensor, now: Tensor, S: float | Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """γ_i with |γ_i| · norms_i ≤ S, and which of them had to be held to it (None: the rule is seen to have kept
        its word).  # [sample] float64, [sample] bool
        """
        raw = self._map(self.rule.weight, norms, group, now).to(torch.float64)
        lengths = norms.clamp(min=_SHORTEST)
        if self._sees(raw) and raw.shape[0] and _longest(raw * lengths) <= min(S * _ROUNDING, _FINITE):  # NaN is not
            return (raw if keep is None else torch.where(keep, raw, 0.0)), None
        raw = raw.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        clamped = (raw * lengths).abs() > S * _ROUNDING
        held = torch.where(clamped, raw.sign() * (S / lengths), raw)
        return (held, clamped) if keep is None else (torch.where(keep, held, 0.0), clamped & keep)

    def resting(self, nows: Tensor, groups: int) -> Tensor:
        """The weight of a zero gradient, for each step's `now` and each group; a smaller one is clipped.

        nows: [step, ...] -> [step, group]
        """
        zero, group = nows.new_zeros(groups, dtype=torch.float64), torch.arange(groups, device=nows.device)
        each_group = torch.func.vmap(self.rule.weight, in_dims=(0, 0, None))
        weights: Tensor = torch.func.vmap(each_group, in_dims=(None, None, 0))(zero, group, nows)
        return weights.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    @property
    def is_ours(self) -> bool:
        """Whether the rule is one of this package, which is what its fields say it is and nothing else."""
        return type(self.rule).__module__.startswith("evenclip.rules.")

    @cached_property
    def _at_once(self) -> bool:
        """Whether the rule is called on the whole batch: only our own, which tests prove to do the same to each sample.

        A stranger's word is not enough: a rule that is handed the batch can look at it.
        """
        return self.rule.elementwise and self.is_ours

    def _sees(self, x: Tensor) -> bool:
        """Whether the numbers can be looked at here and now, for nothing: on the CPU, and not blind."""
        return x.is_cpu and not self.blind

    def _map(self, method: Method, norms: Tensor, group: Tensor, public: Tensor) -> Tensor:
        """`method(norm, group, public)` for every sample."""
        if self._at_once:
            return method(norms, group, public)
        if len(norms) == 0:  # vmap refuses an empty axis
            one = method(norms.new_zeros(()), group.new_zeros(()), public)
            return one.new_zeros((0, *one.shape))
        return torch.func.vmap(method, in_dims=(0, 0, None))(norms, group, public)


def _longest(x: Tensor) -> float:
    """The largest |x|."""
    return float(torch.linalg.vector_norm(x, ord=math.inf))
