"""A training run: everything that changes while a model is trained, a step at a time."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenclip.data import Dataset, Streamed
from evenclip.data.dataset import Samples
from evenclip.gradients import Tape, WholeTape, plan
from evenclip.gradients.losses import Loss, per_sample
from evenclip.gradients.precision import precision
from evenclip.gradients.tape import call, count
from evenclip.mechanism import Ledger, Mechanism, Release
from evenclip.mechanism.noise import Ahead, Noise
from evenclip.mechanism.sampling import Poisson, Sampler, Shuffled
from evenclip.mechanism.settings import Settings
from evenclip.rules import RULES, Constants, Rule
from evenclip.training import checkpoint
from evenclip.training.checkpoint import Checkpoint, CheckpointError
from evenclip.training.config import Performance, TrainConfig
from evenclip.training.identity import digest, mark, streams
from evenclip.training.loss import RuleLoss, changes_loss, targets
from evenclip.training.processes import Processes, Share
from evenclip.training.step import Chunk, Step, WeightedSums, step
from evenclip.training.trace import Trace

if TYPE_CHECKING:
    from evenclip.data.streamed import Feed
    from evenclip.training.graph import Graph

__all__ = ["Run"]


class Run:
    """Everything that changes while a model is trained, a step at a time.

        with run.listening():
            while run.t < run.settings.steps:
                run.update(run.step())

    Attributes:
        model: being trained. May be published after every step.
        state: the rule's state. May be published.
        ledger: what was released so far. May be published.
        trace: what was seen so far. Private.
        t: number of steps taken.
    """

    def __init__(
        self, model: nn.Module, data: Dataset | Streamed, settings: Settings, config: TrainConfig,
        device: torch.device, ranks: Processes,
    ) -> None:  # fmt: skip
        self.ranks, self.rows = ranks, ranks.rows(len(data))
        self.model, self.data, self.settings, self.device = model, data, settings, device
        self.performance = config.performance
        self.mechanism = _mechanism(settings, model, config.loss, data)
        self.state = self.mechanism.start().to(device)
        self.ledger, self.trace, self.t = Ledger(), Trace(self.mechanism, ranks), 0
        _check_tape(settings.rule, self.performance, ranks)
        ranks.check_given(_given(settings, model, data))
        self.tape = type(settings.rule).tape(
            settings.rule, _tape(model, config.loss, data, settings.rule, self.state)
        )  # as `_check_tape` saw it
        digested = ranks.digest(digest(data))
        self._mark = mark(data, ranks, digested)
        own = streams(settings, model, digested, ranks)
        self._move = ranks.update(self.tape, config.optimizer, settings.lr)
        if not self._move.is_plain:
            _check_step(self.optimizer, _NO_CLOSURE)
        self.scheduler = None if config.scheduler is None else config.scheduler(self.optimizer)
        _check_step(self.scheduler, _NO_METRICS)
        self._move.is_plain &= self.scheduler is None  # a schedule watches the optimiser's own step
        self.sampler = _sampler(settings, own["batches"])
        self.dropout = int(own["dropout"].generate_state(1, np.uint64)[0] >> 1)
        self._sizes = {**self.mechanism.statistics, "gradient": self.tape.layout.size}
        self.noise = Ahead(Noise(own["noise"]), self._sizes, self.tape.layout.blank.dtype, device)
        self._zeros = torch.zeros(0, dtype=torch.int64, device=device)
        self._graph: Graph | None = None
        self._feed: Feed | None = None
        self._is_listening = False

    @property
    def optimizer(self) -> Optimizer:
        """What moves the parameters."""
        return self._move.optimizer

    def close(self) -> None:
        """Give the model away: parameters with memory of their own, and no gradients."""
        self._graph = None
        self.model = self._move.close()

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Where steps can be taken: the tape records, and torch's global generator is put back
        afterwards.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            precision(self.performance.tf32),
            torch.random.fork_rng(devices=devices),
            self.tape.listening(),
        ):
            if self.performance.compile and self._graph is None:
                self._graph = self._compiled(self.performance.compile)
            self._is_listening = True
            try:
                yield self
            finally:
                self._is_listening = False
                self._stop_reading()

    def step(self) -> Step:
        """Draw a batch, write the ledger, take one step of Algorithm 2.

        Raises:
            RuntimeError: outside `listening()`, where no gradients are recorded.
        """
        if not self._is_listening:
            raise RuntimeError(
                "Take steps inside `with run.listening():`; outside of it no gradients are "
                "recorded."
            )
        feed = self._reading()  # before the sampler moves on
        batch = self.sampler.next()
        B, chunks = (
            self.sampler.expected_size(batch),
            self._chunks(self.ranks.share(batch, self.rows), feed),
        )
        # First, so that an interrupted step counts.
        mechanism = self.mechanism.at(self.t)
        self.ledger.write(self.sampler.q, mechanism.multipliers)
        noise = self._draw()
        if self._graph is not None and self._graph.takes(chunks, B):
            public, part = self._graph(self.state, chunks[0], noise)
        else:
            with self.ranks.together():
                release = Release(noise, self._totals)
                public, part = step(self.tape, mechanism, self.state, chunks, B, release)
        sums = WeightedSums(self.tape, chunks)
        return Step(
            public, part.seen, part.total, sums, B, self.t, mechanism, self.tape, self.state
        )

    def update(self, found: Step) -> None:
        """Publish: move the parameters along the noisy gradient, carry the rule's state on.

        Raises:
            RuntimeError: for a step that the run has made already.
        """
        if found.t != self.t:
            raise RuntimeError(
                f"This is step {found.t}, and the run is at step {self.t}; update once for each "
                "run.step()."
            )
        self._move(found.public.gradient)
        found.weighted_sum.is_over = True
        self.state = found.public.state
        self.t += 1
        self.trace.add(found.seen, found.public.now)
        if self.settings.ends(self.t):
            self._check_together()
            self.trace.close(self.state, float(found.public.sensitivity))
            if self.scheduler is not None:
                self.scheduler.step()

    def _compiled(self, mode: bool | str) -> Graph | None:
        """The compiled step; None, with a warning, where there is none."""
        from evenclip.training.graph import Graph, NoGraph  # imports torch's compiler

        try:
            if self.ranks.world > 1:
                raise NoGraph("several ranks take it together")
            return Graph(
                self.tape, self.mechanism, self.state, self.settings.B, self._some, self._draw(),
                mode if isinstance(mode, str) else None,
            )  # fmt: skip
        except NoGraph as why:
            warnings.warn(
                f"The step is not compiled: {why}. The run is computed without.", stacklevel=4
            )
            return None

    def _some(self, n: int) -> Chunk:
        """Any n samples, to try the step on."""
        return self._chunk(torch.arange(n) % min(len(self.data), 256), None, 0)

    def _check_together(self) -> None:
        """Raise unless all processes have the same parameters and the same state, bit by bit."""
        if self.ranks.world > 1:
            self.ranks.check_equal(digest([self._move.common, self.state]), self.t)

    # --- what a step needs ---

    def _draw(self) -> dict[str, Tensor]:
        """This step's noise, as much of it as this rank adds."""
        if not self.mechanism.varies and not any(self.mechanism.noise.values()):
            return {}
        if not self._totals:
            return self.noise.of(self.t)
        drawn, at = dict[str, Tensor](), 0
        for name, size in self._sizes.items():
            drawn[name] = self.noise.pieces(
                self.t, [(first + at, end + at) for first, end in self._totals[name].ranges]
            )
            at += size
        return drawn

    @cached_property
    def _totals(self) -> Mapping[str, Share]:
        """How what is released is added up over the processes; empty in a single one."""
        return self.ranks.totals(self._move, self._sizes)

    def _reading(self) -> Feed | None:
        """What reads ahead of the steps to come; None where the data are in memory.

        It has a sampler of its own, which draws the same batches: the run's stays at the run's
        step.
        """
        if isinstance(self.data, Dataset):
            return None
        if self._feed is None or self.t >= self.settings.steps:  # after T, step by step
            self._stop_reading()
            ahead = copy.deepcopy(self.sampler)
            steps = range(max(1, self.settings.steps - self.t))
            batches = (self.ranks.share(ahead.next(), self.rows) for _ in steps)
            self._feed = self.data.ahead(batches, self.performance.readers)
        return self._feed

    def _stop_reading(self) -> None:
        """End the threads and processes that read ahead."""
        if self._feed is not None:
            self._feed.close()
        self._feed = None

    def _chunks(self, batch: Tensor, feed: Feed | None) -> list[Chunk]:
        """The batch as the performance settings want it."""
        if feed is None:
            take, rows = self.data.take, batch
        else:
            take, rows = feed.of(batch).take, torch.arange(len(batch))
        size = self.performance.chunk
        pieces = (rows,) if size is None or len(rows) <= size else torch.split(rows, size)
        found = [self._chunk(some, None, i, take) for i, some in enumerate(pieces) if len(rows)]
        if (
            self.ranks.sharded
        ):  # all ranks take as many passes; a record that fills up counts for nothing
            none = torch.zeros(1, dtype=torch.bool)
            more = max(self.ranks.each(len(found))) - len(found)
            found += [
                self._chunk(torch.zeros(1, dtype=torch.int64), none, len(found) + i)
                for i in range(more)
            ]
        return found

    def _chunk(
        self,
        rows: Tensor,
        real: Tensor | None,
        i: int,
        take: Callable[[Tensor], Samples] | None = None,
    ) -> Chunk:
        """These rows of the data, or of what was read of them."""
        if take is None:
            x, y, group = self.data.take(
                rows.to(self.device) if isinstance(self.data, Dataset) else rows
            )
        else:
            x, y, group = take(rows.to(self.device))
        if group is None:
            group = self._zero_groups(rows.shape[0])
        target = targets(self.settings.rule, y, group, self.state)
        # Odd multipliers: every (step, chunk, rank) of a run has a seed of its own.
        i = i * self.ranks.world + self.ranks.rank
        seed = (self.dropout + 0x9E3779B97F4A7C15 * (self.t + 1) + 0xC2B2AE3D27D4EB4F * i) % 2**63
        return Chunk(x, target, group, None if real is None else real.to(self.device), seed)

    def _zero_groups(self, rows: int) -> Tensor:
        """The groups of samples without groups.  # [row]"""
        if rows > len(self._zeros):
            self._zeros = torch.zeros(2 * rows, dtype=torch.int64, device=self.device)
        return self._zeros.narrow(0, 0, rows)

    # --- checkpoints ---

    def save(self, folder: Path) -> None:
        """Write a checkpoint of this moment: every rank takes part, the one that leads writes."""
        self._check_together()
        trace, (model, optimizer) = self.trace.state(), self._move.state()
        if not self.ranks.leads:
            return
        published = {
            "settings": self.settings.to_json(),
            "t": self.t,
            "state": self.state.tolist(),
            "state_dtype": str(self.state.dtype).removeprefix("torch."),
            "ledger": self.ledger.to_json(),
        }
        secret = {
            "noise": self.noise.state(),
            "batches": self.sampler.state(),
            "dropout": self.dropout,
            "seed": self.settings.seed,
            "data": self._mark,
            "optimizer": optimizer,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "trace": trace,
        }
        checkpoint.save(folder, self.t, Checkpoint(model, published, secret))

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint, if it is one of this very run."""
        found = checkpoint.load(path)
        ours = json.loads(json.dumps(self.settings.to_json()))
        _refuse_foreign(
            path, found.published["settings"], ours, found.secret["seed"] == self.settings.seed
        )
        _refuse_other_data(path, found.secret["data"], self._mark)
        try:
            self._move.set_state(found.model, found.secret["optimizer"])
        except RuntimeError as error:
            said = " ".join(str(error).split())
            raise CheckpointError(
                f"{path} belongs to another model ({said}). Resume with the model it was started "
                "with, or choose another folder."
            ) from error
        self.t = found.published["t"]
        dtype = getattr(
            torch, found.published.get("state_dtype", ""), self.state.dtype
        )  # it may have changed on the way
        self.state = torch.tensor(found.published["state"], dtype=dtype, device=self.device)
        self.ledger = Ledger.from_json(found.published["ledger"])
        secret = found.secret
        self.noise.set_state(secret["noise"])
        self._stop_reading()
        self.sampler.set_state(secret["batches"])
        self.dropout = secret["dropout"]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(secret["scheduler"])
        self.trace.set_state(secret["trace"])


_NO_CLOSURE = (
    "which would be a second look at the batch; take another optimizer, such as SGD or Adam."
)
_NO_METRICS = (
    "and whatever could be measured of training is private; take one that counts epochs, such as "
    "StepLR or CosineAnnealingLR."
)


def _check_step(of: Any, why: str) -> None:
    """Raise for an optimiser or a schedule whose step must be given something."""
    if of is None:
        return
    named = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    needed = inspect.signature(of.step).parameters.values()
    lacks = next(
        (p.name for p in needed if p.kind in named and p.default is inspect.Parameter.empty), None
    )
    if lacks is not None:
        raise ValueError(f"{type(of).__name__} must be given {lacks!r} at every step, {why}")


def _check_tape(rule: Rule, performance: Performance, ranks: Processes) -> None:
    """Raise for a rule that changes what is differentiated and claims a bound all the same: it sees
    whole batches.
    """
    if rule.bounded and type(rule).tape is not Rule.tape:
        raise ValueError(
            f"{rule.name} takes its gradients in its own way (tape), so nothing bounds what one "
            "record does; say bounded = False in its class. It will have no ε."
        )
    if not rule.bounded and performance.chunk is not None:
        raise ValueError(f"{rule.name} needs the whole batch at once; leave chunk out.")
    if type(rule).tape is not Rule.tape and ranks.world > 1:
        raise ValueError(
            f"{rule.name} needs the whole batch at once; train it in one process, without ranks."
        )


def _given(settings: Settings, model: nn.Module, data: Dataset | Streamed) -> dict[str, Any]:
    """What all processes of a run must have been given alike."""
    names = {"group_names": data.group_names, "class_names": data.class_names}
    return settings.to_json() | names | {"seed": settings.seed, "model": digest(model.state_dict())}


def _tape(
    model: nn.Module, loss: Loss, data: Dataset | Streamed, rule: Rule, state: Tensor
) -> Tape | WholeTape:
    """Plan the model's gradients, using three samples chosen among the first few."""
    some = _few(data, 256 if isinstance(data, Dataset) else 16)  # streamed ones have to be read
    if not changes_loss(rule):
        return plan(model, loss, some.x, some.y)
    group = some.group
    if group is None:
        group = torch.zeros(count(some.x), dtype=torch.int64, device=state.device)
    return plan(model, RuleLoss(loss, rule), some.x, targets(rule, some.y, group, state))


