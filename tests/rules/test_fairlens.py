"""FairLens: the gradient of its regularisers compared with autograd; it has no ε anywhere."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

import evenclip
from evenclip.comparison import compare
from evenclip.gradients import plan
from evenclip.mechanism import Mechanism, accounting
from evenclip.mechanism.calibration import calibrate
from evenclip.mechanism.statement import paragraph, report
from evenclip.models import mlp, sigmoid_then_softmax
from evenclip.rules import DPSGD, Constants, FairLens
from evenclip.rules.fairlens import Regularised, regulariser_gradient
from evenclip.training.fit import prepare


def table(n=24, features=5, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(n, features, generator=generator, dtype=torch.float64)
    y, group = (torch.randint(0, 2, (n,), generator=generator) for _ in range(2))
    return x, y, group


def tanh_cnn():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()


MODELS = {
    "an MLP": (lambda: mlp(5, 2, (7, 6), seed=1).double(), (5,)),
    "logistic regression": (lambda: mlp(5, 2, (), seed=1).double(), (5,)),
    "Dutch's": (lambda: sigmoid_then_softmax(5, 2, seed=1).double(), (5,)),
    "convolutions": (tanh_cnn, (1, 3, 3)),
    "a layer twice": (lambda: Twice().double(), (5,)),
}


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


def brute(model, x, y, group, rule):
    """Return the gradient of R = γ1 R1 + γ2 R2 by autograd through all of it."""
    own = {name: p.detach() for name, p in model.named_parameters()}

    def one(parameters, a, target):
        return cross_entropy(
            functional_call(model, parameters, (a.unsqueeze(0),)), target.unsqueeze(0)
        )

    def regularisers(parameters):
        each = vmap(grad(one), in_dims=(None, 0, 0))(parameters, x, y)
        g = torch.cat([v.flatten(1) for v in each.values()], dim=1)
        clipped = g * (rule.C0 / g.norm(dim=1, keepdim=True)).clamp(max=1.0)
        apart = g[group == 0].mean(0) - g[group == 1].mean(0)
        r1 = (apart @ (clipped.mean(0) - g.mean(0))).abs()
        share = functional_call(model, parameters, (x,)).softmax(-1)[:, 1]
        f = [share[group == k].mean() for k in (0, 1)]
        return rule.gamma1 * r1 + rule.gamma2 * 0.5 * sum(v * (1 - v) for v in f)

    gradient = grad(regularisers)(own)
    return torch.cat([v.flatten() for v in gradient.values()])


def images(x, shape):
    if len(shape) == 1:
        return x
    generator = torch.Generator().manual_seed(3)
    return 2 * torch.randn(len(x), *shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(("gamma1", "gamma2"), [(1.0, 0.0), (0.0, 1.0), (0.7, 2.0)])
def test_the_gradient_of_the_regularisers_is_that_of_autograd(name, gamma1, gamma2):
    make, shape = MODELS[name]
    x, y, group = table()
    x, model, rule = images(x, shape), make(), FairLens(C0=0.4, gamma1=gamma1, gamma2=gamma2)
    tape = plan(model, cross_entropy, x, y)
    with tape.recording():
        gradient = regulariser_gradient(tape, tape(x, y), x, y, group, rule)
    expected = brute(model, x, y, group, rule)
    assert expected.norm() > 1e-3
    # norms are rounded up by sixteen roundings, hence not to the last digit
    torch.testing.assert_close(
        gradient, expected, rtol=1e-9, atol=1e-12 + 1e-10 * float(expected.norm())
    )


@pytest.mark.parametrize("name", list(MODELS))
def test_every_samples_gradient_is_its_own_and_the_regularisers(name):
    make, shape = MODELS[name]
    x, y, group = table(seed=4)
    x, model, rule = images(x, shape), make(), FairLens(C0=0.4)
    plain = plan(model, cross_entropy, x, y)
    with plain.recording():
        own = plain(x, y).per_sample()
    tape = Regularised(plain, rule)
    with tape.recording():
        shifted = tape(x, y, group)
        norms, each = shifted.norms(), shifted.per_sample()
    expected = own + brute(model, x, y, group, rule)
    torch.testing.assert_close(each, expected, rtol=1e-8, atol=1e-9)
    assert bool((norms >= expected.norm(dim=1)).all())
    torch.testing.assert_close(norms, expected.norm(dim=1), rtol=1e-2, atol=0)


def clipped_sum(model, x, y, group, rule):
    tape = rule.tape(plan(model, cross_entropy, x, y))
    with tape.recording():
        shifted = tape(x, y, group)
        return shifted.weighted_sum(rule.weight(shifted.norms(), group, torch.zeros(0)))


def test_one_record_moves_the_clipped_sum_by_more_than_the_bound():
    """Removing one outlier of 200 records changes the sum by more than C0, so C0 is not a
    sensitivity.
    """
    x, y, group = table(200, seed=2, scale=0.5)
    x[0] *= 40
    model, moved = mlp(5, 2, (), seed=1).double(), {}
    for rule in (FairLens(C0=0.1, gamma1=5.0), DPSGD(C0=0.1)):
        there = clipped_sum(model, x, y, group, rule)
        moved[rule.name] = (
            float((there - clipped_sum(model, x[1:], y[1:], group[1:], rule)).norm()) / 0.1
        )
    assert moved["fairlens"] > 10
    assert moved["dpsgd"] <= 1 + 1e-9


def trained(**more):
    x, y, group = table(120)
    given = {"rule": FairLens(C0=0.5), "batch_size": 30, "steps": 6, "seed": 0, **more}
    run = prepare(mlp(5, 2, (4,)), (x.float(), y, group), **given)
    with run.listening():
        while run.t < run.settings.steps:
            run.update(run.step())
    return run


def test_there_is_no_epsilon_anywhere():
    run = trained()
    assert run.ledger.steps == 6
    assert not run.ledger.is_private
    assert accounting.epsilon(run.ledger, 1e-5) is None
    statement = report(run.settings, run.ledger)
    assert statement["epsilon"] is None
    assert statement["epsilon_rdp"] is None
    assert statement["epsilon_without_amplification"] is None
    assert "tie every sample's gradient to every record" in " ".join(paragraph(statement).split())
    assert not accounting_of(run.settings.rule)
    with pytest.raises(ValueError, match="has no valid ε with any noise"):
        calibrate(run.settings.rule, epsilon=3.0, delta=1e-6, q=0.1, steps=10)


def accounting_of(rule):
    """Return whether the planned ledger of a rule is private."""
    ledger = evenclip.mechanism.release.Ledger()
    ledger.write(0.1, Mechanism(rule, Constants(groups=2)).multipliers)
    return ledger.is_private


def test_noise_is_added_all_the_same():
    one, other = trained(seed=0), trained(seed=1)
    assert not torch.equal(
        *(torch.nn.utils.parameters_to_vector(run.model.parameters()) for run in (one, other))
    )
    run = prepare(mlp(5, 2, (4,)), floats(), rule=FairLens(C0=0.5), batch_size=30, steps=1, seed=0)
    with run.listening():
        step = run.step()
    added = step.public.gradient * step.B - step.clipped_sum
    assert 0.3 < float(added.std()) < 0.7  # σ C0 = 0.5


def floats():
    x, y, group = table(120)
    return x.float(), y, group


def test_the_table_of_a_comparison_says_none_and_why(tmp_path, here):
    from evenclip.data import Dataset, Splits

    x, y, group = floats()
    parts = [
        Dataset(x[i::2], y[i::2], group[i::2], ("a", "b"), ("no", "yes"), "toy") for i in (0, 1)
    ]
    comparison = compare(
        Splits(*parts),
        ["dpsgd", FairLens(C0=0.5)],
        2,
        epochs=1,
        batch_size=20,
        lr=0.1,
        model="linear",
        store=tmp_path,
        on=here,
    )
    assert comparison["fairlens"].epsilon == {"pld": None, "rdp": None}
    row = next(
        line for line in comparison.table().splitlines() if "fairlens" in line and "none" in line
    )
    assert row.split()[1:3] == ["none", "none"]
    assert "fairlens has no valid ε with any amount of noise" in " ".join(
        comparison.table().split()
    )
    assert comparison.to_json()["privacy"]["fairlens"]["delta"] is None


def test_a_batch_without_one_of_the_groups_has_no_regulariser():
    x, y, group = table()
    model, rule = mlp(5, 2, (4,), seed=0).double(), FairLens(C0=0.4)
    tape = plan(model, cross_entropy, x, y)
    with tape.recording():
        for only in (torch.zeros_like(group), torch.ones_like(group)):
            assert regulariser_gradient(tape, tape(x, y), x, y, only, rule).abs().max() == 0


def test_empty_batches_and_samples_that_are_not_finite():
    run = trained(q=0.001, batch_size=1, steps=8)
    assert sum(row["empty_batches"] for row in run.trace.rows) > 0
    x, y, group = table()
    x[3] = 1e200
    model, rule, kept = mlp(5, 2, (), seed=0).double(), FairLens(C0=0.4), torch.arange(24) != 3
    with (tape := rule.tape(plan(model, cross_entropy, x[:3], y[:3]))).recording():
        gradients = tape(x, y, group)
        assert torch.equal(torch.isfinite(gradients.norms()), kept)
        summed = gradients.masked(kept).weighted_sum(kept.double())
        alone = tape(x[kept], y[kept], group[kept])
        torch.testing.assert_close(summed, alone.weighted_sum(torch.ones(23, dtype=torch.float64)))


@dataclass(frozen=True)
class Sly(DPSGD):
    """A rule that reads the batch and claims a bound."""

    name: ClassVar[str] = "sly"

    def tape(self, tape):
        return tape


def test_a_rule_with_a_tape_of_its_own_cannot_claim_a_bound():
    with pytest.raises(
        ValueError, match=r"sly takes its gradients in its own way .* bounded = False"
    ):
        prepare(mlp(5, 2), floats(), rule=Sly(), batch_size=30)


def test_what_it_is_not_for():
    x, y, group = floats()
    assert (
        FairLens().unsuited(3, 2) == "it is for two groups and two classes, and there are 3 and 2."
    )
    assert FairLens().unsuited(2, 2) is None
    with pytest.raises(ValueError, match="needs the whole batch at once"):
        prepare(
            mlp(5, 2),
            (x, y, group),
            rule=FairLens(),
            batch_size=30,
            performance=evenclip.Performance(chunk=10),
        )
    with pytest.raises(ValueError, match="gamma1 is -1"):
        FairLens(gamma1=-1.0)
    with plan(mlp(5, 2), cross_entropy, x, y).recording() as tape:
        regularised = Regularised(tape, FairLens())
        with pytest.raises(ValueError, match="needs the group of every sample"):
            regularised(x, y)
