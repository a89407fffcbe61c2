"""The places where code keeps values: functions, classes, caches and variables of modules.

Code of installed libraries is not followed.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenclip.gradients.place import Place, named

__all__ = [
    "CACHE", "Variables", "body", "cache", "function", "in_body", "in_function", "is_generated",
    "is_of_library",
]  # fmt: skip

CACHE = type(functools.lru_cache(len))
_LIBRARIES = frozenset(("site-packages", "dist-packages"))
# In the bodies of classes: what Python and torch keep there.
_OF_PYTHON = frozenset(("__dict__", "__weakref__", "_abc_impl", "_autograd_function_id"))
_OF_FUNCTIONS = "__defaults__", "__kwdefaults__", "__code__"
_MISSING = object()


class Variables:
    """The variables of modules that functions name: one place for each module."""

    def __init__(self) -> None:
        self._modules: dict[int, tuple[str, dict[str, Any], set[str]]] = {}

    @property
    def places(self) -> list[Place]:
        """The place of each module's variables."""
        return [
            named(f"a variable of {name}", held, sorted(names))
            for name, held, names in self._modules.values()
        ]

    def of(self, value: types.FunctionType) -> Iterator[Any]:
        """Yield what a function can reach in the variables of modules, and remember their names."""
        if is_of_library(value.__module__):
            return
        names, variables = _names(value.__code__), value.__globals__
        package = variables.get("__package__") or ""
        imported = [sys.modules.get(path) for n in names for path in (n, f"{package}.{n}")]
        modules = [(value.__module__, variables)]
        modules += [(m.__name__, vars(m)) for m in imported if isinstance(m, types.ModuleType)]
        seen = set[int]()
        while modules:
            name, held = modules.pop()
            if id(held) in seen or (held is not variables and is_of_library(name)):
                continue
            seen.add(id(held))
            self._modules.setdefault(id(held), (name, held, set()))[2].update(names)
            for part in [held[own] for own in names if own in held]:
                if isinstance(part, types.ModuleType):
                    modules.append((part.__name__, vars(part)))
                else:
                    yield part


def is_generated(value: types.FunctionType) -> bool:
    """Return whether `dataclass` has made a function, which keeps nothing."""
    return value.__code__.co_filename == "<string>" and value.__name__.startswith("__")


def function(name: str, value: types.FunctionType) -> Place:
    """Return the place of what a function itself holds."""
    cells = value.__closure__ or ()

    def read() -> tuple[Any, ...]:
        own = (getattr(value, attribute) for attribute in _OF_FUNCTIONS)
        held = vars(value), value.__annotations__
        parts = (part for d in held for part in (len(d), *d, *d.values()))
        return (*own, *map(_content, cells), *parts)

    own = [getattr(value, attribute) for attribute in _OF_FUNCTIONS]
    contents = [_content(cell) for cell in cells]
    dicts = [dict(held) for held in (vars(value), value.__annotations__)]

    def write(_: tuple[Any, ...]) -> None:
        for attribute, part in zip(_OF_FUNCTIONS, own, strict=True):
            if getattr(value, attribute) is not part:
                setattr(value, attribute, part)
        for cell, part in zip(cells, contents, strict=True):
            if part is not _MISSING:
                cell.cell_contents = part
            elif _content(cell) is not _MISSING:
                del cell.cell_contents
        for now, before in zip((vars(value), value.__annotations__), dicts, strict=True):
            now.clear()
            now.update(before)

    return Place(name, read, write)


def in_function(value: types.FunctionType) -> list[Any]:
    """Return what a function holds, without variables of modules."""
    parts: list[Any] = [value.__defaults__, value.__kwdefaults__, vars(value)]
    return [*parts, *map(_content, value.__closure__ or ())]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING


def _names(code: types.CodeType) -> frozenset[str]:
    """Return all names in the code of a function that are not local to it."""
    inner = (_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def body(value: type) -> Place:
    """Return the place of the attributes of a class."""

    def read() -> tuple[Any, ...]:
        return tuple(part for pair in in_body(value) for part in pair)

    def write(held: tuple[Any, ...]) -> None:
        before = dict(zip(held[::2], held[1::2], strict=True))
        for name, part in in_body(value):
            if name not in before:
                delattr(value, name)
            elif part is not before[name]:
                setattr(value, name, before[name])

    return Place(f"an attribute of the class {value.__qualname__}", read, write)


def in_body(value: type) -> list[tuple[str, Any]]:
    """Return the attributes of a class, by name."""
    return [(name, part) for name, part in list(vars(value).items()) if name not in _OF_PYTHON]


def cache(name: str, value: Any) -> Place:
    """Return the place of a cache, which is emptied when it has a new result."""
    place: Place

    def write(held: tuple[Any, ...]) -> None:
        del held
        value.cache_clear()
        place.held = (value.cache_info().misses,)

    place = Place(name, lambda: (value.cache_info().misses,), write)
    return place


@functools.cache
def is_of_library(name: str | None) -> bool:
    """Return whether a module is Python's own, torch's, this package's or an installed one."""
    top = (name or "").partition(".")[0]
    if top in sys.stdlib_module_names or top in ("torch", "evenclip"):
        return True
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return file is not None and not _LIBRARIES.isdisjoint(Path(file).parts)
