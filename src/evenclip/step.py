"""One step of private training: Algorithm 2 of Esipova et al. 2023, for any rule.

    losses and tape          ℓ_i and, unformed, g_i                       private
    norms                    ‖g_i‖                                        private
    count                    Σ statistic_i, released                      public from here on
    weights                  γ_i, held to |γ_i|·‖g_i‖ ≤ S                 private
    weighted sum             Σ γ_i g_i                                    private
    gradient                 released with noise σS, divided by B         public

No method is known here by name. Three kinds of value: what a step *returns as public* is `Step.public`; everything
else in a `Step` is private, is shown to observers, and is never fed back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evenclip.gradients import AnyTape, PerSample
from evenclip.release import Releases
from evenclip.rules import Guarded

__all__ = ["Chunk", "Columns", "Public", "Step", "blind_step", "step", "watched"]


class Chunk(NamedTuple):
    """Some samples of a batch, as many as fit in memory.

    Attributes:
        x, y: inputs and targets.  # [sample, ...]
        group: [sample], int64
        real: which rows are samples and which only fill the chunk up; None: all are.  # [sample], bool
        seed: for whatever the model draws (dropout), so that a second pass draws the same.
    """

    x: Any
    y: Any
    group: Tensor
    real: Tensor | None = None
    seed: int = 0


class Public(NamedTuple):
    """What one step makes public.

    Attributes:
        gradient: g̃, noisy and divided by the public batch size.  # [parameter]
        now: what the step clipped with: Z, or the C_k.
        state: the rule's state for the next step.
        sensitivity: S.
        multipliers: name of each release -> its multiplier, for the ledger.
    """

    gradient: Tensor
    now: Tensor
    state: Tensor
    sensitivity: float | Tensor
    multipliers: dict[str, float]


class Step(NamedTuple):
    """What one step saw (private) and what it made public. Rows that only fill a chunk up are not in here.

    Attributes:
        public: the only part that may leave.
        losses: ℓ_i.  # [sample]
        norms: ‖g_i‖, 0 where it is not finite.  # [sample]
        weights: γ_i.  # [sample]
        group: [sample]
        clamped: where the rule broke its bound and was held to it; None: nowhere.  # [sample], bool
        finite: where the gradient is finite; None: everywhere.  # [sample], bool
        clipped_sum: Σ γ_i g_i before noise.  # [parameter]
        B: the public expected batch size.
        weighted_sum: any other Σ w_i g_i of the same batch, w [sample]: g_B, group gradients. To be asked for while
            the parameters are still θ_t, which is while observers are called.
        guard: the rule.
        model: with the parameters θ_t that all this was computed at; not to be changed.
        t: number of the step, from 0.
    """

    public: Public
    losses: Tensor
    norms: Tensor
    weights: Tensor
    group: Tensor
    clamped: Tensor | None
    finite: Tensor | None
    clipped_sum: Tensor
    B: float
    weighted_sum: Callable[[Tensor], Tensor]
    guard: Guarded
    model: nn.Module
    t: int

    @property
    def clipped(self) -> Tensor:
        """Where the weight is below that of a zero gradient.  # [sample], bool"""
        groups = int(self.group.max()) + 1 if len(self.group) else 1
        return self.weights < self.guard.resting(self.public.now.unsqueeze(0), groups)[0, self.group]


def step(
    tape: AnyTape, guard: Guarded, state: Tensor, chunks: Sequence[Chunk], B: float, release: Releases, t: int = 0
) -> Step:
    """One step of Algorithm 2 on one batch: what becomes public, and what was seen.

    Args:
        tape: the model and its loss.
        guard: the rule, held to its bounds.
        state: the rule's public state.
        chunks: the batch; none if it is empty, which is a step like any other.
        B: the public expected batch size, the only thing that anything is divided by.
        release: this step's noise.
        t: number of the step.
    """
    batch = _Batch(tape, guard, chunks, state)
    public, clipped_sum = _advance(batch, guard, state, B, release)
    return batch.seen(public, clipped_sum, B, t)


