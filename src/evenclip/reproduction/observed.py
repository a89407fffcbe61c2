"""Runs that are watched while they train: what the paper's figures are drawn from.

One seed of every method, with its losses and gradients by group and epoch, and every so many steps
a look at risk (`evenclip.audit.decomposition`). Looking changes nothing: these are the runs of the
tables. All of it is private.
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

from evenclip.audit import RiskTerms
from evenclip.comparison import protocol
from evenclip.comparison.presets import PUBLISHED, SETTINGS
from evenclip.comparison.protocol import Method, Protocol
from evenclip.data import SOURCES, data_directory
from evenclip.reproduction.published import load
from evenclip.rules import DPSGD, NonPrivate
from evenclip.sweep import Executor, Local
from evenclip.sweep.describe import load_data, make_model
from evenclip.sweep.pool import write_whole
from evenclip.sweep.spec import code
from evenclip.training.fit import fit
from evenclip.training.step import Step

__all__ = ["GroupGradients", "Watch", "carry_out", "plan", "watch"]


@dataclass(frozen=True)
class Watch:
    """A run to be watched.

    Attributes:
        dataset: by its name in the catalogue.
        rule: by its name.
        match: whether on the matched protocol.
        seed: of the run.
        epochs: of training; None: the paper's.
        every: steps between two looks at risk.
        norms: steps between two looks at ‖g_B‖.
        sample: samples of each group that are looked at, at the most; None: all.
        probes: for traces.
        eigenvalues: whether to look for λ_max and λ_min.
        device: where to train.
        rows: a sample of the training records; None: all.
        lr: learning rate, where it was chosen on validation data when the table was made; None: the
            protocol's, or else the published one.
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
        """Of its file."""
        closer = "-eigenvalues" if self.eigenvalues else ""
        return f"{self.dataset}-{'matched' if self.match else 'published'}-{self.rule}{closer}"

    @property
    def hash(self) -> str:
        """Of all this and of the code that runs it."""
        plain = json.dumps([asdict(self), repr(self.method), code()], sort_keys=True)
        return hashlib.sha256(plain.encode()).hexdigest()[:24]

    @property
    def settings(self) -> Protocol:
        """What it is trained with."""
        published = PUBLISHED[self.dataset]
        if not self.match:
            return published
        found = protocol.matched(published, len(SOURCES[self.dataset].groups))
        rates = {method.name: method.lr for method in published.methods}
        return replace(
            found,
            methods=tuple(
                Method(m.rule, rates[m.name] if m.lr is None else m.lr) for m in found.methods
            ),
        )

    @property
    def method(self) -> Method:
        """The rule with its learning rate."""
        found = self.settings.only([self.rule]).methods[0]
        return found if self.lr is None else Method(found.rule, self.lr)


class GroupGradients:
    """An observer: ‖g_B‖ of the whole batch and of each group in it, averaged over batches of an
    epoch.

    Attributes:
        rows: of each epoch, [everybody, *groups]; None where no batch had anybody.
    """

    def __init__(self, groups: Sequence[int], epoch: int, every: int = 1) -> None:
        """groups: which; epoch: its steps; every: so many steps one is looked at."""
        self._groups, self._epoch, self._every = list(groups), epoch, every
        self._open: list[
            Tensor
        ] = []  # [everybody, *groups], each; fetched together: a fetch waits for the device
        self.rows: list[list[float | None]] = []

    def __call__(self, step: Step) -> None:
        """One step."""
        if step.t % self._every == 0:
            self._look(step)
        if (step.t + 1) % self._epoch == 0:
            self.close()

    def _look(self, step: Step) -> None:
        masks = [
            torch.ones_like(step.weights),
            *((step.group == k).to(step.weights) for k in self._groups),
        ]
        sizes = [mask.sum() for mask in masks]
        norms = [
            step.weighted_sum(mask).norm() / size for mask, size in zip(masks, sizes, strict=True)
        ]
        self._open.append(
            torch.stack(
                [torch.where(size > 0, n, -1.0) for n, size in zip(norms, sizes, strict=True)]
            )
        )

    def close(self) -> None:
        """The epoch is over."""
        if self._open:
            steps = torch.stack(self._open).tolist()
            columns = [
                [value for value in column if value >= 0] for column in zip(*steps, strict=True)
            ]
            self.rows.append([sum(column) / len(column) if column else None for column in columns])
        self._open = []


