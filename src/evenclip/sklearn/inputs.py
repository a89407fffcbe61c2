"""Inputs of the estimator: rows, classes and groups, checked and encoded."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d
from torch import Tensor

from evenclip.data import columns
from evenclip.data import schema as schemas
from evenclip.data.columns import Column, listed
from evenclip.data.encoder import Encoder, fit_columns
from evenclip.data.labels import JOIN, MISSING, Labels, ordered
from evenclip.data.reading import Reading
from evenclip.rules import Rule

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Groups",
    "Target",
    "check_frame",
    "encoder_of",
    "groups_for",
    "groups_of",
    "in_one_line",
    "refuse_text",
    "target_of",
    "warn_of_unlike",
]


class Target(NamedTuple):
    """Each row's class, and the accesses to the data that ε does not cover."""

    codes: Tensor  # [sample] int64
    classes: NDArray[Any]  # [class]
    uncovered: list[str]


class Groups(NamedTuple):
    """Each row's group; the codes are None if groups are not used."""

    codes: Tensor | None  # [sample] int64
    names: tuple[str, ...]
    column: str


def check_frame(frame: pd.DataFrame) -> None:
    """Raise if a table is empty, has duplicate columns or holds infinite values."""
    from pandas.api import types

    if 0 in frame.shape:
        raise ValueError(
            f"X has {len(frame)} rows and {frame.shape[1]} columns; give at least one of each."
        )
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise ValueError(f"X has two columns {twice[0]!r}; rename one of them.")
    for name, series in frame.items():
        if not types.is_float_dtype(series.dtype):
            continue
        if np.isinf(series.to_numpy(np.float64, na_value=np.nan)).any():
            raise ValueError(
                f"Column {name!r} of X holds infinity; replace it by a number, or by NaN (missing)."
            )


@contextmanager
def in_one_line(name: str) -> Iterator[None]:
    """Turn a message of scikit-learn into one line that names the argument."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split()).removesuffix(".")
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{text}." if re.search(rf"\b{name}\b", text) else f"{name} cannot be used: {text}."
        ) from error


def refuse_text(X: Any) -> None:
    """Raise for an array of texts; only a DataFrame has a type for each column."""
    if getattr(getattr(X, "dtype", None), "kind", "O") not in "OUS":
        return
    text = next(
        (value for value in np.asarray(X, dtype=object).flat if isinstance(value, str)), None
    )
    if text is not None:
        raise ValueError(
            f"X holds the text {text!r} and is not a DataFrame; give a pandas DataFrame, whose "
            "columns of texts become categories, or encode the texts as numbers."
        )


def target_of(y: Any, public: Sequence[Any] | NDArray[Any] | None, n: int) -> Target:
    """Return each row's class; the classes are the public ones, or those found in y."""
    import pandas as pd

    if y is None:
        raise ValueError(
            "PrivateClassifier requires y to be passed, but the target y is None; give each "
            "row's class."
        )
    with in_one_line("y"):
        values = column_or_1d(_plain(y), warn=True)
    if len(values) != n:
        raise ValueError(f"X has {n} rows and y has {len(values)}; give each row of X its class.")
    assert_all_finite(values, input_name="y")
    if pd.isna(values).any():
        raise ValueError(
            f"{int(pd.isna(values).sum())} of {n} rows have no class in y; leave them out."
        )
    try:
        check_classification_targets(values)
        classes = np.unique(values if public is None else _listed(public))
    except TypeError as error:
        raise TypeError(
            "The classes are of different kinds; give numbers only, or texts only."
        ) from error
    if len(classes) < 2:
        raise ValueError(
            f"There is one class only in {'y' if public is None else 'classes'}, "
            f"{classes.tolist()}; there must be two or more to tell apart."
        )
    position = {label: code for code, label in enumerate(classes.tolist())}
    unknown = [label for label in dict.fromkeys(values.tolist()) if label not in position]
    if unknown:
        raise ValueError(
            f"y holds the class {unknown[0]!r}, which is not one of "
            f"{listed(classes.tolist(), 20)}; leave these rows out, or name the class in "
            "`classes` before training."
        )
    codes = torch.tensor([position[label] for label in values.tolist()], dtype=torch.int64)
    uncovered = ["the classes, which are those found in y"] if public is None else []
    return Target(codes, classes, uncovered)


