"""`fit` trains a model privately; `prepare` and `train` are its parts, for custom loops.

The public constants are fixed before anything else is computed: B = batch size, q = B/n and
T = epochs · ⌈n/B⌉, with the declared number n of records, or else their number. Then the run takes
T steps of `evenclip.training.step`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from evenclip.arguments import shown
from evenclip.data import Dataset, as_dataset
from evenclip.gradients.losses import Loss
from evenclip.rules import Rule
from evenclip.training.config import Performance, TrainConfig
from evenclip.training.inputs import check_data, copy_to_device
from evenclip.training.logs.log import Log
from evenclip.training.processes import Processes, SingleProcess
from evenclip.training.progress import Interrupt, Progress
from evenclip.training.result import Record, Result, result
from evenclip.training.run import Run
from evenclip.training.session import AfterStep, EpochLogger, Observer, Resume, Session, start
from evenclip.training.setup import check_number
from evenclip.training.step import Step

__all__ = ["fit", "fit_config", "prepare", "result", "train"]


def fit(
    model: nn.Module,
    data: Any,
    *,
    rule: Rule | None = None,
    loss: Loss = cross_entropy,
    epochs: int = 1,
    batch_size: int = 256,
    lr: float = 0.1,
    delta: float | None = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    optimizer: Callable[..., Optimizer] = SGD,
    scheduler: Callable[[Optimizer], Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: Resume = False,
    observers: Sequence[Observer] = (),
    logs: Sequence[Log] = (),
    q: float | None = None,
    steps: int | None = None,
    records: int | None = None,
    performance: Performance | None = None,
    independence: str | None = None,
    progress: bool | None = None,
    ranks: Processes | None = None,
) -> Result:
    """Train a copy of the model privately with a clipping rule.

    Args:
        model: any module whose samples do not influence each other. It is copied, not changed.
        data: (x, y) or (x, y, group) of tensors or arrays, a `Dataset`, a map-style torch dataset,
            or the result of `evenclip.data.parquet`.
        rule: how gradients are clipped; by default `DPSGDGlobalAdapt()`.
        loss: loss(output, y), as a mean, a sum, or one value per sample.
        epochs: T = epochs · ⌈n/B⌉ steps.
        batch_size: B, the expected batch size.
        lr: learning rate of the optimiser.
        delta: δ; by default the largest power of ten below 1/(2n).
        seed: by default, batches, noise and dropout come from the operating system. A seed
            determines them, together with everything else that the training computes with: data,
            model, settings, code, versions, threads. Anyone who knows it can subtract the noise. It
            is refused for data that are read item by item, and for functions whose code cannot be
            seen or that change during the training.
        device: where to train; by default where the model is.
        optimizer: called as optimizer(parameters, lr=lr). It gets noisy gradients only, so it costs
            no privacy.
        scheduler: called as scheduler(optimizer); its `step()` is called after every epoch.
        checkpoint: folder for checkpoints, written after every epoch, every `checkpoint_every`
            steps, and on Ctrl-C. Every step is in its journal before it is taken; without a folder,
            the ledger counts this attempt only.
        checkpoint_every: steps between checkpoints.
        resume: True continues from the last checkpoint in the folder, if there is one, with new
            batches and noise from the operating system, also if a seed is given. The ledger then
            also has the steps that earlier attempts took after the checkpoint, or may have taken if
            they were killed, and `epochs` or `steps` may be larger than before. "exact" repeats the
            steps that the seed determines and counts them once; it is refused if anything has
            changed that they depend on.
        observers: called with every `Step` before the update. Their return values are collected in
            `Result.records`, from the first step that this call takes.
        logs: get the values of every epoch when it ends, and finally the privacy report; see
            `evenclip.training.logs`.
        q: Poisson rate, by default batch_size/n. With q, an epoch has round(1/q) steps.
        steps: T, instead of epochs.
        records: public number of records N: q = batch_size/N and T = epochs · ⌈N/batch_size⌉, and δ
            by default below 1/(2N). By default that of the `Dataset`, or else the real number n,
            which the report then lists as not covered by ε. At most 2N records are accepted.
        performance: how the run is computed, which does not change the mechanism.
        independence: None passes each sample through the model by itself, unless the types of the
            layers show that samples are independent, or torch cannot map the model; "tested"
            passes them together, and the privacy report says so.
        progress: whether to show progress; by default only on a terminal.
        ranks: `Ranks()` if `torchrun` has started several processes to train this model together;
            see `evenclip.distributed`. Observers see what their own rank computes; only rank 0
            writes logs and progress.

    Raises:
        ValueError: if the model cannot be trained privately with these arguments; the message says
            what to do.
        KeyboardInterrupt: on Ctrl-C, after the current step and its checkpoint.
    """
    config = TrainConfig().but(
        rule=rule,
        loss=loss,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        delta=delta,
        seed=seed,
        device=device,
        optimizer=optimizer,
        scheduler=scheduler,
        q=q,
        steps=steps,
        records=records,
        performance=performance,
        independence=independence,
    )
    session = Session(observers, logs, checkpoint, checkpoint_every, resume, progress)
    return fit_config(model, data, config, session, ranks)


def fit_config(
    model: nn.Module,
    data: Any,
    config: TrainConfig,
    session: Session | None = None,
    ranks: Processes | None = None,
) -> Result:
    """Train as `fit` does, with its settings as two values: `config` and `session`."""
    session = session or Session()
    run = _prepare(model, data, config, ranks)
    start(run, session.folder, session.resume)
    leads = run.ranks.leads
    logger = EpochLogger(run, session.logs if leads else ())
    with (
        Interrupt() as interrupt,
        Progress(run.settings.steps, session.progress if leads else False) as progress,
    ):
        after = AfterStep(run, session, logger, progress, interrupt)
        records = train(run, session.observers, after)
    trained = result(run, records)
    _warn_of_divergence(trained)
    for module, given in zip(trained.model.modules(), model.modules(), strict=True):
        module.training = given.training
    logger.end(trained)
    return trained


def _warn_of_divergence(trained: Result) -> None:
    """Warn if a weight is not finite."""
    if not all(bool(torch.isfinite(p).all()) for p in trained.model.parameters()):
        warnings.warn(
            f"Training diverged: some weights are not finite. Train with an lr below "
            f"{trained.settings.lr:g}.",
            stacklevel=4,  # the caller of `fit`
        )


def prepare(
    model: nn.Module,
    data: Any,
    config: TrainConfig | None = None,
    *,
    ranks: Processes | None = None,
    **settings: Any,
) -> Run:
    """Return a run before its first step, for your own training loop. All arguments are checked.

    A seed does not depend on your loop: give two loops that compute different things two seeds.

        with run.listening():
            while run.t < run.settings.steps:
                run.update(run.step())

    Args:
        model: as for `fit`.
        data: as for `fit`.
        config: all settings of the training.
        ranks: as for `fit`.
        **settings: fields of `TrainConfig` by name; they take precedence over `config`.
    """
    if not (config is None or isinstance(config, TrainConfig)):
        raise TypeError(
            f"config is {shown(config)}; it must be a TrainConfig, or be left out for settings by "
            "name."
        )
    return _prepare(model, data, (config or TrainConfig()).but(**settings), ranks)


def train(
    run: Run, observers: Sequence[Observer] = (), after: Callable[[int], None] | None = None
) -> list[Record]:
    """Take the remaining steps of a run.

    Args:
        run: from `prepare`.
        observers: called with every `Step` before the update.
        after: called with the number of steps taken, after every update.

    Returns:
        What the observers returned, step by step.
    """
    records = list[Record]()
    with run.listening():
        while run.t < run.settings.steps:
            step = run.step()
            records += [{"t": run.t, **_observed(observer, step)} for observer in observers]
            run.update(step)
            if after is not None:
                after(run.t)
    return records


def _observed(observer: Observer, step: Step) -> Mapping[str, Any]:
    """Call an observer and return its values; raise if they are not a mapping."""
    values = observer(step)
    if not (values is None or isinstance(values, Mapping)):
        raise TypeError(
            f"An observer returned {type(values).__name__}; it must return a dict of what it saw, "
            "or None."
        )
    return values or {}


def _prepare(model: nn.Module, data: Any, config: TrainConfig, ranks: Processes | None) -> Run:
    """Check the arguments and return the run."""
    data = as_dataset(data)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {shown(model)}; it must be a torch.nn.Module.")
    if not (ranks is None or isinstance(ranks, Processes)):
        raise TypeError(
            f"ranks is {shown(ranks)}; it must be evenclip.Ranks(), or be left out for one process."
        )
    model, place = copy_to_device(model, config.device)
    processes = SingleProcess() if ranks is None else ranks
    if config.records is None and isinstance(data, Dataset) and not processes.local:
        config = config.but(records=data.records)
    total = processes.rows(len(data)).n
    settings = config.settings(model, total, data.K)
    check_number(settings, total)
    data = check_data(model, config.loss, data.to(place), config.rule, place)
    return Run(model, data, settings, config, place, processes)
