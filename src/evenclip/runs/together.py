"""Which runs are computed together, and whether that is quicker: measured once for a device and a model, and kept.

Runs are alike if they differ in seed, rule and learning rate only. Stacks of small models win (one call for many),
those of large ones lose on a CPU (the parameters of all runs do not fit its cache): a few steps of each way tell.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from evenclip import compiler
from evenclip.data.disk import cache_directory
from evenclip.objectives import FairLens
from evenclip.run import CONVOLUTIONS
from evenclip.runs.spec import Spec, code
from evenclip.runs.work import prepared

__all__ = ["PLAIN", "How", "bundles", "choose"]

# Fewer steps of all runs together than this are not worth measuring.
_FEW = 4000
# Steps that are timed, after as many that are not.
_TIMED = 12
# A step of one run is some hundred calls, and on a CPU a stack saves those and nothing else: where a step takes as long
# as so many of the smallest, they are the lesser part of it. Adult's takes 2,400, Dutch's 330.
_CALLS = 1500
# Seconds that compiling takes for each rule, about, and the share of a plain step that it saves, by device.
_COMPILING, _SAVED = 10.0, {"cpu": 0.2, "cuda": 0.9}
# Runs of a process that take turns on a GPU: each has streams of its own, of which there are 32.
_TURNS = 10


class How(NamedTuple):
    """How several runs are computed.

    Attributes:
        together: whether as one computation.
        compiled: whether that is compiled.
        turns: how many are in progress at a time; with more than one, each takes a step in turn.
    """

    together: bool
    compiled: bool
    turns: int = 1


PLAIN = How(together=False, compiled=False)


def bundles(specs: Sequence[Spec], workers: int, devices: int = 1) -> list[list[Spec]]:
    """The runs, those that are alike side by side, in as many bundles for each kind as there are workers.

    A bundle has as few rules as can be: runs of one rule are one call. On GPUs it is of one rule, of which there are as
    many bundles as GPUs: a rule's graph is compiled once for each, and all processes share them. What has no graph
    waits for its own process more than for the GPU, and is spread over the workers there too.
    """
    kinds: dict[str, list[Spec]] = {}
    for spec in specs:
        apart = spec.device != "cpu" or not _is_stacked(spec)
        kinds.setdefault(_likeness(spec) + (_rule(spec) if apart else ""), []).append(spec)
    found = []
    for alike in kinds.values():
        parts = min(workers if alike[0].device == "cpu" or not _is_stacked(alike[0]) else devices, len(alike))
        found += _cut(_by_rule(alike), parts)
    return found


def _by_rule(specs: Sequence[Spec]) -> list[Spec]:
    """Those of one rule side by side; rules, and runs of each, in the order in which they come."""
    rules: dict[str, list[Spec]] = {}
    for spec in specs:
        rules.setdefault(_rule(spec), []).append(spec)
    return [spec for alike in rules.values() for spec in alike]


def _cut(specs: Sequence[Spec], parts: int) -> list[list[Spec]]:
    """In parts whose lengths differ by one at most."""
    ends = [len(specs) * i // parts for i in range(parts + 1)]
    return [list(specs[first:end]) for first, end in pairwise(ends)]


def _is_stacked(spec: Spec) -> bool:
    """Whether runs of its rule can be computed together: not where the loss itself looks at the whole batch."""
    return spec.rule.get("name") != FairLens.name


def choose(specs: Sequence[Spec]) -> How:
    """What is quickest for these runs, which are alike."""
    if specs[0].device != "cpu":
        compiler.warm()
    _, run = prepared(specs[0])
    steps = run.settings.steps
    if steps * len(specs) < _FEW:
        return PLAIN
    if specs[0].device != "cpu" and any(isinstance(module, CONVOLUTIONS) for module in run.model.modules()):
        return How(together=False, compiled=True, turns=_TURNS)  # mapped over runs they are slow
    alone, stacked = _measured(specs)
    together = stacked < alone * len(specs)
    seconds = steps * (stacked if together else alone * len(specs))
    saved = _SAVED["cpu" if specs[0].device == "cpu" else "cuda"] * seconds
    return How(together, compiled=saved > _COMPILING * (len({_rule(spec) for spec in specs}) + 1))


def _rule(spec: Spec) -> str:
    return json.dumps(spec.rule, sort_keys=True, default=str)


def _likeness(spec: Spec) -> str:
    """The same for runs that may be computed together."""
    plain = replace(spec, seed=0, rule={}, lr=1.0).to_json()
    return json.dumps(plain, sort_keys=True, default=str)


def _measured(specs: Sequence[Spec]) -> tuple[float, float]:
    """Seconds a step of one run alone, and of all together; remembered."""
    rules = sorted(_rule(spec) for spec in specs)
    machine = [platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads(), torch.__version__, code()]
    if specs[0].device != "cpu":
        machine.append(torch.cuda.get_device_name(specs[0].device))
    name = hashlib.sha256(json.dumps([machine, rules, _likeness(specs[0])]).encode()).hexdigest()[:24]
    path = cache_directory() / "measured" / f"{name}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(path.read_text())
        return float(known["alone"]), float(known["together"])
    alone, stacked = _time_alone(specs[0]), float("inf")
    if len(specs) > 1 and (specs[0].device != "cpu" or alone < _CALLS * _time_call()):
        stacked = _time_together(specs)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"alone": alone, "together": stacked}))
    return alone, stacked


def _time_alone(spec: Spec) -> float:
    _, run = prepared(spec)
    with run.listening():
        return _seconds(lambda: run.update(run.step()), spec.device)


def _time_together(specs: Sequence[Spec]) -> float:
    from evenclip.program import NoProgram
    from evenclip.stack import Stack

    try:
        stack = Stack([prepared(spec)[1] for spec in specs], compile=False)
    except NoProgram:
        return float("inf")
    with stack.listening():
        return _seconds(stack.step, specs[0].device)


def _time_call() -> float:
    """Of the smallest."""
    one = torch.ones(())
    return _seconds(lambda: torch.add(one, one), "cpu", 100 * _TIMED)


def _seconds(step: Callable[[], Any], device: str, times: int = _TIMED) -> float:
    """Seconds a step."""
    for _ in range(times):
        step()
    _wait(device)
    started = time.perf_counter()
    for _ in range(times):
        step()
    _wait(device)
    return (time.perf_counter() - started) / times


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
