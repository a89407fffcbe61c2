"""Toy: two synthetic groups, one easier to classify, with a best accuracy that is known exactly.

| | |
|---|---|
| samples | n = 2,000, each for training with probability 0.8 |
| features | 10, normal |
| classes | 2, "no" and "yes", equally likely in both groups |
| groups | 2: majority (0), minority (1; each sample with probability 0.2) |
| source | generated from the seed; no real people |
| licence | that of this package |

A sample of group k and class y, with s = 2y − 1 and the unit vector u = (1, ..., 1)/√d, has the
features

    x = s·δ_k·u + N(0, I).

The two classes are normal clouds at distance 2δ_k. They are equally likely, so for every δ_k the
best classifier of either group predicts "yes" where u·x > 0: there the density of "yes" is larger.
As s·(u·x) ~ N(δ_k, 1), it is right with probability P(N(δ_k, 1) > 0) = Φ(δ_k). One linear model is
optimal for both groups at once, so the gap between a trained model and `optimum` is due to
training.

**Caveat.** The groups differ in size and difficulty only. The dataset is not in the paper.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenclip import check
from evenclip.arguments import check_kinds
from evenclip.data.dataset import Dataset, Splits
from evenclip.data.sample import Coins, Rows, coins, stream
from evenclip.data.source import Source

__all__ = ["SOURCE", "optimum", "toy"]

SEPARATION = (1.5, 0.75)
_MOST = 10**8  # numbers
TRAINING = 0.8  # probability that a sample is for training


def toy(
    seed: int = 0,
    *,
    n: int = 2000,
    features: int = 10,
    minority: float = 0.2,
    separation: tuple[float, float] = SEPARATION,
) -> Splits:
    """Generate training and test samples, about 80/20.

    Args:
        seed: determines all random numbers.
        n: number of training and test samples together; at least 10.
        features: number of features d.
        minority: probability that a sample belongs to the minority.
        separation: δ of the majority and of the minority, half the distance of the two classes.

    Raises:
        ValueError: a value is out of range.

    >>> train, test, _ = toy()
    >>> len(train) + len(test), train.records, list(train.x.shape[1:]), train.group_names
    (2000, 1600, [10], ('majority', 'minority'))
    """
    check_kinds(toy, locals())
    check.whole(seed=seed)
    check.at_most(_MOST, n=n, features=features)
    n, features = int(n), int(features)
    check.at_most(_MOST, **{"n · features": n * features})
    check.fraction(minority=minority)
    for delta in separation:
        check.positive(separation=delta)
    if n < 10:
        raise ValueError(f"n is {n}; it must be at least 10, for there to be a test set.")
    numbers = stream(seed, "toy")
    group = (numbers.random(n) < minority).astype(np.int64)  # [sample]
    y = numbers.integers(2, size=n)  # [sample]
    # The shift along every axis, [sample].
    shift = (2 * y - 1) * np.array(separation)[group] / math.sqrt(features)
    noise = numbers.standard_normal((n, features))
    x = (shift[:, None] + noise).astype(np.float32)  # [sample, features]
    drawn = coins(seed, x, y, group)
    train, test = drawn.parts(TRAINING)
    return Splits(
        _dataset(x, y, group, drawn, train, round(TRAINING * n)),
        _dataset(x, y, group, drawn, test, None),
    )


def optimum(separation: tuple[float, float] = SEPARATION) -> tuple[float, float]:
    """Return the best possible accuracy on the majority and on the minority, Φ(δ) each.

    >>> [round(accuracy, 4) for accuracy in optimum()]  # Φ(1.5) and Φ(0.75)
    [0.9332, 0.7734]
    """
    majority, minority = (0.5 * (1 + math.erf(delta / math.sqrt(2))) for delta in separation)
    return majority, minority


def _dataset(
    x: NDArray[np.float32],
    y: NDArray[np.int64],
    group: NDArray[np.int64],
    drawn: Coins,
    rows: Rows,
    records: int | None,
) -> Dataset:
    """Return some samples as a `Dataset`."""
    return Dataset(
        torch.from_numpy(x[rows]),
        torch.from_numpy(y[rows]),
        torch.from_numpy(group[rows]),
        group_names=("majority", "minority"),
        class_names=("no", "yes"),
        name="toy",
        records=records,
        marks=torch.from_numpy(drawn.marks[rows]),
    )


def _load(seed: int = 0, directory: str | Path | None = None, **options: Any) -> Splits:
    """Generate the data; the directory is ignored."""
    del directory
    return toy(seed, **options)


SOURCE = Source(
    name="toy",
    load=_load,
    title="Toy: synthetic, with a best accuracy that is known exactly",
    rows=2_000,
    groups=("majority", "minority"),
    licence="none needed",
    origin="generated from the seed",
)
