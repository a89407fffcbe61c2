"""A bundle of runs, carried out one after the other by one process: the body of every worker.

A task and the events about it are plain values:

    task   {"specs": [{...}, ...], "hashes": ["their names", ...]}
    event  {"event": "step", "i": 0, "t": 120}    the first of them is at step 120
           {"event": "done", "i": 0} | {"event": "busy", "i": 0}
           {"event": "failed", "i": 0, "why": "a sentence", "trace": "a traceback"}

`Keep` decides where results go: into the store, or back to the driver.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["bundles", "described", "into", "opened", "ready", "work_on"]

Say = Callable[..., None]
Keep = Callable[[int, Spec, Mapping[str, Any], "Mapping[str, Tensor]"], None]


def bundles(specs: Sequence[Spec], workers: int) -> list[list[Spec]]:
    """Cut runs into bundles: for each pair of data and model as many as there are workers, of
    nearly equal length.

    The runs of one seed are neighbours, so that a worker reads the data of a seed once.
    """
    kinds = dict[str, list[Spec]]()
    for spec in specs:
        kinds.setdefault(
            json.dumps([spec.data, spec.model], sort_keys=True, default=str), []
        ).append(spec)
    return [
        bundle
        for alike in kinds.values()
        for bundle in _cut(sorted(alike, key=lambda spec: spec.seed), min(workers, len(alike)))
    ]


def _cut(specs: Sequence[Spec], parts: int) -> list[list[Spec]]:
    """Cut into parts whose lengths differ by at most one."""
    ends = [len(specs) * i // parts for i in range(parts + 1)]
    return [list(specs[first:end]) for first, end in pairwise(ends)]


def described(specs: Sequence[Spec]) -> dict[str, Any]:
    """A task for a worker."""
    return {"specs": [spec.to_json() for spec in specs], "hashes": [spec.hash for spec in specs]}


def opened(
    task: Mapping[str, Any], say: Say, other: str, place: Callable[[Spec], Spec] = lambda spec: spec
) -> dict[int, Spec]:
    """The runs of a task, with their files in place; `other` is said of each that would be another
    one here.
    """
    found = dict[int, Spec]()
    for i, (plain, name) in enumerate(zip(task["specs"], task["hashes"], strict=True)):
        with _told(say, i):
            spec = Spec.from_json(plain)
            if spec.hash != name:
                raise RuntimeError(other)
            found[i] = place(spec)
    return found


def into(store: Store, todo: Mapping[int, Spec], say: Say) -> None:
    """Carry out the runs that are neither claimed nor stored; write their results into the store."""

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
    """Prepare this process as a worker: set its threads, and ignore warnings, which the driver has
    shown.
    """
    import warnings

    import torch

    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")


def work_on(todo: Mapping[int, Spec], keep: Keep, say: Say) -> None:
    """Carry out these runs, one after the other."""
    for i, spec in todo.items():
        with _told(say, i):
            _work_on_one(i, spec, keep, say)


def _work_on_one(i: int, spec: Spec, keep: Keep, say: Say) -> None:
    from evenclip.sweep.work import work

    result, weights = work(spec, lambda t: say(event="step", i=i, t=t))
    keep(i, spec, result, weights)
    say(event="done", i=i)


class _told:  # noqa: N801
    """What goes wrong with a run is said of it, and stops nothing else."""

    def __init__(self, say: Say, i: int) -> None:
        self._say, self._i = say, i

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        trace = "".join(traceback.format_exception(error))
        self._say(event="failed", i=self._i, why=f"{error}" or type(error).__name__, trace=trace)
        return True
