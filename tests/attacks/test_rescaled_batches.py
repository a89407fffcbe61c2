"""The attacker's record rescales the whole batch below the mapping over samples.

A tensor of another class than torch's own, as libraries for quantisation have them, and a dispatch
mode get the tensors of all samples, although the model's pass is mapped. With a scale that follows
the largest number of a call, one outlier changes what everybody computes; on ordinary numbers the
scale is 1, so that no test before training sees it. Such a model is tested only, and a batch of
records stops it. The old gates, which looked at names of operators and classes of modules, are
planted.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from evenclip import DPSGD, fit
from evenclip.gradients import ModelError, foreign, known_layers, plan
from evenclip.gradients.tape import Independence

D, CLASSES, N, MOST = 4, 3, 33, 448.0
aten = torch.ops.aten
VIEWS = (
    aten.alias.default, aten.clone.default, aten.detach.default, aten.permute.default,
    aten.t.default, aten.transpose.int, aten._to_copy.default, aten.view.default,
)  # fmt: skip


class Scaled(torch.Tensor):
    """A frozen weight; products with it scale the other factor by its largest number."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, plain):
        return torch.Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)

    def __init__(self, plain):
        self.plain = plain

    def __deepcopy__(self, memo):
        return Scaled(self.plain.clone())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        given = tree_map(lambda t: t.plain if isinstance(t, Scaled) else t, (args, kwargs or {}))
        plain, more = given
        if func in (aten.mm.default, aten.addmm.default, aten.bmm.default):
            first = -2
            scale = (plain[first].abs().amax() / MOST).clamp(min=1.0)
            plain = (*plain[:first], plain[first] / scale, *plain[first + 1 :])
            return func(*plain, **more)
        result = func(*plain, **more)
        return Scaled(result) if isinstance(args[0], Scaled) and func in VIEWS else result


class Scaling(TorchDispatchMode):
    """Scales what tanh returns by the largest number that it is given."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is aten.tanh.default:
            result = result / (args[0].abs().amax() / MOST).clamp(min=1.0)
        return result


class OfAttributes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Scaled(torch.randn(8, D)), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(x @ self.body.t()))


class InAMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(D, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        h = self.body(x)
        with Scaling():
            h = torch.tanh(h)
        return self.head(h)


def sequence():
    return nn.Sequential(nn.Linear(D, 8, bias=False), nn.Tanh(), nn.Linear(8, CLASSES))


def of_parameters():
    model = sequence()
    model[0].weight = nn.Parameter(Scaled(model[0].weight.detach().clone()), requires_grad=False)
    return model


def of_a_call():
    """Something that is called in the place of a layer, as some tracers do."""
    model = sequence()
    own = type(model[1])._call_impl

    def call(x):
        return own(model[1], x) / (x.abs().amax() / MOST).clamp(min=1.0)

    vars(model[1])["_call_impl"] = call
    return model


@pytest.fixture
def data():
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, D, generator=random), torch.arange(N) % CLASSES
    return x, y


MAKES = {"parameters": of_parameters, "attributes": OfAttributes, "a mode": InAMode}


@pytest.mark.parametrize("name", MAKES)
def test_what_sees_all_samples_below_the_mapping_is_tested_only(name, data):
    torch.manual_seed(0)
    tape = plan(MAKES[name](), F.cross_entropy, *data)
    assert tape.independence is Independence.TESTED
    expected = "the dispatch mode Scaling" if name == "a mode" else "its tensor of the class Scaled"
    assert expected.lower() in tape.why_at_once.lower()


@pytest.mark.parametrize("name", MAKES)
def test_an_outlier_in_a_batch_stops_the_training(name, data):
    data[0][-1] = 2e5
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="showed on a batch of records only"):
        fit(MAKES[name](), data, rule=DPSGD(), batch_size=N, q=1.0, steps=1, delta=1e-3)


def test_a_call_that_is_set_on_a_layer_is_no_known_layer(data):
    assert not known_layers.independent_by_layers(of_a_call(), F.cross_entropy, *data)
    assert known_layers.independent_by_layers(sequence(), F.cross_entropy, *data)


def moved(tape, data):
    """How far an outlier moves the sum of clipped gradients, in units of the bound."""
    sums = []
    for x in (data[0][:-1], data[0]):
        with tape.recording():
            gradients = tape(x, data[1][: len(x)])
        sums.append(gradients.weighted_sum((0.05 / gradients.norms()).clamp(max=1.0)))
    return float((sums[1] - sums[0]).norm()) / 0.05


@pytest.mark.parametrize("name", MAKES)
def test_the_attack_wins_against_gates_that_look_at_names(name, data, monkeypatch):
    data[0][-1] = 2e5
    for module in (foreign, known_layers):
        monkeypatch.setattr(module, "is_plain_tensor", lambda value: True)
    monkeypatch.setattr(foreign, "TorchDispatchMode", type("Another", (), {"__enter__": None}))
    torch.manual_seed(0)
    tape = plan(MAKES[name](), F.cross_entropy, data[0][:-1], data[1][:-1])
    assert tape.independence is not Independence.TESTED
    assert moved(tape, data) > 1.5
