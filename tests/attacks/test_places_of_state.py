"""The attacker reads records from where the comparison of a model's state did not look.

A record can be kept in any object of Python, in a variable of a module, a class or a closure, or in
a tensor through `tensor.data`, which torch does not count as a change. It leaves with the model, or
moves what later samples and later steps compute.

Everything that the code of a model and of a loss can reach is put back after a pass, and before the
next one of the same step; tensors that have changed are refused by name. The comparison of
attributes alone is planted.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import functools
import io
import sys
import types

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evenclip
from evenclip import DPSGD, fit
from evenclip.gradients import ModelError, bits, places, plan, state
from evenclip.gradients.place import Place
from evenclip.gradients.tape import WholeTape
from evenclip.training import guard

D, CLASSES, N = 4, 3, 24


class Own(nn.Module):
    """A model with something between its layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.last(self.between(self.first(x), x))


class Slotted:
    __slots__ = ("kept",)


class Keeps(nn.Module):
    def forward(self, x):
        self.kept = x.detach()
        return x


BANK, LAST = [], None
CONTEXT = contextvars.ContextVar("calls", default=0)
sys.modules["kept_rows"] = types.ModuleType("kept_rows")  # a module of the user
sys.modules["kept_rows"].last = 0.0


class InObjects(Own):
    """Keeps records in objects that its attributes hold."""

    def __init__(self):
        super().__init__()
        self.queue, self.slotted, self.hidden = collections.deque(maxlen=3), Slotted(), [Keeps()]
        self.nested, self.bytes, self.counts = {"rows": [[]]}, bytearray(), collections.Counter()
        self.partly = functools.partial(list.append, [])

    def between(self, h, x):
        self.queue.append(x.detach())
        self.slotted.kept = x.detach()
        self.nested["rows"][0].append(x.detach())
        self.bytes.extend(b"1")
        self.counts["calls"] += 1
        self.partly(x.detach())
        self.first.weight.kept = x.detach()
        return self.hidden[0](h)

    def kept(self):
        rows = [self.queue, self.nested["rows"][0], self.bytes, self.counts, self.partly.args[0]]
        attributes = vars(self.first.weight), vars(self.hidden[0])
        return (
            sum(map(len, rows))
            + sum("kept" in a for a in attributes)
            + hasattr(self.slotted, "kept")
        )


class InHooks(Own):
    """Registers a hook that holds its first batch."""

    def between(self, h, x):
        if not self.first._forward_hooks:
            kept = x.detach()
            self.first.register_forward_hook(lambda module, given, output: output + 0 * kept.sum())
        return h

    def kept(self):
        return len(self.first._forward_hooks)


class InCode(Own):
    """Keeps records in variables of its module and its class, in defaults and in a cache."""

    bank = []  # noqa: RUF012  # the attack

    @functools.lru_cache(maxsize=9)  # noqa: B019  # the attack
    def remembered(self, x):
        return x.detach().clone()

    def between(self, h, x, rows=[]):  # noqa: B006  # the attack
        global LAST
        LAST = x.detach()
        BANK.append(x.detach())
        type(self).bank.append(x.detach())
        rows.append(x.detach())
        self.remembered(x)
        return h

    def kept(self):
        rows = len(BANK) + len(InCode.bank) + len(InCode.between.__defaults__[0])
        return rows + InCode.remembered.cache_info().currsize + (LAST is not None)


def in_a_closure():
    """Keeps records in a variable of the function around it."""
    rows, calls = [], 0

    class InClosure(Own):
        def between(self, h, x):
            nonlocal calls
            calls += 1
            rows.append(x.detach())
            return h

        def kept(self):
            return len(rows) + calls

    return InClosure()


class InMemory(Own):
    """Keeps numbers of the records in memory that is no list."""

    def __init__(self):
        super().__init__()
        self.numbers, self.c = array.array("d", [0.0]), (ctypes.c_double * 1)()
        self.parts, self.file = np.array([0.0, None], dtype=object), io.BytesIO()

    def between(self, h, x):
        self.numbers[0] += len(x)
        self.c[0] += len(x)
        self.parts[0] += len(x)
        self.file.write(b"1")
        return h

    def kept(self):
        return self.numbers[0] + self.c[0] + self.parts[0] + len(self.file.getvalue())


class Marks(type):
    """A class of classes, with an attribute."""

    calls = 0


