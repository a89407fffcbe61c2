"""Compare rules: what privacy costs each group, over several seeds of one dataset.

Every rule is trained once per seed. A seed fixes the split and the initialisation, so a private run
is paired with the non-private run of the same seed. Batches and noise differ between runs.

A split per seed is a choice: the test figures then vary with the test records too. Models of
several seeds may each have been trained on a record, with one split or with many, so what is
published of them composes. With `split`, all runs have the split of that seed, and no run is
trained on a record that tests another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from evenclip import check
from evenclip.arguments import check_kinds, plain, shown
from evenclip.comparison.collect import collect
from evenclip.comparison.plan import Changes, in_words, make_plan
from evenclip.comparison.result import Comparison
from evenclip.comparison.source import check_groups, describe_data, readable
from evenclip.comparison.trainings import Trainings
from evenclip.devices import device_of
from evenclip.rules import Rule
from evenclip.sweep import Executor, Local, ProgressDisplay, Silent, Store
from evenclip.sweep.describe import load_data, make_model
from evenclip.sweep.store import default_root

__all__ = ["compare"]

MOST_SEEDS = 10_000


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
    split: int | None = None,
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
    """Compare private rules with a non-private reference: accuracy, loss and cost by group.

    Args:
        data: a name of the catalogue ("adult"); a custom dataset ("my_data.py:faces", a function
            of the seed that returns `Splits`, or a `Source`); a CSV, TSV, Parquet or Feather file
            or a DataFrame, with `target` and `group`; or `Splits`.
        rules: names, rules with their settings, or "file.py:Class"; default: all five. The
            non-private reference is always trained.
        seeds: the number of seeds, from 0, or the seeds.
        target: column to predict; for tables.
        group: protected column or columns; for tables, and for Adult "sex", "race" or "age".
        epsilon: joint ε of every private rule, by calibration; default: the σ of each rule.
        delta: δ; default: as published, or the largest power of ten below 1/(2n).
        epochs: passes over the training data; default: as published, or 20.
        batch_size: expected batch size B; default: as published, or 256.
        lr: learning rate of all rules; default: as published, or matched.
        model: "mlp", "mlp:128,64", "linear", "cnn" or "file.py:function"; default: as published, or
            an MLP 256-256.
        match: use the matched protocol instead of the published settings.
        rows: number of training rows and of test rows to sample, on average; for quick runs.
        split: seed of one split that all runs share; default: every seed has its own.
        risk: also measure what clipping's direction and magnitude cost each group, in a further
            run of each rule.
        device: device to train on.
        tf32: allow a GPU to round the operands of products to 11 bits, which is faster; norms
            allow for it.
        options: further options of the dataset; for tables those of `evenclip.data.table.table`.
        data_dir: folder with dataset files; default: $EVENCLIP_DATA.
        store: folder of results, where finished runs are found again; default: the user's cache.
        workers: number of processes; default: one per core.
        on: executor of the runs, such as `evenclip.sweep.Ray` or `Slurm`; default: processes of
            this machine.
        show: receiver of progress events.

    Raises:
        ValueError: if the comparison cannot be made; the message says what to do.
        RunsError: if runs failed; raised after all others are done.
    """
    check_kinds(compare, locals())
    chosen, executor = _seeds(seeds), _executor(workers, on)
    _check_device(device, tf32, executor)
    kept = Store(default_root() if store is None else store)
    # Plain numbers, because numpy's cannot be written to JSON.
    epsilon, delta, lr = plain(epsilon), plain(delta), plain(lr)
    epochs, batch_size = plain(epochs), plain(batch_size)
    changes = Changes(epsilon, delta, epochs, batch_size, lr, model, rows, tf32)
    rules = None if rules is None else list(rules)
    if show is not None and not hasattr(show, "planned"):
        raise TypeError(f"show is {shown(show)}; it must receive progress, or be left out.")
    display = Silent() if show is None else show
    with readable(data, kept) as found:
        described = describe_data(found, target, group, dict(options or {}), data_dir)
        if rows is not None:
            check.natural(rows=rows)
            described["rows"] = int(rows)
        if split is not None:
            check.whole(split=split)
            described["split"] = int(split)
        loaded = load_data(described, chosen[0])
        train = loaded.splits.train
        check_groups(train, loaded.splits.test)
        if train.fingerprints() == loaded.splits.test.fingerprints():
            raise ValueError(
                "data has the same records for training and for testing, so its figures would be "
                "of records that were trained on; give other records as test."
            )
        plan, notes = make_plan(described, train, rules, match, changes)
        make_model(plan.model, train, chosen[0])  # raises before training if it does not fit
        trainings = Trainings(plan, described, chosen, kept, executor, display, device, tf32)
        specs = trainings.specs(trainings.reference_rates(loaded))
        results = trainings.results(specs)
        loaded = replace(loaded, notes=(*loaded.notes, *notes))
        comparison = collect(plan, loaded, chosen, results, in_words(plan, changes))
        return replace(comparison, risk=trainings.risk(specs)) if risk else comparison


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Return the seeds."""
    if not isinstance(seeds, Sequence | np.ndarray):
        check.natural(seeds=seeds)
        if seeds > MOST_SEEDS:
            raise ValueError(
                f"seeds is {seeds}; a comparison has at most {MOST_SEEDS} of them: give fewer."
            )
        return tuple(range(int(seeds)))
    for seed in list(seeds):
        check.whole(seeds=seed)
    distinct = tuple(dict.fromkeys(int(seed) for seed in seeds))
    if not distinct:
        raise ValueError("seeds is empty; give at least one, each a whole number of at least 0.")
    return distinct


def _executor(workers: int | None, on: Executor | None) -> Executor:
    """Return the executor of the runs."""
    if workers is not None and on is not None:
        raise ValueError(
            "workers and on are both given; workers is for processes of this machine, so leave it "
            "out with another executor."
        )
    if on is not None and not hasattr(on, "carry_out"):
        raise TypeError(f"on is {shown(on)}; it must be an executor, such as evenclip.sweep.Ray().")
    return Local(workers) if on is None else on


def _check_device(device: str, tf32: bool, executor: Executor) -> None:
    """Raise if the device is not available to the runs."""
    if device_of(device, here=False).type == "cpu" and tf32:
        raise ValueError("tf32 is for a GPU; give cuda as the device with it, or leave it out.")
    executor.check_device(device)
