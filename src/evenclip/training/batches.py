"""The batches of a run: drawn by a sampler, read from the data and cut into chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evenclip.data import Dataset, Streamed
from evenclip.data.dataset import Samples
from evenclip.mechanism.sampling import Poisson, Sampler, Shuffled
from evenclip.mechanism.settings import Settings
from evenclip.mechanism.words import Keyed, derive
from evenclip.training.artificial import artificial
from evenclip.training.config import Performance
from evenclip.training.loss import targets
from evenclip.training.passes import Chunk
from evenclip.training.processes import Processes

if TYPE_CHECKING:
    from evenclip.data.streamed import Feed

__all__ = ["BatchStream"]


class BatchStream(Keyed):
    """The batches of a run, step by step, with a key for the dropout of each chunk.

    Args:
        data: the training data of this process.
        settings: constants of the run.
        performance: sizes of chunks and number of readers.
        ranks: the processes that train together; each computes its share of a batch.
        device: device of the model.
        key: secret key of the run.

    Attributes:
        sampler: draws the indices of each batch. Secret.
        dropout: key that the keys of all chunks are derived from. Secret.
        rows: the records that this process holds.
    """

    def __init__(
        self,
        data: Dataset | Streamed,
        settings: Settings,
        performance: Performance,
        ranks: Processes,
        device: torch.device,
        key: bytes,
    ) -> None:
        self._data, self._settings, self._performance = data, settings, performance
        self._ranks, self._device = ranks, device
        self.rows = ranks.rows(len(data))
        self._key = derive(key, "batches")
        self.sampler = _sampler(settings, self.rows.n, self._key)
        self.dropout = derive(key, "dropout")
        self._zeros = torch.zeros(0, dtype=torch.int64, device=device)
        self._feed: Feed | None = None

    @property
    def q(self) -> float | None:
        """The Poisson rate; None if the batches are not Poisson samples."""
        return self.sampler.q

    def draw(self, index: int, state: Tensor) -> tuple[float, list[Chunk]]:
        """Return the batch of draw `index`.

        Args:
            index: number of the draw, from 0.
            state: the rule's public state, for a rule that changes the loss.

        Returns:
            The public expected batch size B, and this process's share of the batch in chunks.
        """
        feed = self._reader(index)
        batch = self.sampler.batch(index)
        B = self.sampler.expected_size(batch)
        return B, self.chunks(self._ranks.share(batch, self.rows), index, state, feed)

    def artificial(self, n: int, t: int, state: Tensor) -> Chunk:
        """Return n artificial samples as one chunk, to trace a step and to compare results."""
        like = self._taken(torch.zeros(1, dtype=torch.int64))
        groups = len(self._data.group_names)
        return self._chunk(artificial(like, n, groups), 0, t, state)

    def chunks(self, batch: Tensor, t: int, state: Tensor, feed: Feed | None = None) -> list[Chunk]:
        """Return these records in chunks of the size that `Performance` sets.

        With sharded parameters all ranks take the same number of passes. A rank with fewer chunks
        adds chunks of one padding row, which counts for nothing.
        """
        if feed is None:
            source, rows = None, batch
        else:
            source, rows = feed.of(batch), torch.arange(len(batch))
        size = self._performance.chunk
        pieces = (rows,) if size is None or len(rows) <= size else torch.split(rows, size)
        chunks = [
            self._chunk(self._taken(piece, source), i, t, state)
            for i, piece in enumerate(pieces)
            if len(rows)
        ]
        if self._ranks.sharded:
            missing = max(self._ranks.each(len(chunks))) - len(chunks)
            chunks += [self._padding(len(chunks) + i, t, state) for i in range(missing)]
        return chunks

    def _padding(self, i: int, t: int, state: Tensor) -> Chunk:
        """Return a chunk of one row that counts for nothing."""
        padding = self._chunk(self._taken(torch.zeros(1, dtype=torch.int64)), i, t, state)
        return padding._replace(real=torch.zeros(1, dtype=torch.bool, device=self._device))

    def _taken(self, rows: Tensor, source: Samples | None = None) -> Samples:
        """Return these rows of `source`, or of the whole data if it is None."""
        if source is not None:
            return source.take(rows.to(self._device))
        in_memory = isinstance(self._data, Dataset)
        return self._data.take(rows.to(self._device) if in_memory else rows)

    def _chunk(self, samples: Samples, i: int, t: int, state: Tensor) -> Chunk:
        """Return the samples as chunk i of draw t."""
        x, y, group = samples
        if group is None:
            group = self._zero_groups(len(y))
        key = derive(self.dropout, f"draw {t}, chunk {i}, rank {self._ranks.rank}")
        return Chunk(x, targets(self._settings.rule, y, group, state), group, None, key)

    def _zero_groups(self, rows: int) -> Tensor:
        """Return group 0 for samples without groups.  # [row]"""
        if rows > len(self._zeros):
            self._zeros = torch.zeros(2 * rows, dtype=torch.int64, device=self._device)
        return self._zeros.narrow(0, 0, rows)

    # --- reading ahead ---

    def _reader(self, index: int) -> Feed | None:
        """Return the reader of the batches from draw `index` on; None if the data are in memory.

        It draws the same batches ahead, with a second sampler.
        """
        if isinstance(self._data, Dataset):
            return None
        if self._feed is None or index >= self._settings.steps:  # after T, one draw at a time
            self.close()
            sampler = _sampler(self._settings, self.rows.n, self._key)
            draws = range(index, max(index + 1, self._settings.steps))
            batches = (self._ranks.share(sampler.batch(i), self.rows) for i in draws)
            self._feed = self._data.ahead(batches, self._performance.readers)
        return self._feed

    def close(self) -> None:
        """End the threads and processes that read ahead."""
        if self._feed is not None:
            self._feed.close()
        self._feed = None


def _sampler(settings: Settings, n: int, key: bytes) -> Sampler:
    """Return Poisson samples of n records, or shuffled batches for a rule that is not private."""
    if settings.q is None:
        return Shuffled(n, int(settings.B), key)
    return Poisson(n, settings.q, settings.B, key)
