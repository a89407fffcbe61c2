"""Training: `fit` and what it returns.

`fit` fixes the public constants before it looks at anything (B = batch size, q = B/n, T = epochs · ⌈n/B⌉), then takes
T steps of `evenclip.step`. Three kinds of value come out of it: what may be published (`Result.model`, `.ledger`, the
rule's state); what a checkpoint needs besides and nobody else may have (`evenclip.checkpoint`); and what was seen
(`Result.trace`, observers), which is private.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from evenclip import check, checkpoint, privacy
from evenclip.checkpoint import Checkpoint, CheckpointError
from evenclip.data import Dataset, MapDataset, as_dataset
from evenclip.gradients import AnyTape, WholeTape, plan
from evenclip.gradients.losses import Loss
from evenclip.gradients.tape import call
from evenclip.progress import Interrupt, Progress
from evenclip.release import Ledger, Noise, Releases
from evenclip.rules import DPSGDGlobalAdapt, Guarded, Rule
from evenclip.sampling import Poisson, Sampler, Shuffled, chunks, roomy
from evenclip.step import Chunk, Step, step
from evenclip.trace import Trace

__all__ = ["Performance", "Result", "Settings", "fit"]

Observer = Callable[[Step], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Performance:
    """How a run is computed. Changing these must not change what it is.

    Attributes:
        chunk: most samples that go through the model at once; None: the whole batch.
        pad: whether chunks are filled up to one size, so that shapes never change.
        compile: whether the passes through the model are compiled (implies `pad`); plain where there is no compiler.
    """

    chunk: int | None = None
    pad: bool = False
    compile: bool = False


@dataclass(frozen=True)
class Settings:
    """The public constants of a run, fixed before training. Neighbouring datasets are trained with the same ones.

    Attributes:
        rule: the clipping rule.
        n: number of records (an access to the data that ε does not cover).
        groups: number of groups K.
        q: Poisson rate; None for shuffled batches.
        B: expected batch size, what sums are divided by.
        steps: T.
        epoch: steps in an epoch.
        delta: δ.
        lr: learning rate.
        optimizer: name of the optimiser's class.
        seed: what was given; None: taken from the operating system and not kept.
        parameters: number of trainable ones.
    """

    rule: Rule
    n: int
    groups: int
    q: float | None
    B: float
    steps: int
    epoch: int
    delta: float
    lr: float
    optimizer: str
    seed: int | None
    parameters: int

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        rule = {"class": type(self.rule).__qualname__, "name": self.rule.name, "repr": repr(self.rule)}
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "rule"} | {"rule": rule}


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
    data = as_dataset(data)
    rule = DPSGDGlobalAdapt() if rule is None else rule
    performance = performance or Performance()
    model, place = _placed(model, device)
    settings = _settings(model, data, rule, epochs, batch_size, lr, delta, seed, optimizer, q, steps)
    _check_inputs(model, loss, data, rule, place)
    run = _Run(model, data.to(place), loss, settings, optimizer, scheduler, performance, place)
    folder = None if checkpoint is None else Path(checkpoint)
    _start(run, folder, resume)
    return run.train(folder, checkpoint_every, observers, Progress(settings.steps, progress))


class _Run:
    """Everything that changes while a model is trained."""

    def __init__(
        self,
        model: nn.Module,
        data: Dataset | MapDataset,
        loss: Loss,
        settings: Settings,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[[Optimizer], Any] | None,
        performance: Performance,
        device: torch.device,
    ) -> None:
        self.model, self.data, self.settings, self.device = model, data, settings, device
        self.guard = Guarded(settings.rule)
        self.performance = replace(performance, pad=performance.pad or performance.compile)
        self.state = settings.rule.init(settings.groups).to(device)
        self.ledger, self.trace, self.t = Ledger(), Trace(settings.groups), 0
        self.tape = _tape(model, loss, data, performance)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer(self.parameters, lr=settings.lr)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        streams = _streams(settings)
        self.sampler = _sampler(settings, streams["batches"])
        self.noise = Noise(streams["noise"])
        self.dropout = int(streams["dropout"].generate_state(1, np.uint64)[0] >> 1)
        none = torch.zeros(0, dtype=torch.float64, device=device)
        self.counts = len(self.guard.statistics(none, none.long(), self.state, None))
        _check_counts(settings.rule, self.counts)

    def train(
        self, folder: Path | None, every: int | None, observers: Sequence[Observer], progress: Progress
    ) -> Result:
        """Take the remaining steps."""
        settings, records = self.settings, list[dict[str, Any]]()
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self.tape.listening(), Interrupt() as interrupt:
            while self.t < settings.steps:
                found = self.step()
                for observer in observers:
                    records.append({"t": self.t, **(observer(found) or {})})
                self.update(found)
                progress(self.t, self._note(found))
                ended = self.t % settings.epoch == 0 or self.t == settings.steps
                if folder is not None and (ended or interrupt.came or (every and self.t % every == 0)):
                    self.save(folder)
                if interrupt.came:
                    progress.close()
                    _say_saved(folder, self.t, settings.steps)
                    raise KeyboardInterrupt
        progress.close()
        self.model.zero_grad(set_to_none=True)
        return Result(self.model, settings, self.ledger, self.state.cpu(), self.trace.rows, records)

    def step(self) -> Step:
        """Draw a batch, take one step of Algorithm 2, write the ledger."""
        batch = self.sampler.next()
        release = Releases(self._draw())
        found = step(self.tape, self.guard, self.state, self._chunks(batch), self.sampler.expected_size(batch), release)
        self.ledger.write(self.sampler.q, release.multipliers)
        return replace(found, t=self.t)

    def update(self, found: Step) -> None:
        """Publish: move the parameters along the noisy gradient, carry the rule's state on."""
        pieces = self.tape.layout.split(found.public.gradient).values()
        for parameter, gradient in zip(self.parameters, pieces, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.state = found.public.state
        self.t += 1
        self.trace.add(found.losses, found.norms, found.clipped, found.group, found.clamped, found.finite)
        if self.t % self.settings.epoch == 0 or self.t == self.settings.steps:
            self.trace.close(self.state, float(found.public.sensitivity))
            if self.scheduler is not None:
                self.scheduler.step()

    def _draw(self) -> dict[str, Tensor]:
        """This step's noise, drawn in one go."""
        if self.settings.rule.sigma == 0 and self.counts == 0:
            return {}
        layout = self.tape.layout
        drawn = self.noise.normal(self.counts + layout.size, layout.blank.dtype).to(self.device)
        return {"count": drawn[: self.counts], "gradient": drawn[self.counts :]}

    def _chunks(self, batch: Tensor) -> list[Chunk]:
        """The batch as the performance settings want it."""
        size = self.performance.chunk
        if self.performance.pad and size is None:
            size = roomy(self.settings.B)
        pieces = chunks(batch, size, self.performance.pad)
        return [self._chunk(rows, real, i) for i, (rows, real) in enumerate(pieces)]

    def _chunk(self, rows: Tensor, real: Tensor | None, i: int) -> Chunk:
        x, y, group = self.data.take(rows.to(self.device) if isinstance(self.data, Dataset) else rows)
        if group is None:
            group = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        # Odd multipliers: every (step, chunk) of a run has a seed of its own.
        seed = (self.dropout + 0x9E3779B97F4A7C15 * (self.t + 1) + 0xC2B2AE3D27D4EB4F * i) % 2**63
        return Chunk(x, y, group, None if real is None else real.to(self.device), seed)

    def _note(self, found: Step) -> str:
        """What the progress line says: only what is public."""
        epoch = min((self.t - 1) // self.settings.epoch + 1, math.ceil(self.settings.steps / self.settings.epoch))
        del found
        return f"epoch {epoch}"

    # --- checkpoints ---

    def save(self, folder: Path) -> None:
        """Write a checkpoint of this moment."""
        published = {
            "settings": self.settings.to_json(),
            "t": self.t,
            "state": self.state.tolist(),
            "ledger": self.ledger.to_json(),
        }
        secret = {
            "noise": self.noise.state(),
            "batches": self.sampler.state(),
            "dropout": self.dropout,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "trace": self.trace.state(),
        }
        checkpoint.save(folder, self.t, Checkpoint(self.model.state_dict(), published, secret))

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint, if it is one of this very run."""
        found = checkpoint.load(path)
        _refuse_foreign(path, found.published["settings"], json.loads(json.dumps(self.settings.to_json())))
        self.model.load_state_dict(found.model)
        self.t = found.published["t"]
        self.state = torch.tensor(found.published["state"], dtype=self.state.dtype, device=self.device)
        self.ledger = Ledger.from_json(found.published["ledger"])
        secret = found.secret
        self.noise.set_state(secret["noise"])
        self.sampler.set_state(secret["batches"])
        self.dropout = secret["dropout"]
        self.optimizer.load_state_dict(secret["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(secret["scheduler"])
        self.trace.set_state(secret["trace"])


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


def _check_counts(rule: Rule, counts: int) -> None:
    """Raise for a rule that counts and does not say with how much noise."""
    if counts and not rule.sigma_count:
        raise ValueError(
            f"{rule.name} has a statistic of {counts} numbers and no sigma_count; give it the noise "
            "multiplier of that release."
        )


def _shapes(x: Any) -> str:
    """The shapes of an input, with the sample axis named."""
    if isinstance(x, Tensor):
        return f"[sample{''.join(f', {size}' for size in x.shape[1:])}] and dtype {x.dtype}"
    items = x.items() if isinstance(x, dict) else enumerate(x)
    return "; ".join(f"{name}: {_shapes(value)}" for name, value in items)


def _tape(model: nn.Module, loss: Loss, data: Dataset | MapDataset, performance: Performance) -> AnyTape:
    """The model taken apart, after a look at three samples."""
    device = next(model.parameters()).device
    some = data.take(torch.arange(min(3, len(data)), device=device if isinstance(data, Dataset) else "cpu"))
    tape = plan(model, loss, some.x, some.y)
    if not performance.compile or isinstance(tape, WholeTape):
        return tape
    from evenclip.gradients.compiled import CompiledTape  # torch.compile's machinery takes long to import

    return CompiledTape(tape)


def _sampler(settings: Settings, seed: np.random.SeedSequence) -> Sampler:
    """Poisson samples, or shuffled batches for a rule that promises nothing."""
    if settings.q is None:
        return Shuffled(settings.n, int(settings.B), seed)
    return Poisson(settings.n, settings.q, settings.B, seed)


def _streams(settings: Settings) -> dict[str, np.random.SeedSequence]:
    """A random stream for each purpose, of this run alone: two models that shared noise would cancel it.

    The seed is mixed with the specification, so that two rules, or two settings of one, never draw the same numbers.
    """
    specification = hashlib.sha256(json.dumps(settings.to_json(), sort_keys=True).encode()).digest()
    entropy = np.random.SeedSequence().entropy if settings.seed is None else settings.seed
    assert isinstance(entropy, int)
    if entropy < 0:
        raise ValueError(f"seed is {entropy}; it must be a whole number of at least 0.")
    words = [entropy, int.from_bytes(specification[:16])]
    purposes = ("batches", "noise", "dropout")
    return {purpose: np.random.SeedSequence(words, spawn_key=(i,)) for i, purpose in enumerate(purposes)}


def _start(run: _Run, folder: Path | None, resume: bool) -> None:
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


def _refuse_foreign(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise unless the checkpoint was written by a run with these very settings."""
    differ = [
        f"{name}: {theirs.get(name)!r} there, {ours[name]!r} here" for name in ours if theirs.get(name) != ours[name]
    ]
    if differ:
        raise CheckpointError(
            f"{path} belongs to another run ({'; '.join(differ)}). Resume with the settings it was started "
            "with, or choose "
            "another folder."
        )


def _say_saved(folder: Path | None, t: int, steps: int) -> None:
    """What became of an interrupted run."""
    if folder is None:
        print(
            f"Stopped after step {t} of {steps}; nothing was saved (no checkpoint folder was given).", file=sys.stderr
        )
    else:
        print(f"Stopped after step {t} of {steps}, saved in {folder}; go on with resume=True.", file=sys.stderr)
