"""A run in a stack is the run it would be alone: its own data, batches, noise, rule, state and ledger."""

from __future__ import annotations

import dataclasses
import math
import re
from contextlib import suppress
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from evenclip import DPSGD, DPSGDF, DPSGDGlobalAdapt, NonPrivate, Performance, Rule, program
from evenclip.noise import Ahead
from evenclip.program import Engine, NoProgram
from evenclip.stack import Stack
from evenclip.train import prepare

STEPS = 20
CLOSE = {"rtol": 1e-11, "atol": 1e-12}  # float64: sums in another order, and nothing else
ADAPT = DPSGDGlobalAdapt(C0=0.7, sigma=0.8, Z0=1.2, tau=1.1, eta_Z=0.2, sigma_count=2.0)
GROUPS = DPSGDF(C0=0.8, sigma=0.8, sigma_count=3.0)
PRIVATE = (DPSGD(C0=0.7, sigma=0.8), GROUPS, ADAPT)


@pytest.fixture(autouse=True)
def no_graph_is_left_over(monkeypatch):
    monkeypatch.setattr(program, "_GRAPHS", {}, raising=False)


def making(model, data, rule, **more):
    """A function that makes this run anew."""
    given = {"batch_size": 8, "steps": STEPS, "lr": 0.1, "seed": 0, **more}
    return partial(prepare, model, data, rule=rule, **given)


def alone(make):
    run = make()
    with run.listening():
        while run.t < run.settings.steps:
            run.update(run.step())
    return run


def together(makes):
    """The runs of a stack, trained, in the order given."""
    runs = [make() for make in makes]
    stack = Stack(runs, compile=False)
    with stack.listening() as same:
        assert same is stack
        while stack.t < stack.steps:
            stack.step()
    return runs


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
    return {k: v for k, v in enumerate(value if isinstance(value, list) else [value]) if v is not None}


def assert_each_is_what_it_is_alone(makes):
    found = together(makes)
    for make, run in zip(makes, found, strict=True):
        assert_same(alone(make), run)
    return found


# --- the same runs ----------------------------------------------------------------------------------------------------


def test_rules_seeds_and_learning_rates_each_with_its_own_data(toy):
    """Two seeds of every rule on data of their own, and a third run that shares the data of the first."""
    data = [toy.data(seed=seed) for seed in (0, 1)]
    makes = [
        making(toy.mlp(seed=seed), data[seed], rule, seed=seed, lr=0.1 + 0.2 * seed)
        for seed in (1, 0)
        for rule in (ADAPT, *PRIVATE[:2], NonPrivate())
    ]
    makes.append(making(toy.mlp(seed=2), data[0], ADAPT, seed=2, lr=0.05))
    found = assert_each_is_what_it_is_alone(makes)
    vectors = torch.stack([toy.vector(run.model) for run in found])
    assert len(set(map(tuple, vectors.tolist()))) == len(found)  # no two runs ended alike
    assert all(run.ledger.steps == STEPS for run in found)


def test_convolutions(toy):
    makes = [
        making(toy.cnn(seed=seed), toy.images(seed=seed), rule, seed=seed, lr=0.1 + 0.2 * seed)
        for rule in (*PRIVATE, NonPrivate())
        for seed in (0, 1)
    ]
    assert_each_is_what_it_is_alone(makes)


