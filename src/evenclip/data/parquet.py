"""Parquet files that need not fit in memory: rows are read by row group, many batches at once.

    data = evenclip.data.parquet("loans/*.parquet", target="default", group="sex",
    schema="schema.json") evenclip.fit(evenclip.models.mlp(len(data.encoder.features),
    len(data.class_names)), data, batch_size=4096)

A Poisson batch of 256 among millions of rows touches about 256 row groups; read one batch at a
time, every step would decode a good part of the file. But batches are drawn without looking at the
data, so those of the next thousands of steps are known: they are collected until `memory` is used
up, and one pass through the file, in its order, deals out the rows of all of them. A row group is
decoded once for a window of batches, and not at all if nothing in it was drawn.

Before training there is one pass over all rows. It refuses, by file and row, what
`evenclip.data.table` would refuse or leave out, since n is fixed by then; and it takes the digest
that the run's random streams depend on, so that a file and the same rows in memory draw the same
batches and the same noise, and train the same model to the last bit.
"""

from __future__ import annotations

import dataclasses
import glob
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenclip import check
from evenclip.data import columns
from evenclip.data import schema as schemas
from evenclip.data.columns import Column, Number, listed
from evenclip.data.dataset import NO_SAMPLES, Samples
from evenclip.data.encoder import Encoder, nearest
from evenclip.data.streamed import Bits, Feed, Streamed, Windows, fingerprint

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Parquet", "parquet"]

CHUNK = 2**16  # rows that are decoded at once
MEMORY = 2**29
BUFFER = 2**20  # bytes of a column that are read at once
LOOKED_AT = 100_000  # different combinations of class and group, from which on something is wrong
LARGEST = float(np.finfo(np.float32).max)

Rows = NDArray[np.int64]


class Stopped(Exception):  # noqa: N818 - no error: whoever reads was told to end
    """Reading was ended in the middle."""


class _File(NamedTuple):
    """One file, as it was when it was opened."""

    path: Path
    stamp: tuple[int, int]  # size and time of the last change
    sizes: tuple[int, ...]  # rows of each row group
    metadata: Any

    @property
    def rows(self) -> int:
        return sum(self.sizes)


