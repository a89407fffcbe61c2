"""Send the files of specifications to machines that do not have them.

Tables, splits, custom rules and custom models are files with a SHA-256. Their paths affect neither
a run nor its name. A worker uses the file at the given path if its content is the same (a shared
disk), and the sent content otherwise. The files of named datasets are too many to send: they must
be on the worker, in the same folder or in its EVENCLIP_DATA.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenclip import files
from evenclip.files import kinds
from evenclip.sweep.describe import file_sizes, sha256
from evenclip.sweep.spec import Spec

__all__ = ["MOST", "contents", "unpacked"]

MOST = 2**31
"""Maximum size of a sent file, in bytes."""


def contents(specs: Sequence[Spec]) -> Iterator[tuple[str, bytes]]:
    """Yield (SHA-256, content) of every file to send, once each."""
    paths = {file["sha256"]: Path(file["path"]) for spec in specs for file in _files(spec)}
    for digest, path in paths.items():
        if path.stat().st_size <= MOST:
            yield digest, path.read_bytes()


def unpacked(spec: Spec, sent: Callable[[str], bytes | None], folder: Path) -> Spec:
    """Return the same run with paths on this machine; sent files are written to `folder`.

    Raises:
        FileNotFoundError: a file is not on this machine and was not sent.
        ValueError: the files of a named dataset differ on this machine.
    """

    def local(given: Mapping[str, Any]) -> dict[str, Any]:
        if "sha256" not in given:
            return dict(given)
        return {**given, "path": _local_path(given, sent, folder)}

    data = local(spec.data)
    if data.get("test"):
        data["test"] = local(data["test"])
    if "name" in data or "dataset" in data:
        data = _named(data)
    return replace(spec, data=data, model=local(spec.model), rule=local(spec.rule))


def _files(spec: Spec) -> list[Mapping[str, Any]]:
    """Return the descriptions in a specification that are files."""
    described = (spec.data, spec.data.get("test") or {}, spec.model, spec.rule)
    return [description for description in described if "sha256" in description]


def _local_path(file: Mapping[str, Any], sent: Callable[[str], bytes | None], folder: Path) -> str:
    """Return the path of a file on this machine."""
    path = Path(file["path"])
    if path.is_file() and sha256(path) == file["sha256"]:
        return str(path)
    content = sent(file["sha256"])
    if content is None:
        raise FileNotFoundError(
            f"{path} is not on {platform.node()} and is too large to be sent (over "
            f"{MOST / 2**30:.0f} GiB); put it there, under the same path."
        )
    target = folder / file["sha256"][:24] / path.name
    if not target.exists():
        files.make_folder(target.parent, kinds.ROWS)
        files.write(target, content, kinds.ROWS)
    return str(target)


def _named(data: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a named dataset with the folder of this machine."""
    if not Path(data.get("directory", "")).is_dir():
        data = {key: value for key, value in data.items() if key != "directory"}
    expected = data.get("files")
    if expected is None:
        return data
    name, sizes = data.get("name") or data["dataset"], file_sizes(data, data.get("directory"))
    for path, size in expected.items():
        if sizes.get(path) != size:
            state = "does not exist" if path not in sizes else "has another size"
            raise ValueError(
                f"{path} of the dataset {name} {state} on {platform.node()}; put the same "
                "files into the same folder there, or name their folder with EVENCLIP_DATA."
            )
    return data
