"""A resumed, copied or forked run is a branch: new noise, and all steps that may have been seen."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch

from evenclip import DPSGD, DPSGDF, Performance, files, fit, prepare
from evenclip.mechanism import Ledger, Mechanism, accounting
from evenclip.mechanism.entry import Entry
from evenclip.training.checkpoint import CheckpointError, latest
from evenclip.training.fit import train
from evenclip.training.journal import Journal, journaled

T = 15  # 40 records, batches of 8, three epochs


class Stop(Exception):  # noqa: N818
    """A failure that Python handles, so that the run ends in order."""


def settings(**more):
    return {"rule": DPSGD(), "batch_size": 8, "epochs": 3, "lr": 0.2, **more}


def at(step_number, act):
    """Return an observer that acts in one step, before its update."""

    def observe(step):
        if step.t == step_number:
            act()

    return observe


def stop():
    raise Stop


def stopped(toy, folder, t, **given) -> None:
    """Train until an exception in step t, after a checkpoint of every step before it."""
    with pytest.raises(Stop):
        fit(
            toy.mlp(), toy.data(), checkpoint=folder, checkpoint_every=1,
            observers=[at(t, stop)], **settings(**given),
        )  # fmt: skip


def in_a_child(act) -> int:
    """Call act() in a forked process; return its exit status."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(toy, folder, t, **given) -> None:
    """Train in a process that is killed in step t, so that nothing of it ends in order."""
    observers = [at(t, lambda: os._exit(9))]
    given = settings(**given)
    doomed = partial(fit, toy.mlp(), toy.data(), checkpoint=folder, observers=observers, **given)
    assert in_a_child(doomed) == 9


def resumed(toy, folder, **given):
    return fit(toy.mlp(), toy.data(), checkpoint=folder, resume=True, **settings(**given))


def runs(ledger) -> dict[str, list[Entry]]:
    """Return run -> its entries."""
    return {
        e.run: [other for other in ledger.entries if other.run == e.run] for e in ledger.entries
    }


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


# --- new noise ----------------------------------------------------------------------------------


def drawn(run, steps=3):
    """Return batches and noise of some draws."""
    batches = [run.batches.sampler.batch(i).tolist() for i in range(steps)]
    return batches, torch.stack([run.noise.of(i)["gradient"][:] for i in range(steps)])


def assert_nothing_shared(one, other) -> None:
    assert one.key != other.key
    assert one.run_id != other.run_id
    (batches, noise), (others, other_noise) = drawn(one), drawn(other)
    assert batches != others
    assert not torch.isclose(noise, other_noise).any()


@pytest.mark.parametrize("seed", [None, 9])
def test_two_continuations_of_one_checkpoint_share_nothing(toy, tmp_path, seed):
    stopped(toy, tmp_path / "a", 7, seed=seed)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    branches = []
    for name in "ab":
        run = prepare(toy.mlp(), toy.data(), **settings(seed=seed))
        run.restore(latest(tmp_path / name))
        branches.append(run)
        assert run.parent == (branches[0].parent[0], 7)
    original = prepare(toy.mlp(), toy.data(), **settings(seed=9))
    assert_nothing_shared(*branches)
    assert_nothing_shared(branches[0], original)


def test_the_union_of_two_branches_counts_their_beginning_once(toy, tmp_path):
    stopped(toy, tmp_path / "a", 7)  # draw 7 is made
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    ledgers = [resumed(toy, tmp_path / name).ledger for name in "ab"]
    for ledger in ledgers:
        (parent, old), (branch, new) = runs(ledger).items()
        assert [(e.steps, e.reserved) for e in old] == [(7, False), (1, True)]
        assert [e.steps for e in new] == [8]
        assert new[0].parent == (parent, 7)
        assert branch != parent
    union = Ledger.union(*ledgers)
    assert union.steps == 8 + 8 + 8
    assert len(runs(union)) == 3
    assert accounting.epsilon(union, 1e-3) > accounting.epsilon(ledgers[0], 1e-3)


def test_a_branch_alone_is_refused_because_its_beginning_is_missing(toy, tmp_path):
    stopped(toy, tmp_path, 7)
    (_, _), (_, branch) = runs(resumed(toy, tmp_path).ledger).items()
    with pytest.raises(ValueError, match="give the ledger of run"):
        Ledger.union(Ledger(branch))


