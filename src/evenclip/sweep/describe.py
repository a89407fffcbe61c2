"""Convert data, models and rules to the plain values of a specification, and back.

Data are a named dataset, a table, or splits that were given in memory:

    {"name": "adult", "options": {...}, "directory": ...}
    {"table": true, "path": ..., "sha256": ..., "options": {...}, "test": {"path", "sha256"}}
    {"tensors": true, "path": ..., "sha256": ...}

A model is a named network, or a custom function `make(x, classes) -> nn.Module`:

    {"name": "mlp", "options": {"hidden": [256, 256]}}
    {"function": "make", "path": "net.py", "sha256": ...}

A rule is a named rule or a custom class:

    {"name": "dpsgd", "options": {"C0": 1.0, "sigma": 1.0}}
    {"class": "MyRule", "path": "my_rules.py", "sha256": ..., "options": {...}}

With `rows` in the data, each split is sampled down to at most that many rows. With `hold_out`, this
fraction of the training rows becomes the validation split, unless there is one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import io
import platform
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenclip import models
from evenclip.data import Dataset, Splits
from evenclip.rules import RULES, Rule

__all__ = [
    "Loaded",
    "describe_file",
    "describe_model",
    "describe_rule",
    "file_sizes",
    "load_data",
    "make_model",
    "make_rule",
    "named_rule",
    "save_splits",
    "sha256",
]

STREAM = int.from_bytes(b"held out", "big")


@dataclass(frozen=True)
class Loaded:
    """Data and the notes about them.

    Attributes:
        splits: training, test and optionally validation rows.
        pair: the two groups whose gap is reported; None: the largest gap of any two.
        uncovered: accesses to the data that ε does not cover.
        notes: notes for the user.
        small: groups too small to judge.
    """

    splits: Splits
    pair: tuple[str, str] | None = None
    uncovered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


# --- data ---------------------------------------------------------------------------------------


def load_data(description: Mapping[str, Any], seed: int) -> Loaded:
    """Load the data of a run."""
    loaded = _load(description, seed)
    rows = description.get("rows")
    if rows:
        loaded = replace(loaded, splits=_fewer(loaded.splits, int(rows), seed))
    fraction = description.get("hold_out")
    if fraction and loaded.splits.validation is None:
        loaded = replace(loaded, splits=_held_out(loaded.splits, float(fraction), seed))
    return loaded


def _load(description: Mapping[str, Any], seed: int) -> Loaded:
    if description.get("tensors"):
        return _tensors(description)
    if description.get("table"):
        return _table(description, seed)
    from evenclip.data.catalogue import SOURCES, data_directory

    name = description["name"]
    if name not in SOURCES:
        raise ValueError(
            f"There is no dataset {name!r}; choose among {', '.join(SOURCES)}, or give a file."
        )
    source = SOURCES[name]
    directory = data_directory(description.get("directory"))
    splits = source.load(seed, directory=directory, **description.get("options", {}))
    return Loaded(splits, source.pair, source.uncovered)


def file_sizes(name: str, directory: str | Path | None) -> dict[str, int]:
    """Return the size of each existing file of a named dataset.

    The size of a file is its number of bytes, that of a folder its number of entries.
    """
    from evenclip.data.catalogue import SOURCES, data_directory

    root = data_directory(directory)
    located = [(file.path, file.find(root)) for file in SOURCES[name].files]
    return {path: _size(location) for path, location in located if location is not None}


def _size(path: Path) -> int:
    return sum(1 for _ in path.iterdir()) if path.is_dir() else path.stat().st_size


def _table(description: Mapping[str, Any], seed: int) -> Loaded:
    from evenclip.data.table import table

    options = dict(description["options"])
    test = description.get("test")
    for file in (description, test):
        if file is not None:
            _check_content(file)
    tabled = table(
        description["path"], seed=seed, test=None if test is None else test["path"], **options
    )
    return Loaded(tabled.splits, None, tabled.uncovered, tabled.notes, tabled.small)


def save_splits(splits: Splits, folder: Path) -> dict[str, Any]:
    """Write in-memory splits to a file that workers can read; return their description."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {
        split: {
            "x": data.x,
            "y": data.y,
            "group": data.group,
            "names": [list(data.group_names), list(data.class_names)],
        }
        for split, data in zip(Splits._fields, splits, strict=True)
        if data is not None
    }
    buffer = io.BytesIO()  # saved to a path, the content would include the file's name
    torch.save({"name": splits.train.name, **plain}, buffer)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    path, scratch = folder / f"{digest[:24]}.pt", folder / f".writing-{uuid.uuid4().hex}"
    scratch.write_bytes(buffer.getvalue())
    scratch.replace(path)
    return {"tensors": True, "path": str(path.resolve()), "sha256": digest}


