"""The encoder: from the raw rows of a table to features, classes and groups. It is saved with the
model.

Fitted on the training rows alone, or made from a schema without looking at any row:

* numbers and dates are standardised by mean and standard deviation, and held within ±100 of these;
* a category keeps the values with at least max(10, 0.1 %) of the rows, at most 50 of them; the
  others share "other";
* columns that say nothing or name the row (see `columns.useless`) are left out.

The names of classes and groups are labels rather than features: those of all rows are taken, so
that a group that has test rows only is in every table.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenclip.data import columns
from evenclip.data.columns import Category, Column, Date, Flag, Number, listed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["JOIN", "MISSING", "Encoder", "Labels", "fit_columns"]

BOUND = 100.0  # standard deviations; a stray value in a new row must not become infinite
MOST_CATEGORIES = 50
RARE_ROWS, RARE_SHARE = 10, 0.001
MOST_VALUES = 20  # of a number that is a class or a group
JOIN = " × "
MISSING = "missing"

Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Labels:
    """The classes of the target, or the groups of one protected column.

    Attributes:
        column: where they stand.
        names: the labels.
        edges: the values at which a number passes from one label to the next; None where labels are
            values.
    """

    column: str
    names: tuple[str, ...]
    edges: tuple[float, ...] | None = None

    def of(self, series: pd.Series) -> Codes:
        """Each value's position in `names`; −1 where it is missing or has none.  # [row]"""
        position = {name: code for code, name in enumerate(self.names)}
        if self.edges is None:
            codes, names = columns.factor(series)
            places = [position.get(name, -1) for name in names]
            return np.array([*places, position.get(MISSING, -1)], dtype=np.int64)[codes]
        values = columns.numbers(series)
        codes = np.searchsorted(self.edges, values, side="right").astype(np.int64)
        codes[np.isnan(values)] = position.get(MISSING, -1)
        return codes


