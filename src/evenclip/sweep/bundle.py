"""Bundles of runs, each carried out sequentially by one process: the body of every worker.

A task and the events about it are plain values:

    task   {"specs": [{...}, ...], "hashes": ["name of each run", ...]}
    event  {"event": "step", "i": 0, "t": 120}    run 0 has taken 120 steps
           {"event": "done", "i": 0} | {"event": "busy", "i": 0}
           {"event": "failed", "i": 0, "why": "a sentence", "trace": "a traceback"}

A `Keep` function decides where results go: into the store, or back to the driver.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["bundles", "compute_all", "compute_into", "make_task", "prepare_worker", "read_task"]

Say = Callable[..., None]
Keep = Callable[[int, Spec, Mapping[str, Any], "Mapping[str, Tensor]"], None]


def bundles(specs: Sequence[Spec], workers: int) -> list[list[Spec]]:
    """Split runs into bundles of nearly equal length.

    Each pair of data and model gets at most `workers` bundles. Runs of the same seed are adjacent,
    so that a worker reads the data of a seed once.
    """
    kinds = dict[str, list[Spec]]()
    for spec in specs:
        kinds.setdefault(
            json.dumps([spec.data, spec.model], sort_keys=True, default=str), []
        ).append(spec)
    return [
        bundle
        for same_kind in kinds.values()
        for bundle in _split(
            sorted(same_kind, key=lambda spec: spec.seed), min(workers, len(same_kind))
        )
    ]


def _split(specs: Sequence[Spec], count: int) -> list[list[Spec]]:
    """Split into `count` lists whose lengths differ by at most one."""
    ends = [len(specs) * i // count for i in range(count + 1)]
    return [list(specs[first:end]) for first, end in pairwise(ends)]


def make_task(specs: Sequence[Spec]) -> dict[str, Any]:
    """Return the task for a worker."""
    return {"specs": [spec.to_json() for spec in specs], "hashes": [spec.hash for spec in specs]}


def read_task(
    task: Mapping[str, Any], say: Say, other: str, place: Callable[[Spec], Spec] = lambda spec: spec
) -> dict[int, Spec]:
    """Return the runs of a task by number, with their files placed by `place`.

    A run whose hash differs here is reported as failed, with `other` as the reason.
    """
    specs = dict[int, Spec]()
    for i, (plain, name) in enumerate(zip(task["specs"], task["hashes"], strict=True)):
        with _reported(say, i):
            spec = Spec.from_json(plain)
            if spec.hash != name:
                raise RuntimeError(other)
            specs[i] = place(spec)
    return specs


def compute_into(store: Store, todo: Mapping[int, Spec], say: Say) -> None:
    """Run every spec that is neither claimed nor stored; write the results to the store."""

    def keep(i: int, spec: Spec, result: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        del i
        store.write(spec, result, weights)

    for i, spec in todo.items():  # one claim at a time: the number of open files is limited
        with _reported(say, i), store.claim(spec) as mine:
            if store.has(spec):
                say(event="done", i=i)
            elif mine:
                _compute_one(i, spec, keep, say)
            else:
                say(event="busy", i=i)


def prepare_worker() -> None:
    """Prepare this process as a worker: one thread, and no warnings.

    The noise of a seed depends on the number of threads, and the name of a run does not; so all
    workers have one. The driver has already shown the warnings.
    """
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def compute_all(todo: Mapping[int, Spec], keep: Keep, say: Say) -> None:
    """Carry out these runs one after the other."""
    for i, spec in todo.items():
        with _reported(say, i):
            _compute_one(i, spec, keep, say)


def _compute_one(i: int, spec: Spec, keep: Keep, say: Say) -> None:
    from evenclip.sweep.work import work

    result, weights = work(spec, lambda t: say(event="step", i=i, t=t))
    keep(i, spec, result, weights)
    say(event="done", i=i)


class _reported:  # noqa: N801
    """Report an exception as the failure of run `i`, and suppress it."""

    def __init__(self, say: Say, i: int) -> None:
        self._say, self._i = say, i

    def __enter__(self) -> None:
        """Do nothing: only the end of the block matters."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        trace = "".join(traceback.format_exception(error))
        self._say(event="failed", i=self._i, why=f"{error}" or type(error).__name__, trace=trace)
        return True
