"""The privacy report as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["paragraph", "sentences", "span"]


def paragraph(report: Mapping[str, Any], width: int = 79) -> str:
    """Return the report as text, wrapped at `width` columns."""
    return "\n\n".join(textwrap.fill(text, width) for text in sentences(report))


def sentences(report: Mapping[str, Any]) -> list[str]:
    """Return the paragraphs of the report: the guarantee, what it rests on, and its limits."""
    labels = "used" if report["group_labels_entered_training"] else "did not use"
    limits = (
        f"The rule {labels} group labels (the features may still contain them). The seed is "
        f"{report['seed']}. Not covered by ε: {'; '.join(report['not_covered'])}. Not protected: "
        f"{', '.join(report['not_protected'])}."
    )
    if report["epsilon"] is not None:
        limits += f" Encoder: {report['encoder']}."
    return [_guarantee(report), *_conditions(report), limits]


def _guarantee(report: Mapping[str, Any]) -> str:
    """Return the guarantee of the report as text, or that there is none."""
    from evenclip.mechanism.accounting import rounded_up

    if report["epsilon"] is None:
        reason = f" ({report['why_no_epsilon']})" if report["why_no_epsilon"] else ""
        return (
            f"This model was trained by {report['method']} and has no valid ε{reason}: it promises "
            "no privacy to the records it was trained on."
        )
    unsampled = report["epsilon_without_amplification"]
    without_sampling = (
        "no ε would be valid" if unsampled is None else f"it would be {rounded_up(unsampled)}"
    )
    multipliers = ", ".join(f"{span(m)} ({name})" for name, m in report["multipliers"].items())
    return (
        f"This model was trained by {report['method']} ({report['soundness']}) and is (ε, "
        f"δ)-differentially private with ε = {rounded_up(report['epsilon'])} at δ = "
        f"{report['delta']:g} (by PLD; {rounded_up(report['epsilon_rdp'])} by RDP). "
        f"Without the amplification by Poisson sampling {without_sampling}. "
        f"Unit: {report['unit']}. Neighbours: {report['neighbouring_relation']}. "
        f"{report['steps']} steps at rate q = {report['q']:.6g}; noise multipliers {multipliers}, "
        f"jointly {span(report['joint_multiplier'], 4)}; sums divided by {report['divisor']}, "
        f"{report['expected_batch_size']:g}."
    )


def _conditions(report: Mapping[str, Any]) -> list[str]:
    """Return on what the guarantee rests, as one text; nothing without an ε."""
    if report["epsilon"] is None:
        return []
    sampler, enlarged = report["sampler"], report["bound_inflation"]
    texts = [
        report["steps_note"],
        f"The claim is {report['claim']}",
        f"The rule's bound is enforced {report['bound_enforced']}",
        f"Random numbers: {report['random_generator']}",
        f"ε includes {2 * sampler['epsilon_s']:.1e} for the distance of the {sampler['pairs']} "
        "pairs of drawn numbers from Gaussian noise"
        if sampler["pairs"]
        else None,
        None
        if enlarged is None
        else f"The noise is enlarged by at most {100 * enlarged:.2g} % for the rounding of sums",
        report["independence"],
        report["company"],
        f"The ledger covers {report['ledger_covers']}",
    ]
    return [" ".join(f"{_capital(text)}." for text in texts if text)]


def _capital(text: str) -> str:
    """Return a text with a capital letter; ε stays small."""
    return f"{text[0].upper()}{text[1:]}" if text[0].isascii() else text


def span(value: float | Sequence[float] | None, digits: int = 6) -> str:
    """Format a multiplier of the report: a value, or the least and the most of all steps.

    >>> span(1.0), span([1.0, 1.18])
    ('1', '1 to 1.18')
    """
    if value is None:
        return "none"
    ends = value if isinstance(value, Sequence) else [value]
    return " to ".join(f"{end:.{digits}g}" for end in ends)
