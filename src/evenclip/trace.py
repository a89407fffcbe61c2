"""What training looked like, epoch by epoch and group by group. Private: these figures carry no noise.

One row per epoch:

    epoch, steps, samples         how far, and how many samples were seen
    loss, gradient_norm           mean ℓ_i and mean ‖g_i‖ of each group (None for a group that was not seen)
    group_samples                 how many samples of each group were seen
    clip_fraction                 share of samples whose weight is below that of a zero gradient
    state                         the rule's public state at the end of the epoch: Z, or the C_k
    sensitivity                   S of the last step
    non_finite, empty_batches     samples that contributed nothing for lack of a finite gradient; batches without any
    sample clamped                       weights that broke the rule's own bound and were held to it
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from evenclip.rules import Guarded
from evenclip.step import Step

__all__ = ["Trace"]

AT_ONCE = 2**20  # samples that are added up together, so that an epoch of any length fits in memory

Row = dict[str, Any]
# losses, norms, weights, group, each [sample]; clamped (None: nowhere), finite (None: everywhere); the step's `now`
_Columns = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]


class Trace:
    """Rows of finished epochs, and the steps of the one under way."""

    def __init__(self, guard: Guarded, groups: int) -> None:
        self.rows: list[Row] = []
        self._guard, self._groups = guard, groups
        self._open: list[_Columns] = []
        self._held = 0  # samples in there
        self._sums: list[Row] = []  # of the steps of this epoch that are added up already

    def add(self, step: Step) -> None:
        """One step: cheap, because the arithmetic waits for the end of the epoch, or for very many samples."""
        self.note(step.losses, step.norms, step.weights, step.group, step.clamped, step.finite, step.public.now)

    def note(
        self, losses: Tensor, norms: Tensor, weights: Tensor, group: Tensor, clamped: Tensor | None,
        finite: Tensor | None, now: Tensor,
    ) -> None:  # fmt: skip
        """The same by its columns."""
        self._open.append((losses, norms, weights, group, clamped, finite, now))
        self._held += losses.shape[0]
        if self._held >= AT_ONCE:
            self._add_up()

    def _add_up(self) -> None:
        self._sums.append(self._summed(self._open))
        self._open, self._held = [], 0

    def close(self, state: Tensor, sensitivity: float) -> Row:
        """The epoch is over: its row."""
        if self._open:
            self._add_up()
        row = {"epoch": len(self.rows) + 1, **_row(self._sums)}
        row |= {"state": state.tolist(), "sensitivity": sensitivity}
        self._sums = []
        self.rows.append(row)
        return row

    def _summed(self, steps: Sequence[_Columns]) -> Row:
        """Sums over some steps, by group."""
        sizes = torch.tensor([step[0].shape[0] for step in steps])
        columns = zip(*(step[:3] for step in steps), strict=True)
        losses, norms, weights = (_joined(column) for column in columns)
        several = self._groups > 1
        group = _joined([step[3] for step in steps]) if several else torch.zeros(len(losses), dtype=torch.int64)
        now = _joined([step[6].unsqueeze(0) for step in steps])  # [step, ...]
        resting = self._guard.resting(now, self._groups)  # [step, group]
        own = resting.repeat_interleave(sizes, dim=0)  # of each sample's step  [sample, group]
        clipped = weights < (own.gather(1, group.unsqueeze(1))[:, 0] if several else own[:, 0])
        seen, finite = len(losses), _finite(steps)
        if finite is not None:
            losses, norms, clipped, group = losses[finite], norms[finite], clipped[finite], group[finite]
        counts = torch.bincount(group, minlength=self._groups) if several else torch.tensor([len(losses)])
        return {
            "steps": len(steps),
            "samples": seen,
            "loss": self._sum(losses, group),
            "gradient_norm": self._sum(norms, group),
            "group_samples": counts,
            "clipped": int(clipped.sum()),
            "finite": len(losses),
            "empty_batches": int((sizes == 0).sum()),
            "clamped": _count([step[4] for step in steps if step[4] is not None]),
        }

    def _sum(self, values: Tensor, group: Tensor) -> Tensor:
        """By group.  # [group]"""
        if self._groups == 1:
            return values.sum(dim=0, keepdim=True, dtype=torch.float64)
        return torch.bincount(group, weights=values, minlength=self._groups)

    def state(self) -> dict[str, Any]:
        """For the checkpoint: private."""
        return {"rows": self.rows, "open": [list(step) for step in self._open], "sums": self._sums}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.rows = list(state["rows"])
        self._open = [tuple(step) for step in state["open"]]
        self._held = sum(step[0].shape[0] for step in self._open)
        self._sums = list(state["sums"])


def _row(sums: Sequence[Row]) -> Row:
    """The figures of an epoch."""
    whole = {name: sum(part[name] for part in sums) for name in sums[0]}
    counts, finite = whole["group_samples"], whole["finite"]
    return {
        "steps": whole["steps"],
        "samples": whole["samples"],
        "loss": _means(whole["loss"], counts),
        "gradient_norm": _means(whole["gradient_norm"], counts),
        "group_samples": counts.tolist(),
        "clip_fraction": whole["clipped"] / finite if finite else None,
        "non_finite": whole["samples"] - finite,
        "empty_batches": whole["empty_batches"],
        "clamped": whole["clamped"],
    }


def _means(sums: Tensor, counts: Tensor) -> list[float | None]:
    return [float(s / n) if n else None for s, n in zip(sums, counts, strict=True)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """End to end on the CPU, wherever each lies: steps that were resumed, or taken in a stack, lie there already."""
    each = [torch.cat(list(some)).cpu() for _, some in groupby(parts, key=lambda part: part.device)]
    return each[0] if len(each) == 1 else torch.cat(each)


def _count(masks: Sequence[Tensor]) -> int:
    """How often any of them is True."""
    return int(_joined(masks).sum()) if masks else 0


def _finite(steps: Sequence[_Columns]) -> Tensor | None:
    """Where the gradient is finite, over all steps; None: everywhere."""
    masks = [step[5] for step in steps]
    if all(mask is None for mask in masks):
        return None
    pairs = zip(steps, masks, strict=True)
    filled = [torch.ones_like(step[0], dtype=torch.bool) if mask is None else mask for step, mask in pairs]
    return _joined(filled)
