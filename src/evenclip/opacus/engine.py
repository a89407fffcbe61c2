"""Opacus's engine with a rule in it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias

from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from torch.utils.data import DataLoader

from evenclip.opacus.clipping import joint
from evenclip.opacus.optimizer import EvenOptimizer, check_kind, check_optimizer, check_rule
from evenclip.rules import RULES, DPSGDGlobalAdapt, Rule

__all__ = ["EvenPrivacyEngine"]

_MODES = "hooks", "functorch", "ew", "ghost"
_Made: TypeAlias = tuple[Any, ...]  # module, optimizer, (in ghost mode) criterion, data loader


class EvenPrivacyEngine(PrivacyEngine):  # type: ignore[misc]  # Opacus has no types
    """Opacus's `PrivacyEngine` with a rule of this package in place of flat clipping; the rest is
    as it was.

        engine = EvenPrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, clipping="dpsgd-global-adapt",
            noise_multiplier=1.0, max_grad_norm=1.0,
        )

    `noise_multiplier` is the rule's sigma, that of the gradient; `max_grad_norm` its C0. Everything
    else about a rule is given by its own name (`Z0=10.0`, `tau=1.0`, ...), or all of it at once:
    `rule=DPSGDGlobalAdapt(...)`.
    """

    def make_private(
        self,
        *,
        clipping: str | None = None,
        rule: Rule | None = None,
        noise_multiplier: float | None = None,
        max_grad_norm: float | None = None,
        **arguments: Any,
    ) -> _Made:
        """As Opacus's, with a rule.

        Args:
            clipping: name of the rule: "dpsgd", "dpsgd-global" or "dpsgd-global-adapt", which it is
                unless given.
            rule: the rule itself, instead.
            noise_multiplier: sigma of a rule given by name.
            max_grad_norm: C0 of a rule given by name.
            **arguments: fields of a rule given by name, and all other arguments of Opacus's
                `make_private`.

        Raises:
            ValueError: for what cannot be trained by a rule, or has no true ε; the message says
                what to do.
        """
        given = {"sigma": noise_multiplier, "C0": max_grad_norm}
        chosen, rest = _chosen(
            clipping, rule, {k: v for k, v in given.items() if v is not None}, arguments
        )
        if rule is None and (noise_multiplier is None or max_grad_norm is None):
            raise ValueError(
                "Give noise_multiplier and max_grad_norm, or the rule itself: "
                "rule=DPSGDGlobalAdapt(...)."
            )
        return self._made(chosen, rest)

    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        clipping: str | None = None,
        rule: Rule | None = None,
        max_grad_norm: float | None = None,
        data_loader: DataLoader[Any],
        **arguments: Any,
    ) -> _Made:
        """As Opacus's, with a rule: all its noise, the count's too, is scaled until `epochs` epochs
        cost ε at δ.

        Differs from Opacus: sampling rate and number of steps are those that its loader will really
        have.

        Args:
            target_epsilon: ε of everything that is released, by the engine's own accountant.
            target_delta: δ.
            epochs: how many will be trained.
            clipping: as in `make_private`.
            rule: the rule itself, instead; only the ratio of its multipliers counts.
            max_grad_norm: C0 of a rule given by name.
            data_loader: as in `make_private`.
            **arguments: as in `make_private`; a `sigma_count` is for a sigma of 1, and scaled with
                it.
        """
        given = {} if max_grad_norm is None else {"C0": max_grad_norm}
        chosen, rest = _chosen(clipping, rule, given, arguments)
        if rule is None and max_grad_norm is None:
            raise ValueError("Give max_grad_norm, or the rule itself: rule=DPSGDGlobalAdapt(...).")
        if len(self.accountant) > 0:
            warnings.warn(
                "This engine has spent privacy already, which target_epsilon does not include; "
                "the ε of everything "
                "will be larger.",
                stacklevel=2,
            )
        multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=1 / _batches(data_loader),
            steps=epochs * len(data_loader),
            accountant=self.accountant.mechanism(),
        )
        return self._made(
            chosen.scaled(multiplier / joint(chosen)), rest | {"data_loader": data_loader}
        )

    def _made(self, rule: Rule, arguments: dict[str, Any]) -> _Made:
        """Opacus's own `make_private`, which asks for the optimiser and the criterion below."""
        check_rule(rule)
        _check_arguments(arguments)
        made: _Made = PrivacyEngine.make_private(
            self, rule=rule, noise_multiplier=rule.sigma, max_grad_norm=_S(rule), **arguments
        )
        return made

    def _prepare_optimizer(self, *, rule: Rule, **arguments: Any) -> EvenOptimizer:
        """Opacus's, then the rule's."""
        theirs = PrivacyEngine._prepare_optimizer(self, **arguments)
        check_optimizer(theirs)
        return EvenOptimizer(theirs, rule)

    def _prepare_criterion(
        self, *, module: Any, optimizer: EvenOptimizer, rule: Rule, **arguments: Any
    ) -> Any:
        """Opacus's, bound to the rule's weights."""
        del rule  # the optimizer has it
        criterion = PrivacyEngine._prepare_criterion(
            self, module=module, optimizer=optimizer, **arguments
        )
        optimizer.bind(criterion)
        return criterion


