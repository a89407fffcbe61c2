"""`evenclip compare`: what privacy costs each group."""

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
            help="A dataset (see `evenclip data`), or a CSV, TSV, Parquet or Feather file."
        ),
    ] = "adult",
    target: Annotated[str | None, typer.Option(help="Column to predict, of a file.")] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(help="Protected column; given twice or more: their intersection."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="The same joint ε for every private rule, by PLD.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="δ; published, or the largest power of ten below 1/(2n).")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 5,
    rules: Annotated[
        str | None,
        typer.Option(help="Comma-separated names, or file.py:Class; all five by default."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Expected batch size B.")] = None,
    lr: Annotated[float | None, typer.Option(help="One learning rate for all rules.")] = None,
    model: Annotated[
        str | None, typer.Option(help="mlp, mlp:128,64, linear, cnn, or file.py:function.")
    ] = None,
    match: Annotated[
        bool, typer.Option("--match", help="The matched protocol on the paper's datasets.")
    ] = False,
    risk: Annotated[
        bool,
        typer.Option(
            "--risk",
            help="Also what direction and magnitude cost each group; one more run of each rule.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    tf32: Annotated[
        bool, typer.Option("--tf32", help="A GPU may round products' operands; quicker.")
    ] = False,
    test: Annotated[Path | None, typer.Option(help="A file with the test rows.")] = None,
    schema: Annotated[
        Path | None, typer.Option(help="Public ranges and categories; see `evenclip data schema`.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="Column to keep although it looks useless.")
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(help="Column to leave out.")] = None,
    exclude_group: Annotated[
        bool, typer.Option("--exclude-group", help="Keep the group out of the features.")
    ] = False,
    group_bins: Annotated[int | None, typer.Option(help="Bins of a numeric group column.")] = None,
    unit: Annotated[
        str | None, typer.Option(help="Column that names the person; one row each is kept.")
    ] = None,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Take an incomplete copy of CelebA.")
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where files of datasets are; EVENCLIP_DATA by default.")
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

    who = executor(
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
        found = comparison.compare(
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
            on=who,
            show=show,
        )
    results = found.to_json() | {"command": shlex.join(["evenclip", *sys.argv[1:]])}
    text = json.dumps(results, indent=1)
    if out is not None:
        files.write(out / "results.json", text + "\n")
        write_page(results, out / "report.html")
    print(text if as_json else found.table())
    if out is not None and not as_json:
        print(f"\n{out / 'report.html'} shows it, {out / 'results.json'} has all of it.")


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
    """Those that were given."""
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
    """Find out before training that results cannot be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"{folder} cannot be made ({error.strerror}); choose another --out."
        ) from error
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written to; choose another --out.")
