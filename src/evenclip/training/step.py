"""One step of private training: Algorithm 2 of Esipova et al. 2023, for any rule.

    losses and gradients     ℓ_i and, unformed, g_i                       private
    norms                    ‖g_i‖                                        private
    count                    Σ statistic_i, released                      public from here on
    weights                  γ_i, with |γ_i|·‖g_i‖ ≤ S                    private
    weighted sum             Σ γ_i g_i                                    private
    gradient                 released with noise σS, divided by B         public

`step` is a pure function: it draws nothing and writes nothing. Noise is an argument; the run writes
the ledger before it calls. A batch is a sum of parts (chunks here, ranks in `evenclip.distributed`,
physical batches in `evenclip.opacus`). `Public` is all that may leave a step. Everything else is
private, is shown to observers, and is never fed back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evenclip.gradients import AnyTape, PerSample
from evenclip.gradients.tape import call
from evenclip.mechanism import Mechanism, Release
from evenclip.training.loss import Labelled

__all__ = ["Chunk", "Part", "Public", "Seen", "Step", "WeightedSums", "clip", "step"]


class Chunk(NamedTuple):
    """Samples of a batch that pass through the model at once.

    Attributes:
        x, y: inputs and targets.  # [sample, ...]
        group: [sample], int64
        real: which rows are samples; the others only fill the chunk up and count for nothing. None:
            all are. # [sample], bool
        seed: for what the model draws (dropout), so that a second pass draws the same.
    """

    x: Any
    y: Any
    group: Tensor
    real: Tensor | None = None
    seed: int = 0


class Seen(NamedTuple):
    """What a step saw of some samples. Private.

    Attributes:
        losses: ℓ_i.  # [sample], as are all
        norms: ‖g_i‖, 0 where it is not finite.
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
    """What some samples add to a step. Private, and additive.

    Attributes:
        total: Σ γ_i g_i.  # [parameter]
        counts: Σ statistic_i.  # [m]
        seen: of these samples.
    """

    total: Tensor
    counts: Tensor
    seen: Seen


class Public(NamedTuple):
    """All that one step makes public.

    Attributes:
        gradient: g̃, noisy and divided by the public batch size.  # [parameter]
        now: what the step clipped with: Z, or the C_k.
        state: the rule's state for the next step.
        sensitivity: S.
    """

    gradient: Tensor
    now: Tensor
    state: Tensor
    sensitivity: float | Tensor


class Step(NamedTuple):
    """A step as observers see it, at the parameters θ_t that it was computed with.

    Attributes:
        public: the only part that may leave.
        seen: losses, norms, weights, group, clamped and finite, each an attribute of the step too.
        clipped_sum: Σ γ_i g_i before noise.  # [parameter]
        weighted_sum: any other Σ w_i g_i of the same batch, w [sample]: g_B, group gradients. It
            takes the passes again, so it must be called before the update, as observers are.
        B: the public expected batch size.
        t: number of the step, from 0.
        mechanism: the rule held to its bounds.
        tape: the model and its loss at θ_t.
        state: the rule's public state before the step.
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

    @property
    def model(self) -> nn.Module:
        """At θ_t; not to be changed."""
        return self.tape.model

    @property
    def losses(self) -> Tensor:
        """ℓ_i.  # [sample]"""
        return self.seen.losses

    @property
    def norms(self) -> Tensor:
        """‖g_i‖, 0 where it is not finite.  # [sample]"""
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
        return self.weights < self.mechanism.resting(self.public.now.unsqueeze(0))[0, self.group]


def step(
    tape: AnyTape,
    mechanism: Mechanism,
    state: Tensor,
    chunks: Sequence[Chunk],
    B: float,
    release: Release,
) -> tuple[Public, Part]:
    """One step of Algorithm 2 on one batch: what becomes public, and what was seen.

    Args:
        tape: the model and its loss, recording.
        mechanism: the rule, held to its bounds.
        state: the rule's public state.
        chunks: the batch; none if it is empty, which is a step like any other.
        B: the public expected batch size, the only number that anything is divided by.
        release: this step's noise.
    """
    passes = _Passes(tape, chunks, traceable=mechanism.traceable, wants=mechanism.wants)
    now = following = state
    if mechanism.rule.counts_first:
        now, following = mechanism.observe(_count(mechanism, passes, state), B, state, release)
    part, S = _clip(mechanism, passes, state, now)
    if not mechanism.rule.counts_first:
        now, following = mechanism.observe(part.counts, B, state, release)
    return Public(mechanism.publish(part.total, S, B, release), now, following, S), part


