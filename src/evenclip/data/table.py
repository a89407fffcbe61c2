"""Anybody's table: a file or a DataFrame with a target column and a column that says who belongs to
which group.

    made = table("people.csv", target="hired", group="sex")
    evenclip.fit(evenclip.models.mlp(len(made.encoder.features), len(made.encoder.classes)),
    made.splits.train)

| | |
|---|---|
| files | .csv and .txt (separated by comma, semicolon, tab or bar), .tsv, .parquet, .feather; text in UTF-8 |
| missing | empty, NA, N/A, n/a, NaN, nan, NULL, null, <NA>, #N/A and ? |
| split | 64 % training, 16 % validation, 20 % test; with a given test set 80 % training, 20 % validation |
| features | the other columns, as `evenclip.data.columns` and `evenclip.data.encoder` say, by the training rows alone |
| groups | the values of the group column, bins of a number with more than 20 values, combinations of several columns |

Rows without a target are left out; rows without a group are a group of their own, "missing".
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from evenclip.data import columns
from evenclip.data import schema as schemas
from evenclip.data.columns import Column, listed
from evenclip.data.dataset import Dataset, Splits
from evenclip.data.encoder import (
    JOIN,
    MOST_VALUES,
    Codes,
    Encoder,
    Labels,
    fit_columns,
    fit_labels,
    nearest,
    ordered,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "LEAST_TEST",
    "Encoder",
    "TableOptions",
    "Tabled",
    "groups_of",
    "labels_of",
    "read",
    "table",
]

SEPARATORS = ",;\t|"
ABSENT = ("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "<NA>", "#N/A", "?")
SUFFIXES = (".csv", ".txt", ".tsv", ".parquet", ".feather")
SHARES = (0.64, 0.16)  # training, validation; the rest is for testing
LEAST_ROWS = 10
LEAST_TEST = 30  # rows of a group, below which its figures say nothing
MOST_LABELS = 200  # classes or groups; with more, the column is something else
STREAM = int.from_bytes(
    b"table", "big"
)  # so that no other user of the same seed draws the same numbers


class TooLarge(ValueError):  # noqa: N818 - reads as what it says
    """A table that does not fit in memory."""


@dataclass(frozen=True)
class Tabled:
    """A table made ready for training.

    Attributes:
        splits: training, test and validation rows.
        encoder: what made them of the raw rows; it makes the same of new ones.
        uncovered: the looks at the data that ε does not cover, each a phrase for the privacy
            report.
        notes: sentences for whoever called: what was left out, and what to doubt. They tell about
            the data.
        small: groups too small to judge: fewer than 30 test rows, or no test row of some class.
        unit: the column that says who the row is about; None where the row is the unit of privacy.
    """

    splits: Splits
    encoder: Encoder
    uncovered: tuple[str, ...]
    notes: tuple[str, ...]
    small: tuple[str, ...]
    unit: str | None = None


# --- reading ------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str], *, text: Collection[str] = ()) -> pd.DataFrame:
    """The table in a file, by its suffix: .csv, .txt, .tsv, .parquet or .feather.

    Args:
        path: the file. Texts are UTF-8; the separator is found among comma, semicolon, tab and bar;
            numbers in files that are separated by semicolons may have a decimal comma.
        text: columns to be left as they are written, where 01 is not 1.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an empty file, no rows, another encoding or suffix, or no table.
    """
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
    frame = _parsed(file, text) if suffix in (".csv", ".txt", ".tsv") else _stored(file, suffix)
    if len(frame) == 0:
        raise ValueError(f"{file} has a header and no rows; nothing can be learnt from it.")
    return frame


def _parsed(file: Path, text: Collection[str]) -> pd.DataFrame:
    """The table in a text file."""
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
        said = (
            " ".join(str(error).split())
            .removeprefix("Error tokenizing data. C error: ")
            .rstrip(".")
        )
        raise ValueError(
            f"{file} is no table ({said}); every line must have as many fields as the header, and "
            "texts with "
            "separators in them must be quoted."
        ) from None


def _dialect(file: Path) -> tuple[str, str]:
    """Separator and decimal point, from the first lines."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        head = [line for line, _ in zip(lines, range(50), strict=False) if line.strip()]
    widths = {
        separator: [len(row) for row in csv.reader(head, delimiter=separator)]
        for separator in SEPARATORS
    }
    separator = "\t" if file.suffix.lower() == ".tsv" else _separator(widths)
    names = next(csv.reader(head[:1], delimiter=separator), [])
    twice = [name for name in names if name and names.count(name) > 1]
    if twice:
        raise ValueError(f"{file} has two columns {twice[0]!r}; rename one of them.")
    if any(
        width > widths[separator][0] for width in widths[separator][1:2]
    ):  # pandas would take them for an index
        raise csv.Error("The first row has more fields than the header")
    if separator != ";":
        return separator, "."
    body = ";".join(head[1:]).replace('"', "").replace("\n", ";").replace("\r", "").split(";")
    comma, point = (
        any(re.fullmatch(rf"-?\d+{mark}\d+", field) for field in body) for mark in (",", r"\.")
    )
    return separator, "," if comma and not point else "."


