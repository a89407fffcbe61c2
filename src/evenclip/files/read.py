"""Read a file as a whole: an ordinary one, that fits into memory."""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["LARGEST", "read"]

LARGEST = 2**31
"""Bytes that a file which is read as a whole has at most."""


def read(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """Return the content of an ordinary file of at most `most` bytes; wait for no pipe.

    Raises:
        OSError: the file cannot be read; its `strerror` says why, as half a sentence.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not an ordinary file")
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, more than {most:,}")
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)
