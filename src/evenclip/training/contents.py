"""Digests of objects by what they compute: their values, and the code of their functions.

    values       numbers, text, containers and tensors bit by bit; other objects as pickle reduces
                 them, with their class and all their attributes
    functions    bytecode, constants, defaults, attributes, and the variables that they use, local
                 or global; of a module of your own, the variables that are read from it, or all
    classes      everything in their bodies and in those of their bases
    libraries    what lies in an installed package, in torch or in Python's own modules is known by
                 its name and version (`evenclip.training.libraries`), but a function that was put
                 in its place is not

Two processes in which an object does the same get the same digest, wherever its files lie. Where
code or values cannot be seen, there is no digest, and `NoDigest` says why: an open file, a
generator, a function of an unknown C library, scripted code, environment variables, the random
numbers of Python and numpy, and code that is found while it runs (`eval`, `exec`, `globals`,
imports).

Not followed are names that are computed (`getattr(x, name)`), files that are read, clocks, and
results in a cache (`functools.lru_cache`), which are those of the function that it is for.
"""

from __future__ import annotations

import builtins
import copyreg
import functools
import hashlib
import os
import random
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenclip.data.streamed import Bits, fingerprint
from evenclip.gradients.errors import first_line
from evenclip.training import libraries
from evenclip.training.bytecode import imports, reads
from evenclip.training.foreign import WRAPPED, foreign

__all__ = ["NoDigest", "contents", "shape"]

_PLAIN = (type(None), type(...), type(NotImplemented), bool, int, str, bytes)
_NUMBERS = (float, complex)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_BUILTIN = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MethodWrapperType, types.ClassMethodDescriptorType, *_SLOTS,
)  # fmt: skip
_CACHE = type(functools.lru_cache(len))
# In the body of every class, without effect on what its instances compute.
_IGNORED = frozenset({
    "__abstractmethods__", "__annotate_func__", "__annotations__", "__annotations_cache__",
    "__dataclass_fields__", "__dataclass_params__", "__dict__", "__doc__", "__firstlineno__",
    "__match_args__", "__module__", "__parameters__", "__static_attributes__", "__weakref__",
    "_abc_impl", "_autograd_function_id",
})  # fmt: skip
# Attributes of a module that do not affect its contents.
_PLACE = frozenset({
    "__annotations__", "__builtins__", "__cached__", "__doc__", "__file__", "__loader__",
    "__name__", "__package__", "__path__", "__spec__",
})  # fmt: skip
_HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)
_LATER = frozenset(("__import__", "compile", "eval", "exec", "globals", "input"))
_ENVIRONMENT = frozenset(("environ", "environb", "getenv", "getenvb"))
_RANDOM = ("random", "secrets", "numpy.random")
# Those that the functions of the two modules draw from.
_GENERATORS = [getattr(function, "__self__", None) for function in (random.random, np.random.rand)]
_OPERATORS = ("aten", "prim", "prims")  # of torch itself


class NoDigest(ValueError):  # noqa: N818  # not an error without a seed
    """There is no digest; the message gives the reason as a clause."""


def contents(value: Any) -> str:
    """Return the digest of a value, in hexadecimal digits.

    >>> contents(lambda x: x + 1) == contents(lambda x: x + 2), contents([1]) == contents([1.0])
    (False, False)

    Raises:
        NoDigest: some of the code or of the values cannot be seen.
    """
    return _digest(_Contents(), value)


def shape(value: Any) -> str:
    """Return the digest of a value without the numbers in its tensors.

    Raises:
        NoDigest: some of the code or of the values cannot be seen.
    """
    return _digest(_Shape(), value)


def _digest(contents: _Contents, value: Any) -> str:
    try:
        return contents.of(value).hex()
    except RecursionError as error:
        raise NoDigest("it is nested too deeply") from error


