"""Models whose samples are independent by the types of their layers.

Such a model is an `nn.Sequential`, possibly nested, of torch's own layers that compute every sample
from that sample alone, with a loss of torch that does the same. Its types are exact (a subclass may
compute anything), no `forward` is replaced, and no hook is registered, on a module or globally. Its
samples pass at once, which is faster for small layers than each by itself.

Some layers are independent only with some options or shapes: a LayerNorm over the sample axis is
not. So a few artificial samples pass, and the shapes at every layer are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from evenclip.gradients.foreign import is_plain_tensor
from evenclip.gradients.losses import Loss

__all__ = ["independent_by_layers"]

# Layers that compute each number from one number; dropout draws a mask for each.
_ELEMENTWISE = (
    nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh,
    nn.Identity, nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU,
    nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip
# Layers that read [sample, channel, *space], with so many axes of space.
_SPATIAL = {
    kind: axes
    for axes in (1, 2, 3)
    for name in ("Conv", "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "InstanceNorm")
    if (kind := getattr(nn, f"{name}{axes}d", None)) is not None
}
_LOSSES: tuple[Callable[..., Tensor], ...] = (
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.cross_entropy, F.huber_loss,
    F.l1_loss, F.mse_loss, F.nll_loss, F.smooth_l1_loss,
)  # fmt: skip
_LOSS_MODULES = (
    nn.BCELoss, nn.BCEWithLogitsLoss, nn.CrossEntropyLoss, nn.HuberLoss, nn.L1Loss, nn.MSELoss,
    nn.NLLLoss, nn.SmoothL1Loss,
)  # fmt: skip
# Losses that compare two tensors of one shape; torch would broadcast others over the samples.
_PAIRED = (*_LOSSES[:2], *_LOSSES[3:6], _LOSSES[7], nn.BCELoss, nn.BCEWithLogitsLoss, nn.HuberLoss,
           nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss)  # fmt: skip
_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)
_GLOBAL_HOOKS = tuple(
    name for name in vars(torch_module) if name.startswith("_global_") and "hooks" in name
)


def independent_by_layers(model: nn.Module, loss: Loss, x: Any, y: Any) -> bool:
    """Return whether model and loss compute every sample alone, by their types.

    Args:
        model: the model.
        loss: the loss as the user gave it.
        x: inputs of a few artificial samples.
        y: their targets.
    """
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim and y.ndim):
        return False
    if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
        return False
    if not _is_known(loss, _LOSSES, _LOSS_MODULES):
        return False
    layers = list(_layers(model))
    if None in layers:
        return False
    x = x.clone()  # a layer may work in place
    with torch.no_grad():
        for layer in layers:
            assert layer is not None
            if not _alone(layer, x):
                return False
            n, x = len(x), layer(x)
            if not (isinstance(x, Tensor) and x.ndim and len(x) == n):
                return False
    paired = any(loss is known or type(loss) is known for known in _PAIRED)
    return x.ndim > 0 and (not paired or x.shape == y.shape)


def _is_known(
    loss: Loss, functions: tuple[Callable[..., Tensor], ...], modules: tuple[type, ...]
) -> bool:
    """Return whether a loss is one of torch's own, as torch defines it."""
    if isinstance(loss, nn.Module):
        return type(loss) in modules and _is_plain(loss)
    return any(loss is known for known in functions)


def _layers(module: nn.Module) -> Iterator[nn.Module | None]:
    """Yield the layers of nested sequences in order; None where something else is in it."""
    if type(module) is nn.Sequential and _is_plain(module):
        for child in module:
            yield from _layers(child)
    else:
        yield module if _is_plain(module) and not list(module.children()) else None


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module runs the code of its class and nothing else."""
    own = [*module._parameters.values(), *module._buffers.values()]
    return not (
        not all(value is None or is_plain_tensor(value) for value in own)
        or any(callable(getattr(type(module), name, None)) for name in vars(module))
        or vars(module).get("_compiled_call_impl") is not None
        or not type(module).forward.__module__.startswith("torch.nn.")  # replaced in the class
        or any(getattr(module, name) for name in _HOOKS)
        or hasattr(module, "parametrizations")
    )


def _alone(layer: nn.Module, x: Tensor) -> bool:
    """Return whether a layer computes each sample of this input alone, by its type and options."""
    kind, axes = type(layer), x.ndim
    if kind in _ELEMENTWISE:
        return True
    if kind in _SPATIAL:
        return axes == _SPATIAL[kind] + 2 and not getattr(layer, "track_running_stats", False)
    match layer:
        case nn.Linear():
            return kind is nn.Linear and axes >= 2
        case nn.Flatten():
            return kind is nn.Flatten and layer.start_dim >= 1
        case nn.Unflatten():
            return kind is nn.Unflatten and isinstance(layer.dim, int) and layer.dim >= 1
        case nn.LayerNorm() | nn.RMSNorm():
            return kind in (nn.LayerNorm, nn.RMSNorm) and len(layer.normalized_shape) < axes
        case nn.GroupNorm():
            return kind is nn.GroupNorm and axes >= 2
        case nn.PReLU():
            return kind is nn.PReLU and axes >= 2
        case nn.Softmax() | nn.LogSoftmax():
            dim = layer.dim
            return kind in (nn.Softmax, nn.LogSoftmax) and dim is not None and dim % axes >= 1
        case nn.Embedding():
            return kind is nn.Embedding and layer.max_norm is None and not layer.scale_grad_by_freq
    return False
