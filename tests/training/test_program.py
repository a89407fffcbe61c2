"""The step as one graph of tensor operations is the step: the same numbers to rounding, whatever rule and model.

No compiler is needed here: what is compiled is the graph, and the graph is what can be wrong.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from evenclip import DPSGD, DPSGDF, DPSGDGlobalAdapt, NonPrivate, Performance, Rule, fit, program
from evenclip import run as run_module
from evenclip.quick import _ANY, Quick
from evenclip.stack import Stack
from evenclip.train import prepare

TRACED = Performance(compile=True)
STEPS = 20
CLOSE = {"rtol": 1e-11, "atol": 1e-12}  # float64: sums in another order, and nothing else
ADAPT = DPSGDGlobalAdapt(C0=0.7, sigma=0.8, Z0=1.2, sigma_count=2.0)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """What would be compiled is run as it was traced, and no graph is left over from another test."""
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    monkeypatch.setattr(program, "_GRAPHS", {}, raising=False)
    monkeypatch.setattr(run_module, "CONVOLUTIONS", ())  # which are left alone on a CPU, for speed


@pytest.fixture
def quick(monkeypatch):
    """The numbers of the steps that were taken by the graph."""
    taken, call = [], Quick.__call__

    def watched(self, t, *arguments):
        taken.append(t)
        return call(self, t, *arguments)

    monkeypatch.setattr(Quick, "__call__", watched)
    return taken


def through(run):
    """The run, step by step to its end."""
    with run.listening():
        while run.t < run.settings.steps:
            run.update(run.step())
    return run


def stacked(*runs):
    """The same by an engine that compiles nothing."""
    stack = Stack(runs, compile=False)
    with stack.listening():
        while stack.t < stack.steps:
            stack.step()
    return runs


def made(model, data, rule, performance=None, **more):
    given = {"batch_size": 9, "steps": STEPS, "lr": 0.1, "seed": 3, **more}
    return prepare(model, data, rule=rule, performance=performance, **given)


def plain_and_traced(model, data, rule, **more):
    """The same run twice; the second must have had a graph."""
    traced = through(made(model, data, rule, TRACED, **more))
    assert traced._quick is not None, "this model has a program"
    return through(made(model, data, rule, **more)), traced


def assert_same(one, other) -> None:
    """Two runs, up to rounding: parameters, state, ledger and every figure of the trace."""
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    torch.testing.assert_close(one.state, other.state, **CLOSE)
    assert one.ledger == other.ledger
    assert one.t == other.t == one.ledger.steps
    assert len(one.trace.rows) == len(other.trace.rows) > 0
    for row, their_row in zip(one.trace.rows, other.trace.rows, strict=True):
        assert row.keys() == their_row.keys()
        for name, figure in row.items():
            assert figures(figure) == pytest.approx(figures(their_row[name]), rel=1e-10, abs=1e-12), name


def figures(value):
    """A figure of the trace by its places, without the gaps: a group that was not seen has none."""
    values = torch.tensor(value).flatten().tolist() if _is_full(value) else value
    return {k: v for k, v in enumerate(values if isinstance(values, list) else [values]) if v is not None}


def _is_full(value) -> bool:
    return isinstance(value, list) and all(v is not None for v in value)


# --- somebody's own rules ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Soft(Rule):
    """γ = C0/(C0 + ‖g‖) and a little less for odd groups; S = C0. Counts nothing."""

    name: ClassVar[str] = "soft"
    uses_groups: ClassVar[bool] = True
    C0: float = 0.7
    sigma: float = 0.8

    def sensitivity(self, now):
        return self.C0

    def weight(self, norm, group, now):
        return self.C0 / (self.C0 + norm) * torch.where(group % 2 == 1, 0.8, 1.0)


@dataclass(frozen=True)
class Following(Rule):
    """Clips at a bound that follows a noisy mean of squashed norms, which are two numbers of length at most 1."""

    name: ClassVar[str] = "following"
    counts_first: ClassVar[bool] = True
    sigma: float = 0.8
    sigma_count: float | None = 1.5

    def init(self, groups):
        return torch.tensor([0.5, 0.1], dtype=torch.float64)

    def statistic(self, norm, group, state):
        squashed = norm / (state[0] + norm)
        return torch.stack([squashed, 1 - squashed]) / math.sqrt(2)

    def observe(self, noisy, B, state):
        C = (state[0] + 0.1 * noisy[0] / B).clamp(0.1, 2.0)
        return torch.stack([C, noisy[1] / B]), torch.stack([C, state[1] + 1])

    def sensitivity(self, now):
        return now[0]

    def weight(self, norm, group, now):
        return torch.minimum(torch.ones_like(norm), now[0] / norm)


# --- models -----------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A layer without a formula: torch.func maps it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.layer(x.unsqueeze(-1))
        return self.head(output[:, -1])


class Own(nn.Module):
    """Somebody's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale) + self.shift**2


