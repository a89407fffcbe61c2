"""Bad arguments: every public callable and every option of every command, one at a time.

Known-good arguments, and then each parameter replaced by each bad value. The outcome must be a
valid result, or an error that a user can act on: one sentence that names the argument or the value,
before a step is taken. Parameters come from signatures and options from the command line itself, so
a new one is covered without a change here. A new required parameter needs a good value in `GOOD`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import inspect
import io
import itertools
import json
import math
import re
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from torch import nn

import evenclip
from evenclip.arguments import plain
from evenclip.distributed import RankError
from evenclip.mechanism.ledger import Entry, Ledger


class _NoRepr:
    """An object that cannot be printed, and that is equal to nothing."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    __hash__ = None


MOST_SECONDS = 20  # of the processor, for one case
HUGE = 10**400
SHORT: dict[str, Any] = {
    "None": None, "True": True, "NaN": math.nan, "infinity": math.inf, "-1": -1, "0": 0, "1.5": 1.5,
    "text": "x", "list": [], "object": object(), "1e300": 1e300, "huge": HUGE,
}  # fmt: skip
LONG: dict[str, Any] = SHORT | {
    "False": False, "-infinity": -math.inf, "1e-300": 1e-300, "-0.5": -0.5, "1e30": 1e30,
    "10**12": 10**12, "digits": "3", "blank": "", "nul": "a\0b", "long text": "x" * 5000,
    "bytes": b"x", "dict": {}, "set": {1}, "complex": 1j, "class": int, "function": len,
    "lambda": lambda: None, "numpy nan": np.float64("nan"), "numpy 1.5": np.float32(1.5),
    "numpy int": np.int64(3), "numpy bool": np.bool_(True), "array": np.array([1.0, 2.0]),
    "empty array": np.zeros(0), "texts": ["x", "x"], "numbers": [1, 2], "mixed": [1, None, "x"],
    "tensor": torch.zeros(3), "nan tensor": torch.tensor(math.nan), "module": nn.Linear(2, 2),
    "range": range(3), "generator": (i for i in range(2)), "path": Path("/dev/null"),
    # Numbers of other types, and at the ends of their ranges.
    "fraction": Fraction(1, 2), "Fraction 3": Fraction(3), "decimal": Decimal("1.5"),
    "IntEnum": signal.SIGINT, "numpy half": np.float16(1.5), "numpy byte": np.uint8(200),
    "numpy long": np.longdouble(1.5), "array of one": np.array(3), "array of one in a list":
    np.array([3]), "-0.0": -0.0, "subnormal": 5e-324, "1e308": 1e308, "2**63": 2**63,
    "-huge": -HUGE, "2.0": 2.0, "numpy complex": np.complex64(1),
    "numpy date": np.datetime64("2001-01-01"),
    # Texts.
    "half a character": "\ud800", "lines": "a\nb", "numpy text": np.str_("x"), "digits of others":
    "٣", "½": "½", "decomposed": "e\u0301", "escape": "\x1b[2J", "bytearray": bytearray(b"x"),
    "dots": "../..", "slash": "/", "folder and NUL": "a/\0", "long path": "a/" * 3000,
    # Collections, and what is in them.
    "of numbers": {1: 2}, "texts of numbers": {"gradient": "1"}, "NaN of": {"gradient": math.nan},
    "of lists": [[1], [2, 3]], "list of NaN": [math.nan], "list of huge": [HUGE], "list of None":
    [None], "frozenset": frozenset(), "iterator": iter([]), "tuple": (1, "x", None), "object array":
    np.array([1, None], object), "array of texts": np.array(["x", "y"]), "matrix": np.eye(2),
    "records": np.zeros(2, [("a", "i4")]), "masked": np.ma.array([1.0, 2.0], mask=[0, 1]),
    "memory": memoryview(b"x"), "deep": functools.reduce(lambda a, _: [a], range(3000), []),
    # Tensors, modules, and classes in place of instances.
    "tensor with gradient": torch.ones(3, requires_grad=True), "meta tensor":
    torch.zeros(3, device="meta"), "complex tensor": torch.zeros(3, dtype=torch.complex64),
    "sparse tensor": torch.eye(3).to_sparse(), "empty tensor": torch.zeros(0),
    "rule": evenclip.DPSGD(), "class of rules": evenclip.DPSGD, "class of modules": nn.Linear,
    "meta module": nn.Linear(3, 2, device="meta"), "empty module": nn.Sequential(),
    "partial": functools.partial(nn.Linear, 3), "module of Python": math, "type": type,
    "error": ValueError("x"), "no repr": _NoRepr(), "date": datetime.date(2001, 1, 1),
}  # fmt: skip
WORDS_SHORT = ("", "nan", "inf", "-1", "0", "1.5", "abc", "1e300", "9" * 400, "/")
WORDS_LONG = (
    *WORDS_SHORT, " ", "-inf", "NaN", "1e-300", "1e400", "1_000", "0x10", "true", "../..",
    "x" * 5000, "/dev/null", "/dev/zero", "/proc/self/mem", "--", "-", "é😀", "\x1b[31m", "a,b",
    ",", "[]", "{}", "1000000000", "99999999999", "1e-12", "1e-9", "None", "file.py:", ":",
    "mlp:", "mlp:0",
    "mlp:99999999999", "meta", "cuda:99", "mps", "cpu:1",
    "-0", "-0.0", "5e-324", "1e308", "+1", "1.0", "1,5", "٣", "½", "e\u0301", "a\nb", "\udc80",
    "\u202e", "a/" * 3000, "x/", ".", "..", "~", "$HOME", "CON", "adult,", ",adult", "dpsgd,dpsgd",
    "0b1", "1e", "9223372036854775808", "mlp:-1", "mlp:1.5", "mlp:1,,2", "file.py:a:b", "*", "?",
)  # fmt: skip
INTERNALS = re.compile(
    r"NoneType|has no attribute|unsupported operand|not supported between|Traceback|not iterable|"
    r"not subscriptable|positional argument|out of bounds|cannot be interpreted|"
    r"must be real number|could not convert|truth value|cannot convert|math domain|"
    r"invalid literal|unhashable|Errno|"
    r"too large to convert|expected str, bytes|ufunc|Overflow|embedded null|object is not callable"
)

