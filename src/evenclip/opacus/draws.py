"""Noise and Poisson batches: each is drawn once, under a secret key that no copy shares.

Opacus tosses the coins of its batches with `torch.rand`, which gives multiples of 2⁻²⁴, from a
generator that is not cryptographic. `Batches` takes its place in the data loader. Its coins are
those of `evenclip.mechanism.sampling`, so the rate in the ledger is the rate of the batches.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from evenclip.mechanism.entry import Parent
from evenclip.mechanism.rounding import TAU, covered_records, most_records
from evenclip.mechanism.sampling import Poisson, drawn_rate
from evenclip.mechanism.words import KEY_BYTES, derive

__all__ = ["Batches", "Draws"]

T = TypeVar("T")
_ALL = weakref.WeakSet["Draws[Any]"]()


class Draws(Generic[T]):
    """Numbered draws from a source with a secret key; each number is given out once.

    A copy, an unpickled object and a forked process get a new key and start at 0.

    Args:
        make: key -> source.
        parent: run and number of draws that these draws continue.

    Attributes:
        source: what is drawn from. Secret.
        run: a hash of the key, which names these draws in the ledger.
        count: number of draws so far.
        parent: run and number of draws that these draws continue; None: they are the first.
    """

    def __init__(self, make: Callable[[bytes], T], parent: Parent | None = None) -> None:
        self._make = make
        self._start(parent)
        _ALL.add(self)

    def _start(self, parent: Parent | None) -> None:
        """Start at 0 with a new key."""
        key = os.urandom(KEY_BYTES)
        self.run, self.count, self.parent = derive(key, "run").hex()[:32], 0, parent
        self.source = self._make(key)

    def take(self) -> int:
        """Return the number of the next draw, which is spent from now on."""
        self.count += 1
        return self.count - 1

    @property
    def place(self) -> Parent | None:
        """The run and number of draws that a copy continues."""
        return (self.run, self.count) if self.count else self.parent

    def renew(self) -> None:
        """Continue with another key."""
        self._start(self.place)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle everything but the key."""
        return type(self), (self._make, self.place)


def _renew_all() -> None:
    """Give every source of a forked process another key."""
    for draws in list(_ALL):
        draws.renew()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_renew_all)


class Batches(UniformWithReplacementSampler):  # type: ignore[misc]  # Opacus has no types
    """Poisson samples with exact coins, each for one release.

    Args:
        n: number of records.
        q: Poisson rate.
        steps: number of batches in one pass over the loader.
        B: Opacus's expected batch size, a public constant.

    Attributes:
        q: the rate at which records are drawn, for the ledger.
        most: a batch has more records than this with probability at most `tau`.
        tau: 10⁻³⁰, or 0 if every batch holds all records.
        on_pass: called when a pass over the loader begins.
    """

    def __init__(self, n: int, q: float, steps: int, B: float) -> None:
        UniformWithReplacementSampler.__init__(self, num_samples=n, sample_rate=q, steps=steps)
        self.q = drawn_rate(q)
        covered = covered_records(self.q, B)
        if n > covered + 1:
            raise ValueError(
                f"The bounds on rounding cover at most {covered + 1} records for batches of {B:g}, "
                f"and there are {n}; give the data loader a larger batch_size."
            )
        self.most = most_records(self.q, covered)
        self.tau = 0.0 if self.q == 1 else TAU
        self._draws = Draws(partial(Poisson, n, q, 1.0))
        self._unspent = deque[tuple[str, int]]()  # run and size of each batch
        self.on_pass: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        """Draw the batches of one pass, as lists of indices."""
        if self.on_pass is not None:
            self.on_pass()
        for _ in range(self.steps):
            index = self._draws.take()
            batch = self._draws.source.batch(index)
            self._unspent.append((self._draws.run, len(batch)))
            yield batch.tolist()

    def spend(self, records: int) -> None:
        """Use up the next batch with this number of records, and those before it.

        Raises:
            ValueError: if there is none, so that ε would not hold for the release.
        """
        drawn = (self._draws.run, records)
        if drawn not in self._unspent:
            raise ValueError(
                f"This logical batch has {records} records, and the data loader has drawn no batch "
                "of that size since the last step, so ε would not hold; take every batch from the "
                "loader of make_private, and step once for each. The batch is dropped."
            )
        while self._unspent.popleft() != drawn:
            pass
