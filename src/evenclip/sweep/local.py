"""Carry out runs in processes of this machine, by default one per core.

A process receives one bundle of runs after the other (`sweep.bundle`). If it dies, its unfinished
runs are reported as failed and the other processes continue. The processes write the results
themselves, so finished results do not depend on this process.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from evenclip import check
from evenclip.arguments import check_fields
from evenclip.sweep.bundle import bundles, make_task
from evenclip.sweep.executor import Assignment, Failure, ProgressDisplay, Tries
from evenclip.sweep.pool import map_processes
from evenclip.sweep.process import check_handles, close, cores, death, end, start
from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store

__all__ = ["Local"]

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Local:
    """Executor that uses processes of this machine.

    If a process dies, its unfinished runs are reported and not retried, because the usual cause
    (too little memory) persists.

    Attributes:
        workers: number of processes; one per core unless given.
    """

    workers: int | None = None

    def __post_init__(self) -> None:
        check_fields(Local, self)
        if self.workers is not None:
            check.natural(workers=self.workers)

    def check_device(self, device: str) -> None:
        """Raise if the device is a GPU and this machine has none."""
        import torch

        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"Device {device!r} is not available on this machine; use 'cpu'.")

    def carry_out(
        self, specs: Sequence[Spec], store: Store, show: ProgressDisplay
    ) -> list[Failure]:
        """Carry out these runs; return the failures."""
        size = self.workers or cores()
        check_handles(min(size, len(specs)))
        return _Pool(store, show, size).carry_out(bundles(specs, size))

    def map_processes(self, work: Callable[[S], T], items: Sequence[S]) -> Iterator[tuple[int, T]]:
        """Yield (index, work(item)) of every item in order of completion."""
        return map_processes(work, items, self.workers)


class _Pool:
    """A pool of worker processes."""

    def __init__(self, store: Store, show: ProgressDisplay, size: int) -> None:
        self._store, self._size = store, size
        self._tries = Tries(store, show, most=1)
        self._events: queue.Queue[tuple[_Worker, dict[str, Any]]] = queue.Queue()

    def carry_out(self, work: Sequence[Sequence[Spec]]) -> list[Failure]:
        """Carry out these bundles; return the failures."""
        waiting = deque(work)
        size = min(self._size, len(work))
        workers = [_Worker(self._events) for _ in range(size)]
        try:
            for worker in workers:
                self._next(worker, waiting)
            while any(worker.assignment.specs for worker in workers):
                worker, event = self._events.get()
                if not worker.assignment.specs:
                    continue
                self._process(worker, event, waiting)
                if event["event"] == "died" and waiting:
                    workers.append(worker := _Worker(self._events))
                if not worker.assignment.specs:
                    self._next(worker, waiting)
        finally:
            for worker in workers:
                worker.stop()
        return self._tries.failures

    def _next(self, worker: _Worker, waiting: deque[Sequence[Spec]]) -> None:
        """Give the worker the next bundle, if there is one."""
        while waiting:
            todo = self._tries.missing(waiting.popleft())
            if todo:
                worker.take(todo, self._store)
                return

    def _process(
        self, worker: _Worker, event: dict[str, Any], waiting: deque[Sequence[Spec]]
    ) -> None:
        """Process an event of a worker."""
        if event["event"] == "died":
            self._tries.end_assignment(worker.assignment, event["why"])
            return
        retry = self._tries.process_event(worker.assignment, event)
        if retry:
            waiting.append(retry)
            time.sleep(0.2)


class _Worker:
    """One process, and the threads that read its output."""

    def __init__(self, events: queue.Queue[tuple[_Worker, dict[str, Any]]]) -> None:
        self.assignment = Assignment({})
        self._process = start(
            "evenclip.sweep.worker", stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
        )
        self._events, self._errors = events, deque[str](maxlen=20)
        self._readers = [
            threading.Thread(target=t, daemon=True) for t in (self._read_events, self._read_errors)
        ]
        for thread in self._readers:
            thread.start()

    def take(self, specs: Sequence[Spec], store: Store) -> None:
        """Send the worker a bundle of runs."""
        self.assignment = Assignment(dict(enumerate(specs)))
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died; the reader reports that
            task = make_task(specs) | {"root": str(store.root.resolve())}
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()

    def stop(self) -> None:
        """End the process; kill it if it has unfinished runs."""
        end(self._process, at_once=bool(self.assignment.specs))
        for thread in self._readers:
            thread.join()
        close(self._process)

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put((self, json.loads(line)))
        self._events.put((self, {"event": "died", "why": self._death(self._process.wait())}))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line.rstrip())

    def _death(self, code: int) -> str:
        last = f": {self._errors[-1]}" if code >= 0 and self._errors else ""
        return f"{death(code)}{last}"