# --- what is public -------------------------------------------------------------------------------

PLACES = (
    "evenclip", "evenclip.audit", "evenclip.data", "evenclip.data.table", "evenclip.export",
    "evenclip.distributed", "evenclip.models", "evenclip.sklearn", "evenclip.rules",
    "evenclip.sweep", "evenclip.mechanism.accounting", "evenclip.mechanism.calibration",
    "evenclip.training.logs", "evenclip.training.session",
)  # fmt: skip
# Made by the package and not by users, and names of what is none of its own.
MADE = {
    "Comparison", "Result", "Run", "Step", "Rule", "Samples", "Splits", "Streamed", "Parquet",
    "Conditions", "Paired", "Estimate", "Trained", "Predictor", "Constants", "Tabled", "Encoder",
    "Log", "AfterStep", "EpochLogger", "Observer", "Resume", "start", "Spec", "Store", "Executor",
    "ProgressDisplay", "Silent", "carry_out", "Inputs", "flat", "MLflow", "PrivateClassifier",
    "TensorBoard", "labels_of", "groups_of",
}  # fmt: skip


def public() -> dict[str, Callable[..., Any]]:
    """Return all public functions and classes of users, by name."""
    named: dict[str, Callable[..., Any]] = {}
    for place in PLACES:
        module = importlib.import_module(place)
        for name in module.__all__:
            value = getattr(module, name)
            is_error = isinstance(value, type) and issubclass(value, Exception | Warning)
            if callable(value) and name not in MADE and not is_error:
                named.setdefault(name, value)
    return named | {"PrivateClassifier.fit": _fit_classifier, "Ledger.write": _write}


def _fit_classifier(**given: Any) -> Any:
    rows = {name: given.pop(name) for name in ("X", "y", "sensitive_features") if name in given}
    return evenclip.sklearn.PrivateClassifier(**given).fit(**rows)