def _separator(widths: dict[str, list[int]]) -> str:
    """The one that cuts the first lines evenly into the most fields, or else the header; the comma
    in doubt.
    """
    even = {
        separator: found[0]
        for separator, found in widths.items()
        if len(set(found)) == 1 and found[0] > 1
    }
    header = even or {separator: found[0] for separator, found in widths.items() if found}
    return max(header, key=lambda separator: header[separator], default=",")


def _undecodable(file: Path) -> tuple[int, int]:
    """The first byte that is no UTF-8, and its line."""
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
    """The table in a Parquet or Feather file."""
    import pandas as pd

    try:
        if suffix == ".parquet":
            _check_room(file)
        return pd.read_parquet(file) if suffix == ".parquet" else pd.read_feather(file)
    except TooLarge:
        raise
    except (ValueError, OSError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{file} is no {suffix[1:].capitalize()} file ({said}); write it again."
        ) from error


def _check_room(file: Path) -> None:
    """Raise for a Parquet file that would take more than half of the memory there is."""
    from pyarrow import parquet as pq

    metadata, available = pq.read_metadata(file), _available()
    stored = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    needed = max(
        stored, 8 * metadata.num_rows * metadata.num_columns
    )  # a value takes 8 bytes, however few it is stored in
    if available is not None and needed > available / 2:
        raise TooLarge(
            f"{file} has {metadata.num_rows} rows, which take about {_size(needed)} of memory as "
            "a table, and "
            f"{_size(available)} are available; train on it without reading it whole, with "
            "evenclip.data.parquet and "
            "evenclip.fit, or take a sample of its rows."
        )


