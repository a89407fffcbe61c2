"""A lowered graph comes to the numbers of the graph it was made from, has our operations where they fit, and no others.

On a CPU: the operations are the same ones, torch does their work. What kernels make of them is for a GPU to show
(tests/gradients/test_gpu.py, tests/test_cuda.py).
"""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from evenclip.compiler import compiled
from evenclip.gradients import plan
from evenclip.gradients.anylayer import call_with
from evenclip.gradients.functional import FunctionalTape
from evenclip.gradients.layers import convolution, operations
from evenclip.lowering import _product, lowered
from evenclip.models import cnn, seeded

aten, ours = torch.ops.aten, torch.ops.evenclip
N = 5


class Passes(nn.Module):
    """What a step does to a model: losses, norms and a weighted sum."""

    def __init__(self, tape):
        super().__init__()
        self.model, self._tape = tape.model, tape

    def forward(self, x, y):
        found = self._tape(x, y)
        norms = found.norms()
        return [found.losses, norms, found.weighted_sum(1 / (1 + norms))]


def traced(model, *shape, monkeypatch=None):
    """The graph of those as a GPU gets it, and its inputs."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, *shape, generator=random), torch.randint(2, (N,), generator=random)
    if monkeypatch is not None:
        monkeypatch.setattr(convolution, "_has_kernel", lambda module, like: like.ndim == 4 and module.groups == 1)
    tape = FunctionalTape(plan(model, F.cross_entropy, x, y), x, y)
    whole, names = Passes(tape), [f"model.{name}" for name in tape.layout.names]
    parameters = [p.detach() for p in model.parameters() if p.requires_grad]

    def act(x, y, *parameters):
        return call_with(whole, dict(zip(names, parameters, strict=True)), (x, y))

    with torch.no_grad():
        return make_fx(act, tracing_mode="fake", _allow_non_fake_inputs=True)(x, y, *parameters), [x, y, *parameters]


def targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def assert_same(graph, other, inputs):
    with torch.no_grad():
        before = [tensor.clone() for tensor in inputs]
        for found, expected in zip(other(*inputs), graph(*inputs), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(one, two) for one, two in zip(inputs, before, strict=True)), "the inputs were written to"


def stacked(*layers, flat):
    with seeded(0):
        return nn.Sequential(*(layer() for layer in layers), nn.Flatten(), nn.Linear(flat, 2))


# --- the networks of the paper ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32)])
def test_the_papers_networks(channels, side, monkeypatch):
    graph, inputs = traced(cnn(channels, side, 2), channels, side, side, monkeypatch=monkeypatch)
    before = targets(graph)
    quick = lowered(graph, exact=True)
    found = targets(quick)
    assert found.count(ours.convolved.default) == 2
    assert found.count(ours.pulled_back.default) == found.count(ours.weight_gradients.default) == 1
    gone = {aten.convolution.default, aten.convolution_backward.default, aten.tanh.default, aten.new_zeros.default}
    assert gone <= {*before}
    assert not gone & {*found}
    assert targets(graph) == before
    assert_same(graph, quick, inputs)


def test_with_operands_of_fewer_bits_convolutions_stay(monkeypatch):
    graph, inputs = traced(cnn(1, 24, 2), 1, 24, 24, monkeypatch=monkeypatch)
    found = targets(lowered(graph, exact=False))
    assert found.count(aten.convolution.default) == 2
    assert not {ours.convolved.default, ours.pulled_back.default} & {*found}
    assert_same(graph, lowered(graph, exact=False), inputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
@pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), reason="needs a C++ compiler"
)
def test_compiled(monkeypatch):
    """Also if δ is put in the place of what was there: torch's compiler has to understand that."""
    torch._dynamo.reset()
    graph, inputs = traced(cnn(1, 24, 2), 1, 24, 24, monkeypatch=monkeypatch)
    run = compiled(lowered(graph, exact=True), [inputs], like=graph)
    assert run is not None
    assert_same(graph, run, inputs)
    places = []
    monkeypatch.setattr(operations, "has_kernels", lambda tensor: bool(places.append(tensor.data_ptr())))
    run(*inputs)
    assert places[1] == places[2] != places[0], "what the second convolution read is written to, not a copy of it"


# --- other networks ---------------------------------------------------------------------------------------------------

