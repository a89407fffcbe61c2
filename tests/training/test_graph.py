"""The compiled step equals the plain step; if there is no graph, a warning gives the reason."""

from __future__ import annotations

import io
import logging
import os
import shutil
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip import DPSGD, DPSGDF, DPSGDGlobalAdapt, NonPrivate, Performance, Rule, fit, prepare
from evenclip.models import cnn
from evenclip.training.result import result

COMPILED = Performance(compile=True)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))),
    reason="needs a C++ compiler",
)
pytestmark = [
    # torch's compiler uses deprecated functions of torch
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("one_stream"),  # the traced and the plain step share their draws
]


@pytest.fixture
def traced(monkeypatch):
    """Replace torch.compile by the identity, so that the traced graph runs without compiling."""
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)


def trained(toy, rule=None, data=None, model=None, **more):
    given = {"batch_size": 8, "steps": 20, "lr": 0.1, "seed": 3, **more}
    rule = DPSGDGlobalAdapt(C0=0.7, sigma=0.8, Z0=1.2) if rule is None else rule
    return fit(
        toy.mlp() if model is None else model,
        toy.data() if data is None else data,
        rule=rule,
        **given,
    )


def assert_close(toy, one, other, tolerance=1e-9):
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(toy.vector(one.model), toy.vector(other.model), **close)
    torch.testing.assert_close(one.state, other.state, **close)
    assert one.ledger == other.ledger
    for row, same in zip(one.trace, other.trace, strict=True):
        for name in ("samples", "group_samples", "empty_batches", "non_finite", "clamped"):
            assert row[name] == same[name], name
        assert row["clip_fraction"] == pytest.approx(same["clip_fraction"])
        assert [v for v in row["loss"] if v is not None] == pytest.approx(
            [v for v in same["loss"] if v is not None]
        )


def graph_of(run):
    """Return whether a run has a graph, and the warning if it has none."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with run.listening():
            return run._graph is not None, " ".join(
                str(w.message) for w in warned if w.category is UserWarning
            )


@needs_compiler
def test_a_compiled_run_is_the_run(toy):
    """With the real compiler: batches of every size, no recompilation, equal up to rounding."""
    from torch._dynamo.utils import counters

    rule = DPSGDGlobalAdapt(C0=0.7, sigma=0.8, Z0=1.2)
    run = prepare(
        toy.mlp(),
        toy.data(),
        rule=rule,
        batch_size=8,
        steps=20,
        lr=0.1,
        seed=3,
        performance=COMPILED,
    )
    sizes = set()
    with run.listening():
        assert run._graph is not None
        before = counters["stats"]["unique_graphs"]
        while run.t < 20:
            step = run.step()
            sizes.add(len(step.losses))
            run.update(step)
        assert counters["stats"]["unique_graphs"] == before >= 1
    assert len(sizes) > 5
    assert_close(toy, result(run), trained(toy))


@pytest.mark.parametrize("groups", ["groups", "none", "the classes"])
def test_the_traced_step_is_the_step_for_every_rule(toy, rule, groups, traced):
    x, y, group = toy.data()
    data = {"groups": (x, y, group), "none": (x, y), "the classes": (x, y, y)}[groups]
    if rule.uses_groups and groups == "none":
        return
    assert_close(
        toy, trained(toy, rule, data, performance=COMPILED), trained(toy, rule, data), 1e-9
    )


def test_the_graph_reads_the_parameters_that_the_optimiser_moves(toy, traced):
    adam = {"optimizer": torch.optim.Adam}
    assert_close(toy, trained(toy, **adam, performance=COMPILED), trained(toy, **adam))


def test_observers_of_a_traced_step_see_the_step(toy, traced):
    seen = [[], []]

    def record(into):
        def observer(step):
            ones = torch.ones(len(step.losses), dtype=torch.float64)
            into.append(
                (
                    step.losses,
                    step.norms,
                    step.weights,
                    step.clipped_sum,
                    step.weighted_sum(ones),
                    step.group,
                )
            )

        return observer

    trained(toy, performance=COMPILED, observers=[record(seen[0])])
    trained(toy, observers=[record(seen[1])])
    for ours, theirs in zip(*seen, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_resumed_run_goes_on_with_its_graph(toy, traced, tmp_path):
    def stop(step):
        if step.t == 13:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        trained(
            toy, performance=COMPILED, observers=[stop], checkpoint=tmp_path, checkpoint_every=5
        )
    resumed = trained(
        toy, performance=COMPILED, checkpoint=tmp_path, checkpoint_every=5, resume="exact"
    )
    assert_close(toy, resumed, trained(toy))


def test_a_sample_that_is_not_finite_contributes_nothing_to_a_traced_step(toy, traced):
    x, y, group = toy.data(40, torch.float32)
    x[3] = 3e38
    given = {"model": toy.mlp(torch.float32), "data": (x, y, group), "q": 0.5, "batch_size": 20}
    with_graph = trained(toy, **given, performance=COMPILED)
    assert torch.isfinite(toy.vector(with_graph.model)).all()
    assert_close(toy, with_graph, trained(toy, **given), 1e-4)


# --- steps without a graph --------------------------------------------------------------------


class Bakes(nn.Module):
    """Converts the number of samples to a Python int while it is traced."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3).double()

    def forward(self, x):
        return self.linear(x) + float(int(x.shape[0]) > 20)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 4, batch_first=True).double(), nn.Linear(4, 3).double()

    def forward(self, x):
        return self.head(self.lstm(x.unsqueeze(1).expand(-1, 3, -1))[0][:, -1])


