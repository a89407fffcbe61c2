"""Conversion of arrays, numbers and the items of torch datasets to tensors."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from evenclip.data.validation import describe, remedy

__all__ = ["Inputs", "coded", "inputs", "item", "numbered", "whole"]

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""Input of a model: a tensor [sample, ...], or a tuple or dict of them for several inputs."""


def numbered(group: Tensor) -> tuple[str, ...]:
    """Return the names "0" to "K−1" for groups without names."""
    codes = np.unique(group.cpu().numpy()).tolist()
    if group.is_floating_point() or codes == list(range(len(codes))):  # `Dataset` refuses floats
        return tuple(str(code) for code in codes)
    raise ValueError(
        f"group has {len(codes)} different codes from {codes[0]} to {codes[-1]}; without "
        "group_names they must be 0 to K−1, each in use: give group_names, or number the groups "
        "from 0."
    )


def inputs(x: Any) -> Inputs:
    """Convert the features to tensors."""
    if isinstance(x, dict):
        return {key: _tensor(f"x[{key!r}]", value) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(_tensor(f"x[{i}]", value) for i, value in enumerate(x))
    return _tensor("x", x)


def coded(name: str, values: Any, names: tuple[str, ...]) -> tuple[Tensor, tuple[str, ...]]:
    """Return targets or groups as a tensor, and their names; by default the sorted strings."""
    _refuse_masked(name, values)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "UOT":
        return whole(_tensor(name, values)), names
    if not all(isinstance(value, str) for value in values.flat):
        raise TypeError(
            f"{name} has dtype {values.dtype} and values that are not strings, such as missing "
            "ones; remove them, or give integers or strings only."
        )
    distinct, codes = np.unique(values.astype(str), return_inverse=True)
    names = names or tuple(distinct.tolist())
    unknown = [value for value in distinct.tolist() if value not in names]
    if unknown:
        raise ValueError(
            f"{name} has the value {unknown[0]!r}, which is not one of {names}; add it to them."
        )
    positions = [names.index(value) for value in distinct.tolist()]
    return torch.from_numpy(np.array(positions, dtype=np.int64)[codes]), names


def item(source: Any, i: int) -> tuple[Inputs, ...]:
    """Read one row of a torch dataset."""
    try:
        item = source[i]
    except Exception as error:
        raise ValueError(
            f"Item {i} of the dataset cannot be read ({type(error).__name__}: {error}); correct "
            "it, or leave it out."
        ) from error
    return _row(item)


def _row(item: Any) -> tuple[Inputs, ...]:
    """Convert the elements of an item to tensors."""
    if not isinstance(item, tuple | list) or len(item) not in (2, 3):
        raise ValueError(
            f"An item of the dataset is {describe(item)}; it must be (x, y) or (x, y, group)."
        )
    return inputs(item[0]), _tensor("y", item[1]), *(_tensor("group", group) for group in item[2:])


def _tensor(name: str, value: Any) -> Tensor:
    """Return a tensor; numpy arrays are copied, floating ones to torch's default dtype."""
    if isinstance(value, Tensor):
        return value
    _refuse_masked(name, value)
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(
            f"{name} is {describe(value)}; give a tensor or a numpy array.{remedy(value)}"
        )
    if value.dtype.kind not in "fiub":
        raise TypeError(f"{name} has dtype {value.dtype}; encode it as numbers before training.")
    default = torch.empty(0).numpy().dtype
    dtype = default if value.dtype.kind == "f" else value.dtype.newbyteorder("=")
    return torch.from_numpy(np.array(value, dtype=dtype, order="C"))


def _refuse_masked(name: str, value: Any) -> None:
    """Raise for a masked array with missing values, which a tensor would hold as numbers."""
    is_masked = isinstance(value, np.ma.MaskedArray)
    missing = int(np.asarray(value.mask).sum()) if is_masked else 0
    if missing:
        raise ValueError(
            f"{name} is a masked array with {missing} missing values; fill them in, or leave their "
            "rows out."
        )


def whole(values: Tensor) -> Tensor:
    """Convert integers and booleans to int64, for use as indices; floats are unchanged."""
    return values if values.is_floating_point() else values.long()
