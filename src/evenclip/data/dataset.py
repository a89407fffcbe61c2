"""The one form in which data enter training: rows of (x, y, group), taken by index.

Poisson sampling may draw any row at any step, so everything here has a length and random access:

    len(data)           number of samples n
    data.K              number of groups, 1 where there is no group
    data.take(indices)  those rows as Samples(x, y, group)

`Dataset` holds tensors and is strict; `MapDataset` reads its rows from a torch dataset when they
are needed, as `evenclip.data.parquet` does from files; `as_dataset` makes one of the first two from
what users have. Images may be kept as bytes, a quarter of the memory: `take` gives uint8 features
as float32 in [0, 1].
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

from evenclip.data.streamed import Bits, Feed, Streamed, fingerprint

__all__ = ["Dataset", "Inputs", "MapDataset", "Samples", "Splits", "as_dataset"]

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""What a model takes: a tensor [sample, ...]; a tuple or dict of such tensors where it has several inputs."""

ACCEPTED = (
    "give (x, y) or (x, y, group) as a tuple of tensors or numpy arrays, an evenclip Dataset, "
    "or a map-style torch dataset whose items are (x, y) or (x, y, group)"
)
NO_SAMPLES = "The dataset has 0 samples; training needs at least one: was everything filtered out?"


class Samples(NamedTuple):
    """Some rows of a dataset, or all of them."""

    x: Inputs  # [sample, ...]
    y: Tensor  # [sample]
    group: Tensor | None  # [sample] int64

    def take(self, indices: Tensor) -> Samples:
        """The rows at `indices` [row] int64, bytes as floats."""
        group = None if self.group is None else self.group.index_select(0, indices)
        return Samples(_each(_taken, self.x, indices), self.y.index_select(0, indices), group)

    def cut(self, start: int, end: int) -> Samples:
        """The rows from one to before another, not copied."""
        group = None if self.group is None else self.group[start:end]
        return Samples(
            _each(Tensor.narrow, self.x, 0, start, end - start), self.y[start:end], group
        )

    def to(self, device: torch.device | str) -> Samples:
        """The same rows on a device."""
        group = None if self.group is None else self.group.to(device)
        return Samples(_each(Tensor.to, self.x, device), self.y.to(device), group)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples held in memory. The data are private and not printed; the names are public.

    Attributes:
        x: features [sample, ...], or a tuple or dict of such tensors for a model with several
            inputs. Where they are uint8, `take` gives them as float32, divided by 255; other dtypes
            it leaves alone.
        y: targets [sample], or whatever shape the loss takes.
        group: each sample's group [sample] int64, a position in `group_names`; None without groups.
        group_names: the groups, public: a group without any sample is listed too.
        class_names: the classes, public; empty where y is no class or the classes have no names.
        name: for reports.

    Raises:
        ValueError: no samples, lengths that differ, non-finite values, or a code without a name.
        TypeError: something that is not a tensor, or codes that are not int64.

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
        _check_lengths(tensors)
        for name, tensor in tensors.items():
            _check_finite(name, tensor)
        _check_groups(self.group, self.group_names)
        _check_classes(self.y, self.class_names)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def K(self) -> int:
        """Number of groups; 1 where there is no group."""
        return max(1, len(self.group_names))

    def take(self, indices: Tensor) -> Samples:
        """The rows at `indices` [row] int64 on the dataset's device, bytes as floats; there may be
        none.
        """
        return Samples(self.x, self.y, self.group).take(indices)

    def to(self, device: torch.device | str) -> Dataset:
        """The same data on a device."""
        x, y, group = Samples(self.x, self.y, self.group).to(device)
        return dataclasses.replace(self, x=x, y=y, group=group)


