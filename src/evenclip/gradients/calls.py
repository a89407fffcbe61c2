"""How a model is called: with one input, several, or inputs by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from evenclip.arguments import shown
from evenclip.gradients.errors import ModelError, first_line

__all__ = ["arguments", "call", "check_samples", "count", "taking"]


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model's positional arguments, and those by name."""
    if isinstance(x, dict):
        return (), x
    return (tuple(x), {}) if isinstance(x, (tuple, list)) else ((x,), {})


def call(model: nn.Module, x: Any) -> Any:
    """Call the model; x is its one input, a tuple of its inputs, or a dict of them by name."""
    args, kwargs = arguments(x)
    return model(*args, **kwargs)


def check_samples(x: Any, y: Any) -> None:
    """Raise unless inputs and targets hold tensors, samples first."""
    for name, value in (("x", x), ("y", y)):
        try:
            leaves = tree_leaves(value)
        except RecursionError:
            leaves = []
        if not leaves or not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
            raise TypeError(
                f"{name} is {shown(value)}; it must be a tensor [sample, ...], or a tuple or dict "
                "of them."
            )
    lengths = {len(leaf) for leaf in tree_leaves((x, y))}
    if len(lengths) > 1:
        raise ValueError(
            f"x and y have {' and '.join(map(str, sorted(lengths)))} samples; give as many targets "
            "as inputs."
        )


@contextmanager
def taking(taker: str, what: str) -> Iterator[None]:
    """Turn torch's errors about shapes and types, and those of custom code, into a sentence."""
    try:
        yield
    except ModelError:
        raise
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(
            f"{taker} does not take {what}; torch says: {first_line(error).removesuffix('.')}."
        ) from error


def count(x: Any) -> int:
    """Return the number of samples in an input; a symbolic size while a step is traced."""
    samples: int = (x if isinstance(x, Tensor) else tree_leaves(x)[0]).shape[0]
    return samples
