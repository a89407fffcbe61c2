"""What a custom rule may use: constants, several statistics, outputs, labels, a loss, the step."""

from __future__ import annotations

import warnings
from dataclasses import astuple, dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from evenclip import DPSGD, Performance, Rule, fit, prepare
from evenclip.audit import RiskTerms
from evenclip.mechanism import Mechanism, Release
from evenclip.mechanism.accounting import epsilon
from evenclip.mechanism.statement import paragraph
from evenclip.rules import Constants
from exact import released

# Different ways to compute one run, or runs that differ in one respect, share their draws here.
pytestmark = pytest.mark.usefixtures("one_stream")

N, FEATURES, CLASSES, GROUPS = 60, 4, 3, 2
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, FEATURES, generator=GENERATOR)
Y = torch.randint(CLASSES, (N,), generator=GENERATOR)
GROUP = torch.randint(GROUPS, (N,), generator=GENERATOR)
DATA = X, Y, GROUP


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def run_of(rule: Rule, **given):
    given = {"batch_size": 20, "steps": 4, "seed": 0, "lr": 0.1, **given}
    return prepare(network(), DATA, rule=rule, **given)


def take(run, steps: int = 1) -> list:
    taken = []
    with run.listening():
        for _ in range(steps):
            taken.append(run.step())
            run.update(taken[-1])
    return taken


@dataclass(frozen=True)
class Base(Rule):
    """DPSGD, from which the other rules derive."""

    name: ClassVar[str] = "base"
    C0: float = 0.5
    sigma: float = 1.0

    def sensitivity(self, now):
        return self.C0

    def weight(self, norm, group, now):
        return (self.C0 / norm).clamp(max=1.0)


# --- constants ----------------------------------------------------------------------------------


class StartsWithThem(Base):
    def init(self, constants):
        return torch.tensor(astuple(constants), dtype=torch.float64)


def test_a_rule_receives_the_public_constants_of_the_run():
    run = run_of(StartsWithThem(), epochs=2, steps=None)
    parameters = sum(p.numel() for p in network().parameters())
    expected = Constants(GROUPS, CLASSES, parameters, 20.0, 20 / N, 6)
    assert run.mechanism.constants == expected
    assert run.state.tolist() == list(astuple(expected))


def test_a_state_keeps_its_shape():
    class Grows(Base):
        def observe(self, noisy, B, state):
            return state, torch.cat([state, state.new_zeros(1)])

    with pytest.raises(ValueError, match=r"next state of shape \[1\], and init one of shape \[0\]"):
        take(run_of(Grows()), 2)


def test_constants_that_are_a_number_are_refused():
    with pytest.raises(TypeError, match=r"constants is 2; .* such as Constants\(groups=2\)"):
        Mechanism(DPSGD(), 2)


# --- several statistics -------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoCounts(Base):
    """Two statistics: how many norms are above C0, and the sizes of the groups."""

    name: ClassVar[str] = "two counts"
    uses_groups: ClassVar[bool] = True
    sigma_count: dict[str, float] = field(default_factory=lambda: {"above": 3.0, "members": 5.0})

    def init(self, constants):
        return torch.zeros(1 + constants.groups, dtype=torch.float64)

    def statistic(self, norm, group, state):
        members = torch.arange(len(state) - 1) == group
        return {"above": norm > self.C0, "members": members.to(norm.dtype)}

    def observe(self, noisy, B, state):
        return state, torch.cat([noisy["above"], noisy["members"]])


class LongCounts(TwoCounts):
    """Its statistics are 100 times longer than allowed."""

    def statistic(self, norm, group, state):
        plain = TwoCounts.statistic(self, norm, group, state)
        return {name: 100.0 * value for name, value in plain.items()}