# --- written ahead ------------------------------------------------------------------------------


def test_a_step_is_on_the_disk_before_anything_is_seen_of_it(toy, tmp_path):
    seen = []

    def observe(step):
        entries = journaled(tmp_path).entries
        assert all(entry.reserved for entry in entries)
        seen.append(any(entry.first <= step.t < entry.end for entry in entries))

    fit(toy.mlp(), toy.data(), checkpoint=tmp_path, observers=[observe], **settings())
    assert seen == [True] * T


def test_the_file_and_its_folder_are_flushed_before_the_batch_is_drawn(toy, tmp_path, monkeypatch):
    events, flush = [], os.fsync

    def watched(handle):
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        flush(handle)

    run = prepare(toy.mlp(), toy.data(), **settings())
    run.write_ahead(tmp_path)
    draw = run.batches.draw
    monkeypatch.setattr(os, "fsync", watched)
    run.batches.draw = lambda *given: events.append("draw") or draw(*given)
    with run.listening():
        for _ in range(3):
            run.update(run.step())
    assert events == ["file", "folder", "draw", "draw", "draw", "file", "folder"]


def test_blocks_are_of_an_epoch_and_at_least_a_hundred_steps(toy, tmp_path):
    """So that flushing takes no time: once in 100 steps."""
    fit(toy.mlp(), toy.data(), checkpoint=tmp_path / "a", **settings(steps=250, epochs=1))
    blocks = [(line["first"], line["entries"][0]["steps"]) for line in lines(tmp_path / "a")]
    assert blocks == [(0, 100), (100, 100), (200, 50)]
    long = settings(batch_size=8, q=1 / 150, steps=200)
    fit(toy.mlp(), toy.data(), checkpoint=tmp_path / "b", **long)
    assert [line["first"] for line in lines(tmp_path / "b")] == [0, 150]


def test_steps_that_a_killed_process_may_have_taken_count(toy, tmp_path):
    killed(toy, tmp_path, 7)  # after the checkpoint of step 5
    assert [line["entries"][0]["steps"] for line in lines(tmp_path)] == [T]
    result = resumed(toy, tmp_path)
    (_, old), (_, new) = runs(result.ledger).items()
    assert [(e.steps, e.reserved) for e in old] == [(5, False), (T - 5, True)]
    assert [(e.steps, e.reserved) for e in new] == [(T - 5, False)]
    once = fit(toy.mlp(), toy.data(), **settings())
    assert result.epsilon() > once.epsilon()
    assert result.epsilon() == accounting.epsilon(result.ledger, result.settings.delta)
    assert result.ledger.steps == T + T - 5


def test_a_process_that_is_killed_again_and_again_is_counted_each_time(toy, tmp_path):
    killed(toy, tmp_path, 7)
    killed(toy, tmp_path, 8, resume=True)
    killed(toy, tmp_path, 9, resume=True)
    result = resumed(toy, tmp_path)
    assert len(runs(result.ledger)) == 4
    assert result.ledger.steps == T + 3 * (T - 5)


def test_a_process_that_is_killed_before_its_first_checkpoint_is_counted(toy, tmp_path):
    killed(toy, tmp_path, 3)
    assert latest(tmp_path) is None
    with pytest.raises(CheckpointError) as caught:
        fit(toy.mlp(), toy.data(), checkpoint=tmp_path, **settings())
    assert str(caught.value) == (
        f"{tmp_path} already holds the journal of a run; pass resume=True to continue from it, or "
        "choose another folder."
    )
    assert resumed(toy, tmp_path).ledger.steps == 2 * T


def test_a_run_that_ends_in_order_frees_the_rest_of_its_block(toy, tmp_path):
    stopped(toy, tmp_path, 7)  # draw 7 is made, and no other
    assert [len(line["entries"]) for line in lines(tmp_path)] == [1, 0]
    assert journaled(tmp_path).steps == 8
    assert resumed(toy, tmp_path).ledger.steps == 8 + (T - 7)


def test_an_exact_resume_counts_repeated_steps_once(toy, tmp_path):
    killed(toy, tmp_path, 7, seed=9)
    exact = settings(seed=9, checkpoint=tmp_path, resume="exact")
    again, whole = (
        fit(toy.mlp(), toy.data(), **exact),
        fit(toy.mlp(), toy.data(), **settings(seed=9)),
    )
    assert again.ledger == whole.ledger
    assert toy.same(again.model, whole.model)
    assert again.trace == whole.trace