class TwoInputs(nn.Module):
    """A table and an image, each through layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.image, self.head = nn.Linear(5, 4), nn.Conv2d(1, 2, 3, stride=2), nn.Linear(22, 3)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        return self.head(torch.cat([self.table(x), self.image(image).flatten(1)], dim=1).tanh())


class Shared(nn.Module):
    """One layer called twice, and one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(self.one(self.one(x).tanh()).tanh()))


class Positions(nn.Module):
    """Words, and a table of positions that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(7, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        words = (x.abs() * 3).long().clamp(max=6)
        return self.head((self.words(words) + self.places(torch.arange(5))).tanh().mean(dim=1))


class Lengths(nn.Module):
    """Asks for the number of samples in the ways one does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(x.shape[0], -1)) + x.new_zeros(x.size(0), 3)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(requires_grad=False)
    model[2].bias.requires_grad_(requires_grad=False)
    return model


MODELS = {
    "linear": lambda: nn.Linear(5, 3),
    "LSTM": Recurrent,
    "somebody's own layer": lambda: nn.Sequential(nn.Linear(5, 5), Own(), nn.Linear(5, 3)),
    "two inputs": TwoInputs,
    "frozen parameters": frozen,
    "a shared parameter": Shared,
    "layer norm": lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
    "ReLU in place": lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)),
    "asks for the number of samples": Lengths,
    "groups of channels": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(20, 3)
    ),
}
MAPPED = ("LSTM", "somebody's own layer", "groups of channels")  # torch's GroupNorm too


@pytest.fixture(params=MODELS)
def task(request, toy):
    """A model and its data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = MODELS[request.param]().double()
    x, y, group = toy.data()
    return model, ((x, toy.images()[0]) if request.param == "two inputs" else x, y, group)


# --- the same numbers -------------------------------------------------------------------------------------------------


def test_every_rule_is_traced_as_it_is(toy, rule, quick):
    data = toy.data()
    plain, traced = plain_and_traced(toy.mlp(), data, rule)
    assert_same(plain, traced)
    assert len(quick) == STEPS
    assert_same(plain, *stacked(made(toy.mlp(), data, rule)))


@pytest.mark.parametrize("rule", [Soft(), Following()], ids=lambda rule: rule.name)
def test_a_strangers_rule_is_traced_as_it_is(toy, rule):
    """Mapped sample by sample, so that the graph may be for one size of batch: then it is one of a stack."""
    data, seeds = toy.data(), (3, 4)
    plain = [through(made(toy.mlp(), data, rule, seed=seed)) for seed in seeds]
    assert plain[0].trace.rows[0]["clip_fraction"] > 0
    for one, seed in zip(plain, seeds, strict=True):
        assert_same(one, through(made(toy.mlp(), data, rule, TRACED, seed=seed)))
    several = [made(toy.mlp(), data, rule, TRACED, seed=seed) for seed in seeds]
    for one, other in zip(plain, stacked(*several), strict=True):
        assert_same(one, other)


def test_every_model_is_traced_as_it_is(request, task, quick):
    """Layers without a formula are mapped sample by sample, and torch's map may want to know how many there are."""
    model, data = task
    rule = DPSGDF(C0=0.5, sigma=0.8, sigma_count=3.0)
    traced = through(made(model, data, rule, TRACED))
    assert_same(through(made(model, data, rule)), traced)
    if request.node.callspec.params["task"] not in MAPPED:
        assert len(quick) == STEPS


