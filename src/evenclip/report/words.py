"""Sentences of a report: the answer, its interval, its limits, and how each method works."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evenclip.rules import DPSGD, RULES, NonPrivate

__all__ = ["BASELINE", "METHODS", "REFERENCE", "answer", "count", "display", "limits", "points"]

REFERENCE, BASELINE = NonPrivate.name, DPSGD.name

METHODS = {name: rule.summary for name, rule in RULES.items()}
"""Name of a rule -> how it works."""


def display(rule: str) -> str:
    """Return a rule's display name; the name itself for custom rules."""
    return RULES[rule].title if rule in RULES else rule


def points(value: float | None, digits: int = 1) -> str:
    """Format a number with a minus sign, not a hyphen; a dash if there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    shown = f"{value:.{digits}f}"
    return shown.replace("-", "−") if float(shown) else f"{0:.{digits}f}"


def answer(results: Mapping[str, Any]) -> list[str]:
    """Return the answer as a sentence, and a sentence about its certainty."""
    private = [
        rule for rule in results["table"] if results["privacy"][rule]["epsilon_pld"] is not None
    ]
    costs = {rule: _costs(results, rule) for rule in private}
    costs = {rule: known for rule, known in costs.items() if known}
    if not costs:
        return [_without_reference(results, private)]
    first = BASELINE if BASELINE in costs else next(iter(costs))
    others = [rule for rule in costs if rule != first and _gap(results, rule) is not None]
    best = min(others, key=lambda rule: _gap(results, rule) or 0.0, default=None)
    groups = _two(results, costs[first])
    named = [first] if best is None else [first, best]
    own = [f"{_called(group)} {points(costs[first][group])}" for group in groups]
    own[0] += " points of accuracy"
    clauses = [f"{display(first)} costs {' and '.join(own)}"]
    if best is not None:
        known = [points(costs[best].get(group)) for group in groups]
        clauses.append(f"{display(best)} costs {' and '.join(known)}")
    sentences = [f"At {_epsilons(results, named)}, {'; '.join(clauses)}."]
    verdict = results["verdict"].get(best) if best is not None and first == BASELINE else None
    if best is not None and verdict is not None:
        sentences.append(_verdict(results, best, verdict))
    return sentences


def _without_reference(results: Mapping[str, Any], private: Sequence[str]) -> str:
    if not private:
        return "No rule of this comparison has a valid ε, so there is no price of privacy to tell."
    return (
        f"{count(len(private), 'private rule')} on {results['dataset']}, without a reference "
        "to measure cost by."
    )


def _verdict(results: Mapping[str, Any], best: str, verdict: Mapping[str, Any]) -> str:
    reads, seeds = verdict["reads"], count(len(results["seeds"]), "seed")
    if reads == "no difference shown":
        return f"Between the gaps of {display(best)} and DPSGD no difference is shown with {seeds}."
    if verdict["low"] is None:
        return f"Whether the gap of {display(best)} differs from DPSGD's: {reads} ({seeds})."
    way = "smaller" if verdict["mean"] < 0 else "larger"
    if reads.startswith("no verdict"):
        return (
            f"With {seeds} there is no verdict: the gap between the groups is "
            f"{points(abs(verdict['mean']))} points {way} with {display(best)} than with DPSGD, "
            f"95\u00a0% interval of the difference {points(verdict['low'])} to "
            f"{points(verdict['high'])}. A verdict needs five seeds."
        )
    # The interval of a verdict does not contain 0.
    ends = sorted(abs(verdict[end]) for end in ("low", "high"))
    p = "p below 0.001" if verdict["p"] < 0.001 else f"p = {verdict['p']:.3f}"
    return (
        f"The gap between the groups is {points(abs(verdict['mean']))} points {way} with "
        f"{display(best)} than with DPSGD (95\u00a0% interval {points(ends[0])} to "
        f"{points(ends[1])}, {p} corrected for all rules, over {seeds})."
    )


def limits(results: Mapping[str, Any]) -> list[str]:
    """Return the limits of the answer, as sentences."""
    sentences = [results["protocol_in_words"]]
    if results["protocol"] not in ("matched", "given"):
        sentences.append(
            "Part of the difference between the rules is therefore how far they step, and not how "
            "they clip; the matched protocol separates the two."
        )
    seeds = count(len(results["seeds"]), "seed")
    sentences.append(
        f"The comparison uses one dataset and {seeds}. Intervals are over seeds (split, "
        "initialisation, batches and noise); they do not cover other data, models or settings."
    )
    return sentences


def _costs(results: Mapping[str, Any], rule: str) -> dict[str, float]:
    """Return group -> mean privacy cost, where it is known."""
    cells = results["table"][rule].get("privacy_cost", {})
    return {group: cell["mean"] for group, cell in cells.items() if cell["mean"] is not None}


def _gap(results: Mapping[str, Any], rule: str) -> float | None:
    cell = results["table"][rule].get("privacy_cost_gap")
    return None if cell is None else cell["mean"]


def _two(results: Mapping[str, Any], costs: Mapping[str, float]) -> list[str]:
    """Return the two groups to name: the pair, or those that pay least and most."""
    if results["pair"] is not None and all(group in costs for group in results["pair"]):
        return list(results["pair"])
    judged = [group for group in costs if group not in results["small_groups"]] or list(costs)
    if len(judged) <= 2:
        return judged
    ordered = sorted(judged, key=lambda group: costs[group])
    return [ordered[0], ordered[-1]]


def _called(group: str) -> str:
    """Return the name of a group, with "group" before a number."""
    return f"group {group}" if group[:1].isdigit() else group


def _epsilons(results: Mapping[str, Any], rules: Sequence[str]) -> str:
    """Format the ε of these rules: one value, or all if they differ."""
    from evenclip.mechanism.accounting import rounded_up

    shown = list(
        dict.fromkeys(rounded_up(results["privacy"][rule]["epsilon_pld"], 3) for rule in rules)
    )
    return "ε = " + " and ".join(shown)


def count(number: int, what: str) -> str:
    """Format a count with its noun, as in "1 seed" or "2 seeds"."""
    return f"{number} {what}{'' if number == 1 else 's'}"
