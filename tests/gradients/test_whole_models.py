"""Whole models, common and unusual ones, against single samples."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_map

from evenclip.gradients import Tape, WholeTape, per_sample_gradients, plan
from evenclip.gradients.layers import linear

N, T, D, CLASSES = 4, 5, 4, 3


class Chain(nn.Module):
    """Apply the steps in order; a step is a module or a function."""

    def __init__(self, *steps):
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(step for step in steps if isinstance(step, nn.Module))

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


class Recurrent(nn.Module):
    def __init__(self, layer, width):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, CLASSES)

    def forward(self, x):
        if not self.layer.batch_first:
            x = x.transpose(0, 1)
        output, _ = self.layer(x)
        return self.head(output.mean(dim=1 if self.layer.batch_first else 0))


class LastState(nn.Module):
    """Uses the second of a layer's outputs only."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(D, 3, batch_first=True), nn.Linear(3, CLASSES)

    def forward(self, x):
        _, (_, c) = self.layer(x)
        return self.head(c[-1])


class Cells(nn.Module):
    """A cell called for every position with its previous state."""

    def __init__(self, begun):
        super().__init__()
        self.cell, self.head, self.begun = nn.LSTMCell(D, 3), nn.Linear(3, CLASSES), begun

    def forward(self, x):
        state = (x.new_zeros(len(x), 3), x.new_zeros(len(x), 3)) if self.begun else None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state[0])


class Attention(nn.Module):
    def __init__(self, batch_first=True, masked=False, dropout=0.0):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, dropout=dropout, batch_first=batch_first)
        self.head = nn.Linear(D, CLASSES)
        self.batch_first, self.masked = batch_first, masked

    def forward(self, x):
        if not self.batch_first:
            x = x.transpose(0, 1)
        mask = (
            torch.ones(T, T, dtype=torch.bool).triu(1) if self.masked else None
        )  # the same for all samples
        y, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return self.head(y.mean(dim=1 if self.batch_first else 0))


class Own(nn.Module):
    """A custom layer."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x):
        return torch.sin(x * self.scale) + self.shift**2


class OwnAroundOthers(nn.Module):
    """A module with its own parameters and child layers: one unit."""

    def __init__(self):
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.randn(D)), nn.Linear(D, D)

    def forward(self, x, *, power):
        return self.gain * self.inner(x).tanh() ** power, {"unused": self.gain * x}


class CallsWithKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.head = OwnAroundOthers(), nn.Linear(D, CLASSES)

    def forward(self, x):
        y, _ = self.own(x, power=3)
        return self.head(y)


class ClassToken(nn.Module):
    """The model itself has parameters."""

    def __init__(self):
        super().__init__()
        self.cls_token, self.body = nn.Parameter(torch.randn(1, 1, D)), nn.Linear(D, D)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, CLASSES)

    def forward(self, x):
        x = torch.cat([self.cls_token.expand(len(x), 1, D), x], dim=1)
        x = x + torch.softmax(x @ x.mT, dim=-1) @ self.body(x)
        return self.head(self.norm(x)[:, 0])


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(D, D), nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.head(self.layer(self.layer(x).tanh()).tanh())


class OneParameterInTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, CLASSES)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.head(self.other(self.one(x).tanh()).tanh())


class OneModuleInTwo(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.Linear(D, D)
        self.one, self.other = nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer, nn.ReLU())
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.head(self.other(self.one(x)))


class Language(nn.Module):
    """A language model whose output layer uses the embedding's weights, tied or called directly."""

    def __init__(self, openly, **options):
        super().__init__()
        self.tokens, self.body = nn.Embedding(6, D, **options), nn.Linear(D, D)
        self.output = nn.Linear(D, 6, bias=False) if openly else None
        if openly:
            self.output.weight = self.tokens.weight

    def forward(self, x):
        h = self.body(self.tokens(x)).tanh().mean(dim=1)
        return F.linear(h, self.tokens.weight) if self.output is None else self.output(h)


