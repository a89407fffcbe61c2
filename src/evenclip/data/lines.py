"""The lines of a text file, checked before pandas reads them.

pandas fills lines with too few fields, lets a quote that is not closed swallow the lines after it,
skips blank lines and ends texts at NUL bytes, all in silence. Here, a file whose lines do not all
have the fields of the header is refused with the number of the line, and what is legal and
doubtful, such as a field of several lines, is noted.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = ["Lines", "check_bytes", "check_lines", "long_fields", "short_sample"]

_FORMATS = {
    b"\x1f\x8b": "compressed with gzip; unpack it with `gunzip`",
    b"PK\x03\x04": "a ZIP archive or a spreadsheet; unpack it, or export the sheet as CSV",
    b"BZh": "compressed with bzip2; unpack it with `bunzip2`",
    b"\xfd7zXZ": "compressed with xz; unpack it with `unxz`",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it with `unzstd`",
    b"PAR1": "a Parquet file; rename it to .parquet",
    b"ARROW1": "a Feather file; rename it to .feather",
    b"\xff\xfe": "UTF-16; convert it, for example with `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "UTF-16; convert it, for example with `iconv -f UTF-16 -t UTF-8`",
}
_BLOCK = 2**20


class Lines(NamedTuple):
    """The rows of a text file below its header."""

    rows: int
    notes: tuple[str, ...]


class _Row(NamedTuple):
    first: int  # number of its first line
    last: int
    fields: list[str]


@contextmanager
def long_fields() -> Iterator[None]:
    """Allow fields of any length; the limit of the csv module is one for the whole process."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def check_bytes(file: Path, *, beginning: bool = False) -> None:
    """Raise if a text file is of another format or holds NUL bytes.

    Args:
        file: the file.
        beginning: whether to look at its first bytes only, which name the format.

    Raises:
        ValueError: it is; the message names the format, or the line.
    """
    with file.open("rb") as content:
        start = content.read(8)
        for magic, what in _FORMATS.items():
            if start.startswith(magic):
                raise ValueError(f"{file} is {what}.")
        if beginning:
            return
        content.seek(0)
        line = 1
        while block := content.read(_BLOCK):
            place = block.find(b"\0")
            if place >= 0:
                line += block.count(b"\n", 0, place)
                raise ValueError(
                    f"{file} has a NUL byte in line {line}; it is damaged or not UTF-8: export it "
                    "again as UTF-8."
                )
            line += block.count(b"\n")


def check_lines(file: Path, separator: str) -> Lines:
    """Return the number of rows and notes; raise unless all have the fields of the header.

    Raises:
        UnicodeDecodeError: the file is not UTF-8.
        ValueError: a line has too many or too few fields, or a quote is not closed, or not at the
            end of its field.
    """
    plain = _plain(file, separator)
    if plain is not None:
        return plain
    with file.open(encoding="utf-8-sig", newline="") as lines, long_fields():
        return _quoted(file, separator, _rows(file, csv.reader(
            lines, delimiter=separator, skipinitialspace=True, strict=True
        )))  # fmt: skip


def _plain(file: Path, separator: str) -> Lines | None:
    """Check a file without quotes by counting separators; None if it has quotes."""
    mark, width, count, blank, between = separator.encode(), 0, 0, 0, 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if b'"' in line or (b"\r" in line and line.find(b"\r") < len(line) - 2):
                return None
            fields = line.count(mark) + 1
            if fields != (width or fields) or fields == 1:
                if not line.strip(b"\xef\xbb\xbf \t\r\n"):
                    blank += width > 0
                    continue
                if width:
                    _check_width(file, fields, width, number, number)
            count, between = count + (width > 0), blank
            width = width or fields
    return Lines(count, _blank(between))


def _rows(file: Path, rows: Iterator[list[str]]) -> Iterator[_Row]:
    """Yield the rows with their lines."""
    last = 0
    try:
        for fields in rows:
            first, last = last + 1, rows.line_num  # type: ignore[attr-defined]
            yield _Row(first, last, fields)
    except csv.Error as error:
        reason = (
            f"the quote that opens there is not closed, and takes in {rows.line_num - last} lines"  # type: ignore[attr-defined]
            if "unexpected end" in str(error)
            else "a quote is closed before the end of its field"
        )
        raise ValueError(
            f"{file} is not a table: in the row that begins in line {last + 1}, {reason}; double "
            'the quotes inside of quoted texts (""), and remove stray ones.'
        ) from error


def _quoted(file: Path, separator: str, rows: Iterator[_Row]) -> Lines:
    """Check the rows of a file with quotes."""
    width, count, blank, between = 0, 0, 0, 0
    tall: list[_Row] = []
    single: list[int] = []
    for row in rows:
        if not row.fields or (len(row.fields) == 1 != width and not row.fields[0].strip()):
            blank += width > 0
            continue
        if width:
            _check_width(file, len(row.fields), width, row.first, row.last)
        count, between = count + (width > 0), blank
        width = width or len(row.fields)
        if any(field.count('"') % 2 for field in row.fields):
            single.append(row.first)
        if row.last > row.first:
            _check_swallowed(file, separator, row)
            tall.append(row)
    notes = _blank(between)
    if tall:
        longest = max(tall, key=lambda row: row.last - row.first)
        notes += (
            f"{len(tall)} rows have a quoted text of several lines, the longest of "
            f"{longest.last - longest.first + 1} lines from line {longest.first}; if a quote is "
            "missing there, correct it.",
        )
    if single:
        notes += (
            f"{len(single)} rows have a text with a single quote mark, the first in line "
            f"{single[0]}; if it is stray, remove it.",
        )
    return Lines(count, notes)


def _check_width(file: Path, fields: int, width: int, first: int, last: int) -> None:
    """Raise unless a row has the fields of the header."""
    if fields != width:
        where = f"line {first}" if first == last else f"lines {first} to {last}"
        raise ValueError(
            f"{file} is not a table ({_fields(fields)} in {where}, and {width} in the header); "
            "every line must have as many fields as the header, and texts with separators in them "
            "must be quoted."
        )


def _check_swallowed(file: Path, separator: str, row: _Row) -> None:
    """Raise if a field of several lines has the separators of as many rows."""
    each = len(row.fields) - 1
    for field in row.fields:
        breaks = len(field.splitlines()) - 1
        if each and breaks > 0 and field.count(separator) >= each * breaks:
            raise ValueError(
                f"{file} is not a table: a quoted text in the row that begins in line {row.first} "
                f"takes in {breaks} further rows; remove the stray quotes in lines {row.first} "
                f"to {row.last}."
            )


def _blank(count: int) -> tuple[str, ...]:
    """Return the note on blank lines between rows."""
    if not count:
        return ()
    lines = "1 blank line is" if count == 1 else f"{count} blank lines are"
    return (f"{lines} left out; rows are numbered without them.",)


def _fields(count: int) -> str:
    return "1 field" if count == 1 else f"{count} fields"


def short_sample(lines: Iterator[str], most: int) -> list[str]:
    """Return the first lines that are not blank, for the detection of the separator."""
    return [line for line, _ in zip(lines, range(most), strict=False) if line.strip()]
