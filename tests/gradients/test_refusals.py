"""Models that cannot be trained privately are refused, and the model is not changed.

The error names the module.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from evenclip.gradients import ModelError, per_sample_gradients, plan

N, T, D, CLASSES = 4, 5, 4, 3


class Wrapped(nn.Module):
    """A model with several modules, so that the error can name a path."""

    def __init__(self, inside):
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(D, D), inside, nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.last(self.inside(self.first(x)).reshape(len(x), -1, D).mean(dim=1))


class MinusMean(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=0)


class MinusMeanWithWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return (x - x.mean(dim=0)) * self.weight


class OverTheBatch(nn.Module):
    """Attention along the wrong axis: the default of MultiheadAttention is position first."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class NextSample(nn.Module):
    """Every sample reads the next one, so changing the first sample changes no other."""

    def forward(self, x):
        return x + torch.cat([x[1:], torch.zeros_like(x[:1])])


class InItself(nn.Module):
    """The samples mix between layers, not in a layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, CLASSES)

    def forward(self, x):
        h = self.first(x)
        return self.last(h + h.mean(dim=0))


class InItselfFromTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.last = nn.Embedding(6, D), nn.Linear(D, CLASSES)

    def forward(self, x):
        h = self.tokens(x).mean(dim=1)
        return self.last(h + h.mean(dim=0))


class Counting(nn.Module):
    """Keeps a statistic of the data in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.detach().abs().mean().to(self.seen)
        return x


