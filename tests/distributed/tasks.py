"""Tasks that the tests run on every rank; with ranks=None they run in a single process."""

from __future__ import annotations

import copy
import os
import signal
import threading
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import evenclip
from evenclip.distributed.ranks import Ranks
from evenclip.distributed.sharded import Pieces

RULES = {
    "non-private": evenclip.NonPrivate(),
    "dpsgd": evenclip.DPSGD(C0=0.7, sigma=0.8),
    "dpsgd-f": evenclip.DPSGDF(C0=0.8, sigma=0.8, sigma_count=3.0),
    "dpsgd-global": evenclip.DPSGDGlobal(C0=0.7, sigma=0.8, Z=1.6),
    "dpsgd-global-adapt": evenclip.DPSGDGlobalAdapt(
        C0=0.7, sigma=0.8, Z0=1.2, tau=1.1, eta_Z=0.2, sigma_count=2.0
    ),
}


class Stop(Exception):  # noqa: N818
    """The training was interrupted on purpose."""


def data(kind: str, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x, y, group) with three classes and three groups."""
    random = torch.Generator().manual_seed(5)
    shape = (5,) if kind == "mlp" else (1, 7, 7)
    x = torch.randn(n, *shape, generator=random, dtype=torch.float64)
    group = torch.arange(n) % 3
    return (
        x * (1 + group.double()).view(-1, *[1] * len(shape)),
        torch.randint(3, (n,), generator=random),
        group,
    )


class Items(torch.utils.data.Dataset):
    """The same data as a map-style dataset."""

    def __init__(self, columns: tuple[Tensor, ...]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        return tuple(column[i] for column in self._columns)


def network(kind: str, seed: int = 0, dropout: float = 0.0) -> nn.Module:
    """Return a small network for these data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "mlp":
            layers = [nn.Linear(5, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)]
        else:
            layers = [
                nn.Conv2d(1, 3, 3),
                nn.Tanh(),
                nn.Conv2d(3, 2, 3, stride=2),
                nn.Flatten(),
                nn.Linear(8, 3),
            ]
        return nn.Sequential(*layers).double()


