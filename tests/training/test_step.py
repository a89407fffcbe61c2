"""Compare a step with a slow transcription of Algorithm 2: one-sample autograd, Python numbers and
the same noise.
"""

from __future__ import annotations

import copy
import math
import signal
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from evenclip import DPSGD, DPSGDGlobalAdapt, NonPrivate, Performance, Rule, fit, prepare
from evenclip.gradients import plan
from evenclip.mechanism import Mechanism, Release
from evenclip.mechanism.statement import paragraph
from evenclip.rules import ENFORCED, Constants
from evenclip.training.passes import Chunk
from exact import Ideal, released

K = 3


# --- the slow transcription ---------------------------------------------------------------------


def slow_non_private(rule, norms, groups, state, B, count_noise):
    return 0.0, [1.0 for _ in norms], state


def slow_dpsgd(rule, norms, groups, state, B, count_noise):
    return rule.C0, [1.0 if norm <= rule.C0 else rule.C0 / norm for norm in norms], state


def slow_dpsgd_f(rule, norms, groups, state, B, count_noise):
    counts = [0.0] * (2 * K)
    for norm, k in zip(norms, groups, strict=True):
        counts[2 * k + (norm > rule.C0)] += 1
    noisy = released(counts, 1.0, rule.sigma_count, count_noise).tolist()
    shares = []
    for k in range(K):
        o, m = (max(0, math.floor(number)) for number in noisy[2 * k : 2 * k + 2])
        shares.append(m / (m + o) if m + o > 0 else 1.0)
    mean = sum(shares) / K
    C = [rule.C0 * (1 + (share / mean if mean > 0 else 0.0)) for share in shares]
    weights = [min(1.0, C[k] / norm) for norm, k in zip(norms, groups, strict=True)]
    return max(C), weights, C


def slow_global(rule, norms, groups, state, B, count_noise):
    return rule.C0, [rule.C0 / rule.Z if norm <= rule.Z else 0.0 for norm in norms], state


def slow_global_adapt(rule, norms, groups, state, B, count_noise):
    Z = state
    weights = [rule.C0 / Z if norm <= Z else rule.C0 / norm for norm in norms]
    count = sum(1 for norm in norms if norm > rule.tau * Z)
    noisy = float(released([count], 1.0, rule.sigma_count, count_noise))
    return rule.C0, weights, Z * math.exp(-rule.eta_Z + noisy / B)


# Name -> function of the rule, the norms and groups of a batch, the state, B and the noise of the
# count, as Python numbers and lists; it returns S, the weights and the next state. `released` adds
# the noise to a sum.
SLOW = {
    "non-private": slow_non_private,
    "dpsgd": slow_dpsgd,
    "dpsgd-f": slow_dpsgd_f,
    "dpsgd-global": slow_global,
    "dpsgd-global-adapt": slow_global_adapt,
}


@dataclass
class Slow:
    gradient: Tensor
    state: object
    S: float
    weights: list[float]
    norms: list[float]
    losses: Tensor


def slow_step(toy, rule, model, x, y, group, state, B, noise) -> Slow:
    losses, gradients = toy.gradients(model, x, y)
    norms = [math.sqrt(sum(number**2 for number in g.tolist())) for g in gradients]
    counts = noise.get("count", torch.zeros(0)).tolist()
    S, weights, following = SLOW[rule.name](rule, norms, group.tolist(), state, B, counts)
    total = torch.zeros_like(toy.vector(model))
    for weight, gradient in zip(weights, gradients, strict=True):
        total = total + weight * gradient
    if rule.sigma:
        total = released(total, S, rule.sigma, noise["gradient"])
    return Slow(total / B, following, S, weights, norms, losses)


def close(a, b, tolerance=1e-10) -> bool:
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def public_state(rule, constants=Constants(groups=K)):  # noqa: B008  # frozen
    return rule.init(constants).tolist()


# --- one step -----------------------------------------------------------------------------------


def one(x, y, group):
    return [Chunk(x, y, group)]


def several(x, y, group):
    return [Chunk(x[i : i + 5], y[i : i + 5], group[i : i + 5]) for i in range(0, len(y), 5)]


