"""JSON without ambiguity: no name twice in an object, no endless nesting."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["loads"]


def loads(text: str | bytes) -> Any:
    """Return the value of JSON.

    >>> loads('{"steps": 100, "steps": 1}')
    Traceback (most recent call last):
    ...
    ValueError: the name 'steps' twice in one object

    Raises:
        ValueError: it is no JSON, or readers could understand it in different ways.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; raise if a name occurs twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} twice in one object")
    return made
