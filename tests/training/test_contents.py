"""Digests of functions and values: everyday ways in which two of them differ."""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.util
import itertools
import math
import os
import random
import re
import sys
import textwrap
import types
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip.training.contents import NoDigest, contents
from fresh import fresh

SCALE = 2.0


def half(output, y):
    return F.cross_entropy(output, y, reduction="none") / 2


class Net(nn.Module):
    def __init__(self, factor) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def wraps_a_library(k):
    @functools.wraps(F.cross_entropy)
    def loss(output, y):
        return k * F.cross_entropy(output, y, reduction="none")

    return loss


class Scaled:
    """A decorated function, with the name of what it decorates."""

    def __init__(self, function, by) -> None:
        functools.update_wrapper(self, function)
        self.function, self.by = function, by

    def __call__(self, *given):
        return self.by * self.function(*given)


def weighted(output, y, a, b):
    return a * half(output, y) + b * output.square().sum(1)


def weighted_in_another_order(output, y, b, a):
    return b * half(output, y) + a * output.square().sum(1)


def module(**variables):
    """A module of the user's, which has no file here."""
    made = types.ModuleType("settings_of_mine")
    vars(made).update(variables)
    return made


def reads_scale(settings):
    return settings.SCALE


def with_globals(code, **variables):
    """Return the function `f` that this code defines, with these global variables."""
    variables = {"__name__": "mine", "reads_scale": reads_scale, "torch": torch, **variables}
    exec(textwrap.dedent(code), variables)
    return variables["f"]


def counting(start):
    count = start

    def loss(output, y):
        nonlocal count
        count += 1
        return half(output, y) * count

    return loss


def dispatched(k):
    @functools.singledispatch
    def loss(output, y):
        return half(output, y)

    @loss.register
    def _(output: torch.Tensor, y):
        return half(output, y) * k

    return loss


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by) -> None:
        self.by = by

    def __getstate__(self):
        return {}


class Forgetful:
    def __init__(self, by) -> None:
        self.by = by

    def __getstate__(self):
        return {}


class Meta(type):
    def __call__(cls, *given):
        return cls.by


class Set(set):
    pass


@dataclass
class Weights:
    by: float = field(compare=False, repr=False)


def decorated(k):
    """A function that a library wraps, in a module that holds it under its name."""
    made = module()
    made.__file__ = "made.py"
    exec(f"import torch\n@torch.no_grad()\ndef f(x): return x * {k}", vars(made))
    sys.modules[made.__name__] = made
    try:
        assert made.f.__module__ == made.__name__
        return contents(made.f)
    finally:
        del sys.modules[made.__name__]


def with_attribute(value, by):
    value.by = by
    return value


def with_metadata(k):
    @dataclass
    class Fields:
        by: float = field(default=1.0, metadata={"by": k})

    return Fields


def jumps(k):
    """Two functions with one bytecode, which differ in what their exception table covers."""
    if k == 1:

        def loss(x):
            try:
                a = half(x, x)
                b = half(a, a)
            except ValueError:
                b = 0
            return b

    else:

        def loss(x):
            try:
                a = half(x, x)
            except ValueError:
                b = 0
            else:
                b = half(a, a)
            return b

    return loss


def hooked(k):
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    net.weight.register_hook(lambda grad: grad * k)
    return net


def with_hooks(k):
    """Two hooks, of which the k-th gets the keyword arguments too."""
    net = nn.Identity()
    for i in (1, 2):
        net.register_forward_hook(lambda *given: None, with_kwargs=i == k)
    return net


def shares_memory(k):
    weight = torch.ones(2)
    return [weight, weight.detach() if k == 1 else weight.clone()]


def patched(k):
    """A class of a library, with a method put into it."""
    made = type("Made", (nn.ReLU,), {"__module__": "torch.nn", "__qualname__": "ReLU"})
    made.forward = lambda self, x: x * k
    return made()


class Array(np.ndarray):
    pass


class ConstantCopy:
    def __init__(self, by) -> None:
        self.by = by

    def __reduce__(self):
        return ConstantCopy, (0,)


def with_gradients(k):
    class Multiplied(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, gradient):
            return gradient * k

    return lambda x: Multiplied.apply(x)


def parametrised(k):
    layer = method_of_one(1)
    nn.utils.parametrize.register_parametrization(layer, "weight", Net(k))
    return layer


def method_of_one(k):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    layer.forward = types.MethodType(lambda self, x: x * k, layer)
    return layer