@dataclass
class _Checked:
    """What the pass over all rows has found; shared by all copies of a dataset."""

    fingerprints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Parquet(Streamed):
    """Rows of Parquet files; made by `parquet`.

    Attributes:
        files: in the order of the rows.
        encoder: what makes features, classes and groups of raw rows; it makes the same of new ones.
        uncovered: the looks at the data that ε does not cover, each a phrase for the privacy
            report.
        memory: bytes that the rows of the batches under way may take.
        name: for reports.
        device: where `take` puts the rows.
    """

    files: tuple[_File, ...] = field(repr=False)
    encoder: Encoder = field(repr=False)
    entries: dict[str, Any] | None = field(repr=False)
    uncovered: tuple[str, ...]
    memory: int
    name: str
    device: torch.device | str = "cpu"
    checked: _Checked = field(default_factory=_Checked, repr=False)

    def __len__(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def group_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The groups; none without a group column."""
        return self.encoder.groups

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The classes."""
        return self.encoder.classes

    @property
    def row_groups(self) -> int:
        """How many there are in all files."""
        return sum(len(file.sizes) for file in self.files)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for whoever called, after a pass over all rows. They tell about the data."""
        self.fingerprints()
        return self.checked.notes

    def take(self, indices: Tensor) -> Samples:
        """The rows at `indices` [row] int64; every row group that has any is decoded once."""
        return self._gather(indices, _never).to(self.device)

    def to(self, device: torch.device | str) -> Parquet:
        """The same data, whose rows are put on a device when they are taken."""
        return dataclasses.replace(self, device=device)

    def labelled(self, outputs: int, ignored: int) -> Parquet:
        """The same data, if the model has an output for every class."""
        del ignored
        if len(self.class_names) > outputs:
            raise ValueError(
                f"{self.encoder.target.column!r} has {len(self.class_names)} classes, "
                f"{listed(self.class_names, 20)}, "
                f"and the model has {outputs} outputs; give the model {len(self.class_names)}."
            )
        return self

    def ahead(self, batches: Iterator[Tensor], readers: int) -> Feed:
        """The rows of these batches, read a window at a time by a thread, whatever the number of
        readers.
        """
        del readers
        each = (
            4 * len(self.encoder.features) + 16 + 72
        )  # bytes of features, class and group; of places while reading
        return _Placed(
            Windows(self._gather, batches, max(1, self.memory // 2 // each)), self.device
        )

    def fingerprints(self) -> tuple[str, ...]:
        """Those of a `Dataset` with the same rows, by a pass over all of them, in which each is
        checked.

        Raises:
            ValueError: a row that cannot be used.
        """
        if not self.checked.fingerprints:
            self._pass()
        return self.checked.fingerprints

    def _pass(self) -> None:
        n, width = len(self), len(self.encoder.features)
        parts = [(torch.float32, (n, width)), (torch.int64, (n,))]
        parts += [(torch.int64, (n,))] if self.encoder.group else []
        bits = [Bits(math.prod(shape) * dtype.itemsize) for dtype, shape in parts]
        outside = dict.fromkeys(self.entries or (), 0)
        for file in self.files:
            first = 1
            for frame in self._frames(file):
                try:
                    for name, count in self._check(frame, first).items():
                        outside[name] += count
                    samples = self._encoded(frame, first)
                except ValueError as error:
                    raise ValueError(f"{file.path}: {error}") from None
                for each, tensor in zip(bits, (_features(samples), *samples[1:]), strict=False):
                    if tensor is not None:
                        each.add(tensor)
                first += len(frame)
        lines = [
            fingerprint(dtype, shape, each)
            for (dtype, shape), each in zip(parts, bits, strict=True)
        ]
        self.checked.notes = tuple(
            schemas.note_outside(name, count) for name, count in outside.items() if count
        )
        self.checked.fingerprints = tuple(lines)

    def _check(self, frame: pd.DataFrame, first: int) -> dict[str, int]:
        """Raise for a row that cannot be used; how many values of each column count as the end of
        its range.
        """
        if self.entries is not None:
            used = [name for name in frame.columns if name in self.entries]
            return {
                name: schemas.count_outside(name, self.entries[name], frame[name], first)
                for name in used
            }
        for column in self.encoder.columns:
            absent = np.isnan(columns.numbers(frame[column.column]))
            if absent.any():
                raise ValueError(
                    f"Column {column.column!r} has no number in row "
                    f"{int(np.flatnonzero(absent)[0]) + first} (missing, "
                    "or infinite); leave such rows out of the file, or give a schema, which has "
                    "an indicator for them."
                )
        return {}

    def _encoded(self, frame: pd.DataFrame, first: int = 1) -> Samples:
        """Rows as tensors."""
        group = self.encoder.group_of(frame, first=first) if self.encoder.group else None
        return Samples(
            self.encoder.encode(frame), self.encoder.target_of(frame, first=first), group
        )

    def _gather(self, indices: Tensor, stopped: Callable[[], bool]) -> Samples:
        """The rows at `indices`, in one pass through the files."""
        n, wanted = len(indices), indices.numpy()
        if n and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(
                f"Rows {wanted.min()} to {wanted.max()} are asked for, and there are {len(self)}."
            )
        grouped = bool(self.encoder.group)
        x, y = torch.empty(n, len(self.encoder.features)), torch.empty(n, dtype=torch.int64)
        group = torch.empty(n, dtype=torch.int64) if grouped else None
        order = np.argsort(
            wanted, kind="stable"
        )  # place in the answer of each row, in the order of the files
        ends = np.cumsum([0, *(file.rows for file in self.files)])
        cuts = np.searchsorted(wanted, ends, sorter=order)
        for i, file in enumerate(self.files):
            places = order[cuts[i] : cuts[i + 1]]
            for part, frame in self._picked(file, wanted[places] - ends[i]):
                if stopped():
                    raise Stopped
                rows, found = torch.from_numpy(places[part]), self._encoded(frame)
                x[rows], y[rows] = _features(found), found.y
                if group is not None and found.group is not None:
                    group[rows] = found.group
        return Samples(x, y, group)

    def _picked(self, file: _File, wanted: Rows) -> Iterator[tuple[slice, pd.DataFrame]]:
        """The rows of a file at these places, which ascend and may repeat: which of them, and the
        raw rows.
        """
        if len(wanted) == 0:
            return
        begins = np.cumsum([0, *file.sizes])  # [row group + 1]
        own = (
            np.searchsorted(begins, wanted, side="right") - 1
        )  # [wanted]; an empty row group holds nothing
        hit, rank = np.unique(own, return_inverse=True)
        before = np.cumsum(
            [0, *np.array(file.sizes)[hit]]
        )  # rows that are decoded before each row group
        decoded = wanted - begins[own] + before[rank]  # place among the rows that are decoded
        done = 0
        for table in _together(_chosen(self._batches(file, hit.tolist()), decoded)):
            yield slice(done, done + len(table)), _frame(table)
            done += len(table)

    def _frames(self, file: _File) -> Iterator[pd.DataFrame]:
        """All rows of a file, some at a time."""
        return (
            _frame(table) for table in _together(self._batches(file, list(range(len(file.sizes)))))
        )

    def _batches(self, file: _File, groups: list[int]) -> Iterator[Any]:
        """The columns that are used, as Arrow's record batches."""
        if _stamp(file.path) != file.stamp:
            raise ValueError(
                f"{file.path} has changed since it was opened; a run sees one dataset only: open "
                "it again and start "
                "again."
            )
        yield from _batches(file, groups, self._names)

    @property
    def _names(self) -> list[str]:
        features = [column.column for column in self.encoder.columns]
        return list(
            dict.fromkeys(
                [*features, *(each.column for each in (self.encoder.target, *self.encoder.group))]
            )
        )


class _Placed:
    """A feed whose rows are put on a device."""

    def __init__(self, feed: Feed, device: torch.device | str) -> None:
        self._feed, self._device = feed, device

    def of(self, batch: Tensor) -> Samples:
        return self._feed.of(batch).to(self._device)

    def close(self) -> None:
        self._feed.close()


def parquet(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    target: str,
    group: str | Sequence[str] = (),
    features: Sequence[str] | None = None,
    schema: dict[str, Any] | str | os.PathLike[str] | None = None,
    exclude_group: bool = False,
    group_bins: int | None = None,
    memory: int = MEMORY,
) -> Parquet:
    """Parquet files, to be trained on without reading them into memory.

    With a schema every column is encoded by what is public about it, and nothing is fitted on the
    data. Without one the features must be numbers, which are taken as they are; the names of
    classes and groups are then found in the file.

    Args:
        source: a file, a pattern such as "loans/*.parquet", a folder, or several of them. Files of
            a pattern or a folder are taken in the order of their names.
        target: the column to predict; two or more classes.
        group: the protected column, or several, whose combinations are the groups; none unless
            given.
        features: the columns to learn from; unless given those of the schema, or else all but
            target and group.
        schema: public ranges and categories (see `evenclip.data.schema`), or the file they are in.
        exclude_group: whether the protected columns of the schema are kept out of the features.
        group_bins: number of groups that a number with a range in the schema is cut into.
        memory: bytes that the rows of the batches under way may take. The more, the fewer passes
            through the files: a pass deals out memory/2 bytes of encoded rows.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no Parquet file, files with different columns, no such column, a feature that is
            no number, and what `evenclip.data.table.table` says about classes and groups.

    >>> import tempfile, pandas as pd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     frame = pd.DataFrame({"age": [20, 40, 60], "paid": ["yes", "no", "yes"]})
    ...     frame.to_parquet(f"{folder}/loans.parquet", row_group_size=2)
    ...     data = parquet(f"{folder}/loans.parquet", target="paid")
    ...     print(len(data), data.class_names, data.take(torch.tensor([2, 0])))
    3 ('no', 'yes') Samples(x=tensor([[60.],
            [20.]]), y=tensor([1, 1]), group=None)
    """
    check.natural(memory=memory)
    group = (group,) if isinstance(group, str) else tuple(group)
    plain = schemas.load(schema) if isinstance(schema, str | os.PathLike) else schema
    entries = None if plain is None else schemas.validated(plain)["columns"]
    files = tuple(_opened(path) for path in _paths(source))
    if sum(file.rows for file in files) == 0:
        raise ValueError(NO_SAMPLES)
    _check_names(files, target, group, features or ())
    found = _columns(files[0], target, group, features, entries, exclude_group)
    _check_alike(files, [column.column for column in found] + [target, *group])
    labels, groups, uncovered = _labels(files, target, group, group_bins, entries or {})
    uncovered.insert(0, "a check that every row can be used, which only ever stops training")
    encoder = Encoder(found, labels[0], labels[1:], groups)
    used = {*(column.column for column in found), target, *group}
    entries = (
        None
        if entries is None
        else {name: entry for name, entry in entries.items() if name in used}
    )
    return Parquet(files, encoder, entries, tuple(uncovered), int(memory), files[0].path.name)


# --- files --------------------------------------------------------------------------------------


def _paths(source: Any) -> list[Path]:
    """The files that are meant."""
    if not isinstance(source, str | os.PathLike):
        if not isinstance(source, Sequence):
            raise TypeError(
                f"source is a {type(source).__name__}; give the path of a Parquet file, or a list "
                "of them."
            )
        return [path for each in source for path in _paths(each)]
    path = Path(source)
    if path.is_dir():
        found = sorted(path.glob("*.parquet"))
    elif not path.exists() and glob.has_magic(str(source)):
        found = sorted(Path(each) for each in glob.glob(str(source)))
    else:
        return [path]
    if not found:
        raise FileNotFoundError(
            f"There are no Parquet files at {source}; name a file, a folder or a pattern."
        )
    return found


def _opened(path: Path) -> _File:
    """A file's shape, from its last bytes."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    stamp = _stamp(path)
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"{path} is no Parquet file ({said}); write it again.") from error
    sizes = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    return _File(path, stamp, sizes, metadata)


def _stamp(path: Path) -> tuple[int, int]:
    """What changes when a file does."""
    try:
        found = path.stat()
    except OSError:
        raise FileNotFoundError(f"{path} is not there; give a file.") from None
    return found.st_size, found.st_mtime_ns


def _types(file: _File) -> dict[str, Any]:
    """Arrow's type of each column."""
    schema = file.metadata.schema.to_arrow_schema()
    return dict(zip(schema.names, schema.types, strict=True))


def _batches(file: _File, groups: list[int], names: list[str]) -> Iterator[Any]:
    """Some columns of some row groups, `CHUNK` rows at a time; texts as codes, which is how they
    are stored.
    """
    import pyarrow as pa
    from pyarrow import parquet as pq

    types = _types(file)
    texts = [
        name
        for name in names
        if pa.types.is_string(types[name]) or pa.types.is_large_string(types[name])
    ]
    # Not buffered beforehand: that would hold a whole row group, of all columns.
    with pq.ParquetFile(
        file.path,
        metadata=file.metadata,
        read_dictionary=texts,
        pre_buffer=False,
        buffer_size=BUFFER,
    ) as opened:
        try:
            yield from opened.iter_batches(
                CHUNK, row_groups=groups, columns=names, use_threads=False
            )
        except (pa.ArrowException, OSError) as error:
            said = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"{file.path} cannot be read to its end ({said}); write it again."
            ) from error


