"""Training: `fit` and what it returns.

`fit` fixes the public constants before it looks at anything (B = batch size, q = B/n, T = epochs · ⌈n/B⌉), then takes
T steps of `evenclip.step`. Three kinds of value come out of it: what may be published (`Result.model`, `.ledger`, the
rule's state); what a checkpoint needs besides and nobody else may have (`evenclip.checkpoint`); and what was seen
(`Result.trace`, observers), which is private.
"""

from __future__ import annotations

import copy
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from evenclip import check, checkpoint, privacy
from evenclip.checkpoint import CheckpointError
from evenclip.data import Dataset, MapDataset, as_dataset
from evenclip.gradients.losses import Loss
from evenclip.gradients.tape import call
from evenclip.progress import Interrupt, Progress
from evenclip.release import Ledger
from evenclip.rules import DPSGDGlobalAdapt, Rule
from evenclip.run import Performance, Run, Settings
from evenclip.step import Step

__all__ = ["Result", "fit", "prepare"]

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
    """

    model: nn.Module
    settings: Settings
    ledger: Ledger
    state: Tensor
    trace: list[dict[str, Any]] = field(repr=False)
    records: list[dict[str, Any]] = field(repr=False)

    def epsilon(self, accountant: str = "pld", delta: float | None = None) -> float | None:
        """ε at δ for the release of this model and everything public about its training; None if there is no valid
        one.
        """
        from evenclip import accounting

        return accounting.epsilon(self.ledger, self.settings.delta if delta is None else delta, accountant)

    @cached_property
    def privacy(self) -> dict[str, Any]:
        """Everything that a privacy report must state; `evenclip.privacy.paragraph` puts it in words."""
        return privacy.report(self.settings, self.ledger, self.trace)


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
    q: float | None = None,
    steps: int | None = None,
    performance: Performance | None = None,
    progress: bool | None = None,
) -> Result:
    """Train a copy of the model privately, by the given rule.

    Args:
        model: any module whose samples do not influence each other; it is copied and left as it was.
        data: (x, y) or (x, y, group) of tensors or arrays, a `Dataset`, or a map-style torch dataset.
        rule: how gradients are clipped; `DPSGDGlobalAdapt()` unless given.
        loss: loss(output, y); averaging, summing or per sample.
        epochs: T = epochs · ⌈n/B⌉ steps.
        batch_size: B, the expected batch size.
        lr: learning rate, handed to the optimiser.
        delta: δ; the largest power of ten below 1/(2n) unless given.
        seed: fixes batches, noise and dropout, so that whoever knows it can subtract the noise; from the operating
            system
            unless given.
        device: where to train; where the model is unless given.
        optimizer: called as optimizer(parameters, lr=lr). What it does with noisy gradients costs no privacy.
        scheduler: called as scheduler(optimizer), then `.step()` after every epoch.
        checkpoint: folder for checkpoints: after every epoch, every `checkpoint_every` steps, and on Ctrl-C.
        checkpoint_every: steps between checkpoints.
        resume: go on from the folder's last checkpoint, if there is one.
        observers: called with every `Step` before the update; what they return is collected in `Result.records`.
        q: Poisson rate, batch_size/n unless given; an epoch is then round(1/q) steps.
        steps: T, instead of epochs.
        performance: how it is computed, which does not change what comes out.
        progress: whether to show progress; on a terminal unless given.

    Raises:
        ValueError: for anything that cannot be trained privately as given; the message says what to do.
        KeyboardInterrupt: on Ctrl-C, after the step under way (and the checkpoint).
    """
    run = prepare(
        model, data, rule=rule, loss=loss, epochs=epochs, batch_size=batch_size, lr=lr, delta=delta, seed=seed,
        device=device, optimizer=optimizer, scheduler=scheduler, q=q, steps=steps, performance=performance,
    )  # fmt: skip
    folder = None if checkpoint is None else Path(checkpoint)
    _start(run, folder, resume)
    records = _train(run, folder, checkpoint_every, observers, Progress(run.settings.steps, progress))
    run.model.zero_grad(set_to_none=True)
    return Result(run.model, run.settings, run.ledger, run.state.cpu(), run.trace.rows, records)


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
) -> Run:
    """A run that has not begun, everything checked: for a training loop of one's own.

    The arguments are those of `fit`, which is

        with run.listening():
            while run.t < run.settings.steps:
                run.update(run.step())
    """
    data = as_dataset(data)
    rule = DPSGDGlobalAdapt() if rule is None else rule
    model, place = _placed(model, device)
    settings = _settings(model, data, rule, epochs, batch_size, lr, delta, seed, optimizer, q, steps)
    _check_inputs(model, loss, data, rule, place)
    return Run(model, data.to(place), loss, settings, optimizer, scheduler, performance or Performance(), place)


def _train(
    run: Run, folder: Path | None, every: int | None, observers: Sequence[Observer], progress: Progress
) -> list[dict[str, Any]]:
    """Take the remaining steps; what the observers returned."""
    records, steps = list[dict[str, Any]](), run.settings.steps
    with run.listening(), Interrupt() as interrupt:
        while run.t < steps:
            found = run.step()
            records += [{"t": run.t, **(observer(found) or {})} for observer in observers]
            run.update(found)
            progress(run.t, f"epoch {math.ceil(run.t / run.settings.epoch)}")
            if folder is not None and (run.ended or interrupt.came or (every and run.t % every == 0)):
                run.save(folder)
            if interrupt.came:
                progress.close()
                _say_saved(folder, run.t, steps)
                raise KeyboardInterrupt
    progress.close()
    return records


# --- before training
# -----------------------------------------------------------------------------------------------------


def _settings(
    model: nn.Module, data: Dataset | MapDataset, rule: Rule, epochs: int, batch_size: int, lr: float,
    delta: float | None, seed: int | None, optimizer: Callable[..., Optimizer], q: float | None, steps: int | None,
) -> Settings:  # fmt: skip
    """The public constants of the run."""
    n = len(data)
    check.natural(epochs=epochs, batch_size=batch_size)
    check.positive(lr=lr)
    if q is None or not rule.poisson:
        if rule.poisson and batch_size > n:
            raise ValueError(
                f"batch_size is {batch_size} and there are {n} records, so the sampling rate q = batch_size/n "
                "would be above 1; "
                f"choose a batch_size of at most {n}."
            )
        q, epoch = batch_size / n, math.ceil(n / batch_size)
    else:
        check.fraction(q=q)
        epoch = round(1 / q)
    if steps is not None:
        check.natural(steps=steps)
    return Settings(
        rule=rule, n=n, groups=data.K, q=q if rule.poisson else None, B=float(batch_size), epoch=epoch,
        steps=epochs * epoch if steps is None else steps, delta=_delta(delta, n), lr=float(lr),
        optimizer=_name(optimizer), seed=seed,
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
        return 10.0 ** (math.ceil(math.log10(1 / (2 * n))) - 1)
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; it must lie between 0 and 1, well below 1/n = {1 / n:.1e}.")
    if delta >= 1 / n:
        warnings.warn(
            f"delta is {delta:g}, not below 1/n = {1 / n:.1e}: publishing one whole record would satisfy it. "
            f"Choose at most {10.0 ** (math.ceil(math.log10(1 / (2 * n))) - 1):g}.",
            stacklevel=4,
        )
    return delta


def _placed(model: nn.Module, device: str | torch.device | None) -> tuple[nn.Module, torch.device]:
    """A copy of the model on the device, in training mode."""
    first = next(model.parameters(), None)
    place = torch.device(device) if device is not None else first.device if first is not None else torch.device("cpu")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device is {str(place)!r} and torch {torch.__version__} finds no CUDA device; pass device='cpu', "
            "or install a CUDA "
            "build of torch and its driver."
        )
    return copy.deepcopy(model).to(place).train(), place


def _check_inputs(model: nn.Module, loss: Loss, data: Dataset | MapDataset, rule: Rule, place: torch.device) -> None:
    """Raise for data that this model, loss or rule cannot be trained on."""
    some = data.take(torch.arange(min(3, len(data)))).to(place)
    if rule.uses_groups and some.group is None:
        raise ValueError(
            f"{rule.name} needs every sample's group and the data have none; pass (x, y, group), or choose a "
            "rule that does not "
            "use group labels, such as DPSGDGlobalAdapt."
        )
    state = torch.random.get_rng_state()
    try:
        with torch.no_grad():
            output = call(model, some.x)
    except (RuntimeError, TypeError, IndexError) as error:
        shapes = _shapes(some.x)
        raise ValueError(f"The model does not take this input, of shape {shapes}; torch says: {error}") from error
    finally:
        torch.random.set_rng_state(state)
    _check_labels(output, loss, data)


def _check_labels(output: Any, loss: Loss, data: Dataset | MapDataset) -> None:
    """Raise for class labels that the model has no output for."""
    if not (loss is cross_entropy or isinstance(loss, nn.CrossEntropyLoss)) or not isinstance(output, Tensor):
        return
    if isinstance(data, MapDataset) or data.y.is_floating_point() or output.ndim < 2:
        return
    ignored = getattr(loss, "ignore_index", -100)
    labels = data.y[data.y != ignored]
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= output.shape[1]):
        raise ValueError(
            f"The labels run from {int(labels.min())} to {int(labels.max())} and the model has "
            f"{output.shape[1]} outputs, for the "
            f"labels 0 to {output.shape[1] - 1}; number the classes from 0, or give the model more outputs."
        )


def _shapes(x: Any) -> str:
    """The shapes of an input, with the sample axis named."""
    if isinstance(x, Tensor):
        return f"[sample{''.join(f', {size}' for size in x.shape[1:])}] and dtype {x.dtype}"
    items = x.items() if isinstance(x, dict) else enumerate(x)
    return "; ".join(f"{name}: {_shapes(value)}" for name, value in items)


def _start(run: Run, folder: Path | None, resume: bool) -> None:
    """From the beginning, or from the folder's last checkpoint."""
    last = None if folder is None else checkpoint.latest(folder)
    if resume and folder is None:
        raise ValueError("resume=True needs the folder with the checkpoint; pass checkpoint=DIR too.")
    if last is None:
        return
    if not resume:
        raise CheckpointError(
            f"{folder} already holds a checkpoint ({last.name}); pass resume=True to go on from it, or choose "
            "another folder."
        )
    run.restore(last)


def _say_saved(folder: Path | None, t: int, steps: int) -> None:
    """What became of an interrupted run."""
    if folder is None:
        print(
            f"Stopped after step {t} of {steps}; nothing was saved (no checkpoint folder was given).", file=sys.stderr
        )
    else:
        print(f"Stopped after step {t} of {steps}, saved in {folder}; go on with resume=True.", file=sys.stderr)
