"""Parts of a library's modules and classes that are not what the library defines there.

A library is known by its name and version, so what a program puts into it must be found. A function
is the library's own in its place if the place has its module and its qualified name, and its code
is that of its file. All else is foreign: functions of the program, functions of the library under
another name, and callable objects. The aliases that a library itself makes are foreign too, and are
the same in every process.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from evenclip.training import libraries

__all__ = ["WRAPPED", "foreign", "functions"]

WRAPPED = {property: ("fget", "fset", "fdel"), staticmethod: ("__func__",),
           classmethod: ("__func__",), functools.cached_property: ("func",)}  # fmt: skip
_WRAPPERS = tuple(WRAPPED)
_DESCRIPTORS = (
    types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType,
)  # fmt: skip
_MAKERS = frozenset(("functools", "operator"))  # of objects that call other functions
_ALIASES = frozenset(("typing", "typing_extensions", "types", "collections.abc"))
_BY_COMPILER = frozenset(
    f"install_generation_tagging_init.<locals>.patched_{name}" for name in ("init", "setstate")
)
_BY_TORCH = frozenset({
    ("torch._compile", "_disable_dynamo.<locals>.inner"),
    ("torch._dynamo.eval_frame", "DisableContext.__call__.<locals>._fn"),
    ("torch.optim.optimizer", "Optimizer.profile_hook_step.<locals>.wrapper"),
})  # fmt: skip
_IGNORED = frozenset(("__class_getitem__", "__init_subclass__", "__subclasshook__", "__class__"))


def foreign(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the foreign parts of a module or a class of a library, by name.

    A function of the library is given by its module and its name, or by its code where that is not
    the code of its file.
    """
    is_class = isinstance(owner, type)
    home, before = (
        (owner.__module__, f"{owner.__qualname__}.") if is_class else (owner.__name__, "")
    )
    for name, part in list(vars(owner).items()):
        if name in _IGNORED or isinstance(part, _DESCRIPTORS):
            continue
        for function in functions(part):
            if isinstance(function, types.FunctionType):
                value = _function(owner, name, function, home, before + name)
            elif isinstance(function, types.BuiltinFunctionType):
                value = _builtin(function, name, home)
            else:
                value = _object(function, name)
            if value is not None:
                yield name, value


def functions(part: Any) -> Iterator[Any]:
    """Yield a part, or the functions that a property or a class method wraps."""
    if not isinstance(part, _WRAPPERS):
        yield part
        return
    for kind, names in WRAPPED.items():
        if isinstance(part, kind):
            values = (getattr(part, name) for name in names)
            yield from (value for value in values if value is not None)


def _function(owner: Any, name: str, function: types.FunctionType, home: str, place: str) -> Any:
    """Return what a digest needs of a function in this place; None if it is the library's own."""
    function = _unwrapped(function)
    if not libraries.library_of(function.__globals__):
        return function
    code = function.__code__
    if (function.__module__, function.__qualname__) != (home, place):
        if isinstance(owner, type) and _inherited(owner, name) is function:
            return None
        if function.__closure__:  # made around others, which its name does not show
            return function
        return f"{function.__module__} {function.__qualname__} {code.co_qualname}"
    is_of_file = code.co_filename == function.__globals__.get("__file__")
    return None if is_of_file and code.co_qualname == place else code


def _unwrapped(function: types.FunctionType) -> types.FunctionType:
    """Return the function in wrappers that torch makes, when its compiler or an optimizer starts.

    They change nothing in what is computed.
    """
    while True:
        inner = vars(function).get("__wrapped__")
        home, name = function.__globals__.get("__name__"), function.__code__.co_qualname
        if name in _BY_COMPILER and home == "torch._dynamo.mutation_guard":
            inner = next(cell.cell_contents for cell in function.__closure__ or ())
        elif (home, name) not in _BY_TORCH:
            return function
        if not isinstance(inner, types.FunctionType):
            return function
        function = inner


def _inherited(owner: type, name: str) -> Any:
    """Return what a class would have under this name without its own."""
    part = next((vars(base)[name] for base in owner.__mro__[1:] if name in vars(base)), None)
    return _unwrapped(part) if isinstance(part, types.FunctionType) else part


def _builtin(function: types.BuiltinFunctionType, name: str, home: str) -> Any:
    """Return what a digest needs of a compiled function; None for torch's operators by name."""
    module = function.__module__
    holds_operators = home.startswith("torch._C") or home in ("torch", "torch._VF")
    if holds_operators and function.__name__ == name and (module or "torch").startswith("torch"):
        return None
    if module and not libraries.library_of_name(module):
        return function
    return f"{module} {function.__qualname__}"


def _object(part: Any, name: str) -> Any:
    """Return what a digest needs of another part; None for values, modules and own classes."""
    if isinstance(part, type):
        if not libraries.library_of_name(part.__module__):
            return part
        is_own = part.__name__ == name and libraries.object_named(part) is part
        return None if is_own else f"{part.__module__} {part.__qualname__}"
    is_called = callable(part) or hasattr(type(part), "__get__")
    if not is_called or isinstance(part, types.ModuleType) or type(part).__module__ in _ALIASES:
        return None
    is_named = getattr(part, "__name__", None) == name and libraries.object_named(part) is part
    if is_named and libraries.library_of_name(part.__module__):
        return None
    is_made_of_others = isinstance(part, nn.Module) or type(part).__module__ in _MAKERS
    if is_made_of_others or not libraries.library_of_class(type(part)):
        return part
    return f"{type(part).__module__} {type(part).__qualname__} {getattr(part, '__name__', '')}"
