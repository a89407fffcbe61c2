"""The tables of the page: accuracy, privacy cost, loss, and the verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenclip.report.markup import text, wide
from evenclip.report.words import REFERENCE, display, points

__all__ = ["tables"]

_BLOCKS = (
    ("accuracy", "Accuracy on test records, %", 1, max),
    (
        "privacy_cost",
        "Privacy cost, points of accuracy lost against the non-private reference",
        1,
        min,
    ),
    ("loss", "Loss on test records", 3, min),
)


def tables(results: Mapping[str, Any]) -> str:
    """Return the section with all tables."""
    blocks = "".join(_block(results, *block) for block in _BLOCKS)
    small = results["small_groups"]
    note = f"<p>† Too small to judge: {text(', '.join(small))}.</p>" if small else ""
    return (
        f'<section aria-labelledby="table"><h2 id="table">The table</h2>{blocks}'
        "<p>Mean ± standard error over seeds. Bold: the best of the private "
        f"rules.</p>{note}{_verdicts(results)}</section>"
    )


def _block(results: Mapping[str, Any], metric: str, caption: str, digits: int, best: Any) -> str:
    rows = {rule: row for rule, row in results["table"].items() if metric in row}
    if metric == "privacy_cost":
        rows = {rule: row for rule, row in rows.items() if rule != REFERENCE}
    if not rows:
        return ""
    columns: list[tuple[str, Any]] = [
        (group, lambda row, g=group: row[metric].get(g)) for group in results["groups"]
    ]
    if any(f"{metric}_gap" in row for row in rows.values()):
        columns.append(("gap", lambda row: row.get(f"{metric}_gap")))
    bests = [
        _best(results, [(rule, cell(row)) for rule, row in rows.items()], best)
        for _, cell in columns
    ]
    cells = [
        [
            _cell(cell(row), digits, strong=rule in best_rules)
            for (_, cell), best_rules in zip(columns, bests, strict=True)
        ]
        for rule, row in rows.items()
    ]  # [rule][group]
    names = [display(rule) for rule in rows]
    across = [_marked(results, name) for name, _ in columns]
    corner = "Rule"
    if len(across) > _ACROSS:  # too wide for the page: transpose
        names, across, corner = across, names, "Group"
        cells = [list(row) for row in zip(*cells, strict=True)]
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in across)
    body = "".join(
        f'<tr><th scope="row">{text(name)}</th>{"".join(row)}</tr>'
        for name, row in zip(names, cells, strict=True)
    )
    return wide(
        caption,
        f"<table><caption>{text(caption)}</caption>"
        f'<thead><tr><th scope="col">{corner}</th>{head}</tr></thead><tbody>{body}</tbody></table>',
    )


# Maximum number of group columns.
_ACROSS = 5


def _marked(results: Mapping[str, Any], name: str) -> str:
    return f"{name}†" if name in results["small_groups"] else name


def _best(results: Mapping[str, Any], cells: Sequence[tuple[str, Any]], best: Any) -> set[str]:
    """Return the private rules with the best mean; empty if all are equal."""
    private = {
        rule: cell["mean"]
        for rule, cell in cells
        if cell is not None
        and cell["mean"] is not None
        and results["privacy"][rule]["epsilon_pld"] is not None
    }
    if len(set(private.values())) < 2:
        return set()
    return {rule for rule, mean in private.items() if mean == best(private.values())}


def _cell(cell: Mapping[str, Any] | None, digits: int, *, strong: bool) -> str:
    if cell is None or cell["mean"] is None:
        return "<td>–</td>"
    shown = points(cell["mean"], digits) + (
        "" if cell["se"] is None else f" <span>± {points(cell['se'], digits)}</span>"
    )
    return f"<td>{f'<strong>{shown}</strong>' if strong else shown}</td>"


def _verdicts(results: Mapping[str, Any]) -> str:
    """Draw each rule's gap against DPSGD's: interval, p-values and verdict."""
    verdicts = results.get("verdict")
    if not verdicts:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{text(display(rule))}</th><td>{points(verdict["mean"])}</td>'
        f"<td>{_interval(verdict)}</td><td>{_probability(verdict.get('p'))}</td>"
        f"<td>{_probability(verdict.get('p_rank'))}</td><td>{text(_words(verdict))}</td></tr>"
        for rule, verdict in verdicts.items()
    )
    caption = "Gap of the privacy cost against DPSGD's, points, by seed"
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("Rule", "Difference", "95 % interval", "p, paired t", "p, signed rank", "")
    )
    return wide(
        caption,
        f"<table><caption>{text(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table>",
    ) + (
        "<p>Both p are corrected for the number of rules (Holm). The verdict is that of the t test "
        "and needs five seeds.</p>"
    )


def _interval(verdict: Mapping[str, Any]) -> str:
    """Format the interval of a verdict; a dash if there is none."""
    if verdict["low"] is None:
        return "–"
    return f"{points(verdict['low'])} to {points(verdict['high'])}"


def _probability(p: float | None) -> str:
    """Format a p-value."""
    return "–" if p is None else "&lt; 0.001" if p < 0.001 else f"{p:.3f}"


def _words(verdict: Mapping[str, Any]) -> str:
    """Return the verdict without its numbers, which stand beside it."""
    return str(verdict["reads"]).split(";")[0].split(" by ")[0]
