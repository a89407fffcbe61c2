"""`evenclip compare`: measure what privacy costs each group."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from evenclip.cli import files
from evenclip.cli.executors import (
    Account,
    Cpus,
    Gpus,
    Jobs,
    Minutes,
    On,
    OnOption,
    Partition,
    RayAddress,
    Workers,
    executor,
)
from evenclip.cli.report import write_page
from evenclip.cli.stops import kept

__all__ = ["compare"]


def compare(
    data: Annotated[
        str,
        typer.Argument(
            help="Dataset name (see `evenclip data`), or a CSV, TSV, Parquet or Feather file."
        ),
    ] = "adult",
    target: Annotated[str | None, typer.Option(help="Column to predict; for files.")] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(help="Protected column; repeat it to compare intersections."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Joint ε by PLD, the same for every private rule.")
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(help="δ; default: as published, or the largest 10^-k below 1/(2n)."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 5,
    rules: Annotated[
        str | None,
        typer.Option(help="Comma-separated names or file.py:Class; default: all five."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Expected batch size B.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of all rules.")] = None,
    model: Annotated[
        str | None, typer.Option(help="mlp, mlp:128,64, linear, cnn, or file.py:function.")
    ] = None,
    match: Annotated[
        bool, typer.Option("--match", help="Use the matched protocol; for the paper's datasets.")
    ] = False,
    risk: Annotated[
        bool,
        typer.Option(
            "--risk",
            help="Also measure what clipping's direction and magnitude cost each group; "
            "trains each rule once more.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Allow TF32 products on a GPU; faster.")
    ] = False,
    test: Annotated[Path | None, typer.Option(help="File with the test rows.")] = None,
    schema: Annotated[
        Path | None, typer.Option(help="Public ranges and categories; see `evenclip data schema`.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="Column to use although it would be dropped.")
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Column to leave out.")] = None,
    exclude_group: Annotated[
        bool, typer.Option("--exclude-group", help="Keep the group out of the features.")
    ] = False,
    group_bins: Annotated[
        int | None, typer.Option(help="Number of bins for a numeric group column.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="Column that identifies people; keeps one row per person.")
    ] = None,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Accept an incomplete copy of CelebA.")
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with dataset files; default: $EVENCLIP_DATA.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and the runs.")] = None,
    workers: Workers = None,
    on: OnOption = On.LOCAL,
    ray_address: RayAddress = None,
    cpus_per_run: Cpus = None,
    gpus_per_run: Gpus = None,
    slurm_partition: Partition = None,
    slurm_account: Account = None,
    slurm_minutes: Minutes = None,
    slurm_jobs: Jobs = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print results.json instead of the table.")
    ] = False,
) -> None:
    """Train a non-private reference and the private rules, and print what privacy costs each group.

    Example: evenclip compare loans.csv --target default --group sex --epsilon 3
    """
    names = None if rules is None else [name.strip() for name in rules.split(",") if name.strip()]
    if names == []:
        raise ValueError(
            "--rules is empty; give names separated by commas, or leave it out for all five."
        )
    if out is not None:
        _writable(out)
    from evenclip import comparison
    from evenclip.report.live import watching

    runner = executor(
        on,
        workers=workers,
        ray_address=ray_address,
        cpus_per_run=cpus_per_run,
        gpus_per_run=gpus_per_run,
        slurm_partition=slurm_partition,
        slurm_account=slurm_account,
        slurm_minutes=slurm_minutes,
        slurm_jobs=slurm_jobs,
    )
    options = _options(test, schema, keep, drop, exclude_group, group_bins, unit, allow_partial)
    columns: Any = group[0] if group and len(group) == 1 else group or None
    with kept(), watching() as show:
        outcome = comparison.compare(
            data,
            names,
            seeds,
            target=target,
            group=columns,
            epsilon=epsilon,
            delta=delta,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            model=model,
            match=match,
            risk=risk,
            device=device,
            tf32=tf32,
            options=options,
            data_dir=data_dir,
            store=None if out is None else out / "runs",
            on=runner,
            show=show,
        )
    results = outcome.to_json() | {"command": shlex.join(["evenclip", *sys.argv[1:]])}
    text = json.dumps(results, indent=1)
    if out is not None:
        files.write(out / "results.json", text + "\n")
        write_page(results, out / "report.html")
    print(text if as_json else outcome.table())
    if out is not None and not as_json:
        print(f"\nWrote {out / 'report.html'} and {out / 'results.json'}.")


def _options(
    test: Path | None,
    schema: Path | None,
    keep: list[str] | None,
    drop: list[str] | None,
    exclude_group: bool,
    group_bins: int | None,
    unit: str | None,
    allow_partial: bool,
) -> dict[str, Any]:
    """Return the data options that were given."""
    if schema is not None:
        from evenclip.data import schema as schemas

        loaded: Any = schemas.load(schema)
    else:
        loaded = None
    given = {
        "test": None if test is None else str(test), "schema": loaded, "keep": keep, "drop": drop,
        "exclude_group": exclude_group or None, "group_bins": group_bins, "unit": unit,
        "allow_partial": allow_partial or None,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


def _writable(folder: Path) -> None:
    """Raise before training if results cannot be written to `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"{folder} cannot be created ({error.strerror}); choose another --out."
        ) from error
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written to; choose another --out.")
