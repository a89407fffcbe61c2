"""A norm is never below the norm of the sample's term in the sum, also under cancellation.

Every model here is one layer with the loss ⟨output, y⟩, so that δ equals y to the last bit and can
be chosen. The term of sample i is weighted_sum(w·e_i) in the model's precision; its norm is
computed in float64.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from evenclip.gradients import Tape, plan
from evenclip.gradients.layers import Formed, convolution, linear
from evenclip.mechanism.rounding import sum_rounding

few = settings(max_examples=40)


def against(output, y):
    """The loss with δ = y."""
    return (output * y).flatten(1).sum(dim=1)


# how it is made, one sample's input, one sample's output, axes of the output that run over
# positions
LAYERS = {
    "Linear, one position": (lambda: nn.Linear(7, 5), (7,), (5,), ()),
    "Linear, Gram": (lambda: nn.Linear(24, 24), (16, 24), (16, 24), (1,)),
    "Linear, formed": (lambda: nn.Linear(3, 2), (300, 3), (300, 2), (1,)),
    "Linear, one number": (lambda: nn.Linear(1, 1), (64, 1), (64, 1), (1,)),
    "Linear, weight only": (lambda: nn.Linear(4, 4, bias=False), (50, 4), (50, 4), (1,)),
    "Conv1d, formed": (lambda: nn.Conv1d(2, 2, 3), (2, 102), (2, 100), (2,)),
    "Conv2d, large, Gram": (lambda: nn.Conv2d(16, 24, 3), (16, 5, 5), (24, 3, 3), (2, 3)),
    "Conv1d, large, formed": (lambda: nn.Conv1d(2, 8, 40, padding=20), (2, 30), (8, 31), (2,)),
    "Conv2d, large, one position": (lambda: nn.Conv2d(6, 9, 3), (6, 3, 3), (9, 1, 1), ()),
    "Embedding": (lambda: nn.Embedding(4, 3), (80,), (80, 3), (1,)),
    "Embedding, one row": (lambda: nn.Embedding(1, 2), (80,), (80, 2), (1,)),
    "LayerNorm": (lambda: nn.LayerNorm(6), (50, 6), (50, 6), (1,)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 50), (4, 50), (2,)),
    "PReLU": (lambda: nn.PReLU(4), (4, 50), (4, 50), (2,)),
}


@pytest.fixture(scope="session")
def tapes(made, numbers, tokens):
    """`tapes(name, dtype)`: the cached tape of that layer, planned on ordinary numbers."""
    kept = {}

    def tape(name, dtype):
        if (name, dtype) not in kept:
            make, inputs, outputs, _ = LAYERS[name]
            model = made(0, make).to(dtype)
            x = (
                tokens(1, model.num_embeddings, 3, *inputs)
                if "Embedding" in name
                else numbers(1, 3, *inputs).to(dtype)
            )
            kept[name, dtype] = plan(model, against, x, numbers(2, 3, *outputs).to(dtype))
        return kept[name, dtype]

    return tape


@pytest.fixture(scope="session")
def cancelling(numbers, tokens):
    """`cancelling(name, data)`: nearly constant inputs, and δ with a sum near 0."""

    def draw(name, data, n=3):
        make, inputs, outputs, positions = LAYERS[name]
        exponents = st.integers(-6, 6)
        size_a, size_delta = (
            10.0 ** data.draw(exponents, label=f"size of {part}") for part in ("a", "δ")
        )
        wiggle = 10.0 ** data.draw(st.integers(-9, 0), label="wiggle")
        seed = data.draw(st.integers(0, 999), label="seed")
        if "Embedding" in name:
            a = tokens(seed, make().num_embeddings, n, *inputs)
        else:
            a = size_a * (
                numbers(seed, n, *(1 for _ in inputs)) + wiggle * numbers(seed + 1, n, *inputs)
            )
        delta = numbers(seed + 2, n, *outputs)
        if positions:
            delta = delta - delta.mean(dim=positions, keepdim=True)
        weight = data.draw(st.sampled_from([1.0, 0.3, 1e-3, 7.7]), label="weight")
        return a, size_delta * delta, weight

    return draw


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
@few
@given(data=st.data())
def test_a_norm_is_never_too_small(name, dtype, data, tapes, cancelling):
    a, delta, weight = cancelling(name, data)
    a = a.to(dtype) if a.is_floating_point() else a
    with tapes(name, dtype).recording() as tape:
        gradients = tape(a, delta.to(dtype))
    for indicator, norm in zip(
        weight * torch.eye(len(a), dtype=torch.float64), gradients.norms(), strict=True
    ):
        assert gradients.weighted_sum(indicator).double().norm() <= weight * norm


@pytest.mark.parametrize("name", [name for name in LAYERS if "Conv" in name])
def test_the_cases_take_the_way_they_say(name, tapes, numbers):
    _, inputs, outputs, _ = LAYERS[name]
    with tapes(name, torch.float64).recording() as tape:
        (part,) = tape(numbers(0, 2, *inputs), numbers(1, 2, *outputs)).gradients
    assert isinstance(part.gradient, convolution.LargeConvolution if "large" in name else Formed)


@pytest.mark.parametrize("name", LAYERS)
def test_a_norm_is_hardly_too_large_where_nothing_cancels(name, tapes, numbers, tokens):
    make, inputs, outputs, _ = LAYERS[name]
    a = (
        tokens(0, make().num_embeddings, 3, *inputs)
        if "Embedding" in name
        else numbers(0, 3, *inputs).float()
    )
    with tapes(name, torch.float32).recording() as tape:
        gradients = tape(a, numbers(1, 3, *outputs).float())
    exact = gradients.per_sample().double().norm(dim=1)
    assert (gradients.norms() <= exact * 1.001).all()


def test_a_thousand_positions_are_no_reason_to_give_the_layer_up(numbers):
    model = nn.Linear(8, 8)
    tape = plan(model, against, numbers(0, 3, 4096, 8).float(), numbers(1, 3, 4096, 8).float())
    assert isinstance(tape, Tape)


def test_a_loss_in_float64_does_not_hide_that_the_model_is_in_float32(numbers):
    model = nn.Linear(1, 1, bias=False)
    a, delta = numbers(0, 500, 1).float(), numbers(1, 500, 1)
    with plan(model, lambda output, y: against(output.double(), y), a, delta).recording() as tape:
        gradients = tape(a, delta)
    added = torch.stack(
        [gradients.weighted_sum(unit) for unit in torch.eye(500, dtype=torch.float64)]
    )
    assert (added.double().norm(dim=1) <= gradients.norms()).all()


def naive_gram_norms(a, delta):
    """The published formula in the precision of its inputs: the planted fault."""
    return ((a @ a.mT) * (delta @ delta.mT)).sum(dim=(1, 2)).clamp(min=0.0).sqrt()


def test_the_gram_form_in_float32_is_too_small_and_ours_is_not(numbers):
    a = (numbers(2, 100, 1, 24) + 1e-4 * numbers(0, 100, 16, 24)).float()
    delta = numbers(1, 100, 16, 24)
    delta = (delta - delta.mean(dim=1, keepdim=True)).float()
    gradients = linear.gradient(None, a, delta, ["weight"])
    added = [gradients.weighted_sum(unit)["weight"] for unit in torch.eye(100, dtype=torch.float64)]
    norms = torch.stack(added).double().flatten(1).norm(dim=1)
    naive = naive_gram_norms(a, delta)
    assert (
        naive < 0.5 * norms
    ).sum() > 10  # less than half of what it should be, for more than a tenth of the samples
    assert (gradients.square_norms().sqrt() >= norms).all()
    assert (gradients.square_norms().sqrt() <= 2 * norms).all()


@pytest.mark.parametrize(("precision", "unit"), [("high", 2.0**-11), ("medium", 2.0**-8)])
def test_products_of_fewer_bits_are_accounted_for(precision, unit, tapes, numbers):
    a, delta = numbers(0, 3, 50, 4).float(), numbers(1, 3, 50, 4).float()
    with tapes("Linear, weight only", torch.float32).recording() as tape:
        gradients, sizes = tape(a, delta), (a.norm(dim=2) * delta.norm(dim=2)).sum(dim=1)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            norms = tape(a, delta).norms()
        finally:
            torch.set_float32_matmul_precision(before)
    assert (norms >= gradients.norms() + 2 * unit * sizes).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=10)
@given(data=st.data())
def test_the_order_of_the_records_moves_a_clipped_sum_by_less_than_its_bound(
    name, dtype, data, tapes, cancelling
):
    """Also where positions cancel, because norms have a margin for them (`mechanism.rounding`)."""
    n = 40
    a, delta, _ = cancelling(name, data, n)
    a = a.to(dtype) if a.is_floating_point() else a
    with tapes(name, dtype).recording() as tape:
        gradients, turned = tape(a, delta.to(dtype)), tape(a.flip(0), delta.to(dtype).flip(0))
    weights = 1.0 / gradients.norms().clamp(min=2.0**-100)  # S = 1
    apart = gradients.weighted_sum(weights) - turned.weighted_sum(weights.flip(0))
    bound = sum_rounding(n, cancelling=tape.cancels)
    assert apart.norm() <= bound
    assert bound < 1e-2


def test_sums_do_not_depend_on_the_bits_of_float32_products(numbers):
    layer = linear.gradient(None, numbers(0, 9, 4).float(), numbers(1, 9, 5).float(), ["weight"])
    weights = torch.rand(9, dtype=torch.float64)
    exact, before = layer.weighted_sum(weights), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(layer.weighted_sum(weights)["weight"], exact["weight"])
    finally:
        torch.set_float32_matmul_precision(before)


# --- several layers measured together, in float32 -----------------------------------------------


def layers_of(scales, data):
    """Layers of one position with inputs and δ of very different sizes, including zeros."""
    layers = []
    for i, (size_a, size_delta) in enumerate(scales):
        d, p = data.draw(st.sampled_from([(1, 1), (3, 2), (700, 5), (9, 1024)]), label=f"shape {i}")
        seed = data.draw(st.integers(0, 2**16), label=f"seed {i}")
        random = torch.Generator().manual_seed(seed)
        a, delta = torch.randn(6, d, generator=random), torch.randn(6, p, generator=random)
        delta[0], a[1] = 0.0, 0.0
        layers.append(linear.OnePosition(a * size_a, delta * size_delta, ("weight", "bias")))
    return layers


def lengths_of_what_is_added(layers):
    """Return ‖g_i‖ from gradients formed in float64.  # [sample]"""
    each = [g.double().flatten(1) for layer in layers for g in layer.per_sample().values()]
    return torch.cat(each, dim=1).norm(dim=1)