MADE = {
    "a function that wraps one of a library": wraps_a_library,
    "an object that wraps a function": lambda k: Scaled(half, k),
    "names of arguments": lambda k: partial(
        weighted if k == 1 else weighted_in_another_order, a=1.0, b=0.0
    ),
    "an exception table": jumps,
    "a module as attribute": lambda k: types.SimpleNamespace(settings=module(SCALE=k)),
    "a module as default": lambda k: with_globals(
        "def f(x, settings=settings): return settings.SCALE * x", settings=module(SCALE=k)
    ),
    "a module as argument": lambda k: with_globals(
        "def f(x): return reads_scale(settings) * x", settings=module(SCALE=k)
    ),
    "a module in a module": lambda k: with_globals(
        "def f(x): return reads_scale(settings.inner) * x",
        settings=module(inner=module(SCALE=k)),
    ),
    "an attribute of a module": lambda k: with_globals(
        "def f(x): return settings.inner.SCALE * x", settings=module(inner=module(SCALE=k))
    ),
    "an attribute by its name": lambda k: with_globals(
        "def f(x): return getattr(settings, 'SCALE') * x", settings=module(SCALE=k)
    ),
    "an attribute of a function": lambda k: with_attribute(lambda x: x, k),
    "an attribute of a parameter": lambda k: with_attribute(nn.Parameter(torch.ones(2)), k),
    "a metaclass": lambda k: (type if k == 1 else Meta)("Made", (), {"by": 1}),
    "the order of numbers in memory": lambda k: torch.ones(2, 3, 4, 4).to(
        memory_format=torch.contiguous_format if k == 1 else torch.channels_last
    ),
    "shared memory": shares_memory,
    "a slot": Slotted,
    "an attribute that no copy has": Forgetful,
    "a counter": counting,
    "a dispatched function": dispatched,
    "a field that is not compared": Weights,
    "metadata of a field": with_metadata,
    "a set with an attribute": lambda k: with_attribute(Set(), k),
    "a kind of set": lambda k: (set if k == 1 else frozenset)([1]),
    "numpy": lambda k: np.array([1.0, k]),
    "a view of numpy": lambda k: np.arange(6.0)[::k],
    "a lambda in a list": lambda k: [lambda x: x * k],
    "a lambda in a dictionary": lambda k: {"f": lambda x: x * k},
    "a partial method": lambda k: type(
        "Made", (), {"f": functools.partialmethod(lambda self, x, y: x, k)}
    ),
    "a property": lambda k: type("Made", (), {"by": property(lambda self: k)}),
    "a cache": lambda k: functools.lru_cache(lambda x: x * k),
    "a chain of iterators": lambda k: itertools.count(k),
    "a vectorised function": lambda k: np.vectorize(lambda x: x * k),
    "a mapped function": lambda k: torch.vmap(lambda x: x * k),
    "a function without gradients": lambda k: torch.no_grad()(lambda x: x * k),
    "a decorated function of a module": decorated,
    "a context": lambda k: contextlib.contextmanager(lambda: iter([k])),
    "a traced module": lambda k: torch.fx.symbolic_trace(Net(factor=k)),
    "a hook of a parameter": hooked,
    "hooks of a module": with_hooks,
    "a method put into a class of a library": patched,
    "an enumeration": lambda k: enum.Enum("Made", {"BY": k}).BY,
    "a named tuple": lambda k: collections.namedtuple("Made", "a")(k),
    "a default dictionary": lambda k: collections.defaultdict(lambda: k),
    "a class that a library made": lambda k: dataclasses.make_dataclass("Made", [("a", int, k)]),
    "gradients of its own": with_gradients,
    "a parametrised layer": parametrised,
    "a method of one object": method_of_one,
    "a pattern": lambda k: re.compile("a" * k),
    "an array with an attribute": lambda k: with_attribute(np.ones(2).view(Array), k),
    "a constant copy": ConstantCopy,
    "operators of torch": lambda k: with_globals(
        f"def f(x): return torch.ops.aten.{'relu' if k == 1 else 'gelu'}(x)"
    ),
    "two functions of torch": lambda k: [nn.Linear, torch.ao.nn.qat.Linear][k - 1],
    "a constant of a library": lambda k: with_globals(
        "def f(x): return x * math.pi", math=math if k == 1 else module(pi=3.0)
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_functions_that_differ_have_different_digests(name):
    make = MADE[name]
    assert contents(make(1)) == contents(make(1)), "a digest does not repeat"
    assert contents(make(1)) != contents(make(2))


def test_a_function_that_was_put_into_a_library_is_seen(monkeypatch):
    net, loss = nn.ReLU(), with_globals("def f(x): return F.relu(x)", F=F)
    before = contents(net), contents(loss)
    monkeypatch.setattr(F, "relu", lambda x: x * SCALE)
    assert contents(loss) != before[1]
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x * SCALE)
    assert contents(net) != before[0]


HIDDEN = {
    "environment": ("def f(x): return x * float(os.environ['BY'])", "environment variables"),
    "one variable": ("def f(x): return x * float(os.getenv('BY'))", "environment variables"),
    "imported variable": ("def f(x): return x * float(getenv('BY'))", "environment variables"),
    "imported environment": ("def f(x): return x * float(environ['BY'])", "environment variables"),
    "imported late": (
        "def f(x):\n    import os\n    return x * float(os.environ['BY'])",
        "environment variables",
    ),
    "Python's random numbers": ("def f(x): return x * random.random()", "random numbers"),
    "imported random numbers": ("def f(x): return x * uniform(0, 1)", "random numbers"),
    "numpy's random numbers": ("def f(x): return x * np.random.rand()", "random numbers"),
    "numpy's generators": ("def f(x): return np.random.default_rng()", "random numbers"),
    "evaluated text": ("def f(x): return eval('x * 2')", "calls eval"),
    "own operators": ("def f(x): return torch.ops.mine_of_test.double(x)", "cannot be seen"),
    "generator": ("def f(x): return next(generator)", "generator has no copy"),
    "file": ("def f(x): return file.read()", "has no copy"),
}


@torch.library.custom_op("mine_of_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def given_to_hidden(file):
    return {
        "os": os, "getenv": os.getenv, "environ": os.environ, "random": random, "np": np,
        "uniform": random.uniform, "generator": (i for i in range(3)), "file": file,
    }  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_what_cannot_be_seen_has_no_digest(name, tmp_path):
    code, why = HIDDEN[name]
    with (tmp_path / "file").open("w") as file, pytest.raises(NoDigest, match=why):
        contents(with_globals(code, **given_to_hidden(file)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, torch.compile])
def test_compiled_code_has_no_digest(make):
    with pytest.raises(NoDigest):
        contents(make(half))


# --- what is in a library -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["statistics", "profile", "torch", "numpy"])
def test_a_file_with_the_name_of_a_library_is_none(tmp_path, monkeypatch, name):
    """As `python train.py` finds it before the library, beside the program."""
    found, path = [], tmp_path / f"{name}.py"
    for scale in (1.0, 2.0):
        path.write_text(f"SCALE = {scale}\ndef loss(output, y): return output * SCALE\n")
        spec = importlib.util.spec_from_file_location(name, path)
        made = importlib.util.module_from_spec(spec)
        exec(path.read_text(), vars(made))  # no bytecode is kept
        monkeypatch.setitem(sys.modules, name, made)
        found.append(contents([made.loss, made]))
    assert found[0] != found[1]


def installed(folder, body, *, record=True, editable=False):
    """Install a package of one file, as pip does."""
    path = folder / ("source" if editable else "site") / "lossy.py"
    info = folder / "site" / "lossy-1.0.dist-info"
    for place in (path.parent, info):
        place.mkdir(parents=True, exist_ok=True)
    path.write_text(body)
    digest = base64.urlsafe_b64encode(hashlib.sha256(body.encode()).digest()).decode().rstrip("=")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lossy\nVersion: 1.0\n")
    if record:
        line = "" if editable else f"lossy.py,sha256={digest},{len(body)}\n"
        (info / "RECORD").write_text(line)
    return path


DIGEST = """
    import sys
    sys.path[:0] = sys.argv[1:]
    import lossy
    from evenclip.training.contents import contents
    print(contents(lossy.loss))
"""


@pytest.mark.parametrize("how", ["installed again", "changed in place", "editable", "no record"])
def test_a_package_that_changes_without_a_new_version_has_another_digest(tmp_path, how):
    def digest(body):
        path = installed(tmp_path, body, record=how != "no record", editable=how == "editable")
        if how == "changed in place":
            path.write_text(body + "SCALE = SCALE + 1\n")
        return fresh(textwrap.dedent(DIGEST), str(tmp_path / "site"), str(path.parent))

    body = "SCALE = {}\ndef loss(output, y): return output * SCALE\n"
    first, again, other = (digest(body.format(scale)) for scale in (1.0, 1.0, 2.5))
    assert first == again != other
