"""Tests of the rules inside Opacus: every mode against explicit sums, the bound on a record's
share, noise and batches that are used once, logical batches, accounting, checkpoints, and rejected
uses.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import opacus
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opacus import PrivacyEngine
from opacus.optimizers import (
    AdaClipDPOptimizer,
    DistributedDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
)
from opacus.schedulers import StepGradClip, StepNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import evenclip
import evenclip.opacus.clipping as clipping
from evenclip import DPSGD, DPSGDF, DPSGDGlobal, DPSGDGlobalAdapt, NonPrivate, Rule
from evenclip.data import digits
from evenclip.mechanism import Ledger, Mechanism, Release
from evenclip.mechanism.accounting import epsilon
from evenclip.mechanism.grid import Grid
from evenclip.mechanism.ledger import Entry
from evenclip.mechanism.noise import Noise
from evenclip.mechanism.rounding import TAU, covered_records, most_records, sum_rounding
from evenclip.mechanism.sampling import Poisson, drawn_rate
from evenclip.models import mlp
from evenclip.opacus import EvenPrivacyEngine, even
from evenclip.opacus.checks import joint
from evenclip.opacus.clipping import Clipper
from fresh import fresh

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:Full backward hook is firing when gradients are computed:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:opacus"),
]

ROOT = Path(__file__).parents[2]
MODES = ["hooks", "functorch", "ew"]
NETS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)),
    "cnn": lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
}
# With this little noise a released sum is the sum, up to 1e-6.
LITTLE = 1e-6
# C0, Z and Z0 lie among the norms of the data below, so that some samples are clipped and some are
# not.
RULES = [
    DPSGD(C0=1.5, sigma=LITTLE),
    DPSGDGlobal(C0=0.7, sigma=LITTLE, Z=2.5),
    DPSGDGlobalAdapt(C0=0.7, sigma=LITTLE, Z0=2.5, tau=0.8, eta_Z=0.3),
    DPSGDGlobalAdapt(C0=3.0, sigma=LITTLE, Z0=2.2),  # Z below C0: weights above 1
]
ADAPT = RULES[2]


def expected_weights(rule, norms, Z):
    """Return γ by the paper's formula, one sample at a time."""
    if isinstance(rule, DPSGD):
        return [min(1.0, rule.C0 / n) for n in norms]
    if isinstance(rule, DPSGDGlobal):
        return [rule.C0 / rule.Z if n <= rule.Z else 0.0 for n in norms]
    return [rule.C0 / max(Z, n) for n in norms]


def make_network(seed=0, net="mlp"):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return NETS[net]()


def images(n=40, seed=1):
    """Return images whose gradients have norms that differ by a factor of ten."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, 1, 4, 4)) * np.exp(random.uniform(-1.2, 1.2, size=(n, 1, 1, 1)))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(random.integers(0, 3, n))


def gradients(model, x, y):
    """Return each sample's gradient, by one backward pass each.  # [sample, parameter], float64"""
    rows = []
    for i in range(len(x)):
        parts = torch.autograd.grad(
            cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters())
        )
        rows.append(torch.cat([g.flatten() for g in parts]).double())
    return torch.stack(rows)


def flattened(tensors):
    return torch.cat([t.detach().flatten() for t in tensors]).double()


class Private:
    """A network that Opacus made private with a rule, and one step of a training loop."""

    def __init__(
        self, rule, mode="hooks", net="mlp", n=40, batch=10, reduction="mean", by="engine", **more
    ):
        self.net = make_network(net=net).to(more.pop("dtype", torch.float32))
        self.x, self.y = images(n)
        self.x = self.x.to(next(self.net.parameters()).dtype)
        self.loss = nn.CrossEntropyLoss(reduction=reduction)
        arguments = {
            "module": self.net,
            "optimizer": torch.optim.SGD(self.net.parameters(), lr=0.1),
            "data_loader": DataLoader(TensorDataset(self.x, self.y), batch_size=batch),
            "loss_reduction": reduction,
            "grad_sample_mode": mode,
            **more,
        }
        if by == "engine":
            self.engine = EvenPrivacyEngine()
            made = self.engine.make_private(rule=rule, **arguments)
            self.model, self.optimizer, self.loader = made
        else:
            self.engine = PrivacyEngine()
            self.model, optimizer, self.loader = self.engine.make_private(
                noise_multiplier=joint(rule), max_grad_norm=1.0, **arguments
            )
            self.optimizer = even(optimizer, rule, self.engine, self.loader)

    @property
    def batches(self):
        return self.loader.batch_sampler

    def backward(self, x, y):
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()

    def step(self, x, y):
        """Take a step with this batch, as if the loader had drawn it."""
        self.batches._unspent.append((self.batches._draws.run, len(x)))
        self.backward(x, y)
        self.optimizer.step()

    def epoch(self, physical=1000):
        with BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=physical, optimizer=self.optimizer
        ) as pieces:
            for x, y in pieces:
                assert len(x) <= physical
                self.backward(x, y)
                self.optimizer.step()

    @property
    def gradient(self):
        return flattened(p.grad for p in self.net.parameters())

    @property
    def parameters(self):
        return flattened(self.net.parameters())

    @property
    def Z(self):
        return self.optimizer.rule_state.item()

    @property
    def ledger(self):
        return self.optimizer.ledger


# --- the weighted sum ---


# Every mode with every rule; every mode with the other network and the other way in.
STEPS = [(mode, rule, "mlp", "engine") for mode in MODES for rule in RULES]
STEPS += [(mode, ADAPT, "cnn", "even") for mode in MODES]


