"""What stops a command that trains, in a sentence; what was finished stays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

__all__ = ["kept"]


@contextmanager
def kept() -> Iterator[None]:
    """Where runs are carried out: an interruption is status 130, a run that failed status 1."""
    from evenclip.sweep import RunsError

    try:
        yield
    except KeyboardInterrupt as interrupted:
        print(
            "evenclip: interrupted; what was finished is kept, and the same command goes on.",
            file=sys.stderr,
        )
        raise typer.Exit(130) from interrupted
    except RunsError as failed:
        print(f"evenclip: {failed}", file=sys.stderr)
        raise typer.Exit(1) from failed