class Untouched(nn.Module):
    """A layer that is not called, one whose output is not used, and tokens that do not occur."""

    def __init__(self):
        super().__init__()
        self.never, self.ignored = nn.Linear(2, 2), nn.Linear(2 * D, 7)
        self.tokens, self.head = nn.Embedding(50, D), nn.Linear(2 * D, CLASSES)

    def forward(self, x):
        h = self.tokens(x[:, :2]).flatten(1)
        self.ignored(h)
        return self.head(h)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.numbers, self.head = (
            nn.Embedding(6, D),
            nn.Linear(D, D),
            nn.Linear(D, CLASSES),
        )

    def forward(self, tokens, features):
        return self.head(self.words(tokens).mean(dim=1) * self.numbers(features))


class Positions(nn.Module):
    """Positional embeddings that all samples share."""

    def __init__(self, how):
        super().__init__()
        self.positions, self.body = nn.Embedding(T, D), nn.Linear(D, D)
        self.head, self.how = nn.Linear(D, CLASSES), how

    def forward(self, x):
        at = torch.arange(x.shape[1])
        if self.how == "position first":
            h = (x.transpose(0, 1) + self.positions(at).unsqueeze(1)).transpose(0, 1)
        elif self.how == "with an axis of one":
            h = x + self.positions(at[None])
        elif self.how == "through another layer":
            h = x + self.body(self.positions(at))
        else:
            h = x + self.positions(at)
        return self.head(self.body(h).tanh().mean(dim=1))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Bilinear(D, D, D), nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.head(self.gate(x, x.flip(1)).tanh())


