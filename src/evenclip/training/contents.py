"""Digests of objects by what they compute: their values, and the code of their functions.

    values       numbers, text, containers and tensors bit by bit; other objects as pickle reduces
                 them, with their class
    functions    bytecode, constants, defaults, and the variables that they use, local or global
    classes      everything in their bodies and in those of their bases
    libraries    an installed package, or Python's own, is known by its name and version

Two processes in which an object does the same get the same digest, wherever its files lie. Where
code or values cannot be seen, as in an open file or a function of an unknown C library, there is no
digest, and `NoDigest` says why. Code that is found by its name only while it runs (`eval`,
`getattr` with a computed name) is not followed.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from evenclip.data.streamed import Bits, fingerprint

__all__ = ["NoDigest", "contents"]

_PLAIN = (type(None), type(...), type(NotImplemented), bool, int, str, bytes)
_WRAPPED = {property: ("fget", "fset", "fdel"), staticmethod: ("__func__",),
            classmethod: ("__func__",), functools.cached_property: ("func",)}  # fmt: skip
# In the body of every class, without effect on what its instances compute.
_IGNORED = frozenset({
    "__abstractmethods__", "__annotate_func__", "__annotations__", "__annotations_cache__",
    "__dataclass_fields__", "__dataclass_params__", "__dict__", "__doc__", "__firstlineno__",
    "__match_args__", "__module__", "__parameters__", "__static_attributes__", "__weakref__",
    "_abc_impl",
})  # fmt: skip
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


class NoDigest(ValueError):  # noqa: N818  # not an error without a seed
    """There is no digest; the message gives the reason as a clause."""


def contents(value: Any) -> str:
    """Return the digest of a value, in hexadecimal digits.

    >>> contents(lambda x: x + 1) == contents(lambda y: y + 1), contents([1]) == contents([1.0])
    (True, False)

    Raises:
        NoDigest: some of the code or of the values cannot be seen.
    """
    try:
        return _Contents().of(value).hex()
    except RecursionError as error:
        raise NoDigest("it is nested too deeply") from error


class _Contents:
    """The digests of the parts of one value."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}
        self._open: dict[int, int] = {}  # objects that contain the current one -> depth
        self._tensors: dict[int, int] = {}  # tensor -> number, because tensors may be shared
        self._kept: list[Any] = []  # so that no id is used again

    def of(self, value: Any) -> bytes:
        """Return the digest of a value."""
        if type(value) in _PLAIN:
            return _hash(type(value).__name__, [repr(value).encode()])
        if type(value) in (float, complex):
            return _hash("number", [repr(value).encode()])
        if id(value) in self._open:
            return _hash("container", [str(self._open[id(value)]).encode()])
        if id(value) not in self._known:
            self._kept.append(value)
            self._open[id(value)] = len(self._open)
            try:
                self._known[id(value)] = self._of(value)
            finally:
                del self._open[id(value)]
        return self._known[id(value)]

    def _of(self, value: Any) -> bytes:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) in (list, tuple):
            return self._all(type(value).__name__, value)
        if type(value) is dict:
            return self._all("dict", (part for item in value.items() for part in item))
        if isinstance(value, set | frozenset):
            return _hash("set", sorted(self.of(item) for item in value))
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return self._all("method", (value.__func__, value.__self__))
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.ModuleType):
            return self._module(value, ())
        if isinstance(value, weakref.ref):
            return self._all("reference", (value(),))
        if type(value) in _WRAPPED:
            names = _WRAPPED[type(value)]
            return self._all(type(value).__name__, (getattr(value, name) for name in names))
        if callable(value) and hasattr(value, "__qualname__"):
            return self._builtin(value)
        return self._object(value)

    def _all(self, kind: str, parts: Iterable[Any]) -> bytes:
        """Return the digest of several values in order."""
        return _hash(kind, [self.of(part) for part in parts])

    def _tensor(self, value: Tensor) -> bytes:
        """Return the digest of the bits, and of which tensor of this value it is."""
        number = self._tensors.setdefault(id(value), len(self._tensors))
        bits = Bits()
        try:
            bits.add(value)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise NoDigest(f"a tensor of layout {value.layout} has no plain bits") from error
        kind = f"{type(value).__name__} {number} {value.requires_grad}"
        return _hash(kind, [fingerprint("", value.dtype, value.shape, bits).encode()])

    # --- code ---

    def _class(self, value: type) -> bytes:
        """Return the digest of a class: the bodies of its bases that are in no library."""
        parts = []
        for base in value.__mro__:
            library = _library(base.__module__)
            parts += [_hash("class", [base.__qualname__.encode(), library.encode()])]
            if not library:
                for name, part in sorted(vars(base).items()):
                    if name not in _IGNORED and type(part) not in _SLOTS:
                        parts += [self.of(name), self.of(part)]
        return _hash("classes", parts)

    def _function(self, value: types.FunctionType) -> bytes:
        """Return the digest of a function, with all variables that it uses."""
        library = _library(value.__module__ or "")
        if library:
            return self._named(value, library)
        parts = [
            self.of(value.__code__),
            self.of(value.__defaults__),
            self.of(value.__kwdefaults__),
        ]
        for cell in value.__closure__ or ():
            try:
                parts.append(self.of(cell.cell_contents))
            except ValueError as error:
                if isinstance(error, NoDigest):
                    raise
                parts.append(b"empty")  # it gets its value later
        names, attributes = _names(value.__code__)
        for name in names:
            if name in value.__globals__:
                used = value.__globals__[name]
                is_module = isinstance(used, types.ModuleType)
                parts.append(self._module(used, attributes) if is_module else self.of(used))
            elif not hasattr(builtins, name):
                parts.append(b"absent")
        return _hash("function", parts)

    def _code(self, value: types.CodeType) -> bytes:
        """Return the digest of bytecode; names of local variables do not count."""
        layout = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount,
                  value.co_flags, value.co_names, value.co_code)  # fmt: skip
        keywords = value.co_varnames[: value.co_argcount + value.co_kwonlyargcount]
        return self._all("code", (*layout, *keywords[value.co_argcount :], *value.co_consts))

    def _module(self, value: types.ModuleType, attributes: Iterable[str]) -> bytes:
        """Return the digest of a module, or of those of its attributes that a function may use."""
        library = _library(value.__name__)
        if library:
            return _hash("module", [library.encode(), value.__name__.encode()])
        parts = [value.__name__.encode()]
        for name in attributes:
            if hasattr(value, name):
                used = getattr(value, name)
                is_module = isinstance(used, types.ModuleType)
                parts.append(self._module(used, attributes) if is_module else self.of(used))
        return _hash("module", parts)

    def _builtin(self, value: Any) -> bytes:
        """Return the digest of a function that is not written in Python."""
        if hasattr(value, "__wrapped__"):  # a cache, for example
            return self._all("wrapped", (type(value), value.__wrapped__))
        owner = getattr(value, "__self__", None)
        module = getattr(value, "__module__", None) or getattr(
            getattr(value, "__objclass__", None), "__module__", "builtins"
        )
        library = _library(module)
        if not library:
            raise NoDigest(f"the code of {value.__qualname__} in {module} cannot be seen")
        bound = None if isinstance(owner, types.ModuleType) else owner
        return _hash("builtin", [self._named(value, library), self.of(bound)])

    def _named(self, value: Any, library: str) -> bytes:
        """Return the digest of a function of a library."""
        return _hash("library", [library.encode(), value.__qualname__.encode()])

    # --- values ---

    def _object(self, value: Any) -> bytes:
        """Return the digest of an object, by its class and what pickle would keep of it."""
        if isinstance(value, nn.Module):
            return self._all("module", (type(value), *_state(value)))
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:  # anything that a class may raise
            raise NoDigest(f"{type(value).__name__} has no copy ({_first_line(error)})") from error
        if isinstance(reduced, str):
            library = _library(type(value).__module__)
            return _hash("constant", [library.encode(), self.of(type(value)), reduced.encode()])
        parts: tuple[Any, ...] = (*reduced, None, None, None)
        function, given, state, items, pairs = parts[:5]
        return self._all("object", (function, given, state, list(items or ()), list(pairs or ())))


