"""The folder of an exported model.

    model/
        model.safetensors   parameters; differentially private
        model.json          architecture, by name: nothing is unpickled
        encoder.json        how raw rows become features
        privacy.json        privacy report
        README.md           model card
        manifest.json       size and SHA-256 of each of the others

Without a schema, encoder.json is fitted on the training rows without noise. No file has a figure of
test rows, unless the model card is asked for those of the groups. The folder is written whole, and
it is loaded only if every file is the one in the manifest.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from evenclip import files, models
from evenclip.arguments import check_kinds
from evenclip.data.encoder import Encoder
from evenclip.export.card import card
from evenclip.export.predict import Predictor
from evenclip.export.train import Trained
from evenclip.files import DamagedError, kinds

__all__ = ["check_place", "load", "save", "save_or_rescue"]

FORMAT = 1
FILES = ("model.safetensors", "model.json", "encoder.json", "privacy.json", "README.md")


def check_place(folder: str | os.PathLike[str], force: bool = False) -> Path:
    """Raise unless a model can be written to `folder`; call it before training.

    Returns:
        The folder itself where `folder` is a link.

    Raises:
        ValueError: the folder exists and is neither empty nor a model to replace.
        OSError: the folder cannot be written: its name, the permissions, or no room.
    """
    check_kinds(check_place, locals())
    place = Path(os.path.realpath(folder))
    if place.exists() and not place.is_dir():
        raise ValueError(f"{folder} is a file; give a new folder.")
    files.check_place(place)
    present = {path.name for path in place.iterdir()} if place.is_dir() else set()
    if present:
        strange = sorted(present - {*FILES, files.MANIFEST})
        if strange or not present >= set(FILES[:4]):
            what = f"holds {strange[0]!r}" if strange else "holds no model"
            raise ValueError(f"{folder} is not empty and {what}; give a new folder.")
        if not force:
            raise ValueError(
                f"{folder} already holds a model; give another folder, or --force to replace it."
            )
    return place


def save(
    trained: Trained,
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    with_group_figures: bool = False,
) -> Path:
    """Write a model to a folder, atomically; return the folder.

    Args:
        trained: result of `train`. Its table and traces are not written.
        folder: a new or empty folder.
        force: whether to replace an existing model. There is a whole model at every moment.
        with_group_figures: whether the model card has the accuracy and the number of test rows of
            each group. They are exact, and not differentially private.

    Raises:
        ValueError: the folder is not empty.
        OSError: the folder cannot be written.
    """
    check_kinds(save, locals())
    place = check_place(folder, force)
    contents = _contents(trained, with_group_figures)
    return files.write_folder(place, contents, kinds.MODEL, replace=force)


def save_or_rescue(
    trained: Trained, folder: str | os.PathLike[str], **options: bool
) -> tuple[Path, str | None]:
    """Write a model as `save` does; if that fails, write it to another place.

    Training is not repeatable and its ε is spent, so a model is not lost to a full disk.

    Returns:
        The folder that was written, and a sentence that says so if it is another place.

    Raises:
        OSError, ValueError: no place can be written; the error is that of the first one.
    """
    try:
        return save(trained, folder, **options), None
    except (OSError, ValueError) as error:
        name = f"evenclip-model-{secrets.token_hex(4)}"
        for place in (Path.cwd(), Path.home(), Path(tempfile.gettempdir())):
            with suppress(OSError, ValueError):
                written = save(trained, place / name, **(options | {"force": False}))
                return written, f"{error} The model was written to {written} instead; move it."
        raise


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
        "privacy.json": files.sealed(trained.privacy),
        "README.md": card(trained, with_group_figures=with_group_figures).encode(),
    }


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def load(folder: str | os.PathLike[str]) -> Predictor:
    """Load a model from a folder that `save` wrote; runs no code and no pickle.

    Raises:
        FileNotFoundError: the folder holds no model.
        DamagedError: a file is damaged, or of another model.
        ValueError: the model was written by another version.
    """
    check_kinds(load, locals())
    place = Path(folder)
    if not (place / files.MANIFEST).is_file():
        lack = next((name for name in FILES[:4] if not (place / name).is_file()), files.MANIFEST)
        raise FileNotFoundError(
            f"{folder} holds no model ({lack} is missing); give the folder that `evenclip train "
            "--out` wrote."
        )
    contents = files.read_folder(place, kinds.MODEL, FILES[:4])
    described, encoded = (
        files.parsed(contents[name], place / name, kinds.MODEL) for name in FILES[1:3]
    )
    report = files.unsealed(contents["privacy.json"], place / "privacy.json", kinds.STATEMENT)
    if described.get("evenclip_model") != FORMAT or described.get("name") not in models.TABULAR:
        raise ValueError(
            f"{place / 'model.json'} describes the model {described.get('name')!r} in format "
            f"{described.get('evenclip_model')!r}; this version of evenclip reads "
            f"{', '.join(models.TABULAR)} in format {FORMAT}."
        )
    try:
        encoder = Encoder.from_json(encoded)
        model = _model(described, encoder, contents["model.safetensors"])
    except (KeyError, TypeError, ValueError, RuntimeError, MemoryError, RecursionError) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise DamagedError(
            f"The files in {folder} do not belong together ({reason}); train the model again."
        ) from error
    return Predictor(model, encoder, report)


def _model(described: Mapping[str, Any], encoder: Encoder, packed: bytes) -> nn.Module:
    """Return the model; raise before memory is allocated that its parameters do not fill."""
    options = dict(described["options"])
    if options["inputs"] != len(encoder.features):
        raise ValueError(
            f"the model takes {options['inputs']} features and the encoder has "
            f"{len(encoder.features)}"
        )
    parameters = _parameters(packed)
    widths = [options["inputs"], *options.get("hidden", ()), options["classes"]]
    largest = max(math.prod(pair) for pair in pairwise(map(int, widths)))
    if largest > max((value.numel() for value in parameters.values()), default=0):
        raise ValueError(f"model.safetensors is too small for a model of {widths}")
    model = models.TABULAR[described["name"]](**options).eval()
    model.load_state_dict(parameters)
    return model


def _parameters(packed: bytes) -> dict[str, Tensor]:
    """Return the parameters in the content of a file."""
    from safetensors import SafetensorError
    from safetensors.torch import load as unpacked

    try:
        return dict(unpacked(packed))
    except SafetensorError as error:
        raise ValueError(f"model.safetensors is damaged: {error}") from error
