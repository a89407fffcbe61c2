"""Classes and groups of a table: their names, and the code of each row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evenclip.data import columns

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["JOIN", "MISSING", "Codes", "Labels", "fit_labels", "groups_of", "labels_of", "ordered"]

MOST_VALUES = 20  # of a numeric class or group column
MOST_LABELS = 200  # classes or groups; with more, the column is probably the wrong one
JOIN = " × "
MISSING = "missing"
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Labels:
    """The classes of the target, or the groups of one protected column.

    Attributes:
        column: name of the column.
        names: the labels.
        edges: the thresholds between the labels of a number; None if the labels are values.
    """

    column: str
    names: tuple[str, ...]
    edges: tuple[float, ...] | None = None

    def of(self, series: pd.Series) -> Codes:
        """Return each value's position in `names` [row]; −1 if it is missing or unknown."""
        position = {name: code for code, name in enumerate(self.names)}
        if self.edges is None:
            codes, names = columns.factor(series)
            places = [position.get(name, -1) for name in names]
            return np.array([*places, position.get(MISSING, -1)], dtype=np.int64)[codes]
        values = columns.numbers(series, columns.is_duration(series))
        codes = np.searchsorted(self.edges, values, side="right").astype(np.int64)
        codes[np.isnan(values)] = position.get(MISSING, -1)
        return codes


def fit_labels(
    series: pd.Series, bins: int | None, entry: dict[str, Any] | None
) -> tuple[Labels, str | None]:
    """Return the groups of a protected column, and the access to them that ε does not cover.

    All rows are used: results are reported by group, so the groups must not depend on the split.
    """
    name = str(series.name)
    if entry is not None and entry["kind"] in ("category", "boolean"):
        public = entry["values"] if entry["kind"] == "category" else ["False", "True"]
        return Labels(name, _with_missing(public, entry.get("missing", True))), None
    ranged = entry is not None and entry["kind"] == "number" and bins is not None
    if ranged or (columns.kind_of(series).name == "number" and series.nunique() > MOST_VALUES):
        return _fitted_bins(series, bins, entry)
    codes, names = columns.factor(series)
    labels = Labels(name, _with_missing(ordered(names), bool((codes < 0).any())))
    return labels, f"the names of the groups of {name!r}, which are those found in the data"


def labels_of(
    used: list[tuple[pd.DataFrame, Codes]], target: str, group: tuple[str, ...], bins: int | None,
    entries: dict[str, Any],
) -> tuple[tuple[Labels, ...], list[str]]:  # fmt: skip
    """Return the classes and each protected column's groups, and uncovered accesses."""
    for name in (target, *group):
        if entries.get(name, {}).get("other", False):
            raise ValueError(
                f'The schema gives {name!r} "other": true; classes and groups must all be listed.'
            )
    classes, uncovered = _classes(_joined(used, target), entries.get(target))
    labels = [classes]
    for name in group:
        groups, access = fit_labels(_joined(used, name), bins, entries.get(name))
        labels.append(groups)
        uncovered += [] if access is None else [access]
    return tuple(labels), uncovered


def groups_of(
    used: list[tuple[pd.DataFrame, Codes]], labels: tuple[Labels, ...], entries: dict[str, Any]
) -> tuple[str, ...]:
    """Return the combinations of labels that occur, or all of them if all labels are public."""
    sizes = tuple(len(attribute.names) for attribute in labels)
    if all(attribute.column in entries for attribute in labels):
        places = np.arange(math.prod(sizes))
    else:
        codes = tuple(attribute.of(_joined(used, attribute.column)) for attribute in labels)
        places = np.unique(np.ravel_multi_index(codes, sizes))
    what = JOIN.join(attribute.column for attribute in labels)
    if len(places) > MOST_LABELS:
        raise ValueError(
            f"The group {what!r} has {len(places)} different values, more than {MOST_LABELS} "
            "groups; is it the right column?"
        )
    names = [
        JOIN.join(attribute.names[code] for attribute, code in zip(labels, place, strict=True))
        for place in zip(*np.unravel_index(places, sizes), strict=True)
    ]
    if len(names) < 2:
        raise ValueError(
            f"All rows belong to one group of {what!r}, {names[0]!r}; choose a column with two or "
            "more."
        )
    return tuple(names)