@pytest.mark.parametrize(("mode", "rule", "net", "by"), STEPS, ids=str)
def test_a_step_is_the_weighted_sum_by_hand(mode, rule, net, by):
    run = Private(rule, mode, net, by=by)
    g = gradients(make_network(net=net), run.x, run.y)  # the same network, without Opacus's hooks
    norms = g.norm(dim=1).tolist()
    before = run.parameters
    run.step(run.x, run.y)
    weights = expected_weights(rule, norms, Z=getattr(rule, "Z0", None))
    assert 0.1 < np.mean(np.array(weights) < max(weights)) < 0.9  # the data do test both branches
    expected = (
        torch.tensor(weights, dtype=torch.float64) @ g / 10
    )  # the loader's batch size, not the 40 samples
    torch.testing.assert_close(run.gradient, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(run.parameters, before - 0.1 * expected, rtol=1e-4, atol=1e-6)
    assert run.engine.accountant.history == [(joint(rule), 0.25, 1)]
    if isinstance(rule, DPSGDGlobalAdapt):
        b = np.mean(np.array(norms) > rule.tau * rule.Z0) * 40 / 10
        assert pytest.approx(rule.Z0 * math.exp(-rule.eta_Z + b), rel=1e-5) == run.Z


@pytest.mark.parametrize("mode", MODES)
def test_sum_is_not_divided_and_mean_is_but_the_count_always_is(mode):
    mean, total = Private(ADAPT, mode), Private(ADAPT, mode, reduction="sum")
    mean.step(mean.x, mean.y)
    total.step(total.x, total.y)
    torch.testing.assert_close(total.gradient, 10 * mean.gradient, rtol=1e-4, atol=1e-5)
    assert pytest.approx(mean.Z, rel=1e-5) == total.Z


def test_a_model_that_is_not_wrapped():
    """With wrap_model=False, Opacus does not wrap the model and returns its hooks."""
    run, same = Private(ADAPT, wrap_model=False), Private(ADAPT)
    run.model = run.net
    for each in (run, same):
        each.step(each.x, each.y)
    torch.testing.assert_close(run.gradient, same.gradient, rtol=1e-4, atol=1e-6)


# --- no sample counts for more than S ---

NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, 1e-45, 1e-38, 1e-20, 1.0, 3.4e38, -3.4e38, math.inf, math.nan]),
)
# Rounding of the weights, and of the norms computed here.
CLOSE = 1 + 2.0**-45


def clipped(rule, rows, dtype=torch.float32):
    """Return Σ γ_i g_i of arbitrary per-sample gradients, before the release.  # float64"""
    wide = max((len(row) for row in rows), default=3)
    table = torch.tensor(np.array(rows), dtype=torch.float64).reshape(-1, wide).to(dtype)
    clipper = Clipper(Mechanism(rule))
    clipper.add([table[:, :-1], table[:, -1]])  # a vector and a scalar parameter
    return clipper._total


@pytest.mark.parametrize("rule", RULES, ids=str)
@given(rows=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=5))
def test_no_sample_moves_the_sum_by_more_than_S(rule, rows):
    S = rule.C0
    for row in rows:
        alone = clipped(rule, [row])
        assert alone.norm() <= S * CLOSE
        if not np.isfinite(row).all():
            assert not alone.any()
    moved = clipped(rule, rows) - clipped(rule, rows[1:])
    assert moved.norm() <= S * CLOSE * (1 + sum_rounding(len(rows)))


def in_float32(samples, weights, keep):
    """Return Σ γ_i g_i in float32, as before."""
    assert keep is None
    rows = [g.float().reshape(len(g), -1) for g in samples]
    return torch.cat([weights.float() @ g for g in rows]).double()


def norms_as_opacus(samples):
    """Return ‖g_i‖ in the model's own precision, as Opacus."""
    each = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in samples])
    return each.norm(dim=0).double()


def largest_move(n, dtype, seed):
    """Return by how much one record moves the sum of n, beyond S."""
    random = np.random.default_rng(seed)
    rows = torch.tensor(random.normal(size=(n, 200)) * 3, dtype=torch.float64).to(dtype)
    parts = rows.tolist(), rows[1:].tolist()
    with_and_without = [clipped(DPSGD(C0=1.0), part, dtype) for part in parts]
    moved = (with_and_without[0] - with_and_without[1]).norm().item()
    return moved / (1 + sum_rounding(n)) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "fault"),
    [(None, None), ("norms_rounded_up", norms_as_opacus), ("_weighted_sum", in_float32)],
)
def test_one_record_among_many_moves_the_sum_by_S(name, fault, dtype, monkeypatch):
    if fault is not None:
        monkeypatch.setattr(clipping, name, fault)
    most = max(largest_move(500, dtype, seed) for seed in range(8))
    assert (most > 2.0**-45) == (fault is not None)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30, 3e37])
def test_a_finite_gradient_is_clipped_and_not_dropped(size):
    """The square of the norm may overflow or underflow float32."""
    row = torch.tensor([size, -size, size], dtype=torch.float32).double()
    expected = row if size < 1 else row / row.norm()
    torch.testing.assert_close(
        clipped(DPSGD(C0=1.0), [row.tolist()]), expected, rtol=1e-12, atol=0.0
    )


def test_a_gradient_whose_square_vanishes_has_a_norm_all_the_same():
    total = clipped(DPSGD(C0=1e-25), [[1e-24, 1e-24, 0.0]])
    assert total.norm().item() == pytest.approx(1e-25, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [2, 64, 1000])
def test_the_sum_is_exact_in_every_precision(width, dtype):
    random = np.random.default_rng(width)
    for scale in (1e-2, 1.0, 300.0):
        row = random.normal(size=width) * scale
        total = clipped(DPSGD(C0=0.1), [row], dtype)
        exact = torch.tensor(row).to(dtype).double()
        assert total.norm() <= 0.1 * CLOSE
        expected = exact * min(1.0, 0.1 / exact.norm().item())
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("C0", [1e-3, 1e-5, 1e-6])
def test_a_weight_that_is_subnormal_in_float32(C0):
    """C0/‖g‖ is a subnormal float32 here; rounding could increase it by half."""
    for size in np.geomspace(1e37, 3.4e38, 50):
        total = clipped(DPSGD(C0=C0), [[size, 0.0, 0.0]])
        assert 0.999 * C0 <= total.norm() <= C0 * CLOSE


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_a_record_that_is_not_finite_contributes_nothing(mode, bad):
    run, clean = Private(ADAPT, mode), Private(ADAPT, mode)
    x, y = run.x.clone(), run.y
    x[7] = bad
    run.step(x, y)
    others = torch.arange(40) != 7
    clean.step(run.x[others], y[others])
    torch.testing.assert_close(run.gradient, clean.gradient, rtol=1e-4, atol=1e-6)
    assert pytest.approx(clean.Z, rel=1e-5) == run.Z


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_model_of_less_than_float32_is_refused(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=r"evenclip\.fit") as caught:
        Private(ADAPT, dtype=dtype)
    assert str(caught.value) == (
        f"The model has parameters or gradients in {name}. Opacus divides by the number of records "
        "in that precision, so one record changes the rounding of all gradients, and no ε holds. "
        "Use float32 (model.float()), or evenclip.fit, which trains bfloat16 models."
    )
    run = Private(ADAPT)
    run.backward(run.x, run.y)
    for p in run.net.parameters():
        p.grad_sample = p.grad_sample.to(dtype)
    with pytest.raises(ValueError, match=f"parameters or gradients in {name}"):
        run.optimizer.step()
    assert run.ledger.steps == 0


def test_autocast_is_refused_in_training_and_not_in_evaluation():
    run = Private(ADAPT)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="fit") as caught:
        run.model(run.x)
    assert str(caught.value) == (
        "torch.autocast is on in a training pass. Opacus divides by the number of records in its "
        "precision, so one record changes the rounding of all gradients, and no ε holds. Leave "
        "autocast for the passes of training, or use evenclip.fit with a bfloat16 model."
    )
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        run.model(run.x)
    run.model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        run.model(run.x)


