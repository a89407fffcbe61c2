"""Data as plain values: a named or custom dataset, a table, or splits given in memory.

With `rows` in the description, each split is sampled down to about that many rows. With `hold_out`,
about this fraction of the training rows becomes the validation split, unless there is one. Both are
decided row by row, by the marks of the rows. With `split`, this seed splits the data in every run.

The `content` of a custom dataset is a digest of what it returned for seed 0, because its file may
read others.
"""

from __future__ import annotations

import hashlib
import inspect
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenclip.data import SOURCES, Dataset, Source, Splits, data_directory
from evenclip.data.sample import Coins, coins
from evenclip.data.source import NUMBER, check_splits, source_of
from evenclip.files import kinds, make_folder, write
from evenclip.sweep.describe.files import (
    call,
    check_content,
    describe_file,
    load_module,
    read_content,
)

__all__ = [
    "NO_DATASET",
    "Loaded",
    "describe_dataset",
    "file_sizes",
    "find_source",
    "load_data",
    "save_splits",
]

NO_DATASET = (
    "There is no dataset {!r}; choose among {}, or give a table or your own dataset "
    "(my_data.py:name)."
)


@dataclass(frozen=True)
class Loaded:
    """Data and the notes about them.

    Attributes:
        splits: training, test and optionally validation rows.
        pair: the two groups whose gap is reported; None: the largest gap of any two.
        uncovered: accesses to the data that ε does not cover.
        notes: notes for the user.
        small: groups too small to judge.
    """

    splits: Splits
    pair: tuple[str, str] | None = None
    uncovered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


def load_data(description: Mapping[str, Any], seed: int) -> Loaded:
    """Load the data of a run."""
    seed = int(description.get("split", seed))
    loaded = _load(description, seed)
    rows = description.get("rows")
    if rows:
        loaded = replace(loaded, splits=_fewer(loaded.splits, int(rows), seed))
    fraction = description.get("hold_out")
    if fraction and loaded.splits.validation is None:
        loaded = replace(loaded, splits=_held_out(loaded.splits, float(fraction), seed))
    return loaded


def _load(description: Mapping[str, Any], seed: int) -> Loaded:
    if description.get("tensors"):
        return _tensors(description)
    if description.get("table"):
        return _table(description, seed)
    source = find_source(description)
    if source is None:
        raise ValueError(NO_DATASET.format(description["name"], ", ".join(SOURCES)))
    directory = data_directory(description.get("directory"))
    if "dataset" in description:
        splits = _custom_splits(description, source, directory, seed)
    else:
        splits = source.load(seed, directory=directory, **description.get("options", {}))
    declared = splits.train.records is not None
    uncovered = tuple(access for access in source.uncovered if not (declared and access == NUMBER))
    return Loaded(splits, source.pair, uncovered)


def find_source(description: Mapping[str, Any]) -> Source | None:
    """Return the `Source` of a named or custom dataset; None for other data and unknown names."""
    if "dataset" not in description:
        return SOURCES.get(description.get("name", ""))
    name, where = description["dataset"], _where(description)
    module = load_module(description)
    if not name or not hasattr(module, name):
        raise ValueError(
            f"{Path(description['path']).name} has no dataset {name!r}; give file.py:name with a "
            f"function of the seed or a Source, such as {_candidates(module)}."
        )
    return source_of(getattr(module, name), name, where)


def _candidates(module: ModuleType) -> str:
    """Return the names of up to five functions and sources that the module defines."""
    own = [
        name
        for name, value in vars(module).items()
        if isinstance(value, Source)
        or (inspect.isfunction(value) and value.__module__ == module.__name__)
    ]
    return ", ".join([name for name in own if not name.startswith("_")][:5]) or "faces(seed)"


def file_sizes(
    description: Mapping[str, Any], directory: str | Path | None = None
) -> dict[str, int]:
    """Return the size of each existing file of a named or custom dataset.

    The size of a file is its number of bytes, that of a folder its number of entries.
    """
    source, root = find_source(description), data_directory(directory)
    files = () if source is None else source.files
    located = [(file.path, file.find(root)) for file in files]
    return {path: _size(location) for path, location in located if location is not None}


def _size(path: Path) -> int:
    return sum(1 for _ in path.iterdir()) if path.is_dir() else path.stat().st_size


def describe_dataset(
    given: str, options: Mapping[str, Any], directory: Path | None
) -> dict[str, Any]:
    """Describe a custom dataset given as file.py:name; it is loaded once, with seed 0."""
    path, _, name = given.rpartition(":")
    description = {"dataset": name, "options": dict(options), **describe_file(path)}
    if directory is not None:
        description["directory"] = str(directory.resolve())
    sizes = file_sizes(description, directory)
    if sizes:
        description["files"] = sizes
    return {**description, "content": _digest(_load(description, 0).splits)}


