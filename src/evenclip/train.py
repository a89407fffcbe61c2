"""Training: `fit` and what it returns.

`fit` fixes the public constants before it looks at anything (B = batch size, q = B/n, T = epochs · ⌈n/B⌉), then takes
T steps of `evenclip.step`. Three kinds of value come out of it: what may be published (`Result.model`, `.ledger`, the
rule's state); what a checkpoint needs besides and nobody else may have (`evenclip.checkpoint`); and what was seen
(`Result.trace`, observers), which is private.
"""

from __future__ import annotations

import copy
import logging
import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from evenclip import check, checkpoint, privacy
from evenclip.accounting import default_delta
from evenclip.checkpoint import CheckpointError
from evenclip.data import Dataset, Streamed, as_dataset
from evenclip.gradients.losses import Loss, per_sample
from evenclip.gradients.plan import refuse_stateful
from evenclip.gradients.tape import call
from evenclip.logs.log import Log, flat
from evenclip.progress import Interrupt, Progress
from evenclip.ranks import Alone, AnyRanks, Ranks
from evenclip.release import Ledger
from evenclip.rules import DPSGDGlobalAdapt, Rule
from evenclip.run import Performance, Run, Settings, trying
from evenclip.step import Step

if TYPE_CHECKING:
    from evenclip.stack import Stack

__all__ = ["Result", "fit", "prepare", "reeled", "result"]

_log = logging.getLogger(__name__)

