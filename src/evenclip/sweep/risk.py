"""Risk terms of a run: what direction and magnitude of its steps cost each group.

The run is trained once more and measured about 20 times. Measuring does not change the run, so it
is the same run as in the tables. The measurements are stored beside its result. They are private.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from evenclip.sweep.executor import Executor
from evenclip.sweep.pool import write_whole
from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store

__all__ = ["MEASUREMENTS", "measure_risk"]

MEASUREMENTS = 20
"""Approximate number of measurements of a run."""

# Maximum number of samples per group.
_SAMPLE = 1024

Measurement = dict[str, Any]  # t; dir and mag by group, None if unknown


def measure_risk(
    specs: Sequence[Spec], store: Store, executor: Executor
) -> list[list[Measurement]]:
    """Return the measurements of every run, computing those that are not in the store."""
    folder = store.root / "risk"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{spec.hash}.json" for spec in specs]
    todo = [(spec, path) for spec, path in zip(specs, paths, strict=True) if not path.is_file()]
    for i, measurements in executor.map_processes(_measure, [spec for spec, _ in todo]):
        write_whole(todo[i][1], json.dumps(measurements) + "\n")
    return [json.loads(path.read_text()) for path in paths]


def _measure(spec: Spec) -> list[Measurement]:
    """Train a run and return its measurements."""
    from evenclip.audit import RiskTerms
    from evenclip.sweep.work import prepared
    from evenclip.training.fit import train

    _, run = prepared(spec)
    every = max(1, run.settings.steps // MEASUREMENTS)
    risk = RiskTerms(run.data, spec.lr, every=every, probes=0, sample=_SAMPLE, seed=spec.seed)
    return [
        {"t": record["t"]}
        | {name: _by_group(record, name, run.settings.groups) for name in ("dir", "mag")}
        for record in train(run, [risk])
        if "risk" in record
    ]


def _by_group(record: dict[str, Any], name: str, groups: int) -> list[float | None]:
    """Return a term of every group; None for empty groups."""
    known = {risk["group"]: float(f"{risk['terms'][name][0]:.4g}") for risk in record["risk"]}
    return [known.get(k) for k in range(groups)]
