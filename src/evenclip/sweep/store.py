"""Where results lie: one folder per run, named by the hash of its specification.

    ROOT/HASH/spec.json            what was run
              result.json          what came out: metrics, ledger, trace, environment
              model.safetensors    the model
    ROOT/locks/HASH                held by whoever is computing it

A folder appears whole or not at all: it is written under another name, flushed to disk, and
renamed. What is there is never written again.
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
    """The user's cache: EVENCLIP_CACHE, or ~/.cache/evenclip; results of earlier commands are found
    there again.
    """
    given = os.environ.get("EVENCLIP_CACHE")
    return (Path(given) if given else Path.home() / ".cache" / "evenclip") / "runs"


class Store:
    """The folder of results."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"{self.root} cannot be made ({error.strerror}); choose another folder for results."
            ) from error

    def folder(self, spec: Spec) -> Path:
        """Where the result is, or will be."""
        return self.root / spec.hash

    def has(self, spec: Spec) -> bool:
        """Whether it has been computed."""
        return (self.folder(spec) / "result.json").is_file()

    def read(self, spec: Spec) -> dict[str, Any]:
        """The result."""
        found: dict[str, Any] = json.loads((self.folder(spec) / "result.json").read_text())
        return found

    def write(self, spec: Spec, result: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Put a result there, whole; if somebody else was faster, theirs stays."""
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
        """Whether nobody else is computing this run; for as long as the context lasts nobody else
        will.
        """
        locks = self.root / "locks"
        locks.mkdir(exist_ok=True)
        with (locks / spec.hash).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except (
                OSError
            ) as error:  # a disk without locks; a result that is computed twice is still kept once
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                    raise
            yield True  # closing the file lets go of it, and so does dying


def _write(path: Path, content: bytes) -> None:
    """To the disk, not only to the cache of the system."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _put(scratch: Path, target: Path) -> None:
    """Rename, unless there is a whole result already."""
    if target.exists() and not (target / "result.json").is_file():
        shutil.rmtree(target)  # somebody deleted a part of it
    try:
        os.rename(scratch, target)
    except OSError:
        if not (target / "result.json").is_file():
            raise
