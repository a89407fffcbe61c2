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
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from evenclip.data import validation
from evenclip.data.streamed import Bits, Feed, Streamed, fingerprint
from evenclip.data.validation import describe, remedy

__all__ = ["Dataset", "Inputs", "MapDataset", "Samples", "Splits", "as_dataset"]

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""Input of a model: a tensor [sample, ...], or a tuple or dict of them for several inputs."""

ACCEPTED = (
    "give (x, y) or (x, y, group) as a tuple of tensors or numpy arrays, an evenclip Dataset, or "
    "a map-style torch dataset whose items are (x, y) or (x, y, group)"
)


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

    def __post_init__(self) -> None:
        tensors = _named(self.x, self.y, self.group)
        validation.check_lengths(tensors)
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
        columns = torch_data.default_collate([_item(self.source, i) for i in rows])
        x = tuple(columns[0]) if isinstance(columns[0], list) else columns[0]
        samples = Samples(x, _whole(columns[1]), _whole(columns[2]) if len(columns) == 3 else None)
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

    >>> data = as_dataset((np.eye(3), np.array([True, False, True]), np.array(["m", "f", "f"])))
    >>> data.y, data.group, data.group_names
    (tensor([1, 0, 1]), tensor([1, 0, 0]), ('f', 'm'))
    """
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
    y, class_names = _coded("y", y, ())
    if group is not None:
        group, group_names = _coded("group", group, group_names)
        group_names = group_names or _numbered(group)
    return Dataset(_inputs(x), y, group, group_names, class_names)


def _numbered(group: Tensor) -> tuple[str, ...]:
    """Return the names "0" to "K−1" for groups without names."""
    codes = np.unique(group.cpu().numpy()).tolist()
    if group.is_floating_point() or codes == list(range(len(codes))):  # `Dataset` refuses floats
        return tuple(str(code) for code in codes)
    raise ValueError(
        f"group has {len(codes)} different codes from {codes[0]} to {codes[-1]}; without "
        "group_names they must be 0 to K−1, each in use: give group_names, or number the groups "
        "from 0."
    )


def _inputs(x: Any) -> Inputs:
    """Convert the features to tensors."""
    if isinstance(x, dict):
        return {key: _tensor(f"x[{key!r}]", value) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(_tensor(f"x[{i}]", value) for i, value in enumerate(x))
    return _tensor("x", x)


def _coded(name: str, values: Any, names: tuple[str, ...]) -> tuple[Tensor, tuple[str, ...]]:
    """Return targets or groups as a tensor, and their names; by default the sorted strings."""
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "UOT":
        return _whole(_tensor(name, values)), names
    if not all(isinstance(value, str) for value in values.flat):
        raise TypeError(
            f"{name} has dtype {values.dtype} and values that are not strings, such as missing "
            "ones; remove them, or give integers or strings only."
        )
    distinct, codes = np.unique(values.astype(str), return_inverse=True)
    names = names or tuple(distinct.tolist())
    unknown = [value for value in distinct.tolist() if value not in names]
    if unknown:
        raise ValueError(
            f"{name} has the value {unknown[0]!r}, which is not one of {names}; add it to them."
        )
    positions = [names.index(value) for value in distinct.tolist()]
    return torch.from_numpy(np.array(positions, dtype=np.int64)[codes]), names


def _item(source: Any, i: int) -> tuple[Inputs | Tensor, ...]:
    """Read one row of a torch dataset."""
    try:
        item = source[i]
    except Exception as error:
        raise ValueError(
            f"Item {i} of the dataset cannot be read ({type(error).__name__}: {error}); correct "
            "it, or leave it out."
        ) from error
    return _row(item)


def _row(item: Any) -> tuple[Inputs | Tensor, ...]:
    """Convert the elements of an item to tensors."""
    if not isinstance(item, tuple | list) or len(item) not in (2, 3):
        raise ValueError(
            f"An item of the dataset is {describe(item)}; it must be (x, y) or (x, y, group)."
        )
    return _inputs(item[0]), _tensor("y", item[1]), *(_tensor("group", group) for group in item[2:])


def _tensor(name: str, value: Any) -> Tensor:
    """Return a tensor; numpy arrays are copied, floating ones to torch's default dtype."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(
            f"{name} is {describe(value)}; give a tensor or a numpy array.{remedy(value)}"
        )
    if value.dtype.kind not in "fiub":
        raise TypeError(f"{name} has dtype {value.dtype}; encode it as numbers before training.")
    default = torch.empty(0).numpy().dtype
    dtype = default if value.dtype.kind == "f" else value.dtype.newbyteorder("=")
    return torch.from_numpy(np.array(value, dtype=dtype, order="C"))


def _whole(values: Tensor) -> Tensor:
    """Convert integers and booleans to int64, for use as indices; floats are unchanged."""
    return values if values.is_floating_point() else values.long()


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
