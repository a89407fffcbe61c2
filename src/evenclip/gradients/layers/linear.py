"""Linear layers, over any number of positions.

With a [sample, position, in] and δ [sample, position, out], the gradient of sample i is δ_iᵀ a_i
for the weight and Σ_t δ_it for the bias, and

    one position:   ‖δ_i‖² (‖a_i‖² + 1)                 (Goodfellow 2015)
    T positions:    Σ_{s,t} ⟨a_is, a_it⟩ ⟨δ_is, δ_it⟩   if 2T² ≤ in · out
                                                        (Li et al. 2022; Bu et al. 2022)
                    ‖δ_iᵀ a_i‖²                         otherwise, formed

The sum over positions can cancel (nearly constant inputs, δ with a sum near 0). The Gram form is
therefore computed in float64, and bounds on roundings are added:

- a margin for the later sum, (T + 1)·2⁻²⁴·Σ_t ‖a_t‖‖δ_t‖;
- for a product that is formed only to be measured, T·u·Σ_t ‖a_t‖‖δ_t‖ with the unit roundoff u;
- for the Gram form, (in + out + T²)·u·(Σ_t ‖a_t‖‖δ_t‖)² with the u of float64.

A training step measures several layers of one position together, in their own precision and in few
operations (`quick_square_norms`), and adds the bound on the roundings there too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from evenclip.gradients.layers.layer import (
    LayerGradient,
    kept,
    lengths,
    margin,
    operand_roundoff,
    rounding,
    square_sums,
    sum_square_norms,
)

__all__ = [
    "FORMULAS",
    "OnePosition",
    "gradient",
    "operands",
    "product_square_norms",
    "quick_square_norms",
]

# Size of a block of per-sample products that are formed only to be measured: 64 MiB in float32.
_BLOCK = 2**24
# The widest layer that is measured in float32: at 1024 the bound on the roundings increases a norm
# by 0.012 %.
_WIDEST = 1024
# Minimum length of δ in float32 norms: the squares of smaller numbers underflow.
_SHORTEST = 2.0**-50


def gradient(module: nn.Linear, a: Tensor, delta: Tensor, names: Collection[str]) -> LayerGradient:
    """Return the gradients of a Linear layer.  a: [sample, ..., in], delta: [sample, ..., out]"""
    del module
    if a.ndim == 2:
        return OnePosition(a, delta, names)
    n, d, p = a.shape[0], a.shape[-1], delta.shape[-1]
    return Positions(a.reshape(n, -1, d), delta.reshape(n, -1, p), names)


class OnePosition(LayerGradient):
    """The gradient δaᵀ of the weight, never formed, and δ of the bias."""

    def __init__(self, a: Tensor, delta: Tensor, names: Collection[str]) -> None:
        self._a, self._delta = a, delta  # [sample, in], [sample, out]
        self._weight, self._bias = "weight" in names, "bias" in names

    @property
    def width(self) -> int:
        """The larger of the input and output widths."""
        return max(self._a.shape[1], self._delta.shape[1])

    @property
    def is_quick(self) -> bool:
        """Whether `quick_square_norms` supports this layer."""
        single = self._a.dtype == self._delta.dtype == torch.float32
        return self._weight and self._bias and single and self.width <= _WIDEST

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Return ‖δ_i‖ and ‖a_i‖ in their own precision.  # [sample], [sample]"""
        norm = torch.linalg.vector_norm
        return norm(self._delta, dim=1), norm(self._a, dim=1)

    def square_norms(self) -> Tensor:  # noqa: D102
        total = square_sums(self._delta)
        if not self._weight:
            return total
        size = square_sums(self._a)
        return torch.addcmul(total, total, size) if self._bias else total * size  # ‖δ‖² (‖a‖² + 1)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:  # noqa: D102
        weights = weights.to(torch.promote_types(weights.dtype, self._delta.dtype))
        delta, out = self._delta.to(weights.dtype), {}
        if self._weight:
            a = self._a.to(weights.dtype)
            if a.shape[1] < delta.shape[1]:  # scale the smaller operand
                out["weight"] = delta.T @ (a * weights.unsqueeze(1))
            else:
                out["weight"] = (delta * weights.unsqueeze(1)).T @ a
        if self._bias:
            out["bias"] = torch.mv(delta.T, weights)
        return out

    def per_sample(self) -> dict[str, Tensor]:  # noqa: D102
        gradients = {"weight": self._delta.unsqueeze(2) * self._a.unsqueeze(1), "bias": self._delta}
        return {
            name: each
            for name, each in gradients.items()
            if (self._weight if name == "weight" else self._bias)
        }

    def masked(self, keep: Tensor) -> OnePosition:  # noqa: D102
        requested = (("weight", self._weight), ("bias", self._bias))
        names = [name for name, is_requested in requested if is_requested]
        return OnePosition(kept(self._a, keep), kept(self._delta, keep), names)


