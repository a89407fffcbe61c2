"""Folders for private rows that other processes must read: removed in every ending.

A helper process waits for the end of this one and removes the folder, also after SIGKILL. If both
are killed at once, as when the power fails, the next command that uses the parent removes it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evenclip.files.write import clear_leftovers, explained, scratch_folder

__all__ = ["private_folder"]

# Again and again for a while: other processes that end may still write there.
_WAIT = """
import os, shutil, sys, time
sys.stdin.read()
for _ in range(100):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.lexists(sys.argv[1]):
        break
    time.sleep(0.1)
"""


@contextmanager
def private_folder(parent: Path) -> Iterator[Path]:
    """Create a folder that only this user can read; remove it when the context or process ends."""
    with explained(parent):
        clear_leftovers(parent)
    with scratch_folder(parent, 0o700) as folder:
        guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WAIT, str(folder.absolute())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        try:
            yield folder
        finally:
            assert guardian.stdin is not None
            guardian.stdin.close()
            guardian.wait()
