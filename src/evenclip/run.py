"""A training run: the public constants it is fixed by, and everything that changes while it runs."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from evenclip import check, checkpoint
from evenclip.checkpoint import Checkpoint, CheckpointError
from evenclip.data import Dataset, MapDataset, Streamed
from evenclip.data.dataset import Samples
from evenclip.data.streamed import Bits, fingerprint
from evenclip.gradients import Tape, WholeTape, plan
from evenclip.gradients.losses import Loss
from evenclip.gradients.precision import precision
from evenclip.noise import Ahead, Noise
from evenclip.ranks import AnyRanks, RankError, Ranks, Spread, Summed, Total
from evenclip.recording import aside, sent
from evenclip.release import Ledger, Releases
from evenclip.rules import Guarded, Rule
from evenclip.sampling import Poisson, Sampler, Shuffled, chunks, roomy
from evenclip.sharded import Sharded
from evenclip.step import Chunk, Step, step, watched
from evenclip.trace import Steps, Trace
from evenclip.update import Update

if TYPE_CHECKING:
    from evenclip.data.streamed import Feed
    from evenclip.program import Kind
    from evenclip.quick import Quick

__all__ = ["CONVOLUTIONS", "Performance", "Run", "Settings", "trying"]

_log = logging.getLogger(__name__)
CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d


@dataclass(frozen=True)
class Performance:
    """How a run is computed. Changing these must not change what it is.

    Attributes:
        chunk: most samples that go through the model at once; None: the whole batch.
        pad: whether chunks are filled up to one size, so that shapes never change.
        compile: whether the step is made one graph and compiled, on a GPU recorded as a CUDA graph. Worth it for many
            steps: compiling takes a quarter of a minute, once for a model. Plain where it cannot be done.
        tf32: whether a GPU may round the operands of products to 11 bits. Norms allow for it, and the report says it.
        readers: processes that read the items of a map-style torch dataset ahead of training; 0: it reads them itself.
    """

    chunk: int | None = None
    pad: bool = False
    compile: bool = False
    tf32: bool = False
    readers: int = 0

    def __post_init__(self) -> None:
        if self.readers != 0:
            check.natural(readers=self.readers)
        if self.chunk is not None:
            check.natural(chunk=self.chunk)


def trying(performance: Performance, device: torch.device, ranks: AnyRanks) -> AbstractContextManager[None]:
    """Where a model is tried out on a few samples: where its steps will be recorded, if they will."""
    return aside(device) if performance.compile and device.type == "cuda" and ranks.world == 1 else nullcontext()


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
        """As plain values that may be published: all but the seed, of which only whether one was given."""
        rule = {"class": type(self.rule).__qualname__, "name": self.rule.name, "repr": repr(self.rule)}
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("rule", "seed")}
        return plain | {"rule": rule, "seed_given": self.seed is not None}

    def ends(self, t: int) -> bool:
        """Whether an epoch ends with the step of this number, the first being 1."""
        return t % self.epoch == 0 or t == self.steps

    @property
    def specification(self) -> str:
        """SHA-256 of all that, as hexadecimal digits: the name of these settings in reports."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


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
        self,
        model: nn.Module,
        data: Dataset | Streamed,
        loss: Loss,
        settings: Settings,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[[Optimizer], Any] | None,
        performance: Performance,
        device: torch.device,
        ranks: AnyRanks,
    ) -> None:
        self.ranks, self.rows = ranks, ranks.rows(len(data))
        self.model, self.data, self.settings, self.device = model, data, settings, device
        self.guard = Guarded(settings.rule)
        self.performance = performance
        self.state = settings.rule.init(settings.groups).to(device)
        self.ledger, self.trace, self.t = Ledger(), Trace(self.guard, settings.groups, ranks), 0
        _check_tape(settings.rule, performance, ranks)
        _check_equal(ranks, settings, model, data)
        with trying(performance, device, ranks):
            self.tape = settings.rule.tape(_tape(model, loss, data))
        digest = ranks.digest(_digest(data))
        self._mark = _mark(data, ranks, digest)
        streams = _streams(settings, model, digest, ranks)
        self._move = self._moved(optimizer)
        if not self._move.is_plain:
            _check_step(self.optimizer, _NO_CLOSURE)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        _check_step(self.scheduler, _NO_METRICS)
        self._move.is_plain &= self.scheduler is None  # a schedule watches the optimiser's own step
        self.sampler = _sampler(settings, streams["batches"])
        self.dropout = int(streams["dropout"].generate_state(1, np.uint64)[0] >> 1)
        none = torch.zeros(0, dtype=torch.float64, device=device)
        self.counts = len(self.guard.statistics(none, none.long(), self.state, None))
        _check_counts(settings.rule, self.counts)
        most = len(data) if isinstance(data, Dataset) else 0  # data that are not in memory have more than fits
        rows = max(most, roomy(settings.B), performance.chunk or 0)
        self.nobody = torch.zeros(rows, dtype=torch.int64, device=device)  # everybody's group, where there are none
        layout = self.tape.layout
        sizes = {"count": self.counts, "gradient": layout.size}
        self.noise = Ahead(Noise(streams["noise"]), sizes, layout.blank.dtype, device)
        self._quick: Quick | None = None
        self._feed: Feed | None = None

    @property
    def optimizer(self) -> Optimizer:
        """What moves the parameters."""
        return self._move.optimizer

    @property
    def ended(self) -> bool:
        """Whether an epoch has just ended."""
        return self.settings.ends(self.t)

    def close(self) -> None:
        """The model is given away: parameters with memory of their own, and no gradients."""
        self.model = self._move.close()

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Where steps can be taken: the tape listens, and torch's global generator is put back afterwards."""
        devices = [self.device] if self.device.type == "cuda" else []
        with precision(self.performance.tf32), torch.random.fork_rng(devices=devices), self.tape.listening():
            if self.performance.compile and self._quick is None and self.ranks.world == 1:
                self._quick = self._compiled()
            try:
                yield self
            finally:
                self._read_no_more()

    def step(self) -> Step:
        """Draw a batch, take one step of Algorithm 2, write the ledger."""
        feed = self._reading()  # before the sampler moves on
        batch = self.sampler.next()
        B = self.sampler.expected_size(batch)
        if self._quick is not None and self._quick.takes(batch):
            return self._quick_step(self._quick, batch, B)
        release, own = Releases(self._draw(), self._totals), self.ranks.share(batch, self.rows)
        with self.ranks.together():
            found = step(self.tape, self.guard, self.state, self._chunks(own, feed), B, release, self.t)
        self.ledger.write(self.sampler.q, release.multipliers)
        return found

    def update(self, found: Step) -> None:
        """Publish: move the parameters along the noisy gradient, carry the rule's state on."""
        self._move(found.public.gradient)
        self.state = found.public.state
        self.t += 1
        self.trace.add(found)
        if self.ended:
            self._check_together()
            self.trace.close(self.state, float(found.public.sensitivity))
            if self.scheduler is not None:
                self.scheduler.step()

    def _quick_step(self, quick: Quick, batch: Tensor, B: float) -> Step:
        """The same by the program."""
        columns, rows = quick(self.t, batch, self._move.vector, self.state, B)
        self.ledger.write(self.sampler.q, quick.multipliers)
        chunk = partial(self._chunk, batch, None, 0)
        assert isinstance(self.data, Dataset)
        group = self.nobody if self.data.group is None else self.data.group.index_select(0, rows)
        return watched(columns, len(batch), self.tape, self.guard, chunk, group, B, quick.multipliers, self.t)

    @property
    def kind(self) -> Kind:
        """What this run has in common with others that may be computed together."""
        from evenclip.program import Kind  # torch's machinery for tracing takes long to import

        fixed = self.settings.B if self.settings.q is not None else None
        return Kind(self.settings.rule, fixed, tuple(self.noise.sizes.items()), 1)

    def _compiled(self) -> Quick | None:
        """The step as one graph, or None where that cannot be done, or would be slower."""
        if self.device.type == "cpu" and any(isinstance(module, CONVOLUTIONS) for module in self.model.modules()):
            return None  # the plain step forms their gradients block by block, in the cache, as no compiler does
        if self.performance.chunk is not None or not isinstance(self.data, Dataset) or not isinstance(self.tape, Tape):
            return None
        from evenclip.program import NoProgram
        from evenclip.quick import Quick

        data = Samples(self.data.x, self.data.y, self.data.group)
        try:
            return Quick(self.tape, self.kind, data, self.noise, self._move.vector, self.state)
        except NoProgram as error:
            _log.debug("no program: %s", error)
            return None

    def _check_together(self) -> None:
        """Raise unless all ranks have the same parameters and the same state, bit by bit."""
        if self.ranks.world == 1:
            return
        found = self.ranks.each(_digest([self._move.common, self.state]))
        others = [r for r, value in enumerate(found) if value != found[0]]
        if others:
            raise RankError(
                f"After step {self.t} rank {others[0]} has other parameters than rank 0, so they no longer train one "
                "model. Was the model changed on one of them, or do they compute on machines of different kinds? Go on "
                "from the last checkpoint with resume=True, on machines of one kind."
            )

    # --- in a stack ---

    @property
    def is_plain(self) -> bool:
        """Whether parameters are moved by plain SGD without a schedule."""
        return self._move.is_plain

    @property
    def vector(self) -> Tensor:
        """The trainable parameters as they stand, not to be changed.  # [parameter]"""
        return self._move.vector

    def precision(self) -> AbstractContextManager[None]:
        """Where products have the precision that was asked for."""
        return precision(self.performance.tf32)

    def take_over(self, t: int, vector: Tensor, state: Tensor, batches: Sequence[Tensor], seen: Steps | None) -> None:
        """Steps that were taken, and written to the ledger, for this run elsewhere: up to step t, the end of an epoch
        unless it was interrupted.

        Args:
            t: number of steps taken.
            vector: the parameters they led to.
            state: the rule's state they led to, on the CPU.
            batches: of each step.
            seen: of them all, but for groups; on the CPU. None: there are none.
        """
        self._move.set(vector)
        self.state, self.t = sent(state, self.device), t
        if seen is None:
            return
        if self.settings.groups > 1:
            seen = seen._replace(group=self._group_here[torch.cat(list(batches))])
        self.trace.note(seen)
        if self.ended:
            self.trace.close(state, float(self.settings.rule.sensitivity(seen.now[-1])))

    @cached_property
    def _group_here(self) -> Tensor:
        """Each record's group, on the CPU: whoever asks a GPU for it waits for all that it was told to do."""
        assert isinstance(self.data, Dataset)
        assert self.data.group is not None
        return self.data.group.cpu()

    def _draw(self) -> dict[str, Tensor]:
        """This step's noise, as much of it as this rank adds."""
        if self.settings.rule.sigma == 0 and self.counts == 0:
            return {}
        if self._spread is None:
            return self.noise.of(self.t)
        count = [(0, self.counts)] if self.ranks.leads else []
        gradient = [(first + self.counts, end + self.counts) for first, end in self._spread.ranges]  # it comes after
        return {"count": self.noise.pieces(self.t, count), "gradient": self.noise.pieces(self.t, gradient)}

    def _moved(self, optimizer: Callable[..., Optimizer]) -> Update | Sharded:
        """What moves the parameters: whole ones on every rank, or its piece of them."""
        if isinstance(self.ranks, Ranks) and self.ranks.sharded:
            return Sharded(self.tape, optimizer, self.settings.lr, self.ranks)
        return Update(self.model, self.tape.layout, optimizer, self.settings.lr)

    @cached_property
    def _spread(self) -> Spread | Sharded | None:
        """How the gradient is added up and who adds which of its noise; None in one process."""
        if isinstance(self._move, Sharded):
            return self._move
        return None if self.ranks.world == 1 else Spread(self.ranks, self.tape.layout.size)

    @cached_property
    def _totals(self) -> dict[str, Total]:
        """How what is released is added up."""
        return {} if self._spread is None else {"count": Summed(self.ranks), "gradient": self._spread}

    def _reading(self) -> Feed | None:
        """What reads ahead of the steps to come; None where the data are in memory.

        It has a sampler of its own, which draws the same batches: the run's stands where the run does.
        """
        if isinstance(self.data, Dataset):
            return None
        if self._feed is None or self.t >= self.settings.steps:  # whoever goes on after T reads step by step
            self._read_no_more()
            ahead = copy.deepcopy(self.sampler)
            steps = range(max(1, self.settings.steps - self.t))
            batches = (self.ranks.share(ahead.next(), self.rows) for _ in steps)
            self._feed = self.data.ahead(batches, self.performance.readers)
        return self._feed

    def _read_no_more(self) -> None:
        """No thread or process reads ahead any longer."""
        if self._feed is not None:
            self._feed.close()
        self._feed = None

    def _chunks(self, batch: Tensor, feed: Feed | None = None) -> list[Chunk]:
        """The batch as the performance settings want it."""
        size = self.performance.chunk
        if self.performance.pad and size is None:
            size = roomy(self.settings.B / self.ranks.world)
        if feed is None:
            take, places = self.data.take, batch
        else:
            take, places = feed.of(batch).take, torch.arange(len(batch))
        pieces = chunks(places, size, self.performance.pad)
        found = [self._chunk(rows, real, i, take) for i, (rows, real) in enumerate(pieces)]
        if self.ranks.sharded:  # all ranks take as many passes; a record that fills up counts for nothing
            none = torch.zeros(1, dtype=torch.bool)
            more = max(self.ranks.each(len(found))) - len(found)
            found += [self._chunk(torch.zeros(1, dtype=torch.int64), none, len(found) + i) for i in range(more)]
        return found

    def _chunk(
        self, rows: Tensor, real: Tensor | None, i: int, take: Callable[[Tensor], Samples] | None = None
    ) -> Chunk:
        """These rows of the data, or of what was read of them."""
        if take is None:
            x, y, group = self.data.take(rows.to(self.device) if isinstance(self.data, Dataset) else rows)
        else:
            x, y, group = take(rows.to(self.device))
        if group is None:
            group = self._nobody(rows.shape[0])
        # Odd multipliers: every (step, chunk, rank) of a run has a seed of its own.
        i = i * self.ranks.world + self.ranks.rank
        seed = (self.dropout + 0x9E3779B97F4A7C15 * (self.t + 1) + 0xC2B2AE3D27D4EB4F * i) % 2**63
        return Chunk(x, y, group, None if real is None else real.to(self.device), seed)

    def _nobody(self, rows: int) -> Tensor:
        """Everybody's group, where there are none.  # [row]"""
        if rows > len(self.nobody):
            self.nobody = torch.zeros(rows, dtype=torch.int64, device=self.device)
        return self.nobody.narrow(0, 0, rows)

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
        _refuse_foreign(path, found.published["settings"], ours, found.secret["seed"] == self.settings.seed)
        _refuse_other_data(path, found.secret["data"], self._mark)
        try:
            self._move.set_state(found.model, found.secret["optimizer"])
        except RuntimeError as error:
            said = " ".join(str(error).split())
            raise CheckpointError(
                f"{path} belongs to another model ({said}). Resume with the model it was started with, or choose "
                "another folder."
            ) from error
        self.t = found.published["t"]
        self.state = torch.tensor(found.published["state"], dtype=self.state.dtype, device=self.device)
        self.ledger = Ledger.from_json(found.published["ledger"])
        secret = found.secret
        self.noise.set_state(secret["noise"])
        self._quick = None  # it has the key
        self._read_no_more()
        self.sampler.set_state(secret["batches"])
        self.dropout = secret["dropout"]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(secret["scheduler"])
        self.trace.set_state(secret["trace"])