def _few(data: Dataset | Streamed, rows: int) -> Samples:
    """Return the first rows of the data."""
    device = data.y.device if isinstance(data, Dataset) else None
    return data.take(torch.arange(min(rows, len(data)), device=device))


def _mechanism(
    settings: Settings, model: nn.Module, loss: Loss, data: Dataset | Streamed
) -> Mechanism:
    """Return the rule with its bounds enforced, for the constants of this run.

    A custom rule may depend on the number of classes and on the shapes of outputs and targets. One
    record shows them, in a copy of the model, so that this pass changes nothing.
    """
    rule, classes, like = settings.rule, len(data.class_names), dict[str, Any]()
    wanted = inspect.signature(rule.statistic).parameters.keys() & {"loss", "output", "y"}
    custom = type(rule) not in RULES.values()
    if wanted or (custom and not classes and type(rule).init is not Rule.init):
        one = _few(data, 1)
        with torch.no_grad():
            output = call(copy.deepcopy(model).eval(), one.x)
        classes = classes or _classes(output, one.y)
        like = {"loss": per_sample(loss)(output, one.y), "output": output, "y": one.y}
    constants = Constants(
        settings.groups, classes, settings.parameters, settings.B, settings.q, settings.steps
    )
    return Mechanism(rule, constants, like=like if wanted else {})


