"""Reading of tables from text, Parquet and Feather files."""

from __future__ import annotations

import csv
import os
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from evenclip.arguments import check_kinds, check_path
from evenclip.data.lines import check_bytes, check_lines, long_fields, short_sample
from evenclip.data.stored import TooLarge, stored, stored_names

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TooLarge", "column_names", "read", "read_noted"]

SEPARATORS = ",;\t|"
ABSENT = ("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "<NA>", "#N/A", "?")
TEXTS = (".csv", ".txt", ".tsv")
SUFFIXES = (*TEXTS, ".parquet", ".feather")


class _Dialect(NamedTuple):
    """How a text file is written."""

    separator: str
    decimal: str
    names: tuple[str, ...]
    notes: tuple[str, ...]


def read(path: str | os.PathLike[str], *, text: Collection[str] = ()) -> pd.DataFrame:
    """Read a table from a .csv, .txt, .tsv, .parquet or .feather file; warn of doubtful lines.

    Args:
        path: the file. Text is UTF-8; the separator (comma, semicolon, tab or bar) is detected;
            numbers in files that are separated by semicolons may have a decimal comma.
        text: columns that are read as text, so that 01 is not 1.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is empty, has no rows, another encoding or suffix, or is not a table.
    """
    check_kinds(read, {"path": path, "text": text})
    frame, notes = read_noted(path, text=text)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return frame


def read_noted(
    path: str | os.PathLike[str],
    *,
    text: Collection[str] = (),
    values: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> tuple[pd.DataFrame, list[str]]:
    """Read a table, as `read` does; return it with notes on what is doubtful in the file.

    Args:
        path: the file.
        text: columns that are read as text.
        values: known categories of columns. One that is spelt as a missing value, such as NA, is
            not missing there.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: as for `read`.
    """
    file, suffix = _checked(path)
    frame, notes = _parsed(file, text, values) if suffix in TEXTS else (stored(file, suffix), [])
    if len(frame) == 0:
        raise ValueError(f"{file} has a header and no rows; give at least one row.")
    return frame, [f"{file.name}: {note}" for note in notes]


def column_names(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the names of the columns of a table, without reading a row of it.

    Of a text file, only the first line that is not blank is looked at, which must be the header. Of
    a Parquet or Feather file, only the names in its schema are.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is empty, has another suffix, or no header in one line of UTF-8.
    """
    file, suffix = _checked(path)
    return _header(file) if suffix in TEXTS else stored_names(file, suffix)


def _checked(path: str | os.PathLike[str]) -> tuple[Path, str]:
    """Return the file and its suffix; raise if it cannot be a table."""
    check_path("path", path)
    file = Path(path)
    if not file.is_file():
        why = " (it is a folder)" if file.is_dir() else ""
        if file.exists() and not why:
            raise ValueError(f"{file} is not an ordinary file; write its content into a file.")
        raise FileNotFoundError(f"{file} is not there{why}; give a file.")
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(
            f"{file} ends in {suffix!r}; tables are read from {', '.join(SUFFIXES)}: rename or "
            "convert the file."
        )
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty; it must hold a header and rows.")
    if not os.access(file, os.R_OK):
        raise PermissionError(f"{file} cannot be read; ask its owner for permission to read it.")
    return file, suffix


def _header(file: Path) -> tuple[str, ...]:
    """Return the names in the header of a text file, as `read` gives them."""
    check_bytes(file, beginning=True)
    with file.open("rb") as lines:
        line = next((line for line in lines if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        raise ValueError(f"The header of {file} is not UTF-8; save the file as UTF-8.") from None
    rows = {separator: _fields(text, separator) for separator in SEPARATORS}
    widths = {separator: [len(row)] for separator, row in rows.items() if row}
    names = rows["\t" if file.suffix.lower() == ".tsv" else _separator(widths)]
    if not names:
        raise ValueError(
            f"{file} has no header in one line, with every quote closed; write the names of the "
            "columns into its first line."
        )
    _check_distinct(file, names)
    return tuple(name or f"Unnamed: {place}" for place, name in enumerate(names))


def _fields(line: str, separator: str) -> list[str]:
    """Return the fields of one line; none if a quote is not closed."""
    try:
        with long_fields():
            rows = csv.reader([line], delimiter=separator, skipinitialspace=True, strict=True)
            return next(rows, [])
    except csv.Error:
        return []


def _check_distinct(file: Path, names: Sequence[str]) -> None:
    """Raise if two columns have one name."""
    twice = [name for name in names if name and names.count(name) > 1]
    if twice:
        raise ValueError(f"{file} has two columns {twice[0]!r}; rename one of them.")


def _parsed(
    file: Path, text: Collection[str], values: Mapping[str, Collection[str]]
) -> tuple[pd.DataFrame, list[str]]:
    """Read a text file; return it with notes."""
    import pandas as pd

    check_bytes(file)
    try:
        dialect = _dialect(file)
        lines = check_lines(file, dialect.separator)
        frame = pd.read_csv(
            file,
            sep=dialect.separator,
            decimal=dialect.decimal,
            encoding="utf-8-sig",
            keep_default_na=False,
            na_values=_absent(dialect.names, values),
            skipinitialspace=True,
            low_memory=False,
            **_precision(pd.__version__),
            dtype=dict.fromkeys(text, str),
        )
    except UnicodeDecodeError:
        offset, line = _undecodable(file)
        raise ValueError(
            f"{file} is not UTF-8 (byte {offset}, in line {line}); convert it, for example with "
            f"`iconv -f LATIN1 -t UTF-8 {file.name} > utf8.csv`, naming the encoding it was saved "
            "in."
        ) from None
    except pd.errors.EmptyDataError:
        raise ValueError(f"{file} is empty; it must hold a header and rows.") from None
    except (pd.errors.ParserError, csv.Error, OverflowError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{file} is not a table ({reason}); every line must have as many fields as the header, "
            "and texts with separators in them must be quoted."
        ) from error
    if len(frame) != lines.rows:
        raise ValueError(
            f"{file} has {lines.rows} rows and is read as {len(frame)}; remove stray quotes and "
            "carriage returns."
        )
    return frame, [*dialect.notes, *lines.notes]


def _absent(names: Sequence[str], values: Mapping[str, Collection[str]]) -> Any:
    """Return the texts that are missing values, by column if categories are spelt so."""
    if not any(set(ABSENT) & set(known) for known in values.values()):
        return ABSENT
    return {
        name: [text for text in ABSENT if not text or text not in values.get(name, ())]
        for name in (name or f"Unnamed: {place}" for place, name in enumerate(names))
    }


def _precision(version: str) -> dict[str, Any]:
    """Return the option for exact numbers, so that they equal the same numbers in a text column.

    pandas 3.1 reads them exactly by default, and warns of the option.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    return {} if (major, minor) >= (3, 1) else {"float_precision": "round_trip"}


def _dialect(file: Path) -> _Dialect:
    """Detect the separator and the decimal point from the first lines."""
    with file.open(encoding="utf-8-sig", newline="") as lines, long_fields():
        head = short_sample(lines, 50)
        rows = {
            separator: list(csv.reader(head, delimiter=separator, skipinitialspace=True))
            for separator in SEPARATORS
        }
    widths = {separator: [len(row) for row in rows[separator]] for separator in SEPARATORS}
    separator = "\t" if file.suffix.lower() == ".tsv" else _separator(widths)
    names = tuple(rows[separator][0]) if rows[separator] else ()
    _check_distinct(file, names)
    if separator != ";":
        return _Dialect(separator, ".", names, ())
    body = [field.strip() for row in rows[separator][1:] for field in row]
    commas, points = (
        [field for field in body if re.fullmatch(rf"-?\d+{mark}\d+", field)]
        for mark in (",", r"\.")
    )
    if points or not commas:
        return _Dialect(separator, ".", names, ())
    thousands = all(re.fullmatch(r"-?[1-9]\d{0,2},\d{3}", field) for field in commas)
    note = (
        f"Its commas are read as decimal commas, {commas[0]} as {commas[0].replace(',', '.')}; "
        "if they separate thousands, remove them."
    )
    return _Dialect(separator, ",", names, (note,) if thousands else ())


def _separator(widths: dict[str, list[int]]) -> str:
    """Choose the separator that splits the first lines evenly into the most fields.

    If none splits them evenly, only the header counts; the default is the comma.
    """
    even = {
        separator: counts[0]
        for separator, counts in widths.items()
        if len(set(counts)) == 1 and counts[0] > 1
    }
    header = even or {separator: counts[0] for separator, counts in widths.items() if counts}
    return max(header, key=lambda separator: header[separator], default=",")


def _undecodable(file: Path) -> tuple[int, int]:
    """Return the position and the line of the first byte that is not UTF-8."""
    before = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):  # a line break is never part of another character
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return before + error.start, number
            before += len(line)
    raise AssertionError(f"{file} is UTF-8 after all")
