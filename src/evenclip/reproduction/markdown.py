"""Tables 2 to 5 as Markdown, drawn from their records.

‡ marks a difference from the printed number that two standard errors and rounding do not explain.
The numbers of a matched table or of a part of the data cannot be compared with print, so the
printed ones are left out there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenclip.audit import statistics
from evenclip.comparison.presets import PUBLISHED
from evenclip.comparison.protocol import STEP, expected_sensitivity
from evenclip.reproduction.cells import Cell, Columns, cells, verdicts
from evenclip.reproduction.published import PublishedTable, load
from evenclip.reproduction.tables import REFERENCE, TABLES, Table
from evenclip.rules import Constants

__all__ = ["draw"]

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


def draw(record: Mapping[str, Any]) -> str:
    """Draw a record as Markdown."""
    table = TABLES[record["table"]]
    printed, columns = load(table.dataset), cells(record)
    seeds = len(record["seeds"])
    n = sorted({f"{value:,}" for value in (min(record["n_train"]), max(record["n_train"]))})
    lines = [f"## {table.title}", ""]
    if record["quick"]:
        lines += [
            "**A quick run: fewer epochs, and of images fewer records, than the paper's. These "
            "are not its numbers.**",
            "",
        ]
    beside = not table.match and not record.get("partial")
    if record.get("partial"):
        lines += [
            f"**Partial: {record['partial']}. The available images are split by identity, and not "
            "as published. No number can be compared with the printed table.**",
            "",
        ]
    other = _other_steps(record, table)
    says = record["says"]
    if other:
        says = says.replace("every private rule", f"every private rule but {' and '.join(other)}")
    lines += [
        f"{seeds} seed{'s' if seeds > 1 else ''}, {' to '.join(n)} training records. {says}",
        "",
    ]
    for column, heading in _HEADINGS.items():
        lines += _block(columns, column, heading, printed, beside and column != "test_loss")
    lines += _privacy(record, printed, beside) + _steps(other) + _claims(record, table)
    if beside:
        lines += [
            "‡ not explained by two standard errors of the difference and the rounding of what is "
            "printed.",
            "",
        ]
    lines += [f"{note}\n" for note in record["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _block(
    columns: Columns, column: str, heading: str, printed: PublishedTable, beside: bool
) -> list[str]:
    """Return the lines of one quantity: a row for each rule, with all groups and the gap."""
    rules = [rule for rule in columns if column in columns[rule]]
    gap = f"{column}_gap"
    names = [*printed.groups, *(["gap"] if any(gap in columns[rule] for rule in rules) else [])]
    head = [
        "",
        *(title for name in names for title in ((name, "printed", "diff.") if beside else (name,))),
    ]
    lines = [f"**{heading}**", "", _line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    for rule in rules:
        row = [*columns[rule][column], *columns[rule].get(gap, ())]
        texts = [text for cell in row for text in _texts(cell, _DIGITS[column], beside)]
        lines.append(_line([rule, *texts]))
    return [*lines, ""]


def _texts(cell: Cell, digits: int, beside: bool) -> tuple[str, ...]:
    """Return our number and, if `beside`, the printed one and the difference."""
    ours = _number(cell.mean, cell.se, digits)
    if not beside:
        return (ours,)
    if cell.printed is None or cell.difference is None:
        return ours, "–", "–"
    mark = "‡" if cell.explained is False else ""
    return ours, str(cell.printed), f"{cell.difference:+.{cell.printed.digits}f}{mark}"


def _number(mean: float, se: float | None, digits: int) -> str:
    """Format a mean with its standard error."""
    return f"{mean:.{digits}f}" + ("" if se is None else f" ± {se:.{digits}f}")


def _line(cells: Sequence[str]) -> str:
    """Return one line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def _privacy(record: Mapping[str, Any], printed: PublishedTable, beside: bool) -> list[str]:
    """Return the lines of the ε of every rule, beside the printed one."""
    from evenclip.mechanism.accounting import rounded_up

    lines = [
        "**Privacy**",
        "",
        _line(["", "ε, RDP", "ε, PLD", "printed", "learning rate", "soundness"]),
    ]
    lines.append(_line(["---", "---:", "---:", "---:", "---:", "---"]))
    for rule, row in record["rules"].items():
        rdp, pld = (row["epsilon"][name] for name in ("rdp", "pld"))
        published = str(printed.epsilon) if rule != REFERENCE and beside else "–"
        rates = sorted({f"{lr:.3g}" for lr in row["lr"]}, key=float)
        shown = [rounded_up(value) for value in (rdp, pld)]
        lines.append(
            _line(
                [
                    rule,
                    *shown,
                    published,
                    " to ".join(dict.fromkeys((rates[0], rates[-1]))),
                    row["soundness"],
                ]
            )
        )
    return [
        *lines,
        "",
        f"δ = {record['rules'][REFERENCE]['delta']:g}. Gradient and counts are accounted for "
        "together.",
        "",
    ]


def _other_steps(record: Mapping[str, Any], table: Table) -> dict[str, float]:
    """Return the expected largest step of each rule of a matched table that has another one."""
    if not table.match:
        return {}
    published = PUBLISHED[table.dataset]
    constants = Constants(groups=len(record["groups"]), B=float(published.batch_size))
    other = {}
    for method in published.methods:
        if not (method.rule.sigma and method.rule.bounded):
            continue
        S = expected_sensitivity(method.rule, constants)
        step = S * record["rules"][method.name]["lr"][0]
        if abs(step - STEP) > 0.01 * STEP:
            other[method.name] = step
    return other


def _steps(other: Mapping[str, float]) -> list[str]:
    """Return a sentence for each rule with another expected largest step."""
    lines = []
    for rule, step in other.items():
        lines += [
            f"{rule} was trained at an expected largest step of {step:.3g}, and not {STEP:g}: an "
            "earlier version took its typical sensitivity to be smaller. It has not been run "
            "again.",
            "",
        ]
    return lines


def _claims(record: Mapping[str, Any], table: Table) -> list[str]:
    """Return the lines of the paper's claims of significance, tested on our seeds."""
    tested = [verdict for verdict in verdicts(record) if verdict.holds is not None]
    if not tested:
        return []
    held = sum(bool(verdict.holds) for verdict in tested)
    seeds = len(record["seeds"])
    where = "at the same expected largest step" if table.match else "with the published settings"
    lines = [
        f"**The paper's claims** (p < 0.05, one-sided Wilcoxon): {held} of {len(tested)} hold "
        f"{where}, in both groups.",
        f"With {seeds} seeds p is never below {statistics.smallest_p(seeds):.3g}.", "",
        _line(["better", "than", "in", "p", "holds"]), _line(["---", "---", "---", "---", "---"]),
    ]  # fmt: skip
    for claim, p, holds in tested:
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
