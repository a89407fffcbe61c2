"""The loss and gradient of each sample of a batch, as norms and weighted sums.

    norms()            ‖g_i‖           the norms that the rule clips
    weighted_sum(w)    Σ_i w_i g_i     the update; with indicators as weights, g_B and group sums

Both are computed from the records of one forward and backward pass, any number of times. So an
audit reads the same gradients as the training step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from evenclip.gradients.layers import Formed, LayerGradient
from evenclip.gradients.layers.linear import OnePosition, quick_square_norms
from evenclip.gradients.layout import Layout
from evenclip.gradients.units import Record

__all__ = ["Blocks", "NamedGradient", "Padded", "PerSample", "Whole"]

# Covers the roundings of the square root and of sums over layers, in float64, with room to spare.
# A sum of d squares, in any order, adds at most (d + 1)·2⁻⁵³, half of it in the root.
_ROUNDING_UP, _UNIT = 1 + 2.0**-40, 2.0**-53


@dataclass(frozen=True)
class Whole:
    """Formed per-sample gradients of the whole model or of one call of a layer."""

    each: dict[str, Tensor]  # the model's name -> [sample, *parameter]

    @property
    def parameters(self) -> dict[str, str]:
        """The identity map of the model's names."""
        return {name: name for name in self.each}

    def gradient(self, n: int, names: Collection[str]) -> LayerGradient:
        """Return the formed gradients of these parameters."""
        del n
        return Formed({name: self.each[name] for name in names})


class NamedGradient(NamedTuple):
    """A layer's gradients with the model's names for its parameters."""

    gradient: LayerGradient
    names: dict[str, str]


class PerSample:
    """The loss and gradient of each sample, most gradients unformed.

    The values are private: only the training step and audits may use them.

    Attributes:
        losses: ℓ_i.  # [sample]
        layout: the parameters, in the order of every returned vector.
        may_be_quick: whether `norms(quick=True)` may compute them in another way than `norms()`.
    """

    def __init__(
        self, losses: Tensor, records: Sequence[Record | Whole], layout: Layout,
        *, may_be_quick: bool = True,
    ) -> None:  # fmt: skip
        self.losses, self.layout, self.records = losses, layout, tuple(records)
        self.may_be_quick = may_be_quick

    @cached_property
    def gradients(self) -> tuple[NamedGradient, ...]:
        """The gradients of the layers.

        Gradients of a parameter that several calls use are formed and added first, because the norm
        of their sum has cross terms.
        """
        n, uses = self.losses.shape[0], _uses(self.records)
        if max(uses.values(), default=1) == 1:
            return tuple(
                [NamedGradient(r.gradient(n, r.parameters), r.parameters) for r in self.records]
            )
        gradients, shared = [], dict[str, Tensor]()
        for record in self.records:
            names = record.parameters
            used_once = [own for own, full in names.items() if uses[full] == 1]
            used_again = [own for own, full in names.items() if uses[full] > 1]
            if used_once:
                gradients.append(NamedGradient(record.gradient(n, used_once), names))
            if used_again:
                for own, each in record.gradient(n, used_again).per_sample().items():
                    full = names[own]
                    shared[full] = shared[full] + each if full in shared else each
        gradients.append(NamedGradient(Formed(shared), {name: name for name in shared}))
        return tuple(gradients)

    @property
    def cancels(self) -> bool:
        """Whether a weighted sum adds several terms of a sample, which may cancel."""
        return any(named.gradient.cancels for named in self.gradients)

    def norms(self, *, quick: bool = False) -> Tensor:
        """Return ‖g_i‖ over all trainable parameters, rounded up.  # [sample], float64

        Args:
            quick: use fewer operations if possible. The norms are then slightly larger, and
                infinite if float32 overflows.
        """
        if not self.gradients:
            return torch.zeros_like(self.losses, dtype=torch.float64)
        layers = [named.gradient for named in self.gradients]
        # One layer gains nothing. The choice depends on the model only, not on the layers that this
        # batch used.
        quick = quick and self.may_be_quick and len(self.layout.names) > 2
        quick_layers = [g for g in layers if quick and isinstance(g, OnePosition) and g.is_quick]
        squares = [quick_square_norms(quick_layers)] if quick_layers else []
        if len(quick_layers) < len(layers):
            squares += [g.square_norms() for g in layers if g not in quick_layers]
        total = squares[0] if len(squares) == 1 else torch.stack(squares).sum(dim=0)
        return total.sqrt_().mul_(_ROUNDING_UP + self.layout.size * _UNIT)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i weights_i · g_i as one vector.  weights: [sample] -> [parameter]

        The sum is computed in the dtype of the weights. Training uses float64, so that the rounding
        of the sum is far below one record's share (`evenclip.mechanism.rounding`).
        """
        total: dict[str, Tensor] = {}
        for gradient, names in self.gradients:
            for own, summed in gradient.weighted_sum(weights).items():
                total[names[own]] = summed
        return self.layout.join(total, weights.dtype)

    def per_sample(self) -> Tensor:
        """Form every gradient, for tests and small diagnostics.  # [sample, parameter]"""
        eye = torch.eye(len(self.losses), dtype=torch.float64, device=self.losses.device)
        return torch.stack([self.weighted_sum(indicator) for indicator in eye])

    def masked(self, keep: Tensor) -> PerSample:
        """Return a copy with the gradients of all other samples set to 0.  keep: [sample]

        They are exactly 0, also if they were NaN.
        """
        losses = torch.where(keep, self.losses, 0.0)
        masked = PerSample(losses, (), self.layout, may_be_quick=self.may_be_quick)
        masked.gradients = tuple(
            NamedGradient(g.masked(keep), names) for g, names in self.gradients
        )
        return masked

    def formed(self) -> PerSample:
        """Return a copy without the operands of gradients that are formed."""
        formed = PerSample(self.losses, (), self.layout, may_be_quick=self.may_be_quick)
        formed.gradients = self.gradients
        return formed


