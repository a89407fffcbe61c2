"""The files that specifications name, sent along to a machine that does not have them.

A table, splits, somebody's rule or model are files with a SHA-256; where they lie does not matter
to a run, nor to its name. So a worker takes the file at that path if it has the same content there
(a shared disk), and what was sent otherwise. The files of named datasets are too many to be sent:
they must lie on the worker, in the same folder or in the one that EVENCLIP_DATA names there.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenclip.sweep.describe import file_sizes, sha256
from evenclip.sweep.spec import Spec

__all__ = ["MOST", "contents", "unpacked"]

MOST = 2**31
"""Bytes of a file that is sent, at the most."""


def contents(specs: Sequence[Spec]) -> Iterator[tuple[str, bytes]]:
    """(SHA-256, content) of every file that is to be sent, once each."""
    found = {part["sha256"]: Path(part["path"]) for spec in specs for part in _files(spec)}
    for digest, path in found.items():
        if path.stat().st_size <= MOST:
            yield digest, path.read_bytes()


def unpacked(spec: Spec, sent: Callable[[str], bytes | None], folder: Path) -> Spec:
    """The same run with files that are here, those that were sent written into the folder.

    Raises:
        FileNotFoundError: if a file is neither here nor was it sent.
        ValueError: if the files of a named dataset are others here.
    """

    def here(part: Mapping[str, Any]) -> dict[str, Any]:
        return dict(part) if "sha256" not in part else {**part, "path": _here(part, sent, folder)}

    data = here(spec.data)
    if data.get("test"):
        data["test"] = here(data["test"])
    if "name" in data:
        data = _named(data)
    return replace(spec, data=data, model=here(spec.model), rule=here(spec.rule))


def _files(spec: Spec) -> list[Mapping[str, Any]]:
    """The parts that are files."""
    parts = (spec.data, spec.data.get("test") or {}, spec.model, spec.rule)
    return [part for part in parts if "sha256" in part]


def _here(part: Mapping[str, Any], sent: Callable[[str], bytes | None], folder: Path) -> str:
    """Where the file is on this machine."""
    path = Path(part["path"])
    if path.is_file() and sha256(path) == part["sha256"]:
        return str(path)
    content = sent(part["sha256"])
    if content is None:
        raise FileNotFoundError(
            f"{path} is not on {platform.node()}, and is too large to be sent (over "
            f"{MOST / 2**30:.0f} GiB); put it "
            "there, under the same path."
        )
    target = folder / part["sha256"][:24] / path.name
    if not target.exists():
        target.parent.mkdir(parents=True)
        target.write_bytes(content)
    return str(target)


def _named(data: dict[str, Any]) -> dict[str, Any]:
    """A named dataset, read from the folder of this machine."""
    if not Path(data.get("directory", "")).is_dir():
        data = {key: value for key, value in data.items() if key != "directory"}
    asked = data.get("files")
    if asked is None:
        return data
    found = file_sizes(data["name"], data.get("directory"))
    for path, size in asked.items():
        if found.get(path) != size:
            state = "is not there" if path not in found else "is another version"
            raise ValueError(
                f"{path} of the dataset {data['name']} {state} on {platform.node()}; put the same "
                "files into the same "
                "folder there, or name their folder with EVENCLIP_DATA."
            )
    return data
