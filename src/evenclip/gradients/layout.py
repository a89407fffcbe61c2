"""The trainable parameters of a model as one vector."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from evenclip.gradients.layers.linear import operands

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """The trainable parameters of a model, concatenated into one vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    blank: Tensor  # empty, of the parameters' dtype and device

    @staticmethod
    def of(model: nn.Module) -> Layout:
        """Return the layout of all parameters with `requires_grad`, in the model's order."""
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            return Layout((), (), torch.empty(0))
        blank = next(iter(trainable.values())).detach().new_empty(0)
        return Layout(tuple(trainable), tuple(p.shape for p in trainable.values()), blank)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """Number of elements of all parameters."""
        return sum(self.sizes)

    @cached_property
    def roundoff(self) -> float:
        """The unit roundoff of the parameters."""
        return torch.finfo(self.blank.dtype).eps / 2

    @property
    def rounding_up(self) -> float:
        """Factor that makes a norm an upper bound on the norm of the term in the weighted sum.

        It covers the roundings of weight · input · δ with sixteen unit roundoffs. If products with
        fewer bits (TF32) are enabled, their roundoff is used.
        """
        return 1 + 16 * max(self.roundoff, operands(self.blank))

    def join(self, tensors: dict[str, Tensor]) -> Tensor:
        """Concatenate into one vector; missing parameters are 0.  # [size]"""
        if len(tensors) == len(self.names):
            if not tensors:
                return self.blank
            return torch.cat([tensors[name].reshape(-1) for name in self.names])
        pieces = [
            tensors[name].reshape(-1) if name in tensors else self.blank.new_zeros(size)
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return torch.cat(pieces) if pieces else self.blank

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of the vector by parameter name."""
        pieces = torch.split(vector, list(self.sizes))
        return {name: v.view(s) for name, s, v in zip(self.names, self.shapes, pieces, strict=True)}
