"""Files of the user: described by their content, and run once per process.

What the code in a file prints goes to stderr, because stdout may be JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from evenclip import check

__all__ = ["call", "check_content", "describe_file", "load_module", "sha256"]


def describe_file(path: str | Path) -> dict[str, Any]:
    """Describe a file: its path, suffix and SHA-256."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the path of a file.")
    return {"path": str(path.resolve()), "suffix": path.suffix.lower(), "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_content(description: Mapping[str, Any]) -> None:
    """Raise if a file is missing or has changed since it was described."""
    path = Path(description["path"])
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist on {platform.node()}; put it where every machine can read it."
        )
    if sha256(path) != description["sha256"]:
        raise ValueError(
            f"{description['path']} has changed since the comparison began; start it again."
        )


def load_module(description: Mapping[str, Any]) -> ModuleType:
    """Run the user's file as a module; the same content gives the same object.

    The files that it imports are not compared.
    """
    name = f"evenclip_given_{description['sha256'][:16]}"
    if name in sys.modules:
        return sys.modules[name]
    check_content(description)
    path = str(description["path"])
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # dataclasses look up their module
    try:
        # Compiled here: Python's cache of compiled files can miss a change within one second.
        code = compile(Path(path).read_bytes(), path, "exec")
        with contextlib.redirect_stdout(sys.stderr):
            exec(code, vars(module))
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise ValueError(
            f"{path} cannot be loaded: {check.reason(error, path)}{_neighbour(error, path)}"
        ) from error
    return module


def call(function: Callable[[], Any], what: str, path: str) -> Any:
    """Call the user's function; its output goes to stderr, because stdout may be JSON."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} failed: {check.reason(error, path)}") from error


def _neighbour(error: BaseException, path: str) -> str:
    """Return what to do if the user's file imports another file of its folder."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    module = error.name.partition(".")[0]
    folder = Path(path).parent
    if not (folder / f"{module}.py").is_file() and not (folder / module).is_dir():
        return ""
    return (
        f" Runs are named by the content of this one file, and only this file is sent to workers: "
        f"move what it needs of {module} into it, or install {module} as a package."
    )
