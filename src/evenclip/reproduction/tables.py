"""Tables 2 to 5 of the paper: training their runs, and their records.

`make` trains the runs of a table with `evenclip.comparison.compare` and returns a record of plain
values. `evenclip.reproduction.markdown` draws the table from the record alone, so it can be redrawn
without training. Each dataset has two tables: *as published*, with the paper's settings, and
*matched*, with the same expected largest step for every private rule, the fairer comparison.
"""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenclip.comparison import Comparison, compare
from evenclip.comparison.presets import PUBLISHED, SETTINGS
from evenclip.data import SOURCES, data_directory
from evenclip.reproduction.published import load
from evenclip.reproduction.training import Training
from evenclip.rules import NonPrivate
from evenclip.sweep.spec import code

__all__ = ["REFERENCE", "TABLES", "Table", "made_with", "make", "partial", "record"]

REFERENCE = NonPrivate.name
FORMAT = 1


@dataclass(frozen=True)
class Table:
    """One of the tables that `evenclip paper` makes.

    Attributes:
        name: name of the table.
        dataset: name of the dataset.
        match: whether the runs use the matched protocol.
    """

    name: str
    dataset: str
    match: bool

    @property
    def title(self) -> str:
        """The heading of the table."""
        printed = load(self.dataset)
        how = "matched" if self.match else "as published"
        return f"Table {printed.number}, {SETTINGS[self.dataset].title}, {how}"


TABLES: dict[str, Table] = {
    table.name: table
    for dataset in SETTINGS
    for table in (
        Table(dataset, dataset, match=False),
        Table(f"{dataset}-matched", dataset, match=True),
    )
}
"""The tables of the four datasets; Table 1 is in `evenclip.reproduction.directions`."""


def make(table: Table, how: Training) -> dict[str, Any]:
    """Train the runs of a table that the store does not have; return its record."""
    setting = SETTINGS[table.dataset]
    few: dict[str, Any] = {"epochs": 1, "rows": setting.quick_rows} if how.quick else {}
    comparison = compare(
        table.dataset,
        [m.name for m in PUBLISHED[table.dataset].methods if m.name != REFERENCE],
        how.seeds,
        match=table.match,
        device=how.device,
        tf32=how.tf32,
        options=setting.options,
        data_dir=how.data_dir,
        store=how.store,
        on=how.on,
        show=how.show,
        **few,
    )
    return record(
        table,
        comparison,
        device=how.device,
        quick=how.quick,
        partial=partial(table.dataset, how.data_dir),
    )


def partial(dataset: str, data_dir: Path | None) -> str | None:
    """Return what is missing from an incomplete copy of the data; None if nothing is missing."""
    source, directory = SOURCES[dataset], data_directory(data_dir)
    return None if source.incomplete is None or directory is None else source.incomplete(directory)


def record(
    table: Table, comparison: Comparison, *, device: str, quick: bool, partial: str | None = None
) -> dict[str, Any]:
    """Return all values that the table shows, as plain values."""
    return {
        "format": FORMAT,
        "table": table.name,
        "quick": quick,
        "partial": partial,
        "seeds": list(comparison.seeds),
        "groups": list(comparison.groups),
        "n_train": list(comparison.n),
        "says": comparison.says,
        "notes": list(comparison.notes),
        "rules": {
            outcome.name: {
                "rule": outcome.rule,
                "lr": list(outcome.lr),
                "soundness": outcome.soundness,
                "epsilon": dict(outcome.epsilon),
                "delta": outcome.delta,
                "accuracy": _plain(outcome.metrics["accuracy"]),
                "train_loss": _plain(outcome.metrics["train_loss"]),
                "test_loss": _plain(outcome.metrics["loss"]),
                "overall": {name: _plain(outcome.overall[name]) for name in ("accuracy", "loss")},
                "seconds": [round(value, 1) for value in outcome.seconds],
            }
            for outcome in comparison.outcomes
        },
        "made_with": made_with(device),
    }


def made_with(device: str) -> dict[str, Any]:
    """Return the versions and the machine that a record was made with."""
    import torch

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    versions = {package: metadata.version(package) for package in ("evenclip", "torch", "numpy")}
    return {
        "device": device,
        "machine": name,
        "python": platform.python_version(),
        **versions,
        "code": code()[:16],
    }


def _plain(values: NDArray[np.float64]) -> list[Any]:
    """Return the values as nested lists, rounded to six decimals; None replaces NaN and ±∞."""
    rounded: list[Any] = np.round(values, 6).tolist()
    return [_finite(value) for value in rounded]


def _finite(value: Any) -> Any:
    """Replace NaN and ±∞ in nested lists by None."""
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if math.isfinite(value) else None
