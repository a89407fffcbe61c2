"""Collect the results of runs into a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenclip.comparison.protocol import Method, Protocol
from evenclip.comparison.result import Comparison, Outcome
from evenclip.mechanism.ledger import Ledger
from evenclip.mechanism.settings import Settings
from evenclip.rules import Rule, soundness
from evenclip.sweep.describe import Loaded, model_name
from evenclip.training.trace import events

__all__ = ["collect"]


def collect(
    plan: Protocol,
    loaded: Loaded,
    seeds: Sequence[int],
    results: Sequence[Mapping[str, Any]],
    says: str,
) -> Comparison:
    """Return the comparison of these results, which are ordered by seed and then by rule."""
    size = len(plan.methods)
    by_rule = [[results[i * size + j] for i in range(len(seeds))] for j in range(size)]
    first = results[0]
    for name in ("groups", "classes"):
        if any(result[name] != first[name] for result in results):
            raise ValueError(
                f"The {name} differ between the seeds, so they cannot be put in one table."
            )
    reference = by_rule[0]
    return Comparison(
        dataset=loaded.splits.train.name,
        groups=tuple(first["groups"]),
        seeds=tuple(seeds),
        protocol=plan.name,
        says=says,
        outcomes=tuple(
            _outcome(method, seeds) for method, seeds in zip(plan.methods, by_rule, strict=True)
        ),
        pair=loaded.pair,
        uncovered=(
            *loaded.uncovered,
            *(_READ if _counted(loaded) else ()),
        ),
        notes=tuple(
            dict.fromkeys(
                [
                    *loaded.notes,
                    *(note for result in reference for note in result["notes"]),
                ]
            )
        ),
        small=tuple(dict.fromkeys(name for result in reference for name in result["small"])),
        n=tuple(result["n"] for result in reference),
        model=model_name(plan.model),
        private={
            method.name: events([row for result in results for row in result["trace"]])
            for method, results in zip(plan.methods, by_rule, strict=True)
        },
    )


# Accesses to data that a comparison is given as they are.
_READ = (
    "the number n of training records, from which q and the steps follow",
    "the splitting of the data",
)


def _counted(loaded: Loaded) -> bool:
    """Return whether n was counted in the training records, and no note says so."""
    said = any("number n" in access for access in loaded.uncovered)
    return loaded.splits.train.records is None and not said


def _outcome(method: Method, results: Sequence[Mapping[str, Any]]) -> Outcome:
    """Return the outcome of one rule from the results of its seeds."""
    by_group = [result["test"]["groups"] for result in results]
    metrics = {name: _array([seed[name] for seed in by_group]) for name in by_group[0]}
    metrics["train_loss"] = _array([result["train_loss"] for result in results])
    overall = [result["test"]["overall"] for result in results]
    return Outcome(
        name=method.name,
        rule=repr(method.rule),
        lr=tuple(result["settings"]["lr"] for result in results),
        soundness=soundness(method.rule),
        epsilon={
            accountant: _epsilon(method.rule, results, accountant) for accountant in ("pld", "rdp")
        },
        delta=max(result["delta"] for result in results),
        metrics=metrics,
        overall={name: _array([seed[name] for seed in overall]) for name in overall[0]},
        seconds=tuple(result["seconds"] for result in results),
        course=_course([result["trace"] for result in results]),
        statement=_statement(method.rule, results[0]),
    )


def _course(traces: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the mean of each epoch's values over the seeds; None if a seed has none."""
    columns = {}
    for name in ("loss", "gradient_norm", "clip_fraction", "sensitivity", "state"):
        seeds = [_array([row[name] for row in trace]) for trace in traces]  # [epoch, ...] each
        columns[name] = (
            _rounded(np.mean(seeds, axis=0)) if len({part.shape for part in seeds}) == 1 else None
        )
    return columns


def _rounded(values: NDArray[np.float64]) -> list[Any]:
    """Return values with four digits, which is enough for a chart; None replaces NaN and ±∞."""
    rounded: list[Any] = [_rounded(row) for row in values] if values.ndim > 1 else [
        float(f"{value:.4g}") if math.isfinite(value) else None for value in values
    ]  # fmt: skip
    return rounded


_LEDGER = ("ledger", "remaining", "runs", "parents")


def _statement(rule: Rule, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the privacy statement of a run, without its ledger and the ids in it.

    The seeds of a comparison are known, so an id is a function of the data that anyone can compute
    and compare with.
    """
    from evenclip.mechanism import statement

    settings, ledger = _settings(rule, result), Ledger.from_json(result["ledger"])
    stored = result["facts"]
    facts = statement.Facts(**stored | {"uncovered": tuple(stored["uncovered"])})
    report = statement.report(settings, ledger, facts)
    return {name: value for name, value in report.items() if name not in _LEDGER}


def _epsilon(rule: Rule, results: Sequence[Mapping[str, Any]], accountant: str) -> float | None:
    """Return the largest ε over the seeds; None if a seed has no valid ε."""
    from evenclip.mechanism import statement

    distinct = {repr(_priced(result)): result for result in results}
    epsilons = [
        statement.epsilon(_settings(rule, result), Ledger.from_json(result["ledger"]), accountant)
        for result in distinct.values()
    ]
    known = [epsilon for epsilon in epsilons if epsilon is not None]
    return max(known) if len(known) == len(epsilons) else None


def _priced(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what ε depends on; run ids differ between seeds, and ε does not."""
    places = ("run", "first", "parent")
    rows = [{k: v for k, v in row.items() if k not in places} for row in result["ledger"]]
    return rows, result["delta"], result["settings"]["steps"]


def _settings(rule: Rule, result: Mapping[str, Any]) -> Settings:
    """Return the settings of a stored run."""
    public = {
        name: value
        for name, value in result["settings"].items()
        if name not in ("rule", "seed_given")
    }
    return Settings(rule=rule, seed=0, **public)


def _array(rows: Sequence[Any]) -> NDArray[np.float64]:
    """Return nested lists as an array, with NaN for None."""
    return np.array(rows, dtype=np.float64)
