"""Tests of the worker process: its input, its output, and its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from evenclip.sweep import Local, Store, carry_out, process
from evenclip.sweep.bundle import make_task
from evenclip.sweep.describe.files import describe_file, load_module
from evenclip.sweep.executor import Silent


def test_a_worker_answers_line_by_line_and_ends_with_its_input(store, spec):
    """Two tasks give one final event per run, and no other output."""
    tasks = [
        make_task(specs) | {"root": str(store.root)}
        for specs in ([spec(0), spec(1)], [spec(2), spec(0)])
    ]
    worker = process.start("evenclip.sweep.worker", text=True)
    out, _ = worker.communicate("".join(json.dumps(task) + "\n" for task in tasks))
    events = [json.loads(line) for line in out.splitlines()]
    ends = [(event["event"], event["i"]) for event in events if event["event"] != "step"]
    assert ends == [("done", 0), ("done", 1), ("done", 0), ("done", 1)]
    assert all(store.has(spec(seed)) for seed in range(3))
    process.end(worker, at_once=False)
    process.close(worker)
    assert worker.returncode == 0


def test_the_threads_of_the_environment_change_no_result(store, spec, tmp_path, monkeypatch):
    """The noise of a seed depends on the threads, and the name of a run does not."""
    monkeypatch.setenv("EVENCLIP_THREADS", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    other = Store(tmp_path / "other")
    carry_out([spec(0)], other, Silent(), Local(1))
    monkeypatch.undo()
    carry_out([spec(0)], store, Silent(), Local(1))
    ours, theirs = (one.read(spec(0)) for one in (store, other))
    assert ours["ledger"] == theirs["ledger"]
    assert ours["trace"] == theirs["trace"]


def test_a_worker_that_is_ended_at_once_is_gone():
    worker = process.start("evenclip.sweep.worker")
    process.end(worker, at_once=True)
    process.close(worker)
    assert worker.returncode < 0
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_workers_do_not_outlive_their_parent():
    """They inherit its error stream; `run` waits until the last of them closes it."""
    code = (
        "import subprocess, sys\n"
        "from evenclip.sweep.process import python\n"
        "body = 'from evenclip.sweep.worker import main; main()'\n"
        "p = subprocess.Popen([*python(), '-c', body],"
        " stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)\n"
        "print(p.pid)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout)


def test_a_worker_does_not_import_from_the_current_folder(tmp_path, monkeypatch):
    """Neither by itself nor by an empty entry of PYTHONPATH; a folder that is named stays."""
    named = tmp_path / "named"
    named.mkdir()
    monkeypatch.chdir(tmp_path)
    before = os.environ.get("PYTHONPATH")
    folders = ["", str(named), *([] if before is None else [before]), ""]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    code = "import os, sys; print([f for f in sys.path if f in ('', os.getcwd())], *sys.path)"
    done = subprocess.run(
        [*process.python(), "-c", code],
        env=process.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("[] ")
    assert str(named) in done.stdout.split()


def test_no_worker_is_started_while_a_file_is_loaded(tmp_path):
    """Every worker would load it, and start workers."""
    path = tmp_path / "recursive.py"
    path.write_text(
        "from evenclip.sweep import process\n"
        "process.close(process.start('evenclip.sweep.worker'))\n"
    )
    with pytest.raises(ValueError, match="starts a comparison when it is loaded, and every worker"):
        load_module(describe_file(path))
