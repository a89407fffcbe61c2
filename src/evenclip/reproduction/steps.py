"""Matched rules at several largest steps: how far the comparison depends on the step.

The matched tables have one expected largest step η·E[S] for all private rules, 0.1. Here the same
rules are trained at longer steps too, beside the non-private reference of the matched table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evenclip.audit import cost, statistics
from evenclip.comparison import Comparison, compare
from evenclip.comparison.presets import PUBLISHED
from evenclip.comparison.protocol import expected_sensitivity
from evenclip.data import SOURCES
from evenclip.reproduction.published import load
from evenclip.reproduction.tables import made_with
from evenclip.reproduction.training import Training
from evenclip.rules import DPSGD, Constants, NonPrivate

__all__ = ["DATASETS", "NAME", "STEPS", "TITLE", "draw", "make"]

NAME, TITLE = "steps", "Matched rules at longer steps"
DATASETS = ("adult", "dutch")

STEPS = (0.1, 0.2, 0.4, 0.8)
"""Expected largest steps η·E[S]."""


def make(how: Training) -> dict[str, Any]:
    """Train every bounded rule at every step; return the record.

    Runs that the store already has are not repeated.
    """
    rows = [row for dataset in DATASETS for row in _rows(dataset, how)]
    return {
        "format": 1,
        "table": NAME,
        "quick": how.quick,
        "seeds": list(range(how.seeds)),
        "rows": rows,
        "made_with": made_with(how.device),
    }


def _rows(dataset: str, how: Training) -> list[dict[str, Any]]:
    """Return the record's rows of one dataset: the reference, then every rule at every step."""
    published = PUBLISHED[dataset]
    private = [m for m in published.methods if m.rule.bounded and m.rule.sigma]
    reference = _compared(dataset, [method.name for method in private], how, match=True)
    rows = [_row(dataset, NonPrivate.name, None, reference)]
    constants = Constants(groups=len(SOURCES[dataset].groups), B=float(published.batch_size))
    for step in STEPS:
        for method in private:
            lr = step / expected_sensitivity(method.rule, constants)
            compared = _compared(dataset, [method.rule], how, lr=lr)
            rows.append(_row(dataset, method.name, step, compared))
    return rows


def _compared(dataset: str, rules: Sequence[Any], how: Training, **given: Any) -> Comparison:
    return compare(
        dataset,
        rules,
        how.seeds,
        device=how.device,
        epochs=1 if how.quick else None,
        data_dir=how.data_dir,
        store=how.store,
        on=how.on,
        show=how.show,
        **given,
    )


def _row(dataset: str, rule: str, step: float | None, compared: Comparison) -> dict[str, Any]:
    places = [compared.groups.index(group) for group in load(dataset).groups]
    metrics = compared[rule].metrics
    return {
        "dataset": dataset,
        "rule": rule,
        "step": step,
        "lr": list(compared[rule].lr),
        "accuracy": np.round(metrics["accuracy"][:, places], 6).tolist(),
        "loss": np.round(metrics["train_loss"][:, places], 6).tolist(),
    }


def draw(record: Mapping[str, Any]) -> str:
    """Draw a record as Markdown."""
    lines = [f"## {TITLE}", ""]
    if record["quick"]:
        lines += ["**A quick run: fewer epochs than the paper's. These are not its numbers.**", ""]
    lines += [
        f"{len(record['seeds'])} seeds. Accuracy on test rows in %; the gap is that of the privacy "
        "cost, |π_a − π_b| of each seed, in points. The verdict compares a rule's gaps with "
        "DPSGD's at the same expected largest step η·E[S]: paired t test, Holm-corrected over the "
        "rules of that step.",
    ]
    for dataset in DATASETS:
        rows = [row for row in record["rows"] if row["dataset"] == dataset]
        lines += ["", *_table(dataset, rows)]
    return "\n".join([*lines, ""])


def _table(dataset: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of one dataset."""
    a, b = load(dataset).groups
    reference, *private = rows
    lines = [
        f"**{dataset.capitalize()}**", "",
        f"| η·E[S] | rule | {a} | {b} | gap | gap against DPSGD's |",
        "| ---: | --- | ---: | ---: | ---: | --- |",
        f"| – | {reference['rule']} | {_cell(reference, 0)} | {_cell(reference, 1)} | – | – |",
    ]  # fmt: skip
    for step in STEPS:
        of_step = [row for row in private if row["step"] == step]
        gaps = {row["rule"]: _gaps(reference, row) for row in of_step}
        pairs = {
            rule: statistics.paired(gap, gaps[DPSGD.name])
            for rule, gap in gaps.items()
            if rule != DPSGD.name
        }
        verdicts = statistics.corrected(pairs)
        for row in of_step:
            rule = row["rule"]
            mean, se = statistics.mean_se(gaps[rule])
            reads = verdicts[rule].reads if rule in verdicts else "–"
            gap = _number(mean, se, 2)
            cells = (f"{step:g}", rule, _cell(row, 0), _cell(row, 1), gap, reads)
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _gaps(reference: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    """Return |π_a − π_b| of each seed."""
    return cost.gap(cost.privacy_cost(reference["accuracy"], row["accuracy"]), (0, 1))


def _cell(row: Mapping[str, Any], k: int) -> str:
    """Return the accuracy of the k-th group with its standard error."""
    return _number(*statistics.mean_se(np.array(row["accuracy"])[:, k]), 1)


def _number(mean: float | None, se: float | None, digits: int) -> str:
    assert mean is not None
    return f"{mean:.{digits}f}" + ("" if se is None else f" ± {se:.{digits}f}")
