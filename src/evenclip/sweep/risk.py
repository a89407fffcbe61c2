"""Risk terms of a run: what direction and magnitude of its steps cost each group.

The run is trained once more and measured about 20 times. Measuring does not change the run, so it
is the same run as in the tables. The measurements are stored beside its result. They are private.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenclip import files
from evenclip.files import kinds
from evenclip.sweep.executor import Executor
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
    folder = files.make_folder(store.root / "risk", kinds.MEASUREMENTS)
    todo = [spec for spec in specs if _stored(folder, spec) is None]
    for i, measurements in executor.map_processes(_measure, todo):
        content = files.sealed({"run": todo[i].hash, "measurements": measurements}, None)
        files.write(folder / f"{todo[i].hash}.json", content, kinds.MEASUREMENTS)
    measured = [_stored(folder, spec) for spec in specs]
    return [measurements for measurements in measured if measurements is not None]


def _stored(folder: Path, spec: Spec) -> list[Measurement] | None:
    """Return the stored measurements of a run; None if there are none, or damaged ones."""
    try:
        stored = files.read_sealed(folder / f"{spec.hash}.json", kinds.MEASUREMENTS)
    except (FileNotFoundError, files.DamagedError):
        return None
    return list(stored["measurements"]) if stored.get("run") == spec.hash else None


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
