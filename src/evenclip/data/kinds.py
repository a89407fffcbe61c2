"""The kind of a column (number, date, boolean or category), and whether it is useful."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evenclip.data.values import ISO, coded, days, is_duration, listed, numbers, shortened, text

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Kind", "doubt", "kind_of", "useless"]

FALSE_TRUE = ("false", "true")
# Tried in this order: 3/4/2020 is the 4th of March.
MONTH = "%Y-%m"
FORMATS = (ISO, MONTH, "%d.%m.%Y", "%Y/%m/%d", "%m/%d/%Y", "%d/%m/%Y")
PROBED = 200  # values that are parsed first, before a whole column is
LEAST_ROWS, DIFFERENT_SHARE, MOST_GAPS = 50, 0.95, 3  # when a column counts as an identifier
NUMERIC_SHARE = 0.95  # of a text's distinct values; the others then count as missing
_PLAIN = re.compile(r"[+-]?\d+(\.\d+)?")
# Numbers with separators of thousands, a comma, a currency or a percent sign; dates in any order.
_LIKE = re.compile(
    r"[(+\-−]?\s?[^\w\s]?\s?\d[\d.,'’_\s]*\s?[^\w\s]?\)?"
    r"|\d{1,4}[-/. ](\d{1,2}|[^\W\d]{3,9}\.?)[-/., ]+\d{1,4}\b.*"
    r"|[^\W\d]{3,9}\.? \d{1,2},? \d{4}\b.*"
)


class Kind(NamedTuple):
    """The kind of a column's values."""

    name: str  # "number", "date", "boolean" or "category"
    format: str = ISO  # of dates
    note: str | None = None  # a remark for reports


def kind_of(series: pd.Series) -> Kind:
    """Return the kind of a column, from its dtype or, if that is text, from its values.

    Raises:
        TypeError: the column holds values such as lists.
    """
    from pandas.api import types

    if types.is_bool_dtype(series.dtype):
        return Kind("boolean")
    if types.is_datetime64_any_dtype(series.dtype):
        return Kind("date")
    if is_duration(series):
        return Kind("number")
    if types.is_numeric_dtype(series.dtype) and not types.is_complex_dtype(series.dtype):
        return Kind("number")
    if str(series.dtype) == "category":
        return Kind("category")
    return _kind_of_text(series)


def _kind_of_text(series: pd.Series) -> Kind:
    """Return the kind of a column of texts or of Python objects."""
    distinct = _texts(series)
    if not distinct:
        return Kind("category")
    if all(name.casefold() in FALSE_TRUE for name in distinct):
        return Kind("boolean")
    probed = distinct[:PROBED]
    if _numeric(probed) and _numeric(distinct):
        return Kind("number", note=_strays(str(series.name), distinct))
    return _kind_of_dates(str(series.name), probed, distinct)


def _texts(series: pd.Series) -> list[str]:
    """Return the texts of the distinct values."""
    return [name for name in map(text, coded(series)[1]) if name is not None]


def _kind_of_dates(column: str, probed: list[str], distinct: list[str]) -> Kind:
    """Return "date" if one format parses all values, else "category"."""
    if not any(character.isdigit() for character in probed[0]):
        return Kind("category")
    fitting = [form for form in FORMATS if _dates(probed, form) and _dates(distinct, form)]
    if not fitting:
        return Kind("category")
    both = fitting == ["%m/%d/%Y", "%d/%m/%Y"]
    note = (
        f"The dates of {column!r} are read as month/day/year, and day/month/year fits too; write "
        "them as 2001-12-31."
    )
    return Kind("date", fitting[0], note if both else None)


def _dates(values: list[str], form: str) -> bool:
    """Return whether all values are dates of this format; a plain number such as 2001 is not."""
    import pandas as pd

    if any(value.isdigit() for value in values[:PROBED]):
        return False
    return not bool(np.isnan(days(pd.Series(values, dtype=object), form)).any())


def _numeric(values: list[str]) -> bool:
    """Return whether enough of the values are numbers for the column to count as numeric."""
    import pandas as pd

    parsed = pd.to_numeric(pd.Series(values, dtype=object), errors="coerce")
    return int(parsed.notna().sum()) >= NUMERIC_SHARE * len(values)


def _strays(column: str, distinct: list[str]) -> str | None:
    """Return a note on the values of a numeric column that are not numbers."""
    import pandas as pd

    missing = pd.to_numeric(pd.Series(distinct, dtype=object), errors="coerce").isna()
    strays = [value for value, stray in zip(distinct, missing, strict=True) if stray]
    if not strays:
        return None
    return f"{column!r} holds numbers and {listed(strays, 3)}, which count as missing."


def doubt(series: pd.Series) -> str | None:
    """Return a note on a column of texts that look like numbers or dates, or None.

    >>> import pandas as pd
    >>> doubt(pd.Series(["1,200", "3,400", "n/k"], name="income"))
    "Column 'income' is read as texts, and 2 of its 3 different values look like numbers or dates, \
such as '1,200'; write numbers as 1234.5 and dates as 2001-12-31."
    """
    try:
        # The type "category" declares that numbers are categories.
        if str(series.dtype) == "category" or kind_of(series).name != "category":
            return None
    except TypeError:  # lists
        return None
    distinct = _texts(series)
    alike = [value for value in distinct if _LIKE.fullmatch(value)]
    if not alike or 2 * len(alike) < len(distinct):
        return None
    # The numbers that are written as they should be are not what is wrong.
    example = next((value for value in alike if not _PLAIN.fullmatch(value)), None)
    if example is None:
        example = next((value for value in distinct if value not in alike), alike[0])
    return (
        f"Column {str(series.name)!r} is read as texts, and {len(alike)} of its {len(distinct)} "
        f"different values look like numbers or dates, such as {shortened(example)}; write numbers "
        "as 1234.5 and dates as 2001-12-31."
    )


def useless(series: pd.Series) -> str | None:
    """Return why a column should not be used (no information, or an identifier), or None.

    An identifier is a text whose values are nearly all different, or whole numbers that are all
    different and either consecutive (1, 2, 3, ..., with gaps for the rows of other splits), or in a
    column that is unnamed or has "id" or "key" as a word of its name.
    """
    try:
        different = int(series.nunique())
    except (TypeError, NotImplementedError):  # lists, also those of Arrow
        return "holds values that are not numbers, texts or dates"
    rows = int(series.notna().sum())
    if rows == 0:
        return "has no values"
    if different == 1 and rows == len(series):
        return "has one value only"
    kind = kind_of(series).name
    if kind == "category" and rows >= LEAST_ROWS and different >= DIFFERENT_SHARE * rows:
        return f"looks like an identifier ({different} different values in {rows} rows)"
    if kind == "number" and rows >= LEAST_ROWS and different == rows and _enumerates(series):
        return "looks like an identifier (whole numbers, all different)"
    return None


def _enumerates(series: pd.Series) -> bool:
    """Return whether numbers that are all different look like row numbers."""
    values = numbers(series, is_duration(series))
    values = values[~np.isnan(values)]
    if not len(values) or (values != np.floor(values)).any():
        return False
    words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", str(series.name)).lower())
    named = not {"id", "key", "uuid", "index", "unnamed"}.isdisjoint(words)
    return bool(np.ptp(values) < MOST_GAPS * len(values)) or named
