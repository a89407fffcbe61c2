"""The journal of a checkpoint folder: ledger lines written ahead, so that no step can be lost.

    DIR/journal.jsonl       draws of all runs of the folder, before they are made   may be published
    DIR/digests-0.secret    keyed digests of what each step published, by rank      never share

Before the first draw of a block, the ledger entries of the whole block are on the disk, marked as
reserved. So if a process is killed, all steps that it may have published are counted when the
training is resumed; the reserved steps that it did not take are counted too. A run that ends in
order, also by Ctrl-C or by an exception, writes how far it came, and the rest of its block is free
again. Nothing is flushed between two blocks, so that this takes no noticeable time.

A line of the journal replaces what the earlier lines of its run say about its first draw and all
later ones; at the time of writing, none of these is made.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from evenclip.mechanism import Ledger
from evenclip.mechanism.entry import Entry, read, row
from evenclip.mechanism.words import derive
from evenclip.training.checkpoint import CheckpointError, synchronise

__all__ = ["Journal", "Repeats", "journaled"]

_NAME = "journal.jsonl"
_VOID = b"~"  # ends a line that a process was writing when it was killed


def journaled(folder: Path) -> Ledger:
    """Return the draws of all runs in the journal of a folder, as reserved steps.

    Raises:
        CheckpointError: a line is damaged.
    """
    path = folder / _NAME
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Ledger()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}), so the steps of earlier attempts cannot be "
            "counted; make it readable, or start again in another folder."
        ) from error
    runs: dict[str, list[Entry]] = defaultdict(list)
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        if line.endswith(_VOID):  # it was never complete, so none of its draws was made
            continue
        run, first, entries = _line(path, number, line)
        runs[run] = [*_before(first, runs[run]), *entries]
    return Ledger([entry for entries in runs.values() for entry in entries])


def _line(path: Path, number: int, line: bytes) -> tuple[str, int, list[Entry]]:
    """Return a line's run, its first draw and its entries."""
    place = f"Line {number} of {path}"
    try:
        plain = json.loads(line)
        entries = [read(entry, place) for entry in plain["entries"]]
        return str(plain["run"]), int(plain["first"]), entries
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{place} is damaged, so the steps of earlier attempts cannot be counted; bring the "
            "file back from a copy, or start again in another folder."
        ) from error


def _before(first: int, entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the steps before a draw."""
    for entry in entries:
        if entry.first < first:
            yield replace(entry, steps=min(entry.steps, first - entry.first))


class Journal:
    """The journal that a run writes before it draws.

    Attributes:
        reserved: the entries of the current block.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self.reserved: list[Entry] = []

    def covers(self, draw: Entry) -> bool:
        """Return whether this draw is reserved on the disk."""
        return any(
            entry.run == draw.run
            and entry.first <= draw.first < entry.end
            and entry.is_same_release(draw)
            for entry in self.reserved
        )

    def reserve(self, run: str, first: int, entries: Sequence[Entry]) -> None:
        """Write entries from draw `first` of a run on, and wait until they are on the disk."""
        entries = [replace(entry, reserved=True) for entry in entries]
        plain = {"run": run, "first": first, "entries": [row(entry) for entry in entries]}
        self._append(json.dumps(plain).encode() + b"\n")
        self.reserved = entries

    def close(self, run: str, drawn: int) -> None:
        """Write that a run ended after `drawn` draws; the rest of its block is free again."""
        if any(entry.run == run and entry.end > drawn for entry in self.reserved):
            self.reserve(run, drawn, [])

    def _append(self, line: bytes) -> None:
        """Write a line, and wait until it is on the disk."""
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                size = os.fstat(handle).st_size
                if size and os.pread(handle, 1, size - 1) != b"\n":
                    line = _VOID + b"\n" + line
                if os.write(handle, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            finally:
                os.close(handle)
            synchronise(self._path.parent)
        except OSError as error:
            raise CheckpointError(
                f"{self._path} cannot be written ({error.strerror}), and no step is taken before "
                "it is in the journal; make room, or choose another folder."
            ) from error


class Repeats:
    """Keyed digests of what each step of a run published, to compare repeated steps with.

    A run that is resumed with `resume="exact"` repeats the steps after its checkpoint with the same
    noise. If one of them came out otherwise, one noise would hide two sums.

    Args:
        folder: folder of the checkpoints.
        rank: number of this process; a sharded run publishes a piece on each rank.
        key: the run's secret key.
    """

    _ROW = struct.Struct("<16sQ16s")  # run, draw, digest
    _AT_ONCE = 2**30  # bytes; the cipher takes less than 2³¹

    def __init__(self, folder: Path, rank: int, key: bytes) -> None:
        self._path, self._cipher = (
            folder / f"digests-{rank}.secret",
            AESGCM(derive(key, "published")),
        )
        self._run = derive(key, "repeats")[:16]
        self._seen: dict[int, bytes] = {}
        if self._path.exists():
            content = self._path.read_bytes()
            whole = len(content) - len(content) % self._ROW.size
            os.truncate(self._path, whole)
            for run, draw, seen in self._ROW.iter_unpack(content[:whole]):
                if run == self._run:
                    self._seen[draw] = seen

    def check(self, draw: int, published: Sequence[Tensor]) -> None:
        """Compare what a draw published with what it published before, or keep its digest.

        Raises:
            CheckpointError: the run has published other values at this draw.
        """
        digest = self._digest(draw, published)
        if draw not in self._seen:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(handle, self._ROW.pack(self._run, draw, digest))
            finally:
                os.close(handle)
        elif self._seen[draw] != digest:
            raise CheckpointError(
                f"Draw {draw} did not come out as when this run first made it, and one noise must "
                "not hide two sums, so nothing of it is returned. Resume with resume=True, which "
                "draws new noise."
            )

    def _digest(self, draw: int, published: Sequence[Tensor]) -> bytes:
        """Return the digest of the bits; GMAC takes a twentieth of the time of BLAKE2b."""
        tags = b""
        for tensor in published:
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            for part in torch.split(content, self._AT_ONCE):
                nonce = draw.to_bytes(8, "big") + len(tags).to_bytes(4, "big")
                tags += self._cipher.encrypt(nonce, b"", part.numpy().data)
        return hashlib.blake2b(tags, digest_size=16).digest()
