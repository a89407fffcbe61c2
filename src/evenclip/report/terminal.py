"""A comparison as text at 80 columns: the table, and the verdict in words."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evenclip.audit import statistics
from evenclip.report.words import REFERENCE

if TYPE_CHECKING:
    from evenclip.comparison import Comparison, Outcome

__all__ = ["table"]

_NAME, _CELL = 20, 14
Best = Callable[[Sequence[float]], float]


def table(comparison: Comparison, width: int = 80) -> str:
    """Format accuracy, cost and loss of every rule and group, and the verdict.

    The best of the private rules is marked.
    """
    sections = [_head(comparison, width)]
    sections += [_block(comparison, *block, width) for block in _blocks(comparison)]
    sections += [_privacy(comparison), *_verdict(comparison, width), _warnings(comparison, width)]
    return "\n\n".join(section for section in sections if section)


def _head(comparison: Comparison, width: int) -> str:
    seeds = f"{len(comparison.seeds)} seed{'s' if len(comparison.seeds) > 1 else ''}"
    n = f"{min(comparison.n):,}" + (
        f" to {max(comparison.n):,}" if min(comparison.n) != max(comparison.n) else ""
    )
    return textwrap.fill(
        f"{comparison.dataset}: {seeds}, {n} training records. {comparison.says}", width
    )


# Heading, rule -> values by seed, which value is best.
Column = tuple[str, dict[str, NDArray[np.float64]], Best | None]


def _blocks(comparison: Comparison) -> list[tuple[str, list[Column], int]]:
    """Return heading, columns and digits of each block of the table."""
    names = [o.name for o in comparison.outcomes]
    blocks = []
    wanted: list[tuple[str, str, Best, int]] = [
        ("accuracy, %", "accuracy", max, 1),
        ("test loss", "loss", min, 3),
    ]
    for heading, metric, best, digits in wanted:
        columns: list[Column] = [
            (
                _marked(comparison, group),
                {o.name: o.metrics[metric][:, k] for o in comparison.outcomes},
                best,
            )
            for k, group in enumerate(comparison.groups)
        ]
        blocks.append((heading, columns, digits))
    if comparison.reference is not None:
        private = [name for name in names if name != comparison.reference.name]
        costs = {name: comparison.privacy_cost(name) for name in private}
        columns = [
            (
                _marked(comparison, group),
                {name: values[:, k] for name, values in costs.items()},
                min,
            )
            for k, group in enumerate(comparison.groups)
        ]
        columns.append(
            ("gap", {name: comparison.gap(values) for name, values in costs.items()}, min)
        )
        blocks.insert(1, ("privacy cost, points", columns, 1))
        risks = {name: comparison.gap(comparison.excessive_risk(name)) for name in private}
        blocks[-1][1].append(("risk gap", risks, min))
    return blocks


def _marked(comparison: Comparison, group: str) -> str:
    return f"{group}†" if group in comparison.small else group


def _block(
    comparison: Comparison, heading: str, columns: list[Column], digits: int, width: int
) -> str:
    """Format one block; columns that do not fit continue below."""
    fit = max(1, (width - _NAME) // _CELL)
    lines = []
    for start in range(0, len(columns), fit):
        some = columns[start : start + fit]
        lines.append(
            f"{heading if not start else '':{_NAME}}"
            + "".join(f"{_short(name):>{_CELL}}" for name, _, _ in some)
        )
        for outcome in comparison.outcomes:
            cells = [_cell(outcome, values, best, digits) for _, values, best in some]
            if any(cells):
                lines.append(
                    f"  {outcome.name:{_NAME - 2}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)
                )
    return "\n".join(lines)


def _short(name: str) -> str:
    return name if len(name) < _CELL else name[: _CELL - 2] + "…"


def _cell(
    outcome: Outcome, values: dict[str, NDArray[np.float64]], best: Best | None, digits: int
) -> str:
    """Format mean ± standard error, with a star for the best of the private rules."""
    if outcome.name not in values:
        return ""
    own = values[outcome.name]
    mean, se = statistics.mean_se(own)
    if mean is None or bool(np.isnan(own).any()):
        return "–"
    shown = f"{mean:.{digits}f}" + ("" if se is None else f" ±{se:.{digits}f}")
    private = [
        float(np.mean(v))
        for name, v in values.items()
        if name != REFERENCE and not np.isnan(v).any()
    ]
    star = (
        best is not None
        and len(private) > 1
        and outcome.name != REFERENCE
        and best(private) == float(np.mean(own))
    )
    return shown + ("*" if star else " ")


def _privacy(comparison: Comparison) -> str:
    """Format ε, soundness and learning rate of every rule."""
    from evenclip.mechanism.accounting import rounded_up

    lines = [f"{'privacy':{_NAME}}{'ε PLD':>7}{'ε RDP':>7}{'δ':>6}{'lr':>6}  soundness"]
    for o in comparison.outcomes:
        pld, rdp = (
            ("none" if e is None else rounded_up(e)) for e in (o.epsilon["pld"], o.epsilon["rdp"])
        )
        delta = f"{o.delta:.0e}" if o.epsilon["pld"] is not None else "–"
        lines.append(
            f"  {o.name:{_NAME - 2}}{pld:>7}{rdp:>7}{delta:>6}{_rate(o):>6}  {o.soundness}"
        )
    return "\n".join(lines)


def _rate(outcome: Outcome) -> str:
    """Format the learning rate; "var." if it varies between seeds."""
    return f"{outcome.lr[0]:.2g}" if len(set(outcome.lr)) == 1 else "var."


def _verdict(comparison: Comparison, width: int) -> list[str]:
    """Describe what the seeds show about the gaps."""
    if not comparison.verdicts:
        return []
    lines = [
        textwrap.fill(
            "Gap in privacy cost between the groups, in points, against dpsgd's, by seed:", width
        )
    ]
    for name, pair in comparison.verdicts.items():
        p = "" if pair.p is None else f"; p = {_probability(pair.p)}"
        lines.append(
            textwrap.fill(
                f"{name}: {pair.reads}{p}", width, initial_indent="  ", subsequent_indent="    "
            )
        )
    ranks = ", ".join(
        f"{name} {_probability(pair.p_rank)}"
        for name, pair in comparison.verdicts.items()
        if pair.p_rank is not None
    )
    says = (
        "In brackets 95 % intervals; p by paired t test, corrected for the number of rules "
        f"(Holm). One-sided signed-rank p, corrected alike: {ranks or 'none'}."
    )
    lines.append(textwrap.fill(says, width, initial_indent="  ", subsequent_indent="  "))
    return ["\n".join(lines)]


def _probability(p: float) -> str:
    """Format a p-value with three decimals."""
    return "below 0.001" if p < 0.001 else f"{p:.3f}"


def _warnings(comparison: Comparison, width: int) -> str:
    """Format the notes and warnings."""
    lines = []
    if comparison.small:
        out = comparison.pair is None and len(comparison.groups) - len(comparison.small) > 1
        what = "left out of gaps" if out else "but included in gaps"
        lines.append(f"† too small to judge, {what}: {', '.join(comparison.small)}.")
    lines += [note for note in comparison.notes if not note.startswith("Too small to judge")]
    if comparison.uncovered:
        lines.append(
            f"Not covered by ε: {'; '.join(_clause(text) for text in comparison.uncovered)}."
        )
    if comparison.pair is not None and len(comparison.groups) > 2:
        lines.append(f"Gaps are those between {comparison.pair[0]} and {comparison.pair[1]}.")
    lines.append(
        "* best of the private rules. The group figures are measured on test data and are not "
        "differentially private."
    )
    return "\n".join(textwrap.fill(line, width) for line in lines)


def _clause(sentence: str) -> str:
    """Turn a sentence into a clause of another."""
    return sentence[:1].lower() + sentence[1:].rstrip(".")
