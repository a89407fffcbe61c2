"""What a layer contributes to each sample's gradient.

A layer kind is one file with one function

    gradient(module, a, delta, names) -> LayerGradient

where `a` is the layer's input and `delta` the gradient of Σ_i ℓ_i with respect to its output, both
with the sample axis first, and `names` the layer's own trainable parameters ("weight", "bias") that
are asked for. Nothing is stored on modules or parameters; what is returned is a value.

Never too small. Clipping trusts the norm, so a norm must not come out below the norm of what
`weighted_sum` adds. Square sums are accumulated in float64. Where gradients are formed, the formed
ones are both measured and summed. Where they are not, sums over positions may cancel, and the bound
on their rounding is added (`layers.linear`).
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
    "operand_roundoff",
    "rounding",
    "square_sums",
    "sum_square_norms",
    "wanted",
]


# Numbers that a CPU takes squares of at a time, 8 MiB in float64: more would not stay in its cache.
_BLOCK = 2**20


class LayerGradient(ABC):
    """One layer's part of every sample's gradient, formed or not."""

    @abstractmethod
    def square_norms(self) -> Tensor:
        """‖this layer's part of g_i‖² for every sample i.  # [sample], float64"""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Parameter name -> Σ_i weights_i · g_i.  weights: [sample]"""

    @abstractmethod
    def per_sample(self) -> dict[str, Tensor]:
        """Parameter name -> every sample's gradient.  # [sample, *parameter]"""

    @abstractmethod
    def masked(self, keep: Tensor) -> LayerGradient:
        """The same with exactly 0 for samples that are not kept, whatever theirs was.  keep:
        [sample], bool
        """


class Formed(LayerGradient):
    """Gradients that stand in memory for every sample: small layers, shared parameters, layers
    without a formula.
    """

    def __init__(self, each: dict[str, Tensor], keep: Tensor | None = None) -> None:
        self._each, self._keep = (
            each,
            keep,
        )  # name -> [sample, *parameter]; those that count, None: all

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
    """Σ x² over everything but the sample axis, accumulated in float64.  # [sample]

    >>> square_sums(torch.full((2, 4), 2.0))
    tensor([16., 16.], dtype=torch.float64)
    """
    flat = x if x.ndim == 2 else x.unsqueeze(1).flatten(1)
    numbers = flat.numel()
    if (
        isinstance(numbers, int) and numbers > _BLOCK and flat.device.type == "cpu"
    ):  # a symbol where shapes are traced
        return torch.cat(
            [_square_lengths(rows) for rows in torch.split(flat, max(1, _BLOCK // flat.shape[1]))]
        )
    return _square_lengths(flat)


def _square_lengths(rows: Tensor) -> Tensor:
    """‖row‖² in float64, of which torch makes a copy of all rows."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return lengths.square()


def sum_square_norms(delta: Tensor) -> Tensor:
    """‖Σ_t δ_t‖², never below that of the sum that is taken later.  delta: [sample, position, out]
    -> [sample]
    """
    T = delta.shape[1]
    if T == 1:
        return square_sums(delta)
    sizes: Tensor = torch.linalg.vector_norm(
        delta, dim=2, dtype=torch.float64
    )  # ‖δ_t‖  [sample, position]
    total: Tensor = torch.linalg.vector_norm(delta.sum(dim=1), dim=1, dtype=torch.float64)
    return (
        total + rounding(delta, 2 * T) * sizes.sum(dim=1)
    ).square()  # this sum's roundings and the later one's


def kept(x: Tensor, keep: Tensor) -> Tensor:
    """The tensor with 0 for samples that are not kept, which a product with 0 is not.  x: [sample,
    ...]
    """
    return torch.where(keep.view(-1, *(1 for _ in x.shape[1:])), x, 0.0)


def rounding(like: Tensor, operations: int) -> float:
    """How far a result may lie off after so many roundings, relative to what went in: (1 +
    u)^operations − 1.

    >>> rounding(torch.zeros(1), 1) == 2.0**-24
    True
    """
    return math.expm1(operations * math.log1p(torch.finfo(like.dtype).eps / 2))


def operand_roundoff(like: Tensor, precision: str) -> float:
    """What float32 numbers are rounded to before they are multiplied, where somebody has allowed
    that.

    TF32 keeps eleven bits, bfloat16 eight. `precision` is the setting of torch.backends for the
    operation.
    """
    return (
        {"tf32": 2.0**-11, "bf16": 2.0**-8}.get(precision, 0.0)
        if like.dtype == torch.float32
        else 0.0
    )


def wanted(parts: dict[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Those parts whose parameter is asked for."""
    return {name: part for name, part in parts.items() if name in names}


def _contract(weights: Tensor, each: Tensor, keep: Tensor | None) -> Tensor:
    """Σ_i weights_i · each_i over those that count."""
    flat, weights = each.reshape(each.shape[0], -1), weights.to(each.dtype)
    return torch.mv((flat if keep is None else kept(flat, keep)).T, weights).reshape(each.shape[1:])
