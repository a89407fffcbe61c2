"""JSON that vouches for itself, and the manifest of a folder.

A sealed file is ordinary JSON whose key "checksum" is the SHA-256 of everything else. White space
and the order of keys do not matter; every value does. A manifest is a sealed file with the size and
the SHA-256 of each file of a folder. Both protect against damage and mix-ups. They do not protect
against a forger, who can compute a checksum too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evenclip.files import strict
from evenclip.files.kinds import Kind
from evenclip.files.read import LARGEST, read

__all__ = [
    "MANIFEST",
    "DamagedError",
    "manifest",
    "parsed",
    "read_folder",
    "read_sealed",
    "sealed",
    "unsealed",
]

MANIFEST = "manifest.json"
FORMAT = 1
_CHECKSUM = "checksum"


class DamagedError(ValueError):
    """A file is not what was written; the message names it and says what to do."""


def sealed(value: Mapping[str, Any], indent: int | None = 1) -> bytes:
    """Return an object as JSON with its checksum; without `indent`, in one line.

    >>> sealed({"a": 1}) == sealed({"a": 1, "checksum": "an older one"})
    True
    """
    plain = json.loads(json.dumps({name: value[name] for name in value if name != _CHECKSUM}))
    text = json.dumps(plain | {_CHECKSUM: _checksum(plain)}, indent=indent, ensure_ascii=False)
    return (text + "\n").encode()


def unsealed(content: bytes, source: object, kind: Kind, *, verify: bool = True) -> dict[str, Any]:
    """Return the object in a sealed file, without its checksum.

    Args:
        content: the content of the file.
        source: the file, for messages.
        kind: what it is.
        verify: whether to check the checksum.

    Raises:
        DamagedError: the content is no JSON object, has no checksum, or another one.
    """
    value = parsed(content, source, kind)
    stated = value.pop(_CHECKSUM, None)
    if verify and stated is None:
        raise DamagedError(
            f"{source} has no checksum: it was written by an earlier version or by hand; "
            f"{kind.remedy}."
        )
    if verify and stated != _checksum(value):
        raise DamagedError(
            f"{source} is damaged or was changed: its checksum does not match its content; "
            f"{kind.remedy}."
        )
    return value


def read_sealed(path: Path, kind: Kind, *, verify: bool = True) -> dict[str, Any]:
    """Read a sealed file.

    Raises:
        OSError: the file cannot be read.
        DamagedError: it is not what was written.
    """
    return unsealed(_bytes(path, LARGEST, kind), path, kind, verify=verify)


def parsed(content: bytes, source: object, kind: Kind) -> dict[str, Any]:
    """Return the JSON object in `content`.

    Raises:
        DamagedError: there is none.
    """
    try:
        value = strict.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise DamagedError(f"{source} is damaged (no JSON: {error}); {kind.remedy}.") from error
    if not isinstance(value, dict):
        raise DamagedError(f"{source} is damaged (no JSON object); {kind.remedy}.")
    return value


def manifest(contents: Mapping[str, bytes], kind: Kind, identity: Mapping[str, Any]) -> bytes:
    """Return the manifest of a folder.

    Args:
        contents: name -> content of each file.
        kind: what the folder is.
        identity: what the folder belongs to, such as the name of its run.
    """
    files = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    return sealed(
        {"evenclip_manifest": FORMAT, "kind": kind.name, **dict(identity), "files": files}
    )


def read_folder(
    folder: Path, kind: Kind, names: Iterable[str] | None = None, **identity: Any
) -> dict[str, bytes]:
    """Return the contents of the files of a folder by name, checked against its manifest.

    Args:
        folder: the folder.
        kind: what it is.
        names: the files to read; all by default.
        **identity: what the folder must belong to.

    Raises:
        FileNotFoundError: the folder has no manifest.
        DamagedError: a file is missing, damaged, or of another folder.
    """
    listed = _listed(folder, kind, identity)
    wanted = list(listed if names is None else names)
    return {name: _checked(folder / name, listed.get(name), kind) for name in wanted}


def _listed(folder: Path, kind: Kind, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the files of a manifest."""
    path = folder / MANIFEST
    stated = read_sealed(path, kind)
    if stated.get("evenclip_manifest") != FORMAT:
        raise DamagedError(
            f"{path} has format {stated.get('evenclip_manifest')!r}, and this version reads "
            f"{FORMAT}; use the version that wrote it, or {kind.remedy}."
        )
    expected = {"kind": kind.name, **identity}
    for name, value in expected.items():
        if stated.get(name) != value:
            raise DamagedError(
                f"{folder} holds another {kind.name} ({name} is {stated.get(name)!r}, and not "
                f"{value!r}); {kind.remedy}."
            )
    files = stated.get("files")
    if not isinstance(files, dict):
        raise DamagedError(f"{path} is damaged (no files); {kind.remedy}.")
    return files


def _checked(path: Path, stated: Any, kind: Kind) -> bytes:
    """Return the content of a file; raise unless it is the one in the manifest."""
    if not isinstance(stated, dict):
        raise DamagedError(f"{path} is not in the manifest of its folder; {kind.remedy}.")
    # A file of another size is not read: it may be larger than the memory.
    is_other = path.is_file() and path.stat().st_size != stated.get("bytes")
    try:
        content = b"" if is_other else _bytes(path, LARGEST, kind)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing; {kind.remedy}.") from error
    if is_other or hashlib.sha256(content).hexdigest() != stated.get("sha256"):
        raise DamagedError(
            f"{path} is damaged, or of another {kind.name}: it is not the file that the manifest "
            f"lists; {kind.remedy}."
        )
    return content


def _bytes(path: Path, most: int, kind: Kind) -> bytes:
    """Return the content of an ordinary file of at most `most` bytes."""
    try:
        return read(path, most)
    except OSError as error:
        raise type(error)(f"{path} cannot be read ({error.strerror}); {kind.remedy}.") from error


def _checksum(value: Mapping[str, Any]) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
