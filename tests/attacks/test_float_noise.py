"""Mironov's attack: a floating-point sum plus floating-point noise.

The attacker knows a dataset and one more record, and sees the model after one step of softmax
regression from zero, on all records. So it knows the released gradient to the last bit. For either
dataset it looks for noise that leads to this gradient. If there is none, it was the other dataset.

With float32 sums and noise, most numbers can be reached from one dataset only, and every gradient
gives its dataset away, however small ε is. On the grids, every published number can be reached from
both, so the search must never decide.

Mironov 2012, "On significance of the least significant bits for differential privacy".
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenclip import DPSGD, fit

ROUNDS, N, D, CLASSES, B = 8, 24, 80, 4, 16
# Of floats between 45 and 64, the noise in float32 reaches 71 %; above that, up to 90, all.
RULE = DPSGD(C0=1.0, sigma=45.0)
SETTINGS = {"rule": RULE, "batch_size": B, "q": 1.0, "steps": 1, "lr": 1.0, "delta": 1e-5}


def model():
    """Return softmax regression that starts at zero, so that the model is the gradient."""
    layer = nn.Linear(D, CLASSES)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
    return layer


@pytest.fixture
def neighbours():
    """Return a dataset with the record in question, and one without it."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(N + 1, D, generator=random), torch.arange(N + 1) % CLASSES
    return {"with": (x, y), "without": (x[:-1], y[:-1])}


def decisions(attacker, neighbours, single):
    """Return for every run its dataset, and which datasets the attacker cannot rule out."""
    known = {n: attacker.release_of(model(), data, **SETTINGS) for n, data in neighbours.items()}
    decided = []
    for name, data in neighbours.items():
        for _ in range(ROUNDS):
            result = fit(model(), data, **SETTINGS)
            assert result.epsilon("pld", 1e-5) < 0.1
            gradient = -nn.utils.parameters_to_vector(result.model.parameters()).detach()
            possible = [
                guess
                for guess in neighbours
                if attacker.reachable(gradient, *known[guess], 1 / B, torch.float32, single).all()
            ]
            decided.append((name, possible))
    return decided


@pytest.mark.parametrize("single", [False, True])
def test_no_gradient_gives_its_dataset_away(attacker, neighbours, single):
    """With noise of 53 bits or 24, both datasets explain every gradient."""
    for _, possible in decisions(attacker, neighbours, single):
        assert possible == list(neighbours)


def test_the_attack_wins_against_float_noise(attacker, neighbours, float_noise):
    for name, possible in decisions(attacker, neighbours, single=True):
        assert possible == [name]