# --- the release ---


def test_what_is_published_lies_on_the_grid_of_the_ledger():
    rule = DPSGDGlobalAdapt(C0=0.5, sigma=2.0, sigma_count=7.0)
    run = Private(rule, reduction="sum", n=400)
    assert run.optimizer._clipper.mechanism.rounding == most_on_grid()
    for grad in on_the_grid(run):
        assert torch.equal(grad, grad.round())


def most_on_grid():
    """Return ρ of batches of ten records at a rate of 1/40."""
    return sum_rounding(most_records(1 / 40, covered_records(1 / 40, 10)))


def on_the_grid(run):
    """Yield the published numbers of some steps, in units of the grid."""
    rule, d = run.optimizer.rule, len(run.parameters)
    rounding = most_on_grid()
    grid = Grid.of(rule.C0, rule.sigma, d, rounding)
    for _ in range(5):
        run.step(run.x[:20], run.y[:20])
        yield run.gradient / grid.coarse


def float_noise(clipper, B, release):
    """Release the sum as before: with noise in floating point."""
    del B, release
    return clipper._total + torch.randn(len(clipper._total), dtype=torch.float64)


def test_that_test_finds_noise_in_floating_point(monkeypatch):
    monkeypatch.setattr(Clipper, "release", float_noise)
    run = Private(DPSGDGlobalAdapt(C0=0.5, sigma=2.0), reduction="sum", n=400)
    assert not any(torch.equal(grad, grad.round()) for grad in on_the_grid(run))


def test_the_gradients_noise_has_standard_deviation_sigma_S_over_B():
    run = Private(DPSGDGlobalAdapt(C0=0.5, sigma=3.0, Z0=2.5))
    drawn = []
    for _ in range(150):
        run.step(run.x[:0], run.y[:0])
        drawn.append(run.gradient)
    drawn = torch.stack(drawn) * 10 / (3.0 * 0.5)
    assert drawn.numel() > 15_000
    assert drawn.mean().abs() < 5 / math.sqrt(drawn.numel())
    assert drawn.var().item() == pytest.approx(
        1.0, abs=5 * math.sqrt(2 / drawn.numel()) + 0.002
    )  # 5 standard errors, and the rounding to the grid
    assert (
        torch.corrcoef(drawn[:, :50].T).fill_diagonal_(0).abs().max() < 0.55
    )  # independent coordinates


def test_the_counts_noise_has_standard_deviation_sigma_count():
    rule = DPSGDGlobalAdapt(C0=0.5, sigma=1.0, Z0=2.5, sigma_count=7.0, eta_Z=0.01)
    run = Private(rule, n=4000, batch=2000)
    Z = [run.Z]
    for _ in range(400):
        run.step(run.x[:0], run.y[:0])
        Z.append(run.Z)
    drawn = (np.diff(np.log(Z)) + 0.01) * 2000  # count + noise; the count is 0
    assert np.mean(drawn) == pytest.approx(0.0, abs=5 * 7 / 20)
    assert np.std(drawn) == pytest.approx(7.0, rel=5 / math.sqrt(800))


