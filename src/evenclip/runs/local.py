"""Runs carried out by processes of this machine, as many at a time as it has cores.

A process is given one bundle of runs that are alike after the other, and computes them together where that is quicker
(`runs.together`). If it dies, what it had in hand is lost and reported; the others go on. Results are written by the
processes themselves, so nothing that was finished depends on this one.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from evenclip.runs.spec import Spec
from evenclip.runs.store import Store
from evenclip.runs.together import bundles

__all__ = ["Failure", "RunsError", "Show", "Silent", "carry_out", "cores"]


@dataclass(frozen=True)
class Failure:
    """A run that did not end well."""

    spec: Spec
    why: str
    trace: str = ""


class RunsError(RuntimeError):
    """Some runs did not end well; all the others did, and are kept."""

    def __init__(self, failures: Sequence[Failure], total: int) -> None:
        self.failures = tuple(failures)
        first = self.failures[0]
        kept = f"; the other {total - len(failures)} are kept" if total > len(failures) else ""
        super().__init__(
            f"{len(failures)} of {total} runs failed{kept}. {first.spec.rule.get('name', 'The rule')}, seed "
            f"{first.spec.seed}: {first.why.rstrip('.')}. Run the same command again to finish what is missing."
        )


class Show(Protocol):
    """Who is told how far things are."""

    def planned(self, runs: int) -> None:
        """So many more runs are to be carried out."""

    def started(self, spec: Spec) -> None:
        """A worker took this run up."""

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


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def carry_out(specs: Sequence[Spec], store: Store, show: Show, workers: int | None = None) -> list[dict[str, Any]]:
    """The results of all these runs, in their order; what is in the store is not computed again.

    Raises:
        RunsError: after all the others have been carried out.
    """
    todo = [spec for spec in _distinct(specs) if not store.has(spec)]
    show.planned(len(todo))
    at_once = workers or cores()
    failures = _Pool(store, show, at_once).carry_out(bundles(todo, at_once)) if todo else []
    if failures:
        raise RunsError(failures, len(_distinct(specs)))
    return [store.read(spec) for spec in specs]


def _distinct(specs: Sequence[Spec]) -> list[Spec]:
    return list({spec.hash: spec for spec in specs}.values())


class _Pool:
    """Worker processes and what each has in hand."""

    def __init__(self, store: Store, show: Show, size: int) -> None:
        self._store, self._show, self._size = store, show, size
        self._events: queue.Queue[tuple[_Worker, dict[str, Any]]] = queue.Queue()

    def carry_out(self, work: Sequence[Sequence[Spec]]) -> list[Failure]:
        """All of them; those that failed."""
        waiting, failures = deque(work), list[Failure]()
        at_once = min(self._size, len(work))
        # A compiler starts as many processes of its own as there are cores, in each of ours.
        threads = max(1, cores() // at_once)
        workers = [_Worker(self._events, threads) for _ in range(at_once)]
        try:
            for worker in workers:
                self._next(worker, waiting)
            while any(worker.specs for worker in workers):
                worker, event = self._events.get()
                if not worker.specs:
                    continue
                failures += self._heard(worker, event, waiting)
                if event["event"] == "died" and waiting:
                    workers.append(worker := _Worker(self._events, threads))
                if not worker.specs:
                    self._next(worker, waiting)
        finally:
            for worker in workers:
                worker.stop()
        return failures

    def _next(self, worker: _Worker, waiting: deque[Sequence[Spec]]) -> None:
        """Give the worker something to do, if there is anything."""
        while waiting:
            bundle = waiting.popleft()
            done = [spec for spec in bundle if self._store.has(spec)]  # another command has done it meanwhile
            for spec in done:
                self._show.ended(spec, None)
            todo = [spec for spec in bundle if spec not in done]
            if todo:
                worker.take(todo, self._store)
                return

    def _heard(self, worker: _Worker, event: dict[str, Any], waiting: deque[Sequence[Spec]]) -> list[Failure]:
        """Act on what a worker said; what failed."""
        if event["event"] == "died":
            lost = [Failure(spec, event["why"]) for spec in worker.specs.values()]
            worker.specs.clear()
            for each in lost:
                self._show.ended(each.spec, each)
            return lost
        spec = worker.specs[event["i"]]
        if event["i"] not in worker.begun:  # a run's own time begins when it is first heard of
            worker.begun.add(event["i"])
            self._show.started(spec)
        if event["event"] == "step":
            self._show.step(spec, event["t"])
            return []
        del worker.specs[event["i"]]
        if event["event"] == "busy":  # another command is at it: look again later
            waiting.append([spec])
            time.sleep(0.2)
            return []
        failure = Failure(spec, event["why"], event["trace"]) if event["event"] == "failed" else None
        self._show.ended(spec, failure)
        return [] if failure is None else [failure]


class _Worker:
    """One process, and a thread that listens to it."""

    def __init__(self, events: queue.Queue[tuple[_Worker, dict[str, Any]]], threads: int) -> None:
        self.specs: dict[int, Spec] = {}  # what it has in hand
        self.begun: set[int] = set()  # what of it was heard of
        env = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "evenclip.runs.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True, env=env,
        )  # fmt: skip
        self._events, self._said = events, deque[str](maxlen=20)
        self._listeners = [threading.Thread(target=t, daemon=True) for t in (self._listen, self._listen_to_errors)]
        for thread in self._listeners:
            thread.start()

    def take(self, specs: Sequence[Spec], store: Store) -> None:
        """Something to do."""
        self.specs, self.begun = dict(enumerate(specs)), set()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead, and the listener will say so
            described, names = [spec.to_json() for spec in specs], [spec.hash for spec in specs]
            task = {"specs": described, "hashes": names, "root": str(store.root.resolve())}
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()

    def stop(self) -> None:
        """No more: at once if it is in the middle of something."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        if self.specs:
            self._process.kill()
        self._process.wait()
        with suppress(ProcessLookupError, PermissionError):  # a compiler's processes, which hold on to our pipes
            os.killpg(self._process.pid, signal.SIGKILL)
        for thread in self._listeners:
            thread.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put((self, json.loads(line)))
        self._events.put((self, {"event": "died", "why": self._death(self._process.wait())}))

    def _listen_to_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.rstrip())

    def _death(self, code: int) -> str:
        if code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return f"its process was ended by {signal.Signals(-code).name}{hint}"
        last = f": {self._said[-1]}" if self._said else ""
        return f"its process ended with status {code}{last}"
