"""Tests of local processes that succeed, fail, and are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest

from evenclip.sweep import Local, RunsError, carry_out


def test_results_come_in_the_order_asked_for_and_once(store, spec, progress):
    specs = [spec(seed) for seed in (2, 0, 2, 1)]
    results = carry_out(specs, store, progress, Local(2))
    assert [result["settings"]["seed_given"] for result in results] == [True] * 4
    assert results[0] == results[2]
    assert results[0]["test"] != results[1]["test"]
    assert (progress.runs, sorted(progress.begun)) == (3, [0, 1, 2])
    before = {p: p.stat().st_mtime_ns for p in store.root.rglob("result.json")}
    assert carry_out(specs, store, progress, Local(2)) == results
    assert progress.runs == 3  # nothing was computed again
    assert {p: p.stat().st_mtime_ns for p in store.root.rglob("result.json")} == before


def test_a_run_that_fails_does_not_stop_the_others(store, spec, progress):
    bad = spec(5, lr=-1.0)
    with pytest.raises(RunsError) as raised:
        carry_out([spec(0), bad, spec(1)], store, progress, Local(1))
    assert str(raised.value) == (
        "1 of 3 runs failed; the other 2 are kept. dpsgd, seed 5: lr is -1.0; it must be a finite "
        "number above 0. Run the same command again to finish what is missing. "
        f"Details are in {store.root / 'failures.txt'}."
    )
    assert "Traceback" in raised.value.failures[0].trace
    assert (store.root / "failures.txt").read_text().startswith("dpsgd, seed 5: lr is -1.0; ")
    assert raised.value.failures[0].trace in (store.root / "failures.txt").read_text()
    assert store.has(spec(0))
    assert store.has(spec(1))
    assert not store.has(bad)


def children():
    """Return the process ids of our workers."""
    listed = subprocess.run(
        ["ps", "-wwo", "pid=,args=", "--ppid", str(os.getpid())],
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        int(line.split()[0])
        for line in listed.stdout.splitlines()
        if "evenclip.sweep.worker" in line
    ]


def test_a_killed_worker_costs_the_bundle_it_had_in_hand_and_the_command_can_be_given_again(
    store, spec, progress, gate, here
):
    """Kill it during the second of three runs: two are lost, the other bundle is carried out."""
    bundle, other = [spec(seed, model=gate.model) for seed in (7, 8, 9)], [spec(0), spec(1)]

    def step(spec, t):
        if t == 1 and spec.seed == 7:
            gate.let_through()
        if t == 1 and spec.seed == 8:
            (worker,) = children()
            os.kill(worker, signal.SIGKILL)

    progress.step = step
    with pytest.raises(RunsError) as raised:
        carry_out([*bundle, *other], store, progress, Local(1))
    assert [failure.spec.seed for failure in raised.value.failures] == [8, 9]
    assert {seed for seed, failure in progress.over if failure is None} == {0, 1, 7}
    assert str(raised.value).startswith(
        "2 of 5 runs failed; the other 3 are kept. dpsgd, seed 8: its process was ended by "
        "SIGKILL (out of memory?)."
    )
    assert [run.seed for run in (*bundle, *other) if store.has(run)] == [7, 0, 1]
    assert not any(p.name.startswith(".") for p in store.root.iterdir())
    assert children() == []
    gate.open_for_all()
    assert len(carry_out([*bundle, *other], store, type(progress)(), here)) == 5


def test_things_done_apart_come_back_with_their_place():
    assert sorted(Local(1).map_processes(abs, [3, -1])) == [(0, 3), (1, 1)]
    assert list(Local(1).map_processes(abs, [])) == []


def test_two_commands_on_one_store_share_the_work(store, spec, progress):
    specs, results = [spec(seed, epochs=2) for seed in range(4)], {}

    def command(name):
        results[name] = carry_out(specs, store, type(progress)(), Local(1))

    threads = [threading.Thread(target=command, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["first"] == results["second"]
    folders = [p for p in store.root.iterdir() if (p / "result.json").is_file()]
    assert len(folders) == 4
