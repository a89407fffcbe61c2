"""The attacker's record changes what the model computes for all others.

The attacker knows model, code and every other record, and chooses a model whose samples influence
each other where a few samples of one batch do not show it. One record then moves the sum of the
gradients by many times S, and ε says nothing.

Each of these models is refused, with the module's name, or its samples pass by themselves, so that
the others do not exist for it. The old test, which changes one of three samples and compares
losses, is planted: it accepts most of them.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip import DPSGD, fit
from evenclip.gradients import ModelError, WholeTape, foreign, plan
from evenclip.gradients.anylayer import Mode
from evenclip.gradients.losses import per_sample
from evenclip.gradients.tape import Independence

D, CLASSES, N = 4, 3, 16


class Normalised(nn.Module):
    """A hand-written batch norm."""

    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0, correction=0) + 1e-3)


class NormalisedInHalf(nn.Module):
    """Batch norm whose statistics are in half precision."""

    def forward(self, x):
        half = x.bfloat16()
        return x - half.mean(0).to(x)


class Later(nn.Module):
    """Sample i sees later samples only."""

    def forward(self, x):
        return x + torch.flip(torch.cumsum(torch.flip(x, [0]), 0), [0]) - x


class OnlyInTraining(nn.Module):
    """Mixes in training mode only."""

    def forward(self, x):
        return x - x.mean(0) if self.training else x


class FromEight(nn.Module):
    """Mixes from 8 samples on."""

    def forward(self, x):
        return x - x.mean(0) if len(x) >= 8 else x


class FromSixtyFour(nn.Module):
    """Mixes above 64 samples."""

    def forward(self, x):
        return x - x.mean(0) if len(x) > 64 else x


class Attention(nn.Module):
    """Attention across the batch: the default of MultiheadAttention is position first."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2)

    def forward(self, x):
        return self.attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1))[0].squeeze(1)


class BackwardOnly(torch.autograd.Function):
    """The identity, whose derivative is the mean over the batch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, delta):
        return delta.mean(0, keepdim=True).expand_as(delta)


class MixesGradients(nn.Module):
    def forward(self, x):
        return BackwardOnly.apply(x)


def model(inside, zero=True):
    """A model with this module before a head that starts at zero."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(D, D), inside, nn.Linear(D, CLASSES))
    if zero:
        nn.init.zeros_(made[2].weight)
    return made


def faint(output, y):
    """A loss with a factor of 1e-5, over a normalised batch."""
    return 1e-5 * F.cross_entropy(output - output.mean(0), y, reduction="none")


MIXING = {
    "batch norm": (Normalised, F.cross_entropy),
    "batch norm in half precision": (NormalisedInHalf, F.cross_entropy),
    "later samples": (Later, F.cross_entropy),
    "in training only": (OnlyInTraining, F.cross_entropy),
    "from 8 samples on": (FromEight, F.cross_entropy),
    "above 64 samples": (FromSixtyFour, F.cross_entropy),
    "attention": (Attention, F.cross_entropy),
    "in the backward pass": (MixesGradients, F.cross_entropy),
    "a faint loss": (nn.Identity, faint),
}


@pytest.fixture
def data():
    fixed = torch.Generator().manual_seed(0)
    x = torch.randn(80, D, generator=fixed)
    return x, torch.randint(CLASSES, (80,), generator=fixed)


@pytest.mark.parametrize("independence", [None, "tested"], ids=str)
@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_mixes_samples_is_refused(name, independence, data):
    inside, loss = MIXING[name]
    with pytest.raises(ModelError, match="The samples of a batch influence each other in"):
        plan(model(inside()), loss, *data, independence)


