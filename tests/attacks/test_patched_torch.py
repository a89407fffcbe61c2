"""One seed, and torch itself computes something else.

A program changes torch between two runs from one seed: it puts one of torch's own functions in the
place of another, registers a hook for all modules, enters a mode, or registers an operator anew.
The model, the loss and all settings are the same objects. The attacker subtracts the first
gradients of both runs. If they had one noise, the result is the difference of two exact sums.

A run with a seed must have another key, or be refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import operator
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from evenclip import DPSGD, prepare
from evenclip.mechanism.grid import Grid
from evenclip.training import interventions, keys
from evenclip.training.contents import contents
from evenclip.training.patches import patches

RULE = DPSGD(C0=1.0, sigma=2.0)
B = 16


def prepared(seed=5):
    random = torch.Generator().manual_seed(0)
    data = torch.randn(40, 8, generator=random).double(), torch.arange(40) % 3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    settings = {"rule": RULE, "batch_size": B, "steps": 3, "delta": 1e-5, "seed": seed}
    return prepare(model, data, **settings)


def first_step(run):
    with run.listening():
        return run.step()


def distance(one, other):
    """Return how far the difference of two gradients is from that of their sums, in σ'√d."""
    size = len(one.clipped_sum)
    grid = Grid.of(1.0, RULE.sigma, size, 0.0)
    guess = B * (one.public.gradient - other.public.gradient)
    off = torch.linalg.vector_norm(guess - (one.clipped_sum - other.clipped_sum))
    return float(off) / (grid.std * math.sqrt(size)), grid


@contextlib.contextmanager
def put(owner, name, value):
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def put_code(function, code):
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before


@contextlib.contextmanager
def put_defaults(function, defaults):
    before, function.__defaults__ = function.__defaults__, defaults
    try:
        yield
    finally:
        function.__defaults__ = before


class Always:
    """A callable object of a program."""

    def __call__(self, x, inplace=False):
        return x.clamp(min=0.1)


def relu_of_a_program(input, inplace=False):
    return input * 1.5


@functools.lru_cache
def cached_relu(input, inplace=False):
    return input * 1.5


class Descriptor:
    def __get__(self, instance, owner=None):
        return torch.tanh


PATCHES = {
    "a method of another class": lambda: put(nn.ReLU, "forward", nn.Tanh.forward),
    "a method of its own base": lambda: put(nn.ReLU, "__call__", nn.Module.zero_grad),
    "another function of torch": lambda: put(F, "relu", F.silu),
    "its own name from another module": lambda: put(F, "relu", torch.relu),
    "a partial": lambda: put(F, "relu", functools.partial(F.leaky_relu, negative_slope=0.3)),
    "another function made around others": lambda: put(F, "max_pool2d", F.max_pool1d),
    "a cached function": lambda: put(F, "relu", cached_relu),
    "an object of the standard library": lambda: put(F, "relu", operator.methodcaller("sigmoid")),
    "a callable object": lambda: put(F, "relu", Always()),
    "a module": lambda: put(F, "relu", nn.Tanh()),
    "a function of a program": lambda: put(F, "relu", relu_of_a_program),
    "a wrapper of torch": lambda: put(nn.ReLU, "forward", torch.no_grad()(nn.ReLU.forward)),
    "a static method": lambda: put(nn.ReLU, "forward", staticmethod(F.relu)),
    "a property": lambda: put(nn.ReLU, "inplace", property(relu_of_a_program)),
    "a descriptor": lambda: put(nn.ReLU, "forward", Descriptor()),
    "another operator": lambda: put(torch._C._nn, "linear", torch._C._nn.gelu),
    "a function that modules import": lambda: put(
        nn.modules.activation, "_is_make_fx_tracing", F.relu
    ),
    "a class": lambda: put(nn, "ReLU", nn.Tanh),
    "other code": lambda: put_code(F.relu, relu_of_a_program.__code__),
    "other code of torch": lambda: put_code(F.relu, F.silu.__code__),
    "other defaults": lambda: put_defaults(F.relu, (True,)),
    "a constant of a class": lambda: put(nn.ReLU, "slope", 0.5),
}


@pytest.mark.parametrize("name", PATCHES)
def test_what_is_put_into_torch_changes_the_digest(name):
    before = contents(patches())
    with PATCHES[name]():
        assert contents(patches()) != before
    assert contents(patches()) == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (functools.partial(F.elu, alpha=0.3), functools.partial(F.elu, alpha=0.2)),
        (nn.ELU(0.3), nn.ELU(0.2)),
        (operator.methodcaller("sigmoid"), operator.methodcaller("tanh")),
        (torch.no_grad()(relu_of_a_program), torch.no_grad()(F.silu)),
    ],
    ids=["partials", "modules", "objects of the standard library", "wrappers of torch"],
)
def test_what_two_objects_call_is_in_their_digests(one, other):
    digests = []
    for value in (one, other):
        with put(F, "relu", value):
            digests.append(contents(patches()))
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    "name", ["a method of another class", "another function of torch", "a partial"]
)
def test_a_run_with_patched_torch_has_another_key_and_other_noise(name):
    plain = prepared()
    one = first_step(plain)
    with PATCHES[name]():
        run = prepared()
        other = first_step(run)
    assert run.run_id != plain.run_id
    assert not torch.allclose(one.clipped_sum, other.clipped_sum)
    assert distance(one, other)[0] > math.sqrt(2) / 4


