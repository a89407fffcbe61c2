"""Layers that normalise within one sample: LayerNorm, GroupNorm, InstanceNorm, RMSNorm.

Such a layer scales and shifts the normalised input x̂. The gradient of sample i is Σ_t x̂_t ⊙ δ_t
for the scale and Σ_t δ_t for the shift, summed over the positions that share a parameter. Both have
the size of the parameters and are formed.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn
from torch.nn import functional as F

from evenclip.gradients.layers.layer import Formed, LayerGradient, wanted

__all__ = ["FORMULAS", "group_norm", "instance_norm", "layer_norm", "rms_norm"]


def layer_norm(
    module: nn.LayerNorm, a: Tensor, delta: Tensor, names: Collection[str]
) -> LayerGradient:
    """Return the gradients of a LayerNorm.  a, delta: [sample, ..., *normalized_shape]"""
    normal = F.layer_norm(a, module.normalized_shape, eps=module.eps)
    return _trailing(normal, delta, len(module.normalized_shape), names)


def rms_norm(module: nn.RMSNorm, a: Tensor, delta: Tensor, names: Collection[str]) -> LayerGradient:
    """Return the gradients of an RMSNorm.  a, delta: [sample, ..., *normalized_shape]"""
    normal = F.rms_norm(a, module.normalized_shape, eps=module.eps)
    return _trailing(normal, delta, len(module.normalized_shape), names)


def group_norm(
    module: nn.GroupNorm, a: Tensor, delta: Tensor, names: Collection[str]
) -> LayerGradient:
    """Return the gradients of a GroupNorm.  a, delta: [sample, channel, ...]"""
    return _channels(F.group_norm(a, module.num_groups, eps=module.eps), delta, names)


def instance_norm(
    module: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d,
    a: Tensor,
    delta: Tensor,
    names: Collection[str],
) -> LayerGradient:
    """Return the gradients of an InstanceNorm without running statistics.

    a, delta: [sample, channel, ...]
    """
    return _channels(F.instance_norm(a, eps=module.eps), delta, names)


def _trailing(normal: Tensor, delta: Tensor, axes: int, names: Collection[str]) -> LayerGradient:
    """Return the gradients of parameters along the last `axes` axes."""
    shape = delta.shape[-axes:]
    gradients = {
        "weight": (normal * delta).reshape(delta.shape[0], -1, *shape).sum(dim=1),
        "bias": delta.reshape(delta.shape[0], -1, *shape).sum(dim=1),
    }
    return Formed(wanted(gradients, names))


def _channels(normal: Tensor, delta: Tensor, names: Collection[str]) -> LayerGradient:
    """Return the gradients of parameters along axis 1."""
    n, c = delta.shape[:2]
    gradients = {
        "weight": (normal * delta).reshape(n, c, -1).sum(dim=2),
        "bias": delta.reshape(n, c, -1).sum(dim=2),
    }
    return Formed(wanted(gradients, names))


FORMULAS = {
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    nn.InstanceNorm1d: instance_norm,
    nn.InstanceNorm2d: instance_norm,
    nn.InstanceNorm3d: instance_norm,
}