class _Contents:
    """The digests of the parts of one value."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}
        self._open: dict[int, int] = {}  # objects that contain the current one -> depth
        self._tensors: dict[int, int] = {}  # tensor -> number, because tensors may be shared
        self._memory: dict[int, int] = {}  # the memory of tensors -> number
        self._kept: list[Any] = []  # so that no id is used again

    def of(self, value: Any) -> bytes:
        """Return the digest of a value."""
        if type(value) in _PLAIN:
            return _hash(type(value).__name__, [repr(value).encode()])
        if type(value) in _NUMBERS:
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
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, _BUILTIN):
            return self._builtin(value)
        if isinstance(value, set | frozenset):
            items = sorted(self.of(item) for item in value)
            return _hash("set", [self.of(type(value)), *items, self._attributes(value)])
        digest = _BY_TYPE.get(type(value))
        return digest(self, value) if digest is not None else self._object(value)

    def _all(self, kind: str, parts: Iterable[Any]) -> bytes:
        """Return the digest of several values in order."""
        return _hash(kind, [self.of(part) for part in parts])

    def _pairs(self, value: Any) -> bytes:
        """Return the digest of a dictionary, in its order."""
        return self._all("dict", (part for item in value.items() for part in item))

    # --- tensors ---

    def _tensor(self, value: Tensor) -> bytes:
        """Return the digest of the bits, and of which tensor of this value it is."""
        number = self._tensors.setdefault(id(value), len(self._tensors))
        try:
            memory = value.untyped_storage()
            place = self._memory.setdefault(memory._cdata, len(self._memory))
            layout = (number, place, value.stride(), value.requires_grad)
            bits = self._bits(value)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise NoDigest(f"a tensor of layout {value.layout} has no plain bits") from error
        self._kept.append(memory)
        hooks = [list((hooks or {}).values()) for hooks in _hooks(value)]
        return _hash("tensor", [bits, *map(self.of, (type(value), layout, vars(value), hooks))])

    def _bits(self, value: Tensor) -> bytes:
        bits = Bits()
        bits.add(value)
        return fingerprint("", value.dtype, value.shape, bits).encode()

    # --- code ---

    def _class(self, value: type) -> bytes:
        """Return the digest of a class: the bodies of its bases that are in no library."""
        parts = [] if type(value) is type else [self.of(type(value))]
        for base in value.__mro__:
            library = libraries.library_of_class(base)
            name = f"{base.__module__} {base.__qualname__}" if library else base.__qualname__
            parts += [_hash("class", [library.encode(), name.encode()])]
            for part in foreign(base) if library else _body(base):
                parts.append(self._all("part", part))
        return _hash("classes", parts)

    def _function(self, value: types.FunctionType) -> bytes:
        """Return the digest of a function, with all variables that it uses."""
        library = libraries.library_of(value.__globals__)
        if library and _is_held(value):
            return self._named(value, value.__module__, library)
        parts = [
            self.of(value.__code__),
            self.of(value.__defaults__),
            self.of(value.__kwdefaults__),
            self._pairs(vars(value)),
            *(self._cell(cell) for cell in value.__closure__ or ()),
        ]
        if library:  # a function that a library made around others
            return _hash("made", [library.encode(), *parts])
        return _hash("function", [*parts, *self._used(value)])

    def _cell(self, cell: types.CellType) -> bytes:
        try:
            value = cell.cell_contents
        except ValueError:
            return b"empty"  # it gets its value later
        return self.of(value)

    def _used(self, value: types.FunctionType) -> Iterator[bytes]:
        """Yield the digests of the global variables that a function uses."""
        self._refuse_imports(value.__code__)
        for name, attributes in reads(value.__code__):
            yield self.of((name, attributes))
            if name in value.__globals__:
                yield self._read(value.__globals__[name], attributes)
            elif hasattr(builtins, name):
                if name in _LATER:
                    raise NoDigest(f"{value.__qualname__} calls {name}")
                yield self.of(getattr(builtins, name))

    def _refuse_imports(self, code: types.CodeType) -> None:
        """Raise if a function imports what cannot be seen."""
        for module, attributes in imports(code):
            if not libraries.library_of_name(module):
                raise NoDigest(f"{code.co_qualname} imports {module or 'a module'} when it runs")
            if module.split(".")[0] == "os" and attributes & _ENVIRONMENT:
                raise NoDigest(f"{code.co_qualname} reads environment variables")
            is_random = module == "numpy" and "random" in attributes
            if is_random or _is_random(module):
                raise NoDigest(_drawn(code.co_qualname))

    def _read(self, value: Any, attributes: Iterable[str]) -> bytes:
        """Return the digest of what a function reads: a variable, or an attribute of a module."""
        path, is_of_library = list[str](), False
        for name in attributes:
            if not isinstance(value, types.ModuleType):
                break
            is_of_library = bool(libraries.library_of_module(value))
            path = [*path, value.__name__, name]
            if not hasattr(value, name):
                return _hash("absent", [" ".join(path).encode()])
            value = getattr(value, name)
        if not is_of_library or isinstance(value, types.ModuleType):
            return self.of(value)
        _refuse_hidden(path)
        is_seen = isinstance(value, (types.FunctionType, type, *_BUILTIN, *_PLAIN, *_NUMBERS))
        return _hash("read", [" ".join(path).encode(), self.of(value) if is_seen else b""])

    def _code(self, value: types.CodeType) -> bytes:
        """Return the digest of bytecode; names of local variables do not count."""
        counts = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount
        names_and_code = value.co_flags, value.co_names, value.co_code, value.co_exceptiontable
        end = value.co_argcount + value.co_kwonlyargcount
        keywords = value.co_varnames[value.co_posonlyargcount : end]
        return self._all("code", (counts, names_and_code, keywords, value.co_consts))

    def _module(self, value: types.ModuleType) -> bytes:
        """Return the digest of a module: of all its variables, if it is in no library."""
        library = libraries.library_of_module(value)
        if library:
            _refuse_hidden([value.__name__])
            return _hash("module", [library.encode(), value.__name__.encode()])
        variables = {name: part for name, part in vars(value).items() if name not in _PLACE}
        return _hash("module", [value.__name__.encode(), self._pairs(variables)])

    def _builtin(self, value: Any) -> bytes:
        """Return the digest of a function that is not written in Python."""
        owner, module = getattr(value, "__self__", None), _module_of(value)
        library = libraries.library_of_name(module)
        if not library:
            raise NoDigest(f"the code of {value.__qualname__} in {module} cannot be seen")
        is_plain = isinstance(owner, types.ModuleType) or type(owner).__name__ == "PyCapsule"
        return _hash("builtin", [
            self._named(value, module, library), self.of(None if is_plain else owner),
        ])  # fmt: skip

    def _cache(self, value: Any) -> bytes:
        """Return the digest of the function that a cache wraps."""
        parts = (value.__wrapped__, tuple(value.cache_parameters().items()), vars(value))
        return self._all("cache", parts)

    def _named(self, value: Any, module: str, library: str) -> bytes:
        """Return the digest of a function of a library."""
        _refuse_hidden([module, value.__qualname__])
        return _hash("library", [library.encode(), module.encode(), value.__qualname__.encode()])

    # --- values ---

    def _object(self, value: Any) -> bytes:
        """Return the digest of an object: its class, what pickle would keep, and the rest."""
        if isinstance(value, nn.Module):
            return _hash("module", [
                self.of(type(value)), self._all("state", _state(value)), self._slots(value),
            ])  # fmt: skip
        if any(value is generator for generator in _GENERATORS):
            raise NoDigest(_drawn(type(value).__name__))
        if isinstance(value, os._Environ):
            raise NoDigest("it reads environment variables")
        if callable(value) and libraries.object_named(value) is value:  # such as a ufunc
            library = libraries.library_of_name(value.__module__)
            if library:
                return self._named(value, value.__module__, library)
        try:
            reduced = _reduced(value)
        except Exception as error:  # anything that a class may raise
            raise NoDigest(f"{type(value).__name__} has no copy ({first_line(error)})") from error
        kept = (reduced,) if isinstance(reduced, str) else (*reduced, None, None, None)[:5]
        parts = [list(part) if isinstance(part, Iterator) else part for part in kept]
        return _hash("object", [
            self.of(type(value)), self._all("reduced", parts), self._attributes(value),
        ])  # fmt: skip

    def _attributes(self, value: Any) -> bytes:
        """Return the digest of what pickle may leave out; a library's own way is trusted."""
        if libraries.library_of_class(type(value)):
            return b""
        return _hash(
            "attributes", [self._pairs(getattr(value, "__dict__", {})), self._slots(value)]
        )

    def _slots(self, value: Any) -> bytes:
        """Return the digest of the attributes that are in slots."""
        bases = [base for base in type(value).__mro__ if not libraries.library_of_class(base)]
        slots = [part for base in bases for part in vars(base).values() if type(part) in _SLOTS[:1]]
        return self._pairs({s.__name__: getattr(value, s.__name__, None) for s in slots})