_NO_CLOSURE = "which would be a second look at the batch; take another optimizer, such as SGD or Adam."
_NO_METRICS = (
    "and whatever could be measured of training is private; take one that counts epochs, such as StepLR or "
    "CosineAnnealingLR."
)


def _check_step(of: Any, why: str) -> None:
    """Raise for an optimiser or a schedule whose step must be given something."""
    if of is None:
        return
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = inspect.signature(of.step).parameters.values()
    lacks = next((p.name for p in needed if p.kind in named and p.default is inspect.Parameter.empty), None)
    if lacks is not None:
        raise ValueError(f"{type(of).__name__} must be given {lacks!r} at every step, {why}")


def _check_tape(rule: Rule, performance: Performance, ranks: AnyRanks) -> None:
    """Raise for a rule that changes what is differentiated and claims a bound all the same: it sees whole batches."""
    if rule.bounded and type(rule).tape is not Rule.tape:
        raise ValueError(
            f"{rule.name} takes its gradients in its own way (tape), so nothing bounds what one record does; say "
            "bounded = False in its class. It will have no ε."
        )
    if not rule.bounded and (performance.chunk is not None or performance.pad):
        raise ValueError(f"{rule.name} needs the whole batch at once; leave chunk and pad out.")
    if type(rule).tape is not Rule.tape and ranks.world > 1:
        raise ValueError(f"{rule.name} needs the whole batch at once; train it in one process, without ranks.")


