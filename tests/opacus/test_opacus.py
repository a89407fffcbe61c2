"""Tests of the rules inside Opacus: every mode against explicit sums, noise, logical batches,
accounting, checkpoints, and rejected uses.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
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
    DPPerLayerOptimizer,
)
from opacus.schedulers import StepGradClip, StepNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import evenclip
import evenclip.opacus.optimizer as adapter
from evenclip import DPSGD, DPSGDF, DPSGDGlobal, DPSGDGlobalAdapt, NonPrivate, Rule
from evenclip.data import digits
from evenclip.mechanism.accounting import epsilon
from evenclip.mechanism.release import Entry, Ledger
from evenclip.models import mlp
from evenclip.opacus import EvenOptimizer, EvenPrivacyEngine, even
from evenclip.opacus.clipping import Clipper, joint

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:Full backward hook is firing when gradients are computed:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:opacus"),
]

ROOT = Path(__file__).parents[2]
MODES = ["hooks", "functorch", "ew", "ghost"]
NETS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)),
    "cnn": lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
}
# C0, Z and Z0 lie among the norms of the data below, so that some samples are clipped and some are
# not.
RULES = [
    DPSGD(C0=1.5, sigma=1.0),
    DPSGDGlobal(C0=0.7, sigma=1.0, Z=2.5),
    DPSGDGlobalAdapt(C0=0.7, sigma=1.0, Z0=2.5, tau=0.8, eta_Z=0.3),
    DPSGDGlobalAdapt(C0=3.0, sigma=1.0, Z0=2.2),  # Z below C0: weights above 1
]


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
        self,
        rule,
        mode="hooks",
        net="mlp",
        n=40,
        batch=10,
        reduction="mean",
        seed=None,
        by="engine",
        accountant="prv",
    ):
        self.net = make_network(net=net)
        self.x, self.y = images(n)
        loader = DataLoader(TensorDataset(self.x, self.y), batch_size=batch)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        inner = torch.optim.SGD(self.net.parameters(), lr=0.1)
        loss = nn.CrossEntropyLoss(reduction=reduction)
        common = {
            "module": self.net, "optimizer": inner, "data_loader": loader, "criterion": loss,
            "loss_reduction": reduction, "grad_sample_mode": mode, "noise_generator": generator,
        }  # fmt: skip
        if by == "engine":
            self.engine = EvenPrivacyEngine(accountant=accountant)
            out = self.engine.make_private(rule=rule, **common)
        else:
            self.engine = PrivacyEngine(accountant=accountant)
            out = self.engine.make_private(
                noise_multiplier=joint(rule), max_grad_norm=1.0, **common
            )
        self.model, self.optimizer, self.loader = out[0], out[1], out[-1]
        self.loss = out[2] if mode == "ghost" else loss
        if by == "even":
            self.optimizer = even(self.optimizer, rule, self.loss if mode == "ghost" else None)

    def step(self, x, y):
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
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


class ZeroNoise:
    """A replacement of Opacus's noise that returns zeros and records each draw."""

    def __init__(self):
        self.draws = []

    def __call__(self, *, std, reference, generator, secure_mode):
        assert reference.dtype == torch.float64  # float32 normals have no tail
        self.draws.append((std, tuple(reference.shape)))
        return torch.zeros_like(reference)


@pytest.fixture
def zero_noise(monkeypatch):
    recorder = ZeroNoise()
    monkeypatch.setattr(adapter, "_generate_noise", recorder)
    return recorder


# --- the weighted sum ---


# Every mode with every rule; every mode with the other network and the other way in.
STEPS = [(mode, rule, "mlp", "engine") for mode in MODES for rule in RULES]
STEPS += [(mode, RULES[2], "cnn", "even") for mode in MODES]


@pytest.mark.parametrize(("mode", "rule", "net", "by"), STEPS, ids=str)
def test_a_step_is_the_weighted_sum_by_hand(mode, rule, net, by, zero_noise):
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
    assert list(run.engine.accountant.history) == [(joint(rule), 1 / 4, 1)]
    if isinstance(rule, DPSGDGlobalAdapt):
        b = np.mean(np.array(norms) > rule.tau * rule.Z0) * 40 / 10
        assert pytest.approx(rule.Z0 * math.exp(-rule.eta_Z + b)) == run.Z


