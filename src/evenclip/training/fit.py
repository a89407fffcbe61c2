"""Training: `fit`, the one training loop, and what comes out.

`fit` fixes the public constants before it looks at anything (B = batch size, q = B/n, T = epochs ·
⌈n/B⌉), then takes T steps of `evenclip.training.step`. Three kinds of value come out of it: what
may be published (`Result.model`, `.ledger`, the rule's state); what a checkpoint needs besides,
which is secret (`evenclip.training.checkpoint`); and what was seen (`Result.trace`, observers),
which is private.
"""

from __future__ import annotations

import copy
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from evenclip import check
from evenclip.data import Dataset, Streamed, as_dataset
from evenclip.gradients.losses import Loss, per_sample
from evenclip.gradients.plan import refuse_stateful
from evenclip.gradients.tape import call
from evenclip.mechanism import Ledger, statement
from evenclip.mechanism.settings import Settings
from evenclip.rules import Rule
from evenclip.training import checkpoint as checkpoints
from evenclip.training.checkpoint import CheckpointError
from evenclip.training.config import Performance, TrainConfig
from evenclip.training.logs.log import Log, flat
from evenclip.training.processes import Alone, Processes
from evenclip.training.progress import Interrupt, Progress
from evenclip.training.run import Run
from evenclip.training.step import Step

__all__ = ["Result", "Session", "fit", "fit_config", "prepare", "result", "train"]

