"""Opacus's optimiser with a rule in it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.optimizers.optimizer import _check_processed_flag, _generate_noise, _mark_as_processed
from torch import Tensor

from evenclip.mechanism import Mechanism, joint_multiplier
from evenclip.opacus.clipping import Clipper, Formed, Ghost, joint
from evenclip.rules import Rule

__all__ = ["EvenOptimizer", "check_kind", "check_optimizer", "check_rule", "even"]

_KEY = "evenclip"  # where a checkpoint of the optimiser has the rule's state


def even(optimizer: DPOptimizer, rule: Rule, criterion: Any = None) -> EvenOptimizer:
    """The optimiser that Opacus's `make_private` returned, weighting samples by `rule` from here
    on.

    Noise and bound are the rule's: `noise_multiplier` and `max_grad_norm` of `make_private` are not
    used any more. A rule that counts releases its count as well, so ε is larger than Opacus planned
    for the same σ; `get_epsilon` says how large, and `EvenPrivacyEngine.make_private_with_epsilon`
    reaches a given one.

    Make schedulers and `BatchMemoryManager` with what this returns.

    Args:
        optimizer: as `make_private` returned it, for flat clipping on one device.
        rule: any rule that needs no group labels and clips with last step's state, such as
            `DPSGDGlobalAdapt`.
        criterion: in ghost mode, the criterion that `make_private` returned; it goes on working,
            changed in place.

    Raises:
        TypeError: for another optimiser of Opacus, or none of its.
        ValueError: for a rule that cannot work here; the message says why.
    """
    check_rule(rule)
    check_optimizer(optimizer)
    _say_if_less_noise(optimizer.noise_multiplier, rule)
    ghost = type(optimizer) is DPOptimizerFastGradientClipping
    if ghost and criterion is None:
        raise ValueError(
            "In ghost mode the weights are applied while the loss is differentiated; give the "
            "criterion that "
            "make_private returned too: even(optimizer, rule, criterion)."
        )
    found = EvenOptimizer(optimizer, rule)
    if ghost:
        found.bind(criterion)
    return found


class EvenOptimizer(DPOptimizer):  # type: ignore[misc]  # Opacus has no types
    """A `DPOptimizer` whose weights, noise and accounts are a rule's. Made by `even` or by
    `EvenPrivacyEngine`.

    Attributes:
        rule: the rule. A noise scheduler of Opacus scales all its noise, the count's too.
        rule_state: the rule's public state: Z of the next step. In every checkpoint.
        noise_multiplier: the joint multiplier of everything that one step releases, which is what
            the accountant reads.
        max_grad_norm: S; fixed by the rule.
    """

    def __init__(self, optimizer: DPOptimizer, rule: Rule) -> None:
        self._clipper = Clipper(rule)
        is_ghost = isinstance(optimizer, DPOptimizerFastGradientClipping)
        self._gradients: Formed | Ghost = (
            Ghost(self._clipper) if is_ghost else Formed(self._clipper)
        )
        DPOptimizer.__init__(
            self,
            optimizer.original_optimizer,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            expected_batch_size=optimizer.expected_batch_size,
            loss_reduction=optimizer.loss_reduction,
            generator=optimizer.generator,
            secure_mode=optimizer.secure_mode,
        )
        self.step_hook = optimizer.step_hook
        self._step_skip_queue = (
            optimizer._step_skip_queue
        )  # a BatchMemoryManager made before goes on talking to us
        if self._clipper.mechanism.counts and optimizer.expected_batch_size is None:
            raise ValueError(
                f"{rule.name} divides its count by the expected batch size, and this optimizer "
                "has none; give the "
                "DPOptimizer an expected_batch_size."
            )

    @property
    def rule(self) -> Rule:
        """What clips."""
        return self._clipper.mechanism.rule

    @property
    def rule_state(self) -> Tensor:
        """Z of the next step: public."""
        return self._clipper.state.clone()

    @property
    def noise_multiplier(self) -> float:
        """(Σ m_j⁻²)^(-1/2) over what one step releases."""
        return joint_multiplier(self._clipper.mechanism.multipliers.values())

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        if value != self.noise_multiplier:
            self._clipper.mechanism = Mechanism(self.rule.scaled(value / self.noise_multiplier))

    @property
    def max_grad_norm(self) -> float:
        """S."""
        return self._clipper.sensitivity

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if value != self.max_grad_norm:
            raise ValueError(
                f"max_grad_norm cannot become {value}: it is {self.max_grad_norm}, "
                f"{self.rule.name}'s sensitivity. "
                "To change the length of a step, change the learning rate."
            )

    @property
    def accumulated_iterations(self) -> int:
        """Batches whose gradients lie there unused: 1, or more where gradients are accumulated
        without Poisson.
        """
        return self._gradients.batches(self.params)

    def bind(self, criterion: Any) -> None:
        """In ghost mode: the criterion whose second backward pass takes its weights from here."""
        if not isinstance(self._gradients, Ghost):
            raise TypeError("Only an optimizer in ghost mode is bound to its module.")
        self._gradients.bind(criterion, self.params)
        criterion.optimizer = self  # its backward() clears gradients through the optimiser

    def clip_and_accumulate(self) -> None:
        """Add this physical batch, weighted, to the sum and to the count of its logical batch."""
        for p, part in zip(self.params, self._gradients.clipped_sums(self.params), strict=True):
            if p.summed_grad is None:
                p.summed_grad = part
            else:
                p.summed_grad += part  # in place: the tensor remembers whether it was used

    def add_noise(self) -> None:
        """Release the count, which moves Z, and the sum of the logical batch, into `p.grad`."""
        for p in self.params:
            _check_processed_flag(p.summed_grad)
        total = torch.cat([p.summed_grad.reshape(-1) for p in self.params])
        noisy = self._clipper.release(total, self._expected_size(), self._noise)
        for p, part in zip(
            self.params, torch.split(noisy, [p.numel() for p in self.params]), strict=True
        ):
            p.grad = part.to(p.dtype).view_as(p)
            _mark_as_processed(p.summed_grad)

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Everything before the wrapped optimiser's own step; whether to take that step."""
        del closure
        if not self.params:  # everything is frozen: nothing is released
            return True
        self.clip_and_accumulate()
        self._is_last_step_skipped = bool(self._check_skip_next_step())
        if self._is_last_step_skipped:
            return False
        self.add_noise()
        self.scale_grad()
        if self.step_hook:
            self.step_hook(self)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimiser's, and the rule's state."""
        ours = {"rule": self.rule.name, "state": self._clipper.state.clone()}
        return {**self.original_optimizer.state_dict(), _KEY: ours}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there: the wrapped optimiser's state, and Z.

        Raises:
            ValueError: for the checkpoint of another rule, or of none.
        """
        theirs = dict(state_dict)
        ours = theirs.pop(_KEY, None)
        if ours is None and self._clipper.state.numel():
            raise ValueError(
                f"This checkpoint has no state of a rule, and {self.rule.name} needs the Z it had "
                "got to; it was not "
                "saved by this optimizer."
            )
        if ours is not None and ours["rule"] != self.rule.name:
            raise ValueError(
                f"This checkpoint is of {ours['rule']} and the optimizer has {self.rule.name}."
            )
        self.original_optimizer.load_state_dict(theirs)
        if ours is not None:
            self._clipper.state = ours["state"].to(self._clipper.state).clone()

    def _expected_size(self) -> float:
        """B: what the count is divided by, whether or not the gradient is (loss_reduction)."""
        return (
            math.nan
            if self.expected_batch_size is None
            else self.expected_batch_size * self.accumulated_iterations
        )

    def _noise(self, size: int) -> Tensor:
        """N(0, I), as Opacus draws it, in float64: torch's float32 normals end at 5.8 standard
        deviations.
        """
        reference = torch.empty(size, dtype=torch.float64, device=self.params[0].device)
        noise: Tensor = _generate_noise(
            std=1.0, reference=reference, generator=self.generator, secure_mode=self.secure_mode
        )
        return noise


