"""What a model holds besides its trained parameters, which no step may change.

A running mean, a layer that initialises itself from its first batch, or a record kept in an
attribute would leave with the model without noise, and would make a later step depend on an earlier
batch. So buffers, parameters and tensors in attributes must be as they were after every pass: a
model that changes one is refused by name. Other attributes, such as a counter or a cache, are put
back to what they were.

Tensors are compared by identity and by torch's count of changes in place, so nothing is copied.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from evenclip.gradients.errors import ModelError

__all__ = ["ModelState"]

_MISSING = object()
# Attributes of every module, which hold modules, tensors and hooks; `forward` is replaced by tapes.
_KNOWN = frozenset(vars(nn.Module())) | {"forward"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class ModelState:
    """The state of a model at one time, to compare with later and to return to.

    Args:
        model: the model.
        what: what it is called in messages.
        trained: whether trainable parameters are compared too, which updates change.
        frozen: whether frozen parameters are. No parameters of a sharded model are, because torch
            replaces them in every pass.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> state = ModelState(model)
    >>> model.batches = 3
    >>> state.check()
    >>> hasattr(model, "batches")
    False
    """

    def __init__(
        self,
        model: nn.Module,
        what: str = "the model",
        *,
        trained: bool = True,
        frozen: bool = True,
    ) -> None:
        self._what = what
        whole = not any(hasattr(p, "full_tensor") for p in model.parameters())
        self._model, self._trained, self._frozen = model, trained and whole, frozen and whole
        self._tensors = {name: (t, t._version) for name, t in self._named()}
        self._attributes = {
            path: {name: _Kept(value) for name, value in _attributes(module)}
            for path, module in model.named_modules()
        }

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors to compare, by name."""
        for name, p in self._model.named_parameters():
            if self._trained if p.requires_grad else self._frozen:
                yield name, p
        yield from self._model.named_buffers()

    def check(self) -> None:
        """Put attributes back; raise for anything else that has changed.

        Raises:
            ModelError: a tensor of the model has changed, or an attribute cannot be put back.
        """
        now = dict(self._named())
        for name in {**self._tensors, **now}:
            before, version = self._tensors.get(name, (None, 0))
            if now.get(name) is not before or (before is not None and before._version != version):
                raise _changed(self._what, repr(name))
        for path, module in self._model.named_modules():
            kept = self._attributes.get(path, {})
            current = dict(_attributes(module))
            for name in {**kept, **current}:
                value = current.get(name, _MISSING)
                if name not in kept:
                    delattr(module, name)
                elif not kept[name].is_same(value) and not kept[name].put_back(module, name):
                    where = f"{path or self._what} ({type(module).__name__})"
                    raise _changed(self._what, f"the attribute {name!r} of {where}")


class _Kept:
    """A value of an attribute, as it was."""

    def __init__(self, value: Any) -> None:
        self._value, self._print = value, _print(value, {})
        self._content = _content(value)

    def is_same(self, value: Any) -> bool:
        """Return whether a value is this one, unchanged."""
        return value is not _MISSING and _print(value, {}) == self._print

    def put_back(self, module: nn.Module, name: str) -> bool:
        """Set the attribute to what it was; return False for a value that cannot be restored."""
        value, content = self._value, self._content
        if type(value) is list:
            value[:] = content
        elif type(value) in (dict, set):
            value.clear()
            value.update(content)
        setattr(module, name, value)
        return self.is_same(value)


def _changed(passed: str, what: str) -> ModelError:
    """Return the error for state that a pass has changed."""
    return ModelError(
        f"A pass through {passed} changes {what}. What a batch leaves there would be published "
        "without noise, and would reach later steps. Build the layer without running statistics, "
        "or compute the value from one sample alone."
    )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's own attributes, without those in which torch keeps its shards."""
    for name, value in vars(module).items():
        if name not in _KNOWN and not name.startswith("__composable_api_"):
            yield name, value


def _content(value: Any) -> Any:
    """Return a copy of what a container holds; None for other values."""
    return type(value)(value) if type(value) in (list, dict, set) else None


def _print(value: Any, seen: dict[int, int]) -> Any:
    """Return what identifies a value and its contents, to compare by ==."""
    if isinstance(value, _PLAIN):
        return (type(value), repr(value))
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, Tensor):
        version = 0 if is_functorch_wrapped_tensor(value) else value._version
        return ("tensor", id(value), version)
    if isinstance(value, np.ndarray):
        return ("array", id(value), value.tobytes())
    if isinstance(value, list | tuple):
        return (type(value), id(value), tuple(_print(v, seen) for v in value))
    if isinstance(value, dict):
        items = ((_print(k, seen), _print(v, seen)) for k, v in value.items())
        return (type(value), id(value), tuple(items))
    if isinstance(value, set | frozenset):
        return (type(value), id(value), frozenset(map(repr, value)))
    if isinstance(value, nn.Module):
        named = (*value.named_parameters(), *value.named_buffers())
        tensors = tuple((n, id(t), t._version) for n, t in named)
        return ("module", id(value), tensors)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType):
        return ("code", id(value))
    own = getattr(value, "__dict__", {})
    return (type(value), id(value), tuple((n, _print(v, seen)) for n, v in own.items()))
