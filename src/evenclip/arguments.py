"""Check arguments against their annotations, before anything is computed.

A public function calls `check_kinds(function, locals())` first, and a dataclass calls
`check_kinds(Class, vars(self))` in `__post_init__`. A value of another kind than its annotation
says is refused in one sentence, and so is a path that no file can have. Ranges are checked where
they are known, by `evenclip.check`. A class of a library that is not imported at run time, such as
`pd.DataFrame`, is known by its name; any other annotation that cannot be evaluated accepts
everything.
"""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

__all__ = ["check_fields", "check_kinds", "check_path", "is_number", "plain", "shown"]

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    bytes: "bytes",
    dict: "a dict",
    None: "None",
}
_ITEMS: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "texts"}
_LISTS = (Sequence, list, tuple, collections.abc.Iterable, Collection)
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
        ValueError: a value is a path that no file can have.
    """
    for name, hint in _hints(owner).items():
        if name not in values:
            continue
        value = values[name]
        if not _fits(value, hint):
            raise TypeError(f"{name} is {shown(value)}; it must be {_expected(hint)}.")
        if isinstance(value, str | os.PathLike) and _names_paths(hint):
            check_path(name, value)


def check_fields(owner: type, instance: Any, names: Collection[str] | None = None) -> None:
    """Check the fields of a dataclass as `check_kinds` does, and make its values Python's own.

    Arithmetic on numpy's numbers is that of their type: of np.uint8 it overflows at 256, and of
    np.float16 it has three digits, so that an ε computed from them would be wrong. Lists and arrays
    become tuples where a tuple is annotated, and other arrays become lists.

    Args:
        owner: the dataclass.
        instance: an instance of it, or of a class that derives from it.
        names: the fields; by default all.
    """
    hints, known = _hints(owner), [field.name for field in dataclasses.fields(owner)]
    for name in known if names is None else names:
        given = getattr(instance, name)
        value = _as_annotated(plain(given), hints.get(name, Any))
        check_kinds(owner, {name: value})
        if value is not given:
            object.__setattr__(instance, name, value)


def _as_annotated(value: Any, hint: Any) -> Any:
    """Return a list or an array as the annotated kind of list, and 2.0 as 2 where it is."""
    hints = (hint, *get_args(hint))
    if isinstance(value, float) and int in hints and float not in hints and _is_whole(value):
        return int(value)
    kinds = {get_origin(one) for one in hints}
    if tuple in kinds and (isinstance(value, list) or _is_array(value)):
        return tuple(value.tolist() if _is_array(value) else value)
    return value.tolist() if Sequence in kinds and _is_array(value) else value


def plain(value: Any) -> Any:
    """Return a number or flag of numpy as Python's; other values are unchanged.

    >>> import numpy as np
    >>> plain(np.uint8(200)) * 2, plain("x")
    (400, 'x')
    """
    if not _is_scalar(value):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value.item()


_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes


def check_path(name: str, value: str | os.PathLike[str]) -> None:
    """Raise unless a file can have this path.

    >>> check_path("out", "a/" + 300 * "b")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: out is 'a/bbb...; it has a name of more than 255 bytes: give a shorter one.

    Raises:
        TypeError: it is no text.
        ValueError: it is empty, too long, or has characters that no path has.
    """
    text = os.fspath(value)
    if not isinstance(text, str):
        raise TypeError(f"{name} is {shown(value)}; it must be a path that is a text.")
    what = f"{name} is {shown(text)}"
    if not text:
        raise ValueError(f"{what}; it must be a path.")
    if "\0" in text:
        raise ValueError(f"{what}; it has a NUL character, which no path has: remove it.")
    try:
        content = os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError(
            f"{what}; it has a character that file names here cannot have: remove it."
        ) from None
    if len(content) > _LONGEST_PATH or max(map(len, content.split(b"/"))) > _LONGEST_NAME:
        raise ValueError(
            f"{what}; it has a name of more than {_LONGEST_NAME} bytes: give a shorter one."
        )


def shown(value: Any) -> str:
    """Return a value for a message: plain ones as Python writes them, of others the class only.

    >>> shown("x"), shown([1, 2]), shown({})
    ("'x'", 'a list', 'a dict')
    """
    if not (isinstance(value, _PRINTED) or _is_scalar(value)):
        return _a(type(value).__name__)
    try:
        text = str(value) if isinstance(value, Real) else repr(value)
    except Exception:  # a class of the user may raise anything
        if isinstance(value, int):  # Python writes none of more than 4,300 digits
            return f"a whole number of {value.bit_length()} bits"
        return _a(type(value).__name__)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _a(kind: str) -> str:
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def _is_scalar(value: Any) -> bool:
    """Return whether a value is a number, flag or text of numpy; arrays without axes are none."""
    kinds = [f"{kind.__module__}.{kind.__name__}" for kind in type(value).__mro__]
    return "numpy.generic" in kinds


class _Class(type):
    """The type of a class that is not imported; an instance has a class of that name."""

    def __instancecheck__(cls, value: Any) -> bool:
        return any(kind.__name__ == cls.__name__ for kind in type(value).__mro__)


class _Library:
    """A library that is not imported; its attributes are classes."""

    def __getattr__(self, name: str) -> type:
        return _Class(name, (), {})


class _Libraries(dict[str, Any]):
    """Names of an annotation that are neither in its module nor built in."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__(known)

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return _Library()


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
        return eval(hint, {}, _Libraries(names))
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
    if hint is float:
        return is_number(value)
    if hint is int:
        return is_number(value) and (isinstance(value, Integral) or _is_whole(value))
    if hint is bool:
        return _is_bool(value)
    return _fits_class(value, origin or hint, inner)


