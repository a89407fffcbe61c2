"""The formula for recurrent layers: every kind and option, against single samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip.gradients import Tape, plan
from evenclip.gradients.layers import recurrent

N, T, D, H, CLASSES = 4, 6, 3, 5, 3
KINDS = {
    "lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN,
    "rnn, relu": lambda *given, **more: nn.RNN(*given, nonlinearity="relu", **more),
}  # fmt: skip


class Classifier(nn.Module):
    """A recurrent layer, and a linear layer on one of its outputs."""

    def __init__(self, layer, used, state=False):
        super().__init__()
        self.layer, self.used, self.state = layer, used, state
        self.into = nn.Linear(D, D)  # so that the recurrent layer's input has a gradient
        directions = 2 if layer.bidirectional else 1
        self.head = nn.Linear(layer.hidden_size * (directions if used == "output" else 1), CLASSES)

    def forward(self, x):
        x = self.into(x)
        state = ()
        if self.state:
            layers = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
            h = (
                x.mean(dim=1, keepdim=True)
                .repeat(1, layers, 2)[:, :, :H]
                .transpose(0, 1)
                .contiguous()
            )
            state = ((h, h * 0.5) if isinstance(self.layer, nn.LSTM) else h,)
        x = x if self.layer.batch_first else x.transpose(0, 1)
        output, end = self.layer(x, *state)
        if self.used == "output":
            return self.head(
                (output if self.layer.batch_first else output.transpose(0, 1)).square().sum(dim=1)
            )
        if isinstance(self.layer, nn.LSTM):
            end = end[0] if self.used == "h" else end[1]
        return self.head(end.sum(dim=0))


@pytest.fixture
def formed(monkeypatch):
    """Count the uses of the formula."""
    calls, real = [], recurrent.gradient
    monkeypatch.setattr(
        recurrent, "gradient", lambda *given: calls.append(given[0]) or real(*given)
    )
    return calls


def check(model, made, numbers, tokens, alone, same, formed):
    model = made(0, lambda: model)
    x, y = numbers(1, N, T, D), tokens(2, CLASSES, N)
    tape = plan(model, F.cross_entropy, x, y)
    assert isinstance(tape, Tape)
    formed.clear()
    with tape.recording():
        gradients, expected = tape(x, y), alone(model, F.cross_entropy, x, y)
        same(gradients, expected)
        keep = torch.tensor([True, False, True, True])
        same(gradients.masked(keep), torch.where(keep.unsqueeze(1), expected, 0.0))
    assert formed, "it should have gone by the formula"


# Every pair of two options once.
@pytest.mark.parametrize(
    ("layers", "both", "first", "bias"),
    [
        (1, False, True, True),
        (1, True, False, True),
        (2, False, False, True),
        (2, True, True, True),
        (2, True, False, False),
        (1, False, True, False),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind, layers, both, first, bias, made, numbers, tokens, alone, same, formed):
    layer = KINDS[kind](D, H, layers, bidirectional=both, batch_first=first, bias=bias)
    check(Classifier(layer, "output"), made, numbers, tokens, alone, same, formed)


@pytest.mark.parametrize("state", [False, True], ids=["from nothing", "from a state"])
@pytest.mark.parametrize(
    ("kind", "used"),
    [
        ("lstm", "output"),
        ("lstm", "h"),
        ("lstm", "c"),
        ("gru", "output"),
        ("gru", "h"),
        ("rnn", "output"),
        ("rnn", "h"),
    ],
)
def test_every_input_and_output(kind, used, state, made, numbers, tokens, alone, same, formed):
    layer = KINDS[kind](D, H, 2, bidirectional=True, batch_first=True)
    check(Classifier(layer, used, state), made, numbers, tokens, alone, same, formed)


def test_some_parameters_frozen(made, numbers, tokens, alone, same, formed):
    model = Classifier(nn.LSTM(D, H, 2, batch_first=True), "output")
    for name, p in model.layer.named_parameters():
        p.requires_grad_(name in ("weight_hh_l0", "bias_ih_l1"))
    check(model, made, numbers, tokens, alone, same, formed)


def test_dropout_that_is_off_does_not_matter(made, numbers, tokens, alone, same, formed):
    model = Classifier(nn.GRU(D, H, 2, batch_first=True, dropout=0.5), "output").eval()
    check(model, made, numbers, tokens, alone, same, formed)


class Own(nn.LSTM):
    """A custom subclass may compute something else."""


def test_what_has_no_formula():
    x = torch.zeros(N, T, D)
    taken = [
        nn.LSTM(D, H),
        nn.GRU(D, H),
        nn.RNN(D, H),
        nn.LSTM(D, H, 1, dropout=0.0),
        nn.LSTM(D, H, 2, dropout=0.5).eval(),
    ]
    assert all(recurrent.takes(layer, (x,)) for layer in taken)
    left = [
        nn.LSTM(D, H, proj_size=2),
        nn.LSTM(D, H, 2, dropout=0.5),
        nn.LSTMCell(D, H),
        Own(D, H),
        nn.Linear(D, H),
    ]
    assert not any(recurrent.takes(layer, (x,)) for layer in left)
    assert not recurrent.takes(nn.LSTM(D, H), (x[0],))
    assert not recurrent.takes(nn.LSTM(D, H), ())
    assert not recurrent.takes(
        nn.LSTM(D, H), (nn.utils.rnn.pack_padded_sequence(x, [T] * N, batch_first=True),)
    )
    changed = nn.utils.parametrizations.weight_norm(nn.LSTM(D, H), "weight_hh_l0")
    assert not recurrent.takes(changed, (x,))


def test_norms_are_never_too_small_in_float32(made, numbers, tokens):
    """Sums over long sequences of nearly constant input cancel."""
    model = made(0, lambda: Classifier(nn.LSTM(D, H, batch_first=True), "output")).float()
    x = (1 + 1e-3 * numbers(1, N, 200, D)).float()
    tape = plan(model, F.cross_entropy, x, tokens(2, CLASSES, N))
    with tape.recording():
        gradients = tape(x, tokens(2, CLASSES, N))
    each = torch.stack(
        [gradients.weighted_sum(indicator) for indicator in torch.eye(N, dtype=torch.float64)]
    )
    assert (gradients.norms() >= each.double().norm(dim=1)).all()
    assert (gradients.norms() <= 1.001 * each.double().norm(dim=1)).all()
