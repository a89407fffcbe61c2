"""The trace of a run: statistics per epoch and group. Private, because they are without noise.

One row per epoch:

    epoch, steps, samples         number of the epoch, of its steps and of their samples
    loss, gradient_norm           mean ℓ_i and mean ‖g_i‖ of each group (None for a group without
                                  samples)
    group_samples                 number of samples of each group
    clip_fraction                 share of samples whose weight is below that of a zero gradient
    state                         the rule's public state at the end of the epoch: Z, or the C_k
    sensitivity                   S of the last step
    non_finite                    samples without a finite gradient, which contribute nothing
    empty_batches                 batches without any sample
    clamped                       weights that broke the rule's own bound and were clamped
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenclip.mechanism import Mechanism
from evenclip.training.processes import Processes, SingleProcess
from evenclip.training.step import Seen

__all__ = ["Trace", "events"]

AT_ONCE = 2**20  # samples summed at once, so that an epoch of any length fits in memory

Row = dict[str, Any]


def events(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return how often something out of the ordinary happened in training. Private.

    - empty_batches: steps with an empty batch, which add noise and are accounted like all others.
    - non_finite_samples: samples whose gradient was not finite, which contributed nothing. A large
      number means that training diverged.
    - clamped_weights: weights that exceeded the rule's own bound and were reduced to it. A number
      above 0 means that the formula or the bound of the rule is wrong; the ε still holds.

    They are exact counts of records, so one record can change them: no privacy report has them.

    >>> events([{"empty_batches": 1, "non_finite": 0, "clamped": 2}])
    {'empty_batches': 1, 'non_finite_samples': 0, 'clamped_weights': 2}
    """
    columns = {
        "empty_batches": "empty_batches",
        "non_finite_samples": "non_finite",
        "clamped_weights": "clamped",
    }
    return {name: sum(int(row[column]) for row in rows) for name, column in columns.items()}


class Trace:
    """Rows of finished epochs, and sums over the steps of the current epoch.

    Sums are taken step by step, so that they do not depend on when they are taken: at a checkpoint,
    at the end of the epoch, or earlier to save memory.
    """

    def __init__(self, mechanism: Mechanism, ranks: Processes | None = None) -> None:
        self.rows: list[Row] = []
        self._mechanism, self._groups = mechanism, mechanism.groups
        self._ranks: Processes = SingleProcess() if ranks is None else ranks
        # Steps that are not summed yet, each with the public values it clipped with.
        self._open: list[tuple[Seen, Tensor]] = []
        self._held = 0  # number of samples in `_open`
        self._begin()

    def _begin(self) -> None:
        """Start a new epoch."""
        # For each group Σ ℓ_i, Σ ‖g_i‖ and the number of samples; then the numbers of finite,
        # clipped and clamped samples.  # [3 K + 3]
        self._sums = torch.zeros(3 * self._groups + 3, dtype=torch.float64)
        self._sizes: list[float] = []  # number of samples of each step

    def add(self, seen: Seen, now: Tensor) -> None:
        """Add one step and the public values it clipped with.

        The sums are computed later: at the end of the epoch, or when there are many samples.
        """
        self._open.append((seen, now))
        self._held += seen.losses.shape[0]
        if self._held >= AT_ONCE:
            self._add_up()

    def close(self, state: Tensor, sensitivity: float) -> Row:
        """End the epoch; return its row, over the samples of all ranks."""
        sums, sizes = self._total()
        K = self._groups
        (losses, norms, counts), (kept, clipped, clamped) = (
            sums[: 3 * K].view(3, K),
            sums[3 * K :].tolist(),
        )
        seen = sum(sizes)
        row = {
            "epoch": len(self.rows) + 1,
            "steps": len(sizes),
            "samples": int(seen),
            "loss": _divided(losses, counts),
            "gradient_norm": _divided(norms, counts),
            "group_samples": counts.long().tolist(),
            "clip_fraction": clipped / kept if kept else None,
            "non_finite": int(seen - kept),
            "empty_batches": sizes.count(0.0),
            "clamped": int(clamped),
            "state": state.tolist(),
            "sensitivity": sensitivity,
        }
        self._begin()
        self.rows.append(row)
        return row

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint, over the samples of all ranks. Private.

        Collective: every rank must call it.
        """
        sums, sizes = self._total()
        return {"rows": self.rows, "sums": sums, "sizes": sizes}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state; the leading rank takes all sums of the current epoch."""
        self.rows, self._open, self._held = list(state["rows"]), [], 0
        share = 1.0 if self._ranks.leads else 0.0
        self._sums, self._sizes = share * state["sums"], [share * size for size in state["sizes"]]

    def _total(self) -> tuple[Tensor, list[float]]:
        """Return sums and sizes over all ranks."""
        self._add_up()
        whole = self._ranks.sum(
            torch.cat([self._sums, torch.tensor(self._sizes, dtype=torch.float64)])
        )
        return whole[: len(self._sums)], whole[len(self._sums) :].tolist()

    def _add_up(self) -> None:
        """Add the steps in `_open` to the sums."""
        if not self._open:
            return
        steps, nows = zip(*self._open, strict=True)
        self._open, self._held = [], 0
        sizes = [seen.losses.shape[0] for seen in steps]
        losses, norms, weights, group = (
            _joined(column) for column in list(zip(*steps, strict=True))[:4]
        )
        # [sample]: step · K + group
        place = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        if self._groups > 1:
            place = place * self._groups + group
        unclipped = self._mechanism.zero_gradient_weight(torch.stack(nows).cpu())  # [step, group]
        clipped, finite = weights < unclipped.flatten()[place], _finite(steps)
        if finite is not None:
            losses, norms, clipped, place = (
                losses[finite],
                norms[finite],
                clipped[finite],
                place[finite],
            )
        each = [_by_place(x, place, len(sizes), self._groups) for x in (losses, norms, None)]
        clamped = sum(int(seen.clamped.sum()) for seen in steps if seen.clamped is not None)
        numbers = torch.tensor([len(losses), int(clipped.sum()), clamped], dtype=torch.float64)
        self._sums[: 3 * self._groups] = _added(
            self._sums[: 3 * self._groups], torch.cat(each, dim=1)
        )
        self._sums[3 * self._groups :] += numbers
        self._sizes += map(float, sizes)


def _by_place(values: Tensor | None, place: Tensor, steps: int, groups: int) -> Tensor:
    """Return sums over the samples of each step and group, in order.  # [step, group], float64

    If `values` is None, return the numbers of samples.
    """
    weights = None if values is None else values.double()
    return (
        torch.bincount(place, weights=weights, minlength=steps * groups)
        .view(steps, groups)
        .double()
    )


def _added(total: Tensor, each: Tensor) -> Tensor:
    """Return the total plus every row, added in order; torch would choose the order.  # [column]"""
    return torch.from_numpy(np.add.reduce(torch.cat([total.unsqueeze(0), each]).numpy(), axis=0))


def _divided(sums: Tensor, counts: Tensor) -> list[float | None]:
    """Return the mean of each group; None for a group without samples."""
    return [float(s / n) if n else None for s, n in zip(sums, counts, strict=True)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the concatenation, on the CPU."""
    return torch.cat(list(parts)).cpu()


def _finite(steps: Sequence[Seen]) -> Tensor | None:
    """Return where the gradient is finite; None if it is finite everywhere.  # [sample], bool"""
    if all(seen.finite is None for seen in steps):
        return None
    finite = _joined(
        [
            torch.ones_like(seen.losses, dtype=torch.bool) if seen.finite is None else seen.finite
            for seen in steps
        ]
    )
    return None if bool(finite.all()) else finite
