"""Notes on names and values that look alike or cannot be seen, and on numbers far from others."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from evenclip.data.encoder import Encoder
from evenclip.data.values import numbers, shortened

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["alike", "notes_of_columns", "notes_of_numbers", "notes_of_values"]

_FAR = 1e6  # times the median
_MOST = 1000  # values that are looked at
_UNSEEN = ("Cc", "Cf", "Zl", "Zp", "Zs")


def notes_of_columns(names: Sequence[str]) -> list[str]:
    """Return notes on the names of columns.

    >>> notes_of_columns(["age", "Age", "sex "])[0]
    "The columns 'age' and 'Age' differ only in case, blanks or characters that cannot be seen."
    """
    bare = [name for name in names if name != name.strip() or not name.isprintable()]
    notes = [
        f"The columns {first!r} and {second!r} differ only in case, blanks or characters that "
        "cannot be seen."
        for first, second in _first(alike(names))
    ]
    if bare:
        notes.append(
            f"The name of the column {shortened(bare[0])} has blanks at an end, or characters "
            "that cannot be seen."
        )
    unnamed = [name for name in names if name.startswith("Unnamed: ") or not name.strip()]
    if unnamed:
        notes.append(f"{len(unnamed)} columns have no name; give each a name, or leave it out.")
    return notes


def notes_of_values(encoder: Encoder) -> list[str]:
    """Return notes on the classes, groups and categories, one for each column."""
    values = {labels.column: labels.names for labels in (encoder.target, *encoder.group)}
    for column in encoder.columns:
        values.setdefault(column.column, getattr(column, "values", ()))
    notes = []
    for column_name, texts in values.items():
        for first, second in _first(alike(texts)):
            notes.append(
                f"Column {column_name!r} has {shortened(first)} and {shortened(second)}, which "
                "differ only in case, blanks or characters that cannot be seen; if they are one, "
                "correct them."
            )
        odd = [text for text in texts if not text.isprintable()]
        if odd:
            notes.append(
                f"Column {column_name!r} has values with characters that cannot be seen, such as "
                f"{shortened(odd[0])}; if they are damaged, correct them."
            )
    return notes


def notes_of_numbers(encoder: Encoder, frame: pd.DataFrame) -> list[str]:
    """Return notes on columns whose mean and deviation a few values determine."""
    notes = []
    for column in encoder.columns:
        if column.kind != "number":
            continue
        series = frame[column.column]
        size = np.abs(numbers(series))  # [row]
        lost = series[series.notna().to_numpy() & np.isnan(size)]
        infinite = [value for value in lost.unique()[:_MOST] if _is_infinite(value)]
        if infinite:
            notes.append(
                f"Column {column.column!r} has infinite values, such as "
                f"{shortened(str(infinite[0]))}, which count as missing."
            )
        size = size[~np.isnan(size)]
        least = _FAR * float(np.median(size)) if len(size) else 0.0
        far = size[size > least] if least else size[:0]
        if len(far):
            notes.append(
                f"Column {column.column!r} has {len(far)} values of up to {far.max():.3g}, more "
                "than a million times the median; if they are damaged, or stand for missing ones, "
                "correct them."
            )
    return notes


def _is_infinite(value: object) -> bool:
    try:
        return math.isinf(float(str(value)))
    except ValueError:
        return False


def alike(texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs that differ only in case, blanks, composition or characters not to be seen.

    >>> list(alike(["yes", "no", "Yes "]))
    [('yes', 'Yes ')]
    """
    known: dict[str, str] = {}
    for text in texts:
        first = known.setdefault(_seen(text), text)
        if first != text:
            yield first, text


def _first(pairs: Iterator[tuple[str, str]]) -> list[tuple[str, str]]:
    return [pair for pair in [next(pairs, None)] if pair is not None]


def _seen(text: str) -> str:
    composed = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in composed if unicodedata.category(c) not in _UNSEEN)
