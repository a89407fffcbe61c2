"""Conversion of a column's values to texts, codes, numbers, days and flags."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "ISO",
    "Factor",
    "Values",
    "absent",
    "coded",
    "days",
    "factor",
    "flags",
    "has_flags",
    "is_duration",
    "listed",
    "numbers",
    "shortened",
    "text",
    "zoned",
]

ISO = "ISO8601"
Values = NDArray[np.float64]  # [row], NaN where missing


class Factor(NamedTuple):
    """A column as codes."""

    codes: NDArray[np.int64]  # [row], −1 where missing
    names: tuple[str, ...]  # [code], in order of appearance


# Whole numbers as pandas writes them if a column has missing values.
_WHOLE = re.compile(r"-?(0|[1-9]\d*)\.0+")
# pandas takes more for ISO 8601: "today", "2001", "2001-12".
_DAY = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{8})([T ].*)?")
_DIGIT = re.compile(r".*\d.*", re.DOTALL)  # "now" is a moment in every format
_ZONE = re.compile(r".*:.*(Z|[+-]\d\d(:?\d\d)?)")
_LARGEST = int(np.finfo(np.float64).max)
# Kinds of objects that are equal as keys only if they are equal.
_UNIFORM = ("string", "boolean", "decimal", "date", "datetime", "datetime64", "bytes", "empty")


def text(value: Any) -> str | None:
    """Return the text by which a value is reported and compared; None for an empty value.

    A whole number has one text, whether it is given as an integer, a float or a string.

    >>> text(3.0), text("3.0"), text("03"), text(" a "), text(True), text(" ")
    ('3', '3', '03', 'a', 'True', None)
    """
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, float | np.floating):
        whole = math.isfinite(value) and value == int(value)
        return str(int(value)) if whole else str(float(value))
    if isinstance(value, datetime.date | datetime.datetime):
        return value.isoformat()
    stripped = _decoded(value).strip()
    return (stripped[: stripped.index(".")] if _WHOLE.fullmatch(stripped) else stripped) or None


def coded(series: pd.Series) -> tuple[NDArray[np.int64], list[Any]]:
    """Return the code of each value, −1 where missing, and the distinct values.

    Raises:
        TypeError: the column holds values such as lists.
    """
    import pandas as pd

    mixed = series.dtype == object and (
        pd.api.types.infer_dtype(series, skipna=True) not in _UNIFORM
    )
    try:
        if not mixed:
            codes, distinct = pd.factorize(series)
            return codes, list(distinct)
        # 1, 1.0 and True are equal as keys.
        known = dict[Any, int]()
        missing = series.isna().to_numpy(dtype=bool)
        codes = np.array(
            [
                -1 if gap else known.setdefault((type(value), value), len(known))
                for value, gap in zip(series.to_numpy(), missing, strict=True)
            ],
            dtype=np.int64,
        )
        return codes, [value for _, value in known]
    except (TypeError, NotImplementedError) as error:
        value = next((value for value in series if isinstance(value, Sized)), None)
        raise TypeError(
            f"Column {str(series.name)!r} holds {type(value).__name__}s such as "
            f"{shortened(value)}, which are neither numbers, texts nor dates; leave the column "
            "out, or split it into several."
        ) from error


def factor(series: pd.Series) -> Factor:
    """Encode a column as codes of its texts.

    Raises:
        TypeError: the column holds values such as lists.
    """
    codes, distinct = coded(series)
    texts = [text(value) for value in distinct]
    position: dict[str, int] = {}
    for name in texts:
        if name is not None:
            position.setdefault(name, len(position))
    lookup = [-1 if name is None else position[name] for name in texts]
    # A missing value has the code −1, which selects the last element.
    return Factor(np.array([*lookup, -1], dtype=np.int64)[codes], tuple(position))


def absent(series: pd.Series) -> NDArray[np.bool_]:
    """Return which values are missing or blank  # [row]."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(series.dtype) or _is_moment(series) or is_duration(series):
        return np.asarray(series.isna().to_numpy(dtype=bool))
    return factor(series).codes < 0


def has_flags(series: pd.Series) -> bool:
    """Return whether a column holds truth values, all or among others."""
    import pandas as pd

    if series.dtype != object:
        return bool(pd.api.types.is_bool_dtype(series.dtype))
    return any(isinstance(value, bool | np.bool_) for value in coded(series)[1])


def is_duration(series: pd.Series) -> bool:
    """Return whether a column holds durations."""
    return _letter(series) == "m"


