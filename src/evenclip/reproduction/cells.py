"""Our numbers beside the printed ones, and the paper's claims tested on our seeds.

- Accuracy and privacy cost are those of test rows. Loss and excessive risk are those of the running
  training loss of the last epoch, as printed in the paper; test losses are a further column.
- A gap is the gap of the means, |mean_a − mean_b|, as in the paper.
- A difference is explained if it is within two of its standard errors and the rounding of the
  printed number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenclip.audit import statistics
from evenclip.reproduction.published import Claim, Printed, PublishedTable, claims, load
from evenclip.reproduction.tables import REFERENCE, TABLES, Table

__all__ = ["Cell", "Columns", "Verdict", "cells", "verdicts"]


class Cell(NamedTuple):
    """One of our numbers and the printed one.

    Attributes:
        mean: our mean over seeds.
        se: its standard error; None for one seed.
        printed: the printed number; None if nothing is printed.
    """

    mean: float
    se: float | None
    printed: Printed | None

    @property
    def difference(self) -> float | None:
        """Our mean minus the printed one; None if nothing is printed."""
        return None if self.printed is None else self.mean - self.printed.mean

    @property
    def explained(self) -> bool | None:
        """Whether two standard errors and rounding explain the difference; None if unknown."""
        if self.printed is None or self.se is None or self.printed.se is None:
            return None
        half = 0.5 * 10.0**-self.printed.digits
        assert self.difference is not None
        return abs(self.difference) <= 2 * math.hypot(self.se, self.printed.se + half) + half


Columns = dict[str, dict[str, tuple[Cell, ...]]]
"""Rule -> column -> one cell for each group, or one cell for a gap."""


def cells(record: Mapping[str, Any]) -> Columns:
    """Return every number of a record with the printed one, for the groups of the printed table."""
    table = TABLES[record["table"]]
    printed = load(table.dataset)
    places = [record["groups"].index(group) for group in printed.groups]
    values = {
        rule: _values(row, record["rules"][REFERENCE], places)
        for rule, row in record["rules"].items()
    }
    return {
        rule: {column: _cells(columns[column], printed, rule, column, table) for column in columns}
        for rule, columns in values.items()
    }


def _values(
    row: Mapping[str, Any], reference: Mapping[str, Any], places: Sequence[int]
) -> dict[str, Any]:
    """Return column -> values.  # [seed, group], or [seed, 1] for a gap"""
    accuracy, loss, test = (
        _array(row[name])[:, places] for name in ("accuracy", "train_loss", "test_loss")
    )
    columns = {"accuracy": accuracy, "loss": loss, "test_loss": test}
    if row is not reference:
        cost = _array(reference["accuracy"])[:, places] - accuracy
        risk = loss - _array(reference["train_loss"])[:, places]
        columns |= {"privacy_cost": cost, "excessive_risk": risk}
        columns["privacy_cost_gap"] = cost[:, :1] - cost[:, 1:]
        columns["excessive_risk_gap"] = risk[:, :1] - risk[:, 1:]
    return columns


def _cells(
    values: NDArray[np.float64], printed: PublishedTable, rule: str, column: str, table: Table
) -> tuple[Cell, ...]:
    """Return the cells of one rule and column."""
    numbers: tuple[Printed, ...] | None = (
        None if table.match else printed.rows.get(rule, {}).get(column)
    )
    row = []
    for k in range(values.shape[1]):
        mean, se = statistics.mean_se(values[:, k])
        mean = math.nan if mean is None else abs(mean) if column.endswith("_gap") else mean
        row.append(Cell(mean, se, None if numbers is None else numbers[k]))
    return tuple(row)


def _array(rows: Any) -> NDArray[np.float64]:
    """Return nested lists as an array."""
    return np.array(rows, dtype=np.float64)


# --- claims -------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """A claim of the paper, tested on our seeds.

    Attributes:
        claim: the claim.
        p: group, or "gap" -> p of the one-sided Wilcoxon test; None if no seed differs.
        holds: whether every p is below the claimed bound; None if the claim is that the two rules
            are comparable.
    """

    claim: Claim
    p: dict[str, float | None]
    holds: bool | None


def verdicts(record: Mapping[str, Any]) -> list[Verdict]:
    """Test every claim about the dataset; claims that name no group are tested for both groups."""
    table = TABLES[record["table"]]
    printed = load(table.dataset)
    places = [record["groups"].index(group) for group in printed.groups]
    rules = record["rules"]
    results = []
    for claim in claims(table.dataset):
        if claim.better not in rules or claim.worse not in rules:
            continue
        better, worse = (
            _values(rules[name], rules[REFERENCE], places)[claim.metric]
            for name in (claim.better, claim.worse)
        )
        if claim.metric.endswith("_gap"):
            better, worse = np.abs(better), np.abs(worse)
        sign = -1 if claim.metric == "accuracy" else 1  # lower is better except for accuracy
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
        results.append(Verdict(claim, p, holds))
    return results
