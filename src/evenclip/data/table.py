"""Your own table: a file or a DataFrame with a target column and one or more group columns.

    made = table("people.csv", target="hired", group="sex")
    model = evenclip.models.mlp(len(made.encoder.features), len(made.encoder.classes))
    evenclip.fit(model, made.splits.train)

- Files: .csv and .txt (separated by comma, semicolon, tab or bar), .tsv, .parquet and .feather;
  text in UTF-8.
- Missing values: empty, NA, N/A, n/a, NaN, nan, NULL, null, <NA>, #N/A and ?.
- Split: 64 % training, 16 % validation, 20 % test; with a given test set 80 % training and 20 %
  validation. These are probabilities: each row (each person, with a unit) is put into a part by
  itself, see `evenclip.data.sample`.
- Features: the other columns, encoded by `evenclip.data.columns` and `evenclip.data.encoder`, which
  are fitted on the training rows alone.
- Groups: the values of the group column, bins of a number with more than 20 values, or combinations
  of several columns.

Rows without a target are left out; rows without a group form the group "missing".
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from evenclip import check
from evenclip.arguments import check_fields, check_kinds, shown
from evenclip.data import schema as schemas
from evenclip.data.alike import notes_of_columns, notes_of_numbers, notes_of_values
from evenclip.data.columns import Column, listed
from evenclip.data.dataset import Dataset, Splits
from evenclip.data.distinct import TESTED, check_distinct_files, check_distinct_tables
from evenclip.data.encoder import Encoder, fit_columns, nearest
from evenclip.data.formats import read, read_noted
from evenclip.data.labels import Codes, groups_of, labels_of
from evenclip.data.rows import split_rows, with_target

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

_PATHS = (str, os.PathLike)
LEAST_TEST = 30  # test rows of a group; with fewer, its figures are meaningless


@dataclass(frozen=True)
class Tabled:
    """A table made ready for training.

    Attributes:
        splits: training, test and validation rows.
        encoder: converts raw rows, also new ones, to features, classes and groups.
        uncovered: accesses to the data that ε does not cover, as phrases for the privacy report.
        notes: remarks for the caller on what was left out and what is doubtful. They are computed
            from the data and not private.
        small: groups too small to judge: fewer than 30 test rows, or no test row of some class.
        unit: the column that identifies a row's person; None if the row is the unit of privacy.
        declared: whether the encoder, and the names of classes and groups, are declared by a schema
            without a warning. Otherwise they were fitted on the rows or read from them, and ε holds
            for the encoder as given.
    """

    splits: Splits
    encoder: Encoder
    uncovered: tuple[str, ...]
    notes: tuple[str, ...]
    small: tuple[str, ...]
    unit: str | None = None
    declared: bool = False


# --- tables -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableOptions:
    """Options for the preparation of a table.

    Attributes:
        test: a separate test set, file or DataFrame; the source is then split 80/20 into training
            and validation.
        schema: public ranges and categories (see `evenclip.data.schema`), or the path of their
            file. Nothing is then fitted on the data. A schema with a "warning" was read from data.
        keep: columns to use although they look useless.
        drop: columns to leave out.
        exclude_group: whether to leave the protected columns out of the features.
        group_bins: number of groups that a numeric group column with more than 20 values is cut
            into.
        unit: the column that identifies a row's person. One row per person is kept, so that a
            record is a person.
        records: public number of rows with a target, or of persons with a unit; None: their real
            number, which ε does not cover. q, T and δ are computed from the training share of it.
    """

    test: str | os.PathLike[str] | pd.DataFrame | None = None
    schema: dict[str, Any] | str | os.PathLike[str] | None = None
    keep: Sequence[str] = ()
    drop: Sequence[str] = ()
    exclude_group: bool = False
    group_bins: int | None = None
    unit: str | None = None
    records: int | None = None

    def __post_init__(self) -> None:
        check_fields(TableOptions, self)
        if self.group_bins is not None:
            check.natural(group_bins=self.group_bins)
            if self.group_bins < 2:
                raise ValueError(
                    f"group_bins is {self.group_bins}; it must be a whole number of at least 2."
                )
        if self.records is not None:
            check.natural(records=self.records)


def table(
    source: str | os.PathLike[str] | pd.DataFrame,
    *,
    target: str,
    group: str | Sequence[str],
    seed: int = 0,
    **options: Any,
) -> Tabled:
    """Prepare a table for training: split it, and encode features, classes and groups.

    Args:
        source: a file (see `read`) or a DataFrame.
        target: the column to predict; two or more classes.
        group: the protected column, or several, whose combinations are the groups.
        seed: determines the split, and with `unit` which row of a person is kept.
        **options: fields of `TableOptions` by name: test, schema, keep, drop, exclude_group,
            group_bins, unit, records.

    Raises:
        FileNotFoundError: a file does not exist.
        TypeError: an option does not exist.
        ValueError: a column does not exist, there is only one class or one group, the target is a
            number, rows do not fit the schema, or `read` refuses a file.
    """
    check_kinds(table, locals())
    check.whole(seed=seed)
    chosen = _chosen(options)
    schema, keep, drop, unit = chosen.schema, chosen.keep, chosen.drop, chosen.unit
    group = (group,) if isinstance(group, str) else tuple(group)
    plain = schemas.load(schema) if isinstance(schema, str | os.PathLike) else schema
    entries = None if plain is None else schemas.validated(plain)["columns"]
    frame, name, notes = _frame(source, "The table", entries or {}, unit)
    frames = [frame]
    if chosen.test is not None:
        given = [Path(part) for part in (source, chosen.test) if isinstance(part, _PATHS)]
        other, _, more = _frame(chosen.test, "The test set", entries or {}, unit)
        frames.append(other)
        notes += more
        check_distinct_files(given, TESTED)
        check_distinct_tables(*frames)
    for part, where in zip(frames, (name, "the test set"), strict=False):
        _check_names(part, where, target, group, (keep, drop, () if unit is None else (unit,)))
    notes += schemas.notes(plain)
    notes += [note for part in frames if plain is not None for note in schemas.check(plain, part)]
    rows, row_notes = split_rows(frames, target, unit, chosen.records, seed)
    unused = {target, unit, *drop, *(group if chosen.exclude_group else ())}
    used = [column for column in frame.columns if column not in unused]
    encoded, uncovered, column_notes = _columns(frame, rows.train, used, keep, entries)
    notes += [*row_notes, *column_notes]
    # Labels come from all rows with a target, so that they depend on neither the seed nor the unit.
    labelled = [(part, with_target(part, target, "", [])) for part in frames]
    labels, accesses = labels_of(labelled, target, group, chosen.group_bins, entries or {})
    declared = plain is not None and not (schemas.accesses(plain) or accesses)
    uncovered = [*schemas.accesses(plain), *uncovered, *accesses]
    if chosen.records is None:
        what = "rows with a target" if unit is None else "persons"
        uncovered.append(f"the number of {what}, from which n, q and T are computed")
    groups = groups_of(labelled, labels[1:], entries or {})
    encoder = Encoder(encoded, labels[0], labels[1:], groups)
    splits = Splits(
        train=_dataset(encoder, frame, rows.train, name, rows.marks),
        test=_dataset(encoder, frames[-1], rows.test, name, rows.test_marks),
        validation=_dataset(encoder, frame, rows.validation, name, rows.marks),
    )
    splits = splits._replace(train=replace(splits.train, records=rows.records))
    if chosen.test is not None:
        notes += _unlike(encoder, frames[1], rows.test)
    small = _small(splits.test)
    notes += [*notes_of_columns(list(frame.columns)), *notes_of_values(encoder)]
    notes += notes_of_numbers(encoder, frame)
    notes += _doubts(splits, small)
    return Tabled(splits, encoder, tuple(uncovered), tuple(notes), small, unit, declared)


def _chosen(options: Mapping[str, Any]) -> TableOptions:
    """Return the options that were given by name."""
    known = [field.name for field in fields(TableOptions)]
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise TypeError(
            f"There is no option {unknown!r} of a table; the options are {', '.join(known)}."
        )
    return TableOptions(**options)


def _frame(
    source: str | os.PathLike[str] | pd.DataFrame,
    where: str,
    entries: dict[str, Any],
    unit: str | None,
) -> tuple[pd.DataFrame, str, list[str]]:
    """Return the rows of a file or a DataFrame, a name for them, and notes on the file."""
    import pandas as pd

    if not isinstance(source, pd.DataFrame):
        if not isinstance(source, str | os.PathLike):
            raise TypeError(
                f"{where} (source or test) is {shown(source)}; give the path of a file or a pandas "
                "DataFrame."
            )
        known = {
            name: entry["values"] for name, entry in entries.items() if entry["kind"] == "category"
        }
        # As text, 01 and 1 are two persons whatever the ids of others look like.
        texts = [*known, *([] if unit is None else [unit])]
        frame, notes = read_noted(source, text=texts, values=known)
        return frame, Path(source).name, notes
    if not all(isinstance(name, str) for name in source.columns):
        source = source.rename(columns=str)
    twice = source.columns[source.columns.duplicated()]
    if len(twice):
        raise ValueError(f"{where} has two columns {twice[0]!r}; rename one of them.")
    if len(source) == 0:
        raise ValueError(f"{where} has no rows; nothing can be learnt from it.")
    return source, "the table", []


def _check_names(
    frame: pd.DataFrame,
    where: str,
    target: str,
    group: tuple[str, ...],
    others: tuple[Sequence[str], ...],
) -> None:
    """Raise if a column does not exist, or has two roles."""
    if not group:
        raise ValueError("group names no column; name the one whose groups are compared.")
    for name in (target, *group, *(other for names in others for other in names)):
        if name not in frame.columns:
            raise ValueError(
                f"There is no column {name!r} in {where}{nearest(name, frame.columns)} its "
                f"columns are {listed(list(frame.columns), 20)}."
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


# --- columns ------------------------------------------------------------------------------------


def _columns(
    frame: pd.DataFrame,
    rows: Codes,
    used: list[str],
    keep: Sequence[str],
    entries: dict[str, Any] | None,
) -> tuple[tuple[Column, ...], list[str], list[str]]:
    """Return the encodings of the columns, uncovered accesses, and notes."""
    if entries is None:
        encoded, notes = fit_columns(frame, rows, used, keep)
        uncovered = [
            "the encoder (columns used, categories, means and deviations), fitted on the "
            "training rows"
        ]
    else:
        named = [name for name in used if entries.get(name, {"kind": "ignore"})["kind"] != "ignore"]
        encoded = [schemas.column(name, entries[name]) for name in named]
        unnamed = [name for name in used if name not in entries]
        notes = [f"The schema does not name {listed(unnamed, 20)}: not used."] if unnamed else []
        uncovered = [schemas.FITS]
    if not encoded:
        reasons = f" ({' '.join(notes)})" if notes else ""
        raise ValueError(
            f"No column is left to learn from{reasons}; keep some of those that were left out, or "
            "add some."
        )
    return tuple(encoded), uncovered, notes


# --- results ------------------------------------------------------------------------------------


def _dataset(
    encoder: Encoder, frame: pd.DataFrame, rows: Codes, name: str, marks: Codes
) -> Dataset:
    """Encode some rows as a `Dataset`."""
    return Dataset(
        encoder.encode(frame, rows),
        encoder.target_of(frame, rows),
        encoder.group_of(frame, rows),
        group_names=encoder.groups,
        class_names=encoder.classes,
        name=name,
        marks=torch.from_numpy(marks[rows]),
    )


def _unlike(encoder: Encoder, test: pd.DataFrame, rows: Codes) -> list[str]:
    """Return notes on how a separate test set differs from training; raise if it is unreadable."""
    reading = encoder.read(test, rows)[1]
    reading.check()
    return [f"The test set: {note}" for note in reading.notes]


def _small(test: Dataset) -> tuple[str, ...]:
    """Return the groups with too few test rows, or none of some class."""
    assert test.group is not None
    K, classes = len(test.group_names), len(test.class_names)
    cells = torch.bincount(test.group * classes + test.y, minlength=K * classes)
    counts = cells.view(K, classes)  # [group, class]
    small = (counts.sum(1) < LEAST_TEST) | (counts == 0).any(1)
    return tuple(
        name for name, is_small in zip(test.group_names, small.tolist(), strict=True) if is_small
    )


def _doubts(splits: Splits, small: tuple[str, ...]) -> list[str]:
    """Return notes on groups and classes with too few rows."""
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
