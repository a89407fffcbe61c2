"""Models as plain values: a named network, or a custom function in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenclip import models
from evenclip.data import Dataset
from evenclip.sweep.describe.data import find_source
from evenclip.sweep.describe.files import call, describe_file, load_module

__all__ = ["default_model", "describe_model", "make_model", "model_name"]


def describe_model(given: str) -> dict[str, Any]:
    """Describe a model given as on the command line.

    That is mlp, mlp:128,64, linear, cnn, sigmoid-then-softmax, or file.py:function.
    """
    name, _, rest = given.partition(":")
    if name.endswith(".py"):
        return {"function": rest, **describe_file(name)}
    if name == "linear" and not rest:
        return {"name": "mlp", "options": {"hidden": []}}
    if name == "mlp":
        try:
            hidden = [int(width) for width in rest.split(",")] if rest else [256, 256]
        except ValueError:
            raise ValueError(
                f"--model is {given!r}; give the widths as whole numbers, as in mlp:256,256."
            ) from None
        return {"name": "mlp", "options": {"hidden": hidden}}
    if name in ("cnn", "sigmoid-then-softmax") and not rest:
        return {"name": name, "options": {}}
    raise ValueError(
        f"There is no model {given!r}; choose mlp, mlp:WIDTH,WIDTH, linear, cnn or "
        "sigmoid-then-softmax, or give file.py:function for your own."
    )


def model_name(description: Mapping[str, Any]) -> str:
    """Return a model in the form of the command line.

    >>> model_name(describe_model("mlp:64,32")), model_name(describe_model("linear"))
    ('mlp:64,32', 'linear')
    """
    if "function" in description:
        return f"{Path(description['path']).name}:{description['function']}"
    name, hidden = description["name"], description.get("options", {}).get("hidden")
    if name != "mlp":
        return str(name)
    return "mlp:" + ",".join(map(str, hidden)) if hidden else "linear"


def default_model(description: Mapping[str, Any], data: Dataset) -> dict[str, Any] | None:
    """Describe the default model of a named or custom dataset; None: that of tables."""
    source = find_source(description)
    if source is not None and source.model is not None:
        return describe_model(source.model)
    shape = list(data.x.shape[1:]) if isinstance(data.x, Tensor) else []
    square = len(shape) == 3 and shape[1] == shape[2] >= 5  # as models.cnn needs
    return describe_model("cnn") if "dataset" in description and square else None


def make_model(description: Mapping[str, Any], data: Dataset, seed: int) -> nn.Module:
    """Create the model for these data, initialised from this seed."""
    x = data.take(torch.arange(1)).x
    classes = len(data.class_names) or int(data.y.max()) + 1
    if "function" in description:
        return _custom_model(description, x, classes, seed)
    try:
        return _named_model(description, x, classes, seed)
    except (RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"The model {description['name']} cannot be created with these options ({reason})."
        ) from error


def _custom_model(description: Mapping[str, Any], x: Any, classes: int, seed: int) -> nn.Module:
    """Call the user's function to create a model."""
    name, path = description["function"], description["path"]
    make = getattr(load_module(description), name, None) if name else None
    if not callable(make):
        raise ValueError(
            f"{path} has no function {name!r}; give file.py:function, called as function(x, "
            "classes)."
        )
    with models.seeded(seed):
        model = call(lambda: make(x, classes), f"{name} of {path}", path)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{name} of {path} returned {type(model).__name__}; it must return an nn.Module."
        )
    return model


def _named_model(description: Mapping[str, Any], x: Any, classes: int, seed: int) -> nn.Module:
    """Create one of the paper's networks."""
    assert isinstance(x, Tensor)
    name, options = description["name"], dict(description.get("options", {}))
    if x.dtype != torch.float32:
        raise ValueError(
            f"The model {name} needs float32 features, but x is {x.dtype}; convert it with "
            "x.float(), or give your own model."
        )
    if name == "cnn":
        if x.ndim != 4 or x.shape[2] != x.shape[3]:
            raise ValueError(
                f"The model cnn needs square images, but the data have shape {list(x.shape[1:])}; "
                "use mlp."
            )
        return models.cnn(x.shape[1], x.shape[2], classes, seed=seed, **options)
    if x.ndim != 2:
        return nn.Sequential(
            nn.Flatten(), models.TABULAR[name](x[0].numel(), classes, seed=seed, **options)
        )
    if name == "sigmoid-then-softmax":
        return models.sigmoid_then_softmax(x.shape[1], classes, seed=seed)
    return models.mlp(x.shape[1], classes, seed=seed, **options)
