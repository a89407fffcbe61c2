"""Datasets for training: rows of (x, y, group), selected by index.

Poisson sampling may draw any row at any step, so every dataset has a length and random access:

    len(data)           number of samples n
    data.K              number of groups, 1 without groups
    data.take(indices)  these rows as Samples(x, y, group)

`Dataset` holds tensors and validates them. `MapDataset` reads its rows from a torch dataset on
demand, as `evenclip.data.parquet` does from files. `as_dataset` converts arrays and torch datasets
to one of the first two. Images may be stored as bytes, in a quarter of the memory: `take` returns
uint8 features as float32 in [0, 1].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import data as torch_data

from evenclip import check
from evenclip.arguments import check_fields, check_kinds
from evenclip.data import arrays, validation
from evenclip.data.arrays import Inputs
from evenclip.data.streamed import Bits, Feed, Streamed, fingerprint
from evenclip.data.validation import describe, remedy
from evenclip.devices import device_of

__all__ = ["Dataset", "Inputs", "MapDataset", "Samples", "Splits", "as_dataset"]

ACCEPTED = (
    "give (x, y) or (x, y, group) as a tuple of tensors or numpy arrays, an evenclip Dataset, or "
    "a map-style torch dataset whose items are (x, y) or (x, y, group)"
)


_PUBLIC = ("group_names", "class_names", "name", "records")  # others are checked as tensors


class Samples(NamedTuple):
    """Rows of a dataset."""

    x: Inputs  # [sample, ...]
    y: Tensor  # [sample]
    group: Tensor | None  # [sample] int64

    def take(self, indices: Tensor) -> Samples:
        """Return the rows at `indices` [row] int64, with bytes as floats."""
        group = None if self.group is None else self.group.index_select(0, indices)
        return Samples(_each(_taken, self.x, indices), self.y.index_select(0, indices), group)

    def cut(self, start: int, end: int) -> Samples:
        """Return the rows from `start` to before `end`, as views."""
        group = None if self.group is None else self.group[start:end]
        x = _each(Tensor.narrow, self.x, 0, start, end - start)
        return Samples(x, self.y[start:end], group)

    def to(self, device: torch.device | str) -> Samples:
        """Return the same rows on a device."""
        group = None if self.group is None else self.group.to(device)
        return Samples(_each(Tensor.to, self.x, device), self.y.to(device), group)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples held in memory. The data are private and not printed; the names are public.

    Attributes:
        x: features [sample, ...], or a tuple or dict of such tensors for a model with several
            inputs. `take` returns uint8 features as float32, divided by 255, and leaves other
            dtypes unchanged.
        y: targets [sample], or any other shape that the loss accepts.
        group: each sample's group [sample] int64, a position in `group_names`; None without groups.
        group_names: public names of all groups, including groups without samples.
        class_names: public names of the classes; empty if y is not a class or classes are unnamed.
        name: name for reports.
        records: public number of records from which q, T and δ are computed, such as the share of
            a split times the number of all records; None: the length, which ε does not cover.
        marks: random word of each sample [sample] int64, a function of its raw fields alone (see
            `evenclip.data.sample`), by which later choices among the samples are made; None: a
            function of x, y and group.

    Raises:
        ValueError: there are no samples, lengths differ, values are non-finite, or a code has no
            name.
        TypeError: a value is not a tensor, or codes are not int64.

    >>> data = Dataset(torch.eye(3), torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), ("a", "b"))
    >>> len(data), data.K
    (3, 2)
    >>> data.take(torch.tensor([2])).group
    tensor([1])
    """

    x: Inputs = field(repr=False)
    y: Tensor = field(repr=False)
    group: Tensor | None = field(default=None, repr=False)
    group_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    name: str = "data"
    records: int | None = None
    marks: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_fields(Dataset, self, _PUBLIC)
        tensors = _named(self.x, self.y, self.group)
        marks = {} if self.marks is None else {"marks": self.marks}
        validation.check_lengths(tensors | marks)
        if self.records is not None:
            check.natural(records=self.records)
        for name, tensor in tensors.items():
            validation.check_finite(name, tensor)
        validation.check_groups(self.group, self.group_names)
        validation.check_classes(self.y, self.class_names)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def K(self) -> int:
        """Number of groups; 1 without groups."""
        return max(1, len(self.group_names))

    @property
    def n(self) -> int:
        """The public number of records, or the length if there is none."""
        return len(self) if self.records is None else self.records

    def take(self, indices: Tensor) -> Samples:
        """Return the rows at `indices` [row] int64, with bytes as floats.

        `indices` is on the dataset's device and may be empty.
        """
        return Samples(self.x, self.y, self.group).take(indices)

    def fingerprints(self) -> list[str]:
        """Return a line for each tensor, with a digest of its bits; never publish it."""
        return _fingerprints(Samples(self.x, self.y, self.group))

    def to(self, device: torch.device | str) -> Dataset:
        """Return the same data on a device."""
        x, y, group = Samples(self.x, self.y, self.group).to(device)
        return dataclasses.replace(self, x=x, y=y, group=group)


