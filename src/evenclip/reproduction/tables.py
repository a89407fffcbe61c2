"""The paper's tables beside our own numbers, and its claims tested again.

A table is trained by `compare`, kept as one record of plain values (`record`), and drawn from that
alone (`draw`), so that it can be redrawn without training. *As published* has the paper's settings;
*matched* has the same largest step for every private rule, which is the fair reading.

How ours and printed are compared:

* accuracy and privacy cost on test rows; loss and excessive risk on the running training loss of
  the last epoch, which is what the paper prints. Test losses stand beside them.
* a gap is that of the means, |mean_a − mean_b|, as the printed ones are.
* ‡ marks a difference that two standard errors of it, and the rounding of what is printed, do not
  explain.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenclip.audit import statistics
from evenclip.comparison import Comparison, compare
from evenclip.comparison.presets import PUBLISHED, SETTINGS
from evenclip.data import SOURCES, data_directory
from evenclip.reproduction.published import Claim, Printed, PublishedTable, claims, load
from evenclip.reproduction.training import Training
from evenclip.rules import NonPrivate
from evenclip.sweep.spec import code

__all__ = ["TABLES", "Cell", "Table", "Verdict", "cells", "draw", "make", "record", "verdicts"]

REFERENCE = NonPrivate.name
FORMAT = 1


@dataclass(frozen=True)
class Table:
    """One of the tables that `evenclip paper` makes.

    Attributes:
        name: what it is asked for by.
        dataset: by its name in the catalogue.
        match: whether on the matched protocol.
    """

    name: str
    dataset: str
    match: bool

    @property
    def title(self) -> str:
        """For a heading."""
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
"""Those of the four datasets; Table 1 is in `evenclip.reproduction.directions`."""


# --- training -----------------------------------------------------------------------------------


def make(table: Table, how: Training) -> dict[str, Any]:
    """Train what the table needs and the store lacks; return its record."""
    setting = SETTINGS[table.dataset]
    few: dict[str, Any] = {"epochs": 1, "rows": setting.quick_rows} if how.quick else {}
    found = compare(
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
        found,
        device=how.device,
        quick=how.quick,
        partial=partial(table.dataset, how.data_dir),
    )


def partial(dataset: str, data_dir: Path | None) -> str | None:
    """What a copy of the data lacks, with which a table is made all the same; None: nothing."""
    source, directory = SOURCES[dataset], data_directory(data_dir)
    return None if source.incomplete is None or directory is None else source.incomplete(directory)


def record(
    table: Table, found: Comparison, *, device: str, quick: bool, partial: str | None = None
) -> dict[str, Any]:
    """Everything that is drawn, as plain values."""
    return {
        "format": FORMAT,
        "table": table.name,
        "quick": quick,
        "partial": partial,
        "seeds": list(found.seeds),
        "groups": list(found.groups),
        "n_train": list(found.n),
        "says": found.says,
        "notes": list(found.notes),
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
            for outcome in found.outcomes
        },
        "made_with": made_with(device),
    }


def made_with(device: str) -> dict[str, Any]:
    """Versions and machine."""
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
    """As JSON has it: six digits, None for what is not a number."""
    rounded: list[Any] = np.round(values, 6).tolist()
    return [_known(value) for value in rounded]


def _known(value: Any) -> Any:
    if isinstance(value, list):
        return [_known(each) for each in value]
    return value if math.isfinite(value) else None


# --- ours and theirs ----------------------------------------------------------------------------


class Cell(NamedTuple):
    """One number of ours beside the printed one.

    Attributes:
        mean: ours.
        se: its standard error; None with one seed.
        printed: theirs; None where nothing is printed.
    """

    mean: float
    se: float | None
    printed: Printed | None

    @property
    def difference(self) -> float | None:
        """Ours less theirs."""
        return None if self.printed is None else self.mean - self.printed.mean

    @property
    def explained(self) -> bool | None:
        """Whether two standard errors of the difference, and rounding, explain it; None where that
        cannot be told.
        """
        if self.printed is None or self.se is None or self.printed.se is None:
            return None
        half = 0.5 * 10.0**-self.printed.digits
        assert self.difference is not None
        return abs(self.difference) <= 2 * math.hypot(self.se, self.printed.se + half) + half


Columns = dict[
    str, dict[str, tuple[Cell, ...]]
]  # rule -> column -> a cell for each group, or one for a gap


def cells(kept: Mapping[str, Any]) -> Columns:
    """Every number of a record with the printed one, for the groups of the printed table."""
    table = TABLES[kept["table"]]
    printed = load(table.dataset)
    places = [kept["groups"].index(group) for group in printed.groups]
    values = {
        rule: _values(row, kept["rules"][REFERENCE], places) for rule, row in kept["rules"].items()
    }
    return {rule: {column: _row(found[column], printed, rule, column, table) for column in found}
            for rule, found in values.items()}  # fmt: skip


def _values(
    row: Mapping[str, Any], reference: Mapping[str, Any], places: Sequence[int]
) -> dict[str, Any]:
    """Column -> [seed, group]."""
    accuracy, loss, test = (
        _array(row[name])[:, places] for name in ("accuracy", "train_loss", "test_loss")
    )
    found = {"accuracy": accuracy, "loss": loss, "test_loss": test}
    if row is not reference:
        found["privacy_cost"] = _array(reference["accuracy"])[:, places] - accuracy
        found["excessive_risk"] = loss - _array(reference["train_loss"])[:, places]
        found["privacy_cost_gap"] = found["privacy_cost"][:, :1] - found["privacy_cost"][:, 1:]
        found["excessive_risk_gap"] = (
            found["excessive_risk"][:, :1] - found["excessive_risk"][:, 1:]
        )
    return found


def _row(
    values: NDArray[np.float64], printed: PublishedTable, rule: str, column: str, table: Table
) -> tuple[Cell, ...]:
    theirs: tuple[Printed, ...] | None = (
        None if table.match else printed.rows.get(rule, {}).get(column)
    )
    found = []
    for k in range(values.shape[1]):
        mean, se = statistics.mean_se(values[:, k])
        mean = math.nan if mean is None else abs(mean) if column.endswith("_gap") else mean
        found.append(Cell(mean, se, None if theirs is None else theirs[k]))
    return tuple(found)


def _array(rows: Any) -> NDArray[np.float64]:
    return np.array(rows, dtype=np.float64)


# --- claims -------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """A claim of the paper, tested on our seeds.

    Attributes:
        claim: what is said.
        p: what it is said of (a group, "overall", "gap") -> one-sided Wilcoxon p; None without a
            difference.
        holds: whether every one of them is below what is claimed; None where the claim is that they
            are comparable.
    """

    claim: Claim
    p: dict[str, float | None]
    holds: bool | None


def verdicts(kept: Mapping[str, Any]) -> list[Verdict]:
    """Every claim about the dataset. Where the paper does not say of whom, for both groups."""
    table = TABLES[kept["table"]]
    printed = load(table.dataset)
    places = [kept["groups"].index(group) for group in printed.groups]
    rules = kept["rules"]
    found = []
    for claim in claims(table.dataset):
        if claim.better not in rules or claim.worse not in rules:
            continue
        better, worse = (
            _values(rules[name], rules[REFERENCE], places)[claim.metric]
            for name in (claim.better, claim.worse)
        )
        if claim.metric.endswith("_gap"):
            better, worse = np.abs(better), np.abs(worse)
        sign = -1 if claim.metric == "accuracy" else 1  # less is better, of all but accuracy
        names = printed.groups if better.shape[1] == 2 else ("gap",)
        p = {
            name: statistics.wilcoxon(sign * (better[:, k] - worse[:, k]), "less")
            for k, name in enumerate(names)
        }
        holds = (
            None
            if claim.p_below is None
            else all(v is not None and v < claim.p_below for v in p.values())
        )
        found.append(Verdict(claim, p, holds))
    return found


# --- drawing ------------------------------------------------------------------------------------

_DIGITS = {
    "accuracy": 1,
    "privacy_cost": 1,
    "privacy_cost_gap": 1,
    "loss": 3,
    "test_loss": 3,
    "excessive_risk": 3,
    "excessive_risk_gap": 3,
}
_HEADINGS = {
    "accuracy": "Accuracy on test rows, %",
    "privacy_cost": "Privacy cost π, points of accuracy",
    "loss": "Training loss of the last epoch (what the paper prints)",
    "test_loss": "Test loss",
    "excessive_risk": "Excessive risk R, of the training loss",
}


def draw(kept: Mapping[str, Any]) -> str:
    """A record as Markdown, readable at 80 columns as it is."""
    table = TABLES[kept["table"]]
    printed, found = load(table.dataset), cells(kept)
    seeds = len(kept["seeds"])
    n = sorted({f"{value:,}" for value in (min(kept["n_train"]), max(kept["n_train"]))})
    lines = [f"## {table.title}", ""]
    if kept["quick"]:
        lines += [
            "**A quick look: fewer epochs, and of images fewer records, than the paper's. These "
            "are not its numbers.**",
            "",
        ]
    if kept.get("partial"):
        lines += [
            f"**Partial: {kept['partial']}. What is there is split by identity and not as "
            "published.**",
            "",
        ]
    lines += [
        f"{seeds} seed{'s' if seeds > 1 else ''}, {' to '.join(n)} training records. "
        f"{kept['says']}",
        "",
    ]
    for column, heading in _HEADINGS.items():
        lines += _block(found, column, heading, printed, table)
    lines += _privacy(kept, printed, table) + _claims(kept, table)
    if not table.match:
        lines += [
            "‡ not explained by two standard errors of the difference and the rounding of what is "
            "printed.",
            "",
        ]
    lines += [f"{note}\n" for note in kept["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _block(
    found: Columns, column: str, heading: str, printed: PublishedTable, table: Table
) -> list[str]:
    """One quantity, method by method: ours, printed and the difference for each group, and the gap."""
    rules = [rule for rule in found if column in found[rule]]
    gap = f"{column}_gap"
    names = [*printed.groups, *(["gap"] if any(gap in found[rule] for rule in rules) else [])]
    beside = not table.match and column != "test_loss"
    head = [
        "",
        *(part for name in names for part in ((name, "printed", "diff.") if beside else (name,))),
    ]
    lines = [f"**{heading}**", "", _line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    for rule in rules:
        row = [*found[rule][column], *found[rule].get(gap, ())]
        texts = [text for cell in row for text in _texts(cell, _DIGITS[column], beside)]
        lines.append(_line([rule, *texts]))
    return [*lines, ""]


def _texts(cell: Cell, digits: int, beside: bool) -> tuple[str, ...]:
    ours = _number(cell.mean, cell.se, digits)
    if not beside:
        return (ours,)
    if cell.printed is None or cell.difference is None:
        return ours, "–", "–"
    mark = "‡" if cell.explained is False else ""
    return ours, str(cell.printed), f"{cell.difference:+.{cell.printed.digits}f}{mark}"


def _number(mean: float, se: float | None, digits: int) -> str:
    return f"{mean:.{digits}f}" + ("" if se is None else f" ± {se:.{digits}f}")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _privacy(kept: Mapping[str, Any], printed: PublishedTable, table: Table) -> list[str]:
    """ε of every rule, with the printed one."""
    from evenclip.mechanism.accounting import rounded_up

    lines = [
        "**Privacy**",
        "",
        _line(["", "ε, RDP", "ε, PLD", "printed", "learning rate", "soundness"]),
    ]
    lines.append(_line(["---", "---:", "---:", "---:", "---:", "---"]))
    for rule, row in kept["rules"].items():
        rdp, pld = (row["epsilon"][name] for name in ("rdp", "pld"))
        said = str(printed.epsilon) if rule != REFERENCE and not table.match else "–"
        rates = sorted({f"{lr:.3g}" for lr in row["lr"]}, key=float)
        shown = [("none" if value is None else rounded_up(value)) for value in (rdp, pld)]
        lines.append(
            _line(
                [
                    rule,
                    *shown,
                    said,
                    " to ".join(dict.fromkeys((rates[0], rates[-1]))),
                    row["soundness"],
                ]
            )
        )
    return [
        *lines,
        "",
        f"δ = {kept['rules'][REFERENCE]['delta']:g}. Gradient and counts are accounted for "
        "together.",
        "",
    ]


def _claims(kept: Mapping[str, Any], table: Table) -> list[str]:
    """What the paper calls significant, tested again."""
    found = [verdict for verdict in verdicts(kept) if verdict.holds is not None]
    if not found:
        return []
    held = sum(bool(verdict.holds) for verdict in found)
    seeds = len(kept["seeds"])
    where = "at the same largest step" if table.match else "with the published settings"
    lines = [
        f"**The paper's claims** (p < 0.05, one-sided Wilcoxon): {held} of {len(found)} hold "
        f"{where}, in both groups.",
        f"With {seeds} seeds p is never below {statistics.smallest_p(seeds):.3g}.", "",
        _line(["better", "than", "in", "p", "holds"]), _line(["---", "---", "---", "---", "---"]),
    ]  # fmt: skip
    for claim, p, holds in found:
        shown = ", ".join(
            f"{name} {'–' if value is None else f'{value:.3f}'}" for name, value in p.items()
        )
        lines.append(
            _line(
                [
                    claim.better,
                    claim.worse,
                    claim.metric.replace("_", " "),
                    shown,
                    "yes" if holds else "no",
                ]
            )
        )
    return [*lines, ""]