def is_number(value: Any) -> bool:
    """Return whether a value is an int or float, of Python or numpy; a flag is none."""
    if _is_bool(value):
        return False
    return isinstance(value, int | float) or (_is_scalar(value) and isinstance(value, Real))


def _is_whole(value: Any) -> bool:
    return math.isfinite(value) and float(value).is_integer()


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def _fits_class(value: Any, kind: Any, inner: tuple[Any, ...]) -> bool:
    """Return whether a value is an instance of a class, and its items of their annotations."""
    if kind is collections.abc.Callable:
        return callable(value)
    if kind in _LISTS:
        return _fits_list(value, kind, inner)
    if kind is type:
        return isinstance(value, type) and all(issubclass(value, one) for one in inner)
    if kind in (Mapping, dict) and isinstance(value, Mapping):
        return not inner or all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if getattr(kind, "_is_protocol", False):
        # One is enough, because a custom object may leave out what is not called.
        members = [name for name in vars(kind) if not name.startswith("_") or name == "__call__"]
        return any(hasattr(value, name) for name in members)
    return not isinstance(kind, type) or isinstance(value, kind)


def _fits_list(value: Any, kind: Any, inner: tuple[Any, ...]) -> bool:
    """Return whether a value is a list, or an array with one axis, of the annotated items."""
    is_array = _is_array(value)
    if isinstance(value, str | bytes) or (hasattr(value, "ndim") and not is_array):
        return False
    items: Any = value.tolist() if is_array else value
    if not isinstance(items, Sequence if kind is tuple and is_array else kind):
        return False
    if kind is tuple and inner and inner[-1] is not ...:
        pairs = zip(items, inner, strict=False)
        return len(items) == len(inner) and all(_fits(v, one) for v, one in pairs)
    one = inner[0] if inner else Any
    is_kept = isinstance(items, Collection)  # an iterator would be used up
    return one is Any or not is_kept or all(_fits(v, one) for v in items)


def _is_array(value: Any) -> bool:
    """Return whether a value is an array of numpy, or a column of pandas, with one axis."""
    kinds = {kind.__name__ for kind in type(value).__mro__}
    return not kinds.isdisjoint({"ndarray", "Series", "Index"}) and value.ndim == 1


def _names_paths(hint: Any) -> bool:
    """Return whether an annotation allows paths."""
    kinds = [get_origin(one) or one for one in get_args(hint) or (hint,)]
    return any(isinstance(one, type) and issubclass(one, os.PathLike | Path) for one in kinds)


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
    if kind in _LISTS:
        return _expected_list(inner)
    if kind is type and inner:
        return f"a class that derives from {inner[0].__name__}"
    if isinstance(kind, type) and issubclass(kind, os.PathLike):
        return "a path"
    if kind is Mapping:
        return "a dict"
    if kind in _WORDS:
        return _WORDS[kind]
    return _a(getattr(kind, "__name__", str(kind)))


def _expected_list(inner: tuple[Any, ...]) -> str:
    """Describe a list, with its items if they are plain."""
    kinds = {_ITEMS.get(one) for one in inner if one is not ...}
    return f"a list of {kinds.pop()}" if len(kinds) == 1 and None not in kinds else "a list"
