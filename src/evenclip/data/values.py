"""Conversion of a column's values to texts, codes, numbers, days and flags."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ISO", "Factor", "Values", "days", "factor", "flags", "listed", "numbers", "text"]

ISO = "ISO8601"
Values = NDArray[np.float64]  # [row], NaN where missing


class Factor(NamedTuple):
    """A column as codes."""

    codes: NDArray[np.int64]  # [row], −1 where missing
    names: tuple[str, ...]  # [code], in order of appearance


# Whole numbers as pandas writes them if a column has missing values.
_WHOLE = re.compile(r"-?(0|[1-9]\d*)\.0+")


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
    stripped = str(value).strip()
    return (stripped[: stripped.index(".")] if _WHOLE.fullmatch(stripped) else stripped) or None


def factor(series: pd.Series) -> Factor:
    """Encode a column as codes of its texts.

    Raises:
        TypeError: the values are not hashable, such as lists.
    """
    import pandas as pd

    codes, distinct = pd.factorize(series)
    texts = [text(value) for value in distinct]
    position: dict[str, int] = {}
    for name in texts:
        if name is not None:
            position.setdefault(name, len(position))
    lookup = [-1 if name is None else position[name] for name in texts]
    # A missing value has the code −1, which selects the last element.
    return Factor(np.array([*lookup, -1], dtype=np.int64)[codes], tuple(position))


def numbers(series: pd.Series) -> Values:
    """Convert a column to numbers; infinite values and values that are not numbers are missing."""
    import pandas as pd

    if pd.api.types.is_timedelta64_dtype(series.dtype):
        series = series.dt.total_seconds() / 86400
    if not pd.api.types.is_numeric_dtype(series.dtype) or pd.api.types.is_complex_dtype(
        series.dtype
    ):
        codes, distinct = pd.factorize(series)
        numerals = pd.Series([_numeral(value) for value in distinct], dtype=object)
        parsed = pd.to_numeric(numerals, errors="coerce")
        values = np.append(parsed.to_numpy(dtype=np.float64, na_value=np.nan), np.nan)[codes]
    else:
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
    return np.where(np.isfinite(values), values, np.nan)


def days(series: pd.Series, form: str) -> Values:
    """Convert a column to days since 1970; values that are not dates of this format are missing."""
    import pandas as pd

    if pd.api.types.is_datetime64_any_dtype(series.dtype):
        return _days(pd.to_datetime(series, utc=True))
    codes, distinct = pd.factorize(series)
    texts = pd.Series([text(value) for value in distinct], dtype=object)
    parsed = pd.to_datetime(texts, format=form, errors="coerce", utc=True)
    return np.asarray(np.append(_days(parsed), np.nan)[codes])


def flags(series: pd.Series) -> Values:
    """Convert a column to 0 and 1; values that are neither true nor false are missing."""
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
