"""What a clipping rule is: norms in, weights out, for one sample at a time.

Private training forms Σ_i γ_i g_i and adds noise. A rule says what γ_i is. It is written for ONE
sample and mapped over the batch by the mechanism (`evenclip.mechanism.mechanism`), so it cannot see
the batch; the mechanism does every sum, every release and every division. In the order in which a
step calls them:

    state                                          public; `init(groups)` before the first step
    statistic(norm, group, state)                  one sample's share of a count vector, of length at most 1
    ... the mechanism sums them, adds σ_count · N(0, I): public from here on ...
    now, next = observe(noisy, B, state)           public -> public
    S = sensitivity(now)                           the most that one sample may add to Σ γ_i g_i
    weight(norm, group, now)                       γ_i; the mechanism holds |γ_i| · ‖g_i‖ ≤ S whatever comes back
    ... the mechanism sums γ_i g_i, adds σ · S · N(0, I), divides by B, updates, carries `next` on ...

A rule is a frozen dataclass whose fields are public. One file holds its formula, its sensitivity
argument, its accounting, whether it uses group labels, its soundness and its citation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

__all__ = ["NO_EPSILON", "REPAIRED", "SOUND", "Rule"]

SOUND = "sound"
REPAIRED = "sound here, unsound as published"
NO_EPSILON = "no valid ε"


class Rule(ABC):
    """A clipping rule. A new one needs `name`, `sigma`, `sensitivity` and `weight`; see the
    module's docstring.

    Attributes:
        name: the one name used in results, on the command line and in reports.
        title: the name as it is written in sentences.
        summary: how the rule works, in a few sentences for reports.
        sigma: noise multiplier of the gradient; 0 publishes it in clear, and the run has no ε.
        sigma_count: noise multiplier of the summed statistics; unused by a rule without any.
        soundness: `SOUND`, `REPAIRED` or `NO_EPSILON`, printed wherever ε is printed.
        uses_groups: whether `statistic` or `weight` read the group label (which then enters
            training).
        counts_first: whether `now` depends on this step's noisy statistics. It only saves time: if
            False, a batch in several chunks is clipped and counted in one pass, and again if
            `observe` returns another `now` after all.
        elementwise: whether the methods also take a whole batch at once ([sample] in, [sample] or
            [sample, m] out) with the same result as sample by sample. The mechanism then skips the
            mapping, for rules of this package only, whose equality a test proves.
        poisson: whether batches are Poisson samples; otherwise shuffled batches without
            replacement, and no ε.
        bounded: whether one record moves Σ γ_i g_i by at most S. False: noise is added for S all
            the same, and the ledger calls it a release in clear.
        why: for a rule without ε, the reason, as a clause.
        reference: where the rule comes from.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    soundness: ClassVar[str] = SOUND
    uses_groups: ClassVar[bool] = False
    counts_first: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    poisson: ClassVar[bool] = True
    bounded: ClassVar[bool] = True
    why: ClassVar[str] = ""
    reference: ClassVar[str] = ""

    sigma: float
    sigma_count: float | None = None

    def init(self, groups: int) -> Tensor:
        """The public state before the first step, given the (public) number of groups: empty for a
        rule without state.
        """
        del groups
        return torch.zeros(0, dtype=torch.float64)

    def statistic(self, norm: Tensor, group: Tensor, state: Tensor) -> Tensor:
        """This sample's contribution to the count vector, of L2 length at most 1: nothing for a
        rule that counts nothing.
        """
        del group, state
        return norm.new_zeros((*norm.shape, 0))

    def observe(self, noisy: Tensor, B: float, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the step clips with (`now`) and what the next step starts from, given the noisy sum
        of statistics.
        """
        del noisy, B
        return state, state

    @abstractmethod
    def sensitivity(self, now: Tensor) -> float | Tensor:
        """S: the most |γ_i| · ‖g_i‖ can be for any sample of any group, from public values only."""

    @abstractmethod
    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:
        """γ_i, what this sample's gradient is multiplied with."""

    def tape(self, tape: Any) -> Any:
        """What gradients are taken with: the model's own tape, unless the rule trains on another
        loss. One that does is not `bounded`: it sees whole batches.
        """
        return tape

    def unsuited(self, groups: int, classes: int) -> str | None:
        """Why this rule is not for data with so many groups and classes, in a sentence; None: it
        is.
        """
        del groups, classes
        return None

    def multipliers(self) -> dict[str, float]:
        """Name -> multiplier of what one step releases, as the ledger will have it."""
        count = {} if self.sigma_count is None else {"count": float(self.sigma_count)}
        return {**count, "gradient": float(self.sigma) if self.bounded else 0.0}

    def scaled(self, factor: float) -> Self:
        """The same rule with all its noise multiplied by `factor`."""
        present = {"sigma": self.sigma, "sigma_count": self.sigma_count}
        noise: dict[str, Any] = {
            name: m * factor for name, m in present.items() if m
        }  # none in a rule without noise
        return replace(self, **noise)  # type: ignore[type-var]  # a rule is a dataclass