@dataclass(frozen=True, eq=False)
class MapDataset(Streamed):
    """Samples that a map-style torch dataset reads when they are needed; nothing is kept in memory.

    A row is (x, y) or (x, y, group), converted as `as_dataset` converts arrays, so that `take`
    gives what a `Dataset` of the same rows gives. Rows are checked when they are read; non-finite
    features are let through, because stopping in the middle of training helps nobody.

    Attributes:
        source: has a length and gives row i as source[i].
        group_names: as in `Dataset`; must be given where rows have a group, since finding them
            would mean reading everything.
        class_names: as in `Dataset`.
        name: for reports.
        device: where `take` puts the rows.
        uncovered: looks at the data before this that ε does not cover, each a phrase for the
            privacy report.
        labels: number of labels that the model knows, and the one that its loss ignores; None: not
            known yet.

    Raises:
        ValueError: no samples, rows of another form, rows that cannot be read, or groups without
            names.
        TypeError: a source without a length, or a value that is no number.
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
            raise ValueError(NO_SAMPLES)
        self.take(torch.tensor([0]))

    def __len__(self) -> int:
        if not isinstance(self.source, Sized):
            kind = type(self.source).__name__
            raise TypeError(
                f"{kind} has no length, and the sampling rate is q = B/n; give it a __len__."
            )
        return len(self.source)

    def take(self, indices: Tensor) -> Samples:
        """The rows at `indices` [row] int64, collated; there may be none."""
        found = self.read(indices.tolist()).to(self.device)
        return found._replace(x=_each(_floats, found.x))

    def read(self, rows: list[int]) -> Samples:
        """The same on the CPU and with bytes left as they are, which is how other processes send
        them.
        """
        if not rows:  # the shapes of no rows are those of one row, cut to length 0
            return self.read([0]).cut(0, 0)
        columns = torch_data.default_collate([_item(self.source, i) for i in rows])
        x = tuple(columns[0]) if isinstance(columns[0], list) else columns[0]
        samples = Samples(x, _whole(columns[1]), _whole(columns[2]) if len(columns) == 3 else None)
        _check_groups(samples.group, self.group_names)
        _check_classes(samples.y, self.class_names)
        if self.labels is not None:
            _check_labels(samples.y, rows, *self.labels)
        return samples

    def to(self, device: torch.device | str) -> MapDataset:
        """The same data, whose rows are put on a device when they are taken."""
        return dataclasses.replace(self, device=device)

    def labelled(self, outputs: int, ignored: int) -> MapDataset:
        """The same data; a row whose label the model has no output for is refused when it is read."""
        return dataclasses.replace(self, labels=(outputs, ignored))

    def fingerprints(self) -> list[str]:
        """Of the first few rows: finding those of all would mean reading everything."""
        return [
            _fingerprint(tensor) for tensor in _tensors(self.take(torch.arange(min(16, len(self)))))
        ]

    def ahead(self, batches: Iterator[Tensor], readers: int) -> Feed:
        """The rows of these batches, read by so many processes; by this one when they are asked for
        if there are 0.
        """
        from evenclip.data.readers import Processes, Untimely

        return Processes(self, batches, readers) if readers else Untimely(self)


class Splits(NamedTuple):
    """A dataset cut up: what is trained on, what is reported on, and what settings may be chosen
    on.
    """

    train: Dataset
    test: Dataset
    validation: Dataset | None = None


def as_dataset(data: Any, *, group_names: Sequence[str] = ()) -> Dataset | Streamed:
    """What users have, in the form that training takes.

    Floating numpy arrays become torch's default dtype; tensors and integer features stay as they
    are. Integers and booleans in y and group become int64, strings become codes: positions in
    `group_names`, or else in their own sorted list. Arrays are copied, tensors are not. A
    `TensorDataset` becomes a `Dataset`, any other torch dataset a `MapDataset`.

    Args:
        data: (x, y) or (x, y, group) of tensors or numpy arrays, where x may be a tuple or dict of
            them; a `Dataset` or `MapDataset`; or a map-style torch dataset with such rows. What
            `evenclip.data.parquet` opened is left as it is.
        group_names: the groups, public. Without them those of an array are read from the data,
            which ε does not cover: its sorted strings, or "0" to "K−1" for codes that are all in
            use.

    Raises:
        TypeError: anything else; the message lists what is accepted.
        ValueError: data that `Dataset` refuses, or groups that `group_names` does not name.

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
            f"data is {_describe(data)}, an IterableDataset, which is read in its own order; "
            "Poisson "
            "sampling draws every row independently at each step and needs random access: "
            f"{ACCEPTED}."
        )
    if isinstance(data, torch_data.Dataset):
        return MapDataset(data, group_names=names)
    if isinstance(data, tuple) and len(data) in (2, 3):
        return _from_arrays(*data, group_names=names)
    raise TypeError(f"data is {_describe(data)}; {ACCEPTED}.{_remedy(data)}")


def _from_arrays(
    x: Any, y: Any, group: Any = None, *, group_names: tuple[str, ...] = ()
) -> Dataset:
    """The `Dataset` of tensors or arrays."""
    y, class_names = _coded("y", y, ())
    if group is not None:
        group, group_names = _coded("group", group, group_names)
        group_names = group_names or _numbered(group)
    return Dataset(_inputs(x), y, group, group_names, class_names)