def old_test_accepts(made, loss, x, y):
    """Change one of three samples and compare the losses, as it was done."""
    with torch.no_grad():
        each = loss(made(x[:3]), y[:3], **({} if loss is faint else {"reduction": "none"}))
        other = torch.cat([3 * x[:1] + 1, x[1:3]])
        changed = loss(made(other), y[:3], **({} if loss is faint else {"reduction": "none"}))
    return torch.allclose(changed[1:], each[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MIXING)
def test_the_attack_wins_against_a_test_of_three_losses(name, data):
    inside, loss = MIXING[name]
    assert old_test_accepts(model(inside()), loss, *data)


class OnAValue(nn.Module):
    """Mixes samples only where the batch holds a record with a large value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.layer(x) * (1 + 50 * (x.amax() > 1e3).to(x))


def moved(independence):
    """Return how far one record moves the sum of all clipped gradients, and the grade."""
    torch.manual_seed(0)
    made, random = OnAValue(), torch.Generator().manual_seed(1)
    x, y = torch.randn(N, D, generator=random), torch.randint(CLASSES, (N,), generator=random)
    tape = plan(made, F.cross_entropy, x, y, independence)
    attack = torch.cat([x, torch.full((1, D), 2e3)])
    sums = []
    with tape.recording():
        for inputs in (x, attack):
            gradients = tape(inputs, y if inputs is x else torch.cat([y, y[:1]]))
            weights = (0.01 / gradients.norms()).clamp(max=1.0)
            sums.append(gradients.weighted_sum(weights))
    return float((sums[1] - sums[0]).norm()) / 0.01, tape.independence


def test_what_no_test_sees_does_not_matter_where_samples_pass_by_themselves():
    distance, grade = moved(None)
    assert grade is Independence.CONSTRUCTION
    assert distance <= 1 + 1e-6


def test_the_attack_wins_where_independence_is_only_tested():
    distance, grade = moved("tested")
    assert grade is Independence.TESTED
    assert distance > 1.5


def test_a_batch_of_an_epoch_shows_it_and_the_step_is_not_published(data):
    torch.manual_seed(0)
    x, y = data[0].clone(), data[1]
    x[7] = 2e3
    given = {"rule": DPSGD(), "batch_size": 80, "q": 1.0, "steps": 3, "delta": 1e-3}
    with pytest.raises(ModelError, match="showed on a batch of records only"):
        fit(OnAValue(), (x[[*range(8, 80), *range(8)]], y), **given, independence="tested")
    result = fit(OnAValue(), (x, y), **given)
    assert result.privacy["independence"].startswith("by construction")


class Unmappable(OnAValue):
    """The same, with a branch on a value, so that each sample passes in a loop."""

    def forward(self, x):
        return super().forward(x) if bool(x.isfinite().all()) else x[:, :CLASSES]


@pytest.mark.parametrize("model", [OnAValue, Unmappable])
def test_outputs_that_a_statistic_uses_are_of_each_sample_alone(model, data):
    torch.manual_seed(0)
    made, (x, y) = model(), data
    tape = plan(made, F.cross_entropy, x, y)
    if model is Unmappable:  # as for models that neither can be mapped nor split into layers
        tape = WholeTape(made, per_sample(F.cross_entropy), 2, Mode.LOOP)
    attack = torch.cat([x[:5], torch.full((1, D), 2e3)])
    with tape.recording():
        torch.testing.assert_close(tape.outputs(attack)[:5], tape.outputs(x[:5]))
    assert not torch.allclose(made(attack)[:5], made(x[:5]))


class Whole(torch.autograd.Function):
    """The identity, whose mapping rule sees the batch and uses it where a value is large."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, delta):
        return delta

    @staticmethod
    def vmap(info, in_dims, x):
        return x - (x.amax() > 1e3) * x.mean(in_dims[0], keepdim=True), in_dims[0]


class WithARule(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.layer(Whole.apply(x))


def test_a_function_with_its_own_mapping_rule_is_not_mapped(data):
    tape = plan(WithARule(), F.cross_entropy, *data)
    assert tape.independence is Independence.TESTED


@torch.library.custom_op("evenclip_attack::whole", mutates_args=())
def whole(x: torch.Tensor) -> torch.Tensor:
    """The identity, whose mapping rule sees the batch."""
    return x.clone()


@whole.register_vmap
def _(info, in_dims, x):
    return x * (50.0 if x.shape[in_dims[0]] > 9 else 1.0), in_dims[0]


class AsDerivative(torch.autograd.Function):
    """The identity, whose derivative calls the operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, delta):
        return whole(delta)


class InBackward(nn.Module):
    def forward(self, x):
        return AsDerivative.apply(x)


class InHook(nn.Module):
    def forward(self, x):
        if x.requires_grad:
            x.register_hook(whole)
        return x


class InForward(nn.Module):
    def forward(self, x):
        return x + 0 * whole(x.detach())


class ForOne(nn.Module):
    """Calls the operator for batches of one sample, as mapped passes are."""

    def forward(self, x):
        return AsDerivative.apply(x) if len(x) == 1 else x


def distance(tape, x, y):
    """Return how far a first record moves the sum of the other's clipped gradients, in S."""
    sums = []
    with tape.recording():
        for front in (x[:0], torch.full((1, D), 40.0)):
            gradients = tape(torch.cat([front, x]), torch.cat([y[: len(front)], y]))
            weights = (0.01 / gradients.norms()).clamp(max=1.0)
            sums.append(gradients.weighted_sum(weights))
    return float((sums[1] - sums[0]).norm()) / 0.01


OPERATORS = pytest.mark.parametrize("inside", [InForward, InBackward, InHook, ForOne])


@OPERATORS
def test_an_operator_with_a_mapping_rule_is_not_mapped_in_a_derivative_either(inside, data):
    tape = plan(model(inside(), zero=False), F.cross_entropy, *data)
    assert tape.independence is Independence.TESTED
    assert distance(tape, data[0][:9], data[1][:9]) <= 1 + 1e-6


def test_the_attack_wins_where_only_the_forward_pass_of_a_batch_is_looked_at(data, monkeypatch):
    planning = importlib.import_module("evenclip.gradients.plan")
    monkeypatch.setattr(planning, "_why_at_once", lambda *given: "")
    monkeypatch.setattr(foreign, "_Refuse", contextlib.nullcontext)
    made = model(InBackward(), zero=False)
    tape = plan(made, F.cross_entropy, *data)
    assert tape.independence is Independence.CONSTRUCTION
    assert distance(tape, data[0][:9], data[1][:9]) > 1.01


def test_an_operator_that_planning_has_not_seen_stops_a_mapped_pass(data):
    made = model(nn.Tanh(), zero=False)
    tape = plan(nn.Sequential(made, Scaled()), F.cross_entropy, *data)
    assert tape.independence is Independence.CONSTRUCTION
    tape.model[1].inside = InForward()
    with tape.recording(), pytest.raises(RuntimeError, match="evenclip_attack::whole may have a"):
        tape(*data)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Identity()

    def forward(self, x):
        return self.inside(2 * x)


class Seeded(nn.Module):
    """Draws a mask after setting the seed: each place of a batch has its own, in every batch."""

    def forward(self, x):
        torch.manual_seed(0)
        return x * torch.rand(x.shape)


class SeededApart(nn.Module):
    """Does so and restores the generator."""

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            mask = torch.rand(x.shape)
        return F.dropout(x * mask, 0.1)


class OwnGenerator(nn.Module):
    def forward(self, x):
        return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(0))


class OfPython(nn.Module):
    def forward(self, x):
        return x * (1 + 1e-9 * random.random())


DRAWN = {
    Seeded: "after setting the seed of torch's generator",
    SeededApart: "after setting the seed of torch's generator",
    OwnGenerator: "from a generator of its own",
    OfPython: "from the generator of Python or of numpy",
}


@pytest.mark.parametrize("independence", [None, "tested"], ids=str)
@pytest.mark.parametrize("inside", DRAWN)
def test_random_numbers_that_are_not_fresh_are_refused(inside, independence, data):
    said = rf"^A pass through the model or its loss draws random numbers {DRAWN[inside]}, which may"
    with pytest.raises(ModelError, match=said):
        plan(model(inside(), zero=False), F.cross_entropy, *data, independence)


@pytest.mark.parametrize("inside", [Seeded, OwnGenerator])
def test_the_attack_wins_where_masks_belong_to_places(inside, data, monkeypatch):
    planning = importlib.import_module("evenclip.gradients.plan")
    monkeypatch.setattr(planning, "_refuse_draws", lambda *given: None)
    monkeypatch.setattr(planning, "_refuse_mixing", lambda *given, **more: None)
    tape = plan(model(inside(), zero=False), F.cross_entropy, *data)
    assert tape.independence is Independence.CONSTRUCTION
    assert distance(tape, data[0][:30], data[1][:30]) > 1.5


def test_fresh_random_numbers_are_not_refused(data):
    for inside in (nn.Dropout(0.2), nn.Sequential(nn.Dropout(0.2), Scaled(), nn.AlphaDropout(0.1))):
        tape = plan(nn.Sequential(Scaled(), model(inside)), F.cross_entropy, *data)
        assert tape.independence is Independence.CONSTRUCTION


class NeedsTwo(nn.Module):
    def forward(self, x):
        return F.batch_norm(x, None, None, training=True)


def test_a_model_that_takes_no_batch_of_one_is_refused_in_a_sentence(data):
    said = r"^The model or its loss does not take a batch of one sample \(Expected more than 1"
    with pytest.raises(ModelError, match=said):
        plan(model(NeedsTwo()), F.cross_entropy, *data)


class InDouble(nn.Module):
    """A part in float64, of which no copy in another precision takes the inputs."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(D, D).double()

    def forward(self, x):
        return self.inside(x.double()).float()


class InDoubleNormalised(InDouble):
    def forward(self, x):
        inner = self.inside(x.double())
        return (inner - inner.mean(0)).float()


def test_a_model_of_several_precisions_is_tested_as_it_is(data):
    made = nn.Sequential(nn.Linear(D, D), InDouble(), nn.Linear(D, CLASSES))
    assert plan(made, F.cross_entropy, *data).independence is Independence.CONSTRUCTION
    made[1] = InDoubleNormalised()
    with pytest.raises(ModelError, match="The samples of a batch influence each other in"):
        plan(made, F.cross_entropy, *data)


def test_the_report_says_which_grade(data):
    given = {"rule": DPSGD(), "batch_size": 20, "steps": 1, "delta": 1e-3}
    known = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(D, CLASSES)

        def forward(self, x):
            return self.layer(x)

    grades = [
        fit(made, data, **given, independence=way).privacy["independence"].split(":")[0]
        for made, way in ((known, None), (Own(), None), (Own(), "tested"))
    ]
    assert grades == ["by layer types", "by construction", "tested"]


class Branches(nn.Module):
    """Has a branch on numbers, so that its passes cannot be mapped; quotes what it is given."""

    def __init__(self, least=-math.inf):
        super().__init__()
        self.layer, self.least = nn.Linear(D, CLASSES), least

    def forward(self, x):
        if bool((x < self.least).any()):
            raise ValueError(f"{x.min()} is too small")
        return self.layer(x)


@pytest.mark.parametrize(
    ("given", "independence", "reason"),
    [
        (Branches(), None, "because a pass failed (vmap: It looks like you're attempting to"),
        (Branches(), "tested", "because this was chosen"),
        (Branches(0.0), None, None),  # planned with records, which a message may quote
    ],
    ids=["branch", "chosen", "records"],
)
def test_the_report_says_why_samples_pass_together(given, independence, reason, data):
    x, y = data[0].abs(), data[1]
    result = fit(
        given, (x, y), rule=DPSGD(), batch_size=20, steps=1, delta=1e-3, independence=independence
    )
    sentence = result.privacy["independence"]
    assert sentence.startswith("tested: ")
    assert reason in sentence if reason else "because" not in sentence