def _signature_of_fit() -> inspect.Signature:
    """Return the parameters of the estimator and of its `fit` as one signature."""
    kind = evenclip.sklearn.PrivateClassifier
    both = [*inspect.signature(kind).parameters.values()]
    both += [*inspect.signature(kind.fit).parameters.values()][1:]
    keywords = [p.replace(kind=p.KEYWORD_ONLY) for p in both]
    return inspect.Signature(keywords)


_fit_classifier.__signature__ = _signature_of_fit()


def _write(q: float | None, multipliers: Any, sizes: Any = (), tau: float = 0.0) -> float | None:
    from evenclip.mechanism.accounting import epsilon

    ledger = Ledger()
    ledger.write(q, multipliers, sizes, tau)
    return epsilon(ledger, 1e-5)


# --- good arguments -------------------------------------------------------------------------------


@cache
def folder() -> Path:
    """Return a folder with a table, its schema, a Parquet file and a ledger."""
    import pandas as pd

    place = Path(tempfile.mkdtemp(prefix="evenclip-arguments-"))
    numbers = np.random.default_rng(0)
    n = 400
    frame = pd.DataFrame({
        "age": numbers.integers(18, 80, n), "pay": numbers.normal(size=n).round(3),
        "sex": numbers.choice(["f", "m"], n), "hired": numbers.choice(["no", "yes"], n),
    })  # fmt: skip
    frame.to_csv(place / "table.csv", index=False)
    frame.iloc[:, [0, 1, 3]].to_parquet(place / "table.parquet")
    ledger = Ledger([Entry(0.01, (("gradient", 1.0),), 100)])
    (place / "ledger.json").write_text(json.dumps(ledger.to_json()))
    return place


def rows(n: int = 100) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, 3 * n).reshape(n, 3)
    return x, (x[:, 0] > 0).long(), torch.arange(n) % 2


def _scores() -> torch.Tensor:
    return torch.linspace(-1, 1, 200).reshape(100, 2)


GOOD: dict[str, Callable[[], Any]] = {
    "model": lambda: nn.Linear(3, 2),
    "trained": lambda: _trained(),
    "folder": lambda: folder() / "new",
    "data": rows,
    "loss": lambda: nn.functional.cross_entropy,
    "x": lambda: rows()[0],
    "y": lambda: rows()[1],
    "scores": _scores,
    "K": lambda: 2,
    "rule": lambda: evenclip.DPSGD(),
    "epsilon": lambda: 3.0,
    "delta": lambda: 1e-5,
    "deltas": lambda: [1e-5],
    "q": lambda: 0.01,
    "steps": lambda: 20,
    "multipliers": lambda: {"gradient": 1.0},
    "ledger": lambda: Ledger([Entry(0.01, (("gradient", 1.0),), 100)]),
    "values": lambda: [1.0, 2.0, 3.0, 4.0, 5.0],
    "value": lambda: 1.0,
    "a": lambda: [1.0, 2.0, 3.0, 4.0, 5.0],
    "b": lambda: [2.0, 2.5, 3.5, 4.5, 6.0],
    "reference": lambda: [80.0, 70.0],
    "private": lambda: [70.0, 60.0],
    "differences": lambda: [1.0, 2.0, -3.0, 4.0, 5.0],
    "p_values": lambda: {"a": 0.01, "b": 0.2},
    "n": lambda: 5,
    "seed": lambda: 0,
    "group_names": lambda: ("a", "b"),
    "path": lambda: folder() / "log",
    "joint": lambda: 2.4,
    "count": lambda: 4.0,
    "lr": lambda: 0.1,
    "kind": lambda: evenclip.DPSGD,
    "name": lambda: "name",
    "load": lambda: evenclip.data.toy,
    "source": lambda: folder() / "table.csv",
    "target": lambda: "hired",
    "group": lambda: "sex",
    **dict.fromkeys(
        ("norm_a", "norm_b", "share_a", "share_b", "S", "mean_square", "spread"), lambda: 0.5
    ),
}
_TENSOR_GROUP = {"group": lambda: rows()[2]}
_COSTS = dict.fromkeys(("reference", "private"), lambda: [[80.0, 70.0]])
_FIT = {"epochs": lambda: 1, "batch_size": lambda: 20}