class _Shape(_Contents):
    """The same without the numbers in tensors."""

    def _bits(self, value: Tensor) -> bytes:
        return f"{value.dtype} {tuple(value.shape)}".encode()


_BY_TYPE: dict[type, Any] = {
    list: lambda self, value: self._all("list", value),
    tuple: lambda self, value: self._all("tuple", value),
    dict: _Contents._pairs,
    types.MappingProxyType: _Contents._pairs,
    types.FunctionType: _Contents._function,
    types.MethodType: lambda self, value: self._all("method", (value.__func__, value.__self__)),
    types.CodeType: _Contents._code,
    types.UnionType: lambda self, value: self._all("union", value.__args__),
    weakref.ref: lambda self, value: self._all("reference", (value(),)),
    _CACHE: _Contents._cache,
    **{
        kind: lambda self, value: self._all(
            type(value).__name__, (getattr(value, name) for name in WRAPPED[type(value)])
        )
        for kind in WRAPPED
    },
}


def _body(value: type) -> Iterator[tuple[str, Any]]:
    """Yield what the body of a class defines, by name."""
    for name, part in sorted(vars(value).items()):
        if name not in _IGNORED and type(part) not in _SLOTS:
            yield name, part
    for name, field in sorted(vars(value).get("__dataclass_fields__", {}).items()):
        if field.metadata:
            yield f"metadata of {name}", dict(field.metadata)