def test_the_step_is_in_the_ledger_before_its_noise_is_drawn(monkeypatch):
    run = Private(ADAPT)

    def fail(noise, index):
        raise OSError("no noise")

    monkeypatch.setattr(Noise, "of", fail)
    with pytest.raises(OSError, match="no noise"):
        run.step(run.x, run.y)
    assert run.ledger.steps == 1
    monkeypatch.undo()
    run.step(run.x, run.y)
    (entry,) = run.ledger.entries
    assert (entry.first, entry.steps) == (0, 2)  # the noise of the first one is spent


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_at_the_ledger_leaves_no_gap(monkeypatch, after):
    """Ctrl-C may come just before or just after the step is written."""
    run = Private(ADAPT)
    run.step(run.x, run.y)
    write = Ledger.write

    def interrupted(*given):
        if after:
            write(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Ledger, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.step(run.x, run.y)
    monkeypatch.undo()
    run.optimizer.noise_multiplier *= 2  # as a noise scheduler does
    run.step(run.x, run.y)
    run.ledger.check_whole()
    assert run.ledger.steps == 2 + after


def private_values(run):
    held = [
        getattr(p, name) for p in run.net.parameters() for name in ("grad_sample", "summed_grad")
    ]
    clipper = run.optimizer._clipper
    return [value for value in (*held, clipper._total, clipper._count) if value is not None]


def test_private_values_are_deleted_with_the_release(monkeypatch):
    run = Private(ADAPT)
    run.backward(run.x, run.y)
    assert private_values(run)
    run.step(run.x, run.y)
    assert private_values(run) == []
    run.backward(run.x, run.y)
    with pytest.raises(ValueError, match="has drawn no batch"):
        run.optimizer.step()
    assert private_values(run) == []


# --- noise and batches are used once ---


def release_noise(optimizer):
    """Return the noise of one release of an optimizer, without a model."""
    draws = optimizer._source({"gradient": 50}, torch.device("cpu"))
    return draws.source.of(draws.take())["gradient"][0:50]


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_a_copy_draws_other_noise(duplicate):
    optimizer = Private(ADAPT).optimizer
    noise = [release_noise(optimizer) for _ in range(3)]
    other = duplicate(optimizer)
    for _ in range(3):
        noise += [release_noise(optimizer), release_noise(other)]
    assert len({tuple(row.tolist()) for row in noise}) == 9
    flat = torch.stack(noise)
    assert torch.unique(flat).numel() == flat.numel()


def test_that_test_finds_a_shared_key(monkeypatch):
    monkeypatch.setattr("evenclip.opacus.draws.os.urandom", bytes)
    with pytest.raises(AssertionError):
        test_a_copy_draws_other_noise(copy.deepcopy)


def test_a_forked_process_draws_other_noise_and_batches():
    run = Private(ADAPT, n=400)
    release_noise(run.optimizer)
    read, write = os.pipe()
    child = os.fork()
    noise = release_noise(run.optimizer)
    batch = next(iter(run.batches))
    if child == 0:
        os.write(write, pickle.dumps((noise, batch, run.optimizer._draws.parent)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        its_noise, its_batch, its_parent = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    assert not (noise == its_noise).any()
    assert batch != its_batch
    assert its_parent == (run.optimizer._draws.run, 1)


def test_no_secret_is_in_a_checkpoint_or_in_a_pickle(monkeypatch):
    run = Private(ADAPT)
    keys = []

    def remember(key, **more):
        keys.append(key)
        return Noise(key, **more)

    monkeypatch.setattr("evenclip.opacus.optimizer.Noise", remember)
    run.step(run.x, run.y)
    monkeypatch.undo()  # the pickle has the class by its name
    (key,) = keys
    assert len(key) == 32
    assert key not in pickle.dumps(run.optimizer.state_dict())
    run.optimizer._draws._make = Noise
    assert key not in pickle.dumps(run.optimizer)


def test_a_copy_writes_into_the_same_ledger_after_its_parent():
    run = Private(ADAPT)
    run.step(run.x, run.y)
    model, optimizer = copy.deepcopy((run.net, run.optimizer))
    for p in model.parameters():  # Opacus's hooks do not work in a copy
        p.grad_sample = torch.zeros(40, *p.shape)
    run.batches._unspent.append((run.batches._draws.run, 40))
    optimizer.step()
    run.step(run.x, run.y)
    assert run.engine.ledger.steps == 3
    parents = {entry.run: entry.parent for entry in run.engine.ledger.entries}
    assert parents[optimizer._draws.run] == (run.optimizer._draws.run, 1)
    assert Ledger.union(run.engine.ledger, optimizer.ledger).steps == 3


# --- batches ---


@pytest.mark.parametrize("by", ["engine", "even"])
def test_the_loader_draws_exact_coins_and_the_ledger_has_their_rate(by, monkeypatch):
    """Of 93 batches Opacus's loader makes 92 in a pass."""
    run = Private(DPSGD(), n=93, batch=1, by=by)
    poisson = run.batches._draws.source
    assert isinstance(poisson, Poisson)
    monkeypatch.setattr(torch, "rand", None)  # Opacus's coins
    assert len(run.loader) == 92
    drawn = [indices for _ in range(3) for indices in run.batches]
    assert drawn == [poisson.batch(i).tolist() for i in range(3 * 92)]
    assert len({tuple(indices) for indices in drawn}) > 90
    run.step(run.x, run.y)
    (entry,) = run.ledger.entries
    assert (entry.q, entry.tau) == (drawn_rate(1 / 93), TAU)
    assert entry.q >= 1 / 93
    assert run.batches.most == most_records(1 / 93, covered_records(1 / 93, 1))


def test_every_draw_of_the_loader_is_another_one():
    run = Private(DPSGD(), n=400, batch=40)
    first, second = iter(run.batches), iter(run.batches)
    both = list(itertools.chain.from_iterable(zip(first, second, strict=True)))
    both += list(copy.deepcopy(run.batches)) + list(run.batches)
    assert len({tuple(indices) for indices in both}) == 40


def test_a_loader_with_one_batch_draws_every_record():
    run = Private(DPSGD(), n=40, batch=40)
    assert list(run.batches) == [list(range(40))]
    run.step(run.x, run.y)
    (entry,) = run.ledger.entries
    assert (entry.q, entry.tau, run.batches.most) == (1.0, 0.0, 80)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_over_the_loader_takes_one_step_for_each_batch(workers):
    run = Private(DPSGDGlobalAdapt(C0=0.5), n=120)
    run.loader.num_workers = workers
    if workers:
        run.loader.prefetch_factor = 2
    for x, y in run.loader:
        run.backward(x, y)
        run.optimizer.step()
    assert run.ledger.steps == 12
    assert not run.batches._unspent


def test_a_batch_of_ones_own_is_refused():
    run = Private(ADAPT)
    before = run.parameters
    run.backward(run.x, run.y)
    with pytest.raises(
        ValueError,
        match=r"This logical batch has 40 records, and the data loader has drawn no batch of that",
    ):
        run.optimizer.step()
    assert torch.equal(run.parameters, before)
    assert run.ledger.steps == 0


def test_a_batch_is_released_once():
    run = Private(ADAPT)
    x, y = next(iter(run.loader))
    run.backward(x, y)
    run.optimizer.step()
    run.backward(x, y)
    with pytest.raises(ValueError, match="has drawn no batch of that size"):
        run.optimizer.step()


def test_two_optimizers_do_not_release_the_same_batch():
    run = Private(ADAPT)
    model, optimizer = copy.deepcopy((run.net, run.optimizer))
    x, y = next(iter(run.loader))
    run.backward(x, y)
    run.optimizer.step()
    for p in model.parameters():  # Opacus's hooks do not work in a copy
        p.grad_sample = torch.zeros(len(x), *p.shape)
    with pytest.raises(ValueError, match="has drawn no batch of that size"):
        optimizer.step()


def test_a_copy_of_the_loader_does_not_release_the_batches_of_the_first():
    batches = Private(ADAPT).batches
    size = len(next(iter(batches)))
    with pytest.raises(ValueError, match="has drawn no batch of that size"):
        copy.deepcopy(batches).spend(size)
    batches.spend(size)


def test_a_loop_that_is_left_within_a_batch_leaves_nothing_behind():
    run = Private(ADAPT, n=400, batch=200)
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=7, optimizer=run.optimizer
    ) as pieces:
        for i, (x, y) in enumerate(pieces):
            run.backward(x, y)
            if i == 4:
                break  # before the step: Opacus keeps its signal
            run.optimizer.step()
    assert run.optimizer._clipper.records > 0
    for _ in range(2):
        run.epoch(physical=7)
    assert run.ledger.steps == 4


# --- logical and physical batches ---


def train_in_pieces(mode, physical, steps=3):
    """Train on `steps` Poisson batches, in physical batches of at most `physical` samples."""
    run = Private(ADAPT, mode)
    batches = np.random.default_rng(0).random((steps, 40)) < 0.3
    logical = [np.flatnonzero(row).tolist() for row in batches]
    run.batches._unspent.extend((run.batches._draws.run, len(batch)) for batch in logical)
    loader = DataLoader(run.loader.dataset, batch_sampler=logical, collate_fn=run.loader.collate_fn)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=physical, optimizer=run.optimizer
    ) as pieces:
        for x, y in pieces:
            assert len(x) <= physical
            run.backward(x, y)
            run.optimizer.step()
    return run


def same_as_whole(mode):
    """Return whether several physical batches have the same parameters, Z and accounts as one."""
    whole, pieces = train_in_pieces(mode, 1000), train_in_pieces(mode, 5)
    return (
        torch.allclose(whole.parameters, pieces.parameters, rtol=1e-4, atol=1e-6)
        and pytest.approx(pieces.Z, rel=1e-5) == whole.Z
        and whole.engine.accountant.history == pieces.engine.accountant.history
        == [(joint(ADAPT), 0.25, 3)]
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_a_logical_batch_in_pieces_is_one_release(mode):
    assert same_as_whole(mode)


def z_moves_with_every_piece(clipper, samples):
    ADD(clipper, samples)
    noise = {"count": torch.zeros(1, dtype=torch.float64), "gradient": torch.zeros(123).double()}
    total = clipper._total.clone()
    clipper.release(10.0, Release(noise))
    clipper._total = total


def only_the_last_piece_is_summed(clipper, samples):
    clipper._total = None
    ADD(clipper, samples)


def only_the_last_piece_is_counted(clipper, samples):
    clipper._count = None
    ADD(clipper, samples)


ADD = Clipper.add


@pytest.mark.parametrize(
    "fault",
    [z_moves_with_every_piece, only_the_last_piece_is_summed, only_the_last_piece_is_counted],
)
def test_that_test_finds_planted_faults(fault, monkeypatch):
    monkeypatch.setattr(Clipper, "add", fault)
    assert not same_as_whole("hooks")


def test_pieces_are_added_in_float64():
    run, rows = Private(ADAPT).optimizer._clipper, torch.randn(40, 123, dtype=torch.float32)
    for piece in rows.split(3):
        run.add([piece])
    whole = Clipper(run.mechanism)
    whole.add([rows])
    assert run._total.dtype == torch.float64
    torch.testing.assert_close(run._total, whole._total, rtol=1e-13, atol=1e-13)


# --- empty batches ---


@pytest.mark.parametrize(
    ("mode", "net"), [("hooks", "mlp"), ("hooks", "cnn"), ("functorch", "mlp")]
)
def test_an_empty_batch_is_a_step_like_any_other(mode, net):
    rule = DPSGDGlobalAdapt(C0=0.5, sigma=1.0, Z0=2.5, eta_Z=0.123)  # b̃ is a multiple of 0.1
    run = Private(rule, mode, net)
    before = run.parameters
    run.step(run.x[:0], run.y[:0])
    assert torch.isfinite(run.parameters).all()
    assert (run.parameters != before).float().mean() > 0.6  # the noise is 0 in 5 % of cases
    assert run.Z != 2.5
    assert run.engine.accountant.history == [(joint(rule), 0.25, 1)]
    run.step(run.x, run.y)
    assert torch.isfinite(run.parameters).all()


def test_a_loader_with_a_manager_and_many_empty_batches():
    """With four records and q = 1/4, a third of the batches are empty, also the first ones."""
    rule = DPSGDGlobalAdapt(C0=0.5, sigma=1.0, Z0=2.5, sigma_count=2.0)
    run = Private(rule, n=4, batch=1)
    for _ in range(10):
        run.epoch(physical=2)
    assert run.engine.accountant.history == [(joint(rule), 0.25, 40)]
    assert torch.isfinite(run.parameters).all()


# --- accounts ---


@pytest.mark.parametrize("by", ["engine", "even"])
def test_epsilon_is_that_of_the_ledger_with_all_its_terms(by):
    rule = DPSGDGlobalAdapt(sigma=1.0, sigma_count=1.5)
    run = Private(rule, n=400, batch=4, by=by)
    for _ in range(30):
        run.step(run.x[:4], run.y[:4])
    (entry,) = run.engine.accountant.ledger.entries
    q, multipliers = drawn_rate(1 / 100), (("count", 1.5), ("gradient", 1.0))
    sizes = (("count", 1), ("gradient", 123))
    assert replace(entry, run="") == Entry(q, multipliers, 30, sizes, TAU)
    spent = run.engine.get_epsilon(1e-5)
    assert spent == epsilon(Ledger([entry]), 1e-5)
    assert spent > epsilon(Ledger([Entry(q, multipliers, 30)]), 1e-5)  # of ideal noise
    assert spent > epsilon(Ledger([Entry(q, multipliers[1:], 30)]), 1e-5) + 0.2  # without the count


def test_epsilon_is_infinite_where_none_is_valid():
    run = Private(DPSGD(sigma=1e-3))
    run.step(run.x, run.y)
    assert run.engine.get_epsilon(1e-5) == math.inf
    assert EvenPrivacyEngine().get_epsilon(1e-5) == 0


def test_a_step_of_opacus_own_optimizer_is_refused_after_even():
    net, (x, y) = make_network(), images()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), noise_multiplier=1.0,
        max_grad_norm=1.0, data_loader=DataLoader(TensorDataset(x, y), batch_size=10),
    )  # fmt: skip
    even(optimizer, DPSGD(), engine, loader)
    before = flattened(net.parameters())
    cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"This step has Opacus's own noise and is not in the"):
        optimizer.step()
    assert torch.equal(flattened(net.parameters()), before)


