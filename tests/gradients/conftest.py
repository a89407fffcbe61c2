"""Reference values for the gradient tests: one sample at a time through ordinary autograd.

With `--import-mode=importlib` test files cannot import each other, so the helpers are fixtures of
session scope (which hypothesis allows beside `@given`).
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map

RTOL = 1e-9  # two orders of the same float64 operations


@pytest.fixture(scope="session")
def numbers():
    """`numbers(seed, *shape)`: standard normal numbers, float64, from their own generator."""

    def draw(seed, *shape):
        return torch.randn(
            shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )

    return draw


@pytest.fixture(scope="session")
def tokens():
    """`tokens(seed, high, *shape)`: integers from 0 to high - 1."""

    def draw(seed, high, *shape):
        return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture(scope="session")
def made():
    """`made(seed, make)`: a float64 module, independent of earlier draws; no parameter is 0."""

    def make_it(seed, make):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = make().double()
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(0.3 * torch.randn_like(p))
        return module

    return make_it


@pytest.fixture(scope="session")
def alone():
    """`alone(model, loss, x, y)`: gradients from batches of one.  # [sample, parameter]"""

    def gradients(model, loss, x, y):
        parameters = [p for p in model.parameters() if p.requires_grad]
        rows = []
        for i in range(len(y)):
            batch = tree_map(lambda t, i=i: t[i : i + 1], x)
            output = (
                model(**batch)
                if isinstance(batch, dict)
                else model(*batch)
                if isinstance(batch, tuple)
                else model(batch)
            )
            value = loss(output, y[i : i + 1]).sum()
            gradients = torch.autograd.grad(value, parameters, allow_unused=True)
            filled = [
                torch.zeros_like(p) if g is None else g
                for p, g in zip(parameters, gradients, strict=True)
            ]
            rows.append(
                torch.cat([g.to_dense().flatten() if g.is_sparse else g.flatten() for g in filled])
            )
        return torch.stack(rows)

    return gradients


@pytest.fixture(scope="session")
def layer_alone():
    """`layer_alone(module, a, delta)`: name -> gradient of ⟨module(a_i), δ_i⟩ for each sample i."""

    def gradients(module, a, delta):
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        each = []
        for i in range(len(a)):
            value = (module(a[i : i + 1]) * delta[i : i + 1]).sum()
            each.append(torch.autograd.grad(value, list(parameters.values())))
        return {name: torch.stack([g[k] for g in each]) for k, name in enumerate(parameters)}

    return gradients


@pytest.fixture(scope="session")
def same_layer():
    """`same_layer(actual, expected)`: compare a LayerGradient with {name: [sample, *parameter]}.

    Norms, weighted sums and per-sample gradients are compared.
    """

    def compare(actual, expected):
        n = len(next(iter(expected.values())))
        scale = max(
            1.0, *(float(g.abs().max()) for g in expected.values())
        )  # what cancels leaves 1e-17, not 0
        close = {"rtol": RTOL, "atol": RTOL * scale}
        norms = (
            torch.stack([g.flatten(1).square().sum(dim=1) for g in expected.values()])
            .sum(dim=0)
            .sqrt()
        )
        check_norms(actual.square_norms().sqrt(), norms, actual.cancels, close)
        torch.testing.assert_close(actual.per_sample(), expected, **close)
        for weights in weightings(n):
            total = {name: torch.tensordot(weights, g, dims=1) for name, g in expected.items()}
            torch.testing.assert_close(actual.weighted_sum(weights), total, **close)

    return compare


@pytest.fixture(scope="session")
def same():
    """`same(actual, expected)`: compare a PerSample with gradients [sample, parameter].

    Norms, weighted sums and per-sample gradients are compared.
    """

    def compare(actual, expected, rtol=RTOL):
        close = {"rtol": rtol, "atol": rtol * float(expected.abs().max()), "check_dtype": False}
        check_norms(actual.norms(), expected.double().norm(dim=1), actual.cancels, close)
        torch.testing.assert_close(actual.per_sample(), expected, **close)
        for weights in weightings(len(expected)):
            torch.testing.assert_close(
                actual.weighted_sum(weights), weights @ expected.double(), **close
            )

    return compare


def check_norms(actual, expected, cancels, close):
    """Compare norms; those of sums that may cancel are enlarged by a margin, never too small."""
    if cancels:
        slack = 1e-3 * expected.max().clamp(min=1.0)
        assert (actual >= expected * (1 - close["rtol"]) - close["atol"]).all()
        assert (actual <= expected * (1 + close["rtol"]) + close["atol"] + slack).all()
    else:
        torch.testing.assert_close(actual, expected, **close)


def weightings(n):
    """Return three weight vectors of n samples: positive; zeros and negative values; all zero."""
    some = torch.linspace(0.2, 1.7, n, dtype=torch.float64)
    signs = torch.tensor([(-1.0, 0.0, 1.0)[i % 3] for i in range(n)], dtype=torch.float64)
    return some, some.flip(0) * signs, torch.zeros(n, dtype=torch.float64)