@pytest.mark.parametrize("mode", MODES)
def test_sum_is_not_divided_and_mean_is_but_the_count_always_is(mode, zero_noise):
    rule = RULES[2]
    mean, total = Private(rule, mode), Private(rule, mode, reduction="sum")
    mean.step(mean.x, mean.y)
    total.step(total.x, total.y)
    torch.testing.assert_close(total.gradient, 10 * mean.gradient, rtol=1e-5, atol=1e-7)
    assert pytest.approx(mean.Z) == total.Z


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_model_that_is_not_wrapped(mode, zero_noise):
    """With wrap_model=False, Opacus does not wrap the model and returns its hooks."""
    rule, net = RULES[2], make_network()
    x, y = images()
    out = EvenPrivacyEngine().make_private(
        rule=rule,
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        grad_sample_mode=mode,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=10),
        wrap_model=False,
    )
    (out[2] if mode == "ghost" else nn.CrossEntropyLoss())(net(x), y).backward()
    out[1].step()
    same = Private(rule)
    same.step(x, y)
    torch.testing.assert_close(
        flattened(p.grad for p in net.parameters()), same.gradient, rtol=1e-4, atol=1e-6
    )


def test_accumulated_batches_are_one_batch_of_their_sizes_together(zero_noise):
    """Two backward passes before one step; Opacus allows this without Poisson sampling."""
    net = make_network()
    x, y = images()
    model, optimizer, _ = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=10),
        poisson_sampling=False,
    )
    optimizer = even(optimizer, RULES[2])
    for part in (slice(0, 25), slice(25, 40)):
        cross_entropy(model(x[part]), y[part]).backward()
    assert optimizer.accumulated_iterations == 2
    optimizer.step()
    whole = Private(RULES[2])
    whole.step(x, y)
    torch.testing.assert_close(
        flattened(p.grad for p in net.parameters()), whole.gradient / 2, rtol=1e-5, atol=1e-7
    )
    b = (math.log(whole.Z / 2.5) + 0.3) / 2  # half the share
    assert optimizer.rule_state.item() == pytest.approx(2.5 * math.exp(-0.3 + b))


# --- no sample counts for more than S ---

NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, 1e-45, 1e-38, 1e-20, 1.0, 3.4e38, -3.4e38, math.inf, math.nan]),
)


def clipped(rule, rows, dtype=torch.float32):
    """Return Σ γ_i g_i of arbitrary per-sample gradients, stored as backward() would."""
    wide = max((len(row) for row in rows), default=3)
    p, q = (
        nn.Parameter(torch.zeros(wide - 1, dtype=dtype)),
        nn.Parameter(torch.zeros((), dtype=dtype)),
    )
    inner = torch.optim.SGD([p, q], lr=1.0)
    optimizer = EvenOptimizer(
        DPOptimizer(
            inner,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=1,
            loss_reduction="sum",
        ),
        rule,
    )
    table = torch.tensor(np.array(rows), dtype=torch.float64).reshape(-1, wide).to(dtype)
    p.grad_sample, q.grad_sample = table[:, :-1], table[:, -1]
    optimizer.clip_and_accumulate()
    return flattened([p.summed_grad, q.summed_grad])


@pytest.mark.parametrize("rule", RULES, ids=str)
@given(rows=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=5))
def test_no_sample_moves_the_sum_by_more_than_S(rule, rows):
    S = rule.C0
    for row in rows:
        alone = clipped(rule, [row])
        assert alone.norm() <= S
        if not np.isfinite(row).all():
            assert not alone.any()
    moved = clipped(rule, rows) - clipped(rule, rows[1:])
    assert moved.norm() <= S * (1 + 1e-6 * len(rows))  # the sum itself is rounded


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30, 3e37])
def test_a_finite_gradient_is_clipped_and_not_dropped(size):
    """The square of the norm may overflow or underflow float32."""
    row = torch.tensor([size, -size, size], dtype=torch.float64)
    expected = row if size < 1 else row / row.norm()
    torch.testing.assert_close(
        clipped(DPSGD(C0=1.0), [row.tolist()]), expected, rtol=1e-5, atol=0.0
    )


def test_a_gradient_whose_square_vanishes_has_a_norm_all_the_same():
    total = clipped(DPSGD(C0=1e-25), [[1e-24, 1e-24, 0.0]])
    assert total.norm().item() == pytest.approx(1e-25, rel=1e-5)
    assert total.norm() <= 1e-25


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("width", [2, 64, 65, 66, 1000])
def test_the_bound_holds_in_every_precision_and_width(width, dtype):
    """The widths are around the size of a block, whose squares are summed in float32."""
    random = np.random.default_rng(width)
    for scale in (1e-2, 1.0, 300.0):
        row = random.normal(size=width) * scale
        total = clipped(DPSGD(C0=0.1), [row], dtype)
        exact = torch.tensor(row).to(dtype).double()
        assert total.norm() <= 0.1
        expected = exact * min(1.0, 0.1 / exact.norm().item())
        torch.testing.assert_close(
            total, expected, rtol=20 * torch.finfo(dtype).eps + 1e-5, atol=1e-6
        )