def numbers(series: pd.Series, duration: bool = False) -> Values:
    """Convert a column to numbers, or durations to days; NaN for values that are not numbers.

    Infinite values are NaN, too. A column of durations has no numbers, and one of numbers has no
    durations, because their unit is not known.
    """
    import pandas as pd

    if is_duration(series) != duration:
        return np.full(len(series), np.nan)
    if duration:
        series = series.astype("timedelta64[us]").dt.total_seconds() / 86400
    if not pd.api.types.is_numeric_dtype(series.dtype) or pd.api.types.is_complex_dtype(
        series.dtype
    ):
        codes, distinct = coded(series)
        numerals = pd.Series([_numeral(value) for value in distinct], dtype=object)
        parsed = pd.to_numeric(numerals, errors="coerce")
        values = np.append(parsed.to_numpy(dtype=np.float64, na_value=np.nan), np.nan)[codes]
    else:
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    return np.where(np.isfinite(values), values, np.nan)


def days(series: pd.Series, form: str) -> Values:
    """Convert a column to days since 1970; NaN for texts that are not dates of this format."""
    import pandas as pd

    if _is_moment(series):
        return _days(pd.to_datetime(series, utc=True))
    codes, distinct = coded(series)
    dates = [isinstance(value, datetime.date) for value in distinct]
    texts = [text(value) for value in distinct]
    written = [None if date else value for date, value in zip(dates, texts, strict=True)]
    real = [value if date else None for date, value in zip(dates, texts, strict=True)]
    parsed = _parsed(written, form)
    parsed = np.where(np.isnan(parsed), _parsed(real, ISO), parsed)
    return np.asarray(np.append(parsed, np.nan)[codes])


def zoned(series: pd.Series) -> tuple[int, int]:
    """Return how many distinct moments have a time zone, and how many have none."""
    if _is_moment(series):
        has_zone = "," in str(series.dtype) or "tz=" in str(series.dtype)
        return (int(has_zone), int(not has_zone)) if series.notna().any() else (0, 0)
    _, distinct = coded(series)
    texts = [name for name in map(text, distinct) if name is not None]
    marks = [_ZONE.fullmatch(name) is not None for name in texts]
    return sum(marks), len(marks) - sum(marks)


def flags(series: pd.Series) -> Values:
    """Convert a column to 0 and 1; NaN for values that are neither true nor false."""
    import pandas as pd

    if pd.api.types.is_bool_dtype(series.dtype):
        return np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
    codes, names = factor(series)
    known = {"false": 0.0, "true": 1.0, "0": 0.0, "1": 1.0}
    return np.array([*(known.get(name.casefold(), np.nan) for name in names), np.nan])[codes]


def _numeral(value: Any) -> Any:
    """Return what pandas converts to a number."""
    if isinstance(value, str | bytes):
        return text(value)
    if isinstance(value, int) and abs(value) > _LARGEST:
        return None
    return None if isinstance(value, complex) else value


def _decoded(value: Any) -> str:
    """Return the text of a value; bytes are UTF-8, as in a Parquet column without a type."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return str(value)
    return str(value)


def _letter(series: pd.Series) -> str:
    """Return numpy's letter for the kind of a column's values, such as "M" for moments."""
    return str(getattr(series.dtype, "kind", "O"))


def _is_moment(series: pd.Series) -> bool:
    return _letter(series) == "M"


def _parsed(texts: Sequence[str | None], form: str) -> Values:
    """Return the days of texts in one format, NaN for others."""
    import pandas as pd

    shape = _DAY if form == ISO else _DIGIT
    texts = [value if value and shape.fullmatch(value) else None for value in texts]
    values = pd.Series(texts, dtype=object)
    return _days(pd.to_datetime(values, format=form, errors="coerce", utc=True))


def _days(moments: pd.Series) -> Values:
    import pandas as pd

    # Nanoseconds end in 2262, and 9999-12-31 is a usual "open end".
    moments = moments.astype("datetime64[s, UTC]")
    epoch = pd.Timestamp("1970-01-01", tz="UTC").as_unit("s")
    since = (moments - epoch) / pd.Timedelta(days=1)
    return np.asarray(since.to_numpy(dtype=np.float64, na_value=np.nan))


def listed(values: Sequence[str], most: int) -> str:
    """Join the first `most` values in quotes.

    >>> listed(["a", "b", "c"], 2)
    "'a', 'b' and 1 more"
    """
    shown = ", ".join(repr(value) for value in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def shortened(value: Any) -> str:
    """Return a value as it is shown in messages.

    >>> shortened("x" * 99)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...'"
    """
    plain = _decoded(value)
    return repr(plain if len(plain) <= 40 else f"{plain[:37]}...")
