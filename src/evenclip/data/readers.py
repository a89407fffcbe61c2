"""Processes that read the items of a map-style torch dataset ahead: for items that take Python long
to make.

Not torch's `DataLoader`: that a worker was killed it tells by an exception in whatever line
training has come to.
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

__all__ = ["Processes", "Untimely"]

AHEAD = 2  # batches that each process reads ahead
WATCHED = 1.0  # seconds between two looks at whether the process that trains is still there


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
    """A feed whose batches so many processes read, each a whole one.

    Batches come in their order, whoever has read them. An error is raised where its batch is asked
    for.
    """

    def __init__(self, data: MapDataset, batches: Iterator[Tensor], readers: int) -> None:
        self._device, self._batches, self._readers = data.device, batches, readers
        # A copy of this process has the dataset already, also one that cannot be pickled.
        forked = "fork" in multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("fork" if forked else None)
        self._pool = ProcessPoolExecutor(
            readers, mp_context=context, initializer=_begin, initargs=(data.to("cpu"), os.getpid())
        )
        self._asked: deque[tuple[Tensor, Future[Any]]] = deque()
        self._ask()

    def of(self, batch: Tensor) -> Samples:
        """The rows of the next batch."""
        if not self._asked:
            raise IndexError("All batches that were to be read ahead are taken; ask for new ones.")
        read, future = self._asked.popleft()
        check_same(batch, read)
        try:
            found = future.result()
            self._ask()
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"A process that reads the dataset has ended before its time ({error}) If it ran "
                "out of memory, take "
                f"fewer than {self._readers} readers."
            ) from error
        if isinstance(found, Exception):
            raise found
        samples: Samples = tree_map_only(_Packed, _Packed.tensor, found)
        return samples.to(self._device)

    def close(self) -> None:
        """The processes end, after the batch that each has begun."""
        self._asked.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self) -> None:
        """For batches, until enough are under way."""
        while len(self._asked) < AHEAD * self._readers:
            batch = next(self._batches, None)
            if batch is None:
                return
            self._asked.append((batch, self._pool.submit(_read, batch.tolist())))


# --- in the processes that read -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Packed:
    """A tensor as bytes on its way to another process: torch would send a file descriptor, and
    these are few.
    """

    content: NDArray[np.uint8]
    dtype: torch.dtype
    shape: torch.Size

    def tensor(self) -> Tensor:
        """What was packed."""
        return torch.from_numpy(self.content).view(self.dtype).reshape(self.shape)


_data: list[MapDataset] = []  # that this process reads


def _begin(data: MapDataset, trainer: int) -> None:
    """What a reader does first. Ctrl-C is for the process that trains, which takes the step to its
    end and saves.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _data.append(data)
    threading.Thread(target=_watch, args=(trainer,), daemon=True).start()


def _watch(trainer: int) -> None:
    """End with the process that trains, also if it was killed and could tell nobody."""
    while os.getppid() == trainer:
        time.sleep(WATCHED)
    os._exit(1)


def _read(rows: list[int]) -> Samples | Exception:
    """A batch, or what is wrong with it; where it went wrong, for whoever wrote the dataset, is in
    a note.
    """
    try:
        found: Samples = tree_map_only(Tensor, _packed, _data[-1].read(rows))
        return found
    except (ValueError, TypeError) as error:
        told = (
            type(error)(str(error))
            if type(error) in (ValueError, TypeError)
            else ValueError(str(error))
        )
        told.add_note("".join(traceback.format_exception(error)))
        return told


def _packed(tensor: Tensor) -> _Packed:
    return _Packed(
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy(),
        tensor.dtype,
        tensor.shape,
    )
