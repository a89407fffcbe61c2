"""The measured models, and random data of their shapes; times do not depend on the values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenclip.models import cnn, mlp, seeded, sigmoid_then_softmax

__all__ = ["CASES", "PAPER", "Case", "data", "floats", "grouped"]


@dataclass(frozen=True)
class Case:
    """A model and the shape of its data.

    Attributes:
        make: function seed -> model.
        n: number of samples; four batches if that is more.
        shape: shape of one sample.
        classes: number of classes.
    """

    make: Callable[[int], nn.Module]
    n: int
    shape: tuple[int, ...]
    classes: int


class Block(nn.Module):
    """A pre-norm transformer block without dropout: attention, then two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [sample, position, width]"""
        n, T, width = x.shape
        q, k, v = (
            self.qkv(self.before(x))
            .view(n, T, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, T, width)
        x = x + self.out(mixed)
        output: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return output


class VisionTransformer(nn.Module):
    """A transformer for 3×32×32 images, with the width and heads of ViT-tiny.

    It has patches of 4×4, three blocks, and a mean over the positions. Positions are encoded by
    fixed sine waves, so that every parameter belongs to a layer.
    """

    def __init__(self, width: int = 192, heads: int = 3, depth: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        self.register_buffer("positions", _waves(64, width))

    def forward(self, x: Tensor) -> Tensor:
        """x: [sample, 3, 32, 32] -> [sample, class]"""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.get_buffer("positions")
        scores: Tensor = self.head(self.norm(self.blocks(tokens)).mean(dim=1))
        return scores


class Recurrent(nn.Module):
    """An LSTM over [sample, 32, 16], and a linear layer on its last output."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 64, batch_first=True), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: [sample, time, 16] -> [sample, class]"""
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


def _waves(positions: int, width: int) -> Tensor:
    """Return the position encoding of Vaswani et al. 2017.  # [position, width]"""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
    angles = torch.arange(positions).unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


def _transformer(seed: int) -> nn.Module:
    with seeded(seed):
        return VisionTransformer()


def _recurrent(seed: int) -> nn.Module:
    with seeded(seed):
        return Recurrent()


PAPER = ("dutch", "adult", "mnist", "celeba")
CASES = {
    "dutch": Case(lambda seed: sigmoid_then_softmax(seed=seed), 48_336, (59,), 2),
    "adult": Case(lambda seed: mlp(seed=seed), 23_484, (98,), 2),
    "mnist": Case(lambda seed: cnn(seed=seed), 8_192, (1, 28, 28), 10),
    "celeba": Case(
        lambda seed: cnn(channels=3, side=64, classes=2, seed=seed), 2_048, (3, 64, 64), 2
    ),
    "vit": Case(_transformer, 8_192, (3, 32, 32), 10),
    "lstm": Case(_recurrent, 16_384, (32, 16), 10),
}


def data(case: Case, batch: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return samples and targets.

    On a GPU images are bytes, as in `evenclip`; every training loop converts them in its step.
    """
    n, generator = max(case.n, 4 * batch), torch.Generator().manual_seed(seed)
    if len(case.shape) == 3 and device != "cpu":
        x = torch.randint(0, 256, (n, *case.shape), generator=generator, dtype=torch.uint8)
    else:
        x = torch.rand(n, *case.shape, generator=generator)
    return x.to(device), torch.randint(0, case.classes, (n,), generator=generator).to(device)


def grouped(given: tuple[Tensor, Tensor], groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Add group labels to the data; no group is empty."""
    x, y = given
    return x, y, torch.arange(len(y), device=y.device) % groups


def floats(x: Tensor) -> Tensor:
    """Convert bytes to float32 in [0, 1]; return other types unchanged."""
    return x.to(torch.float32).div_(255) if x.dtype is torch.uint8 else x