def _numbered(group: Tensor) -> tuple[str, ...]:
    """The names "0" to "K−1" of groups that have no others."""
    found = np.unique(group.cpu().numpy()).tolist()
    if group.is_floating_point() or found == list(
        range(len(found))
    ):  # `Dataset` will refuse floats
        return tuple(str(code) for code in found)
    raise ValueError(
        f"group has {len(found)} different codes from {found[0]} to {found[-1]}; without "
        "group_names they "
        "must be 0 to K−1, each in use: give group_names, or number the groups from 0."
    )


def _inputs(x: Any) -> Inputs:
    """The features as tensors."""
    if isinstance(x, dict):
        return {key: _tensor(f"x[{key!r}]", value) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(_tensor(f"x[{i}]", value) for i, value in enumerate(x))
    return _tensor("x", x)


def _coded(name: str, values: Any, names: tuple[str, ...]) -> tuple[Tensor, tuple[str, ...]]:
    """Targets or groups as a tensor, and their names; strings without names are sorted to make
    them.
    """
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "UOT":
        return _whole(_tensor(name, values)), names
    if not all(isinstance(value, str) for value in values.flat):
        raise TypeError(
            f"{name} has dtype {values.dtype} and values that are not strings, such as missing "
            "ones; remove "
            "them, or give integers or strings only."
        )
    found, codes = np.unique(values.astype(str), return_inverse=True)
    names = names or tuple(found.tolist())
    unknown = [value for value in found.tolist() if value not in names]
    if unknown:
        raise ValueError(
            f"{name} has the value {unknown[0]!r}, which is not one of {names}; add it to them."
        )
    positions = np.array(
        [names.index(value) for value in found.tolist()], dtype=np.int64
    )  # [found value]
    return torch.from_numpy(positions[codes]), names


def _item(source: Any, i: int) -> tuple[Inputs | Tensor, ...]:
    """One row of a torch dataset."""
    try:
        item = source[i]
    except Exception as error:
        raise ValueError(
            f"Item {i} of the dataset cannot be read ({type(error).__name__}: {error}); correct "
            "it, or leave it out."
        ) from error
    return _row(item)


def _row(item: Any) -> tuple[Inputs | Tensor, ...]:
    """One item of a torch dataset with its parts as tensors."""
    if not isinstance(item, tuple | list) or len(item) not in (2, 3):
        raise ValueError(
            f"An item of the dataset is {_describe(item)}; it must be (x, y) or (x, y, group)."
        )
    return _inputs(item[0]), _tensor("y", item[1]), *(_tensor("group", group) for group in item[2:])


def _tensor(name: str, value: Any) -> Tensor:
    """A tensor as it is; numbers and numpy arrays copied, floating ones to torch's default dtype."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(
            f"{name} is {_describe(value)}; give a tensor or a numpy array.{_remedy(value)}"
        )
    if value.dtype.kind not in "fiub":
        raise TypeError(f"{name} has dtype {value.dtype}; encode it as numbers before training.")
    default = torch.empty(0).numpy().dtype
    dtype = default if value.dtype.kind == "f" else value.dtype.newbyteorder("=")
    return torch.from_numpy(np.array(value, dtype=dtype, order="C"))


def _whole(values: Tensor) -> Tensor:
    """Integers and booleans as int64, with which losses and group counts index; floats as they are."""
    return values if values.is_floating_point() else values.long()


def _each(function: Callable[..., Tensor], x: Inputs, *arguments: Any) -> Inputs:
    """`function(tensor, *arguments)` of every tensor in x."""
    if isinstance(x, Tensor):
        return function(x, *arguments)
    if isinstance(x, dict):
        return {key: function(leaf, *arguments) for key, leaf in x.items()}
    return tuple(function(leaf, *arguments) for leaf in x)


def _taken(values: Tensor, indices: Tensor) -> Tensor:
    """Some rows of features."""
    return _floats(values.index_select(0, indices))


def _floats(values: Tensor) -> Tensor:
    """Bytes as float32 in [0, 1]; anything else as it is."""
    return values if values.dtype is not torch.uint8 else values.to(torch.float32).div_(255)


def _tensors(samples: Samples) -> list[Tensor]:
    """All of them, in one order."""
    found = list(_named(*samples).values())
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _fingerprint(tensor: Tensor) -> str:
    """A line that changes with every bit, wherever and on however many threads it is made."""
    bits = Bits(tensor.numel() * tensor.element_size())
    bits.add(tensor)
    return fingerprint(tensor.dtype, tensor.shape, bits)


def _named(x: Any, y: Any, group: Any) -> dict[str, Any]:
    """Everything that should be a tensor, by the name it has in messages."""
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, tuple) else ()
    leaves = {f"x[{key!r}]": leaf for key, leaf in items} or {"x": x}
    return {**leaves, "y": y} if group is None else {**leaves, "y": y, "group": group}


def _check_lengths(tensors: dict[str, Any]) -> None:
    """Raise unless all are tensors with one row per sample, and there is a sample."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} is {_describe(tensor)}; Dataset holds tensors: use as_dataset."
            )
        if tensor.ndim == 0:
            raise ValueError(f"{name} is a single number; it must have one row per sample.")
    lengths = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"The numbers of rows differ: {listed}; give one row per sample in each.")
    if lengths["y"] == 0:
        raise ValueError(NO_SAMPLES)


