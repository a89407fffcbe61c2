"""The result of a training: the model, its privacy, and what was recorded.

Three kinds of value are kept apart: values that may be published (model, ledger, the rule's state,
the privacy report); values that only a checkpoint needs, which are secret
(`evenclip.training.checkpoint`); and recorded values of training samples (trace, records, and the
counts in `Result.private`), which are private.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from evenclip.data import Dataset
from evenclip.gradients.tape import Independence
from evenclip.mechanism import Ledger, statement
from evenclip.mechanism.settings import Settings
from evenclip.mechanism.statement import Facts
from evenclip.training.run import Run
from evenclip.training.trace import events

__all__ = ["Record", "Result", "result"]

PLANNED_ON_RECORDS = (
    "the choice of how gradients are computed, which was tried on a few records, because the model "
    "does not take artificial ones"
)

TESTED_ON_RECORDS = (
    "the test that samples do not influence each other, on a few records before training and on a "
    "batch of every epoch, which can only stop the training"
)
SENTENCES = {
    Independence.LAYERS: "every layer and the loss are torch's own, and compute each sample from "
    "that sample alone",
    Independence.CONSTRUCTION: "each sample passes through the model by itself, so its gradient is "
    "a function of that sample, public parameters and fresh random numbers",
    Independence.TESTED: "samples pass through the model together, and no test saw one of them "
    "change another's numbers, which does not prove that none does",
}
"""Why a sample's gradient does not depend on the others, as the privacy report says it."""

Record = dict[str, Any]  # what an observer returned, with the number of the step


@dataclass(frozen=True)
class Result:
    """A trained model, its privacy, and what was recorded during training.

    Attributes:
        model: the trained copy. May be published.
        settings: the public constants.
        ledger: the releases. May be published.
        state: the rule's final state: Z, or the C_k. May be published.
        trace: one row per epoch; see `evenclip.training.trace`. Private.
        records: what the observers returned, step by step. Private.
        facts: how the run was computed, as far as the privacy report states it.
    """

    model: nn.Module
    settings: Settings
    ledger: Ledger
    state: Tensor
    trace: list[dict[str, Any]] = field(repr=False)
    records: list[Record] = field(repr=False)
    facts: Facts = field(default=Facts(), repr=False)

    def epsilon(self, accountant: str = "pld", delta: float | None = None) -> float | None:
        """Return ε at δ for releasing the model and all public values; None if none is valid.

        A run that was stopped early has the ε of all declared steps.
        """
        return statement.epsilon(self.settings, self.ledger, accountant, delta, self.facts)

    @cached_property
    def privacy(self) -> dict[str, Any]:
        """The privacy report; `evenclip.mechanism.statement.paragraph` returns it as text.

        It may be published: nothing in it is a count of what happened in training.
        """
        return statement.report(self.settings, self.ledger, self.facts)

    @property
    def private(self) -> dict[str, int]:
        """How often batches were empty, gradients not finite and weights clamped. Private.

        See `evenclip.training.trace.events`.
        """
        return events(self.trace)


def result(run: Run, records: Sequence[Record] = ()) -> Result:
    """Close a run and return its result.

    Args:
        run: its model moves to the result; the run cannot be continued.
        records: what observers returned.
    """
    run.close()
    facts = Facts(
        tf32=run.performance.tf32 and run.device.type == "cuda",
        uncovered=(
            *(() if isinstance(run.data, Dataset) else run.data.uncovered),
            *((PLANNED_ON_RECORDS,) if run.needs_records else ()),
            *((TESTED_ON_RECORDS,) if run.independence is Independence.TESTED else ()),
        ),
        independence=_independence(run),
        company=run.company,
        rounding=run.mechanism.rounding,
        durable=run.durable,
        remaining=run.open_declarations.to_json(),
        first_steps=run.first_steps,
    )
    return Result(
        run.model,
        run.settings,
        run.ledger,
        run.state.cpu(),
        run.trace.rows,
        list(records),
        facts,
    )


def _independence(run: Run) -> str:
    """Return why samples are independent, and why no more than a test shows it."""
    sentence = f"{run.independence.value}: {SENTENCES[run.independence]}"
    reason = run.why_at_once
    return f"{sentence}; samples do not pass by themselves because {reason}" if reason else sentence
