"""Executors: carry out the runs that are not in the store, and report progress.

`Local` uses processes of this machine, `Ray` tasks and `Slurm` jobs of a cluster. They share the
store, the progress events and the count of tries defined here. `sweep.bundle` carries out one
bundle of runs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from evenclip import files
from evenclip.files import kinds
from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store

__all__ = [
    "TRIES",
    "Assignment",
    "Executor",
    "Failure",
    "ProgressDisplay",
    "RunsError",
    "Silent",
    "Tries",
    "carry_out",
]

S = TypeVar("S")
T = TypeVar("T")

TRIES = 3
"""Maximum tries of a run on a cluster, whose nodes may die."""


@dataclass(frozen=True)
class Failure:
    """A failed run, with the reason and the traceback."""

    spec: Spec
    why: str
    trace: str = ""


class RunsError(RuntimeError):
    """Some runs failed; the results of all others are in the store."""

    def __init__(self, failures: Sequence[Failure], total: int, traces: Path | None = None) -> None:
        self.failures = tuple(failures)
        kept = f"; the other {total - len(failures)} are kept" if total > len(failures) else ""
        where = "" if traces is None else f" Details are in {traces}."
        super().__init__(
            f"{len(failures)} of {total} runs failed{kept}. {_summary(self.failures[0])}. "
            f"Run the same command again to finish what is missing.{where}"
        )


def _summary(failure: Failure) -> str:
    """Name the run and the reason."""
    spec = failure.spec
    return f"{spec.rule['name']}, seed {spec.seed}: {failure.why.rstrip('.')}"


def _traces(failures: Sequence[Failure], store: Store) -> Path | None:
    """Write the tracebacks to a file; return its path, or None if there are none."""
    if not any(failure.trace for failure in failures):
        return None
    path = store.root / "failures.txt"
    text = "\n".join(f"{_summary(failure)}\n{failure.trace}" for failure in failures)
    return files.write(path, text, kinds.TRACEBACKS)


class ProgressDisplay(Protocol):
    """Receiver of progress events."""

    def planned(self, runs: int) -> None:
        """Add `runs` to the number of runs to carry out."""

    def started(self, spec: Spec) -> None:
        """Note that a worker started this run; called again for each further try."""

    def step(self, spec: Spec, t: int) -> None:
        """Note that the run has taken `t` steps."""

    def ended(self, spec: Spec, failure: Failure | None) -> None:
        """Note that the run is done or has failed."""


class Silent:
    """Progress display that ignores every event."""

    def planned(self, runs: int) -> None:
        """Do nothing."""

    def started(self, spec: Spec) -> None:
        """Do nothing."""

    def step(self, spec: Spec, t: int) -> None:
        """Do nothing."""

    def ended(self, spec: Spec, failure: Failure | None) -> None:
        """Do nothing."""


class Executor(Protocol):
    """Carries out runs."""

    def check_device(self, device: str) -> None:
        """Raise a ValueError if runs on this device cannot be carried out."""

    def carry_out(
        self, specs: Sequence[Spec], store: Store, show: ProgressDisplay
    ) -> list[Failure]:
        """Write the results of these missing runs to the store; return the failures."""

    def map_processes(self, work: Callable[[S], T], items: Sequence[S]) -> Iterator[tuple[int, T]]:
        """Yield (index, work(item)) of every item in order of completion."""


def carry_out(
    specs: Sequence[Spec], store: Store, show: ProgressDisplay, executor: Executor
) -> list[dict[str, Any]]:
    """Return the results of these runs in order, computing those that are not in the store.

    Raises:
        RunsError: some runs failed; raised after all others have been carried out.
    """
    distinct = list({spec.hash: spec for spec in specs}.values())
    for spec in distinct:
        sentence = store.set_aside(spec)
        if sentence is not None:
            warnings.warn(sentence, stacklevel=2)
    todo = [spec for spec in distinct if not store.has(spec)]
    show.planned(len(todo))
    failures = executor.carry_out(todo, store, show) if todo else []
    if failures:
        raise RunsError(failures, len(distinct), _traces(failures, store))
    return [store.read(spec) for spec in specs]


@dataclass
class Assignment:
    """The unfinished runs of a worker by number in its bundle, and which of them have begun."""

    specs: dict[int, Spec]
    begun: set[int] = field(default_factory=set)


class Tries:
    """Count the tries of each run, collect failures, and report progress.

    Tries are counted per run, not per bundle: one run may have killed the worker of a bundle, and
    the others can still succeed. A run is therefore retried on its own.
    """

    def __init__(self, store: Store, show: ProgressDisplay, most: int) -> None:
        self._store, self._show, self._most = store, show, most
        self._failed: Counter[str] = Counter()
        self.failures: list[Failure] = []

    def process_event(self, assignment: Assignment, event: Mapping[str, Any]) -> list[Spec]:
        """Process an event of a worker (see `sweep.bundle`); return the runs to retry."""
        i = event["i"]
        if i not in assignment.specs:  # from a job that Slurm restarted, about a finished run
            return []
        spec = assignment.specs[i]
        if i not in assignment.begun:  # a run's time starts with its first event
            assignment.begun.add(i)
            self._show.started(spec)
        if event["event"] == "step":
            self._show.step(spec, event["t"])
            return []
        del assignment.specs[i]
        if event["event"] == "busy":  # another command is computing it: retry later
            return [spec]
        if event["event"] == "failed":
            return self._count(Failure(spec, event["why"], event["trace"]))
        self._show.ended(spec, None)
        return []

    def end_assignment(self, assignment: Assignment, why: str, trace: str = "") -> list[Spec]:
        """Handle the end of a worker; return the runs to retry.

        Its unfinished runs failed, except those whose results are in the store.
        """
        retry = []
        for spec in assignment.specs.values():
            if self._store.has(spec):
                self._show.ended(spec, None)
            else:
                retry += self._count(Failure(spec, why, trace))
        assignment.specs.clear()
        return retry

    def missing(self, specs: Sequence[Spec]) -> list[Spec]:
        """Return the runs not in the store; another command has computed the others."""
        for spec in specs:
            if self._store.has(spec):
                self._show.ended(spec, None)
        return [spec for spec in specs if not self._store.has(spec)]

    def _count(self, failure: Failure) -> list[Spec]:
        self._failed[failure.spec.hash] += 1
        if self._failed[failure.spec.hash] < self._most:
            return [failure.spec]
        self.failures.append(failure)
        self._show.ended(failure.spec, failure)
        return []
