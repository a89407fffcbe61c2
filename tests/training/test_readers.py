"""Processes that read items of a map-style dataset ahead: batches, errors, and clean shutdown."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils.data import Dataset as TorchDataset

from evenclip import DPSGD, DPSGDF, NonPrivate, Performance, fit, prepare
from evenclip.data import MapDataset
from evenclip.data.readers import ReaderPool

# Different ways to compute one run, or runs that differ in one respect, share their draws here.
pytestmark = pytest.mark.usefixtures("one_stream")

NAMES = ("a", "b", "c")


class Rows(TorchDataset):
    """A map-style dataset of (x, y, group); one row may be bad."""

    def __init__(self, columns, bad=None, how=None) -> None:
        self.columns, self.bad, self.how = columns, bad, how

    def __len__(self) -> int:
        return len(self.columns[1])

    def __getitem__(self, i):
        if i == self.bad and self.how is not None:
            return self.how(tuple(column[i] for column in self.columns))
        return tuple(column[i] for column in self.columns)


def given(rule, readers=0, **more):
    performance = Performance(readers=readers)
    return {
        "rule": rule,
        "batch_size": 8,
        "epochs": 2,
        "lr": 0.2,
        "seed": 9,
        "performance": performance,
        **more,
    }


def readers() -> list[multiprocessing.Process]:
    """Return the running reader processes; the ranks of other tests are daemons."""
    return [process for process in multiprocessing.active_children() if not process.daemon]


def no_reader_is_left() -> bool:
    """Return whether all readers have ended; closing a feed waits for them."""
    return not readers()


@pytest.mark.parametrize("rule", [NonPrivate(), DPSGDF()], ids=lambda rule: rule.name)
def test_the_number_of_readers_does_not_matter(toy, rule):
    columns = toy.data()
    data = MapDataset(Rows(columns), NAMES)
    results = [fit(toy.mlp(dropout=0.2), data, **given(rule, readers)) for readers in (0, 1, 2)]
    results.append(fit(toy.mlp(dropout=0.2), columns, **given(rule)))
    for result in results[1:]:
        assert toy.same(result.model, results[0].model)
        assert result.trace == results[0].trace
    assert no_reader_is_left()


def test_empty_batches(toy):
    data = MapDataset(Rows(toy.data()), NAMES)
    results = [
        fit(toy.mlp(), data, **given(DPSGD(), readers, q=0.01, steps=30)) for readers in (0, 1)
    ]
    assert toy.same(results[0].model, results[1].model)
    assert sum(row["empty_batches"] for row in results[1].trace) > 10


def test_resuming_with_another_number_of_readers(toy, tmp_path):
    data = MapDataset(Rows(toy.data()), NAMES)
    whole = fit(toy.mlp(), data, **given(DPSGD(), 0))

    def stop(step):
        if step.t == 6:
            raise RuntimeError("stopped here")

    with pytest.raises(RuntimeError, match="stopped here"):
        fit(
            toy.mlp(),
            data,
            **given(
                DPSGD(), 2, checkpoint=tmp_path / "saved", checkpoint_every=1, observers=[stop]
            ),
        )
    assert no_reader_is_left()
    again = fit(toy.mlp(), data, **given(DPSGD(), 1, checkpoint=tmp_path / "saved", resume="exact"))
    assert toy.same(again.model, whole.model)
    assert again.trace == whole.trace


def fails(item):
    raise KeyError("picture")


BAD = {
    "error": (
        fails,
        "Item 30 of the dataset cannot be read (KeyError: 'picture'); correct it, or leave it out.",
    ),
    "label": (
        lambda item: (item[0], torch.tensor(7), item[2]),
        "Item 30 of the dataset has the label 7 and the model has 3 outputs, for the labels 0 to "
        "2; number the classes from 0, or give the model more outputs.",
    ),
    "negative": (
        lambda item: (item[0], torch.tensor(-1), item[2]),
        "Item 30 of the dataset has the label -1 and the model has 3 outputs, for the labels 0 "
        "to 2; number the classes from 0, or give the model more outputs.",
    ),
    "form": (
        lambda item: item[0],
        "An item of the dataset is a Tensor; it must be (x, y) or (x, y, group).",
    ),
}


@pytest.mark.parametrize("readers", [0, 2])
@pytest.mark.parametrize("what", BAD)
def test_a_bad_item_is_named(toy, what, readers):
    how, message = BAD[what]
    data = MapDataset(Rows(toy.data(), 30, how), NAMES)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        fit(toy.mlp(), data, **given(DPSGD(), readers, epochs=9))
    if what == "error" and readers:
        assert "in fails" in raised.value.__notes__[0]  # where the item failed
    assert no_reader_is_left()


def test_a_label_that_the_loss_ignores(toy):
    data = MapDataset(
        Rows(toy.data(), 30, lambda item: (item[0], torch.tensor(-100), item[2])), NAMES
    )
    assert fit(toy.mlp(), data, **given(NonPrivate())).ledger.steps == 10


def interrupted(item):
    os.kill(os.getpid(), signal.SIGINT)
    return item


def test_readers_do_not_hear_ctrl_c(toy):
    """A terminal sends SIGINT to readers too, but the current step needs their rows. A custom loop
    is used because the readers would inherit the handler of `fit`.
    """
    data = MapDataset(Rows(toy.data(), 30, interrupted), NAMES)
    run = prepare(toy.mlp(), data, **given(DPSGD(), 2))
    with run.listening():
        while run.t < run.settings.steps:
            run.update(run.step())
    assert torch.equal(
        toy.vector(run.model), toy.vector(fit(toy.mlp(), toy.data(), **given(DPSGD())).model)
    )


def test_bytes_stay_bytes_until_they_are_taken(toy):
    x, y, group = toy.data()
    x = (x * 20).clamp(0, 255).to(torch.uint8)
    data = MapDataset(Rows((x, y, group)), NAMES)
    models = [
        fit(toy.mlp(torch.float32), data, **given(DPSGD(), readers)).model for readers in (0, 2)
    ]
    models.append(fit(toy.mlp(torch.float32), (x, y, group), **given(DPSGD())).model)
    assert toy.same(models[0], models[1])
    assert toy.same(models[0], models[2])


def dies(item):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_reader_that_dies(toy):
    data = MapDataset(Rows(toy.data(), 30, dies), NAMES)
    with pytest.raises(
        RuntimeError,
        match=r"A process that reads the dataset has ended before its time \(.+\) If it ran out",
    ):
        fit(toy.mlp(), data, **given(DPSGD(), 1, epochs=9))
    assert no_reader_is_left()


def test_batches_that_were_not_drawn_are_not_dealt(toy):
    data = MapDataset(Rows(toy.data()), NAMES)
    feed = ReaderPool(data, iter([torch.tensor([1, 2])]), 1)
    with pytest.raises(AssertionError, match="another, of 2, was read ahead"):
        feed.of(torch.tensor([1, 3]))
    with pytest.raises(IndexError, match="All batches that were to be read ahead are taken"):
        feed.of(torch.tensor([1, 3]))
    feed.close()
    assert no_reader_is_left()


def test_leaving_a_loop_of_ones_own_ends_the_readers(toy):
    run = prepare(toy.mlp(), MapDataset(Rows(toy.data()), NAMES), **given(DPSGD(), 2))
    with run.listening():
        run.update(run.step())
        assert len(readers()) == 2
    assert no_reader_is_left()


def test_readers_must_be_a_number():
    with pytest.raises(ValueError, match="readers"):
        Performance(readers=-1)


# Training does not end by itself, so it still runs when the signal arrives.
ENDLESS = """
import sys, time, torch, evenclip
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.ones(3), i % 2
def print_step(step):
    print("step", step.t, flush=True)
torch.set_num_threads(1)
evenclip.fit(
    torch.nn.Linear(3, 2), Rows(), rule=evenclip.DPSGD(), batch_size=20, epochs=10**5,
    checkpoint=sys.argv[1], observers=[print_step], performance=evenclip.Performance(readers=2))
"""


def test_ctrl_c_saves_and_leaves_no_process_behind(tmp_path):
    """SIGINT goes to the whole process group, as from a terminal. The readers must not end before
    the current step has its rows.

    Readers hold the pipes that `communicate` reads to the end, so it returns when the last process
    has ended.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path / "saved")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    for _ in range(3):
        assert process.stdout.readline().startswith("step")
    os.killpg(process.pid, signal.SIGINT)
    _, printed = process.communicate()
    assert "saved in" in printed
    assert list((tmp_path / "saved").iterdir())


def test_readers_end_with_a_process_that_is_killed(tmp_path):
    """The pipe ends when the last reader has closed it."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path / "saved")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline().startswith("step")
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
