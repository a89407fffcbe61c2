"""One record changes the rounding of all others.

The attacker chooses a dataset whose clipped gradients are all alike, so that their sum is long and
rounds coarsely, and one more record. It knows both sums to the last bit. If they are farther apart
than S(1 + ρ), the noise is scaled to a distance that one record exceeds.

Sums in float32 exceed it for some records; sums in float64 must exceed it for none.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

from evenclip import DPSGD, prepare
from evenclip.gradients import PerSample
from evenclip.mechanism.rounding import sum_rounding

N, D, CANDIDATES = 1500, 6, 16
RULE = DPSGD(C0=1.0, sigma=1.0)


def clipped_sum(x, y):
    """Return the clipped sum of the first step, and ρ as the attacker computes it."""
    settings = {"rule": RULE, "q": 1.0, "batch_size": N, "steps": 1, "delta": 1e-5}
    model = nn.Linear(D, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    run = prepare(model, (x, y), **settings)
    with run.listening():
        total = run.step().clipped_sum
    assert run.mechanism.rounding <= sum_rounding(2 * N)
    return [Fraction(number) for number in total.tolist()], run.mechanism.rounding


def farthest():
    """Return the largest square distance that a record makes, and the square of S(1 + ρ)."""
    random = torch.Generator().manual_seed(1)
    x = 3 + 0.01 * torch.randn(N, D, generator=random)
    y = torch.zeros(N, dtype=torch.int64)
    without, rho = clipped_sum(x, y)
    distances = []
    for _ in range(CANDIDATES):
        record = 3 + 0.01 * torch.randn(1, D, generator=random)
        added, rho_added = clipped_sum(torch.cat([record, x]), torch.zeros(N + 1).long())
        rho = max(rho, rho_added)
        distances.append(sum((a - b) ** 2 for a, b in zip(added, without, strict=True)))
    return max(distances), (1 + Fraction(rho)) ** 2


def test_no_record_moves_the_sum_by_more_than_its_bound():
    moved, bound = farthest()
    assert 0.99 < moved <= bound < 1 + 1e-8


@pytest.fixture
def single_precision(monkeypatch):
    """Plant weighted sums in the precision of the model."""
    exact = PerSample.weighted_sum

    def single(self, weights):
        return exact(self, weights.float()).double()

    monkeypatch.setattr(PerSample, "weighted_sum", single)


def test_the_attack_wins_against_sums_in_single_precision(single_precision):
    moved, bound = farthest()
    assert moved > bound + Fraction(1, 10**5)
