"""Runs carried out by processes of this machine, as many at a time as it has cores.

A process is given one bundle of runs after the other (`sweep.bundle`). If it dies, what it had in
hand is lost and reported; the others go on. Results are written by the processes themselves, so
nothing that was finished depends on this one.
"""

from __future__ import annotations

import json
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from evenclip import check
from evenclip.sweep.bundle import bundles, described
from evenclip.sweep.executor import Failure, InHand, Show, Tries
from evenclip.sweep.pool import map_processes
from evenclip.sweep.process import Process, close, cores, end, start
from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store

__all__ = ["Local"]

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Local:
    """Processes of this machine.

    A process that dies takes what it had in hand with it: that is reported, not tried again, since
    what killed it (too little memory, mostly) is still there.

    Attributes:
        workers: at a time; one per core unless given.
    """

    workers: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None:
            check.natural(workers=self.workers)

    def check_device(self, device: str) -> None:
        """Raise for a GPU that is not here."""
        import torch

        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {device!r} and there is none here; use cpu.")

    def carry_out(self, specs: Sequence[Spec], store: Store, show: Show) -> list[Failure]:
        """All of them; those that failed."""
        at_once = self.workers or cores()
        return _Pool(store, show, at_once).carry_out(bundles(specs, at_once))

    def map_processes(self, work: Callable[[S], T], items: Sequence[S]) -> Iterator[tuple[int, T]]:
        """(place, work(item)) of every item, as they end."""
        return map_processes(work, items, self.workers)


class _Pool:
    """Worker processes and what each has in hand."""

    def __init__(self, store: Store, show: Show, size: int) -> None:
        self._store, self._size = store, size
        self._tries = Tries(store, show, most=1)
        self._events: queue.Queue[tuple[_Worker, dict[str, Any]]] = queue.Queue()

    def carry_out(self, work: Sequence[Sequence[Spec]]) -> list[Failure]:
        """All of them; those that failed."""
        waiting = deque(work)
        at_once = min(self._size, len(work))
        workers = [_Worker(self._events, start()) for _ in range(at_once)]
        try:
            for worker in workers:
                self._next(worker, waiting)
            while any(worker.hand.specs for worker in workers):
                worker, event = self._events.get()
                if not worker.hand.specs:
                    continue
                self._heard(worker, event, waiting)
                if event["event"] == "died" and waiting:
                    workers.append(worker := _Worker(self._events, start()))
                if not worker.hand.specs:
                    self._next(worker, waiting)
        finally:
            for worker in workers:
                worker.stop()
        return self._tries.failures

    def _next(self, worker: _Worker, waiting: deque[Sequence[Spec]]) -> None:
        """Give the worker something to do, if there is anything."""
        while waiting:
            todo = self._tries.there(waiting.popleft())
            if todo:
                worker.take(todo, self._store)
                return

    def _heard(
        self, worker: _Worker, event: dict[str, Any], waiting: deque[Sequence[Spec]]
    ) -> None:
        """Act on what a worker said."""
        if event["event"] == "died":
            self._tries.over(worker.hand, event["why"])
            return
        again = self._tries.heard(worker.hand, event)
        if again:
            waiting.append(again)
            time.sleep(0.2)


class _Worker:
    """One process, and a thread that listens to it."""

    def __init__(
        self, events: queue.Queue[tuple[_Worker, dict[str, Any]]], process: Process
    ) -> None:
        self.hand, self._process = InHand({}), process
        self._events, self._said = events, deque[str](maxlen=20)
        self._listeners = [
            threading.Thread(target=t, daemon=True) for t in (self._listen, self._listen_to_errors)
        ]
        for thread in self._listeners:
            thread.start()

    def take(self, specs: Sequence[Spec], store: Store) -> None:
        """Something to do."""
        self.hand = InHand(dict(enumerate(specs)))
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead, and the listener will say so
            task = described(specs) | {"root": str(store.root.resolve())}
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()

    def stop(self) -> None:
        """No more: at once if it is in the middle of something."""
        end(self._process, at_once=bool(self.hand.specs))
        for thread in self._listeners:
            thread.join()
        close(self._process)

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