@pytest.mark.parametrize("chunk", [None, 7])
def test_each_statistic_is_released_with_its_own_noise(chunk):
    run = run_of(TwoCounts(), performance=Performance(chunk=chunk))
    (step,) = take(run)
    (entry,) = run.ledger.entries
    assert dict(entry.multipliers) == {"above": 3.0, "members": 5.0, "gradient": 1.0}
    assert dict(entry.sizes) == {"above": 1, "members": 2, "gradient": 43}
    exact = [float((step.norms > 0.5).sum())]
    exact += [float((step.group == k).sum()) for k in range(GROUPS)]
    draws = run_of(TwoCounts()).noise.of(0)
    above = released(exact[:1], 1.0, 3.0, draws["above"])
    members = released(exact[1:], 1.0, 5.0, draws["members"])
    assert torch.equal(step.public.state, torch.cat([above, members]))
    assert {name: len(draw) for name, draw in draws.items()} == {
        "above": 1,
        "members": 2,
        "gradient": step.public.gradient.numel(),
    }


def test_leaving_one_record_out_moves_each_statistic_by_at_most_one():
    for rule in (TwoCounts(), LongCounts()):
        mechanism = Mechanism(rule, Constants(groups=GROUPS))
        norms, keep = torch.rand(9, dtype=torch.float64), torch.ones(9, dtype=torch.bool)
        state = mechanism.start()
        whole = mechanism.count(norms, GROUP[:9], state, keep)
        for i in range(9):
            without = keep.clone()
            without[i] = False
            moved = whole - mechanism.count(norms, GROUP[:9], state, without)
            assert float(moved[:1].norm()) <= 1 + 1e-12
            assert float(moved[1:].norm()) <= 1 + 1e-12


def test_all_releases_of_a_step_are_accounted_jointly():
    result = fit(network(), DATA, rule=TwoCounts(), batch_size=20, steps=4, seed=0)
    assert result.privacy["joint_multiplier"] == pytest.approx((3**-2 + 5**-2 + 1) ** -0.5)
    alone = fit(network(), DATA, rule=Base(), batch_size=20, steps=4, seed=0)
    assert result.epsilon() > alone.epsilon()
    assert "3 (above), 5 (members), 1 (gradient)" in " ".join(paragraph(result.privacy).split())


def test_a_statistic_needs_its_own_multiplier_and_may_not_be_called_gradient():
    with pytest.raises(ValueError, match=r"two counts has a statistic called 'members' of 2 num"):
        run_of(TwoCounts(sigma_count={"above": 3.0}))

    class Gradient(Base):
        def statistic(self, norm, group, state):
            return {"gradient": norm > 1}

    with pytest.raises(ValueError, match=r"has a statistic called 'gradient', .* another name"):
        run_of(Gradient())


def test_a_negative_multiplier_in_a_dictionary_is_refused():
    with pytest.raises(ValueError, match=r"sigma_count\['above'\] of two counts is -1\.0"):
        run_of(TwoCounts(sigma_count={"above": -1.0, "members": 1.0}))


def test_statistics_keep_their_names():
    class Wanders(TwoCounts):
        wanders: ClassVar[bool] = False

        def statistic(self, norm, group, state):
            both = TwoCounts.statistic(self, norm, group, state)
            return {"other": both["above"]} if self.wanders else both

    run = run_of(Wanders())
    Wanders.wanders = True
    with pytest.raises(ValueError, match=r"the statistics other, and had above, mem"):
        take(run, 3)


def test_calibration_scales_every_multiplier():
    scaled = TwoCounts(sigma=2.0).scaled(0.5)
    assert scaled.multipliers() == {"above": 1.5, "members": 2.5, "gradient": 1.0}


# --- outputs and labels -------------------------------------------------------------------------


@dataclass(frozen=True)
class SoftPredictions(Base):
    """The sum of the predicted probabilities of the samples of class 1."""

    name: ClassVar[str] = "soft predictions"
    sigma_count: float = 2.0

    def init(self, constants):
        return torch.zeros(constants.classes, dtype=torch.float64)

    def statistic(self, norm, group, state, output, y):
        return torch.where(y == 1, torch.softmax(output, dim=0), 0.0)  # length at most 1

    def observe(self, noisy, B, state):
        return state, noisy


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_statistic_may_see_one_samples_output_and_label(chunk):
    run = run_of(SoftPredictions(), performance=Performance(chunk=chunk))
    batch = run_of(SoftPredictions()).batches.sampler.batch(0)
    (step,) = take(run)
    with torch.no_grad():
        predictions = torch.softmax(network()(X[batch]), dim=1)
    exact = predictions[Y[batch] == 1].sum(dim=0).double()
    noise = run_of(SoftPredictions()).noise.of(0)["count"]
    assert torch.equal(step.public.state, released(exact, 1.0, 2.0, noise))


