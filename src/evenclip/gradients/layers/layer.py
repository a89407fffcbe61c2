"""What a layer contributes to each sample's gradient.

A layer kind is one file with one function

    gradient(module, a, delta, names) -> LayerGradient

where `a` is the layer's input and `delta` the gradient of Σ_i ℓ_i with respect to its output, both with the sample axis
first, and `names` the layer's own trainable parameters ("weight", "bias") that are asked for. Nothing is stored on
modules or parameters; what is returned is a value.

Never too small. Clipping trusts the norm, so a norm must not come out below the norm of what `weighted_sum` adds.
Square sums are accumulated in float64. Where gradients are formed, the formed ones are both measured and summed. Where
they are not, sums over positions may cancel, and the bound on their rounding is added (`layers.linear`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

import torch
from torch import Tensor

__all__ = ["Formed", "LayerGradient", "square_sums"]


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


class Formed(LayerGradient):
    """Gradients that stand in memory for every sample: small layers, shared parameters, layers without a formula."""

    def __init__(self, each: dict[str, Tensor]) -> None:
        self._each = each  # name -> [sample, *parameter]

    def square_norms(self) -> Tensor:  # noqa: D102
        return torch.stack([square_sums(g) for g in self._each.values()]).sum(dim=0)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:  # noqa: D102
        return {name: _contract(weights, g) for name, g in self._each.items()}

    def per_sample(self) -> dict[str, Tensor]:  # noqa: D102
        return self._each


def square_sums(x: Tensor) -> Tensor:
    """Σ x² over everything but the sample axis, accumulated in float64.  # [sample]

    >>> square_sums(torch.full((2, 3), 2.0))
    tensor([12., 12.], dtype=torch.float64)
    """
    lengths: Tensor = torch.linalg.vector_norm(x.unsqueeze(1).flatten(1), dim=1, dtype=torch.float64)
    return lengths.square()


def wanted(parts: dict[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Those parts whose parameter is asked for."""
    return {name: part for name, part in parts.items() if name in names}


def _contract(weights: Tensor, each: Tensor) -> Tensor:
    """Σ_i weights_i · each_i."""
    flat = each.reshape(len(each), -1)
    return torch.mv(flat.T, weights.to(flat.dtype)).reshape(each.shape[1:])