SMALL = {  # layers, size of the last one's output; how often the first and the last of our operations come
    "padded": (
        [lambda: nn.Conv2d(3, 8, 3, padding=1), nn.Tanh, lambda: nn.Conv2d(8, 16, 3, padding=1)],
        16 * 400,
        3,
        0,
    ),
    "ReLU": ([lambda: nn.Conv2d(3, 8, 3), nn.ReLU, lambda: nn.Conv2d(8, 16, 3)], 16 * 256, 3, 0),
    "no bias": ([lambda: nn.Conv2d(3, 8, 3, bias=False), nn.Tanh, lambda: nn.Conv2d(8, 16, 3)], 16 * 256, 2, 1),
    "oblong": ([lambda: nn.Conv2d(3, 8, (1, 4)), nn.Tanh, lambda: nn.Conv2d(8, 8, (3, 2))], 8 * 18 * 16, 2, 1),
    "tanh at the end": ([lambda: nn.Conv2d(3, 8, 3), nn.Tanh], 8 * 324, 1, 0),
    "one after the other": (
        [lambda: nn.Conv2d(3, 8, 3), nn.Tanh, *3 * [lambda: nn.Conv2d(8, 8, 3), nn.Tanh]],
        8 * 144,
        4,
        3,
    ),
    "too thin": ([lambda: nn.Conv2d(3, 8, 3), nn.Tanh, lambda: nn.Conv2d(8, 5, 3)], 5 * 256, 2, 0),
    "from too thin": ([lambda: nn.Conv2d(3, 5, 3), nn.Tanh, lambda: nn.Conv2d(5, 8, 3)], 8 * 256, 1, 0),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_convolutions(name, monkeypatch):
    layers, flat, passes, together = SMALL[name]
    graph, inputs = traced(stacked(*layers, flat=flat), 3, 20, 20, monkeypatch=monkeypatch)
    quick = lowered(graph, exact=True)
    found = targets(quick)
    assert (found.count(ours.convolved.default), found.count(ours.pulled_back.default)) == (passes, together)
    assert_same(graph, quick, inputs)


LARGE = {
    "strides": ([lambda: nn.Conv2d(3, 8, 3, stride=2)], 8 * 9),
    "dilation": ([lambda: nn.Conv2d(3, 8, 3, dilation=2)], 8 * 16),
    "channel groups": ([lambda: nn.Conv2d(3, 24, 3, groups=3)], 24 * 36),
    "many channels": ([lambda: nn.Conv2d(3, 40, 3)], 40 * 36),
    "odd channels": ([lambda: nn.Conv2d(3, 12, 3)], 12 * 36),
    "many offsets": ([lambda: nn.Conv2d(3, 8, (2, 5))], 8 * 28),
    "transposed": ([lambda: nn.ConvTranspose2d(3, 8, 3)], 8 * 100),
}


@pytest.mark.parametrize("name", LARGE)
def test_others_are_left_to_torch(name):
    layers, flat = LARGE[name]
    graph, inputs = traced(stacked(*layers, flat=flat), 3, 8, 8)
    quick = lowered(graph, exact=True)
    assert ours.convolved.default not in targets(quick)
    assert_same(graph, quick, inputs)


def test_in_one_dimension_and_in_float64_they_are_left_to_torch():
    graph, inputs = traced(stacked(lambda: nn.Conv1d(3, 8, 3), flat=8 * 6), 3, 8)
    assert ours.convolved.default not in targets(lowered(graph, exact=True))
    assert_same(graph, lowered(graph, exact=True), inputs)
    act = make_fx(lambda x, w: [F.conv2d(x, w)], tracing_mode="fake")
    for dtype, there in ((torch.float64, False), (torch.float32, True)):
        graph = act(torch.randn(2, 3, 5, 5, dtype=dtype), torch.randn(8, 3, 3, 3, dtype=dtype))
        assert (ours.convolved.default in targets(lowered(graph, exact=True))) is there


class Branched(nn.Module):
    """The tanh that goes into the second convolution is needed elsewhere too."""

    def __init__(self, how):
        super().__init__()
        self.how, self.one, self.two = how, nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=0)
        self.last = nn.Linear(8 * 256, 2)

    def forward(self, x):
        a = torch.tanh(self.one(x))
        found = self.two(a)
        if self.how == "around":
            found = found + a[..., 1:-1, 1:-1]
        elif self.how == "watched":
            found = found * (1 + a.detach().mean(dim=(1, 2, 3), keepdim=True))
        elif self.how == "twice":
            found = found + self.two(a)
        return self.last(found.flatten(1))


