"""Tests of `evenclip epsilon A B`: the joint ε of ledgers in files, and damaged files."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from evenclip import DPSGD, fit, prepare
from evenclip.cli import main
from evenclip.mechanism.accounting import epsilon
from evenclip.mechanism.ledger import Entry, Ledger
from evenclip.training.fit import result

DELTA = 1e-5
FIRST = Entry(0.05, (("gradient", 1.0),), 100, (("gradient", 50),), 1e-30, run="a" * 32)
BRANCH = replace(FIRST, steps=60, run="b" * 32, parent=("a" * 32, 40))
OTHER = replace(FIRST, steps=70, run="c" * 32)


def run(capsys, *arguments):
    """Run `evenclip epsilon`; return (exit status, stdout, stderr)."""
    with pytest.raises(SystemExit) as stop:
        main(["epsilon", *map(str, arguments)])
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


@pytest.fixture
def write(tmp_path):
    def write(name, *entries, **facts):
        path = tmp_path / name
        ledger = Ledger(list(entries)).to_json()
        facts = {"ledger": ledger, "delta": DELTA} | facts
        path.write_text(json.dumps(facts if facts["delta"] else ledger), encoding="utf-8")
        return path

    return write


def joint(capsys, *arguments):
    status, out, err = run(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_steps_that_two_files_hold_count_once(capsys, write):
    parent, branch = write("a.json", FIRST), write("b.json", replace(FIRST, steps=40), BRANCH)
    facts = joint(capsys, parent, branch)
    assert facts["steps"] == 160  # the parent's steps after the fork are a branch too
    assert facts["pld"] == epsilon(Ledger([FIRST, BRANCH]), DELTA)
    assert facts["rdp"] == epsilon(Ledger([FIRST, BRANCH]), DELTA, "rdp")
    assert facts["runs"] == [FIRST.run, BRANCH.run]
    alone = joint(capsys, parent)
    assert alone["pld"] == epsilon(Ledger([FIRST]), DELTA) < facts["pld"]
    assert joint(capsys, parent, parent) | {"files": []} == alone | {"files": []}


def test_separate_runs_add_up(capsys, write):
    files = write("a.json", FIRST), write("c.json", OTHER)
    assert joint(capsys, *files)["pld"] == epsilon(Ledger([FIRST, OTHER]), DELTA)


def test_the_text_has_every_fact_and_fits_the_terminal(capsys, write):
    waiting = replace(FIRST, first=100, steps=5, reserved=True)
    path = write("a.json", FIRST, waiting, declared_steps=200)
    status, out, err = run(capsys, path, "--curve")
    assert (status, err) == (0, "")
    words = " ".join(out.split())
    assert "runs aaaaaaaa" in words
    assert "steps 105, 5 of them reserved and perhaps not taken" in words
    assert "by PLD" in words
    assert "at δ = 1e-05" in words
    assert "ε counts 95 more that were declared and not taken" in words
    assert "declares 200 steps and holds 105; the steps that were not taken count too" in words
    assert all(len(line) <= 80 for line in out.splitlines() if str(path) not in line)


def test_the_files_of_a_real_training(capsys, tmp_path):
    """The report, the checkpoint and the ledger of one run are the same steps."""
    data = (torch.randn(40, 3), torch.arange(40) % 2)
    result = fit(
        nn.Linear(3, 2), data, rule=DPSGD(), batch_size=8, epochs=2, delta=DELTA,
        checkpoint=tmp_path / "kept",
    )  # fmt: skip
    (report := tmp_path / "privacy.json").write_text(json.dumps(result.privacy))
    (ledger := tmp_path / "ledger.json").write_text(json.dumps(result.ledger.to_json()))
    published = sorted((tmp_path / "kept").glob("step-*/published.json"))[-1]
    facts = joint(capsys, report, ledger, published)
    assert facts["pld"] == pytest.approx(result.epsilon(), rel=1e-12)
    assert facts["delta"] == DELTA
    assert facts["notes"] == []


# --- steps that are not in the ledger of a file ---------------------------------------------------


def started(**given):
    options = {"rule": DPSGD(), "batch_size": 8, "q": 1 / 60, "steps": 240, "delta": DELTA}
    data = (torch.randn(40, 3), torch.arange(40) % 2)
    return nn.Linear(3, 2), data, options | given


def killed(folder, t):
    """Train in a process that is killed in step t; draws are reserved in blocks of 100."""

    def kill(step):
        if step.t == t:
            os._exit(9)

    model, data, options = started()
    child = os.fork()
    if child == 0:
        fit(model, data, checkpoint=folder, observers=[kill], **options)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def loop(updates, draws=1, **given):
    model, data, options = started(**given)
    run = prepare(model, data, **options)
    with run.listening():
        for _ in range(updates):
            for _ in range(draws):
                step = run.step()
            run.update(step)
    return run


def test_a_run_that_was_stopped_early_costs_what_its_report_states(capsys, tmp_path):
    for draws in (1, 2):
        report = result(loop(20, draws)).privacy
        (path := tmp_path / "privacy.json").write_text(json.dumps(report))
        facts = joint(capsys, path)
        assert facts["pld"] == pytest.approx(report["epsilon"], rel=1e-12)
        assert (facts["steps"], facts["remaining_steps"]) == (20 * draws, 220)


def test_a_killed_run_is_counted_from_any_of_its_files(capsys, tmp_path):
    killed(tmp_path, 110)  # after the checkpoint of step 60
    checkpoint = tmp_path / "step-00000060"
    whole = epsilon(Ledger([loop(240).ledger.entries[0]]), DELTA)
    names = {
        checkpoint / "published.json": (100, 140),
        checkpoint: (200, 40),
        tmp_path: (200, 40),
        tmp_path / "journal.jsonl": (200, 40),
    }
    for path, (steps, left) in names.items():
        facts = joint(capsys, path, "--delta", DELTA)
        assert (facts["steps"], facts["remaining_steps"]) == (steps, left), path
        assert facts["pld"] == pytest.approx(whole, rel=1e-12)
        assert f"{path} declares 240 steps" in facts["notes"][0]
    shutil.rmtree(checkpoint)
    facts = joint(capsys, tmp_path, "--delta", DELTA)
    assert (facts["steps"], facts["remaining_steps"]) == (200, 40)
    assert facts["pld"] == pytest.approx(whole, rel=1e-12)


def test_a_folder_that_is_resumed_shows_how_its_checkpoints_went_on(capsys, tmp_path):
    """The first attempt's declared steps are those of the second one."""
    killed(tmp_path / "kept", 110)
    shutil.copytree(tmp_path / "kept" / "step-00000060", tmp_path / "old")
    saved = json.loads((tmp_path / "old" / "published.json").read_text())
    branch = Entry(**{
        **vars(Ledger.from_json(saved["ledger"]).entries[0]),
        "run": "b" * 32, "steps": 180, "parent": tuple(saved["place"]),
    })  # fmt: skip
    ledger = Ledger.union(
        Ledger.from_json(saved["ledger"]), Ledger.from_json(saved["reserved"]), Ledger([branch])
    )
    (report := tmp_path / "privacy.json").write_text(
        json.dumps({"ledger": ledger.to_json(), "delta": DELTA, "declared_steps": 240})
    )
    facts = joint(capsys, tmp_path / "old" / "published.json", report)
    assert (facts["steps"], facts["remaining_steps"], facts["notes"]) == (100 + 180, 0, [])


