"""The attacker's record reaches later steps through a custom rule that keeps values.

A rule's methods are called once for all samples of a chunk. The number of calls depends on the
batch, because an empty batch makes none and a large one several, and a value that a method keeps is
a number of the records. So a bound that decays with every call, or a norm that the next call uses,
made one record move the sum of later steps by several S. What a rule keeps is put back after every
call; the old behaviour, calls without that, is planted.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from evenclip import DPSGD, Performance, Rule, fit, prepare
from evenclip.gradients import ModelError
from evenclip.mechanism import mechanism

N, D, CLASSES = 33, 4, 3
CALLS, END, KEPT = [0], [0], list[torch.Tensor]()


@dataclass(frozen=True)
class Decays(Rule):
    """A bound that decays with every call of `weight`, in a list field."""

    name: ClassVar[str] = "decays"
    sigma: float = 1.0
    bound: list[float] = field(default_factory=lambda: [1.0], compare=False)

    def sensitivity(self, now):
        return self.bound[0]

    def weight(self, norm, group, now):
        bound = self.bound[0]
        self.bound[0] *= 0.8
        return (bound / norm).clamp(max=1.0)


@dataclass(frozen=True)
class Phases(Rule):
    """A loss that changes its sign after some calls, counted in a variable of the module."""

    name: ClassVar[str] = "phases"
    sigma: float = 1.0

    def loss(self, loss, output, y, group, state):
        CALLS[0] += 1
        return loss * (1 if CALLS[0] < END[0] else -1)

    def sensitivity(self, now):
        return 1.0

    def weight(self, norm, group, now):
        return (1.0 / norm).clamp(max=1.0)


@dataclass(frozen=True)
class Remembers(Rule):
    """Weights that use the norms of an earlier chunk."""

    name: ClassVar[str] = "remembers"
    sigma: float = 1.0
    sigma_count: float = 10.0

    def statistic(self, norm, group, state):
        KEPT.append(norm)
        return (norm > 1).to(torch.float64)[None]

    def sensitivity(self, now):
        return 1.0

    def weight(self, norm, group, now):
        return (1.0 / norm).clamp(max=1.0) * (1.0 if len(KEPT) < 3 else 0.1)


def sums(rule, out, chunk=None):
    """The sums of three steps with all records in every batch but the one left out."""
    END[0] = 10**9  # not while the run is prepared
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    x, y = 2 * torch.randn(N, D), torch.arange(N) % CLASSES
    run = prepare(
        model, (x, y), rule=rule, batch_size=N, q=1.0, steps=3, delta=1e-3, lr=1e-30,
        performance=Performance(chunk=chunk),
    )  # fmt: skip
    run.set_key(bytes([1]) * 32)
    whole = run.batches.sampler.batch

    def batch(t):
        rows = whole(t)
        rows = rows[:1] if isinstance(rule, Decays) and t == 0 else rows  # the first one alone
        return rows if out is None else rows[rows != out]

    run.batches.sampler.batch = batch
    CALLS[0], END[0] = 0, 4
    KEPT.clear()
    taken = []
    with run.listening():
        for _ in range(3):
            step = run.step()
            taken.append((step.clipped_sum.clone(), float(step.public.sensitivity)))
            run.update(step)
    return taken


def moved(rule, chunk=None):
    """The most, in units of S, that the first record moves the sum of a step."""
    pairs = zip(sums(copy.deepcopy(rule), None, chunk), sums(rule, 0, chunk), strict=True)
    return max(float((a - b).norm()) / S for (a, S), (b, _) in pairs)


RULES = {"decays": (Decays(), None), "phases": (Phases(), 32), "remembers": (Remembers(), 32)}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_keeps_nothing_from_call_to_call(name):
    assert moved(*RULES[name]) <= 1 + 1e-6


@pytest.mark.parametrize("name", RULES)
def test_the_attack_wins_against_calls_without_a_guard(name, monkeypatch):
    monkeypatch.setattr(mechanism, "RuleGuard", lambda rule: contextlib.nullcontext())
    assert moved(*RULES[name]) > 1.5


@dataclass(frozen=True)
class InNumbers(Rule):
    """A bound that decays with every call, in memory that torch does not watch."""

    name: ClassVar[str] = "in numbers"
    sigma: float = 1.0
    bound: Any = None

    def sensitivity(self, now):
        return float(self.bound[0])

    def weight(self, norm, group, now):
        bound = self.bound if isinstance(self.bound, np.ndarray) else self.bound.data
        bound *= 0.9
        return (1.0 / norm).clamp(max=1.0)


@pytest.mark.parametrize("bound", [np.ones(1), torch.ones(1)], ids=["numpy", "tensor.data"])
def test_a_rule_that_changes_an_array_or_a_tensor_is_refused(bound):
    data = torch.randn(N, D), torch.arange(N) % CLASSES
    with pytest.raises(ModelError, match="A pass through the rule in numbers changes"):
        fit(nn.Linear(D, CLASSES), data, rule=InNumbers(bound=bound), batch_size=8, steps=2)


@dataclass(frozen=True)
class Keeps(DPSGD):
    """Keeps the norms in a field, and in an attribute that is no field."""

    seen: list[torch.Tensor] = field(default_factory=list, compare=False)

    def weight(self, norm, group, now):
        self.seen.append(norm)
        object.__setattr__(self, "last", norm)
        return super().weight(norm, group, now)


def test_no_norm_leaves_with_the_rule():
    data = torch.randn(N, D), torch.arange(N) % CLASSES
    result = fit(nn.Linear(D, CLASSES), data, rule=Keeps(), batch_size=8, steps=3, delta=1e-3)
    assert result.settings.rule.seen == []
    assert not hasattr(result.settings.rule, "last")


def test_a_rule_that_a_program_changes_during_a_run_is_put_back_with_a_warning():
    rule, data = Decays(), (torch.randn(N, D), torch.arange(N) % CLASSES)
    run = prepare(nn.Linear(D, CLASSES), data, rule=rule, batch_size=8, steps=2, delta=1e-3)
    with run.listening():
        run.update(run.step())
        run.settings.rule.bound[0] = 0.5
        with pytest.warns(UserWarning, match="The rule decays was changed between two steps"):
            step = run.step()
    assert float(step.public.sensitivity) == 1.0
