"""`evenclip compare`: measure what privacy costs each group."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from evenclip import files, terminal
from evenclip.cli.executors import ExecutorOptions
from evenclip.cli.options import DataDir, DataOptions, grouped
from evenclip.cli.stops import kept
from evenclip.files import kinds

__all__ = ["compare"]


AllowPartial = Annotated[
    bool, typer.Option("--allow-partial", help="Accept an incomplete copy of CelebA.")
]


@dataclass(frozen=True)
class CompareOptions:
    """What is compared, and how it is trained."""

    target: Annotated[str | None, typer.Option(help="Column to predict; for files.")] = None
    group: Annotated[
        list[str] | None,
        typer.Option(help="Protected column; repeat it to compare intersections."),
    ] = None
    epsilon: Annotated[
        float | None, typer.Option(help="Joint ε by PLD, the same for every private rule.")
    ] = None
    delta: Annotated[
        float | None,
        typer.Option(help="δ; default: as published, or the largest 10^-k below 1/(2n)."),
    ] = None
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 5
    rules: Annotated[
        str | None,
        typer.Option(help="Comma-separated names or file.py:Class; default: all five."),
    ] = None
    split: Annotated[
        int | None,
        typer.Option(help="Seed of one split for all runs; default: a split per seed."),
    ] = None
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None
    batch_size: Annotated[int | None, typer.Option(help="Expected batch size B.")] = None
    lr: Annotated[float | None, typer.Option(help="Learning rate of all rules.")] = None
    model: Annotated[
        str | None, typer.Option(help="mlp, mlp:128,64, linear, cnn, or file.py:function.")
    ] = None
    match: Annotated[
        bool, typer.Option("--match", help="Use the matched protocol; for the paper's datasets.")
    ] = False
    risk: Annotated[
        bool,
        typer.Option(
            "--risk",
            help="Also measure what clipping's direction and magnitude cost each group; "
            "trains each rule once more.",
        ),
    ] = False
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"
    tf32: Annotated[bool, typer.Option("--tf32", help="Allow TF32 products on a GPU; faster.")] = (
        False
    )

    def given(self) -> dict[str, Any]:
        """Return the arguments of `evenclip.compare`.

        Raises:
            ValueError: `--rules` is empty.
        """
        names = None
        if self.rules is not None:
            names = [name.strip() for name in self.rules.split(",") if name.strip()]
        if names == []:
            raise ValueError(
                "--rules is empty; give names separated by commas, or leave it out for all five."
            )
        columns = self.group or None
        return vars(self) | {
            "rules": names,
            "group": columns[0] if columns and len(columns) == 1 else columns,
        }


@grouped
def compare(
    data: Annotated[
        str,
        typer.Argument(
            help="Dataset name (see `evenclip data`), your own dataset (file.py:name), or a CSV, "
            "TSV, Parquet or Feather file."
        ),
    ] = "adult",
    *,
    settings: CompareOptions,
    options: DataOptions,
    allow_partial: AllowPartial = False,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and the runs.")] = None,
    runs: ExecutorOptions,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print results.json instead of the table.")
    ] = False,
) -> None:
    """Train a non-private reference and the private rules, and print what privacy costs each group.

    Example: evenclip compare loans.csv --target default --group sex --epsilon 3
    """
    given = settings.given()
    if out is not None:
        _check_writable(out)
    from evenclip.comparison.compare import compare as run_comparison
    from evenclip.report.live import live_progress
    from evenclip.report.page import page
    from evenclip.report.terminal import table

    prepared, executor = _options(options, allow_partial), runs.executor()
    with kept(), live_progress() as show:
        outcome = run_comparison(
            data,
            **given,
            options=prepared,
            data_dir=data_dir,
            store=None if out is None else out / "runs",
            on=executor,
            show=show,
        )
    for note in outcome.private_notes:
        terminal.say(f"note: {terminal.in_line(note)}", error=True)
    results = outcome.to_json() | {"command": shlex.join(["evenclip", *_without_folders()])}
    content = files.sealed(results)
    if out is not None:
        files.write(out / "results.json", content, kinds.RESULTS)
        files.write(out / "report.html", page(results), kinds.REPORT)
    if as_json:
        terminal.say_json(content.decode().rstrip())
    else:
        terminal.say(table(results))
    if out is not None and not as_json:
        terminal.say(f"\nWrote {out / 'report.html'} and {out / 'results.json'}.")


def _options(options: DataOptions, allow_partial: bool) -> dict[str, Any]:
    """Return the data options that were given, as values that a specification can hold."""
    given = options.given()
    if options.test is not None:
        given["test"] = str(options.test)
    if options.schema is not None:
        from evenclip.data import schema as schemas

        given["schema"] = schemas.load(options.schema)
    return given | ({"allow_partial": True} if allow_partial else {})


def _without_folders() -> list[str]:
    """Return the arguments of the command with the last part of every path alone."""
    arguments = []
    for argument in sys.argv[1:]:
        option, equals, value = argument.rpartition("=")
        arguments.append(f"{option}{equals}{os.path.basename(value.rstrip(os.sep))}")
    return arguments


def _check_writable(folder: Path) -> None:
    """Raise before training if results cannot be written to `folder`."""
    files.make_folder(folder, kinds.RESULTS)
    for name in ("results.json", "report.html"):
        files.check_name(folder / name)
        files.check_place(folder / name)