@dataclass(frozen=True, eq=False)
class MapDataset(Streamed):
    """Samples that a map-style torch dataset reads on demand; nothing is kept in memory.

    A row is (x, y) or (x, y, group), converted as `as_dataset` converts arrays, so that `take`
    returns the same rows as a `Dataset`. Rows are checked when they are read. Non-finite features
    are accepted, because an error in the middle of training would not help.

    Attributes:
        source: dataset with a length; row i is source[i].
        group_names: as in `Dataset`; required if rows have a group, because finding the names would
            mean reading all rows.
        class_names: as in `Dataset`.
        name: name for reports.
        device: device of the rows that `take` returns.
        uncovered: earlier accesses to the data that ε does not cover, as phrases for the privacy
            report.
        labels: number of the model's outputs, and the label that its loss ignores; None: not known
            yet.

    Raises:
        ValueError: there are no samples, rows have another form or cannot be read, or groups have
            no names.
        TypeError: the source has no length, or a value is not a number.
    """

    source: torch_data.Dataset[Any] = field(repr=False)
    group_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    name: str = "data"
    device: torch.device | str = "cpu"
    uncovered: tuple[str, ...] = ()
    labels: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_fields(MapDataset, self)
        device_of(self.device)
        _check_repeats(self.source)
        if len(self) == 0:
            raise ValueError(validation.NO_SAMPLES)
        self.take(torch.tensor([0]))

    def __len__(self) -> int:
        if not isinstance(self.source, Sized):
            kind = type(self.source).__name__
            raise TypeError(
                f"{kind} has no length, and the sampling rate is q = B/n; give it a __len__."
            )
        return len(self.source)

    def take(self, indices: Tensor) -> Samples:
        """Return the rows at `indices` [row] int64, collated; `indices` may be empty."""
        samples = self.read(indices.tolist()).to(self.device)
        return samples._replace(x=_each(_floats, samples.x))

    def read(self, rows: list[int]) -> Samples:
        """Return the rows on the CPU with bytes unchanged, as other processes send them."""
        if not rows:  # the shapes of an empty batch are those of one row, cut to length 0
            return self.read([0]).cut(0, 0)
        columns = torch_data.default_collate([arrays.item(self.source, i) for i in rows])
        x = tuple(columns[0]) if isinstance(columns[0], list) else columns[0]
        samples = Samples(
            x, arrays.whole(columns[1]), arrays.whole(columns[2]) if len(columns) == 3 else None
        )
        validation.check_groups(samples.group, self.group_names)
        validation.check_classes(samples.y, self.class_names)
        if self.labels is not None:
            validation.check_labels(samples.y, rows, *self.labels)
        return samples

    def to(self, device: torch.device | str) -> MapDataset:
        """Return the same data; `take` puts the rows on the device."""
        return dataclasses.replace(self, device=device)

    def labelled(self, outputs: int, ignored: int) -> MapDataset:
        """Return the same data; reading a label without an output of the model raises an error."""
        return dataclasses.replace(self, labels=(outputs, ignored))

    def fingerprints(self) -> list[str]:
        """Return the fingerprints of the first rows; using all would mean reading everything."""
        return _fingerprints(self.take(torch.arange(min(16, len(self)))))

    def ahead(self, batches: Iterator[Tensor], readers: int) -> Feed:
        """Return a feed of these batches, read by `readers` processes, or on demand if 0."""
        from evenclip.data.readers import OnDemand, ReaderPool

        return ReaderPool(self, batches, readers) if readers else OnDemand(self)


class Splits(NamedTuple):
    """A dataset split into rows for training, for reporting, and for choosing settings."""

    train: Dataset
    test: Dataset
    validation: Dataset | None = None


def _check_repeats(source: Any) -> None:
    """Raise if a dataset made of others holds one of them, or one of their rows, twice."""
    parts = list(source.datasets) if isinstance(source, torch_data.ConcatDataset) else []
    rows = list(source.indices) if isinstance(source, torch_data.Subset) else []
    if len({id(part) for part in parts}) < len(parts):
        raise ValueError(
            "data is a ConcatDataset that holds one dataset twice, so each record would count as "
            "two; give it once."
        )
    if len(set(map(int, rows))) < len(rows):
        raise ValueError(
            "data is a Subset that holds one row twice, so a record would count as two; give each "
            "row once."
        )
    for part in [*parts, *([source.dataset] if isinstance(source, torch_data.Subset) else [])]:
        _check_repeats(part)