class Bag(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(6, D, **options), nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.head(self.bag(x).tanh())


def frozen(model, *names):
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def folded(*layers):
    """Positions are folded into the batch axis."""
    return Chain(
        lambda x: x.reshape(-1, D),
        *layers,
        lambda x: x.reshape(-1, T * D),
        nn.Linear(T * D, CLASSES),
    )


def film():
    """Convolutions over the frames of a video, folded into the batch axis."""
    return Chain(
        lambda x: x.reshape(-1, 1, 2, 2),
        nn.Conv2d(1, 2, 2, padding=1),
        nn.GroupNorm(2, 2),
        nn.ReLU(),
        lambda x: x.reshape(-1, T * 18),
        nn.Linear(T * 18, CLASSES),
    )


def pictures(*layers, out):
    return Chain(lambda x: x.reshape(-1, 1, T, D), *layers, nn.Flatten(), nn.Linear(out, CLASSES))


def transformer(dropout):
    layer = nn.TransformerEncoderLayer(D, 2, dim_feedforward=6, dropout=dropout, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(T * D, CLASSES))


MODELS = {  # name: how it is made, its input, its tape
    "layers one after the other": (
        lambda: nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, CLASSES)),
        "row",
        Tape,
    ),
    "one layer, the model itself": (lambda: nn.Linear(D, CLASSES), "row", Tape),
    "convolutions": (
        lambda: pictures(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.GroupNorm(3, 3),
            nn.ReLU(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(3, 8, 2),
            nn.InstanceNorm2d(8, affine=True),
            nn.Tanh(),
            nn.Conv2d(8, 9, 2),
            out=18,
        ),
        "sequence",
        Tape,
    ),
    "norms without parameters": (
        lambda: pictures(
            nn.Conv2d(1, 4, 2),
            nn.GroupNorm(2, 4, affine=False),
            nn.Conv2d(4, 2, 2),
            nn.InstanceNorm2d(2),
            nn.Flatten(),
            nn.LayerNorm(12, elementwise_affine=False),
            out=12,
        ),
        "sequence",
        Tape,
    ),
    "LSTM": (lambda: Recurrent(nn.LSTM(D, 3, batch_first=True), 3), "sequence", Tape),
    "LSTM, position first": (lambda: Recurrent(nn.LSTM(D, 3), 3), "sequence", Tape),
    "LSTM, last state": (LastState, "sequence", Tape),
    "LSTM with projection": (lambda: Recurrent(nn.LSTM(D, 3, proj_size=2), 2), "sequence", Tape),
    "GRU, two layers, both ways": (
        lambda: Recurrent(nn.GRU(D, 3, num_layers=2, bidirectional=True, batch_first=True), 6),
        "sequence",
        Tape,
    ),
    "RNN": (lambda: Recurrent(nn.RNN(D, 3), 3), "sequence", Tape),
    # δ of its second output goes through the first
    "LSTMCell": (lambda: Cells(begun=True), "sequence", WholeTape),
    "LSTMCell, first called without a state": (lambda: Cells(begun=False), "sequence", WholeTape),
    "attention": (Attention, "sequence", Tape),
    "attention, position first": (lambda: Attention(batch_first=False), "sequence", Tape),
    "attention, one mask for all": (lambda: Attention(masked=True), "sequence", Tape),
    "transformer": (lambda: transformer(0.0), "sequence", Tape),
    "transformer at rest": (lambda: transformer(0.5).eval(), "sequence", Tape),
    "own layer": (
        lambda: nn.Sequential(nn.Linear(D, D), Own(D), nn.Linear(D, CLASSES)),
        "row",
        Tape,
    ),
    "own layer around others": (CallsWithKeyword, "row", Tape),
    "class token": (ClassToken, "sequence", Tape),
    "a layer called twice": (CalledTwice, "row", Tape),
    "a layer called twice, over positions": (
        lambda: Chain(CalledTwice(), lambda x: x.mean(dim=1)),
        "sequence",
        Tape,
    ),
    "one parameter in two layers": (OneParameterInTwo, "row", Tape),
    "one layer in two modules": (OneModuleInTwo, "row", Tape),
    "tied embedding": (lambda: Language(openly=True), "tokens", Tape),
    "tied embedding, behind its back": (lambda: Language(openly=False), "tokens", WholeTape),
    "embedding with padding": (lambda: Language(openly=True, padding_idx=2), "tokens", Tape),
    "sparse embedding": (
        lambda: nn.Sequential(
            nn.Embedding(6, D, sparse=True), nn.Flatten(), nn.Linear(T * D, CLASSES)
        ),
        "tokens",
        Tape,
    ),
    "frozen layer": (lambda: frozen(CalledTwice(), "layer.weight", "layer.bias"), "row", Tape),
    "frozen weights": (lambda: frozen(CalledTwice(), "layer.weight", "head.weight"), "row", Tape),
    "frozen bias": (lambda: frozen(CalledTwice(), "layer.bias", "head.bias"), "row", Tape),
    "frozen part of a unit": (
        lambda: frozen(Recurrent(nn.LSTM(D, 3), 3), "layer.weight_ih_l0", "layer.bias_hh_l0"),
        "sequence",
        Tape,
    ),
    "frozen part of the model itself": (
        lambda: frozen(ClassToken(), "cls_token"),
        "sequence",
        Tape,
    ),
    "untouched parameters": (Untouched, "tokens", Tape),
    "two inputs": (TwoInputs, "two", Tape),
    "two inputs by name": (TwoInputs, "named", Tape),
    "positions": (lambda: Positions("plainly"), "sequence", Tape),
    "positions, with an axis of one": (lambda: Positions("with an axis of one"), "sequence", Tape),
    "positions, through another layer": (
        lambda: Positions("through another layer"),
        "sequence",
        WholeTape,
    ),
    "positions, position first": (lambda: Positions("position first"), "sequence", WholeTape),
    "positions in the batch axis": (
        lambda: folded(nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh()),
        "sequence",
        Tape,
    ),
    "positions in the batch axis, own layer": (lambda: folded(Own(D)), "sequence", WholeTape),
    "pictures in the batch axis": (film, "sequence", WholeTape),
    "ReLU in place": (
        lambda: nn.Sequential(nn.Linear(D, 6), nn.ReLU(inplace=True), nn.Linear(6, CLASSES)),
        "row",
        Tape,
    ),
    "ReLU in place, after a convolution": (
        lambda: pictures(nn.Conv2d(1, 2, 2), nn.ReLU(inplace=True), out=24),
        "sequence",
        Tape,
    ),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(D, 6)), nn.Linear(6, CLASSES)),
        "row",
        Tape,
    ),
    "transposed convolution": (
        lambda: pictures(nn.ConvTranspose2d(1, 2, 2, stride=2), out=160),
        "sequence",
        Tape,
    ),
    "PReLU": (
        lambda: nn.Sequential(nn.Linear(D, D), nn.PReLU(D), nn.Linear(D, CLASSES)),
        "row",
        Tape,
    ),
    "Bilinear": (Gate, "row", Tape),
    "EmbeddingBag": (Bag, "tokens", Tape),
    "EmbeddingBag, largest": (lambda: Bag(mode="max"), "tokens", Tape),
    "EmbeddingBag, sparse": (lambda: Bag(mode="sum", sparse=True), "tokens", Tape),
}


