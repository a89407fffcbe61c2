"""Processes that read the items of a map-style torch dataset ahead: for items that take Python long to make."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data

from evenclip.data.dataset import MapDataset, Samples
from evenclip.data.streamed import check_same

__all__ = ["Processes", "Untimely"]


class Untimely:
    """A feed that reads a batch when it is asked for it."""

    def __init__(self, data: MapDataset) -> None:
        self._data = data

    def of(self, batch: Tensor) -> Samples:
        """Its rows."""
        return self._data.take(batch)

    def close(self) -> None:
        """There is nothing to end."""


class Processes:
    """A feed whose batches torch's `DataLoader` has read by so many processes, two batches of each ahead.

    Batches come in their order, whoever has read them. An error is raised where its batch is asked for.
    """

    def __init__(self, data: MapDataset, batches: Iterator[Tensor], readers: int) -> None:
        self._data, self._readers = data, readers
        loader = torch_data.DataLoader(
            _Read(data), batch_sampler=_Lists(batches), num_workers=readers, collate_fn=_as_it_is,
            worker_init_fn=_deaf,
        )  # fmt: skip
        self._items: Iterator[Any] | None = iter(loader)

    def of(self, batch: Tensor) -> Samples:
        """The rows of the next batch."""
        assert self._items is not None
        try:
            rows, found = next(self._items)
        except StopIteration:
            raise IndexError("All batches that were to be read ahead are taken; ask for new ones.") from None
        except RuntimeError as error:
            self.close()
            raise RuntimeError(
                f"A process that reads the dataset has ended ({error}); if it ran out of memory, take fewer than "
                f"{self._readers} readers."
            ) from error
        if isinstance(found, Exception):
            raise found
        check_same(batch, torch.tensor(rows, dtype=torch.int64))
        samples: Samples = found
        return samples.to(self._data.device)

    def close(self) -> None:
        """The processes end."""
        self._items = None  # which is how a loader's are told to


class _Read(torch_data.Dataset[Any]):
    """In a process of its own: whole batches, or what went wrong with them."""

    def __init__(self, data: MapDataset) -> None:
        self._data = data

    def __getitems__(self, rows: list[int]) -> tuple[list[int], Samples | Exception]:
        try:
            return rows, self._data.read(rows)
        except Exception as error:  # the loader would make a traceback of its sentence
            told = type(error)(*error.args) if isinstance(error, TypeError) else ValueError(str(error))
            told.add_note("".join(traceback.format_exception(error)))
            return rows, told


class _Lists:
    """Batches as a loader takes them."""

    def __init__(self, batches: Iterator[Tensor]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self._batches)


def _as_it_is(found: Any) -> Any:
    return found


def _deaf(worker: int) -> None:
    """Ctrl-C is for the process that trains: it takes the step to its end, saves, and then ends these."""
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
