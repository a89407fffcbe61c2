"""Processes of this machine that carry out runs, started before it is known which.

They import torch first, which takes a second, and so does whoever plans the runs: at the same time, if they are started
from here, where nothing is imported. What they are told and what they answer is in `evenclip.runs.worker`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["Process", "close", "cores", "early", "end", "start"]

Process = subprocess.Popen[str]

_EARLY: list[Process] = []


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start(at_once: int) -> Process:
    """A process that waits for its first task: one of so many that work at a time."""
    if _EARLY:
        return _EARLY.pop()
    # A compiler starts as many processes of its own as there are cores, in each of ours.
    threads = max(1, cores() // at_once)
    env = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "evenclip.runs.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True, env=env,
    )  # fmt: skip


@contextmanager
def early(at_once: int) -> Iterator[None]:
    """Where so many are there before they are started; those that nobody needed end with it."""
    _EARLY.extend([start(at_once) for _ in range(at_once)])
    try:
        yield
    finally:
        while _EARLY:
            left = _EARLY.pop()
            end(left, at_once=True)
            close(left)


def end(process: Process, *, at_once: bool) -> None:
    """No more tasks: it ends when it is done with what it has, or at once. What it said may still be read."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    if at_once:
        process.kill()
    process.wait()
    with suppress(ProcessLookupError, PermissionError):  # a compiler's processes, which hold on to our pipes
        os.killpg(process.pid, signal.SIGKILL)


def close(process: Process) -> None:
    """Nobody reads what it said any more."""
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