LONG = {"q": 1 / 60, "steps": 240}  # an epoch has 60 steps, a block 100


def test_an_exact_attempt_that_ends_earlier_erases_no_step_of_the_one_before(toy, tmp_path):
    """It makes the same draws again, and the first attempt has published more of them."""
    killed(toy, tmp_path, 110, seed=9, **LONG)  # draws 100 to 199 are reserved
    exact = {"checkpoint": tmp_path, "resume": "exact", **settings(seed=9, **LONG)}
    with pytest.raises(Stop):
        fit(toy.mlp(), toy.data(), observers=[at(65, stop)], **exact)
    assert [(e.first, e.steps) for e in journaled(tmp_path).entries] == [(0, 200)]
    again = resumed(toy, tmp_path, seed=9, **LONG).ledger
    assert again.steps == 200 + (240 - 60)


def test_going_back_exactly_within_a_process_erases_no_step(toy, tmp_path):
    run = prepare(toy.mlp(), toy.data(), **settings(seed=9))
    run.write_ahead(tmp_path)
    with run.listening():
        for t in range(8):
            run.update(run.step())
            if t == 1:
                run.save(tmp_path)
    run.restore(latest(tmp_path), exact=True)
    with run.listening():
        run.update(run.step())
    assert (run.t, run.drawn) == (3, 3)
    assert [(e.first, e.steps) for e in journaled(tmp_path).entries] == [(0, 8)]
    assert run.ledger.steps == 8
    assert Ledger.union(run.ledger, run.remaining).steps == T  # draws 3 to 7 are reserved


def test_a_repeated_step_that_differs_erases_no_step(toy, tmp_path, monkeypatch):
    killed(toy, tmp_path, 9, seed=9)
    publish = Mechanism.publish
    monkeypatch.setattr(
        Mechanism, "publish", lambda self, total, *rest: publish(self, total * 1.5, *rest)
    )
    with pytest.raises(CheckpointError, match="did not come out"):
        fit(
            toy.mlp(), toy.data(), checkpoint=tmp_path, resume="exact", **settings(seed=9)
        )  # fmt: skip
    assert journaled(tmp_path).steps == T


def test_a_draw_with_another_noise_than_it_had_is_not_made(toy, tmp_path):
    """The first attempt took step 1 twice, and a second one does not."""
    sigmas = [1.0 + t for t in range(T)]

    def started():
        run = prepare(toy.mlp(), toy.data(), **settings(seed=9))
        run.mechanism = _Varying(run.mechanism, sigmas)
        return run

    run = started()
    run.write_ahead(tmp_path)
    with run.listening():
        run.update(run.step())
        run.save(tmp_path)
        run.step()
        run.update(run.step())
        run.update(run.step())
    other = started()
    other.restore(latest(tmp_path), exact=True)
    other.write_ahead(tmp_path)
    with other.listening():
        other.update(other.step())
        with pytest.raises(CheckpointError, match="Draw 2 is another step than the one that an"):
            other.step()
    assert [(e.first, e.steps) for e in journaled(tmp_path).entries] == [(0, 1), (1, 2), (3, 1)]


def test_new_noise_also_before_the_first_checkpoint(toy, tmp_path):
    """The seed's noise may have been published already."""
    killed(toy, tmp_path, 3, seed=9)
    result, original = (
        resumed(toy, tmp_path, seed=9),
        fit(toy.mlp(), toy.data(), **settings(seed=9)),
    )
    assert result.ledger.steps == 2 * T
    assert not toy.same(result.model, original.model)
    assert set(runs(original.ledger)) < set(runs(result.ledger))
    (tmp_path / "new").mkdir()  # without a step in the journal, the seed determines the noise
    assert toy.same(resumed(toy, tmp_path / "new", seed=9).model, original.model)


# --- "all attempts" -----------------------------------------------------------------------------


def covers_all(result) -> bool:
    return result.privacy["ledger_covers"].startswith("all attempts")


