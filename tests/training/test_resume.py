"""A run that is resumed exactly equals an uninterrupted one; an incomplete checkpoint is refused.

`test_branches.py` is about `resume=True`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import signal
import stat
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from evenclip import DPSGD, DPSGDF, DPSGDGlobalAdapt, NonPrivate, Performance, files, fit
from evenclip.data import Dataset, as_dataset
from evenclip.files import kinds
from evenclip.mechanism import Mechanism
from evenclip.training.checkpoint import CheckpointError, load
from evenclip.training.identity import digest
from evenclip.training.progress import Interrupt

EPOCH, STEPS = 5, 15  # 40 records, batches of 8, three epochs


class Stop:
    """An observer that sends Ctrl-C during a step."""

    def __init__(self, during: int) -> None:
        self.during = during

    def __call__(self, step) -> None:
        if step.t == self.during - 1:
            signal.raise_signal(signal.SIGINT)


def settings(rule, **more):
    return {"rule": rule, "batch_size": 8, "epochs": 3, "lr": 0.2, "seed": 9, **more}


def stopped(model, data, folder, after, **given) -> None:
    """Run until Ctrl-C in a given step."""
    with pytest.raises(KeyboardInterrupt):
        fit(model, data, checkpoint=folder, observers=[Stop(after)], **given)


def assert_identical(toy, one, other) -> None:
    assert toy.same(one.model, other.model)
    assert one.ledger == other.ledger
    assert one.trace == other.trace
    assert one.state.dtype == other.state.dtype
    assert torch.equal(one.state, other.state)
    assert one.settings == other.settings


# --- bitwise equality -------------------------------------------------------------------


def test_every_rule_goes_on_bit_by_bit(toy, rule, tmp_path):
    check_resumed(toy, rule, tmp_path, after=7)


@pytest.mark.parametrize("after", [1, 5, 14, 15], ids=lambda t: f"after {t}")
def test_it_goes_on_from_any_step(toy, tmp_path, after):
    """The first step, the last of an epoch, the last but one, and the last."""
    check_resumed(toy, DPSGDF(C0=0.8), tmp_path, after)


def check_resumed(toy, rule, tmp_path, after):
    data, model = toy.data(40, torch.float32), toy.mlp(torch.float32, dropout=0.3)
    whole = fit(model, data, **settings(rule))
    stopped(model, data, tmp_path, after, **settings(rule))
    assert written(tmp_path)[-1] == after
    assert_identical(
        toy, fit(model, data, **settings(rule), checkpoint=tmp_path, resume="exact"), whole
    )


OPTIMIZERS = {
    "momentum and steps": (
        partial(SGD, momentum=0.9, nesterov=True),
        partial(StepLR, step_size=1, gamma=0.5),
    ),
    "Adam": (Adam, None),
    "Adam and cosine": (partial(Adam, betas=(0.8, 0.9)), partial(CosineAnnealingLR, T_max=3)),
    "weight decay": (partial(SGD, weight_decay=0.1), None),
}


@pytest.mark.parametrize(
    ("kind", "after"),
    [*((kind, 8) for kind in OPTIMIZERS), ("Adam and cosine", 3), ("Adam and cosine", 5)],
)
def test_every_optimiser_goes_on_bit_by_bit(toy, tmp_path, kind, after):
    optimizer, scheduler = OPTIMIZERS[kind]
    given = settings(DPSGDGlobalAdapt(), optimizer=optimizer, scheduler=scheduler)
    data, model = toy.data(40, torch.float32), toy.mlp(torch.float32)
    whole = fit(model, data, **given)
    stopped(model, data, tmp_path, after, **given)
    assert_identical(toy, fit(model, data, **given, checkpoint=tmp_path, resume="exact"), whole)


@pytest.mark.parametrize("performance", [Performance(chunk=3)], ids=["chunks"])
def test_so_does_a_run_in_chunks(toy, tmp_path, performance):
    given = settings(DPSGDF(C0=0.8), performance=performance)
    data, model = toy.data(), toy.mlp(dropout=0.5)
    whole = fit(model, data, **given)
    stopped(model, data, tmp_path, 7, **given)
    assert_identical(toy, fit(model, data, **given, checkpoint=tmp_path, resume="exact"), whole)


def test_it_may_be_stopped_again_and_again(toy, tmp_path):
    data, model, given = toy.data(), toy.mlp(dropout=0.3), settings(DPSGDGlobalAdapt())
    for after in (2, 5, 6, 11):
        stopped(model, data, tmp_path, after, **given, resume="exact")
    resumed = fit(model, data, **given, checkpoint=tmp_path, resume="exact")
    assert_identical(toy, resumed, fit(model, data, **given))


def test_looking_at_checkpoints_changes_nothing(toy, tmp_path):
    data, model, given = toy.data(), toy.mlp(dropout=0.3), settings(DPSGDF())
    saved = fit(model, data, **given, checkpoint=tmp_path, checkpoint_every=2)
    assert_identical(toy, saved, fit(model, data, **given))


def test_a_finished_run_is_returned_without_another_step(toy, tmp_path):
    data, model, given = toy.data(), toy.mlp(), settings(DPSGDF())
    first, calls = fit(model, data, **given, checkpoint=tmp_path), []
    again = fit(model, data, **given, checkpoint=tmp_path, resume="exact", observers=[calls.append])
    assert_identical(toy, first, again)
    assert calls == []


def test_resume_without_any_checkpoint_begins_at_the_beginning(toy, tmp_path):
    data, model, given = toy.data(), toy.mlp(), settings(DPSGD())
    assert_identical(
        toy,
        fit(model, data, **given, checkpoint=tmp_path, resume="exact"),
        fit(model, data, **given),
    )


def test_without_a_seed_there_are_no_steps_to_repeat(toy, tmp_path):
    with pytest.raises(ValueError, match="seed") as caught:
        fit(
            toy.mlp(), toy.data(), **settings(DPSGD(), seed=None), checkpoint=tmp_path,
            resume="exact",
        )  # fmt: skip
    assert str(caught.value) == (
        'resume="exact" repeats the steps that a seed determines; give the seed that the run was '
        "started with, or pass resume=True, which draws new noise."
    )


@pytest.mark.parametrize("value", [None, "yes", 1, "Exact"])
def test_resume_is_one_of_three_values(toy, tmp_path, value):
    with pytest.raises(ValueError, match="resume is") as caught:
        fit(toy.mlp(), toy.data(), **settings(DPSGD()), checkpoint=tmp_path, resume=value)
    assert str(caught.value) == (
        f"resume is {value!r}; give True to continue with new noise, 'exact' to repeat the steps "
        "that a seed determines, or False."
    )


def square(output, y):
    return (output.gather(1, y.unsqueeze(1)).squeeze(1) - 1).square()


CHANGED = {
    "loss": ({"loss": square}, "loss"),
    "initial weights": ({"model": 1}, "model"),
    "scheduler": ({"scheduler": partial(StepLR, step_size=1)}, "scheduler"),
    "chunks": ({"performance": Performance(chunk=3)}, "performance"),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_steps_that_would_come_out_otherwise_are_not_repeated(toy, tmp_path, kind):
    given, name = CHANGED[kind]
    stopped(toy.mlp(), toy.data(), tmp_path, 7, **settings(DPSGD()))
    model = toy.mlp(seed=given.get("model", 0))
    more = {key: value for key, value in given.items() if key != "model"}
    with pytest.raises(CheckpointError) as caught:
        fit(
            model, toy.data(), **settings(DPSGD(), **more), checkpoint=tmp_path, resume="exact",
        )  # fmt: skip
    assert str(caught.value) == (
        f'{tmp_path / "step-00000007"} cannot be continued by resume="exact": since it was '
        f"written, there is another {name}. Resume with resume=True, which draws new noise and "
        "counts all steps, or start again in another folder."
    )


def test_after_new_noise_there_are_no_steps_to_repeat(toy, tmp_path):
    stopped(toy.mlp(), toy.data(), tmp_path, 7, **settings(DPSGD()))
    stopped(toy.mlp(), toy.data(), tmp_path, 9, **settings(DPSGD()), resume=True)
    with pytest.raises(CheckpointError, match="it was written after a resume that drew new noise"):
        fit(toy.mlp(), toy.data(), **settings(DPSGD()), checkpoint=tmp_path, resume="exact")


def test_a_repeated_step_that_differs_is_stopped_before_anybody_sees_it(toy, tmp_path, monkeypatch):
    """As on a machine that adds in another order from one day to the next."""
    data, model, given = toy.data(), toy.mlp(), settings(DPSGD())
    stopped(model, data, tmp_path, 9, **given)
    shutil.rmtree(tmp_path / "step-00000009")  # steps 5 to 8 are repeated
    publish = Mechanism.publish
    monkeypatch.setattr(
        Mechanism, "publish", lambda self, total, *rest: publish(self, total * 1.5, *rest)
    )
    seen = []
    with pytest.raises(CheckpointError) as caught:
        fit(model, data, **given, checkpoint=tmp_path, resume="exact", observers=[seen.append])
    assert str(caught.value) == (
        "Draw 5 did not come out as when this run first made it, and one noise must not hide two "
        "sums, so nothing of it is returned. Resume with resume=True, which draws new noise."
    )
    assert seen == []
    monkeypatch.undo()
    resumed = fit(model, data, **given, checkpoint=tmp_path, resume="exact")
    assert_identical(toy, resumed, fit(model, data, **given))


@pytest.mark.parametrize("lost", ["file", "row"])
def test_without_the_digests_no_step_is_repeated(toy, tmp_path, lost):
    """Otherwise a step that differs would be published with the noise of the first."""
    given = settings(DPSGD(), q=1 / 60, steps=240)
    data, model, path = toy.data(), toy.mlp(), tmp_path / "digests-0.secret"
    stopped(model, data, tmp_path, 110, **given)
    shutil.rmtree(tmp_path / "step-00000110")  # steps 60 to 109 are repeated
    content, size = path.read_bytes(), len(path.read_bytes()) // 110
    if lost == "file":
        path.unlink()
    else:
        path.write_bytes(content[: 65 * size])
    with pytest.raises(CheckpointError) as caught:
        fit(model, data, **given, checkpoint=tmp_path, resume="exact")
    assert str(caught.value) == (
        f"{path} has no digest of draw {60 if lost == 'file' else 65}, so it cannot be checked "
        "that a repeated step publishes what it published before, and one noise must not hide two "
        "sums. Bring the file back from a copy, or resume with resume=True, which draws new noise."
    )
    path.write_bytes(content)
    again = fit(model, data, **given, checkpoint=tmp_path, resume="exact")
    assert_identical(toy, again, fit(model, data, **given))


def test_digests_are_on_the_disk_before_the_next_block(toy, tmp_path, monkeypatch):
    flushed, flush = [], os.fsync

    def watched(handle):
        flushed.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        flush(handle)

    monkeypatch.setattr(os, "fsync", watched)
    fit(toy.mlp(), toy.data(), **settings(DPSGD(), q=1 / 250, steps=200), checkpoint=tmp_path)
    assert flushed.count("digests-0.secret") == 2  # when it is created, and at the end
    flushed.clear()
    more = {**settings(DPSGD()), "steps": 250, "checkpoint_every": 1000}
    fit(toy.mlp(), toy.data(), **more, checkpoint=tmp_path / "more")
    written = [name for name in flushed if name.startswith(("digests", "journal"))]
    digests, journal = "digests-0.secret", "journal.jsonl"
    assert written == [digests, journal, digests, journal, digests, journal, digests]


def test_a_digest_that_cannot_be_written_stops_the_step(toy, tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, b: 7 if len(b) == 40 else write(handle, b))
    seen = []
    with pytest.raises(CheckpointError, match=r"digests-0.secret cannot be written \(No space"):
        fit(
            toy.mlp(), toy.data(), **settings(DPSGD()), checkpoint=tmp_path,
            observers=[seen.append],
        )  # fmt: skip
    assert seen == []


# --- when checkpoints are written, and Ctrl-C ---------------------------------------------------


def written(folder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted(folder.glob("step-*"))]


def test_one_is_written_after_every_epoch_and_the_one_before_is_kept(toy, tmp_path):
    data = toy.data()
    history = []
    fit(
        toy.mlp(),
        data,
        **settings(DPSGD()),
        checkpoint=tmp_path,
        observers=[lambda _: history.append(written(tmp_path))],
    )
    assert history == [[]] * 5 + [[5]] * 5 + [[5, 10]] * 5
    assert written(tmp_path) == [10, 15]


def test_one_is_written_after_each_interval_of_steps(toy, tmp_path):
    given, history = settings(DPSGD(), steps=8), []
    observers = [lambda _: history.append(written(tmp_path)[-1:])]
    fit(
        toy.mlp(), toy.data(), **given, checkpoint=tmp_path, checkpoint_every=3, observers=observers
    )
    assert history == [[], [], [], [3], [3], [5], [6], [6]]
    assert written(tmp_path) == [6, 8]


def test_ctrl_c_waits_for_the_step_saves_and_says_so(toy, tmp_path, capsys):
    stopped(toy.mlp(), toy.data(), tmp_path, 7, **settings(DPSGD()))
    assert written(tmp_path) == [5, 7]
    captured = capsys.readouterr()
    assert (
        captured.err
        == f"Stopped after step 7 of 15, saved in {tmp_path}; continue with resume=True.\n"
    )
    assert captured.out == ""
    published = json.loads((tmp_path / "step-00000007" / "published.json").read_text())
    assert published["t"] == sum(entry["steps"] for entry in published["ledger"]) == 7


def test_ctrl_c_without_a_folder_says_that_nothing_was_saved(toy, capsys):
    with pytest.raises(KeyboardInterrupt):
        fit(toy.mlp(), toy.data(), **settings(DPSGD()), observers=[Stop(7)])
    assert capsys.readouterr().err == (
        "Stopped after step 7 of 15; nothing was saved (no checkpoint folder was given).\n"
    )


def test_ctrl_c_is_pythons_own_again_afterwards(toy, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    stopped(toy.mlp(), toy.data(), tmp_path, 3, **settings(DPSGD()))
    assert signal.getsignal(signal.SIGINT) is before
    fit(toy.mlp(), toy.data(), **settings(DPSGD()))
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait():
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.came
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_right_after_the_decision_not_to_save_is_not_reported_as_saved(
    toy, tmp_path, capsys, monkeypatch
):
    """The signal may arrive at any moment; a reported checkpoint must exist."""
    looks = []

    def came(self):
        looks.append(1)
        return len(looks) > 1  # False on the first read, True on all later ones

    monkeypatch.setattr(Interrupt, "came", property(came, lambda self, value: None), raising=False)
    with pytest.raises(KeyboardInterrupt):
        fit(toy.mlp(), toy.data(), **settings(DPSGD()), checkpoint=tmp_path)
    stopped_at = re.search(r"Stopped after step (\d+) of 15, saved", capsys.readouterr().err)
    assert stopped_at is not None
    assert written(tmp_path)[-1] == int(stopped_at[1])


def test_training_works_outside_the_main_thread(toy):
    """Python lets only the main thread handle signals."""
    results = []
    thread = threading.Thread(
        target=lambda: results.append(fit(toy.mlp(), toy.data(), **settings(DPSGD())))
    )
    thread.start()
    thread.join()
    assert toy.same(results[0].model, fit(toy.mlp(), toy.data(), **settings(DPSGD())).model)


# --- damaged, foreign and left-over checkpoints -------------------------------------------------


@pytest.fixture
def folder(toy, tmp_path):
    """A folder with checkpoints of steps 5 and 7."""
    stopped(toy.mlp(), toy.data(), tmp_path, 7, **settings(DPSGDF()))
    return tmp_path


def resume(toy, folder, rule=None, data=None, model=None, how="exact", **more):
    given = settings(DPSGDF() if rule is None else rule, **more)
    return fit(model or toy.mlp(), data or toy.data(), **given, checkpoint=folder, resume=how)


def replaced(path, name, content):
    """Put another file into a checkpoint, with a manifest that lists it."""
    contents = files.read_folder(path, kinds.CHECKPOINT) | {name: content}
    files.write_folder(path, contents, kinds.CHECKPOINT, replace=True)


@pytest.mark.parametrize("name", ["model.pt", "secret.pt", "published.json"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_still_loads(
    toy, folder, name, damage
):
    bad = folder / "step-00000007"
    content = bytearray((bad / name).read_bytes())
    size = len(content)
    if damage == "cut":
        content = content[: size // 2]
    else:
        content[size // 2] ^= 1
    (bad / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        resume(toy, folder)
    assert str(caught.value) == (
        f"{bad / name} is damaged, or of another checkpoint: it is not the file that the manifest "
        "lists; use another checkpoint. The previous one, "
        f"{folder / 'step-00000005'}, is still there: remove step-00000007 and resume from that."
    )
    shutil.rmtree(bad)
    assert_identical(toy, resume(toy, folder), fit(toy.mlp(), toy.data(), **settings(DPSGDF())))


@pytest.mark.parametrize("name", ["manifest.json", "model.pt", "secret.pt", "published.json"])
def test_a_missing_file_is_named(toy, folder, name):
    bad = folder / "step-00000007"
    (bad / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        resume(toy, folder)
    why = "cannot be read (No such file or directory)" if name == "manifest.json" else "is missing"
    what = f"{bad / name} {why}; use another checkpoint."
    assert str(caught.value) == (
        f"{what} The previous one, {folder / 'step-00000005'}, is still there: remove "
        "step-00000007 and resume from that."
    )
    shutil.rmtree(bad)
    assert_identical(toy, resume(toy, folder), fit(toy.mlp(), toy.data(), **settings(DPSGDF())))


@pytest.mark.parametrize("content", ["", '{"model.pt": {"by', "[]", "{}", '{"model.pt": 3}'])
def test_a_damaged_manifest_is_named(toy, folder, content):
    bad = folder / "step-00000007"
    (bad / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        resume(toy, folder)
    assert str(caught.value).startswith(f"{bad / 'manifest.json'} ")
    assert "remove step-00000007 and resume from that." in str(caught.value)


def test_a_damaged_checkpoint_with_none_before_it(toy, folder):
    shutil.rmtree(folder / "step-00000005")
    (folder / "step-00000007" / "model.pt").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"There is no earlier one; start again in another folder\.$"
    ):
        resume(toy, folder)


def test_one_of_another_format_is_refused(toy, folder):
    path = folder / "step-00000007"
    published = json.loads((path / "published.json").read_text()) | {"format": 99}
    replaced(path, "published.json", json.dumps(published).encode())
    with pytest.raises(CheckpointError) as caught:
        resume(toy, folder)
    assert str(caught.value) == (
        f"{path} has another format than this version reads (5); resume with the version that "
        "wrote it."
    )


FOREIGN = {
    "rule": ({"rule": DPSGD()}, "rule: {'class': 'DPSGDF', "),
    "constant of the rule": ({"rule": DPSGDF(C0=2.0)}, "rule: {'class': 'DPSGDF', "),
    "learning rate": ({"lr": 0.1}, "lr: 0.2 there, 0.1 here"),
    "seed": ({"seed": 8}, "seed: another one there"),
    "epochs": ({"epochs": 4}, "steps: 15 there, 20 here"),
    "batch size": ({"batch_size": 10}, "q: 0.2 there, 0.25 here; B: 8.0 there, 10.0 here; "),
    "optimiser": ({"optimizer": Adam}, "optimizer: 'SGD' there, 'Adam' here"),
    "optimiser's own settings": (
        {"optimizer": partial(SGD, momentum=0.9)},
        "optimizer: 'SGD' there, 'SGD(momentum=0.9)' here",
    ),
}


@pytest.mark.parametrize("column", [0, 1, 2], ids=["features", "labels", "groups"])
def test_a_checkpoint_of_as_many_other_records_is_refused(toy, folder, column):
    """One number differs; the number of records is equal."""
    data = [part.clone() for part in toy.data()]
    last = data[column].view(-1)[-1:]
    last.copy_(last + 1 if column == 0 else 1 - last.clamp(max=1))
    with pytest.raises(
        CheckpointError,
        match=r"step-00000007 belongs to a run on other data: a record or the order",
    ):
        resume(toy, folder, data=tuple(data))


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_checkpoint_of_other_settings_is_refused(toy, folder, kind):
    other, reason = FOREIGN[kind]
    with pytest.raises(CheckpointError) as caught:
        resume(toy, folder, **other)
    assert str(caught.value).startswith(f"{folder / 'step-00000007'} belongs to another run (")
    assert reason in str(caught.value)
    assert str(caught.value).endswith(
        "). Resume with the settings it was started with, or choose another folder."
    )


def test_a_checkpoint_of_other_data_is_refused(toy, folder):
    with pytest.raises(
        CheckpointError,
        match=r"belongs to another run \(n: 40 there, 41 here; q: 0\.2 there, 0\.195",
    ):
        resume(toy, folder, data=toy.data(41))


def test_a_checkpoint_of_another_model_is_refused(toy, folder):
    with pytest.raises(
        CheckpointError, match=r"belongs to another run \(parameters: 57 there, 18 here\)"
    ):
        resume(toy, folder, model=nn.Linear(5, 3).double())


def test_a_checkpoint_of_another_model_of_the_same_size_is_refused(toy, folder):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 6).double(), nn.Linear(6, 3).double()

        def forward(self, x):
            return self.second(self.first(x).tanh())

    with pytest.raises(CheckpointError) as caught:
        resume(toy, folder, model=Named(), how=True)
    assert str(caught.value).startswith(f"{folder / 'step-00000007'} belongs to another model (")
    assert str(caught.value).endswith(
        "). Resume with the model it was started with, or choose another folder."
    )


def contents(folder) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def test_a_folder_with_a_checkpoint_is_not_written_into_unasked(toy, folder):
    before = contents(folder)
    with pytest.raises(CheckpointError) as caught:
        fit(toy.mlp(), toy.data(), **settings(DPSGDF()), checkpoint=folder)
    assert str(caught.value) == (
        f"{folder} already holds a checkpoint (step-00000007); pass resume=True to continue from "
        "it, or choose another folder."
    )
    with pytest.raises(CheckpointError):
        resume(toy, folder, lr=0.1)
    assert contents(folder) == before


def checkpoints(folder) -> dict[str, bytes]:
    """Return all files except for the journal and the digests, which grow with every step."""
    inside = contents(folder).items()
    return {name: b for name, b in inside if not name.startswith(("journal", "digests"))}


def test_a_crash_while_writing_leaves_the_one_before_it_whole(toy, folder, monkeypatch):
    before = checkpoints(folder)
    replace = os.replace

    def crash(source, target):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="the disk is full"):
        resume(toy, folder)
    monkeypatch.setattr(os, "replace", replace)
    assert checkpoints(folder) == before  # no partial checkpoint is left, which could hold secrets
    assert_identical(toy, resume(toy, folder), fit(toy.mlp(), toy.data(), **settings(DPSGDF())))


def test_nothing_is_a_checkpoint_before_it_is_whole(toy, folder, monkeypatch):
    """After a power cut at any moment of writing, the previous checkpoints are unchanged."""
    before, seen = checkpoints(folder), []
    synchronise, replace = os.fsync, os.replace

    def watched_synchronise(handle):
        there = checkpoints(folder).items()
        seen.append({name: content for name, content in there if name.startswith("step-")})
        synchronise(handle)

    def watched_replace(source, target):
        assert sorted(p.name for p in source.iterdir()) == [
            "manifest.json",
            "model.pt",
            "published.json",
            "secret.pt",
        ]
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_synchronise)
    monkeypatch.setattr(os, "replace", watched_replace)
    resume(toy, folder)
    # First the journal and its folder; then for each of two checkpoints: four files and their
    # folder are synchronised, then renamed, then the folder above; at last the digests.
    assert len(seen) == 2 + 2 * 6 + 1
    assert all(content == before for content in seen[:7])
    assert written(folder) == [10, 15]


def test_a_power_cut_while_writing_is_overlooked(toy, folder):
    """The files of a killed process are not taken for a checkpoint."""
    left = folder / ".evenclip-0123456789abcdef"
    left.mkdir()
    (left / "model.pt").write_bytes(b"half")
    assert_identical(toy, resume(toy, folder), fit(toy.mlp(), toy.data(), **settings(DPSGDF())))


# --- contents of the files -----------------------------------------------------------------------


@pytest.mark.parametrize("rule", [NonPrivate(), DPSGDF()], ids=lambda rule: rule.name)
def test_nothing_is_unpickled(toy, tmp_path, rule):
    given = settings(rule, optimizer=Adam, scheduler=partial(StepLR, step_size=1))
    stopped(toy.mlp(), toy.data(), tmp_path, 7, **given)
    path = tmp_path / "step-00000007"
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "model.pt",
        "published.json",
        "secret.pt",
    ]
    model = torch.load(path / "model.pt", weights_only=True)
    assert list(model) == list(toy.mlp().state_dict())
    secret = torch.load(path / "secret.pt", weights_only=True)
    assert sorted(secret) == [
        "conditions",
        "data",
        "drawn",
        "key",
        "optimizer",
        "scheduler",
        "seed",
        "trace",
    ]
    published = json.loads((path / "published.json").read_text())
    assert sorted(published) == [
        "durable", "first_steps", "format", "journal", "ledger", "parent", "place", "remaining",
        "reserved", "settings", "state", "state_dtype", "t",
    ]  # fmt: skip


class Payload:
    """An object whose unpickling would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["model.pt", "secret.pt"])
