"""The privacy statement on the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evenclip.report.markup import text, wide
from evenclip.report.words import REFERENCE, display

__all__ = ["statement"]

_FIELDS = (
    ("epsilon", "ε, by PLD"), ("epsilon_rdp", "ε, by RDP"),
    ("epsilon_without_amplification", "ε without amplification by sampling"), ("delta", "δ"),
    ("delta_times_n", "δ times the number of records"), ("soundness", "soundness of the method"),
    ("why_no_epsilon", "why there is no ε"), ("multipliers", "noise multipliers"),
    ("joint_multiplier", "joint noise multiplier"),
    ("sampler", "distance of the drawn noise from Gaussian noise"),
    ("bound_inflation", "noise added for the rounding of sums, as a share"),
    ("steps", "steps drawn"), ("declared_steps", "steps declared"),
    ("first_declared_steps", "steps declared at first"),
    ("reserved_steps", "steps reserved"), ("steps_note", "steps that ε covers"),
    ("q", "sampling rate q"),
    ("expected_batch_size", "expected batch size B"), ("divisor", "sums are divided by"),
    ("poisson_sampling", "Poisson sampling"),
    ("group_labels_entered_training", "group labels entered training"),
    ("bound_enforced", "the rule's bound is enforced"), ("precision", "precision"),
    ("independence", "independence of samples"), ("company", "samples in company"),
    ("random_generator", "random generator"),
    ("ledger_covers", "the ledger covers"),
    ("specification", "specification, SHA-256"),
)  # fmt: skip
_COMMON = (
    ("trust_model", "Trust model"),
    ("claim", "The claim is"),
    ("unit", "Unit of privacy"),
    ("neighbouring_relation", "Neighbouring data"),
    ("protected", "Protected"),
    ("not_protected", "Not protected"),
    ("not_covered", "Not covered by ε"),
    ("encoder", "Encoder"),
    ("accountant", "Accountant"),
    ("seed", "Seed"),
)


def statement(results: Mapping[str, Any]) -> str:
    """Return the section with the privacy statement; empty without a private rule."""
    statements = {rule: s for rule, s in results["statement"].items() if rule != REFERENCE}
    if not statements:
        return ""
    first = next(iter(statements.values()))
    common = "".join(
        f"<dt>{text(label)}</dt>"
        f"<dd>{_value(first[name], results if name == 'not_covered' else None)}</dd>"
        for name, label in _COMMON
        if first.get(name) is not None
    )
    head = "".join(f'<th scope="col">{text(display(rule))}</th>' for rule in statements)
    rows = ""
    for name, label in _FIELDS:
        if all(s.get(name) in (None, "", []) for s in statements.values()) and name != "epsilon":
            continue
        cells = "".join(f"<td>{_constant(name, _valid(s, name))}</td>" for s in statements.values())
        rows += f'<tr><th scope="row">{text(label)}</th>{cells}</tr>'
    return (
        '<section aria-labelledby="statement"><h2 id="statement">Privacy statement</h2>'
        f"<dl>{common}</dl>"
        + wide(
            "Constants of every rule",
            '<table class="words">'
            "<caption>Run of the first seed; results.json has the ε of all seeds.</caption>"
            f'<thead><tr><th scope="col">Constant</th>{head}</tr></thead><tbody>{rows}</tbody>'
            "</table>",
        )
        + "</section>"
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
        return text(", ".join(f"{name} {part}" for name, part in value.items()))
    if isinstance(value, str):
        return text(value)
    more = (
        []
        if results is None
        else [access.rstrip(".") for access in results.get("not_covered_by_epsilon", [])]
    )
    return f"<ul>{''.join(f'<li>{text(part)}</li>' for part in [*value, *more])}</ul>"


def _constant(name: str, value: Any) -> str:
    """Format a field of the statement; an ε is never rounded down."""
    from evenclip.mechanism.accounting import rounded_up
    from evenclip.mechanism.statement import span

    if value is None:
        return "none" if name.startswith("epsilon") else "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.startswith("epsilon") and isinstance(value, float):
        return rounded_up(value) if math.isfinite(value) else "∞"
    if isinstance(value, float):
        return text(f"{value:.6g}")
    if name == "joint_multiplier":
        return text(span(value))
    if isinstance(value, list):
        return text(", ".join(value)) or "–"
    if isinstance(value, Mapping):
        return text(", ".join(f"{key} {span(number, 4)}" for key, number in value.items())) or "–"
    return f"<code>{text(value[:16])}…</code>" if name == "specification" else text(value)
