"""`evenclip report`: draw the page from stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenclip import files, terminal
from evenclip.files import kinds

__all__ = ["report"]


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder that `evenclip compare --out` wrote, or a results.json.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: report.html beside the results.")
    ] = None,
    unverified: Annotated[
        bool,
        typer.Option(
            "--unverified", help="Draw results whose checksum does not match, and mark the page."
        ),
    ] = False,
) -> None:
    """Write report.html, a self-contained page with answer, table, charts and privacy statement.

    Results that are not what `evenclip compare` wrote are refused.
    """
    from evenclip.report.page import page

    results = folder / "results.json" if folder.is_dir() else folder
    path = results.with_name("report.html") if out is None else out
    files.check_name(path)
    values = files.read_sealed(results, kinds.RESULTS, verify=not unverified)
    try:
        drawn = page(values, unverified=unverified)
    except (KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise ValueError(
            f"{results} does not hold the results of a comparison ({reason}); make it again with "
            "`evenclip compare --out`."
        ) from error
    files.write(path, drawn, kinds.REPORT)
    terminal.say(path)
