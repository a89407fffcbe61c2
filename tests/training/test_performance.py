"""Performance settings and observers do not change a run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from evenclip import DPSGD, DPSGDF, DPSGDGlobalAdapt, Performance, TrainConfig, fit, prepare
from evenclip.gradients import plan
from evenclip.mechanism.generators import fill_generators
from evenclip.rules import Constants
from evenclip.training.fit import fit_config
from evenclip.training.passes import Chunk

# Different ways to compute one run, or runs that differ in one respect, share their draws here.
pytestmark = pytest.mark.usefixtures("one_stream")

WAYS = {
    "chunks": Performance(chunk=3),
    "one sample at a time": Performance(chunk=1),
}
RULES = [DPSGDF(C0=0.8, sigma=0.8), DPSGDGlobalAdapt(C0=0.7, sigma=0.8, Z0=1.2)]
named = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


@pytest.fixture(params=["mlp", "cnn"])
def task(request, toy):
    """A model and its data."""
    return (toy.mlp(), toy.data()) if request.param == "mlp" else (toy.cnn(), toy.images())


def trained(model, data, rule, **more):
    given = {"batch_size": 8, "steps": 20, "lr": 0.1, "seed": 3, **more}
    return fit(model, data, rule=rule, **given)


def assert_close(toy, one, other, tolerance=1e-9) -> None:
    """Compare parameters, state, ledger and trace up to rounding."""
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(toy.vector(one.model), toy.vector(other.model), **close)
    torch.testing.assert_close(one.state, other.state, **close)
    assert one.ledger == other.ledger
    for row, other_row in zip(one.trace, other.trace, strict=True):
        assert set(row) == set(other_row)
        for name, value in row.items():
            assert seen(value) == pytest.approx(
                seen(other_row[name]), rel=tolerance, abs=tolerance
            ), name


def seen(figure):
    """Return the values of a trace column without those of groups without samples."""
    return (
        {k: number for k, number in enumerate(figure) if number is not None}
        if isinstance(figure, list)
        else figure
    )


# --- chunks -------------------------------------------------------------------------------------


@named
@pytest.mark.parametrize("way", WAYS)
def test_every_way_agrees_with_the_plain_one(toy, task, rule, way):
    model, data = task
    assert_close(toy, trained(model, data, rule, performance=WAYS[way]), trained(model, data, rule))


def test_float32_agrees_to_its_own_rounding(toy):
    data, model = toy.data(40, torch.float32), toy.mlp(torch.float32)
    rule = DPSGDGlobalAdapt(C0=0.7, sigma=0.8, Z0=1.2)
    plain = trained(model, data, rule)
    for performance in WAYS.values():
        assert_close(toy, trained(model, data, rule, performance=performance), plain, 1e-4)


# --- dropout over several chunks ----------------------------------------------------------------


@pytest.mark.parametrize("rule", [DPSGDF(C0=0.5), DPSGD(C0=0.5)], ids=lambda rule: rule.name)
def test_a_second_pass_over_the_chunks_draws_the_same_masks(toy, rule):
    """DPSGD-F passes over the chunks twice; both passes must have the same dropout masks."""
    model, (x, y, group) = toy.mlp(dropout=0.5), toy.data(12)
    noise = {
        "count": torch.zeros(6, dtype=torch.float64),
        "gradient": torch.zeros(len(toy.vector(model)), dtype=torch.float64),
    }
    rows = torch.arange(12).split(4)
    chunks = [Chunk(x[r], y[r], group[r], key=bytes([i]) * 32) for i, r in enumerate(rows)]
    tape = plan(model, cross_entropy, x, y)
    with tape.recording(), torch.random.fork_rng(devices=[]):
        step = toy.step(tape, rule, rule.init(Constants(groups=3)), chunks, 8.0, noise)
        each = torch.stack([step.weighted_sum(one) for one in torch.eye(12, dtype=torch.float64)])
        # By hand: the dropout masks of each chunk's key; one forward pass per chunk, one backward
        # pass per sample.
        by_hand, losses = [], []
        for i, r in enumerate(rows):
            fill_generators(bytes([i]) * 32, cuda=False)
            values = cross_entropy(model(x[r]), y[r], reduction="none")
            losses.append(values.detach())
            for value in values:
                parts = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
                by_hand.append(torch.cat([part.flatten() for part in parts]))
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(each, torch.stack(by_hand), **close)
    torch.testing.assert_close(step.losses, torch.cat(losses), **close)
    torch.testing.assert_close(step.norms, torch.stack(by_hand).norm(dim=1), **close)
    torch.testing.assert_close(step.weights @ torch.stack(by_hand), step.clipped_sum, **close)


def test_every_step_and_chunk_has_masks_of_its_own(toy):
    """The loss is linear in one input, so it shows which units are dropped."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False)).double()
    nn.init.ones_(model[1].weight)
    x = 2.0 ** -torch.arange(64, dtype=torch.float64).remainder(20).expand(30, 64)
    seen = []

    def loss(output, target):
        return (output.squeeze(-1) + 0 * target).sum()

    fit(
        model,
        (x, torch.zeros(30)),
        loss=loss,
        rule=DPSGD(C0=1e-9, sigma=1e-6),
        batch_size=10,
        steps=6,
        lr=1e-9,
        seed=0,
        performance=Performance(chunk=2),
        observers=[lambda step: seen.append(step.losses)],
    )
    losses = torch.cat(seen)
    assert len(losses) > 40
    assert len(set(losses.round(decimals=4).tolist())) > 0.9 * len(losses)