@pytest.fixture(scope="session")
def case(numbers, tokens, made):
    """`case(name)`: model, x, y and the kind of tape it should get."""

    def build(name, n=N):
        make, kind, tape = MODELS[name]
        x = {
            "row": lambda: numbers(1, n, D),
            "sequence": lambda: numbers(1, n, T, D),
            "tokens": lambda: tokens(1, 6, n, T),
            "two": lambda: (tokens(1, 6, n, T), numbers(2, n, D)),
            "named": lambda: {"tokens": tokens(1, 6, n, T), "features": numbers(2, n, D)},
        }[kind]()
        return made(0, make), x, tokens(3, CLASSES, n), tape

    return build


WAYS = [None, "tested"]  # each sample by itself where that is possible, or all samples at once


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("independence", WAYS, ids=str)
def test_gradients_are_those_of_each_sample_alone(independence, name, case, alone, same):
    """A batch and a batch of one are correct; at once, with the named kind of tape."""
    for n in (N, 1):
        model, x, y, kind = case(name, n=n)
        tape = plan(model, F.cross_entropy, x, y, independence)
        assert independence is None or isinstance(tape, kind)
        with tape.recording():
            same(tape(x, y), alone(model, F.cross_entropy, x, y))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_float32_agrees_with_float64_to_rounding(name, case, alone, same):
    model, x, y, _ = case(name)
    expected = alone(model, F.cross_entropy, x, y)
    narrow = tree_map(lambda t: t.float() if t.is_floating_point() else t, x)
    same(
        per_sample_gradients(copy.deepcopy(model).float(), F.cross_entropy, narrow, y),
        expected,
        rtol=2e-5,
    )


@pytest.mark.parametrize(
    "name", ["LSTM", "own layer", "convolutions", "positions", "tied embedding, behind its back"]
)
@pytest.mark.parametrize("independence", WAYS, ids=str)
def test_one_plan_serves_batches_of_any_size(independence, name, case, alone, same):
    model, x, y, _ = case(name, n=7)
    with plan(model, F.cross_entropy, x, y, independence).recording() as tape:
        for n in (1, 2, 7):
            same(tape(x[:n], y[:n]), alone(model, F.cross_entropy, x[:n], y[:n]))


@pytest.mark.parametrize(
    "name", ["LSTM", "positions", "positions, with an axis of one", "attention", "own layer"]
)
@pytest.mark.parametrize("length", [1, 8])
@pytest.mark.parametrize("independence", WAYS, ids=str)
def test_one_plan_serves_sequences_of_any_length(
    independence, name, length, case, made, numbers, alone, same
):
    model, x, y, _ = case(name)
    if "positions" in name:
        model.positions = made(0, lambda: nn.Embedding(8, D))
    longer = numbers(7, N, *(() if name == "own layer" else (length,)), D)
    with plan(model, F.cross_entropy, x, y, independence).recording() as tape:
        same(tape(longer, y), alone(model, F.cross_entropy, longer, y))


