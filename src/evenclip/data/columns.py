"""Columns of a table: the kind of a column, and how its values become features.

| kind | values | features |
|---|---|---|
| number | numbers, or text that parses as numbers | (value − centre)/scale, in ±bound; missing: 0 |
| date | dates, or text that parses as dates only | days since 1970 as a number |
| boolean | True and False, also as text | 1 and 0; missing: ½ |
| category | all others | one indicator per value; unknown: the indicator "other", or none |

If the training rows have missing values, a further indicator marks them; an infinite number counts
as missing. Every function here depends on one column. A `Column`, once fitted or made from a
schema, does not depend on further data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from evenclip.data.kinds import Kind, kind_of, useless
from evenclip.data.values import ISO, Factor, Values, days, factor, flags, listed, numbers, text

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
    "factor",
    "flags",
    "from_json",
    "kind_of",
    "listed",
    "numbers",
    "text",
    "useless",
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
    def fill(self, series: pd.Series, out: Features) -> None:
        """Write the features of the values into `out` [row, feature]."""

    def to_json(self) -> dict[str, Any]:
        """Return the encoding as plain values."""
        # Every subclass is a dataclass.
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Number(Column):
    """A number: (value − centre)/scale, clipped to ±bound; 0 if missing."""

    kind: ClassVar[str] = "number"

    column: str
    centre: float
    scale: float
    bound: float
    missing: bool

    @property
    def features(self) -> tuple[str, ...]:  # noqa: D102
        return (self.column, f"{self.column}=(missing)") if self.missing else (self.column,)

    def fill(self, series: pd.Series, out: Features) -> None:  # noqa: D102
        _fill_scaled(numbers(series), self.centre, self.scale, self.bound, out)


@dataclass(frozen=True)
class Date(Column):
    """A date in days since 1970: (days − centre)/scale, clipped to ±bound; 0 if missing."""

    kind: ClassVar[str] = "date"

    column: str
    format: str
    centre: float
    scale: float
    bound: float
    missing: bool

    @property
    def features(self) -> tuple[str, ...]:  # noqa: D102
        return (self.column, f"{self.column}=(missing)") if self.missing else (self.column,)

    def fill(self, series: pd.Series, out: Features) -> None:  # noqa: D102
        _fill_scaled(days(series, self.format), self.centre, self.scale, self.bound, out)


@dataclass(frozen=True)
class Flag(Column):
    """A boolean: 1 for true, 0 for false, ½ if missing."""

    kind: ClassVar[str] = "boolean"

    column: str
    missing: bool

    @property
    def features(self) -> tuple[str, ...]:  # noqa: D102
        return (self.column, f"{self.column}=(missing)") if self.missing else (self.column,)

    def fill(self, series: pd.Series, out: Features) -> None:  # noqa: D102
        values = flags(series)
        absent = np.isnan(values)
        out[:, 0] = np.where(absent, 0.5, values)
        out[:, 1:] = absent[:, None]


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

    @property
    def features(self) -> tuple[str, ...]:  # noqa: D102
        names = (*self.values, *["(other)"] * self.other, *["(missing)"] * self.missing)
        return tuple(f"{self.column}={name}" for name in names)

    def fill(self, series: pd.Series, out: Features) -> None:  # noqa: D102
        codes, names = factor(series)
        position = {name: place for place, name in enumerate(self.values)}
        unknown = len(self.values) if self.other else -1
        absent = len(self.values) + self.other if self.missing else -1
        lookup = [*(position.get(name, unknown) for name in names), absent]
        places = np.array(lookup, dtype=np.int64)[codes]  # [row]
        out[:] = 0
        rows = np.flatnonzero(places >= 0)
        out[rows, places[rows]] = 1


_KINDS: dict[str, type[Column]] = {column.kind: column for column in (Number, Date, Flag, Category)}


def from_json(plain: dict[str, Any]) -> Column:
    """Return the column that `to_json` wrote."""
    fields = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
    }
    return _KINDS[str(fields.pop("kind"))](**fields)


def _fill_scaled(values: Values, centre: float, scale: float, bound: float, out: Features) -> None:
    """Write scaled numbers, computed in float64, and the missing indicator if `out` has one."""
    absent = np.isnan(values)
    with np.errstate(over="ignore"):  # an infinite difference is clipped to the bound
        scaled = np.clip((values - centre) / scale, -bound, bound)
    out[:, 0] = np.where(absent, 0.0, scaled)
    out[:, 1:] = absent[:, None]
