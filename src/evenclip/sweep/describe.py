"""Data, models and rules as plain values, and back: what a specification is made of.

| | |
|---|---|
| data | {"name": "adult", "options": {...}, "directory": ...}                       a dataset of the catalogue |
|      | {"table": true, "path": ..., "sha256": ..., "options": {...}, "test": {"path": ..., "sha256": ...}} |
|      | {"tensors": true, "path": ..., "sha256": ...}                                splits that were given in memory |
| model | {"name": "mlp", "options": {"hidden": [256, 256]}} |
|       | {"function": "make", "path": "net.py", "sha256": ...}                        make(x, classes) -> nn.Module |
| rule | {"name": "dpsgd", "options": {"C0": 1.0, "sigma": 1.0}} |
|      | {"class": "MyRule", "path": "my_rules.py", "sha256": ..., "options": {...}} |

`rows` in the data takes a sample of each part, of so many at the most; `hold_out` keeps a fraction
of the training rows apart for validation, where there is no such split.
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
    """Data, and what has to be said about them.

    Attributes:
        splits: training, test and perhaps validation rows.
        pair: the two groups whose gap is reported; None: the largest gap of any two.
        uncovered: accesses to the data that ε does not cover.
        notes: what the user should know.
        small: groups too small to judge.
    """

    splits: Splits
    pair: tuple[str, str] | None = None
    uncovered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


# --- data ---------------------------------------------------------------------------------------


def load_data(description: Mapping[str, Any], seed: int) -> Loaded:
    """The data of a run."""
    found = _load(description, seed)
    rows = description.get("rows")
    if rows:
        found = replace(found, splits=_fewer(found.splits, int(rows), seed))
    fraction = description.get("hold_out")
    if fraction and found.splits.validation is None:
        found = replace(found, splits=_held_out(found.splits, float(fraction), seed))
    return found


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
    """Bytes of each file that a named dataset is read from, entries of a folder; those that are
    there.
    """
    from evenclip.data.catalogue import SOURCES, data_directory

    place = data_directory(directory)
    found = [(file.path, file.find(place)) for file in SOURCES[name].files]
    return {path: _size(place) for path, place in found if place is not None}


def _size(place: Path) -> int:
    return sum(1 for _ in place.iterdir()) if place.is_dir() else place.stat().st_size


def _table(description: Mapping[str, Any], seed: int) -> Loaded:
    from evenclip.data.table import table

    options = dict(description["options"])
    test = description.get("test")
    for part in (description, test):
        if part is not None:
            _check_content(part)
    found = table(
        description["path"], seed=seed, test=None if test is None else test["path"], **options
    )
    return Loaded(found.splits, None, found.uncovered, found.notes, found.small)


def save_splits(splits: Splits, folder: Path) -> dict[str, Any]:
    """Splits that were given in memory, written where workers find them; their description."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {
        part: {
            "x": data.x,
            "y": data.y,
            "group": data.group,
            "names": [list(data.group_names), list(data.class_names)],
        }
        for part, data in zip(Splits._fields, splits, strict=True)
        if data is not None
    }
    buffer = io.BytesIO()  # a file's own name would be a part of its content
    torch.save({"name": splits.train.name, **plain}, buffer)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    path, scratch = folder / f"{digest[:24]}.pt", folder / f".writing-{uuid.uuid4().hex}"
    scratch.write_bytes(buffer.getvalue())
    scratch.replace(path)
    return {"tensors": True, "path": str(path.resolve()), "sha256": digest}


def _tensors(description: Mapping[str, Any]) -> Loaded:
    _check_content(description)
    plain = torch.load(description["path"], weights_only=True)
    parts = {
        part: Dataset(
            p["x"], p["y"], p["group"], tuple(p["names"][0]), tuple(p["names"][1]), plain["name"]
        )
        for part, p in plain.items()
        if part != "name"
    }
    return Loaded(Splits(**parts))