@dataclass(frozen=True)
class Encoder:
    """How the raw rows of one table become what a model takes. Plain values only; `to_json` writes
    all of them.

    Attributes:
        columns: how each used column becomes features, in the order of the features.
        target: the classes.
        group: the labels of each protected column.
        groups: the groups: the labels of the one column, or of several joined by " × ".

    >>> encoder = Encoder((Number("age", 40.0, 20.0, 100.0, False),), Labels("y", ("no", "yes")), (), ())
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
        """The columns that hold categories: to be read as text, so that 01 stays 01."""
        return tuple(column.column for column in self.columns if isinstance(column, Category))

    def encode(self, frame: pd.DataFrame, rows: Codes | None = None) -> Tensor:
        """The features of these rows, or of those at the positions `rows`.  # [row, feature]
        float32

        Other columns are ignored. Values that training has not seen are held within bounds or have
        no indicator.

        Raises:
            ValueError: a column is not there.
        """
        self._check_columns(frame, [column.column for column in self.columns])
        widths = [len(column.features) for column in self.columns]
        out = np.empty((len(frame) if rows is None else len(rows), sum(widths)), dtype=np.float32)
        ends = np.cumsum([0, *widths])
        for i, column in enumerate(self.columns):
            column.fill(_taken(frame, column.column, rows), out[:, ends[i] : ends[i + 1]])
        return torch.from_numpy(out)

    def target_of(self, frame: pd.DataFrame, rows: Codes | None = None, first: int = 1) -> Tensor:
        """Each row's class; `first` numbers the first row in messages.  # [row] int64

        Raises:
            ValueError: the column is not there, a value is missing or is no class.
        """
        self._check_columns(frame, [self.target.column])
        series = _taken(frame, self.target.column, rows)
        codes = self.target.of(series)
        _check_known(codes, series, "class", self.classes, first)
        return torch.from_numpy(codes)

    def group_of(self, frame: pd.DataFrame, rows: Codes | None = None, first: int = 1) -> Tensor:
        """Each row's group; `first` numbers the first row in messages.  # [row] int64

        Raises:
            ValueError: a column is not there, or a row belongs to no group.
        """
        self._check_columns(frame, [labels.column for labels in self.group])
        codes = np.zeros(len(frame) if rows is None else len(rows), dtype=np.int64)
        names = [""]
        for labels in self.group:
            series = _taken(frame, labels.column, rows)
            part = labels.of(series)
            _check_known(part, series, "group", labels.names, first)
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
        """As plain values, from which `from_json` makes the same encoder."""
        return {
            "columns": [column.to_json() for column in self.columns],
            "target": _labels_to_json(self.target),
            "group": [_labels_to_json(labels) for labels in self.group],
            "groups": list(self.groups),
        }

    @staticmethod
    def from_json(plain: dict[str, Any]) -> Encoder:
        """The encoder that `to_json` wrote."""
        return Encoder(
            tuple(columns.from_json(column) for column in plain["columns"]),
            _labels_from_json(plain["target"]),
            tuple(_labels_from_json(labels) for labels in plain["group"]),
            tuple(plain["groups"]),
        )

    def _check_columns(self, frame: pd.DataFrame, needed: Iterable[str]) -> None:
        absent = [name for name in needed if name not in frame.columns]
        if absent:
            raise ValueError(
                f"The rows lack {'the column' if len(absent) == 1 else 'the columns'} "
                f"{listed(absent, 20)}, which the "
                "model was trained with; add them (empty where they are unknown)."
            )


# --- fitting ------------------------------------------------------------------------------------


def fit_columns(
    frame: pd.DataFrame, rows: Codes, names: Sequence[str], keep: Collection[str]
) -> tuple[list[Column], list[str]]:
    """How these columns become features, by the training rows alone; and notes on those that are
    left out.
    """
    found: list[Column] = []
    notes: list[str] = []
    for name in names:
        series = _taken(frame, name, rows)
        reason = None if name in keep else columns.useless(series)
        if reason is None:
            column, note = _fitted(series, name)
            reason = _without_information(column) if name not in keep else None
            notes += [] if note is None else [note]
        if reason is None:
            found.append(column)
        else:
            notes.append(f"Column {name!r} {reason} and is not used; to use it, keep it.")
    return found, notes


def fit_labels(
    series: pd.Series, bins: int | None, entry: dict[str, Any] | None
) -> tuple[Labels, str | None]:
    """The groups of a protected column, and what ε does not cover in them.

    From all rows: groups are what results are reported for, and must be the same whatever the split
    is.
    """
    name = str(series.name)
    if entry is not None and entry["kind"] in ("category", "boolean"):
        public = entry["values"] if entry["kind"] == "category" else ["False", "True"]
        return Labels(name, _with_missing(public, entry.get("missing", True))), None
    ranged = entry is not None and entry["kind"] == "number" and bins is not None
    if ranged or (columns.kind_of(series).name == "number" and series.nunique() > MOST_VALUES):
        return _fitted_bins(series, bins, entry)
    codes, names = columns.factor(series)
    found = _with_missing(ordered(names), bool((codes < 0).any()))
    return Labels(
        name, found
    ), f"the names of the groups of {name!r}, which are those found in the data"


def _fitted_bins(
    series: pd.Series, bins: int | None, entry: dict[str, Any] | None
) -> tuple[Labels, str | None]:
    """A number cut into groups: at quantiles of the rows, or evenly over the public range."""
    name, values = str(series.name), columns.numbers(series)
    if bins is None:
        raise ValueError(
            f"The group column {name!r} is a number with {series.nunique()} different values; "
            "give group_bins "
            "(--group-bins), the number of groups to cut it into."
        )
    if entry is not None and entry["kind"] == "number":
        low, high = entry["range"]
        edges, missing, uncovered = (
            np.linspace(low, high, bins + 1)[1:-1],
            entry.get("missing", True),
            None,
        )
    else:
        edges = np.unique(np.nanquantile(values, np.arange(1, bins) / bins))
        missing = bool(np.isnan(values).any())
        uncovered = f"the values that cut {name!r} into groups, which are quantiles of all rows"
    return Labels(
        name, _with_missing(_bin_names(edges.tolist()), missing), tuple(edges.tolist())
    ), uncovered


def _with_missing(names: Sequence[str], missing: bool) -> tuple[str, ...]:
    """The names, and last the one of those who have none."""
    found = [name for name in names if name != MISSING]
    return (*found, MISSING) if missing or len(found) < len(names) else tuple(found)


def ordered(names: Iterable[str]) -> list[str]:
    """The names sorted, by value where all are numbers.

    >>> ordered(["10", "9", "-1"]), ordered(["b", "10", "9"])
    (['-1', '9', '10'], ['10', '9', 'b'])
    """
    found = list(names)
    try:
        return sorted(found, key=float)
    except ValueError:
        return sorted(found)


def nearest(name: str, names: Iterable[Any]) -> str:
    """`; did you mean 'income'?`, where there is such a column."""
    known = {str(other).casefold(): str(other) for other in names}
    close = difflib.get_close_matches(name.casefold(), known, n=1)
    return f"; did you mean {known[close[0]]!r}?" if close else ";"


def _fitted(series: pd.Series, name: str) -> tuple[Column, str | None]:
    """How one column becomes features, and what the reader should know."""
    kind = columns.kind_of(series)
    match kind.name:
        case "boolean":
            return Flag(name, bool(np.isnan(columns.flags(series)).any())), kind.note
        case "number":
            values = columns.numbers(series)
            return Number(name, *_moments(values), BOUND, bool(np.isnan(values).any())), kind.note
        case "date":
            values = columns.days(series, kind.format)
            return Date(
                name, kind.format, *_moments(values), BOUND, bool(np.isnan(values).any())
            ), kind.note
    return _fitted_category(series, name)


def _fitted_category(series: pd.Series, name: str) -> tuple[Column, str | None]:
    """The frequent values; a note where many are not."""
    codes, names = columns.factor(series)
    counts = np.bincount(codes[codes >= 0], minlength=len(names))
    least = max(RARE_ROWS, math.ceil(RARE_SHARE * len(series)))
    frequent = sum(int(count) >= least for count in counts)
    common = [
        names[code] for code in np.argsort(-counts, kind="stable")[: min(frequent, MOST_CATEGORIES)]
    ]
    other = len(common) < len(names)
    note = None
    if frequent > MOST_CATEGORIES:
        note = (
            f"Column {name!r} has {frequent} frequent values; the {MOST_CATEGORIES} most "
            "frequent are used."
        )
    return Category(name, tuple(ordered(common)), other, bool((codes < 0).any())), note


def _without_information(column: Column) -> str | None:
    """Why a category whose values are all rare is of no use."""
    if isinstance(column, Category) and not column.values and not (column.other and column.missing):
        return f"has only rare values (fewer than {RARE_ROWS} training rows each)"
    return None


def _moments(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation of what is there; 0 and 1 where nothing is, and a deviation of 1
    for a constant.
    """
    values = values[~np.isnan(values)]
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0:
        return 0.0, 1.0
    scaled = values / largest  # squares of numbers such as 1e200 are infinite
    mean, deviation = float(scaled.mean()) * largest, float(scaled.std()) * largest
    return mean, deviation if values.min() < values.max() and deviation > 0 else 1.0


