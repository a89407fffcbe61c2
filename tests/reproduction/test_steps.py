"""Matched rules at longer steps: the record, and its table."""

from types import SimpleNamespace

import numpy as np
import pytest

from evenclip.comparison import protocol
from evenclip.reproduction import steps
from evenclip.reproduction.training import Training

RULES = ("dpsgd", "dpsgd-f", "dpsgd-global", "dpsgd-global-adapt")


class Compared:
    """A comparison that was not trained: every rule has the same accuracy."""

    groups = ("Female", "Male")

    def __init__(self, lr):
        self.lr = lr

    def __getitem__(self, name):
        metrics = {"accuracy": np.array([[90.0, 80.0]]), "train_loss": np.array([[0.2, 0.4]])}
        return SimpleNamespace(metrics=metrics, lr=(0.3 if self.lr is None else self.lr,))


@pytest.fixture
def record(monkeypatch):
    """The record of one seed, from comparisons that were not trained."""
    monkeypatch.setattr(steps, "DATASETS", ("adult",))
    monkeypatch.setattr(steps, "STEPS", (0.1, 0.8))
    monkeypatch.setattr(steps, "compare", lambda *_, lr=None, **__: Compared(lr))
    return steps.make(Training(seeds=1, quick=True))


def test_every_rule_takes_each_step(record):
    reference, *private = record["rows"]
    assert reference["rule"] == "non-private"
    assert reference["step"] is None
    assert [(row["rule"], row["step"]) for row in private] == [
        (rule, step) for step in (0.1, 0.8) for rule in RULES
    ]
    for row in private:
        S = 0.5 * (2.414213562 if row["rule"] == "dpsgd-f" else 1.0)
        assert row["lr"] == [pytest.approx(row["step"] / S)]
        assert row["accuracy"] == [[80.0, 90.0]]  # in the order of the printed table


def test_at_the_matched_step_it_is_the_matched_table(record):
    assert record["rows"][1]["lr"] == [protocol.STEP / 0.5]


def known(gaps):
    """A record with these gaps, seed by seed, at the first step; women lose nothing."""
    rows = [{"dataset": "adult", "rule": "non-private", "step": None, "lr": [0.1] * 5,
             "accuracy": [[80.0, 90.0]] * 5, "loss": [[0.4, 0.2]] * 5}]  # fmt: skip
    rows += [
        {"dataset": "adult", "rule": rule, "step": step, "lr": [0.1] * 5,
         "accuracy": [[80.0 - gap, 90.0] for gap in gaps[rule]], "loss": [[0.4, 0.2]] * 5}
        for step in steps.STEPS for rule in RULES
    ]  # fmt: skip
    return {"quick": False, "seeds": list(range(5)), "rows": rows}


def test_the_table_has_gaps_and_verdicts(monkeypatch):
    monkeypatch.setattr(steps, "DATASETS", ("adult",))
    gaps = {
        "dpsgd": [3.0, 3.2, 2.8, 3.1, 2.9], "dpsgd-f": [3.1, 3.1, 2.9, 3.0, 2.9],
        "dpsgd-global": [1.0, 1.3, 0.7, 1.2, 0.8], "dpsgd-global-adapt": [0.0] * 5,
    }  # fmt: skip
    lines = steps.draw(known(gaps)).splitlines()
    (line,) = [line for line in lines if line.startswith("| 0.1 | dpsgd-global |")]
    assert "| 79.0 ± 0.1 | 90.0 ± 0.0 | 1.00 ± 0.11 | smaller by 2 (1." in line
    (line,) = [line for line in lines if line.startswith("| 0.1 | dpsgd-f |")]
    assert line.endswith("| no difference shown |")
    assert "| – | non-private | 80.0 ± 0.0 | 90.0 ± 0.0 | – | – |" in lines
