"""Which records are used for what: coins that each record brings along.

Whether a record is for training, validation or testing, whether it is thinned away, and which row
of a person is kept is decided by that record alone,

    coins of a record = PRF(key, content, occurrence number),

with BLAKE2b as the keyed function. The content is all raw fields as they were read, with labels,
groups and weights, before any encoding; or the id of a person, without an occurrence number. The
occurrence number counts records that are spelt alike in their order, so that copies have different
coins. One record more or less changes nobody else's coins: with copies, what comes or goes is the
last occurrence, and copies cannot be told apart. Records of equal content that are spelt
differently (`01` and `1`) are counted apart, because an encoder may tell them apart.

So the part of the data that is used for training changes by at most the one record, and an ε for
adding or removing a training record holds for adding or removing a record of all data. A split into
exact shares does not have this property: one more row changes the place of hundreds of others.

The key is a function of the seed, which is public in most uses. Everybody then knows the part of a
given record, whether or not it is in the data. That is fine: ε holds for every fixed key. All that
belongs together (every rule, tuning, testing) uses one seed. Models of several splits may each have
been trained on a record, so what is published of them composes.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenclip.data.content import Coded, Content, Numbers, of_array

__all__ = ["Coins", "coins", "stream", "uniform"]

Rows: TypeAlias = NDArray[np.int64]

_SPLIT, _KEEP, _LATER, _ORDER = range(4)  # what the words of a record are used for
_BLOCK_BYTES = 2**24


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the random generator of a dataset that is generated from a seed.

    The name separates it from other generators that are derived from the same seed. Which records
    of given data are used is not drawn from it, but by `coins`.

    Raises:
        ValueError: the seed is negative.
    """
    _check(seed)
    sequence = np.random.SeedSequence([int(seed), int.from_bytes(name.encode(), "big")])
    return np.random.Generator(np.random.PCG64(sequence))


@dataclass(frozen=True, eq=False)
class Coins:
    """Four random words of each record, one for each kind of choice.

    Attributes:
        words: 64 random bits each [record, 4]. They are a function of the record and of the seed.

    >>> drawn = coins(0, np.arange(1000))
    >>> train, test = drawn.parts(0.8)
    >>> len(train) + len(test), bool(abs(len(train) - 800) < 65)
    (1000, True)
    """

    words: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.words)

    def parts(self, *shares: float) -> list[Rows]:
        """Return the positions of the records of each part, in their order.

        Each record is in part i with probability `shares[i]`, and in the last part otherwise.
        """
        edges = [*np.cumsum(shares), np.inf]
        part = np.searchsorted(edges, uniform(self.words[:, _SPLIT]), side="right")
        return [np.flatnonzero(part == i) for i in range(len(edges))]

    def kept(self, probability: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which records are kept, each with its own probability.  # [record]"""
        return uniform(self.words[:, _KEEP]) < probability

    @property
    def marks(self) -> NDArray[np.int64]:
        """The word for later choices among the records, see `Dataset.marks`.  # [record]"""
        return np.ascontiguousarray(self.words[:, _LATER]).view(np.int64)

    def first_of_each(self, person: Rows) -> Rows:
        """Return the positions of one record of each person, in order of position.

        Which one depends on the records of that person alone.  person: code of each record's person
        """
        by_person = np.lexsort((self.words[:, _ORDER], person))
        sorted_person = person[by_person]
        starts = np.flatnonzero(np.diff(sorted_person, prepend=sorted_person[:1] - 1))
        return np.sort(by_person[starts])

    def at(self, rows: Rows) -> Coins:
        """Return the coins of some records."""
        return Coins(self.words[rows])


def coins(seed: int, *columns: Content | NDArray[Any], copies: bool = True) -> Coins:
    """Return the coins of records.

    Args:
        seed: determines the key.
        columns: all raw fields of the records, as arrays [record] of numbers or texts, as arrays
            [record, ...] of numbers, or as `evenclip.data.content` converts a column of a table.
        copies: whether equal records have different coins; False for ids of persons, whose
            records go together.

    Raises:
        ValueError: the seed is negative, there is no column, or columns differ in length.
    """
    _check(seed)
    fields = [c if isinstance(c, Numbers | Coded) else of_array(c) for c in columns]
    lengths = {len(field) for field in fields}
    if len(lengths) != 1:
        raise ValueError(
            f"The columns have {sorted(lengths)} records; give at least one column, and all of the "
            "same length."
        )
    layout = repr([field.layout for field in fields])
    digests = _digests(_key(seed, f"record {layout} {copies}"), fields, *lengths)
    if copies:
        _separate(_key(seed, "occurrence"), digests, fields)
    words = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 4)
    return Coins(words.astype(np.uint64))


def uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return random words as numbers in [0, 1), multiples of 2⁻⁵³."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _check(seed: int) -> None:
    """Raise if the seed is negative."""
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be a whole number of at least 0.")


def _key(seed: int, purpose: str) -> bytes:
    """Return the key of a seed for one purpose."""
    plain = f"{int(seed)} {purpose}".encode()
    return hashlib.blake2b(plain, digest_size=32, person=b"evenclip split").digest()


def _digests(key: bytes, fields: list[Content], records: int) -> list[bytes]:
    """Return the keyed digest of each record's content, 32 bytes each."""
    if records == 0:
        return []
    width = sum(field.block(0, 1).shape[1] for field in fields)
    rows = max(1, _BLOCK_BYTES // max(1, width))
    digests, blake2b = list[bytes](), hashlib.blake2b
    for start in range(0, records, rows):
        end = min(records, start + rows)
        block = np.concatenate([field.block(start, end) for field in fields], axis=1)
        plain = block.tobytes()
        digests += [
            blake2b(plain[at : at + width], digest_size=32, key=key).digest()
            for at in range(0, len(plain), width)
        ]
    return digests


def _separate(key: bytes, digests: list[bytes], fields: Sequence[Content]) -> None:
    """Replace the digests of all but the first of equal records, by their occurrence numbers."""
    times = Counter(digests)
    if len(times) == len(digests):
        return
    rows = [at for at, digest in enumerate(digests) if times[digest] > 1]
    occurred = defaultdict[tuple[bytes, bytes], int](int)
    for at, spelling in zip(rows, _spellings(fields, rows), strict=True):
        digest = digests[at]
        number = occurred[digest, spelling]
        occurred[digest, spelling] += 1
        if number:
            plain = struct.pack("<Q", number) + digest
            digests[at] = hashlib.blake2b(plain, digest_size=32, key=key).digest()


def _spellings(fields: Sequence[Content], rows: list[int]) -> Iterator[bytes]:
    """Yield what is equal for those of these records that are spelt alike."""
    columns = [field.spelling[rows] for field in fields if field.spelling is not None]
    if not columns:
        return repeat(b"", len(rows))
    return map(bytes, np.ascontiguousarray(np.stack(columns, axis=1)))