def test_a_second_checkpoint_of_a_step_has_the_draws_since_the_first(toy, tmp_path):
    run = prepare(toy.mlp(), toy.data(), **settings())
    with run.listening():
        run.update(run.step())
        for _ in range(3):
            run.save(tmp_path)
        for _ in range(2):
            run.step()
            run.save(tmp_path)
    names = [path.name for path in sorted(tmp_path.glob("step-*"))]
    assert names == ["step-00000001-0001", "step-00000001-0002"]
    result = resumed(toy, tmp_path)
    assert result.ledger.steps == 3 + (T - 1)
    assert result.ledger.entries[-1].parent in {(run.run_id, 3), None}
    assert not covers_all(result)


def test_a_branch_that_is_saved_before_it_draws_has_its_own_key(toy, tmp_path):
    stopped(toy, tmp_path, 7)
    run = prepare(toy.mlp(), toy.data(), **settings())
    run.restore(latest(tmp_path))
    run.save(tmp_path)
    assert latest(tmp_path).name == "step-00000007-0001"
    published = json.loads((latest(tmp_path) / "published.json").read_text())
    assert published["place"] == [run.run_id, 0]


def test_steps_without_a_journal_are_remembered(toy, tmp_path):
    """Their number after the last checkpoint is unknown for ever."""
    run = prepare(toy.mlp(), toy.data(), **settings())
    with run.listening():
        run.update(run.step())
        run.save(tmp_path)
        for _ in range(5):  # seen, and lost
            run.update(run.step())
    run.write_ahead(tmp_path)  # too late
    assert not run.durable
    first = resumed(toy, tmp_path, epochs=3)
    assert not covers_all(first)
    assert not covers_all(resumed(toy, tmp_path, epochs=4))


def test_a_checkpoint_in_another_folder_than_its_journal_is_not_durable(toy, tmp_path):
    run = prepare(toy.mlp(), toy.data(), **settings())
    (tmp_path / "a").mkdir()
    run.write_ahead(tmp_path / "a")
    with run.listening():
        run.update(run.step())
        run.save(tmp_path / "a")
        run.save(tmp_path / "b")
    assert covers_all(resumed(toy, tmp_path / "a"))
    assert not covers_all(resumed(toy, tmp_path / "b"))


def test_steps_before_the_journal_are_written_into_it(toy, tmp_path):
    run = prepare(toy.mlp(), toy.data(), **settings())
    with run.listening():
        for _ in range(3):
            run.update(run.step())
        run.write_ahead(tmp_path)
        run.update(run.step())
    assert [(e.first, e.steps) for e in journaled(tmp_path).entries] == [(0, 4)]
    assert resumed(toy, tmp_path).ledger.steps == 4 + T


# --- lost and shortened journals ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["older", "empty", "other"])
def test_a_journal_that_lost_lines_is_refused(toy, tmp_path, how):
    killed(toy, tmp_path, 110, **LONG)
    path = tmp_path / "journal.jsonl"
    stopped(toy, tmp_path, 112, resume=True, **LONG)
    content = path.read_bytes()
    other = [json.loads(line) | {"attempt": "0"} for line in content.splitlines()]
    shorter = {"older": content.partition(b"\n")[0] + b"\n", "empty": b""}
    path.write_bytes(shorter.get(how, b"".join(files.sealed(line, None) for line in other)))
    with pytest.raises(CheckpointError) as caught:
        resumed(toy, tmp_path, **LONG)
    kept = json.loads((latest(tmp_path) / "published.json").read_text())["journal"]["bytes"]
    why = {
        "older": f"it holds {len(shorter['older'])} bytes, and {kept} were written",
        "empty": f"it holds 0 bytes, and {kept} were written",
        "other": "its beginning differs",
    }[how]
    assert str(caught.value) == (
        f"{path} is not the one that {latest(tmp_path).name} was saved with: {why}. Steps of "
        "earlier attempts may be missing in it; bring the file back from a copy, or start again "
        "in another folder."
    )


def test_without_its_journal_a_checkpoint_does_not_know_all_attempts(toy, tmp_path):
    killed(toy, tmp_path, 7)
    (tmp_path / "journal.jsonl").unlink()
    result = resumed(toy, tmp_path)
    assert result.ledger.steps == T + (T - 5)
    assert not covers_all(result)


def test_a_last_line_that_lost_its_end_counts(toy, tmp_path):
    killed(toy, tmp_path, 3)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="already holds the journal of a run"):
        fit(toy.mlp(), toy.data(), checkpoint=tmp_path, **settings())
    assert journaled(tmp_path).steps == T
    assert resumed(toy, tmp_path).ledger.steps == 2 * T  # and it is not crossed out
    assert journaled(tmp_path).steps == 2 * T


