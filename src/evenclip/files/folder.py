"""Write and replace a folder so that there is a whole one at every moment.

A new folder is written under a scratch name and renamed. An existing one is exchanged with it in
one operation of the operating system; what was replaced is then removed. Where the file system
cannot exchange two folders, the old one is NAME.replaced for the moment between two renames.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from evenclip.files.kinds import Kind
from evenclip.files.seal import MANIFEST, manifest
from evenclip.files.write import (
    clear_leftovers,
    explained,
    scratch_file,
    scratch_folder,
    synchronise,
    write_all,
)

__all__ = ["check_place", "make_folder", "set_aside", "write_folder"]

_CURRENT = -100  # AT_FDCWD: paths are relative to the current folder
_EXCHANGE = 2  # RENAME_EXCHANGE on Linux, RENAME_SWAP on macOS


def make_folder(folder: Path, kind: Kind) -> Path:
    """Create a folder and its parents if they are missing.

    Raises:
        OSError: it cannot be created.
    """
    with explained(folder):
        _make_parents(folder / "anything")
        folder.mkdir(mode=kind.folder_mode, exist_ok=True)
    return folder


def _make_parents(target: Path) -> None:
    """Create the folders above a path."""
    for folder in target.parents:
        if os.path.lexists(folder):
            if not folder.is_dir():
                raise NotADirectoryError(f"{folder} is not a folder; choose another place.")
            break
    target.parent.parent.mkdir(parents=True, exist_ok=True)


def check_place(target: Path, room: int = 2**20) -> None:
    """Raise unless a file or folder of this name and size can be written; create its parents.

    Raises:
        OSError: the name is too long, or its folder cannot be created, is read-only or full.
    """
    with explained(target):
        with suppress(FileNotFoundError):
            os.lstat(target)
        _make_parents(target)
        target.parent.mkdir(exist_ok=True)
        with scratch_file(target.parent, 0o600) as (_, handle):
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, room)


def write_folder(
    place: Path, contents: Mapping[str, bytes], kind: Kind, *, replace: bool, **identity: Any
) -> Path:
    """Write a folder of files and their manifest, atomically; return its path.

    Args:
        place: the folder. If it exists and is not empty, `replace` decides.
        contents: name -> content.
        kind: what the folder is.
        replace: whether an existing folder is replaced; otherwise it is left as it is.
        **identity: what the folder belongs to.

    Raises:
        OSError: the folder cannot be written; an existing one is unchanged.
    """
    files = {**contents, MANIFEST: manifest(contents, kind, identity)}
    with explained(place):
        clear_leftovers(place.parent)
        with scratch_folder(place.parent, kind.folder_mode) as scratch:
            for name, content in files.items():
                handle = os.open(
                    scratch / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, kind.file_mode
                )
                try:
                    write_all(handle, content)
                finally:
                    os.close(handle)
            synchronise(scratch)
            _move(scratch, place, replace=replace)
            synchronise(place.parent)
    return place


def set_aside(place: Path, parent: Path, kind: Kind) -> Path:
    """Move a damaged folder into another one, under a new name; return its path."""
    aside = make_folder(parent, kind) / f"{place.name}-{secrets.token_hex(4)}"
    with explained(aside), suppress(FileNotFoundError):  # another command was faster
        os.replace(place, aside)
    return aside


def _move(scratch: Path, place: Path, *, replace: bool) -> None:
    """Give a finished folder its name. What it replaces, if anything, is at `scratch` then."""
    try:
        os.replace(scratch, place)  # works if there is none, or an empty one
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if not replace:
        return
    if _exchange(scratch, place):
        return
    aside = place.with_name(f"{place.name}.replaced")
    os.replace(place, aside)
    try:
        os.replace(scratch, place)
    except BaseException:
        os.replace(aside, place)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one operation; return whether the system can."""
    name = "renameat2" if sys.platform == "linux" else "renameatx_np"
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if call is None:
        return False
    here = _CURRENT if sys.platform == "linux" else -2
    if call(here, os.fsencode(one), here, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(other))
