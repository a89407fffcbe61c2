"""The charts of the page, drawn from results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evenclip.audit.statistics import student
from evenclip.report import charts
from evenclip.report.charts import Course, Dot
from evenclip.report.markup import text
from evenclip.report.words import REFERENCE, display

__all__ = ["pictures"]


def pictures(results: Mapping[str, Any]) -> str:
    """Return the section with all charts."""
    groups = list(results["groups"])
    shown = (
        [k for k, _ in enumerate(groups)] if len(groups) <= charts.MOST_GROUPS else _pair(results)
    )
    names = [groups[k] for k in shown]
    less = (
        ""
        if len(shown) == len(groups)
        else f"<p>Of {len(groups)} groups these are drawn: {text(', '.join(names))}.</p>"
    )
    accuracy = _dots(results, "accuracy", names, "Accuracy by group", "accuracy on test records, %")
    costs = _dots(
        results, "privacy_cost", names, "Privacy cost by group", "points of accuracy lost"
    )
    losses = _courses(results, "loss", shown, "Training loss by group and epoch")
    norms = _courses(
        results, "gradient_norm", shown, "Mean length of a record's gradient by group and epoch"
    )
    drawn = (
        ("Accuracy by group", accuracy),
        ("Privacy cost by group", costs),
        ("Training loss by group", losses),
        ("Length of gradients by group", norms),
    )
    figures = "".join(_figure(title, svg) for title, svg in drawn if svg)
    of_rules = "".join(_figure(*figure) for figure in _of_rules(results))
    return (
        '<section aria-labelledby="pictures"><h2 id="pictures">Pictures</h2>'
        f"{less}{charts.legend(names)}{figures}{of_rules}{_risk(results, shown)}</section>"
    )


def _pair(results: Mapping[str, Any]) -> list[int]:
    """Return the groups to draw if there are too many."""
    wanted = results["pair"] or results["groups"][: charts.MOST_GROUPS]
    return [results["groups"].index(group) for group in wanted]


def _figure(title: str, svg: str, note: str = "") -> str:
    said = f"<p>{text(note)}</p>" if note else ""
    return f"<figure><figcaption>{text(title)}</figcaption>{svg}{said}</figure>"


def _dots(
    results: Mapping[str, Any], metric: str, names: Sequence[str], title: str, unit: str
) -> str:
    rows = []
    for rule, row in results["table"].items():
        if metric not in row or (metric == "privacy_cost" and rule == REFERENCE):
            continue
        least = 0.0 if metric == "accuracy" else -100.0
        rows.append(
            (
                display(rule),
                [_dot(row[metric].get(name), len(results["seeds"]), least) for name in names],
            )
        )
    bars = any(dot.low is not None for _, dots in rows for dot in dots)
    describes = f"One row for each rule, one marker for each of {', '.join(names)}" + (
        ", with 95 % intervals over seeds." if bars else "; too few seeds for intervals."
    )
    note = "bars: 95 % intervals over seeds" if bars else "no intervals below three seeds"
    return charts.dots(title, describes, f"{unit}; {note}", rows)


def _dot(cell: Mapping[str, Any] | None, seeds: int, least: float) -> Dot:
    """Return the mean with Student's interval, cut to possible values; none below three seeds."""
    if cell is None or cell["mean"] is None:
        return Dot(None, None, None)
    if cell["se"] is None or seeds < 3:
        return Dot(cell["mean"], None, None)
    half = student(seeds - 1) * cell["se"]
    return Dot(cell["mean"], max(least, cell["mean"] - half), min(100.0, cell["mean"] + half))


def _courses(results: Mapping[str, Any], name: str, groups: Sequence[int], title: str) -> str:
    panels = [
        Course(display(rule), [[epoch[k] for epoch in course[name]] for k in groups])
        for rule, course in results["course"].items()
        if course.get(name)
    ]
    describes = (
        "A panel for each rule, a line for each group, mean over seeds; the number of the "
        "epoch to the right."
    )
    return charts.courses(title, describes, "epoch", panels)


def _of_rules(results: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the charts that concern a rule, not a group: title, chart, note."""
    clipped = [
        Course(display(rule), [[None if v is None else 100 * v for v in course["clip_fraction"]]])
        for rule, course in results["course"].items()
        if course.get("clip_fraction") and any(course["clip_fraction"])
    ]
    if clipped:
        yield (
            "Records whose gradient was held back, %",
            charts.courses(
                "Share of records whose gradient was held back",
                "By rule and epoch.",
                "epoch",
                clipped,
            ),
            "Held back more than the others: clipped, or left out.",
        )
    states = [
        (rule, course["state"]) for rule, course in results["course"].items()
        if course.get("state") and course["state"][0] not in (None, [])
    ]  # fmt: skip
    for rule, state in states:
        lines = (
            [list(line) for line in zip(*state, strict=True)]
            if isinstance(state[0], list)
            else [state]
        )
        if len(lines) == 1:
            yield (
                f"Z of {display(rule)}",
                charts.courses(
                    f"Z of {display(rule)}", "By epoch.", "epoch", [Course(display(rule), lines)]
                ),
                "",
            )
        elif len(lines) == len(results["groups"]) <= charts.MOST_GROUPS:
            yield (
                f"Bounds of {display(rule)} by group",
                charts.courses(
                    f"Bounds of {display(rule)} by group",
                    "By epoch.",
                    "epoch",
                    [Course("C_k", lines)],
                ),
                "",
            )


def _risk(results: Mapping[str, Any], groups: Sequence[int]) -> str:
    """Draw what clipping's direction and magnitude cost each group, if measured."""
    risk = results.get("risk")
    if not risk:
        return ""
    figures = ""
    for name, title in (("dir", "Risk by direction"), ("mag", "Risk by magnitude")):
        panels = [
            Course(display(rule), [[look[name][k] for look in looks] for k in groups])
            for rule, looks in risk.items()
        ]
        svg = charts.courses(
            title, "A panel for each rule, a line for each group, over training.", "look", panels
        )
        figures += _figure(title, svg, _RISKS[name])
    return figures


_RISKS = {
    "dir": "Change of the group's loss in one step because clipping turned the step, to second "
    "order.",
    "mag": "Change of the group's loss in one step because clipping shortened the step. The run of "
    "the first seed, measured about 20 times.",
}