class OwnDice(nn.Module):
    """Draws random numbers from a generator other than torch's."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return x + torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


def batch_frequency_loss(output, target):
    """Weigh a sample by the rarity of its class in the batch."""
    counts = torch.bincount(target, minlength=CLASSES)
    return F.cross_entropy(output, target, reduction="none") / counts[target]


def contrastive_loss(output, target):
    return F.cross_entropy(output @ output.T, torch.arange(len(output)), reduction="none")


def tokens_then(make):
    return lambda: nn.Sequential(make(), nn.Flatten(), nn.LazyLinear(CLASSES))


mixes = (
    r"The samples of a batch influence each other in {}: a sample's numbers depend on the other "
    r"samples of its batch\. Private"
)
REFUSED = {  # how the model is made, its input, its loss, what the error says
    "BatchNorm1d": (
        lambda: Wrapped(nn.BatchNorm1d(D)),
        "row",
        F.cross_entropy,
        r"^inside \(BatchNorm1d\) computes its statistics over the batch.*Replace it by "
        r"nn\.GroupNorm, nn\.LayerNorm",
    ),
    "BatchNorm2d": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, D)), nn.Conv1d(1, 2, 1), nn.Sequential(nn.BatchNorm2d(2))
        ),
        "row",
        F.cross_entropy,
        r"^2\.0 \(BatchNorm2d\) computes its statistics over the batch",
    ),
    "BatchNorm, the model itself": (
        lambda: nn.BatchNorm1d(D),
        "row",
        F.cross_entropy,
        r"^the model \(BatchNorm1d\) computes "
        r"its statistics",
    ),
    "InstanceNorm with statistics": (
        lambda: Wrapped(nn.InstanceNorm1d(D, track_running_stats=True)),
        "row",
        F.cross_entropy,
        r"^inside \(InstanceNorm1d\) keeps running statistics.*Build it with "
        r"track_running_stats=False\.",
    ),
    "Embedding, max_norm": (
        tokens_then(lambda: nn.Embedding(6, D, max_norm=1.0)),
        "tokens",
        F.cross_entropy,
        r"^0 \(Embedding\) rewrites its weights on every look-up \(max_norm\)\. Build it without "
        r"max_norm\.",
    ),
    "Embedding, scale_grad_by_freq": (
        tokens_then(lambda: nn.Embedding(6, D, scale_grad_by_freq=True)),
        "tokens",
        F.cross_entropy,
        r"^0 \(Embedding\) scales gradients by how often a token occurs in the batch.*without "
        r"scale_grad_by_freq\.",
    ),
    "EmbeddingBag, max_norm": (
        tokens_then(lambda: nn.EmbeddingBag(6, D, max_norm=1.0)),
        "tokens",
        F.cross_entropy,
        r"^0 \(EmbeddingBag\) rewrites its weights on every look-up",
    ),
    "EmbeddingBag, scale_grad_by_freq": (
        tokens_then(lambda: nn.EmbeddingBag(6, D, scale_grad_by_freq=True, mode="sum")),
        "tokens",
        F.cross_entropy,
        r"^0 \(EmbeddingBag\) scales gradients by how often a token occurs in the batch",
    ),
    "mean over the batch": (
        lambda: Wrapped(MinusMean()),
        "row",
        F.cross_entropy,
        mixes.format(
            r"inside "
            r"\(MinusMean\)"
        ),
    ),
    "mean over the batch, with a parameter": (
        lambda: Wrapped(MinusMeanWithWeight()),
        "row",
        F.cross_entropy,
        mixes.format(r"inside \(MinusMeanWithWeight\)"),
    ),
    "attention over the batch": (
        lambda: Wrapped(OverTheBatch()),
        "sequence",
        F.cross_entropy,
        mixes.format(r"inside\.attention \(MultiheadAttention\)"),
    ),
    "mean over the batch, between layers": (
        InItself,
        "row",
        F.cross_entropy,
        mixes.format(r"the model itself \(InItself\)"),
    ),
    "mean over the batch, of tokens": (
        InItselfFromTokens,
        "tokens",
        F.cross_entropy,
        mixes.format(
            r"the model itself "
            r"\(InItselfFromTokens\)"
        ),
    ),
    "mean over the batch, of one sample's tokens": (
        InItselfFromTokens,
        "one",
        F.cross_entropy,
        mixes.format(
            r"the model itself "
            r"\(InItselfFromTokens\)"
        ),
    ),
    "the next sample": (
        lambda: Wrapped(NextSample()),
        "row",
        F.cross_entropy,
        mixes.format(r"inside \(NextSample\)"),
    ),
    "a loss that counts classes": (
        lambda: nn.Linear(D, CLASSES),
        "row",
        batch_frequency_loss,
        mixes.format("the loss"),
    ),
    "a loss that counts classes, which are sorted": (
        lambda: nn.Linear(D, CLASSES),
        "sorted",
        batch_frequency_loss,
        mixes.format("the loss"),
    ),
    "a loss that contrasts samples": (
        lambda: nn.Linear(D, CLASSES),
        "row",
        contrastive_loss,
        mixes.format("the loss"),
    ),
    "spectral norm": (
        lambda: Wrapped(parametrizations.spectral_norm(nn.Linear(D, D))),
        "row",
        F.cross_entropy,
        r"A pass through the model changes 'inside\.parametrizations\.weight\.0\._u'\. What a "
        r"batch leaves there would be published without noise",
    ),
    "a buffer that counts": (
        lambda: Wrapped(Counting()),
        "row",
        F.cross_entropy,
        r"A pass through the model changes 'inside\.seen'",
    ),
    "random from elsewhere": (
        lambda: Wrapped(OwnDice()),
        "row",
        F.cross_entropy,
        r"^A pass through the model or its loss draws random numbers from",
    ),
    "nothing to train": (
        lambda: nn.Linear(D, CLASSES).requires_grad_(False),
        "row",
        F.cross_entropy,
        r"The model has no trainable parameter; set requires_grad=True on what is to be trained\.",
    ),
    "no parameter at all": (
        nn.Flatten,
        "row",
        F.cross_entropy,
        r"The model has no trainable parameter",
    ),
}


@pytest.fixture
def case(numbers, tokens):
    """`case(name)`: model, loss, x, y and what the error says."""

    def build(name):
        make, kind, loss, message = REFUSED[name]
        x, y = {
            "row": lambda: (numbers(1, N, D), tokens(2, CLASSES, N)),
            "sorted": lambda: (numbers(1, 9, D), torch.arange(9) // 5),
            "sequence": lambda: (numbers(1, N, T, D), tokens(2, CLASSES, N)),
            "tokens": lambda: (tokens(1, 6, N, T), tokens(2, CLASSES, N)),
            "one": lambda: (tokens(1, 6, 1, T), tokens(2, CLASSES, 1)),
        }[kind]()
        model = make().double()
        if any(isinstance(m, nn.LazyLinear) for m in model.modules()):
            model(x)
        return model, loss, x, y, message

    return build


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name, case):
    model, loss, x, y, message = case(name)
    with pytest.raises(ModelError, match=message):
        plan(model, loss, x, y)


def test_refused_without_a_sample(numbers, tokens):
    with pytest.raises(
        ModelError, match=r"^No sample was given to analyse the model with; give at least one"
    ):
        plan(
            nn.Linear(D, CLASSES).double(), F.cross_entropy, numbers(1, 0, D), tokens(2, CLASSES, 0)
        )


def test_refused_under_autocast(numbers, tokens):
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(
            ModelError,
            match=r"torch\.autocast is on.*Switch it off, or convert the model itself",
        ),
    ):
        plan(
            nn.Linear(D, CLASSES), F.cross_entropy, numbers(1, N, D).float(), tokens(2, CLASSES, N)
        )


def test_refused_in_float16_but_not_in_bfloat16(numbers, tokens):
    x, y = numbers(1, N, D), tokens(2, CLASSES, N)
    with pytest.raises(ModelError, match=r"'weight' has the dtype float16.*model\.bfloat16\(\)"):
        plan(nn.Linear(D, CLASSES).half(), F.cross_entropy, x.half(), y)
    plan(nn.Linear(D, CLASSES).bfloat16(), F.cross_entropy, x.bfloat16(), y)


@pytest.mark.filterwarnings(
    "ignore:Using a target size:UserWarning"
)  # torch's own, of the very thing
def test_targets_that_broadcast_over_the_samples_are_refused(numbers):
    with pytest.raises(ModelError, match=mixes.format("the loss")):
        plan(nn.Linear(D, 1).double(), F.mse_loss, numbers(1, N, D), numbers(2, N))


ACCEPTED = {  # similar models that are not refused
    "InstanceNorm": lambda: Wrapped(
        nn.Sequential(nn.Unflatten(1, (1, D)), nn.InstanceNorm1d(1, affine=True))
    ),
    "a buffer that stays": lambda: Wrapped(parametrizations.spectral_norm(nn.Linear(D, D))).eval(),
    "dropout": lambda: Wrapped(nn.Dropout(0.5)),
    "another dropout": lambda: Wrapped(nn.AlphaDropout(0.3)),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_not_refused(name, numbers, tokens):
    plan(ACCEPTED[name]().double(), F.cross_entropy, numbers(1, N, D), tokens(2, CLASSES, N))


# --- the model is not changed -------------------------------------------------------------------

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
)


class Snapshot:
    """Return the full state of a model and of torch's generator."""

    def __init__(self, model):
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.values = {name: value.clone() for name, value in model.state_dict().items()}
        self.wants = {name: p.requires_grad for name, p in self.parameters.items()}
        self.training = {name: m.training for name, m in model.named_modules()}
        self.hooks = {
            (name, kind): dict(getattr(m, kind))
            for name, m in model.named_modules()
            for kind in HOOKS
        }
        self.attributes = {name: set(vars(m)) for name, m in model.named_modules()}
        self.generator = torch.get_rng_state()

    def assert_same(self, other):
        assert self.parameters.keys() == other.parameters.keys()
        assert all(self.parameters[name] is other.parameters[name] for name in self.parameters)
        assert all(p.grad is None for p in self.parameters.values())
        assert all(torch.equal(self.values[name], other.values[name]) for name in self.values)
        assert (self.wants, self.training) == (other.wants, other.training)
        assert (self.hooks, self.attributes) == (other.hooks, other.attributes)
        assert torch.equal(self.generator, other.generator)


