"""Toy: two groups of synthetic people, one easier to classify than the other, and the best accuracy
known exactly.

| | |
|---|---|
| samples | n = 2,000, 80 % of them for training |
| features | 10, normal |
| classes | 2, "no" and "yes", equally likely in both groups |
| groups | 2: majority (0), minority (1; each sample with probability 0.2) |
| source | made here, from the seed; nobody's data |
| licence | that of this package |

Of a sample of group k and class y, with s = 2y − 1 and the unit vector u = (1, ..., 1)/√d, the
features are

    x = s·δ_k·u + N(0, I),

two normal clouds at distance 2δ_k. The classes are equally likely, so the best classifier of either
group says "yes" where u·x > 0, whatever δ_k is: there the density of its cloud is the larger one.
As s·(u·x) ~ N(δ_k, 1), it is right with probability P(N(δ_k, 1) > 0) = Φ(δ_k). One linear model is
best for both groups at once, so what a trained model loses against `optimum`, it loses to training.

**Caveat.** The groups differ in size and difficulty only. Not in the paper.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from evenclip import check
from evenclip.data.dataset import Dataset, Splits
from evenclip.data.sample import cut, stream

__all__ = ["optimum", "toy"]

SEPARATION = (1.5, 0.75)


def toy(
    seed: int = 0,
    *,
    n: int = 2000,
    features: int = 10,
    minority: float = 0.2,
    separation: tuple[float, float] = SEPARATION,
) -> Splits:
    """Training and test samples, split 80/20.

    Args:
        seed: decides everything that is random.
        n: number of samples, training and test together; at least 10.
        features: number of features d.
        minority: probability that a sample is of the minority.
        separation: δ of the majority and of the minority, half the distance of the two classes.

    Raises:
        ValueError: a value out of range.

    >>> train, test, _ = toy()
    >>> list(train.x.shape), len(test), train.group_names
    ([1600, 10], 400, ('majority', 'minority'))
    """
    check.natural(n=n, features=features)
    check.fraction(minority=minority)
    for delta in separation:
        check.positive(separation=delta)
    if n < 10:
        raise ValueError(f"n is {n}; it must be at least 10, for there to be a test set.")
    numbers = stream(seed, "toy")
    group = (numbers.random(n) < minority).astype(np.int64)  # [sample]
    y = numbers.integers(2, size=n)  # [sample]
    shift = (
        (2 * y - 1) * np.array(separation)[group] / math.sqrt(features)
    )  # [sample], along every axis
    x = (shift[:, None] + numbers.standard_normal((n, features))).astype(
        np.float32
    )  # [sample, features]
    train, test = cut(np.arange(n), numbers)
    return Splits(
        _dataset(x[train], y[train], group[train]), _dataset(x[test], y[test], group[test])
    )


def optimum(separation: tuple[float, float] = SEPARATION) -> tuple[float, float]:
    """The best accuracy that any classifier can have on the majority and on the minority, Φ(δ)
    each, in [0, 1].

    >>> [round(accuracy, 4) for accuracy in optimum()]  # Φ(1.5) and Φ(0.75)
    [0.9332, 0.7734]
    """
    majority, minority = (0.5 * (1 + math.erf(delta / math.sqrt(2))) for delta in separation)
    return majority, minority


def _dataset(x: NDArray[np.float32], y: NDArray[np.int64], group: NDArray[np.int64]) -> Dataset:
    """As tensors."""
    return Dataset(
        torch.from_numpy(x),
        torch.from_numpy(y),
        torch.from_numpy(group),
        group_names=("majority", "minority"),
        class_names=("no", "yes"),
        name="toy",
    )
