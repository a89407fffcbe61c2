"""Keyed digests of what each step of a run published, to compare repeated steps with."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from evenclip.files import synchronise
from evenclip.mechanism.words import derive
from evenclip.training.checkpoint import CheckpointError

__all__ = ["Repeats"]


class Repeats:
    """Keyed digests of what each step of a run published, to compare repeated steps with.

    A run that is resumed with `resume="exact"` repeats the steps after its checkpoint with the same
    noise. If a repeated step published another value, one draw of noise would cover two sums.

    Args:
        folder: folder of the checkpoints.
        rank: number of this process; a sharded run publishes a piece on each rank.
        key: the run's secret key.
    """

    _ROW = struct.Struct("<16sQ16s")  # run, draw, digest
    _AT_ONCE = 2**30  # bytes; the cipher takes less than 2³¹

    def __init__(self, folder: Path, rank: int, key: bytes) -> None:
        self._path = folder / f"digests-{rank}.secret"
        self._cipher = AESGCM(derive(key, "published"))
        self._run = derive(key, "repeats")[:16]
        self._is_flushed = True
        self._seen: dict[int, bytes] = {}
        self._exists = self._path.exists()
        if self._exists:
            self._load()

    def _load(self) -> None:
        """Read the digests of this run, and cut off a row that was being written."""
        content = self._path.read_bytes()
        whole = len(content) - len(content) % self._ROW.size
        os.truncate(self._path, whole)
        for run, draw, seen in self._ROW.iter_unpack(content[:whole]):
            if run == self._run:
                self._seen[draw] = seen

    def check_held(self, drawn: int, blocks: int, end: int) -> None:
        """Raise unless the digests of repeated draws are there; then create the file.

        Args:
            drawn: the draw that the run repeats first.
            blocks: the draws before this one were made for certain, and their digests flushed.
            end: the draws before this one may have been made.

        Raises:
            CheckpointError: the file or a digest is missing.
        """
        lost = next((draw for draw in range(drawn, blocks) if draw not in self._seen), None)
        if lost is None and drawn < end and not self._exists:
            lost = drawn
        if lost is not None:
            raise CheckpointError(
                f"{self._path} has no digest of draw {lost}, so it cannot be checked that a "
                "repeated step publishes what it published before, and one noise must not hide "
                "two sums. Bring the file back from a copy, or resume with resume=True, which "
                "draws new noise."
            )
        if not self._exists:  # from here on, a file that is missing was removed
            self._append(b"")
            self.flush()
            synchronise(self._path.parent)

    def check(self, draw: int, published: Sequence[Tensor]) -> None:
        """Compare what a draw published with what it published before, or keep its digest.

        Raises:
            CheckpointError: the run has published other values at this draw.
        """
        digest = self._digest(draw, published)
        if draw not in self._seen:
            self._append(self._ROW.pack(self._run, draw, digest))
            self._seen[draw] = digest
        elif self._seen[draw] != digest:
            raise CheckpointError(
                f"Draw {draw} did not come out as when this run first made it, and one noise must "
                "not hide two sums, so nothing of it is returned. Resume with resume=True, which "
                "draws new noise."
            )

    def flush(self) -> None:
        """Wait until all digests are on the disk; a no-op if they are."""
        if not self._is_flushed:
            synchronise(self._path)
            self._is_flushed = True

    def _append(self, content: bytes) -> None:
        """Write a row; `flush` waits until it is on the disk."""
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                if os.write(handle, content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(handle)
        except OSError as error:
            raise CheckpointError(
                f"{self._path} cannot be written ({error.strerror}), and nothing of a step is "
                "returned before its digest is there; make room, or choose another folder."
            ) from error
        self._is_flushed = False

    def _digest(self, draw: int, published: Sequence[Tensor]) -> bytes:
        """Return the digest of the bits; GMAC takes a twentieth of the time of BLAKE2b."""
        tags = b""
        for tensor in published:
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            for part in torch.split(content, self._AT_ONCE):
                nonce = draw.to_bytes(8, "big") + len(tags).to_bytes(4, "big")
                tags += self._cipher.encrypt(nonce, b"", part.numpy().data)
        return hashlib.blake2b(tags, digest_size=16).digest()
