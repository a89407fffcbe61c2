"""What is different on a GPU: products of fewer bits, other generators. Skipped where there is none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip.gradients import plan
from evenclip.gradients.layers import operations
from evenclip.noise import Noise

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


@pytest.mark.parametrize("n", [1, 31, 32, 33, 300])
@pytest.mark.parametrize("columns", [1, 16, 33, 4608])
def test_rows_of_weight_0_count_for_nothing_whatever_stands_in_them(n, columns, numbers):
    from evenclip.gradients.layers.formed_cuda import weighted_rows

    rows, weights = numbers(0, n, columns), numbers(1, n)
    weights[::3] = 0
    expected = weights @ rows
    rows[::3] = torch.tensor([float("nan"), float("inf"), -float("inf")])[torch.arange(len(rows[::3])) % 3].unsqueeze(1)
    found = weighted_rows(rows.float().cuda(), weights.float().cuda())
    assert torch.allclose(found.cpu().double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 17, 1025, 97115])
def test_the_kernel_draws_the_noise_of_the_cpu(size):
    from evenclip import noise_cuda

    noises = [Noise(np.random.SeedSequence(seed)) for seed in range(3)]
    keys = torch.stack([noise.key for noise in noises]).cuda()
    for t in (0, 1, 2**33):
        drawn = noise_cuda.normal(keys, torch.tensor(t).cuda(), size).cpu()
        expected = torch.cat([noise.normal(t, size) for noise in noises])
        assert torch.allclose(drawn, expected, rtol=1e-5, atol=2e-6), (size, t)


def test_the_kernel_has_the_tail():
    """Further bits go in where u < 2⁻²⁰: among twenty million pairs, about twenty times."""
    from evenclip import noise_cuda

    noise, size = Noise(np.random.SeedSequence(5)), 4_000_001
    far = 0
    for t in range(10):
        drawn = noise_cuda.normal(noise.key.cuda().unsqueeze(0), torch.tensor(t).cuda(), size)[0].cpu()
        expected = noise.normal(t, size)[0]
        far += int((expected.abs() > 5.2).sum())
        assert torch.allclose(drawn, expected, rtol=1e-5, atol=2e-6)
    assert far > 3


# --- small convolutions by kernels of our own -------------------------------------------------------------------------

SHAPES = [  # samples, channels in and out, height and width, kernel, padding
    (3, 1, 32, (28, 28), (3, 3), (0, 0)),
    (5, 32, 16, (26, 26), (3, 3), (0, 0)),
    (2, 3, 8, (9, 7), (5, 5), (2, 1)),
    (1, 7, 24, (4, 11), (1, 3), (0, 1)),
    (40, 16, 32, (24, 24), (3, 3), (2, 2)),
    (1, 8, 8, (3, 3), (3, 3), (0, 0)),
]


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("n", "c", "p", "space", "kernel", "padding"), SHAPES)
def test_a_convolution_by_our_kernel(n, c, p, space, kernel, padding, bias, tanh, numbers):
    a, weight, b = numbers(0, n, c, *space).float(), numbers(1, c, *kernel, p).float(), numbers(2, p).float()
    exact = [a.double(), weight.double().permute(3, 0, 1, 2), b.double() if bias else None]
    expected = F.conv2d(*exact, padding=padding)
    # Every sum is rounded as often as it has terms, and no rounding is larger than the terms together allow.
    sizes = F.conv2d(*(None if part is None else part.abs() for part in exact), padding=padding)
    bound = 2.0**-24 * (c * math.prod(kernel) + 1) * sizes + 1e-6
    given = [a.cuda(), weight.cuda(), b.cuda() if bias else None]
    assert operations.has_kernels(given[0])
    found = operations.convolved(*given, [*padding], tanh).cpu().double()
    assert ((found - (expected.tanh() if tanh else expected)).abs() <= bound).all()


@pytest.mark.parametrize(("n", "c", "p", "space", "kernel", "padding"), SHAPES)
def test_back_through_a_convolution_by_our_kernel(n, c, p, space, kernel, padding, numbers):
    """δ is written where the input was: every place once, also in the last block, which is not full."""
    del padding
    c = 8 * -(-c // 8)
    before = numbers(0, n, c, *space).requires_grad_(True)
    a, weight = before.tanh(), numbers(1, p, c, *kernel)
    out = F.conv2d(a, weight)
    delta = numbers(2, *out.shape)
    (out * delta).sum().backward()
    turned = weight.flip(2, 3).permute(0, 2, 3, 1)
    expected = operations.weight_gradients(a.detach(), delta, [*kernel], [1, 1], [1, 1], True)
    written, signal = a.detach().float().cuda(), delta.float().cuda()
    found = operations.pulled_back(written, signal, turned.float().cuda(), True)
    torch.testing.assert_close(written.cpu().double(), before.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=1e-4)


def test_samples_do_not_touch(numbers):
    """What is not finite stays in its own sample."""
    a, weight = numbers(0, 9, 8, 6, 6).float().cuda(), numbers(1, 8, 3, 3, 16).float().cuda()
    expected = operations.convolved(a, weight, None, [1, 1], True)
    a[4], a[7, 2, 3, 3] = float("inf"), float("nan")
    found = operations.convolved(a, weight, None, [1, 1], True)
    others = torch.tensor([0, 1, 2, 3, 5, 6, 8]).cuda()
    assert torch.equal(found[others], expected[others])
    assert found[7].isnan().any()


def test_more_positions_than_are_counted_at_once(monkeypatch, numbers):
    a, weight = numbers(0, 9, 8, 6, 6).float().cuda(), numbers(1, 8, 3, 3, 16).float().cuda()
    expected = operations.convolved(a, weight, None, [0, 0], False)
    monkeypatch.setattr(operations, "_MOST_POSITIONS", 3 * 16 + 1)
    assert torch.equal(operations.convolved(a, weight, None, [0, 0], False), expected)
