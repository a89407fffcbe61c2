"""Tests of Slurm jobs without a cluster: submitit runs them as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from evenclip.sweep import RunsError, Slurm, carry_out
from evenclip.sweep import slurm as module
from evenclip.sweep.executor import Assignment

pytest.importorskip("submitit")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Use an empty cache, and poll the jobs often."""
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_POLL", 0.05)


@pytest.fixture
def slurm():
    return Slurm(jobs=2, minutes=5, cluster="local")


def test_a_run_that_fails_three_times_is_reported_with_its_traceback_and_the_rest_completes(
    store, one_of_three_fails
):
    one_of_three_fails(Slurm(jobs=1, cluster="local"))
    assert len(list((store.root / "slurm").iterdir())) == 1  # the output of the jobs is kept


def kill(store):
    """Kill the only running job of a sweep."""
    listed = subprocess.run(
        ["ps", "-wweo", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    folder = str(store.root.resolve() / "slurm")
    (job,) = [
        line for line in listed.splitlines() if folder in line and "submitit.core._submit" in line
    ]
    os.kill(int(job.split()[0]), signal.SIGKILL)


def test_a_killed_job_costs_nothing_that_was_finished_and_the_rest_of_it_is_tried_again(
    store, spec, progress, gate
):
    """Kill a job with three runs during the second."""

    def step(spec, t):
        if t == 1 and spec.seed == 0:
            gate.let_through()
        if t == 1 and progress.begun == [0, 1]:
            kill(store)
            gate.open_for_all()

    progress.step = step
    specs = [spec(seed, model=gate.model) for seed in range(3)]
    results = carry_out(specs, store, progress, Slurm(jobs=1, cluster="local"))
    assert len(results) == 3
    assert progress.begun[:2] == [0, 1]
    assert sorted(progress.begun[2:]) == [1, 2]
    assert sorted(progress.over) == [(0, None), (1, None), (2, None)]
    assert list((store.root / "slurm").iterdir()) == []  # the folder of the sweep is gone
    assert carry_out(specs, store, progress, Slurm()) == results  # needs no cluster


def test_a_job_that_is_killed_as_often_as_it_is_tried_is_reported(
    store, spec, progress, slurm, gate, monkeypatch
):
    monkeypatch.setattr(module, "TRIES", 2)
    progress.step = lambda spec, t: kill(store) if t == 1 else None
    with pytest.raises(RunsError, match=r"seed 1: its job \d+ ended without a result"):
        carry_out([spec(1, model=gate.model)], store, progress, slurm)
    assert progress.begun == [1, 1]


def test_a_run_that_another_command_is_at_is_asked_for_again(
    store, spec, progress, slurm, monkeypatch
):
    monkeypatch.setattr(module, "_RETRY", 0.0)
    lock = store.claim(spec(0))
    assert lock.__enter__()
    started = progress.started

    def release(run):
        started(run)
        if progress.begun == [0]:
            lock.__exit__(None, None, None)

    progress.started = release
    carry_out([spec(0)], store, progress, slurm)
    assert progress.begun == [0, 0]
    assert progress.over == [(0, None)]


def test_things_done_apart_come_back_with_their_place(slurm):
    assert sorted(slurm.map_processes(abs, [3, -1])) == [(0, 3), (1, 1)]
    assert list(slurm.map_processes(abs, [])) == []


def test_something_done_apart_that_fails_as_often_as_it_is_tried_is_said(slurm, monkeypatch):
    monkeypatch.setattr(module, "TRIES", 2)
    with pytest.raises(RuntimeError, match=r"its job \d+ ended without a result \(.*TypeError"):
        list(slurm.map_processes(abs, ["x"]))


def test_a_line_that_was_cut_off_is_passed_over(tmp_path):
    """A job was killed while it wrote, and another continued the file."""
    path = tmp_path / "1.jsonl"
    log = module._EventFile(Assignment({}), path)
    assert log.new_events() == []
    path.write_text('\n{"event": "step", "i": 0, "t": 1}\n{"event": "st')
    assert [event["t"] for event in log.new_events()] == [1]
    with path.open("a") as file:
        file.write('\n{"event": "done", "i": 0}\n')
    assert [event["event"] for event in log.new_events()] == ["done"]
    assert log.new_events() == []


def test_interrupted_it_cancels_its_jobs(store, spec, progress, slurm, gate, monkeypatch):
    from submitit.local.local import LocalJob

    cancel, cancelled = LocalJob.cancel, []

    def waited_for(self, check=True):
        cancel(self, check)
        cancelled.append(self._process.wait(30))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalJob, "cancel", waited_for)
    progress.step = interrupt
    with pytest.raises(KeyboardInterrupt):
        carry_out([spec(seed, model=gate.model) for seed in (0, 1)], store, progress, slurm)
    assert len(cancelled) == 2


def test_without_slurm_it_says_where_to_go(store, spec, progress, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ValueError, match=r"Slurm is not installed \(no sbatch\); run the command on a login node"
    ):
        carry_out([spec(0)], store, progress, Slurm())
