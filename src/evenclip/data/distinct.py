"""The same rows given twice: one record would count as two, and ε would be too small.

A file may be named twice by other paths or links, or be a copy. Files are compared by what the
system says is one file, then by size and content. DataFrames are compared by their rows. A record
that occurs twice within one file cannot be told from two records with equal values; see
docs/sharp_edges.md.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FilesSeen", "check_distinct_files", "check_distinct_tables", "same_rows"]

TWO = "each record would count as two"
TESTED = "the test figures would be of records that were trained on"
_FEW = 30  # rows; two smaller files may hold equal records of different people


def check_distinct_files(paths: Sequence[Path], why: str = TWO) -> None:
    """Raise if two paths lead to one file, or to files of equal content.

    Args:
        paths: existing files.
        why: what is wrong if two are the same, for the message.

    Raises:
        ValueError: two are the same; the message names both.
    """
    known: dict[tuple[int, int], Path] = {}
    sizes: dict[int, list[Path]] = {}
    for path in paths:
        status = os.stat(path)
        place = status.st_dev, status.st_ino
        if place in known:
            raise _twice(known[place], path, "one file", why)
        known[place] = path
        sizes.setdefault(status.st_size, []).append(path)
    for alike in sizes.values():
        contents: dict[bytes, Path] = {}
        for path in alike if len(alike) > 1 else ():
            digest = _digest(path)
            if digest in contents:
                raise _twice(contents[digest], path, "files of equal content", why)
            contents[digest] = path


def check_distinct_tables(train: pd.DataFrame, test: pd.DataFrame) -> None:
    """Raise if a table and its test set are the same rows.

    Raises:
        ValueError: they are, in whatever order.
    """
    if same_rows(train, test):
        raise ValueError(
            f"The table and its test set hold the same rows, so {TESTED}; give other rows as test, "
            "or leave test out."
        )


def same_rows(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    """Return whether two tables hold the same rows in the same columns, in whatever order."""
    if len(a) != len(b) or set(a.columns) != set(b.columns):
        return False
    first, second = (np.sort(_hashes(table.astype(str))) for table in (a, b))
    return bool((first == second).all())


class FilesSeen:
    """The rows of several files, to find two that hold the same ones in another form or order.

    The hashes of a file's rows are added up, so neither the order of rows nor compression matters.
    Files of few rows may be alike by chance and are not compared.
    """

    def __init__(self) -> None:
        self._sums: dict[Path, tuple[int, int]] = {}  # number of rows, sum of their hashes

    def add(self, path: Path, rows: pd.DataFrame) -> None:
        """Add some rows of a file."""
        n, total = self._sums.get(path, (0, 0))
        self._sums[path] = n + len(rows), (total + int(_hashes(rows).sum())) % 2**64

    def check(self) -> None:
        """Raise if two files hold the same rows.

        Raises:
            ValueError: two do; the message names both.
        """
        known: dict[tuple[int, int], Path] = {}
        for path, rows in self._sums.items():
            if rows[0] >= _FEW and rows in known:
                raise _twice(known[rows], path, "files of the same rows")
            known[rows] = path


def _hashes(rows: pd.DataFrame) -> NDArray[np.uint64]:
    """Return a hash of each row, whatever types hold its values.  # [row]"""
    import pandas as pd

    plain = rows[sorted(rows.columns)]
    coded = [name for name in plain.columns if str(plain[name].dtype) in ("category", "str")]
    texts = plain.astype(dict.fromkeys(coded, object))
    hashes: NDArray[np.uint64] = pd.util.hash_pandas_object(texts, index=False).to_numpy()
    return hashes


def _twice(first: Path, second: Path, how: str, why: str = TWO) -> ValueError:
    return ValueError(f"{first} and {second} are {how}, so {why}; give it once.")


def _digest(path: Path) -> bytes:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