def clip(
    tape: AnyTape, mechanism: Mechanism, chunks: Sequence[Chunk], state: Tensor, now: Tensor
) -> Part:
    """Return what a batch would add to a step from `state` that clips with `now`, for auditors.

    Nothing is released.
    """
    return _clip(mechanism, _Passes(tape, chunks, wants=mechanism.wants), state, now)[0]


class WeightedSums:
    """Σ w_i g_i over the samples of a batch, as a function of the weights w [sample].

    The passes are taken on first use; those of a batch in several chunks, on every use.

    Attributes:
        is_over: whether the parameters have moved on, so that the passes would be those of another
            step.
    """

    def __init__(self, tape: AnyTape, chunks: Sequence[Chunk]) -> None:
        self._passes, self.is_over = _Passes(tape, chunks), False

    def __call__(self, weights: Tensor) -> Tensor:
        """Σ w_i g_i.  # [parameter]

        Raises:
            RuntimeError: after the update, when the gradients would be those of other parameters.
        """
        if self.is_over:
            raise RuntimeError(
                "The parameters have moved on since this step; ask for weighted sums before "
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
            some, at = weights[at : at + n], at + n
            if real is not None:
                some = weights.new_zeros(len(real)).masked_scatter(real, some)
            total = total + p.gradients.weighted_sum(some)
        return total


class _Pass(NamedTuple):
    """A chunk after its passes through the model."""

    chunk: Chunk
    gradients: PerSample
    losses: Tensor
    norms: Tensor
    finite: Tensor | None
    further: dict[str, Any]

    @property
    def keep(self) -> Tensor | None:
        """Which rows count; None: all.  # [sample], bool"""
        if self.finite is None or self.chunk.real is None:
            return self.chunk.real if self.finite is None else self.finite
        return self.finite & self.chunk.real


class _Passes:
    """The chunks of a batch, each passed through the model when its turn comes; a single one passes
    once.
    """

    def __init__(
        self,
        tape: AnyTape,
        chunks: Sequence[Chunk],
        *,
        traceable: bool = False,
        wants: Sequence[str] = (),
    ) -> None:
        self.tape, self._chunks, self._wants = tape, chunks, wants
        self._pass = _traceable_pass if traceable else _pass
        self._only: _Pass | None = None

    @property
    def samples(self) -> int:
        """How many there are, without rows that only fill a chunk up."""
        return sum(c.group.shape[0] if c.real is None else int(c.real.sum()) for c in self._chunks)

    def __iter__(self) -> Iterator[_Pass]:
        if len(self._chunks) != 1:
            return (self._pass(self.tape, chunk, self._wants) for chunk in self._chunks)
        if self._only is None:
            self._only = self._pass(self.tape, self._chunks[0], self._wants)
        return iter((self._only,))


def _pass(tape: AnyTape, chunk: Chunk, wants: Sequence[str]) -> _Pass:
    """Through the model and back; a sample whose loss or gradient is not finite is masked out."""
    _seed(chunk)
    gradients = tape(chunk.x, chunk.y, chunk.group)
    losses, norms, finite = gradients.losses, gradients.norms(quick=True), None
    if not math.isfinite(
        float(torch.dot(norms, norms)) + float(torch.dot(losses, losses))
    ):  # this synchronises
        # Exactly, where float32 overflowed and nowhere else: no sample's norm may depend on other
        # samples.
        norms = torch.where(torch.isfinite(norms), norms, gradients.norms())
        finite = torch.isfinite(norms) & torch.isfinite(losses)
        gradients, norms = gradients.masked(finite), torch.where(finite, norms, 0.0)
    return _Pass(chunk, gradients, losses, norms, finite, _further(tape, chunk, losses, wants))


def _traceable_pass(tape: AnyTape, chunk: Chunk, wants: Sequence[str]) -> _Pass:
    """The same without reading a value: what is not finite is masked out whether or not there is
    any.
    """
    gradients = tape(chunk.x, chunk.y, chunk.group)
    losses, norms = gradients.losses, gradients.norms()
    finite = torch.isfinite(norms) & torch.isfinite(losses)
    norms = torch.where(finite, norms, 0.0)
    further = _further(tape, chunk, losses, wants)
    return _Pass(chunk, gradients.masked(finite), losses, norms, finite, further)


def _further(tape: AnyTape, chunk: Chunk, losses: Tensor, wants: Sequence[str]) -> dict[str, Any]:
    """Return what else a rule's statistic uses of these samples: `loss`, `output`, `y`.

    The output takes a second forward pass, with the same dropout.
    """
    further: dict[str, Any] = {}
    if "loss" in wants:
        further["loss"] = losses
    if "output" in wants:
        _seed(chunk)
        with torch.no_grad():
            further["output"] = call(tape.model, chunk.x)
    if "y" in wants:
        further["y"] = chunk.y.y if isinstance(chunk.y, Labelled) else chunk.y
    return further


def _seed(chunk: Chunk) -> None:
    """Dropout draws from torch's global generator: set it to where this chunk's stream begins."""
    torch.default_generator.manual_seed(chunk.seed)
    if chunk.group.is_cuda:
        torch.cuda.manual_seed(chunk.seed)


def _count(mechanism: Mechanism, passes: _Passes, state: Tensor) -> Tensor:
    """Σ statistic_i over the batch."""
    total = state.new_zeros(mechanism.counts, dtype=torch.float64)
    for p in passes:
        total = total + mechanism.count(p.norms, p.chunk.group, state, p.keep, p.further)
    return total


def _clip(
    mechanism: Mechanism, passes: _Passes, state: Tensor, now: Tensor
) -> tuple[Part, float | Tensor]:
    """Σ γ_i g_i with the rule's weights for this `now`, and S. The rule states S once, so that the
    noise is for the bound that was enforced.
    """
    S = mechanism.sensitivity(now)
    return _add_up(
        (_part(mechanism, p, state, now, S) for p in passes), mechanism, passes.tape, state
    ), S


def _part(mechanism: Mechanism, p: _Pass, state: Tensor, now: Tensor, S: float | Tensor) -> Part:
    """What one chunk adds to the step; rows that only fill it up are not in what was seen."""
    group, keep = p.chunk.group, p.keep
    weights, clamped = mechanism.weights(p.norms, group, now, S, keep)
    count = mechanism.count(p.norms, group, state, keep, p.further)
    seen = Seen(p.losses, p.norms, weights, group, clamped, p.finite)
    if p.chunk.real is not None:
        seen = Seen(*(None if column is None else column[p.chunk.real] for column in seen))  # type: ignore[arg-type]
    return Part(p.gradients.weighted_sum(weights), count, seen)


def _add_up(parts: Iterable[Part], mechanism: Mechanism, tape: AnyTape, state: Tensor) -> Part:
    """The sum of the parts; only one of them has its sum in memory beside the total."""
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
    """The samples of several chunks side by side."""
    losses, norms, weights, group = (
        torch.cat(column) for column in list(zip(*seen, strict=True))[:4]
    )
    clamped = _join_masks([s.clamped for s in seen], [s.group for s in seen], filled=False)
    finite = _join_masks([s.finite for s in seen], [s.group for s in seen], filled=True)
    return Seen(losses, norms, weights, group, clamped, finite)


def _join_masks(
    masks: Sequence[Tensor | None], like: Sequence[Tensor], *, filled: bool
) -> Tensor | None:
    """The masks of all chunks as one; None stands for `filled` everywhere."""
    if all(mask is None for mask in masks):
        return None
    pairs = zip(masks, like, strict=True)
    return torch.cat(
        [
            torch.full_like(x, filled, dtype=torch.bool) if mask is None else mask
            for mask, x in pairs
        ]
    )
