"""The paper's networks: parameter counts, seeds, and the loss floor of the Dutch model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from evenclip.models import cnn, mlp, sigmoid_then_softmax

MODELS = {  # name -> function, shape of one sample, classes, parameters
    "Adult": (mlp, (98,), 2, 91_650),  # printed in App. B
    "Dutch": (sigmoid_then_softmax, (59,), 2, 120),  # printed in App. B
    # (9·1+1)·32 + (9·32+1)·16 + 24²·16·10 + 10
    "MNIST": (cnn, (1, 28, 28), 10, 97_114),
    # printed in App. B: (9·3+1)·32 + (9·32+1)·16 + 60²·16·2 + 2
    "CelebA": (lambda seed=0: cnn(3, 64, 2, seed=seed), (3, 64, 64), 2, 120_722),
    "softmax regression": (lambda seed=0: mlp(7, 3, (), seed=seed), (7,), 3, 24),
}


@pytest.fixture(params=MODELS)
def case(request):
    return MODELS[request.param]


def parameters(model):
    """Return all parameters in one vector."""
    return nn.utils.parameters_to_vector(model.parameters())


def test_number_of_parameters_and_shapes(case):
    make, shape, classes, count = case
    assert len(parameters(make())) == count
    assert make()(torch.zeros(5, *shape)).shape == (5, classes)


def test_the_seed_decides_the_parameters(case):
    make = case[0]
    assert torch.equal(parameters(make(seed=3)), parameters(make(seed=3)))
    assert not torch.equal(parameters(make(seed=3)), parameters(make(seed=4)))


def test_the_global_generator_neither_decides_nor_moves(case):
    make = case[0]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = parameters(make())
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(first, parameters(make()))


def test_a_seed_does_not_give_the_numbers_that_torch_draws_from_it():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = nn.Linear(59, 2)
    assert not torch.equal(plain.weight, sigmoid_then_softmax(seed=0)[0].weight)


def test_models_are_made_on_the_cpu_for_any_default_device():
    with torch.device("meta"):
        model = mlp()
    assert torch.equal(parameters(model), parameters(mlp()))


@pytest.mark.parametrize("classes", [2, 5])
def test_loss_of_sigmoid_then_softmax_stays_above_its_floor(classes):
    model = sigmoid_then_softmax(3, classes).double()
    y = torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():  # greatest certainty: sigmoid 1 for the right class, 0 for all others
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([1e6] + [-1e6] * (classes - 1)))
        loss = float(cross_entropy(model(torch.zeros(1, 3).double()), y))
    assert loss == pytest.approx(math.log(1 + (classes - 1) / math.e), abs=1e-12)
    assert classes > 2 or loss == pytest.approx(0.313, abs=5e-4)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: mlp(0), "inputs is 0; it must be a whole number of at least 1."),
        (lambda: mlp(hidden=(256, 0)), "hidden is 0; it must be a whole number of at least 1."),
        (
            lambda: cnn(side=4),
            "side is 4; two 3×3 convolutions without padding need at least 5 pixels.",
        ),
        (lambda: mlp(seed=-1), "seed is -1; it must be a whole number of at least 0."),
    ],
)
def test_what_is_refused_is_explained(attempt, message):
    with pytest.raises(ValueError, match=r"it must|need") as caught:
        attempt()
    assert str(caught.value) == message
