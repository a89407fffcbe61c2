"""Validation of the tensors of a dataset; each error says what to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "NO_SAMPLES",
    "check_classes",
    "check_finite",
    "check_groups",
    "check_labels",
    "check_lengths",
    "describe",
    "remedy",
]

NO_SAMPLES = "The dataset has 0 samples; training needs at least one: was everything filtered out?"


def check_lengths(tensors: dict[str, Any]) -> None:
    """Raise unless all are tensors with one row per sample, and there is at least one sample."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} is {describe(tensor)}; Dataset holds tensors: use torch.as_tensor, or "
                "evenclip.data.as_dataset for all of (x, y, group)."
            )
        _check_values(name, tensor)
        if tensor.ndim == 0:
            raise ValueError(f"{name} is a single number; it must have one row per sample.")
    lengths = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"The numbers of rows differ: {listed}; give one row per sample in each.")
    if lengths["y"] == 0:
        raise ValueError(NO_SAMPLES)


def _check_values(name: str, tensor: Tensor) -> None:
    """Raise unless a tensor is an ordinary one."""
    if tensor.is_meta:
        raise ValueError(f"{name} is on the device 'meta', so it has no values; load it first.")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise ValueError(
            f"{name} is a sparse or nested tensor; give an ordinary one, as from to_dense()."
        )
    if tensor.is_quantized:
        raise ValueError(f"{name} is a quantized tensor; give numbers, as from dequantize().")
    if tensor.requires_grad:
        raise ValueError(
            f"{name} requires a gradient, and records are not trained; give {name}.detach()."
        )


def check_finite(name: str, values: Tensor) -> None:
    """Raise if there is a NaN or an infinity; the message says how many and where."""
    # A finite sum has finite terms, so one pass without a mask suffices. An infinite sum may be an
    # overflow of finite terms, so the values are then checked one by one.
    if not values.is_floating_point() or torch.isfinite(values.sum()):
        return
    bad = ~torch.isfinite(values)
    rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten()  # [bad row]
    if len(rows):
        raise ValueError(
            f"{name} has {int(bad.sum())} non-finite values in {len(rows)} of {len(values)} rows "
            f"(first: row {int(rows[0])}); remove or impute them before training."
        )


def check_groups(group: Tensor | None, group_names: tuple[str, ...]) -> None:
    """Raise unless there are both groups and names for them, or neither."""
    if group is None and not group_names:
        return
    if group is None:
        raise ValueError(
            f"group_names is {group_names} but there is no group; give both or neither."
        )
    if group.ndim != 1:
        raise ValueError(
            f"group has shape {list(group.shape)}; it must be [sample], one code for each."
        )
    if group.dtype != torch.int64:
        raise TypeError(
            f"group has dtype {group.dtype}; it must hold int64 codes, positions in group_names."
        )
    if not group_names:
        raise ValueError(
            "There is a group but no group_names; give the public names of all groups."
        )
    _check_codes("group", group, "group_names", group_names)


def check_classes(y: Tensor, class_names: tuple[str, ...]) -> None:
    """Raise if the classes have names and y holds a code without a name."""
    if class_names and not y.is_floating_point():
        _check_codes("y", y, "class_names", class_names)


def check_labels(y: Tensor, rows: list[int], outputs: int, ignored: int) -> None:
    """Raise for a class label that the model has no output for."""
    if y.is_floating_point():
        return
    wrong = ((y < 0) | (y >= outputs)) & (y != ignored)
    if wrong.any():
        place = wrong.nonzero()[0]
        raise ValueError(
            f"Item {rows[int(place[0])]} of the dataset has the label {int(y[tuple(place)])} and "
            f"the model has {outputs} outputs, for the labels 0 to {outputs - 1}; number the "
            "classes from 0, or give the model more outputs."
        )


def _check_codes(name: str, codes: Tensor, names_field: str, names: tuple[str, ...]) -> None:
    """Raise unless the codes are positions in the names, and the names differ."""
    if len(set(names)) < len(names):
        raise ValueError(f"{names_field} is {names}; each name may appear only once.")
    lowest, highest = (int(code) for code in codes.aminmax())
    if lowest < 0 or highest >= len(names):
        raise ValueError(
            f"{name} has codes from {lowest} to {highest} and {names_field} has {len(names)} "
            f"names, so codes must lie from 0 to {len(names) - 1}; add the missing names or "
            "correct the codes."
        )


def describe(value: Any) -> str:
    """Name the type of a value, with its article and, for sequences, its length."""
    if value is None:
        return "None"
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    length = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{article} {kind}{length}"


def remedy(value: Any) -> str:
    """Say how to convert a common wrong type; matched by name to avoid importing pandas."""
    remedies = {
        "DataFrame": " Encode the columns of a DataFrame as numbers and pass their .to_numpy().",
        "Series": " Pass the .to_numpy() of a Series.",
        "DataLoader": " Pass the .dataset of a DataLoader.",
        "list": " Pass numpy.array(...) of a list.",
    }
    return remedies.get(type(value).__name__, "")