# --- observers ---------------------------------------------------------------------------------


def meddle(step):
    """Read every value of a step, and draw from the global generator."""
    torch.rand(7)
    torch.manual_seed(1)
    ones = torch.ones(len(step.losses), dtype=torch.float64)
    step.model(torch.randn(3, 5, dtype=step.public.gradient.dtype)).sum().backward()
    return {"g_B": step.weighted_sum(ones), "loss": step.losses.sum()}


@pytest.mark.parametrize("performance", [Performance(), *WAYS.values()], ids=["plain", *WAYS])
def test_looking_changes_nothing(toy, rule, performance):
    model, data = toy.mlp(torch.float32, dropout=0.3), toy.data(40, torch.float32)
    given = {
        "rule": rule,
        "batch_size": 8,
        "steps": 12,
        "lr": 0.1,
        "seed": 3,
        "performance": performance,
    }
    alone, observed = (
        fit(model, data, **given),
        fit(model, data, **given, observers=[meddle, meddle]),
    )
    assert toy.same(alone.model, observed.model)
    assert alone.trace == observed.trace
    assert alone.ledger == observed.ledger
    assert torch.equal(alone.state, observed.state)
    assert [record["t"] for record in observed.records] == [t for t in range(12) for _ in range(2)]
    assert alone.records == []


def test_the_global_generator_is_left_where_it_was(toy):
    torch.manual_seed(4)
    before = torch.get_rng_state()
    fit(toy.mlp(dropout=0.5), toy.data(), rule=DPSGD(), batch_size=8, observers=[meddle])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("performance", [Performance(), *WAYS.values()], ids=["plain", *WAYS])
def test_what_is_shown_is_what_was_trained(toy, task, spy, performance):
    """Compare g_B, the clipped sum and the group gradients of a step with one-sample autograd."""
    model, (x, y, group) = task
    seen = []

    def record(step):
        rows = spy.batches[step.t]
        losses, gradients = toy.gradients(step.model, x[rows], y[rows])
        seen.append(len(rows))
        ones = torch.ones(len(rows), dtype=torch.float64)
        pairs = [
            (step.losses, losses),
            (step.norms, gradients.norm(dim=1)),
            (step.weighted_sum(ones), gradients.sum(dim=0)),
            (step.weighted_sum(step.weights), step.clipped_sum),
            (step.weights @ gradients, step.clipped_sum),
        ]
        for k in range(3):
            mine = group[rows] == k
            pairs.append((step.weighted_sum(mine.double()), gradients[mine].sum(dim=0)))
            pairs.append(
                (
                    step.weighted_sum(mine.double() * step.weights),
                    step.weights[mine] @ gradients[mine],
                )
            )
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
        assert torch.equal(step.group, group[rows])
        assert step.clipped.tolist() == (step.weights < 1).tolist()

    trained(
        model, (x, y, group), DPSGDF(C0=0.6), performance=performance, steps=6, observers=[record]
    )
    assert len(seen) == 6


