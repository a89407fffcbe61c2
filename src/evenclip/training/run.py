"""A training run: the values that change during training, and the steps that change them."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenclip.data import Dataset, Streamed
from evenclip.data.dataset import Samples
from evenclip.gradients import AnyTape, Tape, WholeTape, plan
from evenclip.gradients.losses import Loss, per_sample
from evenclip.gradients.precision import precision
from evenclip.gradients.tape import call, count
from evenclip.mechanism import Ledger, Mechanism, Release, Share, wanted
from evenclip.mechanism.noise import Noise, Values
from evenclip.mechanism.rounding import TAU, most_records, sum_rounding
from evenclip.mechanism.settings import Settings
from evenclip.mechanism.trial import try_rule
from evenclip.mechanism.words import derive
from evenclip.rules import RULES, Rule
from evenclip.training import checkpoint
from evenclip.training.batches import BatchStream
from evenclip.training.checkpoint import Checkpoint, CheckpointError
from evenclip.training.company import fix_company
from evenclip.training.config import Performance, TrainConfig
from evenclip.training.identity import digest, mark, secret_key
from evenclip.training.inputs import check_optimizer, check_scheduler, check_tape
from evenclip.training.loss import RuleLoss, changes_loss, targets
from evenclip.training.processes import Processes
from evenclip.training.step import Step, WeightedSums, step
from evenclip.training.trace import Trace

if TYPE_CHECKING:
    from evenclip.training.graph import Graph

__all__ = ["Run"]


class Run:
    """A training run, one step at a time.

        with run.listening():
            while run.t < run.settings.steps:
                run.update(run.step())

    Attributes:
        model: the model in training. May be published after every step.
        state: the rule's state. May be published.
        ledger: the releases so far. May be published.
        trace: statistics of the training so far. Private.
        t: number of steps taken.
        company: a sentence on whether a sample's numbers depend on the rest of its batch.
        run_id: a hash of the secret key, which names the run in ledgers. May be published.
        drawn: number of batches drawn, each with its noise; every `step()` draws one.
    """

    def __init__(
        self, model: nn.Module, data: Dataset | Streamed, settings: Settings, config: TrainConfig,
        device: torch.device, ranks: Processes,
    ) -> None:  # fmt: skip
        rule = settings.rule
        self.model, self.data, self.settings, self.device = model, data, settings, device
        self.performance, self.ranks = config.performance, ranks
        self.mechanism = _mechanism(settings, model, config.loss, data)
        self.state = self.mechanism.start().to(device)
        self.ledger, self.trace = Ledger(), Trace(self.mechanism, ranks)
        self.t = self.drawn = 0
        check_tape(rule, self.performance, ranks)
        ranks.check_given(_given(settings, model, data))
        tape = _tape(model, config.loss, data, rule, self.state)
        self.tape = type(rule).tape(rule, tape)  # the method that `check_tape` has checked
        data_digest = ranks.digest(digest(data))
        self._fingerprint = mark(data, ranks, data_digest)
        self._update = ranks.update(self.tape, config.optimizer, settings.lr)
        if not self._update.is_plain:
            check_optimizer(self.optimizer)
        self.scheduler = None if config.scheduler is None else config.scheduler(self.optimizer)
        check_scheduler(self.scheduler)
        # A scheduler expects that the optimiser itself takes the steps.
        self._update.is_plain &= self.scheduler is None
        self._sizes = {**self.mechanism.statistics, "gradient": self.tape.layout.size}
        self._set_key(secret_key(settings, model, data_digest, ranks))
        self._fix_blocks(compiled=bool(self.performance.compile))
        self._graph: Graph | None = None
        self._is_recording = False

    def _fix_blocks(self, *, compiled: bool) -> None:
        """Fix the size of the blocks that pass at once, and what the rounding of sums costs."""
        some = partial(self.batches.some, t=0, state=self.state)
        place = self.tape, self.settings, self.performance, self.ranks.world
        self.company = fix_company(*place, None if compiled else some)
        rounding = _rounding(self.settings, self.tape, self.performance)
        self.mechanism = replace(self.mechanism, rounding=rounding)

    def _set_key(self, key: bytes) -> None:
        """Draw batches and noise from this key; secret."""
        self.key, places = key, (self.ranks, self.device)
        self.run_id = derive(key, "run").hex()[:32]
        self.batches = BatchStream(self.data, self.settings, self.performance, *places, key)
        self.noise = Noise(derive(key, "noise"), self._sizes, self.device)

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser of the parameters."""
        return self._update.optimizer

    def close(self) -> None:
        """End the run; its model then has separate memory for each parameter, and no gradients."""
        self._graph = None
        self.model = self._update.close()

    # --- steps ---

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Record forward passes, as steps need; restore torch's generator at the end."""
        devices = [self.device] if self.device.type == "cuda" else []
        with precision(self.performance.tf32), torch.random.fork_rng(devices=devices):
            if self.performance.compile and self._graph is None:
                self._graph = self._compiled(self.performance.compile)
            with self.tape.recording():
                self._is_recording = True
                try:
                    yield self
                finally:
                    self._is_recording = False
                    self.batches.close()

    def step(self) -> Step:
        """Draw a batch, write the ledger, and compute one step of Algorithm 2.

        Raises:
            RuntimeError: outside `listening()`, where no gradients are recorded.
        """
        if not self._is_recording:
            raise RuntimeError(
                "Take steps inside `with run.listening():`; outside of it no gradients are "
                "recorded."
            )
        mechanism, index = self.mechanism.at(self.t), self.drawn
        # Before the step, so that an interrupted step is in the ledger.
        self._write(mechanism, index)
        self.drawn += 1
        B, chunks = self.batches.draw(index, self.state)
        noise = self._noise(index)
        if self._graph is not None and self._graph.takes(chunks, B):
            public, part = self._graph(self.state, chunks[0], noise)
        else:
            with self.ranks.collective():
                release = Release(noise, self._shares)
                public, part = step(self.tape, mechanism, self.state, chunks, B, release)
        sums = WeightedSums(self.tape, chunks)
        return Step(
            public, part.seen, part.total, sums, B, self.t, mechanism, self.tape, self.state
        )

    def _write(self, mechanism: Mechanism, index: int) -> None:
        """Write draw `index` into the ledger."""
        sizes = {name: self._sizes[name] for name in mechanism.multipliers}
        q = self.batches.q
        tau = 0.0 if q is None or q == 1 else TAU
        self.ledger.write(q, mechanism.multipliers, sizes, tau, self.run_id, index)

    def update(self, step: Step) -> None:
        """Update the parameters with the noisy gradient, and replace the rule's state.

        Raises:
            RuntimeError: if the run has taken this step already.
        """
        if step.t != self.t:
            raise RuntimeError(
                f"This is step {step.t}, and the run is at step {self.t}; update once for each "
                "run.step()."
            )
        self._update(step.public.gradient)
        step.weighted_sum.is_over = True
        self.state = step.public.state
        self.t += 1
        self.trace.add(step.seen, step.public.now)
        if self.settings.ends(self.t):
            self._check_equal()
            self.trace.close(self.state, float(step.public.sensitivity))
            if self.scheduler is not None:
                self.scheduler.step()

    def _noise(self, index: int) -> dict[str, Values]:
        """Return the noise of draw `index`: name of a release -> N(0, I)."""
        if not self.mechanism.varies and not any(self.mechanism.noise.values()):
            return {}
        return self.noise.of(index)

    @cached_property
    def _shares(self) -> Mapping[str, Share]:
        """This process's share of each released value; empty in a single process."""
        return self.ranks.shares(self._update, self._sizes)

    def _compiled(self, mode: bool | str) -> Graph | None:
        """Return the compiled step; warn and return None if there is none."""
        from evenclip.training.graph import Graph, NoGraph  # imports torch's compiler

        try:
            if self.ranks.world > 1:
                raise NoGraph("several ranks compute it")
            with self.tape.recording():
                return Graph(
                    self.tape,
                    self.mechanism,
                    self.state,
                    self.settings.B,
                    partial(self.batches.some, t=self.t, state=self.state),
                    self._noise(0),
                    mode if isinstance(mode, str) else None,
                )
        except NoGraph as why:
            self._fix_blocks(compiled=False)
            warnings.warn(
                f"The step is not compiled: {why}. The run is computed without.", stacklevel=4
            )
            return None

    def _check_equal(self) -> None:
        """Raise unless all processes have bitwise equal parameters and states."""
        if self.ranks.world > 1:
            self.ranks.check_equal(digest([self._update.common, self.state]), self.t)

    # --- checkpoints ---

    def save(self, folder: Path) -> None:
        """Write a checkpoint. Collective: every rank calls it, and the leading rank writes."""
        self._check_equal()
        trace, (model, optimizer) = self.trace.state(), self._update.state()
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
            "key": self.key,
            "drawn": self.drawn,
            "seed": self.settings.seed,
            "data": self._fingerprint,
            "optimizer": optimizer,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "trace": trace,
        }
        checkpoint.save(folder, self.t, Checkpoint(model, published, secret))

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint of this run; raise if it is of another run."""
        saved = checkpoint.load(path)
        published, secret = saved.published, saved.secret
        settings = json.loads(json.dumps(self.settings.to_json()))
        same_seed = secret["seed"] == self.settings.seed
        checkpoint.check_settings(path, published["settings"], settings, same_seed=same_seed)
        checkpoint.check_data(path, secret["data"], self._fingerprint)
        try:
            self._update.set_state(saved.model, secret["optimizer"])
        except RuntimeError as error:
            message = " ".join(str(error).split())
            raise CheckpointError(
                f"{path} belongs to another model ({message}). Resume with the model it was "
                "started with, or choose another folder."
            ) from error
        self.t = published["t"]
        # A rule may return a state of another dtype than its first.
        dtype = getattr(torch, published.get("state_dtype", ""), self.state.dtype)
        self.state = torch.tensor(published["state"], dtype=dtype, device=self.device)
        self.ledger = Ledger.from_json(published["ledger"])
        self._set_key(secret["key"])
        self.drawn = secret["drawn"]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(secret["scheduler"])
        self.trace.set_state(secret["trace"])


def _rounding(settings: Settings, tape: AnyTape, performance: Performance) -> float:
    """Return ρ of the run's sums; see `evenclip.mechanism.rounding`."""
    if settings.q is None or not settings.rule.bounded:
        return 0.0
    blocks = [size for size in (performance.chunk, tape.rows) if size is not None]
    records = most_records(settings.q, settings.n)
    return sum_rounding(records, min(blocks, default=None), cancelling=tape.cancels)