@pytest.mark.parametrize("C0", [1e-3, 1e-5, 1e-6])
def test_a_weight_that_has_lost_its_digits_is_none(C0):
    """C0/‖g‖ is a subnormal float32 here; rounding could increase it by half."""
    for size in np.geomspace(1e37, 3.4e38, 50):
        assert clipped(DPSGD(C0=C0), [[size, 0.0, 0.0]]).norm() <= C0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_a_record_that_is_not_finite_contributes_nothing(mode, bad, zero_noise):
    run, clean = Private(RULES[2], mode), Private(RULES[2], mode)
    x, y = run.x.clone(), run.y
    x[7] = bad
    run.step(x, y)
    others = torch.arange(40) != 7
    clean.step(run.x[others], y[others])
    torch.testing.assert_close(run.gradient, clean.gradient, rtol=1e-5, atol=1e-7)
    assert run.Z == clean.Z


def test_in_ghost_mode_a_record_that_is_not_finite_stops_the_training(zero_noise):
    run = Private(RULES[2], "ghost")
    run.x[7] = math.nan
    before = run.parameters
    with pytest.raises(
        FloatingPointError, match=r"use grad_sample_mode='hooks', where they contribute nothing"
    ):
        run.step(run.x, run.y)
    assert torch.equal(run.parameters, before)
    assert run.Z == RULES[2].Z0


# --- noise ---


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_gradients_noise_has_standard_deviation_sigma_S_over_B(mode):
    rule = DPSGDGlobalAdapt(C0=0.5, sigma=3.0, Z0=2.5)
    run = Private(rule, mode, seed=3)
    drawn = []
    for _ in range(150):
        run.step(run.x[:0], run.y[:0])
        drawn.append(run.gradient)
    drawn = torch.stack(drawn) * 10 / (3.0 * 0.5)
    assert drawn.numel() > 15_000
    assert drawn.mean().abs() < 4 / math.sqrt(drawn.numel())
    assert drawn.var().item() == pytest.approx(
        1.0, abs=4 * math.sqrt(2 / drawn.numel())
    )  # 4 standard errors
    assert (
        torch.corrcoef(drawn[:, :50].T).fill_diagonal_(0).abs().max() < 0.5
    )  # independent coordinates


def test_the_counts_noise_has_standard_deviation_sigma_count():
    rule = DPSGDGlobalAdapt(C0=0.5, sigma=1.0, Z0=2.5, sigma_count=7.0, eta_Z=0.01)
    run = Private(rule, "hooks", n=4000, batch=2000, seed=4)
    Z, drawn = [run.Z], []
    for _ in range(400):
        run.step(run.x[:0], run.y[:0])
        Z.append(run.Z)
    drawn = (np.diff(np.log(Z)) + 0.01) * 2000  # count + noise; the count is 0
    assert np.mean(drawn) == pytest.approx(0.0, abs=4 * 7 / 20)
    assert np.std(drawn) == pytest.approx(7.0, rel=4 / math.sqrt(800))


def test_what_noise_is_asked_for(zero_noise):
    run = Private(DPSGDGlobalAdapt(C0=0.5, sigma=2.0, sigma_count=7.0))
    run.step(run.x, run.y)
    assert zero_noise.draws == [(1.0, (1,)), (1.0, (len(run.parameters),))]


def test_a_rule_without_a_count_asks_for_none(zero_noise):
    run = Private(DPSGDGlobal(C0=0.5, sigma=2.0))
    run.step(run.x, run.y)
    assert zero_noise.draws == [(1.0, (len(run.parameters),))]
    assert run.optimizer.noise_multiplier == 2.0


def test_noise_in_secure_mode_is_the_generators_too():
    """Opacus's secure mode sums four draws; this generator replaces that of torchcsprng."""

    def steps(seed):
        net, generator = make_network(), torch.Generator().manual_seed(seed)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        theirs = DPOptimizer(
            inner,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=10,
            generator=generator,
            secure_mode=True,
        )
        optimizer = even(theirs, RULES[2])
        for p in net.parameters():
            p.grad_sample = torch.zeros(0, *p.shape)
        optimizer.step()
        return flattened(p.grad for p in net.parameters()), optimizer.rule_state

    (one, Z), (again, again_Z), (other, other_Z) = steps(1), steps(1), steps(2)
    assert torch.equal(one, again)
    assert torch.equal(Z, again_Z)
    assert not (one == other).any()
    assert other_Z != Z
    assert one.std().item() * 10 == pytest.approx(0.7, rel=0.25)  # σ·C0, 123 numbers