def _classes(output: Any, y: Any) -> int:
    """Return the number of classes that the model has outputs for; 0 if y has no classes."""
    if not (isinstance(output, Tensor) and isinstance(y, Tensor)):
        return 0
    return output.shape[1] if output.ndim == 2 and not y.is_floating_point() else 0


def _sampler(settings: Settings, seed: np.random.SeedSequence) -> Sampler:
    """Poisson samples, or shuffled batches for a rule that promises nothing."""
    if settings.q is None:
        return Shuffled(settings.n, int(settings.B), seed)
    return Poisson(settings.n, settings.q, settings.B, seed)


def _refuse_foreign(
    path: Path, theirs: dict[str, Any], ours: dict[str, Any], same_seed: bool
) -> None:
    """Raise unless the checkpoint was written by a run with these very settings."""
    differ = [
        f"{name}: {theirs.get(name)!r} there, {ours[name]!r} here"
        for name in ours
        if theirs.get(name) != ours[name]
    ]
    if not same_seed:
        differ.append("seed: another one there")
    if differ:
        raise CheckpointError(
            f"{path} belongs to another run ({'; '.join(differ)}). Resume with the settings it "
            "was started with, or choose another folder."
        )


def _refuse_other_data(path: Path, theirs: str | None, ours: str | None) -> None:
    """Raise if the checkpoint was written by a run on other data, where that can be told: by all
    rows, or by some.
    """
    if theirs is None or ours is None or theirs.split()[0] != ours.split()[0] or theirs == ours:
        return
    raise CheckpointError(
        f"{path} belongs to a run on other data: a record differs, or their order. Resume with "
        "the data it was started with, or choose another folder; going on with other data would "
        "add the same noise to two datasets."
    )
