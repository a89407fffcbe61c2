"""One process at a time on a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from evenclip.runs import gate, work
from evenclip.stack import Stack


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The file that stands for a GPU that is not here."""
    monkeypatch.setattr(gate, "_place", lambda device: tmp_path / f"{device}.lock")
    return tmp_path / "cuda.lock"


def test_a_cpu_is_shared_by_all(place):
    with gate.alone_on("cpu"), gate.alone_on("cpu"):
        pass
    assert not list(place.parent.iterdir())


def test_the_second_waits_for_the_first(place):
    seen, inside = [], threading.Event()

    def second():
        inside.wait()
        with gate.alone_on("cuda"):
            seen.append("second")

    other = threading.Thread(target=second)
    other.start()
    with gate.alone_on("cuda"):
        inside.set()
        time.sleep(0.2)
        seen.append("first")
    other.join(10)
    assert seen == ["first", "second"]
    assert place.stat().st_mode & 0o077 == 0  # nobody else's


def test_two_gpus_are_two(place):
    with gate.alone_on("cuda:0"), gate.alone_on("cuda:1"):
        assert len(list(place.parent.iterdir())) == 2


def test_one_that_fails_or_dies_lets_go(place):
    with pytest.raises(RuntimeError, match="failed"), gate.alone_on("cuda"):
        raise RuntimeError("failed")
    hold = f"import fcntl, time; f = open({str(place)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True)"
    hold += "; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        killed = threading.Timer(0.3, other.kill)
        killed.start()
        started = time.monotonic()
        with gate.alone_on("cuda"):
            assert time.monotonic() - started > 0.2


def test_where_nothing_can_be_locked_nobody_waits(place, monkeypatch):
    theirs = place.parent / "somebody's"
    place.symlink_to(theirs)
    with gate.alone_on("cuda"):
        assert not theirs.exists()  # it is not followed
    place.unlink()

    def no_locks(*given):
        raise OSError(gate.errno.ENOLCK, "no locks available")

    monkeypatch.setattr(gate.fcntl, "flock", no_locks)
    with gate.alone_on("cuda"), gate.alone_on("cuda"):
        assert place.exists()


def test_runs_that_are_computed_together_are_ready_before_it_and_train_behind_it(spec, monkeypatch):
    seen, make, step = [], Stack.__init__, Stack.step

    @contextmanager
    def alone_on(device):
        seen.append(f"in, {device}")
        yield
        seen.append("out")

    monkeypatch.setattr(work, "alone_on", alone_on)
    monkeypatch.setattr(Stack, "__init__", lambda *given, **more: (seen.append("made"), make(*given, **more))[1])
    monkeypatch.setattr(Stack, "step", lambda self: (seen.append("step"), step(self))[1])
    work.work_together([spec(0), spec(1)], lambda t: None, compile=False, turns=True)
    assert seen[:3] == ["made", "made", "in, cpu"]
    assert seen[-1] == "out"
    assert set(seen[3:-1]) == {"step"}