def _available() -> int | None:
    """Bytes of memory that are free or can be; None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(
        (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None
    )


def _size(size: float) -> str:
    """In words."""
    return (
        f"{size / 1e9:.1f} GB"
        if size >= 1e9
        else f"{size / 1e6:.1f} MB"
        if size >= 1e6
        else f"{size / 1e3:.0f} kB"
    )


# --- tables -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableOptions:
    """How a table is made ready for training.

    Attributes:
        test: a test set of its own, file or DataFrame; the source is then split 80/20 into training
            and validation.
        schema: public ranges and categories (see `evenclip.data.schema`), or the file they are in.
            Nothing is then fitted on the data.
        keep: columns that are used although they look useless.
        drop: columns that are not used.
        exclude_group: whether the protected columns are kept out of the features.
        group_bins: number of groups that a numeric group column with more than 20 values is cut
            into.
        unit: the column that says whom a row is about: one row per person is kept, so that a record
            is a person.
    """

    test: str | os.PathLike[str] | pd.DataFrame | None = None
    schema: dict[str, Any] | str | os.PathLike[str] | None = None
    keep: Sequence[str] = ()
    drop: Sequence[str] = ()
    exclude_group: bool = False
    group_bins: int | None = None
    unit: str | None = None

    def __post_init__(self) -> None:
        if self.group_bins is not None and (
            self.group_bins != int(self.group_bins) or self.group_bins < 2
        ):
            raise ValueError(
                f"group_bins is {self.group_bins}; it must be a whole number of at least 2."
            )


def table(
    source: str | os.PathLike[str] | pd.DataFrame,
    *,
    target: str,
    group: str | Sequence[str],
    seed: int = 0,
    **options: Any,
) -> Tabled:
    """A table made ready for training: split, encoded, with classes and groups.

    Args:
        source: a file (see `read`) or a DataFrame.
        target: the column to predict; two or more classes.
        group: the protected column, or several, whose combinations are the groups.
        seed: decides the split, and with `unit` which row of a person is kept.
        **options: fields of `TableOptions` by name: test, schema, keep, drop, exclude_group,
            group_bins, unit.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: there is no such option.
        ValueError: no such column, one class, one group, a target that is a number, rows that do
            not fit the schema, and what `read` refuses.
    """
    if isinstance(seed, bool) or seed != int(seed) or seed < 0:
        raise ValueError(f"seed is {seed}; it must be a whole number of at least 0.")
    chosen = _chosen(options)
    schema, keep, drop, unit = chosen.schema, chosen.keep, chosen.drop, chosen.unit
    group = (group,) if isinstance(group, str) else tuple(group)
    plain = schemas.load(schema) if isinstance(schema, str | os.PathLike) else schema
    entries = None if plain is None else schemas.validated(plain)["columns"]
    frame, name = _frame(source, "The table", entries or {})
    asked = None if chosen.test is None else _frame(chosen.test, "The test set", entries or {})[0]
    frames = [frame] if asked is None else [frame, asked]
    for each, where in zip(frames, (name, "the test set"), strict=False):
        _check_names(each, where, target, group, (keep, drop, () if unit is None else (unit,)))
    notes = [note for each in frames if plain is not None for note in schemas.check(plain, each)]
    rows, said = _rows(frames, target, unit, seed)
    notes += said
    unused = {target, unit, *drop, *(group if chosen.exclude_group else ())}
    used = [each for each in frame.columns if each not in unused]
    found, uncovered, said = _columns(frame, rows.train, used, keep, entries)
    notes += said
    everyone = [
        (each, _with_target(each, target, "", [])) for each in frames
    ]  # whatever the seed, and the unit
    labels, looked = labels_of(everyone, target, group, chosen.group_bins, entries or {})
    uncovered += looked
    if unit is not None:
        uncovered.append(f"the choice of one row for each person, by the column {unit!r}")
    encoder = Encoder(found, labels[0], labels[1:], groups_of(everyone, labels[1:], entries or {}))
    splits = Splits(
        train=_dataset(encoder, frame, rows.train, name),
        test=_dataset(encoder, frames[-1], rows.test, name),
        validation=_dataset(encoder, frame, rows.validation, name),
    )
    small = _small(splits.test)
    return Tabled(splits, encoder, tuple(uncovered), (*notes, *_doubts(splits, small)), small, unit)


def _chosen(options: Mapping[str, Any]) -> TableOptions:
    """The options that were given by name."""
    known = [field.name for field in fields(TableOptions)]
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise TypeError(
            f"There is no option {unknown!r} of a table; the options are {', '.join(known)}."
        )
    return TableOptions(**options)


class _Rows(NamedTuple):
    """Positions in the source; those of the test rows in the test set, where one was given."""

    train: Codes
    validation: Codes
    test: Codes


def _frame(
    source: str | os.PathLike[str] | pd.DataFrame, where: str, entries: dict[str, Any]
) -> tuple[pd.DataFrame, str]:
    """The rows, and a name for them."""
    import pandas as pd

    if not isinstance(source, pd.DataFrame):
        if not isinstance(source, str | os.PathLike):
            raise TypeError(
                f"{where} is a {type(source).__name__}; give the path of a file or a pandas "
                "DataFrame."
            )
        texts = [name for name, entry in entries.items() if entry["kind"] == "category"]
        return read(source, text=texts), Path(source).name
    if not all(isinstance(name, str) for name in source.columns):
        source = source.rename(columns=str)
    twice = source.columns[source.columns.duplicated()]
    if len(twice):
        raise ValueError(f"{where} has two columns {twice[0]!r}; rename one of them.")
    if len(source) == 0:
        raise ValueError(f"{where} has no rows; nothing can be learnt from it.")
    return source, "the table"


def _check_names(
    frame: pd.DataFrame,
    where: str,
    target: str,
    group: tuple[str, ...],
    others: tuple[Sequence[str], ...],
) -> None:
    """Raise for a column that is not there, or is asked to be two things."""
    if not group:
        raise ValueError("group names no column; name the one whose groups are compared.")
    for name in (target, *group, *(each for names in others for each in names)):
        if name not in frame.columns:
            raise ValueError(
                f"There is no column {name!r} in {where}{nearest(name, frame.columns)} "
                f"its columns are {listed(list(frame.columns), 20)}."
            )
    keep, drop, unit = others
    if target in group:
        raise ValueError(
            f"target and group are both {target!r}; predict one column and compare the groups of "
            "another."
        )
    if len(set(group)) < len(group):
        raise ValueError(f"group names a column twice, {listed(group, 20)}; name each once.")
    if target in (*drop, *unit):
        raise ValueError(
            f"The column {target!r} is the target; it can neither be dropped nor be the unit."
        )
    both = [name for name in keep if name in drop]
    if both:
        raise ValueError(f"The column {both[0]!r} is to be kept and to be dropped; choose one.")


# --- rows ---------------------------------------------------------------------------------------


def _rows(
    frames: list[pd.DataFrame], target: str, unit: str | None, seed: int
) -> tuple[_Rows, list[str]]:
    """Which rows are for what; notes on those that are left out."""
    stream = np.random.Generator(np.random.PCG64(np.random.SeedSequence([int(seed), STREAM])))
    notes: list[str] = []
    kept = [
        _with_target(frame, target, what, notes)
        for frame, what in zip(frames, ("", "test "), strict=False)
    ]
    rows = stream.permutation(kept[0])
    if unit is not None:
        rows = _one_each(frames[0][unit], unit, rows, notes)
    if len(rows) < LEAST_ROWS:
        raise ValueError(
            f"There are {len(rows)} rows to learn from and to test on; at least {LEAST_ROWS} are "
            "needed."
        )
    shares = SHARES if len(frames) == 1 else (0.8, 0.2)
    ends = np.round(np.cumsum(shares) * len(rows)).astype(int)
    train, validation, test = (np.sort(part) for part in np.split(rows, ends))
    return _Rows(train, validation, test if len(frames) == 1 else kept[1]), notes


def _with_target(frame: pd.DataFrame, target: str, what: str, notes: list[str]) -> Codes:
    """The rows that have a target."""
    codes = columns.factor(frame[target]).codes
    kept = np.flatnonzero(codes >= 0)
    if len(kept) == 0:
        raise ValueError(
            f"The target {target!r} is missing in every {what}row; choose another column."
        )
    if len(kept) < len(frame):
        notes.append(
            f"{len(frame) - len(kept)} of {len(frame)} {what}rows have no {target!r} and are left "
            "out."
        )
    return kept


def _one_each(series: pd.Series, unit: str, rows: Codes, notes: list[str]) -> Codes:
    """Of every person the row that comes first in this (random) order; rows about nobody are left
    out.
    """
    codes = columns.factor(series).codes[rows]
    known = codes >= 0
    _, first = np.unique(codes[known], return_index=True)
    kept = rows[known][np.sort(first)]
    notes.append(
        f"One row for each of the {len(kept)} persons in {unit!r} is kept, "
        f"{len(rows) - len(kept)} rows are left out"
        + (f", {int((~known).sum())} of them about nobody." if not known.all() else ".")
    )
    return kept


# --- columns, classes, groups -------------------------------------------------------------------


def _columns(
    frame: pd.DataFrame,
    rows: Codes,
    used: list[str],
    keep: Sequence[str],
    entries: dict[str, Any] | None,
) -> tuple[tuple[Column, ...], list[str], list[str]]:
    """How columns become features; what ε does not cover in that; notes."""
    if entries is None:
        found, notes = fit_columns(frame, rows, used, keep)
        uncovered = [
            "the encoder (columns used, categories, means and deviations), fitted on the training "
            "rows"
        ]
    else:
        named = [name for name in used if entries.get(name, {"kind": "ignore"})["kind"] != "ignore"]
        found = [schemas.column(name, entries[name]) for name in named]
        unnamed = [name for name in used if name not in entries]
        notes = [f"The schema does not name {listed(unnamed, 20)}: not used."] if unnamed else []
        uncovered = ["a check that the rows fit the schema, which only ever stops training"]
    if not found:
        left = f" ({' '.join(notes)})" if notes else ""
        raise ValueError(
            f"No column is left to learn from{left}; keep some of those that were left out, or "
            "add some."
        )
    return tuple(found), uncovered, notes


def labels_of(
    used: list[tuple[pd.DataFrame, Codes]], target: str, group: tuple[str, ...], bins: int | None,
    entries: dict[str, Any],
) -> tuple[tuple[Labels, ...], list[str]]:  # fmt: skip
    """The classes and each protected column's groups; what ε does not cover in them."""
    for name in (target, *group):
        if entries.get(name, {}).get("other", False):
            raise ValueError(
                f'The schema gives {name!r} "other": true; classes and groups must all be listed.'
            )
    classes, looked = _classes(_joined(used, target), entries.get(target))
    found, uncovered = [classes], looked
    for name in group:
        labels, access = fit_labels(_joined(used, name), bins, entries.get(name))
        found.append(labels)
        uncovered += [] if access is None else [access]
    return tuple(found), uncovered


