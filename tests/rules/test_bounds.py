"""The mechanism for a rule without a bound: its weights are finite numbers."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from evenclip.mechanism import Mechanism
from evenclip.rules import DPSGD, Rule


@dataclass(frozen=True)
class Boundless(DPSGD):
    """S = ∞, and a given weight."""

    name: ClassVar[str] = "boundless"
    given: float = 1.0

    def sensitivity(self, now):
        return float("inf")

    def weight(self, norm, group, now):
        return torch.full_like(norm, self.given)


@pytest.mark.parametrize("given", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("traceable", [False, True])
def test_a_weight_that_is_no_number_is_0_without_a_bound_too(given, traceable):
    guard = Mechanism(Boundless(given=given), traceable=traceable)
    norms, group = (
        torch.tensor([0.0, 1.0, 1e200], dtype=torch.float64),
        torch.zeros(3, dtype=torch.int64),
    )
    weights, _ = guard.weights(norms, group, torch.zeros(0), float("inf"), None)
    assert weights.tolist() == [0.0, 0.0, 0.0]


def test_a_weight_that_is_a_number_is_left_alone():
    guard = Mechanism(Boundless(given=3.0))
    weights, _ = guard.weights(
        torch.ones(2, dtype=torch.float64),
        torch.zeros(2).long(),
        torch.zeros(0),
        float("inf"),
        None,
    )
    assert weights.tolist() == [3.0, 3.0]


@dataclass(frozen=True)
class InSinglePrecision(Rule):
    """A custom rule whose S is a number of float32, and whose weights are a little too large."""

    name: ClassVar[str] = "in-single-precision"
    sigma: float = 1.0

    def sensitivity(self, now):
        return torch.ones(())

    def weight(self, norm, group, now):
        return (1 + 5e-8) / norm


def test_weights_are_held_to_S_in_double_precision():
    mechanism, norms = Mechanism(InSinglePrecision()), torch.rand(20, dtype=torch.float64) + 0.5
    S = mechanism.sensitivity(torch.zeros(0))
    weights, clamped = mechanism.weights(norms, torch.zeros(20).long(), torch.zeros(0), S, None)
    assert clamped.all()
    assert (weights * norms).max() <= 1 + 2.0**-50


@dataclass(frozen=True)
class Long(InSinglePrecision):
    """A custom rule with a statistic of a million numbers."""

    name: ClassVar[str] = "long"
    sigma_count: float = 1.0

    def statistic(self, norm, group, state):
        return norm * torch.linspace(0.1, 1.0, 10**6, dtype=torch.float64)


@pytest.mark.parametrize("norm", [1e-4, 1.0, 1e5])
def test_a_long_statistic_is_no_longer_than_1(norm):
    count = Mechanism(Long()).count(
        torch.tensor([norm], dtype=torch.float64), torch.zeros(1).long(), torch.zeros(0), None
    )
    exact = math.sqrt(math.fsum(value * value for value in count.tolist()))
    assert exact <= 1 + 2.0**-46
