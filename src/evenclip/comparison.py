"""What privacy costs each group: several rules, several seeds, one dataset.

Every rule is trained once per seed. A seed fixes the split and the initialisation, so that a private run is paired with
the non-private one of the same seed; batches and noise are each run's own. Measured on test data, for each group k:

    π_k = acc_k(θ*) − acc_k(θ̃)     privacy cost, in points
    R_k = L_k(θ̃) − L_k(θ*)         excessive risk

and their gaps between groups. None of these figures is differentially private.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evenclip import check, protocol
from evenclip.audit import cost, statistics
from evenclip.data import SOURCES, Dataset, Source, Splits, data_directory
from evenclip.mechanism.release import Ledger
from evenclip.paper.settings import PUBLISHED
from evenclip.protocol import LEARNING_RATES, Method, Protocol
from evenclip.rules import DPSGD, NO_EPSILON, NonPrivate, Rule
from evenclip.runs import Engine, Local, Show, Silent, Spec, Store, carry_out
from evenclip.runs.parts import (
    RULES,
    Loaded,
    describe_file,
    describe_model,
    describe_rule,
    file_sizes,
    load_data,
    make_model,
    named_rule,
    save_splits,
)
from evenclip.runs.risk import looks
from evenclip.runs.store import default_root

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Comparison", "Outcome", "compare"]

REFERENCE, BASELINE = NonPrivate.name, DPSGD.name
# Of the training rows, where the learning rate has to be chosen and there is no validation split.
HELD_OUT = 0.2


@dataclass(frozen=True)
class Outcome:
    """One rule over all seeds.

    Attributes:
        name: the rule's.
        rule: how it was set.
        lr: learning rate, by seed.
        soundness: whether its ε can be believed.
        epsilon: ε by accountant ("pld", "rdp"), the largest over the seeds; None: none is valid.
        delta: δ.
        metrics: name -> [seed, group]; NaN where undefined. "accuracy" in percent, "loss" and "train_loss" in nats.
        overall: name -> [seed], over everybody.
        seconds: of training, by seed.
        course: what training looked like, epoch by epoch, mean over seeds: "loss" and "gradient_norm" by group, each
            [epoch][group]; "clip_fraction" and "sensitivity" [epoch]; "state" [epoch], the rule's public one.
        statement: the privacy statement of the first seed's run, see `evenclip.privacy`.
    """

    name: str
    rule: str
    lr: tuple[float, ...]
    soundness: str
    epsilon: Mapping[str, float | None]
    delta: float
    metrics: Mapping[str, NDArray[np.float64]]
    overall: Mapping[str, NDArray[np.float64]]
    seconds: tuple[float, ...]
    course: Mapping[str, Any]
    statement: Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """The rules side by side. Not differentially private: group figures carry no noise.

    Attributes:
        dataset, groups, seeds: what was compared on.
        protocol: "published", "matched" or "one learning rate"; `says` has it in words.
        outcomes: one per rule, the non-private reference first.
        pair: the two groups whose gaps are reported; None: the largest gap between any two.
        uncovered: accesses to the data that ε does not cover.
        notes: what else should be known, sentences.
        small: groups too small to judge.
        n: training records, by seed.
        risk: rule -> looks at the first seed's run (see `evenclip.runs.risk`), if they were asked for.
    """

    dataset: str
    groups: tuple[str, ...]
    seeds: tuple[int, ...]
    protocol: str
    says: str
    outcomes: tuple[Outcome, ...]
    pair: tuple[str, str] | None
    uncovered: tuple[str, ...]
    notes: tuple[str, ...]
    small: tuple[str, ...]
    n: tuple[int, ...]
    risk: Mapping[str, Any] | None = None

    def __getitem__(self, name: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.name == name)

    @property
    def reference(self) -> Outcome | None:
        """The non-private runs."""
        return next((outcome for outcome in self.outcomes if outcome.name == REFERENCE), None)

    def privacy_cost(self, name: str) -> NDArray[np.float64]:
        """π_k in points.  # [seed, group]"""
        assert self.reference is not None
        return cost.privacy_cost(self.reference.metrics["accuracy"], self[name].metrics["accuracy"])

    def excessive_risk(self, name: str) -> NDArray[np.float64]:
        """R_k on test data.  # [seed, group]"""
        assert self.reference is not None
        return cost.excessive_risk(self.reference.metrics["loss"], self[name].metrics["loss"])

    def gap(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Between the pair of groups, or the largest.  [seed, group] -> [seed]

        Groups too small to judge are left out of the largest, if there are two others.
        """
        if self.pair is not None:
            return cost.gap(values, (self.groups.index(self.pair[0]), self.groups.index(self.pair[1])))
        judged = [k for k, group in enumerate(self.groups) if group not in self.small]
        return cost.gap(values[:, judged] if len(judged) > 1 else values)

    @cached_property
    def verdicts(self) -> dict[str, statistics.Paired]:
        """Each private rule's privacy-cost gap against DPSGD's, seed by seed; the p-values are Holm's."""
        names = [outcome.name for outcome in self.outcomes]
        if self.reference is None or BASELINE not in names or len(self.groups) < 2:
            return {}
        baseline = self.gap(self.privacy_cost(BASELINE))
        others = [name for name in names if name not in (REFERENCE, BASELINE)]
        found = {name: statistics.paired(self.gap(self.privacy_cost(name)), baseline) for name in others}
        adjusted = statistics.holm({name: pair.p for name, pair in found.items() if pair.p is not None})
        return {name: replace(pair, p=adjusted.get(name)) for name, pair in found.items()}

    def table(self, width: int = 80) -> str:
        """The table and the verdict, for a terminal of that width."""
        from evenclip.report.terminal import table

        return table(self, width)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; accuracies and costs in percent and points."""
        return {
            "dataset": self.dataset,
            "groups": list(self.groups),
            "seeds": list(self.seeds),
            "protocol": self.protocol,
            "protocol_in_words": self.says,
            "pair": None if self.pair is None else list(self.pair),
            "n_train": list(self.n),
            "privacy": {outcome.name: self._privacy(outcome) for outcome in self.outcomes},
            "table": {outcome.name: self._row(outcome) for outcome in self.outcomes},
            "verdict": {name: _plain(pair) | self._bootstrap(name) for name, pair in self.verdicts.items()},
            "settings": {o.name: {"rule": o.rule, "lr": list(o.lr)} for o in self.outcomes},
            "seconds": {o.name: list(o.seconds) for o in self.outcomes},
            "course": {o.name: dict(o.course) for o in self.outcomes},
            "statement": {o.name: dict(o.statement) for o in self.outcomes},
            "not_covered_by_epsilon": list(self.uncovered),
            "small_groups": list(self.small),
            "notes": list(self.notes),
            **({} if self.risk is None else {"risk": dict(self.risk)}),
            "warning": "Group figures are measured on test data and are not differentially private.",
        }

    def to_dataframe(self) -> pd.DataFrame:
        """One row per rule, seed, group and metric."""
        import pandas as pd

        rows = [
            {"rule": o.name, "seed": seed, "group": group, "metric": metric, "value": float(values[i, k])}
            for o in self.outcomes
            for metric, values in self._metrics(o).items()
            for i, seed in enumerate(self.seeds)
            for k, group in enumerate(self.groups)
        ]
        return pd.DataFrame(rows, columns=["rule", "seed", "group", "metric", "value"])

    def _privacy(self, outcome: Outcome) -> dict[str, Any]:
        valid = outcome.epsilon["pld"] is not None
        return {
            "epsilon_pld": outcome.epsilon["pld"],
            "epsilon_rdp": outcome.epsilon["rdp"],
            "delta": outcome.delta if valid else None,
            "sound": valid and outcome.soundness != NO_EPSILON,
            "soundness": outcome.soundness,
        }

    def _bootstrap(self, name: str) -> dict[str, Any]:
        """The bootstrap's interval of the same difference."""
        difference = self.gap(self.privacy_cost(name)) - self.gap(self.privacy_cost(BASELINE))
        found = statistics.bootstrap_interval(difference)
        return {"bootstrap": None if found is None else [_finite(end) for end in found]}

    def _metrics(self, outcome: Outcome) -> dict[str, NDArray[np.float64]]:
        """All that is known by seed and group."""
        found = dict(outcome.metrics)
        if self.reference is not None:
            found["privacy_cost"] = self.privacy_cost(outcome.name)
            found["excessive_risk"] = self.excessive_risk(outcome.name)
        return found

    def _row(self, outcome: Outcome) -> dict[str, Any]:
        metrics = self._metrics(outcome)
        row: dict[str, Any] = {
            name: {group: _mean_se(values[:, k]) for k, group in enumerate(self.groups)}
            for name, values in metrics.items()
        }
        for name in ("privacy_cost", "excessive_risk"):
            if name in metrics and len(self.groups) > 1:
                row[f"{name}_gap"] = _mean_se(self.gap(metrics[name]))
        row["overall"] = {name: _mean_se(values) for name, values in outcome.overall.items()}
        return row


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
    on: Engine | None = None,
    show: Show | None = None,
) -> Comparison:
    """Train the rules over the seeds, beside a non-private reference, and measure what privacy costs each group.

    Args:
        data: a name of the catalogue ("adult"); a CSV, TSV, Parquet or Feather file or a DataFrame, with `target` and
            `group`; or `Splits` of our datasets.
        rules: names, rules with their settings, or "file.py:Class"; all five unless given. The non-private reference
            is always trained.
        seeds: how many, from 0, or which.
        target: column to predict, of a table.
        group: protected column or columns, of a table; for Adult "sex", "race" or "age".
        epsilon: every private rule gets this joint ε by calibration; otherwise the σ it has.
        delta: δ; published, or the largest power of ten below 1/(2n).
        epochs: passes over the training data; published, or 20.
        batch_size: expected batch size B; published, or 256.
        lr: one learning rate for all rules; otherwise published, or matched.
        model: "mlp", "mlp:128,64", "linear", "cnn" or "file.py:function"; published, or an MLP 256-256.
        match: on the paper's datasets, the matched protocol instead of the published settings.
        rows: a sample of so many training rows at the most, and of as many test rows: for a look.
        risk: whether to look, in one more run of each rule, at what direction and magnitude cost each group.
        device: where to train.
        tf32: whether a GPU may round the operands of products to 11 bits, which is quicker; norms allow for it.
        options: further options of the dataset; for a table those of `evenclip.data.table.table`.
        data_dir: where files of datasets are; EVENCLIP_DATA unless given.
        store: where results of runs are kept and found again; the user's cache unless given.
        workers: processes at a time; one per core unless given.
        on: who carries out the runs: `evenclip.runs.Ray` or `Slurm`; processes of this machine unless given.
        show: who is told about progress.

    Raises:
        ValueError: for anything that cannot be compared; the message says what to do.
        RunsError: if runs failed, after all others.
    """
    chosen = _seeds(seeds)
    engine = _engine(workers, on)
    _check_device(device, tf32, engine)
    kept = Store(default_root() if store is None else store)
    described = _described(data, target, group, dict(options or {}), data_dir, kept)
    if rows is not None:
        check.natural(rows=rows)
        described["rows"] = int(rows)
    loaded = load_data(described, chosen[0])
    train = loaded.splits.train
    _check_groups(train, loaded.splits.test)
    plan = _protocol(described, train, rules, match)
    plan = _adjusted(plan, epochs, batch_size, delta, lr, model, len(train))
    plan, skipped = _suited(*_paced(plan, len(train), "name" in described), train)
    if epsilon is not None:
        check.positive(epsilon=epsilon)
        plan = _calibrated(plan, epsilon, len(train))
    make_model(plan.model, train, chosen[0])  # a model that does not fit is found before anything is trained
    shown = Silent() if show is None else show
    spec = partial(_spec, plan, device=device, tf32=tf32)
    rates = _chosen_rates(plan, spec, described, loaded, chosen, kept, engine, shown)
    specs = [
        spec(method.rule, rates[seed] if method.lr is None else method.lr, described, seed)
        for seed in chosen
        for method in plan.methods
    ]
    results = carry_out(specs, kept, shown, engine)
    settings = {"ε": epsilon, "δ": delta, "epochs": epochs, "batch size": batch_size, "lr": lr, "model": model}
    settings |= {"rows": rows, "products in": "TF32" if tf32 else None}
    says = _says(plan, [f"{name} {value}" for name, value in settings.items() if value is not None])
    notes = (*loaded.notes, *skipped, *_doubts(plan, len(train)), *_unsound(plan))
    found = _comparison(plan, replace(loaded, notes=notes), chosen, results, says)
    if not risk:
        return found
    private = [spec for spec, method in zip(specs, plan.methods, strict=False) if method.name != REFERENCE]
    names = [method.name for method in plan.methods if method.name != REFERENCE]
    return replace(found, risk=dict(zip(names, looks(private, kept, engine), strict=True)))


