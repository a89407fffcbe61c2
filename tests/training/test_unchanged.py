"""What a key was derived from does not change while steps are taken, and no thread steps in."""

from __future__ import annotations

import contextlib
import copy
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip import DPSGD, fit, prepare
from evenclip.data import Dataset

PUT_BACK = "{} was changed between two steps, and is put back: nothing but the update changes the"
WHY = "Since the run was prepared, these have changed: "


def given(**more):
    return {"rule": DPSGD(), "batch_size": 8, "steps": 3, "lr": 0.1, "seed": 5, **more}


class Scaled:
    """A loss that can be changed."""

    def __init__(self) -> None:
        self.by = 1.0

    def __call__(self, output, y):
        return self.by * F.cross_entropy(output, y, reduction="none")


class Scaling(nn.Module):
    def __init__(self, module) -> None:
        super().__init__()
        self.module, self.by = module, 1.0

    def forward(self, x):
        return self.by * self.module(x)


def steps(run, change=lambda: None):
    """Take all steps, with a change after the first."""
    with run.listening():
        while run.t < run.settings.steps:
            run.update(run.step())
            change()


def a_run(toy, **more):
    data = Dataset(*(column.clone() for column in toy.data()), ("a", "b", "c"))
    loss = Scaled()
    return prepare(Scaling(toy.mlp()), data, **given(loss=loss, **more)), data, loss


CHANGES = {
    "data": lambda run, data, loss: data.x[-1].add_(1),
    "loss": lambda run, data, loss: setattr(loss, "by", 2.0),
    "model": lambda run, data, loss: setattr(run.model, "by", 2.0),
    "threads": lambda run, data, loss: torch.set_num_threads(torch.get_num_threads() + 1),
    "switches": lambda run, data, loss: torch.set_flush_denormal(True),
}


@pytest.fixture(autouse=True)
def _same_machine():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("name", CHANGES)
def test_with_a_seed_a_change_before_the_first_step_is_refused(toy, name):
    run, *place = a_run(toy)
    CHANGES[name](run, *place)
    with pytest.raises(RuntimeError) as caught:
        steps(run)
    assert str(caught.value) == (
        f"{WHY}{name}. With a seed, the noise is a function of them, so a run with the same noise "
        "and without the change would show the difference. Prepare the run again after the "
        "change, or leave seed out; do not publish what this run has released."
    )
    assert run.ledger.steps == 0


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "model"])
def test_with_a_seed_a_change_between_two_steps_is_found_at_the_end(toy, name):
    run, *place = a_run(toy)
    with pytest.raises(RuntimeError, match=f"{WHY}{name}"):
        steps(run, lambda: CHANGES[name](run, *place) if run.t == 1 else None)
    with pytest.raises(RuntimeError, match=f"{WHY}{name}"):
        steps(run)


def test_what_a_model_changes_in_itself_while_steps_are_taken_belongs_to_them(toy):
    """A cache or a counter of its own is no reason to stop; a change after the steps is one."""
    run, *place = a_run(toy)
    with pytest.warns(UserWarning, match=PUT_BACK.format("The model")):
        steps(run, lambda: CHANGES["model"](run, *place) if run.t == 1 else None)
    run.model.by = 3.0
    with pytest.raises(RuntimeError, match=f"{WHY}model"):
        steps(run)


def test_an_observer_that_changes_the_loss_is_found(toy):
    loss = Scaled()
    with pytest.raises(RuntimeError, match=f"{WHY}loss"):
        fit(
            toy.mlp(), toy.data(), **given(loss=loss),
            observers=[lambda step: setattr(loss, "by", 2.0)],
        )  # fmt: skip


def test_a_loss_that_has_no_digest_any_more_is_found(toy):
    run, _, loss = a_run(toy)
    loss.lock = threading.Lock()
    with pytest.raises(RuntimeError, match="its model or its loss has changed: lock has no copy"):
        steps(run)


@pytest.mark.parametrize("name", CHANGES)
def test_without_a_seed_the_key_is_a_function_of_nothing(toy, name):
    run, *place = a_run(toy, seed=None)
    CHANGES[name](run, *place)
    puts_back = name in ("model", "loss")
    expected = pytest.warns(UserWarning, match=PUT_BACK.format(f"The {name}"))
    with expected if puts_back else contextlib.nullcontext():
        steps(run, lambda: CHANGES[name](run, *place))
    assert run.t == 3


def test_one_warning_says_that_a_change_is_put_back(toy):
    run, _, loss = a_run(toy, seed=None)
    loss.by = 2.0
    with pytest.warns(UserWarning, match=PUT_BACK.format("The loss")) as warned:
        steps(run, lambda: setattr(loss, "by", 2.0))
    assert len(warned) == 1
    assert loss.by == 2.0  # set after the last step


def test_a_copy_has_a_key_from_the_operating_system(toy):
    run, *_ = a_run(toy)
    copied = copy.deepcopy(run)
    copied.model.by = 2.0
    with pytest.warns(UserWarning, match=PUT_BACK.format("The model")):
        steps(copied)
    steps(run)


# --- one step at a time -------------------------------------------------------------------------


def in_a_thread(function):
    """Return the error that a function raises in another thread."""
    errors = []

    def run():
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0] if errors else None


@pytest.mark.parametrize("seed", [None, 5])
def test_another_thread_takes_no_step(toy, seed):
    """Two threads at once would draw one batch twice and count it once."""
    run, *_ = a_run(toy, seed=seed)
    with run.listening():
        error = in_a_thread(run.step)
        assert isinstance(error, RuntimeError)
        assert str(error) == (
            "Take steps in the thread that entered `with run.listening():`; two threads would "
            "draw one batch twice. Give each thread a run of its own."
        )
        error = in_a_thread(lambda: steps(run))
        assert isinstance(error, RuntimeError)
        assert str(error) == (
            "The run is inside `with run.listening():` already; enter it once, and give each "
            "thread a run of its own."
        )
        assert run.drawn == run.ledger.steps == 0
        run.update(run.step())
    assert in_a_thread(lambda: steps(run)) is None  # one after the other
    assert run.drawn == run.ledger.steps == 3


def test_a_step_is_refused_under_autocast(toy):
    run, *_ = a_run(toy, seed=None)
    with run.listening(), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError) as caught:
            run.step()
        assert str(caught.value) == (
            "torch.autocast is on: its products have fewer bits than the parameters, so norms "
            "would be too small. Leave it for run.step(), or convert the model itself "
            "(model.bfloat16())."
        )
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        steps(run)
    assert run.ledger.steps == 0


def test_data_that_are_a_copy_may_change(toy):
    """Arrays on another device, or of another type, were copied."""
    run, data, _ = a_run(toy)
    other = replace(data, x=data.x.clone())
    other.x.add_(1)
    steps(run)