@pytest.mark.parametrize("name", ["a method of another class", "another function of torch"])
def test_a_patch_after_prepare_is_found(name):
    run = prepared()
    with PATCHES[name](), pytest.raises(RuntimeError, match="functions of torch"):
        first_step(run)
    assert run.ledger.steps == 0


@pytest.mark.parametrize("name", ["a method of another class", "another function of torch"])
def test_the_attack_wins_where_only_functions_of_a_program_are_seen(name, monkeypatch):
    """Plant the digest of functions that are of no library."""
    monkeypatch.setattr(keys, "patches", dict)
    monkeypatch.setattr("evenclip.training.unchanged.patches", dict)
    monkeypatch.setattr("evenclip.training.contents.foreign", lambda owner: ())
    one = first_step(prepared())
    with PATCHES[name]():
        other = first_step(prepared())
    off, grid = distance(one, other)
    assert off <= grid.coarse / grid.std


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_what_torch_itself_changes_is_no_patch():
    """Its compiler and its optimizers put wrappers around functions when they start."""
    before = contents(patches())
    torch.optim.Adam([torch.ones(2, requires_grad=True)]).step()
    importlib.import_module("torch._inductor.compile_fx")
    importlib.import_module("torch._dynamo.eval_frame").TorchPatcher.patch()
    importlib.import_module("torch._dynamo.mutation_guard").install_generation_tagging_init()
    assert contents(patches()) == before


# --- what acts in every computation -------------------------------------------------------------


@contextlib.contextmanager
def hooked(register, hook):
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, kinds, given=(), named=None):
        return function(*given, **(named or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, kinds, given=(), named=None):
        return function(*given, **(named or {}))


@contextlib.contextmanager
def registered():
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("relu", lambda x: torch.ops.aten.clamp(x, min=0.0) * 1.5, "CPU")
    try:
        yield
    finally:
        library._destroy()


MODULES = nn.modules.module
ACTIVE = {
    "a hook of torch.nn.modules.module.register_module_forward_hook": lambda: hooked(
        MODULES.register_module_forward_hook, lambda module, given, output: None
    ),
    "a hook of torch.nn.modules.module.register_module_forward_pre_hook": lambda: hooked(
        MODULES.register_module_forward_pre_hook, lambda module, given: None
    ),
    "a hook of torch.nn.modules.module.register_module_full_backward_hook": lambda: hooked(
        MODULES.register_module_full_backward_hook, lambda module, given, output: None
    ),
    "a hook of torch.optim.optimizer.register_optimizer_step_pre_hook": lambda: hooked(
        interventions._OPTIMIZERS.register_optimizer_step_pre_hook, lambda *given: None
    ),
    "the mode Functions is active": Functions,
    "the mode Dispatch is active": Dispatch,
    "saved_tensors_hooks are active": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x
    ),
    "the operator aten::relu was registered anew for CPU (torch.library)": registered,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_what_acts_in_every_computation_is_refused_with_a_seed(name):
    run = prepared()
    with ACTIVE[name]():
        with pytest.raises(ValueError, match="leave seed out") as caught:
            prepared()
        with pytest.raises(ValueError, match="With a seed, the noise is a function of all"):
            first_step(run)
    message = str(caught.value)
    assert message.startswith(
        f"With a seed, the noise is a function of all that is computed with, and {name}"
    )
    assert message.endswith("; remove or leave it before prepare() or fit(), or leave seed out.")
    assert run.ledger.steps == 0
    first_step(run)


@pytest.mark.parametrize("mode", [Functions, Dispatch])
def test_a_mode_inside_the_loop_is_refused(mode):
    run = prepared()
    with run.listening(), mode(), pytest.raises(ValueError, match=f"the mode {mode.__name__} is"):
        run.step()
    assert run.ledger.steps == 0


def test_without_a_seed_hooks_and_modes_are_allowed():
    for name in ("a hook of torch.nn.modules.module.register_module_forward_hook",
                 "the mode Functions is active"):  # fmt: skip
        with ACTIVE[name]():
            first_step(prepared(seed=None))


def test_a_default_device_is_no_mode():
    with torch.device("cpu"):
        first_step(prepared())


def test_the_attack_wins_against_a_key_without_hooks(monkeypatch):
    for place in ("keys", "unchanged"):
        monkeypatch.setattr(f"evenclip.training.{place}.check_interventions", lambda: None)
    one = first_step(prepared())
    with hooked(
        MODULES.register_module_forward_hook,
        lambda module, given, output: output * 1.5 if isinstance(module, nn.Linear) else None,
    ):
        other = first_step(prepared())
    assert not torch.allclose(one.clipped_sum, other.clipped_sum)
    off, grid = distance(one, other)
    assert off <= grid.coarse / grid.std


# --- libraries other than torch ------------------------------------------------------------------


def test_a_method_of_another_class_changes_the_digest_of_a_librarys_class():
    kind, other = torch.utils.data.TensorDataset, torch.utils.data.Subset
    plain = contents(kind)
    with put(kind, "__len__", other.__len__):
        assert contents(kind) != plain
    with put(kind, "__len__", functools.partial(len, "abc")):
        assert contents(kind) != plain
    assert contents(kind) == plain
