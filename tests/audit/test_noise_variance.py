"""The noise in R_noise is the noise that is released: tests by drawing and publishing it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from evenclip import DPSGD, fit
from evenclip.audit import RiskTerms
from evenclip.mechanism.grid import Grid, inflation, published

DRAWS = 2**20


def spread(grid: Grid, seed: int = 0) -> float:
    """Return the mean square error of published numbers, around random sums, by drawing them.

    The normal values are quantiles at equal distances in random order, so that the variance is
    known to about 1e-5 and not to 1e-3 only.
    """
    random = torch.Generator().manual_seed(seed)
    ranks = torch.arange(DRAWS, dtype=torch.float64)[torch.randperm(DRAWS, generator=random)]
    z = torch.special.ndtri((ranks + 0.5) / DRAWS)
    total = 50 * float(grid.std) * torch.rand(DRAWS, generator=random, dtype=torch.float64)
    return float((published(total.clone(), z, grid) - total).square().mean())


@pytest.mark.parametrize("S", [1.0, 0.3, 1.99, 1e-4])
@pytest.mark.parametrize("multiplier", [0.8, 1.0, 20.0])
def test_the_variance_is_that_of_published_numbers(S, multiplier):
    grid = Grid.of(S, multiplier, 91_650, 1e-4)
    assert spread(grid) == pytest.approx(grid.variance, rel=1e-4)


def test_the_rounding_to_the_coarse_grid_is_seen():
    """The test above would notice if H²/12 were left out."""
    grid = Grid.of(1.0, 1.0, 91_650, 0.0)
    assert grid.variance / grid.std**2 - 1 > 1e-3
    assert spread(grid) != pytest.approx(grid.std**2, rel=5e-4)


@pytest.mark.parametrize("size", [1, 120, 91_650, 10**8])
def test_the_inflation_is_never_exceeded(size):
    for S in torch.logspace(-6, 6, 97, dtype=torch.float64).tolist():
        for multiplier, rounding in ((0.5, 0.0), (1.0, 1e-9), (100.0, 0.004)):
            grid = Grid.of(S, multiplier, size, rounding)
            assert rounding < grid.std / (S * multiplier) - 1 <= inflation(rounding) * (1 + 1e-9)


def test_the_noise_term_has_the_variance_of_the_released_gradient():
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 4, generator=random), torch.arange(60) % 2
    rule = DPSGD(C0=0.3, sigma=1.0)
    torch.manual_seed(0)
    observer = RiskTerms((x, y, y), 0.2, probes=20, every=1, loss=cross_entropy)
    (record,) = fit(
        nn.Linear(4, 2), (x, y, y), rule=rule, batch_size=20, steps=1, lr=0.2, seed=0,
        observers=[observer],
    ).records  # fmt: skip
    grid = Grid.of(rule.C0, rule.sigma, 10, 0.0)
    for group in record["risk"]:
        expected = 0.2**2 / 2 * group["trace"][0] * spread(grid) / 20**2
        assert group["terms"]["noise"][0] == pytest.approx(expected, rel=2e-4)
        assert group["terms"]["noise"][0] != pytest.approx(
            0.2**2 / 2 * group["trace"][0] * (rule.sigma * rule.C0 / 20) ** 2, rel=2e-4
        )
