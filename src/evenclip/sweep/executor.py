"""What carries out runs, wherever that is: an executor takes those that are missing, and tells how
far they are.

`Local` is processes of this machine, `Ray` a cluster's tasks, `Slurm` its jobs. They share the
store, what is told, and the count of tries; what they do with one bundle of runs is in
`sweep.bundle`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store

__all__ = [
    "TRIES",
    "Executor",
    "Failure",
    "InHand",
    "RunsError",
    "Show",
    "Silent",
    "Tries",
    "carry_out",
]

S = TypeVar("S")
T = TypeVar("T")

TRIES = 3
"""Of a run on a cluster, whose nodes may die."""


@dataclass(frozen=True)
class Failure:
    """A run that did not end well."""

    spec: Spec
    why: str
    trace: str = ""


class RunsError(RuntimeError):
    """Some runs did not end well; all the others did, and are kept."""

    def __init__(self, failures: Sequence[Failure], total: int, traces: Path | None = None) -> None:
        self.failures = tuple(failures)
        kept = f"; the other {total - len(failures)} are kept" if total > len(failures) else ""
        where = "" if traces is None else f" Details are in {traces}."
        super().__init__(
            f"{len(failures)} of {total} runs failed{kept}. {_told(self.failures[0])}. Run the "
            "same command again to "
            f"finish what is missing.{where}"
        )


def _told(failure: Failure) -> str:
    """Which run, and why."""
    return (
        f"{failure.spec.rule.get('name', 'The rule')}, seed {failure.spec.seed}: "
        f"{failure.why.rstrip('.')}"
    )


def _traces(failures: Sequence[Failure], store: Store) -> Path | None:
    """Write the tracebacks down; where, or None if there are none."""
    if not any(failure.trace for failure in failures):
        return None
    path = store.root / "failures.txt"
    path.write_text("\n".join(f"{_told(failure)}\n{failure.trace}" for failure in failures))
    return path


class Show(Protocol):
    """Who is told how far things are."""

    def planned(self, runs: int) -> None:
        """So many more runs are to be carried out."""

    def started(self, spec: Spec) -> None:
        """A worker took this run up; once more, if it is tried again."""

    def step(self, spec: Spec, t: int) -> None:
        """It has taken so many steps."""

    def ended(self, spec: Spec, failure: Failure | None) -> None:
        """It is done, or failed."""


class Silent:
    """Nobody is told."""

    def planned(self, runs: int) -> None:
        """Nothing."""

    def started(self, spec: Spec) -> None:
        """Nothing."""

    def step(self, spec: Spec, t: int) -> None:
        """Nothing."""

    def ended(self, spec: Spec, failure: Failure | None) -> None:
        """Nothing."""


class Executor(Protocol):
    """Who carries out runs."""

    def check_device(self, device: str) -> None:
        """Raise a ValueError if runs on this device cannot be carried out, before every run says
        so.
        """

    def carry_out(self, specs: Sequence[Spec], store: Store, show: Show) -> list[Failure]:
        """Put the results of these runs, none of which is there, into the store; those that failed."""

    def map_processes(self, work: Callable[[S], T], items: Sequence[S]) -> Iterator[tuple[int, T]]:
        """(place, work(item)) of every item, as they end."""


def carry_out(
    specs: Sequence[Spec], store: Store, show: Show, executor: Executor
) -> list[dict[str, Any]]:
    """The results of all these runs, in their order; what is in the store is not computed again.

    Raises:
        RunsError: after all the others have been carried out.
    """
    distinct = list({spec.hash: spec for spec in specs}.values())
    todo = [spec for spec in distinct if not store.has(spec)]
    show.planned(len(todo))
    failures = executor.carry_out(todo, store, show) if todo else []
    if failures:
        raise RunsError(failures, len(distinct), _traces(failures, store))
    return [store.read(spec) for spec in specs]


@dataclass
class InHand:
    """The runs that a worker has in hand, by their number in its bundle; what was heard of them."""

    specs: dict[int, Spec]
    begun: set[int] = field(default_factory=set)


class Tries:
    """How often each run was tried, what came of it, and who is told.

    Counted by run and not by bundle: a bundle that dies with its worker may have been killed by one
    of its runs, and the others are to be had. So whatever is tried again is tried by itself.
    """

    def __init__(self, store: Store, show: Show, most: int) -> None:
        self._store, self._show, self._most = store, show, most
        self._failed: Counter[str] = Counter()
        self.failures: list[Failure] = []

    def heard(self, hand: InHand, event: Mapping[str, Any]) -> list[Spec]:
        """Act on what a worker said (see `sweep.bundle`); the runs to try again."""
        i = event["i"]
        if i not in hand.specs:  # a job that Slurm started once more, on what was done
            return []
        spec = hand.specs[i]
        if i not in hand.begun:  # a run's own time begins when it is first heard of
            hand.begun.add(i)
            self._show.started(spec)
        if event["event"] == "step":
            self._show.step(spec, event["t"])
            return []
        del hand.specs[i]
        if event["event"] == "busy":  # another command is at it: look again later
            return [spec]
        if event["event"] == "failed":
            return self._again(Failure(spec, event["why"], event["trace"]))
        self._show.ended(spec, None)
        return []

    def over(self, hand: InHand, why: str, trace: str = "") -> list[Spec]:
        """A worker is gone, and with it what it had in hand but for what it had put into the store;
        the runs to try again.
        """
        again = []
        for spec in hand.specs.values():
            if self._store.has(spec):
                self._show.ended(spec, None)
            else:
                again += self._again(Failure(spec, why, trace))
        hand.specs.clear()
        return again

    def there(self, specs: Sequence[Spec]) -> list[Spec]:
        """Those that are not in the store; another command has done the others meanwhile."""
        for spec in specs:
            if self._store.has(spec):
                self._show.ended(spec, None)
        return [spec for spec in specs if not self._store.has(spec)]

    def _again(self, failure: Failure) -> list[Spec]:
        self._failed[failure.spec.hash] += 1
        if self._failed[failure.spec.hash] < self._most:
            return [failure.spec]
        self.failures.append(failure)
        self._show.ended(failure.spec, failure)
        return []
