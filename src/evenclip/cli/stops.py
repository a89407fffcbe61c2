"""Turn interruptions and failed runs into one sentence and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from evenclip import terminal

__all__ = ["kept"]


@contextmanager
def kept() -> Iterator[None]:
    """Exit with status 130 on an interruption and 1 on failed runs; finished runs are kept."""
    from evenclip.sweep import RunsError

    try:
        yield
    except KeyboardInterrupt as interrupted:
        terminal.say(
            "evenclip: interrupted; finished runs are kept. Run the same command to continue.",
            error=True,
        )
        raise typer.Exit(130) from interrupted
    except RunsError as failed:
        terminal.say(f"evenclip: {terminal.in_line(failed)}", error=True)
        raise typer.Exit(1) from failed