# --- what is compared -------------------------------------------------------------------------------------------------


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, int):
        check.natural(seeds=seeds)
        return tuple(range(seeds))
    found = tuple(dict.fromkeys(int(seed) for seed in seeds))
    if not found or min(found) < 0:
        raise ValueError(f"seeds are {list(seeds)}; give at least one, each a whole number of at least 0.")
    return found


def _described(
    data: Any, target: str | None, group: str | Sequence[str] | None, options: dict[str, Any],
    data_dir: str | os.PathLike[str] | None, store: Store,
) -> dict[str, Any]:  # fmt: skip
    """The data as plain values."""
    if isinstance(data, Splits):
        return save_splits(data, store.root / "data")
    if hasattr(data, "to_parquet"):  # a DataFrame, without importing pandas to ask
        data = _written(data, store.root / "data")
    if not isinstance(data, (str, os.PathLike)):
        raise TypeError(
            f"data is of type {type(data).__name__}; give the name of a dataset, a file, a DataFrame, or Splits."
        )
    path = Path(data)
    if path.suffix or path.exists():
        return _table(path, target, group, options)
    return _named(str(data), target, group, options, data_dir)


def _named(
    name: str, target: str | None, group: str | Sequence[str] | None, options: dict[str, Any],
    data_dir: str | os.PathLike[str] | None,
) -> dict[str, Any]:  # fmt: skip
    """A dataset of the catalogue as plain values."""
    if name not in SOURCES:
        raise ValueError(f"There is no dataset {name!r}; choose among {', '.join(SOURCES)}, or give a file.")
    if target is not None:
        raise ValueError(f"{name!r} is a dataset of its own, whose target is fixed; leave --target out.")
    source = SOURCES[name]
    if group is not None:
        if not source.attributes or not isinstance(group, str):
            raise ValueError(f"--group is {group}; {name} {_attributes(source)}")
        options["group"] = group
    known = (*source.options, "group") if source.attributes else source.options
    for option in options:
        if option not in known:
            raise ValueError(f"--{option.replace('_', '-')} is not for {name}; it is for {_owner(option)}.")
    directory = data_directory(None if data_dir is None else Path(data_dir))
    sizes = file_sizes(name, directory)  # of partial or other copies
    where = {} if directory is None else {"directory": str(directory.resolve())}
    return {"name": name, "options": options, "files": sizes, **where}