SIZES = st.sampled_from([0.0, 1e-38, 1e-25, 1e-20, 1e-10, 1e-3, 1.0, 1e4, 1e15])


@few
@given(data=st.data(), scales=st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=4))
def test_a_quick_norm_is_never_too_small(scales, data):
    layers = layers_of(scales, data)
    assert all(layer.is_quick for layer in layers)
    quick, exact = linear.quick_square_norms(layers).sqrt(), lengths_of_what_is_added(layers)
    assert (quick >= exact).all()
    longest = max((float(size_a) for size_a, _ in scales), default=0.0) * 40
    assert (quick <= exact * 1.001 + 2.0**-49 * (1 + longest) * len(layers)).all()


def test_without_a_shortest_length_squares_would_be_lost(monkeypatch):
    layer = linear.OnePosition(torch.ones(1, 3), torch.full((1, 2), 1e-25), ("weight", "bias"))
    exact = lengths_of_what_is_added([layer])
    assert linear.quick_square_norms([layer, layer]).sqrt() >= exact * 2**0.5
    monkeypatch.setattr(linear, "_SHORTEST", 0.0)
    assert linear.quick_square_norms([layer, layer]).sqrt() == 0.0


@pytest.mark.parametrize(
    ("a", "delta", "names"),
    [
        (torch.ones(2, 1025), torch.ones(2, 3), ("weight", "bias")),
        (torch.ones(2, 4), torch.ones(2, 3), ("weight",)),
        (torch.ones(2, 4), torch.ones(2, 3), ("bias",)),
        (torch.ones(2, 4).double(), torch.ones(2, 3).double(), ("weight", "bias")),
        (torch.ones(2, 4).bfloat16(), torch.ones(2, 3).bfloat16(), ("weight", "bias")),
    ],
    ids=["wide", "no bias", "no weight", "float64", "bfloat16"],
)
def test_what_the_quick_way_does_not_take(a, delta, names):
    assert not linear.OnePosition(a, delta, names).is_quick


