"""Checks of named values, and errors of custom code, as sentences."""

from __future__ import annotations

import math
import traceback
from typing import Any

from evenclip.arguments import is_number, shown

__all__ = [
    "MOST_STEPS",
    "at_most",
    "finite",
    "fraction",
    "natural",
    "positive",
    "real",
    "reason",
    "whole",
]

_MOST = 1e30  # 32-bit floats compute with smaller numbers without overflow
_MOST_WHOLE = 2**53  # the largest that double precision and JSON hold exactly
MOST_STEPS = 10**7
"""Most steps that are accounted for: more take minutes, and lose a δ of 1e-6 to rounding."""


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
            raise ValueError(f"{name} is {shown(value)}; it must be a finite number above 0.")


def real(**named: float) -> None:
    """Raise unless every value is a finite number."""
    for name, value in named.items():
        if not _number(value):
            raise ValueError(f"{name} is {shown(value)}; it must be a finite number.")


def finite(**named: float) -> None:
    """Raise unless every value is a number that 32-bit floats can hold."""
    for name, value in named.items():
        if not _number(value) or abs(value) > _MOST:
            raise ValueError(f"{name} is {shown(value)}; it must be a number within ±{_MOST:g}.")


def natural(**named: int) -> None:
    """Raise unless every value is a whole number of at least 1."""
    _check_whole(named, 1)


def whole(**named: int) -> None:
    """Raise unless every value is a whole number of at least 0, such as a seed."""
    _check_whole(named, 0)


def _check_whole(named: dict[str, int], least: int) -> None:
    for name, value in named.items():
        if isinstance(value, int) and not isinstance(value, bool) and value > _MOST_WHOLE:
            raise ValueError(f"{name} is {shown(value)}; it must be at most {_MOST_WHOLE} (2^53).")
        if not _number(value) or int(value) != value or value < least or value > _MOST_WHOLE:
            raise ValueError(
                f"{name} is {shown(value)}; it must be a whole number of at least {least}."
            )


def at_most(most: int, **named: int) -> None:
    """Raise unless every value is a whole number from 1 to `most`.

    >>> at_most(100, n=10**12)
    Traceback (most recent call last):
    ...
    ValueError: n is 1000000000000; it must be at most 100.
    """
    natural(**named)
    for name, value in named.items():
        if value > most:
            raise ValueError(f"{name} is {shown(value)}; it must be at most {most:,}.")


def fraction(**named: float) -> None:
    """Raise unless every value lies above 0 and at most at 1."""
    for name, value in named.items():
        if not (_number(value) and 0 < value <= 1):
            raise ValueError(f"{name} is {shown(value)}; it must lie above 0 and at most at 1.")


def reason(error: BaseException, path: str = "") -> str:
    """Return an error of custom code in one line, with the line of its file where it was raised."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    place = f" (line {lines[-1]})" if lines else ""
    kind, text = type(error).__name__, " ".join(f"{error}".split()).removesuffix(".")
    return f"{kind}: {text}{place}." if text else f"{kind}{place}."


def _number(value: Any) -> bool:
    """Return whether the value is a finite number of Python or numpy, and no flag."""
    if not is_number(value):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