class Routed(nn.Module):
    """Each sample goes through one of two layers; each layer is called on its own samples."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(D, CLASSES), nn.Linear(D, CLASSES)

    def forward(self, x):
        first = x[:, 0] > 0
        out = x.new_zeros(len(x), CLASSES)
        out[first] = self.one(x[first])
        out[~first] = self.other(x[~first])
        return out


@pytest.mark.parametrize("signs", [(1, 1, 1, 1), (1, -1, 1, -1), (-1, -1, -1, 1)])
def test_samples_that_go_different_ways(signs, made, numbers, tokens, alone, same):
    model, x, y = made(0, Routed), numbers(1, N, D), tokens(2, CLASSES, N)
    x[:, 0] = torch.tensor(signs) * x[:, 0].abs()
    same(per_sample_gradients(model, F.cross_entropy, x, y), alone(model, F.cross_entropy, x, y))
    with plan(model, F.cross_entropy, x, y).recording() as tape:
        same(tape(-x, y), alone(model, F.cross_entropy, -x, y))


class Selected(nn.Module):
    """Layers see the unmasked positions of all samples in one axis."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, CLASSES)

    def forward(self, x, mask):
        out = x.new_zeros(*x.shape[:2], CLASSES)
        out[mask] = self.layer(x[mask])
        return out.mean(dim=1)


def test_a_batch_unlike_the_one_of_the_plan_is_an_error_and_not_a_mistake(made, numbers, tokens):
    model, x, y = made(0, Selected), numbers(1, N, T, D), tokens(2, CLASSES, N)
    mask = torch.ones(N, T, dtype=torch.bool)
    with plan(model, F.cross_entropy, (x, mask), y, "tested").recording() as tape:
        mask = mask.clone()
        mask[0, 0] = False
        with pytest.raises(
            RuntimeError,
            match=r"shape \[19, 4\]; for 4 samples it should have 20 entries along axis 0",
        ):
            tape((x, mask), y).norms()


@pytest.mark.parametrize(
    "name", ["layers one after the other", "LSTM", "tied embedding, behind its back"]
)
def test_an_empty_batch(name, case):
    model, x, y, _ = case(name)
    with plan(model, F.cross_entropy, x, y).recording() as tape:
        gradients = tape(x[:0], y[:0])
    assert gradients.norms().shape == (0,)
    assert torch.equal(gradients.weighted_sum(torch.ones(0)), tape.layout.join({}))


