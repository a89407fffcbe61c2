"""A step of one run in another.

A run is copied. Every step is taken with the run and applied to both, so the copy is trained by
releases that its own ledger lacks. Its report states ε = 0, and the attacker gets the model.

A run must be updated with its own last step, and once.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from evenclip import DPSGDGlobalAdapt, prepare
from evenclip.training import run as runs
from evenclip.training.result import result

T = 5


def prepared(seed=None):
    random = torch.Generator().manual_seed(0)
    data = torch.randn(40, 8, generator=random).double(), torch.arange(40) % 3
    settings = {"rule": DPSGDGlobalAdapt(sigma=2.0), "batch_size": 16, "steps": T, "delta": 1e-5}
    return prepare(nn.Linear(8, 3).double(), data, **settings, seed=seed)


def trained_by_another(run, other):
    """Train both with the steps of one; return the other's result."""
    with run.listening(), other.listening():
        while other.t < T:
            step = run.step()
            run.update(step)
            other.update(step)
    return result(other)


def test_a_step_says_where_it_is_in_the_ledger():
    run = prepared()
    with run.listening():
        steps = [run.step(), run.step()]
    assert [(step.run_id, step.draw) for step in steps] == [(run.run_id, 0), (run.run_id, 1)]
    assert run.ledger.end_of(run.run_id) == 2


@pytest.mark.parametrize("seed", [None, 3])
def test_a_copy_refuses_the_steps_of_its_run(seed):
    run = prepared(seed)
    other = copy.deepcopy(run)
    before = [p.clone() for p in other.model.parameters()]
    with pytest.raises(RuntimeError) as caught:
        trained_by_another(run, other)
    assert str(caught.value) == (
        f"This step is draw 0 of run {run.run_id[:8]}, and not the last unused draw of this run, "
        "so its release may be in no ledger of this run; give run.update() what the last "
        "run.step() of the same run returned, once."
    )
    assert other.t == 0
    assert all(map(torch.equal, before, other.model.parameters()))


def test_a_copy_in_the_middle_refuses_the_step_before_it():
    run = prepared()
    with run.listening():
        step = run.step()
    other = copy.deepcopy(run)
    with pytest.raises(RuntimeError, match="not the last unused draw of this run"):
        other.update(step)
    run.update(step)
    assert run.t == 1


def test_a_step_is_used_once_and_only_the_last_one():
    run = prepared()
    with run.listening():
        first, second = run.step(), run.step()
        with pytest.raises(RuntimeError, match="not the last unused draw of this run"):
            run.update(first)
        run.update(second)
        with pytest.raises(RuntimeError, match="update once for each"):
            run.update(second)
        with pytest.raises(RuntimeError, match="not the last unused draw of this run"):
            run.update(second._replace(t=1))
    assert (run.t, run.ledger.steps) == (1, 2)


def test_the_attack_wins_against_a_run_that_looks_at_the_number_only(monkeypatch):
    monkeypatch.setattr(runs, "check_step", lambda step, t, unused: None)
    run = prepared()
    other = trained_by_another(run, copy.deepcopy(run))
    assert other.privacy["epsilon"] == 0
    assert 0 < result(run).privacy["epsilon"] < math.inf
