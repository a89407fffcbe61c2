"""The places where the code of a model or of a loss can keep a value from one pass to the next.

    objects      attributes, also those in slots; lists, dictionaries, sets, deques, byte arrays;
                 numpy arrays, tensors, random generators
    code         closures, defaults and attributes of functions; class attributes; the variables of
                 modules that functions name; results of `functools.lru_cache`

Objects are those that lie in the attributes of the model's modules. Code is what they, and
functions among them, can reach. Code of installed libraries is not followed, and neither are files,
iterators and the memory of compiled extensions.

Each place has a copy of what it held, by identity, so a pass over all places is quick.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import io
import mmap
import random
import types
import warnings
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped

from evenclip.gradients.code_places import (
    CACHE,
    Variables,
    body,
    cache,
    function,
    in_body,
    in_function,
    is_generated,
    is_of_library,
)
from evenclip.gradients.place import (
    PLAIN,
    Place,
    context,
    entries,
    kinds,
    members,
    memory,
    numbers,
    pairs,
    queue,
    sequence,
    stream,
    variable,
)

__all__ = ["Places", "Reached", "modes"]

# Attributes of modules that are compared by name elsewhere, or that torch and tapes set in passes.
_APART = frozenset(("_parameters", "_buffers", "_modules", "forward", "training"))
_SHARDS = "__composable_api_"  # attributes in which torch keeps the shards of a model


@dataclass
class Reached:
    """Places, and the tensors in them, by name."""

    places: list[Place] = field(default_factory=list)
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return [name for name, _ in self.tensors]

    @property
    def versions(self) -> list[int]:
        """How often each tensor has been changed in place."""
        return [_version(tensor) for _, tensor in self.tensors]


class Places:
    """All places that objects and their code reach.

    Attributes:
        objects: what is reached in the objects.
        code: what is reached only through their code.

    Args:
        roots: names of values, and the values; the last one is followed first.
        without: values that are left out, by identity.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], without: Collection[int]) -> None:
        self.objects, self.code = Reached(), Reached()
        self._seen, self._kept = set(without), list[Any]()  # kept, so that no id is used again
        self._later: list[tuple[str, Any]] = []
        self._objects, self._variables = list[Any](), Variables()
        self._walk(list(roots), self.objects)
        self.objects.places.append(kinds(self._objects))
        while self._later:
            later, self._later = self._later, []
            self._walk(later, self.code)
        self.code.places += self._variables.places

    def _walk(self, stack: list[tuple[str, Any]], reached: Reached) -> None:
        """Add the places of values and of what they hold; leave code for later."""
        while stack:
            name, value = stack.pop()
            if isinstance(value, PLAIN) or id(value) in self._seen or _is_of_shards(value):
                continue
            if isinstance(value, type | types.FunctionType | CACHE):
                if reached is self.objects:
                    self._later.append((name, value))
                else:
                    self._see(value)
                    self._add_code(value, reached.places, stack)
                continue
            self._see(value)
            if isinstance(value, Tensor):
                reached.tensors.append((name, value))
            elif isinstance(value, np.ndarray) and _is_in_order(value):
                reached.tensors.append((name, _as_tensor(value)))
            reached.places += _places(name, value)
            if reached is self.objects and isinstance(getattr(value, "__dict__", None), dict):
                self._objects.append(value)
            stack += [(name, part) for part in _parts(value)]
            self._later += [(name, part) for part in _code_of(value)]

    def _see(self, value: Any) -> None:
        self._seen.add(id(value))
        self._kept.append(value)

    def _add_code(self, value: Any, places: list[Place], stack: list[tuple[str, Any]]) -> None:
        """Add the places of a function, a class or a cache."""
        name = f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, CACHE):
            places.append(cache(f"the cache of {name}", value))
            stack.append((name, value.__wrapped__))
        elif isinstance(value, type):
            stack.append((name, type(value)))
            for base in value.__mro__:
                if not is_of_library(base.__module__):
                    places.append(body(base))
                    stack += [(f"{name}.{own}", part) for own, part in in_body(base)]
        elif not is_generated(value):
            places.append(function(f"a variable of {name}", value))
            held = [*in_function(value), *self._variables.of(value)]
            stack += [(f"a variable of {name}", part) for part in held]


# --- objects ------------------------------------------------------------------------------------


