"""What can be used with a rule of this package inside Opacus, and what is refused."""

from __future__ import annotations

import warnings
from dataclasses import is_dataclass
from typing import Any

from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from evenclip.mechanism import Mechanism, joint_multiplier, wanted
from evenclip.opacus.accountant import LedgerAccountant
from evenclip.opacus.clipping import check_dtype
from evenclip.rules import Rule

__all__ = [
    "NO_GHOST",
    "accountant_of",
    "check_kind",
    "check_loader",
    "check_optimizer",
    "check_rule",
    "joint",
    "warn_if_less_noise",
]

NO_GHOST = (
    "In ghost mode, Opacus computes norms and sums in float32 over the whole batch, and no ε can "
    "be proved for that; use grad_sample_mode='hooks', or evenclip.fit, which forms no per-sample "
    "gradients either."
)


def joint(rule: Rule) -> float:
    """Return the joint noise multiplier of all releases of the first step.

    >>> from evenclip import DPSGDGlobalAdapt
    >>> joint(DPSGDGlobalAdapt(sigma=3.0, sigma_count=4.0))
    2.4
    """
    return joint_multiplier(Mechanism(rule).multipliers.values())


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
    if wanted(rule) or type(rule).loss is not Rule.loss:
        raise ValueError(
            f"{rule.name} uses each sample's loss, output or target, which Opacus's loop does not "
            "give to its optimizer; train it with evenclip.fit."
        )
    if not (rule.sigma > 0 and rule.bounded and rule.poisson):
        raise ValueError(
            f"{rule.name} has no ε, so there is nothing to account for; choose a private rule."
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise unless the optimizer is one of Opacus for flat clipping on one device."""
    if type(optimizer) is DPOptimizerFastGradientClipping:
        raise ValueError(NO_GHOST)
    if type(optimizer) is not DPOptimizer:
        raise TypeError(
            f"The optimizer is a {type(optimizer).__name__}; give the DPOptimizer that Opacus's "
            "make_private returns for clipping='flat' on one device. Per-layer, adaptive and "
            "distributed optimizers and an EvenOptimizer are not supported."
        )
    if not optimizer.expected_batch_size:
        raise ValueError(
            f"The optimizer has the expected batch size {optimizer.expected_batch_size}, and sums "
            "are divided by it; use a larger batch_size in the data loader."
        )
    if optimizer.generator is not None and not optimizer.secure_mode:
        raise ValueError(
            "noise_generator is given, but noise is always drawn from a secret key; leave it out."
        )
    for p in optimizer.params:
        check_dtype(p.dtype)


def check_loader(data_loader: Any) -> None:
    """Raise unless the data loader is one of Opacus for Poisson samples on one device."""
    if type(data_loader) is not DPDataLoader:
        raise TypeError(
            f"The data loader is a {type(data_loader).__name__}; give the one that make_private "
            "returned with poisson_sampling=True."
        )
    kind = type(data_loader.batch_sampler)
    if kind is not UniformWithReplacementSampler:
        raise ValueError(
            f"The data loader has a {kind.__name__}; give the one that make_private returned for "
            "one device, to one optimizer only."
        )
    if data_loader.collate_fn.rand_on_empty:
        raise ValueError(
            "rand_on_empty is True: with a random record instead of an empty batch, one record "
            "more or less changes the sum by up to 2·S, and ε holds for S. Leave it out: a step "
            "with an empty batch is a step too."
        )


def accountant_of(engine: PrivacyEngine) -> LedgerAccountant:
    """Return the accountant of the engine, a new one instead of Opacus's."""
    accountant = engine.accountant
    if isinstance(accountant, LedgerAccountant):
        return accountant
    if len(accountant) > 0:
        raise ValueError(
            "This engine has recorded steps with Opacus's own noise, which the ledger cannot "
            "account for; use a new engine."
        )
    return LedgerAccountant()


def warn_if_less_noise(planned: float, rule: Rule) -> None:
    """Warn if ε will be larger than planned in `make_private`."""
    multiplier = joint(rule)
    if multiplier < planned and rule.sigma != planned:
        warnings.warn(
            f"The rule's noise has the joint multiplier {multiplier:.4g}, and make_private was "
            f"given {planned:.4g}: ε will be larger than planned. "
            "EvenPrivacyEngine.make_private_with_epsilon reaches a given ε.",
            stacklevel=3,
        )
