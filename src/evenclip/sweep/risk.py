"""What the steps of a run cost each group, and by what: the run trained once more, and looked at
now and then.

Looking changes nothing, so it is the run of the tables. What is seen lies in the store beside its
result. Private.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from evenclip.sweep.executor import Executor
from evenclip.sweep.pool import write_whole
from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store

__all__ = ["LOOKS", "looks"]

LOOKS = 20
"""How often a run is looked at, about."""

# Samples of each group that are looked at, at the most.
_SAMPLE = 1024

Look = dict[str, Any]  # t; dir and mag by group; None where nothing is known


def looks(specs: Sequence[Spec], store: Store, executor: Executor) -> list[list[Look]]:
    """Of every run, what was seen of its steps; what the store has is not looked at again."""
    folder = store.root / "risk"
    folder.mkdir(parents=True, exist_ok=True)
    places = [folder / f"{spec.hash}.json" for spec in specs]
    todo = [(spec, place) for spec, place in zip(specs, places, strict=True) if not place.is_file()]
    for i, found in executor.map_processes(watched, [spec for spec, _ in todo]):
        write_whole(todo[i][1], json.dumps(found) + "\n")
    return [json.loads(place.read_text()) for place in places]


def watched(spec: Spec) -> list[Look]:
    """Train it, and what was seen."""
    from evenclip.audit import RiskTerms
    from evenclip.sweep.work import prepared
    from evenclip.training.fit import train

    _, run = prepared(spec)
    every = max(1, run.settings.steps // LOOKS)
    risk = RiskTerms(run.data, spec.lr, every=every, probes=0, sample=_SAMPLE, seed=spec.seed)
    return [
        {"t": record["t"]}
        | {name: _by_group(record, name, run.settings.groups) for name in ("dir", "mag")}
        for record in train(run, [risk])
        if "risk" in record
    ]


def _by_group(record: dict[str, Any], name: str, groups: int) -> list[float | None]:
    """A term of every group; None of those that nobody is in."""
    known = {part["group"]: float(f"{part['terms'][name][0]:.4g}") for part in record["risk"]}
    return [known.get(k) for k in range(groups)]
