"""Checkpoints, with public and secret values in separate files.

    DIR/step-00000120/
        model.pt          parameters and buffers                               may be published
        published.json    specification, step, the rule's state, the ledger    may be published
        secret.pt         key, data fingerprint, optimiser, traces             never share
        manifest.json     size and SHA-256 of the others

secret.pt reveals the batches, and the noise can be subtracted with it. The folder also holds the
journal of its runs (`evenclip.training.journal`), and one belongs to the other. Loading does not
unpickle objects: only tensors, plain values (`weights_only=True`) and JSON are read. A checkpoint
is written as a whole (`evenclip.files`). The previous one is kept.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evenclip import files
from evenclip.files import kinds, synchronise

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "check_conditions",
    "check_data",
    "check_settings",
    "create",
    "latest",
    "load",
    "save",
]

FORMAT = 5
_IDENTITY = ("place", "ledger", "durable")  # which draws were made
_FILES = ("model.pt", "published.json", "secret.pt")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """The three parts of a checkpoint.

    Attributes:
        model: state of the model.
        published: other values that may be published.
        secret: values that must stay secret.
    """

    model: dict[str, Any]
    published: dict[str, Any]
    secret: dict[str, Any]


def save(directory: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint for this step; keep it and the previous one, remove older ones.

    If the step has a checkpoint already, nothing is written, unless the run has made other draws
    since; then the new one is `step-00000120-0001`.
    """
    create(directory)
    target = directory / f"step-{step:08d}"
    same = [path for path in _steps(directory) if path.name.startswith(target.name)]
    if same and _is_saved(same[-1], checkpoint):
        return same[-1]
    if same:
        target = _following(same[-1])
    published = json.dumps({"format": FORMAT, **checkpoint.published}, indent=1)
    contents = {
        "model.pt": _tensors(checkpoint.model),
        "published.json": published.encode(),
        "secret.pt": _tensors(checkpoint.secret),
    }
    files.write_folder(target, contents, kinds.CHECKPOINT, replace=False)
    for old in _steps(directory)[:-2]:
        shutil.rmtree(old)
    return target


def create(directory: Path) -> None:
    """Create a folder for checkpoints, and wait until it and its new parents are on the disk.

    Raises:
        CheckpointError: it cannot be created.
    """
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in new:
            synchronise(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot hold checkpoints ({error.strerror}); choose another folder."
        ) from error


def latest(directory: Path) -> Path | None:
    """Return the folder of the checkpoint of the highest step, or None."""
    checkpoints = _steps(directory)
    return checkpoints[-1] if checkpoints else None


def load(path: Path) -> Checkpoint:
    """Return the checkpoint in this folder.

    Raises:
        CheckpointError: if it is incomplete, damaged, or in another format.
    """
    contents = _contents(path)
    published = json.loads(contents["published.json"])
    if published.pop("format", None) != FORMAT:
        raise CheckpointError(
            f"{path} has another format than this version reads ({FORMAT}); resume with the "
            "version that wrote it."
        )
    model, secret = (
        torch.load(io.BytesIO(contents[name]), weights_only=True)
        for name in ("model.pt", "secret.pt")
    )
    return Checkpoint(model, published, secret)


def check_settings(
    path: Path, theirs: dict[str, Any], ours: dict[str, Any], *, same_seed: bool, longer: bool
) -> None:
    """Raise unless the checkpoint was written by a run with these settings and this seed.

    The seeds themselves are secret and are not printed.

    Args:
        path: folder of the checkpoint.
        theirs: its settings.
        ours: those of this run.
        same_seed: whether the seeds are equal.
        longer: whether this run may have more steps; its ε is that of all of them.
    """
    differences = [
        f"{name}: {theirs.get(name)!r} there, {ours[name]!r} here"
        for name in ours
        if theirs.get(name) != ours[name]
        and not (longer and name == "steps" and ours[name] > theirs.get(name, ours[name]))
    ]
    if not same_seed:
        differences.append("seed: another one there")
    if differences:
        raise CheckpointError(
            f"{path} belongs to another run ({'; '.join(differences)}). Resume with the settings "
            "it was started with, or choose another folder."
        )


def check_data(path: Path, theirs: str | None, ours: str | None) -> None:
    """Raise if the checkpoint was written by a run on other data.

    Both arguments are fingerprints under the key of the checkpoint (`identity.mark`): of all rows
    or of some rows. Fingerprints of different kinds cannot be compared; None is an unknown
    fingerprint.
    """
    if theirs is None or ours is None or theirs.split()[0] != ours.split()[0] or theirs == ours:
        return
    raise CheckpointError(
        f"{path} belongs to a run on other data: a record or the order of records differs. Resume "
        "with the data it was started with, or choose another folder; ε is that of one dataset."
    )


def check_conditions(path: Path, differing: Sequence[str], *, same_key: bool) -> None:
    """Raise if a run cannot repeat the steps after a checkpoint bit by bit.

    Args:
        path: folder of the checkpoint.
        differing: names of what has changed since (`keys.different`).
        same_key: whether the run has the key of the checkpoint.
    """
    if same_key and not differing:
        return
    if differing:
        why = f"since it was written, there is another {', '.join(differing)}"
    else:
        why = "it was written after a resume that drew new noise"
    raise CheckpointError(
        f'{path} cannot be continued by resume="exact": {why}. Resume with resume=True, which '
        "draws new noise and counts all steps, or start again in another folder."
    )


def _following(path: Path) -> Path:
    """Return the folder of a further checkpoint of the same step; the names are in order."""
    _, step, *number = path.name.split("-")
    return path.with_name(f"step-{step}-{int(number[0] if number else 0) + 1:04d}")


def _is_saved(path: Path, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint of the same draws, with the same ledger, is saved here."""
    try:
        saved = load(path)
    except CheckpointError:
        return False
    ours = json.loads(json.dumps(checkpoint.published))
    return all(saved.published.get(name) == ours.get(name) for name in _IDENTITY)


def _contents(path: Path) -> dict[str, bytes]:
    """Return the contents of the files by name; raise unless they are those of the manifest."""
    try:
        return files.read_folder(path, kinds.CHECKPOINT, _FILES)
    except (OSError, files.DamagedError) as error:
        raise CheckpointError(f"{error} {_remedy(path)}") from error


def _remedy(path: Path) -> str:
    """Return what to do about an unusable checkpoint."""
    earlier = [p for p in _steps(path.parent) if p.name < path.name]
    if not earlier:
        return "There is no earlier one; start again in another folder."
    return (
        f"The previous one, {earlier[-1]}, is still there: remove {path.name} and resume from that."
    )


def _steps(directory: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    return sorted(p for p in directory.glob("step-*") if p.is_dir())


def _tensors(value: dict[str, Any]) -> bytes:
    """Return the content of a file written by torch.save."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
