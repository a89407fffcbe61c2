"""Faults that somebody might make, planted: the comparisons in this folder notice each of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip.gradients import Tape, WholeTape, plan, tape
from evenclip.gradients.layers import convolution, embedding, formula, layer, linear

caught = pytest.raises(AssertionError, match="not close")


def without_bias(delta):
    return torch.zeros_like(delta[:, 0])


def without_bias_norm(delta):
    return delta.new_zeros(len(delta))


def without_bias_in_outer_product(self):
    return layer.square_sums(self._a) * layer.square_sums(self._delta)


def without_stride(self):
    """The windows of a convolution of stride 1, cut to size."""
    return self.a.unfold(2, self.space[0], 1).narrow(2, 0, self.module.kernel_size[0])


def one_place_off(self):
    """The windows of a convolution, each begun one place too late."""
    return self.a.roll(-1, dims=2).unfold(2, self.space[0], 1)


def without_dilation(module, a, delta, weight, groups):
    """The weight gradient of a convolution whose kernel has no holes."""
    return nn.grad.conv1d_weight(a[:, :, : delta.shape[2] + 2], weight.shape, delta, groups=groups)


def without_padding_idx(module, a, delta, names):
    return embedding.EmbeddingGradient(a, delta, module.num_embeddings)


def with_float32_gram(a, delta):
    return ((a.float() @ a.float().mT) * (delta.float() @ delta.float().mT)).sum(dim=(1, 2)).clamp(min=0.0).double()


def without_repetitions(self):
    return self._delta.double().square().sum(dim=(1, 2))


FAULTS = {  # the fault: the layer, one sample's input, how it is planted
    "the bias is forgotten": (lambda: nn.Linear(3, 2), (4, 3), (linear, "_over_positions", without_bias)),
    "the bias is forgotten in the norm": (
        lambda: nn.Linear(3, 2), (4, 3), (linear, "sum_square_norms", without_bias_norm)),
    "the bias is forgotten in the norm of one position": (
        lambda: nn.Linear(3, 2), (3,), (linear.OnePosition, "square_norms", without_bias_in_outer_product)),
    "the bias is forgotten in the norm of a convolution": (
        lambda: nn.Conv1d(8, 9, 3), (8, 4), (convolution, "sum_square_norms", without_bias_norm)),
    "the stride is forgotten": (
        lambda: nn.Conv1d(2, 2, 3, stride=2), (2, 9), (convolution.Shifts, "windows", property(without_stride))),
    "the windows are one place off": (
        lambda: nn.Conv1d(2, 2, 3), (2, 9), (convolution.Shifts, "windows", property(one_place_off))),
    "the windows are one place off, offset by offset": (
        lambda: nn.Conv1d(8, 2, 3), (8, 9), (convolution.Shifts, "windows", property(one_place_off))),
    "the padding token is not left out": (
        lambda: nn.Embedding(4, 2, padding_idx=1), (6,), (embedding, "gradient", without_padding_idx)),
    "tokens that repeat are not added up": (
        lambda: nn.Embedding(2, 2), (6,), (embedding.EmbeddingGradient, "square_norms", without_repetitions)),
    "the Gram form is not in float64": (
        lambda: nn.Linear(6, 6), (4, 6), (linear, "_gram_square_norms", with_float32_gram)),
    "the weights are forgotten": (
        lambda: nn.LayerNorm(3), (4, 3), (layer, "_contract", lambda weights, each, keep: each.sum(dim=0))),
}  # fmt: skip


@pytest.fixture
def built(made, numbers, tokens):
    """`built(name)`: layer, a and δ of a fault, and where it is planted."""

    def build(name):
        make, shape, place = FAULTS[name]
        module = made(0, make)
        a = tokens(1, module.num_embeddings, 3, *shape) if "token" in name else numbers(1, 3, *shape)
        return module, a, numbers(2, *module(a).shape), place

    return build


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_in_a_layer_is_noticed(name, built, layer_alone, same_layer, monkeypatch):
    module, a, delta, (owner, attribute, fault) = built(name)
    names, expected = [n for n, _ in module.named_parameters()], layer_alone(module, a, delta)
    same_layer(formula(module)(module, a, delta, names), expected)
    gradient = fault if attribute == "gradient" else formula(module)
    monkeypatch.setattr(owner, attribute, fault)
    with caught:
        same_layer(gradient(module, a, delta, names), expected)


def test_a_planted_fault_in_a_convolution_of_groups_is_noticed(made, numbers, layer_alone, same_layer, monkeypatch):
    module, a = made(0, lambda: nn.Conv1d(8, 2, 3, dilation=2)), numbers(1, 3, 8, 12)
    delta = numbers(2, *module(a).shape)
    expected = layer_alone(module, a, delta)
    monkeypatch.setattr(convolution, "_has_onednn", lambda like: True)
    same_layer(convolution.gradient(module, a, delta, ["weight", "bias"]), expected)
    monkeypatch.setattr(convolution, "_weight_gradient", without_dilation)
    with caught:
        same_layer(convolution.gradient(module, a, delta, ["weight", "bias"]), expected)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


def uses_once(records):
    """Every parameter is used once."""
    return {full: 1 for record in records for full in record.parameters.values()}


def test_forgotten_cross_terms_of_a_shared_parameter_are_noticed(made, numbers, tokens, alone, same, monkeypatch):
    model, x, y = made(0, Twice), numbers(1, 4, 3), tokens(2, 3, 4)
    expected, taken = alone(model, F.cross_entropy, x, y), plan(model, F.cross_entropy, x, y)
    assert isinstance(taken, Tape)
    with taken.listening():
        same(taken(x, y), expected)
        monkeypatch.setattr(tape, "_uses", uses_once)
        with caught:
            same(taken(x, y), expected)


def weight_only(self, weights):
    weighted = self._delta * weights.view(-1, 1, 1)
    return {"weight": torch.einsum("nto,nti->oi", weighted, self._a)}


@pytest.mark.parametrize(
    "place",
    [(linear, "sum_square_norms", without_bias_norm), (linear.Positions, "weighted_sum", weight_only)],
    ids=["in the norm", "in the sum"],
)
def test_the_plan_itself_notices_a_wrong_layer_and_goes_round_it(place, made, numbers, alone, same, monkeypatch):
    model, x, y = made(0, lambda: nn.Linear(3, 3)), numbers(1, 4, 5, 3), numbers(2, 4, 5, 3)
    assert isinstance(plan(model, F.mse_loss, x, y), Tape)
    monkeypatch.setattr(*place)
    taken = plan(model, F.mse_loss, x, y)
    assert isinstance(taken, WholeTape)
    same(taken(x, y), alone(model, F.mse_loss, x, y))
