"""What Opacus leaves of the records in a module, and how it is removed.

Opacus keeps per-sample gradients and sums without noise as attributes of the parameters, and the
inputs of layers as attributes of the layers. `torch.save(module)` and `copy.deepcopy` take them
along; a `state_dict` does not.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

__all__ = ["clear", "clear_parameters"]

# Attributes of parameters that hold values of records; Opacus expects the first two to exist.
_RESET = "grad_sample", "summed_grad"
_DELETED = ("_current_grad_sample",)


def clear(module: nn.Module) -> None:
    """Delete everything that Opacus keeps of the records in a module.

    Every step of an `EvenOptimizer` clears its parameters. Call this before a module is saved or
    copied as a whole after other passes, for example a forward pass in training mode without a
    backward pass: the inputs of its layers are still there.

    Gradients `p.grad` are deleted too, because after a backward pass without a step they are
    without noise.

    >>> from torch import nn
    >>> layer = nn.Linear(2, 1)
    >>> layer.weight.grad_sample = layer.weight[None]
    >>> clear(layer)
    >>> layer.weight.grad_sample is None
    True
    """
    for part in module.modules():
        if hasattr(part, "activations"):
            setattr(part, "activations", [])  # noqa: B010 - torch types it as a module
        if hasattr(part, "max_batch_len"):  # left by a pass that failed
            delattr(part, "max_batch_len")
    parameters = list(module.parameters())
    clear_parameters(parameters)
    for p in parameters:
        p.grad = None
        if hasattr(p, "_forward_counter"):
            p._forward_counter = 0


def clear_parameters(parameters: Iterable[nn.Parameter]) -> None:
    """Delete per-sample gradients, and sums of them without noise, from parameters."""
    for p in parameters:
        for name in _RESET:
            if getattr(p, name, None) is not None:
                setattr(p, name, None)
        for name in _DELETED:
            if hasattr(p, name):
                delattr(p, name)