def _state(module: nn.Module) -> Iterator[Any]:
    """Yield names and values of a module's attributes; hooks without their running numbers."""
    own = vars(module)
    numbers = sorted({number for name in _HOOKS & own.keys() for number in own[name] or ()})
    for name, value in own.items():
        yield name
        is_numbered = name in _HOOKS and isinstance(value, dict)
        yield [(numbers.index(n), hook) for n, hook in value.items()] if is_numbered else value


def _reduced(value: Any) -> Any:
    """Return what pickle would keep of an object."""
    registered = copyreg.dispatch_table.get(type(value))
    reduced = None if registered is None else registered(value)
    return reduced if isinstance(reduced, tuple) else value.__reduce_ex__(4)


def _hooks(value: Tensor) -> Iterator[Any]:
    """Yield the hooks of a tensor: number -> function."""
    yield value._backward_hooks
    yield getattr(value, "_post_accumulate_grad_hooks", None)


def _is_held(value: types.FunctionType) -> bool:
    """Return whether a module of a library holds a function under its name.

    What a library wraps around a function of your own has the name of that function, in its module.
    """
    is_held = libraries.object_named(value) is value
    return is_held and bool(libraries.library_of_name(value.__module__))


def _module_of(value: Any) -> str:
    """Return the name of the module that a builtin function is in."""
    owner, of_class = getattr(value, "__self__", None), getattr(value, "__objclass__", None)
    if getattr(value, "__module__", None):
        return str(value.__module__)
    if of_class is not None:
        return str(of_class.__module__)
    if owner is not None and not isinstance(owner, types.ModuleType):
        return str((owner if isinstance(owner, type) else type(owner)).__module__)
    places = (builtins, torch, torch._C._VariableFunctions, torch._C._nn)
    name = value.__name__
    held = (place.__name__ for place in places if getattr(place, name, None) is value)
    return next(held, "an unknown library")


def _refuse_hidden(path: list[str]) -> None:
    """Raise for what depends on more than its arguments, given its module and its name."""
    module, name = path[-2:] if len(path) > 1 else (path[0], "")
    if module in ("os", "posix") and name in _ENVIRONMENT:
        raise NoDigest("it reads environment variables")
    if _is_random(module) and name[:1].islower():
        raise NoDigest(_drawn(f"{module}.{name}"))
    if module.startswith("torch.ops.") and module.split(".")[2] not in _OPERATORS:
        raise NoDigest(f"the code of {module}.{name} cannot be seen")


def _is_random(module: str) -> bool:
    """Return whether a module draws random numbers that torch's seed does not determine."""
    return f"{module}.".startswith(tuple(f"{name}." for name in _RANDOM))


def _drawn(name: str) -> str:
    return (
        f"{name} draws random numbers that no seed of a training determines; those of torch are "
        "determined"
    )


def _hash(kind: str, parts: Iterable[bytes]) -> bytes:
    """Return the digest of parts, each with its length."""
    digest = hashlib.blake2b(digest_size=32)
    for part in (kind.encode(), *parts):
        digest.update(b" %d " % len(part) + part)
    return digest.digest()
