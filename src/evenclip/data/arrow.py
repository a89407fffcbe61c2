"""Reading of Parquet files with Arrow: metadata, record batches and tables."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "DataFile",
    "Rows",
    "batches_of",
    "chosen",
    "frame_of",
    "opened",
    "paths_of",
    "stamp_of",
    "tables",
    "types_of",
]

CHUNK = 2**16  # rows decoded at once
BUFFER = 2**20  # bytes of a column read at once
Rows = NDArray[np.int64]


class DataFile(NamedTuple):
    """A file and its state when it was opened."""

    path: Path
    stamp: tuple[int, int]  # size and modification time
    sizes: tuple[int, ...]  # rows of each row group
    metadata: Any

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(self.sizes)


def paths_of(source: Any) -> list[Path]:
    """Return the files that a path, a pattern, a folder or a list of them names."""
    if not isinstance(source, str | os.PathLike):
        if not isinstance(source, Sequence):
            raise TypeError(
                f"source is a {type(source).__name__}; give the path of a Parquet file, or a list "
                "of them."
            )
        if not source:
            raise ValueError("source is an empty list; name at least one Parquet file.")
        return [path for item in source for path in paths_of(item)]
    path = Path(source)
    if path.is_dir():
        paths = sorted(path.glob("*.parquet"))
    elif not path.exists() and glob.has_magic(str(source)):
        paths = sorted(Path(match) for match in glob.glob(str(source)))
    else:
        return [path]
    if not paths:
        raise FileNotFoundError(
            f"There are no Parquet files at {source}; name a file, a folder or a pattern."
        )
    return paths


def opened(path: Path) -> DataFile:
    """Read the metadata of a file."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    stamp = stamp_of(path)
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"{path} is not a Parquet file ({reason}); write it again.") from error
    sizes = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    return DataFile(path, stamp, sizes, metadata)


def stamp_of(path: Path) -> tuple[int, int]:
    """Return size and modification time, which change when the file changes."""
    try:
        status = path.stat()
    except OSError:
        raise FileNotFoundError(f"{path} is not there; give a file.") from None
    return status.st_size, status.st_mtime_ns


def types_of(file: DataFile) -> dict[str, Any]:
    """Return the Arrow type of each column."""
    schema = file.metadata.schema.to_arrow_schema()
    return dict(zip(schema.names, schema.types, strict=True))


def batches_of(file: DataFile, groups: list[int], names: list[str]) -> Iterator[Any]:
    """Yield some columns of some row groups, at most `CHUNK` rows at a time.

    Texts are read as dictionary codes, the form in which Parquet stores them.
    """
    import pyarrow as pa
    from pyarrow import parquet as pq

    types = types_of(file)
    texts = [
        name
        for name in names
        if pa.types.is_string(types[name]) or pa.types.is_large_string(types[name])
    ]
    # Without pre-buffering, which would hold a whole row group with all its columns.
    with pq.ParquetFile(
        file.path,
        metadata=file.metadata,
        read_dictionary=texts,
        pre_buffer=False,
        buffer_size=BUFFER,
        page_checksum_verification=True,
    ) as opened:
        left = sum(file.sizes[group] for group in groups)
        try:
            for batch in opened.iter_batches(
                CHUNK, row_groups=groups, columns=names, use_threads=False
            ):
                batch.validate(full=True)  # damaged lengths and codes would end the process
                left -= len(batch)
                yield batch
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"{file.path} cannot be read to its end ({reason}); write it again."
            ) from error
        if left:
            raise ValueError(
                f"{file.path} is damaged: its metadata says {abs(left)} rows "
                f"{'more' if left > 0 else 'fewer'} than it holds; write it again."
            )


def chosen(batches: Iterator[Any], rows: Rows) -> Iterator[Any]:
    """Yield the rows at ascending, possibly repeated positions of consecutive record batches."""
    import pyarrow as pa

    at = 0
    for batch in batches:
        start, end = np.searchsorted(rows, [at, at + len(batch)])
        if end > start:
            yield batch.take(pa.array(rows[start:end] - at))
        at += len(batch)


def tables(batches: Iterator[Any]) -> Iterator[Any]:
    """Join record batches to tables of at least `CHUNK` rows, except for the last.

    Encoding few rows takes as long as encoding many.
    """
    import pyarrow as pa

    held: list[Any] = []
    for batch in batches:
        held.append(batch)
        if sum(map(len, held)) >= CHUNK:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def frame_of(table: Any) -> pd.DataFrame:
    """Convert an Arrow table to the DataFrame that the encoder takes."""
    # Without pandas' metadata, an index is an ordinary column.
    frame: pd.DataFrame = table.unify_dictionaries().to_pandas(ignore_metadata=True)
    return frame