def watch(given: Watch, data_dir: str | None = None) -> dict[str, Any]:
    """Train it, and what was seen."""
    settings, method = given.settings, given.method
    described: dict[str, Any] = {"name": given.dataset, "options": SETTINGS[given.dataset].options}
    if given.rows is not None:
        described["rows"] = given.rows
    loaded = load_data(
        {**described, **({} if data_dir is None else {"directory": data_dir})}, given.seed
    )
    train = loaded.splits.train.to(given.device)
    assert method.lr is not None
    batches = settings.batches or 1
    if abs(len(train) / settings.batch_size - batches) > 0.05 * batches:
        batches = -(-len(train) // settings.batch_size)  # a partial copy
    groups = [train.group_names.index(group) for group in load(given.dataset).groups]
    gradients = GroupGradients(groups, batches, given.norms)
    risk = RiskTerms(
        train,
        method.lr,
        every=given.every,
        groups=groups,
        probes=given.probes,
        sample=given.sample,
        eigenvalues=given.eigenvalues,
        seed=given.seed,
    )
    found = fit(
        make_model(settings.model, loaded.splits.train, given.seed),
        train,
        rule=method.rule,
        epochs=given.epochs or settings.epochs,
        batch_size=settings.batch_size,
        lr=method.lr,
        q=1 / batches if method.rule.poisson else None,
        delta=settings.delta,
        seed=given.seed,
        device=given.device,
        observers=[gradients, risk],
        progress=False,
    )
    gradients.close()
    assert train.group is not None
    shares = [float((train.group == k).double().mean()) for k in groups]
    return {
        "watch": asdict(given),
        "hash": given.hash,
        "lr": method.lr,
        "rule": repr(method.rule),
        "groups": [train.group_names[k] for k in groups],
        "shares": shares,
        "n": len(train),
        "q": found.settings.q,
        "B": found.settings.B,
        "steps": found.settings.steps,
        "loss": [[row["loss"][k] for k in groups] for row in found.trace],
        "norm": gradients.rows,
        "risk": [_slim(record) for record in found.records if "risk" in record],
    }


def _slim(record: Mapping[str, Any]) -> dict[str, Any]:
    """A look at risk with six digits: it goes into a file that is kept."""
    kept: dict[str, Any] = json.loads(
        json.dumps(record), parse_float=lambda text: float(f"{float(text):.6g}")
    )
    return kept


def plan(
    dataset: str,
    *,
    match: bool,
    quick: bool = False,
    device: str = "cpu",
    reference_lr: float | None = None,
) -> list[Watch]:
    """Every method of a dataset's table; and DPSGD on Adult once more with its eigenvalues, which
    take dozens of products a look and are looked at a fourth as often. Images have fewer probes,
    and ‖g_B‖ of every fifth batch. The non-private run has the learning rate that is given, of the
    matched table.
    """
    setting, image = SETTINGS[dataset], PUBLISHED[dataset].model["name"] == "cnn"
    every = setting.every
    often: dict[str, Any] = {"norms": 5, "probes": 30} if image else {}
    found = [
        Watch(dataset, method.name, match, every=every, device=device, **often)
        for method in PUBLISHED[dataset].methods
    ]
    found = [replace(w, lr=reference_lr) if w.rule == NonPrivate.name else w for w in found]
    if setting.eigenvalues:
        found.insert(
            0,
            Watch(
                dataset,
                DPSGD.name,
                match,
                every=4 * every,
                probes=0,
                eigenvalues=True,
                device=device,
            ),
        )
    if quick:
        few: dict[str, Any] = {"epochs": 1, "sample": 128, "rows": setting.quick_rows}
        found = [
            replace(w, every=5 if image else max(20, w.every // 2), probes=min(w.probes, 10), **few)
            for w in found
        ]
    return found


def carry_out(
    watches: Sequence[Watch],
    folder: Path,
    *,
    data_dir: Path | None = None,
    on: Executor | None = None,
) -> Iterator[tuple[Watch, dict[str, Any]]]:
    """What was seen of each, as they end; what lies in the folder is not run again."""
    folder.mkdir(parents=True, exist_ok=True)
    todo = []
    for given in watches:
        known = read(folder, given)
        if known is None:
            todo.append(given)
        else:
            yield given, known
    where = None if data_dir is None else str(data_dir)
    for i, found in (on or Local()).map_processes(partial(watch, data_dir=where), todo):
        write_whole(folder / f"{todo[i].name}.json", json.dumps(found) + "\n")
        yield todo[i], found


def read(folder: Path, given: Watch) -> dict[str, Any] | None:
    """What was seen of this very run, if it is there."""
    path = folder / f"{given.name}.json"
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found if found.get("hash") == given.hash else None


def lacks(dataset: str, data_dir: Path | None) -> str | None:
    """What hinders runs on this dataset; None if nothing does. A copy with fewer images does not,
    and is marked so.
    """
    directory = data_directory(data_dir)
    absent = SOURCES[dataset].missing(directory)
    return SOURCES[dataset].lacks(directory) if absent else None
