"""Random words are AES-256 in counter mode, and every part of a stream can be drawn on its own."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from evenclip.mechanism.words import KEY_BYTES, Words, derive

PROPERTY = settings(derandomize=True, deadline=None, database=None)
KEY = bytes(range(KEY_BYTES))
KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
FIRST = st.integers(0, 9) | st.integers(0, 2**80) | st.integers(2**129 - 9, 2**129 + 9)


def bytes_of(words):
    """Return words as AES wrote them, the first byte of each is the lowest."""
    return words.astype("<u8").tobytes()


def plain(key, first_block, blocks):
    """Return the blocks of AES in counter mode, from the library's own encryption of zeros."""
    counter = (first_block % 2**128).to_bytes(16, "big")
    return Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor().update(bytes(16 * blocks))


# Published vectors
# --------------------------------------------------------------------------------------------------


def test_the_vector_of_sp_800_38a():
    """F.5.5, CTR-AES256.Encrypt: the four output blocks."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    blocks = (
        "0bdf7df1591716335e9a8b15c860c502 5a6e699d536119065433863c8f657b94 "
        "1bc12c9c01610d5d0d8bd6a3378eca62 2956e1c8693536b1bee99c73a31576b6"
    )
    first = 2 * int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16)
    assert bytes_of(Words(key).span(first, 8)) == bytes.fromhex(blocks)


def test_the_vector_of_fips_197():
    """C.3, AES-256 of one block."""
    block = bytes.fromhex("00112233445566778899aabbccddeeff")
    expected = bytes.fromhex("8ea2b7ca516745bfeafc49904b496089")
    counters = np.frombuffer(block, dtype="<u8").reshape(1, 2).astype(np.uint64)
    assert bytes_of(Words(KEY).at(counters)) == expected[:8]


# Any part of a stream
# --------------------------------------------------------------------------------------------------


@given(KEYS, FIRST, st.integers(0, 40))
@PROPERTY
def test_a_span_is_the_plain_counter_mode(key, first, count):
    stream = plain(key, first // 2, count // 2 + 2)
    at = 8 * (first % 2)
    words = Words(key).span(first, count)
    assert words.dtype == np.uint64
    assert words.shape == (count,)
    assert bytes_of(words) == stream[at : at + 8 * count]


@given(KEYS, st.lists(st.tuples(FIRST, st.integers(0, 50)), min_size=1, max_size=6))
@PROPERTY
def test_a_word_does_not_depend_on_what_was_drawn_before(key, spans):
    words = Words(key)
    for first, count in spans:
        drawn = words.span(first, count)
        assert [int(Words(key).span(first + i, 1)[0]) for i in range(count)] == drawn.tolist()


def test_the_counter_wraps_at_its_end():
    """The block after 2¹²⁸ − 1 is block 0, inside one span as between two."""
    words = Words(KEY)
    across = words.span(2 * 2**128 - 3, 6)
    assert np.array_equal(across, np.concatenate([words.span(2 * 2**128 - 3, 3), words.span(0, 3)]))
    assert np.array_equal(words.span(2 * 2**128, 4), words.span(0, 4))


@given(KEYS, st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 2), min_size=1, max_size=9))
@PROPERTY
def test_a_word_at_a_counter_is_the_plain_block_cipher(key, counters):
    drawn = Words(key).at(np.array(counters, dtype=np.uint64))
    for word, (low, high) in zip(drawn, counters, strict=True):
        block = low.to_bytes(8, "little") + high.to_bytes(8, "little")
        cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # one block, as a function
        assert int(word).to_bytes(8, "little") == cipher.update(block)[:8]


def test_no_word_of_a_span_or_of_counters_occurs_twice():
    """A 64-bit collision among 2¹⁷ words has probability 5e-10, and the key is fixed."""
    counters = np.stack(np.divmod(np.arange(2**16, dtype=np.uint64), 256), axis=1)
    words = Words(derive(KEY, "a")).span(0, 2**16), Words(derive(KEY, "b")).at(counters)
    assert len(np.unique(np.concatenate(words))) == 2**17


# Keys
# --------------------------------------------------------------------------------------------------


def test_a_key_for_a_purpose_is_a_keyed_blake2b():
    expected = hashlib.blake2b(b"noise", key=KEY, digest_size=32, person=b"evenclip").digest()
    assert derive(KEY, "noise") == expected


@given(st.lists(st.tuples(KEYS, st.text(max_size=9)), min_size=2, max_size=5, unique=True))
@PROPERTY
def test_other_keys_and_other_purposes_have_other_keys(pairs):
    purposes = {purpose for _, purpose in pairs}
    assert len({derive(*pair) for pair in pairs}) == len(pairs)
    assert len({derive(KEY, purpose) for purpose in purposes}) == len(purposes)


@pytest.mark.parametrize("size", [0, 15, 31, 33])
def test_a_key_of_another_length_is_refused(size):
    with pytest.raises(ValueError, match="Invalid key size"):
        Words(bytes(size))