def test_a_checkpoint_without_its_journal_is_noted(capsys, tmp_path):
    killed(tmp_path, 70)
    (tmp_path / "journal.jsonl").unlink()
    assert "has lost its journal" in joint(capsys, tmp_path)["notes"][-1]


def test_a_shortened_journal_is_refused(capsys, tmp_path):
    killed(tmp_path, 70)
    (tmp_path / "journal.jsonl").write_text("")
    check_refused(capsys, [tmp_path], "it holds 0 bytes, and")


def test_ledgers_that_lack_steps_are_refused(capsys, write):
    late = replace(FIRST, first=90, steps=10)
    check_refused(capsys, [write("a.json", late)], "Draw 0 of run " + "a" * 32 + " is missing")
    assert joint(capsys, write("a.json", late), write("b.json", FIRST))["steps"] == 100
    emptied = write("a.json", steps=100, declared_steps=100)
    check_refused(capsys, [emptied], "The ledger holds 0 steps, and the file states 100; one of")
    other = write("a.json", FIRST, steps=101)
    check_refused(capsys, [other], "The ledger holds 100 steps, and the file states 101")
    stored = write("a.json", settings={"steps": 100})
    check_refused(capsys, [stored], "holds 0 steps, and the file is of a run with 100")
    saved = write("a.json", FIRST, place=["a" * 32, 101])
    check_refused(capsys, [saved], "holds 100 steps, and the file is of a run with 101")
    short = write("a.json", FIRST, declared_steps=120, remaining=[])
    check_refused(capsys, [short], "declares 120 steps, and holds 100 and 0 that remain")


