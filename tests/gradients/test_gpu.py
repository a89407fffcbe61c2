"""What is different on a GPU: products of fewer bits, other generators. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip.gradients import plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def against(output, y):
    """The loss whose δ is y."""
    return (output * y).flatten(1).sum(dim=1)


LAYERS = {  # how it is made, one sample's input, one sample's output, axes of the output that run over positions
    "Linear, one position": (lambda: nn.Linear(70, 50), (70,), (50,), ()),
    "Linear, Gram": (lambda: nn.Linear(64, 64), (32, 64), (32, 64), (1,)),
    "Linear, formed": (lambda: nn.Linear(32, 32), (300, 32), (300, 32), (1,)),
    "convolution, formed": (lambda: nn.Conv2d(3, 8, 3), (3, 34, 34), (8, 32, 32), (2, 3)),
    "convolution, large": (lambda: nn.Conv2d(64, 64, 3, padding=1), (64, 6, 6), (64, 6, 6), (2, 3)),
    "convolution, large, one position": (lambda: nn.Conv2d(64, 64, 3), (64, 3, 3), (64, 1, 1), ()),
}


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("wiggle", [1.0, 1e-4])
@pytest.mark.parametrize("name", LAYERS)
def test_a_norm_is_never_too_small(name, wiggle, precision, made, numbers):
    make, inputs, outputs, positions = LAYERS[name]
    a = (numbers(0, 8, *(1 for _ in inputs)) + wiggle * numbers(1, 8, *inputs)).float().cuda()
    delta = numbers(2, 8, *outputs)
    delta = (delta - delta.mean(dim=positions, keepdim=True) if positions else delta).float().cuda()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        model = made(0, make).float().cuda()
        with plan(model, against, numbers(3, 3, *inputs).float().cuda(), delta[:3]).listening() as tape:
            found = tape(a, delta)
            norms, added = found.norms(), found.per_sample().double().norm(dim=1)
    finally:
        torch.set_float32_matmul_precision(before)
    assert (added <= norms).all()
    assert wiggle < 1 or (norms <= 1.25 * added).all()


def test_the_generators_are_left_alone_even_if_the_model_is_not_on_the_gpu(numbers, tokens):
    torch.cuda.init()
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    for device in ("cpu", "cuda"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.PReLU(), nn.Linear(4, 3)).to(device)
        state = torch.get_rng_state(), torch.cuda.get_rng_state()
        plan(model, F.cross_entropy, numbers(0, 4, 4).float().to(device), tokens(1, 3, 4).to(device))
        assert torch.equal(state[0], torch.get_rng_state())
        assert torch.equal(state[1], torch.cuda.get_rng_state())
    assert torch.equal(before[1], torch.cuda.get_rng_state())


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_recurrent_layers(make, made, numbers, tokens, alone, same):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = make(4, 3, batch_first=True), nn.Linear(3, 3)

        def forward(self, x):
            return self.head(self.layer(x)[0][:, -1])

    model, x, y = made(0, Model).cuda(), numbers(1, 5, 6, 4).cuda(), tokens(2, 3, 5).cuda()
    with plan(model, F.cross_entropy, x, y).listening() as tape:
        found = tape(x, y)
    expected = alone(model, F.cross_entropy, x, y)
    torch.testing.assert_close(found.per_sample(), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.norms(), expected.norm(dim=1))
