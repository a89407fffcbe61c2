"""Numbers that callers give as arrays or lists."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenclip.arguments import shown

__all__ = ["array_of"]


def array_of(name: str, values: Any) -> NDArray[np.float64]:
    """Return a copy of the values as an array, with NaN for None; `name` is for messages.

    Raises:
        TypeError: they are not numbers.
    """
    try:
        return np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"{name} is {shown(values)}; it must hold numbers, in rows of equal length."
        ) from None