class InClasses(Own, metaclass=Marks):
    """Keeps records in what Python gives to every class and function, and in its own methods."""

    __calls__ = 0

    def between(self, h, x, calls=0):
        kind = type(self)
        kind.__calls__ += 1
        type(kind).calls += 1
        kind.between.__defaults__ = (calls + 1,)
        kind.kept.__annotations__["calls"] = calls + 1
        self.forward = functools.partial(Own.forward, self)
        self.__class__ = type("Called", (InClasses,), {})
        return h

    def kept(self):
        own = InClasses.__calls__ + Marks.calls + InClasses.between.__defaults__[0]
        is_marked = bool(InClasses.kept.__annotations__) or "forward" in vars(self)
        return own + is_marked + (type(self) is not InClasses)

    @staticmethod
    def reset():
        InClasses.__calls__ = Marks.calls = 0
        InClasses.between.__defaults__ = (0,)
        InClasses.kept.__annotations__.clear()


class InOtherModules(Own):
    """Keeps records in a variable of another module, imported here, and in a context variable."""

    def between(self, h, x):
        import kept_rows

        kept_rows.last = max(kept_rows.last, float(x.detach().abs().max()))
        CONTEXT.set(CONTEXT.get() + 1)
        return h

    def kept(self):
        return sys.modules["kept_rows"].last + CONTEXT.get()


class InOrder(Own):
    """Keeps records in arrays whose numbers are not in the order of C, and in ordered dicts."""

    def __init__(self):
        super().__init__()
        self.turned = np.zeros((2, 3)).T
        self.sizes = collections.OrderedDict()

    def between(self, h, x):
        self.turned[0] += len(x)
        self.sizes[len(self.sizes)] = len(x)
        return h

    def kept(self):
        return float(abs(self.turned).sum()) + len(self.sizes)


class OnTensors(Own):
    """Keeps records in the gradient of a frozen parameter, and in hooks of a trained one."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def between(self, h, x):
        self.frozen.grad = torch.ones(1)
        if self.last.weight.requires_grad:
            self.last.weight.register_hook(lambda gradient: None)
        return h

    def kept(self):
        return len(self.last.weight._backward_hooks or ()) + (self.frozen.grad is not None)


class ByData(Own):
    """Keeps a mean of the records in a buffer, without a change that torch counts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))

    def between(self, h, x):
        self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return h


class ByAssignment(ByData):
    def between(self, h, x):
        self.mean.data = 0.9 * self.mean.data + 0.1 * x.detach().mean(0)
        return h


class ByNumpy(ByData):
    def between(self, h, x):
        self.mean.numpy()[:] += float(x.detach().abs().sum())
        return h


class Initialised(Own):
    """Sets its trainable scale from its batch, as ActNorm does."""

    def __init__(self):
        super().__init__()
        self.mean, self.is_set = nn.Parameter(torch.ones(D)), False

    def between(self, h, x):
        if not self.is_set:
            self.is_set = True
            self.mean.data.copy_(1 / (x.detach().std() + 1))
        return h * self.mean


class InSeries(Own):
    def __init__(self):
        super().__init__()
        self.mean = pd.Series([0.0])

    def between(self, h, x):
        self.mean.iloc[0] += len(x)
        return h


class InArray(Own):
    def __init__(self):
        super().__init__()
        self.mean = np.zeros(1)  # its place is not put back, as that of other tensors

    def between(self, h, x):
        self.mean[0] += len(x)
        return h


@pytest.fixture
def data():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=random)
    return x, torch.randint(CLASSES, (N,), generator=random)


def settings():
    return {"rule": DPSGD(), "batch_size": 8, "steps": 4, "delta": 1e-3, "lr": 0.01}


WAYS = pytest.mark.parametrize("independence", [None, "tested"], ids=str)
KEEPING = [
    InObjects, InHooks, InCode, in_a_closure, InMemory, InClasses, InOtherModules, InOrder,
    OnTensors,
]  # fmt: skip


@WAYS
@pytest.mark.parametrize("make", KEEPING)
def test_what_a_pass_keeps_is_put_back(make, independence, data):
    model = fit(make(), data, **settings(), independence=independence).model
    assert model.kept() == 0


@WAYS
@pytest.mark.parametrize("make", [ByData, ByAssignment, ByNumpy, Initialised, InArray, InSeries])
def test_a_tensor_that_changes_without_a_count_is_refused_by_name(make, independence, data):
    with pytest.raises(ModelError, match=r"^A pass through the model changes .*'mean'"):
        fit(make(), data, **settings(), independence=independence)


