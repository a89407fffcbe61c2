"""The mechanism of a step: a rule held to its bounds, and the only road from private to public.

Every driver of a step calls it: plain and compiled runs, several processes, Opacus's loop, the
audit. It knows norms, groups and sums, and no model. In the order of Algorithm 2 (Esipova et al.
2023):

    count        Σ statistic_i                                             private
    observe      the count released; what to clip with now, and next       public from here on
    weights      γ_i                                                       private
    publish      Σ γ_i g_i released and divided by B                       public from here on

The rule is mapped sample by sample (`torch.func.vmap`); rules of this package that declare
themselves elementwise are called on the whole batch. Whatever the rule returns, these bounds are
enforced:

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
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from evenclip.mechanism.release import Release
from evenclip.rules import RULES, Rule

__all__ = ["Mechanism"]

Method = Callable[[Tensor, Tensor, Tensor], Tensor]  # (norm, group, public) -> one sample's value

# C0/‖g‖ · ‖g‖ may come out a few units in the last place above C0. Norms are rounded up by far more
# than that, so such a weight is neither clamped nor counted.
_ROUNDING = 1 + 2.0**-50
# A rule may claim no bound at all (S = ∞); its weights are finite all the same.
_FINITE = sys.float_info.max
# A shorter gradient is clamped as if it were this long: its weight stays finite in float32, where 0
# · ∞ would be NaN.
_SHORTEST = 2.0**-100


@dataclass(frozen=True)
class Mechanism:
    """`rule`, mapped over batches and held to its bounds.

    Attributes:
        rule: the clipping rule.
        groups: number of groups K.
        traceable: whether no value may be read while computing, because the step is being traced.

    Raises:
        ValueError: for a rule that counts without saying with how much noise.

    >>> from evenclip.rules import DPSGDGlobalAdapt
    >>> Mechanism(DPSGDGlobalAdapt(sigma=1.0)).multipliers
    {'count': 10.0, 'gradient': 1.0}
    """

    rule: Rule
    groups: int = 1
    traceable: bool = False

    def __post_init__(self) -> None:
        for name in ("sigma", "sigma_count"):
            _check_multiplier(self.rule, name)
        if self.counts and not self.sigma_count:
            raise ValueError(
                f"{self.rule.name} has a statistic of {self.counts} numbers and no sigma_count; "
                "give it the noise "
                "multiplier of that release."
            )

    @cached_property
    def counts(self) -> int:
        """How many numbers the rule counts."""
        none = torch.zeros(0, dtype=torch.float64)
        return len(self.count(none, none.long(), self.start(), None))

    @cached_property
    def sigma(self) -> float:
        """Noise multiplier of the gradient, read from the rule once: what is added is what the
        ledger says.
        """
        return float(self.rule.sigma)

    @cached_property
    def sigma_count(self) -> float:
        """Noise multiplier of the count, read once; 0 for a rule without any."""
        return float(self.rule.sigma_count or 0.0)

    @cached_property
    def multipliers(self) -> dict[str, float]:
        """Name -> multiplier of what every step releases: what the ledger says, known before the
        step.

        Not `rule.multipliers()`: a custom rule may say anything there.
        """
        gradient = {"gradient": self.sigma if self.rule.bounded else 0.0}
        return {"count": self.sigma_count, **gradient} if self.counts else gradient

    def start(self) -> Tensor:
        """The rule's state before the first step."""
        state = self.rule.init(self.groups)
        if not isinstance(state, Tensor):
            raise ValueError(
                f"init of {self.rule.name} returned {type(state).__name__}; it must return a "
                "tensor, such as "
                "torch.tensor([1.0], dtype=torch.float64)."
            )
        return state.detach().clone()

    # --- a step, in this order ---

    def count(self, norms: Tensor, group: Tensor, state: Tensor, keep: Tensor | None) -> Tensor:
        """The sum over the kept samples of their statistics, each of length at most 1.  # [m],
        float64

        Args:
            norms: [sample], float64
            group: [sample], int64
            state: the rule's public state.
            keep: [sample], bool; None keeps all.
        """
        each = self._map("statistic", norms, group, state)
        if each.dtype == torch.bool and each.ndim == 1:  # True has length 1
            return (each if keep is None else each & keep).sum(
                dim=0, keepdim=True, dtype=torch.float64
            )
        each = (
            each.unsqueeze(1) if each.ndim == 1 else each if each.ndim == 2 else each.flatten(1)
        )  # [sample, m]
        each = each.to(torch.float64)
        if each.numel() == 0:
            return each.new_zeros(each.shape[1])
        lengths: Tensor = torch.linalg.vector_norm(each, dim=1, keepdim=True)
        if not (self._reads(lengths) and float(lengths.max()) <= _ROUNDING):  # NaN is not
            each = each.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            each = each / torch.linalg.vector_norm(each, dim=1, keepdim=True).clamp(min=1.0)
        if keep is not None:
            each = torch.where(keep.unsqueeze(1), each, 0.0)
        return each.sum(dim=0)

    def observe(
        self, count: Tensor, B: float, state: Tensor, release: Release
    ) -> tuple[Tensor, Tensor]:
        """Release the count of the whole batch. What the step clips with, and the state of the next
        step.

        Raises:
            ValueError: for a count of another length than the ledger and the noise are for.
        """
        if len(count) != self.counts:
            raise ValueError(
                f"{self.rule.name} has a statistic of {len(count)} numbers, and had {self.counts} "
                "before the first "
                "step; give it the same length in every step."
            )
        noisy = release("count", count, sensitivity=1.0, multiplier=self.sigma_count)
        if self._is_ours:
            return self.rule.observe(noisy, B, state)
        given = state.clone()  # a custom rule may change it in place
        version = given._version
        found = self.rule.observe(noisy, B, given)
        if not (
            isinstance(found, tuple)
            and len(found) == 2
            and all(isinstance(part, Tensor) for part in found)
        ):
            raise ValueError(
                f"observe of {self.rule.name} must return two tensors, (now, next): what this "
                "step clips with and what "
                "the next one starts from."
            )
        now, following = (
            state if part is given and given._version == version else part for part in found
        )
        return now, following

    def sensitivity(self, now: Tensor) -> float | Tensor:
        """S of a step that clips with `now`: a copy, so that the bound that is enforced is the one
        noise is added for.

        Raises:
            ValueError: unless it is one finite number of at least 0. A rule without noise may have
                no bound.
        """
        if self._is_ours:  # tests prove it of these
            return self.rule.sensitivity(now)
        S: Any = self.rule.sensitivity(now.clone())
        if isinstance(S, Tensor) and S.numel() == 1:
            S = S.detach().reshape(()).clone()
        elif not isinstance(S, Real):
            raise ValueError(
                f"sensitivity of {self.rule.name} returned {_shown(S)}; it must return one number."
            )
        if isinstance(S, Real) or self._reads(S):
            value = float(S)
            if not value >= 0 or (math.isinf(value) and self.sigma):
                raise ValueError(
                    f"sensitivity of {self.rule.name} returned {value}; it must be a finite "
                    "number of at least 0."
                )
        return S if isinstance(S, Tensor) else float(S)

    def weights(
        self, norms: Tensor, group: Tensor, now: Tensor, S: float | Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """γ_i with |γ_i| · norms_i ≤ S, and which of them had to be clamped (None: none, as far as
        was checked).  # [sample] float64, [sample] bool
        """
        raw = self._map("weight", norms, group, now).to(torch.float64)
        if raw.shape != norms.shape:
            if raw.shape[1:].numel() != 1:
                raise ValueError(
                    f"weight of {self.rule.name} returned {raw.shape[1:].numel()} numbers for one "
                    "sample; it must "
                    "return one."
                )
            raw = raw.reshape(norms.shape)
        lengths = norms.clamp(min=_SHORTEST)
        if (
            self._reads(raw)
            and raw.shape[0]
            and _longest(raw * lengths) <= min(S * _ROUNDING, _FINITE)
        ):  # NaN is not
            return (raw if keep is None else torch.where(keep, raw, 0.0)), None
        raw = raw.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        clamped = (raw * lengths).abs() > S * _ROUNDING
        held = torch.where(clamped, raw.sign() * (S / lengths), raw)
        return (held, clamped) if keep is None else (torch.where(keep, held, 0.0), clamped & keep)

    def publish(self, total: Tensor, S: float | Tensor, B: float, release: Release) -> Tensor:
        """Release Σ γ_i g_i, which one record moves by at most S, and divide it by the public B.  #
        [parameter]
        """
        noisy = release("gradient", total, sensitivity=S, multiplier=self.sigma)
        # In clear, `noisy` is the same tensor as `total`.
        return noisy * (1 / B) if noisy is total else noisy.mul_(1 / B)

    # --- for observers ---

    def resting(self, nows: Tensor) -> Tensor:
        """The weight of a zero gradient, for each step's `now` and each group; a smaller one is
        clipped.

        nows: [step, ...] -> [step, group]
        """
        zero, group = (
            nows.new_zeros(self.groups, dtype=torch.float64),
            torch.arange(self.groups, device=nows.device),
        )
        each_group = torch.func.vmap(self.rule.weight, in_dims=(0, 0, None))
        weights: Tensor = torch.func.vmap(each_group, in_dims=(None, None, 0))(zero, group, nows)
        return weights.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    @cached_property
    def _is_ours(self) -> bool:
        """Whether the rule is one of this package, with nothing but its fields set: not a custom
        one.
        """
        known = {field.name for field in fields(self.rule)}  # type: ignore[arg-type]  # a rule is a dataclass
        return RULES.get(self.rule.name) is type(self.rule) and vars(self.rule).keys() <= known

    @cached_property
    def _at_once(self) -> bool:
        """Whether the rule is called on the whole batch: only rules of this package, for which
        tests prove the same result. A custom rule that was given the batch could read it.
        """
        return self.rule.elementwise and self._is_ours

    def _reads(self, x: Tensor) -> bool:
        """Whether values can be read now without waiting: on the CPU, and not traced."""
        return x.is_cpu and not self.traceable

    def _map(self, name: str, norms: Tensor, group: Tensor, public: Tensor) -> Tensor:
        """`rule.NAME(norm, group, public)` for every sample."""
        method: Method = getattr(self.rule, name)
        if self._at_once:
            return method(norms, group, public)
        public = public.clone()  # a custom rule may change it in place
        try:
            if len(norms) == 0:  # vmap refuses an empty axis
                one = method(norms.new_zeros(()), group.new_zeros(()), public)
                return one.new_zeros((0, *one.shape))
            return torch.func.vmap(method, in_dims=(0, 0, None))(norms, group, public)
        except Exception as error:  # anything that a custom rule may raise
            said = " ".join(str(error).split())[:120]
            raise ValueError(
                f"{name} of {self.rule.name} cannot be mapped over samples ({said}). It is given "
                "one "
                "sample's norm and group as tensors without axes and must return a tensor; write "
                "torch.where instead "
                "of if, and read no value by float() or .item()."
            ) from error


def _check_multiplier(rule: Rule, name: str) -> None:
    """Raise unless a noise multiplier of the rule is a finite number of at least 0."""
    given = getattr(rule, name)
    if given is None and name == "sigma_count":
        return
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{name} of {rule.name} is {given!r}; it must be a finite number of at least 0."
        )


def _shown(value: object) -> str:
    """A value in an error message."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _longest(x: Tensor) -> float:
    """The largest |x|."""
    return float(torch.linalg.vector_norm(x, ord=math.inf))
