"""The settings of a training, and the public constants computed from them."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any, SupportsIndex

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from evenclip import check
from evenclip.arguments import check_fields, is_number, shown
from evenclip.gradients.losses import Loss
from evenclip.mechanism.accounting import check_delta, check_delta_of_steps, default_delta
from evenclip.mechanism.settings import Settings
from evenclip.rules import DPSGDGlobalAdapt, Rule, check_complete

__all__ = ["Performance", "TrainConfig"]

_MOST_EPOCH = 10**12  # steps
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_LISTED = ", ".join(map(repr, _MODES))


@dataclass(frozen=True)
class Performance:
    """How a run is computed, which does not change the mechanism.

    Attributes:
        chunk: largest number of samples that pass through the model at once; None: the whole batch.
        compile: whether to trace and compile the step; or a mode of `torch.compile`, such as
            "reduce-overhead" on a GPU. Compiling takes ten to twenty seconds, so it pays for long
            runs of small models. If it is not possible, a warning gives the reason and the plain
            step is used.
        tf32: whether a GPU may round the operands of products to 11 bits. Norms are enlarged to
            allow for it, and the privacy report states it.
        readers: number of processes that read items of a map-style torch dataset ahead of training.
    """

    chunk: int | None = None
    compile: bool | str = False
    tf32: bool = False
    readers: int = 0

    def __post_init__(self) -> None:
        check_fields(Performance, self)
        check.whole(readers=self.readers)
        if self.chunk is not None:
            check.natural(chunk=self.chunk)
        if isinstance(self.compile, str) and self.compile not in _MODES:
            raise ValueError(
                f"compile is {self.compile!r}; give True, False, or a mode of torch.compile: "
                f"{_LISTED}."
            )


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a training except the model and the data; they are keywords of `fit`.

    Attributes:
        rule: how gradients are clipped.
        loss: loss(output, y), as a mean, a sum, or one value per sample.
        epochs: T = epochs · ⌈n/B⌉ steps.
        batch_size: B, the expected batch size.
        lr: learning rate of the optimiser.
        delta: δ; None: the largest power of ten below 1/(2n).
        seed: determines batches, noise and dropout, together with everything else that the training
            computes with, so anyone who knows it can subtract the noise; it is not printed. None:
            they come from the operating system.
        device: where to train; None: where the model is.
        optimizer: called as optimizer(parameters, lr=lr).
        scheduler: called as scheduler(optimizer); its `step()` is called after every epoch.
        q: Poisson rate; None: batch_size/n. With q, an epoch has round(1/q) steps.
        steps: T, instead of epochs.
        records: public number of records N, from which q, T and δ are computed; None: that of the
            dataset, or else the real number, which ε does not cover. Ignored by rules without
            Poisson sampling.
        performance: how the run is computed, which does not change the mechanism.
        independence: None passes each sample through the model by itself, unless the types of the
            layers show that samples are independent, or torch cannot map the model; "tested"
            passes them together, and the privacy report says that independence was tested only.
    """

    rule: Rule = field(default_factory=DPSGDGlobalAdapt)
    loss: Loss = cross_entropy
    epochs: int = 1
    batch_size: int = 256
    lr: float = 0.1
    delta: float | None = None
    seed: int | None = field(default=None, repr=False)
    device: str | torch.device | None = None
    optimizer: Callable[..., Optimizer] = SGD
    scheduler: Callable[[Optimizer], Any] | None = None
    q: float | None = None
    steps: int | None = None
    records: int | None = None
    performance: Performance = Performance()
    independence: str | None = None

    def __post_init__(self) -> None:
        """Raise if a value is out of range, or a class is given instead of an instance."""
        rule = self.rule
        if not (isinstance(rule, Rule) and is_dataclass(type(rule))):
            raise TypeError(
                f"rule is {shown(rule)}; it must be a rule such as DPSGDGlobalAdapt(C0=1.0, "
                "sigma=1.0), or a frozen dataclass that derives from evenclip.Rule."
            )
        check_complete(type(rule))
        given = self.independence
        if given is not None and not (isinstance(given, str) and given == "tested"):
            raise ValueError(
                f'independence is {shown(given)}; give None, which is the default, or "tested".'
            )
        for name, example in (
            ("optimizer", "torch.optim.Adam or functools.partial(torch.optim.SGD, momentum=0.9)"),
            ("scheduler", "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)"),
        ):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise TypeError(
                    f"{name} is an object of class {type(given).__name__}; give a function that "
                    f"constructs one, such as {example}, because the model that is trained is a "
                    "copy."
                )
        check_fields(TrainConfig, self)
        check.natural(epochs=self.epochs, batch_size=self.batch_size)
        check.positive(lr=self.lr)
        check.finite(lr=self.lr)
        whole = {"steps": self.steps, "records": self.records}
        check.natural(**{name: value for name, value in whole.items() if value is not None})
        if self.q is not None:
            check.fraction(q=self.q)
        if self.delta is not None:
            check_delta(self.delta)
        if self.seed is not None:
            _seed(self.seed)

    def but(self, **changes: Any) -> TrainConfig:
        """Return a copy with these changes; None for `rule` or `performance` is the default."""
        known = ", ".join(self.__dataclass_fields__)
        unknown = next((name for name in changes if name not in self.__dataclass_fields__), None)
        if unknown is not None:
            raise TypeError(
                f"There is no setting {unknown!r}; the settings of a training are {known}."
            )
        defaults: dict[str, Callable[[], Any]] = {
            "rule": DPSGDGlobalAdapt,
            "performance": Performance,
        }
        given = {name: defaults[name]() for name in defaults if changes.get(name, 0) is None}
        return replace(self, **(changes | given))

    def settings(self, model: nn.Module, n: int, groups: int) -> Settings:
        """Return the public constants of a run on n records, or on the declared number of records.

        They are built-in numbers, because numpy's cannot be written to JSON.
        """
        declared = self.records is not None and self.rule.poisson
        if self.records is not None:
            n = int(self.records) if declared else n
        q, epoch = self._pace(n)
        steps = int(self.epochs) * epoch if self.steps is None else int(self.steps)
        if steps > check.MOST_STEPS:
            given = f"epochs is {self.epochs}" if self.steps is None else f"steps is {self.steps}"
            raise ValueError(
                f"{given}, with {epoch} steps per epoch (records ÷ batch_size, or 1 ÷ q); a run "
                f"has at most {check.MOST_STEPS} steps: give fewer."
            )
        delta = _delta(self.delta, n)
        if self.rule.bounded and self.rule.poisson and is_number(self.rule.sigma):
            check_delta_of_steps(delta, 1 if q == 1 else steps)
        return Settings(
            rule=self.rule,
            n=n,
            groups=groups,
            q=q,
            B=float(self.batch_size),
            epoch=epoch,
            steps=steps,
            delta=delta,
            lr=float(self.lr),
            optimizer=_name(self.optimizer),
            seed=_seed(self.seed),
            parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            declared=declared,
        )

    def _pace(self, n: int) -> tuple[float | None, int]:
        """Return the Poisson rate (None for shuffled batches) and the steps of an epoch."""
        B = int(self.batch_size)
        if not self.rule.poisson:
            return None, math.ceil(n / B)
        if self.q is not None:
            q = float(self.q)
            if q * _MOST_EPOCH < 1:
                raise ValueError(
                    f"q is {q:g}; an epoch has 1 ÷ q steps, at most {_MOST_EPOCH:g}: give a larger "
                    "q."
                )
            return q, round(1 / q)
        if n < B:
            raise ValueError(
                f"batch_size is {B} and there are {n} records, so the sampling rate q = "
                f"batch_size/n would be above 1; choose a batch_size of at most {n}."
            )
        return B / n, math.ceil(n / B)


