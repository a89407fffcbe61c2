"""`evenclip report`: the page of a comparison, drawn again from its results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from evenclip.cli import files

__all__ = ["report", "write_page"]


def report(
    folder: Annotated[
        Path, typer.Argument(help="What `evenclip compare --out` made, or a results.json.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write; report.html beside the results by default.")
    ] = None,
) -> None:
    """Write report.html: the answer, the table, pictures, the privacy statement; one file that
    needs no other.
    """
    results = folder / "results.json" if folder.is_dir() else folder
    try:
        text = results.read_text(encoding="utf-8")
    except OSError as error:
        raise FileNotFoundError(
            f"{results} cannot be read ({error.strerror}); give the folder that `evenclip compare "
            "--out` made."
        ) from error
    path = results.with_name("report.html") if out is None else out
    write_page(_parsed(text, results), path)
    print(path)


def write_page(results: Mapping[str, Any], path: Path) -> None:
    """Write the page of these results into a file."""
    from evenclip.report.page import page

    files.write(path, page(results))


def _parsed(text: str, source: Path) -> dict[str, Any]:
    """The results in a file's text."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{source} is not JSON ({error}); make it again with `evenclip compare --out`."
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{source} has no results in it; give the folder that `evenclip compare --out` made."
        )
    return found
