"""A log with one line of JSON per epoch; the last line is the privacy report."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from evenclip.arguments import check_kinds
from evenclip.training.logs.log import PRIVATE, writable

__all__ = ["JSONL"]


class JSONL:
    """A log in a file of JSON lines.

    It has one line {"private": …}, a line {"epoch": 1, "loss/Female": …} for each epoch, and
    {"privacy": …} at the end. Lines are appended to an existing file, as for a resumed run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_kinds(JSONL.__init__, locals())
        self._path = writable(path)
        if not self._path.stat().st_size:
            self._add({"private": PRIVATE})

    def epoch(self, number: int, values: Mapping[str, float | None]) -> None:
        """Append the line of an epoch."""
        self._add({"epoch": number, **values})

    def end(self, report: Mapping[str, Any]) -> None:
        """Append the last line, with the privacy report."""
        self._add({"privacy": dict(report)})

    def _add(self, value: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
