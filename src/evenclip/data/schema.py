"""Schemas: public ranges and categories, with which a table is encoded without reading its rows.

A schema is a JSON file:

    {"evenclip_schema": 1,
     "columns": {
       "age":    {"kind": "number", "range": [0, 120], "missing": false},
       "since":  {"kind": "date", "range": ["1990-01-01", "2030-12-31"], "format": "ISO8601"},
       "member": {"kind": "boolean"},
       "job":    {"kind": "category", "values": ["baker", "miller"], "other": true},
       "id":     {"kind": "ignore"}}}

`range` is mapped to [−1, 1]; values outside count as its nearer end. `missing` (default true) says
whether values may be missing, and gives them an indicator. `other` (default false) gives one
indicator to all values that are not listed; without it such a value in the data is refused. Columns
that the schema does not name are not used. The listed values of the target and of the group are the
public names of classes and groups.

Where the values come from is stated by the schema itself. `propose` reads them from rows and adds a
"warning"; while it is there, with any content, everything that uses the schema says that its values
were read from the data and that ε does not cover this. Removing the warning is the user's
declaration that every value is public, which no program can check. `evenclip.data.skeleton` makes a
schema from the names of columns alone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evenclip import files
from evenclip.arguments import check_path
from evenclip.data import columns
from evenclip.data.columns import Category, Column, Date, Flag, Number, listed
from evenclip.data.skeleton import check_filled
from evenclip.files import strict

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "FITS",
    "READ",
    "accesses",
    "check",
    "column",
    "count_outside",
    "load",
    "note_outside",
    "notes",
    "propose",
    "validated",
]

VERSION = 1
WARNING = (
    "Every range and value below was read from the data, which ε does not cover. While this line "
    "is here, every privacy statement says so. Replace them by what is publicly known (the range "
    "of the form's field, the list of the register), and then remove this line: by removing it, "
    "you declare that every kind, range and value below is public. No program can check that."
)
READ = (
    'the encoder and the names in the schema, which still has its "warning": kinds, ranges, '
    "categories, classes and groups were read from the data"
)
"""Access to the data of a schema with a warning, as a phrase for the privacy report."""
FITS = "a check that the rows fit the schema, which only ever stops training"
"""Access to the data of every schema, as a phrase for the privacy report."""
NOTE = (
    'The schema still has its "warning": its ranges and values count as read from the data. '
    "Replace them by public ones and remove the warning, which declares that they are public."
)
MOST_VALUES = 50  # proposed values of a category; the others are "other"

# Required and optional fields of an entry, by kind.
FIELDS = {
    "number": ({"range"}, {"missing"}),
    "date": ({"range"}, {"format", "missing"}),
    "boolean": (set[str](), {"missing"}),
    "category": ({"values"}, {"other", "missing"}),
    "ignore": (set[str](), {"reason"}),
}


def propose(frame: pd.DataFrame) -> dict[str, Any]:
    """Propose a schema for editing, with the kinds, ranges and categories of the given rows.

    Columns without information and columns that look like identifiers are ignored, with the reason.

    >>> import pandas as pd
    >>> propose(pd.DataFrame({"age": [20, 60], "sex": ["f", "m"]}))["columns"]["age"]
    {'kind': 'number', 'range': [20, 60], 'missing': False}
    """
    entries = {str(name): _proposed(series) for name, series in frame.items()}
    return {"evenclip_schema": VERSION, "warning": WARNING, "columns": entries}


def accesses(schema: Mapping[str, Any] | None) -> list[str]:
    """Return what a schema read from the data, as phrases for the privacy report.

    >>> accesses({"evenclip_schema": 1, "columns": {}})
    []
    """
    return [READ] if schema is not None and "warning" in schema else []


def notes(schema: Mapping[str, Any] | None) -> list[str]:
    """Return remarks for the person who uses a schema."""
    return [NOTE] if accesses(schema) else []


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and validate the schema in a file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not a schema; the message says where and what to do.
    """
    file = Path(path)
    check_path("schema", file)
    try:
        read = strict.loads(files.read(file).decode("utf-8-sig"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file} is not there; write a first schema with `evenclip data schema TABLE "
            "--columns-only`."
        ) from None
    except OSError as error:
        raise type(error)(f"{file} cannot be read ({error.strerror}); name a file.") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{file} is not JSON (line {error.lineno}: {error.msg}); correct it, or write a new "
            "schema with `evenclip data schema TABLE --columns-only`."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 (byte {error.start}); save it as UTF-8.") from error
    except ValueError as error:
        raise ValueError(f"{file} is not valid ({error}); correct it.") from error
    return validated(read, str(file))


