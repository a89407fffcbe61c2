"""DPSGD compared with Algorithm 1, written as loops."""

from __future__ import annotations

import math

import pytest
import torch

from evenclip.mechanism import Mechanism
from evenclip.rules import DPSGD, Constants


def clip_to(C0, gradient):
    """Return ḡ_i and its factor, computed number by number."""
    length = math.sqrt(sum(x * x for x in gradient))
    factor = 1.0
    if length > C0:
        factor = C0 / length
    return [factor * x for x in gradient]


def algorithm_1(gradients, C0, sigma, B, noise):
    """Return g̃_B of the box, divided by the public B where the box has |B|."""
    total = [0.0, 0.0, 0.0]
    for gradient in gradients:
        for j, x in enumerate(clip_to(C0, gradient)):
            total[j] += x
    return [(total[j] + sigma * C0 * noise[j]) / B for j in range(3)]


@pytest.mark.parametrize("C0", [0.1, 0.7, 1.0, 1e6])
def test_weights(C0, norms_around):
    norms = norms_around(C0)
    weights, held = Mechanism(DPSGD(C0=C0)).weights(
        norms, torch.zeros(len(norms)), torch.zeros(0), C0, None
    )
    expected = [1.0 if n <= C0 else C0 / n for n in norms.tolist()]
    # torch takes a number over a tensor as number · (1/tensor): two roundings where the loop has
    # one.
    torch.testing.assert_close(
        weights, torch.tensor(expected, dtype=torch.float64), rtol=2.0**-51, atol=0
    )
    assert held is None


@pytest.mark.parametrize("C0", [0.1, 0.7, 1e6])
def test_step(C0, take_step, batch):
    gradients, group = batch
    noise = [0.3, -1.7, 6.5]
    rule = DPSGD(C0=C0, sigma=0.8)
    given = {"gradient": torch.tensor(noise, dtype=torch.float64)}
    gradient, _, _, multipliers = take_step(
        rule, gradients, group, rule.init(Constants(groups=3)), 38.0, given
    )
    expected = algorithm_1(gradients.tolist(), C0, 0.8, 38.0, noise)
    torch.testing.assert_close(
        gradient, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )
    assert multipliers == {"gradient": 0.8}


def test_an_infinite_bound_on_the_data_is_no_clipping(batch):
    gradients, group = batch
    norms = torch.linalg.vector_norm(gradients, dim=1)
    weights, _ = Mechanism(DPSGD(C0=2 * float(norms.max()))).weights(
        norms, group, torch.zeros(0), 1e9, None
    )
    assert weights.tolist() == [1.0] * 40


def test_no_state():
    rule = DPSGD()
    assert rule.init(Constants(groups=3)).shape == (0,)
    assert rule.statistic(torch.ones(5), torch.zeros(5), rule.init(Constants(groups=3))).shape == (
        5,
        0,
    )
