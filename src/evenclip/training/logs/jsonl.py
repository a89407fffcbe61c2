"""Epochs as lines of JSON, each whole when it is written; the last line is the privacy report."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from evenclip.training.logs.log import PRIVATE, writable

__all__ = ["JSONL"]


class JSONL:
    """{"private": …} once, {"epoch": 1, "loss/Female": …} for each epoch, {"privacy": …} at the
    end.

    A file that is there is gone on with: of a run that was resumed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = writable(path)
        if not self._path.stat().st_size:
            self._add({"private": PRIVATE})

    def epoch(self, number: int, values: Mapping[str, float | None]) -> None:
        """One line."""
        self._add({"epoch": number, **values})

    def end(self, report: Mapping[str, Any]) -> None:
        """The last line."""
        self._add({"privacy": dict(report)})

    def _add(self, value: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
