"""Convolutions form their gradients where δ passes by: right in every kind of graph, and nothing large is kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip.gradients import Tape, plan
from evenclip.gradients.tape import Record, Whole, _Arrival

N, CLASSES = 4, 3


class Branches(nn.Module):
    """Two convolutions of the same input, one after both, and a way round."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.after = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2, 3, 1), nn.Conv2d(3, 3, 3)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x):
        x = self.left(x).tanh() + self.right(x).sin()
        return self.head(self.after(x).mean(dim=(2, 3)) + x.mean(dim=(2, 3)))


class Unused(nn.Module):
    """One convolution whose output goes nowhere, one that only the other's output depends on."""

    def __init__(self):
        super().__init__()
        self.first, self.ignored, self.last = nn.Conv1d(2, 3, 2), nn.Conv1d(3, 2, 2), nn.Conv1d(2, CLASSES, 2)

    def forward(self, x):
        self.ignored(self.first(x))
        return self.last(x).mean(dim=2)


class Twice(nn.Module):
    """The same convolution at two sizes, and a weight that two convolutions share."""

    def __init__(self):
        super().__init__()
        self.layer, self.other, self.head = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3), nn.Linear(2, CLASSES)
        self.other.weight = self.layer.weight

    def forward(self, x):
        return self.head(self.other(self.layer(self.layer(x).tanh()).tanh()).mean(dim=(2, 3)))


class Pair(nn.Module):
    """Somebody's own layer, with two outputs."""

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
        one, other = self.own(self.layer(x).mean(dim=2))
        return one + other


def chain(*middle):
    return nn.Sequential(nn.Conv2d(2, 9, 3), *middle, nn.Flatten(), nn.LazyLinear(CLASSES))


MODELS = {  # how it is made, one sample's input, how many calls are formed at once
    "one layer": (
        lambda: nn.Sequential(nn.Conv1d(2, CLASSES, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()), (2, 7), 1),
    "in place": (lambda: chain(nn.ReLU(inplace=True), nn.Conv2d(9, 2, 2), nn.ELU(inplace=True)), (2, 7, 7), 2),
    "saved by what follows": (lambda: chain(nn.Sigmoid(), nn.Conv2d(9, 2, 2), nn.Tanh()), (2, 7, 7), 2),
    "three dimensions": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(24, CLASSES)),
        (2, 3, 3, 3), 1),
    "branches": (Branches, (2, 6, 6), 3),
    "unused": (Unused, (2, 7), 1),
    "twice": (Twice, (2, 9, 9), 3),
    "two outputs": (TwoOutputs, (2, 6), 1),
    "large": (
        lambda: nn.Sequential(nn.Conv2d(16, 20, 3), nn.Tanh(), nn.Flatten(), nn.Linear(80, CLASSES)), (16, 4, 4), 0),
}  # fmt: skip


@pytest.fixture
def taken(made, numbers, tokens):
    """`taken(name)`: the model, its tape, x and y."""

    def build(name):
        make, shape, _ = MODELS[name]
        x, y = numbers(1, N, *shape), tokens(2, CLASSES, N)

        def whole():
            model = make()
            model(x.float())  # lazy layers learn their width
            return model

        model = made(0, whole)
        tape = plan(model, F.cross_entropy, x, y)
        assert isinstance(tape, Tape)
        return model, tape, x, y

    return build


@pytest.mark.parametrize("name", MODELS)
def test_in_every_kind_of_graph(name, taken, alone, same):
    model, tape, x, y = taken(name)
    with tape.listening():
        found = tape(x, y)
    assert sum(isinstance(record, Whole) for record in found.records) == MODELS[name][2]
    same(found, alone(model, F.cross_entropy, x, y))


@pytest.mark.parametrize("name", MODELS)
def test_masked(name, taken, alone, same):
    model, tape, x, y = taken(name)
    keep = torch.tensor([True, False, True, True])
    with tape.listening():
        found = tape(x, y).masked(keep)
    same(found, torch.where(keep.unsqueeze(1), alone(model, F.cross_entropy, x, y), 0.0))


@pytest.mark.parametrize("name", MODELS)
def test_the_records_of_somebody_else_give_the_same(name, taken, same, monkeypatch):
    """Whoever makes δ otherwise makes records of it."""
    _, tape, x, y = taken(name)
    with tape.listening():
        formed = tape(x, y)
        monkeypatch.setattr("evenclip.gradients.tape.Convolution", ())  # none is formed at once
        kept = tape(x, y)
    assert all(isinstance(record, Record) for record in kept.records)
    same(formed, kept.per_sample())


def test_nothing_large_is_kept(taken):
    """Of what goes into the convolutions and comes out of them, nothing outlives the passes but the batch."""
    model, tape, x, y = taken("saved by what follows")
    seen, batch = [], x.clone()

    def look(module, args, output):
        seen.extend([weakref.ref(args[0]), weakref.ref(output)])
        output.register_hook(lambda delta: seen.append(weakref.ref(delta)))

    handles = [m.register_forward_hook(look) for m in model if isinstance(m, nn.Conv2d)]
    with tape.listening():
        found = tape(batch, y)
    for handle in handles:
        handle.remove()
    gc.collect()
    alive = [ref() for ref in seen if ref() is not None]
    assert len(seen) == 6
    assert all(tensor is batch for tensor in alive)
    storages = {t.untyped_storage().data_ptr() for r in found.records if isinstance(r, Whole) for t in r.each.values()}
    assert batch.untyped_storage().data_ptr() not in storages


def test_the_input_is_let_go_as_soon_as_it_was_used(taken, numbers):
    """And not after the passes: what comes next on the way back has its place."""
    unit = taken("saved by what follows")[1].units[1]
    a = numbers(0, N, 9, 5, 5)
    arrival, gone = _Arrival(unit, a, N), weakref.ref(a)
    del a
    assert gone() is not None
    arrival.arrived(numbers(1, N, 2, 4, 4))
    assert gone() is None


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
