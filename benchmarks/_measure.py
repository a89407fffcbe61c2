"""Measuring: ways that take turns, peak memory, the machine, and where results are kept."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import itertools
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = [
    "RESULTS",
    "Loop",
    "Timed",
    "arguments",
    "commit",
    "environment",
    "in_child",
    "interleaved",
    "memory",
    "prepare_torch",
    "ratios",
    "reason",
    "save",
    "spread",
    "turn_seconds",
    "turn_steps",
    "wait",
]

RESULTS = Path(__file__).parent / "results"
# Steps before the clock starts: at least, at most, and enough once they took this many seconds.
_WARM = 2, 200, 0.5
# Most steps of a way in one turn.
_TURN = 1000
# Seconds after which a turn does not wait for the end of an epoch: what is done once in so long
# does not show, and the others should have their turn within the same seconds.
_EPOCH = 2.0
# Rounds that there are in any case, if so many were asked for.
_LEAST = 5
# Seconds after which no further step is looked at for its memory, if there were two.
_LONG = 3.0
# Steps whose allocations are looked at: Poisson batches differ in size.
_LOOKED_AT = 8

# A step at a time; where something is done once an epoch, whether one has just ended.
Loop = Iterator[bool | None]


class Timed(NamedTuple):
    """What was measured, by the names of the ways.

    Attributes:
        seconds: of a step, round by round.
        first: seconds until the first step was taken, preparation and compiling included.
        failed: why a way has no times.
    """

    seconds: dict[str, list[float]]
    first: dict[str, float]
    failed: dict[str, str]


def interleaved(
    makes: Mapping[str, Callable[[], Loop]],
    *,
    rounds: int,
    seconds: float,
    device: str,
    budget: float = math.inf,
    mute: bool = True,
) -> Timed:
    """Seconds a step of every way. They take turns of about so many seconds, so that whatever else
    the machine does hits all alike; one that fails is left out from there on. Beyond the budget, in
    seconds, there are five rounds only.
    """
    found = Timed({}, {}, {})
    loops: dict[str, tuple[Loop, int]] = {}
    for name, make in makes.items():
        try:
            started = time.perf_counter()
            loop = make()
            next(loop)
            wait(device)
            found.first[name] = time.perf_counter() - started
            loops[name] = loop, turn_steps(loop, seconds, device)
            found.seconds[name] = []
        except Exception as error:  # one way that fails does not stop the others
            found.failed[name] = reason(error)
            _tidy(device)
    began = time.perf_counter()
    for done in range(rounds):
        if done >= _LEAST and time.perf_counter() - began > budget:
            break
        for name, (loop, steps) in list(loops.items()):
            try:
                found.seconds[name].append(turn_seconds(loop, steps, device))
            except Exception as error:
                del loops[name], found.seconds[name]
                found.failed[name] = reason(error)
                _tidy(device)
        if not mute:
            print(f"\rround {done + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    if not mute:
        print("\r" + " " * 30 + "\r", end="", file=sys.stderr)
    return found


def turn_steps(loop: Loop, seconds: float, device: str) -> int:
    """Steps that take about so long, after some to warm up; whole epochs if the loop says when one
    ends.
    """
    least, most, enough = _WARM
    began, steps = time.perf_counter(), 0
    while steps < least or (steps < most and time.perf_counter() - began < enough):
        steps += _taken(loop, 1)
    wait(device)
    few = max(1, steps // 4)
    return max(1, min(_TURN, round(seconds / turn_seconds(loop, few, device))))


def turn_seconds(
    loop: Loop, steps: int, device: str, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds a step."""
    wait(device)
    started = clock()
    done = _taken(loop, steps)
    wait(device)
    return (clock() - started) / done


def _taken(loop: Loop, steps: int) -> int:
    """Take at least so many steps, and the rest of a short epoch if the loop has any; how many it
    were.
    """
    began, done, ended = time.perf_counter(), 0, None
    while done < steps or (ended is False and time.perf_counter() - began < _EPOCH):
        ended, done = next(loop), done + 1
    return done


def wait(device: str) -> None:
    """Until the device has done what it was told."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def _tidy(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def reason(error: BaseException) -> str:
    """What went wrong, in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def ratios(found: Sequence[float], to: Sequence[float]) -> list[float]:
    """Round by round: both sides saw the same minute of the machine."""
    return [a / b for a, b in zip(found, to, strict=True)]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


