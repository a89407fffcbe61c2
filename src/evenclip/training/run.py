"""A training run: the values that change during training, and the steps that change them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from evenclip.data import Dataset, Streamed
from evenclip.gradients.precision import precision
from evenclip.mechanism import Ledger, Mechanism, Release, Share
from evenclip.mechanism.declared import open_declarations
from evenclip.mechanism.entry import Entry, Parent
from evenclip.mechanism.noise import Noise, Values
from evenclip.mechanism.settings import Settings
from evenclip.mechanism.words import KEY_BYTES, derive
from evenclip.training.ahead import ahead, declaration, place_draw
from evenclip.training.alone import Alone
from evenclip.training.batches import BatchStream
from evenclip.training.company import fix_company
from evenclip.training.compiled import compile_step, compiler
from evenclip.training.config import TrainConfig
from evenclip.training.guard import ModelGuard, state_of
from evenclip.training.identity import digest
from evenclip.training.inputs import (
    check_optimizer,
    check_scheduler,
    check_step,
    check_tape,
)
from evenclip.training.interventions import check_modes
from evenclip.training.journal import Declaration, Journal, check_place, made
from evenclip.training.keys import (
    check_one_key,
    computed_with,
    conditions,
    fresh_key,
    run_id,
    secret_key,
)
from evenclip.training.passes import Chunk
from evenclip.training.processes import Processes
from evenclip.training.repeats import Repeats
from evenclip.training.resume import restore, save
from evenclip.training.setup import given, make_mechanism, make_tape, rounding, warn_of_rounding
from evenclip.training.step import Step, WeightedSums, step
from evenclip.training.trace import Trace
from evenclip.training.unchanged import Unchanged
from evenclip.training.update import constructed

if TYPE_CHECKING:
    from evenclip.training.graph import Graph

__all__ = ["Run"]

# Fewest steps, unless the run has fewer, that the journal is written ahead: flushing takes
# milliseconds.
_BLOCK = 100
# A copy has its own key, and what belongs to a key.
_NOT_COPIED = frozenset(
    (
        "key", "batches", "noise", "conditions", "_alone", "_graph", "_guard", "_journal",
        "_repeats", "_shares", "_unchanged", "_unused",
    )
)  # fmt: skip


class Run:
    """A training run, one step at a time.

        with run.listening():
            while run.t < run.settings.steps:
                run.update(run.step())

    A copy of a run, a pickle of it, and its continuation in a forked process are branches: each
    draws batches and noise from its own key.

    Attributes:
        model: the model in training. May be published after every step.
        state: the rule's state. May be published.
        ledger: the releases so far. May be published.
        trace: statistics of the training so far. Private.
        t: number of steps taken.
        needs_records: whether the model was planned on records, not on artificial ones.
        independence: why a sample's gradient does not depend on the others.
        why_at_once: why samples that are independent as far as tested pass at once; may be empty.
        company: a sentence on whether a sample's numbers depend on the rest of its batch.
        run_id: a hash of the secret key, which names the run in ledgers. May be published.
        drawn: number of batches drawn, each with its noise; every `step()` draws one.
        parent: run and draw that this run branches off; None for a run from its beginning.
        conditions: digests of what the key depends on besides the seed; empty without a seed.
            Secret.
        data_digest: digest of the data of all ranks. Secret.
        sizes: name of each release -> how many numbers it has.
        is_on_disk: whether every draw so far was on a disk before it was made.
        declarations: what earlier attempts declared. May be published.
        first_steps: the number of steps that was declared at first, before the run was extended.
    """

    def __init__(
        self, model: nn.Module, data: Dataset | Streamed, settings: Settings, config: TrainConfig,
        device: torch.device, ranks: Processes,
    ) -> None:  # fmt: skip
        rule, state = settings.rule, state_of(model, ranks)  # as given, before any pass
        self.model, self.data, self.settings, self.device = model, data, settings, device
        self.performance, self.ranks = config.performance, ranks
        self.mechanism = make_mechanism(settings, model, config.loss, data)
        self.state = self.mechanism.start().to(device)
        self.ledger, self.trace = Ledger(), Trace(self.mechanism, ranks)
        self.declarations, self.first_steps = list[Declaration](), settings.steps
        self.t = 0
        check_tape(rule, self.performance, ranks)
        ranks.check_given(given(settings, model, data) | computed_with(config))
        digested, self.conditions = digest(data), dict[str, str]()
        self.data_digest = ranks.digest(digested)
        if settings.seed is not None:
            self.conditions = conditions(
                settings, config, model, data, self.data_digest, device, ranks
            )
        places = config.loss, data, self.mechanism, self.state, config.independence
        tape, self.needs_records = make_tape(model, *places, maps=not ranks.sharded)
        self.independence = tape.independence
        # A message of torch's may quote a record, so none is kept where records were passed.
        self.why_at_once = "" if self.needs_records else tape.why_at_once
        self.tape = type(rule).tape(rule, tape)  # the method that `check_tape` has checked
        self._update = ranks.update(self.tape, config.optimizer, settings.lr)
        if not self._update.is_plain:
            check_optimizer(self.optimizer)
        self.scheduler = None
        if config.scheduler is not None:
            called = "scheduler(optimizer)"
            self.scheduler = constructed("scheduler", called, config.scheduler, self.optimizer)
        check_scheduler(self.scheduler)
        # A scheduler expects that the optimiser itself takes the steps.
        self._update.is_plain &= self.scheduler is None
        self.sizes = {**self.mechanism.statistics, "gradient": self.tape.layout.size}
        self._graph: Graph | None = None
        self._alone = Alone()
        self._takes_plain_steps = not self.performance.compile
        self._set_first_key()
        self._journal: Journal | None = None
        self.is_on_disk, self._is_recording = True, False
        self._guard = ModelGuard(self.tape, self.independence, ranks, state)
        self._unchanged: Unchanged | None = None
        if self.conditions:
            whole = None if ranks.sharded else self.model  # pieces hold connections
            self._unchanged = Unchanged(whole, data, digested, config, device)

    def _set_first_key(self) -> None:
        """Set the key of the seed, or one of the operating system, and fix the blocks.

        A compiled and a plain step round differently, and only compiling shows which one is taken.
        So the key of a seed is derived after compiling; the key before it makes no draw.
        """
        seed = self.settings.seed
        self.set_key(fresh_key(self.ranks) if seed is None else secret_key(seed, self.conditions))
        self._fix_blocks(compiled=not self._takes_plain_steps)
        if self._takes_plain_steps:
            warn_of_rounding(self.mechanism.rounding)
        elif self.conditions and seed is not None:
            with self._computing():
                self._compile()
            self.conditions |= {"compiler": compiler(), "compiled": str(self._graph is not None)}
            self.set_key(secret_key(seed, self.conditions))

    def _fix_blocks(self, *, compiled: bool) -> None:
        """Fix the size of the blocks that pass at once, and what the rounding of sums costs."""
        rows = None if self.needs_records else partial(self._artificial, t=0)
        place = self.tape, self.settings, self.performance, self.ranks.world
        self.company = fix_company(*place, rows, compiled=compiled)
        self.mechanism = replace(self.mechanism, rounding=rounding(*place))

    def _artificial(self, n: int, t: int) -> Chunk:
        """Return n artificial samples as a chunk of step t."""
        return self.batches.artificial(n, t, self.state)

    # --- key, ledger and branches ---

    def set_key(self, key: bytes, parent: Parent | None = None) -> None:
        """Draw batches and noise from this secret key, from draw 0 on. Collective.

        Args:
            key: secret key, which has made no draw, or whose draws are repeated.
            parent: run and draw that this run branches off.
        """
        check_one_key(key, self.ranks)
        self.key, self.parent = key, parent
        self._alone.claim()
        self.run_id, self.drawn = run_id(key), 0
        self._unused: tuple[str, int] | None = None  # the draw that no update has used
        places = (self.ranks, self.device)
        self.batches = BatchStream(self.data, self.settings, self.performance, *places, key)
        self.noise = Noise(derive(key, "noise"), self.sizes, self.device)
        self._repeats: Repeats | None = None

    def _branch(self) -> None:
        """Continue as a branch, with batches and noise from the operating system."""
        self._check_alone()
        self.conditions = {}
        self.set_key(os.urandom(KEY_BYTES), self.place)

    def _check_alone(self) -> None:
        """Raise if the run has several ranks, which must have one key."""
        if self.ranks.world > 1:
            raise RuntimeError(
                "A run over several ranks cannot be copied or forked, because all ranks draw from "
                "one key; save a checkpoint, and resume it with resume=True."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the run without its key: a copy draws other batches and other noise."""
        self._check_alone()
        if self._is_recording:
            raise RuntimeError("Copy a run outside `with run.listening():`, where it takes steps.")
        return {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._graph = self._journal = self._unchanged = None
        self._alone = Alone()
        self.is_on_disk = not self.ledger.entries
        self._guard = ModelGuard(self.tape, self.independence, self.ranks)
        self._branch()

    def write_ahead(self, folder: Path) -> None:
        """Write every further draw into the journal of a folder before it is made."""
        self._journal = Journal(folder, writes=self.ranks.leads)
        if self.conditions:
            self._repeats = Repeats(folder, self.ranks.rank, self.key)
            if self._is_noisy:
                end = self.ledger.end_of(self.run_id)
                self._repeats.check_held(self.drawn, made(folder, self.run_id), end)
        self._journal.adopt(self.ledger, self.declarations, self.settings.steps)

    def end_attempt(self) -> None:
        """Write how far the run came; further draws, also repeated ones, are of another attempt."""
        if self._repeats is not None:
            self._repeats.flush()
        if self._journal is not None:
            if not self._alone.is_in_fork:
                self._journal.close(self.run_id, self.drawn, self._repeated(self._journal))
            self._journal.renew()

    @property
    def durable(self) -> bool:
        """Whether every draw is on a disk before it is made, so that all attempts are counted."""
        return self._journal is not None and self.is_on_disk

    def is_durable_in(self, folder: Path) -> bool:
        """Return whether every draw is in the journal of this folder before it is made."""
        return self._journal is not None and self.durable and self._journal.is_in(folder)

    @property
    def remaining(self) -> Ledger:
        """The declared steps that the run has not taken, at the places of their draws."""
        return declaration(self).remaining

    @property
    def open_declarations(self) -> Ledger:
        """The declared steps that this attempt and earlier ones have not taken."""
        earlier = (one.remaining for one in self.declarations)
        return open_declarations(self.ledger, [*earlier, self.remaining])

    @property
    def place(self) -> Parent | None:
        """The draw that a branch of the run continues; of a run without a draw, its parent."""
        return (self.run_id, self.drawn) if self.drawn else self.parent

    def _repeated(self, journal: Journal) -> Declaration | None:
        """Return the declaration, if steps were repeated since the last one."""
        known = journal.has_declared(self.run_id, self.drawn - self.t)
        return None if known or not journal.reserved else declaration(self)

    @property
    def reserved(self) -> list[Entry]:
        """The ledger lines that are written ahead."""
        return [] if self._journal is None else self._journal.reserved

    def _write(self, mechanism: Mechanism) -> None:
        """Write the next draw, of a step by this mechanism, into the ledger, after the journal."""
        draw = place_draw(self, mechanism, 0)
        if self._journal is None:
            self.is_on_disk = False
        elif not self._journal.covers(draw):
            self._reserve(self._journal, draw)
        self.ledger.add(draw)

    def _reserve(self, journal: Journal, draw: Entry) -> None:
        """Write the block that begins with this draw into the journal."""
        check_place(self.ledger, draw)
        left = max(1, self.settings.steps - self.t)
        block = min(left, max(self.settings.epoch, _BLOCK))
        entries = Ledger.joined(Ledger([draw]), ahead(self, block)).entries
        shift = self.drawn - self.t
        declared = None if journal.has_declared(self.run_id, shift) else declaration(self)
        if self._repeats is not None:
            self._repeats.flush()
        journal.reserve(self.run_id, self.drawn, entries, declared, shift)

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser of the parameters."""
        return self._update.optimizer

    def update_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state of the model and of the optimiser. Collective."""
        return self._update.state()

    def set_update_state(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Continue from a state of the model and of the optimiser."""
        self._update.set_state(model, optimizer)
        self._guard = ModelGuard(self.tape, self.independence, self.ranks)

    def close(self) -> None:
        """End the run; its model then has separate memory for each parameter, and no gradients."""
        self._guard.reset()
        self._graph = None
        self.model = self._update.close()

    # --- steps ---

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Record forward passes, as steps need; restore torch's generator at the end.

        Raises:
            RuntimeError: inside `listening()`; or with a seed, if what the key was derived from
                has changed since.
        """
        with self._alone.entered():
            self._check_unchanged(after_steps=False)
            with self._computing():
                if self._graph is None and not self._takes_plain_steps:
                    self._compile()
                with self.tape.recording():
                    self._is_recording = True
                    try:
                        yield self
                    finally:
                        self._is_recording = False
                        if not self._alone.is_in_fork:
                            self.batches.close()
                            self.end_attempt()
            self._check_unchanged(after_steps=True)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute in the precision of the run; restore torch's generators at the end."""
        devices = [self.device] if self.device.type == "cuda" else []
        with precision(self.performance.tf32), torch.random.fork_rng(devices):
            yield

    def _check_unchanged(self, *, after_steps: bool) -> None:
        """Raise if what the key of a run with a seed was derived from has changed since."""
        if self._unchanged is not None and self.conditions:
            self._unchanged.check(after_steps=after_steps)

    def step(self) -> Step:
        """Draw a batch, write the ledger, and compute one step of Algorithm 2.

        Raises:
            RuntimeError: outside `listening()`, where no gradients are recorded; in another thread;
                or under `torch.autocast`.
        """
        if not self._is_recording:
            raise RuntimeError(
                "Take steps inside `with run.listening():`; outside of it no gradients are "
                "recorded."
            )
        self._alone.check_thread()
        if self.conditions:
            check_modes()
        if self._alone.is_in_fork:
            self._branch()
        if self.conditions and self._unchanged is not None and not self._guard.is_loss_same:
            self._unchanged.check_loss()
        mechanism, index = self.mechanism.at(self.t), self.drawn
        # Before the step, so that an interrupted step is in the ledger.
        self._write(mechanism)
        self.drawn += 1
        self._unused = self.run_id, index
        B, chunks = self.batches.draw(index, self.state)
        noise = self._noise(index)
        with self._guard:
            if self._graph is not None and self._graph.takes(chunks, B):
                public, part = self._graph(self.state, chunks[0], noise)
            else:
                with self.ranks.collective():
                    release = Release(noise, self._shares)
                    public, part = step(self.tape, mechanism, self.state, chunks, B, release)
        if self.settings.begins(self.t):
            self._guard.test(chunks)
        if self._repeats is not None and noise:
            self._repeats.check(index, (public.gradient, public.now, public.state))
        sums = WeightedSums(self.tape, chunks)
        return Step(
            public, part.seen, part.total, sums, B, self.t, mechanism, self.tape, self.state,
            self.run_id, index,
        )  # fmt: skip

    def update(self, step: Step) -> None:
        """Update the parameters with the noisy gradient, and replace the rule's state.

        Raises:
            RuntimeError: if this is not the last step of this run, or if an update has used it.
        """
        check_step(step, self.t, self._unused)
        self._unused = None
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
        return self.noise.of(index) if self._is_noisy else {}

    @property
    def _is_noisy(self) -> bool:
        """Whether steps have noise."""
        return self.mechanism.varies or any(self.mechanism.noise.values())

    @cached_property
    def _shares(self) -> Mapping[str, Share]:
        """This process's share of each released value; empty in a single process."""
        return self.ranks.shares(self._update, self.sizes)

    def _compile(self) -> None:
        """Compile the step; warn if that fails, and take plain steps from then on.

        Raises:
            RuntimeError: if the key was derived for compiled steps, and there are none.
        """
        self._graph, why = compile_step(self, partial(self._artificial, t=self.t), self._noise(0))
        if self._graph is not None:
            return
        if "compiled" in self.conditions:
            raise RuntimeError(
                f"The steps of this run were compiled, and now they are not: {why}. With a seed, "
                "plain steps would have the same noise; prepare the run again."
            )
        self._takes_plain_steps = True
        self._fix_blocks(compiled=False)
        warn_of_rounding(self.mechanism.rounding)
        warnings.warn(f"The step is not compiled: {why}. The run takes plain steps.", stacklevel=4)

    def _check_equal(self) -> None:
        """Raise unless all processes have bitwise equal parameters and states."""
        if self.ranks.world > 1:
            self.ranks.check_equal(digest([self._update.common, self.state]), self.t)

    # --- checkpoints ---

    def save(self, folder: Path) -> None:
        """Write a checkpoint. Collective: every rank calls it, and the leading rank writes."""
        self._check_equal()
        save(self, folder)

    def restore(self, path: Path, *, exact: bool = False) -> None:
        """Continue from a checkpoint of this run, as a branch with new batches and noise.

        Args:
            path: folder of the checkpoint.
            exact: whether to repeat the steps of the run instead, which needs its seed.

        Raises:
            CheckpointError: if the checkpoint is of another run or cannot be repeated.
        """
        restore(self, path, exact=exact)
