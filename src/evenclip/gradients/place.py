"""One place where a value can be kept: reading it, and putting back what it held."""

from __future__ import annotations

import contextvars
import io
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = [
    "PLAIN", "Place", "context", "entries", "forwards", "kinds", "marks", "members", "memory",
    "named", "numbers", "pairs", "queue", "sequence", "stream", "variable",
]  # fmt: skip

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types of values that are compared by ==."""
_MISSING = object()
# Attributes of tensors that hold their hooks.
_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"


class Place:
    """A place with what it held at first.

    Args:
        name: what it is called in messages.
        read: returns what it holds.
        write: puts what it held back; None for a place that cannot be restored.

    Attributes:
        held: what it held.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], tuple[Any, ...]],
        write: Callable[[tuple[Any, ...]], None] | None = None,
    ) -> None:
        self.name, self._read, self._write = name, read, write
        self.held = read()

    @property
    def is_same(self) -> bool:
        """Whether the place holds what it held."""
        return _alike(self._read(), self.held)

    def put_back(self) -> bool:
        """Put back what it held; return False if that fails."""
        if self._write is None:
            return False
        try:
            self._write(self.held)
        except Exception:  # anything that a class may raise
            return False
        return self.is_same


def sequence(name: str, value: list[Any] | bytearray) -> Place:
    """Return the place of a list or of a byte array."""

    def write(held: tuple[Any, ...]) -> None:
        value[:] = held

    return Place(name, lambda: tuple(value), write)


def queue(name: str, value: deque[Any]) -> Place:
    """Return the place of a deque."""

    def write(held: tuple[Any, ...]) -> None:
        value.clear()
        value.extend(held)

    return Place(name, lambda: tuple(value), write)


def entries(name: str, value: np.ndarray[Any, Any]) -> Place:
    """Return the place of the entries of an array of objects."""

    def write(held: tuple[Any, ...]) -> None:
        for i, part in enumerate(held):
            value.flat[i] = part

    return Place(name, lambda: tuple(value.flat), write)


def numbers(name: str, value: np.ndarray[Any, Any]) -> Place:
    """Return the place of the values of an array of any kind and order."""

    def write(held: tuple[Any, ...]) -> None:
        value[...] = np.frombuffer(held[0], dtype=value.dtype).reshape(value.shape)

    return Place(name, lambda: (value.tobytes(),), write)


def named(name: str, variables: dict[str, Any], names: Sequence[str]) -> Place:
    """Return the place of the variables of these names, which may be absent."""

    def write(held: tuple[Any, ...]) -> None:
        for own, part in zip(names, held, strict=True):
            if part is _MISSING:
                variables.pop(own, None)
            else:
                variables[own] = part

    return Place(name, lambda: tuple(variables.get(own, _MISSING) for own in names), write)


def context(name: str, value: contextvars.ContextVar[Any]) -> Place:
    """Return the place of a context variable; one that had no value cannot be put back."""

    def read() -> tuple[Any, ...]:
        try:
            return (value.get(),)
        except LookupError:
            return (_MISSING,)

    def write(held: tuple[Any, ...]) -> None:
        if held[0] is not _MISSING:
            value.set(held[0])

    return Place(name, read, write)


def memory(name: str, value: Any) -> Place | None:
    """Return the place of a value's own memory; None if it has none that can be written."""
    try:
        bytes_of = memoryview(value).cast("B")
    except (TypeError, ValueError, BufferError):
        return None
    if bytes_of.readonly:
        return None

    def write(held: tuple[Any, ...]) -> None:
        memoryview(value).cast("B")[:] = held[0]

    bytes_of.release()
    return Place(name, lambda: (bytes(memoryview(value)),), write)


def stream(name: str, value: io.BytesIO | io.StringIO) -> Place:
    """Return the place of a file in memory."""

    def write(held: tuple[Any, ...]) -> None:
        value.__init__(held[0])  # type: ignore[misc]  # resets the contents
        value.seek(held[1])

    return Place(name, lambda: (value.getvalue(), value.tell()), write)


