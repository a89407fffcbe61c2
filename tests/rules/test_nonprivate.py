"""Plain SGD: the mean gradient."""

from __future__ import annotations

import math

import torch

from evenclip.mechanism import Mechanism
from evenclip.rules import NonPrivate


def test_every_weight_is_1(norms_around):
    norms = norms_around(1.0)
    weights, held = Mechanism(NonPrivate()).weights(
        norms, torch.zeros(len(norms)), torch.zeros(0), math.inf, None
    )
    assert weights.tolist() == [1.0] * len(norms)
    assert held is None


def test_step_is_the_mean_gradient_in_clear(take_step, batch):
    gradients, group = batch
    gradient, _, _, multipliers = take_step(
        NonPrivate(), gradients, group, torch.zeros(0), 40.0, {}
    )
    mean = [math.fsum(column) / 40 for column in gradients.T.tolist()]
    torch.testing.assert_close(
        gradient, torch.tensor(mean, dtype=torch.float64), rtol=0, atol=1e-13
    )
    assert multipliers == {"gradient": 0.0}
