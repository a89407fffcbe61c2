"""One place where a value can be kept: reading it, and putting back what it held."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["PLAIN", "Place", "members", "pairs", "queue", "sequence", "variable"]

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types of values that are compared by ==."""
_MISSING = object()


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
        dict.update(value, before)  # a Counter would add

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