def test_a_model_of_words_is_what_it_is(toy):
    """By a graph or plainly: norms of an embedding depend on which words repeat."""
    torch.manual_seed(1)
    model, data = Positions().double(), toy.data()
    assert_same(through(made(model, data, ADAPT)), through(made(model, data, ADAPT, TRACED)))


@pytest.mark.parametrize("rule", [NonPrivate(), ADAPT], ids=lambda rule: rule.name)
def test_convolutions_are_traced_as_they_are(toy, rule, quick):
    assert_same(*plain_and_traced(toy.cnn(), toy.images(), rule))
    assert len(quick) == STEPS


def test_a_frozen_parameter_stays_and_one_sample_does_not_see_it_move(toy):
    model = frozen().double()
    plain, traced = plain_and_traced(model, toy.data(), ADAPT)
    assert_same(plain, traced)
    assert torch.equal(traced.model[0].weight, model[0].weight)
    assert torch.equal(traced.model[2].bias, model[2].bias)
    assert not torch.equal(traced.model[2].weight, model[2].weight)


def test_without_groups_everybody_is_in_one(toy, quick):
    x, y, _ = toy.data()
    assert_same(*plain_and_traced(toy.mlp(), (x, y), ADAPT))
    assert len(quick) == STEPS


class CountsRows(nn.Module):
    """Takes the number of samples for a constant, as `len` does."""

    def __init__(self, ways: str) -> None:
        super().__init__()
        self.inner, self.ways = nn.Linear(5, 3).double(), ways

    def forward(self, x: Tensor) -> Tensor:
        if self.ways == "view":
            return self.inner(x.view(len(x), -1))
        if self.ways == "zeros":
            return self.inner(x) + torch.zeros(len(x), 1, dtype=x.dtype)
        return self.inner(x) + 0 * torch.arange(len(x)).unsqueeze(1)


@pytest.mark.parametrize("ways", ["view", "zeros", "arange"])
def test_a_model_that_takes_the_number_of_samples_for_a_constant_is_trained_all_the_same(toy, ways):
    """By a graph for any number of samples or plainly, but not by a graph for one number of them."""
    model, data = CountsRows(ways), toy.data()
    assert_same(through(made(model, data, ADAPT)), through(made(model, data, ADAPT, TRACED)))


@pytest.mark.parametrize("rule", [ADAPT, DPSGDF(C0=0.8, sigma=0.8)], ids=lambda rule: rule.name)
def test_empty_batches_and_batches_of_one(toy, rule, quick):
    data, few = toy.data(), {"q": 0.03, "batch_size": 1, "steps": 40}
    sampler = made(toy.mlp(), data, rule, **few).sampler
    assert {len(sampler.next()) for _ in range(40)} >= {0, 1, 2}
    plain = through(made(toy.mlp(), data, rule, **few))
    traced = through(made(toy.mlp(), data, rule, TRACED, **few))
    assert_same(plain, traced)
    assert traced.trace.rows[0]["empty_batches"] > 0
    assert quick  # the larger ones


def test_the_last_batch_of_an_epoch_is_smaller_and_divided_by_its_own_size(toy, quick):
    data = toy.data()
    sampler = made(toy.mlp(), data, NonPrivate()).sampler
    assert {len(sampler.next()) for _ in range(STEPS)} == {9, 4}
    plain, traced = plain_and_traced(toy.mlp(), data, NonPrivate())
    assert_same(plain, traced)
    assert len(quick) == STEPS


