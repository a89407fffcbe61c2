"""The data of a comparison as plain values that worker processes can load.

Rows in memory, of a DataFrame or of `Splits`, go to the workers through a file in a folder of the
store that only this user can read and that is removed in every ending (`evenclip.files.private`).
"""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evenclip.arguments import check_path, shown
from evenclip.data import SOURCES, Dataset, Source, Splits, data_directory
from evenclip.files import kinds, private_folder, write
from evenclip.sweep import Store
from evenclip.sweep.describe import (
    NO_DATASET,
    describe_dataset,
    describe_file,
    file_sizes,
    find_source,
    save_splits,
)

__all__ = ["check_groups", "describe_data", "readable"]

_LOG = logging.getLogger("evenclip")
# Names of the files in which earlier versions left the rows.
_LEFT = re.compile(r"[0-9a-f]{24}\.(pt|parquet|writing-\d+)|\.writing-[0-9a-f]{32}")


@contextmanager
def readable(data: Any, store: Store) -> Iterator[Any]:
    """Yield data that workers can read: rows in memory as a file, all else as it is.

    The file of `Splits` comes as their description. It is removed when the context ends.
    """
    _remove_old_rows(store.root / "data")
    is_frame = hasattr(data, "to_parquet")  # a DataFrame, without importing pandas to ask
    if not is_frame and not isinstance(data, Splits):
        yield data
        return
    with private_folder(store.root) as folder:
        _LOG.warning(
            "The rows are in %s while the comparison runs; only you can read it, and it is removed "
            "at the end.",
            folder,
        )
        yield _written(data, folder) if is_frame else _Described(save_splits(data, folder))


class _Described(dict[str, Any]):
    """Data that are plain values already."""


def _remove_old_rows(folder: Path) -> None:
    """Remove the rows that earlier versions left in the store."""
    if folder.is_symlink() or not folder.is_dir():
        return
    old = [path for path in folder.iterdir() if _LEFT.fullmatch(path.name)]
    for path in old:
        path.unlink(missing_ok=True)
    if old:
        _LOG.warning(
            "Removed %d files with rows from %s, where an earlier version left them.",
            len(old),
            folder,
        )
    if not any(folder.iterdir()):
        folder.rmdir()


def describe_data(
    data: Any, target: str | None, group: str | Sequence[str] | None, options: dict[str, Any],
    data_dir: str | os.PathLike[str] | None,
) -> dict[str, Any]:  # fmt: skip
    """The data as plain values."""
    if isinstance(data, _Described):
        return data
    if not isinstance(data, (str, os.PathLike)):
        raise TypeError(
            f"data is {shown(data)}; give the name of a dataset, a file, "
            "file.py:name for your own dataset, a DataFrame, or Splits."
        )
    check_path("data", data)
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
    """A DataFrame as a file."""
    buffer = io.BytesIO()
    frame.to_parquet(buffer)
    return write(folder / "rows.parquet", buffer.getvalue(), kinds.ROWS)


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
