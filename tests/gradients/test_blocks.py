"""Large activations pass in blocks: correct in every graph, and nothing large is kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip.gradients import Tape, plan
from evenclip.gradients import tape as module
from evenclip.gradients.per_sample import Blocks

N, CLASSES = 5, 3


class Branches(nn.Module):
    """Two convolutions of the same input, a third after both, and a skip connection."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.after = (
            nn.Conv2d(2, 3, 3, padding=1),
            nn.Conv2d(2, 3, 1),
            nn.Conv2d(3, 3, 3),
        )
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x):
        x = self.left(x).tanh() + self.right(x).sin()
        return self.head(self.after(x).mean(dim=(2, 3)) + x.mean(dim=(2, 3)))


class Unused(nn.Module):
    """A convolution whose output is not used, and one that feeds only that convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.ignored, self.last = (
            nn.Conv1d(2, 3, 2),
            nn.Conv1d(3, 2, 2),
            nn.Conv1d(2, CLASSES, 2),
        )

    def forward(self, x):
        self.ignored(self.first(x))
        return self.last(x).mean(dim=2)


class Twice(nn.Module):
    """The same convolution at two sizes, and a weight that two convolutions share."""

    def __init__(self):
        super().__init__()
        self.layer, self.other, self.head = (
            nn.Conv2d(2, 2, 3),
            nn.Conv2d(2, 2, 3),
            nn.Linear(2, CLASSES),
        )
        self.other.weight = self.layer.weight

    def forward(self, x):
        return self.head(self.other(self.layer(self.layer(x).tanh()).tanh()).mean(dim=(2, 3)))


class Pair(nn.Module):
    """A custom layer with two outputs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x):
        return self.scale * x, x.sin() * self.scale


class TwoOutputs(nn.Module):
    """A convolution before a layer with two outputs."""

    def __init__(self):
        super().__init__()
        self.layer, self.own = nn.Conv1d(2, CLASSES, 2), Pair()

    def forward(self, x):
        first, second = self.own(self.layer(x).mean(dim=2))
        return first + second


def chain(*middle):
    return nn.Sequential(nn.Conv2d(2, 9, 3), *middle, nn.Flatten(), nn.LazyLinear(CLASSES))