OPTIMIZERS = {
    "momentum and steps": (partial(SGD, momentum=0.9, nesterov=True), partial(StepLR, step_size=1, gamma=0.5)),
    "Adam": (Adam, None),
    "Adam and cosine": (partial(Adam, betas=(0.8, 0.9)), partial(CosineAnnealingLR, T_max=3)),
    "somebody's own": (lambda parameters, lr: SGD(parameters, lr=lr / 2), None),  # gets the parameters one by one
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimiser_moves_by_the_same_gradients(toy, kind, quick):
    optimizer, scheduler = OPTIMIZERS[kind]
    assert_same(*plain_and_traced(toy.mlp(), toy.data(), ADAPT, optimizer=optimizer, scheduler=scheduler))
    assert len(quick) == STEPS


def test_plain_sgd_with_a_schedule(toy):
    """Without a word of the scheduler's about who was called first: warnings are errors here."""
    halved = partial(StepLR, step_size=1, gamma=0.5)
    plain, traced = plain_and_traced(toy.mlp(), toy.data(), ADAPT, scheduler=halved)
    assert_same(plain, traced)
    assert traced.optimizer.param_groups[0]["lr"] == 0.1 / 2**4


def test_float32_agrees_to_its_own_rounding(toy):
    """The lengths of 20 steps are about 1 in all, and each is rounded to 6e-8 of its parameters."""
    data, model = toy.data(40, torch.float32), toy.mlp(torch.float32)
    plain, traced = plain_and_traced(model, data, ADAPT)
    torch.testing.assert_close(toy.vector(traced.model), toy.vector(plain.model), rtol=1e-5, atol=1e-6)


# --- no graph ---------------------------------------------------------------------------------------------------------


def test_a_model_that_draws_random_numbers_has_no_program_and_is_what_it_was(toy):
    data, model = toy.data(40, torch.float32), toy.mlp(torch.float32, dropout=0.4)
    plain, asked = (through(made(model, data, ADAPT, given)) for given in (None, TRACED))
    assert asked._quick is None
    assert toy.same(plain.model, asked.model)
    assert plain.trace.rows == asked.trace.rows
    assert torch.equal(plain.state, asked.state)


def test_a_model_that_looks_at_its_numbers_has_no_program(toy):
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3).double()

        def forward(self, x):
            return self.inner(x) if float(x.detach().abs().max()) < 1e6 else self.inner(x / 2)

    model, data = Looking(), toy.data()
    plain, asked = (through(made(model, data, ADAPT, given)) for given in (None, TRACED))
    assert asked._quick is None
    assert toy.same(plain.model, asked.model)


def test_chunks_that_were_asked_for_are_kept(toy, quick):
    data = toy.data()
    ways = (Performance(chunk=3), Performance(chunk=3, compile=True))
    plain, asked = (through(made(toy.mlp(), data, ADAPT, given)) for given in ways)
    assert toy.same(plain.model, asked.model)
    assert not quick


@pytest.mark.parametrize("when", ["asked", "called"])
def test_without_a_compiler_the_graph_is_run_as_it_was_traced_and_silently(toy, monkeypatch, capfd, quick, when):
    def broken(*_, **__):
        torch.rand(3)
        raise RuntimeError("InvalidCxxCompiler: no working C++ compiler found")

    monkeypatch.setattr(torch, "compile", broken if when == "asked" else lambda graph, **_: broken)
    before = torch.get_rng_state()
    plain, traced = plain_and_traced(toy.mlp(), toy.data(), DPSGDF(C0=0.8))
    assert not traced._quick.compiled
    assert_same(plain, traced)
    assert len(quick) == STEPS
    said = capfd.readouterr()
    assert said.out == said.err == ""
    assert torch.equal(torch.get_rng_state(), before)


