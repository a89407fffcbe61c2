"""The next draws of a run as ledger entries: those to write ahead, and those it declares."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from evenclip.mechanism import Ledger, Mechanism
from evenclip.mechanism.entry import Entry, entry_of
from evenclip.mechanism.rounding import TAU
from evenclip.rules import NO_EPSILON
from evenclip.training.journal import Declaration

if TYPE_CHECKING:
    from evenclip.training.run import Run

__all__ = ["ahead", "declaration", "place_draw"]


def declaration(run: Run) -> Declaration:
    """Return what a run declares at its next draw."""
    rule, steps = run.settings.rule, run.settings.steps
    left = ahead(run, steps - run.t) if steps > run.t else Ledger()
    why = rule.why if rule.soundness == NO_EPSILON else None
    return Declaration(run.run_id, steps, run.first_steps, left, why)


def ahead(run: Run, steps: int) -> Ledger:
    """Return the next steps, one draw for each; of noise that varies, only unwritten draws."""
    if not run.mechanism.varies:
        return Ledger([replace(place_draw(run, run.mechanism.at(run.t), 0), steps=steps)])
    entries, written = Ledger(), run.ledger.end_of(run.run_id)
    for i in range(max(0, written - run.drawn), steps):
        entries.add(place_draw(run, run.mechanism.at(run.t + i), i))
    return entries


def place_draw(run: Run, mechanism: Mechanism, i: int) -> Entry:
    """Return the ledger's entry of the draw after i others, of a step by this mechanism."""
    multipliers, q = mechanism.multipliers, run.batches.q
    return entry_of(
        q,
        multipliers,
        sizes=((name, run.sizes[name]) for name in multipliers),
        tau=0.0 if q is None or q == 1 else TAU,
        run=run.run_id,
        first=run.drawn + i,
        parent=run.parent,
    )
