"""The raw content of records as bytes: equal for equal records, different for different ones.

The bytes of a value depend on that value alone, not on the rest of its column: pandas reads whole
numbers as floats if one row has none, and as texts if one row has a text. Hence

- a number is its float64, with one zero and one NaN, whether it is stored as a number or as text
  (`3`, `3.0`, `03`, `"3,0"`);
- a truth value is the text `True` or `False`;
- a date, or a text that is one in the form 2001-12-31, with or without a time, is its moment;
- a missing value, NaN and a blank text are one value;
- everything else is the BLAKE2b digest of its text, without spaces around it.

A value takes 17 bytes: its kind, and 16 bytes. So no two lists of values have the same bytes,
unless two texts had one digest. Numbers that differ only beyond float64 are one value here.

Values of one content may be spelt differently, and an encoder may tell them apart (`01` and `1` as
categories). So a column also knows which of its records have the same spelling.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from evenclip.data.values import text

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Coded", "Content", "Numbers", "of_array", "of_series"]

T = TypeVar("T")
Bytes: TypeAlias = NDArray[np.uint8]  # [record, byte]

WIDTH = 17
MISSING, NUMBER, TEXT = 0, 1, 2
_COMMA = re.compile(r"[+-]?\d*,\d*([eE][+-]?\d+)?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?")


@dataclass(frozen=True, eq=False)
class Numbers:
    """A column of numbers.

    Attributes:
        values: numbers [record], or several of each record [record, ...], such as pixels.
        spelling: equal for records that are spelt alike [record]; None: records of equal numbers.
    """

    values: NDArray[Any]
    spelling: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def layout(self) -> tuple[int, ...]:
        """Shape of one record's numbers."""
        return self.values.shape[1:]

    def block(self, start: int, end: int) -> Bytes:
        """Return the bytes of the records from `start` to before `end`."""
        plain = np.ascontiguousarray(self.values[start:end], dtype="<f8").reshape(end - start, -1)
        plain = np.where(np.isnan(plain), np.nan, plain + 0.0)  # one NaN; −0.0 + 0.0 is 0.0
        words = plain.astype("<f8").view(np.uint8).reshape(end - start, -1)
        if self.values.ndim > 1:
            return words
        out = np.zeros((end - start, WIDTH), dtype=np.uint8)
        present = ~np.isnan(plain[:, 0])
        out[present, 0] = NUMBER
        out[present, 1:9] = words[present]
        return out


@dataclass(frozen=True, eq=False)
class Coded:
    """A column of other values.

    Attributes:
        codes: position of each record's value in `table`, one for each spelling [record].
        table: bytes of the values [value, 17].
    """

    codes: NDArray[np.int64]
    table: Bytes

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def layout(self) -> tuple[int, ...]:
        """Shape of one record's value: a single one."""
        return ()

    @property
    def spelling(self) -> NDArray[np.int64]:
        """Equal for records that are spelt alike.  # [record]"""
        return self.codes

    def block(self, start: int, end: int) -> Bytes:
        """Return the bytes of the records from `start` to before `end`."""
        return self.table[self.codes[start:end]]


Content: TypeAlias = Numbers | Coded


def of_array(values: NDArray[Any] | Sequence[Any]) -> Content:
    """Return the content of an array: numbers [record, ...], or texts, bytes or flags [record].

    >>> number, numeral = of_array([3]), of_array(["3.0"])
    >>> bool((number.block(0, 1) == numeral.block(0, 1)).all())
    True
    """
    array = np.asarray(values)
    if array.dtype.kind in "iuf" or (array.dtype.kind == "b" and array.ndim > 1):
        return Numbers(array)
    if array.ndim != 1:
        raise ValueError(
            f"A column has the shape {list(array.shape)} and the dtype {array.dtype}; give one "
            "text of each record, or numbers."
        )
    if array.dtype.kind == "O":
        return _each(array)
    distinct, codes = np.unique(array, return_inverse=True)
    return Coded(codes.astype(np.int64), _table(distinct.tolist()))