class Blocks(PerSample):
    """The per-sample gradients of several blocks of samples."""

    def __init__(self, blocks: Sequence[PerSample], layout: Layout) -> None:
        super().__init__(torch.cat([block.losses for block in blocks]), (), layout)
        self._blocks, self._sizes = tuple(blocks), [len(block.losses) for block in blocks]

    @property
    def cancels(self) -> bool:
        """Whether a weighted sum adds several terms of a sample."""
        return any(block.cancels for block in self._blocks)

    def norms(self, *, quick: bool = False) -> Tensor:
        """Return the norms of all blocks."""
        return torch.cat([block.norms(quick=quick) for block in self._blocks])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over all blocks."""
        first, *others = zip(self._blocks, torch.split(weights, self._sizes), strict=True)
        total = first[0].weighted_sum(first[1])
        for block, some in others:
            total += block.weighted_sum(some)
        return total

    def masked(self, keep: Tensor) -> PerSample:
        """Return a copy with every block masked."""
        pairs = zip(self._blocks, torch.split(keep, self._sizes), strict=True)
        return Blocks([block.masked(some) for block, some in pairs], self.layout)


class Padded(PerSample):
    """The per-sample gradients of a block whose last rows are padding, without these rows.

    The padding has the weight 0, and is masked where it is not finite, because 0 · ∞ is NaN.
    """

    def __init__(self, block: PerSample, n: int) -> None:
        super().__init__(block.losses[:n], (), block.layout)
        self._block, self._rows = block, len(block.losses)

    @property
    def cancels(self) -> bool:
        """Whether a weighted sum adds several terms of a sample."""
        return self._block.cancels

    def norms(self, *, quick: bool = False) -> Tensor:
        """Return the norms of the samples."""
        n, norms = len(self.losses), self._block.norms(quick=quick)
        if not math.isfinite(float(norms[n:].sum())):
            self._block = self._block.masked(torch.arange(self._rows, device=norms.device) < n)
        return norms[:n]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over the samples."""
        return self._block.weighted_sum(pad(weights, (0, self._rows - len(weights))))

    def masked(self, keep: Tensor) -> PerSample:
        """Return a copy with the gradients of all other samples set to 0."""
        return Padded(self._block.masked(pad(keep, (0, self._rows - len(keep)))), len(keep))

    def formed(self) -> PerSample:
        """Return a copy without the operands of gradients that are formed."""
        return Padded(self._block.formed(), len(self.losses))


def _uses(records: Sequence[Record | Whole]) -> dict[str, int]:
    """Count the uses of each parameter, by the model's names."""
    uses: dict[str, int] = {}
    for record in records:
        for full in record.parameters.values():
            uses[full] = uses.get(full, 0) + 1
    return uses