def _given(settings: Settings, model: nn.Module, data: Dataset | Streamed) -> dict[str, Any]:
    """Return the values that must be equal on all processes of a run."""
    names = {"group_names": data.group_names, "class_names": data.class_names}
    return settings.to_json() | names | {"seed": settings.seed, "model": digest(model.state_dict())}


def _mechanism(
    settings: Settings, model: nn.Module, loss: Loss, data: Dataset | Streamed
) -> Mechanism:
    """Return the rule with its bounds enforced, for the constants of this run.

    A custom rule may depend on the number of classes and on the shapes of outputs and targets. One
    record shows them, in a copy of the model, so that this pass changes nothing.
    """
    rule, classes, like = settings.rule, len(data.class_names), dict[str, Any]()
    uses = wanted(rule)
    custom = type(rule) not in RULES.values()
    if uses or (custom and not classes and type(rule).init is not Rule.init):
        one = _first_rows(data, 1)
        with torch.no_grad():
            output = call(copy.deepcopy(model).eval(), one.x)
        classes = classes or _classes(output, one.y)
        like = {"loss": per_sample(loss)(output, one.y), "output": output, "y": one.y}
    mechanism = Mechanism(rule, settings.constants(classes), like=like if uses else {})
    try_rule(mechanism)
    return mechanism


def _classes(output: Any, y: Any) -> int:
    """Return the number of classes that the model has outputs for; 0 if y has no classes."""
    if not (isinstance(output, Tensor) and isinstance(y, Tensor)):
        return 0
    return output.shape[1] if output.ndim == 2 and not y.is_floating_point() else 0


def _tape(
    model: nn.Module, loss: Loss, data: Dataset | Streamed, rule: Rule, state: Tensor
) -> Tape | WholeTape:
    """Plan the model's gradients, using three samples chosen among the first few."""
    # Fewer of streamed data, which have to be read.
    samples = _first_rows(data, 256 if isinstance(data, Dataset) else 16)
    if not changes_loss(rule):
        return plan(model, loss, samples.x, samples.y)
    group = samples.group
    if group is None:
        group = torch.zeros(count(samples.x), dtype=torch.int64, device=state.device)
    return plan(model, RuleLoss(loss, rule), samples.x, targets(rule, samples.y, group, state))


def _first_rows(data: Dataset | Streamed, rows: int) -> Samples:
    """Return the first rows of the data."""
    device = data.y.device if isinstance(data, Dataset) else None
    return data.take(torch.arange(min(rows, len(data)), device=device))
