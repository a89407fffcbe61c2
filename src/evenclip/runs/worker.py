"""A process that carries out one run after the other: a line of JSON in for each, lines of JSON out.

    in    {"specs": [{...}, ...], "hashes": ["their names", ...], "root": "where results lie"}
    out   {"event": "step", "i": 0, "t": 120}    the first of them is at step 120
          {"event": "done", "i": 0} | {"event": "busy", "i": 0}
          {"event": "failed", "i": 0, "why": "a sentence", "trace": "a traceback"}

Several runs that come in one line are alike, and are computed together where that is quicker.

It ends when its input does, so it does not outlive whoever started it by more than one run.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenclip.runs.spec import Spec
    from evenclip.runs.store import Store
    from evenclip.runs.together import How

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
    out.flush()
    os._exit(0)  # results are on disk; taking down a compiler's processes and a GPU's graphs takes half a minute


def _carry_out(task: dict[str, Any], say: Any) -> None:
    from evenclip.runs.spec import Spec
    from evenclip.runs.store import Store

    specs, store = [Spec.from_json(spec) for spec in task["specs"]], Store(task["root"])
    with ExitStack() as claims:
        todo = dict[int, Spec]()
        for i, spec in enumerate(specs):
            try:
                if spec.hash != task["hashes"][i]:
                    raise RuntimeError("the package was changed while the command ran; start it again")
                if not claims.enter_context(store.claim(spec)):
                    say(event="busy", i=i)
                elif store.has(spec):
                    say(event="done", i=i)
                else:
                    todo[i] = spec
            except Exception as error:
                _fail(say, i, error)
        how = _how(list(todo.values()))
        for i, spec in _together(todo, how, store, say).items():
            _alone(i, spec, how, store, say)


def _how(specs: list[Spec]) -> How:
    """How to compute these; plainly, if they cannot even be begun: each will say why."""
    from evenclip.runs.together import PLAIN, choose

    try:
        return choose(specs) if specs else PLAIN
    except Exception:
        return PLAIN


def _together(todo: dict[int, Spec], how: How, store: Store, say: Any) -> dict[int, Spec]:
    """Carry out what is better computed together; what is left."""
    if how.together:
        return _at_once(todo, how, store, say)
    if how.turns == 1:
        return todo
    left: dict[int, Spec] = {}
    waiting = list(todo.items())
    while waiting:
        some, waiting = waiting[: how.turns], waiting[how.turns :]
        left |= _at_once(dict(some), how, store, say)
    return left


def _at_once(todo: dict[int, Spec], how: How, store: Store, say: Any) -> dict[int, Spec]:
    """Carry these out, all in progress at the same time; what is left."""
    from evenclip.runs.work import work_together

    def report(t: int) -> None:
        for i in todo:
            say(event="step", i=i, t=t)

    try:
        found = work_together(list(todo.values()), report, compile=how.compiled, turns=how.turns > 1)
    except Exception:  # whatever it was, each run will say it of itself
        return todo
    for (i, spec), (result, weights) in zip(todo.items(), found, strict=True):
        try:
            store.write(spec, result, weights)
            say(event="done", i=i)
        except Exception as error:
            _fail(say, i, error)
    return {}


def _alone(i: int, spec: Spec, how: How, store: Store, say: Any) -> None:
    from evenclip.runs.work import work

    try:
        result, weights = work(spec, lambda t: say(event="step", i=i, t=t), compile=how.compiled)
        store.write(spec, result, weights)
        say(event="done", i=i)
    except Exception as error:
        _fail(say, i, error)


def _fail(say: Any, i: int, error: Exception) -> None:
    say(event="failed", i=i, why=f"{error}" or type(error).__name__, trace=traceback.format_exc())


if __name__ == "__main__":
    main()
