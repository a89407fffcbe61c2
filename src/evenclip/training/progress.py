"""A line of progress on the terminal, and stopping between two steps."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType
from typing import Self, TextIO

__all__ = ["Interrupt", "Progress"]


class Progress:
    """One line on stderr, rewritten a few times a second; silent when that is not a terminal."""

    def __init__(self, total: int, shown: bool | None = None, stream: TextIO | None = None) -> None:
        self._total, self._stream = total, stream or sys.stderr
        self._shown = self._stream.isatty() if shown is None else shown
        self._started, self._last, self._width = time.monotonic(), 0.0, 0
        self._first: int | None = None

    def __call__(self, done: int, note: str) -> None:
        """`done` of the steps are taken."""
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
    """Ctrl-C waits for the step under way, so that what is saved is whole; a second one does not
    wait.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: object = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]  # what signal() itself returned

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.came:
            raise KeyboardInterrupt
        self.came = True