@dataclass(frozen=True)
class Reads(Rule):
    """A custom rule that reads a tensor's value."""

    name: ClassVar[str] = "reads"
    sigma: float = 1.0

    def sensitivity(self, now):
        return 1.0

    def observe(self, noisy, B, state):
        assert float(state.sum()) == 0
        return state, state

    def weight(self, norm, group, now):
        return (1.0 / norm).clamp(max=1.0)


@dataclass(frozen=True)
class OwnLoss(DPSGD):
    """A custom rule with a loss that torch maps for one number of samples only."""

    name: ClassVar[str] = "own-loss"

    def loss(self, loss, output, y, group, state):
        return F.cross_entropy(output, y)


@pytest.mark.parametrize(
    ("model", "rule", "why"),
    [
        ("dropout", DPSGD(), "draws random numbers"),
        ("cnn", DPSGD(), "faster for convolutions"),
        ("mlp", Reads(), "use torch.where instead of if"),
        ("mlp", OwnLoss(), "the rule fixes the number of samples while"),
    ],
)
def test_where_a_step_has_no_graph_a_sentence_says_why(toy, traced, model, rule, why):
    data = toy.images(dtype=torch.float32) if model == "cnn" else toy.data()
    made = {
        "dropout": lambda: toy.mlp(dropout=0.5),
        "cnn": lambda: cnn(1, 7, 3, seed=0),
        "mlp": toy.mlp,
    }[model]()
    given = {"rule": rule, "batch_size": 8, "steps": 5, "seed": 3}
    has, reason = graph_of(prepare(made, data, **given, performance=COMPILED))
    assert not has
    assert why in reason
    assert reason.startswith("The step is not compiled: ")
    with pytest.warns(UserWarning, match="not compiled"):
        ours = fit(made, data, **given, performance=COMPILED)
    assert toy.same(ours.model, fit(made, data, **given).model)


@pytest.mark.parametrize("make", [Bakes, Recurrent])
def test_a_size_that_is_baked_into_the_trace_is_caught(toy, traced, make):
    """Either torch traces the model for every size, or the comparison on three sizes rejects it."""
    given = {"rule": DPSGD(C0=0.7), "batch_size": 8, "steps": 12, "lr": 0.1, "seed": 4}
    torch.manual_seed(0)
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = fit(model, toy.data(), **given, performance=COMPILED)
    torch.testing.assert_close(
        toy.vector(ours.model), toy.vector(fit(model, toy.data(), **given).model)
    )


