"""Jobs as submitit runs them without a cluster: processes of this machine, one of which is killed."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from evenclip.runs import RunsError, Slurm, carry_out
from evenclip.runs import slurm as module
from evenclip.runs.engine import InHand

pytest.importorskip("submitit")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Where what is done apart, and how long steps take, is kept."""
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def slurm():
    return Slurm(jobs=2, minutes=5, cluster="local")


def test_results_are_in_the_store_and_the_folder_of_the_sweep_is_gone(store, spec, told, slurm):
    specs = [spec(seed) for seed in (2, 0, 1)]
    found = carry_out(specs, store, told, slurm)
    assert len(found) == 3
    assert sorted(told.begun) == [0, 1, 2]
    assert sorted(told.over) == [(0, None), (1, None), (2, None)]
    assert told.steps
    assert list((store.root / "slurm").iterdir()) == []
    assert carry_out(specs, store, told, Slurm()) == found  # nothing is left for which to ask a cluster


def test_a_run_that_fails_three_times_is_reported_with_its_traceback_and_the_rest_completes(
    store, slurm, one_of_three_fails
):
    one_of_three_fails(slurm)
    assert len(list((store.root / "slurm").iterdir())) == 1  # what the jobs wrote can be looked at


class Killer:
    """Kills the jobs of a sweep once one run of it is well under way."""

    def __init__(self, told, store, seed, times):
        self._told, self._store, self._seed, self.times = told, store, seed, times
        self._killed = set()

    def __getattr__(self, name):
        return getattr(self._told, name)

    def step(self, spec, t):
        if spec.seed == self._seed and self.times:
            self.times -= self._kill()

    def _kill(self):
        listed = subprocess.run(["ps", "-wweo", "pid=,args="], capture_output=True, text=True, check=True).stdout
        folder = str(self._store.root.resolve() / "slurm")
        ours = [line for line in listed.splitlines() if folder in line and "submitit.core._submit" in line]
        found = {int(line.split()[0]) for line in ours} - self._killed
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        self._killed |= found
        return bool(found)


def test_a_killed_job_costs_nothing_that_was_finished_and_the_rest_of_it_is_tried_again(store, spec, told):
    """One job with three runs, of which the second is under way."""
    alike = [spec(seed, epochs=120) for seed in range(3)]
    killer = Killer(told, store, 1, times=1)
    found = carry_out(alike, store, killer, Slurm(jobs=1, cluster="local"))
    assert len(found) == 3
    assert killer.times == 0
    assert told.begun.count(1) == 2
    assert sorted(told.over) == [(0, None), (1, None), (2, None)]


def test_a_job_that_is_killed_three_times_is_reported(store, spec, told, slurm):
    killer = Killer(told, store, 1, times=3)
    with pytest.raises(RunsError, match=r"seed 1: its job \d+ ended without a result"):
        carry_out([spec(1, epochs=390)], store, killer, slurm)
    assert killer.times == 0


def test_a_run_that_another_command_is_at_is_asked_for_again(store, spec, told, slurm, monkeypatch):
    monkeypatch.setattr(module, "_LATER", 1.0)
    lock = store.claim(spec(0))
    assert lock.__enter__()
    heard = told.started

    def let_go(one):
        heard(one)
        if one.seed == 0 and told.begun.count(0) == 2:
            lock.__exit__(None, None, None)

    told.started = let_go
    carry_out([spec(0), spec(1)], store, told, slurm)
    assert told.begun.count(0) >= 3
    assert sorted(told.over) == [(0, None), (1, None)]


def test_things_done_apart_come_back_with_their_place(slurm):
    assert sorted(slurm.apart(abs, [3, -1])) == [(0, 3), (1, 1)]
    assert list(slurm.apart(abs, [])) == []


def test_something_done_apart_that_fails_three_times_is_said(slurm):
    with pytest.raises(RuntimeError, match=r"its job \d+ ended without a result \(.*TypeError"):
        list(slurm.apart(abs, ["x"]))


def test_a_line_that_was_cut_off_is_passed_over(tmp_path):
    """Its job was killed while it wrote, and another wrote on."""
    path = tmp_path / "1.jsonl"
    hearing = module._Hearing(InHand({}), path)
    assert hearing.news() == []
    path.write_text('\n{"event": "step", "i": 0, "t": 1}\n{"event": "st')
    assert [event["t"] for event in hearing.news()] == [1]
    with path.open("a") as file:
        file.write('\n{"event": "done", "i": 0}\n')
    assert [event["event"] for event in hearing.news()] == ["done"]
    assert hearing.news() == []


def test_interrupted_it_cancels_its_jobs(store, spec, told, slurm, monkeypatch):
    from submitit.local.local import LocalJob

    cancel, cancelled = LocalJob.cancel, []

    def waited_for(self, check=True):
        cancel(self, check)
        cancelled.append(self._process.wait(30))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalJob, "cancel", waited_for)
    told.step = interrupt
    with pytest.raises(KeyboardInterrupt):
        carry_out([spec(0, epochs=390), spec(1, epochs=390)], store, told, slurm)
    assert len(cancelled) == 2


def test_without_slurm_it_says_where_to_go(store, spec, told, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"There is no Slurm here \(no sbatch\); run the command on a login node"):
        carry_out([spec(0)], store, told, Slurm())
