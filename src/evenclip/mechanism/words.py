"""Random words from a secret key, by AES-256 in counter mode.

Word i of a key is a function of (key, i) alone, so any part of a stream can be drawn without the
rest, on any number of processes, and again after a resume. Without the key, an attacker who cannot
break AES-256 cannot distinguish the words from random ones. Every purpose has its own key, derived
by a keyed BLAKE2b.
"""

from __future__ import annotations

import hashlib
from typing import NoReturn, SupportsIndex

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

__all__ = ["KEY_BYTES", "Keyed", "Words", "derive"]

KEY_BYTES = 32
_COUNTERS = 2**128  # of AES, one for each block of two words


def derive(key: bytes, purpose: str) -> bytes:
    """Return the key for one purpose.

    >>> derive(bytes(32), "noise") == derive(bytes(32), "batches")
    False
    """
    return hashlib.blake2b(
        purpose.encode(), key=key, digest_size=KEY_BYTES, person=b"evenclip"
    ).digest()


class Keyed:
    """What holds a secret key, and is not copied: a copy would draw the same values again."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{type(self).__name__} holds a secret key, and a copy would draw the same values "
            "again; copy or pickle the run itself, which then gets a key of its own."
        )


class Words(Keyed):
    """The 64-bit words of a key.

    >>> words = Words(bytes(32))
    >>> bool(words.span(1, 3)[0] == words.span(0, 4)[1])
    True
    """

    def __init__(self, key: bytes) -> None:
        self._aes = algorithms.AES(key)
        self._zeros = b""

    def span(self, first: int, count: int) -> NDArray[np.uint64]:
        """Return words first to first + count − 1.  # [count]"""
        block, skipped = divmod(first, 2)
        length = 8 * (count + skipped)
        if length > len(self._zeros):
            self._zeros = bytes(length)
        counter = (block % _COUNTERS).to_bytes(16, "big")
        out = np.empty(count + skipped + 2, dtype="<u8")  # the library asks for room for a block
        stream = Cipher(self._aes, modes.CTR(counter)).encryptor()
        stream.update_into(memoryview(self._zeros)[:length], out.data.cast("B"))
        return out[skipped : skipped + count].astype(np.uint64, copy=False)

    def at(self, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return one word for each pair of numbers.  counters: [word, 2] -> [word]

        A key is used either for `span` or for `at`, so no block is encrypted twice.
        """
        # ECB of distinct counters is AES as a function of the counter; no text is encrypted.
        blocks = Cipher(self._aes, modes.ECB()).encryptor().update(counters.astype("<u8").tobytes())
        return np.frombuffer(blocks, dtype="<u8")[::2].astype(np.uint64)