@pytest.mark.parametrize("rows", [1, 30, 1000])
def test_a_compiler_that_errs_is_not_used(toy, monkeypatch, rows):
    """One number of the gradient is wrong in small batches, so the compiled step is not used."""

    def wrong(graph, **_):
        def run(*flat):
            outputs = list(graph(*flat))
            if outputs[5].shape[0] < rows:
                outputs[0] = outputs[0].clone()
                outputs[0][3] += 0.1
            return outputs

        return run

    monkeypatch.setattr(torch, "compile", wrong)
    run = prepare(toy.mlp(), toy.data(), batch_size=8, steps=5, seed=3, performance=COMPILED)
    has, reason = graph_of(run)
    assert has is (rows == 1)
    assert has or "differs for 2 samples" in reason


def test_without_a_compiler_a_sentence_says_so_and_the_run_is_the_same(toy, monkeypatch):
    def none(*_, **__):
        raise RuntimeError("InvalidCxxCompiler: no working C++ compiler found")

    monkeypatch.setattr(torch, "compile", lambda graph, **_: none)
    with pytest.warns(UserWarning, match="no working C.. compiler found"):
        without = trained(toy, performance=COMPILED)
    assert toy.same(without.model, trained(toy).model)


class WrappedError(Exception):
    """An error as torch's compiler raises it: the cause is in the context."""


WrappedError.__module__ = "torch._dynamo.exc"


def test_the_innermost_cause_is_quoted_and_torchs_log_is_silent(toy, monkeypatch):
    log, printed = logging.getLogger("torch._subclasses.fake_tensor"), io.StringIO()
    monkeypatch.setattr(log, "handlers", [logging.StreamHandler(printed)])

    def fails(*_, **__):
        try:
            try:
                raise RuntimeError("expand: 2 -> 37\nand more lines")
            except RuntimeError as error:
                log.error("failed while attempting to run meta")
                raise WrappedError("when making fake tensor call") from error
        except WrappedError:
            raise WrappedError("when making fake tensor call") from None

    monkeypatch.setattr(torch, "compile", lambda graph, **_: fails)
    has, reason = graph_of(prepare(toy.mlp(), toy.data(), batch_size=8, performance=COMPILED))
    assert not has
    assert "torch cannot compile it (RuntimeError: expand: 2 -> 37). The run takes" in reason
    assert printed.getvalue() == ""
    log.error("this is printed")
    assert printed.getvalue() == "this is printed\n"


def test_small_and_chunked_batches_take_the_plain_step(toy, traced):
    """Batches of no and of one sample, and batches in several chunks, have no graph."""
    rule = DPSGDF(C0=0.8, sigma=0.8)
    ours = trained(toy, rule, batch_size=1, steps=40, performance=COMPILED)
    assert_close(toy, ours, trained(toy, rule, batch_size=1, steps=40))
    chunked = trained(toy, rule, performance=Performance(chunk=3, compile=True))
    assert_close(toy, chunked, trained(toy, rule))


def test_shuffled_batches_of_another_size_take_the_plain_step(toy, traced):
    data = toy.data(43)  # five batches of 8 and one of 3
    assert_close(
        toy,
        trained(toy, NonPrivate(), data, performance=COMPILED),
        trained(toy, NonPrivate(), data),
    )


class Branching(nn.Module):
    """Computes another function for more than 110 samples."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.a(x)
        return self.b(h * 2 if x.shape[0] > 110 else h)


@dataclass(frozen=True)
class Mapped(DPSGD):
    """DPSGD as a custom rule, which is mapped over the samples."""

    name: ClassVar[str] = "mapped"


@pytest.mark.parametrize("rule", [DPSGD(), Mapped()], ids=lambda rule: rule.name)
def test_a_batch_on_another_branch_of_the_model_than_the_traced_one_takes_the_plain_step(
    toy, traced, monkeypatch, rule
):
    # In padded blocks the plain step would take one branch for all batches.
    monkeypatch.setattr("evenclip.training.run.fix_company", lambda *given, **more: "not fixed")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 3, generator=generator)
    torch.manual_seed(0)
    model, given = (
        Branching(),
        {"data": (x, (x[:, 0] > 0).long()), "batch_size": 110, "steps": 6, "rule": rule},
    )
    plain, compiled = (
        trained(toy, model=model, **given, performance=p) for p in (Performance(), COMPILED)
    )
    torch.testing.assert_close(
        toy.vector(compiled.model), toy.vector(plain.model), rtol=1e-5, atol=1e-6
    )