def _joined(used: list[tuple[pd.DataFrame, Codes]], name: str) -> pd.Series:
    """One column of all rows that are used."""
    import pandas as pd

    parts = [frame[name].iloc[rows] for frame, rows in used]
    return parts[0] if len(parts) == 1 else pd.concat(parts)


def _classes(series: pd.Series, entry: dict[str, Any] | None) -> tuple[Labels, list[str]]:
    """The classes of the target; what ε does not cover in them."""
    name = str(series.name)
    if entry is not None and entry["kind"] in ("category", "boolean"):
        public = entry["values"] if entry["kind"] == "category" else ("False", "True")
        return Labels(name, tuple(public)), []
    names = columns.factor(series).names
    numeric = columns.kind_of(series).name == "number"
    if numeric and len(names) > MOST_VALUES:
        raise ValueError(
            f"The target {name!r} is a number with {len(names)} different values; this is "
            "classification, with at most "
            f"{MOST_VALUES} numbers as classes: cut it into classes first (for example income > "
            "50000)."
        )
    if len(names) > MOST_LABELS:
        raise ValueError(
            f"The target {name!r} has {len(names)} different values, more than {MOST_LABELS} "
            "classes; "
            "is it the right column?"
        )
    if len(names) < 2:
        raise ValueError(
            f"The target {name!r} has one class only, {names[0]!r}; there is nothing to learn."
        )
    return Labels(name, tuple(ordered(names))), [
        f"the names of the classes of {name!r}, which are those found in the data"
    ]


