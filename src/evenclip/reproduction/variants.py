"""Rows of the paper whose settings are ambiguous, trained with both settings.

- Adult, DPSGD-Global: the learning rate is 1 in the text and 0.2 in the released code.
- Dutch, DPSGD-Global-Adapt: the learning rate is 1 in the text; 2 comes closer to the printed row.
- Adult and Dutch, FairLens: R1 is a function of per-sample gradients. If the implementation
  detaches these gradients from the autograd graph, ∇R1 is 0, and the method is R2 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenclip.audit import statistics
from evenclip.comparison import compare
from evenclip.comparison.presets import PUBLISHED
from evenclip.comparison.protocol import Method
from evenclip.reproduction.cells import Cell
from evenclip.reproduction.published import load
from evenclip.reproduction.tables import made_with
from evenclip.reproduction.training import Training
from evenclip.rules import FairLens

__all__ = ["DATASETS", "NAME", "TITLE", "VARIANTS", "Variant", "draw", "make"]

NAME, TITLE = "variants", "Rows in doubt, trained both ways"
DATASETS = ("adult", "dutch")


@dataclass(frozen=True)
class Variant:
    """One interpretation of a printed row.

    Attributes:
        dataset: the dataset of the table.
        row: the name of the row.
        says: the interpretation, in a few words.
        method: the rule with its learning rate.
    """

    dataset: str
    row: str
    says: str
    method: Method


def _variant(dataset: str, row: str, says: str, **changes: Any) -> Variant:
    """Return a row's published method with some of its fields changed."""
    (method,) = PUBLISHED[dataset].only([row]).methods
    return Variant(dataset, row, says, replace(method, **changes))


def _without_r1(dataset: str) -> Variant:
    """Return FairLens without the gradient of R1."""
    (method,) = PUBLISHED[dataset].only([FairLens.name]).methods
    assert isinstance(method.rule, FairLens)
    return Variant(
        dataset,
        FairLens.name,
        "∇R1 taken to be 0",
        replace(method, rule=replace(method.rule, gamma1=0.0)),
    )


VARIANTS: tuple[Variant, ...] = (
    _variant("adult", "dpsgd-global", "lr 1, the text", lr=1.0),
    _variant("adult", "dpsgd-global", "lr 0.2, the code", lr=0.2),
    _variant("adult", "fairlens", "as the box has it"),
    _without_r1("adult"),
    _variant("dutch", "dpsgd-global-adapt", "lr 1, the text", lr=1.0),
    _variant("dutch", "dpsgd-global-adapt", "lr 2", lr=2.0),
    _variant("dutch", "fairlens", "as the box has it"),
    _without_r1("dutch"),
)
"""The variants, in the order of the table."""


def make(how: Training) -> dict[str, Any]:
    """Train every variant and a reference with the same learning rate; return the record.

    Runs that the store already has are not repeated.
    """
    rows = []
    for variant in VARIANTS:
        printed, method = load(variant.dataset), variant.method
        comparison = compare(
            variant.dataset,
            [method.rule],
            how.seeds,
            lr=method.lr,
            device=how.device,
            epochs=1 if how.quick else None,
            data_dir=how.data_dir,
            store=how.store,
            on=how.on,
            show=how.show,
        )
        places = [comparison.groups.index(group) for group in printed.groups]
        metrics = comparison[method.name].metrics
        rows.append(
            {
                "dataset": variant.dataset,
                "row": variant.row,
                "says": variant.says,
                "lr": method.lr,
                "accuracy": np.round(metrics["accuracy"][:, places], 6).tolist(),
                "loss": np.round(metrics["train_loss"][:, places], 6).tolist(),
            }
        )
    return {
        "format": 1,
        "table": NAME,
        "quick": how.quick,
        "seeds": list(range(how.seeds)),
        "rows": rows,
        "made_with": made_with(how.device),
    }


def draw(record: Mapping[str, Any]) -> str:
    """Draw a record as Markdown."""
    lines = [f"## {TITLE}", ""]
    if record["quick"]:
        lines += ["**A quick run: fewer epochs than the paper's. These are not its numbers.**", ""]
    lines += [
        f"{len(record['seeds'])} seeds. Accuracy on test rows in %, and training loss of the last "
        "epoch.",
        "",
    ]
    lines += [
        "| | read as | accuracy a | printed | accuracy b | printed | loss a | printed | loss b | "
        "printed |"
    ]
    lines += ["| --- | --- |" + " ---: | ---: |" * 4]
    for row in record["rows"]:
        printed = load(row["dataset"])
        cells = []
        for column, digits in (("accuracy", 1), ("loss", 3)):
            for k, group in enumerate(printed.groups):
                mean, se = statistics.mean_se(np.array(row[column])[:, k])
                assert mean is not None
                cell = Cell(mean, se, printed.cell(row["row"], column, group))
                mark = "‡" if cell.explained is False else ""
                cells += [
                    f"{mean:.{digits}f}" + ("" if se is None else f" ± {se:.{digits}f}") + mark,
                    str(cell.printed),
                ]
        lines.append(
            f"| {row['dataset']}, {row['row']} | {row['says']} | " + " | ".join(cells) + " |"
        )
    groups = "; ".join(
        f"{name}: a {load(name).groups[0]}, b {load(name).groups[1]}" for name in DATASETS
    )
    return "\n".join([*lines, "", f"{groups}.", ""])