def test_quick_norms_of_a_model_mix_both_ways(numbers):
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5, bias=False), nn.LayerNorm(5), nn.Linear(5, 3)
    )
    x, y = numbers(0, 7, 4).float(), numbers(1, 7, 3).float()
    with plan(model, against, x, y).recording() as tape:
        gradients = tape(x, y)
    torch.testing.assert_close(gradients.norms(quick=True), gradients.norms(), rtol=1e-5, atol=0)
    assert (gradients.norms(quick=True) >= gradients.per_sample().double().norm(dim=1)).all()


@pytest.mark.parametrize("shape", [(), (3,)], ids=["one position", "positions"])
def test_a_norm_does_not_underflow_where_the_gradient_does_not(shape):
    """δ is so small that its squares underflow, and the input so large that the product counts."""
    layer = nn.Linear(4, 2, bias=False).double()
    x = torch.full((3, *shape, 4), 1e150, dtype=torch.float64)
    delta = torch.full((3, *shape, 2), 1e-163, dtype=torch.float64)
    made = plan(layer, against, torch.randn_like(x), torch.randn_like(delta))
    with made.recording() as tape:
        gradients = tape(x, delta)
        formed = gradients.per_sample()
    exact = torch.stack([(g / g.abs().max()).norm() * g.abs().max() for g in formed])
    assert (exact > 0).all()
    assert (gradients.norms() >= exact).all()