def _advance(
    batch: _Batch, guard: Guarded, state: Tensor, B: float | Tensor, release: Releases
) -> tuple[Public, Tensor]:
    """What the step makes public, and the clipped sum."""
    rule = guard.rule
    if len(batch.chunks) > 1 and not rule.counts_first:
        batch.clipped_sum(state)  # `now` will be the state: clip and count in one pass over the chunks
    look = batch.look
    counts = guard.statistics(look.norms, look.group, state, look.keep)
    noisy = release("count", counts, sensitivity=1.0, multiplier=rule.sigma_count or 0.0)
    now, following = rule.observe(noisy, B, state)  # type: ignore[arg-type]  # a tensor only for shuffled batches
    clipped_sum, S = batch.clipped_sum(now)
    noisy = release("gradient", clipped_sum, sensitivity=S, multiplier=rule.sigma, bounded=rule.bounded)
    share = (1 / B).to(noisy.dtype) if isinstance(B, Tensor) else 1 / B
    gradient = noisy * share if noisy is clipped_sum else noisy.mul_(share)  # in clear, it is the same tensor
    return Public(gradient, now, following, S, release.multipliers), clipped_sum


class Columns(NamedTuple):
    """What a step that never looked at a number computed: tensors alone.

    Attributes:
        gradient: as in `Public`.  # [parameter]
        now: as in `Public`.
        state: as in `Public`.
        clipped_sum: Σ γ_i g_i before noise.  # [parameter]
        seen: losses, norms and weights of `Step`, for every row: those that fill up too.  # [3, row], float64
        flags: clamped and finite, likewise.  # [2, row], bool
    """

    gradient: Tensor
    now: Tensor
    state: Tensor
    clipped_sum: Tensor
    seen: Tensor
    flags: Tensor


def blind_step(
    tape: AnyTape, guard: Guarded, state: Tensor, chunk: Chunk, B: float | Tensor, release: Releases
) -> Columns:
    """`step` on a batch of one chunk, as a pure function of tensors: to be traced, compiled, mapped over runs."""
    batch = _Batch(tape, guard, (chunk,), state)
    public, clipped_sum = _advance(batch, guard, state, B, release)
    return batch.columns(public, clipped_sum)


def watched(
    columns: Columns, n: int, tape: AnyTape, guard: Guarded, chunk: Callable[[], Chunk], group: Tensor, B: float,
    multipliers: dict[str, float], t: int,
) -> Step:  # fmt: skip
    """A blind step as those see it who look on: the first n rows of it, which are the real ones.

    Args:
        columns: what was computed.
        n: how many rows are samples.
        tape: the model.
        guard: the rule.
        chunk: makes the batch, should anybody ask for another weighted sum.
        group: [row]
        B: what sums were divided by.
        multipliers: name of each release -> its multiplier.
        t: number of the step.
    """
    gradient, now, state, clipped_sum, seen, flags = columns
    if n < seen.shape[1]:
        seen, flags = seen.narrow(1, 0, n), flags.narrow(1, 0, n)
    (losses, norms, weights), (clamped, finite) = seen.unbind(), flags.unbind()
    public = Public(gradient, now, state, guard.rule.sensitivity(now), multipliers)
    sums = _LaterSums(tape, guard, chunk, now)
    return Step(
        public, losses.to(gradient.dtype), norms, weights, group.narrow(0, 0, n), clamped, finite, clipped_sum, B, sums,
        guard, tape.model, t,
    )  # fmt: skip


