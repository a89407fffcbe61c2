"""A comparison as text at 80 columns: the table, and the verdicts in words.

It is drawn from results.json alone, like the page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evenclip.report.words import REFERENCE, count
from evenclip.terminal import escaped, in_line

__all__ = ["table"]

_NAME, _CELL = 20, 14
Results = Mapping[str, Any]


def table(results: Results, width: int = 80) -> str:
    """Format accuracy, cost and loss of every rule and group, and the verdicts.

    The best of the private rules is marked.
    """
    sections = [_head(results, width)]
    sections += [_block(results, *block, width) for block in _blocks(results)]
    sections += [_privacy(results), _verdicts(results, width), _warnings(results, width)]
    return escaped("\n\n".join(section for section in sections if section))


def _head(results: Results, width: int) -> str:
    least, most = min(results["n_train"]), max(results["n_train"])
    n = f"{least:,}" + (f" to {most:,}" if most != least else "")
    seeds = count(len(results["seeds"]), "seed")
    model = f", model {results['model']}" if results.get("model") else ""
    return _filled(
        f"{results['dataset']}: {seeds}, {n} training records{model}. "
        f"{results['protocol_in_words']}",
        width,
    )


# Heading, rule -> {"mean", "se"}, which mean is best.
Column = tuple[str, dict[str, Mapping[str, Any]], Callable[[Sequence[float]], float]]


def _blocks(results: Results) -> list[tuple[str, list[Column], int]]:
    """Return heading, columns and digits of each block of the table."""
    blocks = [
        ("accuracy, %", _by_group(results, "accuracy", max), 1),
        ("test loss", _by_group(results, "loss", min), 3),
    ]
    if REFERENCE in results["table"]:
        costs = _by_group(results, "privacy_cost", min) + _gap(results, "privacy_cost", "gap")
        blocks.insert(1, ("privacy cost, points", costs, 1))
        blocks[-1][1].extend(_gap(results, "excessive_risk", "risk gap"))
    return blocks


def _by_group(results: Results, metric: str, best: Callable[..., float]) -> list[Column]:
    """Return a column for each group; the reference has no cost."""
    rows = {
        rule: row[metric]
        for rule, row in results["table"].items()
        if not (metric == "privacy_cost" and rule == REFERENCE)
    }
    return [
        (_marked(results, group), {rule: cells[group] for rule, cells in rows.items()}, best)
        for group in results["groups"]
    ]


def _gap(results: Results, metric: str, heading: str) -> list[Column]:
    """Return the column of a gap; no column if there is one group only."""
    cells = {
        rule: row[f"{metric}_gap"]
        for rule, row in results["table"].items()
        if rule != REFERENCE and f"{metric}_gap" in row
    }
    return [(heading, cells, min)] if cells else []


def _marked(results: Results, group: str) -> str:
    return f"{group}†" if group in results["small_groups"] else group


def _block(results: Results, heading: str, columns: list[Column], digits: int, width: int) -> str:
    """Format one block; columns that do not fit continue below."""
    fit = max(1, (width - _NAME) // _CELL)
    lines = []
    for start in range(0, len(columns), fit):
        some = columns[start : start + fit]
        lines.append(
            f"{heading if not start else '':{_NAME}}"
            + "".join(f"{_short(name):>{_CELL}}" for name, _, _ in some)
        )
        for rule in results["table"]:
            cells = [_cell(rule, values, best, digits) for _, values, best in some]
            if any(cells):
                lines.append(
                    f"  {in_line(rule):{_NAME - 2}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)
                )
    return "\n".join(lines)


def _short(name: str) -> str:
    name = in_line(name)
    return name if len(name) < _CELL else name[: _CELL - 2] + "…"


def _cell(
    rule: str, cells: Mapping[str, Mapping[str, Any]], best: Callable[..., float], digits: int
) -> str:
    """Format mean ± standard error, with a star for the best of the private rules."""
    if rule not in cells:
        return ""
    mean, se = cells[rule]["mean"], cells[rule]["se"]
    if mean is None:
        return "–"
    shown = f"{mean:.{digits}f}" + ("" if se is None else f" ±{se:.{digits}f}")
    private = [
        cell["mean"]
        for name, cell in cells.items()
        if name != REFERENCE and cell["mean"] is not None
    ]
    star = len(private) > 1 and rule != REFERENCE and best(private) == mean
    return shown + ("*" if star else " ")


def _privacy(results: Results) -> str:
    """Format ε, soundness and learning rate of every rule."""
    from evenclip.mechanism.accounting import rounded_up

    lines = [f"{'privacy':{_NAME}}{'ε PLD':>7}{'ε RDP':>7}{'δ':>6}{'lr':>6}  soundness"]
    for rule, privacy in results["privacy"].items():
        pld, rdp = (rounded_up(privacy[name]) for name in ("epsilon_pld", "epsilon_rdp"))
        delta = "–" if privacy["delta"] is None else f"{privacy['delta']:.0e}"
        rate = _rate(results["settings"][rule]["lr"])
        lines.append(
            f"  {in_line(rule):{_NAME - 2}}{pld:>7}{rdp:>7}{delta:>6}{rate:>6}  "
            f"{privacy['soundness']}"
        )
    return "\n".join(lines)


def _rate(rates: Sequence[float]) -> str:
    """Format the learning rate; "var." if it varies between seeds."""
    return f"{rates[0]:.2g}" if len(set(rates)) == 1 else "var."


def _verdicts(results: Results, width: int) -> str:
    """Describe what the seeds show about the gaps."""
    verdicts = results["verdict"]
    if not verdicts:
        return ""
    lines = ["Gap in privacy cost between the groups, in points, against dpsgd's, by seed:"]
    for rule, verdict in verdicts.items():
        p = "" if verdict["p"] is None else f"; p = {_probability(verdict['p'])}"
        lines.append(_filled(f"{rule}: {verdict['reads']}{p}", width, first="  ", others="    "))
    ranks = ", ".join(
        f"{rule} {_probability(verdict['p_rank'])}"
        for rule, verdict in verdicts.items()
        if verdict["p_rank"] is not None
    )
    says = []
    if any("(" in verdict["reads"] for verdict in verdicts.values()):
        says.append("Brackets hold 95 % intervals.")
    if any(verdict["p"] is not None for verdict in verdicts.values()):
        says.append("p is by paired t test.")
    if ranks:
        says.append(f"One-sided signed-rank p: {ranks}.")
    if says:
        says.append("All p are corrected for the number of rules (Holm).")
        lines.append(_filled(" ".join(says), width, first="  ", others="  "))
    return "\n".join(lines)


def _probability(p: float) -> str:
    """Format a p-value with three decimals."""
    return "below 0.001" if p < 0.001 else f"{p:.3f}"


def _warnings(results: Results, width: int) -> str:
    """Format the notes and warnings."""
    small, pair, groups = results["small_groups"], results["pair"], results["groups"]
    lines = []
    if small:
        out = pair is None and len(groups) - len(small) > 1
        what = "left out of gaps" if out else "but included in gaps"
        lines.append(f"† too small to judge, {what}: {', '.join(small)}.")
    lines += [note for note in results["notes"] if not note.startswith("Too small to judge")]
    if results["not_covered_by_epsilon"]:
        accesses = "; ".join(_clause(text) for text in results["not_covered_by_epsilon"])
        lines.append(f"Not covered by ε: {accesses}.")
    if pair is not None and len(groups) > 2:
        lines.append(f"Gaps are those between {pair[0]} and {pair[1]}.")
    lines.append(
        "* best of the private rules. The group figures are measured on test data and are not "
        "differentially private."
    )
    return "\n".join(_filled(line, width) for line in lines)


def _filled(text: str, width: int, first: str = "", others: str = "") -> str:
    """Wrap a text, but not within a name such as dpsgd-global; indent its lines."""
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
    )


def _clause(sentence: str) -> str:
    """Turn a sentence into a clause of another."""
    return sentence[:1].lower() + sentence[1:].rstrip(".")