class Own(nn.Module):
    """A layer without a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x):
        return torch.sin(x * self.scale)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.layer(x.unsqueeze(-1))[0][:, -1])


MODELS = {
    "layer norm": lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(inplace=True), nn.Linear(6, 3)),
    "somebody's own layer": lambda: nn.Sequential(Own(), nn.Linear(5, 3)),
    "group norm": lambda: nn.Sequential(nn.Unflatten(1, (5, 1)), nn.GroupNorm(5, 5), nn.Flatten(), nn.Linear(5, 3)),
    "LSTM": Recurrent,
}


@pytest.mark.parametrize("kind", MODELS)
def test_other_models(toy, kind):
    makes = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        makes.append(making(MODELS[kind]().double(), toy.data(seed=seed), ADAPT, seed=seed))
    assert_each_is_what_it_is_alone(makes)


def test_without_groups(toy):
    makes = [
        making(toy.mlp(seed=seed), toy.data(seed=seed)[:2], rule, seed=seed)
        for rule in (PRIVATE[0], ADAPT, NonPrivate())
        for seed in (0, 1)
    ]
    assert_each_is_what_it_is_alone(makes)


def test_batches_larger_than_the_room_are_not_cut_off(toy):
    """Batches of up to 40 records where there is room for 16, in one step with others."""
    makes = [
        making(toy.mlp(seed=seed), toy.data(seed=seed), rule, seed=seed, q=0.9, batch_size=2)
        for rule in PRIVATE
        for seed in (0, 1)
    ]
    found = assert_each_is_what_it_is_alone(makes)
    assert max(row["samples"] for row in found[0].trace.rows) > 24  # of epochs of one step


def test_empty_batches(toy):
    makes = [
        making(toy.mlp(seed=seed), toy.data(seed=seed), rule, seed=seed, q=0.02, batch_size=1, steps=50)
        for rule in PRIVATE
        for seed in (0, 1)
    ]
    for run in assert_each_is_what_it_is_alone(makes):
        assert run.trace.rows[0]["empty_batches"] > 0


def test_the_last_batch_of_an_epoch_is_smaller_and_divided_by_its_own_size(toy):
    makes = [making(toy.mlp(), toy.data(seed=seed), NonPrivate(), seed=seed, batch_size=9) for seed in (0, 1)]
    for run in assert_each_is_what_it_is_alone(makes):
        assert [row["samples"] for row in run.trace.rows] == [40] * 4


def test_runs_of_other_batch_sizes_and_rates(toy):
    """One rule, three expected sizes: what sums are divided by is each run's own."""
    data = toy.data()
    makes = [making(toy.mlp(), data, ADAPT, q=q, batch_size=b) for q, b in ((0.2, 8), (0.2, 9), (0.21, 8))]
    found = assert_each_is_what_it_is_alone(makes)
    assert [run.ledger.entries[0].q for run in found] == [0.2, 0.2, 0.21]


def test_groups_in_number_of_their_own(toy):
    x, y, group = toy.data()
    makes = [making(toy.mlp(), (x, y, group.clamp(max=most)), GROUPS) for most in (1, 2)]
    assert [len(run.state) for run in assert_each_is_what_it_is_alone(makes)] == [2, 3]


def test_room_for_as_many_rows_as_a_layer_has_units(toy):
    """24 rows and 24 units: neither is taken for the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 3)).double()
    data = toy.data()
    assert_each_is_what_it_is_alone([making(model, data, rule) for rule in (*PRIVATE, NonPrivate())])


def test_a_run_that_is_interrupted_has_what_it_has_learned(toy):
    """In the middle of an epoch: each run is where it would be alone after so many steps, and goes on from there."""
    data = toy.data()
    makes = [making(toy.mlp(seed=seed), data, rule, seed=seed) for rule in (ADAPT, NonPrivate()) for seed in (0, 1)]
    runs = [make() for make in makes]
    stack = Stack(runs, compile=False)

    def interrupted():
        with stack.listening():
            for _ in range(7):
                stack.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [(run.t, run.ledger.steps, len(run.trace.rows)) for run in runs] == [(7, 7, 1)] * 4
    for make, run in zip(makes, runs, strict=True):
        with run.listening():
            while run.t < STEPS:
                run.update(run.step())
        assert_same(alone(make), run)


def test_a_stack_goes_on_from_where_its_runs_are(toy):
    data = toy.data()
    makes = [making(toy.mlp(seed=seed), data, rule, seed=seed) for rule in (ADAPT, GROUPS) for seed in (0, 1)]
    runs = [make() for make in makes]
    for run in runs:
        with run.listening():
            for _ in range(6):
                run.update(run.step())
    stack = Stack(runs, compile=False)
    with stack.listening():
        while stack.t < stack.steps:
            stack.step()
    for make, run in zip(makes, runs, strict=True):
        assert_same(alone(make), run)


# --- no stack ---------------------------------------------------------------------------------------------------------


def scaled(value):
    """A model whose constant is not among its parameters and not in its name."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3).double()
            self.register_buffer("by", torch.tensor(value, dtype=torch.float64))

        def forward(self, x):
            return self.inner(x * self.by)

    return Scaled()