def groups_of(
    used: list[tuple[pd.DataFrame, Codes]], labels: tuple[Labels, ...], entries: dict[str, Any]
) -> tuple[str, ...]:
    """The combinations of labels that occur; all of them where all labels are public."""
    sizes = tuple(len(each.names) for each in labels)
    if all(each.column in entries for each in labels):
        places = np.arange(math.prod(sizes))
    else:
        codes = tuple(each.of(_joined(used, each.column)) for each in labels)
        places = np.unique(np.ravel_multi_index(codes, sizes))
    what = JOIN.join(each.column for each in labels)
    if len(places) > MOST_LABELS:
        raise ValueError(
            f"The group {what!r} has {len(places)} different values, more than {MOST_LABELS} "
            "groups; is it the right "
            "column?"
        )
    parts = zip(*np.unravel_index(places, sizes), strict=True)
    names = [
        JOIN.join(each.names[code] for each, code in zip(labels, part, strict=True))
        for part in parts
    ]
    if len(names) < 2:
        raise ValueError(
            f"All rows belong to one group of {what!r}, {names[0]!r}; choose a column with two or "
            "more."
        )
    return tuple(names)


# --- what comes out -----------------------------------------------------------------------------


def _dataset(encoder: Encoder, frame: pd.DataFrame, rows: Codes, name: str) -> Dataset:
    """These rows as tensors."""
    return Dataset(
        encoder.encode(frame, rows),
        encoder.target_of(frame, rows),
        encoder.group_of(frame, rows),
        group_names=encoder.groups,
        class_names=encoder.classes,
        name=name,
    )


def _small(test: Dataset) -> tuple[str, ...]:
    """The groups with too few test rows, or none of some class."""
    assert test.group is not None
    K, classes = len(test.group_names), len(test.class_names)
    counts = torch.bincount(test.group * classes + test.y, minlength=K * classes).view(
        K, classes
    )  # [group, class]
    small = (counts.sum(1) < LEAST_TEST) | (counts == 0).any(1)
    return tuple(
        name for name, is_small in zip(test.group_names, small.tolist(), strict=True) if is_small
    )


def _doubts(splits: Splits, small: tuple[str, ...]) -> list[str]:
    """Notes on groups and classes with too few rows."""
    notes = []
    if small:
        notes.append(
            f"Too small to judge: {listed(small, 20)} (fewer than {LEAST_TEST} test rows, or none "
            "of some class)."
        )
    counts = torch.bincount(splits.train.y, minlength=len(splits.train.class_names)).tolist()
    absent = [
        name for name, count in zip(splits.train.class_names, counts, strict=True) if count == 0
    ]
    if absent:
        notes.append(f"No training row is of class {listed(absent, 20)}; it cannot be learnt.")
    return notes
