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

from typing import Any

import torch
from torch import Tensor

__all__ = ["Trace"]

Row = dict[str, Any]


class Trace:
    """Rows of finished epochs, and the steps of the one under way."""

    def __init__(self, groups: int) -> None:
        self.rows: list[Row] = []
        self._groups = groups
        self._open = _Open()

    def add(
        self, losses: Tensor, norms: Tensor, clipped: Tensor, group: Tensor, clamped: Tensor, finite: Tensor | None
    ) -> None:
        """One step, all [sample]: cheap, because the arithmetic waits for the end of the epoch."""
        self._open.columns.append((losses, norms, clipped, group, clamped, finite))

    def close(self, state: Tensor, sensitivity: float) -> Row:
        """The epoch is over: its row."""
        done = self._open
        self._open = _Open()
        row = {"epoch": len(self.rows) + 1, "steps": len(done.columns), **self._means(done.columns)}
        row |= {"state": state.tolist(), "sensitivity": sensitivity}
        self.rows.append(row)
        return row

    def _means(self, columns: list[tuple[Tensor, ...]]) -> Row:
        """Sums over the epoch, by group."""
        empty = sum(len(step[0]) == 0 for step in columns)
        steps = [step for step in columns if len(step[0])]
        if not steps:
            nothing = [None] * self._groups
            return {
                "samples": 0, "loss": nothing, "gradient_norm": nothing, "group_samples": [0] * self._groups,
                "clip_fraction": None, "non_finite": 0, "empty_batches": empty, "clamped": 0,
            }  # fmt: skip
        finite = torch.cat([torch.ones_like(step[2]) if step[5] is None else step[5] for step in steps])
        losses, norms, clipped, group, clamped = (torch.cat([step[i] for step in steps]) for i in range(5))
        seen = torch.bincount(group[finite], minlength=self._groups)
        return {
            "samples": len(losses),
            "loss": self._mean(losses, group, finite, seen),
            "gradient_norm": self._mean(norms, group, finite, seen),
            "group_samples": seen.tolist(),
            "clip_fraction": float(clipped[finite].double().mean()) if finite.any() else None,
            "non_finite": int((~finite).sum()),
            "empty_batches": empty,
            "clamped": int(clamped.sum()),
        }

    def _mean(self, values: Tensor, group: Tensor, finite: Tensor, seen: Tensor) -> list[float | None]:
        sums = torch.bincount(group[finite], weights=values[finite].double(), minlength=self._groups)
        return [float(s / n) if n else None for s, n in zip(sums, seen, strict=True)]

    def state(self) -> dict[str, Any]:
        """For the checkpoint: private."""
        return {"rows": self.rows, "open": [list(step) for step in self._open.columns]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.rows = list(state["rows"])
        self._open = _Open()
        self._open.columns = [tuple(step) for step in state["open"]]


class _Open:
    """The steps of an epoch that is not over."""

    def __init__(self) -> None:
        self.columns: list[tuple[Any, ...]] = []
