"""Processes that work, fail, and are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from evenclip.runs import Local, RunsError, carry_out


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """How long steps take is measured by workers, and is not to be remembered."""
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "cache"))


def test_results_come_in_the_order_asked_for_and_once(store, spec, told):
    specs = [spec(seed) for seed in (2, 0, 2, 1)]
    found = carry_out(specs, store, told, Local(2))
    assert [result["settings"]["seed_given"] for result in found] == [True] * 4
    assert found[0] == found[2]
    assert found[0]["test"] != found[1]["test"]
    assert (told.runs, sorted(told.begun)) == (3, [0, 1, 2])
    before = {p: p.stat().st_mtime_ns for p in store.root.rglob("result.json")}
    assert carry_out(specs, store, told, Local(2)) == found
    assert told.runs == 3  # nothing was computed again
    assert {p: p.stat().st_mtime_ns for p in store.root.rglob("result.json")} == before


def test_a_run_that_fails_does_not_stop_the_others(store, spec, told):
    bad = spec(5, lr=-1.0)
    with pytest.raises(RunsError) as raised:
        carry_out([spec(0), bad, spec(1)], store, told, Local(2))
    assert str(raised.value) == (
        "1 of 3 runs failed; the other 2 are kept. dpsgd, seed 5: lr is -1.0; it must be a finite number above 0. "
        "Run the same command again to finish what is missing. "
        f"Details are in {store.root / 'failures.txt'}."
    )
    assert "Traceback" in raised.value.failures[0].trace
    assert (store.root / "failures.txt").read_text().startswith("dpsgd, seed 5: lr is -1.0; ")
    assert raised.value.failures[0].trace in (store.root / "failures.txt").read_text()
    assert store.has(spec(0))
    assert store.has(spec(1))
    assert not store.has(bad)


def children():
    """The process ids of our workers."""
    found = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "evenclip.runs.worker" in line]


class Killer:
    """Kills the worker of one seed, once it is well under way."""

    def __init__(self, told, seed):
        self._told, self._seed, self.killed = told, seed, False

    def __getattr__(self, name):
        return getattr(self._told, name)

    def step(self, spec, t):
        if spec.seed == self._seed and not self.killed:
            self.killed = True
            for pid in children():
                os.kill(pid, signal.SIGKILL)


def test_a_killed_worker_costs_the_bundle_it_had_in_hand_and_the_command_can_be_given_again(store, spec, told):
    """Each of its unfinished runs is reported; those of the other bundle are carried out."""
    long, short = [spec(seed, epochs=800) for seed in (7, 8, 9)], [spec(0), spec(1)]
    killer = Killer(told, 8)
    with pytest.raises(RunsError) as raised:
        carry_out([*long, *short], store, killer, Local(1))
    assert killer.killed
    lost = {failure.spec.seed for failure in raised.value.failures}
    assert 8 in lost
    assert lost == {one.seed for one in long if not store.has(one)}
    assert {seed for seed, failure in told.over if failure is not None} == lost
    assert {seed for seed, failure in told.over if failure is None} == {0, 1, 7, 8, 9} - lost
    assert f"{len(lost)} of 5 runs failed; the other {5 - len(lost)} are kept. dpsgd, seed " in str(raised.value)
    assert ": its process was ended by SIGKILL (out of memory?)." in str(raised.value)
    assert all(map(store.has, short))
    assert not any(p.name.startswith(".") for p in store.root.iterdir())
    assert len(carry_out([spec(7), spec(8), *short], store, told, Local(1))) == 4


def test_two_commands_on_one_store_share_the_work(store, spec, told):
    specs, found = [spec(seed, epochs=30) for seed in range(4)], {}

    def command(name):
        found[name] = carry_out(specs, store, type(told)(), Local(1))

    threads = [threading.Thread(target=command, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["one"] == found["other"]
    folders = [p for p in store.root.iterdir() if (p / "result.json").is_file()]
    assert len(folders) == 4


def test_workers_do_not_outlive_their_parent(tmp_path):
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-m', 'evenclip.runs.worker'], stdin=subprocess.PIPE,"
        " stdout=subprocess.DEVNULL, start_new_session=True)\n"
        "print(p.pid)\n"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _alive(pid):
        time.sleep(0.1)
    assert not _alive(pid)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
