"""What training looked like, epoch by epoch and group by group. Private: these figures carry no
noise.

One row per epoch:

    epoch, steps, samples         how far, and how many samples were seen
    loss, gradient_norm           mean ℓ_i and mean ‖g_i‖ of each group (None for a group that was not seen)
    group_samples                 how many samples of each group were seen
    clip_fraction                 share of samples whose weight is below that of a zero gradient
    state                         the rule's public state at the end of the epoch: Z, or the C_k
    sensitivity                   S of the last step
    non_finite                    samples that contributed nothing for lack of a finite gradient
    empty_batches                 batches without any sample
    clamped                       weights that broke the rule's own bound and were held to it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenclip.mechanism import Mechanism
from evenclip.training.processes import Alone, Processes
from evenclip.training.step import Seen

__all__ = ["Trace"]

AT_ONCE = 2**20  # samples that are added up together, so that an epoch of any length fits in memory

Row = dict[str, Any]


class Trace:
    """Rows of finished epochs, and sums over the steps of the one under way.

    Sums are taken step by step, so that they do not depend on where they are cut: at a checkpoint,
    or for memory.
    """

    def __init__(self, mechanism: Mechanism, ranks: Processes | None = None) -> None:
        self.rows: list[Row] = []
        self._mechanism, self._groups = mechanism, mechanism.groups
        self._ranks: Processes = Alone() if ranks is None else ranks
        self._open: list[
            tuple[Seen, Tensor]
        ] = []  # steps that are not added up yet, and what each clipped with
        self._held = 0  # samples in there
        self._begin()

    def _begin(self) -> None:
        """A new epoch."""
        # Of each group Σ ℓ_i, Σ ‖g_i‖ and how many; how many are finite, clipped, clamped.  # [3 K
        # + 3]
        self._sums = torch.zeros(3 * self._groups + 3, dtype=torch.float64)
        self._sizes: list[float] = []  # samples of each step

    def add(self, seen: Seen, now: Tensor) -> None:
        """One step and what it clipped with; the arithmetic waits for the end of the epoch, or for
        many samples.
        """
        self._open.append((seen, now))
        self._held += seen.losses.shape[0]
        if self._held >= AT_ONCE:
            self._add_up()

    def close(self, state: Tensor, sensitivity: float) -> Row:
        """The epoch is over: its row, of all ranks' samples."""
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
        """For the checkpoint, of all ranks' samples, each of which takes part: private."""
        sums, sizes = self._total()
        return {"rows": self.rows, "sums": sums, "sizes": sizes}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there: the rank that leads has all samples of the epoch under way."""
        self.rows, self._open, self._held = list(state["rows"]), [], 0
        share = 1.0 if self._ranks.leads else 0.0
        self._sums, self._sizes = share * state["sums"], [share * size for size in state["sizes"]]

    def _total(self) -> tuple[Tensor, list[float]]:
        """Sums and sizes over all ranks."""
        self._add_up()
        whole = self._ranks.sum(
            torch.cat([self._sums, torch.tensor(self._sizes, dtype=torch.float64)])
        )
        return whole[: len(self._sums)], whole[len(self._sums) :].tolist()

    def _add_up(self) -> None:
        """Add the open steps to the sums."""
        if not self._open:
            return
        steps, nows = zip(*self._open, strict=True)
        self._open, self._held = [], 0
        sizes = [seen.losses.shape[0] for seen in steps]
        losses, norms, weights, group = (
            _joined(column) for column in list(zip(*steps, strict=True))[:4]
        )
        place = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))  # step, and group
        if self._groups > 1:
            place = place * self._groups + group
        resting = self._mechanism.resting(torch.stack(nows).cpu())  # [step, group]
        clipped, finite = weights < resting.flatten()[place], _finite(steps)
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
    """Sums over the samples of each step and group, one after the other; None: how many.  # [step,
    group], float64
    """
    weights = None if values is None else values.double()
    return (
        torch.bincount(place, weights=weights, minlength=steps * groups)
        .view(steps, groups)
        .double()
    )


def _added(total: Tensor, each: Tensor) -> Tensor:
    """The total and each row, one after the other (torch adds them up in its own order).  #
    [column]
    """
    return torch.from_numpy(np.add.reduce(torch.cat([total.unsqueeze(0), each]).numpy(), axis=0))


def _divided(sums: Tensor, counts: Tensor) -> list[float | None]:
    """The means of the groups that were seen."""
    return [float(s / n) if n else None for s, n in zip(sums, counts, strict=True)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """End to end, on the CPU."""
    return torch.cat(list(parts)).cpu()


def _finite(steps: Sequence[Seen]) -> Tensor | None:
    """Where the gradient is finite; None: everywhere."""
    if all(seen.finite is None for seen in steps):
        return None
    finite = _joined(
        [
            torch.ones_like(seen.losses, dtype=torch.bool) if seen.finite is None else seen.finite
            for seen in steps
        ]
    )
    return None if bool(finite.all()) else finite