# --- memory ---


def memory(make: Callable[[], Loop], steps: int, device: str, there: int) -> dict[str, float]:
    """Peak MiB of some steps, and the seconds until the first was taken. For a process of its own.

    "MiB" is what torch had allocated at most: on a CPU beyond what there was before the step, on a
    GPU beyond the `there` bytes of the data. "held" is what the process held of the machine's
    memory for it, with what its allocator had not given back: on a CPU the highest resident size
    beyond that after the first step.
    """
    started = time.perf_counter()
    loop = make()
    next(loop)  # everything is imported, compiled and allocated by the time we look
    wait(device)
    first = time.perf_counter() - started
    if device != "cpu":
        _some(loop, steps)
        wait(device)
        peak, reserved = (
            torch.cuda.max_memory_allocated(device),
            torch.cuda.max_memory_reserved(device),
        )
        return {"MiB": (peak - there) / 2**20, "held": (reserved - there) / 2**20, "first": first}
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
    before = status("VmRSS")
    _some(loop, steps)
    held = status("VmHWM") - before
    return {"MiB": max(_allocated(loop) for _ in range(_LOOKED_AT)), "held": held, "first": first}


def _allocated(loop: Loop) -> float:
    """The most that torch had allocated during a step, beyond what there was before it."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        next(loop)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0) / 2**20


def _some(loop: Loop, steps: int) -> None:
    """So many steps, or two that take long."""
    began = time.perf_counter()
    for done in range(steps):
        if done >= 2 and time.perf_counter() - began > _LONG:
            return
        next(loop)


def status(field: str) -> float:
    """A size from the kernel's account of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


# --- processes ---


def in_child(
    script: str, task: dict[str, Any], seconds: float, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """What `script --child TASK` prints as its last line; {"error": why} where it does not come to
    that.
    """
    command = [sys.executable, script, "--child", json.dumps(task)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
            env={**os.environ, **(env or {})},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s"}
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return {"error": f"ended by {name}{', out of memory?' if name == 'SIGKILL' else ''}"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        return {"error": said[-1][:300] if said else f"exit status {done.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


# --- the machine ---


def prepare_torch(threads: int, device: str, tf32: bool) -> None:
    """The same for all ways: threads, and how products of float32 are taken on a GPU."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    if device != "cpu":
        cudnn: Any = torch.backends.cudnn
        for setting in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
            setting.fp32_precision = "tf32" if tf32 else "ieee"


def environment(device: str, threads: int) -> dict[str, Any]:
    """What the numbers were measured on."""
    found: dict[str, Any] = {
        "device": device,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads,
    }
    if device != "cpu" and torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    found |= {"system": platform.platform(), "python": platform.python_version()}
    found |= {name: _version(name) for name in ("evenclip", "torch", "opacus", "numpy")}
    return {
        **found,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")


def _version(name: str) -> str | None:
    """Of an installed package; None of one that is not, or is used from its source."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit(root: Path = RESULTS.parents[1]) -> str | None:
    """Of a checkout, with a + where its sources differ; None outside one."""
    try:
        done = [
            subprocess.run(
                ["git", *words], cwd=root, capture_output=True, text=True, check=True
            ).stdout
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", "src"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return done[0].strip() + ("+" if done[1].strip() else "")


# --- the command line ---


def arguments(doc: str, *, rounds: int) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take."""
    parser = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--quick", action="store_true", help="a few short rounds; nothing is written without --out"
    )
    parser.add_argument("--out", type=Path, help="where to write, instead of benchmarks/results/")
    return parser


def save(name: str, given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Keep the results with the environment, unless it was a quick look."""
    if given.quick and given.out is None:
        return
    suffix = "" if given.device == "cpu" else f"-{given.device}"
    if getattr(given, "tf32", False):
        suffix += "-tf32"
    path = given.out or RESULTS / f"{name}{suffix}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {
        name: value for name, value in vars(given).items() if isinstance(value, (str, int, list))
    }  # no folders
    whole = {"environment": environment(given.device, given.threads), "arguments": plain, **found}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    print(f"\nwritten to {path}")
