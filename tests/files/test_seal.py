"""Sealed JSON: every value counts, white space and the order of keys do not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenclip import files
from evenclip.files import kinds

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=4).filter(lambda name: name != "checksum"), plain))
def test_what_is_sealed_comes_back(value):
    content = files.sealed(value)
    assert files.unsealed(content, "f", kinds.RESULTS) == json.loads(json.dumps(value))
    other = json.dumps(dict(reversed(json.loads(content).items()))).encode()
    assert files.unsealed(other, "f", kinds.RESULTS) == json.loads(json.dumps(value))


CONTENT = files.sealed({"epsilon": 3.0, "rules": ["dpsgd", "ünder"], "nested": {"a": [1, None]}})


@given(st.integers(0, 8 * len(CONTENT) - 1))
def test_no_flipped_bit_changes_the_value(bit):
    damaged = bytearray(CONTENT)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        value = files.unsealed(bytes(damaged), "f", kinds.RESULTS)
    except files.DamagedError:
        return
    assert value == files.unsealed(CONTENT, "f", kinds.RESULTS)  # white space


@given(st.integers(0, len(CONTENT) - 3))
def test_no_truncated_file_is_believed(length):
    with pytest.raises(files.DamagedError, match="f is damaged"):
        files.unsealed(CONTENT[:length], "f", kinds.RESULTS)


def test_a_file_without_a_checksum_says_so():
    with pytest.raises(
        files.DamagedError, match="was written by an earlier version or by hand; make it"
    ):
        files.unsealed(b'{"epsilon": 3.0}', "f", kinds.RESULTS)
    assert files.unsealed(b'{"a": 1}', "f", kinds.RESULTS, verify=False) == {"a": 1}