@pytest.mark.parametrize("how", ["around", "watched", "twice", "alone"])
def test_what_is_still_needed_is_not_written_over(how, monkeypatch):
    with seeded(0):
        model = Branched(how)
    graph, inputs = traced(model, 3, 20, 20, monkeypatch=monkeypatch)
    quick = lowered(graph, exact=True)
    assert targets(quick).count(ours.pulled_back.default) == (how == "alone")
    assert_same(graph, quick, inputs)


def test_a_frozen_layer_is_passed_through(monkeypatch):
    model = cnn(1, 24, 2)
    model[2].requires_grad_(False)
    graph, inputs = traced(model, 1, 24, 24, monkeypatch=monkeypatch)
    quick = lowered(graph, exact=True)
    assert ours.pulled_back.default not in targets(quick)
    assert_same(graph, quick, inputs)


# --- zeros, products --------------------------------------------------------------------------------------------------


def test_only_sums_that_change_nothing_are_left_out():
    def act(x):
        zeros, row, short = x.new_zeros(x.shape), x.new_zeros((3, *x.shape)), x.new_zeros(x.shape[1:])
        return [x + zeros, x + row, x + short, (x > 0) + zeros, torch.add(x, zeros, alpha=2)]

    x = torch.randn(4, 5)
    graph = make_fx(act, tracing_mode="fake")(x)
    quick = lowered(graph, exact=True)
    assert targets(quick).count(aten.add.Tensor) == 3
    for found, expected in zip(quick(x), act(x), strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_long_products_with_few_columns_are_taken_in_parts(bias):
    layer = nn.Linear(2304, 5, bias=bias)
    inputs = [torch.randn(7, 2304), *(p.detach() for p in layer.parameters())]

    def act(x, *parameters):
        return F.linear(x, *parameters), x.T @ x[:, :64]  # the second has too many columns

    quick = lowered(make_fx(act, tracing_mode="fake")(*inputs), exact=True)
    assert targets(quick).count(_product) == 1
    assert aten.addmm.default not in targets(quick)
    assert aten.mm.default in targets(quick)
    for found, expected in zip(quick(*inputs), act(*inputs), strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


# --- the operations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 4)])
def test_gradients_of_the_weight(kernel, stride, dilation):
    a, weight = torch.randn(N, 3, 12, 11), torch.randn(4, 3, *kernel)
    delta = torch.randn_like(F.conv2d(a, weight, stride=stride, dilation=dilation))
    sides = [*kernel], [stride, stride], [dilation, dilation]
    found = operations.weight_gradients(a, delta, *sides, True)
    for i in range(N):
        weight.requires_grad_(True).grad = None
        (F.conv2d(a[i : i + 1], weight, stride=stride, dilation=dilation) * delta[i : i + 1]).sum().backward()
        torch.testing.assert_close(found[i], weight.grad.flatten(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [(3, 3), (2, 4)])
def test_back_through_a_convolution_and_a_tanh(kernel):
    before = torch.randn(N, 8, 7, 9, requires_grad=True)
    a, weight = before.tanh(), torch.randn(16, 8, *kernel)
    delta = torch.randn_like(F.conv2d(a, weight))
    expected = operations.weight_gradients(a.detach(), delta, [*kernel], [1, 1], [1, 1], True)
    (F.conv2d(a, weight) * delta).sum().backward()
    written = a.detach().clone()
    found = operations.pulled_back(written, delta, weight.flip(2, 3).permute(0, 2, 3, 1), True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(written, before.grad, rtol=1e-4, atol=1e-4)


def test_torch_knows_what_the_operations_do():
    a, delta, weight = torch.randn(N, 8, 6, 6), torch.randn(N, 16, 4, 4), torch.randn(16, 3, 3, 8)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(operations.convolved, (delta, weight, torch.randn(8), [1, 0], True), test_utils=tests)
    torch.library.opcheck(operations.pulled_back, (a, delta, weight, True), test_utils=tests)
    torch.library.opcheck(
        operations.weight_gradients, (a, delta, [3, 3], [1, 1], [1, 1], True), test_utils=tests
    )  # fmt: skip
