"""Tests of the trial of a custom rule: a rule that learns from noise alone is reported before."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

import evenclip
from evenclip.mechanism import Mechanism
from evenclip.mechanism.trial import try_rule
from evenclip.rules import RULES, Constants, Rule

FIVE = Constants(groups=2, classes=3, parameters=5, B=8.0, q=0.1, steps=10)


@dataclass(frozen=True)
class Custom(Rule):
    """DPSGD with a state, whose methods can be replaced."""

    name: ClassVar[str] = "custom"

    sigma: float = 1.0
    sigma_count: float = 10.0
    methods: dict[str, Any] = field(default_factory=dict)

    def init(self, constants):
        return self._replaced("init", torch.ones(1, dtype=torch.float64), constants)

    def statistic(self, norm, group, state):
        return self._replaced("statistic", (norm > state).double(), norm, group, state)

    def observe(self, noisy, B, state):
        return self._replaced("observe", (state, state), noisy, B, state)

    def sensitivity(self, now):
        return self._replaced("sensitivity", now, now)

    def weight(self, norm, group, now):
        return self._replaced("weight", (now / norm).clamp(max=1.0), norm, group, now)

    def _replaced(self, name, default, *given):
        return self.methods[name](*given) if name in self.methods else default


@pytest.mark.parametrize("kind", RULES.values(), ids=lambda kind: kind.name)
def test_built_in_rules_are_not_tried(kind, monkeypatch):
    monkeypatch.setattr(Mechanism, "start", None)
    mechanism = object.__new__(Mechanism)
    object.__setattr__(mechanism, "rule", kind())
    try_rule(mechanism)


def test_a_rule_that_keeps_the_contract_passes():
    try_rule(Mechanism(Custom(), FIVE))


@pytest.mark.parametrize(
    ("method", "replacement", "message"),
    [
        ("weight", lambda norm, *_: norm * math.nan, r"weight of custom is nan for .* norm 0\.01"),
        ("weight", lambda norm, *_: 1 / (norm - norm), "weight of custom is inf for"),
        (
            "weight",
            lambda norm, group, _: torch.where((norm > 50) & (group == 1), math.inf, 1 / norm),
            "weight of custom is inf for a sample of norm 100 and group 1",
        ),
        ("statistic", lambda norm, *_: norm * math.nan, "the length of statistic of custom is nan"),
        (
            "statistic",
            lambda norm, *_: torch.ones(4) + 0 * norm,
            "the length of statistic of custom is 2 for .*; it must be at most 1",
        ),
        ("observe", lambda noisy, B, state: (state, state * math.nan), "sensitivity of custom re"),
        (
            "observe",
            lambda noisy, B, state: noisy[3],
            r"observe of custom failed: IndexError.*line",
        ),
        ("init", lambda constants: 1 / 0, r"init of custom failed: ZeroDivisionError.*line \d+"),
        ("sensitivity", lambda now: now.missing, "sensitivity of custom failed: AttributeError"),
        ("weight", lambda *_: len(3), "weight of custom failed: TypeError"),
    ],
)
def test_a_rule_that_would_not_learn_is_reported(method, replacement, message):
    with pytest.raises(ValueError, match=message):
        try_rule(Mechanism(Custom(methods={method: replacement}), FIVE))


def test_a_run_tries_its_rule(tmp_path):
    train, _, _ = evenclip.data.digits()
    rule = Custom(methods={"weight": lambda norm, *_: norm * math.nan})
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    with pytest.raises(ValueError, match="weight of custom is nan"):
        evenclip.fit(model, train, rule=rule, epochs=1, batch_size=64)


def test_weights_that_are_not_finite_are_counted():
    """A rule may pass the trial and fail later."""
    norms = torch.tensor([0.5, 7.0, 9.0], dtype=torch.float64)
    rule = Custom(methods={"weight": lambda norm, *_: torch.where(norm > 8, math.nan, 1 / norm)})
    weights, clamped = Mechanism(rule, FIVE).weights(
        norms, torch.zeros(3, dtype=torch.int64), torch.ones(1, dtype=torch.float64), 1.0, None
    )
    assert weights[2] == 0
    assert clamped is not None
    assert clamped.tolist() == [False, False, True]