def test_ghost_and_hooks_are_one_mechanism():
    """Five steps with the same noise give the same parameters, up to rounding, and the same Z."""
    runs = [Private(RULES[2], mode, net="cnn", seed=5) for mode in MODES]
    for t in range(5):
        for run in runs:
            run.step(run.x[4 * t : 4 * t + 12], run.y[4 * t : 4 * t + 12])
    for run in runs[1:]:
        torch.testing.assert_close(run.parameters, runs[0].parameters, rtol=1e-4, atol=1e-5)
        assert pytest.approx(runs[0].Z, rel=1e-9) == run.Z


# --- logical and physical batches ---


def train_in_pieces(mode, physical, zero_noise, steps=3):
    """Train on `steps` Poisson batches, in physical batches of at most `physical` samples."""
    del zero_noise.draws[:]
    run = Private(RULES[2], mode, accountant="rdp")
    batches = np.random.default_rng(0).random((steps, 40)) < 0.3
    logical = [np.flatnonzero(row).tolist() for row in batches]
    loader = DataLoader(run.loader.dataset, batch_sampler=logical, collate_fn=run.loader.collate_fn)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=physical, optimizer=run.optimizer
    ) as pieces:
        for x, y in pieces:
            assert len(x) <= physical
            run.step(x, y)
    return run


def same_as_whole(mode, zero_noise):
    """Return whether several physical batches have the same parameters, Z and accounts as one."""
    whole, pieces = train_in_pieces(mode, 1000, zero_noise), train_in_pieces(mode, 5, zero_noise)
    return (
        torch.allclose(whole.parameters, pieces.parameters, rtol=1e-4, atol=1e-6)
        and pytest.approx(pieces.Z) == whole.Z
        and whole.engine.accountant.history
        == pieces.engine.accountant.history
        == [(joint(RULES[2]), 1 / 4, 3)]
        and len(zero_noise.draws) == 3 * 2
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_logical_batch_in_pieces_is_one_release(mode, zero_noise):
    assert same_as_whole(mode, zero_noise)


def z_moves_with_every_piece(optimizer):
    EvenOptimizer.clip_and_accumulate(optimizer)
    clipper = optimizer._clipper
    clipper.release(flattened(p.summed_grad for p in optimizer.params), 10.0, optimizer._noise)
    clipper.add(torch.zeros(1, dtype=torch.float64))


def noise_with_every_piece(optimizer):
    EvenOptimizer.clip_and_accumulate(optimizer)
    for p in optimizer.params:
        p.summed_grad += optimizer._noise(p.numel()).view_as(p)


def only_the_last_piece_is_counted(optimizer):
    optimizer._clipper._count = None
    EvenOptimizer.clip_and_accumulate(optimizer)


@pytest.mark.parametrize(
    "fault", [z_moves_with_every_piece, noise_with_every_piece, only_the_last_piece_is_counted]
)
def test_that_test_finds_planted_faults(fault, zero_noise, monkeypatch):
    class Faulty(EvenOptimizer):
        clip_and_accumulate = fault

    monkeypatch.setattr("evenclip.opacus.engine.EvenOptimizer", Faulty)
    assert not same_as_whole("hooks", zero_noise)


def test_a_manager_made_before_the_rule_goes_on_working(zero_noise):
    net = make_network()
    x, y = images()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=40),
    )
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=7, optimizer=optimizer
    ) as pieces:
        optimizer = even(optimizer, RULES[2])
        for a, b in pieces:
            optimizer.zero_grad()
            cross_entropy(model(a), b).backward()
            optimizer.step()
    assert len(zero_noise.draws) == 2  # one step
    assert all(torch.isfinite(p).all() for p in net.parameters())


# --- empty batches ---


@pytest.mark.parametrize(
    ("mode", "net"),
    [("hooks", "mlp"), ("hooks", "cnn"), ("functorch", "mlp"), ("ghost", "mlp"), ("ghost", "cnn")],
)
def test_an_empty_batch_is_a_step_like_any_other(mode, net):
    rule = DPSGDGlobalAdapt(C0=0.5, sigma=1.0, Z0=2.5)
    run = Private(rule, mode, net, seed=6, accountant="rdp")
    before = run.parameters
    run.step(run.x[:0], run.y[:0])
    assert torch.isfinite(run.parameters).all()
    assert (run.parameters != before).all()
    assert run.Z not in (2.5, 2.5 * math.exp(-0.1))
    assert run.engine.accountant.history == [(joint(rule), 1 / 4, 1)]
    run.step(run.x, run.y)
    assert torch.isfinite(run.parameters).all()


