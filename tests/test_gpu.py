"""Tests of results that a GPU must not change; each also runs on the CPU.

Ranks on GPUs (nccl) have not been tested.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evenclip
from evenclip import Performance
from evenclip.gradients import plan
from evenclip.models import cnn, mlp

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=on_cuda)]
RULES = [evenclip.NonPrivate(), evenclip.DPSGD(), evenclip.DPSGDF(), evenclip.DPSGDGlobalAdapt()]
# Tolerance of twenty steps of lr 0.1 along gradients of length about 1, each with a relative error
# of 1e-6, because sums have another order.
ROUNDING = 1e-5
# Published numbers lie on a grid. A sum that is rounded otherwise comes out one cell further, at
# most 2e-4 in a parameter here, if it lies next to the border of a cell.
CELLS, OFTEN = 1e-3, 0.01


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def parameters(result):
    return torch.cat([p.detach().cpu().double().flatten() for p in result.model.parameters()])


def assert_close(ours, theirs):
    """Assert that parameters agree to rounding, except for a few that moved to the next cell."""
    off = (ours - theirs).abs()
    assert off.max() < CELLS
    assert (off > ROUNDING).double().mean() < OFTEN


@pytest.fixture
def one_key(monkeypatch):
    """Give runs on both devices the same batches and noise; the device is part of a seed's key."""
    monkeypatch.setattr("evenclip.training.run.secret_key", lambda *given: bytes(32))


def tabular(device, rule, **more):
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(2000, 98, generator=random), torch.randint(0, 2, (2000,), generator=random)
    group = torch.randint(0, 2, (2000,), generator=random)
    return evenclip.fit(
        mlp(hidden=(32,), seed=0),
        (x, y, group),
        rule=rule,
        steps=20,
        batch_size=128,
        seed=0,
        device=device,
        **more,
    )