Record = dict[str, Any]  # what an observer returned, with the number of the step
Observer = Callable[[Step], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Result:
    """A trained model, what it cost in privacy, and what training looked like.

    Attributes:
        model: the trained copy. May be published.
        settings: the public constants.
        ledger: what was released. May be published.
        state: the rule's final state: Z, or the C_k. May be published.
        trace: one row per epoch; see `evenclip.training.trace`. Private.
        records: what the observers returned, step by step. Private.
        tf32: whether a GPU was allowed to round the operands of products.
        uncovered: looks at the data before training that ε does not cover, where it is known that
            there were any.
    """

    model: nn.Module
    settings: Settings
    ledger: Ledger
    state: Tensor
    trace: list[dict[str, Any]] = field(repr=False)
    records: list[dict[str, Any]] = field(repr=False)
    tf32: bool = False
    uncovered: tuple[str, ...] = ()

    def epsilon(self, accountant: str = "pld", delta: float | None = None) -> float | None:
        """ε at δ for releasing this model and all that is public about its training; None where
        none is valid.
        """
        return statement.epsilon(self.settings, self.ledger, accountant, delta)

    @cached_property
    def privacy(self) -> dict[str, Any]:
        """Everything that a privacy report must state; `evenclip.mechanism.statement.paragraph`
        puts it in words.
        """
        return statement.report(
            self.settings, self.ledger, self.trace, tf32=self.tf32, uncovered=self.uncovered
        )


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
    resume: bool = False,
    observers: Sequence[Observer] = (),
    logs: Sequence[Log] = (),
    q: float | None = None,
    steps: int | None = None,
    performance: Performance | None = None,
    progress: bool | None = None,
    ranks: Processes | None = None,
) -> Result:
    """Train a copy of the model privately, by the given rule.

    Args:
        model: any module whose samples do not influence each other; it is copied and left as it
            was.
        data: (x, y) or (x, y, group) of tensors or arrays, a `Dataset`, a map-style torch dataset,
            or what `evenclip.data.parquet` opened.
        rule: how gradients are clipped; `DPSGDGlobalAdapt()` unless given.
        loss: loss(output, y); averaging, summing or per sample.
        epochs: T = epochs · ⌈n/B⌉ steps.
        batch_size: B, the expected batch size.
        lr: learning rate, handed to the optimiser.
        delta: δ; the largest power of ten below 1/(2n) unless given.
        seed: fixes batches, noise and dropout, so that whoever knows it can subtract the noise;
            from the operating system unless given.
        device: where to train; where the model is unless given.
        optimizer: called as optimizer(parameters, lr=lr). What it does with noisy gradients costs
            no privacy.
        scheduler: called as scheduler(optimizer), then `.step()` after every epoch.
        checkpoint: folder for checkpoints: after every epoch, every `checkpoint_every` steps, and
            on Ctrl-C.
        checkpoint_every: steps between checkpoints.
        resume: go on from the folder's last checkpoint, if there is one.
        observers: called with every `Step` before the update; what they return is collected in
            `Result.records`, from where this call took over.
        logs: told about every epoch when it has ended, and the privacy report at the end; see
            `evenclip.training.logs`.
        q: Poisson rate, batch_size/n unless given; an epoch is then round(1/q) steps.
        steps: T, instead of epochs.
        performance: how it is computed, which does not change what comes out.
        progress: whether to show progress; on a terminal unless given.
        ranks: `Ranks()` where `torchrun` has started several processes that train this model
            together; see `evenclip.distributed`. Observers see what their own rank computes; logs
            and progress are rank 0's.

    Raises:
        ValueError: for anything that cannot be trained privately as given; the message says what to
            do.
        KeyboardInterrupt: on Ctrl-C, after the step under way (and the checkpoint).
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
        performance=performance,
    )
    session = Session(observers, logs, checkpoint, checkpoint_every, resume, progress)
    return fit_config(model, data, config, session, ranks)


@dataclass(frozen=True)
class Session:
    """What goes on beside a training and does not change it; see `fit`."""

    observers: Sequence[Observer] = ()
    logs: Sequence[Log] = ()
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None:
            check.natural(checkpoint_every=self.checkpoint_every)

    @property
    def folder(self) -> Path | None:
        """Where checkpoints go."""
        return None if self.checkpoint is None else Path(self.checkpoint)


def fit_config(
    model: nn.Module,
    data: Any,
    config: TrainConfig,
    session: Session | None = None,
    ranks: Processes | None = None,
) -> Result:
    """`fit` with its settings as one value."""
    session = session or Session()
    run = _prepare(model, data, config, ranks)
    _start(run, session.folder, session.resume)
    leads = run.ranks.leads
    logger = _EpochLogger(run, session.logs if leads else ())
    with (
        Interrupt() as interrupt,
        Progress(run.settings.steps, session.progress if leads else False) as shown,
    ):
        records = train(run, session.observers, _Between(run, session, logger, shown, interrupt))
    found = result(run, records)
    for trained, given in zip(found.model.modules(), model.modules(), strict=True):
        trained.training = given.training
    logger.end(found)
    return found


def prepare(
    model: nn.Module,
    data: Any,
    config: TrainConfig | None = None,
    *,
    ranks: Processes | None = None,
    **settings: Any,
) -> Run:
    """A run that has not begun, everything checked: for a training loop of your own.

        with run.listening():
            while run.t < run.settings.steps:
                run.update(run.step())

    Args:
        model: as for `fit`.
        data: as for `fit`.
        config: everything else about the training.
        ranks: as for `fit`.
        **settings: fields of `TrainConfig` by name, as for `fit`.
    """
    if not (config is None or isinstance(config, TrainConfig)):
        raise TypeError(
            f"config is {config!r}; it must be a TrainConfig, or be left out for settings by name."
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
    """What an observer returned."""
    found = observer(step)
    if not (found is None or isinstance(found, Mapping)):
        raise TypeError(
            f"An observer returned {type(found).__name__}; it must return a dict of what it saw, "
            "or None."
        )
    return found or {}


def result(run: Run, records: Sequence[Record] = ()) -> Result:
    """What came of a run, which ends with this."""
    run.close()
    tf32 = run.performance.tf32 and run.device.type == "cuda"
    looks = () if isinstance(run.data, Dataset) else run.data.uncovered
    return Result(
        run.model,
        run.settings,
        run.ledger,
        run.state.cpu(),
        run.trace.rows,
        list(records),
        tf32,
        looks,
    )


# --- while it trains ----------------------------------------------------------------------------


class _EpochLogger:
    """Passes each epoch that ends to the logs."""

    def __init__(self, run: Run, logs: Sequence[Log]) -> None:
        self._run, self._logs, self._known = run, logs, len(run.trace.rows)
        self._groups = run.data.group_names

    def __call__(self) -> None:
        for row in self._run.trace.rows[self._known :]:
            self._known += 1
            for log in self._logs:
                log.epoch(row["epoch"], flat(row, self._groups))

    def end(self, found: Result) -> None:
        """Pass on the privacy report."""
        if self._logs:
            report = found.privacy
            for log in self._logs:
                log.end(report)


class _Between:
    """What `fit` does between two steps: progress, checkpoints, logs, and stopping on Ctrl-C."""

    def __init__(
        self,
        run: Run,
        session: Session,
        logger: _EpochLogger,
        progress: Progress,
        interrupt: Interrupt,
    ) -> None:
        self._run, self._folder, self._every = run, session.folder, session.checkpoint_every
        self._logger, self._progress, self._interrupt = logger, progress, interrupt

    def __call__(self, t: int) -> None:
        run, settings = self._run, self._run.settings
        self._progress(t, f"epoch {math.ceil(t / settings.epoch)}")
        # Asked once: Ctrl-C may come at any moment, and what is said to be saved must be.
        stop = run.ranks.stops(self._interrupt.came, t)
        if self._folder is not None and (
            stop or settings.ends(t) or (self._every and t % self._every == 0)
        ):
            run.save(self._folder)
        self._logger()
        if stop:
            self._progress.close()
            if run.ranks.leads:
                _say_saved(self._folder, t, settings.steps)
            raise KeyboardInterrupt


# --- before training ----------------------------------------------------------------------------


def _prepare(model: nn.Module, data: Any, config: TrainConfig, ranks: Processes | None) -> Run:
    """A run, everything checked."""
    data = as_dataset(data)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r}; it must be a torch.nn.Module.")
    if not (ranks is None or isinstance(ranks, Processes)):
        raise TypeError(
            f"ranks is {ranks!r}; it must be evenclip.Ranks(), or be left out for one process."
        )
    model, place = _placed(model, config.device)
    together = Alone() if ranks is None else ranks
    settings = config.settings(model, together.rows(len(data)).n, data.K)
    data = _checked(model, config.loss, data.to(place), config.rule, place)
    return Run(model, data, settings, config, place, together)


def _placed(model: nn.Module, device: str | torch.device | None) -> tuple[nn.Module, torch.device]:
    """A copy of the model on the device, in training mode."""
    first = next(model.parameters(), None)
    try:
        given = device if device is not None else first.device if first is not None else "cpu"
        place = torch.device(given)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; torch says: {error}") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device is {str(place)!r} and torch {torch.__version__} finds no CUDA device; pass "
            "device='cpu', or install a CUDA build of torch and its driver."
        )
    return copy.deepcopy(model).to(place).train(), place


def _checked(
    model: nn.Module, loss: Loss, data: Dataset | Streamed, rule: Rule, place: torch.device
) -> Dataset | Streamed:
    """The data, if this model, loss and rule can be trained on them; those not read yet are checked
    as they are.
    """
    some = data.take(
        torch.arange(min(3, len(data)), device=place if isinstance(data, Dataset) else "cpu")
    )
    if rule.uses_groups and some.group is None:
        raise ValueError(
            f"{rule.name} needs every sample's group and the data have none; pass (x, y, group), "
            "or choose a rule that does not use group labels, such as DPSGDGlobalAdapt."
        )
    refuse_stateful(model)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), torch.no_grad():
        output = _tried(
            f"The model does not take this input, of shape {_shapes(some.x)}", call, model, some.x
        )
        known = _known_labels(output, loss, some.y)
        if known is not None:
            _check_labels(data.y if isinstance(data, Dataset) else some.y, *known)
        _tried(
            f"The loss does not take the model's output, of shape {_shapes(output)}, with these "
            f"targets, of shape {_shapes(some.y)}",
            per_sample(loss), output, some.y,
        )  # fmt: skip
    return data if known is None or isinstance(data, Dataset) else data.labelled(*known)


def _tried(complaint: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), or else the complaint and what torch has to say."""
    try:
        with warnings.catch_warnings():
            # torch only warns where a loss stretches targets [sample] over outputs [sample, 1],
            # which mixes samples.
            warnings.filterwarnings("error", message="Using a target size")
            return function(*arguments)
    except (RuntimeError, TypeError, IndexError, ValueError, UserWarning) as error:
        raise ValueError(f"{complaint}; torch says: {error}") from error


