"""Roles of the columns of Parquet files: features, classes and groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evenclip.data import arrow
from evenclip.data import schema as schemas
from evenclip.data.columns import Column, Number, listed
from evenclip.data.encoder import nearest
from evenclip.data.labels import groups_of, labels_of

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["check_alike", "check_names", "encodings", "labels_of_files"]

IMPLAUSIBLE = 100_000  # distinct combinations of class and group that indicate a wrong column
LARGEST = float(np.finfo(np.float32).max)


def check_names(
    files: Sequence[arrow.DataFile], target: str, group: tuple[str, ...], features: Sequence[str]
) -> None:
    """Raise if a column does not exist, or has two roles."""
    for file in files:
        existing = list(arrow.types_of(file))
        for name in (target, *group, *features):
            if name not in existing:
                raise ValueError(
                    f"There is no column {name!r} in {file.path}{nearest(name, existing)} its "
                    f"columns are {listed(existing, 20)}."
                )
    if target in group:
        raise ValueError(
            f"target and group are both {target!r}; predict one column and compare the groups of "
            "another."
        )
    if target in features:
        raise ValueError(f"The target {target!r} is among the features; leave it out of them.")
    for what, names in (("group", group), ("features", features)):
        if len(set(names)) < len(names):
            raise ValueError(f"{what} names a column twice, {listed(names, 20)}; name each once.")


def check_alike(files: Sequence[arrow.DataFile], names: Sequence[str]) -> None:
    """Raise if the used columns differ between files."""
    first, kinds = files[0], arrow.types_of(files[0])
    for file in files[1:]:
        types = arrow.types_of(file)
        for name in names:
            if types.get(name) != kinds[name]:
                kind = "missing" if name not in types else str(types[name])
                raise ValueError(
                    f"The files differ: column {name!r} is {kinds[name]} in {first.path} and "
                    f"{kind} in {file.path}; write them with one schema."
                )


def encodings(
    file: arrow.DataFile, target: str, group: tuple[str, ...], features: Sequence[str] | None,
    entries: dict[str, Any] | None, exclude_group: bool,
) -> tuple[Column, ...]:  # fmt: skip
    """Return the encodings of the columns."""
    if entries is None:
        others = [name for name in arrow.types_of(file) if name not in (target, *group)]
        encoded = [_unscaled(file, name) for name in (others if features is None else features)]
    else:
        left_out = {target, *(group if exclude_group else ())}
        used = [
            name
            for name, entry in entries.items()
            if entry["kind"] != "ignore" and name not in left_out
        ]
        _check_entries(file, used, features or (), entries)
        names = used if features is None else features
        encoded = [schemas.column(name, entries[name]) for name in names]
    if not encoded:
        raise ValueError("No column is left to learn from; name some as features.")
    return tuple(encoded)


def _unscaled(file: arrow.DataFile, name: str) -> Column:
    """Return the encoding of a number that is used unscaled."""
    import pyarrow as pa

    kind = arrow.types_of(file)[name]
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ValueError(
            f"Column {name!r} has type {kind} and is not a number; give a schema that says how to "
            "encode it (`evenclip data schema FILE --columns-only` writes one to fill in), or name "
            "the columns to learn from as features."
        )
    return Number(name, 0.0, 1.0, LARGEST, missing=False)


def _check_entries(
    file: arrow.DataFile, used: Sequence[str], features: Sequence[str], entries: dict[str, Any]
) -> None:
    """Raise if the schema does not match the file or the features."""
    existing = list(arrow.types_of(file))
    absent = [name for name in used if name not in existing]
    if absent:
        raise ValueError(
            f"The schema has the column {absent[0]!r} and {file.path} does not; its columns are "
            f"{listed(existing, 20)}: add the column, or take it out of the schema."
        )
    unnamed = [name for name in features if name not in entries]
    if unnamed:
        raise ValueError(
            f"The feature {unnamed[0]!r} is not in the schema{nearest(unnamed[0], entries)} say "
            "there what is public about it."
        )


def labels_of_files(
    files: Sequence[arrow.DataFile],
    target: str,
    group: tuple[str, ...],
    bins: int | None,
    entries: dict[str, Any],
) -> tuple[tuple[Any, ...], tuple[str, ...], list[str]]:
    """Return classes and labels of each protected column, groups, and uncovered accesses.

    The distinct rows suffice: `table` finds the same labels in them as in all rows.
    """
    names = list(dict.fromkeys((target, *group)))
    public = _is_public(entries.get(target, {}), None) and all(
        _is_public(entries.get(name, {}), bins) for name in group
    )
    for frame in _distinct(() if public else files, names, target):
        used = [(frame, np.arange(len(frame)))]
        if public or len(frame):
            labels, uncovered = labels_of(used, target, group, bins, entries)
            groups = groups_of(used, labels[1:], entries) if group else ()
    if not public and len(frame) == 0:
        raise ValueError(f"The target {target!r} is missing in every row; choose another column.")
    if bins is not None and any("quantiles" in access for access in uncovered):
        raise ValueError(
            f"group_bins cuts {listed(group, 20)} at quantiles of all rows, which are not sorted "
            "here; give its range in a schema, or write a column of groups into the file."
        )
    return labels, groups, uncovered


def _is_public(entry: dict[str, Any], bins: int | None) -> bool:
    """Return whether the labels of a column are known without reading it."""
    kind = entry.get("kind")
    return kind in ("category", "boolean") or (kind == "number" and bins is not None)


def _distinct(
    files: Sequence[arrow.DataFile], names: list[str], target: str
) -> Iterator[pd.DataFrame]:
    """Yield the distinct rows of these columns that have a target.

    All are yielded at the end. If they are implausibly many, they are yielded once before, so that
    a target that is not a class is refused before it fills the memory.
    """
    import pandas as pd

    distinct, yielded = pd.DataFrame(columns=names), False
    for file in files:
        for table in arrow.tables(arrow.batches_of(file, list(range(len(file.sizes))), names)):
            frame = _plain(arrow.frame_of(table).dropna(subset=[target]).drop_duplicates())
            if len(distinct):
                frame = pd.concat([distinct, frame]).drop_duplicates()
            distinct = frame
            if len(distinct) > IMPLAUSIBLE and not yielded:
                yielded = True
                yield distinct
    yield distinct


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert dictionary codes to texts, because the codes of two row groups differ."""
    coded = [name for name in frame.columns if str(frame[name].dtype) == "category"]
    return frame.astype(dict.fromkeys(coded, object))