def _check_equal(ranks: AnyRanks, settings: Settings, model: nn.Module, data: Dataset | Streamed) -> None:
    """Raise on every rank unless all were given the same settings and the same model."""
    if ranks.world == 1:
        return
    names = {"group_names": data.group_names, "class_names": data.class_names}
    ours = settings.to_json() | names | {"seed": settings.seed, "model": _digest(model.state_dict())}
    theirs = ranks.each(ours)
    for r, other in enumerate(theirs):
        differ = [name for name in theirs[0] if other[name] != theirs[0][name]]
        secret = {"seed": "another seed", "model": "another model, or the same from another start"}
        if differ:
            said = [secret.get(name, f"{name} {other[name]!r} instead of {theirs[0][name]!r}") for name in differ]
            raise ValueError(
                f"Rank {r} was given {', '.join(said)}: all ranks train one model, so give each the arguments that "
                "rank 0 has; make the model from the same seed on every rank, or load it from the same file."
            )


def _check_counts(rule: Rule, counts: int) -> None:
    """Raise for a rule that counts and does not say with how much noise."""
    if counts and not rule.sigma_count:
        raise ValueError(
            f"{rule.name} has a statistic of {counts} numbers and no sigma_count; give it the noise "
            "multiplier of that release."
        )


def _tape(model: nn.Module, loss: Loss, data: Dataset | Streamed) -> Tape | WholeTape:
    """The model taken apart, after a look at three samples, which are chosen among the first few."""
    if isinstance(data, Dataset):
        few = torch.arange(min(256, len(data)), device=data.y.device)
    else:
        few = torch.arange(min(16, len(data)))  # each has to be read
    some = data.take(few)
    return plan(model, loss, some.x, some.y)


