"""Blocks of one fixed size for a run, and what they do for the independence of samples."""

from __future__ import annotations

from collections.abc import Callable

from evenclip.gradients import AnyTape, Tape
from evenclip.gradients.company import same_in_any_company
from evenclip.mechanism.rounding import covered_records, most_records, summed_at_once
from evenclip.mechanism.settings import Settings
from evenclip.training.config import Performance
from evenclip.training.passes import Chunk

__all__ = ["fix_company"]

_SAME = (
    "samples pass in blocks of {rows}, padded; before training, the numbers of the samples of an "
    "artificial block had the same bits in another order and in other company"
)
_DIFFERENT = (
    "samples pass in blocks of {rows}, padded, but before training the last bits of a sample's "
    "numbers changed with the other samples of its block; no bound on that is in ε"
)
_UNTESTED = (
    "samples pass in blocks of {rows}, padded; whether the last bits of a sample's numbers change "
    "with the other samples of its block was not tested, because the model does not take "
    "artificial records; no bound on that is in ε"
)
_NOT_FIXED = (
    "a batch of any size passes at once, so the last bits of a sample's numbers may change with "
    "the other samples of its batch; no bound on that is in ε"
)


def fix_company(
    tape: AnyTape,
    settings: Settings,
    performance: Performance,
    world: int,
    artificial: Callable[[int], Chunk] | None,
    *,
    compiled: bool,
) -> str:
    """Fix the size of the blocks that pass at once; return a sentence for the privacy report.

    A compiled step, a tape of the rule's own and a model without layers take batches of any size.

    Args:
        tape: the tape of the run.
        settings: constants of the run.
        performance: how the run is computed.
        world: number of processes that share a batch.
        artificial: returns that many artificial samples; None if the model does not take them.
        compiled: whether the step is compiled.
    """
    if isinstance(tape, Tape):
        tape.may_be_quick = not compiled  # a compiled step computes norms in one way only
    q, chunk = settings.q, performance.chunk
    if q is None or not isinstance(tape, Tape) or not settings.rule.bounded or compiled:
        return _NOT_FIXED
    mean = settings.B / world
    if chunk is not None:
        mean, tape.rows = min(mean, chunk), min(chunk, tape.rows or chunk)
    tape.fix_rows(q, mean)
    assert tape.rows is not None
    if tape.cancels:
        records = most_records(q, covered_records(q, settings.B))
        tape.rows = summed_at_once(records, tape.rows, ranks=world)
    if artificial is None:
        return _UNTESTED.format(rows=tape.rows)
    block = artificial(tape.rows)
    sentence = _SAME if same_in_any_company(tape, block.x, block.y) else _DIFFERENT
    return sentence.format(rows=tape.rows)