def test_losses_and_layout(case):
    model, x, y, _ = case("untouched parameters")
    gradients = per_sample_gradients(model, F.cross_entropy, x, y)
    torch.testing.assert_close(gradients.losses, F.cross_entropy(model(x), y, reduction="none"))
    assert gradients.layout.names == tuple(name for name, _ in model.named_parameters())
    total = gradients.layout.split(gradients.weighted_sum(torch.ones(N)))
    assert {name: g.shape for name, g in total.items()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    zero = {name for name, g in total.items() if not g.any()}
    assert zero == {"never.weight", "never.bias", "ignored.weight", "ignored.bias"}


def test_an_unused_parameter_is_alone_in_the_model(numbers):
    model = nn.Module()
    model.unused = nn.Linear(2, 2)
    model.forward = lambda x: x
    gradients = per_sample_gradients(model, F.mse_loss, numbers(0, 3, 2), numbers(1, 3, 2))
    assert torch.equal(gradients.norms(), torch.zeros(3, dtype=torch.float64))
    assert torch.equal(gradients.weighted_sum(torch.ones(3)), torch.zeros(6))


# --- random models ------------------------------------------------------------------------------


def one_forward_pass(model, loss, x, y, seed):
    """Return each sample's gradient by autograd from one batch pass, with one set of masks."""
    torch.manual_seed(seed)
    losses = loss(model(x), y, reduction="none")
    parameters = list(model.parameters())
    rows = [torch.autograd.grad(value, parameters, retain_graph=True) for value in losses]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def test_dropout_between_layers_keeps_its_masks(numbers, tokens, made, same):
    model = made(
        0,
        lambda: nn.Sequential(
            nn.Linear(D, 9), nn.Dropout(0.5), Own(9), nn.Dropout(0.5), nn.Linear(9, 3)
        ),
    )
    x, y = numbers(1, N, D), tokens(2, 3, N)
    tape = plan(model, F.cross_entropy, x, y)
    with torch.random.fork_rng(devices=[]), tape.recording():
        expected = one_forward_pass(model, F.cross_entropy, x, y, seed=7)
        torch.manual_seed(7)
        same(tape(x, y), expected)
    assert isinstance(tape, Tape)


RANDOM = {  # dropout inside a unit: a second run would draw other masks
    "transformer": lambda: transformer(0.5),
    "attention": lambda: Attention(dropout=0.5),
    "attention, rarely": lambda: Attention(dropout=1e-3),  # no mask drops anything on three samples
    "LSTM": lambda: Recurrent(nn.LSTM(D, 3, num_layers=2, dropout=0.5, batch_first=True), 3),
}


@pytest.mark.parametrize("name", RANDOM)
def test_dropout_inside_a_unit_is_differentiated_with_the_masks_of_its_losses(
    name, numbers, tokens, made
):
    model, x, y = made(0, RANDOM[name]), numbers(1, N, T, D), tokens(2, 3, N)
    tape = plan(model, F.cross_entropy, x, y, "tested")
    assert isinstance(tape, WholeTape)
    with torch.random.fork_rng(devices=[]), tape.recording():
        along = numbers(3, tape.layout.size)
        torch.manual_seed(7)
        gradients = tape(x, y)
        slopes = (moved(tape, along, 1e-5, x, y) - moved(tape, along, -1e-5, x, y)) / 2e-5
    torch.testing.assert_close(gradients.per_sample() @ along, slopes, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradients.norms(), gradients.per_sample().norm(dim=1))
    assert name == "attention, rarely" or not torch.allclose(
        gradients.losses, tape(x, y).losses
    )  # other masks


def moved(tape, along, by, x, y):
    """Return the losses at moved parameters with the dropout masks of seed 7."""
    steps = tape.layout.split(by * along)
    with torch.no_grad():
        for name, p in tape.model.named_parameters():
            p += steps[name]
        torch.manual_seed(7)
        losses = tape(x, y).losses
        for name, p in tape.model.named_parameters():
            p -= steps[name]
    return losses


class SometimesSkipped(nn.Module):
    """Stochastic depth: with torch's seed 0 the layer is skipped."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(D, D), nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.head(x if torch.rand(()) < 0.6 else self.layer(x))


def test_a_layer_that_was_skipped_in_the_plan_does_not_go_untrained_in_silence(
    numbers, tokens, made
):
    model, x, y = made(0, SometimesSkipped), numbers(1, N, D), tokens(2, CLASSES, N)
    with (
        torch.random.fork_rng(devices=[]),
        plan(model, F.cross_entropy, x, y, "tested").recording() as tape,
    ):
        torch.manual_seed(0)
        tape(x, y)
        torch.manual_seed(1)
        with pytest.raises(
            RuntimeError, match=r"layer \(Linear\) was not called when the model was analysed"
        ):
            tape(x, y)


# --- the plan is compared with autograd ---------------------------------------------------------


def without_bias_norm(delta):
    return delta.new_zeros(len(delta))


def weight_only(self, weights):
    weighted = self._delta * weights.view(-1, 1, 1)
    return {"weight": torch.einsum("nto,nti->oi", weighted, self._a)}


@pytest.mark.parametrize(
    "place",
    [
        (linear, "sum_square_norms", without_bias_norm),
        (linear.Positions, "weighted_sum", weight_only),
    ],
    ids=["in the norm", "in the sum"],
)
def test_a_layer_whose_formula_is_wrong_is_taken_as_a_whole(
    place, made, numbers, alone, same, monkeypatch
):
    model, x, y = made(0, lambda: nn.Linear(3, 3)), numbers(1, 4, 5, 3), numbers(2, 4, 5, 3)
    assert isinstance(plan(model, F.mse_loss, x, y, "tested"), Tape)
    monkeypatch.setattr(*place)
    taken = plan(model, F.mse_loss, x, y, "tested")
    assert isinstance(taken, WholeTape)
    same(taken(x, y), alone(model, F.mse_loss, x, y))
