"""What every log is: told each epoch as plain numbers by name, and the privacy report at the end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = ["PRIVATE", "Log", "flat", "writable"]

PRIVATE = "Not differentially private: losses, norms and counts of training records, without noise."


class Log(Protocol):
    """Somebody who is told about a run."""

    def epoch(self, number: int, values: Mapping[str, float | None]) -> None:
        """An epoch has ended: its number, from 1, and what was seen, by name; None where nothing
        was.
        """

    def end(self, report: Mapping[str, Any]) -> None:
        """Training has ended with this privacy report."""


def flat(row: Mapping[str, Any], groups: Sequence[str]) -> dict[str, float | None]:
    """A row of the trace as numbers by name: what is by group as "loss/Female", a vector as
    "state/0".

    >>> flat({"epoch": 1, "loss": [0.5, None], "state": [2.0], "steps": 3}, ["a", "b"])
    {'epoch': 1, 'loss/a': 0.5, 'loss/b': None, 'state/0': 2.0, 'steps': 3}
    """
    found: dict[str, float | None] = {}
    for name, value in row.items():
        if not isinstance(value, list):
            found[name] = value
            continue
        by_group = name in ("loss", "gradient_norm", "group_samples") and len(groups) == len(value)
        labels = groups if by_group else [str(i) for i in range(len(value))]
        found |= {f"{name}/{label}": part for label, part in zip(labels, value, strict=True)}
    return found


def writable(path: str | os.PathLike[str]) -> Path:
    """The file's path, with its folder made; better refused now than after the first epoch."""
    place = Path(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise OSError(
            f"{place} cannot be written ({error.strerror}); choose another file for the log."
        ) from error
    return place
