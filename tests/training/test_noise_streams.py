"""Each step of each run has its own noise, with the standard deviation of the ledger."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn.functional import multi_margin_loss
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from evenclip import DPSGD, DPSGDF, DPSGDGlobalAdapt, Performance, fit

STEPS = 6


def noise(toy, rule=None, n=40, data=None, model=None, **more):
    """Return the added noise (g̃·B − Σ γ_i g_i)/(σS) of every step.  # [step, parameter]"""
    rule = DPSGD(C0=0.5, sigma=1.3) if rule is None else rule
    given = {"batch_size": 8, "steps": STEPS, "lr": 0.1, "seed": 5, **more}
    rows = []

    def record(step):
        added = step.public.gradient * step.B - step.clipped_sum
        rows.append(added / (float(step.public.sensitivity) * rule.sigma))

    network = toy.mlp() if model is None else model(toy)
    fit(network, toy.data(n) if data is None else data, rule=rule, observers=[record], **given)
    return torch.stack(rows)


def alike(a, b) -> bool:
    """Return whether a step of one run has the noise of a step of the other, up to sign."""
    products = (a @ b.T).abs() / torch.outer(a.norm(dim=1), b.norm(dim=1))
    return bool((products > 0.9).any())


def test_every_step_has_its_own(toy, private_rule):
    rows = noise(toy, private_rule)
    products = (rows @ rows.T).abs() / rows.norm(dim=1).outer(rows.norm(dim=1))
    assert float((products - torch.eye(STEPS)).max()) < 0.7  # 57 numbers per row


def relu(toy):
    """Return the same network, with the same parameters, and another activation."""
    model = toy.mlp()
    model[1] = nn.ReLU()
    return model


OTHERS = {
    "seed": {"seed": 6},
    "learning rate": {"lr": 0.2},
    "batch size": {"batch_size": 10},
    "number of steps": {"steps": STEPS + 1},
    "δ": {"delta": 1e-6},
    "rule": {"rule": DPSGDGlobalAdapt(C0=0.5, sigma=1.3)},
    "rule with counts": {"rule": DPSGDF(C0=0.5, sigma=1.3)},
    "constant of the rule": {"rule": DPSGD(C0=0.6, sigma=1.3)},
    "σ": {"rule": DPSGD(C0=0.5, sigma=1.4)},
    "records": {"n": 41},
    "optimiser": {"optimizer": torch.optim.Adam},
    "momentum": {"optimizer": partial(SGD, momentum=0.9)},
    "schedule": {"scheduler": partial(StepLR, step_size=1)},
    "loss": {"loss": multi_margin_loss},
    "activation": {"model": relu},
    "initial model": {"model": lambda toy: toy.mlp(seed=1)},
    "chunks": {"performance": Performance(chunk=3)},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_two_runs_that_differ_in_anything_share_no_noise_and_no_batches(toy, spy, kind):
    one, batches = noise(toy), [batch.tolist() for batch in spy.batches]
    spy.batches.clear()
    assert not alike(one, noise(toy, **OTHERS[kind]))
    assert [batch.tolist() for batch in spy.batches][:STEPS] != batches


def released(toy, model, data):
    """Return the noise of a few steps on these data, from this model.  # [step, parameter]"""
    rows = []
    fit(
        model,
        data,
        rule=DPSGD(),
        batch_size=8,
        steps=3,
        seed=5,
        observers=[lambda step: rows.append(_noise(step))],
    )
    return torch.stack(rows)


def _noise(step):
    return step.public.gradient * step.B - step.clipped_sum


def test_another_start_and_other_data_share_no_noise(toy):
    """If two published models had equal noise, it would cancel in their difference."""
    x, y, group = toy.data()
    here = released(toy, toy.mlp(), (x, y, group))
    torch.testing.assert_close(
        released(toy, toy.mlp(), (x.clone(), y, group)), here, rtol=0, atol=0
    )
    one_bit, other_label = x.clone(), y.clone()
    one_bit[-1, -1] += 1e-9
    other_label[-1] = (y[-1] + 1) % 3
    swapped = x[[1, 0, *range(2, len(x))]]
    for model, data in (
        (toy.mlp(seed=1), (x, y, group)),
        (toy.mlp(), (one_bit, y, group)),
        (toy.mlp(), (x, other_label, group)),
        (toy.mlp(), (swapped, y, group)),
    ):
        assert not alike(released(toy, model, data), here)


def test_the_same_seed_and_settings_give_the_same_noise(toy, private_rule):
    one, other = noise(toy, private_rule), noise(toy, private_rule)
    assert torch.equal(one, other)


def test_chunks_add_the_noise_of_the_whole_batch(toy, one_stream):
    torch.testing.assert_close(
        noise(toy, performance=Performance(chunk=3)), noise(toy), rtol=1e-8, atol=1e-8
    )


def test_torchs_global_seed_has_no_say(toy):
    rows = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        rows.append(noise(toy))
    assert torch.equal(*rows)


def test_without_a_seed_every_run_is_different(toy):
    torch.manual_seed(0)
    one = noise(toy, seed=None)
    torch.manual_seed(0)
    assert not alike(one, noise(toy, seed=None))


def test_batches_differ_with_the_seed_and_not_without_it(toy, spy):
    batches = []
    for seed in (5, 5, 6, None, None):
        spy.batches.clear()
        noise(toy, seed=seed)
        batches.append([batch.tolist() for batch in spy.batches])
    assert batches[0] == batches[1]
    assert len({str(drawn) for drawn in batches}) == 4


def test_the_gradients_noise_has_standard_deviation_sigma_times_S(toy, private_rule):
    """Σ z² over coordinates and steps is χ²; each tail outside the limits has probability 1e-6."""
    seen = noise(toy, private_rule, steps=150)
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], seen.numel())
    assert low < float(seen.square().sum()) < high
    assert stats.kstest(seen.flatten().numpy(), "norm").pvalue > 1e-4


