"""Checks of named values, and errors of custom code, as sentences."""

from __future__ import annotations

import math
import traceback
from typing import SupportsFloat

__all__ = ["fraction", "natural", "positive", "reason"]


def positive(**named: float) -> None:
    """Raise unless every value is a finite number above 0; the keyword is the name in the message.

    >>> positive(C0=1.0)
    >>> positive(C0=-1.0)
    Traceback (most recent call last):
    ...
    ValueError: C0 is -1.0; it must be a finite number above 0.
    """
    for name, value in named.items():
        if not (_number(value) and value > 0):
            raise ValueError(f"{name} is {value}; it must be a finite number above 0.")


def natural(**named: int) -> None:
    """Raise unless every value is a whole number of at least 1."""
    for name, value in named.items():
        if isinstance(value, bool) or not _number(value) or int(value) != value or value < 1:
            raise ValueError(f"{name} is {value}; it must be a whole number of at least 1.")


def fraction(**named: float) -> None:
    """Raise unless every value lies above 0 and at most at 1."""
    for name, value in named.items():
        if not (_number(value) and 0 < value <= 1):
            raise ValueError(f"{name} is {value}; it must lie above 0 and at most at 1.")


def reason(error: BaseException, path: str) -> str:
    """Return an error of custom code in a file, with the line of that file where it was raised."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    place = f" (line {lines[-1]})" if lines else ""
    kind, text = type(error).__name__, " ".join(f"{error}".split()).removesuffix(".")
    return f"{kind}: {text}{place}." if text else f"{kind}{place}."


def _number(value: object) -> bool:
    """Return whether the value is a finite number of Python or numpy."""
    return (
        isinstance(value, SupportsFloat)
        and not isinstance(value, str)
        and math.isfinite(float(value))
    )
