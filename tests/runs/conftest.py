"""Small splits, and specifications of runs that take a moment."""

from __future__ import annotations

import pytest
import torch

from evenclip.data import Dataset, Splits
from evenclip.runs import Spec, Store
from evenclip.runs.parts import save_splits


def part(n, seed):
    random = torch.Generator().manual_seed(seed)
    x, group = torch.randn(n, 3, generator=random), torch.arange(n) % 2
    y = (x[:, 0] + 0.5 * group > 0).long()
    return Dataset(x, y, group, ("a", "b"), ("no", "yes"), "made")


@pytest.fixture
def splits():
    return Splits(part(200, 0), part(100, 1))


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


@pytest.fixture
def spec(splits, tmp_path):
    """A function seed -> specification, of DPSGD unless said otherwise."""
    data = save_splits(splits, tmp_path / "data")

    def make(seed=0, rule=None, **changes):
        rule = {"name": "dpsgd", "options": {"C0": 1.0, "sigma": 1.0}} if rule is None else rule
        fields = {"lr": 0.1, "epochs": 1, "batch_size": 20, "q": None, "delta": None, "device": "cpu"} | changes
        return Spec(data, {"name": "mlp", "options": {"hidden": [4]}}, rule, seed=seed, **fields)

    return make


class Told:
    """Writes down what it is told."""

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
def told():
    return Told()