def _check_finite(name: str, values: Tensor) -> None:
    """Raise if there is a NaN or an infinity, saying how many and where."""
    # A finite sum has finite terms: one pass, and no mask of the size of the data. An infinite one
    # may be an overflow, hence the second look.
    if not values.is_floating_point() or torch.isfinite(values.sum()):
        return
    bad = ~torch.isfinite(values)
    rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten()  # [row that has one]
    if len(rows):
        raise ValueError(
            f"{name} has {int(bad.sum())} non-finite values in {len(rows)} of {len(values)} rows "
            f"(first: row {int(rows[0])}); remove or impute them before training."
        )


def _check_groups(group: Tensor | None, group_names: tuple[str, ...]) -> None:
    """Raise unless there are both groups and names for them, or neither."""
    if group is None and not group_names:
        return
    if group is None:
        raise ValueError(
            f"group_names is {group_names} but there is no group; give both or neither."
        )
    if group.ndim != 1:
        raise ValueError(
            f"group has shape {list(group.shape)}; it must be [sample], one code for each."
        )
    if group.dtype != torch.int64:
        raise TypeError(
            f"group has dtype {group.dtype}; it must hold int64 codes, positions in group_names."
        )
    if not group_names:
        raise ValueError(
            "There is a group but no group_names; give the public names of all groups."
        )
    _check_codes("group", group, "group_names", group_names)


def _check_classes(y: Tensor, class_names: tuple[str, ...]) -> None:
    """Raise if y holds codes that have no name, where the classes have names."""
    if class_names and not y.is_floating_point():
        _check_codes("y", y, "class_names", class_names)


def _check_labels(y: Tensor, rows: list[int], outputs: int, ignored: int) -> None:
    """Raise for a class label that the model has no output for."""
    if y.is_floating_point():
        return
    wrong = ((y < 0) | (y >= outputs)) & (y != ignored)
    if wrong.any():
        place = wrong.nonzero()[0]
        raise ValueError(
            f"Item {rows[int(place[0])]} of the dataset has the label {int(y[tuple(place)])} and "
            "the model has "
            f"{outputs} outputs, for the labels 0 to {outputs - 1}; number the classes from 0, or "
            "give the model more "
            "outputs."
        )


def _check_codes(name: str, codes: Tensor, names_field: str, names: tuple[str, ...]) -> None:
    """Raise unless the codes are positions in the names, and the names differ."""
    if len(set(names)) < len(names):
        raise ValueError(f"{names_field} is {names}; each name may appear only once.")
    lowest, highest = (int(code) for code in codes.aminmax())
    if lowest < 0 or highest >= len(names):
        raise ValueError(
            f"{name} has codes from {lowest} to {highest} and {names_field} has {len(names)} "
            "names, so codes "
            f"must lie from 0 to {len(names) - 1}; add the missing names or correct the codes."
        )


def _describe(value: Any) -> str:
    """What was given, in words."""
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    return (
        f"{article} {kind} of {len(value)}"
        if isinstance(value, tuple | list)
        else f"{article} {kind}"
    )


def _remedy(value: Any) -> str:
    """What to do with the usual wrong things; known by name, because pandas is not imported here."""
    remedies = {
        "DataFrame": " Encode the columns of a DataFrame as numbers and pass their .to_numpy().",
        "Series": " Pass the .to_numpy() of a Series.",
        "DataLoader": " Pass the .dataset of a DataLoader.",
        "list": " Pass numpy.array(...) of a list.",
    }
    return remedies.get(type(value).__name__, "")
