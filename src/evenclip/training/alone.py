"""One process and one thread take the steps of a run."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from evenclip.training.inputs import check_thread

__all__ = ["Alone"]

_ALL = weakref.WeakSet["Alone"]()


class Alone:
    """The process and the thread that may take steps.

    A process number alone does not show a fork: in another namespace, a child may have that of its
    parent. So every fork is marked in the child.
    """

    def __init__(self) -> None:
        self._in_use, self._thread = threading.Lock(), threading.get_ident()
        self.claim()
        _ALL.add(self)

    def claim(self) -> None:
        """Let the current process take steps."""
        self._process, self._is_forked = os.getpid(), False

    @property
    def is_in_fork(self) -> bool:
        """Whether this process was forked from the one that may take steps."""
        return self._is_forked or os.getpid() != self._process

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Keep other threads out."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "The run is inside `with run.listening():` already; enter it once, and give each "
                "thread a run of its own."
            )
        try:
            self._thread = threading.get_ident()
            yield
        finally:
            self._in_use.release()

    def check_thread(self) -> None:
        """Raise unless this is the thread that entered, without `torch.autocast`."""
        check_thread(self._thread)

    def mark_fork(self) -> None:
        """Record that this process was forked."""
        self._is_forked = True


def _mark_all() -> None:
    for alone in list(_ALL):
        alone.mark_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_mark_all)