def of_series(series: pd.Series) -> Content:
    """Return the content of a column of a table."""
    import pandas as pd
    from pandas.api import types

    kind = series.dtype
    if types.is_numeric_dtype(kind) and not types.is_bool_dtype(kind):
        if types.is_complex_dtype(kind):
            return _each(series.to_numpy(dtype=object))
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
        if types.is_integer_dtype(kind) and bool((np.abs(values) >= 2**53).any()):
            return Numbers(values, pd.factorize(series)[0].astype(np.int64))
        return Numbers(values)
    # A mixed column may hold 1 and True, which are equal as keys; each value counts by itself.
    if types.is_object_dtype(kind) and types.infer_dtype(series, skipna=True) != "string":
        return _each(series.to_numpy())
    codes, distinct = pd.factorize(series)
    return Coded(codes.astype(np.int64), _table([*distinct, None]))  # −1 selects the last one


def _each(values: Iterable[Any]) -> Coded:
    """Return the content of values that are converted one by one."""
    known = dict[tuple[bytes, Any], int]()
    pairs = ((_value(value), _spelling(value)) for value in values)
    codes = [known.setdefault(pair, len(known)) for pair in pairs]
    joined = np.frombuffer(b"".join(content for content, _ in known), dtype=np.uint8)
    return Coded(np.array(codes, dtype=np.int64), joined.reshape(-1, WIDTH))


def _spelling(value: Any) -> Any:
    """Return what tells a value from others of the same content."""
    return value if isinstance(value, str | bytes) else text(value)


def _table(values: Sequence[Any]) -> Bytes:
    """Return the bytes of each value.  # [value, 17]"""
    joined = b"".join([_value(value) for value in values])
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, WIDTH)


def _value(value: Any) -> bytes:
    """Return the 17 bytes of a value."""
    if isinstance(value, bytes):
        return _text(value.strip())
    if not isinstance(value, str):
        return _other(value)
    stripped = value.strip()
    if not stripped:
        return bytes(WIDTH)
    number = _numeral(stripped)
    if number is not None:
        return _number(number)
    if _DATE.fullmatch(stripped):
        stripped = _moment(stripped)
    flag = stripped.casefold()
    return _text((flag.capitalize() if flag in ("true", "false") else stripped).encode())


def _moment(value: str) -> str:
    """Return a date as the text of its moment; return other texts unchanged."""
    moment = _parsed(datetime.datetime.fromisoformat, value)
    return value if moment is None else moment.isoformat()


def _other(value: Any) -> bytes:
    """Return the 17 bytes of a value that is neither text nor bytes."""
    import pandas as pd

    if isinstance(value, bool | np.bool_):
        return _text(str(bool(value)).encode())
    if isinstance(value, int | float | np.integer | np.floating | decimal.Decimal):
        number = _float(value)
        return bytes(WIDTH) if np.isnan(number) else _number(number)
    if value is None or (pd.api.types.is_scalar(value) and pd.isna(value)):
        return bytes(WIDTH)
    plain = text(value)
    if isinstance(value, datetime.date):
        plain = _moment(value.isoformat())
    return bytes(WIDTH) if plain is None else _text(plain.encode())


def _numeral(value: str) -> float | None:
    """Return the number that a text denotes, with a point or a comma; None if it denotes none."""
    if value[0] not in "0123456789+-.,iI":  # spare texts the exception
        return None
    plain = value.replace(",", ".") if _COMMA.fullmatch(value) else value
    number = _parsed(float, plain)
    return None if number is None or np.isnan(number) else number


def _parsed(convert: Callable[[str], T], value: str) -> T | None:
    try:
        return convert(value)
    except ValueError:
        return None


def _float(value: Any) -> float:
    """Return a number as a float; a whole number that is too large is infinite."""
    try:
        return float(value)
    except OverflowError:
        return np.inf if value > 0 else -np.inf


def _number(value: float) -> bytes:
    """Return the 17 bytes of a number."""
    return bytes([NUMBER]) + np.array(value + 0.0, dtype="<f8").tobytes() + bytes(8)


def _text(value: bytes) -> bytes:
    """Return the 17 bytes of a text."""
    return bytes([TEXT]) + hashlib.blake2b(value, digest_size=16, person=b"evenclip text").digest()