# --- what is not finite -----------------------------------------------------------------------------------------------

BAD = 4


class Kinked(nn.Module):
    """A finite loss whose gradient is not: √ has no slope at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).abs().sqrt()


SPOILT = {
    "linear": (lambda: nn.Linear(5, 3), (math.nan, math.inf, -math.inf)),
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (math.nan,)),
    "convolution": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 3)),
        (math.nan, math.inf),
    ),
    "finite loss, infinite slope": (Kinked, (0.0,)),
    "somebody's own layer": (lambda: nn.Sequential(Own(), nn.Linear(5, 3)), (math.nan, math.inf)),
}


def everybody(model, rule, data, performance=TRACED, spoilt=None):
    """One step on all records, one of them spoilt after the data were checked."""
    x, y, group = data
    run = prepare(
        model, (x.clone(), y, group), rule=rule, batch_size=8, q=1.0, steps=1, seed=0, performance=performance
    )
    if spoilt is not None:
        run.data.x[BAD] = spoilt
    with run.listening():
        found = run.step()
        run.update(found)
    return run, found


@pytest.mark.parametrize("rule", [ADAPT, DPSGDF(C0=0.5, sigma=0.8)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", SPOILT)
def test_what_is_not_finite_contributes_exactly_nothing_and_is_counted(toy, one_stream, rule, kind, quick):
    make, values = SPOILT[kind]
    torch.manual_seed(0)
    model, data = make().double(), toy.data(10)
    gradients = []
    for value in values:
        run, found = everybody(model, rule, data, spoilt=value)
        assert found.finite.tolist() == [i != BAD for i in range(10)]
        assert found.weights[BAD] == found.norms[BAD] == 0
        assert run.trace.rows[0]["non_finite"] == 1
        assert run.trace.rows[0]["samples"] == 10
        assert torch.isfinite(found.public.gradient).all()
        gradients.append(found.public.gradient)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    plain, seen = everybody(model, rule, data, Performance(), values[0])
    torch.testing.assert_close(gradients[0], seen.public.gradient, **CLOSE)
    assert plain.trace.rows[0]["non_finite"] == 1
    assert len(quick) == len(values) or kind in MAPPED


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_overflow_in_float32_is_no_different(toy, one_stream, kind, quick):
    """A finite record whose scores are not."""
    torch.manual_seed(0)
    model, (x, y, group) = SPOILT[kind][0](), toy.data(10, torch.float32)
    with torch.no_grad():
        next(model.parameters()).abs_().add_(1.0)
    x[BAD] = 3e38
    (plain, seen), (traced, found) = (
        everybody(model, ADAPT, (x, y, group), performance) for performance in (Performance(), TRACED)
    )
    assert seen.finite.tolist() == found.finite.tolist() == [i != BAD for i in range(10)]
    torch.testing.assert_close(found.public.gradient, seen.public.gradient, rtol=1e-5, atol=1e-6)
    assert plain.trace.rows[0]["non_finite"] == traced.trace.rows[0]["non_finite"] == 1
    assert quick


def test_a_norm_that_overflows_in_float32_alone_is_clipped_and_kept(toy, one_stream, quick):
    """Its square is beyond float32 and its gradient is not: it weighs as little as it must, and is no less a sample."""
    torch.manual_seed(0)
    model, (x, y, group) = nn.Linear(5, 3), toy.data(10, torch.float32)
    x[BAD] = 1e25
    y[BAD] = model(x[BAD]).argmin()  # where the loss has a slope
    _, found = everybody(model, DPSGD(C0=0.5, sigma=1e-6), (x, y, group))
    assert bool(found.finite.all())
    assert 1e24 < float(found.norms[BAD]) < 1e26
    assert float(found.weights[BAD] * found.norms[BAD]) == pytest.approx(0.5, rel=1e-6)
    _, gradients = toy.gradients(model.double(), x.double(), y)
    torch.testing.assert_close(found.clipped_sum.double(), found.weights @ gradients, rtol=1e-5, atol=1e-6)
    assert quick


def test_a_batch_in_which_nothing_is_finite_releases_its_noise(toy, one_stream):
    model, (x, y, group) = nn.Linear(5, 3).double(), toy.data(10)
    rule = DPSGD(C0=0.5, sigma=1.3)
    run = prepare(model, (x.clone(), y, group), rule=rule, batch_size=8, q=1.0, steps=1, seed=0, performance=TRACED)
    run.data.x[:] = math.nan
    with run.listening():
        found = run.step()
    assert torch.equal(found.clipped_sum, torch.zeros_like(found.clipped_sum))
    torch.testing.assert_close(found.public.gradient, 0.5 * 1.3 / 8 * run.noise.of(0)["gradient"], **CLOSE)


# --- a rule that breaks its word --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Liar(Rule):
    """Promises S = 0.5 and weighs every sample 3, group 1 with NaN; its counts are five times too long."""

    name: ClassVar[str] = "liar"
    uses_groups: ClassVar[bool] = True
    sigma: float = 0.8
    sigma_count: float | None = 1.0

    def init(self, groups):
        return torch.zeros((), dtype=torch.float64)

    def statistic(self, norm, group, state):
        return torch.stack([norm * 0 + 3.0, norm * 0 + 4.0])

    def observe(self, noisy, B, state):
        return state, noisy[0] / B

    def sensitivity(self, now):
        return 0.5

    def weight(self, norm, group, now):
        return torch.where(group == 1, math.nan, norm * 0 + 3.0)


def test_a_rule_that_lies_is_held_to_its_word_and_counted(toy):
    data = toy.data()
    plain = [through(made(toy.mlp(), data, Liar(), seed=seed)) for seed in (3, 4)]
    assert_same(plain[0], through(made(toy.mlp(), data, Liar(), TRACED)))
    traced = stacked(*(made(toy.mlp(), data, Liar(), seed=seed) for seed in (3, 4)))
    for one, other in zip(plain, traced, strict=True):
        assert_same(one, other)
        assert sum(row["clamped"] for row in other.trace.rows) > 20
    run, found = everybody(toy.mlp(), Liar(), toy.data())
    assert float((found.weights.abs() * found.norms).max()) <= 0.5 * (1 + 1e-12)
    assert found.weights[found.group == 1].tolist() == [0.0] * int((found.group == 1).sum())
    assert found.clamped.sum() == run.trace.rows[0]["clamped"] > 0
    count = run.noise.of(0)["count"][0]
    assert float(found.public.state) * 8 == pytest.approx(0.6 * 40 + float(count), rel=1e-12)  # each (3, 4)/5


# --- looking on -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [DPSGDF(C0=0.6), ADAPT], ids=lambda rule: rule.name)
def test_observers_see_what_they_would_see_plainly(toy, rule, quick):
    data, seen = toy.data(), {}
    weights = torch.randn(len(data[1]), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for performance in (Performance(), TRACED):
        steps = seen[performance] = []

        def look(found, steps=steps):
            sums = [found.weighted_sum(w[: len(found.losses)]) for w in (weights, torch.ones_like(weights))]
            mine = found.weighted_sum((found.group == 0).double() * found.weights)
            steps.append((found, sums, mine, toy.vector(found.model).clone(), found.clipped))

        fit(toy.mlp(), data, rule=rule, batch_size=8, steps=8, seed=1, observers=[look], performance=performance)
    assert len(quick) == 8
    for (one, sums, mine, theta, clipped), (other, *others) in zip(*seen.values(), strict=True):
        assert (one.t, one.B, one.public.multipliers) == (other.t, other.B, other.public.multipliers)
        pairs = [(getattr(one, name), getattr(other, name)) for name in ("losses", "norms", "weights", "clipped_sum")]
        pairs += [(getattr(one.public, name), getattr(other.public, name)) for name in ("gradient", "now", "state")]
        pairs += [*zip(sums, others[0], strict=True), (mine, others[1]), (theta, others[2])]
        for a, b in pairs:
            torch.testing.assert_close(a, b, **CLOSE)
        assert float(one.public.sensitivity) == pytest.approx(float(other.public.sensitivity), rel=1e-12)
        assert torch.equal(one.group, other.group)
        assert torch.equal(clipped, others[3])
        assert not bool(other.clamped.any())
        assert bool(other.finite.all())
    assert any(bool(step[-1].any()) for step in seen[TRACED])


def meddle(found):
    """Looks at everything there is to see, and draws from torch's generator."""
    torch.rand(7)
    torch.manual_seed(1)
    found.model(torch.randn(3, 5, dtype=found.public.gradient.dtype)).sum().backward()
    return {"g_B": found.weighted_sum(torch.ones(len(found.losses), dtype=torch.float64))}


