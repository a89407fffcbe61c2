"""Columns of a table: what kind a column is, and how its values become features.

| kind | how it is known | features |
|---|---|---|
| number | numbers, or text that reads as numbers | (value − centre)/scale, within ±bound; missing: 0 |
| date | dates, or text of which every value is one | days since 1970 as a number |
| boolean | True and False, or text that says so | 1 and 0; missing: ½ |
| category | everything else | one indicator per value; unknown: the indicator "other", or no indicator at all |

Where the training rows miss values, a further indicator says which; an infinite number counts as
missing. Everything here is a function of one column, and a column that was made (fitted, or from a
schema) no longer looks at data.
"""

from __future__ import annotations

import datetime
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Category",
    "Column",
    "Date",
    "Factor",
    "Flag",
    "Kind",
    "Number",
    "from_json",
    "kind_of",
    "text",
    "useless",
]

FALSE_TRUE = ("false", "true")
ISO = "ISO8601"
FORMATS = (
    ISO,
    "%d.%m.%Y",
    "%Y/%m/%d",
    "%m/%d/%Y",
    "%d/%m/%Y",
)  # in this order: 3/4/2020 is the 4th of March
LOOKED_AT = 200  # values that are tried before a whole column is
LEAST_ROWS, DIFFERENT_SHARE, MOST_GAPS = 50, 0.95, 3  # when a column is an identifier
NUMERIC_SHARE = 0.95  # of the different values of a text; the others then count as missing

Values = NDArray[np.float64]  # [row], NaN where missing
Features = NDArray[np.float32]  # [row, feature]


class Factor(NamedTuple):
    """A column as codes."""

    codes: NDArray[np.int64]  # [row], −1 where missing
    names: tuple[str, ...]  # [code], in the order in which they appear


class Kind(NamedTuple):
    """What a column holds."""

    name: str  # "number", "date", "boolean" or "category"
    format: str = ISO  # of dates
    note: str | None = None  # what the reader of a report should know


# --- values -------------------------------------------------------------------------------------


_WHOLE = re.compile(r"-?(0|[1-9]\d*)\.0+")  # as pandas writes whole numbers where some are missing


def text(value: Any) -> str | None:
    """A value as it is named in reports and compared with categories; None for an empty one.

    A whole number is the same as a number and as a text, however a file or a program writes it.

    >>> text(3.0), text("3.0"), text("03"), text(" a "), text(True), text(" ")
    ('3', '3', '03', 'a', 'True', None)
    """
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, float | np.floating):
        return (
            str(int(value)) if math.isfinite(value) and value == int(value) else str(float(value))
        )
    if isinstance(value, datetime.date | datetime.datetime):
        return value.isoformat()
    found = str(value).strip()
    return (found[: found.index(".")] if _WHOLE.fullmatch(found) else found) or None


def factor(series: pd.Series) -> Factor:
    """The column as codes of its texts.

    Raises:
        TypeError: for values that cannot be compared, such as lists.
    """
    import pandas as pd

    codes, found = pd.factorize(series)
    texts = [text(value) for value in found]
    position: dict[str, int] = {}
    for name in texts:
        if name is not None:
            position.setdefault(name, len(position))
    lookup = [-1 if name is None else position[name] for name in texts]
    return Factor(
        np.array([*lookup, -1], dtype=np.int64)[codes], tuple(position)
    )  # a missing one, −1, is the last


def numbers(series: pd.Series) -> Values:
    """The column as numbers; what is none, or is infinite, is missing."""
    import pandas as pd

    if pd.api.types.is_timedelta64_dtype(series.dtype):
        series = series.dt.total_seconds() / 86400
    if not pd.api.types.is_numeric_dtype(series.dtype) or pd.api.types.is_complex_dtype(
        series.dtype
    ):
        codes, found = pd.factorize(series)
        parsed = pd.to_numeric(
            pd.Series([_numeral(value) for value in found], dtype=object), errors="coerce"
        )
        values = np.append(parsed.to_numpy(dtype=np.float64, na_value=np.nan), np.nan)[codes]
    else:
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    return np.where(np.isfinite(values), values, np.nan)


