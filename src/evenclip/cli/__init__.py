"""The command line, `evenclip`: one verb per file.

A mistake of the user (a value out of range, a file that is not there) is one sentence on stderr and
exit status 2; runs that failed are a sentence and status 1.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from evenclip.cli import compare, data, epsilon, paper, predict, report, train

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)
app.command()(compare.compare)
app.command()(report.report)
app.command()(train.train)
app.command()(predict.predict)
app.add_typer(data.app, name="data")
app.add_typer(paper.app, name="paper")
app.command()(epsilon.epsilon)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line on `arguments`, by default those of the process, and exit."""
    atexit.register(
        gc.freeze
    )  # at the end Python looks for garbage in all that was imported: a third of a second
    try:
        app(args=arguments, prog_name="evenclip")
    except (ValueError, TypeError, ImportError, OSError) as mistake:
        print(f"evenclip: {mistake}", file=sys.stderr)
        sys.exit(2)


def version() -> str:
    """The version of the installed package; "0+unknown" where it runs from a checkout that was
    never installed.
    """
    try:
        return metadata.version("evenclip")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def _print_version(asked: bool) -> None:
    """Print the version and stop, if it was asked for."""
    if asked:
        print(f"evenclip {version()}")
        raise typer.Exit


@app.callback()
def _evenclip(
    _: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Private training whose cost is shared evenly between groups, with the proof."""
