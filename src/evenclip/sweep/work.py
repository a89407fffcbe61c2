"""Compute the result of one run from its specification."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from importlib import metadata
from typing import Any
from weakref import WeakKeyDictionary

import torch

from evenclip.audit import metrics
from evenclip.data import Dataset
from evenclip.rules import soundness
from evenclip.sweep.describe import Loaded, load_data, make_model, make_rule
from evenclip.sweep.spec import FORMAT, Spec, code
from evenclip.training.fit import prepare, train
from evenclip.training.result import Result, result
from evenclip.training.run import Run

__all__ = ["Outcome", "prepared", "work"]

Report = Callable[[int], None]  # the number of the step


# The result as plain values, and the model's weights.
Outcome = tuple[dict[str, Any], dict[str, torch.Tensor]]


def work(spec: Spec, report: Report) -> Outcome:
    """Train and evaluate one run."""
    started = time.perf_counter()
    loaded, run = prepared(spec)
    train(run, after=_Pulse(report))
    return _outcome(spec, loaded, run, time.perf_counter() - started)


def prepared(spec: Spec) -> tuple[Loaded, Run]:
    """Return the data of a run, and the run before its first step."""
    loaded = _loaded(_Key(spec.data), spec.seed)
    model = make_model(spec.model, loaded.splits.train, spec.seed)
    return loaded, prepare(model, _placed(loaded, spec.device), spec.config(make_rule(spec.rule)))


def _outcome(spec: Spec, loaded: Loaded, run: Run, seconds: float) -> Outcome:
    trained = result(run)
    trained.model.eval()
    return _result(spec, loaded, trained, seconds), dict(trained.model.state_dict())


def _result(spec: Spec, loaded: Loaded, result: Result, seconds: float) -> dict[str, Any]:
    """Collect everything that tables and pages are drawn from."""
    splits, settings = loaded.splits, result.settings
    trained_on = splits.train
    measured = {
        split: _measure(result.model, data, spec.device)
        for split, data in (("test", splits.test), ("validation", splits.validation))
        if data is not None
    }
    return {
        "format": FORMAT,
        "rule": settings.rule.name,
        "soundness": soundness(settings.rule),
        "settings": settings.to_json(),
        "delta": settings.delta,
        "n": settings.n,
        "dataset": trained_on.name,
        "groups": list(trained_on.group_names),
        "classes": list(trained_on.class_names),
        "features": trained_on.x[0].numel() if isinstance(trained_on.x, torch.Tensor) else None,
        "pair": None if loaded.pair is None else list(loaded.pair),
        "uncovered": list(loaded.uncovered),
        "notes": list(loaded.notes),
        "small": list(loaded.small),
        **measured,
        "train_loss": result.trace[-1]["loss"],  # running mean of the last epoch, as in the paper
        "ledger": result.ledger.to_json(),
        "facts": asdict(result.facts),
        "state": result.state.tolist(),
        "trace": result.trace,
        "seconds": seconds,
        "environment": {
            "evenclip": _version(),
            "code": code(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": spec.device,
            "tf32": spec.tf32,
        },
    }


def _measure(model: torch.nn.Module, data: Dataset, device: str) -> dict[str, Any]:
    """Compute the metrics of every group and overall."""
    scores = metrics.scores(model, data, device=device)
    group = torch.zeros_like(data.y) if data.group is None else data.group
    return {
        "groups": metrics.by_group(scores, data.y, group, data.K),
        "overall": metrics.overall(scores, data.y),
    }


class _Pulse:
    """Report the step, at most twice a second."""

    def __init__(self, report: Report) -> None:
        self._report, self._last = report, 0.0

    def __call__(self, t: int) -> None:
        now = time.monotonic()
        if now - self._last > 0.5:
            self._last = now
            self._report(t)


class _Key(dict[str, Any]):
    """A hashable description, used as a cache key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items(), key=lambda item: item[0])))


_ON_DEVICE = WeakKeyDictionary[Loaded, dict[str, Dataset]]()


def _placed(loaded: Loaded, device: str) -> Dataset:
    """Return the training data on the device, copied once for all runs."""
    copies = _ON_DEVICE.setdefault(loaded, {})
    if device not in copies:
        copies[device] = loaded.splits.train.to(device)
    return copies[device]


@lru_cache(maxsize=16)
def _loaded(key: _Key, seed: int) -> Loaded:
    """Load the data of a seed, once for all rules."""
    return load_data(key, seed)


def _version() -> str:
    try:
        return metadata.version("evenclip")
    except metadata.PackageNotFoundError:
        return "0+unknown"