def test_opacus_own_loader_with_a_manager_and_many_empty_batches():
    """With four records and q = 1/4, a third of the batches are empty, also the first ones."""
    rule = DPSGDGlobalAdapt(C0=0.5, sigma=1.0, Z0=2.5, sigma_count=2.0)
    run = Private(rule, "hooks", n=4, batch=1, seed=7, accountant="rdp")
    torch.manual_seed(0)
    sizes = []
    for _ in range(10):
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer
        ) as pieces:
            for x, y in pieces:
                run.step(x, y)
                sizes.append(len(x))
    assert sizes.count(0) > 5
    assert run.engine.accountant.history == [(joint(rule), 1 / 4, 40)]
    assert torch.isfinite(run.parameters).all()


# --- accounts ---


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_epsilon_is_that_of_our_own_ledger(accountant):
    """The count has little noise, so without it ε would be far smaller."""
    rule = DPSGDGlobalAdapt(sigma=1.0, sigma_count=1.5)
    run = Private(rule, n=400, batch=4, accountant=accountant)
    for _ in range(30):
        run.step(run.x[:4], run.y[:4])
    ((multiplier, q, steps),) = run.engine.accountant.history
    assert (multiplier, q, steps) == (pytest.approx((1 + 1.5**-2) ** -0.5), 1 / 100, 30)
    ledger = Ledger([Entry(0.01, (("count", 1.5), ("gradient", 1.0)), 30)])
    ours = epsilon(ledger, 1e-5, "rdp" if accountant == "rdp" else "pld")
    theirs = run.engine.get_epsilon(1e-5)
    assert theirs == pytest.approx(ours, abs=0.02)
    alone = epsilon(
        Ledger([Entry(0.01, (("gradient", 1.0),), 30)]),
        1e-5,
        "rdp" if accountant == "rdp" else "pld",
    )
    assert theirs > alone + 0.2


@pytest.mark.filterwarnings("ignore:GDP accounting is experimental:UserWarning")
def test_the_gaussian_accountant_is_told_the_joint_multiplier():
    run = Private(RULES[2], accountant="gdp")
    for _ in range(3):
        run.step(run.x[:9], run.y[:9])
    assert run.engine.accountant.history == [(pytest.approx((1 + 0.01) ** -0.5), 1 / 4, 3)]


@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha:UserWarning")
@pytest.mark.parametrize(
    ("rule", "accountant"),
    [
        (DPSGD(), "rdp"),
        (DPSGDGlobalAdapt(), "rdp"),
        (DPSGDGlobalAdapt(sigma=1.0, sigma_count=1.0), "rdp"),
        (DPSGDGlobalAdapt(sigma=1.0, sigma_count=1.0), "prv"),
    ],
    ids=str,
)
def test_noise_for_a_given_epsilon_includes_the_count(rule, accountant):
    """Of 93 batches Opacus's loader makes 92, and it accounts for q = 1/92."""
    net = make_network()
    x, y = images(93)
    engine = EvenPrivacyEngine(accountant=accountant)
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        rule=rule,
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=3,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=1),
    )
    assert len(loader) == 92
    made_rule = optimizer.rule
    if rule.sigma_count:
        assert made_rule.sigma_count / made_rule.sigma == pytest.approx(
            rule.sigma_count / rule.sigma
        )
    engine.accountant.history = [(optimizer.noise_multiplier, 1 / 92, 3 * 92)]
    assert 1.97 < engine.get_epsilon(1e-5) <= 2.0
    ledger = Ledger([Entry(1 / 92, tuple(made_rule.multipliers().items()), 3 * 92)])
    assert epsilon(ledger, 1e-5) <= 2.0


def test_a_noise_scheduler_scales_all_the_noise_and_is_accounted(zero_noise):
    run = Private(DPSGDGlobalAdapt(C0=0.5, sigma=2.0, sigma_count=6.0), accountant="rdp")
    scheduler = StepNoise(run.optimizer, step_size=1, gamma=0.5)
    run.step(run.x, run.y)
    scheduler.step()
    run.step(run.x, run.y)
    assert (run.optimizer.rule.sigma, run.optimizer.rule.sigma_count) == (1.0, 3.0)
    both = (2**-2 + 6**-2) ** -0.5
    assert [m for m, _, _ in run.engine.accountant.history] == [
        pytest.approx(both),
        pytest.approx(both / 2),
    ]


