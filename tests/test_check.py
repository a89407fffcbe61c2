"""The checks: accepted values, and the exact messages for refused ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evenclip import check

POSITIVE = "a is {}; it must be a finite number above 0."
NATURAL = "a is {}; it must be a whole number of at least 1."
FRACTION = "a is {}; it must lie above 0 and at most at 1."

REFUSED = [
    *(
        (check.positive, v, POSITIVE)
        for v in (0, 0.0, -0.0, -1, -5e-324, math.nan, math.inf, -math.inf)
    ),
    *((check.natural, v, NATURAL) for v in (0, -1, 1.5, True, False, "3")),
    *(
        (check.fraction, v, FRACTION)
        for v in (0, 0.0, -0.1, 1.0000000000000002, 2, math.nan, math.inf, -math.inf)
    ),
]
TAKEN = [
    *((check.positive, v) for v in (5e-324, 1, 1.5, 1e308, np.float32(0.5))),
    *((check.natural, v) for v in (1, 2, 10**9, np.int64(3), 4.0)),
    *((check.fraction, v) for v in (5e-324, 0.5, 1, 1.0, np.float32(0.5))),
]


@pytest.mark.parametrize(
    ("test", "value", "text"), REFUSED, ids=[f"{t.__name__}-{v!r}" for t, v, _ in REFUSED]
)
def test_refused(test, value, text):
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the whole text is compared
        test(a=value)
    assert str(refused.value) == text.format(repr(value))


@pytest.mark.parametrize(("test", "value"), TAKEN, ids=[f"{t.__name__}-{v!r}" for t, v in TAKEN])
def test_taken(test, value):
    test(a=value)


@pytest.mark.parametrize("test", [check.positive, check.natural, check.fraction])
def test_the_first_offender_is_named(test):
    with pytest.raises(ValueError, match=r"^second is -1; "):
        test(first=1, second=-1, third=-2)
    test()