def frozen(toy, seed):
    model = toy.mlp(seed=seed)
    model[0].requires_grad_(requires_grad=False)
    return model


REFUSED = {
    "momentum": (lambda toy: {"optimizer": partial(SGD, momentum=0.9)}, "only plain SGD"),
    "Adam": (lambda toy: {"optimizer": Adam}, "only plain SGD"),
    "a schedule": (lambda toy: {"scheduler": partial(StepLR, step_size=1)}, "only plain SGD"),
    "steps": (lambda toy: {"steps": STEPS + 1}, "the numbers of steps differ"),
    "epochs": (lambda toy: {"batch_size": 20}, "the numbers of steps differ"),
    "performance": (lambda toy: {"performance": Performance(pad=True)}, "computed in the same way"),
    "model": (lambda toy: {"model": nn.Linear(5, 3).double()}, "the models differ"),
    "activation": (lambda toy: {"model": nn.Sequential(toy.mlp()[0], nn.ReLU(), toy.mlp()[2])}, "the models differ"),
    "no groups": (lambda toy: {"data": toy.data()[:2]}, "some have groups and some have none"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_runs_that_are_not_alike_are_refused_in_a_sentence(toy, what):
    more, why = REFUSED[what]
    given = {"model": toy.mlp(), "data": toy.data(), "rule": ADAPT}
    one, other = making(**given)(), making(**(given | more(toy)))()
    for runs in ([one, other], [other, one]):
        with pytest.raises(NoProgram, match=re.escape(why)):
            Stack(runs, compile=False)


UNLIKE = {
    "losses": lambda toy: [{"loss": F.cross_entropy}, {"loss": partial(F.cross_entropy, label_smoothing=0.3)}],
    "buffers": lambda toy: [{"model": scaled(1.0)}, {"model": scaled(3.0)}],
    "frozen parameters": lambda toy: [{"model": frozen(toy, 0)}, {"model": frozen(toy, 1)}],
}


@pytest.mark.parametrize("what", UNLIKE)
def test_runs_that_only_look_alike_are_refused_or_kept_apart(toy, what):
    """The same printed model and the same settings: what differs must not be taken from the first run."""
    data = toy.data()
    makes = [making(**({"model": toy.mlp(), "data": data, "rule": ADAPT} | more)) for more in UNLIKE[what](toy)]
    with suppress(NoProgram):
        assert_each_is_what_it_is_alone(makes)


def test_a_model_that_draws_random_numbers_is_refused(toy):
    makes = [making(toy.mlp(dropout=0.5), toy.data(), DPSGD(), seed=seed) for seed in (0, 1)]
    with pytest.raises(NoProgram, match="random"):
        together(makes)


def test_runs_at_different_steps_are_refused(toy):
    one, other = (making(toy.mlp(), toy.data(), ADAPT, seed=seed)() for seed in (0, 1))
    with one.listening():
        one.update(one.step())
    with pytest.raises(NoProgram, match="not at the same step"):
        Stack([one, other], compile=False)


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def columns(monkeypatch):
    """What every step of an engine computed: [step][kind], columns of [run, ...]."""
    seen, call = [], Engine.__call__

    def watched(self, t, inputs):
        found = call(self, t, inputs)
        seen.append([type(of)(*(column.clone() for column in of)) for of in found])
        return found

    monkeypatch.setattr(Engine, "__call__", watched)
    return seen


RULES = [DPSGD(C0=0.5, sigma=1.3), DPSGDGlobalAdapt(C0=0.5, sigma=1.3, Z0=1.2), DPSGDGlobalAdapt(C0=0.4, sigma=1.3)]


def added(columns, runs, B=8.0):
    """(g̃·B − Σ γ_i g_i)/(σS) of every run and step.  # [run · step, parameter]"""
    rules = [rule for rule in sorted(RULES, key=repr) for _ in range(len(runs) // len(RULES))]
    assert [run.settings.rule for run in runs] == rules
    rows = []
    for step in columns:
        gradient, clipped = (torch.cat([getattr(of, name) for of in step]) for name in ("gradient", "clipped_sum"))
        scale = torch.tensor([rule.C0 * rule.sigma for rule in rules], dtype=torch.float64).unsqueeze(1)
        rows.append((gradient * B - clipped) / scale)
    return torch.cat(rows)


def alike(rows) -> bool:
    """Whether two of these rows of noise are the same, up to sign and rounding. 57 numbers each."""
    unit = rows / rows.norm(dim=1, keepdim=True)
    return bool(((unit @ unit.T).abs().fill_diagonal_(0.0) > 0.8).any())


def noises(toy, columns):
    """What was added in a stack of three rules and two seeds, over 6 steps."""
    data = toy.data()
    runs = [making(toy.mlp(), data, rule, seed=seed, steps=6)() for rule in RULES for seed in (0, 1)]
    stack = Stack(runs, compile=False)
    with stack.listening():
        while stack.t < stack.steps:
            stack.step()
    return added(columns, stack.runs)


def test_every_run_and_step_has_noise_of_its_own(toy, columns):
    rows = noises(toy, columns)
    assert rows.shape == (36, 57)
    assert not alike(rows)
    assert 0.9 < float(rows.std()) < 1.1
    assert abs(float(rows.mean())) < 0.1


def test_noise_that_two_runs_share_would_be_seen(toy, columns, monkeypatch):
    """The fault is planted: every run draws by one key."""
    row, first = Ahead.row, []

    def shared(self, t):
        first.append(self)
        return row(first[0], t)[-self.size :] if first[0].size >= self.size else row(self, t)

    monkeypatch.setattr(Ahead, "row", shared)
    assert alike(noises(toy, columns))


def test_noise_that_two_steps_share_would_be_seen(toy, columns, monkeypatch):
    """The fault is planted: the number of the step is not moved on."""
    row = Ahead.row
    monkeypatch.setattr(Ahead, "row", lambda self, t: row(self, 0))
    assert alike(noises(toy, columns))


def test_the_noise_of_a_run_is_what_it_is_alone(toy, columns):
    """Not only different: the very numbers."""
    rows = noises(toy, columns).view(6, 6, 57)  # [step, run, parameter]
    runs = [making(toy.mlp(), toy.data(), rule, seed=seed, steps=6)() for rule in RULES for seed in (0, 1)]
    for r, run in enumerate(sorted(runs, key=lambda run: repr(run.kind))):
        own = torch.stack([run.noise.of(t)["gradient"] for t in range(6)])
        torch.testing.assert_close(rows[:, r], own, rtol=1e-9, atol=1e-9)


# --- one run does not touch another -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_in_one_run_does_not_touch_the_others(toy, value, one_stream):
    """Its record is the first of all data, which batches are filled up with."""
    makes = [
        making(toy.mlp(seed=seed), toy.data(seed=seed), rule, seed=seed) for rule in (ADAPT, GROUPS) for seed in (0, 1)
    ]

    def spoilt(model, data, **given):
        run = prepare(model, tuple(column.clone() for column in data), **given)
        run.data.x[0] = value
        return run

    makes[0] = partial(spoilt, *makes[0].args, **makes[0].keywords)
    found = assert_each_is_what_it_is_alone(makes)
    counted = [sum(row["non_finite"] for row in run.trace.rows) for run in found]
    assert counted[0] > 0
    assert counted[1:] == [0, 0, 0]
    for run in found:
        assert torch.isfinite(toy.vector(run.model)).all()


@pytest.mark.parametrize("rule", [DPSGD(C0=0.3, sigma=1e-9), DPSGDGlobalAdapt(C0=0.3, sigma=1e-9, Z0=0.5)], ids=repr)
def test_one_record_moves_the_clipped_sum_of_its_run_by_at_most_S_and_no_other(toy, columns, one_stream, rule):
    """Everybody is in the batch; one record of the first run is left out."""
    x, y, group = toy.data()
    x = x * 3  # clipped, nearly all of them
    more = {"q": 1.0, "batch_size": 8, "steps": 1}
    sums = {}
    for left_out in (None, 0, 7, 39):
        columns.clear()
        kept = torch.arange(40) != (-1 if left_out is None else left_out)
        makes = [
            making(toy.mlp(), (x[kept].clone(), y[kept], group[kept]), rule, **more),
            making(toy.mlp(seed=1), (x.clone(), y, group), rule, lr=0.2, **more),
        ]
        runs = together(makes)
        (found,) = columns[0]
        order = sorted(range(2), key=lambda i: repr(runs[i].kind))
        sums[left_out] = found.clipped_sum[order.index(0)], found.clipped_sum[order.index(1)]
    for left_out in (0, 7, 39):
        moved = float((sums[left_out][0] - sums[None][0]).norm())
        assert 0.05 < moved <= 0.3 * (1 + 1e-9)
        torch.testing.assert_close(sums[left_out][1], sums[None][1], **CLOSE)


# --- what must not be taken for equal, and what must be written first ------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hidden(Rule):
    """A stranger's rule with a constant that takes no part in comparisons, nor in its name."""

    name: ClassVar[str] = "hidden"
    sigma: float = 1.0
    bound: float = dataclasses.field(default=1.0, compare=False, repr=False)

    def sensitivity(self, now):
        return self.bound

    def weight(self, norm, group, now):
        return (self.bound / norm).clamp(max=1.0)


def test_two_rules_of_a_stranger_that_compare_equal_are_two(toy):
    """One mapped step for both would clip, and add noise, for the bound of the first."""
    rules = Hidden(bound=1.0), Hidden(bound=0.1)
    assert rules[0] == rules[1]
    makes = [partial(prepare, toy.mlp(), toy.data(), rule=rule, batch_size=8, steps=4) for rule in rules]
    runs = [make(seed=seed) for seed, make in enumerate(makes)]
    with (stack := Stack(runs, compile=False)).listening():
        while stack.t < stack.steps:
            stack.step()
    for seed, (make, run) in enumerate(zip(makes, runs, strict=True)):
        alone = make(seed=seed)
        with alone.listening():
            while alone.t < 4:
                alone.update(alone.step())
        torch.testing.assert_close(toy.vector(run.model), toy.vector(alone.model), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_step_that_is_interrupted_is_in_the_ledger_and_never_taken_again(toy, monkeypatch, at):
    """Parameters may have moved by then: the ledger has it, and neither its noise nor its batch come a second time."""
    make = partial(prepare, toy.mlp(), toy.data(), rule=DPSGD(), batch_size=8, steps=6, seed=0)
    run = make()
    before, stack = toy.vector(run.model), Stack([run], compile=False)
    finish = stack._finish

    def interrupted(found):
        finish(found)
        if stack.t == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(stack, "_finish", interrupted)
    with suppress(KeyboardInterrupt), stack.listening():
        while stack.t < stack.steps:
            stack.step()
    assert stack.t == run.t == run.ledger.steps == at
    assert not torch.equal(toy.vector(run.model), before)
    trace = run.trace.state()  # nobody knows what was seen of it
    assert sum(row["steps"] for row in trace["rows"]) + len(trace["sizes"]) == at - 1
    whole = make()
    batches = [whole.sampler.next() for _ in range(7)]
    assert torch.equal(run.sampler.next(), batches[at])