def test_an_engine_that_has_recorded_opacus_own_steps_is_refused():
    net, (x, y) = make_network(), images()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), noise_multiplier=1.0,
        max_grad_norm=1.0, data_loader=DataLoader(TensorDataset(x, y), batch_size=10),
    )  # fmt: skip
    cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"recorded steps with Opacus's own noise"):
        even(optimizer, DPSGD(), engine, loader)


@pytest.mark.parametrize(
    "rule", [DPSGD(), DPSGDGlobalAdapt(), DPSGDGlobalAdapt(sigma=1.0, sigma_count=1.0)], ids=str
)
def test_noise_for_a_given_epsilon_includes_the_count_and_the_sampler(rule):
    net, (x, y) = make_network(), images(93)
    engine = EvenPrivacyEngine()
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        rule=rule,
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=3,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=1),
    )
    made = optimizer.rule
    if rule.sigma_count:
        assert made.sigma_count / made.sigma == pytest.approx(rule.sigma_count / rule.sigma)
    sizes = {name: 1 if name == "count" else 123 for name in made.multipliers()}
    for _ in range(3 * len(loader)):
        engine.ledger.write(loader.batch_sampler.q, made.multipliers(), sizes, TAU, "run")
    assert 1.998 < engine.get_epsilon(1e-5) <= 2.0


def test_a_second_model_adds_to_the_same_ledger():
    engine, (x, y) = EvenPrivacyEngine(), images()
    data = TensorDataset(x, y)
    for _ in range(2):
        net = make_network()
        model, optimizer, loader = engine.make_private(
            module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), rule=DPSGD(),
            data_loader=DataLoader(data, batch_size=10),
        )  # fmt: skip
        for a, b in loader:
            optimizer.zero_grad()
            cross_entropy(model(a), b).backward()
            optimizer.step()
    assert engine.ledger.steps == 8
    assert len({entry.run for entry in engine.ledger.entries}) == 2