MODELS = {  # how it is made, one sample's input
    "one layer": (
        lambda: nn.Sequential(nn.Conv1d(2, CLASSES, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()),
        (2, 7),
    ),
    "in place": (
        lambda: chain(nn.ReLU(inplace=True), nn.Conv2d(9, 2, 2), nn.ELU(inplace=True)),
        (2, 7, 7),
    ),
    "saved by what follows": (
        lambda: chain(nn.Sigmoid(), nn.Conv2d(9, 2, 2), nn.Tanh()),
        (2, 7, 7),
    ),
    "three dimensions": (
        lambda: nn.Sequential(
            nn.Conv3d(2, 3, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(24, CLASSES)
        ),
        (2, 3, 3, 3),
    ),
    "branches": (Branches, (2, 6, 6)),
    "unused": (Unused, (2, 7)),
    "twice": (Twice, (2, 9, 9)),
    "two outputs": (TwoOutputs, (2, 6)),
    "large": (
        lambda: nn.Sequential(
            nn.Conv2d(16, 20, 3), nn.Tanh(), nn.Flatten(), nn.Linear(80, CLASSES)
        ),
        (16, 4, 4),
    ),
}


@pytest.fixture
def taken(made, numbers, tokens, monkeypatch):
    """`taken(name, rows)`: the model, its tape with blocks of `rows` samples, x and y."""

    def build(name, rows):
        make, shape = MODELS[name]
        x, y = numbers(1, N, *shape), tokens(2, CLASSES, N)

        def whole():
            model = make()
            model(x.float())  # lazy layers learn their width
            return model

        model = made(0, whole)
        monkeypatch.setattr(module, "_WORTH", 0)
        monkeypatch.setattr(module, "_BLOCK", 0)
        units = plan(model, F.cross_entropy, x, y).units
        monkeypatch.setattr(module, "_BLOCK", rows * max(unit.numbers for unit in units))
        tape = plan(model, F.cross_entropy, x, y)
        assert isinstance(tape, Tape)
        return model, tape, x, y

    return build


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_in_every_kind_of_graph(name, rows, taken, alone, same):
    model, tape, x, y = taken(name, rows)
    with tape.recording():
        gradients = tape(x, y)
    assert isinstance(gradients, Blocks)
    assert max(gradients._sizes) == rows
    assert sum(gradients._sizes) == N
    same(gradients, alone(model, F.cross_entropy, x, y))


@pytest.mark.parametrize("name", MODELS)
def test_masked(name, taken, alone, same):
    model, tape, x, y = taken(name, 2)
    keep = torch.tensor([True, False, True, True, False])
    with tape.recording():
        gradients = tape(x, y).masked(keep)
    assert isinstance(gradients, Blocks)
    same(gradients, torch.where(keep.unsqueeze(1), alone(model, F.cross_entropy, x, y), 0.0))


def test_all_blocks_but_the_last_are_full(taken):
    _, tape, x, y = taken("one layer", 4)
    with tape.recording():
        assert tape(x, y)._sizes == [4, 1]


def test_where_it_fits_a_batch_passes_whole(taken):
    _, tape, x, y = taken("one layer", N)
    with tape.recording():
        assert not isinstance(tape(x, y), Blocks)


def test_a_model_of_many_parameters_passes_in_larger_blocks(made, numbers, tokens, monkeypatch):
    """A large layer's parameters would be read, and their gradients added, once per block."""
    monkeypatch.setattr(module, "_BLOCK", 1)  # one sample at a time
    model, x, y = made(0, lambda: nn.Linear(20, 50)), numbers(1, N, 20), tokens(2, 50, N)
    for worth, rows in ((0, 1), (1, 21), (10, 210)):  # 1050 parameters, 50 numbers
        monkeypatch.setattr(module, "_WORTH", worth)
        assert plan(model, F.cross_entropy, x, y).rows == rows


def test_inputs_by_name_and_in_tuples_are_cut_alike(
    made, numbers, tokens, alone, same, monkeypatch
):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, CLASSES), nn.Linear(2, CLASSES)

        def forward(self, a, b):
            return self.one(a) * self.other(b)

    monkeypatch.setattr(module, "_WORTH", 0)
    monkeypatch.setattr(module, "_BLOCK", 8)
    a, b, y = numbers(1, N, 4), numbers(2, N, 2), tokens(3, CLASSES, N)
    model = made(0, Two)
    for x in ((a, b), {"b": b, "a": a}):
        tape = plan(model, F.cross_entropy, x, y)
        with tape.recording():
            gradients = tape(x, y)
        assert isinstance(gradients, Blocks)
        same(gradients, alone(model, F.cross_entropy, x, y))


def test_a_layer_that_nothing_goes_into_or_comes_out_of(made, numbers, tokens, alone, same):
    """The layer is called without a tensor, and its outputs have no gradient."""

    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(CLASSES))

        def forward(self):
            return self.scale.detach().tolist()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.aside, self.head = Aside(), nn.Linear(4, CLASSES)

        def forward(self, x):
            return self.head(x) * self.aside()[0]

    model, x, y = made(0, Model), numbers(1, N, 4), tokens(2, CLASSES, N)
    tape = plan(model, F.cross_entropy, x, y)
    with tape.recording():
        same(tape(x, y), alone(model, F.cross_entropy, x, y))


def test_nothing_large_is_kept(taken):
    """Inputs and outputs of convolutions are freed with their block, except the batch itself."""
    model, tape, x, y = taken("saved by what follows", 3)
    seen, batch, alive = [], x.clone(), []

    def record(layer, args, output):
        if layer is model[0]:  # the next block has begun
            gc.collect()
            alive.extend(ref() for ref in seen if ref() is not None)
        seen.extend([weakref.ref(output), *([] if layer is model[0] else [weakref.ref(args[0])])])
        output.register_hook(lambda delta: seen.append(weakref.ref(delta)))

    handles = [m.register_forward_hook(record) for m in model if isinstance(m, nn.Conv2d)]
    with tape.recording():
        gradients = tape(batch, y)
    for handle in handles:
        handle.remove()
    gc.collect()
    assert isinstance(gradients, Blocks)
    assert len(seen) == 10
    assert not alive
    assert not [ref() for ref in seen if ref() is not None]


def test_a_change_of_what_went_in_is_an_error_and_not_a_mistake(made, numbers, tokens):
    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv1d(2, 2, 1), nn.Conv1d(2, CLASSES, 1)

        def forward(self, x):
            h = self.first(x) * 1.0
            y = self.second(h)
            h.mul_(0.0)
            return y.mean(dim=2)

    model, x, y = made(0, Overwrites), numbers(0, N, 2, 5), tokens(1, CLASSES, N)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plan(model, F.cross_entropy, x, y)