def test_the_bound_is_the_rules():
    run = Private(RULES[2])
    assert run.optimizer.max_grad_norm == 0.7
    scheduler = StepGradClip(run.optimizer, step_size=1, gamma=0.5)
    with pytest.raises(
        ValueError,
        match=r"max_grad_norm cannot become 0.35: it is 0.7, dpsgd-global-adapt's sensitiv",
    ):
        scheduler.step()


def test_less_noise_than_make_private_was_given_is_said():
    run = Private(RULES[2], by="even")
    theirs = DPOptimizer(
        run.optimizer.original_optimizer,
        noise_multiplier=5.0,
        max_grad_norm=1.0,
        expected_batch_size=10,
    )
    with pytest.warns(
        UserWarning, match=r"joint multiplier 0.995, and make_private was given 5: ε will be larger"
    ):
        even(theirs, RULES[2])


# --- checkpoints ---


def steps_of(run, first, last):
    for t in range(first, last):
        run.step(run.x[3 * t : 3 * t + 15], run.y[3 * t : 3 * t + 15])


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(mode, tmp_path):
    straight = Private(RULES[2], mode, seed=8)
    steps_of(straight, 0, 6)

    first = Private(RULES[2], mode, seed=8)
    steps_of(first, 0, 3)
    first.engine.save_checkpoint(
        path=tmp_path / "c.pt", module=first.model, optimizer=first.optimizer
    )
    second = Private(RULES[2], mode, seed=8)
    second.engine.load_checkpoint(
        path=tmp_path / "c.pt", module=second.model, optimizer=second.optimizer
    )
    second.optimizer.generator.set_state(
        first.optimizer.generator.get_state()
    )  # Opacus does not save it
    assert second.Z == first.Z != RULES[2].Z0
    steps_of(second, 3, 6)
    assert torch.equal(second.parameters, straight.parameters)
    assert second.Z == straight.Z
    assert second.engine.accountant.history == straight.engine.accountant.history


def test_the_optimizers_state_is_safe_to_load_and_left_as_it_was(tmp_path):
    run = Private(RULES[2], seed=9)
    steps_of(run, 0, 2)
    torch.save(run.optimizer.state_dict(), tmp_path / "o.pt")
    state = torch.load(tmp_path / "o.pt", weights_only=True)
    before = copy.deepcopy(state)
    other = Private(RULES[2])
    other.optimizer.load_state_dict(state)
    assert other.Z == run.Z
    assert state == before
    Private(DPSGD()).optimizer.load_state_dict(
        torch.optim.SGD(run.net.parameters(), lr=0.3).state_dict()
    )


def test_a_checkpoint_of_another_rule_or_of_none_is_refused():
    adapt, plain = Private(RULES[2]), Private(DPSGD())
    with pytest.raises(
        ValueError, match=r"This checkpoint is of dpsgd and the optimizer has dpsgd-global-adapt;"
    ):
        adapt.optimizer.load_state_dict(plain.optimizer.state_dict())
    with pytest.raises(
        ValueError,
        match=r"has no state of a rule, and dpsgd-global-adapt needs its Z; load a checkpoint",
    ):
        adapt.optimizer.load_state_dict(plain.optimizer.original_optimizer.state_dict())


# --- refusals ---


def dp_optimizer(kind=DPOptimizer, **more):
    inner = torch.optim.SGD(make_network().parameters(), lr=0.1)
    return kind(
        inner, **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 10, **more}
    )


class Late(DPSGDGlobalAdapt):
    """A rule that clips with this step's count without declaring `counts_first`."""

    def observe(self, noisy, B, state):
        following = super().observe(noisy, B, state)[1]
        return following, following


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        (DPSGDF(), r"dpsgd-f needs every sample's group .*; train it with evenclip\.fit\."),
        (NonPrivate(), r"non-private has no ε"),
        ("dpsgd", r"rule is 'dpsgd'; it must be a rule such as DPSGDGlobalAdapt"),
        (DPSGD, r"it must be a rule such as"),
    ],
    ids=str,
)
def test_rules_that_are_refused(rule, complaint):
    with pytest.raises((TypeError, ValueError), match=complaint):
        even(dp_optimizer(), rule)
    with pytest.raises((TypeError, ValueError), match=complaint):
        Private(rule)