def validated(schema: Any, name: str = "The schema") -> dict[str, Any]:
    """Return the schema if it is valid.

    Raises:
        ValueError: the schema is invalid; the message refers to it as `name`.
    """
    if not isinstance(schema, dict) or not isinstance(schema.get("columns"), dict):
        raise ValueError(
            f'{name} is not valid; it must be a JSON object with "columns": '
            f'{{name: {{"kind": ...}}}}.'
        )
    if schema.get("evenclip_schema") != VERSION:
        raise ValueError(
            f'{name} has "evenclip_schema": {json.dumps(schema.get("evenclip_schema"))}; this '
            f"version of evenclip reads {VERSION}."
        )
    check_filled(schema, name)
    for key, entry in schema["columns"].items():
        _check_entry(f"{name}, column {key!r}:", entry)
    return schema


def check(schema: dict[str, Any], frame: pd.DataFrame) -> tuple[str, ...]:
    """Raise unless the rows fit the schema; return notes on values outside of their range.

    Raises:
        ValueError: a column is missing, or a value has another kind or is not among the categories.
    """
    here = {str(name): name for name in frame.columns}
    used = {
        name: entry
        for name, entry in validated(schema)["columns"].items()
        if entry["kind"] != "ignore"
    }
    absent = [name for name in used if name not in here]
    if absent:
        raise ValueError(
            f"The schema has the column {absent[0]!r} and the table does not; its columns are "
            f"{listed(list(here), 20)}: add the column, or take it out of the schema."
        )
    outside = {name: count_outside(name, entry, frame[here[name]]) for name, entry in used.items()}
    return tuple(note_outside(name, count) for name, count in outside.items() if count)


def count_outside(name: str, entry: dict[str, Any], series: pd.Series, first: int = 1) -> int:
    """Raise unless the values fit the entry; return how many lie outside of its range.

    `first` is the first row's number in messages.

    Raises:
        ValueError: a value has another kind, is not among the categories, or is missing although
            the entry allows no missing values.
    """
    kind, absent = entry["kind"], series.isna().to_numpy()
    outside = 0
    if kind == "category":
        codes, names = columns.factor(series)
        absent = codes < 0
        unlisted = [value for value in names if value not in entry["values"]]
        unknown = [] if entry.get("other", False) else unlisted
        if unknown:
            raise ValueError(
                f"Column {name!r} has the value {unknown[0]!r}, which is not among the schema's "
                f'{listed(entry["values"], 20)}; add it to them, or set "other": true.'
            )
    else:
        values = _values(kind, entry, series)
        wrong = np.isnan(values) & ~absent
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"Column {name!r} has the value {columns.text(series.iloc[row])!r} in row "
                f"{row + first}, and the schema says it is a {kind}; correct the schema or the "
                "value."
            )
        outside = _outside(entry, values) if "range" in entry else 0
    if absent.any() and not entry.get("missing", True):
        row = int(np.flatnonzero(absent)[0])
        raise ValueError(
            f"Column {name!r} has no value in row {row + first}, and the schema says that none is "
            'missing; set "missing": true, or fill it in.'
        )
    return outside


def note_outside(name: str, count: int) -> str:
    """Return a note on values outside of the range."""
    return (
        f"{count} values of {name!r} lie outside of the schema's range and count as its nearer end."
    )


def column(name: str, entry: dict[str, Any]) -> Column:
    """Return the encoding of a column with this entry."""
    missing = entry.get("missing", True)
    match entry["kind"]:
        case "number":
            return Number(name, *_halves(*entry["range"]), bound=1.0, missing=missing)
        case "date":
            low, high = _range(entry)
            form = entry.get("format", columns.ISO)
            return Date(name, form, *_halves(low, high), bound=1.0, missing=missing)
        case "boolean":
            return Flag(name, missing)
        case "category":
            return Category(name, tuple(entry["values"]), entry.get("other", False), missing)
    raise ValueError(f"The schema ignores the column {name!r}; give it another kind to use it.")


# --- proposing ----------------------------------------------------------------------------------