def _custom_splits(
    description: Mapping[str, Any], source: Source, directory: Path | None, seed: int
) -> Splits:
    """Call the loader of a custom dataset and check what it returns."""
    where = _where(description)
    options = description.get("options", {})
    returned = call(
        lambda: source.load(seed, directory=directory, **options), where, description["path"]
    )
    splits = check_splits(returned, source, where)
    content = description.get("content")
    if seed == 0 and content is not None and _digest(splits) != content:
        raise ValueError(
            f"{where} returned other data for seed 0 than before. It must return the same data "
            "whenever it is called with the same seed: take every random number from a generator "
            "with this seed, do not rely on the order of a set, and leave the files that it reads "
            "unchanged during a comparison."
        )
    return splits


def _where(description: Mapping[str, Any]) -> str:
    """Return a custom dataset as the user named it, without the folder."""
    return f"{Path(description['path']).name}:{description['dataset']}"


def _digest(splits: Splits) -> str:
    """Return the SHA-256 of all tensors and names."""
    digest = hashlib.sha256()
    for data in splits:
        if data is None:
            digest.update(b"no split")
            continue
        digest.update(repr((data.group_names, data.class_names, data.name, data.records)).encode())
        for tensor in (data.x, data.y, data.group):
            assert isinstance(tensor, Tensor)
            digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            plain = tensor.detach().cpu().contiguous().flatten()
            digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _table(description: Mapping[str, Any], seed: int) -> Loaded:
    from evenclip.data.table import table

    options = dict(description["options"])
    test = description.get("test")
    for file in (description, test):
        if file is not None:
            check_content(file)
    tabled = table(
        description["path"], seed=seed, test=None if test is None else test["path"], **options
    )
    for file in (description, test):
        if file is not None:
            check_content(file)  # it may have been replaced while it was read
    return Loaded(tabled.splits, None, tabled.uncovered, tabled.notes, tabled.small)


def save_splits(splits: Splits, folder: Path) -> dict[str, Any]:
    """Write in-memory splits to a file that only this user can read; return their description."""
    make_folder(folder, kinds.ROWS)
    plain = {
        split: {
            "x": data.x,
            "y": data.y,
            "group": data.group,
            "names": [list(data.group_names), list(data.class_names)],
            "records": data.records,
            "marks": data.marks,
        }
        for split, data in zip(Splits._fields, splits, strict=True)
        if data is not None
    }
    buffer = io.BytesIO()  # saved to a path, the content would include the file's name
    torch.save({"name": splits.train.name, **plain}, buffer)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    path = write(folder / f"{digest[:24]}.pt", buffer.getvalue(), kinds.ROWS)
    return {"tensors": True, "path": str(path.resolve()), "sha256": digest}


def _tensors(description: Mapping[str, Any]) -> Loaded:
    plain = torch.load(io.BytesIO(read_content(description)), weights_only=True)
    splits = {
        split: Dataset(
            d["x"],
            d["y"],
            d["group"],
            tuple(d["names"][0]),
            tuple(d["names"][1]),
            plain["name"],
            d["records"],
            d["marks"],
        )
        for split, d in plain.items()
        if split != "name"
    }
    return Loaded(Splits(**splits))


def _fewer(splits: Splits, most: int, seed: int) -> Splits:
    """Sample about `most` rows of each split."""
    train, test, validation = splits
    held = None if validation is None else _sampled(validation, most, seed)
    return Splits(_sampled(train, most, seed), _sampled(test, most, seed), held)


def _sampled(data: Dataset, most: int, seed: int) -> Dataset:
    """Keep each row with probability `most` ÷ number of rows; all if there are no more."""
    if data.n <= most:
        return data
    kept = np.flatnonzero(_coins(data, seed).kept(np.full(len(data), most / data.n)))
    return _rows(data, kept, None if data.records is None else most)


def _held_out(splits: Splits, fraction: float, seed: int) -> Splits:
    """Use each training row for validation with probability `fraction`."""
    train = splits.train
    held, rest = _coins(train, seed).parts(fraction)
    records = None if train.records is None else max(1, round((1 - fraction) * train.records))
    return splits._replace(train=_rows(train, rest, records), validation=_rows(train, held, None))


def _coins(data: Dataset, seed: int) -> Coins:
    """Return the coins of the rows, by their marks or else by their values."""
    if data.marks is not None:
        halves = data.marks.cpu().numpy().view(np.uint32).reshape(-1, 2)  # float64 holds 53 bits
        return coins(seed, halves)
    assert isinstance(data.x, Tensor)
    tensors = (data.x, data.y) if data.group is None else (data.x, data.y, data.group)
    return coins(seed, *(tensor.detach().cpu().numpy() for tensor in tensors))


def _rows(data: Dataset, chosen: NDArray[np.int64], records: int | None) -> Dataset:
    """Select rows; `records` is their public number."""
    assert isinstance(data.x, Tensor)
    if len(chosen) == 0:
        raise ValueError(
            f"Each of the {len(data)} rows was drawn by itself, and none is left; take more rows."
        )
    rows = torch.from_numpy(chosen)
    return replace(
        data,
        x=data.x[rows],
        y=data.y[rows],
        group=None if data.group is None else data.group[rows],
        records=records,
        marks=None if data.marks is None else data.marks[rows],
    )
