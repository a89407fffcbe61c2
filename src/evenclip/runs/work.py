"""One run from its specification to its result."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch

from evenclip.audit import metrics
from evenclip.data import Dataset
from evenclip.runs.parts import Loaded, load_data, make_model, make_rule
from evenclip.runs.spec import FORMAT, Spec, code
from evenclip.step import Step
from evenclip.train import Result, fit

__all__ = ["work"]

Report = Callable[[int], None]  # the number of the step


def work(spec: Spec, report: Report) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train and measure: the result as plain values, and the model's weights."""
    started = time.perf_counter()
    loaded = _loaded(_Key(spec.data), spec.seed)
    rule, train = make_rule(spec.rule), loaded.splits.train
    result = fit(
        make_model(spec.model, train, spec.seed), train, rule=rule, epochs=spec.epochs, batch_size=spec.batch_size,
        lr=spec.lr, q=spec.q, delta=spec.delta, seed=spec.seed, device=spec.device, progress=False,
        observers=[_Pulse(report)],
    )  # fmt: skip
    return _result(spec, loaded, result, time.perf_counter() - started), dict(result.model.state_dict())


def _result(spec: Spec, loaded: Loaded, result: Result, seconds: float) -> dict[str, Any]:
    """Everything that tables and pages are drawn from."""
    splits, settings = loaded.splits, result.settings
    train = splits.train
    measured = {
        part: _measure(result.model, data, spec.device)
        for part, data in (("test", splits.test), ("validation", splits.validation))
        if data is not None
    }
    return {
        "format": FORMAT,
        "rule": settings.rule.name,
        "soundness": settings.rule.soundness,
        "settings": settings.to_json(),
        "delta": settings.delta,
        "n": settings.n,
        "dataset": train.name,
        "groups": list(train.group_names),
        "classes": list(train.class_names),
        "features": train.x[0].numel() if isinstance(train.x, torch.Tensor) else None,
        "pair": None if loaded.pair is None else list(loaded.pair),
        "uncovered": list(loaded.uncovered),
        "notes": list(loaded.notes),
        "small": list(loaded.small),
        **measured,
        "train_loss": result.trace[-1]["loss"],  # running, of the last epoch: what the paper prints
        "ledger": result.ledger.to_json(),
        "state": result.state.tolist(),
        "trace": result.trace,
        "seconds": seconds,
        "environment": {
            "evenclip": _version(), "code": code(), "torch": torch.__version__, "python": platform.python_version(),
            "machine": platform.machine(), "device": spec.device,
        },
    }  # fmt: skip


def _measure(model: torch.nn.Module, data: Dataset, device: str) -> dict[str, Any]:
    """Metrics of every group, and of everybody."""
    scores = metrics.scores(model, data, device=device)
    group = torch.zeros_like(data.y) if data.group is None else data.group
    return {
        "groups": metrics.by_group(scores, data.y, group, data.K),
        "overall": metrics.overall(scores, data.y),
    }


class _Pulse:
    """An observer that tells how far the run is, twice a second."""

    def __init__(self, report: Report) -> None:
        self._report, self._last = report, 0.0

    def __call__(self, step: Step) -> None:
        now = time.monotonic()
        if now - self._last > 0.5:
            self._last = now
            self._report(step.t)


class _Key(dict[str, Any]):
    """A description that can be remembered by."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items(), key=lambda item: item[0])))


@lru_cache(maxsize=2)
def _loaded(key: _Key, seed: int) -> Loaded:
    """The data of a seed, read once for all the rules that are trained on them."""
    return load_data(key, seed)


def _version() -> str:
    try:
        return metadata.version("evenclip")
    except metadata.PackageNotFoundError:
        return "0+unknown"
