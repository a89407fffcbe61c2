"""The public constants of a run, fixed before training; its privacy statement refers to them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from evenclip.rules import Constants, Rule

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """The public constants of a run, fixed before training.

    They are the same for neighbouring datasets.

    Attributes:
        rule: the clipping rule.
        n: number of records, as declared or counted. The number that are really there is not
            published if it was declared.
        groups: number of groups K.
        q: Poisson rate; None for shuffled batches.
        B: expected batch size, the divisor of sums.
        steps: number of steps T.
        epoch: number of steps per epoch.
        delta: δ.
        lr: learning rate.
        optimizer: name of the optimiser's class.
        seed: the given seed; None if the key came from the operating
            system and was not kept. Secret; not printed.
        parameters: number of trainable parameters.
        declared: whether n was given; otherwise it was counted in the training data, which ε does
            not cover.
    """

    rule: Rule
    n: int
    groups: int
    q: float | None
    B: float
    steps: int
    epoch: int
    delta: float
    lr: float
    optimizer: str
    seed: int | None = field(repr=False)
    parameters: int
    declared: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the constants as plain values that may be published.

        The seed is left out; `seed_given` says whether one was given.
        """
        rule = {
            "class": type(self.rule).__qualname__,
            "name": self.rule.name,
            "repr": repr(self.rule),
        }
        plain = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("rule", "seed")
        }
        return plain | {"rule": rule, "seed_given": self.seed is not None}

    def constants(self, classes: int) -> Constants:
        """Return the constants that a rule's first state may depend on."""
        return Constants(self.groups, classes, self.parameters, self.B, self.q, self.steps)

    def begins(self, t: int) -> bool:
        """Return whether an epoch begins after t steps."""
        return t % self.epoch == 0

    def ends(self, t: int) -> bool:
        """Return whether an epoch ends with step t, counted from 1."""
        return t % self.epoch == 0 or t == self.steps

    @property
    def specification(self) -> str:
        """SHA-256 of `to_json` in hexadecimal digits, which identifies the settings in reports."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