def test_looking_at_outputs_changes_nothing_else():
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Dropout(0.5), nn.Linear(5, CLASSES))
    given = {"batch_size": 20, "steps": 4, "seed": 0, "lr": 0.1}
    ours = fit(model, DATA, rule=SoftPredictions(), **given).model

    class Silent(SoftPredictions):  # a statistic of the same length, without the output
        def statistic(self, norm, group, state):
            return norm.new_zeros(len(state))

    Silent.__qualname__ = SoftPredictions.__qualname__  # so that batches and noise are the same
    theirs = fit(model, DATA, rule=Silent(), **given).model
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=1))


def test_an_empty_batch_releases_noise_of_the_same_length():
    run = prepare(network(), DATA, rule=SoftPredictions(), batch_size=1, q=1e-9, steps=2, seed=0)
    (step,) = take(run)
    assert step.losses.numel() == 0
    assert step.public.state.shape == (CLASSES,)


# --- a loss -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weighted(Base):
    """Multiplies each group's loss by a public coefficient, the state."""

    name: ClassVar[str] = "weighted"
    uses_groups: ClassVar[bool] = True

    def init(self, constants):
        return torch.arange(1.0, 1.0 + constants.groups, dtype=torch.float64)

    def loss(self, loss, output, y, group, state):
        chosen = (torch.arange(len(state)) == group).to(loss.dtype)
        return loss * (chosen * state.to(loss.dtype)).sum() + 0.1 * output.square().sum()


def slow_gradient(model, x, y, group):
    """Return one sample's gradient of the changed loss, by autograd."""
    output = model(x)
    loss = cross_entropy(output, y) * (1.0 + float(group)) + 0.1 * output.square().sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("compile", [False, True])
def test_gradients_are_those_of_the_rules_loss(chunk, compile):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # several chunks are not compiled
        run = run_of(Weighted(), performance=Performance(chunk=chunk, compile=compile))
        batch = run_of(Weighted()).batches.sampler.batch(0)
        (step,) = take(run)
    model = network()
    rows = [slow_gradient(model, X[i : i + 1], Y[i : i + 1], GROUP[i]) for i in batch]
    norms = torch.stack(rows).double().norm(dim=1)
    torch.testing.assert_close(step.norms, norms, rtol=1e-4, atol=0)
    clipped = sum(row * min(1.0, 0.5 / float(row.norm())) for row in rows)
    torch.testing.assert_close(step.clipped_sum.float(), clipped, rtol=1e-4, atol=1e-5)


def test_one_samples_loss_does_not_depend_on_another():
    class Mixes(Base):
        def loss(self, loss, output, y, group, state):
            return loss / output.shape[0] if output.ndim > 1 else loss  # one sample has one axis

    Mixes.__qualname__ = Base.__qualname__  # so that batches and noise are the same
    plain, mixed = (take(run_of(rule))[0] for rule in (Base(), Mixes()))
    assert torch.equal(plain.norms, mixed.norms)


def test_mistakes_in_a_loss_are_sentences():
    class Branches(Base):
        def loss(self, loss, output, y, group, state):
            return loss if loss > 1 else 2 * loss

    with pytest.raises(ValueError, match=r"loss of base cannot be mapped.*torch\.where instead"):
        run_of(Branches())

    class Long(Base):
        def loss(self, loss, output, y, group, state):
            return output

    with pytest.raises(ValueError, match=r"loss of base returned 3 numbers for one sample"):
        run_of(Long())


class Thousandfold(Base):
    def loss(self, loss, output, y, group, state):
        return 1000.0 * loss


def test_risk_is_measured_with_the_rules_loss():
    """For further batches, and for the step's own batch."""
    norms = {}
    for rule in (Base(C0=1e6), Thousandfold(C0=1e6)):  # a bound that clips nothing
        looking = RiskTerms(DATA, 0.1, batches=4, probes=0, every=1)
        given = {"batch_size": 20, "steps": 1, "seed": 0, "observers": [looking]}
        (record,) = fit(network(), DATA, rule=rule, **given).records
        plain, clipped = record["norms"]
        assert clipped == pytest.approx(plain, rel=1e-5)
        norms[type(rule)] = plain[1:]  # the first is of the step's own batch
    assert norms[Thousandfold] == pytest.approx([1000 * norm for norm in norms[Base]], rel=1e-5)


