"""Second derivatives along lines, against the Hessian that autograd forms."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian
from torch.nn.functional import cross_entropy

from evenclip.audit import taylor
from evenclip.audit.curvature import Curvature
from evenclip.models import cnn, mlp, sigmoid_then_softmax


def frozen():
    model = mlp(4, 3, (5, 4), seed=2).double()
    model[0].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


def frozen_convolution():
    model = IMAGES["the paper's"]()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


MODELS = {
    "tanh": lambda: mlp(4, 3, (5, 6), seed=1).double(),
    "linear": lambda: mlp(4, 3, (), seed=1).double(),
    "sigmoid": lambda: sigmoid_then_softmax(4, 3, seed=1).double(),
    "relu, flattened, nested, without a bias": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(6, 5, bias=False),
        nn.Sigmoid(),
        nn.Identity(),
        nn.Linear(5, 3),
    ).double(),
    "frozen parts": frozen,
}
IMAGES = {
    "the paper's": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ).double(),
    "strided, padded, dilated, without a bias": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 2, 2, padding="same", dilation=2, bias=False),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(18, 3),
    ).double(),
    "a frozen weight and a frozen bias": frozen_convolution,
}


def batch(n=9, seed=0, shape=(4,)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (n,), generator=generator)


@pytest.mark.parametrize("name", [*MODELS, *IMAGES])
@pytest.mark.parametrize(
    "loss", [cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.2)], ids=["plain", "smoothed"]
)
def test_forms_are_those_of_the_hessian(name, loss):
    torch.manual_seed(0)
    model = {**MODELS, **IMAGES}[name]()
    model.eval()
    assert taylor.takes(model)
    x, y = batch(shape=(2, 6, 6) if name in IMAGES else (4,))
    own = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def total(vector):
        pieces = torch.split(vector, [p.numel() for p in own.values()])
        parameters = {n: v.view(p.shape) for (n, p), v in zip(own.items(), pieces, strict=True)}
        return loss(functional_call(model, parameters, (x,)), y)

    H = hessian(total)(torch.cat([p.flatten() for p in own.values()]))
    vectors = torch.randn(
        7, len(H), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    curvature = Curvature(model, loss, x, y, parts=2)
    assert curvature._taylor
    means = curvature.sizes @ curvature.forms(vectors) / curvature.n
    torch.testing.assert_close(
        means, torch.einsum("vi,ij,vj->v", vectors, H, vectors), rtol=1e-10, atol=1e-11
    )


def test_they_are_those_of_products():
    model, (x, y) = mlp(4, 3, (5, 6), seed=1).double(), batch(40)
    curvature = Curvature(model, cross_entropy, x, y)
    vectors = torch.randn(5, curvature.layout.size, dtype=torch.float64)
    by_taylor = curvature.forms(vectors)
    curvature._taylor = False
    torch.testing.assert_close(by_taylor, curvature.forms(vectors), rtol=1e-10, atol=1e-12)
    assert (
        curvature.forms(vectors[:0]).shape
        == Curvature(model, cross_entropy, x, y).forms(vectors[:0]).shape
    )


def test_a_loss_that_cannot_be_carried_forwards_has_products(monkeypatch):
    model, (x, y) = mlp(4, 3, (5, 6), seed=1).double(), batch(40)
    vectors = torch.randn(5, Curvature(model, cross_entropy, x, y).layout.size, dtype=torch.float64)
    expected = Curvature(model, cross_entropy, x, y).forms(vectors)

    def refuse(*_):
        raise NotImplementedError("Trying to use forward AD")

    monkeypatch.setattr(taylor, "forms", refuse)
    curvature = Curvature(model, cross_entropy, x, y)
    torch.testing.assert_close(curvature.forms(vectors), expected, rtol=1e-10, atol=1e-12)
    assert not curvature._taylor


class Own(nn.Linear):
    """A custom layer may compute something else."""


def test_what_they_are_not_for():
    shared, tied, hooked = nn.Linear(4, 4), (nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 3)
    tied[1].weight = tied[0].weight
    hooked.register_forward_hook(lambda layer, given, output: 2 * output)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.utils.weight_norm(nn.Linear(4, 3))
    new = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    chains = (
        [Own(4, 3)],
        [shared, nn.Tanh(), shared],
        [tied[0], nn.Tanh(), tied[1]],
        [hooked],
        [old],
        [new],
    )
    for model in (
        nn.Sequential(nn.MaxPool2d(2)),
        nn.Linear(4, 3),
        *(nn.Sequential(*chain) for chain in chains),
    ):
        assert not taylor.takes(model)


def test_parts_are_the_samples_in_their_order():
    """The form of a part is that of its samples alone, for any number of rows per pass."""
    model, (x, y) = cnn(1, 6, 3, seed=1).double(), batch(2500, shape=(1, 6, 6))
    curvature = Curvature(model, cross_entropy, x, y, parts=16)
    vectors = torch.randn(3, curvature.layout.size, dtype=torch.float64)
    forms, size = curvature.forms(vectors), int(curvature.sizes[0])
    assert forms.shape == (16, 3)
    for part in (0, 6, 15):
        here = slice(part * size, (part + 1) * size)
        alone = Curvature(model, cross_entropy, x[here], y[here])
        torch.testing.assert_close(forms[part], alone.forms(vectors)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(2, 2, 3, groups=2), nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")]
)
def test_other_convolutions_have_products(layer):
    size = layer(torch.zeros(1, 2, 6, 6)).numel()
    model, (x, y) = (
        nn.Sequential(layer, nn.Flatten(), nn.Linear(size, 3)).double(),
        batch(shape=(2, 6, 6)),
    )
    curvature = Curvature(model, cross_entropy, x, y)
    vectors = torch.randn(4, curvature.layout.size, dtype=torch.float64)
    forms = curvature.sizes @ curvature.forms(vectors) / curvature.n
    assert not curvature._taylor
    torch.testing.assert_close(forms, torch.linalg.vecdot(curvature.products(vectors), vectors))


def test_several_positions_a_sample_have_products():
    """Four samples and four lines have equal shapes, which must not be confused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2)).double()
    x, y = torch.randn(4, 5, 3, dtype=torch.float64), torch.randn(4, 5, 2, dtype=torch.float64)
    curvature = Curvature(model, nn.MSELoss(), x, y)
    vectors = torch.randn(4, curvature.layout.size, dtype=torch.float64)
    forms = curvature.sizes @ curvature.forms(vectors) / curvature.n
    assert not curvature._taylor
    torch.testing.assert_close(forms, torch.linalg.vecdot(curvature.products(vectors), vectors))


def test_the_model_is_left_as_it_was():
    model, (x, y) = mlp(4, 3, (5,), seed=1).double(), batch()
    before = {n: p.clone() for n, p in model.named_parameters()}
    curvature = Curvature(model, cross_entropy, x, y)
    curvature.forms(torch.randn(3, curvature.layout.size, dtype=torch.float64))
    assert all(torch.equal(before[n], p) and p.grad is None for n, p in model.named_parameters())
    assert torch.equal(x, batch()[0])