def test_a_folder_with_an_unreadable_journal_is_not_taken_for_a_new_one(toy, tmp_path):
    (tmp_path / "journal.jsonl").write_bytes(b'{"attempt": "')
    with pytest.raises(CheckpointError, match="already holds the journal of a run"):
        fit(toy.mlp(), toy.data(), checkpoint=tmp_path, **settings())


@pytest.mark.parametrize(
    "change",
    [{"first": -1}, {"run": "b"}, {"first": 3}, {"steps": -5}, {"steps": 0}, {"q": 2}, {"lam": -1}],
    ids=str,
)
def test_a_line_with_impossible_values_is_damaged(tmp_path, change):
    Journal(tmp_path).reserve("a", 0, [ENTRY])
    (line,) = lines(tmp_path)
    if "first" in change or "run" in change:
        line |= change
    else:
        line["entries"][0] |= change
    (tmp_path / "journal.jsonl").write_bytes(files.sealed(line, None))
    with pytest.raises(CheckpointError, match=r"^Line 1 of .* is damaged"):
        journaled(tmp_path)


def test_attempts_that_contradict_each_other_are_refused(tmp_path):
    other = replace(ENTRY, multipliers=(("gradient", 2.0),))
    for entry in (ENTRY, other):
        Journal(tmp_path).reserve("a", 0, [entry])
    with pytest.raises(CheckpointError, match="contradicts itself, so the steps of earlier att"):
        journaled(tmp_path)


def test_a_run_whose_first_steps_are_missing_is_refused(toy, tmp_path):
    Journal(tmp_path).reserve("a", 5, [replace(ENTRY, first=5)])
    with pytest.raises(ValueError, match="Draw 0 of run a is missing, and later ones are there"):
        resumed(toy, tmp_path)


