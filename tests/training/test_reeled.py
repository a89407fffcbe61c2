"""`fit` by a stack of one, as it is on a GPU: the same run, the same checkpoints, the same answer to Ctrl-C.

There is no GPU here. A stack on the CPU stands in for it: `fit` cannot tell.
"""

import signal

import pytest
import torch

import evenclip
from evenclip import Performance, fit, train
from evenclip.checkpoint import latest
from evenclip.run import Run
from evenclip.stack import Stack

GIVEN = {"epochs": 3, "batch_size": 16, "lr": 0.1, "seed": 4, "progress": False}


@pytest.fixture
def reels(monkeypatch):
    """The stacks that fit has made."""
    made = []

    def reel(run):
        made.append(Stack([run], compile=False))
        return made[-1]

    monkeypatch.setattr(train, "reeled", reel)
    return made


def same(toy, one, other):
    torch.testing.assert_close(toy.vector(one.model), toy.vector(other.model))
    assert one.ledger == other.ledger
    assert [row["samples"] for row in one.trace] == [row["samples"] for row in other.trace]
    torch.testing.assert_close(one.state, other.state)


def test_the_run_is_the_same(toy, reels):
    by_stack = fit(toy.mlp(), toy.data(), **GIVEN)
    assert len(reels) == 1
    observed = fit(toy.mlp(), toy.data(), observers=[lambda step: None], **GIVEN)
    assert len(reels) == 1  # whoever is watched step by step is taken step by step
    same(toy, by_stack, observed)
    assert len(by_stack.trace) == 3


def test_checkpoints_are_those_of_steps_one_by_one(toy, reels, tmp_path, monkeypatch):
    saved = []
    save = Run.save
    monkeypatch.setattr(
        Run, "save", lambda run, folder: (saved.append((run.t, toy.vector(run.model))), save(run, folder))
    )
    fit(toy.mlp(), toy.data(), checkpoint=tmp_path / "a", checkpoint_every=3, **GIVEN)
    by_stack, saved = saved, []
    fit(toy.mlp(), toy.data(), checkpoint=tmp_path / "b", checkpoint_every=3, observers=[lambda step: None], **GIVEN)
    assert [t for t, _ in by_stack] == [t for t, _ in saved]
    for (_, one), (_, other) in zip(by_stack, saved, strict=True):
        torch.testing.assert_close(one, other)


def test_ctrl_c_saves_the_step_it_came_in_and_resuming_is_the_same_run(toy, reels, tmp_path, monkeypatch):
    whole = fit(toy.mlp(), toy.data(), **GIVEN)
    step, taken = Stack.step, []

    def interrupted(stack):
        step(stack)
        taken.append(stack.t)
        if len(taken) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Stack, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(toy.mlp(), toy.data(), checkpoint=tmp_path, **GIVEN)
    assert taken == [1, 2, 3, 4, 5]
    assert latest(tmp_path) is not None
    resumed = fit(toy.mlp(), toy.data(), checkpoint=tmp_path, resume=True, **GIVEN)
    assert taken[5] == 6
    same(toy, resumed, whole)


@pytest.mark.parametrize(
    "performance", [Performance(), Performance(compile=True), Performance(compile=True, chunk=8)], ids=str
)
def test_a_cpu_has_no_reel(toy, performance):
    run = evenclip.prepare(toy.mlp(), toy.data(), batch_size=16, performance=performance)
    assert train.reeled(run) is None