def padded(x, y, group):
    """Return chunks of 8 whose padding rows are masked copies of the first sample."""
    rows = torch.cat([torch.arange(len(y)), torch.zeros(-len(y) % 8, dtype=torch.int64)])
    real = torch.arange(len(rows)) < len(y)
    return [
        Chunk(x[r], y[r], group[r], m) for r, m in zip(rows.split(8), real.split(8), strict=True)
    ]


@pytest.mark.parametrize("cut", [one, several, padded])
def test_a_step_is_algorithm_2(toy, rule, cut):
    model, (x, y, group), B = toy.mlp(), toy.data(19), 16.0
    noise = noise_for(toy, rule, model)
    tape = plan(model, cross_entropy, x, y)
    with tape.recording():
        step = toy.step(tape, rule, rule.init(Constants(groups=K)), cut(x, y, group), B, noise)
    slow = slow_step(toy, rule, model, x, y, group, public_state(rule), B, noise)
    assert close(step.public.gradient, slow.gradient)
    assert close(step.public.state, slow.state)
    assert close(step.weights, slow.weights)
    assert close(step.norms, slow.norms)
    assert close(step.losses, slow.losses)
    assert torch.equal(step.group, group)
    assert step.B == B
    if rule.poisson:
        assert float(step.public.sensitivity) == pytest.approx(slow.S, rel=1e-12)
        assert len({round(weight, 9) for weight in slow.weights}) > 1, (
            "the constants should clip some and not others"
        )


def test_an_empty_batch_is_a_step_of_pure_noise(toy, private_rule):
    model, (x, y, group) = toy.mlp(), toy.data(5)
    noise = noise_for(toy, private_rule, model)
    tape = plan(model, cross_entropy, x, y)
    with tape.recording():
        step = toy.step(tape, private_rule, private_rule.init(Constants(groups=K)), [], 16.0, noise)
    state = public_state(private_rule)
    slow = slow_step(toy, private_rule, model, x[:0], y[:0], group[:0], state, 16.0, noise)
    assert close(step.public.gradient, slow.gradient)
    S, sigma = slow.S, private_rule.sigma
    apart = step.public.gradient * 16.0 - sigma * S * noise["gradient"]
    assert float(apart.abs().max()) <= sigma * S / 16 * 1.01  # half of the coarse grid's spacing
    assert close(step.public.state, slow.state)
    assert step.mechanism.multipliers == private_rule.multipliers()  # accounted like every step
    assert len(step.losses) == len(step.norms) == len(step.weights) == len(step.group) == 0
    assert torch.equal(step.weighted_sum(torch.zeros(0)), torch.zeros_like(step.public.gradient))


def noise_for(toy, rule, model):
    random = torch.Generator().manual_seed(5)
    counts = Mechanism(rule, Constants(groups=K)).counts
    return {
        "count": torch.randn(counts, generator=random, dtype=torch.float64),
        "gradient": torch.randn(len(toy.vector(model)), generator=random, dtype=torch.float64),
    }


