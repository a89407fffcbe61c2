"""Files and attempts that hide how many steps were declared.

The owner declares T steps, looks at the results, and stops: by a kill, so that no report is made.
Then they hand in the files that make ε smallest: the journal without the report, an early
checkpoint beside the journal, a folder in which a shorter training was started again. Files are not
forged, but any may be left out. ε belongs to the steps that were declared before anything was seen,
so it must not be smaller than theirs, and handing in one more file must never lower it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from evenclip import DPSGD, fit, prepare
from evenclip.cli import epsilon as command
from evenclip.cli import ledgers, main
from evenclip.files import sealed
from evenclip.mechanism import Entry, Ledger, accounting, declared
from evenclip.mechanism.declared import covered, open_declarations, undeclared, unmet
from evenclip.rules import FairLens
from evenclip.training import journal
from evenclip.training.checkpoint import CheckpointError, latest
from evenclip.training.fit import result
from evenclip.training.run import Run

DELTA, LONG, SHORT = 1e-5, 240, 30  # an epoch has 60 steps; draws are reserved in blocks of 100


def started(steps=LONG, **given):
    options = {"rule": DPSGD(sigma=4.0), "batch_size": 8, "q": 1 / 60, "delta": DELTA}
    torch.manual_seed(0)
    data = (torch.randn(40, 3), torch.arange(40) % 2)
    return nn.Linear(3, 2), data, options | {"steps": steps} | given


def trained(folder, steps=LONG, **given):
    model, data, options = started(steps, **given)
    return fit(model, data, checkpoint=folder, **options)


def killed(folder, t, steps=LONG, **given):
    """Train in a process that is killed in step t."""

    def kill(step):
        if step.t == t:
            os._exit(9)

    child = os.fork()
    if child == 0:
        try:
            trained(folder, steps, observers=[kill], **given)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def price(steps, sigma=4.0):
    """Return ε of a number of steps that were declared, each like those of `started`."""
    model, data, options = started(1, rule=DPSGD(sigma=sigma))
    run = prepare(model, data, **options)
    (entry,) = run.remaining.entries
    whole = replace(entry, steps=steps, run="", first=0)
    return accounting.epsilon(Ledger([whole]), DELTA)


def joint(capsys, *arguments):
    """Return what `evenclip epsilon` says about files."""
    with pytest.raises(SystemExit) as stop:
        main(["epsilon", *map(str, arguments), "--delta", str(DELTA), "--json"])
    out, err = capsys.readouterr()
    assert (stop.value.code or 0, err) == (0, "")
    return json.loads(out)


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["epsilon", *map(str, arguments), "--delta", str(DELTA)])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    return err


# --- a journal instead of a report ----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a run that was killed at step 110 of 240; early.json is beside it."""
    killed(tmp_path / "kept", 110)
    shutil.copy(tmp_path / "kept" / "step-00000060" / "published.json", tmp_path / "early.json")
    return tmp_path / "kept"


def test_every_choice_of_files_costs_the_declared_steps(capsys, folder):
    early, lines = folder.parent / "early.json", folder / "journal.jsonl"
    for files in ([lines], [early], [early, lines], [lines, early], [folder], [folder, lines]):
        facts = joint(capsys, *files)
        assert facts["pld"] == pytest.approx(price(LONG), rel=1e-12), files
        assert facts["steps"] + facts["remaining_steps"] == LONG
        assert any("declares 240 steps" in note for note in facts["notes"])


def test_a_folder_without_a_checkpoint_costs_the_declared_steps(capsys, tmp_path):
    killed(tmp_path, 20)
    assert latest(tmp_path) is None
    for path in (tmp_path, tmp_path / "journal.jsonl"):
        assert joint(capsys, path)["pld"] == pytest.approx(price(LONG), rel=1e-12)


def old_remaining(held, ledger):
    """Return the declared steps as they were: any file with more steps cancelled them."""

    def continues(other, one):
        both = Ledger.joined(one.ledger, other.ledger).steps
        return one.ledger.steps < both == other.ledger.steps

    left = [one for one in held if not any(continues(other, one) for other in held)]
    return Ledger.joined(*(ledger for one in left for ledger in one.remaining))


def test_the_attack_wins_where_a_file_without_a_declaration_cancels_one(
    capsys, folder, monkeypatch
):
    early, lines = folder.parent / "early.json", folder / "journal.jsonl"
    alone = joint(capsys, early)["pld"]
    monkeypatch.setattr(journal, "declarations", lambda path: [])
    monkeypatch.setattr(ledgers, "check_declared", lambda held, ledger: None)
    monkeypatch.setattr(ledgers, "remaining", old_remaining)
    stated = joint(capsys, early, lines)["pld"]
    assert stated == joint(capsys, lines)["pld"] < alone  # a further file lowers ε
    assert command.ledgers is ledgers


