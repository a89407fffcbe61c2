"""The contribution of one layer to each sample's gradient.

Each kind of layer is one file with one function

    gradient(module, a, delta, names) -> LayerGradient

where `a` is the layer's input and `delta` the gradient of Σ_i ℓ_i with respect to its output, both
with the sample axis first, and `names` are the requested trainable parameters of the layer
("weight", "bias"). Nothing is stored on modules or parameters.

Norms are never too small. Clipping relies on the norm, so a norm must not be below the norm of the
term that `weighted_sum` adds. Square sums are accumulated in float64. If gradients are formed, the
same formed gradients are measured and summed. If they are not formed, sums over positions may
cancel. Then the bound on the rounding of the norm is added (`layers.linear`), and a margin in
proportion to the terms that cancel, which bounds the rounding of the weighted sum
(`evenclip.mechanism.rounding`). Weighted sums are computed in the dtype of the weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection

import torch
from torch import Tensor

__all__ = [
    "Formed",
    "LayerGradient",
    "kept",
    "lengths",
    "margin",
    "operand_roundoff",
    "rounding",
    "square_sums",
    "sum_square_norms",
    "wanted",
]


_SHORTEST = 2.0**-500
# Numbers per block when a CPU computes square sums: 8 MiB in float64, to stay in the cache.
_BLOCK = 2**20


class LayerGradient(ABC):
    """One layer's part of each sample's gradient, formed or not.

    Attributes:
        cancels: whether `weighted_sum` adds several terms of a sample, which may cancel.
    """

    cancels: bool = False

    @abstractmethod
    def square_norms(self) -> Tensor:
        """Return ‖this layer's part of g_i‖² for each sample i.  # [sample], float64"""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Return parameter name -> Σ_i weights_i · g_i.  weights: [sample]"""

    @abstractmethod
    def per_sample(self) -> dict[str, Tensor]:
        """Return parameter name -> per-sample gradients.  # [sample, *parameter]"""

    @abstractmethod
    def masked(self, keep: Tensor) -> LayerGradient:
        """Return a copy with exactly 0 for all other samples.  keep: [sample], bool"""


class Formed(LayerGradient):
    """Per-sample gradients in memory.

    Used for small layers, shared parameters and layers without a formula.
    """

    def __init__(self, each: dict[str, Tensor], keep: Tensor | None = None) -> None:
        self._each = each  # name -> [sample, *parameter]
        self._keep = keep  # mask of the samples that are not 0; None: all

    def square_norms(self) -> Tensor:  # noqa: D102
        return torch.stack([square_sums(g) for g in self.per_sample().values()]).sum(dim=0)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:  # noqa: D102
        return {name: _contract(weights, g, self._keep) for name, g in self._each.items()}

    def per_sample(self) -> dict[str, Tensor]:  # noqa: D102
        keep = self._keep
        return (
            self._each if keep is None else {name: kept(g, keep) for name, g in self._each.items()}
        )

    def masked(self, keep: Tensor) -> Formed:  # noqa: D102
        return Formed(self._each, keep if self._keep is None else self._keep & keep)


def square_sums(x: Tensor) -> Tensor:
    """Return Σ x² over all axes but the first, accumulated in float64.  # [sample]

    >>> square_sums(torch.full((2, 4), 2.0))
    tensor([16., 16.], dtype=torch.float64)
    """
    flat = x if x.ndim == 2 else x.unsqueeze(1).flatten(1)
    numbers = flat.numel()  # a symbolic size while shapes are traced
    if isinstance(numbers, int) and numbers > _BLOCK and flat.device.type == "cpu":
        blocks = torch.split(flat, max(1, _BLOCK // flat.shape[1]))
        return torch.cat([_square_lengths(rows) for rows in blocks])
    return _square_lengths(flat)


def _square_lengths(rows: Tensor) -> Tensor:
    """Return ‖row‖² in float64, never too small; torch copies all rows for it."""
    return lengths(rows, 1).square()


def lengths(x: Tensor, dim: int) -> Tensor:
    """Return the lengths along an axis in float64, never too small.

    The squares of numbers below 2⁻⁵¹¹ underflow in float64, so a vector in float64 that is not 0
    has at least the length 2⁻⁵⁰⁰. Narrower numbers have no such squares.
    """
    computed: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=torch.float64)
    if x.dtype != torch.float64:
        return computed
    return torch.where((x != 0).any(dim=dim), computed.clamp(min=_SHORTEST), computed)


def sum_square_norms(delta: Tensor) -> Tensor:
    """Return ‖Σ_t δ_t‖², never below that of the later sum.

    Args:
        delta: [sample, position, out]

    Returns:
        [sample]
    """
    T = delta.shape[1]
    if T == 1:
        return square_sums(delta)
    # sizes: ‖δ_t‖  [sample, position]
    sizes, total = lengths(delta, 2), lengths(delta.sum(dim=1), 1)
    return (total + (rounding(delta, T) + margin(T)) * sizes.sum(dim=1)).square()


def kept(x: Tensor, keep: Tensor) -> Tensor:
    """Set all samples to 0 that are not kept, also if they are NaN.  x: [sample, ...]"""
    return torch.where(keep.view(-1, *(1 for _ in x.shape[1:])), x, 0.0)


def rounding(like: Tensor, operations: int) -> float:
    """Return the relative error bound after this many roundings: (1 + u)^operations − 1.

    >>> rounding(torch.zeros(1), 1) == 2.0**-24
    True
    """
    return math.expm1(operations * math.log1p(torch.finfo(like.dtype).eps / 2))


def margin(T: int) -> float:
    """Return the share of Σ_t ‖term_t‖ that is added to the norm of a sum of T terms.

    It is that of T + 1 roundings in float32, in any precision.
    """
    return math.expm1((T + 1) * math.log1p(2.0**-24))


def operand_roundoff(like: Tensor, precision: str) -> float:
    """Return the roundoff of float32 operands before a product; 0 if they are not rounded.

    TF32 keeps eleven bits, bfloat16 eight. `precision` is the setting of torch.backends for the
    operation.
    """
    if like.dtype != torch.float32:
        return 0.0
    return {"tf32": 2.0**-11, "bf16": 2.0**-8}.get(precision, 0.0)


def wanted(gradients: dict[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Return the gradients of the requested parameters."""
    return {name: gradient for name, gradient in gradients.items() if name in names}


def _contract(weights: Tensor, each: Tensor, keep: Tensor | None) -> Tensor:
    """Return Σ_i weights_i · each_i over the kept samples, in the dtype of the weights."""
    flat = each.reshape(each.shape[0], -1)
    if keep is not None:
        flat = kept(flat, keep)
    numbers = flat.numel()  # a symbolic size while shapes are traced
    if isinstance(numbers, int) and numbers > _BLOCK and flat.dtype != weights.dtype:
        columns = torch.split(flat, max(1, _BLOCK // flat.shape[0]), dim=1)
        total = torch.cat([torch.mv(part.to(weights.dtype).T, weights) for part in columns])
    else:
        total = torch.mv(flat.to(weights.dtype).T, weights)
    return total.reshape(each.shape[1:])
