"""Opacus's privacy engine with a rule of this package."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias

from opacus import PrivacyEngine
from opacus.optimizers.utils import params
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from evenclip.mechanism import Ledger
from evenclip.mechanism.calibration import calibrate
from evenclip.mechanism.sampling import drawn_rate
from evenclip.opacus.accountant import LedgerAccountant
from evenclip.opacus.checks import NO_GHOST, check_kind, check_rule
from evenclip.opacus.optimizer import EvenOptimizer, even
from evenclip.rules import RULES, Constants, DPSGDGlobalAdapt, Rule

__all__ = ["EvenPrivacyEngine"]

_MODES = "hooks", "functorch", "ew"
_Private: TypeAlias = tuple[Any, EvenOptimizer, DataLoader[Any]]


class EvenPrivacyEngine(PrivacyEngine):  # type: ignore[misc]  # Opacus has no types
    """Opacus's `PrivacyEngine` with a rule of this package instead of flat clipping.

        engine = EvenPrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, clipping="dpsgd-global-adapt",
            noise_multiplier=1.0, max_grad_norm=1.0,
        )

    `noise_multiplier` is the rule's sigma, and `max_grad_norm` is its C0. Give the other fields of
    the rule by name (`Z0=10.0`, `tau=1.0`, ...), or give the rule itself:
    `rule=DPSGDGlobalAdapt(...)`.

    Batches and noise come from AES-256 with secret keys of the operating system, so Opacus's
    `secure_mode` is not needed.

    Args:
        accountant: "prv", Opacus's default; ε is computed from the ledger, by PLD.
        secure_mode: accepted, and changes nothing.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        del secure_mode
        if accountant != "prv":
            raise ValueError(
                f"accountant is {accountant!r}, and this engine computes ε from its ledger by PLD; "
                "leave it out. evenclip.mechanism.accounting.epsilon(engine.ledger, delta, 'rdp') "
                "returns ε by RDP."
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Secure RNG turned off")  # that of Opacus's noise
            PrivacyEngine.__init__(self)
        self.accountant = LedgerAccountant()

    @property
    def ledger(self) -> Ledger:
        """Every release of the engine's optimizers; public."""
        ledger: Ledger = self.accountant.ledger
        return ledger

    def make_private(
        self,
        *,
        clipping: str | None = None,
        rule: Rule | None = None,
        noise_multiplier: float | None = None,
        max_grad_norm: float | None = None,
        **arguments: Any,
    ) -> _Private:
        """Make model, optimizer and data loader private, with a rule; see Opacus's `make_private`.

        Args:
            clipping: name of the rule: "dpsgd", "dpsgd-global" or "dpsgd-global-adapt" (default).
            rule: the rule itself, instead of `clipping`.
            noise_multiplier: sigma of a rule given by name.
            max_grad_norm: C0 of a rule given by name.
            **arguments: fields of a rule given by name, and all other arguments of Opacus's
                `make_private`.

        Raises:
            TypeError: if an argument or the rule is unknown.
            ValueError: if the rule cannot be used with Opacus, or ε would be wrong; the message
                says what to do.
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
        return self._private(chosen, rest)

    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        clipping: str | None = None,
        rule: Rule | None = None,
        max_grad_norm: float | None = None,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        **arguments: Any,
    ) -> _Private:
        """Make the training private with a given ε; see Opacus's `make_private_with_epsilon`.

        All noise of the rule, including that of the count, is scaled so that `epochs` epochs cost ε
        at δ. Differs from Opacus: the sampling rate and the number of steps are exactly those of
        the private loader.

        Args:
            target_epsilon: ε of all releases, by PLD, for the drawn noise.
            target_delta: δ.
            epochs: number of epochs.
            clipping: as in `make_private`.
            rule: the rule itself, instead of `clipping`; only the ratio of its multipliers matters.
            max_grad_norm: C0 of a rule given by name.
            optimizer: as in `make_private`.
            data_loader: as in `make_private`.
            **arguments: as in `make_private`; `sigma_count` is relative to sigma = 1.
        """
        given = {} if max_grad_norm is None else {"C0": max_grad_norm}
        chosen, rest = _chosen(clipping, rule, given, arguments)
        if rule is None and max_grad_norm is None:
            raise ValueError("Give max_grad_norm, or the rule itself: rule=DPSGDGlobalAdapt(...).")
        if len(self.accountant) > 0:
            warnings.warn(
                "This engine has already spent privacy that target_epsilon does not include; the "
                "total ε will be larger.",
                stacklevel=2,
            )
        q = 1 / len(data_loader)  # as Opacus's Poisson loader
        calibrated = calibrate(
            chosen,
            epsilon=target_epsilon,
            delta=target_delta,
            q=drawn_rate(q),
            steps=epochs * int(1 / q),
            parameters=max(1, sum(p.numel() for p in params(optimizer))),
        )
        return self._private(
            calibrated, rest | {"optimizer": optimizer, "data_loader": data_loader}
        )

    def _private(self, rule: Rule, arguments: dict[str, Any]) -> _Private:
        """Call Opacus's `make_private`, and give its optimizer the rule."""
        check_rule(rule)
        _check_arguments(arguments)
        model, optimizer, data_loader = PrivacyEngine.make_private(
            self, noise_multiplier=rule.sigma, max_grad_norm=_S(rule), **arguments
        )
        return model, even(optimizer, rule, self, data_loader), data_loader


def _chosen(
    clipping: str | None, rule: Rule | None, given: dict[str, float], arguments: Mapping[str, Any]
) -> tuple[Rule, dict[str, Any]]:
    """Return the rule, and the arguments that are Opacus's."""
    if rule is not None:
        check_kind(rule)
        if (clipping is not None and clipping != rule.name) or any(
            getattr(rule, k) != v for k, v in given.items()
        ):
            raise ValueError(
                f"rule is {rule!r}, and clipping, noise_multiplier or max_grad_norm differ from "
                "it; leave them out."
            )
        return rule, dict(arguments)
    name = DPSGDGlobalAdapt.name if clipping is None else clipping
    if name not in RULES:
        raise ValueError(
            f"clipping is {name!r}; it must be 'dpsgd', 'dpsgd-global' or 'dpsgd-global-adapt'. "
            "For Opacus's own clipping, use its PrivacyEngine."
        )
    kind = RULES[name]
    check_rule(kind())
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    known = names - {"sigma", "C0"}
    own = {k: v for k, v in arguments.items() if k in known}
    return kind(**given, **own), {k: v for k, v in arguments.items() if k not in known}


def _S(rule: Rule) -> float:
    """Return the sensitivity of the first step."""
    return float(rule.sensitivity(rule.init(Constants())))


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise for arguments that Opacus would ignore silently, or that would make its ε wrong."""
    unknown = [
        name
        for name in arguments
        if name not in inspect.signature(PrivacyEngine.make_private).parameters
    ]
    if unknown:
        raise TypeError(
            f"{', '.join(unknown)}: neither an argument of Opacus's make_private nor a field of "
            "the rule; check the spelling, or leave it out."
        )
    mode = arguments.get("grad_sample_mode", "hooks")
    if "ghost" in mode:
        raise ValueError(NO_GHOST)
    if mode not in _MODES:
        raise ValueError(f"grad_sample_mode is {mode!r}; use one of {', '.join(_MODES)}.")
    if not arguments.get("poisson_sampling", True):
        raise ValueError(
            "poisson_sampling is False, and the ε of this engine holds for Poisson samples only; "
            "leave it True."
        )