def test_looking_changes_nothing(toy, rule, quick):
    model, data = toy.mlp(torch.float32), toy.data(40, torch.float32)
    given = {"rule": rule, "batch_size": 8, "steps": 8, "lr": 0.1, "seed": 3, "performance": TRACED}
    alone, watched = fit(model, data, **given), fit(model, data, **given, observers=[meddle])
    assert toy.same(alone.model, watched.model)
    assert alone.trace == watched.trace
    assert alone.ledger == watched.ledger
    assert torch.equal(alone.state, watched.state)
    assert len(quick) == 16


# --- stopped and resumed ----------------------------------------------------------------------------------------------


class Stop:
    """An observer that presses Ctrl-C during a step."""

    def __init__(self, during: int) -> None:
        self.during = during

    def __call__(self, found) -> None:
        if found.t == self.during:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("kind", ["plain SGD", *OPTIMIZERS])
def test_a_run_goes_on_bit_by_bit(toy, tmp_path, kind, quick):
    optimizer, scheduler = OPTIMIZERS.get(kind, (SGD, None))
    data, model = toy.data(40, torch.float32), toy.mlp(torch.float32)
    given = {"rule": ADAPT, "batch_size": 8, "epochs": 3, "lr": 0.2, "seed": 9, "performance": TRACED}
    given |= {"optimizer": optimizer, "scheduler": scheduler}
    whole = fit(model, data, **given)
    with pytest.raises(KeyboardInterrupt):
        fit(model, data, **given, checkpoint=tmp_path, observers=[Stop(6)])
    resumed = fit(model, data, **given, checkpoint=tmp_path, resume=True)
    assert toy.same(whole.model, resumed.model)
    assert whole.trace == resumed.trace
    assert whole.ledger == resumed.ledger
    assert torch.equal(whole.state, resumed.state)
    assert quick == [*range(15), *range(7), *range(7, 15)]