def _proposed(series: pd.Series) -> dict[str, Any]:
    """Propose the entry of one column."""
    reason = columns.useless(series)
    if reason is not None:
        return {"kind": "ignore", "reason": reason}
    kind = columns.kind_of(series)
    match kind.name:
        case "number":
            values = columns.numbers(series)
            ends = [_plain(float(np.nanmin(values))), _plain(float(np.nanmax(values)))]
            return {"kind": "number", "range": ends, "missing": bool(np.isnan(values).any())}
        case "date":
            values = columns.days(series, kind.format)
            days = (np.nanmin(values), np.nanmax(values))
            return {
                "kind": "date",
                "range": [str(np.datetime64(math.floor(day), "D")) for day in days],
                "format": kind.format,
                "missing": bool(np.isnan(values).any()),
            }
        case "boolean":
            return {"kind": "boolean", "missing": bool(np.isnan(columns.flags(series)).any())}
    codes, names = columns.factor(series)
    counts = np.bincount(codes[codes >= 0], minlength=len(names))
    common = [names[code] for code in np.argsort(-counts, kind="stable")[:MOST_VALUES]]
    other = len(common) < len(names)
    return {
        "kind": "category",
        "values": sorted(common),
        "other": other,
        "missing": bool((codes < 0).any()),
    }


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value


# --- checking a schema --------------------------------------------------------------------------


def _check_entry(where: str, entry: Any) -> None:
    """Raise unless the entry is valid."""
    if not isinstance(entry, dict) or entry.get("kind") not in FIELDS:
        kind = entry.get("kind") if isinstance(entry, dict) else entry
        raise ValueError(f"{where} the kind is {kind!r}; it must be one of {', '.join(FIELDS)}.")
    needed, allowed = FIELDS[entry["kind"]]
    for field in needed - entry.keys():
        raise ValueError(f'{where} a {entry["kind"]} needs "{field}"; add it.')
    for field in sorted(entry.keys() - needed - allowed - {"kind"}):
        raise ValueError(
            f'{where} a {entry["kind"]} has no "{field}"; it has {_quoted({*needed, *allowed})}.'
        )
    for field in ("missing", "other"):
        if not isinstance(entry.get(field, True), bool):
            raise ValueError(f"{where} {field} is {entry[field]!r}; it must be true or false.")
    if "range" in entry:
        _check_range(where, entry)
    if "values" in entry:
        _check_values(where, entry["values"])


def _check_range(where: str, entry: dict[str, Any]) -> None:
    """Raise unless the range has two ends, the lower one first."""
    example = "[0, 100]" if entry["kind"] == "number" else '["1990-01-01", "2030-12-31"]'
    try:
        low, high = _range(entry)
        right = math.isfinite(low) and math.isfinite(high) and low < high
    except (TypeError, ValueError):
        right = False
    if not right:
        raise ValueError(
            f"{where} the range is {json.dumps(entry['range'])}; it must be a lower and a higher "
            f"end, such as {example}."
        )


def _check_values(where: str, values: Any) -> None:
    """Raise unless the values are a list of distinct texts."""
    texts = isinstance(values, list) and all(isinstance(value, str) and value for value in values)
    if not texts or not values:
        raise ValueError(
            f'{where} the values are {values!r}; they must be a list of texts, such as ["yes", '
            '"no"].'
        )
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice:
        raise ValueError(f"{where} the value {twice[0]!r} is listed twice; list each once.")


def _range(entry: dict[str, Any]) -> tuple[float, float]:
    """Return the ends as numbers; those of dates in days since 1970, including the last day."""
    low, high = entry["range"]
    if entry["kind"] == "number":
        if isinstance(low, str | bool) or isinstance(high, str | bool):
            raise TypeError
        return float(low), float(high)
    first, last = (np.datetime64(day, "D").astype(np.int64) for day in (low, high))
    return float(first), float(last) + 1


def _halves(low: float, high: float) -> tuple[float, float]:
    """Return the centre and scale that map the range to [−1, 1]."""
    return float(low) / 2 + float(high) / 2, float(high) / 2 - float(low) / 2  # no overflow


def _quoted(fields: set[str]) -> str:
    return ", ".join(f'"{field}"' for field in sorted(fields))


# --- checking rows ------------------------------------------------------------------------------


def _values(kind: str, entry: dict[str, Any], series: pd.Series) -> columns.Values:
    if kind == "number":
        return columns.numbers(series)
    if kind == "date":
        return columns.days(series, entry.get("format", columns.ISO))
    return columns.flags(series)


def _outside(entry: dict[str, Any], values: columns.Values) -> int:
    low, high = _range(entry)
    return int(((values < low) | (values > high)).sum())