def images(device, rule, **more):
    random = torch.Generator().manual_seed(0)
    x, y = (
        torch.rand(300, 1, 28, 28, generator=random),
        torch.randint(0, 10, (300,), generator=random),
    )
    return evenclip.fit(
        cnn(seed=0), (x, y), rule=rule, steps=5, batch_size=64, seed=0, device=device, **more
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_run_is_the_run_on_the_cpu(device, rule, one_key):
    here, there = tabular("cpu", rule), tabular(device, rule)
    assert_close(parameters(here), parameters(there))
    assert here.ledger == there.ledger
    assert here.state.tolist() == pytest.approx(there.state.tolist(), rel=1e-6)


def test_images_are_images_on_the_cpu(device, one_key):
    here, there = images("cpu", evenclip.DPSGD()), images(device, evenclip.DPSGD())
    assert_close(parameters(here), parameters(there))


@pytest.mark.parametrize("rule", [evenclip.DPSGD(), evenclip.DPSGDGlobalAdapt()])
def test_a_seed_has_other_noise_on_another_device(device, rule):
    here, there = tabular("cpu", rule), tabular(device, rule)
    assert torch.equal(parameters(here), parameters(there)) == (device == "cpu")


@pytest.mark.parametrize(
    "performance",
    [
        Performance(chunk=32),
        pytest.param(Performance(compile="reduce-overhead"), id="compiled", marks=on_cuda),
    ],
)
def test_performance_settings_change_nothing(device, performance, one_key):
    for train in (tabular, images):
        plain = train(device, evenclip.DPSGDGlobalAdapt())
        other = train(device, evenclip.DPSGDGlobalAdapt(), performance=performance)
        assert_close(parameters(plain), parameters(other))


def test_looking_changes_nothing(device):
    def look(step):
        return {
            "g_B": float(step.weighted_sum(torch.ones_like(step.weights)).norm()),
            "loss": float(step.losses.sum()),
        }

    alone, watched = (
        tabular(device, evenclip.DPSGDF(), observers=observers) for observers in ([], [look])
    )
    assert torch.allclose(parameters(alone), parameters(watched), rtol=0, atol=ROUNDING)
    assert len(watched.records) == 20


def test_resume_is_bit_identical(device, tmp_path):
    def stop(step):
        if step.t == 7:
            raise RuntimeError("stopped")

    rule, given = evenclip.DPSGDGlobalAdapt(), {"checkpoint": tmp_path, "checkpoint_every": 5}
    torch.use_deterministic_algorithms(True)
    try:
        whole = tabular(device, rule)
        with pytest.raises(RuntimeError, match="stopped"):
            tabular(device, rule, **given, observers=[stop])
        resumed = tabular(device, rule, **given, resume="exact")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(parameters(whole), parameters(resumed))
    assert whole.ledger == resumed.ledger


def test_a_sample_that_is_not_finite_contributes_nothing(device):
    x = torch.randn(64, 98)
    x[3] = 1e30
    data = (x, torch.zeros(64, dtype=torch.int64))
    result = evenclip.fit(
        mlp(hidden=(8,)), data, rule=evenclip.DPSGD(), steps=5, batch_size=64, device=device
    )
    assert torch.isfinite(parameters(result)).all()


# --- products of fewer bits ---------------------------------------------------------------------

# constructor, shape of one sample's input, shape of one sample's output, axes of the output that
# are positions
LAYERS = {
    "Linear, one position": (lambda: nn.Linear(70, 50), (70,), (50,), ()),
    "Linear, Gram": (lambda: nn.Linear(64, 64), (32, 64), (32, 64), (1,)),
    "Linear, formed": (lambda: nn.Linear(32, 32), (300, 32), (300, 32), (1,)),
    "convolution, formed": (lambda: nn.Conv2d(3, 8, 3), (3, 34, 34), (8, 32, 32), (2, 3)),
    "convolution, large": (lambda: nn.Conv2d(64, 64, 3, padding=1), (64, 6, 6), (64, 6, 6), (2, 3)),
}


def against(output, y):
    """A loss whose gradient with respect to the output, δ, is y."""
    return (output * y).flatten(1).sum(dim=1)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("wiggle", [1.0, 1e-4])
@pytest.mark.parametrize("name", LAYERS)
def test_a_norm_is_never_too_small(device, name, wiggle, precision):
    make, inputs, outputs, positions = LAYERS[name]
    random = torch.Generator().manual_seed(0)
    a = torch.randn(8, *(1 for _ in inputs), generator=random) + wiggle * torch.randn(
        8, *inputs, generator=random
    )
    delta = torch.randn(8, *outputs, generator=random)
    delta = delta - delta.mean(dim=positions, keepdim=True) if positions else delta
    a, delta, model = a.to(device), delta.to(device), make().to(device)
    before = torch.get_float32_matmul_precision()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch advises against mixing its two settings of precision
        torch.set_float32_matmul_precision(precision)
        try:
            with plan(
                model, against, torch.randn(3, *inputs, device=device), delta[:3]
            ).recording() as tape:
                gradients = tape(a, delta)
                norms, added = gradients.norms(), gradients.per_sample().double().norm(dim=1)
        finally:
            torch.set_float32_matmul_precision(before)
    assert (added <= norms).all()


@on_cuda
def test_tf32_on_request_has_norms_no_shorter_than_what_is_summed():
    """Weights are C/norm, so a norm that is too small would leave its gradient longer than C."""
    lengths, norms = [], []

    def look(step):
        eye = torch.eye(len(step.losses), dtype=torch.float64, device="cuda")[:24]
        lengths.append(torch.stack([step.weighted_sum(one).double().norm() for one in eye]))
        norms.append(step.norms[:24].double())

    tabular("cuda", evenclip.DPSGD(C0=0.1), performance=Performance(tf32=True), observers=[look])
    assert all(bool((n >= length).all()) for n, length in zip(norms, lengths, strict=True))


def test_the_generators_are_left_alone(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.PReLU(), nn.Linear(4, 3)).to(device)
    generators = [
        torch.default_generator,
        *(torch.cuda.default_generators if device == "cuda" else ()),
    ]
    before = [generator.get_state() for generator in generators]
    plan(
        model,
        F.cross_entropy,
        torch.ones(4, 4, device=device),
        torch.zeros(4, dtype=torch.int64, device=device),
    )
    assert all(
        torch.equal(state, g.get_state()) for state, g in zip(before, generators, strict=True)
    )