@pytest.mark.parametrize(
    "rule", [DPSGDF(sigma_count=3.0), DPSGDGlobalAdapt(sigma_count=3.0)], ids=lambda rule: rule.name
)
def test_the_counts_noise_has_standard_deviation_sigma_count(toy, spy, rule):
    fit(toy.mlp(), toy.data(), rule=rule, batch_size=8, steps=200, lr=0.01, seed=0)
    seen = torch.stack([(r.out - r.value) / 3.0 for r in spy.releases if r.name == "count"])
    assert len(seen) == 200
    drawn = torch.stack([step["count"] for step in spy.noise])
    H = 0.25  # the largest power of two up to 3 / 8; what is released is rounded to it
    torch.testing.assert_close(seen, drawn, rtol=1e-9, atol=H / 2 / 3 + 1e-3)
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], seen.numel())
    assert low < float(seen.square().sum()) < high


def test_the_count_and_the_gradient_do_not_share_noise(toy, spy):
    fit(toy.mlp(), toy.data(), rule=DPSGDGlobalAdapt(), batch_size=8, steps=200, lr=0.01, seed=0)
    counts = torch.tensor([float(step["count"][0]) for step in spy.noise], dtype=torch.float64)
    gradients = torch.stack([step["gradient"] for step in spy.noise])  # [step, parameter]
    pairs = torch.corrcoef(torch.cat([counts.unsqueeze(0), gradients.T]))
    assert (
        float(pairs.fill_diagonal_(0).abs().max()) < 0.45
    )  # 1653 pairs of 200 numbers: 6 standard deviations


def test_float32_noise_has_the_same_size(toy):
    x, y, group = toy.data(40, torch.float32)
    rows = []

    def record(step):
        rows.append((step.public.gradient * step.B - step.clipped_sum).double() / (0.5 * 1.3))

    rule = DPSGD(C0=0.5, sigma=1.3)
    fit(
        toy.mlp(torch.float32),
        (x, y, group),
        rule=rule,
        batch_size=8,
        steps=150,
        seed=0,
        observers=[record],
    )
    seen = torch.stack(rows)
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], seen.numel())
    assert low < float(seen.square().sum()) < high
