"""Slopes and curvature against formulas, full Hessians and differences of gradients."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian
from torch.nn import functional as F

from evenclip.audit.curvature import Curvature, extremes, signs
from evenclip.gradients.losses import per_sample


def seeded(make, seed=0, dtype=torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(dtype)


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(seed, n, k=3):
    return torch.randint(k, (n,), generator=torch.Generator().manual_seed(seed))


def full_hessian(model, loss, x, y):
    """The full Hessian by torch.  # [parameter, parameter]"""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    shapes = [dict(model.named_parameters())[name].shape for name in names]
    start = torch.cat([dict(model.named_parameters())[name].detach().reshape(-1) for name in names])

    def mean_loss(vector):
        pieces = torch.split(vector, [math.prod(shape) for shape in shapes])
        moved = {
            name: piece.view(shape)
            for name, piece, shape in zip(names, pieces, shapes, strict=True)
        }
        return per_sample(loss)(functional_call(model, moved, (x,)), y).mean()

    return hessian(mean_loss)(start)


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


# --- exact cases ---


def test_of_a_quadratic_loss():
    """H = 2/n Σ x xᵀ for any parameters and targets."""
    model, x, y = seeded(lambda: nn.Linear(6, 1, bias=False)), numbers(1, 50, 6), numbers(2, 50, 1)
    curvature, expected = Curvature(model, F.mse_loss, x, y), 2 * x.T @ x / 50
    vectors = numbers(3, 7, 6)
    torch.testing.assert_close(curvature.products(vectors), vectors @ expected)
    torch.testing.assert_close(
        curvature.forms(vectors), ((vectors @ expected) * vectors).sum(dim=1, keepdim=True).T
    )
    assert curvature.exact_trace() == pytest.approx(float(expected.trace()))
    values = torch.linalg.eigvalsh(expected)
    assert curvature.extremes() == pytest.approx((float(values[0]), float(values[-1])))
    gradient = 2 * x.T @ (x @ model.weight.detach()[0] - y[:, 0]) / 50
    torch.testing.assert_close(curvature.gradient(), gradient)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_against_the_full_hessian(monkeypatch, rows):
    monkeypatch.setattr("evenclip.audit.curvature._ROWS", rows)
    model, x, y = seeded(mlp), numbers(1, 30, 4), classes(2, 30)
    curvature, expected = (
        Curvature(model, F.cross_entropy, x, y),
        full_hessian(model, F.cross_entropy, x, y),
    )
    torch.testing.assert_close(curvature.products(torch.eye(43, dtype=torch.float64)), expected)
    assert curvature.exact_trace() == pytest.approx(float(expected.trace()))
    values = torch.linalg.eigvalsh(expected)
    assert curvature.extremes() == pytest.approx(
        (float(values[0]), float(values[-1])), rel=1e-3, abs=1e-3
    )
    assert float(curvature.sizes.sum()) == 30
    assert curvature.forms(numbers(3, 2, 43)).shape == (math.ceil(30 / rows), 2)


@pytest.mark.parametrize("at_once", [1, 2**40])
def test_however_many_vectors_pass_at_once(monkeypatch, at_once):
    monkeypatch.setattr("evenclip.audit.curvature._NUMBERS", at_once)
    model, x, y = seeded(mlp), numbers(1, 30, 4), classes(2, 30)
    vectors = numbers(3, 5, 43)
    expected = full_hessian(model, F.cross_entropy, x, y)
    torch.testing.assert_close(
        Curvature(model, F.cross_entropy, x, y).products(vectors), vectors @ expected
    )


def test_trace_of_softmax_regression_has_a_formula():
    """Mean of (1 − ‖p‖²)(‖x‖² + 1)."""
    model, x, y = seeded(lambda: nn.Linear(4, 3)), numbers(1, 40, 4), classes(2, 40)
    p = model(x).softmax(dim=1).detach()
    expected = float(((1 - p.square().sum(dim=1)) * (x.square().sum(dim=1) + 1)).mean())
    assert Curvature(model, F.cross_entropy, x, y).exact_trace() == pytest.approx(expected)