class Twice(nn.Module):
    """A layer that occurs twice and is used outside itself: whole model through `torch.func`."""

    def __init__(self):
        super().__init__()
        layer = nn.Linear(D, D)
        self.one, self.other, self.last = (
            nn.Sequential(layer),
            nn.Sequential(layer),
            nn.Linear(D, CLASSES),
        )

    def forward(self, x):
        return self.last(F.linear(self.other(self.one(x)), self.one[0].weight))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.GRU(2, D, batch_first=True), nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.last(self.layer(x.reshape(-1, 2, 2))[0][:, -1])


KEPT = {
    "layers": lambda: Wrapped(nn.ReLU(inplace=True)),
    "partly at rest": lambda: Wrapped(nn.Dropout(0.5).eval()),
    "all at rest": lambda: Wrapped(nn.Dropout(0.5)).eval(),
    "recurrent": Recurrent,
    "as a whole": Twice,
    "own layer": lambda: Wrapped(nn.PReLU(D)),
    "parametrised": lambda: Wrapped(parametrizations.weight_norm(nn.Linear(D, D))),
}


@pytest.mark.parametrize("name", KEPT)
def test_nothing_is_left_behind_after_success(name, numbers, tokens):
    model, x, y = KEPT[name]().double(), numbers(1, N, D), tokens(2, CLASSES, N)
    model.last.bias.requires_grad_(False)
    before = Snapshot(model)
    per_sample_gradients(model, F.cross_entropy, x, y).weighted_sum(torch.ones(N))
    before.assert_same(Snapshot(model))


def test_nothing_is_left_behind_by_planning_what_is_random(numbers, tokens):
    model = Wrapped(nn.Dropout(0.5)).double()
    before = Snapshot(model)
    plan(model, F.cross_entropy, numbers(1, N, D), tokens(2, CLASSES, N))
    before.assert_same(Snapshot(model))


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "random from elsewhere"])
def test_nothing_is_left_behind_after_a_refusal(name, case):
    model, loss, x, y, _ = case(name)
    before = Snapshot(model)
    with pytest.raises(ModelError):
        per_sample_gradients(model, loss, x, y)
    before.assert_same(Snapshot(model))


def test_nothing_is_left_behind_after_an_error_in_the_model(numbers, tokens):
    model, x, y = Wrapped(nn.Linear(D, D)).double(), numbers(1, N, D), tokens(2, CLASSES, N)
    before = Snapshot(model)
    with (
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
        plan(model, F.cross_entropy, x, y).recording() as tape,
    ):
        tape(x[:, :1], y)
    before.assert_same(Snapshot(model))
    assert model(x).requires_grad