def _known_labels(output: Any, loss: Loss, y: Any) -> tuple[int, int] | None:
    """How many labels the model knows, and which one the loss ignores; None where y is no class
    label.
    """
    if not (loss is cross_entropy or isinstance(loss, nn.CrossEntropyLoss)):
        return None
    if not isinstance(output, Tensor) or output.ndim < 2 or y.is_floating_point():
        return None
    return output.shape[1], int(getattr(loss, "ignore_index", -100))


def _check_labels(y: Tensor, outputs: int, ignored: int) -> None:
    """Raise for class labels that the model has no output for."""
    labels = y[y != ignored]
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= outputs):
        raise ValueError(
            f"The labels run from {int(labels.min())} to {int(labels.max())} and the model has "
            f"{outputs} outputs, for the labels 0 to {outputs - 1}; number the classes from 0, or "
            "give the model more outputs."
        )


def _shapes(x: Any) -> str:
    """The shapes of inputs, outputs or targets, with the sample axis named."""
    if isinstance(x, Tensor):
        return f"[sample{''.join(f', {size}' for size in x.shape[1:])}] and dtype {x.dtype}"
    if not isinstance(x, dict | tuple | list):
        return f"a {type(x).__name__}"
    items = x.items() if isinstance(x, dict) else enumerate(x)
    return "; ".join(f"{name}: {_shapes(value)}" for name, value in items)


def _start(run: Run, folder: Path | None, resume: bool) -> None:
    """From the beginning, or from the folder's last checkpoint."""
    last = None if folder is None else run.ranks.first(checkpoints.latest(folder))
    if resume and folder is None:
        raise ValueError(
            "resume=True needs the folder with the checkpoint; pass checkpoint=DIR too."
        )
    if folder is not None and last is None and run.ranks.leads:
        _make(folder)
    if last is None:
        return
    if not resume:
        raise CheckpointError(
            f"{folder} already holds a checkpoint ({last.name}); pass resume=True to go on from "
            "it, or choose another folder."
        )
    run.restore(last)


def _make(folder: Path) -> None:
    """The folder for checkpoints; better refused now than after the first epoch."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot hold checkpoints ({error.strerror}); choose another folder."
        ) from error


def _say_saved(folder: Path | None, t: int, steps: int) -> None:
    """What became of an interrupted run."""
    if folder is None:
        print(
            f"Stopped after step {t} of {steps}; nothing was saved (no checkpoint folder was "
            "given).",
            file=sys.stderr,
        )
    else:
        print(
            f"Stopped after step {t} of {steps}, saved in {folder}; go on with resume=True.",
            file=sys.stderr,
        )