def test_trace_by_signs_is_right_within_its_error():
    model, x, y = seeded(mlp), numbers(1, 30, 4), classes(2, 30)
    curvature = Curvature(model, F.cross_entropy, x, y)
    exact = curvature.exact_trace()
    for seed in range(5):
        estimate = curvature.trace(signs(400, 43, seed))
        assert abs(estimate.value - exact) < 4.5 * estimate.se
    assert curvature.trace(signs(1600, 43)).se == pytest.approx(
        curvature.trace(signs(400, 43)).se / 2, rel=0.15
    )
    assert curvature.trace(signs(1, 43)).se == math.inf


def test_trace_of_a_sample_has_the_sample_in_its_error():
    """For 20 samples of 128 out of 4096, the errors match their standard errors."""
    model, x, y = seeded(lambda: nn.Linear(4, 3)), numbers(1, 4096, 4), classes(2, 4096)
    exact = Curvature(model, F.cross_entropy, x, y).exact_trace()
    random, probes, off = torch.Generator().manual_seed(5), signs(300, 15, 1), []
    for _ in range(20):
        rows = torch.randperm(4096, generator=random)[:128]
        part = Curvature(model, F.cross_entropy, x[rows], y[rows], parts=16)
        estimate = part.trace(probes, of=4096)
        alone = part.trace(probes)
        assert estimate.value == alone.value
        assert estimate.se > alone.se
        off.append((estimate.value - exact) / estimate.se)
    assert 0.7 < float(torch.tensor(off).square().mean().sqrt()) < 1.5
    whole = Curvature(model, F.cross_entropy, x, y, parts=16)
    assert whole.trace(probes, of=4096) == whole.trace(probes)


def test_signs_are_signs():
    probes = signs(300, 101, seed=3)
    assert probes.shape == (300, 101)
    assert set(probes.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(probes.mean())) < 4.5 / math.sqrt(300 * 101)
    assert torch.equal(probes, signs(300, 101, seed=3))
    assert not torch.equal(probes, signs(300, 101, seed=4))
    products = probes.T @ probes / 300 - torch.eye(101)
    assert float(products.abs().max()) < 5.5 / math.sqrt(300)


def test_signs_are_exact_where_the_hessian_is_diagonal():
    model, x, y = (
        seeded(lambda: nn.Linear(6, 1, bias=False)),
        torch.eye(6, dtype=torch.float64),
        numbers(2, 6, 1),
    )
    estimate = Curvature(model, F.mse_loss, x, y).trace(signs(9, 6))
    assert estimate == (pytest.approx(2.0), pytest.approx(0.0, abs=1e-12))


# --- any model ---


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(2, 3)
        self.unused, self.frozen = nn.Linear(2, 2), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, a, b):
        return self.one(a).tanh() * self.other(b) * self.frozen


MODELS = {
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)),
        numbers(1, 9, 2, 5, 5),
    ),
    "transformer": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation="gelu", batch_first=True),
            nn.Flatten(),
            nn.Linear(12, 3),
        ),
        numbers(1, 9, 3, 4),
    ),
    "recurrent": (Recurrent, numbers(1, 9, 5, 3)),
    "embedding": (
        lambda: nn.Sequential(
            nn.Embedding(7, 4), nn.LayerNorm(4), nn.Flatten(), nn.Tanh(), nn.Linear(12, 3)
        ),
        classes(1, 27, 7).view(9, 3),
    ),
    "two inputs": (Two, (numbers(1, 9, 4), numbers(2, 9, 2))),
}


