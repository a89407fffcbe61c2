"""The interface of a clipping rule: norms in, weights out, for one sample at a time.

Private training forms Σ_i γ_i g_i and adds noise. A rule defines γ_i. It is written for ONE sample,
and the mechanism (`evenclip.mechanism.mechanism`) maps it over the batch. A rule therefore cannot
see the batch; the mechanism takes every sum, releases every value and does every division. A step
calls the methods in this order:

    state = init(constants)                before the first step; public
    loss(loss, output, y, group, state)    one sample's loss, with public coefficients
    statistic(norm, group, state)          one sample's share of a sum, of length at most 1
        The mechanism sums the statistics and adds σ_count · N(0, I): public from here on.
    now, next = observe(noisy, B, state)   from public values to public values
    S = sensitivity(now)                   the most that one sample may add to Σ γ_i g_i
    weight(norm, group, now)               γ_i; the mechanism enforces |γ_i| · ‖g_i‖ ≤ S
        The mechanism sums γ_i g_i, adds σ · S · N(0, I), divides by B, and keeps `next`.

A rule is a frozen dataclass whose fields are public. One file holds its formula, its sensitivity
argument, its accounting, whether it uses group labels, its soundness and its citation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from evenclip.arguments import check_kinds

__all__ = ["ENFORCED", "NO_EPSILON", "REPAIRED", "SOUND", "Constants", "Rule", "check_complete"]

SOUND = "sound"
ENFORCED = "bound enforced, not proved"
REPAIRED = "sound here, unsound as published"
NO_EPSILON = "no valid ε"


@dataclass(frozen=True)
class Constants:
    """The public constants of a run, for a rule's first state.

    Attributes:
        groups: number of groups K.
        classes: number of classes, from the data's class names or the model's outputs; 0 if the
            targets are not classes.
        parameters: number of trainable parameters d.
        B: expected batch size.
        q: Poisson rate; None for shuffled batches.
        steps: number of steps T.
    """

    groups: int = 1
    classes: int = 0
    parameters: int = 0
    B: float = 1.0
    q: float | None = None
    steps: int = 0


class Rule(ABC):
    """A clipping rule. A new one needs `name`, `sigma`, `sensitivity` and `weight`.

    Attributes:
        name: the name in results, on the command line and in reports.
        title: the name in sentences.
        summary: how the rule works, in a few sentences for reports.
        sigma: noise multiplier of the gradient; 0 publishes it in clear, and the run has no ε.
        sigma_count: noise multiplier of the summed statistic, or {name: multiplier} for several
            statistics; None for a rule without any.
        soundness: `SOUND`, `REPAIRED` or `NO_EPSILON`, printed beside every ε. Reports print
            `ENFORCED` for a custom rule with an ε: see `evenclip.rules.soundness`.
        uses_groups: whether a method reads the group label, which then enters training.
        counts_first: whether `now` depends on this step's noisy statistics. The step then counts
            the whole batch before it clips. If False, `observe` must return the state as `now`;
            the mechanism checks it.
        elementwise: whether the methods also accept a whole batch ([sample] in, [sample] or
            [sample, m] out) with the same result. The mechanism then skips the mapping, but only
            for rules of this package, whose equality a test proves.
        poisson: whether batches are Poisson samples; otherwise they are shuffled batches without
            replacement, and there is no ε.
        bounded: whether one record moves Σ γ_i g_i by at most S. If False, noise is added for S,
            and the ledger records a release in clear.
        why: for a rule without ε, the reason, as a clause.
        reference: citation.
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
    sigma_count: float | Mapping[str, float] | None = None

    def init(self, constants: Constants) -> Tensor:
        """Return the public state before the first step; empty for a rule without state."""
        del constants
        return torch.zeros(0, dtype=torch.float64)

    def loss(self, loss: Tensor, output: Any, y: Any, group: Tensor, state: Tensor) -> Tensor:
        """Return this sample's loss, given its plain loss, its output, its target and its group.

        The coefficients are public: fields of the rule, and the state. Clipping bounds the
        gradient of any loss, so this costs no privacy.
        """
        del output, y, group, state
        return loss

    def statistic(self, norm: Tensor, group: Tensor, state: Tensor) -> Any:
        """Return this sample's share of the sum that becomes public, of L2 length at most 1.

        The default is empty: nothing is counted. Several statistics are a dictionary
        {name: tensor}, each of length at most 1 and with its own multiplier in `sigma_count`. An
        override may have further parameters named `loss`, `output` or `y`; it is then given this
        sample's.
        """
        del group, state
        return norm.new_zeros((*norm.shape, 0))

    def observe(self, noisy: Any, B: float, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return what this step clips with (`now`) and what the next step starts from.

        `noisy` is the noisy sum of the statistics: a tensor, or a dictionary of tensors.
        """
        del noisy, B
        return state, state

    @abstractmethod
    def sensitivity(self, now: Tensor) -> float | Tensor:
        """Return S, the bound of |γ_i| · ‖g_i‖ for any sample of any group, from public values."""

    @abstractmethod
    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:
        """Return γ_i, the factor of this sample's gradient."""

    def typical_sensitivity(self, constants: Constants) -> float:
        """Return the S of a typical step, from public constants: the matched protocol uses it.

        The default is S at the first state.
        """
        return float(self.sensitivity(self.init(constants)))

    def tape(self, tape: Any) -> Any:
        """Return the tape that computes the gradients: the model's own by default.

        An override sees whole batches, so the rule must declare `bounded = False`.
        """
        return tape

    def unsuited(self, groups: int, classes: int) -> str | None:
        """Return why the rule does not fit this number of groups and classes; None if it does."""
        del groups, classes
        return None

    def multipliers(self, t: int = 0) -> dict[str, float]:
        """Return name -> noise multiplier of each release of step t, counted from 0.

        An override may depend on t, which is public. The mechanism adds this noise and writes
        these numbers to the ledger.
        """
        del t
        counts = self.sigma_count
        if not isinstance(counts, Mapping):
            counts = {} if counts is None else {"count": counts}
        return {name: float(m) for name, m in {**counts, "gradient": self.sigma}.items()}

    def scaled(self, factor: float) -> Self:
        """Return the same rule with all its noise multiplied by `factor`."""
        counts: Any = self.sigma_count
        if isinstance(counts, Mapping):
            counts = {name: m * factor for name, m in counts.items()}
        elif counts:
            counts = counts * factor
        noise = {"sigma": self.sigma * factor, "sigma_count": counts}
        present = {name: m for name, m in noise.items() if m}  # none in a rule without noise
        return replace(self, **present)  # type: ignore[type-var]  # a rule is a dataclass


def check_complete(kind: type[Rule]) -> None:
    """Raise unless a class of rules has all that the package reads from it.

    Raises:
        TypeError: the class is no frozen dataclass, or has no `name` or no `sigma`.
    """
    check_kinds(check_complete, locals())
    named = isinstance(getattr(kind, "name", None), str)
    fields = getattr(kind, "__dataclass_fields__", None)  # None: no dataclass
    if not named or fields is None or not ("sigma" in fields or hasattr(kind, "sigma")):
        raise TypeError(
            f"The rule {kind.__qualname__} is not complete. It needs @dataclass(frozen=True) above "
            'the class, a name: ClassVar[str] = "...", and a default for each field, such as '
            "sigma: float = 1.0."
        )