def days(series: pd.Series, form: str) -> Values:
    """The column as days since 1970; what is no date of this form is missing."""
    import pandas as pd

    if pd.api.types.is_datetime64_any_dtype(series.dtype):
        moments = pd.to_datetime(series, utc=True)
    else:
        codes, found = pd.factorize(series)
        parsed = pd.to_datetime(
            pd.Series([text(value) for value in found], dtype=object),
            format=form,
            errors="coerce",
            utc=True,
        )
        return np.asarray(np.append(_days(parsed), np.nan)[codes])
    return _days(moments)


def flags(series: pd.Series) -> Values:
    """The column as 0 and 1; what is neither is missing."""
    import pandas as pd

    if pd.api.types.is_bool_dtype(series.dtype):
        return np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
    codes, names = factor(series)
    known = {"false": 0.0, "true": 1.0, "0": 0.0, "1": 1.0}
    return np.array([*(known.get(name.casefold(), np.nan) for name in names), np.nan])[codes]


def _numeral(value: Any) -> Any:
    return text(value) if isinstance(value, str) else value


def _days(moments: pd.Series) -> Values:
    import pandas as pd

    moments = moments.astype(
        "datetime64[s, UTC]"
    )  # nanoseconds end in 2262, and 9999-12-31 is a usual "open end"
    epoch = pd.Timestamp("1970-01-01", tz="UTC").as_unit("s")
    return np.asarray(
        ((moments - epoch) / pd.Timedelta(days=1)).to_numpy(dtype=np.float64, na_value=np.nan)
    )


# --- kinds --------------------------------------------------------------------------------------


def kind_of(series: pd.Series) -> Kind:
    """What a column holds, by its type and, where that is text, by its values.

    Raises:
        TypeError: for values that cannot be compared, such as lists.
    """
    from pandas.api import types

    if types.is_bool_dtype(series.dtype):
        return Kind("boolean")
    if types.is_datetime64_any_dtype(series.dtype):
        return Kind("date")
    if types.is_timedelta64_dtype(series.dtype):
        return Kind("number")
    if types.is_numeric_dtype(series.dtype) and not types.is_complex_dtype(series.dtype):
        return Kind("number")
    if str(series.dtype) == "category":
        return Kind("category")
    return _kind_of_text(series.dropna())


def _kind_of_text(series: pd.Series) -> Kind:
    """The kind of a column of text, or of Python's objects."""
    found = series.unique()
    different = [value for value in map(text, found) if value is not None]
    if not different:
        return Kind("category")
    if all(name.casefold() in FALSE_TRUE for name in different):
        return Kind("boolean")
    few = different[:LOOKED_AT]
    if _readable(few) >= NUMERIC_SHARE * len(few) and _readable(different) >= NUMERIC_SHARE * len(
        different
    ):
        return Kind("number", note=_strays(str(series.name), different))
    return _kind_of_dates(str(series.name), few, different)


def _kind_of_dates(column: str, few: list[str], different: list[str]) -> Kind:
    """Dates, if one form reads all values."""
    if not any(character.isdigit() for character in few[0]):
        return Kind("category")
    fitting = [form for form in FORMATS if _dates(few, form) and _dates(different, form)]
    if not fitting:
        return Kind("category")
    both = fitting == ["%m/%d/%Y", "%d/%m/%Y"]
    note = (
        f"The dates of {column!r} are read as month/day/year, and day/month/year fits too; "
        "write them as 2001-12-31."
    )
    return Kind("date", fitting[0], note if both else None)


def _dates(values: list[str], form: str) -> bool:
    """Whether all values are dates of this form; a lone number such as 2001 is none."""
    import pandas as pd

    if any(value.isdigit() for value in values[:LOOKED_AT]):
        return False
    return bool(
        pd.to_datetime(pd.Series(values, dtype=object), format=form, errors="coerce", utc=True)
        .notna()
        .all()
    )


def _readable(values: list[str]) -> int:
    """How many are numbers."""
    import pandas as pd

    return int(pd.to_numeric(pd.Series(values, dtype=object), errors="coerce").notna().sum())


