"""The description of a dataset, and the checks of what its loader returns.

A dataset of the package is one module with a loader and one constant:

    SOURCE = Source(name="faces", load=_load, ...)

A custom dataset is a `Source` in your own file, or a function of the seed that returns `Splits`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenclip import check
from evenclip.arguments import check_fields
from evenclip.data.dataset import Dataset, Splits
from evenclip.data.disk import File
from evenclip.data.validation import describe

__all__ = ["NUMBER", "Source", "check_splits", "source_of"]

NUMBER = (
    "The number n of training records, from which q = B/n and the number of steps follow, is "
    "read off the data."
)
"""The access to the data that ε never covers."""


@dataclass(frozen=True)
class Source:
    """A dataset: what it is, where its files come from, and how to load it.

    Attributes:
        name: key in the catalogue.
        load: load(seed, directory=None, **options) -> Splits.
        title: short description.
        rows: number of records before any sampling; None: unknown.
        groups: names of the groups; empty: those of the loaded data.
        licence: licence of the data.
        origin: where to get the data.
        files: files that the data directory must hold; empty if none are needed.
        pair: the two groups whose gap is reported; None: the pair with the largest gap.
        uncovered: each access to the data that ε does not cover, as a sentence.
        incomplete: function of the data directory that returns what the existing files lack, as
            half a sentence, or None if they are complete.
        fixed_test: whether the test records are the same for every seed.
        attributes: the protected attributes that `group` chooses among; empty: the groups are
            fixed.
        options: names of further options of `load` that a comparison accepts.
        model: the default model, in the form of `--model`; None: cnn for the square images of a
            custom dataset, and the model of tables for everything else.
    """

    name: str
    load: Callable[..., Splits]
    title: str = ""
    rows: int | None = None
    groups: tuple[str, ...] = ()
    licence: str = "none stated"
    origin: str = ""
    files: tuple[File, ...] = ()
    pair: tuple[str, str] | None = None
    uncovered: tuple[str, ...] = ()
    incomplete: Callable[[Path], str | None] | None = None
    fixed_test: bool = False
    attributes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    model: str | None = None

    def __post_init__(self) -> None:
        check_fields(Source, self)
        if self.rows is not None:
            check.natural(rows=self.rows)

    def missing(self, directory: Path | None) -> tuple[File, ...]:
        """Return the files that the data directory lacks."""
        return tuple(file for file in self.files if file.find(directory) is None)

    def lacks(self, directory: Path | None) -> str | None:
        """Return why the dataset cannot be loaded, as half a sentence; None if it can."""
        absent = self.missing(directory)
        if absent:
            paths = ", ".join(file.path for file in absent)
            return f"{paths} {'is' if len(absent) == 1 else 'are'} missing"
        return None if self.incomplete is None or directory is None else self.incomplete(directory)

    def here(self, directory: Path | None) -> bool:
        """Return whether the dataset can be loaded."""
        return self.lacks(directory) is None


# --- custom datasets ----------------------------------------------------------------------------


def source_of(value: Any, name: str, where: str) -> Source:
    """Return the `Source` of a custom dataset.

    Args:
        value: a `Source`, or a function of the seed that returns `Splits`.
        name: name of the value in its file.
        where: the dataset as the user named it, such as "my_data.py:faces".

    Raises:
        TypeError: the value is anything else, or the function has other parameters.
    """
    uncovered = (
        f"The function {where} may compute values from the data before training, such as a mean "
        "for scaling, a list of categories or a choice of rows.",
        NUMBER,
    )
    if isinstance(value, Source):
        _check_call(value.load, f"load of {where}", "load(seed, directory)", 0, directory=None)
        return value if value.uncovered else replace(value, uncovered=uncovered)
    if not callable(value):
        raise TypeError(
            f"{where} is {describe(value)}; it must be a function of the seed that returns Splits, "
            "or an evenclip.data.Source."
        )
    _check_call(value, where, f"{name}(seed)", 0)

    def load(seed: int = 0, directory: str | Path | None = None) -> Splits:
        del directory
        splits: Splits = value(seed)
        return splits

    return Source(name=name, load=load, uncovered=uncovered)


def _check_call(
    function: Callable[..., Any], where: str, call: str, *given: Any, **named: Any
) -> None:
    """Raise unless the function accepts these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(*given, **named)
    except TypeError:
        raise TypeError(
            f"{where} has the parameters {signature}; it is called as {call}: add those that are "
            "missing, and give all others default values."
        ) from None


