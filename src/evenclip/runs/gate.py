"""One process at a time trains on a GPU; the others get ready meanwhile.

Processes that share a GPU have it in slices, and what changing over takes is lost (benchmarks/sharing.py). The runs of
one process are computed side by side all the same, on streams.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["alone_on"]


@contextmanager
def alone_on(device: str) -> Iterator[None]:
    """Wait until no other process of this user trains on the GPU, and keep it; a CPU is shared by all.

    Dying lets go of it. Where a file cannot be locked, nobody waits: that is slower, and right.
    """
    if torch.device(device).type == "cpu":
        yield
        return
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(_place(device), flags, 0o600)
    except OSError:
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise
        yield
    finally:
        os.close(lock)


def _place(device: str) -> Path:
    """The file that stands for this GPU on this machine, whatever number it has here."""
    name = getattr(torch.cuda.get_device_properties(device), "uuid", device)
    return Path(tempfile.gettempdir()) / f"evenclip-{os.getuid()}-{str(name).replace('/', '-')}.lock"