def kinds(values: Sequence[Any]) -> Place:
    """Return the place of the classes of objects, which code may change."""

    def write(held: tuple[Any, ...]) -> None:
        for value, kind in zip(values, held, strict=True):
            if type(value) is not kind:
                value.__class__ = kind

    return Place("the class of an object", lambda: tuple(map(type, values)), write)


def forwards(modules: Sequence[nn.Module]) -> Place:
    """Return the place of methods `forward` that are set on a module, not on its class.

    While passes are recorded, the recorder of a layer is in this place, and holds what it replaced.
    """

    def own(module: nn.Module) -> Any:
        set_here = vars(module).get("forward")
        return getattr(set_here, "replaced", set_here)

    def write(held: tuple[Any, ...]) -> None:
        for module, forward in zip(modules, held, strict=True):
            if own(module) is not forward:
                vars(module).pop("forward", None)
                if forward is not None:
                    module.forward = forward

    return Place("a method `forward`", lambda: tuple(map(own, modules)), write)


def marks(tensors: Sequence[torch.Tensor], *, gradients: bool) -> Place:
    """Return the place of the hooks of tensors and, if wanted, of their gradients."""

    def hooks(tensor: torch.Tensor) -> list[dict[Any, Any]]:
        return [getattr(tensor, name, None) or {} for name in _HOOKS]

    def read() -> tuple[Any, ...]:
        dicts = [now for tensor in tensors for now in hooks(tensor)]
        parts = [part for now in dicts for part in (len(now), *now.values())]
        return (*parts, *(t.grad for t in tensors if gradients))

    held = [[dict(each) for each in hooks(tensor)] for tensor in tensors]
    before = [tensor.grad if gradients else None for tensor in tensors]

    def write(_: tuple[Any, ...]) -> None:
        for tensor, own, gradient in zip(tensors, held, before, strict=True):
            for now, then in zip(hooks(tensor), own, strict=True):
                if now:
                    now.clear()
                    now.update(then)
            if gradients:
                tensor.grad = gradient

    return Place("a hook or a gradient of a tensor", read, write)


def members(name: str, value: set[Any]) -> Place:
    """Return the place of a set."""

    def write(held: tuple[Any, ...]) -> None:
        value.clear()
        value.update(held)

    return Place(name, lambda: tuple(sorted(value, key=id)), write)


def pairs(name: str, value: dict[Any, Any], counts: Callable[[str], bool] | None = None) -> Place:
    """Return the place of a dictionary, or of those of its keys that count."""

    def read() -> tuple[Any, ...]:
        if counts is None:
            return (*value, *value.values())
        keys = [key for key in value if counts(key)]
        return (*keys, *map(value.__getitem__, keys))

    def write(held: tuple[Any, ...]) -> None:
        half = len(held) // 2
        before = dict(zip(held[:half], held[half:], strict=True))
        for key in [key for key in value if counts is None or counts(key)]:
            if counts is None or key not in before:  # as a whole it keeps its order
                del value[key]
        # update() of a Counter would add, and that of dict does not reach an OrderedDict's order.
        (OrderedDict if isinstance(value, OrderedDict) else dict).update(value, before)

    return Place(name, read, write)


def variable(name: str, owner: Any, attribute: str) -> Place:
    """Return the place of one attribute, which may be absent."""

    def write(held: tuple[Any, ...]) -> None:
        if held[0] is not _MISSING:
            setattr(owner, attribute, held[0])
        elif hasattr(owner, attribute):
            delattr(owner, attribute)

    return Place(name, lambda: (_held(owner, attribute),), write)


def _alike(now: tuple[Any, ...], held: tuple[Any, ...]) -> bool:
    """Return whether two places hold the same objects, or equal plain values."""
    if len(now) != len(held):
        return False
    return all(map(operator.is_, now, held)) or all(
        a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b)
        for a, b in zip(now, held, strict=True)
    )


def _held(owner: Any, attribute: str) -> Any:
    try:
        return getattr(owner, attribute)
    except (AttributeError, ValueError):  # an empty cell raises ValueError
        return _MISSING
