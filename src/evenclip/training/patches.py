"""What a program has put into torch in place of torch's own.

Modules of torch are known by name and version (`evenclip.training.contents`), so a function that
was put where they call it would otherwise be in no digest.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from evenclip.training.foreign import foreign, functions

__all__ = ["patches"]

_PLAIN = (bool, int, float, str, type(None))


def patches() -> dict[str, Any]:
    """Return place -> what is there, for everything in torch that is not what torch defines there.

    Names that torch itself gives to its functions are among them, as text, and so are the defaults
    of its functions and the constants of its classes.
    """
    known, others = list[str](), dict[str, list[Any]]()
    for owner in _owners():
        for name, part in foreign(owner):
            place = f"{owner.__module__}.{owner.__name__}" if _is_class(owner) else owner.__name__
            if isinstance(part, str):
                known.append(f"{place}.{name} {part}")
            else:
                others.setdefault(f"{place}.{name}", []).append(part)
        known += _constants(owner)
    return {"known": "\n".join(sorted(known)), **dict(sorted(others.items()))}


def _constants(owner: Any) -> Iterator[str]:
    """Yield the defaults of the functions of a module or a class, and the constants of a class."""
    for name, part in list(vars(owner).items()):
        for function in functions(part):
            if isinstance(function, types.FunctionType):
                defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()
                if defaults:
                    yield f"{function.__qualname__} {[d for d in defaults if _is_plain(d)]}"
        if _is_class(owner) and isinstance(part, _PLAIN) and not name.startswith("__"):
            yield f"{owner.__qualname__}.{name} {part!r}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_class(owner: Any) -> bool:
    return isinstance(owner, type)


def _owners() -> list[Any]:
    """Return the modules and classes whose functions models and losses call."""
    modules = [
        torch, functional, nn.init, torch.functional, torch.special, torch.linalg, torch.fft,
        torch._C._nn, torch._VF, nn, torch.optim, torch.optim.lr_scheduler,
    ]  # fmt: skip
    owners = {id(owner): owner for owner in (torch.Tensor, *modules)}
    for module in modules[-3:]:
        for part in list(vars(module).values()):
            if isinstance(part, type) and part.__module__.startswith("torch."):
                home = sys.modules.get(part.__module__, part)
                owners |= {id(part): part, id(home): home}
    return list(owners.values())
