"""Layers with a formula: type -> gradient(module, a, delta, names).

Each kind of layer has its own file, and its `FORMULAS` names the types that it is for. Recurrent
layers have several inputs and outputs, so their formula has another signature (`recurrent`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from torch import nn

from evenclip.gradients.layers.layer import Formed, LayerGradient, square_sums

__all__ = ["FORMULAS", "Formed", "LayerGradient", "formula", "square_sums"]

Formula = Callable[..., LayerGradient]


def _formulas() -> dict[type[nn.Module], Formula]:
    """Return the formulas of all files of this folder."""
    modules = [
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
    ]
    return {
        kind: gradient
        for module in modules
        for kind, gradient in getattr(module, "FORMULAS", {}).items()
    }


FORMULAS = _formulas()
"""Type of layer -> formula."""


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
