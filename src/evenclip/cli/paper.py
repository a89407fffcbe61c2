"""`evenclip paper`: reproduce the paper's tables and figures beside the printed numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenclip import terminal
from evenclip.cli.executors import ExecutorOptions
from evenclip.cli.options import DataDir, grouped
from evenclip.cli.stops import kept

if TYPE_CHECKING:
    from evenclip.reproduction.artifacts import Artifacts
    from evenclip.reproduction.training import Training

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Reproduce the paper's tables and figures.")

FOLDER = Path("paper")

Out = Annotated[Path, typer.Option(help="Folder for tables, figures and their HTML page.")]
Seeds = Annotated[int, typer.Option(help="Number of seeds.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="One epoch, two seeds, few images; output is marked quick.")
]
Tf32 = Annotated[
    bool,
    typer.Option("--tf32", help="Allow TF32 products on a GPU; for the dataset tables only."),
]


@dataclass(frozen=True)
class PaperOptions:
    """Options of every verb that trains."""

    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"
    out: Out = FOLDER
    data_dir: DataDir = None


@app.command("list")
def list_() -> None:
    """List the tables and figures, and the data that is missing for them."""
    from evenclip.comparison.presets import SETTINGS
    from evenclip.reproduction import observed
    from evenclip.reproduction.artifacts import MADE
    from evenclip.reproduction.drawings import DRAWINGS
    from evenclip.reproduction.figures import FIGURES
    from evenclip.reproduction.tables import TABLES

    missing = {dataset: observed.lacks(dataset, None) for dataset in SETTINGS}
    terminal.say("Tables")
    for name, dataset, title in (
        *((made.NAME, made.DATASETS[-1], made.TITLE) for made in MADE.values()),
        *((t.name, t.dataset, t.title) for t in TABLES.values()),
    ):  # fmt: skip
        terminal.say(f"  {name:<28}{title}{'' if missing[dataset] is None else ' (no data)'}")
    terminal.say("\nFigures")
    for name in DRAWINGS:
        terminal.say(f"  {name:<28}an explanatory drawing")
    for figure in FIGURES.values():
        no_data = "" if missing[figure.dataset] is None else " (no data)"
        terminal.say(f"  {figure.name:<28}{figure.kind}{no_data}")
    for dataset, why in missing.items():
        if why is not None:
            terminal.say(f"\n{dataset}: {why}")


@app.command()
@grouped
def table(
    name: Annotated[str, typer.Argument(help="See `evenclip paper list`.")],
    *,
    seeds: Seeds = 5,
    options: PaperOptions,
    runs: ExecutorOptions,
    quick: Quick = False,
    tf32: Tf32 = False,
) -> None:
    """Train the runs of a table, and print it beside the published numbers."""
    from evenclip.reproduction.artifacts import Artifacts

    how = _training(options, runs, quick, seeds=seeds, tf32=tf32)
    artifacts = Artifacts(options.out)
    with kept():
        path = _table(artifacts, name, how)
    terminal.say(path.read_text(encoding="utf-8"))
    terminal.say(f"Wrote {path} and {path.with_suffix('.json')}.")


@app.command()
@grouped
def figure(
    name: Annotated[str, typer.Argument(help="See `evenclip paper list`.")],
    *,
    options: PaperOptions,
    runs: ExecutorOptions,
    quick: Quick = False,
    published_scale: Annotated[
        bool,
        typer.Option(
            "--published-scale", help="Leave out the factor 1/B² of R_noise, as the paper does."
        ),
    ] = False,
) -> None:
    """Train and observe the runs of a figure, and draw it."""
    from evenclip.reproduction.artifacts import Artifacts
    from evenclip.reproduction.drawings import DRAWINGS
    from evenclip.reproduction.figures import FIGURES

    how = _training(options, runs, quick)
    artifacts = Artifacts(options.out)
    if name in FIGURES:
        with kept():
            _observe(artifacts, FIGURES[name].dataset, FIGURES[name].match, how)
    elif name not in DRAWINGS:
        raise ValueError(f"There is no figure {name!r}; `evenclip paper list` has their names.")
    for path in artifacts.draw_figure(name, published_scale=published_scale):
        terminal.say(path)


@app.command("all")
@grouped
def all_(
    *,
    seeds: Seeds = 5,
    options: PaperOptions,
    runs: ExecutorOptions,
    quick: Quick = False,
    tf32: Tf32 = False,
    only: Annotated[
        str | None, typer.Option(help="Comma-separated datasets; default: all with files.")
    ] = None,
) -> None:
    """Make every table and figure whose data is available; finished runs are not repeated."""
    from evenclip.reproduction import observed
    from evenclip.reproduction.artifacts import Artifacts

    how = _training(options, runs, quick, seeds=seeds, tf32=tf32)
    artifacts, left_out = Artifacts(options.out), []
    chosen = _chosen(only)
    with kept():
        for dataset in chosen:
            why = observed.lacks(dataset, options.data_dir)
            if why is None:
                _all_of_dataset(artifacts, dataset, chosen, how)
            else:
                left_out.append(f"{dataset} is left out: {why}")
    for path in artifacts.redraw():
        if path.suffix in (".svg", ".html"):
            terminal.say(path)
    for sentence in left_out:
        terminal.say(sentence)


@app.command()
def redraw(out: Out = FOLDER) -> None:
    """Redraw everything from the kept records, without training."""
    from evenclip.reproduction.artifacts import Artifacts

    if not out.is_dir():
        raise FileNotFoundError(
            f"{out} is not there; give the folder that `evenclip paper all --out` made."
        )
    for path in Artifacts(out).redraw():
        terminal.say(path)


def _training(
    options: PaperOptions, runs: ExecutorOptions, quick: bool, *, seeds: int = 5, tf32: bool = False
) -> Training:
    """Return the settings that the options of a verb describe."""
    from evenclip.reproduction.training import Training

    return Training(seeds, options.device, tf32, quick, options.data_dir, on=runs.executor())


def _chosen(only: str | None) -> list[str]:
    """Return the datasets that `--only` names, in the paper's order; by default all of them."""
    from evenclip.comparison.presets import SETTINGS

    if only is None:
        return list(SETTINGS)
    names = {name.strip() for name in only.split(",") if name.strip()}
    for unknown in names - set(SETTINGS):
        raise ValueError(
            f"There is no dataset {unknown!r} in the paper; choose among {', '.join(SETTINGS)}."
        )
    return [dataset for dataset in SETTINGS if dataset in names]


