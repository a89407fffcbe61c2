"""The encoder: from raw rows of a table to features, classes and groups.

It is saved with the model. It is fitted on the training rows alone, or made from a schema without
reading any row:

* numbers and dates are standardised by mean and standard deviation and clipped to ±100 standard
  deviations;
* a category keeps the values with at least max(10, 0.1 %) of the rows, at most 50 of them; the
  others share "other";
* columns without information and identifiers (see `columns.useless`) are left out.

The names of classes and groups are labels, not features. They are taken from all rows, so that a
group that has only test rows is in every table.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenclip.data import columns
from evenclip.data.columns import Category, Column, Date, Flag, Number, listed
from evenclip.data.labels import JOIN, MISSING, Codes, Labels, ordered
from evenclip.data.reading import Reading

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["JOIN", "MISSING", "Encoder", "Labels", "fit_columns"]

BOUND = 100.0  # standard deviations; keeps the features of outliers finite
MOST_CATEGORIES = 50
RARE_ROWS, RARE_SHARE = 10, 0.001


@dataclass(frozen=True)
class Encoder:
    """The encoding of a table's raw rows as features, classes and groups.

    It holds plain values only; `to_json` writes all of them.

    Attributes:
        columns: the encoding of each used column, in the order of the features.
        target: the classes.
        group: the labels of each protected column.
        groups: the groups: the labels of the one column, or of several joined by " × ".

    >>> age = Number("age", 40.0, 20.0, 100.0, False)
    >>> encoder = Encoder((age,), Labels("y", ("no", "yes")), (), ())
    >>> import pandas as pd
    >>> encoder.encode(pd.DataFrame({"age": [20, 40, None]})).tolist()
    [[-1.0], [0.0], [0.0]]
    >>> Encoder.from_json(encoder.to_json()) == encoder
    True
    """

    columns: tuple[Column, ...]
    target: Labels
    group: tuple[Labels, ...]
    groups: tuple[str, ...]

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features, in the order of the columns of x."""
        return tuple(feature for column in self.columns for feature in column.features)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the codes of y."""
        return self.target.names

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns that hold categories; read them as text, so that 01 stays 01."""
        return tuple(column.column for column in self.columns if isinstance(column, Category))

    @property
    def listed(self) -> dict[str, tuple[str, ...]]:
        """The categories of each column that holds some; NA among them is not a missing value."""
        return {
            column.column: column.values for column in self.columns if isinstance(column, Category)
        }

    def encode(self, frame: pd.DataFrame, rows: Codes | None = None) -> Tensor:
        """Return the features [row, feature] float32 of all rows, or of the positions `rows`.

        Other columns are ignored. Numbers are clipped to their bounds; unknown categories have the
        indicator "other" or none. `read` also returns what could not be read.

        Raises:
            ValueError: a column is missing.
            TypeError: a column holds values such as lists.
        """
        return self.read(frame, rows)[0]

    def read(self, frame: pd.DataFrame, rows: Codes | None = None) -> tuple[Tensor, Reading]:
        """Return the features, as `encode` does, and how each column was read.

        Raises:
            ValueError: a column is missing, or there are two of its name.
            TypeError: a column holds values such as lists.
        """
        self._check_columns(frame, [column.column for column in self.columns])
        count = len(frame) if rows is None else len(rows)
        widths = [len(column.features) for column in self.columns]
        out = np.empty((count, sum(widths)), dtype=np.float32)
        ends = np.cumsum([0, *widths])
        readings = [
            column.read(_taken(frame, column.column, rows), out[:, ends[i] : ends[i + 1]])
            for i, column in enumerate(self.columns)
        ]
        return torch.from_numpy(out), Reading(count, tuple(readings))

    def target_of(self, frame: pd.DataFrame, rows: Codes | None = None, first: int = 1) -> Tensor:
        """Return each row's class [row] int64; `first` is the first row's number in messages.

        Raises:
            ValueError: the column is missing, or a value is missing or not a class.
        """
        self._check_columns(frame, [self.target.column])
        series = _taken(frame, self.target.column, rows)
        codes = self.target.of(series)
        _check_known(codes, series, "classes", self.classes, first)
        return torch.from_numpy(codes)

    def group_of(self, frame: pd.DataFrame, rows: Codes | None = None, first: int = 1) -> Tensor:
        """Return each row's group [row] int64; `first` is the first row's number in messages.

        Raises:
            ValueError: a column is missing, or a row belongs to no group.
        """
        self._check_columns(frame, [labels.column for labels in self.group])
        codes = np.zeros(len(frame) if rows is None else len(rows), dtype=np.int64)
        names = [""]
        for labels in self.group:
            series = _taken(frame, labels.column, rows)
            part = labels.of(series)
            _check_known(part, series, "groups", labels.names, first)
            names = [
                f"{name}{JOIN}{label}" if name else label
                for name in names
                for label in labels.names
            ]
            codes = codes * len(labels.names) + part
        position = {name: code for code, name in enumerate(self.groups)}
        codes = np.array([position.get(name, -1) for name in names], dtype=np.int64)[codes]
        if (codes < 0).any():
            row = int(np.flatnonzero(codes < 0)[0])
            raise ValueError(
                f"Row {row + first} belongs to none of the groups {listed(self.groups, 20)}; "
                "leave it out."
            )
        return torch.from_numpy(codes)

    def to_json(self) -> dict[str, Any]:
        """Return the encoder as plain values, for `from_json`."""
        return {
            "columns": [column.to_json() for column in self.columns],
            "target": _labels_to_json(self.target),
            "group": [_labels_to_json(labels) for labels in self.group],
            "groups": list(self.groups),
        }

    @staticmethod
    def from_json(plain: dict[str, Any]) -> Encoder:
        """Return the encoder that `to_json` wrote."""
        return Encoder(
            tuple(columns.from_json(column) for column in plain["columns"]),
            _labels_from_json(plain["target"]),
            tuple(_labels_from_json(labels) for labels in plain["group"]),
            tuple(plain["groups"]),
        )

    def _check_columns(self, frame: pd.DataFrame, needed: Iterable[str]) -> None:
        needed = list(needed)
        counts = Counter(frame.columns.tolist())  # looking in the columns takes their number
        twice = [name for name in needed if counts[name] > 1]
        if twice:
            raise ValueError(f"The rows have two columns {twice[0]!r}; rename one of them.")
        absent = [name for name in needed if name not in counts]
        if absent:
            raise ValueError(
                f"The rows lack {'the column' if len(absent) == 1 else 'the columns'} "
                f"{listed(absent, 20)}, which the model was trained with; add them (empty where "
                "they are unknown)."
            )


