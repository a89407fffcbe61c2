"""Small splits, and specifications of runs that take a moment."""

from __future__ import annotations

import pytest
import torch

from evenclip.data import Dataset, Splits
from evenclip.runs import RunsError, Spec, Store, carry_out
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


@pytest.fixture
def one_of_three_fails(store, spec, told):
    """A function of an engine: a run that cannot succeed is tried three times, reported, and the others are kept."""

    def check(engine):
        with pytest.raises(RunsError) as raised:
            carry_out([spec(0), spec(5, lr=-1.0), spec(1)], store, told, engine)
        assert str(raised.value) == (
            "1 of 3 runs failed; the other 2 are kept. dpsgd, seed 5: lr is -1.0; it must be a finite number above 0. "
            f"Run the same command again to finish what is missing. Details are in {store.root / 'failures.txt'}."
        )
        (failure,) = raised.value.failures
        assert "Traceback" in failure.trace
        assert sorted(told.begun) == [0, 1, 5, 5, 5]
        assert store.has(spec(0))
        assert store.has(spec(1))

    return check
