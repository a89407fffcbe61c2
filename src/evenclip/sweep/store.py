"""The store of results: one folder per run, named by the hash of its specification.

    ROOT/HASH/spec.json            specification
              result.json          result: metrics, ledger, trace, environment
              model.safetensors    model
              manifest.json        checksums of the others, and the name of the run
    ROOT/damaged/                  results that are not what was written
    ROOT/locks/HASH                lock of the process that computes the run

Writing is atomic, and an existing result is never overwritten. A result is believed only if its
manifest says that it is the result of this run; another one is set aside, and the run is computed
again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from evenclip import files
from evenclip.files import kinds
from evenclip.sweep.spec import Spec

__all__ = ["Store", "default_root"]


_REMEDIES = {
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENOSPC: "make room, or choose another folder for results",
    errno.EROFS: "choose another folder for results",
    errno.EACCES: "choose another folder for results",
}


def default_root() -> Path:
    """Return the store in the user's cache, EVENCLIP_CACHE or ~/.cache/evenclip.

    Later commands reuse its results.
    """
    given = os.environ.get("EVENCLIP_CACHE")
    return (Path(given) if given else Path.home() / ".cache" / "evenclip") / "runs"


class Store:
    """A folder of results. Private: only its owner can read it."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = files.make_folder(Path(root), kinds.RUN)
        files.clear_leftovers(self.root)

    def folder(self, spec: Spec) -> Path:
        """Return the folder of a run's result, existing or not."""
        return self.root / spec.hash

    def has(self, spec: Spec) -> bool:
        """Return whether the undamaged result of a run is stored."""
        try:
            files.read_folder(self.folder(spec), kinds.RUN, run=spec.hash)
        except (OSError, files.DamagedError):
            return False
        return True

    def read(self, spec: Spec) -> dict[str, Any]:
        """Read the result of a run.

        Raises:
            FileNotFoundError: there is none.
            DamagedError: it is not what was written.
        """
        place = self.folder(spec)
        content = files.read_folder(place, kinds.RUN, run=spec.hash)["result.json"]
        return files.parsed(content, place / "result.json", kinds.RUN)

    def set_aside(self, spec: Spec) -> str | None:
        """Move a damaged result out of the way; return a sentence about it, if there is one."""
        place = self.folder(spec)
        if not place.exists():
            return None
        try:
            files.read_folder(place, kinds.RUN, run=spec.hash)
            return None
        except (OSError, files.DamagedError) as error:
            why = str(error)
        aside = files.set_aside(place, self.root / "damaged", kinds.RUN)
        return f"{why} What was there is in {aside}."

    def write(self, spec: Spec, result: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Write a result atomically, unless another process has already written it."""
        from safetensors.torch import save

        contents = {
            "spec.json": json.dumps(spec.to_json(), indent=1).encode(),
            "model.safetensors": save(
                {name: tensor.contiguous().cpu() for name, tensor in weights.items()}
            ),
            "result.json": json.dumps(result, indent=1).encode(),
        }
        self.set_aside(spec)
        files.write_folder(self.folder(spec), contents, kinds.RUN, replace=False, run=spec.hash)

    @contextmanager
    def claim(self, spec: Spec) -> Iterator[bool]:
        """Lock a run for the duration of the context; yield False if it is already locked."""
        with _lock_file(self.root / "locks", spec.hash) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError as error:
                # On a disk without locks a run may be computed twice; one result is kept.
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                    raise
            yield True  # closing the file releases the lock, and so does the end of the process


@contextmanager
def _lock_file(folder: Path, name: str) -> Iterator[int]:
    """Open a lock file, creating it if it is missing; follow no link, and write nothing."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            kind = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            lock = os.open(name, kind, 0o600, dir_fd=inside)
        finally:
            os.close(inside)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "remove what is in its place")
        raise OSError(f"{folder / name} cannot be locked ({error.strerror}); {remedy}.") from error
    try:
        yield lock
    finally:
        os.close(lock)