class _LaterSums:
    """Σ w_i g_i over the samples of a blind step: the passes are taken again by whoever asks first."""

    def __init__(self, tape: AnyTape, guard: Guarded, chunk: Callable[[], Chunk], state: Tensor) -> None:
        self._tape, self._guard, self._chunk, self._state = tape, guard, chunk, state

    @cached_property
    def _sums(self) -> _Sums:
        return _Sums(_Batch(self._tape, self._guard, (self._chunk(),), self._state), None)

    def __call__(self, weights: Tensor) -> Tensor:
        return self._sums(weights)


class _Look(NamedTuple):
    """A chunk, or the whole batch, after its passes through the model."""

    gradients: PerSample | None  # of one chunk; None for a batch in several
    losses: Tensor
    norms: Tensor
    group: Tensor
    finite: Tensor | None
    real: Tensor | None

    @property
    def keep(self) -> Tensor | None:
        """Which rows count; None: all.  # [sample], bool"""
        if self.finite is None or self.real is None:
            return self.real if self.finite is None else self.finite
        return self.finite & self.real


class _Batch:
    """The chunks of a batch: one in memory at a time, what is small of all of them."""

    def __init__(self, tape: AnyTape, guard: Guarded, chunks: Sequence[Chunk], state: Tensor) -> None:
        self._tape, self._guard, self.chunks, self._state = tape, guard, chunks, state
        self._look: _Look | None = None
        self._now: Tensor | None = None  # what the following were clipped with
        self._S: float | Tensor = 0.0
        self._clipped: tuple[Tensor, Tensor, Tensor | None] | None = None  # sum, weights, clamped

    @property
    def look(self) -> _Look:
        """The whole batch, looked at now if it was not before."""
        if self._look is None:
            for _ in self._passes():
                pass
        assert self._look is not None
        return self._look

    def clipped_sum(self, now: Tensor) -> tuple[Tensor, float | Tensor]:
        """Σ γ_i g_i with the rule's weights for this `now` [parameter], and the S that each was held to.

        The rule is asked for S once, so the noise is for the bound that was enforced. The last `now` is remembered.
        """
        if self._clipped is None or self._now is not now:
            self._now, self._S, found = now, self._guard.rule.sensitivity(now), []
            for look in self._passes():
                assert look.gradients is not None
                weights, clamped = self._guard.weights(look.norms, look.group, now, self._S, look.keep)
                found.append((look.gradients.weighted_sum(weights), weights, clamped))
            self._clipped = self._joined(found)
        return self._clipped[0], self._S

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ w_i g_i for given weights of all rows, padding included.  # [parameter]"""
        total, at = self._tape.layout.join({}), 0
        for look in self._passes():
            assert look.gradients is not None
            total = total + look.gradients.weighted_sum(weights[at : at + len(look.losses)])
            at += len(look.losses)
        return total

    def seen(self, public: Public, clipped_sum: Tensor, B: float, t: int) -> Step:
        """Everything about this step; rows that only fill a chunk up are left out."""
        assert self._clipped is not None
        look, (_, weights, clamped) = self.look, self._clipped
        losses, norms, group, finite, real = look.losses, look.norms, look.group, look.finite, look.real
        if real is not None:
            losses, norms, weights, group = (x[real] for x in (losses, norms, weights, group))
            finite, clamped = (None if mask is None else mask[real] for mask in (finite, clamped))
        return Step(
            public, losses, norms, weights, group, clamped, finite, clipped_sum, B, _Sums(self, real), self._guard,
            self._tape.model, t,
        )  # fmt: skip

    def columns(self, public: Public, clipped_sum: Tensor) -> Columns:
        """The same, without a look at which rows are real."""
        assert self._clipped is not None
        look, (_, weights, clamped) = self.look, self._clipped
        assert clamped is not None
        assert look.finite is not None
        now = public.now.clone()  # it may be the state that went in, which the next step overwrites
        seen = torch.stack([part.double() for part in (look.losses, look.norms, weights)])
        return Columns(public.gradient, now, public.state, clipped_sum, seen, torch.stack([clamped, look.finite]))

    def _passes(self) -> Iterator[_Look]:
        """The chunks with their gradients in memory, one after the other; a batch in one chunk passes once."""
        if len(self.chunks) == 1:
            if self._look is None:
                self._look = (_blind_look if self._guard.blind else _look)(self._tape, self.chunks[0])
            yield self._look
            return
        light = []
        for chunk in self.chunks:
            look = _look(self._tape, chunk)
            yield look
            light.append(look._replace(gradients=None))
        self._look = _stitched(light, self._state.new_zeros(0))

    def _joined(self, found: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sum, weights and clamped of all chunks."""
        if len(found) == 1:
            return found[0]
        if not found:
            return self._tape.layout.join({}), self._state.new_zeros(0), None
        sums, weights, clamped = zip(*found, strict=True)
        held = _mask(clamped, weights, filled=False)
        return torch.stack(sums).sum(dim=0), torch.cat(weights), held


class _Sums:
    """Σ w_i g_i over the samples of a step, for weights [sample] of an observer's choice."""

    def __init__(self, batch: _Batch, real: Tensor | None) -> None:
        self._batch, self._real = batch, real

    def __call__(self, weights: Tensor) -> Tensor:
        if self._real is not None:
            spread = weights.new_zeros(len(self._real))
            spread[self._real] = weights
            weights = spread
        return self._batch.weighted_sum(weights)


def _look(tape: AnyTape, chunk: Chunk) -> _Look:
    """Through the model and back; a sample whose loss or gradient is not finite is blanked out."""
    _seed(chunk)
    gradients = tape(chunk.x, chunk.y, chunk.group)
    losses, norms, finite = gradients.losses, gradients.norms(quick=True), None
    if not math.isfinite(float(torch.dot(norms, norms)) + float(torch.dot(losses, losses))):  # this synchronises
        # Exactly, where float32 overflowed and nowhere else: no sample's norm may depend on what another is like.
        norms = torch.where(torch.isfinite(norms), norms, gradients.norms())
        finite = torch.isfinite(norms) & torch.isfinite(losses)
        gradients, norms = gradients.masked(finite), torch.where(finite, norms, 0.0)
    return _Look(gradients, losses, norms, chunk.group, finite, chunk.real)


def _blind_look(tape: AnyTape, chunk: Chunk) -> _Look:
    """The same, blanking out whatever is not finite without asking whether there is any."""
    gradients = tape(chunk.x, chunk.y)
    losses, norms = gradients.losses, gradients.norms()
    finite = torch.isfinite(norms) & torch.isfinite(losses)
    return _Look(gradients.masked(finite), losses, torch.where(finite, norms, 0.0), chunk.group, finite, chunk.real)


def _stitched(looks: Sequence[_Look], nothing: Tensor) -> _Look:
    """Several chunks, or none, as one look at the batch."""
    if not looks:
        return _Look(None, nothing, nothing, nothing.long(), None, None)
    losses, norms, group = (torch.cat([getattr(k, name) for k in looks]) for name in ("losses", "norms", "group"))
    sizes = [k.group for k in looks]
    finite, real = (_mask([getattr(k, name) for k in looks], sizes, filled=True) for name in ("finite", "real"))
    return _Look(None, losses, norms, group, finite, real)


def _mask(masks: Sequence[Tensor | None], like: Sequence[Tensor], *, filled: bool) -> Tensor | None:
    """The masks of all chunks as one; None stands for `filled` everywhere."""
    if all(mask is None for mask in masks):
        return None
    pairs = zip(masks, like, strict=True)
    return torch.cat([torch.full_like(x, filled, dtype=torch.bool) if mask is None else mask for mask, x in pairs])


def _seed(chunk: Chunk) -> None:
    """Dropout and the like draw from torch's global generator: put it where this chunk's stream begins."""
    torch.default_generator.manual_seed(chunk.seed)
    if chunk.group.is_cuda:
        torch.cuda.manual_seed(chunk.seed)