def test_a_run_is_taken_up_plainly_where_the_graph_left_it(toy, tmp_path):
    """How it is computed is no part of what a run is: a checkpoint of one way is one of the other."""
    data, given = toy.data(), {"rule": ADAPT, "batch_size": 8, "epochs": 3, "lr": 0.2, "seed": 9}
    whole = fit(toy.mlp(), data, **given)
    with pytest.raises(KeyboardInterrupt):
        fit(toy.mlp(), data, **given, checkpoint=tmp_path, observers=[Stop(6)], performance=TRACED)
    resumed = fit(toy.mlp(), data, **given, checkpoint=tmp_path, resume=True)
    torch.testing.assert_close(toy.vector(resumed.model), toy.vector(whole.model), **CLOSE)
    assert whole.ledger == resumed.ledger


# --- one graph is not taken for another -------------------------------------------------------------------------------


def test_two_losses_are_two_graphs(toy):
    data = toy.data()
    for loss in (
        F.cross_entropy,
        partial(F.cross_entropy, label_smoothing=0.2),
        nn.CrossEntropyLoss(label_smoothing=0.4),
    ):
        assert_same(*plain_and_traced(toy.mlp(), data, ADAPT, loss=loss))


class Constant(nn.Module):
    """Prints the same whatever its constant is: a number, a tensor, a buffer or a frozen parameter."""

    def __init__(self, kind: str, value: float) -> None:
        super().__init__()
        self.inner, tensor = nn.Linear(5, 3).double(), torch.tensor(value, dtype=torch.float64)
        if kind == "buffer":
            self.register_buffer("scale", tensor)
        else:
            self.scale = {"number": value, "tensor": tensor, "frozen": nn.Parameter(tensor, requires_grad=False)}[kind]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