@pytest.mark.parametrize("name", MODELS)
def test_against_differences_of_gradients(name):
    make, x = MODELS[name]
    model, y = seeded(make), classes(2, 9)
    curvature = Curvature(model, F.cross_entropy, x, y)
    vectors, h = numbers(3, 3, curvature.layout.size), 1e-5
    products = curvature.products(vectors)
    for v, product in zip(vectors, products, strict=True):
        ends = []
        for sign in (1, -1):
            moved = copy.deepcopy(model)
            pieces = curvature.layout.split(sign * h * v)
            with torch.no_grad():
                for parameter, p in moved.named_parameters():
                    if p.requires_grad:
                        p += pieces[parameter]
            ends.append(Curvature(moved, F.cross_entropy, x, y).gradient())
        torch.testing.assert_close(product, (ends[0] - ends[1]) / (2 * h), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_autograd(name):
    make, x = MODELS[name]
    model, y = seeded(make), classes(2, 9)
    output = model(*x) if isinstance(x, tuple) else model(x)
    wanted = [p for p in model.parameters() if p.requires_grad]
    each = torch.autograd.grad(F.cross_entropy(output, y), wanted, allow_unused=True)
    expected = torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).reshape(-1)
            for p, g in zip(wanted, each, strict=True)
        ]
    )
    torch.testing.assert_close(Curvature(model, F.cross_entropy, x, y).gradient(), expected)


def test_float32_is_near_float64():
    model, x, y = seeded(mlp), numbers(1, 200, 4), classes(2, 200)
    exact = Curvature(model, F.cross_entropy, x, y).products(numbers(3, 4, 43))
    rounded = Curvature(model.float(), F.cross_entropy, x.float(), y).products(numbers(3, 4, 43))
    torch.testing.assert_close(rounded, exact, rtol=1e-4, atol=1e-5)


def test_it_reads_the_model_as_it_stands_and_leaves_it():
    model, x, y = seeded(mlp), numbers(1, 30, 4), classes(2, 30)
    curvature, v = Curvature(model, F.cross_entropy, x, y), numbers(3, 1, 43)
    before = curvature.products(v)
    state = copy.deepcopy(model.state_dict())
    curvature.trace(signs(3, 43)), curvature.extremes(), curvature.gradient()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    with torch.no_grad():
        model[0].weight += 0.5
    assert not torch.allclose(curvature.products(v), before)


def test_dropout_is_left_out_and_put_back():
    def make(p):
        mixing = nn.TransformerEncoderLayer(8, 2, 8, dropout=p, batch_first=True)
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(p), mixing, nn.Linear(8, 3))

    with_it, without = seeded(lambda: make(0.5)), seeded(lambda: make(0.0))
    x, y, v = (
        numbers(1, 9, 1, 4),
        classes(2, 9),
        numbers(3, 2, sum(p.numel() for p in without.parameters())),
    )

    def loss(output, y):
        return F.cross_entropy(output[:, 0], y, reduction="none")

    before = torch.get_rng_state()
    curvature, expected = (Curvature(model, loss, x, y) for model in (with_it, without))
    torch.testing.assert_close(curvature.products(v), expected.products(v))
    torch.testing.assert_close(curvature.gradient(), expected.gradient())
    assert torch.equal(torch.get_rng_state(), before)
    assert with_it.training
    assert [m.p for m in with_it.modules() if isinstance(m, nn.Dropout)] == [0.5] * 4
    assert with_it[2].self_attn.dropout == 0.5


def test_no_samples():
    with pytest.raises(ValueError, match="no samples"):
        Curvature(seeded(mlp), F.cross_entropy, numbers(1, 0, 4), classes(2, 0))


# --- eigenvalues ---


@pytest.mark.parametrize("values", [
    np.linspace(-1, 5, 60), np.linspace(-5, 1, 60), np.linspace(0, 5, 60), np.linspace(-3, -1, 60),
    np.r_[np.zeros(59), 3.0], np.r_[-2.0, np.zeros(59)], np.linspace(-1, 2, 5),
])  # fmt: skip
def test_both_ends_of_a_spectrum(values):
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((len(values), len(values))))[0]
    matrix = torch.from_numpy(basis @ np.diag(values) @ basis.T)
    ends = extremes(lambda v: v.double() @ matrix, len(values))
    assert ends == pytest.approx((values.min(), values.max()), abs=1e-3 * np.abs(values).max())