def _sampler(settings: Settings, seed: np.random.SeedSequence) -> Sampler:
    """Poisson samples, or shuffled batches for a rule that promises nothing."""
    if settings.q is None:
        return Shuffled(settings.n, int(settings.B), seed)
    return Poisson(settings.n, settings.q, settings.B, seed)


def _mark(data: Dataset | Streamed, ranks: AnyRanks, digest: int) -> str | None:
    """What tells these data from others when a run is resumed: whoever went on from one checkpoint with the data and
    with those without one record would add the same noise to both.

    None where that cannot be told: of records that ranks have of their own, how they are cut counts too.
    """
    if isinstance(ranks, Ranks) and ranks.local:
        return None
    return f"{'some' if isinstance(data, MapDataset) else 'all'} {digest:032x}"


def _streams(settings: Settings, model: nn.Module, digest: int, ranks: AnyRanks) -> dict[str, np.random.SeedSequence]:
    """A random stream for each purpose, of this run alone: two models that shared noise would cancel it.

    A run is data, model, rule, settings and seed. All are mixed into the streams, so that no two runs draw the same
    numbers: not with another rule, not from another start, and not on the data with one record more or less. The ranks
    of a run have the same streams.
    """
    entropy = ranks.first(np.random.SeedSequence().entropy) if settings.seed is None else settings.seed
    assert isinstance(entropy, int)
    words = [entropy, int(settings.specification[:32], 16), _digest(model.state_dict()), digest]
    purposes = ("batches", "noise", "dropout")
    return {purpose: np.random.SeedSequence(words, spawn_key=(i,)) for i, purpose in enumerate(purposes)}


