"""report.html: a comparison as one self-contained page, without network access or scripts.

It has light, dark and print styles. It is drawn from results.json alone, in this order: answer,
table, charts, privacy statement, methods, settings.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from evenclip.report import charts, words
from evenclip.report.charts import Course, Dot
from evenclip.report.words import REFERENCE, display, points

__all__ = ["NEEDED", "page"]

NEEDED = (
    "dataset",
    "groups",
    "seeds",
    "protocol",
    "privacy",
    "table",
    "settings",
    "course",
    "statement",
)
"""Required keys of results.json."""

WARNING = (
    "The figures by group on this page are measured on test records, and losses, norms and risk "
    "on training records, without noise. They are not differentially private: share them only "
    "with people who may see the records."
)


def page(results: Mapping[str, Any]) -> str:
    """Return the page as HTML.

    Raises:
        ValueError: the results are not those of a comparison.
    """
    lacking = [name for name in NEEDED if name not in results]
    if lacking:
        raise ValueError(
            f"There is no {lacking[0]!r} in these results; make them again with `evenclip compare "
            "--out`."
        )
    title = f"What privacy costs each group: {results['dataset']}"
    sections = [
        _head(results, title),
        _table(results),
        _pictures(results),
        _statement(results),
        _methods(results),
        _settings(results),
    ]
    style = resources.files("evenclip.report").joinpath("page.css").read_text(encoding="utf-8")
    body = "".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_text(title)}</title><style>{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _unbroken(sentence: str) -> str:
    """Escape a sentence, and prevent line breaks within names of rules."""
    return re.sub(
        r"DPSGD(-[A-Za-z]+)+", lambda name: f'<span class="nb">{name[0]}</span>', _text(sentence)
    )


# --- the answer ---------------------------------------------------------------------------------


def _head(results: Mapping[str, Any], title: str) -> str:
    first, *more = words.answer(results)
    known = f"{min(results['n_train']):,}" + (
        f" to {max(results['n_train']):,}"
        if min(results["n_train"]) != max(results["n_train"])
        else ""
    )
    said = "".join(f"<p>{_text(sentence)}</p>" for sentence in more)
    not_said = "".join(f"<li>{_text(sentence)}</li>" for sentence in words.limits(results))
    return (
        f'<header><p class="what">{_text(title)}</p><h1>{_unbroken(first)}</h1>{said}'
        f"<p>{words.count(len(results['seeds']), 'seed')}, {known} training records.</p></header>"
        '<aside class="warning" role="note"><strong>Not differentially private.</strong> '
        f"{_text(WARNING)}</aside>"
        '<section aria-labelledby="limits"><h2 id="limits">What this does not '
        f"say</h2><ul>{not_said}</ul></section>"
    )


# --- the table ----------------------------------------------------------------------------------

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


def _table(results: Mapping[str, Any]) -> str:
    blocks = "".join(_block(results, *block) for block in _BLOCKS)
    small = results["small_groups"]
    note = f"<p>† Too small to judge: {_text(', '.join(small))}.</p>" if small else ""
    return (
        f'<section aria-labelledby="table"><h2 id="table">The table</h2>{blocks}'
        "<p>Mean ± standard error over seeds. Bold: the best of the private "
        f"rules.</p>{note}</section>"
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
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in across)
    body = "".join(
        f'<tr><th scope="row">{_text(name)}</th>{"".join(row)}</tr>'
        for name, row in zip(names, cells, strict=True)
    )
    return (
        f'<div class="wide" role="region" aria-label="{_text(caption)}" tabindex="0">'
        f"<table><caption>{_text(caption)}</caption>"
        f'<thead><tr><th scope="col">{corner}</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
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


# --- pictures -----------------------------------------------------------------------------------


def _pictures(results: Mapping[str, Any]) -> str:
    groups = list(results["groups"])
    shown = (
        [k for k, _ in enumerate(groups)] if len(groups) <= charts.MOST_GROUPS else _pair(results)
    )
    names = [groups[k] for k in shown]
    less = (
        ""
        if len(shown) == len(groups)
        else f"<p>Of {len(groups)} groups these are drawn: {_text(', '.join(names))}.</p>"
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
    said = f"<p>{_text(note)}</p>" if note else ""
    return f"<figure><figcaption>{_text(title)}</figcaption>{svg}{said}</figure>"


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
    describes = (
        f"One row for each rule, one marker for each of {', '.join(names)}, with 95 % "
        "intervals over seeds."
    )
    return charts.dots(title, describes, f"{unit}; bars: 95 % intervals over seeds", rows)


def _dot(cell: Mapping[str, Any] | None, seeds: int, least: float) -> Dot:
    """Return the mean with Student's interval, cut to possible values; none below three seeds."""
    from evenclip.audit.statistics import student

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


# --- the privacy statement ----------------------------------------------------------------------