_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def _state(module: nn.Module) -> Iterator[Any]:
    """Yield names and values of a module's attributes; hooks without their running numbers."""
    for name, value in vars(module).items():
        yield name
        yield list(value.values()) if "_hooks" in name and isinstance(value, dict) else value


def _names(code: types.CodeType) -> tuple[list[str], list[str]]:
    """Return the global variables that bytecode reads, and all attributes that it reads."""
    names, attributes = set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL:
            names.add(instruction.argval)
        elif instruction.opname in _ATTRIBUTE:
            attributes.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME" and not _library(instruction.argval):
            raise NoDigest(
                f"{code.co_qualname} imports {instruction.argval or 'a module'} when it runs"
            )
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            inner = _names(part)
            names.update(inner[0])
            attributes.update(inner[1])
    return sorted(names), sorted(attributes)


@lru_cache(maxsize=1024)
def _library(module: str) -> str:
    """Return name and version of the library that a module belongs to; "" if it is in none."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("torch", "evenclip"):
        return top  # the versions of both packages are separate conditions
    place = getattr(sys.modules.get(top), "__file__", None)
    if place is None or not any(Path(place).is_relative_to(folder) for folder in _installed()):
        return ""
    version = getattr(sys.modules[top], "__version__", None) or _version(top)
    return f"{top} {version}" if version else ""


def _installed() -> set[str]:
    """Return the folders of installed packages."""
    return {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _hash(kind: str, parts: Iterable[bytes]) -> bytes:
    """Return the digest of parts, each with its length."""
    digest = hashlib.blake2b(digest_size=32)
    for part in (kind.encode(), *parts):
        digest.update(b" %d " % len(part) + part)
    return digest.digest()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
