"""Write a file so that it is there as a whole or not at all.

The content goes into a scratch file beside the target, with a random name that is created
exclusively and through no link; it is flushed to the disk and renamed. The scratch file is locked
while its process lives, so that the next command can tell the leftovers of dead processes from the
scratch files of other commands, and removes them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from evenclip.files.kinds import Kind

__all__ = [
    "check_name",
    "clear_leftovers",
    "explained",
    "scratch_file",
    "scratch_folder",
    "synchronise",
    "write",
    "write_all",
]

_PREFIX = ".evenclip-"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
_REMEDIES = {
    errno.ENOSPC: "make room, or choose another place",
    errno.EDQUOT: "make room, or choose another place",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
_cleared = set[Path]()


def write(path: str | os.PathLike[str], content: bytes | str, kind: Kind) -> Path:
    """Write a file atomically, replacing an existing one; return its path.

    Raises:
        OSError: the file cannot be written; the message says why and what to do. An existing file
            is unchanged.
    """
    target, data = Path(path), content.encode() if isinstance(content, str) else content
    check_name(target)
    with explained(target):
        clear_leftovers(target.parent)
        with scratch_file(target.parent, kind.file_mode) as (scratch, handle):
            write_all(handle, data)
            os.replace(scratch, target)
            synchronise(target.parent)
    return target


def check_name(target: Path) -> None:
    """Raise unless a file can be renamed to this path: it is none yet, or an ordinary file.

    Raises:
        OSError: it is a link, which is neither followed nor replaced, a folder, or a device.
    """
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _sentence(error, target) from error
    if stat.S_ISLNK(mode):
        raise OSError(f"{target} is a link; name the file that it points to, or remove the link.")
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{target} is a folder; name a file.")
    if not stat.S_ISREG(mode):
        raise OSError(f"{target} is not an ordinary file; name a file.")


@contextmanager
def explained(target: Path) -> Iterator[None]:
    """Turn an error of the operating system into a sentence about the target."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a sentence already
            raise
        raise _sentence(error, target) from error


def _sentence(error: OSError, target: Path) -> OSError:
    """Return the error with a message that says what to do."""
    remedy = _REMEDIES.get(error.errno or 0, "choose another place")
    return type(error)(f"{target} cannot be written ({error.strerror}); {remedy}.")


@contextmanager
def scratch_file(folder: Path, mode: int) -> Iterator[tuple[Path, int]]:
    """Create an empty scratch file and lock it; remove it at the end if it is still there."""
    while True:
        path = folder / f"{_PREFIX}{secrets.token_hex(8)}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        if _is_kept(path, handle):
            break
        os.close(handle)
    try:
        yield path, handle
    finally:
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(path), os.fstat(handle)):
                path.unlink()
        os.close(handle)


@contextmanager
def scratch_folder(parent: Path, mode: int) -> Iterator[Path]:
    """Create an empty scratch folder and lock it; remove it at the end if it is still there."""
    while True:
        path = parent / f"{_PREFIX}{secrets.token_hex(8)}"
        os.mkdir(path, mode)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if _is_kept(path, handle):
            break
        os.close(handle)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def _is_kept(path: Path, handle: int) -> bool:
    """Lock a new scratch file; return whether no other command removed it before it was locked."""
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def clear_leftovers(folder: Path) -> None:
    """Remove the scratch files and folders of dead processes, once per process and folder."""
    place = Path(os.path.abspath(folder))
    if place in _cleared or not place.is_dir():
        return
    _cleared.add(place)
    with suppress(OSError), os.scandir(place) as entries:
        for path in [Path(entry.path) for entry in entries if entry.name.startswith(_PREFIX)]:
            with suppress(OSError):
                _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    """Remove a scratch file or folder of this user that no process has locked."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(path, ignore_errors=True)
        elif stat.S_ISREG(status.st_mode):
            path.unlink()
    finally:
        os.close(handle)


def synchronise(path: Path) -> None:
    """Wait until this file, or the names of the files in this folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:  # some file systems cannot flush a folder
            raise
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes) -> None:
    """Write everything and flush it to the disk."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]
    os.fsync(handle)
