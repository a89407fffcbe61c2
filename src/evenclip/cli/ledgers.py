"""Ledgers in files: those of `evenclip epsilon A B`, and what is known about each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenclip.mechanism.ledger import Ledger

__all__ = ["Held", "delta_of", "notes", "read"]

_LARGEST = 2.0**53
_EXPECTED = "give a privacy report, a checkpoint's published.json, a stored result or a ledger"


@dataclass(frozen=True)
class Held:
    """What a file holds.

    Attributes:
        path: the file.
        ledger: its ledger.
        delta: its δ; None if it states none.
        declared: its number of declared steps; None if it states none.
        why: why its rule has no valid ε; None if that is not known to be so.
    """

    path: Path
    ledger: Ledger
    delta: float | None
    declared: int | None
    why: str | None


def read(path: Path) -> Held:
    """Read a privacy report, a checkpoint's published.json, a stored result, or a ledger.

    Raises:
        ValueError: the file cannot be read, or holds no ledger; the message names it.
    """
    from evenclip.mechanism.ledger import Ledger

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {_EXPECTED}.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); {_EXPECTED}.") from error
    facts: dict[str, Any] = values if isinstance(values, dict) else {"ledger": values}
    if not isinstance(facts.get("ledger"), list):
        raise ValueError(f"{path} holds no ledger; {_EXPECTED}.")
    try:
        ledger = Ledger.from_json(facts["ledger"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    settings = facts["settings"] if isinstance(facts.get("settings"), dict) else {}
    delta = _number(facts.get("delta", settings.get("delta")))
    declared = _number(facts.get("declared_steps", settings.get("steps")))
    return Held(
        path,
        ledger,
        delta if delta is not None and 0 < delta < 1 else None,
        None if declared is None else int(declared),
        _why(facts, settings),
    )


def delta_of(held: Sequence[Held]) -> float:
    """Return the δ that the files state; raise if it is not one."""
    stated = sorted({one.delta for one in held if one.delta is not None})
    if not stated:
        raise ValueError("The files state no δ; give --delta.")
    if len(stated) > 1:
        which = ", ".join(f"{delta:g}" for delta in stated)
        raise ValueError(f"The files state different values of δ ({which}); give --delta.")
    return stated[0]


def notes(held: Sequence[Held]) -> list[str]:
    """Return what a reader of the joint ε has to know about the files."""
    said = []
    for one in held:
        steps = one.ledger.steps
        if one.declared is not None and steps < one.declared:
            said.append(
                f"{one.path} declares {one.declared} steps and holds {steps}; if that run was "
                "stopped because of its results, it costs all declared steps, as its own report "
                "states."
            )
        if any(not entry.run for entry in one.ledger.entries):
            said.append(
                f"{one.path} has steps without a run id; they count in every file that has them."
            )
        if any(not entry.sizes for entry in one.ledger.entries):
            said.append(f"{one.path} has steps without sizes; their noise is taken as Gaussian.")
    return said


def _number(value: Any) -> float | None:
    """Return a finite number of JSON; None for anything else."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and abs(value) < _LARGEST else None


def _why(facts: dict[str, Any], settings: dict[str, Any]) -> str | None:
    """Return why the rule of a file has no valid ε, if its ledger does not show it."""
    from evenclip.rules import NO_EPSILON, RULES

    if facts.get("soundness") == NO_EPSILON:
        return str(facts.get("why_no_epsilon") or facts.get("method"))
    rule = settings.get("rule")
    name = rule.get("name") if isinstance(rule, dict) else None
    known = RULES.get(name) if isinstance(name, str) else None
    return known.why if known is not None and known.soundness == NO_EPSILON else None
