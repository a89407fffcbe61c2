"""Every layer with a formula, over shapes and options from hypothesis, against single samples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from evenclip.gradients.layers import FORMULAS, Formed, convolution, formula, layer, linear

few = settings(max_examples=60)
uneven = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel lengths:UserWarning"
)


def sizes(low, high):
    return st.integers(low, high)


@st.composite
def linears(draw):
    d, p, bias = draw(sizes(1, 7)), draw(sizes(1, 7)), draw(st.booleans())
    middle = draw(st.lists(sizes(1, 4), max_size=3))
    return lambda: nn.Linear(d, p, bias=bias), (*middle, d)


@st.composite
def convolutions(draw, kind, dims):
    axes = st.tuples(*[sizes(1, 3)] * dims)
    groups, per_group = draw(
        st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1), (1, 8), (2, 9)])
    )  # from 8 on: thick
    kernel, stride = draw(axes), draw(axes)
    dilation = draw(st.tuples(*[sizes(1, 2)] * dims))
    padding = draw(st.one_of(st.sampled_from(["same", "valid"]), st.tuples(*[sizes(0, 2)] * dims)))
    options = {
        "stride": (1,) * dims if padding == "same" else stride,
        "padding": padding,
        "padding_mode": draw(st.sampled_from(["zeros", "reflect", "circular", "replicate"])),
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    space = [
        max(3, d * (k - 1) + 1) + draw(sizes(0, 3)) for d, k in zip(dilation, kernel, strict=True)
    ]
    channels = groups * per_group, groups * draw(sizes(1, 3))
    return lambda: kind(*channels, kernel, **options), (channels[0], *space)


@st.composite
def embeddings(draw):
    rows, width = draw(sizes(2, 6)), draw(sizes(1, 4))  # few rows: tokens repeat
    padding_idx = draw(st.one_of(st.none(), sizes(-rows, rows - 1)))
    shape = tuple(draw(st.lists(sizes(1, 5), max_size=2)))
    return lambda: nn.Embedding(rows, width, padding_idx=padding_idx), shape


@st.composite
def trailing_norms(draw, kind):
    normalized = tuple(draw(st.lists(sizes(1, 4), min_size=1, max_size=2)))
    middle = draw(st.lists(sizes(1, 3), max_size=2))
    options = {} if kind is nn.RMSNorm else {"bias": draw(st.booleans())}
    return lambda: kind(normalized, eps=1e-3, **options), (*middle, *normalized)


@st.composite
def group_norms(draw):
    groups, each = draw(sizes(1, 3)), draw(sizes(2, 4))  # torch refuses a single number in a group
    space = draw(st.lists(sizes(1, 3), max_size=3))
    return lambda: nn.GroupNorm(groups, groups * each, eps=1e-3), (groups * each, *space)


@st.composite
def instance_norms(draw, kind, dims):
    channels, space = draw(sizes(1, 4)), draw(st.tuples(*[sizes(2, 4)] * dims))
    return lambda: kind(channels, affine=True, eps=1e-3), (channels, *space)


CASES = {  # kind -> strategy for (how it is made, shape of one sample's input)
    nn.Linear: linears(),
    nn.Conv1d: convolutions(nn.Conv1d, 1),
    nn.Conv2d: convolutions(nn.Conv2d, 2),
    nn.Conv3d: convolutions(nn.Conv3d, 3),
    nn.Embedding: embeddings(),
    nn.LayerNorm: trailing_norms(nn.LayerNorm),
    nn.RMSNorm: trailing_norms(nn.RMSNorm),
    nn.GroupNorm: group_norms(),
    nn.InstanceNorm1d: instance_norms(nn.InstanceNorm1d, 1),
    nn.InstanceNorm2d: instance_norms(nn.InstanceNorm2d, 2),
    nn.InstanceNorm3d: instance_norms(nn.InstanceNorm3d, 3),
}
CONVOLUTIONS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
WAYS = [
    convolution.Shifts.by_unfolding,
    convolution.Shifts.by_groups,
    convolution.Shifts.by_offsets,
]


@pytest.fixture(scope="session")
def drawn(numbers, tokens, made):
    """`drawn(kind, data)`: a layer, some of its parameters frozen, with random a and δ."""

    def draw(kind, data):
        make, shape = data.draw(CASES[kind], label="layer")
        n, seed = data.draw(sizes(1, 4), label="samples"), data.draw(sizes(0, 99), label="seed")
        module = made(seed, make)
        names = [name for name, _ in module.named_parameters()]
        for name in data.draw(
            st.sampled_from([[], *([name] for name in names if len(names) > 1)]), label="frozen"
        ):
            module.get_parameter(name).requires_grad_(False)
        a = (
            tokens(seed, module.num_embeddings, n, *shape)
            if kind is nn.Embedding
            else numbers(seed, n, *shape)
        )
        delta = numbers(seed + 100, *module(a).shape)
        return module, a, delta

    return draw


def trainable(module):
    return [name for name, p in module.named_parameters() if p.requires_grad]


@uneven
@pytest.mark.parametrize("kind", FORMULAS)
@few
@given(data=st.data())
def test_every_layer_with_a_formula(kind, data, drawn, layer_alone, same_layer):
    module, a, delta = drawn(kind, data)
    gradients = formula(module)(module, a, delta, trainable(module))
    same_layer(gradients, layer_alone(module, a, delta))


@uneven
@pytest.mark.parametrize("kind", CONVOLUTIONS)
@settings(few, max_examples=30)
@given(data=st.data())
def test_every_way_through_a_convolution(kind, data, drawn, layer_alone, same_layer):
    module, a, delta = drawn(kind, data)
    expected, shifts = layer_alone(module, a, delta), convolution.Shifts(module, a, delta)
    same_layer(convolution.LargeConvolution(shifts, trainable(module)), expected)
    for way in WAYS:
        both = {"weight": way(shifts), "bias": shifts.per_sample(["bias"]).get("bias")}
        same_layer(Formed({name: both[name] for name in expected}), expected)


@uneven
@pytest.mark.parametrize("kind", CONVOLUTIONS)
@settings(few, max_examples=30)
@given(data=st.data())
def test_no_sample_of_a_convolution_notices_another_in_any_way(kind, data, drawn):
    """The result is equal to the last bit for any other sample in the batch.

    In float32 a CPU treats the samples as channel groups.
    """
    module, a, delta = drawn(kind, data)
    module, a, delta = module.float(), a.float(), delta.float()
    bad, number = (
        len(a) // 2,
        data.draw(st.sampled_from([math.nan, math.inf, 1e30, -7.0]), label="number"),
    )
    a_, delta_, others = a.clone(), delta.clone(), torch.arange(len(a)) != bad
    a_[bad], delta_[bad] = number, number
    for way in WAYS:
        before, after = (
            way(convolution.Shifts(module, *pair)) for pair in [(a, delta), (a_, delta_)]
        )
        assert torch.equal(before[others], after[others])


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("channels", [(16, 16), (32, 16), (20, 24), (8, 32)], ids=str)
def test_nor_in_the_kernels_for_many_channels(channels, number, numbers):
    module, a, delta = (
        nn.Conv2d(*channels, 3),
        numbers(0, 5, channels[0], 9, 9).float(),
        numbers(1, 5, channels[1], 7, 7),
    )
    a_, delta_, others = a.clone(), delta.float().clone(), torch.tensor([0, 1, 3, 4])
    a_[2], delta_[2] = number, number
    for way in WAYS:
        before = way(convolution.Shifts(module, a, delta.float()))
        for pair in [(a_, delta.float()), (a, delta_), (a_, delta_)]:
            after = way(convolution.Shifts(module, *pair))
            assert torch.equal(before[others], after[others])
            assert not torch.equal(before[2], after[2])


@uneven
@pytest.mark.parametrize("kind", CONVOLUTIONS)
@settings(few, max_examples=30)
@given(data=st.data())
def test_a_convolution_in_float32(kind, data, drawn, layer_alone):
    module, a, delta = drawn(kind, data)
    expected = layer_alone(module, a, delta)
    gradients = convolution.gradient(
        module.float(), a.float(), delta.float(), trainable(module)
    ).per_sample()
    for name, each in expected.items():
        torch.testing.assert_close(
            gradients[name].double(), each, rtol=0, atol=1e-5 * float(each.abs().max() + 1)
        )


@pytest.mark.parametrize(
    ("channels", "dtype", "way"),
    [
        ((7, 4), torch.float32, "by_unfolding"),
        ((8, 4), torch.float32, "by_groups"),
        ((8, 4), torch.float64, "by_offsets"),
        ((8, 4), torch.bfloat16, "by_offsets"),
    ],
)
def test_a_convolution_is_formed_the_quickest_way(channels, dtype, way, numbers, made, monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("without oneDNN there are two ways")
    module, taken = made(0, lambda: nn.Conv2d(*channels, 2)).to(dtype), []
    a = numbers(1, 3, channels[0], 9, 9).to(dtype)
    for each in WAYS:
        name = each.__name__
        monkeypatch.setattr(
            convolution.Shifts,
            name,
            lambda self, name=name, each=each: taken.append(name) or each(self),
        )
    convolution.gradient(module, a, module(a).detach(), ["weight"])
    assert taken == [way]


@pytest.mark.parametrize("channels", [(2, 4), (8, 4)], ids=["thin", "thick"])
def test_a_convolution_can_be_mapped_over_runs_and_traced_for_any_number_of_samples(
    channels, numbers
):
    module = nn.Conv2d(*channels, 2, stride=2, padding=1)
    a = numbers(1, 3, 6, channels[0], 9, 9).float()  # six: tracing takes equal sizes for the same
    delta = numbers(2, 3, *module(a[0]).shape).float()

    def each(a, delta):
        return convolution.gradient(module, a, delta, ["weight", "bias"]).per_sample()

    expected = [each(*pair) for pair in zip(a, delta, strict=True)]
    torch.testing.assert_close(
        torch.func.vmap(each)(a, delta),
        {name: torch.stack([g[name] for g in expected]) for name in expected[0]},
    )
    traced = make_fx(each, tracing_mode="symbolic")(a[0], delta[0])
    torch.testing.assert_close(traced(a[1], delta[1]), expected[1])
    torch.testing.assert_close(
        traced(a[1, :3], delta[1, :3]), {name: g[:3] for name, g in expected[1].items()}
    )


@pytest.mark.parametrize("kind", CASES)
@settings(max_examples=2, database=None, deadline=None, phases=[Phase.generate])  # tracing is slow
@given(data=st.data())
def test_every_formula_can_be_traced_for_any_number_of_samples(kind, drawn, data):
    """A formula that branches on the value of a tensor cannot be compiled."""
    module, a, delta = drawn(kind, data)
    names = trainable(module)

    def each(a, delta):
        return FORMULAS[kind](module, a, delta, names).per_sample()

    traced_rows = torch.arange(37) % len(a)  # tracing takes equal sizes for the same
    traced = make_fx(each, tracing_mode="symbolic")(a[traced_rows], delta[traced_rows])
    rows = torch.arange(5) % len(a)
    torch.testing.assert_close(traced(a[rows], -delta[rows]), each(a[rows], -delta[rows]))


@pytest.mark.parametrize(
    ("channels", "size", "kind"), [((3, 4), 9, Formed), ((16, 20), 4, convolution.LargeConvolution)]
)
def test_a_convolution_is_formed_where_that_is_smaller_than_its_activations(
    channels, size, kind, numbers, made
):
    module = made(0, lambda: nn.Conv2d(*channels, 3))
    a = numbers(0, 2, channels[0], size, size)
    assert isinstance(formula(module)(module, a, module(a).detach(), ["weight"]), kind)


LINEAR = {  # positions of one sample, in, out -> how its norm is computed
    ((), 3, 4): "neither",
    ((1, 1), 3, 4): "neither",
    ((2,), 4, 4): "gram",
    ((2, 2), 6, 6): "gram",
    ((1, 2, 2), 8, 4): "gram",
    ((3,), 4, 4): "formed",
    ((2, 3, 2), 5, 3): "formed",
}


@pytest.mark.parametrize(("case", "way"), LINEAR.items(), ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_norm_of_a_linear_layer_goes_the_cheapest_way(
    case, way, bias, numbers, made, layer_alone, same_layer, monkeypatch
):
    middle, d, p = case
    module = made(1, lambda: nn.Linear(d, p, bias=bias))
    a, delta = numbers(2, 3, *middle, d), numbers(3, 3, *middle, p)
    taken = []
    for name in ("gram", "formed"):
        original = getattr(linear, f"_{name}_square_norms")
        monkeypatch.setattr(
            linear,
            f"_{name}_square_norms",
            lambda a, d, name=name, f=original: taken.append(name) or f(a, d),
        )
    same_layer(linear.gradient(module, a, delta, trainable(module)), layer_alone(module, a, delta))
    assert taken == ([] if way == "neither" else [way])


def test_products_that_are_only_measured_are_formed_in_blocks(
    numbers, made, layer_alone, same_layer, monkeypatch
):
    monkeypatch.setattr(linear, "_BLOCK", 2 * 4 * 3)  # two samples at a time, the fifth alone
    module, a, delta = made(0, lambda: nn.Linear(4, 3)), numbers(1, 5, 6, 4), numbers(2, 5, 6, 3)
    same_layer(linear.gradient(module, a, delta, ["weight", "bias"]), layer_alone(module, a, delta))


@pytest.mark.parametrize("shape", [(5, 7), (5, 2, 3), (3, 30), (1, 30), (0, 4), (5, 0)], ids=str)
def test_squares_are_summed_a_block_of_samples_at_a_time(shape, numbers, monkeypatch):
    x = numbers(0, *shape)
    expected = x.square().flatten(1).sum(dim=1) if x.numel() else x.new_zeros(len(x))
    torch.testing.assert_close(layer.square_sums(x), expected)
    monkeypatch.setattr(layer, "_BLOCK", 14)
    torch.testing.assert_close(layer.square_sums(x), expected)
    torch.testing.assert_close(make_fx(layer.square_sums, tracing_mode="symbolic")(x)(x), expected)


class Doubled(nn.Linear):
    """Does not compute what a Linear computes."""

    def forward(self, x):
        return 2 * nn.functional.linear(x, self.weight, self.bias)


class Named(nn.Linear):
    """Computes what a Linear computes."""


NOT_THE_FORMULA = {
    "a subclass with its own forward": (lambda: Doubled(2, 2), False),
    "a subclass with the same forward": (lambda: Named(2, 2), True),
    "parametrised": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), False),
    "not affine": (lambda: nn.LayerNorm(3, elementwise_affine=False), True),
    "a transposed convolution": (lambda: nn.ConvTranspose2d(2, 2, 2), False),
}


@pytest.mark.parametrize("case", NOT_THE_FORMULA)
def test_a_formula_is_used_only_for_what_computes_as_its_layer(case):
    make, has_formula = NOT_THE_FORMULA[case]
    assert (formula(make()) is not None) == has_formula


def test_a_layer_whose_forward_was_replaced_has_no_formula():
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: 2 * x
    assert formula(layer) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_have_the_dtype_of_the_weights_and_norms_are_float64(dtype, numbers):
    module, a, delta = nn.Linear(3, 2), numbers(0, 4, 3).float(), numbers(1, 4, 2).float()
    gradients = linear.gradient(module, a, delta, ["weight", "bias"])
    assert gradients.square_norms().dtype == torch.float64
    assert {g.dtype for g in gradients.weighted_sum(torch.ones(4, dtype=dtype)).values()} == {dtype}
