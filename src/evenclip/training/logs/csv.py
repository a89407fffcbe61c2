"""A log with one row per epoch, for spreadsheets. It does not contain the privacy report."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from typing import Any

from evenclip.arguments import check_kinds
from evenclip.training.logs.log import writable

__all__ = ["CSV"]


class CSV:
    """A log in a CSV file. All of it is private.

    It has a column for each name; a value that is None is an empty cell. Rows are appended to an
    existing file, as for a resumed run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_kinds(CSV.__init__, locals())
        self._path = writable(path)

    def epoch(self, number: int, values: Mapping[str, float | None]) -> None:
        """Append one row, after a header if the file is empty.

        Raises:
            ValueError: if the file has other columns, from another run.
        """
        row = {"epoch": number, **values}
        with self._path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), None)
        if header is not None and header != list(row):
            raise ValueError(
                f"{self._path} has other columns, of another run; choose another file for the log."
            )
        with self._path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if header is None:
                writer.writeheader()
            writer.writerow(row)

    def end(self, report: Mapping[str, Any]) -> None:
        """Do nothing."""
