"""Which models are independent by the types of their layers, and which only look like it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations

from evenclip.gradients.known_layers import independent_by_layers

N, D, CLASSES = 3, 4, 2


class Own(nn.Linear):
    """A subclass may compute anything."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


def hooked():
    model = nn.Sequential(nn.Linear(D, CLASSES))
    model[0].register_forward_hook(lambda module, given, output: output - output.mean(0))
    return model


def replaced():
    model = nn.Sequential(nn.Linear(D, CLASSES))
    model[0].forward = lambda x: x[:, :CLASSES] - x[:, :CLASSES].mean(0)
    return model


ROWS = {  # models of inputs [N, D]
    "an MLP": (nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, CLASSES)), True),
    "nested": (nn.Sequential(nn.Sequential(nn.Linear(D, 5), nn.ReLU()), nn.Linear(5, 2)), True),
    "one layer": (nn.Linear(D, CLASSES), True),
    "layer norm": (nn.Sequential(nn.LayerNorm(D), nn.Linear(D, CLASSES)), True),
    "layer norm over the batch": (nn.Sequential(nn.LayerNorm((N, D)), nn.Linear(D, 2)), False),
    "softmax over classes": (nn.Sequential(nn.Linear(D, 2), nn.Softmax(dim=1)), True),
    "softmax over the batch": (nn.Sequential(nn.Linear(D, 2), nn.Softmax(dim=0)), False),
    "softmax over the batch, from the end": (nn.Sequential(nn.Softmax(-2), nn.Linear(D, 2)), False),
    "flattened with the batch": (nn.Sequential(nn.Flatten(0), nn.Linear(N * D, 2)), False),
    "unflattened": (nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.Linear(4, 2)), True),
    "the batch unflattened": (nn.Sequential(nn.Unflatten(0, (1, N)), nn.Linear(D, 2)), False),
    "rows as channels": (nn.Sequential(nn.Conv1d(N, N, 1), nn.Linear(D, CLASSES)), False),
    "a subclass": (nn.Sequential(Own(D, CLASSES)), False),
    "a hook": (hooked(), False),
    "another forward": (replaced(), False),
    "a parametrization": (nn.Sequential(parametrizations.weight_norm(nn.Linear(D, 2))), False),
    "batch norm": (nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, CLASSES)), False),
    "attention": (nn.Sequential(nn.MultiheadAttention(D, 2)), False),
}


@pytest.mark.parametrize("name", ROWS)
def test_which_models_are_known(name):
    model, known = ROWS[name]
    assert (
        independent_by_layers(model, F.cross_entropy, torch.randn(N, D), torch.arange(N) % 2)
        is known
    )


def test_a_convolution_reads_samples_channels_and_space():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, CLASSES))
    y = torch.arange(N) % 2
    assert independent_by_layers(model, F.cross_entropy, torch.randn(N, 1, 4, 4), y)
    assert not independent_by_layers(model[:2], F.cross_entropy, torch.randn(1, 4, 4), y[:1])


@pytest.mark.parametrize(
    ("loss", "known"),
    [
        (F.cross_entropy, True),
        (nn.CrossEntropyLoss(), True),
        (nn.CrossEntropyLoss(weight=torch.ones(2)), True),
        (lambda output, y: F.cross_entropy(output - output.mean(0), y), False),
        (type("Mine", (nn.CrossEntropyLoss,), {})(), False),
    ],
    ids=["function", "module", "weights", "custom", "subclass"],
)
def test_the_loss_is_torchs_own(loss, known):
    model, x, y = nn.Linear(D, CLASSES), torch.randn(N, D), torch.arange(N) % 2
    assert independent_by_layers(model, loss, x, y) is known


def test_targets_of_another_shape_would_be_compared_with_every_output():
    model, x = nn.Linear(D, 1), torch.randn(N, D)
    assert independent_by_layers(model, F.mse_loss, x, torch.randn(N, 1))
    assert not independent_by_layers(model, F.mse_loss, x, torch.randn(N))


def test_a_global_hook_sees_every_layer():
    model, x, y = nn.Linear(D, CLASSES), torch.randn(N, D), torch.arange(N) % 2
    handle = torch_module.register_module_forward_hook(lambda module, given, output: None)
    try:
        assert not independent_by_layers(model, F.cross_entropy, x, y)
    finally:
        handle.remove()
    assert independent_by_layers(model, F.cross_entropy, x, y)