def _strays(column: str, different: list[str]) -> str | None:
    """The values of a numeric column that are none."""
    import pandas as pd

    missing = pd.to_numeric(pd.Series(different, dtype=object), errors="coerce").isna()
    strays = [value for value, stray in zip(different, missing, strict=True) if stray]
    return (
        f"{column!r} holds numbers and {listed(strays, 3)}, which count as missing."
        if strays
        else None
    )


def listed(values: Sequence[str], most: int) -> str:
    """The first few in quotes.

    >>> listed(["a", "b", "c"], 2)
    "'a', 'b' and 1 more"
    """
    shown = ", ".join(repr(value) for value in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def useless(series: pd.Series) -> str | None:
    """Why a column is better not used: no information, or a name for each row; None for a good one.

    An identifier is a text of which nearly every value is different, or whole numbers, all
    different, that either run on (1, 2, 3, ..., with gaps for the rows that are elsewhere) or have
    no name, or "id" or "key" as a word of it.
    """
    try:
        different = int(series.nunique())
    except TypeError:
        return "holds values that are no numbers, texts or dates"
    rows = int(series.notna().sum())
    if rows == 0:
        return "has no values"
    if different == 1 and rows == len(series):
        return "has one value only"
    kind = kind_of(series).name
    if kind == "category" and rows >= LEAST_ROWS and different >= DIFFERENT_SHARE * rows:
        return f"looks like an identifier ({different} different values in {rows} rows)"
    if kind == "number" and rows >= LEAST_ROWS and different == rows and _runs_on(series):
        return "looks like an identifier (whole numbers, all different)"
    return None


def _runs_on(series: pd.Series) -> bool:
    """Whether whole numbers that are all different are numbers of rows."""
    values = numbers(series)
    values = values[~np.isnan(values)]
    if not len(values) or (values != np.floor(values)).any():
        return False
    words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", str(series.name)).lower())
    return bool(np.ptp(values) < MOST_GAPS * len(values)) or not {
        "id",
        "key",
        "uuid",
        "index",
        "unnamed",
    }.isdisjoint(words)


# --- features -----------------------------------------------------------------------------------


class Column(ABC):
    """How one column becomes features. A frozen dataclass; its fields may be published if they are
    public knowledge.
    """

    kind: ClassVar[str]
    column: str

    @property
    @abstractmethod
    def features(self) -> tuple[str, ...]:
        """The names of the features."""

    @abstractmethod
    def fill(self, series: pd.Series, out: Features) -> None:
        """Write the features of these values into `out` [row, feature]."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]  # a column is a dataclass


@dataclass(frozen=True)
class Number(Column):
    """(value − centre)/scale, held within ±bound; 0 where it is missing."""

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
    """Days since 1970, (days − centre)/scale, held within ±bound; 0 where it is missing."""

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
    """1 for true, 0 for false, ½ where it is missing."""

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
    """An indicator for each value; unknown values share one if `other`, missing ones have one if
    `missing`.
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
        places = np.array(
            [*(position.get(name, unknown) for name in names), absent], dtype=np.int64
        )[codes]  # [row]
        out[:] = 0
        rows = np.flatnonzero(places >= 0)
        out[rows, places[rows]] = 1


_KINDS: dict[str, type[Column]] = {column.kind: column for column in (Number, Date, Flag, Category)}


def from_json(plain: dict[str, Any]) -> Column:
    """The column that `to_json` wrote."""
    fields = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
    }
    return _KINDS[str(fields.pop("kind"))](**fields)


def _fill_scaled(values: Values, centre: float, scale: float, bound: float, out: Features) -> None:
    """Numbers in float64 until the last moment; the indicator of missing ones where there is room
    for it.
    """
    absent = np.isnan(values)
    with np.errstate(over="ignore"):  # an infinite difference is held within the bound as well
        scaled = np.clip((values - centre) / scale, -bound, bound)
    out[:, 0] = np.where(absent, 0.0, scaled)
    out[:, 1:] = absent[:, None]
