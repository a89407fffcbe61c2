"""Epochs as rows of a table, for a spreadsheet. The privacy report has no place in one."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from typing import Any

from evenclip.training.logs.log import writable

__all__ = ["CSV"]


class CSV:
    """A column for each name, an empty cell for what was not seen. Private, all of it.

    A file that is there is gone on with: of a run that was resumed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = writable(path)

    def epoch(self, number: int, values: Mapping[str, float | None]) -> None:
        """One row, under its names where the file is new.

        Raises:
            ValueError: if the file has other columns: it is of another run.
        """
        row = {"epoch": number, **values}
        with self._path.open(encoding="utf-8", newline="") as file:
            there = next(csv.reader(file), None)
        if there is not None and there != list(row):
            raise ValueError(
                f"{self._path} has other columns, of another run; choose another file for the log."
            )
        with self._path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if there is None:
                writer.writeheader()
            writer.writerow(row)

    def end(self, report: Mapping[str, Any]) -> None:
        """Nothing more."""
