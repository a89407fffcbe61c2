"""The interface of a log, and what all logs use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from evenclip.files import kinds

__all__ = ["PRIVATE", "Log", "flat", "writable"]

PRIVATE = "Not differentially private: losses, norms and counts of training records, without noise."


class Log(Protocol):
    """A log of a run."""

    def epoch(self, number: int, values: Mapping[str, float | None]) -> None:
        """Write the values of an epoch that has ended.

        Args:
            number: number of the epoch, from 1.
            values: name -> value; None if there was no sample.
        """

    def end(self, report: Mapping[str, Any]) -> None:
        """Write the privacy report at the end of training."""


def flat(row: Mapping[str, Any], groups: Sequence[str]) -> dict[str, float | None]:
    """Return a row of the trace as name -> number.

    Values per group are named as in "loss/Female", elements of a vector as in "state/0".

    >>> flat({"epoch": 1, "loss": [0.5, None], "state": [2.0], "steps": 3}, ["a", "b"])
    {'epoch': 1, 'loss/a': 0.5, 'loss/b': None, 'state/0': 2.0, 'steps': 3}
    """
    numbers: dict[str, float | None] = {}
    for name, value in row.items():
        if not isinstance(value, list):
            numbers[name] = value
            continue
        by_group = name in ("loss", "gradient_norm", "group_samples") and len(groups) == len(value)
        labels = groups if by_group else [str(i) for i in range(len(value))]
        numbers |= {f"{name}/{label}": part for label, part in zip(labels, value, strict=True)}
    return numbers


def writable(path: str | os.PathLike[str]) -> Path:
    """Create the file and its folder, and return its path. Only its owner can read a new file.

    Raises:
        OSError: if the file cannot be written; raised before training instead of after an epoch.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK  # waits for no pipe
        os.close(os.open(file, how, kinds.LOG.file_mode))
    except OSError as error:
        raise OSError(
            f"{file} cannot be written ({error.strerror}); choose another file for the log."
        ) from error
    return file
