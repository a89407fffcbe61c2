"""The paper's networks, as modules that return one score per class for softmax cross-entropy.

Weights are initialised by PyTorch's layers, on the CPU, from a random stream that depends on the
seed alone. The global generators are unchanged, and no other use of the same seed draws the same
numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import SupportsIndex

import numpy as np
import torch
from torch import nn

from evenclip import check
from evenclip.arguments import check_kinds, shown

__all__ = ["TABULAR", "cnn", "mlp", "seeded", "sigmoid_then_softmax", "trainable"]

_MOST_PARAMETERS = 10**9
STREAM = int.from_bytes(b"init", "big")


def mlp(
    inputs: int = 98, classes: int = 2, hidden: Sequence[int] = (256, 256), *, seed: int = 0
) -> nn.Sequential:
    """Return linear layers with tanh between them, [sample, inputs] -> [sample, classes].

    The defaults are those of Adult, with 98·256+256 + 256·256+256 + 256·2+2 parameters (App. B:
    N = 91650).

    >>> sum(p.numel() for p in mlp().parameters())
    91650
    """
    check_kinds(mlp, locals())
    for width in hidden:
        check.natural(hidden=width)
    check.natural(inputs=inputs, classes=classes)
    widths = [int(inputs), *(int(width) for width in hidden), int(classes)]
    size = sum((a + 1) * b for a, b in pairwise(widths))
    _check_size(size, inputs=inputs, hidden=list(hidden), classes=classes)
    layers: list[nn.Module] = []
    with seeded(seed):
        for width_in, width_out in pairwise(widths[:-1]):
            layers += [nn.Linear(width_in, width_out), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


def sigmoid_then_softmax(inputs: int = 59, classes: int = 2, *, seed: int = 0) -> nn.Sequential:
    """Return logistic regression with a sigmoid on its scores.

    [sample, inputs] -> [sample, classes]. The defaults are those of Dutch. The cross-entropy
    applies a softmax to the sigmoid, so the scores are squashed twice: they differ by less than 1,
    the loss stays above log(1 + (classes − 1)·e⁻¹), 0.313 for two classes, and it is not convex.
    The model exists because only it reproduces the paper's losses on Dutch. For your own data use
    `mlp(hidden=())`, which is plain softmax regression.

    >>> sum(p.numel() for p in sigmoid_then_softmax().parameters())  # 59·2+2; App. B: N = 120
    120
    """
    check_kinds(sigmoid_then_softmax, locals())
    check.natural(inputs=inputs, classes=classes)
    _check_size((int(inputs) + 1) * int(classes), inputs=inputs, classes=classes)
    with seeded(seed):
        return nn.Sequential(nn.Linear(int(inputs), int(classes)), nn.Sigmoid())


def cnn(channels: int = 1, side: int = 28, classes: int = 10, *, seed: int = 0) -> nn.Sequential:
    """Return two 3×3 convolutions (32 and 16 channels), each with tanh, and a linear layer.

    [sample, channels, side, side] -> [sample, classes], without padding or pooling. The defaults
    are those of MNIST; CelebA uses `cnn(3, 64, 2)` (App. B: N = 120722). Difference from the paper:
    App. B prints N = 80522 for MNIST, which belongs to a net of four convolutions (32-32-16-16);
    the two convolutions of its text have 97114 parameters.

    >>> sum(p.numel() for p in cnn().parameters())
    97114
    >>> sum(p.numel() for p in cnn(channels=3, side=64, classes=2).parameters())
    120722
    """
    check_kinds(cnn, locals())
    check.natural(channels=channels, side=side, classes=classes)
    channels, side, classes = int(channels), int(side), int(classes)
    size = 288 * channels + 16 * side**2 * classes
    _check_size(size, channels=channels, side=side, classes=classes)
    if side < 5:
        raise ValueError(
            f"side is {side}; two 3×3 convolutions without padding need at least 5 pixels."
        )
    with seeded(seed):
        return nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.Tanh(),
            nn.Conv2d(32, 16, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16 * (side - 4) ** 2, classes),
        )


def trainable(model: nn.Module) -> int:
    """Return the number of trainable parameters of a model.

    >>> trainable(mlp())
    91650
    """
    check_kinds(trainable, locals())
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _check_size(parameters: int, **given: object) -> None:
    """Raise before a network is allocated that is too large to train."""
    if parameters > _MOST_PARAMETERS:
        text = ", ".join(f"{name} is {value}" for name, value in given.items())
        raise ValueError(
            f"{text}, so the network would have {parameters:,} parameters; at most "
            f"{_MOST_PARAMETERS:,} are supported: give smaller numbers."
        )


def seeded(seed: int) -> AbstractContextManager[None]:
    """Initialise layers from this seed inside the block, and restore the global generators."""
    check_kinds(seeded, locals())
    if isinstance(seed, bool) or not isinstance(seed, SupportsIndex) or operator.index(seed) < 0:
        raise ValueError(f"seed is {shown(seed)}; it must be a whole number of at least 0.")
    state = np.random.SeedSequence([operator.index(seed), STREAM]).generate_state(1, np.uint64)
    return _seeded(int(state[0]))


@contextmanager
def _seeded(state: int) -> Iterator[None]:
    # torch.manual_seed would also seed the GPUs, whose generators are not restored here.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(state)
        yield


TABULAR: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "sigmoid-then-softmax": sigmoid_then_softmax,
}
"""Networks for tables, by name; each takes `inputs`, `classes` and its own options."""