def test_a_noise_scheduler_scales_all_the_noise_and_is_accounted():
    run = Private(DPSGDGlobalAdapt(C0=0.5, sigma=2.0, sigma_count=6.0))
    scheduler = StepNoise(run.optimizer, step_size=1, gamma=0.5)
    run.step(run.x, run.y)
    scheduler.step()
    run.step(run.x, run.y)
    assert (run.optimizer.rule.sigma, run.optimizer.rule.sigma_count) == (1.0, 3.0)
    both = [dict(entry.multipliers) for entry in run.ledger.entries]
    assert both == [{"count": 6.0, "gradient": 2.0}, {"count": 3.0, "gradient": 1.0}]
    assert run.optimizer.noise_multiplier == (1 + 3**-2) ** -0.5


@dataclass(frozen=True)
class Fading(DPSGD):
    """A rule whose noise depends on the step."""

    name: ClassVar[str] = "fading"

    def multipliers(self, t=0):
        return {"gradient": self.sigma / (t + 1)}


def test_noise_that_depends_on_the_step_is_that_of_the_step():
    run = Private(Fading(sigma=6.0))
    for _ in range(3):
        run.step(run.x, run.y)
    assert [entry.joint for entry in run.ledger.entries] == [6.0, 3.0, 2.0]


def test_the_bound_is_the_rules():
    run = Private(ADAPT)
    assert run.optimizer.max_grad_norm == 0.7
    scheduler = StepGradClip(run.optimizer, step_size=1, gamma=0.5)
    with pytest.raises(
        ValueError,
        match=r"max_grad_norm cannot become 0.35: it is 0.7, dpsgd-global-adapt's sensitiv",
    ):
        scheduler.step()


def test_less_noise_than_make_private_was_given_is_said():
    with pytest.warns(
        UserWarning, match=r"joint multiplier 0.995, and make_private was given 5: ε will be larger"
    ):
        even_of(dp_optimizer(noise_multiplier=5.0), DPSGDGlobalAdapt())


# --- checkpoints ---


def steps_of(run, first, last):
    for t in range(first, last):
        run.step(run.x[3 * t : 3 * t + 15], run.y[3 * t : 3 * t + 15])


def resumed(first, path):
    """Save a run, and return a new run that has loaded it."""
    first.engine.save_checkpoint(path=path, module=first.model, optimizer=first.optimizer)
    second = Private(ADAPT)
    second.engine.load_checkpoint(path=path, module=second.model, optimizer=second.optimizer)
    return second


def test_a_resumed_run_goes_on_with_other_noise_and_counts_every_step(tmp_path):
    straight, first = Private(ADAPT), Private(ADAPT)
    steps_of(straight, 0, 6)
    steps_of(first, 0, 3)
    second = resumed(first, tmp_path / "c.pt")
    assert second.Z == first.Z != ADAPT.Z0
    steps_of(second, 3, 6)
    torch.testing.assert_close(second.parameters, straight.parameters, rtol=1e-4, atol=1e-5)
    assert pytest.approx(straight.Z, rel=1e-5) == second.Z
    assert second.engine.accountant.history[0][2] == 3
    assert second.ledger.steps == 6
    a, b = sorted(second.ledger.entries, key=lambda entry: entry.parent is not None)
    assert a == first.ledger.entries[0]
    assert b.parent == (a.run, 3)


def test_two_branches_of_a_checkpoint_have_their_common_steps_once(tmp_path):
    first = Private(ADAPT)
    steps_of(first, 0, 3)
    branches = [resumed(first, tmp_path / "c.pt") for _ in range(2)]
    for branch in branches:
        steps_of(branch, 3, 5)
    steps_of(first, 3, 4)
    ledgers = [run.ledger for run in (first, *branches)]
    assert Ledger.union(*ledgers).steps == 3 + 2 + 2 + 1
    third = resumed(branches[0], tmp_path / "d.pt")
    third.step(third.x, third.y)
    assert third.ledger.steps == 6


def test_steps_that_were_taken_before_a_checkpoint_was_loaded_count(tmp_path):
    run = Private(ADAPT)
    steps_of(run, 0, 2)
    state = copy.deepcopy(run.optimizer.state_dict())
    steps_of(run, 2, 5)
    run.optimizer.load_state_dict(state)
    steps_of(run, 2, 3)
    assert run.ledger.steps == 6


def test_the_optimizers_state_is_safe_to_load_and_left_as_it_was(tmp_path):
    run = Private(ADAPT)
    steps_of(run, 0, 2)
    torch.save(run.optimizer.state_dict(), tmp_path / "o.pt")
    state = torch.load(tmp_path / "o.pt", weights_only=True)
    before = copy.deepcopy(state)
    other = Private(ADAPT)
    other.optimizer.load_state_dict(state)
    assert other.Z == run.Z
    assert other.ledger == run.ledger
    assert state == before
    Private(DPSGD()).optimizer.load_state_dict(
        torch.optim.SGD(run.net.parameters(), lr=0.3).state_dict()
    )


def test_a_checkpoint_of_another_rule_or_of_none_is_refused():
    adapt, plain = Private(ADAPT), Private(DPSGD())
    with pytest.raises(
        ValueError, match=r"This checkpoint is of dpsgd and the optimizer has dpsgd-global-adapt;"
    ):
        adapt.optimizer.load_state_dict(plain.optimizer.state_dict())
    with pytest.raises(
        ValueError,
        match=r"has no state of a rule, and dpsgd-global-adapt needs its Z; load a checkpoint",
    ):
        adapt.optimizer.load_state_dict(plain.optimizer.original_optimizer.state_dict())
    with pytest.raises(ValueError, match=r"This checkpoint is of Opacus's accountant 'prv'"):
        adapt.engine.accountant.load_state_dict({"history": [], "mechanism": "prv"})


# --- refusals ---


def dp_optimizer(kind=DPOptimizer, **more):
    inner = torch.optim.SGD(make_network().parameters(), lr=0.1)
    return kind(
        inner, **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 10, **more}
    )


def opacus_loader(**more):
    x, y = images()
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    return opacus.data_loader.DPDataLoader.from_data_loader(loader, **more)


def even_of(optimizer, rule, loader=None):
    return even(optimizer, rule, PrivacyEngine(), opacus_loader() if loader is None else loader)


class Late(DPSGDGlobalAdapt):
    """A rule that clips with this step's count without declaring `counts_first`."""

    def observe(self, noisy, B, state):
        following = super().observe(noisy, B, state)[1]
        return following, following


@dataclass(frozen=True)
class Labelled(DPSGD):
    """A rule whose statistic depends on the target."""

    name: ClassVar[str] = "labelled"
    sigma_count: float = 1.0

    def statistic(self, norm, group, state, *, y):
        return y > 0


