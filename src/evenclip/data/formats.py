"""Reading of tables from text, Parquet and Feather files."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenclip.arguments import check_kinds

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TooLarge", "column_names", "read"]

SEPARATORS = ",;\t|"
ABSENT = ("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "<NA>", "#N/A", "?")
TEXTS = (".csv", ".txt", ".tsv")
SUFFIXES = (*TEXTS, ".parquet", ".feather")


class TooLarge(ValueError):  # noqa: N818 - the name states the problem
    """The table does not fit in memory."""


def read(path: str | os.PathLike[str], *, text: Collection[str] = ()) -> pd.DataFrame:
    """Read a table from a .csv, .txt, .tsv, .parquet or .feather file.

    Args:
        path: the file. Text is UTF-8; the separator (comma, semicolon, tab or bar) is detected;
            numbers in files that are separated by semicolons may have a decimal comma.
        text: columns that are read as text, so that 01 is not 1.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is empty, has no rows, another encoding or suffix, or is not a table.
    """
    check_kinds(read, {"path": path, "text": text})
    file, suffix = _checked(path)
    frame = _parsed(file, text) if suffix in TEXTS else _stored(file, suffix)
    if len(frame) == 0:
        raise ValueError(f"{file} has a header and no rows; nothing can be learnt from it.")
    return frame


def column_names(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the names of the columns of a table, without reading a row of it.

    Of a text file, only the first line that is not blank is looked at, which must be the header. Of
    a Parquet or Feather file, only the names in its schema are.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is empty, has another suffix, or no header in one line of UTF-8.
    """
    file, suffix = _checked(path)
    return _header(file) if suffix in TEXTS else _stored_names(file, suffix)


def _checked(path: str | os.PathLike[str]) -> tuple[Path, str]:
    """Return the file and its suffix; raise if it cannot be a table."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is not there{' (it is a folder)' if file.is_dir() else ''}; give a file."
        )
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(
            f"{file} ends in {suffix!r}; tables are read from {', '.join(SUFFIXES)}: rename or "
            "convert the file."
        )
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty; it must hold a header and rows.")
    return file, suffix


def _header(file: Path) -> tuple[str, ...]:
    """Return the names in the header of a text file, as `read` gives them."""
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
        return next(csv.reader([line], delimiter=separator, skipinitialspace=True, strict=True), [])
    except csv.Error:
        return []


def _check_distinct(file: Path, names: Sequence[str]) -> None:
    """Raise if two columns have one name."""
    twice = [name for name in names if name and names.count(name) > 1]
    if twice:
        raise ValueError(f"{file} has two columns {twice[0]!r}; rename one of them.")


def _parsed(file: Path, text: Collection[str]) -> pd.DataFrame:
    """Read a text file."""
    import pandas as pd

    try:
        separator, decimal = _dialect(file)
        return pd.read_csv(
            file,
            sep=separator,
            decimal=decimal,
            encoding="utf-8-sig",
            keep_default_na=False,
            na_values=ABSENT,
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
    except (pd.errors.ParserError, csv.Error) as error:
        reason = " ".join(str(error).split())
        reason = reason.removeprefix("Error tokenizing data. C error: ").rstrip(".")
        raise ValueError(
            f"{file} is not a table ({reason}); every line must have as many fields as the header, "
            "and texts with separators in them must be quoted."
        ) from None


def _precision(version: str) -> dict[str, Any]:
    """Return the option for exact numbers, so that they equal the same numbers in a text column.

    pandas 3.1 reads them exactly by default, and warns of the option.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    return {} if (major, minor) >= (3, 1) else {"float_precision": "round_trip"}


def _dialect(file: Path) -> tuple[str, str]:
    """Detect the separator and the decimal point from the first lines."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        head = [line for line, _ in zip(lines, range(50), strict=False) if line.strip()]
    widths = {
        separator: [len(row) for row in csv.reader(head, delimiter=separator)]
        for separator in SEPARATORS
    }
    separator = "\t" if file.suffix.lower() == ".tsv" else _separator(widths)
    _check_distinct(file, next(csv.reader(head[:1], delimiter=separator), []))
    # pandas would read the additional fields as an index.
    if any(width > widths[separator][0] for width in widths[separator][1:2]):
        raise csv.Error("The first row has more fields than the header")
    if separator != ";":
        return separator, "."
    body = ";".join(head[1:]).replace('"', "").replace("\n", ";").replace("\r", "").split(";")
    comma, point = (
        any(re.fullmatch(rf"-?\d+{mark}\d+", field) for field in body) for mark in (",", r"\.")
    )
    return separator, "," if comma and not point else "."


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


def _stored(file: Path, suffix: str) -> pd.DataFrame:
    """Read a Parquet or Feather file."""
    import pandas as pd

    try:
        if suffix == ".parquet":
            _check_room(file)
        return pd.read_parquet(file) if suffix == ".parquet" else pd.read_feather(file)
    except TooLarge:
        raise
    except (ValueError, OSError) as error:
        raise _unreadable(file, suffix, error) from error


def _stored_names(file: Path, suffix: str) -> tuple[str, ...]:
    """Return the names in the schema of a Parquet or Feather file, without those of an index."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    try:
        if suffix == ".parquet":
            schema = pq.read_schema(file)
        else:
            with pa.OSFile(str(file)) as opened:
                schema = pa.ipc.open_file(opened).schema
    except (ValueError, OSError) as error:
        raise _unreadable(file, suffix, error) from error
    indices = (schema.pandas_metadata or {}).get("index_columns", [])
    return tuple(name for name in schema.names if name not in indices)


def _unreadable(file: Path, suffix: str, error: Exception) -> ValueError:
    """Return the error for a Parquet or Feather file that cannot be read."""
    reason = " ".join(str(error).split()).rstrip(".")
    return ValueError(f"{file} is not a {suffix[1:].capitalize()} file ({reason}); write it again.")


def _check_room(file: Path) -> None:
    """Raise if a Parquet file would take more than half of the available memory."""
    from pyarrow import parquet as pq

    metadata, available = pq.read_metadata(file), _available()
    stored = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    # A value takes 8 bytes in memory, even if the file stores it in fewer.
    needed = max(stored, 8 * metadata.num_rows * metadata.num_columns)
    if available is not None and needed > available / 2:
        raise TooLarge(
            f"{file} has {metadata.num_rows} rows, which take about {_size(needed)} of memory as "
            f"a table, and {_size(available)} are available; train on it without reading it "
            "whole, with evenclip.data.parquet and evenclip.fit, or take a sample of its rows."
        )


def _available() -> int | None:
    """Return the bytes of available memory; None if the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(
        (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None
    )


def _size(size: float) -> str:
    """Format a number of bytes with a unit."""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
