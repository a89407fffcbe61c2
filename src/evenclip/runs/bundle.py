"""A bundle of runs that are alike, carried out by one process: the body of every worker, wherever it is.

A task is plain values, and what is said about it too:

    task   {"specs": [{...}, ...], "hashes": ["their names", ...]}
    said   {"event": "step", "i": 0, "t": 120}    the first of them is at step 120
           {"event": "done", "i": 0} | {"event": "busy", "i": 0}
           {"event": "failed", "i": 0, "why": "a sentence", "trace": "a traceback"}

Where results go is said by `Keep`: into the store, or back to whoever asked.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from evenclip.runs.spec import Spec
from evenclip.runs.store import Store

if TYPE_CHECKING:
    from torch import Tensor

    from evenclip.runs.together import How

__all__ = ["described", "into", "opened", "ready", "work_on"]

Say = Callable[..., None]
Keep = Callable[[int, Spec, Mapping[str, Any], "Mapping[str, Tensor]"], None]


def described(specs: Sequence[Spec]) -> dict[str, Any]:
    """A task for a worker."""
    return {"specs": [spec.to_json() for spec in specs], "hashes": [spec.hash for spec in specs]}


def opened(
    task: Mapping[str, Any], say: Say, other: str, place: Callable[[Spec], Spec] = lambda spec: spec
) -> dict[int, Spec]:
    """The runs of a task, with their files in place; `other` is said of each that would be another one here."""
    found = dict[int, Spec]()
    for i, (plain, name) in enumerate(zip(task["specs"], task["hashes"], strict=True)):
        with _told(say, i):
            spec = Spec.from_json(plain)
            if spec.hash != name:
                raise RuntimeError(other)
            found[i] = place(spec)
    return found


def into(store: Store, todo: Mapping[int, Spec], say: Say) -> None:
    """Carry out what nobody else is at and what is not there; results go into the store."""

    def keep(i: int, spec: Spec, result: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        del i
        store.write(spec, result, weights)

    with ExitStack() as claims:
        mine = dict[int, Spec]()
        for i, spec in todo.items():
            with _told(say, i):
                if not claims.enter_context(store.claim(spec)):
                    say(event="busy", i=i)
                elif store.has(spec):
                    say(event="done", i=i)
                else:
                    mine[i] = spec
        work_on(mine, keep, say)


def ready(threads: int) -> None:
    """Make this process a worker's: so many threads, and no warnings, which whoever started it has said once."""
    import warnings

    import torch

    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")


def work_on(todo: Mapping[int, Spec], keep: Keep, say: Say) -> None:
    """Carry out these runs, together where that is quicker."""
    how = _how(list(todo.values()))
    for i, spec in _together(dict(todo), how, keep, say).items():
        _alone(i, spec, how, keep, say)


def _how(specs: list[Spec]) -> How:
    """How to compute these; plainly, if they cannot even be begun: each will say why."""
    from evenclip.runs.together import PLAIN, choose

    try:
        return choose(specs) if specs else PLAIN
    except Exception:
        return PLAIN


def _together(todo: dict[int, Spec], how: How, keep: Keep, say: Say) -> dict[int, Spec]:
    """Carry out what is better computed together; what is left."""
    if how.together:
        return _at_once(todo, how, keep, say)
    if how.turns == 1:
        return todo
    left: dict[int, Spec] = {}
    waiting = list(todo.items())
    while waiting:
        some, waiting = waiting[: how.turns], waiting[how.turns :]
        left |= _at_once(dict(some), how, keep, say)
    return left


def _at_once(todo: dict[int, Spec], how: How, keep: Keep, say: Say) -> dict[int, Spec]:
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
        with _told(say, i):
            keep(i, spec, result, weights)
            say(event="done", i=i)
    return {}


def _alone(i: int, spec: Spec, how: How, keep: Keep, say: Say) -> None:
    from evenclip.runs.work import work

    with _told(say, i):
        result, weights = work(spec, lambda t: say(event="step", i=i, t=t), compile=how.compiled)
        keep(i, spec, result, weights)
        say(event="done", i=i)


class _told:  # noqa: N801
    """What goes wrong with a run is said of it, and stops nothing else."""

    def __init__(self, say: Say, i: int) -> None:
        self._say, self._i = say, i

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, Exception):
            return False
        trace = "".join(traceback.format_exception(error))
        self._say(event="failed", i=self._i, why=f"{error}" or type(error).__name__, trace=trace)
        return True
