"""Per-sample losses: the loss of a sample is the loss of a batch that contains only this sample."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip.gradients import per_sample_gradients
from evenclip.gradients.losses import per_sample

N, D, CLASSES, T = 4, 3, 5, 6


class Tagger(nn.Module):
    """A class for every position: [sample, class, position]."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, CLASSES * T)

    def forward(self, x):
        return self.layer(x).reshape(-1, CLASSES, T)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(D, CLASSES), nn.Linear(D, 2)

    def forward(self, x):
        return {"one": self.one(x), "other": self.other(x)}


def squares_in_all(output, target):
    """One number for the batch, by the user."""
    return ((output - target) ** 2).sum() / 7


def squares_of_each(output, target):
    """One number for every sample, by the user."""
    return ((output - target) ** 2).mean(dim=1)


def squares_of_each_position(output, target):
    return ((output - target) ** 2) * torch.arange(output.shape[1])


def both_heads(output, target):
    return F.mse_loss(output["one"], target) + output["other"].abs().mean()


class Module(nn.Module):
    """A user's loss module without `reduction`."""

    def forward(self, output, target):
        return F.smooth_l1_loss(output, target)


CASES = {  # the loss -> the model's head, its targets
    "cross_entropy": (F.cross_entropy, "head", "class"),
    "cross_entropy, summed": (partial(F.cross_entropy, reduction="sum"), "head", "class"),
    "cross_entropy, apart": (partial(F.cross_entropy, reduction="none"), "head", "class"),
    "cross_entropy, smoothed": (partial(F.cross_entropy, label_smoothing=0.1), "head", "class"),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), "head", "class"),
    "CrossEntropyLoss, summed": (nn.CrossEntropyLoss(reduction="sum"), "head", "class"),
    "CrossEntropyLoss, apart": (nn.CrossEntropyLoss(reduction="none"), "head", "class"),
    "cross_entropy over positions": (F.cross_entropy, "tagger", "classes"),
    "cross_entropy over positions, summed": (
        nn.CrossEntropyLoss(reduction="sum"),
        "tagger",
        "classes",
    ),
    "mse_loss": (F.mse_loss, "head", "numbers"),
    "mse_loss, summed": (partial(F.mse_loss, reduction="sum"), "head", "numbers"),
    "MSELoss": (nn.MSELoss(), "head", "numbers"),
    "L1Loss, apart": (nn.L1Loss(reduction="none"), "head", "numbers"),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), "head", "yes or no"),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, "head", "yes or no"),
    "KLDivLoss over the batch": (
        nn.KLDivLoss(reduction="batchmean", log_target=True),
        "head",
        "numbers",
    ),
    "one number by the user": (squares_in_all, "head", "numbers"),
    "one number each by the user": (squares_of_each, "head", "numbers"),
    "several numbers each by the user": (squares_of_each_position, "head", "numbers"),
    "a module by the user": (Module(), "head", "numbers"),
    "two heads": (both_heads, "two heads", "numbers"),
}
HEADS = {"head": lambda: nn.Linear(D, CLASSES), "tagger": Tagger, "two heads": TwoHeads}


@pytest.fixture
def case(numbers, tokens, made):
    """`case(name)`: model, loss, x, y."""

    def build(name):
        loss, head, kind = CASES[name]
        y = {
            "class": tokens(1, CLASSES, N),
            "classes": tokens(1, CLASSES, N, T),
            "numbers": numbers(1, N, CLASSES),
            "yes or no": tokens(1, 2, N, CLASSES).double(),
        }[kind]
        return made(0, HEADS[head]), loss, numbers(2, N, D), y

    return build


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_a_sample_is_that_of_a_batch_of_one(name, case, alone, same):
    model, loss, x, y = case(name)
    gradients = per_sample_gradients(model, loss, x, y)
    expected = torch.stack([loss(model(x[i : i + 1]), y[i : i + 1]).sum() for i in range(N)])
    torch.testing.assert_close(gradients.losses, expected.detach())
    same(gradients, alone(model, loss, x, y))


def test_a_loss_module_is_left_as_it_was():
    loss = nn.CrossEntropyLoss()
    per_sample(loss)(torch.zeros(2, 3), torch.tensor([0, 1]))
    assert loss.reduction == "mean"


def test_class_weights_weigh_and_ignored_positions_count_as_nothing(numbers, tokens):
    weight, output, y = (
        torch.rand(CLASSES).double(),
        numbers(0, N, CLASSES, T),
        tokens(1, CLASSES, N, T),
    )
    y[0, 1:] = -100
    log = output.log_softmax(dim=1)
    each = [
        -sum(weight[k] * log[i, k, t] for t, k in enumerate(y[i]) if k >= 0) / T for i in range(N)
    ]
    losses = per_sample(nn.CrossEntropyLoss(weight=weight))(output, y)
    torch.testing.assert_close(losses, torch.stack(each))


wrong = (
    r"^The loss returned shape \[{}\] for 3 samples; it must return one number, or one value "
    r"per sample along the"
)
WRONG = {  # a loss -> its error
    "a column a class": (
        lambda output, target: ((output - target) ** 2).mean(dim=0),
        wrong.format("5"),
    ),
    "samples second": (
        lambda output, target: ((output - target) ** 2).T,
        wrong.format("5, 3"),
    ),
    "positions in the batch axis": (
        lambda output, target: ((output - target) ** 2).flatten(),
        wrong.format("15"),
    ),
    "a torch loss with positions in the batch axis": (
        lambda output, target, reduction="mean": F.mse_loss(
            output.flatten(), target.flatten(), reduction=reduction
        ),
        wrong.format("15"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_of_the_wrong_shape(name, numbers, made):
    loss, message = WRONG[name]
    model = made(0, HEADS["head"])
    with pytest.raises(ValueError, match=message):
        per_sample_gradients(model, loss, numbers(1, N, D), numbers(2, N, CLASSES))
