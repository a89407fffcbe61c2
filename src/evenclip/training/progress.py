"""A progress line on the terminal, and a handler for Ctrl-C that stops between two steps."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType
from typing import Self, TextIO

__all__ = ["Interrupt", "Progress"]


class Progress:
    """A progress line on stderr, rewritten a few times per second.

    By default nothing is written if the stream is not a terminal.
    """

    def __init__(self, total: int, shown: bool | None = None, stream: TextIO | None = None) -> None:
        self._total, self._stream = total, stream or sys.stderr
        is_terminal = self._stream is not None and self._stream.isatty()
        self._shown = is_terminal if shown is None else shown
        self._started, self._last, self._width = time.monotonic(), 0.0, 0
        self._first: int | None = None

    def __call__(self, done: int, note: str) -> None:
        """Show that `done` steps are taken, with a note."""
        if not self._shown:
            return
        now = time.monotonic()
        self._first = done - 1 if self._first is None else self._first
        if now - self._last < 0.2 and done < self._total:
            return
        self._last = now
        rate = (done - self._first) / max(now - self._started, 1e-9)
        left = (self._total - done) / rate if rate else 0.0
        line = f"step {done}/{self._total}  {note}  {rate:.0f} steps/s  {left:.0f} s left"[:79]
        self._stream.write("\r" + line.ljust(self._width))
        self._width = len(line)
        self._stream.flush()

    def close(self) -> None:
        """End the line."""
        if self._shown and self._width:
            self._stream.write("\n")
            self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Interrupt:
    """A handler for Ctrl-C that lets the current step finish, so that saved files are complete.

    A second Ctrl-C raises KeyboardInterrupt at once.

    Attributes:
        came: whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.came = False
        self._previous: object = None  # the handler to restore

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]  # from signal()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.came:
            raise KeyboardInterrupt
        self.came = True
