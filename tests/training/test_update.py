"""One update of all parameters as a vector equals an update of each of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import evenclip
from evenclip import DPSGD
from evenclip.gradients import Layout
from evenclip.training.update import _ELEMENTWISE, Update
from fresh import fresh

SGD = torch.optim.SGD
OPTIONS = {
    "plain": SGD,
    "momentum": partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    **{kind.__name__: kind for kind in _ELEMENTWISE if kind is not SGD},
}


def one_by_one(optimizer):
    """The same optimiser from a custom function, so that the parameters are not joined."""
    return lambda parameters, lr: optimizer(list(parameters), lr=lr)


def train(model, toy, **options):
    rule = DPSGD(C0=0.7, sigma=0.5)
    return evenclip.fit(
        model, toy.data(), rule=rule, epochs=2, batch_size=8, lr=0.05, seed=3, delta=1e-3, **options
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_joined_equals_one_by_one(name, toy):
    layout, models = Layout.of(toy.mlp()), [toy.mlp(), toy.mlp()]
    makes = OPTIONS[name], one_by_one(OPTIONS[name])
    updates = [Update(model, layout, make, 0.05) for model, make in zip(models, makes, strict=True)]
    assert [len(u.optimizer.param_groups[0]["params"]) for u in updates] == [1, len(layout.names)]
    random = torch.Generator().manual_seed(0)
    for _ in range(5):
        gradient = torch.randn(layout.size, generator=random, dtype=layout.blank.dtype)
        kept = gradient.clone()
        for update in updates:
            update(gradient)
        assert torch.equal(gradient, kept)
    assert not toy.same(models[0], toy.mlp())
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


# --- plain SGD constructs its optimiser on first use ---


def test_plain_sgd_without_its_optimiser_is_plain_sgd(toy):
    layout, models = Layout.of(toy.mlp()), [toy.mlp(), toy.mlp()]
    without, used = (Update(model, layout, SGD, 0.05) for model in models)
    gradient = torch.randn(
        layout.size, generator=torch.Generator().manual_seed(0), dtype=layout.blank.dtype
    )
    for _ in range(3):
        without(gradient)
        assert used.optimizer.param_groups[0]["lr"] == 0.05
        used(gradient)
    assert "optimizer" not in vars(without)
    assert toy.same(*models)
    assert not toy.same(models[0], toy.mlp())


def test_a_learning_rate_that_is_changed_at_the_optimiser_counts(toy):
    layout, model = Layout.of(toy.mlp()), toy.mlp()
    update = Update(model, layout, SGD, 0.05)
    update.optimizer.param_groups[0]["lr"] = 0.0
    update(torch.ones(layout.size, dtype=layout.blank.dtype))
    assert toy.same(model, toy.mlp())


def test_what_is_wrong_with_an_optimiser_is_heard_before_training(toy):
    with pytest.raises(ValueError, match="momentum"):
        Update(toy.mlp(), Layout.of(toy.mlp()), partial(SGD, momentum=-1.0), 0.05)


def test_training_by_plain_sgd_does_not_import_the_compiler():
    """The import would take most of a second in every process."""
    code = (
        "import sys, torch, evenclip\n"
        "x = torch.randn(40, 3)\n"
        "y = (x[:, 0] > 0).long()\n"
        "rule, model = evenclip.DPSGD(), torch.nn.Linear(3, 2)\n"
        "evenclip.fit(model, (x, y), rule=rule, epochs=1, batch_size=8, lr=0.1, delta=1e-3)\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    assert fresh(code).split()[-1] == "False"


def storages(model):
    return {p.untyped_storage().data_ptr() for p in model.parameters()}


def test_while_training_they_lie_in_one_vector_and_afterwards_each_in_its_own(toy):
    seen = []
    result = train(toy.mlp(), toy, observers=[lambda step: seen.append(len(storages(step.model)))])
    assert set(seen) == {1}
    parameters = list(result.model.parameters())
    assert len(storages(result.model)) == len(parameters)
    assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in parameters)
    assert all(p.grad is None for p in parameters)


class Strange(nn.Parameter):
    """A custom parameter class."""


@pytest.mark.parametrize("change", ["float32 beside float64", "another kind", "none at all"])
def test_parameters_that_do_not_fit_in_one_vector_are_left_alone(change, toy):
    model = toy.mlp()
    first = next(iter(model.parameters()))
    if change == "float32 beside float64":
        first.data = first.data.float()
    elif change == "another kind":
        layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
        layer.weight = Strange(layer.weight.data)
    else:
        for p in model.parameters():
            p.requires_grad_(False)
    before = len(storages(model))
    make = SGD if change != "none at all" else lambda parameters, lr: SGD([torch.zeros(1)], lr=lr)
    layout = Layout.of(model)
    Update(model, layout, make, 0.1)(torch.ones(layout.size))
    assert len(storages(model)) == before


def test_frozen_parameters_are_not_moved(toy):
    model = toy.mlp()
    frozen = next(iter(model.parameters())).requires_grad_(False)
    before = frozen.clone()
    result = train(model, toy, scheduler=partial(StepLR, step_size=1))
    assert torch.equal(next(iter(result.model.parameters())), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_optimiser_takes_a_model_of_any_dtype(name, dtype, toy):
    """A released gradient is in float32 or wider for any dtype of the parameters."""
    x, y, group = toy.data()
    model, before = toy.mlp().to(dtype), toy.vector(toy.mlp().to(dtype))
    result = evenclip.fit(
        model, (x.to(dtype), y, group), rule=DPSGD(C0=0.7, sigma=0.5), epochs=1, batch_size=8,
        lr=0.5, delta=1e-3, optimizer=OPTIONS[name],
    )  # fmt: skip
    after = toy.vector(result.model)
    assert after.dtype == dtype
    assert not torch.equal(before, after)
