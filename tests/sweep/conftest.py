"""Fixtures: small splits, and specifications of short runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from evenclip.data import Dataset, Splits
from evenclip.sweep import RunsError, Spec, Store, carry_out
from evenclip.sweep.describe import describe_file, save_splits


def dataset(n, seed):
    random = torch.Generator().manual_seed(seed)
    x, group = torch.randn(n, 3, generator=random), torch.arange(n) % 2
    y = (x[:, 0] + 0.5 * group > 0).long()
    return Dataset(x, y, group, ("a", "b"), ("no", "yes"), "made")


@pytest.fixture
def splits():
    return Splits(dataset(200, 0), dataset(100, 1))


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


@pytest.fixture
def spec(splits, tmp_path):
    """Return a function seed -> specification, of DPSGD unless given."""
    data = save_splits(splits, tmp_path / "data")

    def make(seed=0, rule=None, **changes):
        rule = {"name": "dpsgd", "options": {"C0": 1.0, "sigma": 1.0}} if rule is None else rule
        fields = {
            "lr": 0.1,
            "epochs": 1,
            "batch_size": 20,
            "q": None,
            "delta": None,
            "device": "cpu",
        } | changes
        model = fields.pop("model", {"name": "mlp", "options": {"hidden": [4]}})
        return Spec(data, model, rule, seed=seed, **fields)

    return make


class ProgressRecorder:
    """Records the progress events."""

    def __init__(self):
        self.begun, self.over, self.steps, self.runs = [], [], [], 0

    def planned(self, runs):
        self.runs += runs

    def started(self, spec):
        self.begun.append(spec.seed)

    def step(self, spec, t):
        self.steps.append((spec.seed, t))

    def ended(self, spec, failure):
        self.over.append((spec.seed, failure))


@pytest.fixture
def progress():
    return ProgressRecorder()


@pytest.fixture
def one_of_three_fails(store, spec, progress):
    """Return a function that checks an executor: a failing run is tried three times and reported.

    The other runs are kept.
    """

    def check(executor):
        with pytest.raises(RunsError) as raised:
            carry_out([spec(0), spec(5, lr=-1.0), spec(1)], store, progress, executor)
        assert str(raised.value) == (
            "1 of 3 runs failed; the other 2 are kept. dpsgd, seed 5: lr is -1.0; it must be a "
            "finite number above 0. Run the same command again to finish what is missing. "
            f"Details are in {store.root / 'failures.txt'}."
        )
        (failure,) = raised.value.failures
        assert "Traceback" in failure.trace
        assert sorted(progress.begun) == [0, 1, 5, 5, 5]
        assert store.has(spec(0))
        assert store.has(spec(1))

    return check


NET = """
import os

import torch
from torch import nn


def wait():
    try:
        gate = os.open(GATE, os.O_RDONLY)
    except FileNotFoundError:  # the gate is open
        return
    os.read(gate, 1)
    os.close(gate)


class Net(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.linear = nn.Linear(width, classes)
        self.waits = iter([wait])  # what other attributes and variables hold is put back
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        # In float64, copies with other parameters are tested before training.
        if x.dtype == torch.float32 and self.linear.bias.any():
            for once in self.waits:
                once()
        return self.linear(x)


def make(x, classes):
    return Net(x.shape[1], classes)
"""


class Gate:
    """A FIFO at which every run with this model waits between its first and second step.

    A run reports its progress after its first step, so a test that receives `t == 1` knows that the
    run has started and cannot end before the test allows it. A byte in the FIFO lets exactly one
    run through: the first to read it.
    """

    def __init__(self, folder: Path):
        self._path = folder / "gate"
        os.mkfifo(self._path)
        self._end = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        (folder / "net.py").write_text(f"GATE = {str(self._path)!r}\n{NET}")
        self.model = {"function": "make", **describe_file(folder / "net.py")}

    def let_through(self):
        """Let one run continue: a waiting one, or the next to arrive."""
        os.write(self._end, b"x")

    def open_for_all(self):
        """Let all waiting and later runs continue."""
        if self._path.exists():
            self._path.unlink()
            os.write(self._end, bytes(1000))

    def close(self):
        self.open_for_all()
        os.close(self._end)


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path)
    yield gate
    gate.close()  # releases processes that a test left waiting
