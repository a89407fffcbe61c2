"""Processes that prefetch the items of a map-style torch dataset, for slow items.

torch's `DataLoader` is not used, because it reports a killed worker by an exception at an arbitrary
line of training.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_only

from evenclip.data.streamed import check_same

if TYPE_CHECKING:
    from evenclip.data.dataset import MapDataset, Samples

__all__ = ["OnDemand", "ReaderPool"]

AHEAD = 2  # batches that each process reads ahead
POLL = 1.0  # seconds between two checks that the training process is alive


class OnDemand:
    """A feed that reads each batch when it is requested."""

    def __init__(self, data: MapDataset) -> None:
        self._data = data

    def of(self, batch: Tensor) -> Samples:
        """Return the rows of a batch."""
        return self._data.take(batch)

    def close(self) -> None:
        """Do nothing; there is nothing to stop."""


class ReaderPool:
    """A feed whose batches are read by `readers` processes, each batch by one of them.

    Batches are returned in order. An error is raised when its batch is requested.
    """

    def __init__(self, data: MapDataset, batches: Iterator[Tensor], readers: int) -> None:
        self._device, self._batches, self._readers = data.device, batches, readers
        # A forked process inherits the dataset, even one that cannot be pickled.
        forked = "fork" in multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("fork" if forked else None)
        self._pool = ProcessPoolExecutor(
            readers, mp_context=context, initializer=_begin, initargs=(data.to("cpu"), os.getpid())
        )
        self._pending: deque[tuple[Tensor, Future[Any]]] = deque()
        self._submit()

    def of(self, batch: Tensor) -> Samples:
        """Return the rows of the next batch."""
        if not self._pending:
            raise IndexError("All batches that were to be read ahead are taken; ask for new ones.")
        read, future = self._pending.popleft()
        check_same(batch, read)
        try:
            packed = future.result()
            self._submit()
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"A process that reads the dataset has ended before its time ({error}) If it ran "
                f"out of memory, take fewer than {self._readers} readers."
            ) from error
        if isinstance(packed, Exception):
            raise packed
        samples: Samples = tree_map_only(_Packed, _Packed.tensor, packed)
        return samples.to(self._device)

    def close(self) -> None:
        """Stop the processes after their current batches."""
        self._pending.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        """Submit batches until `AHEAD` per process are pending."""
        while len(self._pending) < AHEAD * self._readers:
            batch = next(self._batches, None)
            if batch is None:
                return
            self._pending.append((batch, self._pool.submit(_read, batch.tolist())))


# --- in the reading processes -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Packed:
    """A tensor as bytes, for transfer to another process.

    torch would send a file descriptor per tensor, and their number is limited.
    """

    content: NDArray[np.uint8]
    dtype: torch.dtype
    shape: torch.Size

    def tensor(self) -> Tensor:
        """Return the tensor."""
        return torch.from_numpy(self.content).view(self.dtype).reshape(self.shape)


_data: list[MapDataset] = []  # the dataset that this process reads


def _begin(data: MapDataset, trainer: int) -> None:
    """Initialise a reading process.

    It ignores Ctrl-C: the training process handles it, finishes its step and saves.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _data.append(data)
    threading.Thread(target=_watch, args=(trainer,), daemon=True).start()


def _watch(trainer: int) -> None:
    """Exit when the training process ends, even if it was killed."""
    while os.getppid() == trainer:
        time.sleep(POLL)
    os._exit(1)


def _read(rows: list[int]) -> Samples | Exception:
    """Return a batch, or the error that reading it raised.

    A note on the error holds its traceback, for the author of the dataset.
    """
    try:
        packed: Samples = tree_map_only(Tensor, _packed, _data[-1].read(rows))
        return packed
    except (ValueError, TypeError) as error:
        kind = type(error) if type(error) in (ValueError, TypeError) else ValueError
        copy = kind(str(error))
        copy.add_note("".join(traceback.format_exception(error)))
        return copy


def _packed(tensor: Tensor) -> _Packed:
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _Packed(content, tensor.dtype, tensor.shape)
