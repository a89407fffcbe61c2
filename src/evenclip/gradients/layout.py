"""The trainable parameters of a model as one vector."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

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
    def dtype(self) -> torch.dtype:
        """The dtype of published gradients: that of the parameters, and at least float32."""
        return torch.promote_types(self.blank.dtype, torch.float32)

    @property
    def size(self) -> int:
        """Number of elements of all parameters."""
        return sum(self.sizes)

    def join(self, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
        """Concatenate into one vector; missing parameters are 0.  # [size]

        Args:
            tensors: parameter name -> tensor of its shape.
            dtype: dtype of the vector if there are no tensors.
        """
        blank = next(iter(tensors.values()), self.blank.to(dtype))
        pieces = [
            tensors[name].reshape(-1) if name in tensors else blank.new_zeros(size)
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return torch.cat(pieces) if pieces else blank

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of the vector by parameter name."""
        pieces = torch.split(vector, list(self.sizes))
        return {name: v.view(s) for name, s, v in zip(self.names, self.shapes, pieces, strict=True)}
