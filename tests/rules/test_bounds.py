"""The mechanism for a rule without a bound: its weights are finite numbers."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from evenclip.mechanism import Mechanism
from evenclip.rules import DPSGD


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