SPECIAL: dict[str, dict[str, Callable[[], Any]]] = {
    "fit": {"data": lambda: rows()[:2], "rule": lambda: evenclip.DPSGD(), **_FIT},
    "prepare": {"data": lambda: rows()[:2], "config": lambda: None, **_FIT},
    "compare": {
        "data": lambda: "toy", "rules": lambda: ["dpsgd"], "seeds": lambda: 1, "epochs": lambda: 1,
        "lr": lambda: 0.1, "model": lambda: "linear", "store": lambda: folder() / "store",
        "rows": lambda: 300, "batch_size": lambda: 50, "on": lambda: _Here(), "delta": lambda: 1e-4,
        "epsilon": lambda: 3.0, "group": lambda: None, "target": lambda: None,
    },
    "train": {"epochs": lambda: 1, "batch_size": lambda: 50, "device": lambda: "cpu",
              "model": lambda: "linear", "rule": lambda: "dpsgd"},
    "parquet": {"source": lambda: folder() / "table.parquet", "group": lambda: ()},
    "Dataset": _TENSOR_GROUP
    | {"group_names": lambda: ("a", "b"), "class_names": lambda: ("no", "yes")},
    "MapDataset": {"source": lambda: torch.utils.data.TensorDataset(*rows()[:2]),
                   "group_names": tuple},
    "by_group": _TENSOR_GROUP,
    "metric_frame": _TENSOR_GROUP,
    "as_dataset": {"data": lambda: rows()},
    "scores": {"data": lambda: evenclip.data.as_dataset(rows()[:2])},
    "Curvature": {}, "RiskTerms": {"data": lambda: evenclip.data.as_dataset(rows())},
    "gap": {"values": lambda: [[1.0, 2.0]], "pair": lambda: (0, 1)},
    "left_out": {"values": lambda: [[1.0, None]]},
    "excessive_risk": _COSTS, "privacy_cost": _COSTS,
    "read": {"path": lambda: folder() / "table.csv"},
    "corrected": {"pairs": lambda: {"a": evenclip.audit.paired([1.0, 2, 3], [1.0, 3, 3])}},
    "check_place": {"folder": lambda: folder() / "new"},
    "load": {"folder": lambda: _model()},
    "save": {"folder": lambda: folder() / "saved", "force": lambda: True},
    "TensorBoard": {"folder": lambda: folder() / "board"},
    "File": {"path": lambda: "adult.csv"},
    "PrivateClassifier.fit": {
        "X": lambda: rows()[0].numpy(), "y": lambda: rows()[1].numpy(), "epochs": lambda: 1,
        "batch_size": lambda: 50, "lr": lambda: 0.1, "random_state": lambda: 0,
    },
    "adult": {"group": lambda: "sex", "directory": lambda: None},
    "celeba": {"directory": folder},
    "soundness": {}, "event": {},
    "Ledger.write": {},
    "Session": {},
    "worst": {"values": lambda: [1.0, 2.0]},
}  # fmt: skip
# Answers at once for every value, or costs seconds for good ones: in the long campaign only.
SLOW = {"celeba", "mnist", "dutch", "adult", "digits", "PrivateClassifier.fit", "train"}
LEFT_OUT = {
    "direction_bound": "takes slopes that the audit makes",
    "direction_bound_star": "takes slopes that the audit makes",
    "unconditional_bound": "takes slopes that the audit makes",
}


@cache
def _trained() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return evenclip.export.train(
            folder() / "table.csv", target="hired", group="sex", model="linear", epochs=1,
            batch_size=50,
        )  # fmt: skip


@cache
def _model() -> Path:
    return Path(evenclip.export.save(_trained(), folder() / "model"))


MOST_RUNS, TOO_MANY = 100, "these runs are valid, and too many for a test."