def _chosen(
    clipping: str | None, rule: Rule | None, given: dict[str, float], arguments: Mapping[str, Any]
) -> tuple[Rule, dict[str, Any]]:
    """The rule that was asked for, and the arguments that are Opacus's."""
    if rule is not None:
        check_kind(rule)
        if (clipping is not None and clipping != rule.name) or any(
            getattr(rule, k) != v for k, v in given.items()
        ):
            raise ValueError(
                f"rule is {rule!r}, and clipping, noise_multiplier or max_grad_norm say something "
                "else; leave them out."
            )
        return rule, dict(arguments)
    name = DPSGDGlobalAdapt.name if clipping is None else clipping
    if name not in RULES:
        raise ValueError(
            f"clipping is {name!r}; here it is one of 'dpsgd', 'dpsgd-global', "
            "'dpsgd-global-adapt'. For clipping of "
            "Opacus's own use its PrivacyEngine."
        )
    kind = RULES[name]
    check_rule(kind())
    known = {field.name for field in fields(kind)} - {"sigma", "C0"}  # type: ignore[arg-type]  # a rule is a dataclass
    ours = {k: v for k, v in arguments.items() if k in known}
    return kind(**given, **ours), {k: v for k, v in arguments.items() if k not in known}


def _batches(data_loader: DataLoader[Any]) -> int:
    """Batches an epoch of Opacus's Poisson loader, which rounds down: int(1/(1/93)) is 92."""
    return int(1 / (1 / len(data_loader)))


def _S(rule: Rule) -> float:
    """The sensitivity of the first step."""
    return float(rule.sensitivity(rule.init(1)))


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise for arguments that Opacus would drop without a word, or with which its ε would not be
    true.
    """
    unknown = [
        name
        for name in arguments
        if name not in inspect.signature(PrivacyEngine.make_private).parameters
    ]
    if unknown:
        raise TypeError(
            f"{', '.join(unknown)}: neither an argument of Opacus's make_private nor a field of "
            "the rule."
        )
    mode = arguments.get("grad_sample_mode", "hooks")
    if mode not in _MODES:
        raise ValueError(f"grad_sample_mode is {mode!r}; the rules work with {', '.join(_MODES)}.")
    if not arguments.get("poisson_sampling", True):
        raise ValueError(
            "poisson_sampling is False, and the ε of this engine is that of Poisson samples; "
            "leave it True."
        )
    if arguments.get("rand_on_empty", False):
        raise ValueError(
            "rand_on_empty is True: with a made-up record in place of an empty batch, one record "
            "more or less moves "
            "the sum by up to 2·S, and ε is for S. Leave it out: an empty batch is a step like "
            "any other here."
        )
