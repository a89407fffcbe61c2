"""Planning takes models as people write them: outputs kept in attributes, masks, pruned layers."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from evenclip import DPSGD, fit
from evenclip.gradients import plan
from evenclip.gradients.tape import Independence

D, CLASSES, N = 8, 3, 24


@pytest.fixture
def data():
    random = torch.Generator().manual_seed(0)
    return torch.randn(N, D, generator=random), torch.arange(N) % CLASSES


class KeepsItsOutput(nn.Module):
    """Keeps an output and an auxiliary loss, which have a graph and cannot be copied."""

    def __init__(self, branches):
        super().__init__()
        self.layer, self.branches = nn.Linear(D, CLASSES), branches

    def forward(self, x):
        if self.branches and bool(x.isnan().any()):
            return x[:, :CLASSES]
        self.last = self.layer(x)
        self.auxiliary = self.last.square().mean()
        return self.last


@pytest.mark.parametrize("branches", [False, True])
def test_a_model_that_keeps_its_output_is_planned(branches, data):
    model = KeepsItsOutput(branches)
    expected = Independence.TESTED if branches else Independence.CONSTRUCTION
    assert plan(model, F.cross_entropy, *data).independence is expected
    assert not hasattr(model, "last")


class Attention(nn.Module):
    """Attention with a mask, of which a row may leave one position: its keys then have no δ."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x, mask):
        mask = mask.bool() | (torch.arange(mask.shape[1]) == 0)
        if bool(mask.all()):
            mask = torch.ones_like(mask)
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(dim=-1)
        return self.head((weights @ self.value(x)).mean(dim=1))


def test_a_derivative_that_cancels_is_not_mixing():
    torch.manual_seed(0)
    x, mask = torch.randn(66, 2, 4), torch.randint(2, (66, 2))
    tape = plan(Attention(), F.cross_entropy, (x, mask), torch.arange(66) % CLASSES)
    assert tape.independence is Independence.TESTED


def test_a_model_that_cannot_be_copied_is_refused_with_the_attribute(data):
    model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    prune.l1_unstructured(model[0], "weight", 0.5)
    model(data[0])
    with pytest.raises(ValueError, match=re.escape("because 0.weight is the result of an opera")):
        fit(model, data, rule=DPSGD(), batch_size=8, steps=1, delta=1e-3)
    prune.remove(model[0], "weight")
    fit(model, data, rule=DPSGD(), batch_size=8, steps=1, delta=1e-3)