def test_every_new_folder_is_on_the_disk(toy, tmp_path, monkeypatch):
    """Otherwise a power cut may take the journal with the folder above its own."""
    flushed, flush = [], os.fsync

    def watched(handle):
        flushed.append(os.readlink(f"/proc/self/fd/{handle}"))
        flush(handle)

    monkeypatch.setattr(os, "fsync", watched)
    fit(toy.mlp(), toy.data(), checkpoint=tmp_path / "a" / "b" / "c", **settings(steps=1, epochs=1))
    above = [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    assert sorted(flushed[:3]) == above


def test_a_checkpoint_that_was_copied_without_its_journal_knows_what_was_reserved(toy, tmp_path):
    killed(toy, tmp_path / "a", 7)
    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a" / "step-00000005", tmp_path / "b" / "step-00000005")
    assert resumed(toy, tmp_path / "b").ledger.steps == T + (T - 5)


def test_a_run_that_is_extended_has_the_epsilon_of_all_its_steps(toy, tmp_path):
    first = fit(toy.mlp(), toy.data(), checkpoint=tmp_path, **settings())
    longer = resumed(toy, tmp_path, epochs=5)
    assert longer.ledger.steps == 25
    assert longer.epsilon() > first.epsilon()
    with pytest.raises(CheckpointError, match="steps: 25 there, 15 here"):
        resumed(toy, tmp_path)  # fewer steps, chosen after the fact, have the ε that was declared


def test_only_a_run_with_a_folder_is_durable(toy, tmp_path):
    run = prepare(toy.mlp(), toy.data(), **settings())
    assert not run.durable
    run.write_ahead(tmp_path)
    assert run.durable


def test_a_block_has_the_noise_of_each_of_its_steps(toy, tmp_path):
    run = prepare(toy.mlp(), toy.data(), **settings())
    mechanism = run.mechanism
    sigmas = [1.0 + t // 2 for t in range(T + 1)]
    run.mechanism = _Varying(mechanism, sigmas)
    run.write_ahead(tmp_path)
    with run.listening():
        run.update(run.step())
        written = journaled(tmp_path)
        assert [(e.first, e.steps, e.multipliers) for e in written.entries[:2]] == [
            (0, 2, (("gradient", 1.0),)),
            (2, 2, (("gradient", 2.0),)),
        ]
        run.step()  # draw 1, of step 1
        run.update(run.step())  # draw 2, of step 1 again: the block has the noise of step 2 there
    entries = journaled(tmp_path).entries
    assert [(e.first, e.steps, e.multipliers[0][1]) for e in entries] == [(0, 3, 1.0)]
    assert Ledger.union(run.ledger, journaled(tmp_path)).steps == 3


class _Varying:
    """A mechanism with another multiplier for each step."""

    def __init__(self, mechanism, sigmas) -> None:
        self._mechanism, self._sigmas, self.varies = mechanism, sigmas, True

    def __getattr__(self, name):
        return getattr(self._mechanism, name)

    def at(self, t):
        rule = replace(self._mechanism.rule, sigma=self._sigmas[t])
        return replace(self._mechanism, rule=rule)


# --- damaged journals ---------------------------------------------------------------------------


ENTRY = Entry(0.1, (("gradient", 1.0),), 5, run="a")


def test_a_line_that_was_being_written_is_no_line(tmp_path):
    """The process was killed before the line was flushed, so it drew nothing of it."""
    Journal(tmp_path).reserve("a", 0, [ENTRY])
    whole = (tmp_path / "journal.jsonl").read_bytes()
    for cut in range(1, len(whole) - 1):
        (tmp_path / "journal.jsonl").write_bytes(whole + whole[:cut].replace(b'"a"', b'"b"'))
        after = journaled(tmp_path).entries
        assert [(e.run, e.steps) for e in after] == [("a", 5)]
        Journal(tmp_path).reserve("c", 0, [replace(ENTRY, run="c")])
        assert {e.run for e in journaled(tmp_path).entries} == {"a", "c"}


def test_a_damaged_line_is_named(toy, tmp_path):
    killed(toy, tmp_path, 7)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"steps"', b'"stops"'))
    with pytest.raises(CheckpointError) as caught:
        resumed(toy, tmp_path)
    assert str(caught.value) == (
        f"Line 1 of {path} is damaged, so the steps of earlier attempts cannot be counted; bring "
        "the file back from a copy, or start again in another folder."
    )


def test_without_room_for_the_journal_no_step_is_taken(toy, tmp_path, monkeypatch):
    run = prepare(toy.mlp(), toy.data(), **settings())
    run.write_ahead(tmp_path / "gone")
    with run.listening(), pytest.raises(CheckpointError, match="cannot be written"):
        run.step()
    assert (run.drawn, run.ledger.steps) == (0, 0)


# --- copies and forks ---------------------------------------------------------------------------


def pickled(run):
    return pickle.loads(pickle.dumps(run))


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickled}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("seed", [None, 9])
def test_a_copy_is_a_branch(toy, how, seed):
    run = prepare(toy.mlp(), toy.data(), **settings(seed=seed))
    with run.listening():
        run.update(run.step())
    other = COPIES[how](run)
    assert_nothing_shared(run, other)
    assert (other.parent, other.drawn, other.t) == ((run.run_id, 1), 0, 1)
    assert not other.durable
    if how != "copy":  # which shares the model
        train(run)
        train(other)
        assert run.ledger.steps == other.ledger.steps == T
        assert not toy.same(run.model, other.model)
        assert Ledger.union(run.ledger, other.ledger).steps == T + T - 1
    third = COPIES[how](other)
    assert_nothing_shared(other, third)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_deep_copy_trains_its_own_model(toy, optimizer):
    """Its parameters are views of its own vector, not of the first run's."""
    run = prepare(toy.mlp(), toy.data(), **settings(optimizer=optimizer))
    other = copy.deepcopy(run)
    before = toy.vector(run.model)
    train(other)
    assert torch.equal(toy.vector(run.model), before)
    assert not torch.equal(toy.vector(other.model), before)


def test_a_pickle_holds_no_key(toy):
    run = prepare(toy.mlp(), toy.data(), **settings(seed=9))
    content = pickle.dumps(run)
    assert run.key not in content
    assert run.key.hex().encode() not in content


def test_a_run_is_not_copied_between_two_steps(toy):
    run = prepare(toy.mlp(), toy.data(), **settings())
    with run.listening(), pytest.raises(RuntimeError) as caught:
        copy.deepcopy(run)
    assert str(caught.value) == (
        "Copy a run outside `with run.listening():`, where it takes steps."
    )


def reported(act) -> dict:
    """Return what act() returns in a forked process."""
    read, write = os.pipe()

    def write_result():
        buffer = io.BytesIO()
        torch.save(act(), buffer)
        with open(write, "wb") as file:
            file.write(buffer.getvalue())

    assert in_a_child(write_result) == 0
    os.close(write)
    with open(read, "rb") as file:
        return torch.load(io.BytesIO(file.read()), weights_only=True)


@pytest.mark.parametrize("seed", [None, 9])
def test_a_forked_process_draws_its_own_noise(toy, tmp_path, seed):
    """Inside `listening`, as a forking server would: the two batches must not share a noise."""
    run = prepare(toy.mlp(), toy.data(), **settings(seed=seed))
    run.write_ahead(tmp_path)

    def step() -> dict:
        public = run.step().public
        return {"gradient": public.gradient, "run": run.run_id, "ledger": run.ledger.to_json()}

    with run.listening():
        run.update(run.step())
        children = [reported(step) for _ in range(2)]
        mine = step()
    assert len({mine["run"], *(child["run"] for child in children)}) == 3
    gradients = [mine["gradient"], *(child["gradient"] for child in children)]
    assert not any(torch.equal(a, b) for i, a in enumerate(gradients) for b in gradients[:i])
    ledgers = [Ledger.from_json(given["ledger"]) for given in (mine, *children)]
    union = Ledger.union(*ledgers)
    assert union.steps == 2 + 1 + 1
    assert {e.parent for e in union.entries} == {None, (mine["run"], 1)}
    # All branches are in the journal of the folder.
    assert {e.run for e in journaled(tmp_path).entries} == {e.run for e in union.entries}


def test_a_forked_process_that_leaves_the_loop_closes_nothing_of_the_parent(toy, tmp_path):
    run = prepare(toy.mlp(), toy.data(), **settings())
    run.write_ahead(tmp_path)

    context = run.listening()
    context.__enter__()
    run.update(run.step())
    before = lines(tmp_path)
    assert in_a_child(lambda: context.__exit__(None, None, None)) == 0
    assert lines(tmp_path) == before
    context.__exit__(None, None, None)
    assert [len(line["entries"]) for line in lines(tmp_path)] == [1, 0]


def test_a_second_step_before_the_update_is_a_draw_of_its_own(toy):
    run = prepare(toy.mlp(), toy.data(), **settings(seed=9))
    with run.listening():
        one, other = run.step(), run.step()
        noises = [step.public.gradient * step.B - step.clipped_sum for step in (one, other)]
        assert not torch.isclose(*noises).any()
        assert run.ledger.steps == run.drawn == 2
        run.update(other)
    assert run.t == 1
    train(run)
    assert run.ledger.steps == T + 1
    assert [(e.first, e.steps) for e in run.ledger.entries] == [(0, T + 1)]


def test_two_copies_share_nothing(toy):
    run = prepare(toy.mlp(), toy.data(), **settings())
    assert_nothing_shared(copy.deepcopy(run), copy.deepcopy(run))


def test_going_back_to_a_checkpoint_forgets_no_step(toy, tmp_path):
    """Observers have seen the steps after it."""
    run = prepare(toy.mlp(), toy.data(), **settings())
    with run.listening():
        for t in range(4):
            run.update(run.step())
            if t == 1:
                run.save(tmp_path)
    run.restore(latest(tmp_path))
    assert (run.t, run.ledger.steps) == (2, 4)
    train(run)
    assert run.ledger.steps == 4 + (T - 2)


def test_a_step_that_is_thrown_away_is_counted_after_a_resume(toy, tmp_path):
    run = prepare(toy.mlp(), toy.data(), **settings())
    with run.listening():
        run.step()
        run.update(run.step())
    run.save(tmp_path)
    result = resumed(toy, tmp_path)
    assert result.ledger.steps == 2 + (T - 1)
    assert runs(result.ledger)[result.ledger.entries[-1].run][0].parent == (run.run_id, 2)


@pytest.mark.parametrize("rule", [DPSGD(), DPSGDF()], ids=lambda rule: rule.name)
def test_branches_of_a_run_in_chunks(toy, tmp_path, rule):
    given = {"rule": rule, "performance": Performance(chunk=3)}
    stopped(toy, tmp_path, 7, **given)
    assert resumed(toy, tmp_path, **given).ledger.steps == 8 + (T - 7)