def test_a_ledger_with_a_cycle_is_refused(capsys, write):
    path = write("a.json", replace(FIRST, parent=(FIRST.run, 0)))
    check_refused(capsys, [path], "was resumed from itself, by way of its parents")


@pytest.mark.parametrize("name", ["steps", "declared_steps"])
@pytest.mark.parametrize("value", [-5, 1.5, True, "3"])
def test_a_number_of_steps_is_a_whole_number(capsys, write, name, value):
    path = write("a.json", FIRST, **{name: value})
    check_refused(capsys, [path], f" = {value!r}; it must be a whole number of at least 0.")


@pytest.mark.parametrize("place", [3, ["a"], ["a", -1], [1, 1], ["a", None]], ids=str)
def test_a_damaged_place_is_refused(capsys, write, place):
    check_refused(capsys, [write("a.json", FIRST, place=place)], "it must be a")


def test_a_ledger_without_an_epsilon_has_none(capsys, write):
    clear = replace(OTHER, multipliers=(("gradient", 0.0),))
    facts = joint(capsys, write("a.json", FIRST), write("c.json", clear))
    assert (facts["pld"], facts["rdp"]) == (None, None)
    _, out, _ = run(capsys, write("c.json", clear))
    assert "ε        none: a value was released in clear, or a batch was not a" in out


def test_a_rule_without_an_epsilon_has_none_with_any_ledger(capsys, write):
    """The ledger of FairLens as published looks private, and is not."""
    path = write("a.json", FIRST, soundness="no valid ε", why_no_epsilon="its loss ties samples")
    assert joint(capsys, path)["pld"] is None
    _, out, _ = run(capsys, path)
    assert "none: its loss ties samples" in out
    checkpoint = write("b.json", FIRST, settings={"rule": {"name": "fairlens"}, "delta": DELTA})
    assert joint(capsys, checkpoint)["pld"] is None


def test_delta_is_that_of_the_files_or_given(capsys, write):
    plain, other = write("a.json", FIRST, delta=None), write("b.json", OTHER, delta=1e-6)
    assert joint(capsys, plain, other)["delta"] == 1e-6
    assert joint(capsys, plain, "--delta", "1e-4")["delta"] == 1e-4
    status, _, err = run(capsys, plain)
    assert (status, err) == (2, "evenclip: The files state no δ; give --delta.\n")
    status, _, err = run(capsys, other, write("c.json", FIRST))
    assert (status, err) == (
        2,
        "evenclip: The files state different values of δ (1e-06, 1e-05); give --delta.\n",
    )


def test_steps_by_hand_and_ideal_noise_are_noted(capsys, write):
    by_hand = Entry(0.05, (("gradient", 1.0),), 10)
    notes = joint(capsys, write("a.json", by_hand))["notes"]
    assert "steps without a run id; they count in every file" in notes[0]
    assert "steps without sizes; their noise is taken as Gaussian" in notes[1]


# --- mistakes -------------------------------------------------------------------------------------


def check_refused(capsys, arguments, sentence):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.startswith("evenclip: ")
    assert err.count("\n") == 1
    assert err.endswith(".\n")


def test_ledgers_that_contradict_each_other_are_refused(capsys, write):
    forged = replace(FIRST, multipliers=(("gradient", 9.0),))
    files = write("a.json", FIRST), write("b.json", forged)
    check_refused(capsys, files, "one key makes one step; one of the ledgers is damaged or forged")


def test_a_branch_without_its_parent_is_refused(capsys, write):
    check_refused(capsys, [write("b.json", BRANCH)], f"give the ledger of run {'a' * 32} too.")
    short = replace(FIRST, steps=39)
    check_refused(capsys, [write("b.json", short, BRANCH)], "hold only 39 of those draws")


