"""A sample whose loss or gradient is not finite contributes exactly nothing, and is counted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from evenclip import DPSGD, DPSGDF, DPSGDGlobalAdapt, Performance, fit
from evenclip.data import MapDataset
from evenclip.gradients import Tape, WholeTape, plan
from evenclip.mechanism import Mechanism
from evenclip.rules import Constants
from evenclip.training.passes import Chunk
from exact import released

# Different ways to compute one run, or runs that differ in one respect, share their draws here.
pytestmark = pytest.mark.usefixtures("one_stream")

BAD = 4  # the row that is not finite


class Overflowing(nn.Module):
    """One row's features are so large that exp overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.inner(x) ** 2)


class Kinked(nn.Module):
    """A finite loss with a non-finite gradient: √ has infinite slope at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).abs().sqrt()


class Scaled(nn.Module):
    """The model itself has a parameter without a formula, so `torch.func` maps the module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.inner = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


class BehindTheBack(nn.Module):
    """Uses a layer's weight without calling the layer, so the whole model goes through
    `torch.func`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(x @ self.inner.weight.T))


class Spoilt:
    """Features with a special value in one row."""

    def __init__(self, make, value, tape=Tape) -> None:
        self.make, self.value, self.tape = make, value, tape


CASES = {
    "NaN in a feature": Spoilt(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double(), math.nan
    ),
    "infinity in a feature": Spoilt(lambda: nn.Linear(5, 3).double(), math.inf),
    "scores overflow": Spoilt(Overflowing, 1e3),
    "finite loss, infinite slope": Spoilt(Kinked, 0.0),
    "layer norm": Spoilt(
        lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)).double(), math.nan
    ),
    "several positions": Spoilt(
        lambda: nn.Sequential(
            nn.Unflatten(1, (5, 1)), nn.Linear(1, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)
        ).double(),
        math.nan,
    ),
    "convolution": Spoilt(
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 3)
        ).double(),
        math.nan,
    ),
    "custom module": Spoilt(Scaled, math.nan),
    "whole model": Spoilt(BehindTheBack, math.nan, WholeTape),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def noise_for(model):
    random = torch.Generator().manual_seed(0)
    size = sum(p.numel() for p in model.parameters())
    return torch.randn(64, generator=random).double(), torch.randn(size, generator=random).double()


def taken(toy, model, rule, chunks, tape=None):
    """Compute one step, with the same noise in every call."""
    x, y, _ = chunks[0].x, chunks[0].y, None
    tape = tape or plan(model, cross_entropy, x[:3], y[:3])
    state = rule.init(Constants(groups=3))
    counts, gradient = noise_for(model)
    noise = {"count": counts[: Mechanism(rule, Constants(groups=3)).counts], "gradient": gradient}
    with tape.recording():
        return toy.step(tape, rule, state, chunks, 8.0, noise)


def masked(x, y, group):
    """The original rows, with the spoilt one masked: its weight is 0."""
    return Chunk(x, y, group, torch.arange(len(y)) != BAD)


@pytest.mark.parametrize("independence", [None, "tested"], ids=str)
def test_it_contributes_exactly_nothing(toy, private_rule, case, independence):
    torch.manual_seed(0)
    model, (x, y, group) = case.make(), toy.data(10)
    spoilt = x.clone()
    spoilt[BAD] = case.value
    tape = plan(model, cross_entropy, x[:3], y[:3], independence)
    assert independence is None or isinstance(tape, case.tape)
    step = taken(toy, model, private_rule, [Chunk(spoilt, y, group)], tape)
    without = taken(toy, model, private_rule, [masked(x, y, group)], tape)
    assert step.finite is not None
    assert step.finite.tolist() == [i != BAD for i in range(10)]
    assert torch.equal(step.public.gradient, without.public.gradient)
    assert torch.equal(step.public.state, without.public.state)
    assert torch.equal(step.public.now, without.public.now)
    assert step.weights[BAD] == 0
    assert step.norms[BAD] == 0
    assert torch.isfinite(step.public.gradient).all()
    fewer = torch.arange(10) != BAD
    smaller = taken(toy, model, private_rule, [Chunk(x[fewer], y[fewer], group[fewer])], tape)
    torch.testing.assert_close(
        step.public.gradient, smaller.public.gradient, rtol=1e-12, atol=1e-12
    )


def test_an_infinite_loss_with_a_finite_gradient_contributes_nothing_either(toy):
    x, y, group = toy.data(10)
    model, offsets = toy.mlp(), torch.zeros(10, dtype=torch.float64)
    offsets[BAD] = math.inf

    def loss(output, target):
        return cross_entropy(output, target[:, 0].long(), reduction="none") + target[:, 1]

    targets = torch.stack([y.double(), offsets], dim=1)
    tape = plan(model, loss, x[:3], targets[:3])
    with tape.recording():
        assert torch.isfinite(tape(x, targets).norms()).all()
    step = taken(toy, model, DPSGD(), [Chunk(x, targets, group)], tape)
    without = taken(
        toy,
        model,
        DPSGD(),
        [masked(x, torch.stack([y.double(), 0 * offsets.nan_to_num()], 1), group)],
        tape,
    )
    assert torch.equal(step.public.gradient, without.public.gradient)
    assert not step.finite[BAD]


@pytest.mark.parametrize(
    "rule", [DPSGDF(C0=0.5), DPSGDGlobalAdapt(Z0=0.1, tau=0.5)], ids=lambda rule: rule.name
)
def test_it_is_in_no_statistic(toy, spy, rule):
    x, y, group = toy.data(10)
    model, spoilt = toy.mlp(), x.clone()
    spoilt[BAD] = math.nan
    taken(toy, model, rule, [Chunk(x, y, group)])
    taken(toy, model, rule, [Chunk(spoilt, y, group)])
    whole, fewer = (released.value for released in spy.releases if released.name == "count")
    assert (
        float(whole.sum() - fewer.sum()) == 1.0
    )  # every other sample is counted once, in one place
    assert float((whole - fewer).abs().max()) == 1.0


def test_a_batch_of_nothing_else_is_a_step_of_pure_noise(toy, private_rule):
    x, y, group = toy.data(10)
    model = toy.mlp()
    tape = plan(model, cross_entropy, x[:3], y[:3])
    step = taken(toy, model, private_rule, [Chunk(torch.full_like(x, math.nan), y, group)], tape)
    nothing = taken(
        toy, model, private_rule, [Chunk(x, y, group, torch.zeros(10, dtype=torch.bool))], tape
    )
    assert torch.equal(step.public.gradient, nothing.public.gradient)
    assert torch.equal(step.public.state, nothing.public.state)
    noise = noise_for(model)[1]
    S, sigma = float(step.public.sensitivity), private_rule.sigma
    expected = released(torch.zeros(len(noise)), S, sigma, noise)
    assert torch.equal(step.public.gradient * 8, expected)


class Rows(Dataset):
    """A map-style dataset of (x, y, group)."""

    def __init__(self, x, y, group) -> None:
        self.columns = x, y, group

    def __len__(self) -> int:
        return len(self.columns[1])

    def __getitem__(self, i):
        return tuple(column[i] for column in self.columns)


PERFORMANCES = {
    "plain": Performance(),
    "chunks": Performance(chunk=3),
}


@pytest.mark.parametrize("performance", PERFORMANCES.values(), ids=PERFORMANCES)
def test_it_is_counted_in_trace_and_report(toy, spy, performance):
    """Train on rows of which every third is spoilt."""
    x, y, group = toy.data(40)
    x[3::3] = math.nan
    data = MapDataset(Rows(x, y, group), ("a", "b", "c"))

    def record(step):
        assert torch.isfinite(
            step.weighted_sum(torch.ones(len(step.losses), dtype=torch.float64))
        ).all()

    result = fit(
        toy.mlp(),
        data,
        rule=DPSGDF(C0=0.8),
        batch_size=8,
        epochs=3,
        lr=0.1,
        seed=0,
        performance=performance,
        observers=[record],
    )
    assert torch.isfinite(toy.vector(result.model)).all()
    spoilt = [int(torch.isnan(x[batch, 0]).sum()) for batch in spy.batches]
    assert sum(spoilt) > 5
    for t, row in enumerate(result.trace):
        batches = spy.batches[5 * t : 5 * t + 5]
        assert row["non_finite"] == sum(spoilt[5 * t : 5 * t + 5])
        assert row["samples"] == sum(len(batch) for batch in batches)
        good = torch.cat([batch[~torch.isnan(x[batch, 0])] for batch in batches])
        assert row["group_samples"] == torch.bincount(group[good], minlength=3).tolist()
        assert all(
            value is None or math.isfinite(value) for value in row["loss"] + row["gradient_norm"]
        )
    assert result.private["non_finite_samples"] == sum(spoilt)


def test_it_is_not_counted_among_the_clipped(toy):
    """No gradient is clipped: each is shorter than the bound, or not finite."""
    x, y, group = toy.data(40)
    x[3::3] = math.nan
    data = MapDataset(Rows(x, y, group), ("a", "b", "c"))
    result = fit(toy.mlp(), data, rule=DPSGD(C0=1e6), batch_size=8, epochs=2, lr=1e-9, seed=0)
    assert all(row["non_finite"] for row in result.trace)
    assert [row["clip_fraction"] for row in result.trace] == [0.0, 0.0]


def test_training_on_spoilt_rows_is_training_without_them(toy, spy):
    """Compare with slow steps on the same batches without the spoilt rows."""
    x, y, group = toy.data(40)
    x[5::4] = math.inf
    data, rule = MapDataset(Rows(x, y, group), ("a", "b", "c")), DPSGD(C0=0.7, sigma=0.5)
    result = fit(toy.mlp(), data, rule=rule, batch_size=8, epochs=2, lr=0.2, seed=3)
    model = toy.mlp()
    for batch, noise in zip(spy.batches, spy.noise, strict=True):
        good = batch[torch.isfinite(x[batch, 0])]
        _, gradients = toy.gradients(model, x[good], y[good])
        clipped = gradients * (0.7 / gradients.norm(dim=1, keepdim=True)).clamp(max=1.0)
        total = released(clipped.sum(dim=0), 0.7, 0.5, noise["gradient"])
        torch.nn.utils.vector_to_parameters(toy.vector(model) - 0.2 * total / 8, model.parameters())
    torch.testing.assert_close(toy.vector(result.model), toy.vector(model), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rows", [[0], [0, 1, 2]], ids=["the first", "the first three"])
def test_it_may_be_among_the_rows_that_the_model_is_checked_on(toy, rows):
    x, y, group = toy.data(40)
    x[rows] = math.nan
    data = MapDataset(Rows(x, y, group), ("a", "b", "c"))
    result = fit(toy.mlp(), data, rule=DPSGD(), batch_size=8, epochs=2, lr=0.1, seed=0)
    assert torch.isfinite(toy.vector(result.model)).all()
    assert sum(row["non_finite"] for row in result.trace) > 0


@pytest.mark.parametrize(
    "value", [1e20, math.inf, math.nan], ids=["too long for float32", "infinite", "nan"]
)
def test_what_one_sample_is_like_changes_nothing_about_the_others(toy, value):
    """An overflowing sample must not change the other samples' norms or weights, not even by
    rounding.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 2))
    x, y, group = torch.randn(64, 300), torch.arange(64) % 2, torch.zeros(64, dtype=torch.int64)
    with torch.no_grad():
        model[0].weight[:, 0] = 0.0
    rule = DPSGDGlobalAdapt(Z0=1.0)
    seen = []
    with plan(model, cross_entropy, x[:3], y[:3]).recording() as tape:
        for first in (1.0, value):
            rows = x.clone()
            rows[0, 0] = first
            noise = {"count": torch.zeros(1), "gradient": torch.zeros(tape.layout.size)}
            seen.append(
                toy.step(
                    tape, rule, rule.init(Constants(groups=1)), [Chunk(rows, y, group)], 64.0, noise
                )
            )
    for name in ("norms", "weights"):
        one, other = (getattr(step, name)[1:] for step in seen)
        assert torch.equal(one, other), name


def test_a_gradient_that_is_only_too_long_for_float32_squares_is_clipped_and_not_dropped():
    """‖a‖² overflows in float32, but ‖a‖ does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    x = torch.randn(8, 3)
    x[0] = torch.tensor([1e20, 0.0, 0.0])
    with torch.no_grad():
        model[0].weight[:, 0] = 1e-20  # so that the sigmoid is not saturated
    steps = []
    fit(
        model,
        (x, torch.arange(8) % 2),
        rule=DPSGD(C0=1.0, sigma=1.0),
        q=1.0,
        batch_size=8,
        steps=1,
        lr=0.1,
        seed=0,
        delta=1e-2,
        observers=[steps.append],
    )
    (step,) = steps
    assert step.finite is None or step.finite.all()
    assert 1e17 < float(step.norms[0]) < 1e21
    assert float(step.weights[0]) == pytest.approx(1 / float(step.norms[0]))
