"""One step of private training: Algorithm 2 of Esipova et al. 2023, for any rule.

    losses and gradients     ℓ_i and, unformed, g_i                       private
    norms                    ‖g_i‖                                        private
    count                    Σ statistic_i, released                      public from here on
    weights                  γ_i, with |γ_i|·‖g_i‖ ≤ S                    private
    weighted sum             Σ γ_i g_i                                    private
    gradient                 released with noise σS, divided by B         public

`step` is a pure function: it draws nothing and writes nothing. Noise is an argument; the run writes
the ledger before the step. A batch is a sum of parts (chunks here, ranks in `evenclip.distributed`,
physical batches in `evenclip.opacus`). Only `Public` may leave a step. All other values are
private: observers receive them, and they are never used in later steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from evenclip.gradients import AnyTape
from evenclip.mechanism import Mechanism, Release
from evenclip.training.passes import Chunk, ChunkPass, Passes

__all__ = ["Part", "Public", "Seen", "Step", "WeightedSums", "clip", "step"]


class Seen(NamedTuple):
    """Values of each sample in a step, all [sample]. Private.

    Attributes:
        losses: ℓ_i.
        norms: ‖g_i‖; 0 where loss or gradient is not finite.
        weights: γ_i.
        group: the sample's group.
        clamped: where the rule broke its bound and was clamped; None: nowhere.
        finite: where loss and gradient are finite; None: everywhere.
    """

    losses: Tensor
    norms: Tensor
    weights: Tensor
    group: Tensor
    clamped: Tensor | None
    finite: Tensor | None


class Part(NamedTuple):
    """The contribution of some samples to a step. Private; the parts of a batch add up.

    Attributes:
        total: Σ γ_i g_i.  # [parameter]
        counts: Σ statistic_i.  # [m]
        seen: values of each of these samples.
    """

    total: Tensor
    counts: Tensor
    seen: Seen


class Public(NamedTuple):
    """All that one step makes public.

    Attributes:
        gradient: g̃, noisy and divided by the public batch size.  # [parameter]
        now: the thresholds of this step: Z, or the C_k.
        state: the rule's state for the next step.
        sensitivity: S, the norm that one sample may add to Σ γ_i g_i.
    """

    gradient: Tensor
    now: Tensor
    state: Tensor
    sensitivity: float | Tensor


class Step(NamedTuple):
    """A step for observers, at the parameters θ_t that it was computed with.

    Everything except `public`, `run_id` and `draw` is private.

    Attributes:
        public: the released values.
        seen: losses, norms, weights, group, clamped and finite, which are also attributes here.
        clipped_sum: Σ γ_i g_i before noise.  # [parameter]
        weighted_sum: any other Σ w_i g_i of the same batch, w [sample]: g_B, group gradients. It
            computes the passes again, so call it before the update.
        B: the public expected batch size.
        t: number of the step, from 0.
        mechanism: the rule with its bounds enforced.
        tape: the model and its loss at θ_t.
        state: the rule's public state before the step.
        run_id: the run that took the step, as ledgers name it. May be published.
        draw: number of its draw in the ledger of that run, from 0. May be published.
    """

    public: Public
    seen: Seen
    clipped_sum: Tensor
    weighted_sum: WeightedSums
    B: float
    t: int
    mechanism: Mechanism
    tape: AnyTape
    state: Tensor
    run_id: str
    draw: int

    @property
    def model(self) -> nn.Module:
        """The model at θ_t; do not change it."""
        return self.tape.model

    @property
    def losses(self) -> Tensor:
        """ℓ_i.  # [sample]"""
        return self.seen.losses

    @property
    def norms(self) -> Tensor:
        """‖g_i‖; 0 where loss or gradient is not finite.  # [sample]"""
        return self.seen.norms

    @property
    def weights(self) -> Tensor:
        """γ_i.  # [sample]"""
        return self.seen.weights

    @property
    def group(self) -> Tensor:
        """The samples' groups.  # [sample]"""
        return self.seen.group

    @property
    def clamped(self) -> Tensor | None:
        """Where the rule broke its bound and was clamped; None: nowhere.  # [sample], bool"""
        return self.seen.clamped

    @property
    def finite(self) -> Tensor | None:
        """Where loss and gradient are finite; None: everywhere.  # [sample], bool"""
        return self.seen.finite

    @property
    def clipped(self) -> Tensor:
        """Where the weight is below that of a zero gradient.  # [sample], bool"""
        return (
            self.weights
            < self.mechanism.zero_gradient_weight(self.public.now.unsqueeze(0))[0, self.group]
        )


def step(
    tape: AnyTape,
    mechanism: Mechanism,
    state: Tensor,
    chunks: Sequence[Chunk],
    B: float,
    release: Release,
) -> tuple[Public, Part]:
    """Compute one step of Algorithm 2 on one batch; return its public and its private values.

    Args:
        tape: the model and its loss, recording.
        mechanism: the rule with its bounds enforced.
        state: the rule's public state.
        chunks: the batch. It may be empty; the step then releases noise.
        B: the public expected batch size; every release is divided by it.
        release: releases values with the noise of this step.
    """
    passes = Passes(tape, chunks, traceable=mechanism.traceable, wants=mechanism.wants)
    now = following = state
    if mechanism.rule.counts_first:
        now, following = mechanism.observe(_count(mechanism, passes, state), B, state, release)
    part, S = _clip(mechanism, passes, state, now)
    if not mechanism.rule.counts_first:
        now, following = mechanism.observe(part.counts, B, state, release)
    gradient = mechanism.publish(part.total, S, B, release, tape.layout.dtype)
    return Public(gradient, now, following, S), part


