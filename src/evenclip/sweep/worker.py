"""A process that carries out one bundle of runs after the other: a line of JSON in for each, lines
of JSON out.

In is a task of `sweep.bundle` with the "root" where results lie, out is what is said about it. It
ends when its input does, so it does not outlive whoever started it by more than one bundle.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["carry_out", "main"]


def main() -> None:
    """Until there is no more to do."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints must not be taken for an answer
    from evenclip.sweep.bundle import ready

    ready(int(os.environ.get("EVENCLIP_THREADS", "1")))

    def say(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")

    for line in sys.stdin:
        carry_out(json.loads(line), say)
    out.flush()
    os._exit(0)  # results are on disk; taking down a GPU's context takes seconds


def carry_out(task: dict[str, Any], say: Callable[..., None]) -> None:
    """One bundle, its results into the store."""
    from evenclip.sweep.bundle import into, opened
    from evenclip.sweep.store import Store

    into(
        Store(task["root"]),
        opened(task, say, "the package was changed while the command ran; start it again"),
        say,
    )


if __name__ == "__main__":
    main()
