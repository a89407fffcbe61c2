"""What privacy costs each group: several rules, several seeds, one dataset.

Every rule is trained once per seed. A seed fixes the split and the initialisation, so that a
private run is paired with the non-private one of the same seed; batches and noise are each run's
own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from evenclip import check
from evenclip.comparison.collect import collect
from evenclip.comparison.plan import (
    adjusted,
    calibrated,
    choose_protocol,
    choose_rates,
    doubts,
    in_words,
    paced,
    specify,
    suited,
    unsound,
)
from evenclip.comparison.result import REFERENCE, Comparison
from evenclip.comparison.source import check_groups, describe_data
from evenclip.rules import Rule
from evenclip.sweep import Executor, Local, ProgressDisplay, Silent, Store, carry_out
from evenclip.sweep.describe import load_data, make_model
from evenclip.sweep.risk import measure_risk
from evenclip.sweep.store import default_root

__all__ = ["compare"]


def compare(
    data: Any = "adult",
    rules: Sequence[str | Rule] | None = None,
    seeds: int | Sequence[int] = 5,
    *,
    target: str | None = None,
    group: str | Sequence[str] | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    model: str | None = None,
    match: bool = False,
    rows: int | None = None,
    risk: bool = False,
    device: str = "cpu",
    tf32: bool = False,
    options: Mapping[str, Any] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    store: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    on: Executor | None = None,
    show: ProgressDisplay | None = None,
) -> Comparison:
    """Train the rules over the seeds, beside a non-private reference, and measure what privacy
    costs each group.

    Args:
        data: a name of the catalogue ("adult"); your own dataset ("my_data.py:faces", a function
            of the seed that returns `Splits`, or a `Source`); a CSV, TSV, Parquet or Feather file
            or a DataFrame, with `target` and `group`; or `Splits`.
        rules: names, rules with their settings, or "file.py:Class"; all five unless given. The
            non-private reference is always trained.
        seeds: how many, from 0, or which.
        target: column to predict, of a table.
        group: protected column or columns, of a table; for Adult "sex", "race" or "age".
        epsilon: every private rule gets this joint ε by calibration; otherwise the σ it has.
        delta: δ; published, or the largest power of ten below 1/(2n).
        epochs: passes over the training data; published, or 20.
        batch_size: expected batch size B; published, or 256.
        lr: one learning rate for all rules; otherwise published, or matched.
        model: "mlp", "mlp:128,64", "linear", "cnn" or "file.py:function"; published, or an MLP
            256-256.
        match: on the paper's datasets, the matched protocol instead of the published settings.
        rows: a sample of so many training rows at the most, and of as many test rows: for a look.
        risk: whether to look, in one more run of each rule, at what direction and magnitude cost
            each group.
        device: where to train.
        tf32: whether a GPU may round the operands of products to 11 bits, which is quicker; norms
            allow for it.
        options: further options of the dataset; for a table those of `evenclip.data.table.table`.
        data_dir: where files of datasets are; EVENCLIP_DATA unless given.
        store: where results of runs are kept and found again; the user's cache unless given.
        workers: processes at a time; one per core unless given.
        on: who carries out the runs: `evenclip.runs.Ray` or `Slurm`; processes of this machine
            unless given.
        show: who is told about progress.

    Raises:
        ValueError: for anything that cannot be compared; the message says what to do.
        RunsError: if runs failed, after all others.
    """
    chosen = _seeds(seeds)
    executor = _executor(workers, on)
    _check_device(device, tf32, executor)
    kept = Store(default_root() if store is None else store)
    described = describe_data(data, target, group, dict(options or {}), data_dir, kept)
    if rows is not None:
        check.natural(rows=rows)
        described["rows"] = int(rows)
    loaded = load_data(described, chosen[0])
    train = loaded.splits.train
    check_groups(train, loaded.splits.test)
    plan = choose_protocol(described, train, rules, match)
    plan = adjusted(plan, epochs, batch_size, delta, lr, model, len(train))
    named = "name" in described or "dataset" in described
    plan, skipped = suited(*paced(plan, len(train), named), train)
    if epsilon is not None:
        check.positive(epsilon=epsilon)
        plan = calibrated(plan, epsilon, len(train))
    make_model(
        plan.model, train, chosen[0]
    )  # a model that does not fit is found before anything is trained
    shown = Silent() if show is None else show
    spec = partial(specify, plan, device=device, tf32=tf32)
    rates = choose_rates(plan, spec, described, loaded, chosen, kept, executor, shown)
    specs = [
        spec(method.rule, rates[seed] if method.lr is None else method.lr, described, seed)
        for seed in chosen
        for method in plan.methods
    ]
    results = carry_out(specs, kept, shown, executor)
    settings = {
        "ε": epsilon,
        "δ": delta,
        "epochs": epochs,
        "batch size": batch_size,
        "lr": lr,
        "model": model,
    }
    settings |= {"rows": rows, "products in": "TF32" if tf32 else None}
    says = in_words(
        plan, [f"{name} {value}" for name, value in settings.items() if value is not None]
    )
    notes = (*loaded.notes, *skipped, *doubts(plan, len(train)), *unsound(plan))
    found = collect(plan, replace(loaded, notes=notes), chosen, results, says)
    if not risk:
        return found
    private = [
        spec for spec, method in zip(specs, plan.methods, strict=False) if method.name != REFERENCE
    ]
    names = [method.name for method in plan.methods if method.name != REFERENCE]
    return replace(found, risk=dict(zip(names, measure_risk(private, kept, executor), strict=True)))


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, int):
        check.natural(seeds=seeds)
        return tuple(range(seeds))
    found = tuple(dict.fromkeys(int(seed) for seed in seeds))
    if not found or min(found) < 0:
        raise ValueError(
            f"seeds are {list(seeds)}; give at least one, each a whole number of at least 0."
        )
    return found


def _executor(workers: int | None, on: Executor | None) -> Executor:
    """Who carries out the runs."""
    if workers is not None and on is not None:
        raise ValueError(
            "workers are processes of this machine; leave them out where `on` says who carries "
            "out runs."
        )
    return Local(workers) if on is None else on


def _check_device(device: str, tf32: bool, executor: Executor) -> None:
    """Raise for a device that runs will not have, before every run does."""
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device is {device!r}; give cpu, cuda or cuda:NUMBER.") from None
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r} and there is none here; use cpu.")
    if tf32 and kind == "cpu":
        raise ValueError("tf32 is for a GPU; give cuda as the device with it, or leave it out.")
    executor.check_device(device)
