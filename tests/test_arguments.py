"""Arguments are checked against their annotations; exact messages."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import pytest
import torch

from evenclip.arguments import check_fields, check_kinds, check_path, plain, shown

if TYPE_CHECKING:
    import pandas as pd


class Closing(Protocol):
    def close(self) -> None: ...


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
    rows: Sequence[Sequence[float]] = (),
    frame: pd.DataFrame | None = None,
    kind: type[os.PathLike] = Path,
    closing: Closing | None = None,
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
    ("number", Fraction(1, 2), "a number"),
    ("number", Decimal(1), "a number"),
    ("number", np.array(1.0), "a number"),
    ("number", torch.tensor(1.0), "a number"),
    ("whole", 1.5, "a whole number or None"),
    ("whole", float("nan"), "a whole number or None"),
    ("names", np.ones(2), "a list of texts"),
    ("names", torch.ones(2), "a list of texts"),
    ("names", {"a"}, "a list of texts"),
    ("rows", [[1.0], ["x"]], "a list"),
    ("table", {1: 1}, "a dict or None"),
    ("table", {"a": "1"}, "a dict or None"),
    ("path", b"x", "a text or a path"),
    ("frame", {}, "a DataFrame or None"),
    ("kind", int, "a class that derives from PathLike"),
    ("closing", "x", "a Closing or None"),
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


def test_a_class_that_is_not_imported_is_known_by_its_name():
    import pandas as pd

    _example(frame=pd.DataFrame(), closing=io.StringIO(), names=np.array(["a"]))


PATHS = {
    "": "it must be a path.",
    "a\0b": "it has a NUL character, which no path has: remove it.",
    "\ud800": "it has a character that file names here cannot have: remove it.",
    "a/" + "b" * 256: "it has a name of more than 255 bytes: give a shorter one.",
    "a/" * 3000: "it has a name of more than 255 bytes: give a shorter one.",
}


@pytest.mark.parametrize("path", PATHS, ids=["empty", "NUL", "half", "long name", "long"])
def test_a_path_that_no_file_has_is_refused(path):
    says = f"path is {shown(path)}; {PATHS[path]}"
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        _example(path=path)
    if path:
        with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
            check_path("path", Path(path))


@dataclass(frozen=True)
class _Fields:
    number: float = 1.0
    whole: int = 1
    names: tuple[str, ...] = ()
    values: Sequence[float] = ()

    def __post_init__(self) -> None:
        check_fields(_Fields, self)


def test_fields_become_values_of_python():
    """np.uint8(200) * 2 would be 144, and np.float16 has three digits."""
    made = _Fields(np.float16(0.5), np.uint8(200), ["a"], np.array([1.0, 2.0]))
    assert repr(made) == "_Fields(number=0.5, whole=200, names=('a',), values=[1.0, 2.0])"
    assert made == _Fields(0.5, 200.0, np.array(["a"]), [1.0, 2.0])
    assert type(plain(np.longdouble(0.5))) is float


def test_an_object_that_cannot_be_printed_has_its_class_in_the_message():
    class Odd(type):
        def __repr__(cls) -> str:
            raise RuntimeError

    assert shown(Odd("Kind", (), {})) == "an Odd"