def check_kind(rule: Any) -> None:
    """Raise for what is no rule."""
    if not (isinstance(rule, Rule) and is_dataclass(type(rule))):
        raise TypeError(
            f"rule is {rule!r}; it must be a rule such as DPSGDGlobalAdapt(C0=1.0, sigma=1.0)."
        )


def check_rule(rule: Any) -> None:
    """Raise for a rule that cannot work in Opacus's loop."""
    check_kind(rule)
    if rule.uses_groups:
        raise ValueError(
            f"{rule.name} needs every sample's group and the counts of the whole batch before it "
            "clips, and Opacus's "
            "loop has neither; train it with evenclip.fit."
        )
    if rule.counts_first:
        raise ValueError(
            f"{rule.name} clips with this step's count, which Opacus's loop does not know before "
            "it clips; train it "
            "with evenclip.fit."
        )
    if not (rule.sigma > 0 and rule.bounded and rule.poisson):
        raise ValueError(
            f"{rule.name} has no ε, so there is nothing to account for; choose a private rule."
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise for what is not flat clipping on one device."""
    if type(optimizer) not in (DPOptimizer, DPOptimizerFastGradientClipping):
        raise TypeError(
            f"The optimizer is a {type(optimizer).__name__}; a rule works on what Opacus's "
            "make_private returns for "
            "clipping='flat' on one device (DPOptimizer, or DPOptimizerFastGradientClipping in "
            "ghost mode): not per "
            "layer, not adaptive, not distributed, and not twice."
        )


def _say_if_less_noise(planned: float, rule: Rule) -> None:
    """Warn where ε comes out larger than `make_private` was asked for."""
    multiplier = joint(rule)
    if multiplier < planned and rule.sigma != planned:
        warnings.warn(
            f"The rule's noise has the joint multiplier {multiplier:.4g}, and make_private was "
            f"given {planned:.4g}: ε "
            "will be larger than planned. EvenPrivacyEngine.make_private_with_epsilon reaches a "
            "given ε.",
            stacklevel=3,
        )