def _bin_names(edges: list[float]) -> list[str]:
    """The names of the groups between these values."""
    if not edges:
        return ["all"]
    texts = [f"{edge:.6g}" for edge in edges]
    texts = texts if len(set(texts)) == len(texts) else [repr(edge) for edge in edges]
    between = [f"{low} to < {high}" for low, high in pairwise(texts)]
    return [f"< {texts[0]}", *between, f"≥ {texts[-1]}"]


def _taken(frame: pd.DataFrame, name: str, rows: Codes | None) -> pd.Series:
    """A column, or some rows of it; one at a time, so that the table is never copied."""
    return frame[name] if rows is None else frame[name].iloc[rows]


def _check_known(
    codes: Codes, series: pd.Series, what: str, names: Sequence[str], first: int
) -> None:
    """Raise for a row that has no label."""
    if (codes < 0).any():
        row = int(np.flatnonzero(codes < 0)[0])
        value = None if series.isna().iloc[row] else columns.text(series.iloc[row])
        raise ValueError(
            f"Column {str(series.name)!r} has "
            f"{'no value' if value is None else f'the value {value!r}'} in row "
            f"{row + first}, which is no {what} of this encoder; it knows {listed(names, 20)}."
        )


def _labels_to_json(labels: Labels) -> dict[str, Any]:
    edges = None if labels.edges is None else list(labels.edges)
    return {"column": labels.column, "names": list(labels.names), "edges": edges}


def _labels_from_json(plain: dict[str, Any]) -> Labels:
    edges = None if plain["edges"] is None else tuple(plain["edges"])
    return Labels(plain["column"], tuple(plain["names"]), edges)
