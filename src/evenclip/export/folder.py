"""The folder of an exported model.

    model/
        model.safetensors   parameters; differentially private
        model.json          architecture, by name: nothing is unpickled
        encoder.json        how raw rows become features
        privacy.json        privacy report
        README.md           model card

Without a schema, encoder.json is fitted on the training rows without noise. No file has a figure of
test rows, unless the model card is asked for those of the groups. The folder is written under
another name and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from evenclip import models
from evenclip.data.encoder import Encoder
from evenclip.export.card import card
from evenclip.export.predict import Predictor
from evenclip.export.train import Trained

__all__ = ["check_place", "load", "save"]

FORMAT = 1


FILES = ("model.safetensors", "model.json", "encoder.json", "privacy.json", "README.md")


def check_place(folder: str | os.PathLike[str], force: bool = False) -> Path:
    """Raise unless a model can be written to `folder`; call it before training.

    Raises:
        ValueError: the folder exists and is neither empty nor a model to replace.
        OSError: the folder cannot be written.
    """
    place = Path(folder).absolute()
    if place.exists() and not place.is_dir():
        raise ValueError(f"{folder} is a file; give a new folder.")
    if place.is_dir() and any(place.iterdir()):
        is_model = all((place / name).is_file() for name in FILES[:4])
        if not is_model:
            raise ValueError(f"{folder} is not empty and holds no model; give a new folder.")
        if not force:
            raise ValueError(
                f"{folder} already holds a model; give another folder, or --force to replace it."
            )
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"{place.parent} cannot be created ({error.strerror}); choose another folder."
        ) from error
    if not os.access(place.parent, os.W_OK):
        raise PermissionError(f"{place.parent} cannot be written to; choose another folder.")
    return place


def save(
    trained: Trained,
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    with_group_figures: bool = False,
) -> Path:
    """Write a model to a folder, atomically.

    Args:
        trained: result of `train`. Its table and traces are not written.
        folder: a new or empty folder.
        force: whether to replace an existing model.
        with_group_figures: whether the model card has the accuracy and the number of test rows of
            each group. They are exact, and not differentially private.

    Raises:
        ValueError: the folder is not empty.
        OSError: the folder cannot be written.
    """
    place = check_place(folder, force)
    scratch = place.with_name(f".{place.name}.writing-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        for name, content in _contents(trained, with_group_figures).items():
            _write(scratch / name, content)
        _move(scratch, place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return place


def _contents(trained: Trained, with_group_figures: bool) -> dict[str, bytes]:
    """Return the contents of the files by name."""
    from safetensors.torch import save as packed

    parameters = {
        name: value.contiguous() for name, value in trained.result.model.state_dict().items()
    }
    return {
        "model.safetensors": packed(parameters),
        "model.json": _json({"evenclip_model": FORMAT, **trained.model}),
        "encoder.json": _json(trained.tabled.encoder.to_json()),
        "privacy.json": _json(trained.privacy),
        "README.md": card(trained, with_group_figures=with_group_figures).encode(),
    }


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _move(scratch: Path, place: Path) -> None:
    """Rename the finished folder to its place, then remove the old one."""
    old = place.with_name(f".{place.name}.replaced-{os.getpid()}")
    if place.exists():
        os.replace(place, old)
    try:
        os.replace(scratch, place)
    except OSError:
        if old.exists():
            os.replace(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def load(folder: str | os.PathLike[str]) -> Predictor:
    """Load a model from a folder that `save` wrote; runs no code and no pickle.

    Raises:
        FileNotFoundError: the folder holds no model.
        ValueError: the files do not belong together, or were written by another version.
    """
    place = Path(folder)
    absent = [name for name in FILES[:4] if not (place / name).is_file()]
    if absent:
        raise FileNotFoundError(
            f"{folder} holds no model ({absent[0]} is missing); give the folder that `evenclip "
            "train --out` wrote."
        )
    described, encoded, report = (_read(place / name) for name in FILES[1:4])
    if described.get("evenclip_model") != FORMAT or described.get("name") not in models.TABULAR:
        raise ValueError(
            f"{place / 'model.json'} describes the model {described.get('name')!r} in format "
            f"{described.get('evenclip_model')!r}; this version of evenclip reads "
            f"{', '.join(models.TABULAR)} in format {FORMAT}."
        )
    try:
        encoder = Encoder.from_json(encoded)
        model = models.TABULAR[described["name"]](**described["options"]).eval()
        if described["options"]["inputs"] != len(encoder.features):
            raise ValueError(
                f"the model takes {described['options']['inputs']} features and the encoder has "
                f"{len(encoder.features)}"
            )
        model.load_state_dict(_parameters(place / FILES[0]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"The files in {folder} do not belong together ({reason}); train the model again."
        ) from error
    return Predictor(model, encoder, report)


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); train the model again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged (no JSON object); train the model again.")
    return content


def _parameters(path: Path) -> dict[str, Tensor]:
    """Read the parameters from a file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error
