"""How a model is called: with one input, several, or inputs by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["arguments", "call", "count"]


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model's positional arguments, and those by name."""
    if isinstance(x, dict):
        return (), x
    return (tuple(x), {}) if isinstance(x, (tuple, list)) else ((x,), {})


def call(model: nn.Module, x: Any) -> Any:
    """Call the model; x is its one input, a tuple of its inputs, or a dict of them by name."""
    args, kwargs = arguments(x)
    return model(*args, **kwargs)


def count(x: Any) -> int:
    """Return the number of samples in an input; a symbolic size while a step is traced."""
    samples: int = (x if isinstance(x, Tensor) else tree_leaves(x)[0]).shape[0]
    return samples
