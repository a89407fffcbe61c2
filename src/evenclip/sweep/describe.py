"""Convert data, models and rules to the plain values of a specification, and back.

Data are a named dataset, a custom dataset, a table, or splits that were given in memory:

    {"name": "adult", "options": {...}, "directory": ...}
    {"dataset": "faces", "path": "my_data.py", "sha256": ..., "options": {...}, "content": ...}
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

The `content` of a custom dataset is a digest of what it returned for seed 0, because its file may
read others. Files of the user are run once per process; what they print goes to stderr.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import platform
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evenclip import models
from evenclip.data import SOURCES, Dataset, Source, Splits, data_directory
from evenclip.data.source import check_splits, source_of
from evenclip.rules import RULES, Rule

__all__ = [
    "NO_DATASET",
    "Loaded",
    "default_model",
    "describe_dataset",
    "describe_file",
    "describe_model",
    "describe_rule",
    "file_sizes",
    "find_source",
    "load_data",
    "make_model",
    "make_rule",
    "named_rule",
    "save_splits",
    "sha256",
]

STREAM = int.from_bytes(b"held out", "big")

NO_DATASET = (
    "There is no dataset {!r}; choose among {}, or give a table or your own dataset "
    "(my_data.py:name)."
)


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
    source = find_source(description)
    if source is None:
        raise ValueError(NO_DATASET.format(description["name"], ", ".join(SOURCES)))
    directory = data_directory(description.get("directory"))
    if "dataset" in description:
        splits = _custom_splits(description, source, directory, seed)
    else:
        splits = source.load(seed, directory=directory, **description.get("options", {}))
    return Loaded(splits, source.pair, source.uncovered)


def find_source(description: Mapping[str, Any]) -> Source | None:
    """Return the `Source` of a named or custom dataset; None for other data and unknown names."""
    if "dataset" not in description:
        return SOURCES.get(description.get("name", ""))
    name, where = description["dataset"], _where(description)
    module = _module(description)
    if not name or not hasattr(module, name):
        raise ValueError(
            f"{Path(description['path']).name} has no dataset {name!r}; give file.py:name with a "
            f"function of the seed or a Source, such as {_candidates(module)}."
        )
    return source_of(getattr(module, name), name, where)


def _candidates(module: ModuleType) -> str:
    """Return the names of up to five functions and sources that the module defines."""
    own = [
        name
        for name, value in vars(module).items()
        if isinstance(value, Source)
        or (inspect.isfunction(value) and value.__module__ == module.__name__)
    ]
    return ", ".join([name for name in own if not name.startswith("_")][:5]) or "faces(seed)"


def file_sizes(
    description: Mapping[str, Any], directory: str | Path | None = None
) -> dict[str, int]:
    """Return the size of each existing file of a named or custom dataset.

    The size of a file is its number of bytes, that of a folder its number of entries.
    """
    source, root = find_source(description), data_directory(directory)
    files = () if source is None else source.files
    located = [(file.path, file.find(root)) for file in files]
    return {path: _size(location) for path, location in located if location is not None}


def _size(path: Path) -> int:
    return sum(1 for _ in path.iterdir()) if path.is_dir() else path.stat().st_size


def describe_dataset(
    given: str, options: Mapping[str, Any], directory: Path | None
) -> dict[str, Any]:
    """Describe a custom dataset given as file.py:name; it is loaded once, with seed 0."""
    path, _, name = given.rpartition(":")
    description = {"dataset": name, "options": dict(options), **describe_file(path)}
    if directory is not None:
        description["directory"] = str(directory.resolve())
    sizes = file_sizes(description, directory)
    if sizes:
        description["files"] = sizes
    return {**description, "content": _digest(_load(description, 0).splits)}


def _custom_splits(
    description: Mapping[str, Any], source: Source, directory: Path | None, seed: int
) -> Splits:
    """Call the loader of a custom dataset and check what it returns."""
    where = _where(description)
    options = description.get("options", {})
    returned = _call(
        lambda: source.load(seed, directory=directory, **options), where, description["path"]
    )
    splits = check_splits(returned, source, where)
    content = description.get("content")
    if seed == 0 and content is not None and _digest(splits) != content:
        raise ValueError(
            f"{where} returned other data for seed 0 than before. It must return the same data "
            "whenever it is called with the same seed: take every random number from a generator "
            "with this seed, do not rely on the order of a set, and leave the files that it reads "
            "unchanged during a comparison."
        )
    return splits


def _where(description: Mapping[str, Any]) -> str:
    """Return a custom dataset as the user named it, without the folder."""
    return f"{Path(description['path']).name}:{description['dataset']}"


def _digest(splits: Splits) -> str:
    """Return the SHA-256 of all tensors and names."""
    digest = hashlib.sha256()
    for data in splits:
        if data is None:
            digest.update(b"no split")
            continue
        digest.update(repr((data.group_names, data.class_names, data.name)).encode())
        for tensor in (data.x, data.y, data.group):
            assert isinstance(tensor, Tensor)
            digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            plain = tensor.detach().cpu().contiguous().flatten()
            digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
    make = getattr(_module(description), name, None) if name else None
    if not callable(make):
        raise ValueError(
            f"{path} has no function {name!r}; give file.py:function, called as function(x, "
            "classes)."
        )
    with models.seeded(seed):
        model = _call(lambda: make(x, classes), f"{name} of {path}", path)
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
    """Run the user's file as a module; the same content gives the same object.

    The files that it imports are not compared.
    """
    name = f"evenclip_given_{description['sha256'][:16]}"
    if name in sys.modules:
        return sys.modules[name]
    _check_content(description)
    path = str(description["path"])
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # dataclasses look up their module
    try:
        # Compiled here: Python's cache of compiled files can miss a change within one second.
        code = compile(Path(path).read_bytes(), path, "exec")
        with contextlib.redirect_stdout(sys.stderr):
            exec(code, vars(module))
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise ValueError(
            f"{path} cannot be loaded: {_reason(error, path)}{_neighbour(error, path)}"
        ) from error
    return module


def _call(function: Callable[[], Any], what: str, path: str) -> Any:
    """Call the user's function; its output goes to stderr, because stdout may be JSON."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} failed: {_reason(error, path)}") from error


def _reason(error: BaseException, path: str) -> str:
    """Return the error with the line of the user's file where it was raised."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    place = f" (line {lines[-1]})" if lines else ""
    kind, text = type(error).__name__, f"{error}".removesuffix(".")
    return f"{kind}: {text}{place}." if text else f"{kind}{place}."


def _neighbour(error: BaseException, path: str) -> str:
    """Return what to do if the user's file imports another file of its folder."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    module = error.name.partition(".")[0]
    folder = Path(path).parent
    if not (folder / f"{module}.py").is_file() and not (folder / module).is_dir():
        return ""
    return (
        f" Runs are named by the content of this one file, and only this file is sent to workers: "
        f"move what it needs of {module} into it, or install {module} as a package."
    )
