"""Measure interleaved training loops and peak memory, and save results with the environment."""

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
# Warm-up: minimum steps, maximum steps, and seconds after which it ends.
_WARM = 2, 200, 0.5
# Maximum steps of a loop in one turn.
_TURN = 1000
# Seconds after which a turn does not wait for the end of an epoch. The cost of the end of such a
# long epoch is negligible, and the other loops should have their turn soon.
_EPOCH = 2.0
# Minimum number of rounds, unless fewer were requested.
_MIN_ROUNDS = 5
# Seconds after which the memory of no further step is measured, after at least two.
_LONG_SECONDS = 3.0
# Steps whose allocations are measured: Poisson batches differ in size.
_PROFILED_STEPS = 8

# One step per item; its value is whether an epoch has just ended, or None if that does not matter.
Loop = Iterator[bool | None]


class Timed(NamedTuple):
    """Measurements by the name of the loop.

    Attributes:
        seconds: seconds per step, for each round.
        first: seconds until the end of the first step, including preparation and compiling.
        failed: reasons of the loops without times.
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
    """Measure the seconds per step of every loop.

    The loops take turns of about `seconds` seconds, so that other load on the machine affects all
    of them. A loop that fails is left out from then on. After `budget` seconds, measuring stops
    once there are five rounds.
    """
    timed = Timed({}, {}, {})
    loops: dict[str, tuple[Loop, int]] = {}
    for name, make in makes.items():
        try:
            started = time.perf_counter()
            loop = make()
            next(loop)
            wait(device)
            timed.first[name] = time.perf_counter() - started
            loops[name] = loop, turn_steps(loop, seconds, device)
            timed.seconds[name] = []
        except Exception as error:  # a loop that fails does not stop the others
            timed.failed[name] = reason(error)
            _tidy(device)
    began = time.perf_counter()
    for done in range(rounds):
        if done >= _MIN_ROUNDS and time.perf_counter() - began > budget:
            break
        for name, (loop, steps) in list(loops.items()):
            try:
                timed.seconds[name].append(turn_seconds(loop, steps, device))
            except Exception as error:
                del loops[name], timed.seconds[name]
                timed.failed[name] = reason(error)
                _tidy(device)
        if not mute:
            print(f"\rround {done + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    if not mute:
        print("\r" + " " * 30 + "\r", end="", file=sys.stderr)
    return timed


def turn_steps(loop: Loop, seconds: float, device: str) -> int:
    """Warm up, then return the number of steps that take about `seconds` seconds.

    If the loop reports ends of epochs, whole epochs are timed.
    """
    least, most, enough = _WARM
    began, steps = time.perf_counter(), 0
    while steps < least or (steps < most and time.perf_counter() - began < enough):
        steps += _take(loop, 1)
    wait(device)
    few = max(1, steps // 4)
    return max(1, min(_TURN, round(seconds / turn_seconds(loop, few, device))))


def turn_seconds(
    loop: Loop, steps: int, device: str, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Take some steps; return the seconds per step."""
    wait(device)
    started = clock()
    done = _take(loop, steps)
    wait(device)
    return (clock() - started) / done


def _take(loop: Loop, steps: int) -> int:
    """Take at least `steps` steps, and the rest of a short epoch; return their number."""
    began, done, ended = time.perf_counter(), 0, None
    while done < steps or (ended is False and time.perf_counter() - began < _EPOCH):
        ended, done = next(loop), done + 1
    return done


def wait(device: str) -> None:
    """Wait until the device has finished all work."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def _tidy(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def reason(error: BaseException) -> str:
    """Return the error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def ratios(values: Sequence[float], to: Sequence[float]) -> list[float]:
    """Return the ratios by round; both sides were measured at about the same time."""
    return [a / b for a, b in zip(values, to, strict=True)]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


# --- memory ---


def memory(make: Callable[[], Loop], steps: int, device: str, data_bytes: int) -> dict[str, float]:
    """Return the peak MiB of some steps, and the seconds until the first step.

    Call it in a separate process. "MiB" is the maximum that torch had allocated: on a CPU beyond
    the allocations before the step, on a GPU beyond the `data_bytes` bytes of the data. "held" also
    counts memory that the allocator had not returned: on a CPU it is the highest resident size
    beyond that after the first step.
    """
    started = time.perf_counter()
    loop = make()
    next(loop)  # import, compile and allocate before measuring
    wait(device)
    first = time.perf_counter() - started
    if device != "cpu":
        _take_at_most(loop, steps)
        wait(device)
        peak = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        return {
            "MiB": (peak - data_bytes) / 2**20,
            "held": (reserved - data_bytes) / 2**20,
            "first": first,
        }
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset the recorded peak
    before = status("VmRSS")
    _take_at_most(loop, steps)
    held = status("VmHWM") - before
    return {
        "MiB": max(_allocated(loop) for _ in range(_PROFILED_STEPS)),
        "held": held,
        "first": first,
    }


def _allocated(loop: Loop) -> float:
    """Return the maximum that torch had allocated during a step, beyond what was there before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        next(loop)
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0) / 2**20


def _take_at_most(loop: Loop, steps: int) -> None:
    """Take at most `steps` steps; stop after two if they take long."""
    began = time.perf_counter()
    for done in range(steps):
        if done >= 2 and time.perf_counter() - began > _LONG_SECONDS:
            return
        next(loop)


def status(field: str) -> float:
    """Return a size from /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


# --- processes ---


def in_child(
    script: str, task: dict[str, Any], seconds: float, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run `script --child TASK`; return its last line of output, or {"error": why}."""
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
        errors = done.stderr.strip().splitlines()
        return {"error": errors[-1][:300] if errors else f"exit status {done.returncode}"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


# --- the machine ---


def prepare_torch(threads: int, device: str, tf32: bool) -> None:
    """Set the threads, and the precision of float32 products on a GPU."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    if device != "cpu":
        cudnn: Any = torch.backends.cudnn
        for setting in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
            setting.fp32_precision = "tf32" if tf32 else "ieee"


def environment(device: str, threads: int) -> dict[str, Any]:
    """Describe the machine and the installed versions."""
    facts: dict[str, Any] = {
        "device": device,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads,
    }
    if device != "cpu" and torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    facts |= {"system": platform.platform(), "python": platform.python_version()}
    facts |= {name: _version(name) for name in ("evenclip", "torch", "opacus", "numpy")}
    return {
        **facts,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")


def _version(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit(root: Path = RESULTS.parents[1]) -> str | None:
    """Return the commit of a checkout, with a + if its sources differ; None outside one."""
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
    """Return a parser with the arguments of all benchmarks."""
    parser = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--quick", action="store_true", help="few short rounds; writes nothing without --out"
    )
    parser.add_argument("--out", type=Path, help="output file, instead of benchmarks/results/")
    return parser


def save(name: str, given: argparse.Namespace, results: dict[str, Any]) -> None:
    """Save the results with the environment, unless the run is quick."""
    if given.quick and given.out is None:
        return
    suffix = "" if given.device == "cpu" else f"-{given.device}"
    if getattr(given, "tf32", False):
        suffix += "-tf32"
    path = given.out or RESULTS / f"{name}{suffix}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Paths are left out.
    plain = {
        name: value for name, value in vars(given).items() if isinstance(value, (str, int, list))
    }
    contents = {
        "environment": environment(given.device, given.threads),
        "arguments": plain,
        **results,
    }
    path.write_text(json.dumps(contents, indent=1) + "\n")
    print(f"\nwritten to {path}")