def deep(value):
    """A function in a model, as in a notebook where a cell was edited."""

    class Edited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if value == 1 else self.inner(x).tanh()

    return Edited()


@pytest.mark.parametrize("kind", ["number", "tensor", "buffer", "frozen", "edited"])
def test_two_models_that_print_alike_are_two_graphs(toy, kind):
    data = toy.data()
    for value in (1.0, 3.0):
        assert_same(*plain_and_traced(deep(value) if kind == "edited" else Constant(kind, value), data, ADAPT))


def test_two_seeds_have_each_their_own_noise_and_data(toy):
    """What runs that are alike may share is the graph, and nothing that is in it."""
    for seed in (0, 1):
        assert_same(*plain_and_traced(toy.mlp(seed=seed), toy.data(seed=seed), ADAPT, seed=seed, lr=0.1 + seed))


def test_datasets_of_any_length_share_a_graph(toy):
    """More samples than it was traced for, fewer, and as many as a batch has rows, where the two could be mixed up."""
    for n in (40, 97, 23):
        assert_same(*plain_and_traced(toy.mlp(), toy.data(n, seed=n), ADAPT))
    assert len(program._GRAPHS) == 1
    assert_same(*plain_and_traced(toy.mlp(), toy.data(_ANY), ADAPT))
    assert_same(*plain_and_traced(toy.mlp(), toy.data(5), ADAPT, batch_size=2))  # too few to try it on fewer
    assert len(program._GRAPHS) == 3


def test_stacks_on_data_of_any_length_share_a_graph(toy):
    """Mapped over runs, whose data lie one after the other."""
    for lengths in ((40, 40), (44, 38), (37, 45)):
        runs = [made(toy.mlp(seed=n), toy.data(n, seed=n), ADAPT, seed=i) for i, n in enumerate(lengths)]
        alone = [made(toy.mlp(seed=n), toy.data(n, seed=n), ADAPT, seed=i) for i, n in enumerate(lengths)]
        for one, other in zip(stacked(*runs), map(through, alone), strict=True):
            assert_same(one, other)
    assert len(program._GRAPHS) == 1


def test_data_that_lie_otherwise_are_another_graph(toy):
    """Columns one after the other, and rows with gaps between them."""
    x, y, group = toy.data()
    wide = torch.zeros(len(x), 9, dtype=x.dtype)
    wide[:, : toy.d] = x
    for same in (x, x.T.contiguous().T, wide[:, : toy.d]):
        assert_same(*plain_and_traced(toy.mlp(), (same, y, group), ADAPT))
    assert len(program._GRAPHS) == 3, "compiled code has the steps from one number to the next in it"


def test_data_beyond_32_bits_are_another_graph():
    """Compiled code counts in as many bits as the data need that it was compiled for."""
    few, many = (torch.empty(n, 2**16, dtype=torch.uint8, device="meta") for n in (2**15 - 1, 2**15))
    assert program._kind_of(few, 0) == program._kind_of(few[:100], 0)
    assert program._kind_of(few, 0) != program._kind_of(many, 0)
