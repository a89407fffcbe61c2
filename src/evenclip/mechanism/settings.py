"""The public constants of a run: what its privacy statement is about, fixed before training."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from evenclip.rules import Rule

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """The public constants of a run, fixed before training. Neighbouring datasets are trained with
    the same ones.

    Attributes:
        rule: the clipping rule.
        n: number of records (an access to the data that ε does not cover).
        groups: number of groups K.
        q: Poisson rate; None for shuffled batches.
        B: expected batch size, what sums are divided by.
        steps: T.
        epoch: steps in an epoch.
        delta: δ.
        lr: learning rate.
        optimizer: name of the optimiser's class.
        seed: what was given; None: taken from the operating system and not kept.
        parameters: number of trainable ones.
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
    seed: int | None
    parameters: int

    def to_json(self) -> dict[str, Any]:
        """As plain values that may be published: all but the seed, of which only whether one was
        given.
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

    def ends(self, t: int) -> bool:
        """Whether an epoch ends with the step of this number, the first being 1."""
        return t % self.epoch == 0 or t == self.steps

    @property
    def specification(self) -> str:
        """SHA-256 of all that, as hexadecimal digits: the name of these settings in reports."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
