"""Parquet files that need not fit in memory: rows are read by row group, many batches at once.

    data = evenclip.data.parquet(
        "loans/*.parquet", target="default", group="sex", schema="schema.json"
    )
    model = evenclip.models.mlp(len(data.encoder.features), len(data.class_names))
    evenclip.fit(model, data, batch_size=4096)

A Poisson batch of 256 among millions of rows touches about 256 row groups. If batches were read one
at a time, every step would decode a large part of the file. But batches are drawn independently of
the data, so those of the next thousands of steps are known. They are collected until `memory` is
used up, and one pass through the file, in its order, reads the rows of all of them. A row group is
decoded once per window of batches, and not at all if none of its rows was drawn.

One pass over all rows precedes training. It raises an error, with file and row, for rows that
`evenclip.data.table` would refuse or leave out, because n is fixed by then. It also computes the
digest that the run's random streams depend on, so that a file and the same rows in memory draw the
same batches and the same noise, and train the same model to the last bit.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from evenclip import check
from evenclip.arguments import check_kinds
from evenclip.data import arrow, columns, roles
from evenclip.data import schema as schemas
from evenclip.data.columns import listed
from evenclip.data.dataset import Samples
from evenclip.data.distinct import FilesSeen, check_distinct_files
from evenclip.data.encoder import Encoder
from evenclip.data.streamed import Bits, Feed, Streamed, Windows, fingerprint
from evenclip.data.validation import NO_SAMPLES

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Parquet", "parquet"]

MEMORY = 2**29


class Stopped(Exception):  # noqa: N818 - a request to stop, not an error
    """Reading was stopped before its end."""


@dataclass
class _Checked:
    """Results of the pass over all rows; shared by all copies of a dataset."""

    fingerprints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Parquet(Streamed):
    """Rows of Parquet files; made by `parquet`.

    Attributes:
        files: the files, in the order of the rows.
        encoder: converts raw rows, also new ones, to features, classes and groups.
        uncovered: accesses to the data that ε does not cover, as phrases for the privacy report.
        memory: bytes that prefetched rows may occupy.
        name: name for reports.
        device: device of the rows that `take` returns.
    """

    files: tuple[arrow.DataFile, ...] = field(repr=False)
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
        """The groups; empty without a group column."""
        return self.encoder.groups

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The classes."""
        return self.encoder.classes

    @property
    def row_groups(self) -> int:
        """Number of row groups in all files."""
        return sum(len(file.sizes) for file in self.files)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the data, after a pass over all rows. They are not private."""
        self.fingerprints()
        return self.checked.notes

    def take(self, indices: Tensor) -> Samples:
        """Return the rows at `indices` [row] int64; each row group is decoded at most once."""
        return self._gather(indices, _never).to(self.device)

    def to(self, device: torch.device | str) -> Parquet:
        """Return the same data; `take` puts the rows on the device."""
        return dataclasses.replace(self, device=device)

    def labelled(self, outputs: int, ignored: int) -> Parquet:
        """Return the same data if the model has an output for every class; raise otherwise."""
        del ignored
        if len(self.class_names) > outputs:
            raise ValueError(
                f"{self.encoder.target.column!r} has {len(self.class_names)} classes, "
                f"{listed(self.class_names, 20)}, and the model has {outputs} outputs; give the "
                f"model {len(self.class_names)}."
            )
        return self

    def ahead(self, batches: Iterator[Tensor], readers: int) -> Feed:
        """Return a feed that one thread reads window by window; `readers` is ignored."""
        del readers
        # Bytes per row: features, class and group, and positions while reading.
        size = 4 * len(self.encoder.features) + 16 + 72
        window = max(1, self.memory // 2 // size)
        return _Placed(Windows(self._gather, batches, window), self.device)

    def fingerprints(self) -> tuple[str, ...]:
        """Return the fingerprints of a `Dataset` with the same rows; check every row on the way.

        Raises:
            ValueError: a row cannot be used.
        """
        if not self.checked.fingerprints:
            self._pass()
        return self.checked.fingerprints

    def _pass(self) -> None:
        """Check all rows, and compute fingerprints and notes."""
        n, width = len(self), len(self.encoder.features)
        forms = [("x", torch.float32, (n, width)), ("y", torch.int64, (n,))]
        forms += [("group", torch.int64, (n,))] if self.encoder.group else []
        digests = [Bits() for _ in forms]
        outside = dict.fromkeys(self.entries or (), 0)
        seen = FilesSeen()
        for file in self.files:
            first = 1
            for frame in self._frames(file):
                seen.add(file.path, frame)
                try:
                    for name, count in self._check(frame, first).items():
                        outside[name] += count
                    samples = self._encoded(frame, first)
                except ValueError as error:
                    raise ValueError(f"{file.path}: {error}") from None
                for bits, tensor in zip(digests, (_features(samples), *samples[1:]), strict=False):
                    if tensor is not None:
                        bits.add(tensor)
                first += len(frame)
        seen.check()
        lines = [fingerprint(*form, bits) for form, bits in zip(forms, digests, strict=True)]
        self.checked.notes = tuple(
            schemas.note_outside(name, count) for name, count in outside.items() if count
        )
        self.checked.fingerprints = tuple(lines)

    def _check(self, frame: pd.DataFrame, first: int) -> dict[str, int]:
        """Raise if a row cannot be used; return each column's number of values out of range."""
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
                    f"{int(np.flatnonzero(absent)[0]) + first} (missing, or infinite); leave such "
                    "rows out of the file, or give a schema, which has an indicator for them."
                )
        return {}

    def _encoded(self, frame: pd.DataFrame, first: int = 1) -> Samples:
        """Encode raw rows as tensors."""
        group = self.encoder.group_of(frame, first=first) if self.encoder.group else None
        y = self.encoder.target_of(frame, first=first)
        return Samples(self.encoder.encode(frame), y, group)

    def _gather(self, indices: Tensor, stopped: Callable[[], bool]) -> Samples:
        """Return the rows at `indices`, in one pass through the files."""
        n, wanted = len(indices), indices.numpy()
        if n and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(
                f"Rows {wanted.min()} to {wanted.max()} are requested; give rows from 0 to "
                f"{len(self) - 1}."
            )
        grouped = bool(self.encoder.group)
        x, y = torch.empty(n, len(self.encoder.features)), torch.empty(n, dtype=torch.int64)
        group = torch.empty(n, dtype=torch.int64) if grouped else None
        # Position in the result of each row, in the order of the files.
        order = np.argsort(wanted, kind="stable")
        ends = np.cumsum([0, *(file.rows for file in self.files)])
        cuts = np.searchsorted(wanted, ends, sorter=order)
        for i, file in enumerate(self.files):
            places = order[cuts[i] : cuts[i + 1]]
            for part, frame in self._picked(file, wanted[places] - ends[i]):
                if stopped():
                    raise Stopped
                rows, samples = torch.from_numpy(places[part]), self._encoded(frame)
                x[rows], y[rows] = _features(samples), samples.y
                if group is not None and samples.group is not None:
                    group[rows] = samples.group
        return Samples(x, y, group)

    def _picked(
        self, file: arrow.DataFile, wanted: arrow.Rows
    ) -> Iterator[tuple[slice, pd.DataFrame]]:
        """Yield raw rows of a file, each time with the slice of `wanted` that they belong to.

        `wanted` holds positions in the file, in ascending order and possibly repeated.
        """
        if len(wanted) == 0:
            return
        begins = np.cumsum([0, *file.sizes])  # [row group + 1]
        # The row group of each wanted row [wanted]; "right" skips empty row groups.
        own = np.searchsorted(begins, wanted, side="right") - 1
        hit, rank = np.unique(own, return_inverse=True)
        before = np.cumsum([0, *np.array(file.sizes)[hit]])  # rows decoded before each row group
        decoded = wanted - begins[own] + before[rank]  # position among the decoded rows
        done = 0
        for table in arrow.tables(arrow.chosen(self._batches(file, hit.tolist()), decoded)):
            yield slice(done, done + len(table)), arrow.frame_of(table)
            done += len(table)

    def _frames(self, file: arrow.DataFile) -> Iterator[pd.DataFrame]:
        """Yield all rows of a file, at least `CHUNK` at a time except for the last ones."""
        batches = self._batches(file, list(range(len(file.sizes))))
        return (arrow.frame_of(table) for table in arrow.tables(batches))

    def _batches(self, file: arrow.DataFile, groups: list[int]) -> Iterator[Any]:
        """Yield the used columns of some row groups, as Arrow record batches."""
        if arrow.stamp_of(file.path) != file.stamp:
            raise ValueError(
                f"{file.path} has changed since it was opened; a run sees one dataset only: open "
                "it again and start again."
            )
        yield from arrow.batches_of(file, groups, self._names)

    @property
    def _names(self) -> list[str]:
        features = [column.column for column in self.encoder.columns]
        labelled = [labels.column for labels in (self.encoder.target, *self.encoder.group)]
        return list(dict.fromkeys([*features, *labelled]))


