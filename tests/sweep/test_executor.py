"""Tests of what the executors share: tries, file transfer, and error messages.

None of them needs a cluster.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import replace

import pytest

from evenclip import compare
from evenclip.cli import main
from evenclip.sweep import Local, Ray, Slurm, carry_out
from evenclip.sweep.executor import Assignment, Tries
from evenclip.sweep.transfer import contents, unpacked

FAILED = {"event": "failed", "i": 0, "why": "a sentence", "trace": "Traceback"}


def test_a_run_is_tried_three_times_by_itself_and_then_reported(store, spec, progress):
    tries, run, other = Tries(store, progress, most=3), spec(0), spec(1)
    assignment = Assignment({0: run, 1: other})
    assert tries.process_event(assignment, {"event": "step", "i": 0, "t": 1}) == []
    assert tries.process_event(assignment, FAILED) == [run]
    assert tries.end_assignment(assignment, "its node died") == [other]  # unfinished runs only
    assert tries.process_event(Assignment({0: run}), FAILED) == [run]
    assert progress.over == []
    assert tries.end_assignment(Assignment({0: run}), "its node died", "Ray's message") == []
    (failure,) = tries.failures
    assert (failure.spec, failure.why, failure.trace) == (run, "its node died", "Ray's message")
    assert progress.over == [(0, failure)]
    assert progress.begun == [0, 0]


def test_busy_is_not_a_failed_try(store, spec, progress):
    tries, run = Tries(store, progress, most=1), spec(0)
    for _ in range(5):
        assert tries.process_event(Assignment({0: run}), {"event": "busy", "i": 0}) == [run]
    assert tries.failures == []


def test_what_a_dead_worker_had_put_into_the_store_is_done(store, spec, progress):
    run = spec(0)
    store.write(run, {}, {})
    tries = Tries(store, progress, most=3)
    assert tries.end_assignment(Assignment({0: run}), "its node died") == []
    assert progress.over == [(0, None)]


def test_what_is_said_of_a_run_that_is_over_changes_nothing(store, spec, progress):
    """A job that Slurm restarts repeats its events."""
    tries, assignment = Tries(store, progress, most=3), Assignment({0: spec(0)})
    for _ in range(2):
        assert tries.process_event(assignment, {"event": "done", "i": 0}) == []
    assert progress.over == [(0, None)]


# --- files --------------------------------------------------------------------------------------


def test_a_file_is_taken_from_where_it_is_or_from_what_was_sent(spec, tmp_path):
    given = spec(0)
    ((digest, content),) = contents([given, spec(1)])
    assert digest == given.data["sha256"]
    assert unpacked(given, lambda digest: None, tmp_path / "new") == given  # a shared disk
    moved = replace(given, data={**given.data, "path": "/nowhere/made.pt"})
    placed = unpacked(moved, {digest: content}.get, tmp_path / "new")
    assert placed.hash == given.hash
    assert placed.data["path"].startswith(str(tmp_path / "new"))
    assert placed.data["path"].endswith("/made.pt")
    with pytest.raises(FileNotFoundError) as raised:
        unpacked(moved, lambda digest: None, tmp_path / "new")
    assert str(raised.value) == (
        f"/nowhere/made.pt is not on {platform.node()} and is too large to be sent (over 2 GiB); "
        "put it there, under the same path."
    )


def test_another_copy_of_a_named_dataset_is_refused(spec, tmp_path, monkeypatch):
    monkeypatch.delenv("EVENCLIP_DATA", raising=False)
    data = {
        "name": "dutch",
        "options": {},
        "files": {"dutch/dutch_census_2001.arff": 5},
        "directory": str(tmp_path),
    }
    given = replace(spec(0), data=data)
    with pytest.raises(
        ValueError, match=r"dutch_census_2001.arff of the dataset dutch does not exist on "
    ):
        unpacked(given, lambda digest: None, tmp_path)
    (tmp_path / "dutch").mkdir()
    (tmp_path / "dutch" / "dutch_census_2001.arff").write_text("four")
    with pytest.raises(
        ValueError, match=r"has another size on .*; put the same files into the same folder"
    ):
        unpacked(given, lambda digest: None, tmp_path)
    (tmp_path / "dutch" / "dutch_census_2001.arff").write_text("fives")
    assert unpacked(given, lambda digest: None, tmp_path) == given
    monkeypatch.setenv("EVENCLIP_DATA", str(tmp_path))
    elsewhere = replace(given, data={**data, "directory": "/nowhere"})
    assert "directory" not in unpacked(elsewhere, lambda digest: None, tmp_path).data


# --- sentences ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--workers", "2", "--on", "ray"], "--workers is for --on local, not for --on ray."),
        (["--ray-address", "x:1"], "--ray-address is for --on ray, not for --on local."),
        (
            ["--gpus-per-run", "1"],
            "--gpus-per-run is for --on ray and --on slurm, not for --on local.",
        ),
        (
            ["--on", "slurm", "--gpus-per-run", "0.2"],
            "gpus is 0.2; it must be a whole number.",
        ),
        (
            ["--on", "ray", "--gpus-per-run", "1.5"],
            "gpus is 1.5; give a fraction of one, such as 0.2, or a whole",
        ),
        (
            ["--on", "ray", "--device", "cuda"],
            "device is 'cuda', but Ray assigns no GPU to a run by default; add",
        ),
        (
            ["--on", "slurm", "--device", "cuda"],
            "device is 'cuda', but Slurm assigns no GPU to a job by default",
        ),
        (
            ["--on", "slurm", "--slurm-minutes", "0"],
            "minutes is 0; it must be a whole number of at least 1.",
        ),
    ],
)
@pytest.mark.parametrize(
    "command", [["compare"], ["paper", "table", "adult"]], ids=["compare", "paper"]
)
def test_a_mistake_in_the_options_is_a_sentence(words, says, command, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command, *words, "--out", str(tmp_path)])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"evenclip: {says}")


@pytest.mark.parametrize(
    ("executor", "package", "says"),
    [
        (
            Ray(),
            "ray",
            "Ray is not installed; run `pip install 'evenclip[ray]'`, or leave --on ray out.",
        ),
        (
            Slurm(),
            "submitit",
            "submitit is not installed; run `pip install 'evenclip[slurm]'`, or leave --on slurm",
        ),
    ],
)
def test_without_the_package_it_says_what_to_install(
    executor, package, says, store, spec, progress, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as raised:
        carry_out([spec(0)], store, progress, executor)
    assert str(raised.value).startswith(says)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (
            "127.0.0.1:1",
            r"There is no Ray cluster at 127.0.0.1:1 \(Connection refused\); start its head with "
            r"`ray start",
        ),
        (
            "ray://head:10001",
            "ray://head:10001 is an address of Ray's client, which cannot stream results",
        ),
        ("head", "The Ray address is 'head'; give HOST:PORT of its head, such as 10.0.0.1:6379."),
    ],
)
def test_an_address_that_leads_nowhere_is_a_sentence(
    address, says, store, spec, progress, monkeypatch
):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises((ValueError, ConnectionError), match=says):
        carry_out([spec(0)], store, progress, Ray())


def test_workers_and_on_are_not_both_given(splits, tmp_path):
    with pytest.raises(
        ValueError,
        match="workers and on are both given; workers is for processes of this machine",
    ):
        compare(splits, seeds=1, workers=2, on=Local(), store=tmp_path)