# --- noise by step ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decays(Base):
    """DPSGD whose noise multiplier is σ/(1 + t)."""

    name: ClassVar[str] = "decays"

    def multipliers(self, t=0):
        return {"gradient": self.sigma / (1 + t)}


def test_the_ledger_has_each_steps_noise_and_the_step_adds_it():
    run = run_of(Decays(), steps=3)
    steps = take(run, 3)
    assert [dict(entry.multipliers)["gradient"] for entry in run.ledger.entries] == [
        1.0,
        1 / 2,
        1 / 3,
    ]
    drawn = [run_of(Decays(), steps=3).noise.of(t)["gradient"] for t in range(3)]
    for t, step in enumerate(steps):
        expected = released(step.clipped_sum, 0.5, 1 / (1 + t), drawn[t]) / step.B
        torch.testing.assert_close(step.public.gradient, expected.float())
    exact = epsilon(run.ledger, 1e-5)
    constant = fit(network(), DATA, rule=Base(), batch_size=20, steps=3, seed=0, delta=1e-5)
    assert exact > constant.epsilon()


def test_noise_by_step_survives_a_resume(tmp_path):
    given = {"rule": Decays(), "batch_size": 20, "seed": 0, "lr": 0.1, "steps": 4}
    whole = fit(network(), DATA, **given)
    run = run_of(Decays())
    take(run, 2)
    run.save(tmp_path)
    again = run_of(Decays())
    from evenclip.training.checkpoint import latest

    again.restore(latest(tmp_path), exact=True)
    take(again, 2)
    assert again.ledger.to_json() == whole.ledger.to_json()
    for p, q in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_noise_by_step_is_not_compiled_and_a_sentence_says_why():
    with pytest.warns(UserWarning, match=r"not compiled: the rule's noise depends on the step"):
        take(run_of(Decays(), performance=Performance(compile=True)))


def test_the_noise_term_of_risk_has_the_steps_own_noise():
    looking = RiskTerms(DATA, 0.1, probes=20, every=1)
    records = fit(
        network(), DATA, rule=Decays(), batch_size=20, steps=2, seed=0, lr=1e-9, observers=[looking]
    ).records
    first, second = (record["risk"][0]["terms"]["noise"][0] for record in records)
    assert second == pytest.approx(first / 4, rel=1e-3)  # half the noise


def test_multipliers_without_the_step_or_the_gradient_are_refused():
    class NoStep(Base):
        def multipliers(self):
            return {"gradient": 1.0}

    class NoGradient(Base):
        def multipliers(self, t=0):
            return {}

    with pytest.raises(ValueError, match=r"write def multipliers\(self, t\)"):
        run_of(NoStep())
    with pytest.raises(ValueError, match=r"a dictionary with the noise multiplier of 'gradient'"):
        run_of(NoGradient())


def test_noise_that_ends_ends_the_promise():
    """A step without noise is a release in clear: there is no ε."""

    class Stops(Base):
        def multipliers(self, t=0):
            return {"gradient": 1.0 if t < 3 else 0.0}

    result = fit(network(), DATA, rule=Stops(), batch_size=20, steps=4, seed=0)
    assert result.epsilon() is None


# --- typical sensitivity ------------------------------------------------------------------------


def test_the_typical_sensitivity_is_that_of_the_first_state_unless_written():
    class Starts(Base):
        def init(self, constants):
            return torch.tensor(0.25 * constants.groups, dtype=torch.float64)

        def sensitivity(self, now):
            return now

    assert Base().typical_sensitivity(Constants(groups=7)) == 0.5
    assert Starts().typical_sensitivity(Constants(groups=8)) == 2.0


def test_a_release_takes_each_noise_once():
    release = Release({"above": torch.zeros(1)})
    given = {"sensitivity": 1.0, "multiplier": 1.0, "rounding": 0.0}
    release("above", torch.zeros(1), **given)
    with pytest.raises(ValueError, match=r"released 'above' already"):
        release("above", torch.zeros(1), **given)
