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


# --- group labels ---

DECLARE = r"reads the group, and the class does not declare it; write uses_groups: ClassVar\[bool\]"
THREE = Constants(groups=3, classes=2, parameters=5, B=8.0, q=0.1, steps=10)


class Declared(Custom):
    uses_groups: ClassVar[bool] = True


def per_group(constants):
    return torch.ones(constants.groups, dtype=torch.float64)


def own_bound(norm, group, now):
    return (now.gather(0, group.reshape(1)).reshape(()) / norm).clamp(max=1.0)


READING = [
    ("weight", {"weight": lambda norm, group, now: torch.where(group == 2, 0.5, 1) * 0.9 / norm}),
    ("weight", {"weight": lambda norm, group, now: torch.where(norm < 20 * group, 0.01, 0.0)}),
    # The bounds of the groups are equal in the first step.
    ("weight", {"init": per_group, "weight": own_bound, "sensitivity": lambda now: now.max(),
                "statistic": lambda norm, group, state: norm > 1}),
    ("statistic", {"statistic": lambda norm, group, state: torch.arange(3) == group.reshape(1)}),
    ("statistic", {"statistic": lambda norm, group, state: (norm > 5) & (group == 1)}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "methods"), READING)
def test_a_rule_that_reads_the_group_must_declare_it(method, methods):
    with pytest.raises(ValueError, match=f"^{method} of custom {DECLARE}"):
        try_rule(Mechanism(Custom(methods=methods), THREE))
    try_rule(Mechanism(Declared(methods=methods), THREE))
    if method != "statistic" and "init" not in methods:  # with one group there is nothing to tell
        try_rule(Mechanism(Custom(methods=methods), Constants(groups=1)))


def test_a_state_of_each_class_is_not_taken_for_groups():
    methods = {
        "init": per_group,
        "weight": lambda norm, group, now: (now.mean() / norm).clamp(max=1.0),
        "sensitivity": lambda now: now.mean(),
        "statistic": lambda norm, group, state: norm > state.max(),
    }
    try_rule(Mechanism(Custom(methods=methods), THREE))


class Reweighs(Custom):
    """Weighs the losses of the second class by group."""

    def loss(self, loss, output, y, group, state):
        return torch.where((y == 1) & (group == 1), 2 * loss, loss)


class CountsErrors(Custom):
    """Counts the losses of one group's second class."""

    def statistic(self, norm, group, state, loss, y):
        return (y == 1) & (group == 0) & (loss > 0)


class CountsLosses(Custom):
    def statistic(self, norm, group, state, loss, y):
        return loss > 1

    def loss(self, loss, output, y, group, state):
        return 2 * loss


def grouped(classes=2, rows=80):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator)
    return x, torch.arange(rows) % classes, torch.arange(rows) // 2 % 2


@pytest.mark.parametrize(("kind", "method"), [(Reweighs, "loss"), (CountsErrors, "statistic")])
def test_losses_and_statistics_of_records_are_tried_with_other_groups(kind, method):
    given = {"epochs": 1, "batch_size": 16, "seed": 0}
    model, (x, y, group) = torch.nn.Linear(4, 2), grouped()
    with pytest.raises(ValueError, match=f"^{method} of custom {DECLARE}"):
        evenclip.fit(model, (x, y, group), rule=kind(), **given)
    declared = type("Declared", (kind,), {"uses_groups": True})
    made = evenclip.fit(model, (x, y, group), rule=declared(), **given)
    assert made.privacy["group_labels_entered_training"] is True
    evenclip.fit(model, (x, y), rule=kind(), **given)  # without groups there is nothing to read


def test_a_rule_that_does_not_read_the_group_need_not_declare_it():
    made = evenclip.fit(
        torch.nn.Linear(4, 2), grouped(), rule=CountsLosses(), epochs=1, batch_size=16, seed=0
    )
    assert made.privacy["group_labels_entered_training"] is False


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