class _Placed:
    """A feed that moves its rows to a device."""

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
    """Open Parquet files for training without reading them into memory.

    With a schema, every column is encoded by public ranges and categories, and nothing is fitted on
    the data. Without one, the features must be numbers and are used unscaled; the names of classes
    and groups are then read from the file.

    Args:
        source: a file, a pattern such as "loans/*.parquet", a folder, or several of them. Files of
            a pattern or a folder are sorted by name.
        target: the column to predict; two or more classes.
        group: the protected column, or several, whose combinations are the groups; by default none.
        features: the columns to learn from; by default those of the schema, or without one all but
            target and group.
        schema: public ranges and categories (see `evenclip.data.schema`), or the path of their
            file.
        exclude_group: whether to leave the protected columns of the schema out of the features.
        group_bins: number of groups that a number with a range in the schema is cut into.
        memory: bytes that prefetched rows may occupy. More memory means fewer passes through the
            files: one pass reads memory/2 bytes of encoded rows.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is not a Parquet file, files have different columns, a column does not
            exist, a feature is not a number, or classes or groups are invalid (see
            `evenclip.data.table.table`).

    >>> import tempfile, pandas as pd
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     frame = pd.DataFrame({"age": [20, 40, 60], "paid": ["yes", "no", "yes"]})
    ...     frame.to_parquet(f"{folder}/loans.parquet", row_group_size=2)
    ...     data = parquet(f"{folder}/loans.parquet", target="paid")
    ...     print(len(data), data.class_names, data.take(torch.tensor([2, 0])))
    3 ('no', 'yes') Samples(x=tensor([[60.],
            [20.]]), y=tensor([1, 1]), group=None)
    """
    check_kinds(parquet, locals())
    check.natural(memory=memory)
    if group_bins is not None:
        check.natural(group_bins=group_bins)
    group = (group,) if isinstance(group, str) else tuple(group)
    features = None if features is None else tuple(features)
    plain = schemas.load(schema) if isinstance(schema, str | os.PathLike) else schema
    entries = None if plain is None else schemas.validated(plain)["columns"]
    paths = arrow.paths_of(source)
    files = tuple(arrow.opened(path) for path in paths)
    check_distinct_files(paths)
    if sum(file.rows for file in files) == 0:
        raise ValueError(NO_SAMPLES)
    roles.check_names(files, target, group, features or ())
    encoded = roles.encodings(files[0], target, group, features, entries, exclude_group)
    roles.check_alike(files, [column.column for column in encoded] + [target, *group])
    labels, groups, uncovered = roles.labels_of_files(
        files, target, group, group_bins, entries or {}
    )
    uncovered[:0] = [
        *schemas.accesses(plain),
        "a check that every row can be used, which only ever stops training",
    ]
    encoder = Encoder(encoded, labels[0], labels[1:], groups)
    used = {*(column.column for column in encoded), target, *group}
    if entries is not None:
        entries = {name: entry for name, entry in entries.items() if name in used}
    return Parquet(files, encoder, entries, tuple(uncovered), int(memory), files[0].path.name)


def _features(samples: Samples) -> Tensor:
    assert isinstance(samples.x, Tensor)
    return samples.x


def _never() -> bool:
    return False
