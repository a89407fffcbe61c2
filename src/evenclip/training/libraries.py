"""Which library a module, a function or a class belongs to.

A library is known by its name and version; its code is not read. So only what cannot change under
that name counts: Python's own modules, torch, this package, and installed packages whose files are
those of their installation (`RECORD`). The location of the file decides, not its name: a file
`statistics.py` of your own is no library, nor is an editable installation.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch._ops import _OpNamespace

from evenclip.training.code import OTHERS

__all__ = ["library_of", "library_of_class", "library_of_module", "library_of_name", "object_named"]

_PACKAGES = {"torch": Path(torch.__file__).parent, "evenclip": Path(__file__).parents[1]}
_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}  # they lie among Python's own modules
_HEAP = 1 << 9  # flag of a class that was not built into an extension module


def library_of(variables: Mapping[str, Any]) -> str:
    """Return the library that the module with these variables belongs to; "" if it is in none."""
    name, spec = variables.get("__name__"), variables.get("__spec__")
    if not isinstance(name, str):
        return ""
    origin, file = getattr(spec, "origin", None), variables.get("__file__")
    return _library(name.partition(".")[0], origin, file)


def library_of_name(name: str) -> str:
    """Return the library of a module by its name, whether or not it is imported."""
    top = name.partition(".")[0]
    if top not in sys.modules:
        spec = importlib.util.find_spec(top) if top else None
        return "" if spec is None else _library(top, spec.origin, spec.origin)
    while name:
        module = sys.modules.get(name)
        if module is not None and _is_placed(module):
            return library_of(vars(module))
        name = name.rpartition(".")[0]  # a part of an extension module has no file
    return ""


def library_of_module(module: types.ModuleType) -> str:
    """Return the library of a module."""
    if isinstance(module, _OpNamespace):  # an extension may add operators of its own
        return "torch"
    if _is_placed(module) or sys.modules.get(module.__name__) is not module:
        return library_of(vars(module))
    return library_of_name(module.__name__)


def library_of_class(value: type) -> str:
    """Return the library of a class, which holds it under its name."""
    library = library_of_name(value.__module__)
    is_built_in = not value.__flags__ & _HEAP
    return library if is_built_in or object_named(value) is value else ""


def object_named(value: Any) -> Any:
    """Return what a module holds under the name of a class or a function; None if nothing."""
    held = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in getattr(value, "__qualname__", "").split("."):
        held = getattr(held, part, None)
    return held


def _is_placed(module: types.ModuleType) -> bool:
    """Return whether it is known where a module comes from."""
    origin = getattr(module.__spec__, "origin", None)
    return getattr(module, "__file__", None) is not None or origin in ("built-in", "frozen")


@cache
def _library(top: str, origin: str | None, file: str | None) -> str:
    """Return the library of a module, given its package, its origin and its file."""
    is_pythons = top in sys.stdlib_module_names
    if is_pythons and origin in ("built-in", "frozen"):
        return top
    if file is None:
        return ""
    path = Path(os.path.realpath(file))
    if top in _PACKAGES:  # their versions are conditions of their own
        home = _PACKAGES[top].resolve()
        return top if path.is_relative_to(home) and not _is_outside(path, home) else ""
    if is_pythons and not _PACKAGE_FOLDERS & set(path.parts):
        return top if any(path.is_relative_to(folder) for folder in _standard()) else ""
    return next(_installed(top, path), "")


def _is_outside(path: Path, home: Path) -> bool:
    """Return whether a file of this package is not in `code.sources`."""
    return home.name == "evenclip" and path.relative_to(home).parts[0] in OTHERS


@cache
def _standard() -> list[Path]:
    """Return the folders of Python's own modules."""
    places = (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        sysconfig.get_config_var("DESTSHARED"),
    )
    return [Path(os.path.realpath(place)) for place in places if place]


def _installed(top: str, path: Path) -> Iterator[str]:
    """Yield the distribution of a file, if the file is the one that was installed."""
    for distribution in _distributions(top):
        folder = Path(os.path.realpath(str(distribution.locate_file(""))))
        if path.is_relative_to(folder):
            name = path.relative_to(folder).as_posix()
            lines = (distribution.read_text("RECORD") or "").splitlines()
            own = next((line for line in lines if line.startswith(f"{name},sha256=")), "")
            if own and own.split(",")[1].removeprefix("sha256=") == _hash(path):
                code = sorted(line for line in lines if line.split(",")[0].endswith(_CODE))
                together = hashlib.sha256("\n".join(code).encode()).hexdigest()
                yield f"{distribution.name} {distribution.version} {together}"


_CODE = (".py", ".so", ".pyd", ".dylib", ".dll")


def _distributions(top: str) -> Iterator[metadata.Distribution]:
    """Yield the distributions that may have installed a package."""
    for name in [top] if _has_distribution(top) else _names().get(top, []):
        yield metadata.distribution(name)


def _has_distribution(name: str) -> bool:
    try:
        metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return True


@cache
def _names() -> Mapping[str, list[str]]:
    """Return package -> its distributions; this reads the metadata of all of them."""
    return metadata.packages_distributions()


@cache
def _hash(path: Path) -> str:
    """Return the digest of a file in the form of `RECORD`."""
    try:
        digest = hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return ""
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
