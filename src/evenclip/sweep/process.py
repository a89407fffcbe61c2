"""Start and end worker processes, whose body is `evenclip.sweep.worker`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

__all__ = ["Process", "close", "cores", "end", "start"]

Process = subprocess.Popen[str]


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start() -> Process:
    """Start a worker that waits for its first task."""
    return subprocess.Popen(
        [sys.executable, "-m", "evenclip.sweep.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def end(process: Process, *, at_once: bool) -> None:
    """End a worker after its current task, or at once. Its output can still be read."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    if at_once:
        process.kill()
    process.wait()
    with suppress(ProcessLookupError, PermissionError):  # its children hold our pipes open
        os.killpg(process.pid, signal.SIGKILL)


def close(process: Process) -> None:
    """Close the streams of a worker that has ended."""
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