def test_code_in_a_checkpoint_is_not_run(toy, tmp_path, name):
    """Even if the manifest has the right checksum."""
    stopped(toy.mlp(), toy.data(), tmp_path, 7, **settings(DPSGD()))
    path, made = tmp_path / "step-00000007", tmp_path / "made"
    packed = io.BytesIO()
    torch.save({"payload": Payload(made)}, packed)
    replaced(path, name, packed.getvalue())
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load(path)
    assert not made.exists()


def test_what_may_be_published_holds_no_seed(toy, tmp_path):
    """Neither the seed nor a hash of it that could be searched."""
    names = []
    for seed in (123_456_789, 987_654_321):
        folder = tmp_path / str(seed)
        stopped(toy.mlp(), toy.data(), folder, 7, **settings(DPSGDF(), seed=seed))
        content = (folder / "step-00000007" / "published.json").read_text()
        assert str(seed) not in content
        names.append(
            fit(toy.mlp(), toy.data(), **settings(DPSGDF(), seed=seed)).privacy["specification"]
        )
    assert names[0] == names[1]


def test_what_may_be_published_holds_no_key(toy, tmp_path):
    """Neither the key nor a digest of the data occurs outside of the secret files."""
    data = toy.data()
    stopped(toy.mlp(), data, tmp_path, 7, **settings(DPSGDF()))
    path = tmp_path / "step-00000007"
    secret = torch.load(path / "secret.pt", weights_only=True)
    plain = digest(as_dataset(data))
    assert secret["data"].split()[0] == "all"
    hidden = [secret["key"].hex(), secret["data"].split()[1], plain, *secret["conditions"].values()]
    assert all(len(word) >= 64 for word in hidden)  # long enough to be found
    for name in ("step-00000007/model.pt", "step-00000007/published.json", "journal.jsonl"):
        content = (tmp_path / name).read_bytes()
        for word in hidden:
            assert word.encode() not in content
            assert bytes.fromhex(word) not in content
    assert plain.encode() not in (path / "secret.pt").read_bytes()
    text = (path / "published.json").read_text()
    assert not re.search("noise|generator|batches|dropout|optimizer_state|trace|loss", text)