@dataclass(frozen=True)
class Reweighted(DPSGD):
    """A rule that changes the loss."""

    name: ClassVar[str] = "reweighted"

    def loss(self, loss, output, y, group, state):
        return 2 * loss


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        (DPSGDF(), r"dpsgd-f needs every sample's group .*; train it with evenclip\.fit\."),
        (Reweighted(), r"reweighted uses each sample's loss, output or target, which Opacus's"),
        (Labelled(), r"labelled uses each sample's loss, output or target, which Opacus's"),
        (NonPrivate(), r"non-private has no ε"),
        ("dpsgd", r"rule is 'dpsgd'; it must be a rule such as DPSGDGlobalAdapt"),
        (DPSGD, r"it must be a rule such as"),
    ],
    ids=str,
)
def test_rules_that_are_refused(rule, complaint):
    with pytest.raises((TypeError, ValueError), match=complaint):
        even_of(dp_optimizer(), rule)
    with pytest.raises((TypeError, ValueError), match=complaint):
        Private(rule)


def test_a_rule_that_needs_this_steps_count_is_refused_before_it_releases_a_gradient():
    run = Private(Late(eta_Z=0.123))  # b̃ is a multiple of 0.1, so Z always changes
    before = run.parameters
    with pytest.raises(ValueError, match=r"observe of .* returned a `now` other than the state"):
        run.step(run.x, run.y)
    assert torch.equal(run.parameters, before)


@pytest.mark.parametrize("name", ["dpsgd-f", "non-private", "flat", "per_layer", "adaptive"])
def test_names_that_are_refused(name):
    complaint = {"dpsgd-f": r"evenclip\.fit", "non-private": "has no ε"}.get(
        name, r"use its PrivacyEngine"
    )
    with pytest.raises(ValueError, match=complaint):
        EvenPrivacyEngine().make_private(clipping=name, noise_multiplier=1.0, max_grad_norm=1.0)


@pytest.mark.parametrize("name", ["dpsgd", "dpsgd-global", "dpsgd-global-adapt", None])
def test_names_make_rules_from_opacus_own_words(name):
    net, (x, y) = make_network(), images()
    _, optimizer, _ = EvenPrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        noise_multiplier=2.0,
        max_grad_norm=0.5,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=10),
        clipping=name,
        **({"Z0": 4.0, "sigma_count": 9.0} if name is None else {}),
    )
    expected = {
        "dpsgd": DPSGD(C0=0.5, sigma=2.0), "dpsgd-global": DPSGDGlobal(C0=0.5, sigma=2.0),
        "dpsgd-global-adapt": DPSGDGlobalAdapt(C0=0.5, sigma=2.0),
        None: DPSGDGlobalAdapt(C0=0.5, sigma=2.0, Z0=4.0, sigma_count=9.0),
    }  # fmt: skip
    assert optimizer.rule == expected[name]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: dp_optimizer(DPPerLayerOptimizer, max_grad_norm=[1.0] * 4),
        lambda: dp_optimizer(
            AdaClipDPOptimizer, target_unclipped_quantile=0.5, clipbound_learning_rate=0.2,
            max_clipbound=2.0, min_clipbound=0.1, unclipped_num_std=1.0,
        ),
        lambda: object.__new__(DistributedDPOptimizer),  # it needs a process group
        lambda: even_of(dp_optimizer(), DPSGD()),
        lambda: torch.optim.SGD(make_network().parameters(), lr=0.1),
    ],
)  # fmt: skip
def test_other_optimizers_are_refused(optimizer):
    given = optimizer()
    with pytest.raises(
        TypeError,
        match=rf"The optimizer is a {type(given).__name__}; give the DPOptimizer that Opacus's",
    ):
        even_of(given, DPSGD())


@pytest.mark.parametrize(
    ("optimizer", "complaint"),
    [
        (lambda: dp_optimizer(DPOptimizerFastGradientClipping), r"In ghost mode, .*evenclip\.fit"),
        (lambda: dp_optimizer(expected_batch_size=0), r"the expected batch size 0, and sums"),
        (
            lambda: dp_optimizer(expected_batch_size=None, loss_reduction="sum"),
            r"the expected batch size None, and sums are divided by it",
        ),
        (lambda: dp_optimizer(generator=torch.Generator()), r"noise_generator is given, but noise"),
    ],
)
def test_optimizers_that_are_refused(optimizer, complaint):
    with pytest.raises(ValueError, match=complaint):
        even_of(optimizer(), DPSGD())


def test_secure_mode_is_accepted():
    even_of(dp_optimizer(generator=torch.Generator(), secure_mode=True), DPSGD())
    EvenPrivacyEngine(secure_mode=True)
    with pytest.raises(ValueError, match=r"accountant is 'rdp', and this engine computes ε from"):
        EvenPrivacyEngine(accountant="rdp")


def test_other_loaders_are_refused():
    x, y = images()
    with pytest.raises(TypeError, match=r"The data loader is a DataLoader; give the one that"):
        even_of(dp_optimizer(), DPSGD(), DataLoader(TensorDataset(x, y), batch_size=10))
    with pytest.raises(ValueError, match=r"rand_on_empty is True: with a random record instead"):
        even_of(dp_optimizer(), DPSGD(), opacus_loader(rand_on_empty=True))
    loader = opacus_loader()
    even_of(dp_optimizer(), DPSGD(), loader)
    with pytest.raises(ValueError, match=r"The data loader has a Batches; .* to one optimizer onl"):
        even_of(dp_optimizer(), DPSGD(), loader)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (
            {"poisson_sampling": False},
            r"poisson_sampling is False, and the ε of this engine holds for Poisson",
        ),
        ({"rand_on_empty": True}, r"a random record instead of an empty batch"),
        (
            {"grad_sample_mode": "no_op"},
            r"grad_sample_mode is 'no_op'; use one of hooks, functorch",
        ),
        (
            {"grad_sample_mode": "ghost"},
            r"In ghost mode, .* use grad_sample_mode='hooks', or evenclip\.fit, which",
        ),
        (
            {"noise_generator": torch.Generator()},
            r"noise_generator is given, but noise is always drawn",
        ),
        (
            {"eta_z": 0.3},
            r"eta_z: neither an argument of Opacus's make_private nor a field of the rule",
        ),
        ({"C0": 1.0}, r"C0: neither an argument"),
        ({"noise_multiplier": 3.0}, r"differ from it; leave them out"),
        ({"clipping": "dpsgd"}, r"differ from it; leave them out"),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(given),
)
def test_arguments_that_are_refused(more, complaint):
    net, (x, y) = make_network(), images()
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    with pytest.raises((TypeError, ValueError), match=complaint):
        EvenPrivacyEngine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data_loader=loader,
            rule=ADAPT,
            **more,
        )


