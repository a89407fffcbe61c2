"""Processes that are started before it is known what for: they are used first, and none is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from evenclip import processes
from evenclip.cli import compare as verb
from evenclip.cli import main
from evenclip.runs import local


@pytest.fixture
def begun(monkeypatch):
    """Every process that is begun, in this order."""
    found, begin = [], subprocess.Popen

    def noted(*args, **kwargs):
        found.append(begin(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(processes.subprocess, "Popen", noted)
    return found


def is_over(process):
    """Gone, not only ended: nobody has to ask for its status any more."""
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    return process.returncode is not None


def test_they_are_there_when_they_are_started(begun):
    with processes.early(2):
        assert len(begun) == 2
        taken = [processes.start(2), processes.start(2), processes.start(2)]
        assert len(begun) == 3
        assert set(taken) == set(begun)
        assert all(process.poll() is None for process in taken)
    assert all(process.poll() is None for process in taken)  # they are somebody's
    for process in taken:
        processes.end(process, at_once=False)
        processes.close(process)
    assert [process.returncode for process in taken] == [0, 0, 0]


def test_those_that_nobody_needed_end(begun):
    with processes.early(3):
        taken = processes.start(3)
    others = [process for process in begun if process is not taken]
    assert len(others) == 2
    assert all(map(is_over, others))
    processes.end(taken, at_once=True)
    processes.close(taken)
    assert is_over(taken)


def test_they_end_when_something_goes_wrong(begun):
    with pytest.raises(KeyboardInterrupt), processes.early(2):
        raise KeyboardInterrupt
    assert len(begun) == 2
    assert all(map(is_over, begun))


def test_they_work(begun, tmp_path):
    """A task in, an answer out: here that it is none."""
    with processes.early(1):
        process = processes.start(1)
        out, _ = process.communicate(json.dumps({"root": str(tmp_path), "specs": [{}], "hashes": [""]}) + "\n")
    assert begun == [process]
    assert json.loads(out)["event"] == "failed"


@pytest.mark.parametrize("at_once", [0, -3])
def test_none_are_none(begun, at_once):
    with processes.early(at_once):
        pass
    assert begun == []


def test_nothing_is_imported_before_they_are_started():
    code = "import sys, evenclip.processes, evenclip.cli; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# --- on the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """More arguments of a small comparison -> its exit status."""
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verb, "cores", lambda: 2)
    monkeypatch.setattr(local, "cores", lambda: 2)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["compare", "toy", "--epochs", "1", "--model", "linear", "--lr", "0.1", *arguments])
        capsys.readouterr()
        return ended.value.code or 0

    return run


def test_a_comparison_uses_those_it_started_and_leaves_none(begun, typed, tmp_path):
    out = str(tmp_path / "out")
    assert typed("--seeds", "1", "--rules", "dpsgd", "--out", out) == 0
    assert len(begun) == 2
    assert all(map(is_over, begun))
    assert typed("--seeds", "1", "--rules", "dpsgd", "--out", out) == 0
    assert len(begun) == 2  # everything was there


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--seeds", "2"), 10),
        (("--seeds", "3", "--rules", "dpsgd,dpsgd-f"), 6),
        (("--seeds", "30"), 64),
        (("--workers", "4"), 4),
        (("--on", "slurm"), 0),
        (("--device", "cuda"), 0),
    ],
)
def test_no_more_than_there_are_runs_or_workers(typed, monkeypatch, arguments, expected):
    asked = []

    def stop(at_once):
        asked.append(at_once)
        raise ValueError("far enough")

    monkeypatch.setattr(verb, "cores", lambda: 64)
    monkeypatch.setattr(verb, "early", stop)
    assert typed(*arguments) == 2
    assert asked == [expected]


def test_a_mistake_leaves_none(begun, typed):
    assert typed("--epsilon", "0") == 2
    assert len(begun) == 2
    assert all(map(is_over, begun))