def _tensors(description: Mapping[str, Any]) -> Loaded:
    _check_content(description)
    plain = torch.load(description["path"], weights_only=True)
    splits = {
        split: Dataset(
            d["x"], d["y"], d["group"], tuple(d["names"][0]), tuple(d["names"][1]), plain["name"]
        )
        for split, d in plain.items()
        if split != "name"
    }
    return Loaded(Splits(**splits))


def _fewer(splits: Splits, most: int, seed: int) -> Splits:
    """Sample at most `most` rows of each split."""
    train, test, validation = splits
    held = None if validation is None else _sampled(validation, most, seed)
    return Splits(_sampled(train, most, seed), _sampled(test, most, seed), held)


def _sampled(data: Dataset, most: int, seed: int) -> Dataset:
    if len(data) <= most:
        return data
    stream = np.random.SeedSequence([seed, STREAM, len(data)])
    chosen = np.random.Generator(np.random.PCG64(stream)).permutation(len(data))[:most]
    return _rows(data, torch.from_numpy(np.sort(chosen)))


def _held_out(splits: Splits, fraction: float, seed: int) -> Splits:
    """Use a fraction of the training rows as the validation split."""
    train = splits.train
    order = np.random.Generator(
        np.random.PCG64(np.random.SeedSequence([seed, STREAM]))
    ).permutation(len(train))
    cut = round(fraction * len(train))
    held, rest = torch.from_numpy(np.sort(order[:cut])), torch.from_numpy(np.sort(order[cut:]))
    return splits._replace(train=_rows(train, rest), validation=_rows(train, held))


def _rows(data: Dataset, rows: Tensor) -> Dataset:
    """Select rows."""
    assert isinstance(data.x, Tensor)
    return replace(
        data, x=data.x[rows], y=data.y[rows], group=None if data.group is None else data.group[rows]
    )


# --- models -------------------------------------------------------------------------------------


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
    make = getattr(_module(description), name, None) if name else None
    if not callable(make):
        raise ValueError(
            f"{path} has no function {name!r}; give file.py:function, called as function(x, "
            "classes)."
        )
    try:
        with models.seeded(seed):
            model = make(x, classes)
    except Exception as error:
        raise ValueError(f"{name} of {path} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{name} of {path} returned {type(model).__name__}; it must return an nn.Module."
        )
    return model


def _named_model(description: Mapping[str, Any], x: Any, classes: int, seed: int) -> nn.Module:
    """Create one of the paper's networks."""
    assert isinstance(x, Tensor)
    name, options = description["name"], dict(description.get("options", {}))
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


# --- rules --------------------------------------------------------------------------------------


def named_rule(given: str) -> Rule | str:
    """Return a rule given as on the command line.

    A name is checked and returned; for file.py:Class the custom rule is created with its defaults.
    """
    if ".py:" not in given:
        if given not in RULES:
            raise ValueError(
                f"There is no rule {given!r}; choose among {', '.join(RULES)}, or give "
                "file.py:Class for your own."
            )
        return given
    path, _, name = given.rpartition(":")
    return make_rule({"class": name, "options": {}, **describe_file(path)})


def describe_rule(rule: Rule) -> dict[str, Any]:
    """Describe a rule as plain values."""
    options = {field.name: getattr(rule, field.name) for field in fields(rule)}  # type: ignore[arg-type]
    if RULES.get(rule.name) is type(rule):
        return {"name": rule.name, "options": options}
    try:
        path = inspect.getsourcefile(type(rule))
    except TypeError:
        path = None
    if path is None or not Path(path).is_file():
        raise ValueError(
            f"The rule {rule.name!r} ({type(rule).__qualname__}) has no file that other processes "
            "could load it from; put it into a .py file of its own."
        )
    return {"class": type(rule).__qualname__, "options": options, **describe_file(path)}


def make_rule(description: Mapping[str, Any]) -> Rule:
    """Create the described rule."""
    options = dict(description.get("options", {}))
    if "class" not in description:
        return RULES[description["name"]](**options)
    kind = getattr(_module(description), description["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, Rule)):
        raise ValueError(
            f"{description['path']} has no rule {description['class']!r}; give file.py:Class with "
            "a subclass of evenclip.Rule."
        )
    return kind(**options)


# --- files --------------------------------------------------------------------------------------


def describe_file(path: str | Path) -> dict[str, Any]:
    """Describe a file: its path, suffix and SHA-256."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the path of a file.")
    return {"path": str(path.resolve()), "suffix": path.suffix.lower(), "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_content(description: Mapping[str, Any]) -> None:
    """Raise if a file is missing or has changed since it was described."""
    path = Path(description["path"])
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist on {platform.node()}; put it where every machine can read it."
        )
    if sha256(path) != description["sha256"]:
        raise ValueError(
            f"{description['path']} has changed since the comparison began; start it again."
        )


def _module(description: Mapping[str, Any]) -> ModuleType:
    """Import the user's file as a module; the same content gives the same object.

    The files that it imports are not compared.
    """
    name = f"evenclip_given_{description['sha256'][:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, description["path"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(
            f"{description['path']} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return module
