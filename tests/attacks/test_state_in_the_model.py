"""The attacker reads what training left in the model beside its trained parameters.

A layer that initialises itself from its first batch, a running mean in a frozen parameter, records
kept in an attribute, and an embedding that rewrites its rows all put records into the model without
noise. They leave with the model, and one record reaches later steps through them.

Such a model is refused by name, or the attribute is put back before the next step and before the
model is returned. A run without the comparison is planted.
"""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evenclip
from evenclip import DPSGD, fit
from evenclip.gradients import ModelError, plan, state
from evenclip.training import guard

D, CLASSES, N = 4, 3, 30


class Own(nn.Module):
    """A model with something between its layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.last(self.between(self.first(x), x))


class RunningMean(Own):
    """Keeps the mean of the inputs in a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(D), requires_grad=False)

    def between(self, h, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return h


class FromTheFirstBatch(Own):
    """Sets its trainable scale from the first batch that it is given."""

    def __init__(self):
        super().__init__()
        self.scale, self.is_set = nn.Parameter(torch.ones(())), False

    def between(self, h, x):
        if not self.is_set:
            self.is_set = True
            with torch.no_grad():
                self.scale.copy_(1 / (x.detach().std() + 1))
        return h * self.scale


class BufferLater(Own):
    """Changes a buffer from its fortieth call on, long after every check before training."""

    def __init__(self):
        super().__init__()
        self.calls = [0]
        self.register_buffer("seen", torch.zeros(()))

    def between(self, h, x):
        self.calls[0] += 1
        if self.calls[0] > 40:
            self.seen += 1
        return h


class NewTensor(Own):
    """Replaces a frozen tensor in a list."""

    def __init__(self):
        super().__init__()
        self.kept = [torch.zeros(())]

    def between(self, h, x):
        self.kept[0].add_(1)
        return h


class Cached(Own):
    """Keeps the last batch, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls, self.names = 0, ["first"]

    def between(self, h, x):
        self.calls += 1
        self.names.append(str(self.calls))
        self.last_batch = x.detach()
        return h


class Rewrites(nn.Module):
    """Looks up rows with `max_norm`, which rewrites the weight in the forward pass."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Parameter(5 * torch.ones(9, D)), nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.last(F.embedding(x, self.table, max_norm=1.0))


@pytest.fixture
def data():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=random)
    return x, torch.randint(CLASSES, (N,), generator=random)


def settings():
    return {"rule": DPSGD(), "batch_size": 10, "steps": 60, "delta": 1e-3, "lr": 0.01}


REFUSED = {
    "a mean in a frozen parameter": (RunningMean, "changes 'mean'"),
    "a scale from the first batch": (FromTheFirstBatch, "changes 'scale'"),
    "a tensor in a list": (NewTensor, "changes the attribute 'kept' of"),
}
WAYS = pytest.mark.parametrize("independence", [None, "tested"], ids=str)


@WAYS
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_keeps_records_is_refused_by_name(name, independence, data):
    make, said = REFUSED[name]
    with pytest.raises(ModelError, match=f"A pass through the model {said}"):
        fit(make(), data, **settings(), independence=independence)


@WAYS
def test_rows_that_a_forward_pass_rewrites_are_refused(independence, data):
    x = torch.randint(9, (N,), generator=torch.Generator().manual_seed(1))
    with pytest.raises(ModelError, match="A pass through the model changes"):
        fit(Rewrites(), (x, data[1]), **settings(), independence=independence)


class LaterLoss(nn.Module):
    """A loss that changes a buffer, from some call on."""

    calls = itertools.count(-400)  # begins long after every check before training

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(CLASSES))

    def forward(self, output, y):
        if next(LaterLoss.calls) > 20:
            self.mean += 1
        return F.cross_entropy(output, y, reduction="none")


@WAYS
def test_a_loss_that_keeps_records_is_refused_too(independence, data):
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, CLASSES))
    LaterLoss.calls = itertools.count(-400)
    given = settings() | {"steps": 2000, "loss": LaterLoss(), "independence": independence}
    with pytest.raises(ModelError, match=r"A pass through the (loss|model or the loss) changes"):
        fit(model, data, **given)


@WAYS
def test_attributes_are_put_back_and_a_counter_never_grows(independence, data):
    for make in (Cached, BufferLater):
        model = fit(make(), data, **settings(), independence=independence).model
        assert vars(model).keys() == vars(make()).keys()
        assert getattr(model, "calls", None) == make().calls
        assert getattr(model, "names", None) == getattr(make(), "names", None)
        assert not any("batch" in name for name in vars(model))
    assert not model.seen


def test_planning_leaves_nothing_either(data):
    model = Cached()
    plan(model, F.cross_entropy, *data)
    evenclip.per_sample_norms(model, F.cross_entropy, *data)
    assert model.calls == 0
    assert not hasattr(model, "last_batch")


class Blind:
    """A state that is not compared, as it was."""

    def __init__(self, *given, **more):
        pass

    def check(self):
        pass

    put_back = accept = check


@pytest.mark.parametrize("make", [RunningMean, Cached])
def test_the_attack_wins_where_the_state_is_not_compared(make, data, monkeypatch):
    planning = importlib.import_module(
        "evenclip.gradients.plan"
    )  # the package has a function `plan`
    for module in (guard, planning, state):
        monkeypatch.setattr(module, "ModelState", Blind)
    model = fit(make(), data, **settings(), independence="tested").model
    if make is RunningMean:
        assert model.mean.abs().max() > 0  # a mean of records, without noise
    else:
        assert any(torch.equal(row, record) for row in model.last_batch for record in data[0])
