"""Tables from Parquet and Feather files, validated before they are used.

A damaged file may have lengths and codes that point outside of it. Arrow reads them without a check
and pandas then ends the process. A full validation looks at every length and code; page checksums
are compared where the file has them. Types come from the file's own types, not from the metadata
that pandas adds, so an index with a name is an ordinary column, and one without is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenclip.data.values import shortened

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TooLarge", "stored", "stored_names"]

_INDEX = re.compile(r"__index_level_\d+__")  # pandas' name for an index without one


class TooLarge(ValueError):  # noqa: N818 - the name states the problem
    """The table does not fit in memory."""


def stored(file: Path, suffix: str) -> pd.DataFrame:
    """Read a Parquet or Feather file.

    Raises:
        TooLarge: the table would take more than half of the available memory.
        ValueError: the file is damaged, or not of this format.
    """
    with _sentences(file, suffix):
        table = _parquet(file) if suffix == ".parquet" else _feather(file)
        table = table.select(_names(file, table.schema.names))
        table.validate(full=True)
        frame = table.to_pandas(ignore_metadata=True)
        return _whole(table, frame)


def stored_names(file: Path, suffix: str) -> tuple[str, ...]:
    """Return the names of the columns of a Parquet or Feather file.

    Raises:
        ValueError: the file is damaged, or not of this format.
    """
    import pyarrow as pa
    from pyarrow import parquet as pq

    with _sentences(file, suffix):
        if suffix == ".parquet":
            return tuple(_names(file, pq.read_schema(file).names))
        with pa.OSFile(str(file)) as opened:
            return tuple(_names(file, pa.ipc.open_file(opened).schema.names))


@contextmanager
def _sentences(file: Path, suffix: str) -> Iterator[None]:
    """Turn the errors of Arrow into sentences; a damaged file raises errors of many kinds."""
    try:
        yield
    except _Refused as refused:
        raise ValueError(str(refused)) from None
    except (TooLarge, PermissionError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        reason = reason if len(reason) <= 200 else f"{reason[:200]}..."
        raise ValueError(
            f"{file} is not a {suffix[1:].capitalize()} file ({reason}); write it again."
        ) from error


class _Refused(Exception):  # noqa: N818 - a sentence already
    """The file is of its format, and cannot be used."""


def _names(file: Path, names: list[str]) -> list[str]:
    """Return the names of the columns, without a nameless index."""
    columns = [name for name in names if not _INDEX.fullmatch(name)]
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise _Refused(f"{file} has two columns {shortened(twice[0])}; rename one of them.")
    return columns


def _parquet(file: Path) -> Any:
    """Read a Parquet file as an Arrow table."""
    from pyarrow import parquet as pq

    metadata = pq.read_metadata(file)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    rows = sum(group.num_rows for group in groups)
    # A value takes 8 bytes in memory, even if the file stores it in fewer.
    _check_room(
        file,
        metadata.num_rows,
        max(
            sum(group.total_byte_size for group in groups),
            8 * metadata.num_rows * metadata.num_columns,
        ),
    )
    with pq.ParquetFile(file, metadata=metadata, page_checksum_verification=True) as opened:
        table = opened.read()
    if not len(table) == rows == metadata.num_rows:
        raise _Refused(
            f"{file} is damaged: it holds {len(table)} rows, and its metadata says "
            f"{metadata.num_rows}; write it again."
        )
    return table


def _feather(file: Path) -> Any:
    """Read a Feather file as an Arrow table."""
    import pyarrow as pa

    size, batches = 0, []
    with pa.OSFile(str(file)) as source:
        opened = pa.ipc.open_file(source)
        for place in range(opened.num_record_batches):
            batches.append(opened.get_batch(place))
            size += batches[-1].nbytes
            _check_room(file, sum(map(len, batches)), size)
        return pa.Table.from_batches(batches, opened.schema)


def _whole(table: Any, frame: pd.DataFrame) -> pd.DataFrame:
    """Keep whole numbers exact where some are missing; as floats, two long ids could be equal."""
    import pandas as pd
    import pyarrow as pa

    mapped = {pa.int64(): pd.Int64Dtype(), pa.uint64(): pd.UInt64Dtype()}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        if column.null_count and column.type in mapped:
            frame[name] = column.to_pandas(types_mapper=mapped.get)
    return frame


def _check_room(file: Path, rows: int, needed: int) -> None:
    """Raise if a table would take more than half of the available memory."""
    available = _available()
    if available is not None and needed > available / 2:
        raise TooLarge(
            f"{file} has {rows} rows, which take about {_size(needed)} of memory as "
            f"a table, and {_size(available)} are available; train on it without reading it "
            "whole, with evenclip.data.parquet and evenclip.fit, or take a sample of its rows."
        )


def _available() -> int | None:
    """Return the bytes of available memory; None if the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(
        (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None
    )


def _size(size: float) -> str:
    """Format a number of bytes with a unit."""
    if size >= 1e9:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