def test_the_data_fingerprint_is_of_no_use_without_the_key(toy, tmp_path):
    """The same data have another fingerprint in every run, so a copy of it tells nothing."""
    marks = []
    for name in "ab":
        given = settings(DPSGDF(), seed=None)
        stopped(toy.mlp(), toy.data(), tmp_path / name, 7, **given)
        path = tmp_path / name / "step-00000007" / "secret.pt"
        marks.append(torch.load(path, weights_only=True)["data"])
    assert marks[0] != marks[1]


def test_records_that_collide_under_a_sum_have_two_fingerprints():
    """The plain and the position-weighted sum of 1, 1, 1 are those of 0, 3, 0."""
    y = torch.zeros(3, dtype=torch.int64)
    columns = torch.tensor([[1, 1, 1], [0, 3, 0]])
    places = torch.tensor([1, 3, 5])
    assert torch.equal(columns.sum(dim=1), torch.tensor([3, 3]))
    assert torch.equal(columns @ places, torch.tensor([9, 9]))
    one, other = (digest(Dataset(column.unsqueeze(1), y)) for column in columns)
    assert one != other


def test_the_secret_file_is_for_its_owner_alone(toy, folder):
    for path in (*folder.glob("step-*/secret.pt"), folder / "digests-0.secret"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_published_is_what_the_result_says(toy, tmp_path):
    result = fit(toy.mlp(), toy.data(), **settings(DPSGDF()), checkpoint=tmp_path)
    path = tmp_path / "step-00000015"
    published = json.loads((path / "published.json").read_text())
    assert published["state"] == result.state.tolist()
    assert published["ledger"] == result.ledger.to_json()
    assert published["settings"]["n"] == 40
    model = toy.mlp()
    model.load_state_dict(torch.load(path / "model.pt", weights_only=True))
    assert toy.same(model, result.model)
