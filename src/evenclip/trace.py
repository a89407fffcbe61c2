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
from typing import Any

import torch
from torch import Tensor

from evenclip.ranks import Alone, AnyRanks
from evenclip.rules import Guarded
from evenclip.step import Step

__all__ = ["Trace"]

Row = dict[str, Any]
# losses, norms, weights, group, each [sample]; clamped (None: nowhere), finite (None: everywhere); the step's `now`
_Columns = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]


class Trace:
    """Rows of finished epochs, and the steps of the one under way."""

    def __init__(self, guard: Guarded, groups: int, ranks: AnyRanks | None = None) -> None:
        self.rows: list[Row] = []
        self._guard, self._groups, self._ranks = guard, groups, Alone() if ranks is None else ranks
        self._open: list[_Columns] = []

    def add(self, step: Step) -> None:
        """One step: cheap, because the arithmetic waits for the end of the epoch."""
        self.note(step.losses, step.norms, step.weights, step.group, step.clamped, step.finite, step.public.now)

    def note(
        self, losses: Tensor, norms: Tensor, weights: Tensor, group: Tensor, clamped: Tensor | None,
        finite: Tensor | None, now: Tensor,
    ) -> None:  # fmt: skip
        """The same by its columns."""
        self._open.append((losses, norms, weights, group, clamped, finite, now))

    def close(self, state: Tensor, sensitivity: float) -> Row:
        """The epoch is over: its row."""
        row = {"epoch": len(self.rows) + 1, "steps": len(self._open), **self._means(self._open)}
        row |= {"state": state.tolist(), "sensitivity": sensitivity}
        self._open = []
        self.rows.append(row)
        return row

    def _means(self, steps: Sequence[_Columns]) -> Row:
        """Means over the epoch, by group: of all ranks' samples."""
        sizes = torch.tensor([step[0].shape[0] for step in steps], dtype=torch.float64)  # [step]
        K, own = self._groups, self._sums(steps)
        total = self._ranks.sum(torch.cat([own, sizes]))
        losses, norms, counts = total[: 3 * K].view(3, K)
        seen, kept, clipped, clamped = total[3 * K : len(own)].tolist()
        return {
            "samples": int(seen),
            "loss": _divided(losses, counts),
            "gradient_norm": _divided(norms, counts),
            "group_samples": counts.long().tolist(),
            "clip_fraction": clipped / kept if kept else None,
            "non_finite": int(seen - kept),
            "empty_batches": int((total[len(own) :] == 0).sum()),
            "clamped": int(clamped),
        }

    def _sums(self, steps: Sequence[_Columns]) -> Tensor:
        """Of each group Σ ℓ_i, Σ ‖g_i‖ and how many; how many were seen, finite, clipped, clamped.  # [3 K + 4]"""
        columns = zip(*(step[:3] for step in steps), strict=True)
        losses, norms, weights = (torch.cat(column).cpu() for column in columns)
        several, sizes = self._groups > 1, torch.tensor([step[0].shape[0] for step in steps])
        group = torch.cat([step[3] for step in steps]).cpu() if several else torch.zeros(len(losses), dtype=torch.int64)
        resting = self._guard.resting(torch.stack([step[6] for step in steps]), self._groups).cpu()  # [step, group]
        own = resting.repeat_interleave(sizes, dim=0)  # of each sample's step  [sample, group]
        clipped = weights < (own.gather(1, group.unsqueeze(1))[:, 0] if several else own[:, 0])
        seen, finite = len(losses), _finite(steps)
        if finite is not None:
            losses, norms, clipped, group = losses[finite], norms[finite], clipped[finite], group[finite]
        counts = torch.bincount(group, minlength=self._groups) if several else torch.tensor([len(losses)])
        clamped = _count([step[4] for step in steps if step[4] is not None])
        numbers = torch.tensor([seen, len(losses), int(clipped.sum()), clamped])
        return torch.cat([self._sum(losses, group), self._sum(norms, group), counts.double(), numbers.double()])

    def _sum(self, values: Tensor, group: Tensor) -> Tensor:
        """By group.  # [group], float64"""
        if self._groups == 1:
            return values.sum(dim=0, keepdim=True, dtype=torch.float64)
        # added up in float64
        return torch.bincount(group, weights=values, minlength=self._groups).double()

    def state(self) -> dict[str, Any]:
        """For the checkpoint, of all ranks' samples: private. Every rank takes part; the one that leads gets it."""
        parts = self._ranks.gathered([[_here(column) for column in step] for step in self._open])
        return {"rows": self.rows, "open": [_joined(step) for step in zip(*parts, strict=True)]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there: the rank that leads has all samples of the epoch under way."""
        self.rows = list(state["rows"])
        steps = [tuple(step) for step in state["open"]]
        self._open = steps if self._ranks.leads else [_none_of(step) for step in steps]


def _divided(sums: Tensor, counts: Tensor) -> list[float | None]:
    """The means of the groups that were seen."""
    return [float(s / n) if n else None for s, n in zip(sums, counts, strict=True)]


def _here(column: Tensor | None) -> Tensor | None:
    """On the CPU, where ranks can send it."""
    return None if column is None else column.cpu()


def _joined(parts: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """One step's columns, of all ranks' samples."""
    if len(parts) == 1:
        return list(parts[0])
    found: list[Tensor | None] = []
    for i in range(6):
        masks, like = [part[i] for part in parts], [part[0] for part in parts]
        filled = [
            torch.full_like(x, i == 5, dtype=torch.bool) if mask is None else mask
            for mask, x in zip(masks, like, strict=True)
            if x is not None
        ]
        found.append(None if all(mask is None for mask in masks) else torch.cat(filled))
    return [*found, parts[0][6]]


def _none_of(step: _Columns) -> _Columns:
    """The same step without any sample."""
    *columns, now = step
    losses, norms, weights, group, clamped, finite = (None if c is None else c[:0] for c in columns)
    assert losses is not None
    assert norms is not None
    assert weights is not None
    assert group is not None
    return losses, norms, weights, group, clamped, finite, now


def _count(masks: Sequence[Tensor]) -> int:
    """How often any of them is True."""
    return int(torch.cat(list(masks)).sum()) if masks else 0


def _finite(steps: Sequence[_Columns]) -> Tensor | None:
    """Where the gradient is finite, over all steps; None: everywhere."""
    masks = [step[5] for step in steps]
    if all(mask is None for mask in masks):
        return None
    pairs = zip(steps, masks, strict=True)
    filled = [torch.ones_like(step[0], dtype=torch.bool) if mask is None else mask for step, mask in pairs]
    return torch.cat(filled).cpu()
