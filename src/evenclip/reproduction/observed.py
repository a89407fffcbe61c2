"""Runs that are observed while they train, for the paper's figures.

Losses and gradient norms are measured by group and epoch, and the terms of
`evenclip.audit.decomposition` at regular steps: over five seeds of every method on tables, and one
seed on images. Observing does not change a run, so these are the runs of the tables. All
measurements are private.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenclip import files
from evenclip.audit import RiskTerms
from evenclip.comparison import protocol
from evenclip.comparison.presets import PUBLISHED, SETTINGS
from evenclip.comparison.protocol import Method, Protocol
from evenclip.data import SOURCES, Dataset, Splits, data_directory
from evenclip.files import kinds
from evenclip.reproduction.published import load
from evenclip.rules import DPSGD, Constants, NonPrivate, Rule
from evenclip.sweep import Executor, Local
from evenclip.sweep.describe import load_data, make_model
from evenclip.sweep.spec import code
from evenclip.training.fit import fit
from evenclip.training.step import Step

__all__ = ["GroupGradients", "ObservedRun", "carry_out", "observe_run", "plan"]


@dataclass(frozen=True)
class ObservedRun:
    """A run to observe.

    Attributes:
        dataset: name of the dataset.
        rule: name of the rule.
        match: whether to use the matched protocol.
        seed: seed of the run.
        epochs: number of epochs; None: the paper's.
        every: steps between two measurements of risk.
        norms: steps between two measurements of ‖g_B‖.
        sample: most samples of each group for a measurement of risk; None: all.
        probes: number of probes for traces.
        eigenvalues: whether to measure λ_max and λ_min.
        device: device to train on.
        lr: learning rate that the table chose on validation data; None: that of the protocol, or
            the published one if the protocol has none.
        rows: number of training records to sample; None: all.
    """

    dataset: str
    rule: str
    match: bool = False
    seed: int = 0
    epochs: int | None = None
    every: int = 50
    norms: int = 1
    sample: int | None = 1024
    probes: int = 100
    eigenvalues: bool = False
    device: str = "cpu"
    lr: float | None = None
    rows: int | None = None

    @property
    def name(self) -> str:
        """The name of its file, without suffix."""
        protocol = "matched" if self.match else "published"
        closer = "-eigenvalues" if self.eigenvalues else ""
        seed = f"-seed{self.seed}" if self.seed else ""
        return f"{self.dataset}-{protocol}-{self.rule}{closer}{seed}"

    @property
    def hash(self) -> str:
        """Fingerprint of the fields, the method and the code."""
        plain = json.dumps([asdict(self), repr(self.method), code()], sort_keys=True)
        return hashlib.sha256(plain.encode()).hexdigest()[:24]

    @property
    def settings(self) -> Protocol:
        """The protocol of the run."""
        published = PUBLISHED[self.dataset]
        if not self.match:
            return published
        matched = protocol.matched(published, Constants(groups=len(SOURCES[self.dataset].groups)))
        rates = {method.name: method.lr for method in published.methods}
        methods = [Method(m.rule, rates[m.name] if m.lr is None else m.lr) for m in matched.methods]
        return replace(matched, methods=tuple(methods))

    @property
    def method(self) -> Method:
        """The rule with its learning rate."""
        (method,) = self.settings.only([self.rule]).methods
        return method if self.lr is None else Method(method.rule, self.lr)


class GroupGradients:
    """An observer of ‖g_B‖, for the whole batch and for each group in it, averaged over an epoch.

    Args:
        groups: indices of the groups.
        epoch: number of steps in an epoch.
        every: steps between two measurements.

    Attributes:
        rows: one list [all samples, *groups] for each epoch; None if no batch had such a sample.
    """

    def __init__(self, groups: Sequence[int], epoch: int, every: int = 1) -> None:
        self._groups, self._epoch, self._every = list(groups), epoch, every
        # [all samples, *groups] of each step of the epoch so far. They stay on the device until the
        # epoch ends, because every copy to the CPU synchronises.
        self._steps: list[Tensor] = []
        self.rows: list[list[float | None]] = []

    def __call__(self, step: Step) -> None:
        """Observe one step."""
        if step.t % self._every == 0:
            self._measure(step)
        if (step.t + 1) % self._epoch == 0:
            self.close()

    def _measure(self, step: Step) -> None:
        """Store the norms of one step, −1 for a group without a sample."""
        masks = [
            torch.ones_like(step.weights),
            *((step.group == k).to(step.weights) for k in self._groups),
        ]
        sizes = [mask.sum() for mask in masks]
        norms = [
            step.weighted_sum(mask).norm() / size for mask, size in zip(masks, sizes, strict=True)
        ]
        self._steps.append(
            torch.stack(
                [torch.where(size > 0, n, -1.0) for n, size in zip(norms, sizes, strict=True)]
            )
        )

    def close(self) -> None:
        """End the epoch: append its means to `rows`."""
        if self._steps:
            steps = torch.stack(self._steps).tolist()
            columns = [
                [value for value in column if value >= 0] for column in zip(*steps, strict=True)
            ]
            self.rows.append([sum(column) / len(column) if column else None for column in columns])
        self._steps = []


def observe_run(given: ObservedRun, data_dir: str | None = None) -> dict[str, Any]:
    """Train and observe a run; return its measurements."""
    settings, method, splits = given.settings, given.method, _splits(given, data_dir)
    train = splits.train.to(given.device)
    assert method.lr is not None
    assert train.group is not None
    # Shuffled batches hold all records; the rate comes from their public number.
    batches = _batches(method.rule, settings, train.n if method.rule.poisson else len(train))
    groups = [train.group_names.index(group) for group in load(given.dataset).groups]
    gradients = GroupGradients(groups, batches, given.norms)
    result = fit(
        make_model(settings.model, splits.train, given.seed),
        train,
        rule=method.rule,
        epochs=given.epochs or settings.epochs,
        batch_size=settings.batch_size,
        lr=method.lr,
        q=1 / batches if method.rule.poisson else None,
        delta=settings.delta,
        seed=given.seed,
        device=given.device,
        observers=[gradients, _risk_terms(given, train, groups)],
        progress=False,
    )
    gradients.close()
    return {
        "watch": asdict(given),
        "hash": given.hash,
        "lr": method.lr,
        "rule": repr(method.rule),
        "groups": [train.group_names[k] for k in groups],
        "shares": [float((train.group == k).double().mean()) for k in groups],
        "n": train.n,
        "q": result.settings.q,
        "B": result.settings.B,
        "steps": result.settings.steps,
        "loss": [[row["loss"][k] for k in groups] for row in result.trace],
        "norm": gradients.rows,
        "risk": [_rounded(record) for record in result.records if "risk" in record],
    }


def _splits(given: ObservedRun, data_dir: str | None) -> Splits:
    """Load the data of a run."""
    described: dict[str, Any] = {"name": given.dataset, "options": SETTINGS[given.dataset].options}
    if given.rows is not None:
        described["rows"] = given.rows
    if data_dir is not None:
        described["directory"] = data_dir
    return load_data(described, given.seed).splits


def _batches(rule: Rule, settings: Protocol, n: int) -> int:
    """Return the steps per epoch: those of the records for shuffled batches, or the published ones.

    A partial copy of the data has fewer steps than published.
    """
    own = -(-n // settings.batch_size)
    published = settings.batches or own
    close = abs(n / settings.batch_size - published) <= 0.05 * published
    return published if rule.poisson and close else own


def _risk_terms(given: ObservedRun, train: Dataset, groups: Sequence[int]) -> RiskTerms:
    """Return the observer of the terms of the risk."""
    assert given.method.lr is not None
    return RiskTerms(
        train,
        given.method.lr,
        every=given.every,
        groups=groups,
        probes=given.probes,
        sample=given.sample,
        eigenvalues=given.eigenvalues,
        seed=given.seed,
    )


def _rounded(record: Mapping[str, Any]) -> dict[str, Any]:
    """Round every float to six significant digits, so that the file stays small."""
    rounded: dict[str, Any] = json.loads(
        json.dumps(record), parse_float=lambda text: float(f"{float(text):.6g}")
    )
    return rounded


def plan(
    dataset: str,
    *,
    match: bool,
    quick: bool = False,
    device: str = "cpu",
    reference_lr: Sequence[float] = (),
) -> list[ObservedRun]:
    """Return the runs to observe for the figures of a dataset: the seeds of each method.

    On Adult there are further runs of DPSGD with eigenvalues. They need dozens of Hessian-vector
    products, so these runs are measured a fourth as often. Runs on images use fewer probes and
    measure ‖g_B‖ at every fifth step.

    Args:
        dataset: name of the dataset.
        match: whether to use the matched protocol.
        quick: whether to train for one epoch on few records, with few probes.
        device: device to train on.
        reference_lr: learning rate of the non-private run by seed; see `ObservedRun.lr`.
    """
    setting, image = SETTINGS[dataset], PUBLISHED[dataset].model["name"] == "cnn"
    fewer: dict[str, Any] = {"norms": 5, "probes": 30} if image else {}
    runs = []
    for seed in range(1 if quick else setting.figure_seeds):
        base = ObservedRun(dataset, DPSGD.name, match, seed, every=setting.every, device=device)
        if setting.eigenvalues:
            closer: dict[str, Any] = {"every": 4 * setting.every, "probes": 0, "eigenvalues": True}
            runs.append(replace(base, **closer))
        rates = {NonPrivate.name: reference_lr[seed]} if seed < len(reference_lr) else {}
        runs += [
            replace(base, rule=method.name, lr=rates.get(method.name), **fewer)
            for method in PUBLISHED[dataset].methods
        ]
    if quick:
        few: dict[str, Any] = {"epochs": 1, "sample": 128, "rows": setting.quick_rows}
        runs = [
            replace(w, every=5 if image else max(20, w.every // 2), probes=min(w.probes, 10), **few)
            for w in runs
        ]
    return runs


def carry_out(
    runs: Sequence[ObservedRun],
    folder: Path,
    *,
    data_dir: Path | None = None,
    on: Executor | None = None,
) -> Iterator[tuple[ObservedRun, dict[str, Any]]]:
    """Yield each run with its measurements, as they finish; stored runs are not repeated."""
    files.make_folder(folder, kinds.OBSERVED)
    todo = []
    for given in runs:
        stored = read(folder, given)
        if stored is None:
            todo.append(given)
        else:
            yield given, stored
    observe = partial(observe_run, data_dir=None if data_dir is None else str(data_dir))
    for i, measured in (on or Local()).map_processes(observe, todo):
        files.write(folder / f"{todo[i].name}.json", files.sealed(measured, None), kinds.OBSERVED)
        yield todo[i], measured


def read(folder: Path, given: ObservedRun) -> dict[str, Any] | None:
    """Return the stored measurements of a run; None if there are none of the same fingerprint."""
    path = folder / f"{given.name}.json"
    if not path.is_file():
        return None
    measured = files.read_sealed(path, kinds.OBSERVED)
    return measured if measured.get("hash") == given.hash else None


def lacks(dataset: str, data_dir: Path | None) -> str | None:
    """Return why the dataset cannot be trained on; None if it can.

    A copy with fewer images can be trained on; its tables and figures are marked as partial.
    """
    directory = data_directory(data_dir)
    missing = SOURCES[dataset].missing(directory)
    return SOURCES[dataset].lacks(directory) if missing else None