def _joined(used: list[tuple[pd.DataFrame, Codes]], name: str) -> pd.Series:
    """Return one column of all used rows."""
    import pandas as pd

    pieces = [frame[name].iloc[rows] for frame, rows in used]
    return pieces[0] if len(pieces) == 1 else pd.concat(pieces)


def _classes(series: pd.Series, entry: dict[str, Any] | None) -> tuple[Labels, list[str]]:
    """Return the classes of the target, and uncovered accesses."""
    name = str(series.name)
    if entry is not None and entry["kind"] in ("category", "boolean"):
        public = entry["values"] if entry["kind"] == "category" else ("False", "True")
        return Labels(name, tuple(public)), []
    names = columns.factor(series).names
    numeric = columns.kind_of(series).name == "number"
    if numeric and len(names) > MOST_VALUES:
        raise ValueError(
            f"The target {name!r} is a number with {len(names)} different values; this is "
            f"classification, with at most {MOST_VALUES} numbers as classes: cut it into classes "
            "first (for example income > 50000)."
        )
    if len(names) > MOST_LABELS:
        raise ValueError(
            f"The target {name!r} has {len(names)} different values, more than {MOST_LABELS} "
            "classes; is it the right column?"
        )
    if len(names) < 2:
        raise ValueError(
            f"The target {name!r} has one class only, {names[0]!r}; there is nothing to learn."
        )
    return Labels(name, tuple(ordered(names))), [
        f"the names of the classes of {name!r}, which are those found in the data"
    ]


def _fitted_bins(
    series: pd.Series, bins: int | None, entry: dict[str, Any] | None
) -> tuple[Labels, str | None]:
    """Cut a number into groups, at quantiles of the rows or evenly over the public range."""
    name = str(series.name)
    values = columns.numbers(series, columns.is_duration(series))
    if bins is None:
        raise ValueError(
            f"The group column {name!r} is a number with {series.nunique()} different values; "
            "give group_bins (--group-bins), the number of groups to cut it into."
        )
    if entry is not None and entry["kind"] == "number":
        low, high = entry["range"]
        edges = np.linspace(low, high, bins + 1)[1:-1]
        missing, uncovered = entry.get("missing", True), None
    else:
        edges = np.unique(np.nanquantile(values, np.arange(1, bins) / bins))
        missing = bool(np.isnan(values).any())
        uncovered = f"the values that cut {name!r} into groups, which are quantiles of all rows"
    names = _with_missing(_bin_names(edges.tolist()), missing)
    return Labels(name, names, tuple(edges.tolist())), uncovered


def _with_missing(names: Sequence[str], missing: bool) -> tuple[str, ...]:
    """Append the name of the group of missing values, if `missing` or if it is among the names."""
    others = [name for name in names if name != MISSING]
    return (*others, MISSING) if missing or len(others) < len(names) else tuple(others)


def _bin_names(edges: list[float]) -> list[str]:
    """Return the names of the groups between the thresholds."""
    if not edges:
        return ["all"]
    texts = [f"{edge:.6g}" for edge in edges]
    texts = texts if len(set(texts)) == len(texts) else [repr(edge) for edge in edges]
    between = [f"{low} to < {high}" for low, high in pairwise(texts)]
    return [f"< {texts[0]}", *between, f"≥ {texts[-1]}"]


def ordered(names: Iterable[str]) -> list[str]:
    """Sort names, by value if all are numbers.

    >>> ordered(["10", "9", "-1"]), ordered(["b", "10", "9"])
    (['-1', '9', '10'], ['10', '9', 'b'])
    """
    listing = list(names)
    try:
        return sorted(listing, key=float)
    except ValueError:
        return sorted(listing)
