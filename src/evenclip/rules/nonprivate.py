"""Plain SGD, the reference for the cost of privacy.

    γ_i = 1, no noise, shuffled batches without replacement, the last partial batch kept.

Every gradient is released in clear, so a run has no ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from evenclip.rules.rule import NO_EPSILON, Rule

__all__ = ["NonPrivate"]


@dataclass(frozen=True)
class NonPrivate(Rule):
    """γ_i = 1 and no noise: ordinary SGD.

    >>> NonPrivate().weight(torch.tensor(7.0), torch.tensor(0), torch.zeros(0))
    tensor(1.)
    """

    name: ClassVar[str] = "non-private"
    title: ClassVar[str] = "Non-private"
    summary: ClassVar[str] = "Ordinary training, the reference. It promises no privacy."
    soundness: ClassVar[str] = NO_EPSILON
    why: ClassVar[str] = "no noise is added"
    elementwise: ClassVar[bool] = True
    poisson: ClassVar[bool] = False
    reference: ClassVar[str] = "Robbins, Monro 1951, A Stochastic Approximation Method"

    sigma = 0.0

    def sensitivity(self, now: Tensor) -> float:  # noqa: D102
        del now
        return math.inf

    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:  # noqa: D102
        del group, now
        return torch.ones_like(norm)