def clip(
    tape: AnyTape, mechanism: Mechanism, chunks: Sequence[Chunk], state: Tensor, now: Tensor
) -> Part:
    """Return the part of a batch in a step from `state` with thresholds `now`, for audits.

    Nothing is released.
    """
    return _clip(mechanism, Passes(tape, chunks, wants=mechanism.wants), state, now)[0]


class WeightedSums:
    """Σ w_i g_i over the samples of a batch, as a function of the weights w [sample].

    The passes are computed on first use; for a batch in several chunks, on every use.

    Attributes:
        is_over: whether the parameters have been updated, so that the gradients have changed.
    """

    def __init__(self, tape: AnyTape, chunks: Sequence[Chunk]) -> None:
        self._passes, self.is_over = Passes(tape, chunks), False

    def __call__(self, weights: Tensor) -> Tensor:
        """Return Σ w_i g_i.  # [parameter]

        Raises:
            RuntimeError: after the update, because the gradients would be at other parameters.
        """
        if self.is_over:
            raise RuntimeError(
                "The parameters have been updated since this step; compute weighted sums before "
                "run.update()."
            )
        n = self._passes.samples
        if weights.shape != (n,):
            raise ValueError(
                f"The weights have shape {list(weights.shape)}; give one for each of the {n} "
                "samples."
            )
        total, at = self._passes.tape.layout.join({}), 0
        for p in self._passes:
            real = p.chunk.real
            n = len(p.losses) if real is None else int(real.sum())
            own, at = weights[at : at + n], at + n
            if real is not None:
                own = weights.new_zeros(len(real)).masked_scatter(real, own)
            total = total + p.gradients.weighted_sum(own)
        return total


def _count(mechanism: Mechanism, passes: Passes, state: Tensor) -> Tensor:
    """Return Σ statistic_i over the batch.  # [m], float64"""
    total = state.new_zeros(mechanism.counts, dtype=torch.float64)
    for p in passes:
        total = total + mechanism.count(p.norms, p.chunk.group, state, p.keep, p.further)
    return total


def _clip(
    mechanism: Mechanism, passes: Passes, state: Tensor, now: Tensor
) -> tuple[Part, float | Tensor]:
    """Return the part of the whole batch with thresholds `now`, and S.

    S is read from the rule once, so that the noise is scaled to the enforced bound.
    """
    S = mechanism.sensitivity(now)
    # Exact sums are for noise; without any, the model's own precision is faster.
    dtype = torch.float64 if mechanism.noise["gradient"] else passes.tape.layout.dtype
    parts = (_part(mechanism, p, state, now, S, dtype) for p in passes)
    return _add_up(parts, mechanism, passes.tape, state), S


def _part(
    mechanism: Mechanism,
    p: ChunkPass,
    state: Tensor,
    now: Tensor,
    S: float | Tensor,
    dtype: torch.dtype,
) -> Part:
    """Return the part of one chunk, without its padding; `dtype` is that of the sum."""
    group, keep = p.chunk.group, p.keep
    weights, clamped = mechanism.weights(p.norms, group, now, S, keep)
    count = mechanism.count(p.norms, group, state, keep, p.further)
    seen = Seen(p.losses, p.norms, weights, group, clamped, p.finite)
    if p.chunk.real is not None:
        seen = Seen(*(None if column is None else column[p.chunk.real] for column in seen))  # type: ignore[arg-type]
    return Part(p.gradients.weighted_sum(weights.to(dtype)), count, seen)


def _add_up(parts: Iterable[Part], mechanism: Mechanism, tape: AnyTape, state: Tensor) -> Part:
    """Return the sum of the parts; only one of them is in memory beside the total."""
    total: Tensor | None = None
    counts, seen = [], []
    for part in parts:
        total = part.total if total is None else total.add_(part.total)
        counts.append(part.counts)
        seen.append(part.seen)
    if total is None:
        none = state.new_zeros(0, dtype=torch.float64)
        count = state.new_zeros(mechanism.counts, dtype=torch.float64)
        return Part(tape.layout.join({}), count, Seen(none, none, none, none.long(), None, None))
    if len(seen) == 1:
        return Part(total, counts[0], seen[0])
    return Part(total, torch.stack(counts).sum(dim=0), _join(seen))


def _join(seen: Sequence[Seen]) -> Seen:
    """Concatenate the values of several chunks."""
    losses, norms, weights, group = (
        torch.cat(column) for column in list(zip(*seen, strict=True))[:4]
    )
    clamped = _join_masks([s.clamped for s in seen], [s.group for s in seen], filled=False)
    finite = _join_masks([s.finite for s in seen], [s.group for s in seen], filled=True)
    return Seen(losses, norms, weights, group, clamped, finite)


def _join_masks(
    masks: Sequence[Tensor | None], like: Sequence[Tensor], *, filled: bool
) -> Tensor | None:
    """Concatenate the masks of all chunks; None stands for `filled` everywhere."""
    if all(mask is None for mask in masks):
        return None
    pairs = zip(masks, like, strict=True)
    return torch.cat(
        [
            torch.full_like(x, filled, dtype=torch.bool) if mask is None else mask
            for mask, x in pairs
        ]
    )
