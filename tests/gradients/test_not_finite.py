"""A masked sample contributes exactly 0 for any content, and does not affect the others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip.gradients import Tape, WholeTape, plan
from evenclip.gradients.layers import FORMULAS
from evenclip.gradients.tape import Independence

N, BAD, CLASSES = 5, (1, 3), 3


class Direction(nn.Module):
    """A custom layer, x / ‖x‖, with a NaN gradient at 0."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.scale * x / x.norm(dim=1, keepdim=True)


class Root(nn.Module):
    """A custom layer: √(wx)² has no gradient at 0."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return ((self.weight * x) ** 2).sum(dim=1, keepdim=True).sqrt()


class Recurrent(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.layer, self.first = nn.GRU(4, 3, batch_first=not first), first

    def forward(self, x):
        return self.layer(x.transpose(0, 1))[0][-1] if self.first else self.layer(x)[0][:, -1]


class Tied(nn.Module):
    """A weight is used outside its layer, so the whole model goes through `torch.func`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(self.layer(x), self.layer.weight)


class Twice(nn.Module):
    """The same layer is used twice: its gradients are formed because of their cross terms."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.layer(x))


class Words(nn.Module):
    """Tokens are never NaN, but their factor may be."""

    def __init__(self, positions):
        super().__init__()
        self.words, self.positions = nn.Embedding(6, 4), positions

    def forward(self, x):
        at = torch.arange(4) if self.positions else torch.arange(4).expand(len(x), 4)
        return self.words(at) * x.unsqueeze(2)


LAYERS = {  # kinds that it shows -> how it is made, one sample's input
    nn.Linear: (lambda: nn.Linear(4, 4), (4,)),
    "Linear, positions": (lambda: nn.Linear(4, 4), (5, 4)),
    "Linear, Gram": (lambda: nn.Linear(4, 4), (2, 4)),
    "Linear, positions in the batch axis": (
        lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 4), nn.Unflatten(0, (-1, 2))), (2, 4)),
    nn.Conv1d: (lambda: nn.Conv1d(2, 3, 2, padding=1), (2, 6)),
    nn.Conv2d: (lambda: nn.Conv2d(2, 3, 2), (2, 5, 5)),
    "Conv2d, large": (lambda: nn.Conv2d(8, 9, 2), (8, 3, 3)),
    nn.Conv3d: (lambda: nn.Conv3d(1, 2, 2), (1, 3, 3, 3)),
    nn.Embedding: (lambda: Words(positions=False), (4,)),
    "Embedding of positions": (lambda: Words(positions=True), (4,)),
    nn.LayerNorm: (lambda: nn.LayerNorm(4), (4,)),
    "LayerNorm without eps": (lambda: nn.LayerNorm(4, eps=0.0), (4,)),
    nn.RMSNorm: (lambda: nn.RMSNorm(4), (4,)),
    nn.GroupNorm: (lambda: nn.GroupNorm(2, 4), (4, 3)),
    nn.InstanceNorm1d: (lambda: nn.InstanceNorm1d(2, affine=True), (2, 3)),
    nn.InstanceNorm2d: (lambda: nn.InstanceNorm2d(2, affine=True), (2, 3, 2)),
    nn.InstanceNorm3d: (lambda: nn.InstanceNorm3d(2, affine=True), (2, 3, 2, 2)),
    "GRU": (lambda: Recurrent(first=False), (5, 4)),
    "GRU, position first": (lambda: Recurrent(first=True), (5, 4)),
    "PReLU": (lambda: nn.PReLU(4), (4,)),
    "own layer": (Direction, (4,)),
    "another own layer": (Root, (4,)),
    "as a whole": (Tied, (4,)),
    "twice": (Twice, (4,)),
}  # fmt: skip


def test_every_layer_with_a_formula_is_here():
    missing = [kind.__name__ for kind in FORMULAS if kind not in LAYERS]
    assert not missing, f"add a row for {', '.join(missing)} to LAYERS of {__file__}"


@pytest.fixture
def planned(made, numbers, tokens):
    """`planned(name)`: a model with that layer, its tape (planned on ordinary numbers), x and y."""

    def build(name, independence=None):
        make, shape = LAYERS[name]
        layer = made(0, make)
        x, y = numbers(1, N, *shape), tokens(2, CLASSES, N)
        width = layer(x).flatten(1).shape[1]
        model = nn.Sequential(layer, nn.Flatten(), made(3, lambda: nn.Linear(width, CLASSES)))
        return plan(model, F.cross_entropy, x, y, independence), x, y

    return build


@pytest.mark.parametrize(
    "name", LAYERS, ids=lambda name: name if isinstance(name, str) else name.__name__
)
def test_a_sample_that_is_not_kept_contributes_exactly_nothing(name, planned, numbers):
    tape, x, y = planned(name)
    for bad in (math.nan, math.inf, -math.inf, 0.0):
        check_left_out(tape, x, y, bad, numbers)


def check_left_out(tape, x, y, bad, numbers):
    """One sample is `bad` everywhere, one in a single number; neither is kept."""
    keep = torch.tensor([i not in BAD for i in range(N)])
    broken = x.clone()
    broken[BAD[0]] = bad
    broken[BAD[1]].view(-1)[0] = bad
    with tape.recording():
        clean, masked = tape(x, y), tape(broken, y).masked(keep)
    weights = numbers(5, N)
    torch.testing.assert_close(masked.weighted_sum(weights), clean.weighted_sum(weights * keep))
    torch.testing.assert_close(masked.norms(), torch.where(keep, clean.norms(), 0.0))
    torch.testing.assert_close(masked.losses, torch.where(keep, clean.losses, 0.0))
    for i in BAD:
        indicator = F.one_hot(torch.tensor(i), N).double()
        assert not masked.weighted_sum(indicator).any()
        assert not masked.norms()[i].any()


def test_what_is_masked_twice_stays_masked(planned):
    tape, x, y = planned("own layer")
    x[0], x[1] = 0.0, math.nan
    first, second = torch.arange(N) != 0, torch.arange(N) != 1
    with tape.recording():
        gradients = tape(x, y).masked(first).masked(second)
    assert gradients.norms()[:2].tolist() == [0.0, 0.0]
    assert gradients.weighted_sum(torch.ones(N)).isfinite().all()


@pytest.mark.parametrize("name", [nn.Linear, "own layer", "as a whole"], ids=str)
def test_a_batch_with_nothing_kept(name, planned):
    tape, x, y = planned(name)
    with tape.recording():
        gradients = tape(x * math.nan, y).masked(torch.zeros(N, dtype=torch.bool))
    assert not gradients.norms().any()
    assert torch.equal(gradients.weighted_sum(torch.ones(N)), tape.layout.join({}))


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_model_can_be_planned_on_samples_of_which_one_is_not_finite(
    row, made, numbers, tokens, alone, same
):
    model = made(0, lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, CLASSES)))
    x, y = numbers(1, 3, 4), tokens(2, CLASSES, 3)
    x[row] = math.nan
    tape, others = plan(model, F.cross_entropy, x, y), torch.arange(3) != row
    assert isinstance(tape, Tape)
    with tape.recording():
        same(tape(x[others], y[others]), alone(model, F.cross_entropy, x[others], y[others]))


def test_the_kinds_of_tape_are_those_meant(planned):
    assert isinstance(planned("own layer", "tested")[0], Tape)
    assert isinstance(planned("as a whole", "tested")[0], WholeTape)
    assert planned("own layer")[0].independence is Independence.CONSTRUCTION
