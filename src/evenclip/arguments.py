"""Check arguments against their annotations, before anything is computed.

A public function calls `check_kinds(function, locals())` first, and a dataclass calls
`check_kinds(Class, vars(self))` in `__post_init__`. A value of another kind than its annotation
says is refused in one sentence. Ranges are checked where they are known, by `evenclip.check`. An
annotation that names what is not imported at run time, such as `pd.DataFrame`, accepts everything.
"""

from __future__ import annotations

import collections.abc
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

__all__ = ["check_kinds", "shown"]

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    bytes: "bytes",
    dict: "a dict",
    None: "None",
}
_MOST_CHARACTERS = 60
_PRINTED = (type(None), bool, int, float, complex, str, bytes, os.PathLike, type)


def check_kinds(owner: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Raise unless every value is of the kind that the parameter or field is annotated with.

    >>> def area(width: float, name: str | None = None): check_kinds(area, locals())
    >>> area(2)
    >>> area("2")
    Traceback (most recent call last):
    ...
    TypeError: width is '2'; it must be a number.

    Args:
        owner: the function or dataclass.
        values: its parameters or fields by name; others are ignored.

    Raises:
        TypeError: a value is of another kind; the message names the parameter.
    """
    for name, hint in _hints(owner).items():
        if name in values and not _fits(values[name], hint):
            raise TypeError(f"{name} is {shown(values[name])}; it must be {_expected(hint)}.")


def shown(value: Any) -> str:
    """Return a value for a message: plain ones as Python writes them, of others the class only.

    >>> shown("x"), shown([1, 2]), shown({})
    ("'x'", 'a list', 'a dict')
    """
    plain = isinstance(value, _PRINTED) or (type(value).__module__ == "numpy" and _is_scalar(value))
    if not plain:
        kind = type(value).__name__
        return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"
    try:
        text = str(value) if isinstance(value, Real) else repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return f"a whole number of {value.bit_length()} bits"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _is_scalar(value: Any) -> bool:
    return getattr(value, "ndim", None) == 0 and hasattr(value, "dtype")


@lru_cache(maxsize=256)
def _hints(owner: Callable[..., Any]) -> dict[str, Any]:
    """Return name -> annotation, as far as it can be resolved at run time."""
    hints: dict[str, Any] = {}
    for part in reversed(owner.__mro__) if isinstance(owner, type) else [inspect.unwrap(owner)]:
        names = vars(sys.modules.get(part.__module__, types.ModuleType("")))
        for name, hint in inspect.get_annotations(part).items():
            hints[name] = _resolved(hint, dict(names))
    hints.pop("return", None)
    return hints


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, names)
    except (NameError, AttributeError, TypeError):
        return Any


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of the annotated kind."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or hint is inspect.Parameter.empty or origin is ClassVar:
        return True
    if hint is None or hint is type(None):
        return value is None
    if isinstance(hint, TypeVar):
        return (
            hint.__bound__ is None
            or isinstance(hint.__bound__, str)
            or _fits(value, hint.__bound__)
        )
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if hint in (int, float):  # whether an int is whole is checked with its range
        return isinstance(value, Real) and not _is_bool(value)
    if hint is bool:
        return _is_bool(value)
    return _fits_class(value, origin or hint, inner)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _fits_class(value: Any, kind: Any, inner: tuple[Any, ...]) -> bool:
    """Return whether a value is an instance of a class, and its items of their annotations."""
    if kind is collections.abc.Callable:
        return callable(value)
    if kind in (Sequence, collections.abc.Iterable, collections.abc.Collection, list, tuple):
        is_array = getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist")
        if isinstance(value, str | bytes) or not (isinstance(value, kind) or is_array):
            return False
        if kind is tuple and inner and inner[-1] is not ...:
            pairs = zip(value, inner, strict=False)
            return len(value) == len(inner) and all(_fits(v, one) for v, one in pairs)
        one = inner[0] if inner else Any
        return one is Any or not isinstance(value, Sequence) or all(_fits(v, one) for v in value)
    if not isinstance(kind, type):
        return True
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol that is not checked at run time
        return True


def _expected(hint: Any) -> str:
    """Describe an annotation in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        words = list(dict.fromkeys(_expected(one) for one in inner))
        return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    if origin is Literal:
        return " or ".join(repr(one) for one in inner)
    if isinstance(hint, TypeVar):
        return _expected(hint.__bound__)
    kind = origin or (None if hint is type(None) else hint)
    if kind is collections.abc.Callable:
        return "a function"
    if kind in (Sequence, list, tuple, collections.abc.Iterable, collections.abc.Collection):
        return "a list"
    if kind is os.PathLike:
        return "a path"
    if kind is Mapping:
        return "a dict"
    if kind in _WORDS:
        return _WORDS[kind]
    name = getattr(kind, "__name__", str(kind))
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
