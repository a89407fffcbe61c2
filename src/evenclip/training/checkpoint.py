"""Checkpoints: what may be published and what must stay secret, in files of their own, written
whole or not at all.

    DIR/step-00000120/
        model.pt          parameters and buffers                                                   may be published
        published.json    specification, step, the rule's state, the ledger                        may be published
        secret.pt         random generators, sampler, optimiser, traces: whoever has it can
                          subtract the noise and knows the batches                                 never share
        manifest.json     size and SHA-256 of the others, written last

Nothing is read by unpickling objects: tensors and plain values only (`weights_only=True`), and
JSON. A checkpoint is written beside its place and moved there when it is complete; the one before
it is kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Checkpoint", "CheckpointError", "latest", "load", "save"]

FORMAT = 2
_FILES = ("model.pt", "published.json", "secret.pt")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """The three parts of a checkpoint."""

    model: dict[str, Any]
    published: dict[str, Any]
    secret: dict[str, Any]


def save(directory: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint for this step; keep it and the one before, remove older ones."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"step-{step:08d}"
    if target.exists():
        return target
    for left in directory.glob(
        ".writing-*"
    ):  # by somebody who was killed; there may be secrets in it
        shutil.rmtree(left, ignore_errors=True)
    scratch = directory / f".writing-{os.getpid()}-{step}"
    scratch.mkdir()
    contents = {
        "model.pt": _tensors(checkpoint.model),
        "published.json": json.dumps({"format": FORMAT, **checkpoint.published}, indent=1).encode(),
        "secret.pt": _tensors(checkpoint.secret),
    }
    manifest = {
        name: {"bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()}
        for name, b in contents.items()
    }
    contents["manifest.json"] = json.dumps(manifest, indent=1).encode()
    try:
        for name, content in contents.items():
            _write(scratch / name, content)
        os.replace(scratch, target)
    except BaseException:  # whatever went wrong, secrets are not left lying about
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    _synchronise(directory)
    for old in _steps(directory)[:-2]:
        shutil.rmtree(old)
    return target


def latest(directory: Path) -> Path | None:
    """The checkpoint of the highest step, or None."""
    found = _steps(directory)
    return found[-1] if found else None


def load(path: Path) -> Checkpoint:
    """The checkpoint in this folder, after checking that it is whole."""
    manifest = _manifest(path)
    contents = {name: _checked(path, name, manifest[name]) for name in _FILES}
    published = json.loads(contents["published.json"])
    if published.pop("format", None) != FORMAT:
        raise CheckpointError(
            f"{path} was written in another format than this version reads ({FORMAT})."
        )
    model, secret = (
        torch.load(io.BytesIO(contents[name]), weights_only=True)
        for name in ("model.pt", "secret.pt")
    )
    return Checkpoint(model, published, secret)


def _manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of each file."""
    content = _read(path, "manifest.json")
    try:
        found = json.loads(content)
        return {
            name: {"bytes": int(found[name]["bytes"]), "sha256": str(found[name]["sha256"])}
            for name in _FILES
        }
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a whole checkpoint (manifest.json: damaged). {_before(path)}"
        ) from error


def _read(path: Path, name: str) -> bytes:
    """A file's content, if there is such a file."""
    try:
        return (path / name).read_bytes()
    except OSError as error:
        why = f"{name}: {error.strerror}"
        raise CheckpointError(
            f"{path} is not a whole checkpoint ({why}). {_before(path)}"
        ) from error


def _checked(path: Path, name: str, expected: dict[str, Any]) -> bytes:
    """A file's content, if it is what the manifest says."""
    content = _read(path, name)
    if hashlib.sha256(content).hexdigest() != expected["sha256"]:
        raise CheckpointError(
            f"{path / name} is damaged: {len(content)} bytes, {expected['bytes']} were written, "
            f"and the checksum differs. {_before(path)}"
        )
    return content


def _before(path: Path) -> str:
    """What to do about a bad checkpoint."""
    earlier = [p for p in _steps(path.parent) if p.name < path.name]
    if not earlier:
        return "There is no earlier one; start again in another folder."
    return (
        f"The one before it, {earlier[-1]}, is still there: remove {path.name} and resume from "
        "that."
    )


def _steps(directory: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(p for p in directory.glob("step-*") if p.is_dir())


def _tensors(value: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> None:
    """Write and wait until it is on the disk; secret to everybody else."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _synchronise(directory: Path) -> None:
    """Make the move itself durable, where the system has such a thing."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
