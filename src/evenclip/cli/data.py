"""`evenclip data`: list the named datasets, and write schemas for your own tables."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenclip import files, terminal
from evenclip.cli.options import DataDir
from evenclip.files import kinds

if TYPE_CHECKING:
    import pandas as pd

    from evenclip.data.catalogue import Source

__all__ = ["app", "datasets", "schema"]

_WIDTH = 80
_INDENT = " " * 10

app = typer.Typer(invoke_without_command=True, add_completion=False)


@app.callback()
def datasets(
    context: typer.Context,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the datasets: rows, groups, licence, availability, and how to get them.

    `evenclip compare` also takes your own dataset from a Python file, as file.py:name.

    Example: evenclip data --data-dir ~/datasets
    """
    if context.invoked_subcommand is not None:
        return
    # Imported here so that --help does not wait for torch.
    from evenclip.data.catalogue import SOURCES, data_directory

    directory = data_directory(data_dir)
    facts = {
        "data_directory": None if directory is None else str(directory),
        "datasets": [_facts(source, directory) for source in SOURCES.values()],
    }
    if as_json:
        terminal.say_json(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        terminal.say(_text(facts))


@app.command()
def schema(
    file: Annotated[Path, typer.Argument(help="Table: .csv, .tsv, .parquet or .feather.")],
    target: Annotated[
        str | None, typer.Option(help="Column to predict; its values become classes.")
    ] = None,
    columns_only: Annotated[
        bool,
        typer.Option(
            "--columns-only", help="Read only the names of the columns; fill in the rest."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="New file to write; default: print.")] = None,
) -> None:
    """Write a schema for a table: the kind, range and categories of each column.

    With --columns-only, no row is read, and the schema is to be filled in. Without it, kinds,
    ranges and values are read from the data, and statements say so until they are replaced.

    Example: evenclip data schema loans.csv --columns-only --target default --out schema.json
    """
    if out is not None:
        if os.path.lexists(out):
            raise ValueError(
                f"--out is {out}, which already exists; remove it or name another file."
            )
        files.check_place(out)
    written = _skeleton(file, target) if columns_only else _proposed(file, target)
    text = json.dumps(written, indent=2, ensure_ascii=False)
    if out is None:
        terminal.say_json(text)
        return
    files.write(out, text + "\n", kinds.SCHEMA)
    terminal.say(f"{out}: {len(written['columns'])} columns. {_ONLY if columns_only else _READ}")


_ONLY = "Only their names were read: fill in the kind of each, and its range or its values."
_READ = (
    "Their kinds, ranges and values were read from the data: replace them by public ones, and then "
    'remove the "warning".'
)


def _skeleton(file: Path, target: str | None) -> dict[str, Any]:
    """Return a schema of the names of the columns."""
    from evenclip.data.formats import column_names
    from evenclip.data.skeleton import skeleton

    return skeleton(column_names(file), target)


def _proposed(file: Path, target: str | None) -> dict[str, Any]:
    """Return a schema that is read from the rows, with its warning."""
    from evenclip.data.schema import propose
    from evenclip.data.table import read

    frame = read(file)
    proposed = propose(frame)
    if target is not None:
        proposed["columns"][target] = _classes(frame, target, proposed["columns"])
    return proposed


def _classes(frame: pd.DataFrame, target: str, entries: dict[str, Any]) -> dict[str, Any]:
    """Return the target column's entry: classes, even if it holds numbers."""
    from evenclip.data.columns import factor

    if target not in entries:
        raise ValueError(
            f"--target is {target!r}; the columns of the table are {', '.join(map(repr, entries))}."
        )
    if entries[target]["kind"] in ("category", "boolean"):
        return dict(entries[target])
    return {"kind": "category", "values": list(factor(frame[target]).names)}


def _facts(source: Source, directory: Path | None) -> dict[str, Any]:
    """Return what is printed about a dataset, as plain values."""
    lacks = source.lacks(directory)
    return {
        "name": source.name,
        "title": source.title,
        "rows": source.rows,
        "groups": list(source.groups),
        "pair": None if source.pair is None else list(source.pair),
        "licence": source.licence,
        "origin": source.origin,
        "files": [
            {"path": f.path, "also": list(f.also), "here": f.find(directory) is not None}
            for f in source.files
        ],
        "here": lacks is None,
        "lacks": lacks,
        "uncovered": list(source.uncovered),
    }


def _text(facts: dict[str, Any]) -> str:
    """Format the facts, at most 80 columns wide unless a word is longer."""
    lines = [line for dataset in facts["datasets"] for line in [*_paragraph(dataset), ""]]
    directory = facts["data_directory"]
    where = (
        "There is no data directory; name one"
        if directory is None
        else f"The data directory is {directory}, named"
    )
    return "\n".join(lines + _wrapped(f"{where} with --data-dir or EVENCLIP_DATA.", ""))


def _paragraph(dataset: dict[str, Any]) -> list[str]:
    """Format one dataset: name and title, then its facts."""
    here = "yes" if dataset["files"] else "yes, nothing to download"
    rows = [
        ("rows", f"{dataset['rows']:,}"),
        ("groups", ", ".join(dataset["groups"])),
        ("licence", dataset["licence"]),
        ("here", here if dataset["here"] else f"no: {dataset['lacks']}"),
    ]
    if not dataset["here"]:
        rows.append(("get it", f"from {dataset['origin']}"))
    return [
        *_wrapped(f"{dataset['name']:10}{dataset['title']}", _INDENT),
        *(line for label, value in rows for line in _wrapped(f"  {label:8}{value}", _INDENT)),
    ]


def _wrapped(text: str, indent: str) -> list[str]:
    """Wrap a text into lines without breaking addresses and file names."""
    return textwrap.wrap(
        text,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
