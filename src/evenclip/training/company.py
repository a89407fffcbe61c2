"""Blocks of one fixed size for a run, and what they do for the independence of samples."""

from __future__ import annotations

from collections.abc import Callable

from evenclip.gradients import AnyTape, Tape
from evenclip.gradients.company import same_in_any_company
from evenclip.mechanism.settings import Settings
from evenclip.training.config import Performance
from evenclip.training.passes import Chunk

__all__ = ["fix_company"]

_SAME = (
    "samples pass in blocks of {rows}, padded; before training, the numbers of the samples of one "
    "block had the same bits in another order and in other company"
)
_DIFFERENT = (
    "samples pass in blocks of {rows}, padded, but before training the last bits of a sample's "
    "numbers changed with the other samples of its block; no bound on that is in ε"
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
    some: Callable[[int], Chunk] | None,
) -> str:
    """Fix the size of the blocks that pass at once; return a sentence for the privacy report.

    A compiled step, a tape of the rule's own and a model without layers take batches of any size.

    Args:
        tape: the tape of the run.
        settings: constants of the run.
        performance: how the run is computed.
        world: number of processes that share a batch.
        some: returns that many arbitrary samples; None for a compiled step.
    """
    q, chunk = settings.q, performance.chunk
    if q is None or not isinstance(tape, Tape) or not settings.rule.bounded or some is None:
        return _NOT_FIXED
    mean = settings.B / world
    if chunk is not None:
        mean, tape.rows = min(mean, chunk), min(chunk, tape.rows or chunk)
    tape.fix_rows(q, mean)
    assert tape.rows is not None
    block = some(tape.rows)
    sentence = _SAME if same_in_any_company(tape, block.x, block.y) else _DIFFERENT
    return sentence.format(rows=tape.rows)