def _name(optimizer: Callable[..., Any]) -> str:
    """Return the name of the optimiser's class, with the arguments of a `functools.partial`."""
    if isinstance(optimizer, partial):
        arguments = ", ".join(f"{k}={v!r}" for k, v in optimizer.keywords.items())
        return f"{_name(optimizer.func)}({arguments})"
    return str(getattr(optimizer, "__name__", type(optimizer).__name__))


def _delta(delta: float | None, n: int) -> float:
    """Return δ; warn if it is too large to protect a record."""
    if delta is None:
        return default_delta(n)
    if not 0 < delta < 1:
        raise ValueError(
            f"delta is {delta}; it must lie between 0 and 1, well below 1/n = {1 / n:.1e}."
        )
    if delta >= 1 / n:
        warnings.warn(
            f"delta is {delta:g}, not below 1/n = {1 / n:.1e}: publishing one whole record would "
            f"satisfy it. Choose at most {default_delta(n):g}.",
            stacklevel=6,  # the caller of `fit`
        )
    return float(delta)


def _seed(seed: int | None) -> int | None:
    """Return the seed as a built-in int."""
    if seed is not None and (not isinstance(seed, SupportsIndex) or operator.index(seed) < 0):
        raise ValueError(f"seed is {seed}; it must be a whole number of at least 0.")
    return None if seed is None else operator.index(seed)