@pytest.mark.parametrize("make", KEEPING)
def test_planning_and_norms_leave_nothing_either(make, data):
    model = make()
    evenclip.per_sample_norms(model, F.cross_entropy, *data)
    assert model.kept() == 0


def test_a_loss_that_is_a_function_keeps_nothing(data):
    rows = []

    def loss(output, y):
        rows.append(output.detach())
        return F.cross_entropy(output, y, reduction="none")

    model = nn.Sequential(nn.Linear(D, CLASSES), nn.Tanh())
    fit(model, data, loss=loss, **settings())
    assert rows == []


def test_a_program_may_change_its_variables_between_steps(data):
    rate, seen = {"value": 1.0}, []

    def loss(output, y):
        return rate["value"] * F.cross_entropy(output, y, reduction="none")

    def observe(step):
        seen.append(rate["value"])
        rate["value"] /= 2

    fit(nn.Linear(D, CLASSES), data, loss=loss, observers=[observe], **settings())
    assert seen == [1.0, 0.5, 0.25, 0.125]


class Peak(Own):
    """Divides by the largest number that it has met; only a loop over samples can pass through."""

    def __init__(self):
        super().__init__()
        self.peak = 10.0

    def between(self, h, x):
        self.peak = max(self.peak, float(x.detach().abs().max()))
        return F.linear(h, self.last.weight.t() @ self.last.weight) / self.peak


def moved(data, *, compared):
    """Return how far one record in front moves the sum of all clipped gradients, in S."""
    torch.manual_seed(0)
    model, (x, y) = Peak(), data
    tape = plan(model, F.cross_entropy, x, y)
    assert isinstance(tape, WholeTape)
    if compared:
        tape.between = state.ModelState(model).put_back
    sums = []
    for front in (0, 1):
        model.peak = 10.0
        given = torch.cat([torch.full((front, D), 2e3), x]), torch.cat([y[:front], y])
        gradients = tape(*given)
        sums.append(gradients.weighted_sum((0.01 / gradients.norms()).clamp(max=1.0)))
    return float((sums[1] - sums[0]).norm()) / 0.01


def test_a_sample_leaves_nothing_for_the_next_one_of_its_batch(data):
    assert moved(data, compared=True) <= 1 + 1e-6


def test_the_attack_wins_where_state_is_put_back_once_a_step(data):
    assert moved(data, compared=False) > 1.5


@pytest.mark.parametrize("make", KEEPING)
def test_the_attack_wins_where_places_are_not_followed(make, data, monkeypatch):
    monkeypatch.setattr(places, "_places", lambda name, value: iter(()))
    monkeypatch.setattr(places.Places, "_add_code", lambda *given: None)
    for name in ("forwards", "marks"):
        monkeypatch.setattr(state, name, lambda values, **more: Place("nothing", tuple))
    model = fit(make(), data, **settings(), independence="tested").model
    assert model.kept() > 0
    for rows in (BANK, InCode.bank, InCode.between.__defaults__[0]):
        rows.clear()
    InCode.remembered.cache_clear()
    InClasses.reset()
    sys.modules["kept_rows"].last = 0.0
    CONTEXT.set(0)
    monkeypatch.setattr(sys.modules[__name__], "LAST", None)


def test_the_attack_wins_where_bits_are_not_compared(data, monkeypatch):
    for module in (state, guard):
        monkeypatch.setattr(module, "sums", lambda tensors: [None for _ in tensors])
    model = fit(ByData(), data, **settings(), independence="tested").model
    assert model.mean.abs().max() > 0


def test_sums_show_every_changed_word():
    random = torch.Generator().manual_seed(0)
    for size in (1, 7, 1024 * 2, 8 * 1024 * 3 + 5):
        tensor = torch.randn(size, generator=random)
        for place in {0, size // 2, size - 1}:
            other = tensor.clone()
            other[place] = torch.nextafter(other[place], torch.tensor(9.0))
            assert bits.sums([tensor]) != bits.sums([other])
        assert bits.sums([tensor]) == bits.sums([tensor.clone()])
        assert bits.sums([torch.cat([torch.zeros(1), tensor])[1:]]) == bits.sums([tensor])
    sparse = torch.eye(3).to_sparse()
    before = bits.sums([sparse])
    assert before != [None]
    sparse._values().data[1] = 2.0
    assert bits.sums([sparse])[0] != before[0]