Observer = Callable[[Step], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Result:
    """A trained model, what it cost in privacy, and what training looked like.

    Attributes:
        model: the trained copy. May be published.
        settings: the public constants.
        ledger: what was released. May be published.
        state: the rule's final state: Z, or the C_k. May be published.
        trace: one row per epoch; see `evenclip.trace`. Private.
        records: what the observers returned, step by step. Private.
        tf32: whether a GPU was allowed to round the operands of products.
        uncovered: looks at the data before training that ε does not cover, where it is known that there were any.
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
        """ε at δ for releasing this model and all that is public about its training; None where none is valid."""
        return privacy.epsilon(self.settings, self.ledger, accountant, delta)

    @cached_property
    def privacy(self) -> dict[str, Any]:
        """Everything that a privacy report must state; `evenclip.privacy.paragraph` puts it in words."""
        return privacy.report(self.settings, self.ledger, self.trace, tf32=self.tf32, uncovered=self.uncovered)


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
    ranks: Ranks | None = None,
) -> Result:
    """Train a copy of the model privately, by the given rule.

    Args:
        model: any module whose samples do not influence each other; it is copied and left as it was.
        data: (x, y) or (x, y, group) of tensors or arrays, a `Dataset`, a map-style torch dataset, or what
            `evenclip.data.parquet` opened.
        rule: how gradients are clipped; `DPSGDGlobalAdapt()` unless given.
        loss: loss(output, y); averaging, summing or per sample.
        epochs: T = epochs · ⌈n/B⌉ steps.
        batch_size: B, the expected batch size.
        lr: learning rate, handed to the optimiser.
        delta: δ; the largest power of ten below 1/(2n) unless given.
        seed: fixes batches, noise and dropout, so that whoever knows it can subtract the noise; from the operating
            system unless given.
        device: where to train; where the model is unless given.
        optimizer: called as optimizer(parameters, lr=lr). What it does with noisy gradients costs no privacy.
        scheduler: called as scheduler(optimizer), then `.step()` after every epoch.
        checkpoint: folder for checkpoints: after every epoch, every `checkpoint_every` steps, and on Ctrl-C.
        checkpoint_every: steps between checkpoints.
        resume: go on from the folder's last checkpoint, if there is one.
        observers: called with every `Step` before the update; what they return is collected in `Result.records`, from
            where this call took over.
        logs: told about every epoch when it has ended, and the privacy report at the end; see `evenclip.logs`.
        q: Poisson rate, batch_size/n unless given; an epoch is then round(1/q) steps.
        steps: T, instead of epochs.
        performance: how it is computed, which does not change what comes out.
        progress: whether to show progress; on a terminal unless given.
        ranks: `Ranks()` where `torchrun` has started several processes that train this model together; see
            `evenclip.ranks`. Observers see what their own rank computes; logs and progress are rank 0's.

    Raises:
        ValueError: for anything that cannot be trained privately as given; the message says what to do.
        KeyboardInterrupt: on Ctrl-C, after the step under way (and the checkpoint).
    """
    run = prepare(
        model, data, rule=rule, loss=loss, epochs=epochs, batch_size=batch_size, lr=lr, delta=delta, seed=seed,
        device=device, optimizer=optimizer, scheduler=scheduler, q=q, steps=steps, performance=performance,
        ranks=ranks,
    )  # fmt: skip
    folder = None if checkpoint is None else Path(checkpoint)
    if checkpoint_every is not None:
        check.natural(checkpoint_every=checkpoint_every)
    _start(run, folder, resume)
    leads = run.ranks.leads
    told = _Told(run, logs if leads else ())
    shown = Progress(run.settings.steps, progress if leads else False)
    records = _train(run, folder, checkpoint_every, observers, told, shown)
    found = result(run, records)
    for trained, given in zip(found.model.modules(), model.modules(), strict=True):
        trained.training = given.training
    told.end(found)
    return found


def result(run: Run, records: Sequence[dict[str, Any]] = ()) -> Result:
    """What came of a run, which ends with this."""
    run.close()
    tf32 = run.performance.tf32 and run.device.type == "cuda"
    looks = () if isinstance(run.data, Dataset) else run.data.uncovered
    return Result(run.model, run.settings, run.ledger, run.state.cpu(), run.trace.rows, list(records), tf32, looks)


def prepare(
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
    q: float | None = None,
    steps: int | None = None,
    performance: Performance | None = None,
    ranks: Ranks | None = None,
) -> Run:
    """A run that has not begun, everything checked: for a training loop of one's own.

    The arguments are those of `fit`, which is

        with run.listening():
            while run.t < run.settings.steps:
                run.update(run.step())
    """
    data = as_dataset(data)
    rule = DPSGDGlobalAdapt() if rule is None else rule
    _check_kinds(model, rule, optimizer, scheduler, ranks)
    model, place = _placed(model, device)
    together: AnyRanks = Alone() if ranks is None else ranks
    n = together.rows(len(data)).n
    settings = _settings(model, n, data.K, rule, epochs, batch_size, lr, delta, seed, optimizer, q, steps)
    data = data.to(place)
    performance = performance or Performance()
    with trying(performance, place, together):
        data = _checked(model, loss, data, rule, place)
    return Run(model, data, loss, settings, optimizer, scheduler, performance, place, together)


def _train(
    run: Run, folder: Path | None, every: int | None, observers: Sequence[Observer], told: _Told, progress: Progress
) -> list[dict[str, Any]]:
    """Take the remaining steps; what the observers returned."""
    watched, steps = _Watched(run, observers), run.settings.steps
    taking = watched if observers else reeled(run) or watched
    with taking.listening(), Interrupt() as interrupt:
        while taking.t < steps:
            taking.step()
            t = taking.t
            progress(t, f"epoch {math.ceil(t / run.settings.epoch)}")
            # Asked once: it may come at any moment, and what is said to be saved must be.
            stop = run.ranks.stops(interrupt.came, t)
            if folder is not None and (stop or run.settings.ends(t) or (every and t % every == 0)):
                taking.hand_over()
                run.save(folder)
            told()
            if stop:
                progress.close()
                if run.ranks.leads:
                    _say_saved(folder, t, steps)
                raise KeyboardInterrupt
    told()  # a stack tells its runs late
    progress.close()
    return watched.records


class _Told:
    """Tells logs the epochs that they do not know yet: those that end while this is there."""

    def __init__(self, run: Run, logs: Sequence[Log]) -> None:
        self._run, self._logs, self._known = run, logs, len(run.trace.rows)
        self._groups = run.data.group_names

    def __call__(self) -> None:
        for row in self._run.trace.rows[self._known :]:
            self._known += 1
            for log in self._logs:
                log.epoch(row["epoch"], flat(row, self._groups))

    def end(self, found: Result) -> None:
        """With the privacy report."""
        if self._logs:
            report = found.privacy
            for log in self._logs:
                log.end(report)


class _Watched:
    """The steps of a run, each shown to its observers before the update; otherwise as a `Stack` has them."""

    def __init__(self, run: Run, observers: Sequence[Observer]) -> None:
        self._run, self._observers, self.records = run, observers, list[dict[str, Any]]()

    @property
    def t(self) -> int:
        return self._run.t

    def listening(self) -> AbstractContextManager[Any]:
        return self._run.listening()

    def step(self) -> None:
        found = self._run.step()
        self.records += [{"t": self.t, **(observer(found) or {})} for observer in self._observers]
        self._run.update(found)

    def hand_over(self) -> None:
        """The run has everything already."""


def reeled(run: Run) -> Stack | None:
    """A compiled run on a GPU that nobody watches step by step, as a stack of one: its batches lie on the GPU, epoch by
    epoch, and a step is one launch. None where that cannot be done.
    """
    if not run.performance.compile or run.device.type == "cpu" or run.performance.chunk is not None:
        return None
    if run.ranks.world > 1:
        _log.debug("not on a reel: several ranks")
        return None
    from evenclip.program import NoProgram
    from evenclip.stack import Stack

    try:
        return Stack([run], compile=True)
    except NoProgram as error:
        _log.debug("not on a reel: %s", error)
        return None


# --- before training -------------------------------------------------------------------------------------------------


def _settings(
    model: nn.Module, n: int, K: int, rule: Rule, epochs: int, batch_size: int, lr: float, delta: float | None,
    seed: int | None, optimizer: Callable[..., Optimizer], q: float | None, steps: int | None,
) -> Settings:  # fmt: skip
    """The public constants of the run, as Python's own numbers: numpy's are not written to JSON."""
    check.natural(epochs=epochs, batch_size=batch_size)
    check.positive(lr=lr)
    epochs, batch_size = int(epochs), int(batch_size)
    if q is None or not rule.poisson:
        if rule.poisson and batch_size > n:
            raise ValueError(
                f"batch_size is {batch_size} and there are {n} records, so the sampling rate q = batch_size/n "
                f"would be above 1; choose a batch_size of at most {n}."
            )
        q, epoch = batch_size / n, math.ceil(n / batch_size)
    else:
        check.fraction(q=q)
        q, epoch = float(q), round(1 / q)
    if steps is not None:
        check.natural(steps=steps)
    return Settings(
        rule=rule, n=n, groups=K, q=q if rule.poisson else None, B=float(batch_size), epoch=epoch,
        steps=epochs * epoch if steps is None else int(steps), delta=_delta(delta, n), lr=float(lr),
        optimizer=_name(optimizer), seed=_seed(seed),
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )  # fmt: skip


def _name(optimizer: Callable[..., Any]) -> str:
    """What to call an optimiser: its class, with what a `functools.partial` has filled in."""
    if isinstance(optimizer, partial):
        return f"{_name(optimizer.func)}({', '.join(f'{k}={v!r}' for k, v in optimizer.keywords.items())})"
    return str(getattr(optimizer, "__name__", type(optimizer).__name__))


def _delta(delta: float | None, n: int) -> float:
    """δ, with a warning where it promises next to nothing."""
    if delta is None:
        return default_delta(n)
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; it must lie between 0 and 1, well below 1/n = {1 / n:.1e}.")
    if delta >= 1 / n:
        warnings.warn(
            f"delta is {delta:g}, not below 1/n = {1 / n:.1e}: publishing one whole record would satisfy it. "
            f"Choose at most {default_delta(n):g}.",
            stacklevel=5,  # whoever called fit
        )
    return float(delta)


def _seed(seed: int | None) -> int | None:
    """The seed as a number of Python's own."""
    if seed is not None and (not isinstance(seed, SupportsIndex) or operator.index(seed) < 0):
        raise ValueError(f"seed is {seed}; it must be a whole number of at least 0.")
    return None if seed is None else operator.index(seed)


def _check_kinds(model: Any, rule: Any, optimizer: Any, scheduler: Any, ranks: Any) -> None:
    """Raise for the usual mix-ups of a class and its instance."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r}; it must be a torch.nn.Module.")
    if not (isinstance(rule, Rule) and is_dataclass(type(rule))):
        raise TypeError(
            f"rule is {rule!r}; it must be a rule such as DPSGDGlobalAdapt(C0=1.0, sigma=1.0), or a frozen dataclass "
            "that derives from evenclip.Rule."
        )
    if not (ranks is None or isinstance(ranks, Ranks)):
        raise TypeError(f"ranks is {ranks!r}; it must be evenclip.Ranks(), or be left out for one process.")
    for name, given, example in (
        ("optimizer", optimizer, "torch.optim.Adam or functools.partial(torch.optim.SGD, momentum=0.9)"),
        ("scheduler", scheduler, "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)"),
    ):
        if given is not None and not callable(given):
            raise TypeError(
                f"{name} is an object of class {type(given).__name__}; give what makes one, such as {example}, because "
                "the model that is trained is a copy."
            )


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
            f"device is {str(place)!r} and torch {torch.__version__} finds no CUDA device; pass device='cpu', "
            "or install a CUDA build of torch and its driver."
        )
    return copy.deepcopy(model).to(place).train(), place


def _checked(
    model: nn.Module, loss: Loss, data: Dataset | Streamed, rule: Rule, place: torch.device
) -> Dataset | Streamed:
    """The data, if this model, loss and rule can be trained on them; those not read yet are checked as they are."""
    some = data.take(torch.arange(min(3, len(data)), device=place if isinstance(data, Dataset) else "cpu"))
    if rule.uses_groups and some.group is None:
        raise ValueError(
            f"{rule.name} needs every sample's group and the data have none; pass (x, y, group), or choose a "
            "rule that does not use group labels, such as DPSGDGlobalAdapt."
        )
    refuse_stateful(model)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), torch.no_grad():
        output = _tried(f"The model does not take this input, of shape {_shapes(some.x)}", call, model, some.x)
        known = _known_labels(output, loss, some.y)
        if known is not None:
            _check_labels(data.y if isinstance(data, Dataset) else some.y, *known)
        _tried(
            f"The loss does not take the model's output, of shape {_shapes(output)}, with these targets, of shape "
            f"{_shapes(some.y)}",
            per_sample(loss), output, some.y,
        )  # fmt: skip
    return data if known is None or isinstance(data, Dataset) else data.labelled(*known)


def _tried(complaint: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), or else the complaint and what torch has to say."""
    try:
        with warnings.catch_warnings():
            # torch only warns where a loss stretches targets [sample] over outputs [sample, 1], which mixes samples.
            warnings.filterwarnings("error", message="Using a target size")
            return function(*arguments)
    except (RuntimeError, TypeError, IndexError, ValueError, UserWarning) as error:
        raise ValueError(f"{complaint}; torch says: {error}") from error


def _known_labels(output: Any, loss: Loss, y: Any) -> tuple[int, int] | None:
    """How many labels the model knows, and which one the loss ignores; None where y is no class label."""
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
            f"{outputs} outputs, for the labels 0 to {outputs - 1}; number the classes from 0, or give the model more "
            "outputs."
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
    last = None if folder is None else run.ranks.first(checkpoint.latest(folder))
    if resume and folder is None:
        raise ValueError("resume=True needs the folder with the checkpoint; pass checkpoint=DIR too.")
    if folder is not None and last is None and run.ranks.leads:
        _make(folder)
    if last is None:
        return
    if not resume:
        raise CheckpointError(
            f"{folder} already holds a checkpoint ({last.name}); pass resume=True to go on from it, or choose "
            "another folder."
        )
    run.restore(last)


def _make(folder: Path) -> None:
    """The folder for checkpoints; better refused now than after the first epoch."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot hold checkpoints ({error.strerror}); choose another folder.") from error


def _say_saved(folder: Path | None, t: int, steps: int) -> None:
    """What became of an interrupted run."""
    if folder is None:
        print(
            f"Stopped after step {t} of {steps}; nothing was saved (no checkpoint folder was given).", file=sys.stderr
        )
    else:
        print(f"Stopped after step {t} of {steps}, saved in {folder}; go on with resume=True.", file=sys.stderr)