def as_dataset(data: Any, *, group_names: Sequence[str] = ()) -> Dataset | Streamed:
    """Convert tensors, numpy arrays or a torch dataset to a dataset for training.

    Floating numpy arrays are converted to torch's default dtype; tensors and integer features are
    unchanged. Integers and booleans in y and group become int64. Strings become codes: positions in
    `group_names`, or else in the sorted list of the strings. Arrays are copied, tensors are not. A
    `TensorDataset` becomes a `Dataset`, any other torch dataset a `MapDataset`.

    Args:
        data: (x, y) or (x, y, group) of tensors or numpy arrays, where x may be a tuple or dict of
            them; a `Dataset` or `MapDataset`; or a map-style torch dataset with such rows. A
            dataset of `evenclip.data.parquet` is returned unchanged.
        group_names: public names of the groups. Without them, the names of an array's groups are
            read from the data, and ε does not cover that: the sorted strings, or "0" to "K−1" for
            codes that are all in use.

    Raises:
        TypeError: `data` is anything else; the message lists the accepted forms.
        ValueError: `Dataset` refuses the data, or `group_names` lacks a group.

    >>> import numpy as np
    >>> data = as_dataset((np.eye(3), np.array([True, False, True]), np.array(["m", "f", "f"])))
    >>> data.y, data.group, data.group_names
    (tensor([1, 0, 1]), tensor([1, 0, 0]), ('f', 'm'))
    """
    check_kinds(as_dataset, {"group_names": group_names})
    names = tuple(group_names)
    if isinstance(data, Dataset | MapDataset):
        return dataclasses.replace(data, group_names=names) if names else data
    if isinstance(data, Streamed):
        return data
    if isinstance(data, torch_data.TensorDataset):
        return as_dataset(data.tensors, group_names=names)
    if isinstance(data, torch_data.IterableDataset):
        raise TypeError(
            f"data is {describe(data)}, an IterableDataset, which is read in its own order; "
            "Poisson sampling draws every row independently at each step and needs random "
            f"access: {ACCEPTED}."
        )
    if isinstance(data, torch_data.Dataset):
        return MapDataset(data, group_names=names)
    if isinstance(data, tuple) and len(data) in (2, 3):
        return _from_arrays(*data, group_names=names)
    raise TypeError(f"data is {describe(data)}; {ACCEPTED}.{remedy(data)}")


def _from_arrays(
    x: Any, y: Any, group: Any = None, *, group_names: tuple[str, ...] = ()
) -> Dataset:
    """Build a `Dataset` from tensors or arrays."""
    y, class_names = arrays.coded("y", y, ())
    if group is not None:
        group, group_names = arrays.coded("group", group, group_names)
        group_names = group_names or arrays.numbered(group)
    return Dataset(arrays.inputs(x), y, group, group_names, class_names)


def _each(function: Callable[..., Tensor], x: Inputs, *arguments: Any) -> Inputs:
    """Apply `function(tensor, *arguments)` to every tensor in x."""
    if isinstance(x, Tensor):
        return function(x, *arguments)
    if isinstance(x, dict):
        return {key: function(leaf, *arguments) for key, leaf in x.items()}
    return tuple(function(leaf, *arguments) for leaf in x)


def _taken(values: Tensor, indices: Tensor) -> Tensor:
    """Return some rows of features, with bytes as floats."""
    return _floats(values.index_select(0, indices))


def _floats(values: Tensor) -> Tensor:
    """Convert bytes to float32 in [0, 1]; other dtypes are unchanged."""
    return values if values.dtype is not torch.uint8 else values.to(torch.float32).div_(255)


def _fingerprints(samples: Samples) -> list[str]:
    """Return the fingerprints of all tensors of the samples."""
    lines = []
    for name, tensor in _named(*samples).items():
        if isinstance(tensor, Tensor):
            bits = Bits()
            bits.add(tensor)
            lines.append(fingerprint(name, tensor.dtype, tensor.shape, bits))
    return lines


def _named(x: Any, y: Any, group: Any) -> dict[str, Any]:
    """Return everything that should be a tensor, by its name in error messages."""
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, tuple) else ()
    leaves = {f"x[{key!r}]": leaf for key, leaf in items} or {"x": x}
    return {**leaves, "y": y} if group is None else {**leaves, "y": y, "group": group}
