"""`evenclip report`: redraw the HTML page of a comparison from its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from evenclip.cli import files

__all__ = ["report"]


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder that `evenclip compare --out` wrote, or a results.json.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: report.html beside the results.")
    ] = None,
) -> None:
    """Write report.html, a self-contained page with answer, table, charts and privacy statement."""
    from evenclip.report.page import page

    results = folder / "results.json" if folder.is_dir() else folder
    try:
        text = results.read_text(encoding="utf-8")
    except OSError as error:
        raise FileNotFoundError(
            f"{results} cannot be read ({error.strerror}); give the folder that `evenclip compare "
            "--out` wrote."
        ) from error
    path = results.with_name("report.html") if out is None else out
    files.write(path, page(_parsed(text, results)))
    print(path)


def _parsed(text: str, source: Path) -> dict[str, Any]:
    """Parse the text of a results file."""
    try:
        results = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{source} is not JSON ({error}); make it again with `evenclip compare --out`."
        ) from error
    if not isinstance(results, dict):
        raise ValueError(
            f"{source} contains no results; give the folder that `evenclip compare --out` wrote."
        )
    return results
