"""Protocols of a comparison: what is equal for all rules.

With published settings the rules differ in how they clip and in how far one sample can move the
model, η·S: 20 times further for DPSGD-Global-Adapt than for DPSGD on Adult. The *matched* protocol
gives every private rule the same expected largest step η·E[S] = 0.1, and chooses the learning rate
of the non-private reference on validation data.

The published settings are in `evenclip.comparison.presets`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from evenclip.mechanism.calls import call
from evenclip.rules import DPSGD, DPSGDF, Constants, DPSGDGlobal, DPSGDGlobalAdapt, NonPrivate, Rule

__all__ = [
    "LEARNING_RATES",
    "STEP",
    "Method",
    "Protocol",
    "expected_sensitivity",
    "for_table",
    "matched",
    "unmatched",
    "with_rates",
]

STEP = 0.1
"""Largest step η·E[S] of the matched protocol: that of DPSGD-Global-Adapt in all four tables."""

LEARNING_RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Learning rates that the non-private reference is tried with."""


@dataclass(frozen=True)
class Method:
    """A rule with its learning rate.

    Attributes:
        rule: the rule.
        lr: its learning rate; None: that of the matched protocol for a private rule, and chosen on
            validation data for the reference.
    """

    rule: Rule
    lr: float | None

    @property
    def name(self) -> str:
        """The name of the rule."""
        return self.rule.name


@dataclass(frozen=True)
class Protocol:
    """The settings of a comparison, without data and seeds.

    Attributes:
        name: "published", "matched", "one learning rate", or "given" if no private rule has
            published settings and each has the expected largest step `STEP`.
        methods: the rules with their learning rates.
        model: description of the model; see `evenclip.sweep.describe`.
        epochs: passes over the training data.
        batch_size: expected batch size B.
        batches: steps per epoch, where q = 1/batches; None: from the number of records.
        delta: δ; None: the largest power of ten below 1/(2n).
        custom: names of the rules whose settings are not published.
    """

    name: str
    methods: tuple[Method, ...]
    model: dict[str, Any]
    epochs: int = 20
    batch_size: int = 256
    batches: int | None = None
    delta: float | None = None
    custom: tuple[str, ...] = ()

    def only(self, names: Sequence[str]) -> Protocol:
        """Return the protocol with these rules only, in this order.

        Raises:
            ValueError: if a rule has no settings here.
        """
        known = {method.name: method for method in self.methods}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(
                f"There is no rule {unknown[0]!r} with settings here; choose among "
                f"{', '.join(known)}, or give file.py:Class for a custom rule."
            )
        return replace(self, methods=tuple(known[name] for name in names))


def expected_sensitivity(rule: Rule, constants: Constants) -> float:
    """Return the S of a typical step, by the rule's own `typical_sensitivity`.

    >>> expected_sensitivity(DPSGD(C0=0.5), Constants(groups=4))
    0.5
    >>> round(expected_sensitivity(DPSGDF(C0=1.0), Constants(groups=4)), 3)  # C0 · (1 + √2)
    2.414

    Raises:
        ValueError: unless it is a positive number.
    """
    try:
        S = call(rule, "typical_sensitivity", constants)
    except ValueError as error:
        if type(rule).typical_sensitivity is not Rule.typical_sensitivity:
            raise
        raise ValueError(
            f"S of the first state of {rule.name} is not one number, so its matched learning rate "
            "is unknown; define typical_sensitivity(self, constants) in the class, or give --lr."
        ) from error
    if not (isinstance(S, Real) and 0 < float(S) < math.inf):
        raise ValueError(
            f"typical_sensitivity of {rule.name} returned {S}; it must be a positive number, "
            "because the matched learning rate is divided by it."
        )
    return float(S)


def unmatched(protocol: Protocol) -> Protocol:
    """Return the matched protocol before its learning rates are known."""
    methods = tuple(Method(method.rule, None) for method in protocol.methods)
    return replace(protocol, name="matched", methods=methods)


def with_rates(protocol: Protocol, constants: Constants) -> Protocol:
    """Return the protocol in which private rules without a learning rate have the step `STEP`."""
    methods = [
        Method(m.rule, STEP / expected_sensitivity(m.rule, constants))
        if m.lr is None and m.rule.sigma
        else m
        for m in protocol.methods
    ]
    return replace(protocol, methods=tuple(methods))


def matched(protocol: Protocol, constants: Constants) -> Protocol:
    """Return the protocol in which every private rule has the expected largest step `STEP`."""
    return with_rates(unmatched(protocol), constants)


def for_table(rules: Sequence[Rule] = ()) -> Protocol:
    """Return the defaults for tables: C0 = 1, Z = Z0 = 10, MLP 256-256, 20 epochs, matched."""
    rules = rules or (
        NonPrivate(),
        DPSGD(C0=1.0),
        DPSGDF(C0=1.0),
        DPSGDGlobal(C0=1.0, Z=10.0),
        DPSGDGlobalAdapt(C0=1.0, Z0=10.0),
    )
    model = {"name": "mlp", "options": {"hidden": [256, 256]}}
    return Protocol("matched", tuple(Method(rule, None) for rule in rules), model)
