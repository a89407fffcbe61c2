"""The store of results: one folder per run, named by the hash of its specification.

    ROOT/HASH/spec.json            specification
              result.json          result: metrics, ledger, trace, environment
              model.safetensors    model
    ROOT/locks/HASH                lock of the process that computes the run

Writing is atomic: a folder is written under another name, flushed to disk, and renamed. An existing
result is never overwritten.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from evenclip.sweep.spec import Spec

__all__ = ["Store", "default_root"]


def default_root() -> Path:
    """Return the store in the user's cache, EVENCLIP_CACHE or ~/.cache/evenclip.

    Later commands reuse its results.
    """
    given = os.environ.get("EVENCLIP_CACHE")
    return (Path(given) if given else Path.home() / ".cache" / "evenclip") / "runs"


class Store:
    """A folder of results."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"{self.root} cannot be created ({error.strerror}); choose another folder for "
                "results."
            ) from error

    def folder(self, spec: Spec) -> Path:
        """Return the folder of a run's result, existing or not."""
        return self.root / spec.hash

    def has(self, spec: Spec) -> bool:
        """Return whether the result of a run is stored."""
        return (self.folder(spec) / "result.json").is_file()

    def read(self, spec: Spec) -> dict[str, Any]:
        """Read the result of a run."""
        result: dict[str, Any] = json.loads((self.folder(spec) / "result.json").read_text())
        return result

    def write(self, spec: Spec, result: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Write a result atomically, unless another process has already written it."""
        from safetensors.torch import save

        scratch = self.root / f".writing-{spec.hash}-{uuid.uuid4().hex}"
        try:
            scratch.mkdir()
            contents = {
                "spec.json": json.dumps(spec.to_json(), indent=1).encode(),
                "model.safetensors": save(
                    {name: tensor.contiguous().cpu() for name, tensor in weights.items()}
                ),
                "result.json": json.dumps(result, indent=1).encode(),
            }
            for name, content in contents.items():
                _write(scratch / name, content)
            _put(scratch, self.folder(spec))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    @contextmanager
    def claim(self, spec: Spec) -> Iterator[bool]:
        """Lock a run for the duration of the context; yield False if it is already locked."""
        locks = self.root / "locks"
        locks.mkdir(exist_ok=True)
        with (locks / spec.hash).open("w") as lock:
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


def _write(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _put(scratch: Path, target: Path) -> None:
    """Rename `scratch` to `target`, unless that holds a complete result."""
    if target.exists() and not (target / "result.json").is_file():
        shutil.rmtree(target)  # incomplete: some of its files were deleted
    try:
        os.rename(scratch, target)
    except OSError:
        if not (target / "result.json").is_file():
            raise
