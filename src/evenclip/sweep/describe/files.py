"""Files of the user: described by their content, and run once per process.

The code that runs is the code whose hash names the results: a file is read once, its bytes are
hashed, and these bytes are compiled. A file may import installed packages, and none of the files in
its folder, because no hash covers them.

What the code in a file prints goes to stderr, because stdout may be JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from evenclip import check
from evenclip.arguments import check_path

__all__ = [
    "call",
    "check_content",
    "check_not_loading",
    "describe_file",
    "load_module",
    "read_content",
    "sha256",
]

_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
_loading = list[str]()  # files that are being executed


def describe_file(path: str | Path) -> dict[str, Any]:
    """Describe a file: its path, suffix and SHA-256."""
    check_path("file", path)
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
    path = _existing(description)
    if sha256(path) != description["sha256"]:
        raise _changed(description)


def read_content(description: Mapping[str, Any]) -> bytes:
    """Return the content of a file, read once; raise if it is not what was described."""
    read = _existing(description).read_bytes()
    if hashlib.sha256(read).hexdigest() != description["sha256"]:
        raise _changed(description)
    return read


def _existing(description: Mapping[str, Any]) -> Path:
    """Return the path of a file; raise if it does not exist."""
    path = Path(description["path"])
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist on {platform.node()}; put it where every machine can read it."
        )
    return path


def _changed(description: Mapping[str, Any]) -> ValueError:
    return ValueError(
        f"{description['path']} has changed since the comparison began; start it again."
    )


def load_module(description: Mapping[str, Any]) -> ModuleType:
    """Execute the user's file as a module; the same content gives the same object.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file has changed, raises an exception, or imports a file of its folder.
    """
    name = f"evenclip_given_{description['sha256']}"
    if name in sys.modules:
        return sys.modules[name]
    path, source = str(description["path"]), read_content(description)
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # dataclasses look up their module
    _loading.append(path)
    try:
        # Compiled here: Python's cache of compiled files can miss a change within one second.
        code = compile(source, path, "exec", dont_inherit=True)
        with contextlib.redirect_stdout(sys.stderr), _no_neighbours(path):
            exec(code, vars(module))
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise ValueError(
            f"{path} cannot be loaded: {check.reason(error, path)}{_neighbour(error, path)}"
        ) from error
    finally:
        _loading.pop()
    return module


def check_not_loading() -> None:
    """Raise if a file is being executed, which would start the processes that execute it.

    Raises:
        ValueError: a file of a rule, model or dataset trains when it is loaded.
    """
    if _loading:
        raise ValueError(
            f"{_loading[-1]} starts a comparison when it is loaded, and every worker loads it; put "
            'the call below `if __name__ == "__main__":`.'
        )


def call(function: Callable[[], Any], what: str, path: str) -> Any:
    """Call the user's function; its output goes to stderr, because stdout may be JSON."""
    try:
        with contextlib.redirect_stdout(sys.stderr), _no_neighbours(path):
            return function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} failed: {check.reason(error, path)}") from error


@contextlib.contextmanager
def _no_neighbours(path: str) -> Iterator[None]:
    """Raise if what is executed imports a file of the folder of `path`, or below it."""
    before = set(sys.modules)
    yield
    folder = Path(path).resolve().parent
    for name in set(sys.modules) - before:
        file = getattr(sys.modules.get(name), "__file__", None)
        is_ours = name.partition(".")[0] == __name__.partition(".")[0]
        if isinstance(file, str) and not is_ours and _is_beside(Path(file).resolve(), folder):
            del sys.modules[name]
            raise ImportError(f"it imports {Path(file).name}.{_ALONE.format(name)}")


def _is_beside(file: Path, folder: Path) -> bool:
    """Return whether a file is in a folder or below it, and not of Python or a package."""
    if not file.is_relative_to(folder) or _PACKAGE_FOLDERS & set(file.parts):
        return False
    if any(part.startswith(".") for part in file.relative_to(folder).parts):  # .venv, .cache
        return False
    return not any(file.is_relative_to(root) for root in (sys.prefix, sys.base_prefix))


def _neighbour(error: BaseException, path: str) -> str:
    """Return what to do if the user's file imports another file of its folder."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    module = error.name.partition(".")[0]
    folder = Path(path).parent
    if not (folder / f"{module}.py").is_file() and not (folder / module).is_dir():
        return ""
    return _ALONE.format(module)


_ALONE = (
    " Runs are named by the content of this one file, and only this file is sent to workers: move "
    "what it needs of {0} into it, or install {0} as a package."
)