def _fewer(splits: Splits, most: int, seed: int) -> Splits:
    """So many rows of each part at the most."""
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
    """A part of the training rows as validation rows."""
    train = splits.train
    order = np.random.Generator(
        np.random.PCG64(np.random.SeedSequence([seed, STREAM]))
    ).permutation(len(train))
    cut = round(fraction * len(train))
    held, rest = torch.from_numpy(np.sort(order[:cut])), torch.from_numpy(np.sort(order[cut:]))
    return splits._replace(train=_rows(train, rest), validation=_rows(train, held))


def _rows(data: Dataset, rows: Tensor) -> Dataset:
    """Some rows, as they are."""
    assert isinstance(data.x, Tensor)
    return replace(
        data, x=data.x[rows], y=data.y[rows], group=None if data.group is None else data.group[rows]
    )


# --- models -------------------------------------------------------------------------------------


def describe_model(given: str) -> dict[str, Any]:
    """A model as the command line has it: mlp, mlp:128,64, linear, cnn, sigmoid-then-softmax, or
    file.py:function.
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
        "sigmoid-then-softmax, or give "
        "file.py:function for one of your own."
    )


def make_model(description: Mapping[str, Any], data: Dataset, seed: int) -> nn.Module:
    """The model for these data, with the initialisation of this seed."""
    x = data.take(torch.arange(1)).x
    classes = len(data.class_names) or int(data.y.max()) + 1
    if "function" in description:
        return _own_model(description, x, classes, seed)
    try:
        return _named_model(description, x, classes, seed)
    except (RuntimeError, MemoryError) as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(
            f"The model {description['name']} cannot be made as it is given ({said})."
        ) from error


def _own_model(description: Mapping[str, Any], x: Any, classes: int, seed: int) -> nn.Module:
    """What somebody's own function makes."""
    name, path = description["function"], description["path"]
    make = getattr(_module(description), name, None) if name else None
    if not callable(make):
        raise ValueError(
            f"{path} has no function {name!r}; give file.py:function, called as function(x, "
            "classes)."
        )
    try:
        with models.seeded(seed):
            made = make(x, classes)
    except Exception as error:
        raise ValueError(f"{name} of {path} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"{name} of {path} returned {type(made).__name__}; it must return an nn.Module."
        )
    return made


def _named_model(description: Mapping[str, Any], x: Any, classes: int, seed: int) -> nn.Module:
    """One of the paper's networks."""
    assert isinstance(x, Tensor)
    name, options = description["name"], dict(description.get("options", {}))
    if name == "cnn":
        if x.ndim != 4 or x.shape[2] != x.shape[3]:
            raise ValueError(
                f"The model cnn needs square images and the data have shape {list(x.shape[1:])}; "
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
    """A rule as the command line has it: its name, or file.py:Class for a stranger's, made with its
    defaults.
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
    """A rule as plain values."""
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
            "could load it from; "
            "put it into a .py file of its own."
        )
    return {"class": type(rule).__qualname__, "options": options, **describe_file(path)}


def make_rule(description: Mapping[str, Any]) -> Rule:
    """The rule that was described."""
    options = dict(description.get("options", {}))
    if "class" not in description:
        return RULES[description["name"]](**options)
    kind = getattr(_module(description), description["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, Rule)):
        raise ValueError(
            f"{description['path']} has no rule {description['class']!r}; give file.py:Class with "
            "a subclass of "
            "evenclip.Rule."
        )
    return kind(**options)


# --- files --------------------------------------------------------------------------------------


def describe_file(path: str | Path) -> dict[str, Any]:
    """Where a file is and what is in it."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; give the path of a file.")
    return {"path": str(path.resolve()), "suffix": path.suffix.lower(), "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_content(description: Mapping[str, Any]) -> None:
    """Raise where a file is not what it was when it was described."""
    path = Path(description["path"])
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there on {platform.node()}; put it where every machine finds it."
        )
    if sha256(path) != description["sha256"]:
        raise ValueError(
            f"{description['path']} has changed since the comparison began; start it again."
        )


def _module(description: Mapping[str, Any]) -> ModuleType:
    """Somebody's own file as a module; the same object for the same content. What it imports is not
    looked at.
    """
    name = f"evenclip_given_{description['sha256'][:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, description["path"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(
            f"{description['path']} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return module