def check_splits(splits: Any, source: Source, where: str) -> Splits:
    """Return the splits of a custom dataset after checking that a comparison can use them.

    Classes without names are named by their numbers, and data without a name after the source.

    Args:
        splits: what the loader returned.
        source: the dataset.
        where: the dataset as the user named it, for messages.

    Raises:
        TypeError: the value is not `Splits` of `Dataset`, or a tensor has another type.
        ValueError: the splits differ in shape, type or names, or the names are not the source's.
    """
    if not isinstance(splits, Splits):
        raise TypeError(
            f"{where} returned {describe(splits)}; it must return Splits(train, test), or "
            "Splits(train, test, validation), from evenclip.data."
        )
    parts = {part: data for part, data in splits._asdict().items() if data is not None}
    for part in ("train", "test"):
        if part not in parts:
            raise TypeError(f"{where} returned no {part} split; a comparison needs both.")
    for part, data in parts.items():
        _check_part(data, f"The {part} split of {where}")
        _check_same(splits.train, data, part, where)
    _check_names(source, splits.train, where)
    # Not only the classes of the training rows: another class in a test row is a different error.
    classes = 1 + max(int(data.y.max()) for data in parts.values())
    named = {
        part: replace(
            data,
            class_names=data.class_names or tuple(str(code) for code in range(classes)),
            name=source.name if data.name == "data" else data.name,
        )
        for part, data in parts.items()
    }
    return Splits(**named)


def _check_part(data: Any, said: str) -> None:
    """Raise unless a comparison can use this split; `said` names it."""
    if not isinstance(data, Dataset):
        raise TypeError(
            f"{said} is {describe(data)}; it must be an evenclip.data.Dataset: as_dataset converts "
            "arrays."
        )
    if not isinstance(data.x, Tensor):
        raise TypeError(f"{said} has {describe(data.x)} as x; a comparison needs one tensor.")
    if data.x.ndim < 2:
        raise ValueError(
            f"{said} has x with shape {list(data.x.shape)}; it must be [row, feature] or "
            "[row, channel, height, width]."
        )
    if data.group is None:
        raise ValueError(
            f"{said} has no groups; give Dataset(x, y, group, group_names), with at least two."
        )
    if data.y.ndim != 1 or data.y.dtype != torch.int64:
        raise TypeError(
            f"{said} has y with dtype {data.y.dtype} and shape {list(data.y.shape)}; it must hold "
            "one class per row, as int64 codes from 0."
        )
    if int(data.y.min()) < 0:
        raise ValueError(f"{said} has the class {int(data.y.min())}; classes are numbered from 0.")


def _check_same(train: Dataset, other: Dataset, part: str, where: str) -> None:
    """Raise unless a split has the shapes and names of the training split."""
    assert isinstance(train.x, Tensor)
    assert isinstance(other.x, Tensor)
    facts = {
        "the shape of a row": (list(train.x.shape[1:]), list(other.x.shape[1:])),
        "the dtype of x": (train.x.dtype, other.x.dtype),
        "group_names": (train.group_names, other.group_names),
        "class_names": (train.class_names, other.class_names),
    }
    for fact, (first, second) in facts.items():
        if first != second:
            raise ValueError(
                f"The splits of {where} differ in {fact}: {first} in train and {second} in {part}; "
                "they must be the same."
            )


def _check_names(source: Source, train: Dataset, where: str) -> None:
    """Raise if the source names other groups than the data."""
    if source.groups and not source.attributes and source.groups != train.group_names:
        raise ValueError(
            f"{where} has the groups {source.groups} and its data {train.group_names}; they must "
            "be the same."
        )
    if source.pair is not None and not set(source.pair) <= set(train.group_names):
        raise ValueError(
            f"pair of {where} is {source.pair}; choose two of the groups "
            f"{', '.join(train.group_names)}."
        )