_FIELDS = (
    ("epsilon", "ε, by PLD"), ("epsilon_rdp", "ε, by RDP"),
    ("epsilon_without_amplification", "ε without amplification by sampling"), ("delta", "δ"),
    ("delta_times_n", "δ times the number of records"), ("soundness", "soundness of the method"),
    ("why_no_epsilon", "why there is no ε"), ("multipliers", "noise multipliers"),
    ("joint_multiplier", "joint noise multiplier"), ("steps", "steps"), ("q", "sampling rate q"),
    ("expected_batch_size", "expected batch size B"), ("divisor", "sums are divided by"),
    ("poisson_sampling", "Poisson sampling"),
    ("group_labels_entered_training", "group labels entered training"),
    ("empty_batches", "empty batches"), ("non_finite_samples", "records without a finite gradient"),
    ("clamped_weights", "weights that had to be held to the bound"), ("precision", "precision"),
    ("specification", "specification, SHA-256"),
)  # fmt: skip
_COMMON = (
    ("trust_model", "Trust model"),
    ("unit", "Unit of privacy"),
    ("neighbouring_relation", "Neighbouring data"),
    ("protected", "Protected"),
    ("not_protected", "Not protected"),
    ("not_covered", "Not covered by ε"),
    ("accountant", "Accountant"),
    ("random_generator", "Random generator"),
    ("seed", "Seed"),
)


def _statement(results: Mapping[str, Any]) -> str:
    statements = {rule: s for rule, s in results["statement"].items() if rule != REFERENCE}
    if not statements:
        return ""
    first = next(iter(statements.values()))
    common = "".join(
        f"<dt>{_text(label)}</dt>"
        f"<dd>{_value(first[name], results if name == 'not_covered' else None)}</dd>"
        for name, label in _COMMON
        if first.get(name) is not None
    )
    head = "".join(f'<th scope="col">{_text(display(rule))}</th>' for rule in statements)
    rows = ""
    for name, label in _FIELDS:
        if all(s.get(name) in (None, "") for s in statements.values()) and name != "epsilon":
            continue
        cells = "".join(f"<td>{_constant(name, _valid(s, name))}</td>" for s in statements.values())
        rows += f'<tr><th scope="row">{_text(label)}</th>{cells}</tr>'
    return (
        '<section aria-labelledby="statement"><h2 id="statement">Privacy statement</h2>'
        f"<dl>{common}</dl>"
        '<div class="wide" role="region" aria-label="Constants of every rule" tabindex="0">'
        '<table class="words">'
        "<caption>Run of the first seed; results.json has the ε of all seeds.</caption>"
        f'<thead><tr><th scope="col">Constant</th>{head}</tr></thead><tbody>{rows}</tbody>'
        "</table></div></section>"
    )


def _valid(statement: Mapping[str, Any], name: str) -> Any:
    """Return a field of the statement; without an ε, δ has no meaning and is None."""
    return (
        None
        if name.startswith("delta") and statement.get("epsilon") is None
        else statement.get(name)
    )


def _value(value: Any, results: Mapping[str, Any] | None = None) -> str:
    if isinstance(value, Mapping):
        return _text(", ".join(f"{name} {part}" for name, part in value.items()))
    if isinstance(value, str):
        return _text(value)
    more = (
        []
        if results is None
        else [text.rstrip(".") for text in results.get("not_covered_by_epsilon", [])]
    )
    return f"<ul>{''.join(f'<li>{_text(part)}</li>' for part in [*value, *more])}</ul>"


def _constant(name: str, value: Any) -> str:
    """Format a field of the statement; an ε is never rounded down."""
    from evenclip.mechanism.accounting import rounded_up

    if value is None:
        return "none" if name.startswith("epsilon") else "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.startswith("epsilon") and isinstance(value, float):
        return rounded_up(value) if math.isfinite(value) else "∞"
    if isinstance(value, float):
        return _text(f"{value:.6g}")
    if isinstance(value, Mapping):
        return _text(", ".join(f"{key} {number:.4g}" for key, number in value.items())) or "–"
    return f"<code>{_text(value[:16])}…</code>" if name == "specification" else _text(value)


# --- methods and settings -----------------------------------------------------------------------


def _methods(results: Mapping[str, Any]) -> str:
    entries = ""
    for rule in results["table"]:
        statement = results["statement"].get(rule, {})
        sound, reference = results["privacy"][rule]["soundness"], statement.get("reference")
        why = statement.get("why_no_epsilon")
        method = words.METHODS.get(rule, "A rule of your own.")
        entries += (
            f"<dt>{_text(display(rule))}</dt><dd>{_text(method)} "
            f"<em>{_text(sound[:1].upper() + sound[1:])}{_text(f': {why}' if why else '')}.</em>"
            f"{f' <cite>{_text(reference)}</cite>' if reference else ''}</dd>"
        )
    return (
        '<section aria-labelledby="methods"><h2 id="methods">How each method works</h2>'
        f"<dl>{entries}</dl></section>"
    )


def _settings(results: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_text(display(rule))}</th>'
        f"<td><code>{_text(given['rule'])}</code></td>"
        f"<td>{_text(', '.join(f'{lr:g}' for lr in dict.fromkeys(given['lr'])))}</td></tr>"
        for rule, given in results["settings"].items()
    )
    versions: Mapping[str, Any] = next(
        (s.get("versions", {}) for s in results["statement"].values()), {}
    )
    notes = "".join(f"<li>{_text(note)}</li>" for note in results["notes"])
    command = results.get("command")
    made = f"<p>Made by</p><pre>{_text(command)}</pre>" if command else ""
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        '<section aria-labelledby="settings"><h2 id="settings">Settings</h2>'
        '<div class="wide" role="region" aria-label="Settings of every rule" tabindex="0">'
        '<table class="words"><thead><tr><th scope="col">Rule</th><th scope="col">Settings</th>'
        '<th scope="col">Learning rate</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{made}<p>{_text(said)}</p>"
        f"{f'<h3>Notes</h3><ul>{notes}</ul>' if notes else ''}</section>"
    )
