"""The layers with a formula: type -> gradient(module, a, delta, names). One file per kind; a new
kind is one row here. Recurrent layers have several inputs and outputs, and a formula of another
form (`recurrent`).
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
    """The formula for this very layer, or None: a subclass may compute something else, so it counts
    only if it does not.
    """
    for kind, gradient in FORMULAS.items():
        if isinstance(module, kind) and _computes_as(module, kind):
            return gradient
    return None


def _computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether `module` runs exactly the code of `kind` on parameters that are its own."""
    same_code = type(module).forward is kind.forward and "forward" not in vars(module)
    own = {name for name, _ in module.named_parameters()}  # weight_norm and the like bring others
    return same_code and own <= {"weight", "bias"}
