"""A key from a seed depends on all that a sum depends on; where it cannot, it is refused."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from evenclip import DPSGD, DPSGDF, Performance, prepare
from evenclip.data import Dataset, MapDataset
from evenclip.training import code, keys, machine
from evenclip.training.contents import NoDigest, contents

# --- runs ---------------------------------------------------------------------------------------


def given(**more):
    return {"rule": DPSGD(), "batch_size": 8, "steps": 3, "lr": 0.1, "seed": 5, **more}


def half(output, y):
    return F.cross_entropy(output, y, reduction="none") / 2


def third(output, y):
    return F.cross_entropy(output, y, reduction="none") / 3


class Net(nn.Module):
    """A network whose activation is an attribute, and a factor that is in no state dict."""

    def __init__(self, activation=torch.tanh, factor=1.0) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 6).double(), nn.Linear(6, 3).double()
        self.activation, self.factor = activation, factor
        self.register_buffer("shift", torch.zeros(1, dtype=torch.float64), persistent=False)
        with torch.no_grad():
            for p in self.parameters():
                p.fill_(0.1)

    def forward(self, x):
        return self.two(self.activation(self.one(x))) * self.factor + self.shift


def shifted():
    net = Net()
    net.shift += 1e-9
    return net


MODELS = {
    "tanh": Net,
    "sigmoid": lambda: Net(torch.sigmoid),
    "a lambda": lambda: Net(lambda x: x.clamp(min=0)),
    "another lambda": lambda: Net(lambda x: x.clamp(min=0.5)),
    "a closure": lambda: Net(clamped(0.0)),
    "another closure": lambda: Net(clamped(0.5)),
    "a factor": lambda: Net(factor=2.0),
    "a buffer": shifted,
    "dropout": lambda: nn.Sequential(Net(), nn.Dropout(0.1)),
    "more dropout": lambda: nn.Sequential(Net(), nn.Dropout(0.2)),
    "frozen": lambda: frozen(Net()),
}


def clamped(least):
    return lambda x: x.clamp(min=least)


def frozen(net):
    net.one.bias.requires_grad_(False)
    return net


OTHERS = {
    "nothing": {},
    "loss": {"loss": half},
    "another loss": {"loss": third},
    "loss by a lambda": {"loss": lambda output, y: half(output, y) * 2},
    "label smoothing": {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
    "optimizer": {"optimizer": Adam},
    "momentum": {"optimizer": partial(SGD, momentum=0.9)},
    "schedule": {"scheduler": partial(StepLR, step_size=1)},
    "another schedule": {"scheduler": partial(StepLR, step_size=2)},
    "learning rate": {"lr": 0.2},
    "rule": {"rule": DPSGDF()},
    "constant of the rule": {"rule": DPSGD(C0=0.9)},
    "steps": {"steps": 4},
    "seed": {"seed": 6},
    "chunks": {"performance": Performance(chunk=3)},
    "TF32": {"performance": Performance(tf32=True)},
    "compiled": {"performance": Performance(compile=True)},
}


def all_runs(toy):
    """Prepare a run of every kind; return them by name."""
    runs = {name: prepare(toy.mlp(), toy.data(), **given(**more)) for name, more in OTHERS.items()}
    return runs | {
        f"model: {name}": prepare(make(), toy.data(), **given()) for name, make in MODELS.items()
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_equal_runs_have_one_key_and_others_have_their_own(toy):
    runs, found = all_runs(toy), {}
    for name, run in runs.items():
        assert run.key not in found, f"{name} has the key of {found[run.key]}"
        assert run.run_id not in [other.run_id for other in runs.values() if other is not run]
        found[run.key] = name
    for name, again in all_runs(toy).items():
        assert again.key == runs[name].key, name


@pytest.mark.parametrize("column", ["x", "y", "group"])
def test_one_bit_of_one_record_changes_the_key(toy, column):
    x, y, group = toy.data()
    data = Dataset(x, y, group, ("a", "b", "c"))
    changed = getattr(data, column).clone()
    if column == "x":
        changed.view(torch.int64)[-1, -1] ^= 1  # the last bit of the last number
    else:
        changed[-1] = (changed[-1] + 1) % 3
    keys = {
        prepare(toy.mlp(), one, **given()).key
        for one in (data, replace(data, **{column: changed}))
    }  # fmt: skip
    assert len(keys) == 2


@pytest.mark.parametrize("what", ["threads", "torch", "processor", "model", "build", "evenclip"])
def test_the_machine_and_the_code_change_the_key(toy, monkeypatch, what):
    before = prepare(toy.mlp(), toy.data(), **given()).key
    if what == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    if what == "processor":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX1024")
    if what == "model":
        monkeypatch.setattr(machine, "_processor", lambda: "model 7")
    if what == "build":
        monkeypatch.setattr(machine, "_libraries", lambda: "BLAS_INFO=other")
    if what == "evenclip":
        monkeypatch.setattr(keys, "sources", lambda: "other")
    assert prepare(toy.mlp(), toy.data(), **given()).key != before


@pytest.mark.parametrize("place", [F, torch.Tensor, nn.Tanh])
def test_a_function_that_was_put_into_torch_changes_the_key(toy, monkeypatch, place):
    """Modules of torch would call it."""
    before = prepare(toy.mlp(), toy.data(), **given()).key
    name = {F: "linear", torch.Tensor: "tile", nn.Tanh: "forward"}[place]
    ours = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *given: ours(*given))
    assert prepare(toy.mlp(), toy.data(), **given()).key != before


def flushing(on):
    torch.set_flush_denormal(on)


def less_precise(on):
    torch.set_float32_matmul_precision("medium" if on else "highest")


def without_mkldnn(on):
    torch.backends.mkldnn.set_flags(not on)


def repeatable(on):
    torch.use_deterministic_algorithms(on)


def doubled(on):
    torch.set_default_dtype(torch.float64 if on else torch.float32)


@pytest.mark.parametrize(
    "switch", [flushing, less_precise, without_mkldnn, repeatable, doubled]
)  # fmt: skip
def test_a_switch_of_torch_changes_the_key(toy, switch):
    switch(False)
    before = prepare(toy.mlp(), toy.data(), **given()).key
    try:
        switch(True)
        assert prepare(toy.mlp(), toy.data(), **given()).key != before
    finally:
        switch(False)
    assert prepare(toy.mlp(), toy.data(), **given()).key == before


def test_a_variable_that_libraries_read_changes_the_key(toy, monkeypatch):
    before = prepare(toy.mlp(), toy.data(), **given()).key
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert prepare(toy.mlp(), toy.data(), **given()).key != before


def test_what_changes_no_sum_changes_no_key(toy):
    before = prepare(toy.mlp(), toy.data(), **given()).key
    assert prepare(toy.mlp(), toy.data(), **given(performance=Performance(readers=2))).key == before
    state = torch.random.get_rng_state()
    torch.manual_seed(3)
    assert prepare(toy.mlp(), toy.data(), **given()).key == before
    torch.random.set_rng_state(state)


def test_without_a_seed_every_key_is_new(toy):
    assert len({prepare(toy.mlp(), toy.data(), **given(seed=None)).key for _ in range(5)}) == 5


def test_every_source_that_computes_is_in_the_digest(tmp_path, monkeypatch):
    """A byte in any file, or its name; the command line computes nothing."""
    package = tmp_path / "evenclip"
    (package / "training").mkdir(parents=True)
    (package / "cli").mkdir()
    file, other = package / "training" / "step.py", package / "cli" / "train.py"
    file.write_text("a = 1\n")
    other.write_text("a = 1\n")
    monkeypatch.setattr(code, "__file__", str(package / "training" / "code.py"))
    digest = code.sources.__wrapped__
    before = digest()
    other.write_text("a = 2\n")
    assert digest() == before
    file.write_text("a = 2\n")
    assert digest() != before
    file.write_text("a = 1\n")
    assert digest() == before
    file.rename(package / "training" / "steps.py")
    assert digest() != before


# --- refusals -----------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    def __init__(self, columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, i):
        return tuple(column[i] for column in self.columns)


def test_a_seed_is_refused_for_data_that_are_never_read_as_a_whole(toy):
    data = MapDataset(Rows(toy.data()), ("a", "b", "c"))
    with pytest.raises(ValueError, match="seed") as caught:
        prepare(toy.mlp(), data, **given())
    assert str(caught.value) == (
        "With a seed, the noise is a function of all records, and data that are read item by item "
        "are never read as a whole; leave seed out, or give the data as arrays, as a Dataset or by "
        "evenclip.data.parquet."
    )
    prepare(toy.mlp(), data, **given(seed=None))


class Augmented(Dataset):
    """Data that are trained on otherwise than they are held."""

    def take(self, indices):
        rows = super().take(indices)
        return rows._replace(x=rows.x * 2)


class Halved(torch.Tensor):
    """A tensor that is something else where its rows are read."""

    def index_select(self, *given):
        return torch.Tensor.index_select(self.as_subclass(torch.Tensor) / 2, *given)


@pytest.mark.parametrize("kind", ["Augmented", "Halved"])
def test_a_seed_is_refused_for_data_that_change_their_rows(toy, kind):
    x, y, group = toy.data()
    names = ("a", "b", "c")
    own = {
        "Augmented": Augmented(x, y, group, names),
        "Halved": Dataset(x.as_subclass(Halved), y, group, names),
    }
    with pytest.raises(ValueError, match="seed") as caught:
        prepare(toy.mlp(), own[kind], **given())
    assert str(caught.value) == (
        f"With a seed, the noise is a function of all records, and the class {kind} of your own "
        "may change them when they are read; leave seed out, or give the records as they are "
        "trained on, as arrays or as a Dataset."
    )
    prepare(toy.mlp(), own["Augmented"], **given(seed=None))


LOCK = threading.Lock()


def locked(output, y):
    with LOCK:
        return half(output, y)


def imports(output, y):
    import tasks_of_a_user  # noqa: F401

    return half(output, y)


def test_a_seed_is_refused_where_there_is_no_digest(toy):
    with pytest.raises(ValueError, match="seed") as caught:
        prepare(toy.mlp(), toy.data(), **given(loss=locked))
    assert str(caught.value) == (
        "With a seed, the noise is a function of the loss's code and values, and lock has no copy "
        "(cannot pickle '_thread.lock' object); leave seed out, or give a loss of Python functions "
        "and plain values."
    )
    prepare(toy.mlp(), toy.data(), **given(loss=locked, seed=None))


def test_a_module_that_is_imported_later_has_no_digest():
    with pytest.raises(NoDigest, match="imports tasks_of_a_user when it runs"):
        contents(imports)


# --- digests of code and values -----------------------------------------------------------------

SCALE = 2.0


def scaled(x):
    return x * SCALE


def calls(x):
    return scaled(x) + 1


class Callable:
    factor = 3

    def __init__(self, add=0) -> None:
        self.add = add

    def __call__(self, x):
        return x * self.factor + self.add


class Child(Callable):
    pass


@functools.lru_cache
def cached(x):
    return x + 1


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * SCALE


VALUES = {
    "None": None,
    "number": 1,
    "float": 1.0,
    "text": "1",
    "tensor": torch.ones(2),
    "parameter": nn.Parameter(torch.ones(2)),
    "array": np.ones(2),
    "float32": torch.float32,
    "device": torch.device("cpu"),
    "list": [1, 2],
    "tuple": (1, 2),
    "set": {"a", "b", "c"},
    "dict": {"a": 1},
    "other dict": {"a": 2},
    "function of torch": F.relu,
    "another of torch": F.elu,
    "builtin": torch.relu,
    "ufunc": np.exp,
    "function": scaled,
    "function that calls": calls,
    "object": Callable(),
    "object with a value": Callable(1),
    "object of a child": Child(),
    "method": Callable().__call__,
    "class": Callable,
    "cache": cached,
    "autograd": Function.apply,
    "partial": partial(scaled, x=1),
    "lambda": lambda x: x + 1,
    "another lambda": lambda x: x + 2,
    "another operation": lambda x: x * 1,
    "another argument": lambda y=1: y + 1,
    "module": nn.LSTM(2, 3),
}


def test_different_values_have_different_digests():
    found = {}
    for name, value in VALUES.items():
        digest = contents(value)
        assert digest not in found, f"{name} has the digest of {found[digest]}"
        found[digest] = name
        assert contents(value) == digest


def test_shared_tensors_are_not_equal_ones():
    """Tied weights are trained together."""
    one, other = torch.ones(2), torch.ones(2)
    assert contents([one, one]) != contents([one, other])


@pytest.mark.parametrize("where", ["global", "class", "default", "closure", "called"])
def test_what_a_function_uses_is_in_its_digest(monkeypatch, where):
    changes = {
        "global": (scaled, lambda: monkeypatch.setitem(globals(), "SCALE", 3.0)),
        "class": (Child(), lambda: monkeypatch.setattr(Callable, "factor", 4)),
        "default": (scaled, lambda: monkeypatch.setattr(scaled, "__defaults__", (1,))),
        "called": (
            calls,
            lambda: monkeypatch.setattr(scaled, "__code__", cached.__wrapped__.__code__),
        ),
    }
    if where == "closure":
        cell = [1]
        value, change = (lambda: cell), lambda: cell.append(2)
    else:
        value, change = changes[where]
    before = contents(value)
    change()
    assert contents(value) != before


def test_a_cycle_ends():
    value = [1]
    value.append(value)
    assert contents(value) == contents(value)
    net = Net()
    net.itself = [net]
    assert contents(net)


PROGRAM = """
    import sys, torch
    from torch import nn
    from evenclip.training.contents import contents

    LIMITS = {"a", "b", "c", "d"}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(2, 2)
            nn.init.ones_(self.line.weight), nn.init.ones_(self.line.bias)
        def forward(self, x):
            return self.line(x) if "a" in LIMITS else x

    print(contents([Net(), lambda x: x in {"e", "f", "g"}]))
"""


def test_a_digest_is_the_same_in_every_process(tmp_path):
    """In another folder, with another order of sets, from a file or typed in."""
    text, printed = textwrap.dedent(PROGRAM), []
    one, two = tmp_path / "one.py", tmp_path / "sub" / "two.py"
    two.parent.mkdir()
    one.write_text(text)
    two.write_text(text)
    for number, words in enumerate(([str(one)], [str(two)], ["-c", text]), start=1):
        environment = {"PYTHONHASHSEED": str(number), "PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, *words]
        printed.append(subprocess.check_output(command, text=True, env=environment))
    assert len(set(printed)) == 1
    assert len(printed[0].strip()) == 64
