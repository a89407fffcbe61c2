"""Progress of a set of runs: a live table on a terminal, one line per run elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Self

from evenclip import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from evenclip.sweep.executor import Failure
    from evenclip.sweep.spec import Spec

__all__ = ["Lines", "Live", "live_progress"]


def live_progress() -> Live | Lines:
    """Return the display that suits the error stream."""
    return Live() if sys.stderr is not None and sys.stderr.isatty() else Lines()


def _named(spec: Spec) -> str:
    return f"{spec.rule['name']}, seed {spec.seed}, lr {spec.lr:.3g}"


class Lines:
    """Print one line per finished run."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._ended = self._planned = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def planned(self, runs: int) -> None:
        """Add to the number of planned runs."""
        self._planned += runs

    def started(self, spec: Spec) -> None:
        """Note the start of a run."""
        self._started[spec.hash] = time.monotonic()

    def step(self, spec: Spec, t: int) -> None:
        """Print nothing."""

    def ended(self, spec: Spec, failure: Failure | None) -> None:
        """Print one line."""
        self._ended += 1
        seconds = time.monotonic() - self._started.get(spec.hash, time.monotonic())
        what = f"{seconds:.1f} s" if failure is None else f"failed: {failure.why}"
        line = f"{self._ended}/{self._planned} {_named(spec)}: {what}"
        terminal.say(terminal.in_line(line), error=True)


class Live:
    """Live table of running runs, finished runs, and the estimated time left."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._running: dict[str, tuple[Spec, float, int]] = {}
        self._failed: list[str] = []
        self._ended, self._planned, self._since = 0, 0, time.monotonic()
        self._live = RichLive(  # draws once when it is created
            console=console or Console(stderr=True),
            refresh_per_second=4,
            transient=True,
            get_renderable=self._draw,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def planned(self, runs: int) -> None:
        """Add to the number of planned runs."""
        self._planned += runs

    def started(self, spec: Spec) -> None:
        """Note the start of a run."""
        self._running[spec.hash] = spec, time.monotonic(), 0

    def step(self, spec: Spec, t: int) -> None:
        """Update the step of a run."""
        known, since, _ = self._running.get(spec.hash, (spec, time.monotonic(), 0))
        self._running[spec.hash] = known, since, t

    def ended(self, spec: Spec, failure: Failure | None) -> None:
        """Remove a finished run; list it if it failed."""
        self._running.pop(spec.hash, None)
        self._ended += 1
        if failure is not None:
            self._failed.append(terminal.in_line(f"{_named(spec)}: {failure.why}"))

    def _draw(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        now = time.monotonic()
        shown = Table(box=None, show_header=False, pad_edge=False)
        rest = (
            (now - self._since) / self._ended * (self._planned - self._ended)
            if self._ended
            else None
        )
        left = (
            ""
            if rest is None
            else f"about {rest:.0f} s left"
            if rest < 100
            else f"about {rest / 60:.0f} min left"
        )
        shown.add_row(f"{self._ended} of {self._planned} runs", "", left)
        for spec, since, t in list(self._running.values()):
            shown.add_row(
                Text(f"  {terminal.in_line(_named(spec))}"), f"step {t}", f"{now - since:.0f} s"
            )
        for line in self._failed:
            shown.add_row(Text(f"  failed: {line}"))
        return shown