def without_declarations(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [{k: v for k, v in line.items() if k != "declared"} for line in lines]
    path.write_bytes(b"".join(sealed(line, None) for line in rows))


def test_a_journal_without_declarations_is_refused_or_read_with_those_of_another_file(
    capsys, folder
):
    """Older versions wrote none."""
    early, lines = folder.parent / "early.json", folder / "journal.jsonl"
    without_declarations(lines)
    (run,) = {entry.run for entry in journal.read_journal(lines).entries}
    assert refused(capsys, lines) == (
        f"evenclip: {lines} does not state how many steps run {run} declared, because an older "
        "version wrote it, and ε counts all declared steps; give the run's report or a checkpoint "
        "of it too.\n"
    )
    assert joint(capsys, early, lines)["pld"] == pytest.approx(price(LONG), rel=1e-12)


def test_a_folder_of_an_older_version_is_resumed_only_where_its_steps_are_known(tmp_path):
    killed(tmp_path, 20)
    without_declarations(tmp_path / "journal.jsonl")
    with pytest.raises(CheckpointError) as caught:
        trained(tmp_path, SHORT, resume=True)
    (run,) = {entry.run for entry in journal.journaled(tmp_path).entries}
    assert str(caught.value) == (
        f"{tmp_path / 'journal.jsonl'} does not state how many steps run {run} declared, because "
        "an older version wrote it; ε counts all declared steps, so it cannot be stated. Start "
        "again in another folder."
    )


def test_a_ledger_that_declares_nothing_says_so(capsys, tmp_path):
    entry = Entry(0.05, (("gradient", 1.0),), 100, (("gradient", 50),), 1e-30, run="a" * 32)
    (path := tmp_path / "ledger.json").write_text(json.dumps(Ledger([entry]).to_json()))
    assert "does not state how many steps were declared" in joint(capsys, path)["notes"][-1]


def test_the_journal_of_a_rule_without_an_epsilon_has_none(capsys, tmp_path):
    """Its ledger looks private, and is not."""
    groups = torch.arange(40) % 2
    model, (x, y), options = started(rule=FairLens())
    kept = {"checkpoint": tmp_path, "resume": True}

    def stop(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, (x, y, groups), observers=[stop], checkpoint=tmp_path, **options)
    facts = joint(capsys, tmp_path / "journal.jsonl")
    assert (facts["pld"], facts["why_no_epsilon"]) == (None, FairLens.why)
    assert latest(tmp_path) is None
    with pytest.raises(CheckpointError, match="has steps of a rule without a valid ε"):
        fit(model, (x, y, groups), **options | {"rule": DPSGD(sigma=4.0)}, **kept)


# --- a shorter training in the same folder --------------------------------------------------------


def test_a_shorter_attempt_does_not_replace_the_declaration_of_a_longer_one(capsys, tmp_path):
    killed(tmp_path, 20)
    again = trained(tmp_path, SHORT, resume=True)
    assert again.ledger.steps == 100 + SHORT  # a block was reserved
    assert again.epsilon() == pytest.approx(price(LONG + SHORT), rel=1e-12)
    report = again.privacy
    assert report["epsilon"] == again.epsilon()
    assert report["ledger_covers"].startswith("all attempts")
    assert "30 steps were declared, 130 drawn" in report["steps_note"]
    assert "140 not taken; ε is that of all 270" in report["steps_note"]
    (path := tmp_path / "privacy.json").write_text(json.dumps(report))
    for files in ([path], [tmp_path], [tmp_path / "journal.jsonl"], [path, tmp_path]):
        assert joint(capsys, *files)["pld"] == pytest.approx(again.epsilon(), rel=1e-12)
    longer = trained(tmp_path, LONG, resume=True)
    assert longer.epsilon() > again.epsilon()
    assert "30 steps were declared at first, and the run was ext" in longer.privacy["steps_note"]


def test_the_attack_wins_where_an_attempt_knows_its_own_declaration_only(tmp_path, monkeypatch):
    killed(tmp_path, 20)
    monkeypatch.setattr(Run, "open_declarations", Run.remaining)
    again = trained(tmp_path, SHORT, resume=True)
    assert again.epsilon() < price(LONG)


def test_an_attempt_with_as_many_steps_continues_the_one_that_was_killed(capsys, tmp_path):
    """It costs the drawn steps of both, which are more than were declared."""
    killed(tmp_path, 20)
    killed(tmp_path, 20, resume=True)
    again = trained(tmp_path, LONG, resume=True)
    assert again.epsilon() == pytest.approx(price(100 + 100 + LONG), rel=1e-12)
    assert again.privacy["remaining"] == []
    assert joint(capsys, tmp_path)["pld"] == pytest.approx(again.epsilon(), rel=1e-12)
    *others, last = dict.fromkeys(entry.run for entry in again.ledger.entries)
    branches = [entry for entry in again.ledger.entries if entry.parent is not None]
    assert {entry.parent[1] for entry in branches} == {100}
    assert {entry.parent[0] for entry in branches} <= {*others, last}


def test_an_attempt_with_more_noise_does_not_stand_for_declared_steps(tmp_path):
    """240 steps with σ = 40 are much less than the 140 with σ = 4 that were declared."""
    killed(tmp_path, 20)
    again = trained(tmp_path, LONG, resume=True, rule=DPSGD(sigma=40.0))
    assert again.epsilon() > price(LONG)
    assert sum(row["steps"] for row in again.privacy["remaining"]) == 140


def test_a_copy_of_a_checkpoint_without_its_journal_declares_what_it_knows(capsys, tmp_path):
    """The declarations are in the checkpoint too, and are written into the new journal."""
    killed(tmp_path / "a", 20)
    killed(tmp_path / "a", 70, 100, resume=True)
    (tmp_path / "b").mkdir()
    shutil.copytree(latest(tmp_path / "a"), tmp_path / "b" / latest(tmp_path / "a").name)
    killed(tmp_path / "b", 80, 100, resume=True)
    facts = joint(capsys, tmp_path / "b" / "journal.jsonl")
    assert facts["steps"] + facts["remaining_steps"] == LONG + 100 + 40


def test_repeated_draws_are_declared_anew_when_a_loop_ends(capsys, tmp_path):
    """Each step is drawn twice, so 20 draws leave 230 of 240 steps."""
    model, data, options = started()
    run = prepare(model, data, **options)
    run.write_ahead(tmp_path)
    with run.listening():
        for _ in range(10):
            run.step()
            run.update(run.step())
    facts = joint(capsys, tmp_path / "journal.jsonl")
    assert (facts["steps"], facts["remaining_steps"]) == (20, 230)
    assert facts["pld"] == pytest.approx(result(run).epsilon(), rel=1e-12)


def test_going_back_within_a_process_keeps_what_was_declared(tmp_path):
    model, data, options = started()
    run = prepare(model, data, **options)
    run.write_ahead(tmp_path)
    with run.listening():
        for t in range(8):
            run.update(run.step())
            if t == 1:
                run.save(tmp_path)
    first = run.run_id
    run.restore(latest(tmp_path))
    assert [(one.run, one.remaining.steps) for one in run.declarations][-1] == (first, LONG - 8)
    left = unmet(run.ledger, [run.open_declarations])  # the branch has not drawn
    assert left.steps == LONG - 8
    with run.listening():
        run.update(run.step())
    assert covered(run.ledger, [run.open_declarations]).steps == 8 + LONG - 2


# --- an extended training -------------------------------------------------------------------------


def test_a_run_that_is_extended_says_so(tmp_path):
    first = trained(tmp_path, 10).privacy
    assert (first["steps_note"], first["first_declared_steps"]) == (None, 10)
    for steps in (SHORT, 50):
        report = trained(tmp_path, steps, resume=True).privacy
        assert (report["first_declared_steps"], report["declared_steps"]) == (10, steps)
        assert report["steps_note"] == (
            f"10 steps were declared at first, and the run was extended to {steps}; {steps} were "
            f"drawn and 0 not taken; ε is that of all {steps}, not of the steps that were declared "
            "at first"
        )
        assert report["epsilon"] == pytest.approx(price(steps), rel=1e-12)


def test_a_journal_keeps_what_was_declared_at_first(tmp_path):
    killed(tmp_path, 5, 10)
    killed(tmp_path, 5, 20, resume=True)
    report = trained(tmp_path, 20, resume=True).privacy
    assert (report["first_declared_steps"], report["declared_steps"]) == (10, 20)


# --- no file lowers ε -----------------------------------------------------------------------------


SIGMAS = (1.0, 2.0)


class Attempts:
    """Attempts of one training, each a run with a declaration, some of which continue others."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.runs = {}  # id -> (parent, multipliers of draws, number of draws)
        for i in range(self.random.randint(1, 5)):
            parents = [(run, n) for run, (_, _, n) in self.runs.items()]
            parent = None
            if parents and self.random.random() < 0.8:
                run, n = self.random.choice(parents)
                parent = (run, self.random.randint(0 if self.random.random() < 0.2 else 1, n))
            declared = [self.random.choice(SIGMAS) for _ in range(self.random.randint(1, 9))]
            if self.random.random() < 0.5:
                declared = [SIGMAS[0]] * len(declared)
            self.runs[f"r{i}"] = parent, declared, self.random.randint(1, len(declared))

    def steps(self, run, first, end):
        parent, sigmas, _ = self.runs[run]
        return [
            Entry(0.1, (("gradient", sigmas[i]),), 1, run=run, first=i, parent=parent)
            for i in range(first, end)
        ]

    def declaration(self, run, at):
        """Return what a run declared at a draw; repeated draws leave more steps."""
        end = len(self.runs[run][1])
        more = Entry(0.1, (("gradient", SIGMAS[0]),), 1, run=run, parent=self.runs[run][0])
        repeated = range(end, end + self.random.choice((0, 0, 1, 2)))
        return Ledger([*self.steps(run, at, end), *(replace(more, first=i) for i in repeated)])

    def file(self):
        """Return what one file holds: draws of a run and of its parents, and some declarations."""
        run = self.random.choice(list(self.runs))
        end, entries, declarations = self.random.randint(1, self.runs[run][2]), [], []
        while run is not None:
            entries += self.steps(run, 0, end)
            if self.random.random() < 0.5:  # at any draw, as it was true then
                at = self.random.randint(0, end)
                declarations.append(self.declaration(run, at))
            parent = self.runs[run][0]
            run, end = parent if parent is not None and parent[1] > 0 else (None, 0)
        ledger = Ledger.union(Ledger(entries))
        if self.random.random() < 0.5:  # as reports and checkpoints keep them
            declarations = [open_declarations(ledger, declarations)]
        return ledger, declarations


def cover(files):
    """Return what ε is computed from."""
    union = Ledger.union(*(ledger for ledger, _ in files))
    return covered(union, [one for _, declarations in files for one in declarations])


def counts(ledger):
    """Return multipliers -> number of steps."""
    steps = Counter()
    for entry in ledger.entries:
        steps[entry.multipliers] += entry.steps
    return steps


def check_no_file_lowers_the_cover(seed):
    attempts = Attempts(seed)
    files = [attempts.file() for _ in range(attempts.random.randint(1, 5))]
    for i in range(1, len(files)):
        before, after = counts(cover(files[:i])), counts(cover(files[: i + 1]))
        assert before <= after, (seed, i)
    for ledger, declarations in files:  # and each declaration is paid in full
        for one in declarations:
            paid = counts(cover(files))
            for run in {entry.run for entry in one.entries} & {e.run for e in ledger.entries}:
                mine = [entry for entry in one.entries if entry.run == run]
                assert counts(Ledger(mine)) <= paid


def test_no_file_lowers_what_epsilon_covers():
    for seed in range(3000):
        check_no_file_lowers_the_cover(seed)


def test_keeping_declarations_with_a_ledger_changes_nothing():
    """What a report or a checkpoint keeps costs as much as the declarations themselves."""
    for seed in range(1000):
        ledger, declarations = Attempts(seed).file()
        kept = open_declarations(ledger, declarations)
        assert counts(unmet(ledger, [kept])) == counts(unmet(ledger, declarations))
        assert open_declarations(ledger, [kept]) == kept


def write(path, ledger, declarations):
    kept = open_declarations(ledger, declarations)
    facts = {"ledger": ledger.to_json(), "remaining": kept.to_json(), "declared_steps": 1}
    path.write_text(json.dumps(facts))
    return path


def test_no_file_lowers_epsilon(capsys, tmp_path):
    for seed in range(4):
        attempts = Attempts(seed)
        paths, last = [], {"pld": 0.0, "rdp": 0.0}
        for i in range(3):
            paths.append(write(tmp_path / f"{seed}-{i}.json", *attempts.file()))
            facts = joint(capsys, *paths)
            assert facts["pld"] >= last["pld"] * (1 - 1e-9), (seed, i)
            assert facts["rdp"] >= last["rdp"] * (1 - 1e-9), (seed, i)
            last = facts


def test_the_attack_wins_where_a_branch_without_a_declaration_cancels_one(monkeypatch):
    """Then a further file lowers what ε covers."""
    monkeypatch.setattr(
        declared, "_left", lambda ledger, rest, parents: {
            run: kinds for run, kinds in rest.items()
            if not any(parent and parent[0] == run for parent in parents.values())
        },
    )  # fmt: skip
    with pytest.raises(AssertionError):
        test_no_file_lowers_what_epsilon_covers()


def test_a_run_before_a_branch_needs_no_declaration():
    parent = Entry(0.1, (("gradient", 1.0),), 5, run="a")
    branch = replace(parent, run="b", parent=("a", 3))
    ledger = Ledger([parent, branch])
    assert undeclared(ledger, ["a", "b", ""], []) == ["a", "b"]
    assert undeclared(ledger, ["a", "b"], ["b"]) == []
    assert undeclared(ledger, ["a", "b"], ["a"]) == ["b"]