# --- many steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "performance",
    [Performance(), Performance(chunk=2)],
    ids=["plain", "chunks"],
)
def test_fit_is_algorithm_2_over_many_steps(toy, rule, spy, performance):
    data = toy.data(24)
    result = fit(
        toy.mlp(),
        data,
        rule=rule,
        batch_size=2,
        steps=100,
        lr=0.1,
        seed=11,
        performance=performance,
    )
    assert len(spy.batches) == 100
    sizes = [len(batch) for batch in spy.batches]
    if rule.poisson:  # with probability 1 − 4e-6; the key follows from the code and the machine
        assert 0 in sizes
        assert max(sizes) > 3, "the seed should give an empty batch and one of several chunks"
    constants = result.settings.constants(classes=int(data[1].max()) + 1)
    model, state = toy.mlp(), public_state(rule, constants)
    for batch, noise in zip(spy.batches, spy.noise, strict=True):
        B = 2.0 if rule.poisson else float(len(batch))
        slow = slow_step(toy, rule, model, *(column[batch] for column in data), state, B, noise)
        moved = toy.vector(model) - 0.1 * slow.gradient
        torch.nn.utils.vector_to_parameters(moved, model.parameters())
        state = slow.state
    assert close(toy.vector(result.model), toy.vector(model), 1e-9)
    assert close(result.state, state, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_non_private_is_plain_sgd(toy, spy, dtype):
    x, y, _ = toy.data(41, dtype)
    result = fit(toy.mlp(dtype), (x, y), rule=NonPrivate(), batch_size=8, epochs=3, lr=0.2, seed=0)
    model = toy.mlp(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    assert [len(batch) for batch in spy.batches] == [8, 8, 8, 8, 8, 1] * 3
    for epoch in range(3):
        assert sorted(torch.cat(spy.batches[6 * epoch : 6 * epoch + 6]).tolist()) == list(range(41))
    for batch in spy.batches:
        optimizer.zero_grad()
        cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    assert close(
        toy.vector(result.model), toy.vector(model), 1e-12 if dtype == torch.float64 else 1e-6
    )


def test_no_clipping_and_no_noise_is_sgd(toy):
    x, y, group = toy.data(32)
    private, plain = toy.mlp(), toy.mlp()
    tape = plan(private, cross_entropy, x, y)
    rule, sgd = DPSGD(C0=1e6, sigma=1.0), torch.optim.SGD(plain.parameters(), lr=0.5)
    with tape.recording():
        for batch in torch.arange(32).split(8):
            silence = {"gradient": torch.zeros(len(toy.vector(private)), dtype=torch.float64)}
            chunk = Chunk(x[batch], y[batch], group[batch])
            step = toy.step(tape, rule, torch.zeros(0), [chunk], 8.0, Ideal(silence))
            torch.nn.utils.vector_to_parameters(
                toy.vector(private) - 0.5 * step.public.gradient, private.parameters()
            )
            sgd.zero_grad()
            cross_entropy(plain(x[batch]), y[batch]).backward()
            sgd.step()
    assert close(toy.vector(private), toy.vector(plain), 1e-12)
    assert not close(toy.vector(private), toy.vector(toy.mlp()), 1e-3)


def test_global_adapt_is_dpsgd_with_bound_Z_at_another_learning_rate(toy):
    """γ = (C0/Z)·min(1, Z/‖g‖): with constant Z, DPSGD(C0=Z) at lr·C0/Z gives the same model."""
    x, y, group = toy.data(32)
    C0, Z, lr = 0.5, 1.3, 0.4
    still = DPSGDGlobalAdapt(
        C0=C0, sigma=1.0, Z0=Z, tau=1e6, eta_Z=1e-300
    )  # the state stays constant
    adapt = trajectory(toy, still, lr, (x, y, group))
    clipped = trajectory(toy, DPSGD(C0=Z, sigma=1.0), lr * C0 / Z, (x, y, group))
    assert close(adapt, clipped, 1e-12)
    assert not close(adapt, trajectory(toy, DPSGD(C0=C0, sigma=1.0), lr, (x, y, group)), 1e-3)


def trajectory(toy, rule, lr, data):
    """Return the parameters after four steps with given batches and noise, without noise on the
    count.
    """
    x, y, group = data
    model, state, random = (
        toy.mlp(),
        rule.init(Constants(groups=K)),
        torch.Generator().manual_seed(3),
    )
    tape = plan(model, cross_entropy, x, y)
    with tape.recording():
        for batch in torch.arange(32).split(8):
            z = torch.randn(len(toy.vector(model)), generator=random, dtype=torch.float64)
            release = Ideal({"count": torch.zeros(1, dtype=torch.float64), "gradient": z})
            step = toy.step(
                tape, rule, state, [Chunk(x[batch], y[batch], group[batch])], 8.0, release
            )
            state = step.public.state
            torch.nn.utils.vector_to_parameters(
                toy.vector(model) - lr * step.public.gradient, model.parameters()
            )
    return toy.vector(model)


# --- custom rules -----------------------------------------------------------------------


@dataclass(frozen=True)
class Soft(Rule):
    """γ = c/(c + ‖g‖), so γ‖g‖ < c; c follows the noisy difference of the numbers of norms above
    and below it.
    """

    name: ClassVar[str] = "soft"
    counts_first: ClassVar[bool] = True

    sigma: float = 0.9
    sigma_count: float | None = 4.0

    def init(self, constants: Constants) -> Tensor:
        return torch.tensor([2.0], dtype=torch.float64)

    def statistic(self, norm: Tensor, group: Tensor, state: Tensor) -> Tensor:
        return torch.where(norm > state, 1.0, -1.0)

    def observe(self, noisy: Tensor, B: float, state: Tensor) -> tuple[Tensor, Tensor]:
        c = state * torch.exp(0.1 * noisy / B)
        return c, c

    def sensitivity(self, now: Tensor) -> Tensor:
        return now[0]

    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:
        return now[0] / (now[0] + norm)


def slow_soft(norms, c, B, z):
    count = sum(1.0 if norm > c else -1.0 for norm in norms)
    c = c * math.exp(0.1 * float(released([count], 1.0, 4.0, z)) / B)
    return c, [c / (c + norm) for norm in norms]


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_custom_rule_is_trained_as_it_is_written(toy, spy, chunk):
    x, y, _ = toy.data(24)
    result = fit(
        toy.mlp(),
        (x, y),
        rule=Soft(),
        batch_size=4,
        steps=12,
        lr=0.3,
        seed=2,
        performance=Performance(chunk=chunk),
    )
    model, c = toy.mlp(), 2.0
    for batch, noise in zip(spy.batches, spy.noise, strict=True):
        _, gradients = toy.gradients(model, x[batch], y[batch])
        c, weights = slow_soft(gradients.norm(dim=1).tolist(), c, 4.0, noise["count"])
        total = torch.tensor(weights, dtype=torch.float64) @ gradients
        total = released(total, c, 0.9, noise["gradient"])
        torch.nn.utils.vector_to_parameters(
            toy.vector(model) - 0.3 * total / 4.0, model.parameters()
        )
    assert close(toy.vector(result.model), toy.vector(model))
    assert result.state.tolist() == [pytest.approx(c, rel=1e-10)]


def test_a_custom_rule_has_trace_report_and_resume(toy, tmp_path):
    settings = {"rule": Soft(), "batch_size": 8, "epochs": 3, "lr": 0.3, "seed": 4}
    data = toy.data(40)
    whole = fit(toy.mlp(), data, **settings)
    assert [row["steps"] for row in whole.trace] == [5, 5, 5]
    assert all(
        row["clamped"] == 0 and row["clip_fraction"] == 1.0 for row in whole.trace
    )  # every γ is below γ(0) = 1
    report = whole.privacy
    assert (report["method"], report["soundness"]) == ("soft", ENFORCED)
    assert report["multipliers"] == {"count": 4.0, "gradient": 0.9}
    assert report["joint_multiplier"] == pytest.approx((1 / 0.81 + 1 / 16) ** -0.5)
    assert "soft" in paragraph(report)

    def stop(step):
        if step.t == 6:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(toy.mlp(), data, **settings, checkpoint=tmp_path, observers=[stop])
    resumed = fit(toy.mlp(), data, **settings, checkpoint=tmp_path, resume="exact")
    assert toy.same(whole.model, resumed.model)
    assert (whole.trace, whole.ledger, whole.state.tolist()) == (
        resumed.trace,
        resumed.ledger,
        resumed.state.tolist(),
    )


@dataclass(frozen=True)
class Liar(Rule):
    """Claims that a sample adds at most 0.1, clips nothing, and counts 1000 instead of 1."""

    name: ClassVar[str] = "liar"

    sigma: float = 1.0
    sigma_count: float | None = 10.0
    size: float = 1000.0

    def statistic(self, norm: Tensor, group: Tensor, state: Tensor) -> Tensor:
        return torch.stack([norm * 0 + self.size, norm * 0 - self.size])

    def sensitivity(self, now: Tensor) -> float:
        return 0.1

    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:
        return norm * 0 + 1.0


def test_a_lying_rule_is_held_to_its_bound_and_counted(toy, spy, untried):
    x, y, _ = toy.data(40)
    seen = []
    result = fit(
        toy.mlp(),
        (x, y),
        rule=Liar(),
        batch_size=10,
        epochs=2,
        lr=0.1,
        seed=0,
        observers=[seen.append],
    )
    large = 0
    for step, batch in zip(seen, spy.batches, strict=True):
        assert (step.weights * step.norms <= 0.1 * (1 + 1e-12)).all()
        assert step.clipped_sum.norm() <= 0.1 * len(batch) * (1 + 1e-12)
        large += int((step.norms > 0.1).sum())
    assert large > 50
    assert sum(row["clamped"] for row in result.trace) == large == result.private["clamped_weights"]
    for seen_release, batch in zip(
        [r for r in spy.releases if r.name == "count"], spy.batches, strict=True
    ):
        assert close(
            seen_release.value, [len(batch) / math.sqrt(2), -len(batch) / math.sqrt(2)]
        )  # length 1 each


def test_what_the_lying_rule_releases_is_what_honest_clipping_releases(toy):
    x, y, group = toy.data(16)
    model, gradients = toy.mlp(), []
    tape = plan(model, cross_entropy, x, y)
    for rule in (Liar(), DPSGD(C0=0.1, sigma=1.0)):
        silence = {"count": torch.zeros(2), "gradient": torch.zeros(len(toy.vector(model)))}
        with tape.recording():
            step = toy.step(tape, rule, torch.zeros(0), [Chunk(x, y, group)], 16.0, silence)
        gradients.append(step.public.gradient)
    assert close(*gradients, 1e-12)


def test_the_original_model_does_not_move(toy):
    model = toy.mlp()
    before = copy.deepcopy(model)
    fit(model, toy.data(), rule=DPSGD(), batch_size=10, lr=0.5, seed=0)
    assert toy.same(model, before)


@dataclass(frozen=True)
class Peeping(Rule):
    """Claims to be elementwise, and reads the whole batch."""

    name: ClassVar[str] = "peeping"
    elementwise: ClassVar[bool] = True
    sigma: float = 1.0

    def sensitivity(self, now):
        return 1.0

    def weight(self, norm, group, now):
        assert norm.ndim == 0, "a custom rule received the batch"
        return (1.0 / norm).clamp(max=1.0)


def test_a_custom_rule_that_claims_to_be_elementwise_does_not_see_the_batch(toy):
    assert (
        fit(toy.mlp(), toy.data(), rule=Peeping(), batch_size=8, steps=3, seed=0).ledger.steps == 3
    )


@dataclass(frozen=True)
class Fickle(Rule):
    """Returns a large bound on the first call of a step, and a small one on later calls."""

    name: ClassVar[str] = "fickle"
    sigma: float = 1.0
    answers: ClassVar[list[float]] = []

    def sensitivity(self, now):
        self.answers.append(100.0 if len(self.answers) % 2 == 0 else 1e-6)
        return self.answers[-1]

    def weight(self, norm, group, now):
        return torch.full_like(norm, 1e9)


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_noise_is_for_the_bound_that_was_enforced(toy, chunk):
    seen = []
    given = {
        "batch_size": 8,
        "steps": 4,
        "performance": Performance(chunk=chunk),
        "observers": [seen.append],
    }
    fit(toy.mlp(), toy.data(), rule=Fickle(), **given)
    for step in seen:
        assert float((step.weights.abs() * step.norms).max()) <= step.public.sensitivity * (
            1 + 1e-12
        )


# --- the ledger ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "performance", [Performance(), Performance(chunk=3)], ids=["plain", "chunks"]
)
def test_a_step_that_is_interrupted_is_in_the_ledger(toy, private_rule, performance):
    """Its noise was drawn and its batch was used, even if it has no result."""

    class Interrupted(Exception):  # noqa: N818
        pass

    def loss(output, y):
        if stop:
            raise Interrupted
        return cross_entropy(output, y, reduction="none")

    stop = []
    run = prepare(
        toy.mlp(), toy.data(), loss=loss, rule=private_rule, q=0.9, batch_size=36, steps=5,
        performance=performance,
    )  # fmt: skip
    with run.listening():
        run.update(run.step())
        stop.append(True)
        with pytest.raises(Interrupted):
            run.step()
    assert (run.t, run.ledger.steps) == (1, 2)
    assert dict(run.ledger.entries[-1].multipliers) == private_rule.multipliers()


@dataclass(frozen=True)
class Follows(Rule):
    """Clips with a bound that depends on the count of the same step."""

    name: ClassVar[str] = "follows"
    counts_first: ClassVar[bool] = True
    sigma: float = 1.0
    sigma_count: float = 1.0

    def init(self, constants):
        return torch.tensor(1.0, dtype=torch.float64)

    def statistic(self, norm, group, state):
        return (norm > 1).to(norm.dtype)

    def observe(self, noisy, B, state):
        # Never the state, 1: a released count is a multiple of a power of two.
        return 0.45 + noisy[0].abs() / B, state

    def sensitivity(self, now):
        return now

    def weight(self, norm, group, now):
        return (now / norm).clamp(max=1.0)


class FollowsInSecret(Follows):
    counts_first: ClassVar[bool] = False


def test_a_rule_whose_bound_follows_from_its_count_is_clipped_with_it(toy, one_stream):
    models = []
    for chunk in (None, 3):
        steps = []
        result = fit(
            toy.mlp(),
            toy.data(),
            rule=Follows(),
            batch_size=8,
            steps=6,
            lr=0.1,
            seed=0,
            performance=Performance(chunk=chunk),
            observers=[steps.append],
        )
        for step in steps:
            assert float(step.public.sensitivity) == float(step.public.now)
            assert float((step.weights * step.norms).max()) <= float(step.public.now) * (1 + 1e-12)
        models.append(toy.vector(result.model))
    torch.testing.assert_close(*models, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compile", [False, True])
def test_a_rule_that_clips_with_its_count_and_does_not_declare_it_is_refused(toy, compile, untried):
    complaint = r"observe of follows returned a `now`.*counts_first = True"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step without a graph says why
        run = prepare(
            toy.mlp(),
            toy.data(),
            rule=FollowsInSecret(),
            batch_size=8,
            steps=6,
            seed=0,
            performance=Performance(compile=compile),
        )
        before = toy.vector(run.model)
        with run.listening(), pytest.raises(ValueError, match=complaint):
            run.step()
    assert torch.equal(toy.vector(run.model), before)
    assert run.ledger.steps <= 1


@dataclass(frozen=True)
class SaysMore(Rule):
    """A rule that states more noise every time its `multipliers` are read."""

    name: ClassVar[str] = "says more"
    reads: ClassVar[list[int]] = []
    sigma: float = 1.0

    def multipliers(self, t=0):
        self.reads.append(t)
        return {"gradient": float(len(self.reads))}

    def sensitivity(self, now):
        return 1.0

    def weight(self, norm, group, now):
        return (1.0 / norm).clamp(max=1.0)


def test_the_ledger_has_the_noise_that_is_added_for_any_answer_of_the_rule(toy):
    SaysMore.reads.clear()
    mechanism = Mechanism(SaysMore())
    noisy = mechanism.publish(torch.zeros(3), 1.0, 1.0, Release({"gradient": torch.ones(3)}))
    assert {"gradient": float(noisy[0])} == pytest.approx(mechanism.multipliers)
    SaysMore.reads.clear()
    run = prepare(toy.mlp(), toy.data(), rule=SaysMore(), batch_size=8, steps=2)
    with run.listening():
        step = run.step()
    ((_, multiplier),) = run.ledger.entries[0].multipliers
    assert multiplier == step.mechanism.noise["gradient"]


@dataclass(frozen=True)
class CountsLater(Rule):
    """Has no statistic in the first step, and one in later ones."""

    name: ClassVar[str] = "counts later"
    counts: ClassVar[bool] = False
    sigma: float = 1.0

    def statistic(self, norm, group, state):
        return norm.clamp(max=1.0).reshape(1) if self.counts else norm.new_zeros(0)

    def sensitivity(self, now):
        return 1.0

    def weight(self, norm, group, now):
        return (1.0 / norm).clamp(max=1.0)


def test_a_count_that_the_ledger_does_not_know_is_not_released(toy, monkeypatch):
    """It would be published without noise, and ε would not include it."""
    monkeypatch.setattr(CountsLater, "counts", False)
    with pytest.raises(
        ValueError,
        match=r"counts later has a statistic of 1 numbers, and had 0 before the first step",
    ):
        fit(
            toy.mlp(), toy.data(), rule=CountsLater(), batch_size=8, steps=2,
            observers=[lambda step: setattr(CountsLater, "counts", True)],
        )  # fmt: skip
