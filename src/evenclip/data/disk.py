"""Files that users bring: where they are, which are missing, and whether they are the right ones.

The data directory has one folder for each dataset (mnist/, dutch/, ...). It is named by the caller
(`--data-dir` on the command line) or by the environment variable EVENCLIP_DATA. What takes long to
make from the files is kept in a cache directory: EVENCLIP_CACHE, or else ~/.cache/evenclip.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["File", "cache_directory", "data_directory"]

TWO_WAYS = "--data-dir or the environment variable EVENCLIP_DATA"


@dataclass(frozen=True)
class File:
    """A file, or a folder of files, that a dataset is read from.

    Attributes:
        path: where it is in the data directory, such as "dutch/dutch_census_2001.arff".
        sha256: of its content, as hexadecimal digits; None where the content is checked in another
            way.
        also: other places where it is accepted, such as the same file unpacked.
    """

    path: str
    sha256: str | None = None
    also: tuple[str, ...] = ()

    def find(self, directory: Path | None) -> Path | None:
        """Where it is; None where it is not there."""
        if directory is None:
            return None
        places = [directory / path for path in (self.path, *self.also)]
        return next((place for place in places if place.exists()), None)

    def require(self, directory: str | Path | None, origin: str) -> Path:
        """Where it is.

        Args:
            directory: the data directory, as the caller gave it.
            origin: where the file can be had, for the message.

        Raises:
            FileNotFoundError: it is not there.
        """
        place = data_directory(directory)
        found = self.find(place)
        if found is not None:
            return found
        if place is None:
            raise FileNotFoundError(
                f"{self} is needed and there is no data directory; get it from {origin}, put it "
                "into a folder and "
                f"name that folder with {TWO_WAYS}."
            )
        raise FileNotFoundError(
            f"{self} is not in the data directory {place}; get it from {origin}, or name another "
            "directory with "
            f"{TWO_WAYS}."
        )

    def read(self, directory: str | Path | None, origin: str) -> bytes:
        """Its content, once that is known to be the right one.

        Raises:
            FileNotFoundError: it is not there.
            ValueError: its content is another one.
        """
        path = self.require(directory, origin)
        content = path.read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if self.sha256 not in (None, found):
            raise ValueError(
                f"{path} has the SHA-256 {found[:12]}... and should have "
                f"{str(self.sha256)[:12]}...: it is damaged or "
                f"another version; get it again from {origin}."
            )
        return content

    def __str__(self) -> str:
        return self.path if not self.also else f"{self.path} (or {', '.join(self.also)})"


def data_directory(given: str | Path | None = None) -> Path | None:
    """The directory that is given, else the one that EVENCLIP_DATA names, else None.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    named, how = (
        (given, "as given")
        if given is not None
        else (os.environ.get("EVENCLIP_DATA") or None, "EVENCLIP_DATA")
    )
    if named is None:
        return None
    path = Path(named).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(
            f"The data directory {path} ({how}) is not a folder; name one with {TWO_WAYS}."
        )
    return path


def cache_directory() -> Path:
    """Where decoded images are kept; made if need be.

    Raises:
        OSError: it cannot be made.
    """
    path = Path(
        os.environ.get("EVENCLIP_CACHE") or Path.home() / ".cache" / "evenclip"
    ).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"The cache directory {path} cannot be made ({error.strerror}); name another one with "
            "the environment "
            "variable EVENCLIP_CACHE."
        ) from None
    return path