def _attributes(source: Source) -> str:
    """What --group may be for this dataset, as half a sentence."""
    if not source.attributes:
        return "has groups of its own: leave it out."
    *others, last = source.attributes
    return f"has the groups {', '.join(others)} and {last}: choose one."


def _owner(option: str) -> str:
    """The datasets that an option is for; tables, if it is no dataset's."""
    return ", ".join(source.name for source in SOURCES.values() if option in source.options) or _TABLES


_TABLES = "tables"


def _table(
    path: Path, target: str | None, group: str | Sequence[str] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """A file as plain values."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; give the path of a CSV, TSV, Parquet or Feather file.")
    for name, value in (("target", target), ("group", group)):
        if not value:
            raise ValueError(f"A table needs --{name}: the name of the column {_PURPOSE[name]}.")
    for option in options:
        if _owner(option) != _TABLES:
            raise ValueError(f"--{option.replace('_', '-')} is not for tables; it is for {_owner(option)}.")
    test = options.pop("test", None)
    named = [group] if isinstance(group, str) else list(group or ())
    beside = {} if test is None else {"test": describe_file(test)}
    chosen = {"target": target, "group": named, **options}
    return {"table": True, "options": chosen, **describe_file(path), **beside}


_PURPOSE = {"target": "to predict", "group": "whose groups are compared"}


def _written(frame: Any, folder: Path) -> Path:
    """A DataFrame as a file that workers can read; the same file for the same content."""
    import hashlib
    import io

    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    frame.to_parquet(buffer)
    path = folder / f"{hashlib.sha256(buffer.getvalue()).hexdigest()[:24]}.parquet"
    if not path.exists():
        scratch = path.with_suffix(f".writing-{os.getpid()}")
        scratch.write_bytes(buffer.getvalue())
        scratch.replace(path)
    return path


def _check_groups(train: Dataset, test: Dataset) -> None:
    """Raise where there is nothing to compare."""
    if train.K < 2 or train.group is None:
        raise ValueError("The data have one group only; a comparison needs at least two: choose another group column.")
    if len(set(train.y.tolist())) < 2:
        raise ValueError("The training rows have one class only; there is nothing to predict.")
    if train.K != test.K:
        raise ValueError(f"Training rows have {train.K} groups and test rows {test.K}; they must be the same.")


# --- how --------------------------------------------------------------------------------------------------------------


def _protocol(
    described: Mapping[str, Any], train: Dataset, rules: Sequence[str | Rule] | None, match: bool
) -> Protocol:
    """The settings of every rule, reference first."""
    name = described.get("name", "")
    published, source = PUBLISHED.get(name), SOURCES.get(name)
    base = protocol.for_table(train.K) if published is None else published
    if published is None and source is not None and source.model is not None:
        base = replace(base, model=dict(source.model))
    base = base.only([m.name for m in base.methods if m.rule.bounded]) if rules is None else _with_rules(base, rules)
    return protocol.matched(base, train.K) if match or published is None else base


def _with_rules(base: Protocol, rules: Sequence[str | Rule]) -> Protocol:
    """The reference and those rules; a stranger's rule is matched, since nothing is published for it."""
    found: dict[str, Method] = {REFERENCE: base.only([REFERENCE]).methods[0]}
    for given in rules:
        rule = named_rule(given) if isinstance(given, str) else given
        if isinstance(rule, str) and any(method.name == rule for method in base.methods):
            (method,) = base.only([rule]).methods
        else:
            made = RULES[rule]() if isinstance(rule, str) else rule
            (method,) = protocol.matched(replace(base, methods=(Method(made, None),)), 2).methods
        if method.name in found and method.name != REFERENCE:
            raise ValueError(f"The rule {method.name!r} is given twice; rules need names of their own.")
        found[method.name] = method
    return replace(base, methods=tuple(found.values()))


def _adjusted(
    plan: Protocol, epochs: int | None, batch_size: int | None, delta: float | None, lr: float | None,
    model: str | None, n: int,
) -> Protocol:  # fmt: skip
    """With what the user has set."""
    if epochs is not None:
        check.natural(epochs=epochs)
        plan = replace(plan, epochs=epochs)
    if batch_size is not None:
        check.natural(batch_size=batch_size)
        plan = replace(plan, batch_size=batch_size, batches=None)
    if delta is not None:
        from evenclip.accounting import check_delta

        check_delta(delta, "delta")
        plan = replace(plan, delta=delta)
    if lr is not None:
        check.positive(lr=lr)
        plan = replace(plan, name="one learning rate", methods=tuple(Method(m.rule, lr) for m in plan.methods))
    if model is not None:
        plan = replace(plan, model=describe_model(model))
    if plan.batch_size > n:
        raise ValueError(f"The batch size is {plan.batch_size} and there are {n} training rows; give --batch-size.")
    return plan


def _paced(plan: Protocol, n: int, named: bool) -> tuple[Protocol, list[str]]:
    """With the steps of an epoch: pinned for a named dataset, whose n may differ between seeds although ε must not."""
    if not named:
        return plan, []
    steps = math.ceil(n / plan.batch_size)
    if plan.batches is None:
        return replace(plan, batches=steps), []
    if abs(steps - plan.batches) <= 0.05 * plan.batches:
        return plan, []
    says = f"There are {n:,} training records, so an epoch has {steps} steps and not the published {plan.batches}."
    return replace(plan, batches=steps), [says]


def _suited(plan: Protocol, notes: Sequence[str], train: Dataset) -> tuple[Protocol, list[str]]:
    """Without the rules that are not for such data, and a sentence about each."""
    classes = len(train.class_names) or int(train.y.max()) + 1
    why = {method.name: method.rule.unsuited(train.K, classes) for method in plan.methods}
    kept = tuple(method for method in plan.methods if why[method.name] is None)
    return replace(plan, methods=kept), [*notes, *(f"{name} is left out: {text}" for name, text in why.items() if text)]


def _rate(plan: Protocol, n: int) -> tuple[float, int]:
    """q, and the steps of an epoch."""
    return (plan.batch_size / n, math.ceil(n / plan.batch_size)) if plan.batches is None else (
        1 / plan.batches, plan.batches
    )  # fmt: skip


def _calibrated(plan: Protocol, epsilon: float, n: int) -> Protocol:
    """Every private rule with the noise for this ε."""
    from evenclip.accounting import calibrate, default_delta

    q, batches = _rate(plan, n)
    delta = default_delta(n) if plan.delta is None else plan.delta
    methods = [
        m if m.rule.sigma == 0
        else Method(calibrate(m.rule, epsilon=epsilon, delta=delta, q=q, steps=plan.epochs * batches), m.lr)
        for m in plan.methods
    ]  # fmt: skip
    return replace(plan, methods=tuple(methods), delta=delta)


def _chosen_rates(
    plan: Protocol, spec: Callable[..., Spec], described: Mapping[str, Any], loaded: Loaded, seeds: Sequence[int],
    store: Store, engine: Engine, show: Show,
) -> dict[int, float]:  # fmt: skip
    """Seed -> the reference's learning rate, chosen by accuracy on that seed's own validation rows.

    One choice for all seeds would see test rows, where what is validation in one split is test in another. Where the
    test rows are the same for all, it is one choice by the mean over seeds, which a rate that only sometimes trains
    (MNIST at 0.1) does not win by luck.
    """
    if all(method.lr is not None for method in plan.methods):
        return {}
    held = {} if loaded.splits.validation is not None else {"hold_out": HELD_OUT}
    pairs = [(seed, lr) for seed in seeds for lr in LEARNING_RATES]
    tries = [spec(NonPrivate(), lr, {**described, **held}, seed) for seed, lr in pairs]
    accuracy = {
        pair: result["validation"]["overall"]["accuracy"]
        for pair, result in zip(pairs, carry_out(tries, store, show, engine), strict=True)
    }
    source = SOURCES.get(described.get("name", ""))
    return _best(accuracy, seeds, shared=source is not None and source.fixed_test)


def _best(accuracy: Mapping[tuple[int, float], float], seeds: Sequence[int], *, shared: bool) -> dict[int, float]:
    """Seed -> the learning rate with the best accuracy, of (seed, rate): of that seed's, or shared by all."""
    if not shared:
        return {seed: max(LEARNING_RATES, key=lambda lr: accuracy[seed, lr]) for seed in seeds}
    return dict.fromkeys(seeds, max(LEARNING_RATES, key=lambda lr: sum(accuracy[seed, lr] for seed in seeds)))


def _spec(
    plan: Protocol, rule: Rule, lr: float, described: Mapping[str, Any], seed: int, *, device: str, tf32: bool
) -> Spec:
    q = None if plan.batches is None or not rule.poisson else 1 / plan.batches
    return Spec(
        dict(described), plan.model, describe_rule(rule), lr, plan.epochs, plan.batch_size, q, plan.delta, seed,
        device, tf32,
    )  # fmt: skip


def _doubts(plan: Protocol, n: int) -> list[str]:
    """A sentence where δ promises next to nothing."""
    if plan.delta is None or plan.delta < 1 / n:
        return []
    return [f"δ is {plan.delta:g}, not below 1/n = {1 / n:.1e}: publishing one whole record would satisfy it."]


def _unsound(plan: Protocol) -> list[str]:
    """A sentence about each rule that adds noise and has no ε all the same."""
    rules = [m.rule for m in plan.methods if m.rule.sigma and m.rule.soundness == NO_EPSILON]
    return [f"{rule.name} has no valid ε, whatever noise it adds: {rule.why}." for rule in rules]


def _engine(workers: int | None, on: Engine | None) -> Engine:
    """Who carries out the runs."""
    if workers is not None and on is not None:
        raise ValueError("workers are processes of this machine; leave them out where `on` says who carries out runs.")
    return Local(workers) if on is None else on


def _check_device(device: str, tf32: bool, engine: Engine) -> None:
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
    engine.check_device(device)


# --- what came out ----------------------------------------------------------------------------------------------------


def _comparison(
    plan: Protocol, loaded: Loaded, seeds: Sequence[int], results: Sequence[Mapping[str, Any]], says: str
) -> Comparison:
    """The stored results, rule by rule."""
    size = len(plan.methods)
    by_rule = [[results[i * size + j] for i in range(len(seeds))] for j in range(size)]
    first = results[0]
    for name in ("groups", "classes"):
        if any(result[name] != first[name] for result in results):
            raise ValueError(f"The {name} differ between the seeds, so they cannot be put in one table.")
    reference = by_rule[0]
    return Comparison(
        dataset=loaded.splits.train.name,
        groups=tuple(first["groups"]),
        seeds=tuple(seeds),
        protocol=plan.name,
        says=says,
        outcomes=tuple(_outcome(method, found) for method, found in zip(plan.methods, by_rule, strict=True)),
        pair=loaded.pair,
        uncovered=(*loaded.uncovered, *(() if any("number n" in text for text in loaded.uncovered) else _READ)),
        notes=tuple(dict.fromkeys([*loaded.notes, *(note for result in reference for note in result["notes"])])),
        small=tuple(dict.fromkeys(name for result in reference for name in result["small"])),
        n=tuple(result["n"] for result in reference),
    )


# What every comparison reads off the data.
_READ = ("the number n of training records, from which q and the steps follow", "the splitting of the data")


def _outcome(method: Method, results: Sequence[Mapping[str, Any]]) -> Outcome:
    by_group = [result["test"]["groups"] for result in results]
    metrics = {name: _array([found[name] for found in by_group]) for name in by_group[0]}
    metrics["train_loss"] = _array([result["train_loss"] for result in results])
    overall = [result["test"]["overall"] for result in results]
    return Outcome(
        name=method.name,
        rule=repr(method.rule),
        lr=tuple(result["settings"]["lr"] for result in results),
        soundness=method.rule.soundness,
        epsilon={accountant: _epsilon(method.rule, results, accountant) for accountant in ("pld", "rdp")},
        delta=max(result["delta"] for result in results),
        metrics=metrics,
        overall={name: _array([found[name] for found in overall]) for name in overall[0]},
        seconds=tuple(result["seconds"] for result in results),
        course=_course([result["trace"] for result in results]),
        statement=_statement(method.rule, results[0]),
    )


def _course(traces: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Mean over the seeds of what every epoch looked like; None where some seed has nothing to say."""
    columns = {}
    for name in ("loss", "gradient_norm", "clip_fraction", "sensitivity", "state"):
        seeds = [_array([row[name] for row in trace]) for trace in traces]  # [epoch, ...] each
        columns[name] = _rounded(np.mean(seeds, axis=0)) if len({part.shape for part in seeds}) == 1 else None
    return columns


def _rounded(values: NDArray[np.float64]) -> list[Any]:
    """Four digits are enough for a picture; None where there is no number."""
    found: list[Any] = [_rounded(row) for row in values] if values.ndim > 1 else [
        float(f"{value:.4g}") if math.isfinite(value) else None for value in values
    ]  # fmt: skip
    return found


def _statement(rule: Rule, result: Mapping[str, Any]) -> dict[str, Any]:
    """What must be known to judge this ε, without the ledger itself."""
    from evenclip import privacy
    from evenclip.training.config import Settings

    public = {name: value for name, value in result["settings"].items() if name not in ("rule", "seed_given")}
    settings = Settings(rule=rule, seed=0, **public)
    found = privacy.report(settings, Ledger.from_json(result["ledger"]), result["trace"])
    return {name: value for name, value in found.items() if name != "ledger"}


def _epsilon(rule: Rule, results: Sequence[Mapping[str, Any]], accountant: str) -> float | None:
    """The largest over the seeds; None where none is valid."""
    from evenclip import accounting

    if rule.soundness == NO_EPSILON:
        return None
    distinct = {repr((result["ledger"], result["delta"])): result for result in results}
    found = [
        accounting.epsilon(Ledger.from_json(result["ledger"]), result["delta"], accountant)
        for result in distinct.values()
    ]
    return None if any(value is None for value in found) else max(value for value in found if value is not None)


_SAYS = {
    "published": "Settings as published; the largest step of one sample, learning rate times sensitivity, differs "
    "between the rules. --match makes it the same.",
    "matched": f"Matched: every private rule has the expected largest step {protocol.STEP:g}; the reference's learning "
    "rate was chosen on validation data.",
    "one learning rate": "One learning rate for all; the largest step of one sample, learning rate times sensitivity, "
    "may differ between the rules.",
}


def _says(plan: Protocol, changed: Sequence[str]) -> str:
    """What was held equal, in words; and what is not as the protocol has it."""
    return _SAYS[plan.name] + (f" Given: {', '.join(changed)}." if changed else "")


def _array(rows: Sequence[Any]) -> NDArray[np.float64]:
    """Numbers, NaN where there is None."""
    return np.array(rows, dtype=np.float64)


def _mean_se(values: NDArray[np.float64]) -> dict[str, float | None]:
    """As JSON has it."""
    if not len(values) or bool(np.isnan(values).any()):
        return {"mean": None, "se": None}
    return {name: _finite(value) for name, value in zip(("mean", "se"), statistics.mean_se(values), strict=True)}


def _plain(pair: statistics.Paired) -> dict[str, Any]:
    """As JSON has it."""
    numbers = {name: _finite(getattr(pair, name)) for name in ("mean", "se", "low", "high", "p")}
    return {"n": pair.n, **numbers, "reads": pair.reads}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: a mean loss is infinite where a score was."""
    return value if value is not None and math.isfinite(value) else None
