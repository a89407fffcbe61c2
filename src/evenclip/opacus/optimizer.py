"""Opacus's optimizer with a rule of this package."""

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
from evenclip.opacus.clipping import Clipper, Ghost, GradSamples, joint
from evenclip.rules import Rule

__all__ = ["EvenOptimizer", "check_kind", "check_optimizer", "check_rule", "even"]

_KEY = "evenclip"  # key of the rule's state in a checkpoint of the optimizer


def even(optimizer: DPOptimizer, rule: Rule, criterion: Any = None) -> EvenOptimizer:
    """Return an optimizer that weights samples by `rule`, from the one of Opacus's `make_private`.

    Noise and bound are those of the rule; `noise_multiplier` and `max_grad_norm` of `make_private`
    are no longer used. A rule that counts releases its count as well, so ε is larger than that of
    Opacus for the same σ. `get_epsilon` includes the count, and
    `EvenPrivacyEngine.make_private_with_epsilon` reaches a given ε.

    Create schedulers and `BatchMemoryManager` with the returned optimizer.

    Args:
        optimizer: the optimizer of `make_private`, for flat clipping on one device.
        rule: a rule that uses no group labels and clips with the state of the last step, such as
            `DPSGDGlobalAdapt`.
        criterion: in ghost mode, the criterion of `make_private`; it is changed in place.

    Raises:
        TypeError: if the optimizer is of another type.
        ValueError: if the rule cannot be used with Opacus; the message says why.
    """
    check_rule(rule)
    check_optimizer(optimizer)
    _warn_if_less_noise(optimizer.noise_multiplier, rule)
    ghost = type(optimizer) is DPOptimizerFastGradientClipping
    if ghost and criterion is None:
        raise ValueError(
            "In ghost mode the criterion's backward() applies the weights; also give the criterion "
            "that make_private returned: even(optimizer, rule, criterion)."
        )
    even_optimizer = EvenOptimizer(optimizer, rule)
    if ghost:
        even_optimizer.bind(criterion)
    return even_optimizer


