"""`evenclip report`: the page of a comparison, drawn again from its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from evenclip.cli import files

__all__ = ["report", "written"]


def report(
    folder: Annotated[Path, typer.Argument(help="What `evenclip compare --out` made, or a results.json.")],
    out: Annotated[Path | None, typer.Option(help="File to write; report.html beside the results by default.")] = None,
) -> None:
    """Write report.html: the answer, the table, pictures, the privacy statement; one file that needs no other."""
    results = folder / "results.json" if folder.is_dir() else folder
    try:
        text = results.read_text(encoding="utf-8")
    except OSError as error:
        raise FileNotFoundError(
            f"{results} cannot be read ({error.strerror}); give the folder that `evenclip compare --out` made."
        ) from error
    print(written(text, results, results.with_name("report.html") if out is None else out))


def written(text: str, source: Path, path: Path) -> Path:
    """The page of these results, in a file."""
    from evenclip.report.page import page

    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON ({error}); make it again with `evenclip compare --out`.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{source} has no results in it; give the folder that `evenclip compare --out` made.")
    files.write(path, page(found))
    return path
