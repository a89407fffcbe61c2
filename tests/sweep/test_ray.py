"""Tests on a real Ray cluster of two nodes on this machine; one of them is killed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from evenclip.sweep import Ray, RunsError, Store, carry_out
from evenclip.sweep import ray as module
from evenclip.sweep.transfer import contents

# Ray reads these on import: they turn on token authentication for the nodes and this process.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
os.environ.pop("RAY_ADDRESS", None)
pytest.importorskip("ray")

SCRIPTS = Path(sys.executable).parent


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def node(*options, cpus):
    """Run a node of a cluster; yield its folder, and end its processes on exit."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the path of a socket must be short
    command = [SCRIPTS / "ray", "start", "--block", "--disable-usage-stats", f"--temp-dir={folder}"]
    process = subprocess.Popen(
        [*command, f"--num-cpus={cpus}", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield folder
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster():
    """Start a head with two processors; yield its address."""
    port = free_port()
    with node("--head", f"--port={port}", "--include-dashboard=false", cpus=2):
        address = f"127.0.0.1:{port}"
        wait_for(lambda: nodes(address) == 1)
        yield address


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def nodes(address):
    """Return the number of living nodes."""
    try:
        with Ray(address)._cluster() as connected:
            return sum(each["Alive"] for each in connected.nodes())
    except ConnectionError:
        return 0


@pytest.fixture
def written(monkeypatch):
    """Count how often each result is written."""
    count, write = Counter(), Store.write

    def counted(self, spec, result, weights):
        count[spec.hash] += 1
        write(self, spec, result, weights)

    monkeypatch.setattr(Store, "write", counted)
    return count


@pytest.fixture
def lost(monkeypatch):
    """Collect the unfinished runs of dead workers."""
    specs, end_assignment = [], module.Tries.end_assignment

    def recorded(self, assignment, *why):
        specs.extend(assignment.specs.values())
        return end_assignment(self, assignment, *why)

    monkeypatch.setattr(module.Tries, "end_assignment", recorded)
    return specs


def kill(folder):
    """Kill all processes of a node if it is running a task; return whether it was."""
    listed = subprocess.run(
        ["ps", "-wweo", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    (raylet,) = [
        line.split()[0]
        for line in listed.splitlines()
        if "/raylet/raylet " in line and f"{folder}/" in line
    ]
    workers = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    if not any(
        b"ray::_carry_out" in Path(f"/proc/{worker}/cmdline").read_bytes() for worker in workers
    ):
        return False
    for pid in (*workers, raylet):
        os.kill(int(pid), signal.SIGKILL)
    return True


def test_forty_runs_of_which_a_node_dies_half_way_are_all_there_and_none_twice(
    cluster, store, spec, progress, written, lost, gate
):
    """Kill the node when twenty runs have ended and each of the three processors runs another."""
    # Ten kinds of models give many bundles.
    specs = [spec(seed, model=gate.model | {"kind": seed % 10}) for seed in range(40)]
    arrived, under_way, let_through = set(), set(), 0

    def step(spec, t):
        nonlocal let_through
        if t != 1 or under_way:
            return
        arrived.add(spec.seed)
        if len(progress.over) < 20:
            let_through += 1
            gate.let_through()
        elif len(arrived) - let_through == 3:
            under_way.update(arrived.difference(seed for seed, _ in progress.over))
            assert kill(second)
            gate.open_for_all()

    progress.step = step
    with node(f"--address={cluster}", cpus=1) as second:
        wait_for(lambda: nodes(cluster) == 2)
        results = carry_out(specs, store, progress, Ray(cluster))
    assert len(results) == 40
    assert {spec.seed for spec in lost} & under_way  # runs of the killed node
    assert set(written.values()) == {1}
    assert len(written) == 40
    assert sorted(progress.over) == [(seed, None) for seed in range(40)]
    assert len(progress.begun) > 40
    assert carry_out(specs, store, progress, Ray("127.0.0.1:1")) == results  # needs no cluster


def test_a_run_that_fails_three_times_is_reported_with_its_traceback_and_the_rest_completes(
    cluster, one_of_three_fails
):
    one_of_three_fails(Ray(cluster))


RULE = """
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from evenclip.rules import DPSGD


@dataclass(frozen=True)
class Deadly(DPSGD):
    name: ClassVar[str] = "deadly"
    tries: str = ""

    def __post_init__(self):
        with open(self.tries, "a") as file:
            file.write("x")
        os._exit(1)
"""


def test_a_run_that_kills_its_process_does_not_cost_the_others_of_its_bundle(
    cluster, store, spec, progress, tmp_path
):
    path, tries = tmp_path / "deadly.py", tmp_path / "tries"
    path.write_text(RULE)
    from evenclip.sweep.describe import describe_file

    kind = {"name": "deadly", "class": "Deadly", "options": {"tries": str(tries)}}
    rule = {**kind, **describe_file(path)}
    specs = [spec(0), spec(1, rule), spec(2), spec(3)]
    with pytest.raises(RunsError, match="seed 1: its process on the Ray cluster died") as raised:
        carry_out(specs, store, progress, Ray(cluster, cpus=2))  # one slot, so one bundle
    assert [failure.spec.seed for failure in raised.value.failures] == [1]
    assert tries.read_text() == "xxx"
    assert all(store.has(spec(seed)) for seed in (0, 2, 3))


def test_steps_are_reported_while_a_run_goes_on(cluster, store, spec, progress, gate):
    """The run waits until its first step was reported."""
    progress.step = lambda spec, t: gate.let_through() if t == 1 else None
    assert len(carry_out([spec(0, model=gate.model)], store, progress, Ray(cluster))) == 1


def test_a_file_that_only_the_driver_has_is_sent(cluster, store, spec, progress, monkeypatch):
    given = spec(0)
    path = Path(given.data["path"])

    def then_gone(specs):
        yield from contents(specs)
        path.rename(path.with_suffix(".elsewhere"))

    monkeypatch.setattr(module, "contents", then_gone)
    (result,) = carry_out([given], store, progress, Ray(cluster))
    assert result["dataset"] == "made"


def test_a_file_too_large_to_be_sent_must_be_on_the_worker(
    cluster, store, spec, progress, monkeypatch
):
    given = spec(0)
    path = Path(given.data["path"])
    monkeypatch.setattr(
        module, "contents", lambda specs: iter([path.rename(path.with_suffix(".elsewhere"))][1:])
    )
    with pytest.raises(
        RunsError, match=r"seed 0: .*\.pt is not on .* and is too large to be sent \(over 2 GiB\)"
    ):
        carry_out([given], store, progress, Ray(cluster))


def test_things_done_apart_come_back_with_their_place(cluster):
    assert sorted(Ray(cluster).map_processes(abs, [3, -1, 2])) == [(0, 3), (1, 1), (2, 2)]
    assert list(Ray(cluster).map_processes(abs, [])) == []


def test_what_no_node_has_is_said_and_not_waited_for(cluster, store, spec, progress):
    with pytest.raises(
        ValueError,
        match=r"A run needs 64 CPUs and 0.5 GPUs, but no node of the Ray cluster has",
    ):
        carry_out([spec(0)], store, progress, Ray(cluster, cpus=64, gpus=0.5))


def evenclip(*words, **environment):
    return subprocess.run(
        [SCRIPTS / "evenclip", *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def test_a_wrong_token_is_a_sentence(cluster, tmp_path):
    command = (
        "compare",
        "--on",
        "ray",
        "--ray-address",
        cluster,
        "--seeds",
        "1",
        "--out",
        str(tmp_path),
    )
    done = evenclip(*command, RAY_AUTH_TOKEN="not this one", RAY_NUM_REDIS_GET_RETRIES="3")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"evenclip: The Ray cluster at {cluster} rejected the connection; if the cluster requires "
        "a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the output of `ray "
        "get-auth-token` on its head; otherwise unset RAY_AUTH_MODE.\n"
    )


def test_no_token_is_a_sentence(cluster, tmp_path):
    environment = {"RAY_AUTH_TOKEN": "", "HOME": str(tmp_path)}
    done = evenclip(
        "compare", "--on", "ray", "--ray-address", cluster, "--seeds", "1", **environment
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "evenclip: Ray found no token; if the cluster requires a token, set RAY_AUTH_MODE"
    )


def test_a_command_on_a_cluster_of_its_own(tmp_path):
    """The command starts and ends its own cluster, and prints no message of Ray."""
    words = [
        "compare",
        "--seeds",
        "1",
        "--epochs",
        "1",
        "--rules",
        "dpsgd",
        "--json",
        "--on",
        "ray",
    ]
    done = evenclip(*words, "--out", str(tmp_path / "out"), EVENCLIP_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["table"]) == ["non-private", "dpsgd"]
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["1/2", "2/2"]
