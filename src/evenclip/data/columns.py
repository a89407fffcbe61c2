"""Columns of a table: the kind of a column, and how its values become features.

| kind | values | features |
|---|---|---|
| number | numbers, or text that parses as numbers | (value − centre)/scale, in ±bound; missing: 0 |
| date | dates, or text that parses as dates only | days since 1970 as a number |
| boolean | True and False, also as text | 1 and 0; missing: ½ |
| category | all others | one indicator per value; unknown: the indicator "other", or none |

If the training rows have missing values, a further indicator marks them; a value that cannot be
read and an infinite number count as missing, and `Column.read` counts them. Every function here
depends on one column. A `Column`, once fitted or made from a schema, does not depend on further
data.
"""

from __future__ import annotations

import datetime
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from evenclip.data.kinds import Kind, doubt, kind_of, useless
from evenclip.data.reading import ColumnReading
from evenclip.data.values import (
    ISO,
    Factor,
    Values,
    absent,
    days,
    factor,
    flags,
    has_flags,
    is_duration,
    listed,
    numbers,
    shortened,
    text,
    zoned,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ISO",
    "Category",
    "Column",
    "Date",
    "Factor",
    "Flag",
    "Kind",
    "Number",
    "Values",
    "days",
    "doubt",
    "factor",
    "flags",
    "from_json",
    "is_duration",
    "kind_of",
    "listed",
    "numbers",
    "text",
    "useless",
    "zoned",
]

Features = NDArray[np.float32]  # [row, feature]


class Column(ABC):
    """The encoding of one column as features.

    Subclasses are frozen dataclasses. Their fields may be published if they are public knowledge.
    """

    kind: ClassVar[str]
    column: str

    @property
    @abstractmethod
    def features(self) -> tuple[str, ...]:
        """The names of the features."""

    @abstractmethod
    def read(self, series: pd.Series, out: Features) -> ColumnReading:
        """Write the features of the values into `out` [row, feature]; return how they were read."""

    def to_json(self) -> dict[str, Any]:
        """Return the encoding as plain values."""
        # Every subclass is a dataclass.
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Number(Column):
    """A number: (value − centre)/scale, clipped to ±bound; 0 if missing.

    A duration is a number of days. Numbers are not read as durations, nor durations as numbers.
    """

    kind: ClassVar[str] = "number"

    column: str
    centre: float
    scale: float
    bound: float
    missing: bool
    duration: bool = False

    def __post_init__(self) -> None:
        _check_named(self)
        _check_scaled(self.column, self.centre, self.scale, self.bound)

    @property
    def features(self) -> tuple[str, ...]:  # noqa: D102
        return (self.column, f"{self.column}=(missing)") if self.missing else (self.column,)

    def read(self, series: pd.Series, out: Features) -> ColumnReading:  # noqa: D102
        values = numbers(series, self.duration)
        outside = _fill_scaled(values, self.centre, self.scale, self.bound, out)
        # True is 1 in every number, so a column of flags is read.
        remark = "holds truth values, read as 1 and 0" if has_flags(series) else None
        kind = "durations" if self.duration else "numbers"
        remedy = "give durations, with their unit" if self.duration else "write them as 1234.5"
        return _read(self, series, values, kind, remedy, outside=outside, remark=remark)


@dataclass(frozen=True)
class Date(Column):
    """A date in days since 1970: (days − centre)/scale, clipped to ±bound; 0 if missing.

    `zoned` says whether training had time zones; without one, a time counts as UTC.
    """

    kind: ClassVar[str] = "date"

    column: str
    format: str
    centre: float
    scale: float
    bound: float
    missing: bool
    zoned: bool = False

    def __post_init__(self) -> None:
        _check_named(self)
        if not isinstance(self.format, str):
            raise ValueError(f"the format of {self.column!r} is {self.format!r}, and not a text")
        _check_scaled(self.column, self.centre, self.scale, self.bound)

    @property
    def features(self) -> tuple[str, ...]:  # noqa: D102
        return (self.column, f"{self.column}=(missing)") if self.missing else (self.column,)

    def read(self, series: pd.Series, out: Features) -> ColumnReading:  # noqa: D102
        values = days(series, self.format)
        outside = _fill_scaled(values, self.centre, self.scale, self.bound, out)
        written = "2001-12-31" if self.format == ISO else _NEW_YEARS_EVE.strftime(self.format)
        remark = self._remark(series, values)
        return _read(
            self, series, values, "dates", f"write them as {written}", outside=outside,
            remark=remark,
        )  # fmt: skip

    def _remark(self, series: pd.Series, values: Values) -> str | None:
        """Return how time zones differ from training."""
        if np.isnan(values).all():
            return None
        with_zone, without = zoned(series)
        if self.zoned and without:
            return "has times without a zone, which training had; they are read as UTC"
        if not self.zoned and with_zone:
            return "has times with a zone, which training had not; they are read in UTC"
        return None


@dataclass(frozen=True)
class Flag(Column):
    """A boolean: 1 for true, 0 for false, ½ if missing."""

    kind: ClassVar[str] = "boolean"

    column: str
    missing: bool

    def __post_init__(self) -> None:
        _check_named(self)

    @property
    def features(self) -> tuple[str, ...]:  # noqa: D102
        return (self.column, f"{self.column}=(missing)") if self.missing else (self.column,)

    def read(self, series: pd.Series, out: Features) -> ColumnReading:  # noqa: D102
        values = flags(series)
        gaps = np.isnan(values)
        out[:, 0] = np.where(gaps, 0.5, values)
        out[:, 1:] = gaps[:, None]
        return _read(self, series, values, "true or false", "write them as True and False")