def vector(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


class Watch:
    """An observer that records thresholds and numbers of samples, and may cause a failure."""

    def __init__(
        self, ranks: Ranks | None, trouble: str = "", at: int = -1, who: int | None = None
    ) -> None:
        self.now: list[list[float]] = []
        self.sizes: list[int] = []
        self._mine = who is None or getattr(ranks, "rank", 0) == who
        self._trouble, self._at = trouble, at

    def __call__(self, step: evenclip.Step) -> None:
        """Record the step; fail in the planned step."""
        self.now.append(step.public.now.flatten().tolist())
        self.sizes.append(len(step.losses))
        if step.t != self._at or not self._mine:
            return
        if self._trouble == "stop":
            raise Stop(f"at step {step.t}")
        if self._trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._trouble == "silence":
            threading.Event().wait()  # never answers; the test ends this process
        if self._trouble == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if self._trouble == "drift":
            with torch.no_grad():
                next(step.model.parameters()).add_(1e-9)


def one_stream() -> Any:
    """Derive keys from the seed alone, so that any number of ranks draws alike."""
    return mock.patch("evenclip.training.run.conditions", no_conditions)


def no_conditions(*given: Any) -> dict[str, str]:
    """Return no conditions."""
    del given
    return {}


def train(
    ranks: Ranks | None,
    rule: Any,
    kind: str = "mlp",
    *,
    n: int = 60,
    seed: int | None = 7,
    own_model: bool = False,
    own: dict[str, list[Any]] | None = None,
    cut: list[int] | None = None,
    trouble: tuple[Any, ...] = (),
    dropout: float = 0.0,
    streamed: bool = False,
    **given: Any,
) -> dict[str, Any]:
    """Train; everything that should not depend on the number of ranks.

    own: argument -> what each rank gives it. cut: where the data are cut into the ranks' own.
    streamed: whether the data are read item by item. All ways to train draw alike.
    """
    rank = getattr(ranks, "rank", 0)
    columns = data(kind, n)
    if cut is not None:
        columns = tuple(column[cut[rank] : cut[rank + 1]] for column in columns)
    given = (
        {"batch_size": 12, "epochs": 2, "lr": 0.3}
        | given
        | {name: each[rank] for name, each in (own or {}).items()}
    )
    watch = Watch(ranks, *trouble)
    with one_stream():
        names = ("a", "b", "c")
        named = (
            evenclip.data.MapDataset(Items(columns), names)
            if streamed
            else evenclip.data.Dataset(*columns, names)
        )
        result = evenclip.fit(
            network(kind, seed=rank if own_model else 0, dropout=dropout),
            named,
            rule=rule,
            seed=seed,
            ranks=ranks,
            observers=[watch],
            **given,
        )
    return {
        "vector": vector(result.model),
        "state": result.state,
        "trace": result.trace,
        "ledger": result.ledger.to_json(),
        "settings": result.settings,
        "now": watch.now,
        "sizes": watch.sizes,
    }


def epsilon(ranks: Ranks | None, rule: Any) -> float | None:
    """Return ε of a run of one epoch."""
    result = evenclip.fit(
        network("mlp"), data("mlp", 60), rule=rule, batch_size=12, seed=7, ranks=ranks
    )
    return result.epsilon()


def train_with_seeds(ranks: Ranks, seeds: list[int]) -> dict[str, Any]:
    """Train, with a different seed on each rank."""
    return train(ranks, RULES["dpsgd"], seed=seeds[ranks.rank])


def run_id(ranks: Ranks | None) -> str:
    """Return the name of a run with a seed, which is a hash of its key."""
    return evenclip.prepare(
        network("mlp"), data("mlp", 8), rule=RULES["dpsgd"], batch_size=4, seed=1, ranks=ranks
    ).run_id


def first_batch(ranks: Ranks, seed: int | None = 1, **own: list[Any]) -> tuple[str, list[int]]:
    """Return the name of a run and its first batch, as this rank draws it.

    own: argument -> what each rank gives it; or the number of threads that each rank has.
    """
    given = {name: each[ranks.rank] for name, each in own.items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(given.pop("threads", threads))
    try:
        run = evenclip.prepare(
            network("mlp"), data("mlp", 40), rule=RULES["dpsgd"], batch_size=8, seed=seed,
            ranks=ranks, **given,
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    return run.run_id, run.batches.sampler.batch(0).tolist()


def with_keys(ranks: Ranks, seed: int | None) -> None:
    """Prepare a run, with a key of its own on each rank."""
    of_the_rank = mock.Mock(return_value=bytes([ranks.rank]) * 32)
    with (
        mock.patch("evenclip.training.run.secret_key", of_the_rank),
        mock.patch("evenclip.training.run.fresh_key", of_the_rank),
    ):
        first_batch(ranks, seed)


def smooth(smoothing: float) -> Any:
    """Return a cross entropy with smoothed labels."""
    return partial(nn.functional.cross_entropy, label_smoothing=smoothing)


class Faster:
    """Construct an optimiser of a multiple of the learning rate."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        """Return the optimiser."""
        return torch.optim.SGD(parameters, lr=lr * self.by)


def copied(ranks: Ranks) -> None:
    """Copy a run."""
    copy.deepcopy(
        evenclip.prepare(
            network("mlp"), data("mlp", 8), rule=RULES["dpsgd"], batch_size=4, ranks=ranks
        )
    )


def dropout_keys(ranks: Ranks) -> list[bytes]:
    """Return the keys of dropout of the chunks of a step."""
    run = evenclip.prepare(
        network("mlp"), data("mlp", 8), rule=RULES["dpsgd"], batch_size=4, seed=1, ranks=ranks,
        performance=evenclip.Performance(chunk=2),
    )  # fmt: skip
    batch = ranks.share(torch.arange(8), run.batches.rows)
    return [chunk.key for chunk in run.batches.chunks(batch, run.t, run.state)]


def shares(ranks: Ranks, batch: Tensor, own: int) -> Tensor:
    """Return this rank's part of a batch, as indices of records."""
    rows = ranks.rows(own)
    return ranks.share(batch, rows) + (rows.first if ranks.local else 0)


@one_stream()
def noise(ranks: Ranks, rule: Any) -> Tensor:
    """Return what the first step of a run adds to the clipped sum of all ranks."""
    run = evenclip.prepare(
        wide(), data("mlp", 40)[:2], rule=rule, batch_size=8, seed=1, ranks=ranks
    )
    with run.listening():
        step = run.step()
    return step.public.gradient * step.B - ranks.sum(step.clipped_sum)


class Fixed:
    """A sampler that returns given batches."""

    q: float | None = 0.5

    def __init__(self, batch: Tensor) -> None:
        self._batch = batch

    def batch(self, index: int) -> Tensor:
        """Return the batch."""
        del index
        return self._batch

    def expected_size(self, batch: Tensor) -> float:
        """Return a constant."""
        del batch
        return 4.0


def clipped_sums(ranks: Ranks, rule: Any, x: Tensor, without: int) -> tuple[Tensor, Tensor, float]:
    """Return Σ γ_i g_i over all ranks with all records and without one, and S."""
    n = len(x)
    sums, S = [], 0.0
    for batch in (
        torch.arange(n),
        torch.tensor([i for i in range(n) if i != without], dtype=torch.int64),
    ):
        data = evenclip.data.Dataset(x, torch.arange(n) % 3, torch.arange(n) % 3, ("a", "b", "c"))
        run = evenclip.prepare(network("mlp"), data, rule=rule, batch_size=2, seed=1, ranks=ranks)
        run.batches.sampler = Fixed(batch)
        with run.listening():
            step = run.step()
        sums.append(ranks.sum(step.clipped_sum))
        S = float(step.public.sensitivity)
    return sums[0], sums[1], S


def progress(ranks: Ranks) -> str:
    """Return what a rank prints during training."""
    import io
    from contextlib import redirect_stderr

    with redirect_stderr(io.StringIO()) as shown:
        train(ranks, RULES["dpsgd"], progress=True)
    return shown.getvalue()


def wide() -> nn.Module:
    """Return a model of 24,000 parameters that are 0."""
    model = nn.Linear(5, 4000).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


@one_stream()
def single_noise(rule: Any) -> Tensor:
    """Return what the first step of a single process adds to the clipped sum."""
    run = evenclip.prepare(wide(), data("mlp", 40)[:2], rule=rule, batch_size=8, seed=1)
    with run.listening():
        step = run.step()
    return step.public.gradient * step.B - step.clipped_sum


@one_stream()
def sharded_noise(ranks: Ranks, rule: Any) -> Tensor:
    """Return the noise of all ranks' pieces, joined."""
    run = evenclip.prepare(
        wide(), data("mlp", 40)[:2], rule=rule, batch_size=8, seed=1, ranks=ranks
    )
    with run.listening():
        step = run.step()
    whole = Pieces(run.tape.layout, ranks.world).join(ranks.each(step.public.gradient)) * step.B
    return whole - ranks.sum(step.clipped_sum)


def uncuttable(ranks: Ranks, what: str) -> None:
    """Try to shard an unsuitable model."""
    x, y, _ = data("mlp", 12)
    model, optimizer = network("mlp"), torch.optim.SGD
    if what == "recurrent":
        model, x = nn.Sequential(nn.LSTM(5, 3, batch_first=True), Last()).double(), x.unsqueeze(1)
    if what == "tied":
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
        model[2].weight = model[0].weight
    if what == "optimizer":
        optimizer = lambda parameters, lr: torch.optim.SGD(parameters, lr=lr)  # noqa: E731
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.uniform_(p, -0.5, 0.5)
    evenclip.fit(
        model, (x, y), rule=RULES["dpsgd"], batch_size=4, optimizer=optimizer, seed=0, ranks=ranks
    )


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def forward(self, outputs: Any) -> Tensor:
        """Return [sample, feature]."""
        return outputs[0][:, -1]
