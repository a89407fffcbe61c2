"""Datasets that are read on demand, because they need not fit in memory.

Poisson batches are drawn by index, from a random stream that does not depend on the data, so the
batches of future steps are known in advance. `Streamed.ahead` takes them in order and prefetches
their rows. The rows are those that `take` returns, independent of the reader and of how far ahead
it reads.
"""

from __future__ import annotations

import abc
import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from evenclip.data.dataset import Samples

__all__ = ["Bits", "Feed", "Streamed", "Windows", "check_same", "fingerprint"]


class Feed(Protocol):
    """The rows of consecutive batches, read ahead."""

    def of(self, batch: Tensor) -> Samples:
        """Return the rows of the next batch, which must be `batch`.

        uint8 features may still be bytes; `Samples.take` converts them.
        """

    def close(self) -> None:
        """Stop reading, and end threads and processes."""


class Streamed(abc.ABC):
    """Samples that are read on demand, with the interface of `Dataset`."""

    group_names: tuple[str, ...]
    class_names: tuple[str, ...]
    name: str
    device: torch.device | str
    # Accesses to the data that ε does not cover, as phrases for the privacy report.
    uncovered: tuple[str, ...]

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @property
    def K(self) -> int:
        """Number of groups; 1 without groups."""
        return max(1, len(self.group_names))

    @abc.abstractmethod
    def take(self, indices: Tensor) -> Samples:
        """Return the rows at `indices` [row] int64 on the dataset's device.

        `indices` is on the CPU and may be empty.
        """

    @abc.abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """Return the same data; `take` puts the rows on the device."""

    @abc.abstractmethod
    def labelled(self, outputs: int, ignored: int) -> Self:
        """Return the same data for a model with `outputs` outputs.

        Reading a row with another label raises an error, except for the label that the loss
        ignores.
        """

    @abc.abstractmethod
    def fingerprints(self) -> Sequence[str]:
        """Return a line for each tensor, with a digest of its bits; never publish it.

        With the digest, an attacker who guesses a record can test whether it is in the data.
        """

    @abc.abstractmethod
    def ahead(self, batches: Iterator[Tensor], readers: int) -> Feed:
        """Return a feed of these batches; `readers` processes may read them."""


# --- reading many batches at once ---------------------------------------------------------------


class Windows:
    """A feed that reads windows of many batches in a thread, while earlier ones are trained on.

    At most two windows are in memory: the one in use, and the next one.

    Args:
        read: read(indices, stopped) returns the rows at the indices, in their order; it calls
            stopped() regularly and ends when that is true.
        batches: the batches that will be requested.
        rows: largest number of rows in a window; a larger batch is a window by itself.
    """

    def __init__(
        self,
        read: Callable[[Tensor, Callable[[], bool]], Samples],
        batches: Iterator[Tensor],
        rows: int,
    ) -> None:
        self._read, self._batches, self._rows = read, batches, rows
        self._room, self._stopped = threading.Semaphore(2), threading.Event()
        self._ready: queue.SimpleQueue[tuple[list[Tensor], Samples] | BaseException] = (
            queue.SimpleQueue()
        )
        self._window: list[Tensor] = []
        self._samples: Samples | None = None
        self._next, self._row = 0, 0  # next batch of the window, and its first row
        self._thread = threading.Thread(target=self._fill, name="evenclip reader", daemon=True)
        self._thread.start()

    def of(self, batch: Tensor) -> Samples:
        """Return the rows of the next batch, as views of the window."""
        if self._next == len(self._window):
            self._turn()
        check_same(batch, self._window[self._next])
        start, self._row, self._next = self._row, self._row + len(batch), self._next + 1
        assert self._samples is not None
        return self._samples.cut(start, self._row)

    def close(self) -> None:
        """End the thread, at the next chunk that it reads."""
        self._stopped.set()
        self._room.release()
        self._thread.join()
        self._window, self._samples, self._next = [], None, 0

    def _turn(self) -> None:
        """Move on to the next window."""
        if self._samples is not None:
            self._window, self._samples = [], None  # freed before another window is read
            self._room.release()
        window = self._ready.get()
        if isinstance(window, BaseException):
            self._ready.put(window)  # raised again by the next call
            raise window
        self._window, self._samples = window
        self._next, self._row = 0, 0

    def _fill(self) -> None:
        """Read windows; runs in the thread."""
        try:
            for window in _grouped(self._batches, self._rows):
                self._room.acquire()
                if self._stopped.is_set():
                    return
                self._ready.put((window, self._read(torch.cat(window), self._stopped.is_set)))
            self._ready.put(
                IndexError("All batches that were to be read ahead are taken; ask for new ones.")
            )
        except BaseException as error:  # raised where the rows are requested
            self._ready.put(error)


def _grouped(batches: Iterator[Tensor], rows: int) -> Iterator[list[Tensor]]:
    """Group consecutive batches into windows of at most `rows` rows, at least one batch each."""
    window: list[Tensor] = []
    held = 0
    for batch in batches:
        if window and held + len(batch) > rows:
            yield window
            window, held = [], 0
        window.append(batch)
        held += len(batch)
    if window:
        yield window


def check_same(drawn: Tensor, read: Tensor) -> None:
    """Raise if another batch was read: training would use records that were not drawn."""
    if not torch.equal(drawn, read):
        raise AssertionError(
            f"A batch of {len(drawn)} records was drawn and another, of {len(read)}, was read "
            "ahead; the sampler was moved while rows were being read: leave `listening` and "
            "enter it again."
        )


# --- fingerprints -------------------------------------------------------------------------------


class Bits:
    """BLAKE2b over the bits of a tensor whose rows are added in order, in parts of any size.

    >>> whole, parts = Bits(), Bits()
    >>> whole.add(torch.arange(3))
    >>> parts.add(torch.arange(1)); parts.add(torch.arange(1, 3))
    >>> whole.digest == parts.digest
    True
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=32)

    def add(self, rows: Tensor) -> None:
        """Add the rows that follow the previous ones."""
        content = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._hash.update(content.numpy().data)

    @property
    def digest(self) -> str:
        """The digest, in hexadecimal digits."""
        return self._hash.hexdigest()


def fingerprint(name: str, dtype: torch.dtype, shape: Sequence[int], bits: Bits) -> str:
    """Return the fingerprint of a tensor: its name, dtype, shape and the digest of its bits."""
    return f"{name} {dtype} {list(shape)} {bits.digest}"