def _listed(public: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
    """Return the given classes as an array."""
    try:
        classes = np.asarray(public)
    except (ValueError, RuntimeError):
        classes = np.empty((0, 0))
    if classes.ndim != 1 or classes.dtype.kind not in "biufOUS":
        raise ValueError("classes must be a list of the classes, all numbers or all texts.")
    return classes


def _plain(y: Any) -> Any:
    """Return nullable labels of pandas and Arrow in numpy's type; `boolean` would become 1.0."""
    import pandas as pd

    if not isinstance(y, pd.Series) or not isinstance(y.dtype, pd.api.extensions.ExtensionDtype):
        return y
    if isinstance(y.dtype, pd.CategoricalDtype):
        return y
    absent = int(y.isna().sum())
    if absent:
        raise ValueError(f"{absent} of {len(y)} rows have no class in y; leave them out.")
    for kind, matches in ((bool, pd.api.types.is_bool_dtype), (int, pd.api.types.is_integer_dtype)):
        if matches(y.dtype):
            return y.to_numpy(dtype=np.int64 if kind is int else bool)
    return y


def groups_for(rule: Rule, sensitive_features: Any, n: int, classes: int) -> Groups:
    """Return the groups if the rule uses groups, else no groups."""
    if not rule.uses_groups:
        return Groups(None, (), "group")
    if sensitive_features is None:
        raise ValueError(
            f"{rule.name} needs every row's group; pass fit(X, y, sensitive_features=...), or "
            "choose a rule that does not use groups, such as 'dpsgd-global-adapt'."
        )
    groups = groups_of(sensitive_features, n)
    reason = rule.unsuited(len(groups.names), classes)
    if reason is not None:
        raise ValueError(f"{rule.name} is not for these data: {reason} Choose another rule.")
    return groups


def groups_of(sensitive_features: Any, n: int) -> Groups:
    """Return the groups: the combinations of values that occur; "missing" is a value too."""
    import pandas as pd

    given = sensitive_features
    if isinstance(given, pd.Series):
        given = given.to_frame("group" if given.name is None else given.name)
    named = isinstance(given, pd.DataFrame | dict)
    frame = pd.DataFrame(given if named else np.asarray(given))
    if not named:
        width = frame.shape[1]
        frame.columns = ["group"] if width == 1 else [f"group {i + 1}" for i in range(width)]
    if len(frame) != n:
        raise ValueError(
            f"X has {n} rows and sensitive_features has {len(frame)}; give each row its group."
        )
    texts = []
    for i in range(frame.shape[1]):
        factor = columns.factor(frame.iloc[:, i])
        texts.append(np.array([*factor.names, MISSING], dtype=object)[factor.codes])
    labels = [JOIN.join(row) for row in zip(*texts, strict=True)]
    names = tuple(ordered(set(labels)))
    position = {name: code for code, name in enumerate(names)}
    codes = torch.tensor([position[label] for label in labels], dtype=torch.int64)
    return Groups(codes, names, JOIN.join(str(name) for name in frame.columns))


def encoder_of(frame: pd.DataFrame, schema: Any) -> tuple[Encoder, list[str]]:
    """Return the encoder, from the public schema or fitted on the rows, and uncovered accesses."""
    if schema is None:
        encoded, notes = _fitted(frame)
        uncovered = [
            "the encoder (kinds, categories, means, deviations and gaps of the columns), fitted "
            "on the training rows"
        ]
    else:
        is_path = isinstance(schema, str | os.PathLike)
        plain = schemas.load(schema) if is_path else schemas.validated(schema)
        notes = [*schemas.notes(plain), *schemas.check(plain, frame)]
        entries = {
            name: entry for name, entry in plain["columns"].items() if entry["kind"] != "ignore"
        }
        encoded = [schemas.column(name, entries[name]) for name in frame.columns if name in entries]
        uncovered = [*schemas.accesses(plain), schemas.FITS]
    if not encoded:
        raise ValueError("The schema leaves no column of X to learn from; give one of them a kind.")
    for note in notes:
        warnings.warn(note, stacklevel=3)  # the caller of fit
    return Encoder(tuple(encoded), Labels("y", ()), (), ()), uncovered


def warn_of_unlike(readings: Sequence[Reading]) -> None:
    """Warn of what is unlike the training rows; raise if a column cannot be read at all.

    Raises:
        ValueError: no value of a column is of its kind, and some are not missing.
    """
    joined = readings[0]
    for further in readings[1:]:
        joined = joined.merged(further)
    joined.check()
    if joined.notes:
        warnings.warn(" ".join(joined.notes), stacklevel=4)  # the caller of predict


def _fitted(frame: pd.DataFrame) -> tuple[list[Column], list[str]]:
    """Fit the encoding of each column on the rows; return the encodings and notes."""
    rows = np.arange(len(frame))
    encoded: list[Column] = []
    notes: list[str] = []
    for name in frame.columns:
        try:
            # Every given column is used: which ones look useless would depend on the data.
            fitted, remarks = fit_columns(frame, rows, [name], keep=[name])
        except TypeError as error:
            raise TypeError(
                f"Column {name!r} of X holds neither numbers nor texts nor dates ({error})."
            ) from error
        encoded += fitted
        notes += remarks
    return encoded, notes
