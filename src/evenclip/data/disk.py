"""Files that users provide: the data directory, the cache directory, and checksums.

The data directory has one folder for each dataset (mnist/, dutch/, ...). The caller gives it
(`--data-dir` on the command line), or the environment variable EVENCLIP_DATA names it. Results that
take long to compute from the files are stored in a cache directory: EVENCLIP_CACHE, or else
~/.cache/evenclip.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from evenclip import files
from evenclip.arguments import check_fields, check_kinds

__all__ = ["File", "cache_directory", "content_of", "data_directory"]

TWO_WAYS = "--data-dir or the environment variable EVENCLIP_DATA"


@dataclass(frozen=True)
class File:
    """A file, or a folder of files, that a dataset is read from.

    Attributes:
        path: path in the data directory, such as "dutch/dutch_census_2001.arff".
        sha256: digest of the content, as hexadecimal digits; None if it is checked elsewhere.
        also: other accepted paths, such as that of the unpacked file.
    """

    path: str
    sha256: str | None = None
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(File, self)

    def find(self, directory: Path | None) -> Path | None:
        """Return the file's full path, or None if it does not exist."""
        if directory is None:
            return None
        candidates = [directory / path for path in (self.path, *self.also)]
        return next((path for path in candidates if path.exists()), None)

    def require(self, directory: str | Path | None, origin: str) -> Path:
        """Return the file's full path.

        Args:
            directory: the data directory, as the caller gave it.
            origin: where to get the file, for the error message.

        Raises:
            FileNotFoundError: the file does not exist.
        """
        folder = data_directory(directory)
        path = self.find(folder)
        if path is not None:
            return path
        if folder is None:
            raise FileNotFoundError(
                f"{self} is needed and there is no data directory; get it from {origin}, put it "
                f"into a folder and name that folder with {TWO_WAYS}."
            )
        raise FileNotFoundError(
            f"{self} is not in the data directory {folder}; get it from {origin}, or name another "
            f"directory with {TWO_WAYS}."
        )

    def read(self, directory: str | Path | None, origin: str) -> bytes:
        """Return the file's content after comparing its digest.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the digest differs.
        """
        path = self.require(directory, origin)
        content = content_of(path, origin)
        digest = hashlib.sha256(content).hexdigest()
        if self.sha256 not in (None, digest):
            raise ValueError(
                f"{path} has the SHA-256 {digest[:12]}... and should have "
                f"{str(self.sha256)[:12]}...: it is damaged or another version; get it again from "
                f"{origin}."
            )
        return content

    def __str__(self) -> str:
        return self.path if not self.also else f"{self.path} (or {', '.join(self.also)})"


def content_of(path: Path, origin: str) -> bytes:
    """Return the content of a file of a dataset; wait for no pipe."""
    try:
        return files.read(path)
    except OSError as error:
        raise type(error)(
            f"{path} cannot be read ({error.strerror}); get it again from {origin}."
        ) from error


def data_directory(given: str | Path | None = None) -> Path | None:
    """Return the given directory, else the one that EVENCLIP_DATA names, else None.

    Raises:
        FileNotFoundError: the directory does not exist.
    """
    check_kinds(data_directory, locals())
    named = given if given is not None else os.environ.get("EVENCLIP_DATA") or None
    how = "as given" if given is not None else "EVENCLIP_DATA"
    if named is None:
        return None
    path = Path(named).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(
            f"The data directory {path} ({how}) is not a folder; name one with {TWO_WAYS}."
        )
    return path


def cache_directory() -> Path:
    """Return the directory for decoded images; it is created if necessary.

    Raises:
        OSError: the directory cannot be created.
    """
    named = os.environ.get("EVENCLIP_CACHE") or Path.home() / ".cache" / "evenclip"
    path = Path(named).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"The cache directory {path} cannot be created ({error.strerror}); name another one "
            "with the environment variable EVENCLIP_CACHE."
        ) from None
    return path
