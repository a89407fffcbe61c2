"""Layers with a formula: type -> gradient(module, a, delta, names).

Each kind of layer has its own file; a new kind needs one row in `FORMULAS`. Recurrent layers have
several inputs and outputs, so their formula has another signature (`recurrent`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from evenclip.gradients.layers import convolution, embedding, linear, normalisation
from evenclip.gradients.layers.layer import Formed, LayerGradient, square_sums

__all__ = ["FORMULAS", "Formed", "LayerGradient", "formula", "square_sums"]

Formula = Callable[..., LayerGradient]

FORMULAS: dict[type[nn.Module], Formula] = {
    nn.Linear: linear.gradient,
    nn.Conv1d: convolution.gradient,
    nn.Conv2d: convolution.gradient,
    nn.Conv3d: convolution.gradient,
    nn.Embedding: embedding.gradient,
    nn.LayerNorm: normalisation.layer_norm,
    nn.RMSNorm: normalisation.rms_norm,
    nn.GroupNorm: normalisation.group_norm,
    nn.InstanceNorm1d: normalisation.instance_norm,
    nn.InstanceNorm2d: normalisation.instance_norm,
    nn.InstanceNorm3d: normalisation.instance_norm,
}


def formula(module: nn.Module) -> Formula | None:
    """Return the formula for this layer, or None.

    A subclass has the formula only if it runs the same code.
    """
    for kind, gradient in FORMULAS.items():
        if isinstance(module, kind) and _computes_as(module, kind):
            return gradient
    return None


def _computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether `module` runs exactly the code of `kind` on its own parameters."""
    same_code = type(module).forward is kind.forward and "forward" not in vars(module)
    own = {name for name, _ in module.named_parameters()}  # weight_norm adds others
    return same_code and own <= {"weight", "bias"}
