"""The rows of a table: which are left out, and which part each of the others is in."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evenclip.data import columns
from evenclip.data.content import of_series
from evenclip.data.labels import Codes
from evenclip.data.sample import Coins, coins

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SplitRows", "split_rows", "with_target"]

SHARES = (0.64, 0.16)  # probabilities of training and validation; the rest is for testing
LEAST_ROWS = 10


class SplitRows(NamedTuple):
    """Positions of rows in the source; test rows in the test set, if one is given.

    The marks are those of all rows of the source, and of the rows of which the test rows are.
    """

    train: Codes
    validation: Codes
    test: Codes
    marks: Codes
    test_marks: Codes
    records: int  # expected number of training rows


def split_rows(
    frames: list[pd.DataFrame], target: str, unit: str | None, declared: int | None, seed: int
) -> tuple[SplitRows, list[str]]:
    """Split the rows; return the splits and notes on rows that are left out.

    Args:
        frames: the source and, if one is given, the test set.
        target: the column to predict; rows without one are left out.
        unit: the column that identifies a row's person, of whom one row is kept.
        declared: public number of rows, or of persons.
        seed: determines the key of the split.

    Raises:
        ValueError: there are too few rows.
    """
    notes: list[str] = []
    kept = [
        with_target(frame, target, what, notes)
        for frame, what in zip(frames, ("", "test "), strict=False)
    ]
    drawn = [coins(int(seed), *map(of_series, _columns_of(frame))) for frame in frames]
    rows, by_record = kept[0], drawn[0].at(kept[0])
    if unit is not None:
        ids = frames[0][unit]
        rows = _one_each(ids, unit, rows, drawn[0], notes)
        by_record = coins(int(seed), of_series(ids.iloc[rows]), copies=False)
    if len(rows) < LEAST_ROWS:
        raise ValueError(
            f"There are {len(rows)} rows to learn from and to test on; at least {LEAST_ROWS} are "
            "needed."
        )
    shares = SHARES if len(frames) == 1 else (0.8,)
    parts = [rows[part] for part in by_record.parts(*shares)]
    if not all(map(len, parts)):
        raise ValueError(
            f"Each of the {len(rows)} rows was put into a part by itself, and a part has none; "
            "give more rows, or another seed."
        )
    train, validation, test = parts if len(frames) == 1 else (*parts, kept[1])
    records = len(rows) if declared is None else int(declared)
    expected = max(1, round(shares[0] * records))
    return SplitRows(train, validation, test, drawn[0].marks, drawn[-1].marks, expected), notes


def _columns_of(frame: pd.DataFrame) -> list[pd.Series]:
    """Return the columns of a table."""
    return [frame[name] for name in frame.columns]


def with_target(frame: pd.DataFrame, target: str, what: str, notes: list[str]) -> Codes:
    """Return the positions of the rows that have a target."""
    codes = columns.factor(frame[target]).codes
    kept = np.flatnonzero(codes >= 0)
    if len(kept) == 0:
        raise ValueError(
            f"The target {target!r} is missing in every {what}row; choose another column."
        )
    if len(kept) < len(frame):
        notes.append(
            f"{len(frame) - len(kept)} of {len(frame)} {what}rows have no {target!r} and are left "
            "out."
        )
    return kept


def _one_each(series: pd.Series, unit: str, rows: Codes, drawn: Coins, notes: list[str]) -> Codes:
    """Keep one of each person's rows, by their coins; rows without a person are left out."""
    codes = columns.factor(series).codes[rows]
    known = codes >= 0
    kept = rows[known][drawn.at(rows[known]).first_of_each(codes[known])]
    notes.append(
        f"One row for each of the {len(kept)} persons in {unit!r} is kept, "
        f"{len(rows) - len(kept)} rows are left out"
        + (f", {int((~known).sum())} of them without a person." if not known.all() else ".")
    )
    return kept