# --- fitting ------------------------------------------------------------------------------------


def fit_columns(
    frame: pd.DataFrame, rows: Codes, names: Sequence[str], keep: Collection[str]
) -> tuple[list[Column], list[str]]:
    """Fit the encoding of columns on the training rows alone.

    Return the encoded columns, and notes on those that are left out.
    """
    fitted: list[Column] = []
    notes: list[str] = []
    for name in names:
        series = _taken(frame, name, rows)
        reason = None if name in keep else columns.useless(series)
        if reason is None:
            column, note = _fitted(series, name)
            reason = _without_information(column) if name not in keep else None
            notes += [] if note is None else [note]
        if reason is None:
            fitted.append(column)
        else:
            notes.append(f"Column {name!r} {reason} and is not used; to use it, keep it.")
        doubt = columns.doubt(series)
        notes += [] if doubt is None else [doubt]
    return fitted, notes


def nearest(name: str, names: Iterable[Any]) -> str:
    """Return `; did you mean 'income'?` for a similar name, or `;` if there is none."""
    known = {str(other).casefold(): str(other) for other in names}
    close = difflib.get_close_matches(name.casefold(), known, n=1)
    return f"; did you mean {known[close[0]]!r}?" if close else ";"


def _fitted(series: pd.Series, name: str) -> tuple[Column, str | None]:
    """Fit the encoding of one column; return it with a note for reports."""
    kind = columns.kind_of(series)
    match kind.name:
        case "boolean":
            return Flag(name, bool(np.isnan(columns.flags(series)).any())), kind.note
        case "number":
            duration = columns.is_duration(series)
            values = columns.numbers(series, duration)
            missing = bool(np.isnan(values).any())
            return Number(name, *_moments(values), BOUND, missing, duration), kind.note
        case "date":
            values = columns.days(series, kind.format)
            missing = bool(np.isnan(values).any())
            zoned = columns.zoned(series)[0] > 0
            return Date(name, kind.format, *_moments(values), BOUND, missing, zoned), kind.note
    return _fitted_category(series, name)


def _fitted_category(series: pd.Series, name: str) -> tuple[Column, str | None]:
    """Fit a category: keep the frequent values, with a note if there are too many of them."""
    codes, names = columns.factor(series)
    counts = np.bincount(codes[codes >= 0], minlength=len(names))
    least = max(RARE_ROWS, math.ceil(RARE_SHARE * len(series)))
    frequent = sum(int(count) >= least for count in counts)
    by_count = np.argsort(-counts, kind="stable")
    common = [names[code] for code in by_count[: min(frequent, MOST_CATEGORIES)]]
    other = len(common) < len(names)
    note = None
    if frequent > MOST_CATEGORIES:
        note = (
            f"Column {name!r} has {frequent} frequent values; the {MOST_CATEGORIES} most frequent "
            "are used."
        )
    return Category(name, tuple(ordered(common)), other, bool((codes < 0).any())), note


def _without_information(column: Column) -> str | None:
    """Return why a category is not used if all its values are rare, or None."""
    if isinstance(column, Category) and not column.values and not (column.other and column.missing):
        return f"has only rare values (fewer than {RARE_ROWS} training rows each)"
    return None


def _moments(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return mean and standard deviation of the values that are not missing.

    They are 0 and 1 if there are none; the deviation of a constant is 1.
    """
    values = values[~np.isnan(values)]
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0:
        return 0.0, 1.0
    scaled = values / largest  # avoids overflow: the square of 1e200 is infinite
    mean, deviation = float(scaled.mean()) * largest, float(scaled.std()) * largest
    return mean, deviation if values.min() < values.max() and deviation > 0 else 1.0


def _taken(frame: pd.DataFrame, name: str, rows: Codes | None) -> pd.Series:
    """Return a column, or some rows of it; one column at a time, to avoid copying the table."""
    return frame[name] if rows is None else frame[name].iloc[rows]


def _check_known(
    codes: Codes, series: pd.Series, what: str, names: Sequence[str], first: int
) -> None:
    """Raise if a row has no label; `what` is "classes" or "groups"."""
    if (codes < 0).any():
        row = int(np.flatnonzero(codes < 0)[0])
        value = None if series.isna().iloc[row] else columns.text(series.iloc[row])
        given = "no value" if value is None else f"the value {value!r}"
        raise ValueError(
            f"Column {str(series.name)!r} has {given} in row {row + first}; the {what} of this "
            f"encoder are {listed(names, 20)}."
        )


def _labels_to_json(labels: Labels) -> dict[str, Any]:
    edges = None if labels.edges is None else list(labels.edges)
    return {"column": labels.column, "names": list(labels.names), "edges": edges}


def _labels_from_json(plain: dict[str, Any]) -> Labels:
    edges = None if plain["edges"] is None else tuple(plain["edges"])
    return Labels(plain["column"], tuple(plain["names"]), edges)
