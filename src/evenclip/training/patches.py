"""Functions that a program has put into torch in place of torch's own.

Modules of torch are known by name and version (`evenclip.training.contents`), so a function that
was put where they call it would otherwise be in no digest.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from evenclip.training.libraries import library_of

__all__ = ["patches"]


def patches() -> dict[str, Any]:
    """Return place -> function, for the functions in torch that are of no library."""
    return {
        f"{owner.__name__}.{name}": part
        for owner in _owners()
        for name, part in sorted(vars(owner).items())
        if isinstance(part, types.FunctionType) and not library_of(part.__globals__)
    }


def _owners() -> Iterator[Any]:
    """Yield the modules and classes whose functions models and losses call."""
    yield from (torch, torch.Tensor, functional)
    for module in (nn, torch.optim, torch.optim.lr_scheduler):
        yield module
        yield from (part for part in vars(module).values() if isinstance(part, type))
