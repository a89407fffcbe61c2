"""Against another library: the hooks of Opacus on a small convolutional network."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip.gradients import per_sample_gradients

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:Full backward hook is firing when gradients are computed:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:opacus"),
]


@pytest.fixture
def network(made):
    return made(0, lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 6, 2, groups=2, dilation=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(24, 5), nn.LayerNorm(5), nn.Linear(5, 3),
    ))  # fmt: skip


def test_gradients_are_those_of_opacus(network, numbers, tokens, same):
    opacus = pytest.importorskip("opacus.grad_sample")
    x, y = numbers(1, 6, 1, 8, 8), tokens(2, 3, 6)
    gradients = per_sample_gradients(network, F.cross_entropy, x, y)
    theirs = opacus.GradSampleModule(network, loss_reduction="sum")
    F.cross_entropy(theirs(x), y, reduction="sum").backward()
    same(gradients, torch.cat([p.grad_sample.flatten(1) for p in network.parameters()], dim=1))
