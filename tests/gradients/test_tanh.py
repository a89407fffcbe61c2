"""tanh by numpy's kernel: equal up to rounding, used if faster, only in the tape's passes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from evenclip.gradients import Tape, plan
from evenclip.gradients import batched as of_passes
from evenclip.gradients import tanh as module

N, CLASSES = 7, 3


@pytest.fixture
def calls(monkeypatch):
    """Use numpy's kernel for every tensor, and record the calls."""
    seen = []

    def noted(x):
        seen.append(x.shape)
        return module.tanh(x)

    monkeypatch.setattr(module, "_FEW", 0)
    monkeypatch.setattr(of_passes, "tanh", noted)
    return seen


@pytest.fixture
def batch(numbers, tokens):
    return numbers(1, N, 5).float(), tokens(2, CLASSES, N)


def mlp():
    return nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    )


# --- the function -------------------------------------------------------------------------------


def off(actual, x):
    """Return the error in units in the last place."""
    exact = np.tanh(x.astype(np.float64))
    return np.abs(actual - exact) / np.spacing(np.abs(exact).astype(np.float32))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_it_is_tanh_to_two_roundings(values):
    x = np.array(values, dtype=np.float32)
    assert off(module.tanh(torch.from_numpy(x)).numpy(), x).max() <= 2


def test_on_a_grid_it_is_tanh_to_two_roundings():
    x = np.concatenate([np.linspace(-12, 12, 200_001), np.logspace(-40, 2, 200_001)]).astype(
        np.float32
    )
    assert off(module.tanh(torch.from_numpy(x)).numpy(), x).max() <= 2


def test_what_is_not_finite():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert torch.equal(module.tanh(x)[:2], torch.tensor([1.0, -1.0]))
    assert module.tanh(x)[2].isnan()


@pytest.mark.parametrize(
    "lie", [lambda x: x, lambda x: x.T, lambda x: x[::2, 1:], lambda x: x.expand(2, 6, 4)]
)
def test_the_gradient_is_that_of_torch_however_the_numbers_lie(lie, numbers):
    x, delta = lie(numbers(1, 6, 4).float()), lie(numbers(2, 6, 4).float())
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module.tanh(ours), ours, delta)
    (expected,) = torch.autograd.grad(torch.tanh(theirs), theirs, delta)
    assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-7)


# --- where --------------------------------------------------------------------------------------


class Kind(torch.Tensor):
    """A custom tensor class."""


@pytest.mark.parametrize(
    ("x", "threads", "expected"),
    [
        (torch.ones(3, 128), 1, True),
        (torch.ones(3, 127), 1, False),
        (torch.ones(3, 256), 2, True),
        (torch.ones(3, 255), 2, False),
        (torch.ones(2**10, 3, 10), 4, True),  # the samples need not come first
        (torch.ones(3, 2**10), 4, True),
        (torch.ones(3, 2**10), 5, False),
        (torch.ones(3, 2**10, dtype=torch.float64), 1, False),
        (torch.ones(3, 2**10, dtype=torch.bfloat16), 1, False),
        (torch.ones(3, 2**10, device="meta"), 1, False),
        (torch.ones(3, 2**10).as_subclass(Kind), 1, False),
        (nn.Parameter(torch.ones(3, 2**10)), 1, False),
        (1.0, 1, False),
    ],
)
def test_where_it_pays(x, threads, expected, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert module.pays(x, 3) is expected


@pytest.mark.parametrize("width", [127, 128])
def test_how_many_samples_there_are_does_not_show(width, calls, monkeypatch):
    """One record more or less must not change the kernel: the number of records is private."""
    monkeypatch.setattr(module, "_FEW", 128)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, CLASSES))
    x, y = torch.randn(600, 5), torch.randint(CLASSES, (600,))
    taken = set()
    with plan(model, F.cross_entropy, x[:3], y[:3]).recording() as tape:
        for n in (1, 2, 63, 64, 65, 127, 128, 129, 600):
            calls.clear()
            tape(x[:n], y[:n])
            taken.add(bool(calls))
    assert taken == {width == 128}


def test_every_samples_gradient(calls, batch, made, alone):
    model, (x, y) = made(0, mlp), batch
    exact = alone(model, F.cross_entropy, x.double(), y)
    with plan(model.float(), F.cross_entropy, x, y).recording() as tape:
        calls.clear()  # the calls made by `plan`
        gradients = tape(x, y)
    assert calls == [(N, 8), (N, 8)]
    assert torch.allclose(gradients.per_sample().double(), exact, rtol=1e-4, atol=1e-6)
    norms = exact.norm(dim=1)
    assert bool((gradients.norms() >= norms * (1 - 1e-5)).all())
    assert torch.allclose(gradients.norms(), norms, rtol=1e-4)