def test_observers_see_the_parameters_before_the_update(toy):
    seen = []
    result = trained(
        toy.mlp(),
        toy.data(),
        DPSGD(),
        steps=4,
        observers=[lambda s: seen.append((s, toy.vector(s.model)))],
    )
    assert [step.t for step, _ in seen] == [0, 1, 2, 3]
    assert torch.equal(seen[0][1], toy.vector(toy.mlp()))
    after = [theta for _, theta in seen[1:]] + [toy.vector(result.model)]
    for (step, before), then in zip(seen, after, strict=True):
        torch.testing.assert_close(
            then, before - 0.1 * step.public.gradient, rtol=1e-12, atol=1e-12
        )


def test_after_the_update_a_step_has_no_other_sums(toy):
    """They would silently be sums at other parameters."""
    run = prepare(toy.mlp(), toy.data(), rule=DPSGD(), batch_size=8, steps=3, seed=0)
    with run.listening():
        step = run.step()
        before = step.weighted_sum(step.weights)
        torch.testing.assert_close(before, step.clipped_sum)
        run.update(step)
        with pytest.raises(
            RuntimeError,
            match=r"The parameters have been updated since this step; compute .* before run.update",
        ):
            step.weighted_sum(step.weights)


def test_settings_that_do_not_exist_are_refused_in_a_sentence(toy):
    with pytest.raises(
        ValueError,
        match=r"compile is 'fast'; give True, False, or a mode of torch.compile: 'default'",
    ):
        Performance(compile="fast")
    with pytest.raises(
        TypeError,
        match=r"There is no setting 'epoch'; the settings of a training are rule, loss, epochs",
    ):
        prepare(toy.mlp(), toy.data(), epoch=3)
    with pytest.raises(TypeError, match=r"config is 3; it must be a TrainConfig"):
        prepare(toy.mlp(), toy.data(), 3)


def test_a_config_is_the_same_settings_by_name(toy):
    given = {"rule": DPSGDF(C0=0.6), "batch_size": 8, "steps": 4, "lr": 0.2, "seed": 5}
    run = prepare(toy.mlp(), toy.data(), TrainConfig(**given))
    assert toy.same(
        fit_config(toy.mlp(), toy.data(), TrainConfig(**given)).model,
        fit(toy.mlp(), toy.data(), **given).model,
    )
    assert run.settings == prepare(toy.mlp(), toy.data(), **given).settings
    assert prepare(toy.mlp(), toy.data(), TrainConfig(**given), lr=0.3).settings.lr == 0.3


def test_hooks_do_not_listen_to_an_observers_own_passes(toy):
    """A forward pass of an observer is not recorded as one of the step."""
    x, y, group = toy.data()
    alone = trained(toy.mlp(), (x, y, group), DPSGDF())

    def record(step):
        before = step.weighted_sum(torch.ones(len(step.losses), dtype=torch.float64))
        step.model(x)
        after = step.weighted_sum(torch.ones(len(step.losses), dtype=torch.float64))
        assert torch.equal(before, after)

    assert toy.same(
        trained(toy.mlp(), (x, y, group), DPSGDF(), observers=[record]).model, alone.model
    )


def test_a_chunk_may_be_larger_than_the_data(toy):
    x, y, _ = toy.data(10)
    plain, chunked = (
        fit(
            toy.mlp(),
            (x, y),
            rule=DPSGDGlobalAdapt(),
            batch_size=8,
            steps=5,
            seed=0,
            performance=given,
        )
        for given in (Performance(), Performance(chunk=64))
    )
    assert toy.same(plain.model, chunked.model)