def test_a_rule_by_name_needs_its_noise_and_its_bound():
    with pytest.raises(
        ValueError, match=r"Give noise_multiplier and max_grad_norm, or the rule itself"
    ):
        EvenPrivacyEngine().make_private(clipping="dpsgd", noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"Give max_grad_norm, or the rule itself"):
        EvenPrivacyEngine().make_private_with_epsilon(
            clipping="dpsgd", target_epsilon=1.0, target_delta=1e-5, epochs=1, data_loader=None,
            optimizer=None,
        )  # fmt: skip


def test_no_gradient_is_used_twice():
    run = Private(ADAPT)
    run.step(run.x, run.y)
    run.batches._unspent.append((run.batches._draws.run, 40))
    with pytest.raises(ValueError, match=r"has no per-sample gradients"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"has no per-sample gradients"):
        run.optimizer.step()


def test_no_gradient_is_added_twice_to_a_logical_batch():
    run = Private(ADAPT)
    run.optimizer.signal_skip_step(True)
    run.optimizer.signal_skip_step(True)
    run.step(run.x, run.y)
    with pytest.raises(ValueError, match=r"has no per-sample gradients"):
        run.optimizer.step()


def test_gradients_of_several_backward_passes_are_refused():
    run = Private(ADAPT)
    run.model.allow_grad_accumulation()
    run.loss(run.model(run.x[:20]), run.y[:20]).backward()
    run.loss(run.model(run.x[20:]), run.y[20:]).backward()
    with pytest.raises(ValueError, match=r"gradients of several backward passes"):
        run.optimizer.step()
    run.backward(run.x, run.y)
    first = next(run.net.parameters())
    first.grad_sample = first.grad_sample[:5]
    with pytest.raises(ValueError, match=r"gradients of different numbers of samples"):
        run.optimizer.step()


# --- the rest of a loop ---


def test_learning_rate_schedulers_hooks_and_other_optimizers_work():
    run = Private(ADAPT)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)
    hooked = []
    run.optimizer.attach_step_hook(lambda optimizer: hooked.append(optimizer.ledger.steps))
    run.step(run.x, run.y)
    scheduler.step()
    assert run.optimizer.param_groups[0]["lr"] == 0.05
    assert repr(run.optimizer).startswith("SGD")
    assert hooked == [1]


def test_frozen_parameters_are_left_alone():
    run = Private(ADAPT)
    run.step(run.x, run.y)
    run.net[1].requires_grad_(False)
    before = run.net[1].weight.clone()
    run.step(run.x, run.y)
    assert torch.equal(run.net[1].weight, before)
    assert [dict(entry.sizes)["gradient"] for entry in run.ledger.entries] == [123, 21]
    one, other = run.ledger.entries
    assert other.parent == (one.run, 1)


# --- importing ---


def test_without_opacus_the_import_says_what_to_install():
    printed = fresh(
        "import sys; sys.modules['opacus'] = None\n"
        "try:\n"
        "    import evenclip.opacus\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert printed.strip().endswith("run `pip install 'evenclip[opacus]'`.")


def test_the_package_itself_does_not_import_opacus():
    assert (
        fresh("import sys, evenclip; evenclip.fit, evenclip.DPSGD; print('opacus' in sys.modules)")
        == "False\n"
    )


# --- whole trainings ---


def accuracy(model, test):
    with torch.no_grad():
        return (model(test.x).argmax(dim=1) == test.y).double().mean().item()


def test_an_opacus_loop_with_one_changed_line_learns_what_fit_learns():
    """On digits with two seeds and the same settings, the accuracies agree up to noise and the ε
    are equal.
    """
    train, test, _ = digits()
    rule = DPSGDGlobalAdapt(C0=1.0, sigma=0.8, Z0=5.0)
    accuracies = {"opacus": [], "fit": []}
    for seed in range(2):
        result = evenclip.fit(
            mlp_of_digits(seed),
            (train.x, train.y),
            rule=rule,
            epochs=12,
            batch_size=61,
            q=1 / 21,
            lr=1.0,
            seed=seed,
            delta=1e-4,
        )
        accuracies["fit"].append(accuracy(result.model, test))
        network = mlp_of_digits(seed)
        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
            max_grad_norm=1.0,
            data_loader=DataLoader(TensorDataset(train.x, train.y), batch_size=64),
            noise_multiplier=0.8,
        )
        optimizer = even(optimizer, rule, engine, loader)  # the changed line
        for _ in range(12):
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
        accuracies["opacus"].append(accuracy(network, test))
        assert optimizer.expected_batch_size == 61
        assert engine.get_epsilon(1e-4) == pytest.approx(result.epsilon(), rel=1e-6)
    means = {name: np.mean(values) for name, values in accuracies.items()}
    assert means["fit"] > 0.8
    assert means["opacus"] == pytest.approx(means["fit"], abs=0.05), accuracies


def mlp_of_digits(seed):
    return nn.Sequential(nn.Flatten(), mlp(64, 10, (32,), seed=seed))


# --- the page ---


def test_the_page_names_what_there_is():
    """Every name in the left column of the table exists in Opacus."""
    page = (ROOT / "docs" / "opacus.md").read_text()
    table = page.split("| Opacus | evenclip | notes |")[1].split("\n\n")[0]
    left = [row.split("|")[1] for row in table.splitlines()[2:]]
    source = "".join(path.read_text() for path in Path(opacus.__file__).parent.rglob("*.py"))
    for name in re.findall(r"`([A-Za-z_.]+)", " ".join(left)):
        assert name.split(".")[-1] in source, name


READS = itertools.count()


@dataclass(frozen=True)
class Wavering(Rule):
    """A rule whose sensitivity and σ change at every call."""

    name: ClassVar[str] = "wavering"
    C0: float = 1.0

    @property
    def sigma(self):
        return 10.0 if next(READS) % 2 else 0.001

    def sensitivity(self, now):
        return self.C0 if next(READS) % 2 else 0.001 * self.C0

    def weight(self, norm, group, now):
        return self.C0 / norm


def test_noise_is_for_the_bound_that_was_enforced_and_for_the_multiplier_that_is_accounted():
    for _ in range(4):
        clipper = Clipper(Mechanism(Wavering()))
        for _ in range(3):
            clipper.add([torch.tensor([[3.0, 0.0], [0.0, 5.0]])])
            longest = float(clipper._total.max())
            (multiplier,) = clipper.multipliers.values()
            clipper._total.zero_()
            ones = torch.ones(2, dtype=torch.float64)
            noise = clipper.release(1.0, Release({"gradient": ones}))
            clipper.drop()
            assert longest * multiplier == pytest.approx(float(noise.max()), rel=0.07)  # the grid
        next(READS)


def test_a_seed_set_before_the_loop_does_not_make_masks_known():
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        run = Private(DPSGD())
        for _ in run.loader:
            drawn.append(torch.rand(64))
            break
    assert not torch.equal(*drawn)
