"""DPSGD-Global compared with Algorithm 2 without its red parts, written as loops."""

from __future__ import annotations

import math

import pytest
import torch

from evenclip.mechanism import Mechanism
from evenclip.rules import Constants, DPSGDGlobal


def algorithm_2(gradients, C0, Z, sigma, B, noise):
    """Return g̃_B of the box, divided by the public B where the box has |B|."""
    total = [0.0, 0.0, 0.0]
    for gradient in gradients:
        if math.sqrt(sum(x * x for x in gradient)) <= Z:
            for j, x in enumerate(gradient):
                total[j] += C0 / Z * x
    return [(total[j] + sigma * C0 * noise[j]) / B for j in range(3)]


# C0/Z = 0.1 is no float32: rounded to one, it would break the bound for norms near Z. The last has
# Z < C0.
BOUNDS = [(1.0, 10.0), (0.5, 50.0), (0.1, 1.0), (1.0, 100.0), (0.7, 3.3), (3.3, 0.7)]


@pytest.mark.parametrize(("C0", "Z"), BOUNDS)
def test_weights(C0, Z, norms_around):
    norms = norms_around(Z, C0)
    weights, held = Mechanism(DPSGDGlobal(C0=C0, Z=Z)).weights(
        norms, torch.zeros(len(norms)), torch.zeros(0), C0, None
    )
    expected = torch.tensor(
        [C0 / Z if n <= Z else 0.0 for n in norms.tolist()], dtype=torch.float64
    )
    # At ‖g‖ = Z the guard may take off what C0/Z was rounded up by.
    torch.testing.assert_close(weights, expected, rtol=2.0**-51, atol=0)
    assert held is None


@pytest.mark.parametrize(("C0", "Z"), BOUNDS)
def test_step(C0, Z, take_step, batch):
    gradients, group = batch
    noise = [0.3, -1.7, 6.5]
    rule = DPSGDGlobal(C0=C0, sigma=0.8, Z=Z)
    given = {"gradient": torch.tensor(noise, dtype=torch.float64)}
    gradient, _, _, multipliers = take_step(
        rule, gradients, group, rule.init(Constants(groups=3)), 38.0, given
    )
    expected = algorithm_2(gradients.tolist(), C0, Z, 0.8, 38.0, noise)
    torch.testing.assert_close(
        gradient, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )
    assert multipliers == {"gradient": 0.8}


def test_the_direction_is_kept_where_nothing_is_dropped(take_step, batch):
    gradients, group = batch
    rule = DPSGDGlobal(C0=0.7, Z=1e3)
    gradient, *_ = take_step(
        rule, gradients, group, rule.init(Constants(groups=3)), 40.0, {"gradient": torch.zeros(3)}
    )
    plain = gradients.mean(dim=0)
    torch.testing.assert_close(gradient, plain * (0.7 / 1e3), rtol=1e-12, atol=0)
