"""What bytecode reads from outside of a function."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Import", "Read", "imports", "reads"]

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")


class Read(NamedTuple):
    """A variable that is read, and the attributes that are read from it at once: a.b.c."""

    name: str
    attributes: tuple[str, ...]


class Import(NamedTuple):
    """A module that is imported while the function runs, and all attributes that it reads."""

    module: str
    attributes: frozenset[str]


def reads(code: types.CodeType) -> list[Read]:
    """Return the variables outside of a function that it reads, in alphabetical order."""
    return sorted({read for part in _parts(code) for read in _reads(part)})


def imports(code: types.CodeType) -> list[Import]:
    """Return the modules that a function imports."""
    found = list[Import]()
    for part in _parts(code):
        steps = list(dis.get_instructions(part))
        attributes = frozenset(step.argval for step in steps if step.opname in _ATTRIBUTE)
        modules = [step.argval for step in steps if step.opname == "IMPORT_NAME"]
        found += [Import(module, attributes) for module in modules]
    return found


def _reads(code: types.CodeType) -> Iterator[Read]:
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for i, step in enumerate(steps):
        if step.opname in _GLOBAL:
            end = i + 1
            while end < len(steps) and steps[end].opname in _ATTRIBUTE:
                end += 1
            yield Read(step.argval, tuple(after.argval for after in steps[i + 1 : end]))


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)
