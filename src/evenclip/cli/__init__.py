"""The `evenclip` command line, one subcommand per file.

A user error (a value out of range, a missing file) prints one sentence to stderr and exits with
status 2. Failed runs print one sentence and exit with status 1. Every other ending is in
`evenclip.cli.endings`.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from evenclip import terminal
from evenclip.cli import compare, data, endings, epsilon, paper, predict, report, train

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
    """Run the command line on `arguments`, by default `sys.argv[1:]`, and exit."""
    # Skip the final garbage collection, which takes a third of a second after the imports.
    atexit.register(gc.freeze)
    terminal.prepare()
    try:
        status = _run(arguments)
    except BaseException as error:
        status = endings.status_of(error)
    sys.exit(status)


def _run(arguments: Sequence[str] | None) -> int:
    """Run a command and write what is left of its output; return the exit status."""
    try:
        app(args=arguments, prog_name="evenclip")
    except SystemExit as end:
        return terminal.finish() or endings.status_of(end)
    return terminal.finish()


def version() -> str:
    """Return the installed package's version, or "0+unknown" if it is not installed."""
    try:
        return metadata.version("evenclip")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def _print_version(requested: bool) -> None:
    """Print the version and exit if `--version` was given."""
    if requested:
        terminal.say(f"evenclip {version()}")
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
    """Differentially private training that shows what privacy costs each group."""
