"""One seed for two runs.

Two models were trained from one seed, on neighbouring datasets or with another loss, activation or
schedule. The attacker subtracts their first gradients. If both had the same noise, the result is
the difference of two exact sums.

A key must depend on everything that can change a sum; then the noise of two runs is independent.
"""

from __future__ import annotations

import functools
import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, multi_margin_loss

from evenclip import DPSGD, Performance, prepare
from evenclip.mechanism.grid import Grid
from evenclip.training import graph
from evenclip.training.fit import train

N, D, B = 40, 8, 16
RULE = DPSGD(C0=1.0, sigma=2.0)
BASE = {"rule": RULE, "q": 0.4, "batch_size": B, "steps": 3, "delta": 1e-5, "seed": 5}


def data(rows=N, **changed):
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(N + 1, D, generator=random).double(), torch.arange(N + 1) % 3
    if changed:
        x[changed["row"], changed["column"]] += changed["by"]
    return x[:rows], y[:rows]


def model(activation=nn.Tanh, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(D, 4), activation(), nn.Linear(4, 3)).double()


class Scaled:
    """A function with the name of another."""

    def __init__(self, function, by) -> None:
        functools.update_wrapper(self, function)
        self.function, self.by = function, by

    def __call__(self, *given, **named):
        return self.by * self.function(*given, **named)


def wrapped(output, y, reduction="mean"):
    return 0.01 * cross_entropy(output, y, reduction=reduction)


functools.update_wrapper(wrapped, cross_entropy)

OTHERS = {
    "one record more": ((model(), data(N + 1)), {}),
    "one record less": ((model(), data(N - 1)), {}),
    "one bit of one record": ((model(), data(row=N - 1, column=0, by=2.0**-50)), {}),
    "another loss": ((model(), data()), {"loss": multi_margin_loss}),
    "another parameter of the loss": (
        (model(), data()), {"loss": partial(cross_entropy, label_smoothing=0.1)},
    ),
    "another loss with its name": ((model(), data()), {"loss": wrapped}),
    "another multiple of the loss": ((model(), data()), {"loss": Scaled(cross_entropy, 0.01)}),
    "another activation": ((model(nn.ReLU), data()), {}),
    "another start": ((model(seed=1), data()), {}),
    "another rule": ((model(), data()), {"rule": DPSGD(C0=1.1, sigma=2.0)}),
    "another rate": ((model(), data()), {"q": 0.3}),
    "another number of steps": ((model(), data()), {"steps": 4}),
    "another schedule": (
        (model(), data()), {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1)},
    ),
}  # fmt: skip


def distance(one, other):
    """Return how far the difference of the two gradients is from that of the sums, in σ'√d."""
    steps = []
    for run in (one, other):
        with run.listening():
            steps.append(run.step())
    size = len(steps[0].clipped_sum)
    grid = Grid.of(1.1, RULE.sigma, size, one.mechanism.rounding)
    guess = B * (steps[0].public.gradient - steps[1].public.gradient)
    off = torch.linalg.vector_norm(guess - (steps[0].clipped_sum - steps[1].clipped_sum))
    return float(off) / (grid.std * math.sqrt(size)), grid


def runs(name):
    (given, changes), base = OTHERS[name], (model(), data())
    return prepare(*base, **BASE), prepare(*given, **(BASE | changes))


@pytest.mark.parametrize("name", OTHERS)
def test_runs_that_differ_have_other_keys_and_other_noise(name):
    """Noise of both, with 51 degrees of freedom: off by half with probability below 1e-15."""
    one, other = runs(name)
    assert one.key != other.key
    assert one.run_id != other.run_id
    assert distance(one, other)[0] > math.sqrt(2) / 4


def test_without_a_seed_the_same_run_has_another_key():
    one, other = (prepare(model(), data(), **(BASE | {"seed": None})) for _ in range(2))
    assert one.key != other.key
    assert distance(one, other)[0] > math.sqrt(2) / 4


def test_the_same_run_from_the_same_seed_is_the_same():
    """So the run counts once in a union of ledgers."""
    one, other = (prepare(model(), data(), **BASE) for _ in range(2))
    assert one.run_id == other.run_id
    assert distance(one, other)[0] == 0


@pytest.mark.parametrize("name", ["one record more", "another loss", "another activation"])
def test_the_attack_wins_against_keys_of_the_seed_alone(name, monkeypatch):
    monkeypatch.setattr("evenclip.training.run.secret_key", lambda *given: bytes(32))
    off, grid = distance(*runs(name))
    assert off <= grid.coarse / grid.std


# --- a step that cannot be compiled -------------------------------------------------------------

COMPILED = {"performance": Performance(compile=True)}


class NoCompiler:
    """A process in which torch finds no compiler."""

    def __init__(self, *given) -> None:
        raise graph.NoGraph("there is no compiler")


def compiled_and_plain(monkeypatch):
    """Return a run with a compiled step, and the same run where compiling fails."""
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    one = prepare(model(), data(), **BASE, **COMPILED)
    monkeypatch.setattr(graph, "Graph", NoCompiler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = prepare(model(), data(), **BASE, **COMPILED)
        assert one._graph is not None
        assert other._graph is None
        return one, other, distance(one, other)


def test_a_run_whose_step_is_not_compiled_has_another_key(monkeypatch):
    """Sums over blocks and over whole batches round differently."""
    one, other, (off, _) = compiled_and_plain(monkeypatch)
    assert one.run_id != other.run_id
    assert off > math.sqrt(2) / 4
    assert one.conditions["compiled"] != other.conditions["compiled"]


def test_a_run_is_compiled_again_or_ends(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    run = prepare(model(), data(), **BASE, **COMPILED)
    run._graph = None
    with run.listening():
        assert run._graph is not None
    run._graph = None
    monkeypatch.setattr(graph, "Graph", NoCompiler)
    with pytest.raises(RuntimeError) as caught, run.listening():
        run.step()
    assert str(caught.value) == (
        "The steps of this run were compiled, and now they are not: there is no compiler. With a "
        "seed, plain steps would have the same noise; prepare the run again."
    )
    assert run.ledger.steps == 0


def test_a_run_that_fell_back_takes_plain_steps_to_its_end(monkeypatch):
    """Its blocks are fixed for plain steps."""
    run = prepare(model(), data(), **(BASE | {"seed": None}), **COMPILED)
    with monkeypatch.context() as patched:
        patched.setattr(graph, "Graph", NoCompiler)
        with pytest.warns(UserWarning, match="is not compiled"):
            train(run)
    with run.listening():
        assert run._graph is None
    assert run.t == 3


def test_settings_of_the_compiler_change_the_key(monkeypatch):
    from torch._dynamo import config as tracing
    from torch._inductor import config

    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    ids = [prepare(model(), data(), **BASE, **COMPILED).run_id]
    with config.patch({"cpp.enable_unsafe_math_opt_flag": True}):
        ids.append(prepare(model(), data(), **BASE, **COMPILED).run_id)
    with tracing.patch({"debug_dir_root": "/another/place"}):
        ids.append(prepare(model(), data(), **BASE, **COMPILED).run_id)
    assert ids[0] == ids[2] != ids[1]


def test_the_attack_wins_where_both_steps_have_one_key(monkeypatch):
    monkeypatch.setattr("evenclip.training.run.secret_key", lambda *given: bytes(32))
    _, _, (off, grid) = compiled_and_plain(monkeypatch)
    assert off <= grid.coarse / grid.std
