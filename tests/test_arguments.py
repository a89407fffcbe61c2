"""Arguments are checked against their annotations; exact messages."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import pytest

from evenclip.arguments import check_kinds, shown


def _example(
    number: float = 1.0,
    whole: int | None = None,
    flag: bool = False,
    names: Sequence[str] = (),
    pair: tuple[int, int] = (0, 1),
    path: str | os.PathLike[str] = "x",
    call: Callable[[], None] = print,
    table: Mapping[str, int] | None = None,
    word: Literal["exact"] | bool = True,
) -> None:
    check_kinds(_example, locals())


REFUSED = [
    ("number", "1", "a number"),
    ("number", True, "a number"),
    ("number", None, "a number"),
    ("whole", [1], "a whole number or None"),
    ("flag", 1, "True or False"),
    ("names", "ab", "a list"),
    ("names", [1], "a list"),
    ("pair", (1,), "a list"),
    ("path", 3, "a text or a path"),
    ("call", 3, "a function"),
    ("table", [], "a dict or None"),
    ("word", "x", "'exact' or True or False"),
]


@pytest.mark.parametrize(("name", "value", "expected"), REFUSED)
def test_a_value_of_another_kind_is_refused(name, value, expected):
    with pytest.raises(TypeError) as refused:
        _example(**{name: value})
    assert str(refused.value).startswith(f"{name} is {shown(value)}; it must be ")
    assert str(refused.value).endswith(".")
    assert all(word in str(refused.value) for word in expected.split(" or "))


def test_numbers_of_numpy_are_numbers():
    _example(np.float32(1.5), np.int64(3), np.bool_(True), names=["a"], pair=(1, 2))


def test_data_are_not_printed():
    assert shown(np.arange(3)) == "a ndarray"
    assert shown(["secret"]) == "a list"
    assert shown(10**5000) == "a whole number of 16610 bits"
    assert len(shown("x" * 1000)) == 60
