"""`evenclip train`: train a private model on a table and write it to a folder."""

from __future__ import annotations

import json
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenclip import check, terminal
from evenclip.cli.options import DataOptions, grouped

if TYPE_CHECKING:
    from evenclip.export import Trained

__all__ = ["train"]


@dataclass(frozen=True)
class TrainOptions:
    """What is trained, and at which ε."""

    target: Annotated[str, typer.Option(help="Column to predict.")]
    group: Annotated[
        list[str], typer.Option(help="Protected column; repeat it to compare intersections.")
    ]
    rule: Annotated[str, typer.Option(help="Clipping rule: its name, or file.py:Class.")] = (
        "dpsgd-global-adapt"
    )
    epsilon: Annotated[float, typer.Option(help="ε of the whole training, by PLD.")] = 3.0
    delta: Annotated[
        float | None, typer.Option(help="δ; default: the largest 10^-k below 1/(2n).")
    ] = None
    epochs: Annotated[int, typer.Option(help="Passes over the training rows.")] = 20
    batch_size: Annotated[int | None, typer.Option(help="Expected batch size B; default: 256.")] = (
        None
    )
    lr: Annotated[float | None, typer.Option(help="Learning rate η; default: η·S = 0.1.")] = None
    model: Annotated[str, typer.Option(help="mlp, mlp:128,64, linear or sigmoid-then-softmax.")] = (
        "mlp"
    )


@dataclass(frozen=True)
class FolderOptions:
    """Where the model is written, and what beside it."""

    out: Annotated[Path, typer.Option(help="Folder for the model.")] = Path("model")
    force: Annotated[bool, typer.Option("--force", help="Replace an existing model.")] = False
    with_group_figures: Annotated[
        bool,
        typer.Option(
            "--with-group-figures",
            help="Put exact test figures of the groups into the model card; not private.",
        ),
    ] = False


def _table(file: Path) -> Path:
    """Return the file; refuse a dataset, before a missing option hides that mistake."""
    # Imported here so that --help does not wait for torch.
    from evenclip.data.catalogue import SOURCES

    if file.exists():
        return file
    if str(file) in SOURCES:
        raise ValueError(
            f"{file} is a dataset of the package, and `evenclip train` takes a table; give a file, "
            f"or try rules on this dataset by `evenclip compare {file}`."
        )
    if ".py:" in str(file):
        raise ValueError(
            f"{file} is a dataset in Python, and `evenclip train` takes a table; give a file, or "
            f"try rules on this dataset by `evenclip compare {file}`."
        )
    return file


@grouped
def train(
    file: Annotated[
        Path,
        typer.Argument(
            help="Table: .csv, .tsv, .parquet or .feather.", callback=_table, is_eager=True
        ),
    ],
    *,
    settings: TrainOptions,
    options: DataOptions,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    folder: FolderOptions,
    seed: Annotated[
        int | None,
        typer.Option(help="For tests only: anyone who knows the seed can subtract the noise."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a differentially private model on a table.

    The output folder also holds the encoder, the privacy report and a model card. The accuracy of
    the groups is printed, and is not in the folder unless you ask for it.

    Example: evenclip train people.csv --target hired --group sex --epsilon 3 --out model/
    """
    check.positive(**{"--epsilon": settings.epsilon})
    # Imported here so that --help does not wait for torch.
    from evenclip import export

    export.check_place(folder.out, folder.force)
    group = settings.group
    given = vars(settings) | {"group": group[0] if len(group) == 1 else group}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        trained = export.train(file, **given, **options.given(), device=device, seed=seed)
    out, problem = export.save_or_rescue(
        trained, folder.out, force=folder.force, with_group_figures=folder.with_group_figures
    )
    for note in (*trained.tabled.notes, *dict.fromkeys(str(warning.message) for warning in warned)):
        terminal.say(f"note: {terminal.in_line(note)}", error=True)
    if as_json:
        terminal.say_json(json.dumps(_facts(trained, out), indent=2, ensure_ascii=False))
    else:
        terminal.say(_text(trained, out))
    if problem is not None:
        terminal.say(f"evenclip: {terminal.in_line(problem)}", error=True)
        raise typer.Exit(1)


def _facts(trained: Trained, out: Path) -> dict[str, Any]:
    """Return what is printed, as plain values."""
    report = trained.privacy
    names = (
        "method",
        "soundness",
        "epsilon",
        "epsilon_rdp",
        "delta",
        "target_epsilon",
        "unit",
        "not_covered",
        "encoder",
        "encoder_declared",
        "n",
    )
    return {
        "out": str(out),
        **{name: report[name] for name in names},
        "seed_given": trained.result.settings.seed is not None,
        "classes": list(trained.tabled.encoder.classes),
        "accuracy": trained.accuracy,
        "test_rows": trained.support,
        "small": list(trained.tabled.small),
        "notes": list(trained.tabled.notes),
    }


def _text(trained: Trained, out: Path) -> str:
    """Format the facts, at most 80 columns wide."""
    from evenclip.mechanism.accounting import rounded_up

    report, small = trained.privacy, trained.tabled.small
    seed = (
        "given: anyone who knows it can subtract the noise"
        if trained.result.settings.seed is not None
        else "not kept"
    )
    lines = [
        f"model    {out}: {trained.model['name']}, {report['method']} ({report['soundness']}), "
        f"{report['n']} rows",
        f"ε        {rounded_up(report['epsilon'])} by PLD, {rounded_up(report['epsilon_rdp'])} by "
        f"RDP, at δ = {report['delta']:g}",
        f"unit     {report['unit']}",
        f"seed     {seed}",
        "accuracy of test rows (not differentially private)",
    ]
    for name, accuracy in trained.accuracy.items():
        percent = "–" if accuracy is None else f"{accuracy:.1f} %"
        lines.append(
            f"  {percent:>7}  {name} "
            f"({trained.support[name]}{', too few' if name in small else ''})"
        )
    lines += ["not covered by ε", *(f"  {access}" for access in report["not_covered"])]
    lines += [f"encoder  {report['encoder']}"]
    return "\n".join(
        textwrap.fill(
            line,
            80,
            subsequent_indent=_indent(line),
            break_on_hyphens=False,
            break_long_words=False,
        )
        for line in lines
    )


def _indent(line: str) -> str:
    """Return the indent of continuation lines: below the text of `line`."""
    return " " * (9 if line[:1].isalpha() and line[8:9] == " " else 4)