class Positions(LayerGradient):
    """The gradient δᵀa of the weight and Σ_t δ_t of the bias.

    They are formed only if that is the cheapest way to compute the norm.
    """

    cancels = True

    def __init__(self, a: Tensor, delta: Tensor, names: Collection[str]) -> None:
        self._a, self._delta = a, delta  # [sample, position, in], [sample, position, out]
        self._names = frozenset(names)

    def square_norms(self) -> Tensor:
        total = self._a.new_zeros(self._a.shape[0], dtype=torch.float64)
        if "weight" in self._names:
            total = product_square_norms(self._a, self._delta)
        if "bias" in self._names:
            total = total + sum_square_norms(self._delta)
        return total

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        weights = weights.to(torch.promote_types(weights.dtype, self._delta.dtype))
        weighted = self._delta * weights.view(-1, 1, 1)
        weighted = weighted.reshape(-1, weighted.shape[-1])  # [sample · position, out]
        out = {}
        if "weight" in self._names:
            a = self._a.reshape(-1, self._a.shape[-1]).to(weights.dtype)
            out["weight"] = weighted.T @ a
        if "bias" in self._names:
            out["bias"] = weighted.sum(dim=0)
        return out

    def per_sample(self) -> dict[str, Tensor]:
        out = {}
        if "weight" in self._names:
            out["weight"] = self._delta.mT @ self._a
        if "bias" in self._names:
            out["bias"] = _over_positions(self._delta)
        return out

    def masked(self, keep: Tensor) -> Positions:
        return Positions(kept(self._a, keep), kept(self._delta, keep), self._names)


def quick_square_norms(layers: Sequence[OnePosition]) -> Tensor:
    """Return Σ_layers ‖δ_i‖² (‖a_i‖² + 1) for layers with `is_quick`.

    The result is never too small, and infinite if float32 overflows.

    In any order of summation, a sum of d squares is off by a factor of at most (1 + u)^(d+1), and
    its root by one rounding more. Underflow loses at most d·2⁻¹²⁶. Relative to the smallest square
    that counts, 2⁻¹⁰⁰, this is d·u/4. For a, the 1 of the bias is far larger than the loss.

    Returns:
        [sample], float64
    """
    deltas, inputs = zip(*(layer.lengths() for layer in layers), strict=True)
    lengths = torch.stack([*deltas, *inputs]).clamp_(min=_SHORTEST)  # [2 · layer, sample]
    delta, a = torch.split(lengths.double().square_(), len(layers))
    slack = 1 + rounding(lengths, 2 * max(layer.width for layer in layers) + 4)  # of each square
    return torch.addcmul(delta, delta, a).sum(dim=0).mul_(slack**2)


def product_square_norms(a: Tensor, delta: Tensor) -> Tensor:
    """Return ‖δ_iᵀ a_i‖², never below that of the sum that is formed later.

    Args:
        a: [sample, position, in]
        delta: [sample, position, out]
    """
    T, d, p = a.shape[1], a.shape[2], delta.shape[2]
    if T == 1:
        return square_sums(a) * square_sums(delta)
    # sizes: ‖a_t‖‖δ_t‖  [sample, position]
    sizes = lengths(a, 2) * lengths(delta, 2)
    size = sizes.sum(dim=1)
    if d * p >= 2 * T**2:
        norm = (_gram_square_norms(a, delta) + rounding(size, d + p + T**2) * size.square()).sqrt()
    else:
        # Two operands, and a margin for the product of their roundings.
        norm = _formed_square_norms(a, delta).sqrt() + (rounding(a, T) + 3 * operands(a)) * size
    return (norm + margin(T) * size).square()


def operands(like: Tensor) -> float:
    """Return the operand roundoff of a matrix product; 0 if it does not round operands."""
    backend = torch.backends.cuda if like.is_cuda else torch.backends.mkldnn
    return operand_roundoff(like, backend.matmul.fp32_precision)


def _gram_square_norms(a: Tensor, delta: Tensor) -> Tensor:
    """Return Σ_{s,t} ⟨a_s, a_t⟩⟨δ_s, δ_t⟩ in float64; rounding may make it slightly negative."""
    a, delta = a.double(), delta.double()
    return ((a @ a.mT) * (delta @ delta.mT)).sum(dim=(1, 2)).clamp(min=0.0)


def _formed_square_norms(a: Tensor, delta: Tensor) -> Tensor:
    """Return ‖δᵀa‖² by forming the products, one block of samples at a time."""
    block = max(1, _BLOCK // (a.shape[2] * delta.shape[2]))
    if a.shape[0] <= block:
        return square_sums(delta.mT @ a)
    blocks = zip(torch.split(a, block), torch.split(delta, block), strict=True)
    return torch.cat([square_sums(d.mT @ x) for x, d in blocks])


def _over_positions(delta: Tensor) -> Tensor:
    """Return Σ_t δ_t.  # [sample, out]"""
    return delta[:, 0] if delta.shape[1] == 1 else delta.sum(dim=1)


FORMULAS = {nn.Linear: gradient}