def _chosen(batches: Iterator[Any], rows: Rows) -> Iterator[Any]:
    """The rows at these places of consecutive record batches; they ascend and may repeat."""
    import pyarrow as pa

    at = 0
    for batch in batches:
        start, end = np.searchsorted(rows, [at, at + len(batch)])
        if end > start:
            yield batch.take(pa.array(rows[start:end] - at))
        at += len(batch)


def _together(batches: Iterator[Any]) -> Iterator[Any]:
    """Record batches joined to tables of at least `CHUNK` rows, but for the last: encoding few rows
    takes as long.
    """
    import pyarrow as pa

    held: list[Any] = []
    for batch in batches:
        held.append(batch)
        if sum(len(each) for each in held) >= CHUNK:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def _frame(table: Any) -> pd.DataFrame:
    """A table as the encoder takes it."""
    found: pd.DataFrame = table.unify_dictionaries().to_pandas(
        ignore_metadata=True
    )  # an index is a column as others are
    return found


def _features(samples: Samples) -> Tensor:
    assert isinstance(samples.x, Tensor)
    return samples.x


def _never() -> bool:
    return False


# --- columns ------------------------------------------------------------------------------------


def _check_names(
    files: Sequence[_File], target: str, group: tuple[str, ...], features: Sequence[str]
) -> None:
    """Raise for a column that is not there, or is asked to be two things."""
    for file in files:
        there = list(_types(file))
        for name in (target, *group, *features):
            if name not in there:
                raise ValueError(
                    f"There is no column {name!r} in {file.path}{nearest(name, there)} its "
                    "columns are "
                    f"{listed(there, 20)}."
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


def _check_alike(files: Sequence[_File], names: Sequence[str]) -> None:
    """Raise for files whose columns differ, where they are used."""
    first, kinds = files[0], _types(files[0])
    for file in files[1:]:
        there = _types(file)
        for name in names:
            if there.get(name) != kinds[name]:
                kind = "not there" if name not in there else str(there[name])
                raise ValueError(
                    f"The files differ: column {name!r} is {kinds[name]} in {first.path} and "
                    f"{kind} in {file.path}; "
                    "write them with one schema."
                )


def _columns(
    file: _File, target: str, group: tuple[str, ...], features: Sequence[str] | None,
    entries: dict[str, Any] | None, exclude_group: bool,
) -> tuple[Column, ...]:  # fmt: skip
    """How columns become features."""
    if entries is None:
        names = (
            [name for name in _types(file) if name not in (target, *group)]
            if features is None
            else features
        )
        found = [_as_it_is(file, name) for name in names]
    else:
        left_out = {target, *(group if exclude_group else ())}
        used = [
            name
            for name, entry in entries.items()
            if entry["kind"] != "ignore" and name not in left_out
        ]
        _check_entries(file, used, features or (), entries)
        found = [
            schemas.column(name, entries[name]) for name in (used if features is None else features)
        ]
    if not found:
        raise ValueError("No column is left to learn from; name some as features.")
    return tuple(found)


def _as_it_is(file: _File, name: str) -> Column:
    """A number that is taken as it is."""
    import pyarrow as pa

    kind = _types(file)[name]
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ValueError(
            f"Column {name!r} is of type {kind}, which is no number; give a schema, which says "
            "how it becomes features "
            "(`evenclip data schema` proposes one), or name the columns to learn from as features."
        )
    return Number(name, 0.0, 1.0, LARGEST, missing=False)


def _check_entries(
    file: _File, used: Sequence[str], features: Sequence[str], entries: dict[str, Any]
) -> None:
    """Raise where the schema and the file, or the features, do not go together."""
    there = list(_types(file))
    absent = [name for name in used if name not in there]
    if absent:
        raise ValueError(
            f"The schema has the column {absent[0]!r} and {file.path} does not; its columns are "
            f"{listed(there, 20)}: "
            "add the column, or take it out of the schema."
        )
    unnamed = [name for name in features if name not in entries]
    if unnamed:
        raise ValueError(
            f"The feature {unnamed[0]!r} is not in the schema{nearest(unnamed[0], entries)} say "
            "there what is public "
            "about it."
        )


def _labels(
    files: Sequence[_File],
    target: str,
    group: tuple[str, ...],
    bins: int | None,
    entries: dict[str, Any],
) -> tuple[tuple[Any, ...], tuple[str, ...], list[str]]:
    """Classes, the labels of each protected column, and groups; what ε does not cover in them.

    What `table` finds in all rows it finds in the different ones, too.
    """
    from evenclip.data.table import groups_of, labels_of

    names = list(dict.fromkeys((target, *group)))
    public = _is_public(entries.get(target, {}), None) and all(
        _is_public(entries.get(name, {}), bins) for name in group
    )
    for frame in _different(() if public else files, names, target):
        used = [(frame, np.arange(len(frame)))]
        if public or len(frame):
            labels, uncovered = labels_of(used, target, group, bins, entries)
            groups = groups_of(used, labels[1:], entries) if group else ()
    if not public and len(frame) == 0:
        raise ValueError(f"The target {target!r} is missing in every row; choose another column.")
    if bins is not None and any("quantiles" in each for each in uncovered):
        raise ValueError(
            f"group_bins cuts {listed(group, 20)} at quantiles of all rows, which are not sorted "
            "here; give its range "
            "in a schema, or write a column of groups into the file."
        )
    return labels, groups, uncovered


def _is_public(entry: dict[str, Any], bins: int | None) -> bool:
    """Whether the labels of a column are known without a look at it."""
    return entry.get("kind") in ("category", "boolean") or (
        entry.get("kind") == "number" and bins is not None
    )


def _different(files: Sequence[_File], names: list[str], target: str) -> Iterator[pd.DataFrame]:
    """The different rows of these columns that have a target: all at the end, and once before if
    they are very many.
    """
    import pandas as pd

    found, told = pd.DataFrame(columns=names), False
    for file in files:
        for table in _together(_batches(file, list(range(len(file.sizes))), names)):
            frame = _plain(_frame(table).dropna(subset=[target]).drop_duplicates())
            found = frame if len(found) == 0 else pd.concat([found, frame]).drop_duplicates()
            if len(found) > LOOKED_AT and not told:
                told = True
                # so that a target that is no class is refused before it fills the memory
                yield found
    yield found


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Codes of texts as texts: those of two row groups differ."""
    coded = [name for name in frame.columns if str(frame[name].dtype) == "category"]
    return frame.astype(dict.fromkeys(coded, object))