def test_small_ones_are_left_to_torch(calls, batch, made, monkeypatch):
    monkeypatch.setattr(module, "_FEW", 9)
    x, y = batch
    with plan(made(0, mlp).float(), F.cross_entropy, x, y).recording() as tape:
        tape(x, y)
    assert calls == []


def test_it_is_used_in_the_tape_only(calls, batch, made):
    """The model is called by an observer, traced, mapped, and called after training."""
    model, (x, y) = made(0, mlp).float(), batch
    own = model(x)
    with plan(model, F.cross_entropy, x, y).recording() as tape:
        tape(x, y)
        calls.clear()
        assert torch.equal(model(x), own)
        assert torch.allclose(torch.func.vmap(model)(x), own, atol=1e-6)
        graph = torch.fx.experimental.proxy_tensor.make_fx(model)(x)
    assert sum(node.target == torch.ops.aten.tanh.default for node in graph.graph.nodes) == 2
    assert torch.equal(model(x), own)
    assert not any("forward" in vars(part) for part in model.modules())
    assert calls == []


def test_also_after_a_pass_that_failed(calls, batch, made):
    model, (x, y) = made(0, mlp).float(), batch
    with plan(model, F.cross_entropy, x, y).recording() as tape:
        with pytest.raises(RuntimeError):
            tape(x[:, :4], y)
        calls.clear()
        model(x)
    assert calls == []


def test_a_custom_forward_is_called(calls, batch, made):
    class Softer(nn.Tanh):
        def forward(self, x):
            return torch.tanh(x / 2)

    def build():
        model = nn.Sequential(
            nn.Linear(5, 8), Softer(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        )
        model[3].forward = lambda x: torch.tanh(x / 3)
        return model

    model, (x, y) = made(0, build).float(), batch
    replaced = vars(model[3])["forward"]
    losses = F.cross_entropy(model(x), y, reduction="none")
    with plan(model, F.cross_entropy, x, y).recording() as tape:
        assert torch.allclose(tape(x, y).losses, losses)
    assert vars(model[3])["forward"] is replaced
    assert calls == []


class Own(nn.Module):
    """A custom layer with parameters and a tanh; `torch.func` forms its gradients."""

    def __init__(self):
        super().__init__()
        self.scale, self.tanh = nn.Parameter(torch.ones(8)), nn.Tanh()

    def forward(self, x):
        return self.tanh(x * self.scale)


class Checkpointed(nn.Module):
    """Checkpointing: the layers are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.tanh, self.last = (
            nn.Linear(5, 8),
            nn.ReLU(),
            nn.Tanh(),
            nn.Linear(8, CLASSES),
        )

    def forward(self, x):
        return self.last(
            checkpoint(lambda h: self.tanh(self.middle(h)), self.first(x), use_reentrant=False)
        )


class Around(nn.Module):
    """`around(tanh, x)` between two linear layers."""

    def __init__(self, around):
        super().__init__()
        self.first, self.tanh, self.last, self._around = (
            nn.Linear(5, 8),
            nn.Tanh(),
            nn.Linear(8, CLASSES),
            around,
        )

    def forward(self, x):
        return self.last(self._around(self.tanh, self.first(x)))


def mapped(tanh, x):
    return torch.func.vmap(tanh)(x)


def negated_by_a_bit(tanh, x):
    return tanh(torch.complex(x, x).conj().imag)


def its_own_derivative(tanh, x):
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(tanh(x).sum(), x, create_graph=True)
    return gradient


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), Own(), nn.Linear(8, CLASSES)),
        Checkpointed,
        *(partial(Around, around) for around in (mapped, negated_by_a_bit, its_own_derivative)),
    ],
    ids=[
        "a layer written by a user",
        "checkpointed",
        "mapped",
        "negated by a bit",
        "its own derivative",
    ],
)
def test_inside_other_things(build, calls, batch, made, alone, monkeypatch):
    """Also if `plan` tries it on too few samples; no warning is shown."""
    model, (x, y) = made(0, build), batch
    exact = alone(model, F.cross_entropy, x.double(), y)
    monkeypatch.setattr(module, "_FEW", 2**62)
    tape = plan(model.float(), F.cross_entropy, x, y, "tested")
    assert isinstance(tape, Tape)
    assert calls == []
    monkeypatch.setattr(module, "_FEW", 0)
    with tape.recording():
        gradients = tape(x, y).per_sample().double()
    assert calls
    assert torch.allclose(gradients, exact, rtol=1e-4, atol=1e-6)