class EvenOptimizer(DPOptimizer):  # type: ignore[misc]  # Opacus has no types
    """A `DPOptimizer` with the weights and the noise of a rule.

    `even` and `EvenPrivacyEngine` create it.

    Attributes:
        rule: the rule. A noise scheduler of Opacus scales all its noise, including the count's.
        rule_state: the rule's public state, Z of the next step; part of every checkpoint.
        noise_multiplier: the joint multiplier of all releases of one step, for the accountant.
        max_grad_norm: S; fixed by the rule.
    """

    def __init__(self, optimizer: DPOptimizer, rule: Rule) -> None:
        self._clipper = Clipper(rule)
        is_ghost = isinstance(optimizer, DPOptimizerFastGradientClipping)
        self._gradients: GradSamples | Ghost = (
            Ghost(self._clipper) if is_ghost else GradSamples(self._clipper)
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
        # The same queue, so that an existing BatchMemoryManager keeps working.
        self._step_skip_queue = optimizer._step_skip_queue
        if self._clipper.mechanism.counts and optimizer.expected_batch_size is None:
            raise ValueError(
                f"{rule.name} divides its count by the expected batch size, and this optimizer has "
                "none; give the DPOptimizer an expected_batch_size."
            )

    @property
    def rule(self) -> Rule:
        """The rule."""
        return self._clipper.mechanism.rule

    @property
    def rule_state(self) -> Tensor:
        """Z of the next step; public."""
        return self._clipper.state.clone()

    @property
    def noise_multiplier(self) -> float:
        """(Σ m_j⁻²)^(-1/2) over the releases of one step."""
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
                f"{self.rule.name}'s sensitivity. To change the step size, change the learning "
                "rate."
            )

    @property
    def accumulated_iterations(self) -> int:
        """Number of batches with unused gradients; it exceeds 1 only without Poisson sampling."""
        return self._gradients.batches(self.params)

    def bind(self, criterion: Any) -> None:
        """Set the criterion whose second backward pass uses the rule's weights; for ghost mode."""
        if not isinstance(self._gradients, Ghost):
            raise TypeError(
                "This optimizer is not in ghost mode; bind() is for grad_sample_mode='ghost' only."
            )
        self._gradients.bind(criterion, self.params)
        criterion.optimizer = self  # its backward() calls zero_grad of the optimizer

    def clip_and_accumulate(self) -> None:
        """Add the weighted sum and the count of a physical batch to those of the logical batch."""
        for p, part in zip(self.params, self._gradients.clipped_sums(self.params), strict=True):
            if p.summed_grad is None:
                p.summed_grad = part
            else:
                p.summed_grad += part  # in place, because Opacus marks the tensor as processed

    def add_noise(self) -> None:
        """Release the count, which updates Z, and write the released sum into `p.grad`."""
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
        """Prepare the wrapped optimizer's step; return whether to take it."""
        del closure
        if not self.params:  # all parameters are frozen, so nothing is released
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
        """Return the state of the wrapped optimizer and of the rule."""
        saved = {"rule": self.rule.name, "state": self._clipper.state.clone()}
        return {**self.original_optimizer.state_dict(), _KEY: saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of the wrapped optimizer and of the rule.

        Raises:
            ValueError: if the checkpoint is of another rule or has no state of a rule.
        """
        wrapped = dict(state_dict)
        saved = wrapped.pop(_KEY, None)
        if saved is None and self._clipper.state.numel():
            raise ValueError(
                f"This checkpoint has no state of a rule, and {self.rule.name} needs its Z; load a "
                "checkpoint that this optimizer saved."
            )
        if saved is not None and saved["rule"] != self.rule.name:
            raise ValueError(
                f"This checkpoint is of {saved['rule']} and the optimizer has {self.rule.name}; "
                "use the same rule."
            )
        self.original_optimizer.load_state_dict(wrapped)
        if saved is not None:
            self._clipper.state = saved["state"].to(self._clipper.state).clone()

    def _expected_size(self) -> float:
        """Return B, the divisor of the count; it does not depend on loss_reduction."""
        return (
            math.nan
            if self.expected_batch_size is None
            else self.expected_batch_size * self.accumulated_iterations
        )

    def _noise(self, size: int) -> Tensor:
        """Draw N(0, I) as Opacus does, but in float64.  # [size]

        torch's float32 normals never exceed 5.8 standard deviations.
        """
        reference = torch.empty(size, dtype=torch.float64, device=self.params[0].device)
        noise: Tensor = _generate_noise(
            std=1.0, reference=reference, generator=self.generator, secure_mode=self.secure_mode
        )
        return noise


def check_kind(rule: Any) -> None:
    """Raise unless `rule` is a rule."""
    if not (isinstance(rule, Rule) and is_dataclass(type(rule))):
        raise TypeError(
            f"rule is {rule!r}; it must be a rule such as DPSGDGlobalAdapt(C0=1.0, sigma=1.0)."
        )


def check_rule(rule: Any) -> None:
    """Raise unless the rule can be used with Opacus."""
    check_kind(rule)
    if rule.uses_groups:
        raise ValueError(
            f"{rule.name} needs every sample's group and the counts of the whole batch before it "
            "clips, and Opacus's loop has neither; train it with evenclip.fit."
        )
    if rule.counts_first:
        raise ValueError(
            f"{rule.name} clips with this step's count, which Opacus's loop does not know before "
            "it clips; train it with evenclip.fit."
        )
    if not (rule.sigma > 0 and rule.bounded and rule.poisson):
        raise ValueError(
            f"{rule.name} has no ε, so there is nothing to account for; choose a private rule."
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise unless the optimizer is one of Opacus for flat clipping on one device."""
    if type(optimizer) not in (DPOptimizer, DPOptimizerFastGradientClipping):
        raise TypeError(
            f"The optimizer is a {type(optimizer).__name__}; give the one that Opacus's "
            "make_private returns for clipping='flat' on one device (DPOptimizer, or "
            "DPOptimizerFastGradientClipping in ghost mode). Per-layer, adaptive and distributed "
            "optimizers and an EvenOptimizer are not supported."
        )


def _warn_if_less_noise(planned: float, rule: Rule) -> None:
    """Warn if ε will be larger than planned in `make_private`."""
    multiplier = joint(rule)
    if multiplier < planned and rule.sigma != planned:
        warnings.warn(
            f"The rule's noise has the joint multiplier {multiplier:.4g}, and make_private was "
            f"given {planned:.4g}: ε will be larger than planned. "
            "EvenPrivacyEngine.make_private_with_epsilon reaches a given ε.",
            stacklevel=3,
        )
