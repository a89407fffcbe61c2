"""Data that are read when they are needed, because they need not fit in memory.

Poisson batches are drawn by index, from a stream that looks at no data; so the batches of steps to
come are known as early as one likes. `Streamed.ahead` is given them in their order and reads in
front of training; what comes out is what `take` would have given, whoever reads and however far
ahead.
"""

from __future__ import annotations

import abc
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from evenclip.data.dataset import Samples

__all__ = ["Bits", "Feed", "Streamed", "Windows", "check_same", "fingerprint"]

PART = 2**20  # words of a digest that are looked at together


class Feed(Protocol):
    """The rows of one batch after the other, read ahead."""

    def of(self, batch: Tensor) -> Samples:
        """The rows of the next batch, which must be this one; to be taken from, since bytes may be
        bytes still.
        """

    def close(self) -> None:
        """Nothing more is read; threads and processes end."""


class Streamed(abc.ABC):
    """Samples that are read when they are needed; otherwise as a `Dataset` has them."""

    group_names: tuple[str, ...]
    class_names: tuple[str, ...]
    name: str
    device: torch.device | str
    uncovered: tuple[
        str, ...
    ]  # looks at the data that ε does not cover, each a phrase for the privacy report

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @property
    def K(self) -> int:
        """Number of groups; 1 where there is no group."""
        return max(1, len(self.group_names))

    @abc.abstractmethod
    def take(self, indices: Tensor) -> Samples:
        """The rows at `indices` [row] int64 on the CPU, put on the dataset's device; there may be
        none.
        """

    @abc.abstractmethod
    def to(self, device: torch.device | str) -> Self:
        """The same data, whose rows are put on a device when they are taken."""

    @abc.abstractmethod
    def labelled(self, outputs: int, ignored: int) -> Self:
        """The same data for a model with so many outputs: a row with another label is refused when
        it is read, but for the label that the loss ignores.
        """

    @abc.abstractmethod
    def fingerprints(self) -> Sequence[str]:
        """What tells these data from others, a line for each tensor; secret."""

    @abc.abstractmethod
    def ahead(self, batches: Iterator[Tensor], readers: int) -> Feed:
        """The rows of these batches; `readers` processes may read them, where that helps."""


# --- reading many batches at once ---------------------------------------------------------------


class Windows:
    """A feed that reads many batches at once, the next ones while those before are trained on, in a
    thread.

    At most two windows are in memory: the one in use, and the one that is read meanwhile.

    Args:
        read: the rows at some indices, in their order; asks now and then whether it should go on.
        batches: what will be asked for.
        rows: most rows of a window; a batch that is larger is a window of its own.
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
        self._next, self._row = 0, 0  # batch of the window, and its first row there
        self._thread = threading.Thread(target=self._fill, name="evenclip reader", daemon=True)
        self._thread.start()

    def of(self, batch: Tensor) -> Samples:
        """The rows of the next batch, as views of the window."""
        if self._next == len(self._window):
            self._turn()
        check_same(batch, self._window[self._next])
        start, self._row, self._next = self._row, self._row + len(batch), self._next + 1
        assert self._samples is not None
        return self._samples.cut(start, self._row)

    def close(self) -> None:
        """The thread ends, at the next chunk that it reads."""
        self._stopped.set()
        self._room.release()
        self._thread.join()
        self._window, self._samples, self._next = [], None, 0

    def _turn(self) -> None:
        """On to the next window."""
        if self._samples is not None:
            self._window, self._samples = [], None  # before the next but one takes its place
            self._room.release()
        found = self._ready.get()
        if isinstance(found, BaseException):
            self._ready.put(found)  # whoever asks again is told again
            raise found
        self._window, self._samples = found
        self._next, self._row = 0, 0

    def _fill(self) -> None:
        """What the thread does."""
        try:
            for window in _grouped(self._batches, self._rows):
                self._room.acquire()
                if self._stopped.is_set():
                    return
                self._ready.put((window, self._read(torch.cat(window), self._stopped.is_set)))
            self._ready.put(
                IndexError("All batches that were to be read ahead are taken; ask for new ones.")
            )
        except BaseException as error:  # it is raised where the rows are asked for
            self._ready.put(error)


def _grouped(batches: Iterator[Tensor], rows: int) -> Iterator[list[Tensor]]:
    """Batches in their order, as many together as have at most so many rows, but one at least."""
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


def check_same(asked: Tensor, read: Tensor) -> None:
    """Raise where rows would go to another batch: the model would be trained on records that were
    not drawn.
    """
    if not torch.equal(asked, read):
        raise AssertionError(
            f"A batch of {len(asked)} records was drawn and another, of {len(read)}, was read "
            "ahead; the sampler was "
            "moved while rows were being read: leave `listening` and enter it again."
        )


# --- what tells data from others ----------------------------------------------------------------


class Bits:
    """Two sums over the bits of a tensor, plain and by place, of which rows come one part after the
    other.

    Whole numbers, so that neither their order nor where they are cut matters. `size` is the
    tensor's, in bytes.

    >>> whole, parts = Bits(24), Bits(24)
    >>> whole.add(torch.arange(3))
    >>> parts.add(torch.arange(1)); parts.add(torch.arange(1, 3))
    >>> whole.sums == parts.sums == (3, 13)  # 0 + 1 + 2, and 1·0 + 3·1 + 5·2
    True
    """

    def __init__(self, size: int) -> None:
        self._word = torch.int64 if size % 8 == 0 else torch.uint8
        self._plain, self._placed, self._at = (
            torch.zeros((), dtype=torch.int64),
            torch.zeros((), dtype=torch.int64),
            0,
        )
        self._rest = torch.zeros(0, dtype=torch.uint8)  # bytes that make no whole word yet

    def add(self, rows: Tensor) -> None:
        """Rows that follow those before."""
        found = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        if self._word is torch.int64:
            found = torch.cat([self._rest, found]) if len(self._rest) else found
            whole = found.numel() // 8 * 8
            self._rest = found[whole:].clone()
            found = (
                found[:whole].view(torch.int64)
                if found.storage_offset() % 8 == 0
                else _aligned(found[:whole])
            )
        for part in torch.split(found, PART):
            self._plain += part.sum(dtype=torch.int64)
            places = torch.arange(part.numel()).add_(self._at).mul_(2).add_(1)
            self._placed += places.mul_(part).sum()
            self._at += part.numel()

    @property
    def sums(self) -> tuple[int, int]:
        """Plain, and by place."""
        return int(self._plain), int(self._placed)


def _aligned(found: Tensor) -> Tensor:
    """Bytes that begin in the middle of a word, as words."""
    return found.clone().view(torch.int64)


def fingerprint(dtype: torch.dtype, shape: Sequence[int], bits: Bits) -> str:
    """A line about one tensor."""
    return f"{dtype} {list(shape)} {bits.sums}"