@dataclass(frozen=True)
class Category(Column):
    """A category: an indicator for each value.

    Unknown values share one indicator if `other` is set; missing values have one if `missing` is.
    """

    kind: ClassVar[str] = "category"

    column: str
    values: tuple[str, ...]
    other: bool
    missing: bool

    def __post_init__(self) -> None:
        _check_named(self)
        texts = isinstance(self.values, tuple) and all(
            isinstance(value, str) for value in self.values
        )
        if not texts or len(set(self.values)) < len(self.values):
            raise ValueError(f"the categories of {self.column!r} are not different texts")
        if not isinstance(self.other, bool):
            raise ValueError(f'"other" of {self.column!r} is {self.other!r}, and not true or false')

    @property
    def features(self) -> tuple[str, ...]:  # noqa: D102
        names = (*self.values, *["(other)"] * self.other, *["(missing)"] * self.missing)
        return tuple(f"{self.column}={name}" for name in names)

    def read(self, series: pd.Series, out: Features) -> ColumnReading:  # noqa: D102
        codes, names = factor(series)
        position = {name: place for place, name in enumerate(self.values)}
        unknown = len(self.values) if self.other else -1
        absent = len(self.values) + self.other if self.missing else -1
        lookup = [*(position.get(name, unknown) for name in names), absent]
        places = np.array(lookup, dtype=np.int64)[codes]  # [row]
        out[:] = 0
        rows = np.flatnonzero(places >= 0)
        out[rows, places[rows]] = 1
        strange = np.array([*(name not in position for name in names), False], dtype=bool)[codes]
        example = names[codes[int(np.argmax(strange))]] if strange.any() else None
        return ColumnReading(
            self.column,
            f"among its categories (read as {'other' if self.other else 'none'})",
            "write them as they were",
            rows=len(codes),
            missing=int((codes < 0).sum()),
            unseen=int(strange.sum()),
            example=None if example is None else shortened(example) + self._similar(example),
            gaps=self.missing,
        )

    def _similar(self, name: str) -> str:
        """Return the category that differs in case and blanks alone, for messages."""
        plain = "".join(name.casefold().split())
        known = (value for value in self.values if "".join(value.casefold().split()) == plain)
        similar = next(known, None)
        return "" if similar is None else f" (training: {shortened(similar)})"


_NEW_YEARS_EVE = datetime.date(2001, 12, 31)
_KINDS: dict[str, type[Column]] = {column.kind: column for column in (Number, Date, Flag, Category)}


def from_json(plain: dict[str, Any]) -> Column:
    """Return the column that `to_json` wrote."""
    fields = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
    }
    return _KINDS[str(fields.pop("kind"))](**fields)


def _fill_scaled(
    values: Values, centre: float, scale: float, bound: float, out: Features
) -> NDArray[np.bool_]:
    """Write scaled numbers, computed in float64, and the missing indicator if `out` has one.

    Return which values lie outside of the bound  # [row].
    """
    gaps = np.isnan(values)
    with np.errstate(over="ignore"):  # an infinite difference is clipped to the bound
        scaled = (values - centre) / scale
    out[:, 0] = np.where(gaps, 0.0, np.clip(scaled, -bound, bound))
    out[:, 1:] = gaps[:, None]
    return np.abs(scaled) > bound * (1 + 1e-9)  # the ends of a range are inside


def _read(
    column: Number | Date | Flag, series: pd.Series, values: Values, expected: str, remedy: str,
    outside: NDArray[np.bool_] | None = None, remark: str | None = None,
) -> ColumnReading:  # fmt: skip
    """Return how the values of a column were read; NaN is missing or unreadable."""
    gaps = np.isnan(values)
    empty = absent(series) if gaps.any() else gaps
    unreadable = gaps & ~empty
    unlike = unreadable if unreadable.any() or outside is None else outside
    example = shortened(series.iloc[int(np.argmax(unlike))]) if unlike.any() else None
    return ColumnReading(
        column.column,
        expected,
        remedy,
        rows=len(values),
        missing=int(empty.sum()),
        unreadable=int(unreadable.sum()),
        outside=0 if outside is None else int(outside.sum()),
        example=example,
        gaps=column.missing,
        remark=remark,
    )


def _check_named(column: Number | Date | Flag | Category) -> None:
    """Raise unless the name is a text and `missing` a truth value."""
    if not isinstance(column.column, str):
        raise ValueError(f"a column has the name {column.column!r}, and not a text")
    if not isinstance(column.missing, bool):
        raise ValueError(
            f'"missing" of {column.column!r} is {column.missing!r}, and not true or false'
        )


def _check_scaled(column: str, centre: float, scale: float, bound: float) -> None:
    """Raise unless the numbers of an encoding are finite, and scale and bound above 0."""
    named = {"centre": centre, "scale": scale, "bound": bound}
    for name, value in named.items():
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not math.isfinite(value) or (name != "centre" and value <= 0):
            kind = "a finite number" if name == "centre" else "a finite number above 0"
            raise ValueError(f"the {name} of {column!r} is {value!r}, and not {kind}")
