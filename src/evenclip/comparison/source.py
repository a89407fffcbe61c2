"""The data of a comparison as plain values that worker processes can load."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenclip.arguments import shown
from evenclip.data import SOURCES, Dataset, Source, Splits, data_directory
from evenclip.sweep import Store
from evenclip.sweep.describe import (
    NO_DATASET,
    describe_dataset,
    describe_file,
    file_sizes,
    find_source,
    save_splits,
)

__all__ = ["check_groups", "describe_data"]


def describe_data(
    data: Any, target: str | None, group: str | Sequence[str] | None, options: dict[str, Any],
    data_dir: str | os.PathLike[str] | None, store: Store,
) -> dict[str, Any]:  # fmt: skip
    """The data as plain values."""
    if isinstance(data, Splits):
        return save_splits(data, store.root / "data")
    if hasattr(data, "to_parquet"):  # a DataFrame, without importing pandas to ask
        data = _written(data, store.root / "data")
    if not isinstance(data, (str, os.PathLike)):
        raise TypeError(
            f"data is {shown(data)}; give the name of a dataset, a file, "
            "file.py:name for your own dataset, a DataFrame, or Splits."
        )
    if ".py:" in str(data):
        return _custom(str(data), target, group, options, data_dir)
    path = Path(data)
    if path.suffix == ".py":
        raise ValueError(
            f"{path} is a Python file; name the dataset that it defines, as in {path}:name."
        )
    if path.suffix or path.exists():
        return _table(path, target, group, options)
    return _named(str(data), target, group, options, data_dir)


def _named(
    name: str, target: str | None, group: str | Sequence[str] | None, options: dict[str, Any],
    data_dir: str | os.PathLike[str] | None,
) -> dict[str, Any]:  # fmt: skip
    """A dataset of the catalogue as plain values."""
    if name not in SOURCES:
        raise ValueError(NO_DATASET.format(name, ", ".join(SOURCES)))
    options = _chosen(SOURCES[name], name, target, group, options)
    directory = data_directory(None if data_dir is None else Path(data_dir))
    sizes = file_sizes({"name": name}, directory)  # of partial or other copies
    where = {} if directory is None else {"directory": str(directory.resolve())}
    return {"name": name, "options": options, "files": sizes, **where}


def _custom(
    given: str, target: str | None, group: str | Sequence[str] | None, options: dict[str, Any],
    data_dir: str | os.PathLike[str] | None,
) -> dict[str, Any]:  # fmt: skip
    """A dataset of the user's own Python file as plain values."""
    path, _, name = given.rpartition(":")
    source = find_source({"dataset": name, **describe_file(path)})
    assert source is not None
    options = _chosen(source, given, target, group, options)
    directory = data_directory(None if data_dir is None else Path(data_dir))
    return describe_dataset(given, options, directory)


def _chosen(
    source: Source, label: str, target: str | None, group: str | Sequence[str] | None,
    options: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The options of a named or custom dataset, with the group; raise for those that it lacks."""
    if target is not None:
        raise ValueError(f"{label!r} is a dataset with a fixed target; leave --target out.")
    if group is not None:
        if not source.attributes or not isinstance(group, str):
            raise ValueError(f"--group is {group}; {label} {_attributes(source)}")
        options = {**options, "group": group}
    known = (*source.options, "group") if source.attributes else source.options
    for option in options:
        if option not in known:
            raise ValueError(
                f"--{option.replace('_', '-')} is not for {label}; it is for {_owner(option)}."
            )
    return options


def _attributes(source: Source) -> str:
    """What --group may be for this dataset, as half a sentence."""
    if not source.attributes:
        return "has its own groups: leave --group out."
    *others, last = source.attributes
    return f"has the groups {', '.join(others)} and {last}: choose one."


def _owner(option: str) -> str:
    """The datasets that an option is for; tables, if it is no dataset's."""
    return (
        ", ".join(source.name for source in SOURCES.values() if option in source.options) or _TABLES
    )


_TABLES = "tables"


def _table(
    path: Path, target: str | None, group: str | Sequence[str] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """A file as plain values."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there; give the path of a CSV, TSV, Parquet or Feather file."
        )
    for name, value in (("target", target), ("group", group)):
        if not value:
            raise ValueError(f"A table needs --{name}: the name of the column {_PURPOSE[name]}.")
    for option in options:
        if _owner(option) != _TABLES:
            raise ValueError(
                f"--{option.replace('_', '-')} is not for tables; it is for {_owner(option)}."
            )
    test = options.pop("test", None)
    named = [group] if isinstance(group, str) else list(group or ())
    beside = {} if test is None else {"test": describe_file(test)}
    chosen = {"target": target, "group": named, **options}
    return {"table": True, "options": chosen, **describe_file(path), **beside}


_PURPOSE = {"target": "to predict", "group": "whose groups are compared"}


def _written(frame: Any, folder: Path) -> Path:
    """A DataFrame as a file that workers can read; the same file for the same content."""
    import hashlib
    import io

    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    frame.to_parquet(buffer)
    path = folder / f"{hashlib.sha256(buffer.getvalue()).hexdigest()[:24]}.parquet"
    if not path.exists():
        scratch = path.with_suffix(f".writing-{os.getpid()}")
        scratch.write_bytes(buffer.getvalue())
        scratch.replace(path)
    return path


def check_groups(train: Dataset, test: Dataset) -> None:
    """Raise where there is nothing to compare."""
    if train.K < 2 or train.group is None:
        raise ValueError(
            "The data have one group only; a comparison needs at least two: choose another group "
            "column, or give the data more groups."
        )
    if len(set(train.y.tolist())) < 2:
        raise ValueError("The training rows have one class only; there is nothing to predict.")
    if train.K != test.K:
        raise ValueError(
            f"Training rows have {train.K} groups and test rows {test.K}; they must be the same."
        )