def _all_of_dataset(
    artifacts: Artifacts, dataset: str, chosen: Sequence[str], how: Training
) -> None:
    """Make the tables of a dataset, observe its runs, and make the tables that it completes."""
    from evenclip.reproduction.artifacts import MADE

    for match in (False, True):
        terminal.say(_table(artifacts, f"{dataset}-matched" if match else dataset, how))
        _observe(artifacts, dataset, match, how)
    for name, made in MADE.items():
        if made.DATASETS[-1] == dataset and set(made.DATASETS) <= set(chosen):
            terminal.say(_table(artifacts, name, replace(how, tf32=False)))


def _table(artifacts: Artifacts, name: str, how: Training) -> Path:
    """Train, store and draw a table; return its path."""
    from evenclip.report.live import live_progress
    from evenclip.reproduction import tables
    from evenclip.reproduction.artifacts import MADE

    if name not in (*MADE, *tables.TABLES):
        raise ValueError(
            f"There is no table {name!r}; choose among {', '.join((*MADE, *tables.TABLES))}."
        )
    if how.tf32 and name in MADE:
        raise ValueError(
            f"Table {name} is not made with --tf32; leave it out, or choose a table of a dataset."
        )
    with live_progress() as show:
        seeds = min(how.seeds, 2) if how.quick else how.seeds
        how = replace(how, seeds=seeds, store=artifacts.root / "runs", show=show)
        made = MADE[name].make(how) if name in MADE else tables.make(tables.TABLES[name], how)
    return artifacts.keep(made)


def _observe(artifacts: Artifacts, dataset: str, match: bool, how: Training) -> None:
    """Observe the runs of a dataset that have not been observed yet."""
    from evenclip.reproduction import observed

    plan = observed.plan(
        dataset,
        match=match,
        quick=how.quick,
        device=how.device,
        reference_lr=artifacts.reference_lr(dataset) if match else (),
    )
    results = observed.carry_out(plan, artifacts.observed, data_dir=how.data_dir, on=how.on)
    for given, _ in results:
        terminal.say(f"  observed {given.name}", error=True)
