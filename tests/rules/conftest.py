"""Fixtures of the rule tests: norms to test with, and one step on given gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from evenclip.mechanism import Mechanism
from evenclip.rules import Constants
from exact import Ideal


@pytest.fixture(scope="session")
def norms_around():
    """Thresholds -> norms: 0, tiny, huge, each threshold and its two neighbours, and 200 others."""

    def norms(*thresholds):
        beside = [
            f(t, to)
            for t in thresholds
            for f, to in ((max, t), (math.nextafter, 0.0), (math.nextafter, math.inf))
        ]
        usual = np.random.default_rng(0).lognormal(0.0, 2.0, 200)
        return torch.tensor([0.0, 1e-300, 1e-12, 1e12, *beside, *usual], dtype=torch.float64)

    return norms


@pytest.fixture(scope="session")
def take_step():
    """Compute one step of the mechanism on given gradients [sample, 3]."""

    def step(rule, gradients, group, state, B, noise):
        mechanism, release = Mechanism(rule, Constants(groups=3)), Ideal(noise)
        norms = torch.linalg.vector_norm(gradients, dim=1)
        now, following = mechanism.observe(
            mechanism.count(norms, group, state, None), B, state, release
        )
        S = rule.sensitivity(now)
        weights, _ = mechanism.weights(norms, group, now, S, None)
        gradient = mechanism.publish(weights @ gradients, S, B, release)
        return gradient, now, following, mechanism.multipliers

    return step


@pytest.fixture(scope="session")
def batch():
    """Return 40 gradients of different lengths in three dimensions, one of them 0, and groups 0, 1,
    2.
    """
    random = np.random.default_rng(1)
    gradients = random.normal(size=(40, 3)) * random.lognormal(0.0, 1.5, (40, 1))
    gradients[7] = 0.0
    return torch.from_numpy(gradients), torch.from_numpy(random.integers(0, 3, 40))