def test_a_rule_that_needs_this_steps_count_is_refused_at_the_latest_before_it_releases_a_gradient():
    run = Private(Late())
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
        lambda: dp_optimizer(AdaClipDPOptimizer, target_unclipped_quantile=0.5, clipbound_learning_rate=0.2,
                             max_clipbound=2.0, min_clipbound=0.1, unclipped_num_std=1.0),
        lambda: object.__new__(DistributedDPOptimizer),  # it needs a process group
        lambda: even(dp_optimizer(), DPSGD()),
        lambda: torch.optim.SGD(make_network().parameters(), lr=0.1),
    ],
)  # fmt: skip
def test_other_optimizers_are_refused(optimizer):
    given = optimizer()
    with pytest.raises(
        TypeError,
        match=rf"The optimizer is a {type(given).__name__}; give the one that Opacus's",
    ):
        even(given, DPSGD())


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
            r"grad_sample_mode is 'no_op'; use one of hooks, functorch, ew, ghost",
        ),
        (
            {"eta_z": 0.3},
            r"eta_z: neither an argument of Opacus's make_private nor a field of the rule",
        ),
        ({"C0": 1.0}, r"C0: neither an argument"),
        ({"noise_multiplier": 3.0}, r"differ from it; leave them out"),
        ({"clipping": "dpsgd"}, r"differ from it; leave them out"),
    ],
    ids=str,
)
def test_arguments_that_are_refused(more, complaint):
    net, (x, y) = make_network(), images()
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    with pytest.raises((TypeError, ValueError), match=complaint):
        EvenPrivacyEngine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data_loader=loader,
            rule=RULES[2],
            **more,
        )


def test_a_rule_by_name_needs_its_noise_and_its_bound():
    with pytest.raises(
        ValueError, match=r"Give noise_multiplier and max_grad_norm, or the rule itself"
    ):
        EvenPrivacyEngine().make_private(clipping="dpsgd", noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"Give max_grad_norm, or the rule itself"):
        EvenPrivacyEngine().make_private_with_epsilon(
            clipping="dpsgd", target_epsilon=1.0, target_delta=1e-5, epochs=1, data_loader=None
        )


def test_a_count_without_an_expected_batch_size_is_refused():
    inner = torch.optim.SGD(make_network().parameters(), lr=0.1)
    theirs = DPOptimizer(
        inner,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=None,
        loss_reduction="sum",
    )
    with pytest.raises(
        ValueError,
        match=r"divides its count by the expected batch size, and this optimizer has none",
    ):
        even(theirs, DPSGDGlobalAdapt())
    even(theirs, DPSGD())


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_no_gradient_is_used_twice(mode):
    run = Private(RULES[2], mode)
    run.step(run.x, run.y)
    with pytest.raises(
        ValueError, match=r"Gradients haven't been cleared|There is no gradient to step with"
    ):
        run.optimizer.step()
    run.optimizer.zero_grad()
    with pytest.raises(
        ValueError, match=r"has no per-sample gradients|There is no gradient to step with"
    ):
        run.optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_no_gradient_is_added_twice_to_a_logical_batch(mode):
    run = Private(RULES[2], mode)
    run.optimizer.signal_skip_step(True)
    run.optimizer.signal_skip_step(True)
    run.step(run.x, run.y)
    with pytest.raises(
        ValueError, match=r"Gradients haven't been cleared|There is no gradient to step with"
    ):
        run.optimizer.step()


def test_in_ghost_mode_a_second_backward_replaces_the_first_and_its_count(zero_noise):
    run, other = Private(RULES[2], "ghost"), Private(RULES[2], "ghost")
    run.loss(run.model(run.x[:20]), run.y[:20]).backward()
    run.loss(run.model(run.x[20:]), run.y[20:]).backward()
    run.optimizer.step()
    other.step(other.x[20:], other.y[20:])
    torch.testing.assert_close(run.gradient, other.gradient)
    assert run.Z == other.Z


def test_in_ghost_mode_another_loss_than_the_criterions_is_refused():
    run = Private(RULES[2], "ghost")
    cross_entropy(run.model(run.x), run.y).backward()  # its gradients are not clipped
    with pytest.raises(
        ValueError, match=r"There is no gradient to step with: call backward\(\) before every step"
    ):
        run.optimizer.step()


def test_in_ghost_mode_a_loss_of_several_numbers_a_sample_is_refused():
    """Opacus would weight every gradient with the sum of all weights."""
    net = nn.Linear(4, 1)
    x, y = torch.randn(20, 4), torch.rand(20, 1)
    model, _, criterion, _ = EvenPrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        criterion=nn.MSELoss(),
        rule=DPSGD(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=5),
        grad_sample_mode="ghost",
    )
    with pytest.raises(
        ValueError,
        match=r"The loss has the shape \[20, 1\] before it is reduced, and ghost clipping",
    ):
        criterion(model(x), y)