def _digest(value: Any) -> int:
    """A number that changes with every bit of the tensors in there, wherever and on however many threads it is made.

    Of a map-style dataset only the first few rows count. Secret, like the streams it goes into.
    """
    if isinstance(value, Dataset):
        value = (value.x, value.y, value.group)
    lines = value.fingerprints() if isinstance(value, Streamed) else _fingerprints(value)
    return int.from_bytes(hashlib.sha256("".join(lines).encode()).digest()[:16])


def _fingerprints(value: Any) -> Iterator[str]:
    """A line for each tensor in there."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            bits = Bits(leaf.numel() * leaf.element_size())
            bits.add(leaf)
            yield fingerprint(leaf.dtype, leaf.shape, bits)


def _refuse_foreign(path: Path, theirs: dict[str, Any], ours: dict[str, Any], same_seed: bool) -> None:
    """Raise unless the checkpoint was written by a run with these very settings."""
    differ = [
        f"{name}: {theirs.get(name)!r} there, {ours[name]!r} here" for name in ours if theirs.get(name) != ours[name]
    ]
    if not same_seed:
        differ.append("seed: another one there")
    if differ:
        raise CheckpointError(
            f"{path} belongs to another run ({'; '.join(differ)}). Resume with the settings it was started "
            "with, or choose another folder."
        )


def _refuse_other_data(path: Path, theirs: str | None, ours: str | None) -> None:
    """Raise if the checkpoint was written by a run on other data, where that can be told: by all rows, or by some."""
    if theirs is None or ours is None or theirs.split()[0] != ours.split()[0] or theirs == ours:
        return
    raise CheckpointError(
        f"{path} belongs to a run on other data: a record differs, or their order. Resume with the data it was started "
        "with, or choose another folder; going on with other data would add the same noise to two datasets."
    )