def _places(name: str, value: Any) -> Iterator[Place]:
    """Yield the places in one object."""
    if isinstance(value, list | bytearray):
        yield sequence(name, value)
    elif isinstance(value, deque):
        yield queue(name, value)
    elif isinstance(value, dict):
        yield pairs(name, value)
    elif isinstance(value, set):
        yield members(name, value)
    elif isinstance(value, np.ndarray) and value.dtype == object:
        yield entries(name, value)
    elif isinstance(value, np.ndarray) and not _is_in_order(value):
        yield numbers(name, value)
    elif isinstance(value, contextvars.ContextVar):
        yield context(name, value)
    elif isinstance(value, io.BytesIO | io.StringIO):
        yield stream(name, value)
    elif isinstance(value, array.array | ctypes.Array | ctypes.Structure | memoryview | mmap.mmap):
        yield from filter(None, [memory(name, value)])
    elif isinstance(value, torch.Generator):
        yield Place(name, lambda: (value.get_state().numpy().tobytes(),))
    elif isinstance(value, random.Random):
        yield Place(name, lambda: (repr(value.getstate()),))
    elif isinstance(value, np.random.Generator | np.random.RandomState):
        yield Place(name, lambda: (repr(_state_of(value)),))
    own = getattr(value, "__dict__", None)
    if isinstance(value, nn.Module):
        yield pairs(name, vars(value), _is_own)
    elif isinstance(own, dict) and not isinstance(value, types.ModuleType):
        yield pairs(name, own)
    for slot in _slots(type(value)):
        yield variable(name, value, slot)


def _is_own(name: str) -> bool:
    """Return whether an attribute of a module is compared here."""
    return name not in _APART and not name.startswith(_SHARDS)


def _parts(value: Any) -> list[Any]:
    """Return what an object holds."""
    if isinstance(value, types.ModuleType):
        return []
    parts: list[Any] = []
    if isinstance(value, list | tuple | set | frozenset | deque):
        parts += value
    elif isinstance(value, dict | types.MappingProxyType):
        parts += [part for item in value.items() for part in item]
    elif isinstance(value, np.ndarray) and value.dtype == object:
        parts += value.ravel().tolist()
    elif isinstance(value, functools.partial):
        parts += [value.func, value.args, value.keywords]
    elif isinstance(value, types.MethodType):
        parts += [value.__self__, value.__func__]
    elif isinstance(value, types.BuiltinFunctionType):
        parts.append(value.__self__)
    elif isinstance(value, weakref.ref):
        parts.append(value())
    elif isinstance(value, property):
        parts += [value.fget, value.fset]
    elif isinstance(value, staticmethod | classmethod):
        parts.append(value.__func__)
    elif type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "_mgr"):
        parts += value._mgr.arrays
    elif _is_in_shards(type(value)):  # a module; its attributes have names of their own
        return []
    own = getattr(value, "__dict__", {})
    if isinstance(own, dict):
        parts += [part for key, part in own.items() if not str(key).startswith(_SHARDS)]
    return [*parts, *(getattr(value, slot, None) for slot in _slots(type(value)))]


def _is_of_shards(value: Any) -> bool:
    """Return whether torch keeps its shards in an object, which changes in every pass."""
    return _is_in_shards(type(value)) and not isinstance(value, Tensor | nn.Module)


def _is_in_shards(kind: type) -> bool:
    return kind.__module__.startswith("torch.distributed")


def modes(modules: Sequence[nn.Module]) -> Place:
    """Return the place of the modes of modules: training or evaluation."""

    def write(held: tuple[Any, ...]) -> None:
        for module, training in zip(modules, held, strict=True):
            module.training = training

    return Place("the mode of a module", lambda: tuple(m.training for m in modules), write)


def _code_of(value: Any) -> list[Any]:
    """Return the class of an object, if it is in no library."""
    kind = type(value)
    return [] if all(is_of_library(base.__module__) for base in kind.__mro__) else [kind]


def _slots(kind: type) -> list[str]:
    """Return the names of the attributes of a class that are in slots."""
    bases = [base for base in kind.__mro__ if "__slots__" in vars(base)]
    return [
        name
        for base in bases
        for name, part in vars(base).items()
        if isinstance(part, types.MemberDescriptorType)
    ]


def _is_in_order(value: np.ndarray[Any, Any]) -> bool:
    """Return whether an array has numbers without gaps, so that a tensor can share its memory."""
    return value.dtype.kind in "biufc" and value.flags.c_contiguous


def _as_tensor(value: np.ndarray[Any, Any]) -> Tensor:
    """Return the bytes of an array as a tensor in the same memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writ")
        return torch.from_numpy(value.reshape(-1).view(np.uint8))


def _state_of(value: np.random.Generator | np.random.RandomState) -> Any:
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.get_state()


def _version(tensor: Tensor) -> int:
    """Return how often a tensor has been changed in place."""
    return 0 if is_wrapped(tensor) or tensor.is_inference() else tensor._version
