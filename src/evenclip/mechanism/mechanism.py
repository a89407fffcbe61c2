"""The mechanism of a step: enforce a rule's bounds, and release what becomes public.

All drivers of a step use it: plain and compiled runs, several processes, Opacus's loop, and the
audit. It handles norms, groups and sums, and does not depend on the model. In the order of
Algorithm 2 (Esipova et al. 2023):

    count        Σ statistic_i                                             private
    observe      release the count; this and the next step's thresholds    public from here on
    weights      γ_i                                                       private
    publish      Σ γ_i g_i released and divided by B                       public from here on

The rule is mapped sample by sample (`torch.func.vmap`); rules of this package that declare
themselves elementwise are called on the whole batch. These bounds are enforced for any return
value of the rule, see `evenclip.mechanism.bounds`:

    ‖statistic_i‖ ≤ 1,   |γ_i| · ‖g_i‖ ≤ S,   a sample that is not kept contributes exactly nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from evenclip.mechanism.bounds import bounded_sum, bounded_weights
from evenclip.mechanism.calls import call, wanted
from evenclip.mechanism.guard import RuleGuard
from evenclip.mechanism.mapping import map_over_samples
from evenclip.mechanism.multipliers import noise_multipliers
from evenclip.mechanism.release import Release
from evenclip.rules import RULES, Constants, Rule

__all__ = ["Mechanism"]


@dataclass(frozen=True)
class Mechanism:
    """A rule, mapped over batches, with its bounds enforced.

    Attributes:
        rule: the clipping rule.
        constants: the public constants of the run.
        traceable: whether the step is being traced, so that no tensor value may be read.
        t: the step, counted from 0, for a rule whose noise depends on it.
        like: `loss`, `output` and `y` of a batch of one, for their shapes; empty unless the rule's
            statistic uses them.
        rounding: ρ, by which the rounding of a sum exceeds its sensitivity; see
            `evenclip.mechanism.rounding`.
        guard: a `with` block for every call of the rule, which puts back what a custom rule keeps.

    Raises:
        ValueError: for a rule with a statistic but without `sigma_count`.

    >>> from evenclip.rules import DPSGDGlobalAdapt
    >>> Mechanism(DPSGDGlobalAdapt(sigma=1.0)).multipliers
    {'count': 10.0, 'gradient': 1.0}
    """

    rule: Rule
    constants: Constants = field(default_factory=Constants)
    traceable: bool = False
    t: int = 0
    like: Mapping[str, Any] = field(default_factory=dict)
    rounding: float = 0.0
    guard: AbstractContextManager[None] = field(
        default_factory=nullcontext, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self._is_ours and getattr(self.guard, "rule", None) is not self.rule:
            object.__setattr__(self, "guard", RuleGuard(self.rule))
        if not isinstance(self.constants, Constants):
            raise TypeError(
                f"constants is {self.constants!r}; give the public constants of the run, such as "
                "Constants(groups=2)."
            )
        _ = self.noise  # read now, so that errors surface early

    def at(self, t: int) -> Mechanism:
        """Return the mechanism of step t: itself, unless the rule's noise depends on the step."""
        return replace(self, t=t) if self.varies else self

    @property
    def varies(self) -> bool:
        """Whether the noise may depend on the step."""
        return type(self.rule).multipliers is not Rule.multipliers

    @property
    def groups(self) -> int:
        """Number of groups K."""
        return self.constants.groups

    @cached_property
    def statistics(self) -> dict[str, int]:
        """Name -> length of each statistic; a rule that returns one tensor has the name "count"."""
        none = torch.zeros(0, dtype=torch.float64)
        further = {name: tree_map(_empty, value) for name, value in self.like.items()}
        named = self.each_statistic(none, none.long(), self.start(), further)
        if "gradient" in named:
            raise ValueError(
                f"{self.rule.name} has a statistic called 'gradient', which is the name of the "
                "gradient's own release; give it another name."
            )
        return {name: len(self._summed(value, None)) for name, value in named.items()}

    @cached_property
    def counts(self) -> int:
        """Length of all statistics, end to end."""
        return sum(self.statistics.values())

    @cached_property
    def wants(self) -> tuple[str, ...]:
        """Which of `loss`, `output` and `y` the rule's statistic has as parameters."""
        return wanted(self.rule)

    @cached_property
    def noise(self) -> dict[str, float]:
        """Name -> noise multiplier of each release of this step.

        It is read from the rule once, so that the noise added is the noise in the ledger.
        """
        with self.guard:
            given = noise_multipliers(self.rule, self.t)
        names = [name for name, length in self.statistics.items() if length]
        missing = next((name for name in names if not given.get(name)), None)
        if missing is not None:
            which = "" if missing == "count" else f" called {missing!r}"
            raise ValueError(
                f"{self.rule.name} has a statistic{which} of {self.statistics[missing]} numbers "
                "and no sigma_count; give it the noise multiplier of that release."
            )
        return {name: given[name] for name in (*names, "gradient")}

    @cached_property
    def multipliers(self) -> dict[str, float]:
        """Name -> multiplier of every release of this step, as written to the ledger."""
        return self.noise if self.rule.bounded else self.noise | {"gradient": 0.0}

    def start(self) -> Tensor:
        """Return the rule's state before the first step."""
        with self.guard:
            state = call(self.rule, "init", self.constants)
        if not isinstance(state, Tensor):
            raise ValueError(
                f"init of {self.rule.name} returned {type(state).__name__}; it must return a "
                "tensor, such as torch.tensor([1.0], dtype=torch.float64)."
            )
        return state.detach().clone()

    # --- a step, in this order ---

    def count(
        self,
        norms: Tensor,
        group: Tensor,
        state: Tensor,
        keep: Tensor | None,
        further: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Sum the statistics of the kept samples, each of length at most 1.  # [m], float64

        Args:
            norms: [sample], float64
            group: [sample], int64
            state: the rule's public state.
            keep: [sample], bool; None keeps all.
            further: what else the statistic uses, by name: `loss`, `output`, `y`.  # [sample, ...]
        """
        each = self.each_statistic(norms, group, state, further)
        if list(each) != list(self.statistics):
            raise ValueError(
                f"{self.rule.name} has the statistics {', '.join(each)}, and had "
                f"{', '.join(self.statistics)} before the first step; give it the same in every "
                "step."
            )
        totals = [self._summed(value, keep) for value in each.values()]
        return totals[0] if len(totals) == 1 else torch.cat(totals)

    def each_statistic(
        self,
        norms: Tensor,
        group: Tensor,
        state: Tensor,
        further: Mapping[str, Any] | None = None,
    ) -> Mapping[str, Tensor]:
        """Return name -> every sample's statistic, as the rule returns it.  # [sample, ...]"""
        each = self._map("statistic", norms, group, state, further)
        named = each if isinstance(each, Mapping) else {"count": each}
        if not all(isinstance(value, Tensor) for value in named.values()):
            raise ValueError(
                f"statistic of {self.rule.name} must return a tensor, or a dictionary of tensors; "
                f"it returned {type(each).__name__}."
            )
        return named

    def _summed(self, each: Tensor, keep: Tensor | None) -> Tensor:
        """Sum one statistic of the kept samples.  # [m], float64"""
        return bounded_sum(each, keep, reads=self._reads(each))

    def observe(
        self, count: Tensor, B: float, state: Tensor, release: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Release the count of the whole batch; return this step's `now` and the next state.

        Raises:
            ValueError: if the count has another length than the ledger and the noise assume.
        """
        if len(count) != self.counts:
            raise ValueError(
                f"{self.rule.name} has a statistic of {len(count)} numbers, and had {self.counts} "
                "before the first step; give it the same length in every step."
            )
        noisy = self._released(count, release)
        if self._is_ours:
            return self.rule.observe(noisy, B, state)
        given = state.clone()  # a custom rule may change it in place
        version = given._version
        with self.guard:
            observed = call(self.rule, "observe", noisy, B, given)
        pair = observed if isinstance(observed, tuple) else ()
        if [isinstance(value, Tensor) for value in pair] != [True, True]:
            raise ValueError(
                f"observe of {self.rule.name} must return two tensors, (now, next): what this "
                "step clips with and what the next one starts from."
            )
        now, following = (
            state if value is given and given._version == version else value for value in observed
        )
        self._check_now(now, state)
        if following.shape != state.shape:
            raise ValueError(
                f"observe of {self.rule.name} returned a next state of shape "
                f"{list(following.shape)}, and init one of shape {list(state.shape)}; keep the "
                "shape in every step."
            )
        return now, following

    def _released(self, count: Tensor, release: Callable[..., Tensor]) -> Any:
        """Release each statistic with its own noise; return them in the form the rule gave them."""
        parts = torch.split(count, list(self.statistics.values()))
        noisy = {
            name: release(
                name,
                part,
                sensitivity=1.0,
                multiplier=self.noise.get(name, 0.0),
                rounding=self.rounding,
            )
            for name, part in zip(self.statistics, parts, strict=True)
        }
        return noisy["count"] if list(noisy) == ["count"] else noisy

    def _check_now(self, now: Tensor, state: Tensor) -> None:
        """Raise for a rule that clips with its count although it does not declare it."""
        if self.rule.counts_first or now is state:
            return
        if not self.traceable and now.shape == state.shape and torch.equal(now, state):
            return
        raise ValueError(
            f"observe of {self.rule.name} returned a `now` other than the state, so this step "
            "clips with its own counts; write counts_first = True in the class, or return the "
            "state itself as `now`."
        )

    def sensitivity(self, now: Tensor) -> float | Tensor:
        """Return S of a step that clips with `now`.

        S is copied, so that the enforced bound is the one that the noise is scaled to.

        Raises:
            ValueError: unless S is one finite number of at least 0. S may be infinite for a rule
                without noise.
        """
        if self._is_ours:  # tests cover these rules
            return self.rule.sensitivity(now)
        with self.guard:
            S: Any = call(self.rule, "sensitivity", now.clone())
        if isinstance(S, Tensor) and S.numel() == 1:
            S = S.detach().reshape(()).to(torch.float64, copy=True)
        elif not isinstance(S, Real):
            raise ValueError(
                f"sensitivity of {self.rule.name} returned {_shown(S)}; it must return one number."
            )
        if isinstance(S, Real) or self._reads(S):
            value = float(S)
            if not value >= 0 or (math.isinf(value) and self.noise["gradient"]):
                raise ValueError(
                    f"sensitivity of {self.rule.name} returned {value}; it must be a finite "
                    "number of at least 0."
                )
        return S if isinstance(S, Tensor) else float(S)

    def weights(
        self, norms: Tensor, group: Tensor, now: Tensor, S: float | Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return γ_i with |γ_i| · norms_i ≤ S, and which of them were clamped (None: none).

        Both have the shape [sample], float64 and bool.
        """
        raw = self.each_weight(norms, group, now)
        return bounded_weights(raw, norms, S, keep, reads=self._reads(raw))

    def each_weight(self, norms: Tensor, group: Tensor, now: Tensor) -> Tensor:
        """Return every sample's weight, as the rule returns it.  # [sample], float64"""
        raw: Tensor = self._map("weight", norms, group, now).to(torch.float64)
        if raw.shape == norms.shape:
            return raw
        if raw.shape[1:].numel() != 1:
            raise ValueError(
                f"weight of {self.rule.name} returned {raw.shape[1:].numel()} numbers for one "
                "sample; it must return one."
            )
        return raw.reshape(norms.shape)

    def publish(
        self,
        total: Tensor,
        S: float | Tensor,
        B: float,
        release: Release,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Release Σ γ_i g_i, which one record moves by at most S, divided by B.  # [parameter]"""
        return release(
            "gradient",
            total,
            sensitivity=S,
            multiplier=self.noise["gradient"],
            rounding=self.rounding,
            scale=1 / B,
            dtype=dtype,
        )

    # --- for observers ---

    def zero_gradient_weight(self, nows: Tensor) -> Tensor:
        """Return the weight of a zero gradient for each step's `now` and each group.

        A sample with a smaller weight is clipped. nows: [step, ...] -> [step, group]
        """
        zero = nows.new_zeros(self.groups, dtype=torch.float64)
        group = torch.arange(self.groups, device=nows.device)
        each_group = torch.func.vmap(self.rule.weight, in_dims=(0, 0, None))
        with self.guard:
            weights: Tensor = torch.func.vmap(each_group, (None, None, 0))(zero, group, nows)
        return weights.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    @cached_property
    def _is_ours(self) -> bool:
        """Whether the rule is one of this package, with no attributes but its fields."""
        known = {f.name for f in fields(self.rule)}  # type: ignore[arg-type]  # a dataclass
        return RULES.get(self.rule.name) is type(self.rule) and vars(self.rule).keys() <= known

    @cached_property
    def _at_once(self) -> bool:
        """Whether the rule is called on the whole batch.

        This holds only for rules of this package, for which tests prove the same result. A custom
        rule must not see the batch.
        """
        return self.rule.elementwise and self._is_ours

    def _reads(self, x: Tensor) -> bool:
        """Whether values can be read without synchronising: on the CPU, and not traced."""
        return x.is_cpu and not self.traceable

    def _map(
        self, name: str, norms: Tensor, group: Tensor, public: Tensor,
        further: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Return `rule.NAME(norm, group, public)` of every sample."""
        if self._at_once:
            return getattr(self.rule, name)(norms, group, public)
        named = {key: further[key] for key in self.wants if key in further} if further else {}
        with self.guard:
            return map_over_samples(self.rule, name, norms, group, public, named)


def _empty(value: Any) -> Any:
    """Return a tensor of a batch of one as a batch of zeros."""
    return torch.zeros_like(value) if isinstance(value, Tensor) else value


def _shown(value: object) -> str:
    """Format a value for an error message."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