def test_files_and_noise_are_not_mixed(capsys, write):
    check_refused(
        capsys, [write("a.json", FIRST), "--sigma", "1"], "give only one of them, with --delta."
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "is not JSON"),
        ('{"ledger": [', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\udcff", "is not JSON"),
        ("3", "holds no ledger; give a privacy report"),
        ('{"epsilon": 3.0}', "holds no ledger; give a privacy report"),
        ('{"ledger": {}}', "holds no ledger; give a privacy report"),
        ('[{"q": 0.1, "steps": 3}]', "has no 'multipliers'"),
        ('[{"q": 7, "multipliers": {"gradient": 1}, "steps": 3}]', "it must be a Poisson rate"),
        ('[{"q": 0.1, "multipliers": {"gradient": -1}, "steps": 3}]', "multiplier 'gradient'"),
        ('[{"q": 0.1, "multipliers": {"gradient": NaN}, "steps": 3}]', "multiplier 'gradient'"),
        ('[{"q": 0.1, "multipliers": {"gradient": 1}, "steps": 1e400}]', "steps"),
        ('[{"q": 0.1, "multipliers": {"gradient": 1}, "steps": 3, "run": 4}]', "run = 4"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_sentence_that_names_it(capsys, tmp_path, content, sentence):
    path = tmp_path / "damaged.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    check_refused(capsys, [path, "--delta", "1e-5"], sentence)
    assert str(path) in run(capsys, path, "--delta", "1e-5")[2]


def test_a_file_that_is_not_there_and_a_folder_are_refused(capsys, tmp_path):
    check_refused(capsys, [tmp_path / "none.json"], "none.json cannot be read (No such file")
    check_refused(capsys, [tmp_path], "is not an ordinary file")


HAND = '{"q": 0.01, "multipliers": {"gradient": 1.0}, "steps": 100}'


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (HAND.replace("1.0", "-1"), "multiplier 'gradient' = -1"),
        (HAND.replace("1.0", "NaN"), "multiplier 'gradient' = nan"),
        (HAND.replace("1.0", "true"), "multipliers['gradient'] = True"),
        (HAND.replace("100", "-5"), "has steps = -5"),
        (HAND.replace("100", "0"), "has steps = 0"),
        (HAND.replace("100", "1e300"), "at most 10000000"),
        (HAND.replace("100", "100, " + '"steps": 1'), "the name 'steps' twice"),
        (HAND.replace("1.0", "0.1, " + '"gradient": 9'), "the name 'gradient' twice"),
        (HAND.replace("0.01", "0"), "has q = 0"),
        (HAND.replace("0.01", '"0.01"'), "has q = '0.01'"),
        (HAND.replace("100", '100, "sizes": {"gradient": 0}'), "has sizes = "),
        (HAND.replace("100", '100, "beta": 0'), "has beta = 0"),
        (HAND.replace("100", "9" * 5000), "is not JSON"),
        ("[" * 10**5 + "]" * 10**5, "nested too deep"),
    ],
)
def test_a_ledger_that_was_made_by_hand_is_checked(capsys, tmp_path, entry, said):
    path = tmp_path / "ledger.json"
    path.write_text(f"[{entry}]", encoding="utf-8")
    status, out, err = run(capsys, path, "--delta", DELTA)
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("evenclip: ")
    assert err.rstrip().endswith(".")


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_ordinary_file_is_not_read(capsys, tmp_path, make):
    make(tmp_path / "ledger.json")
    status, _, err = run(capsys, tmp_path / "ledger.json", "--delta", DELTA)
    assert status == 2
    assert "ledger.json is not an ordinary file; give a privacy report" in err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--sigma", "1e-9"],
            "--sigma is 1e-09, and the joint noise multiplier 1e-09; below 0.001",
        ),
        (["--sigma", "1", "--steps", "1000000000"], "--steps is 1000000000; ε is computed for at"),
    ],
)
def test_noise_without_a_meaning_is_refused_at_once(capsys, given, said):
    status, _, err = run(capsys, "--rate", "0.01", "--steps", "100", "--delta", "1e-5", *given)
    assert status == 2
    assert said in err


def test_a_tiny_rate_is_answered(capsys):
    given = ["--rate", "1e-30", "--steps", "100", "--sigma", "1", "--delta", "1e-5", "--json"]
    status, out, err = run(capsys, *given)
    assert (status, err) == (0, "")
    assert 0 <= json.loads(out)["pld"] < 1e-6
