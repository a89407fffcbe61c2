"""The worker process: read tasks as lines of JSON, carry them out, and write events as lines.

A line of input is a task of `sweep.bundle` with the "root" of the store. The process ends with its
input, so that it outlives its parent by at most one bundle.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["carry_out", "main"]


def main() -> None:
    """Carry out tasks until the input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other output must not mix with the events
    for stream in (sys.stdout, sys.stderr):  # a model may print what the terminal cannot show
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    from evenclip.sweep.bundle import prepare_worker

    prepare_worker()

    def say(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")

    for line in sys.stdin:
        carry_out(json.loads(line), say)
    out.flush()
    os._exit(0)  # results are on disk; destroying a GPU context takes seconds


def carry_out(task: dict[str, Any], say: Callable[..., None]) -> None:
    """Carry out one bundle and write its results to the store."""
    from evenclip.sweep.bundle import compute_into, read_task
    from evenclip.sweep.store import Store

    compute_into(
        Store(task["root"]),
        read_task(task, say, "the package changed while the command ran; start the command again"),
        say,
    )