def test_in_ghost_mode_a_layer_without_a_norm_is_refused():
    """Opacus's formula for linear layers supports inputs with two and three axes."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(12, 2))
    x, y = torch.randn(20, 4, 4), torch.randint(2, (20,))
    out = EvenPrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        rule=DPSGD(),
        grad_sample_mode="ghost",
        data_loader=DataLoader(TensorDataset(x, y), batch_size=5),
    )
    model, optimizer, criterion, _ = out
    criterion(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"Ghost clipping has no norm for one of the parameters"):
        criterion(model(x[:, None]).flatten(1), y).backward()


def test_in_ghost_mode_even_needs_the_criterion():
    net, (x, y) = make_network(), images()
    _, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=10),
        grad_sample_mode="ghost",
    )
    with pytest.raises(ValueError, match=r"even\(optimizer, rule, criterion\)"):
        even(optimizer, DPSGD())
    assert even(optimizer, DPSGD(), criterion) is criterion.optimizer


# --- the rest of a loop ---


def test_learning_rate_schedulers_and_other_optimizers_work():
    run = Private(RULES[2])
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)
    run.step(run.x, run.y)
    scheduler.step()
    assert run.optimizer.param_groups[0]["lr"] == 0.05
    assert repr(run.optimizer).startswith("SGD")


def test_frozen_parameters_are_left_alone(zero_noise):
    net, (x, y) = make_network(), images()
    net[1].requires_grad_(False)
    model, optimizer, _ = EvenPrivacyEngine().make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), rule=RULES[2],
        data_loader=DataLoader(TensorDataset(x, y), batch_size=10),
    )  # fmt: skip
    before = net[1].weight.clone()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert torch.equal(net[1].weight, before)
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert zero_noise.draws == [(1.0, (1,)), (1.0, (trained,))]


# --- importing ---


def run_python(code):
    """Run code in a new Python process; return its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_opacus_the_import_says_what_to_install():
    printed = run_python(
        "import sys; sys.modules['opacus'] = None\n"
        "try:\n"
        "    import evenclip.opacus\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert printed.strip().endswith("run `pip install 'evenclip[opacus]'`.")


def test_the_package_itself_does_not_import_opacus():
    assert (
        run_python(
            "import sys, evenclip; evenclip.fit, evenclip.DPSGD; print('opacus' in sys.modules)"
        )
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
    accuracies, epsilons = {"opacus": [], "fit": [], "opacus alone": []}, set()
    for seed in range(2):
        result = evenclip.fit(
            mlp_of_digits(seed),
            (train.x, train.y),
            rule=rule,
            epochs=12,
            batch_size=62,
            q=1 / 21,
            lr=1.0,
            seed=seed,
            delta=1e-4,
        )
        accuracies["fit"].append(accuracy(result.model, test))
        for name in ("opacus", "opacus alone")[: 2 - seed]:
            network = mlp_of_digits(seed)
            torch.manual_seed(seed)
            engine = PrivacyEngine(accountant="prv")
            model, optimizer, loader = engine.make_private(
                module=network,
                optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
                max_grad_norm=1.0,
                data_loader=DataLoader(TensorDataset(train.x, train.y), batch_size=64),
                noise_multiplier=0.8,
            )
            if name == "opacus":
                optimizer = even(optimizer, rule)  # the changed line
            for _ in range(12):
                for x, y in loader:
                    optimizer.zero_grad()
                    cross_entropy(model(x), y).backward()
                    optimizer.step()
            accuracies[name].append(accuracy(network, test))
            if name == "opacus":
                assert optimizer.expected_batch_size == 62
                epsilons.add((engine.get_epsilon(1e-4), result.epsilon()))
    means = {name: np.mean(values) for name, values in accuracies.items()}
    assert means["fit"] > 0.8
    assert means["opacus"] == pytest.approx(means["fit"], abs=0.03), accuracies
    ((theirs, ours),) = epsilons
    assert theirs == pytest.approx(ours, abs=0.02)
    assert accuracies["opacus"][0] != accuracies["opacus alone"][0]


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
        clipper, norms = Clipper(Wavering()), torch.tensor([3.0, 5.0], dtype=torch.float64)
        for _ in range(3):
            weights, count = clipper.weights_and_count(norms)
            clipper.add(count)
            noise = clipper.release(
                torch.zeros(4), 1.0, lambda n: torch.ones(n, dtype=torch.float64)
            )
            (multiplier,) = clipper.mechanism.multipliers.values()
            assert float((weights * norms).max()) * multiplier == pytest.approx(
                float(noise.max()), rel=1e-6
            )
        next(READS)
