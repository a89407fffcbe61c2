"""The cost of privacy to each group: the non-private model θ* against the private θ̃, per seed.

θ* is the non-private run with the same seed: same split, same initialisation. So differences are
paired, and effects of the split that are common to both cancel.

    π_k = acc_k(θ*) − acc_k(θ̃)      privacy cost of group k, in points
    R_k = L_k(θ̃) − L_k(θ*)          excessive risk of group k

The gaps |π_a − π_b| and |R_a − R_b| say how unevenly the groups pay. Values are [seed, group],
arrays or nested lists. An undefined value (a group without a sample in that seed's split) is None
or NaN. The result is NaN there, and gaps leave it out; `left_out` lists these groups, so that a
report can name them. An infinite loss is defined and stays infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenclip import check
from evenclip.arguments import shown
from evenclip.audit.arrays import array_of

__all__ = ["Values", "excessive_risk", "gap", "left_out", "privacy_cost"]

Values: TypeAlias = NDArray[np.float64] | Sequence[Sequence[float | None]]
"""[seed, group]; None or NaN if undefined."""


def privacy_cost(reference: Values, private: Values) -> NDArray[np.float64]:
    """Return π_k = acc_k(θ*) − acc_k(θ̃), the loss of accuracy of group k.  # [seed, group]

    The unit is that of the arguments.

    >>> privacy_cost([[85.0, 93.0]], [[70.0, 88.5]])
    array([[15. ,  4.5]])

    Raises:
        ValueError: if the two are not of the same seeds and groups.
    """
    a, b = _both(reference, private)
    return _minus(a, b)


def excessive_risk(reference: Values, private: Values) -> NDArray[np.float64]:
    """Return R_k = L_k(θ̃) − L_k(θ*), the increase of group k's loss.  # [seed, group]

    >>> excessive_risk([[0.25, None]], [[0.75, 0.5]])
    array([[0.5, nan]])

    Raises:
        ValueError: if the two are not of the same seeds and groups.
    """
    a, b = _both(reference, private)
    return _minus(b, a)


def gap(values: Values, pair: tuple[int, int] | None = None) -> NDArray[np.float64]:
    """Return |v_a − v_b| for the `pair` (a, b), or the largest gap of any two groups.  # [seed]

    `pair` has positions of groups. The gap is NaN if a group of the pair is undefined, or if fewer
    than two groups are defined. The undefined groups depend on the split only, so two methods with
    the same seed are compared on the same groups.

    A gap is never negative. So the mean of gaps over seeds is at least the gap of the means over
    seeds, and above 0 even if groups pay the same on average. For the gap of the means, give the
    means as one row.

    >>> gap([[15.0, 4.5, 7.0], [1.0, None, 3.0]])
    array([10.5,  2. ])
    >>> gap([[15.0, 4.5, 7.0], [1.0, None, 3.0]], pair=(0, 1))
    array([10.5,  nan])

    Raises:
        ValueError: if the pair does not name two of the groups.
    """
    table = _table("values", values)
    if pair is not None:
        table = table[:, list(_checked(pair, table.shape[1]))]
    undefined = np.isnan(table)
    needed = 2 if pair is None else table.shape[1]
    enough = np.count_nonzero(~undefined, axis=1) >= needed  # [seed]
    highest = np.where(undefined, -np.inf, table).max(axis=1, initial=-np.inf)
    lowest = np.where(undefined, np.inf, table).min(axis=1, initial=np.inf)
    return np.where(enough, _minus(highest, lowest), np.nan)


def left_out(values: Values) -> list[int]:
    """Return the positions of the groups that are undefined for at least one seed.

    Gaps leave these groups out for these seeds.

    >>> left_out([[15.0, 4.5, 7.0], [1.0, None, 3.0]])
    [1]
    """
    return [int(k) for k in np.flatnonzero(np.isnan(_table("values", values)).any(axis=0))]


def _both(reference: Values, private: Values) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return both as arrays; raise unless they have the same shape."""
    a, b = _table("reference", reference), _table("private", private)
    if a.shape != b.shape:
        raise ValueError(
            f"reference is {list(a.shape)} and private is {list(b.shape)}, [seed, group]; they "
            "must be of the same seeds and groups: train the reference with every seed."
        )
    return a, b


def _minus(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the difference; ∞ − ∞ is NaN, without a warning."""
    with np.errstate(invalid="ignore"):
        return np.asarray(a - b, np.float64)


def _table(name: str, values: Values) -> NDArray[np.float64]:
    """Return the values as an array [seed, group], with NaN for None."""
    table = array_of(name, values)
    if table.ndim != 2:
        raise ValueError(
            f"{name} is {list(table.shape)}; expected [seed, group]: give one row for each seed."
        )
    return table


def _checked(pair: tuple[int, int], K: int) -> tuple[int, int]:
    """Return the pair; raise unless it names two groups."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise TypeError(f"pair is {shown(pair)}; it must be two positions of groups.")
    a, b = pair
    check.whole(pair=a)
    check.whole(pair=b)
    if not (0 <= a < K and 0 <= b < K and a != b):
        raise ValueError(
            f"pair is ({a}, {b}) and there are {K} groups; give two different positions of 0 to "
            f"{K - 1}."
        )
    return a, b
