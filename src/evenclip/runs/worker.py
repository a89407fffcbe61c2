"""A process that carries out one run after the other: a line of JSON in for each, lines of JSON out.

    in    {"spec": {...}, "hash": "its name", "root": "where results lie"}
    out   {"event": "step", "t": 120}
          {"event": "done"} | {"event": "busy"} | {"event": "failed", "why": "a sentence", "trace": "a traceback"}

It ends when its input does, so it does not outlive whoever started it by more than one run.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Until there is no more to do."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints must not be taken for an answer
    import torch

    torch.set_num_threads(int(os.environ.get("EVENCLIP_THREADS", "1")))
    warnings.simplefilter("ignore")  # said once by whoever started this, not by every worker

    def say(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")

    for line in sys.stdin:
        _carry_out(json.loads(line), say)


def _carry_out(task: dict[str, Any], say: Any) -> None:
    from evenclip.runs.spec import Spec
    from evenclip.runs.store import Store
    from evenclip.runs.work import work

    try:
        spec, store = Spec.from_json(task["spec"]), Store(task["root"])
        if spec.hash != task["hash"]:
            raise RuntimeError("the package was changed while the command ran; start it again")
        with store.claim(spec) as mine:
            if not mine:
                say(event="busy")
                return
            if not store.has(spec):
                result, weights = work(spec, lambda t: say(event="step", t=t))
                store.write(spec, result, weights)
        say(event="done")
    except Exception as error:
        say(event="failed", why=f"{error}" or type(error).__name__, trace=traceback.format_exc())


if __name__ == "__main__":
    main()