class _Here:
    """An executor of this process; counts as training."""

    def check_device(self, device: str) -> None:
        pass

    def carry_out(self, specs: Any, store: Any, show: Any) -> list[Any]:
        from evenclip.sweep.work import work

        if len(specs) > MOST_RUNS:
            raise ValueError(f"seeds: {TOO_MANY}")
        for spec in specs:
            store.write(spec, *work(spec, lambda t: None))
        return []

    def map_processes(self, work: Any, items: Any) -> Iterator[tuple[int, Any]]:
        return ((place, work(item)) for place, item in enumerate(items))


def good_arguments(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return good arguments: all that are required, and others that keep it short."""
    given, special = {}, SPECIAL.get(name, {})
    for parameter in _parameters(function):
        if parameter in special:
            given[parameter] = special[parameter]()
        elif _is_required(function, parameter):
            assert parameter in GOOD, f"give a good value of {parameter!r} of {name} in GOOD"
            given[parameter] = GOOD[parameter]()
    return given


def _signature(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    named = dict(inspect.signature(function).parameters)
    return {k: p for k, p in named.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def _is_required(function: Callable[..., Any], name: str) -> bool:
    parameter = _signature(function).get(name)
    return parameter is not None and parameter.default is parameter.empty


def _extra(function: Callable[..., Any]) -> dict[str, str]:
    """Return further names that `**settings` or `**options` takes, with their annotations."""
    from evenclip.data.table import TableOptions

    kinds = {
        "table": [TableOptions],
        "train": [TableOptions, evenclip.TrainConfig],
        "prepare": [evenclip.TrainConfig],
    }.get(getattr(function, "__name__", ""), [])
    names = {field.name: str(field.type) for kind in kinds for field in fields(kind)}
    if function.__name__ == "train":
        kept = ("delta", "epochs", "batch_size", "lr", "seed", "device")
        of_table = {field.name for field in fields(TableOptions)}
        names = {k: v for k, v in names.items() if k in kept or k in of_table}
        names |= {"batch_size": "int | None", "lr": "float | None"}
    return names


def _parameters(function: Callable[..., Any]) -> dict[str, str]:
    """Return name -> annotation of every parameter."""
    own = {name: str(p.annotation) for name, p in _signature(function).items()}
    return _extra(function) | own


# --- the outcome ----------------------------------------------------------------------------------


class TooSlow(BaseException):
    """A case took too long."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def counting_steps() -> Iterator[list[int]]:
    """Count the steps of all runs of this process."""
    from evenclip.training.run import Run

    taken, step = [0], Run.step

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        taken[0] += 1
        return step(self, *given, **named)

    Run.step = counted
    try:
        yield taken
    finally:
        Run.step = step


def must_refuse(value: Any, annotation: str) -> bool:
    """Return whether no value of this kind, or no such number, is allowed by an annotation."""
    allowed = {word.strip() for word in annotation.split("|")}
    if not allowed <= {"int", "float", "bool", "str", "None"}:
        return False
    if isinstance(value, bool | np.bool_):
        return "bool" not in allowed
    if isinstance(value, float | np.floating):
        is_whole = math.isfinite(value) and float(value).is_integer()
        return not math.isfinite(value) or not allowed & (
            {"float", "int"} if is_whole else {"float"}
        )
    if isinstance(value, int | np.integer):
        return not allowed & {"int", "float"}
    if isinstance(value, str):
        return "str" not in allowed
    return type(value).__name__ not in allowed and not (value is None and "None" in allowed)


ALSO = {  # what an argument consists of
    "data": ("x is", "y is", "group is"), "records": ("rows",), "deltas": ("delta is",),
    "directory": ("get them from",),
}  # fmt: skip


def check_sentence(text: str, name: str, value: Any) -> None:
    """Raise unless a message is a sentence that names the argument or the value."""
    words = [name, name.replace("_", "-"), *ALSO.get(name, ()), *_words_of(value)]
    own = re.split(r"torch says: |it raised |cannot be used: ", text)[0]  # cites no one
    assert len(text) > 20, f"too short: {text!r}"
    assert text.rstrip().endswith((".", "…")), f"no sentence: {text!r}"
    assert not INTERNALS.search(own), f"internals: {text!r}"
    assert any(word and word in text for word in words), f"names neither {name} nor value: {text!r}"


def _words_of(value: Any) -> list[str]:
    """Return how a message may call a value, or one of its items."""
    is_list = isinstance(value, list | tuple | dict | range) or getattr(value, "ndim", 0) == 1
    items, words = list(value)[:9] if is_list else [], []
    for one in (value, *items):
        with contextlib.suppress(Exception):
            words += [repr(one), str(one)[:20]]
    return words


@cache
def _good_refusal(name: str) -> str | None:
    """Return the message if good arguments are refused too, as where no data are."""
    function = public()[name]
    try:
        function(**good_arguments(name, function))
    except Exception as error:
        return str(error)
    return None


def check_before(taken: list[int], error: Exception) -> None:
    """Raise if steps were taken before the error."""
    assert not taken[0], f"raised after {taken[0]} steps: {error}"


def check_result(value: Any) -> None:
    """Raise unless a result is valid: finite, with an ε that its ledger gives."""
    if isinstance(value, float):
        assert not math.isnan(value), "the result is NaN"
    if isinstance(value, evenclip.Result):
        weights = [p for p in value.model.parameters() if p.is_floating_point()]
        assert all(torch.isfinite(p).all() for p in weights), "weights are not finite"
        epsilon = value.epsilon()
        assert epsilon is None or math.isfinite(epsilon), f"ε is {epsilon}"
    if isinstance(value, evenclip.Rule) and is_dataclass(value):
        numbers = [v for v in vars(value).values() if isinstance(v, int | float)]
        assert all(math.isfinite(v) for v in numbers), f"accepted: {value}"


def check_call(name: str, parameter: str, value: Any) -> None:
    """Call with one bad value; raise an AssertionError that says which outcome it had."""
    function = public()[name]
    given = good_arguments(name, function) | {parameter: value}
    with (
        counting_steps() as taken,
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
    ):
        patch.chdir(tempfile.mkdtemp(dir=folder()))  # no file that another call wrote
        warnings.simplefilter("ignore")
        try:
            with limited(MOST_SECONDS), contextlib.redirect_stderr(io.StringIO()):
                check_result(function(**given))
        except (ValueError, TypeError, OSError, RankError) as error:
            check_before(taken, error)
            if str(error) != _good_refusal(name):
                check_sentence(str(error), parameter, value)
        except TooSlow:
            raise AssertionError(f"took more than {MOST_SECONDS} s") from None
        except AssertionError:
            raise
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        else:
            annotation = _parameters(function)[parameter]
            assert not must_refuse(value, annotation), f"accepted as {annotation}"


def calls(long: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield (id, case) for every parameter of every public callable."""
    for name, function in sorted(public().items()):
        if name in LEFT_OUT or (name in SLOW and not long):
            continue
        for parameter in _parameters(function):
            for label, value in (LONG if long else SHORT).items():
                case = partial(check_call, name, parameter, value)
                yield f"{name}({parameter}={label})", case


# --- the same number in another type --------------------------------------------------------------

TYPES = (np.float64, np.float32, np.float16, np.longdouble, np.int64, np.int32, np.uint8)
WHOLE, BROKEN = (3, 200), (0.5, 200.0)


def check_same(name: str, parameter: str, number: float, kind: Callable[[Any], Any]) -> None:
    """Call with a number of numpy; the answer must be that of the same number of Python."""
    function = public()[name]
    given = good_arguments(name, function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = _said(function(**given | {parameter: plain(kind(number))}))
        except (ValueError, TypeError, OSError, RankError) as refusal:
            expected = type(refusal).__name__
        try:
            answer = _said(function(**given | {parameter: kind(number)}))
        except (ValueError, TypeError, OSError, RankError) as refusal:
            answer = type(refusal).__name__
    assert answer == expected, f"SILENT {answer[:200]} instead of {expected[:200]}"


def _said(value: Any) -> str:
    """Return what a result says, if it is one that can be written."""
    if isinstance(value, evenclip.Result):
        return f"{value.epsilon()} {value.settings}"
    if isinstance(value, evenclip.Comparison):
        written = value.to_json()
        return f"{written['privacy']} {written['settings']}"
    if is_dataclass(value) or isinstance(value, bool | int | float | str | tuple | list | dict):
        return repr(value)
    return type(value).__name__


def same_cases(long: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield (id, case) for every number of every public callable, in every type."""
    for name, function in sorted(public().items()):
        if name in LEFT_OUT or name in SLOW or (name in ("fit", "compare") and not long):
            continue
        for parameter, annotation in _parameters(function).items():
            allowed = {word.strip() for word in annotation.split("|")}
            numbers = WHOLE if "int" in allowed else BROKEN if "float" in allowed else ()
            for number, kind in itertools.product(numbers, TYPES):
                if kind(number) == number:
                    case = partial(check_same, name, parameter, number, kind)
                    yield f"{name}({parameter}={kind.__name__} {number})", case


# --- commands -------------------------------------------------------------------------------------

COMMANDS = {  # value of each required argument or option, by its name; then what keeps it short
    "file": lambda: str(folder() / "table.csv"),
    "model": lambda: str(_model()),
    "folder": lambda: str(_comparison()),
    "paper table name": lambda: "adult",
    "paper figure name": lambda: "adult-epochs",
    "target": lambda: "hired",
    "group": lambda: "sex",
}
SHORTER = {
    "compare": ["toy", "--seeds", "1", "--epochs", "1", "--rules", "dpsgd", "--lr", "0.1",
                "--model", "linear", "--data-dir", "/tmp"],
    "train": ["--epochs", "1", "--batch-size", "50", "--model", "linear", "--force"],
    "predict": ["--out", "OUT"],
    "epsilon": ["--rate", "0.01", "--steps", "100", "--sigma", "1", "--delta", "1e-5"],
    "paper table": ["--quick"], "paper figure": ["--quick"], "paper all": ["--quick"],
}  # fmt: skip
ACCEPTED = "This is accepted, and would be trained now."


def _accept(*_: Any, **__: Any) -> Any:
    """Stand in for the training of the paper's runs, which takes minutes."""
    raise ValueError(ACCEPTED)


@cache
def _comparison() -> Path:
    from evenclip.cli import main

    place = folder() / "comparison"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr("evenclip.sweep.local.Local.carry_out", _Here.carry_out)
        with contextlib.suppress(SystemExit):
            main(["compare", *SHORTER["compare"], "--out", str(place)])
    return place


def commands() -> dict[str, Any]:
    """Return every command of the command line by its words."""
    from evenclip.cli import app

    return dict(_leaves(typer.main.get_command(app), ()))


def _leaves(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield " ".join(words), command
        return
    if command.invoke_without_command:
        yield " ".join(words), command
    for name, inner in command.commands.items():
        yield from _leaves(inner, (*words, name))


def command_line(words: str, parameter: Any, value: str, out: Path) -> list[str]:
    """Return a good command line with one value replaced."""
    line = words.split()
    for other in commands()[words].params:
        if other.name == parameter.name or not other.required:
            continue
        good = COMMANDS.get(f"{words} {other.name}", COMMANDS.get(other.name))()
        line += [good] if other.param_type_name == "argument" else [other.opts[0], good]
    shorter, own = list(SHORTER.get(words, [])), parameter.opts[0]
    if own in shorter:
        place = shorter.index(own)
        del shorter[place : place + 2]
    if parameter.param_type_name == "argument" and words == "compare":
        shorter = shorter[1:]
    line += [str(out / "out") if word == "OUT" else word for word in shorter]
    if words in ("compare", "train") and own != "--out":
        line += ["--out", str(out)]
    return [*line, "--", value] if parameter.param_type_name == "argument" else [*line, own, value]


def check_command(words: str, name: str, value: str) -> None:
    """Run a command with one bad value; raise an AssertionError that says what it did."""
    from evenclip.cli import main

    (parameter,) = [p for p in commands()[words].params if p.name == name]
    out, error = io.StringIO(), io.StringIO()
    place = Path(tempfile.mkdtemp(dir=folder()))
    line = command_line(words, parameter, value, place)
    with (
        counting_steps() as taken,
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        warnings.simplefilter("ignore")
        patch.chdir(place)
        of_paper = words.startswith("paper")
        patch.setattr(
            "evenclip.sweep.local.Local.carry_out", _accept if of_paper else _Here.carry_out
        )
        patch.setattr("evenclip.reproduction.observed.carry_out", _accept)
        try:
            with limited(MOST_SECONDS):
                main(line)
            status = 0
        except SystemExit as end:
            status = end.code or 0
        except TooSlow:
            raise AssertionError(f"took more than {MOST_SECONDS} s") from None
        except BaseException as failed:
            raise AssertionError(f"{type(failed).__name__}: {failed}") from failed
        finally:
            shutil.rmtree(place, ignore_errors=True)
    said = " ".join(error.getvalue().replace("│", " ").split()).rstrip("╯─╰ ")
    assert "TooSlow" not in said, f"took more than {MOST_SECONDS} s"
    if said.endswith((ACCEPTED, TOO_MANY)):
        status = 0
    assert status in (0, 2), f"status {status}: {said[-300:]}"
    if status == 2:
        assert not taken[0], f"refused after {taken[0]} steps: {said[-300:]}"
        if "Invalid value for" not in said:  # said by Typer, with the option
            assert not INTERNALS.search(said), f"internals: {said[-300:]}"
            assert said.endswith((".", "…")), f"no sentence: {said[-300:]}"
    else:
        kind = getattr(parameter, "type", None) or parameter
        is_number = "int" in str(kind).lower() or "float" in str(kind).lower()
        assert not (is_number and value in ("", "nan", "inf", "-inf", "NaN", "abc")), "accepted"


def command_cases(long: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield (id, case) for every option of every command that takes a value."""
    for words, command in commands().items():
        if words.startswith("paper") and not long:
            continue
        for parameter in command.params:
            if getattr(parameter, "is_flag", False) or parameter.name == "help":
                continue
            for value in WORDS_LONG if long else WORDS_SHORT:
                if parameter.name == "out" and value.startswith(("/", "..")):
                    continue  # would be written
                case = partial(check_command, words, parameter.name, value)
                yield f"evenclip {words} {parameter.name}={value[:20]!r}", case


# --- the campaign ---------------------------------------------------------------------------------


def cases(long: bool = False) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield (id, case); a case returns None, or raises an AssertionError with its outcome."""
    yield from calls(long)
    yield from same_cases(long)
    yield from command_cases(long)


# Every fourth value of each parameter, and others of the next one, so that all values are tried on
# every kind of parameter. `python -m tests.faults` runs the long campaign.
_SHARE = 4


def _of_each_group(named: Iterator[tuple[str, Callable[[], None]]]) -> list[Any]:
    """Return some of the cases of each callable or command, as parameters for pytest."""
    groups: dict[str, list[tuple[str, Callable[[], None]]]] = {}
    for place, (name, case) in enumerate(named):
        if place % _SHARE == place // len(SHORT) % _SHARE:
            groups.setdefault(re.split(r"[(=]", name)[0].rpartition(" ")[0] or name.split("(")[0],
                              []).append((name, case))  # fmt: skip
    return [pytest.param(group, id=name) for name, group in groups.items()]


@pytest.mark.parametrize("group", _of_each_group(cases()))
def test_bad_arguments_are_refused_in_a_sentence(group):
    failures = []
    for name, case in group:
        try:
            case()
        except AssertionError as failure:
            failures.append(f"{name}: {failure}")
    assert not failures, "\n".join(failures)


def test_every_public_callable_has_good_arguments():
    for name, function in public().items():
        if name not in LEFT_OUT:
            assert set(good_arguments(name, function)) <= set(_parameters(function)), name
