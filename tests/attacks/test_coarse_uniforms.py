"""Uniforms on a coarse grid, published too finely.

The attacker knows two sums, one record apart, and sees the sum plus noise. Box–Muller pairs with u
on a grid j·2⁻ᵇ lie on circles. For either sum the attacker computes u = exp(−r²/2) of every pair in
the tail, where circles are farther apart than the published cells are wide, and tests whether u
lies on the grid.

With b = 53 this takes a long run of Adult to be seen (a total variation of 2e-4), so the planted
sampler has b = 24. The attack must win against it on the fine grid, and must fail against coarse
cells or against words that are extended; a release has both.
"""

from __future__ import annotations

import math

import pytest
import torch

from evenclip.mechanism import Release, release
from evenclip.mechanism.grid import Grid, published
from evenclip.mechanism.noise import Noise, NormalStream, box_muller

SIZE, BITS, SIGMA, ROUNDS = 4000, 24, 8.0, 10
DECIDED = 0.5


def sums():
    """Return two sums of distance 1, as one record may make it."""
    random = torch.Generator().manual_seed(0)
    total = 10 * torch.randn(SIZE, generator=random, dtype=torch.float64)
    record = torch.randn(SIZE, generator=random, dtype=torch.float64)
    return total, total + record / torch.linalg.vector_norm(record)


def on_circles(out, total, cell):
    """Return how well the tail's pairs lie on the circles: 1 for all, about 0 for none.

    `cell` is the width of a published cell.
    """
    std = float(Grid.of(1.0, SIGMA, SIZE, 0.0).std)
    first, second = ((out - total) / std).view(2, -1)
    r = torch.hypot(first, second)
    u = torch.exp(-r.square() / 2)
    sharp = u * r * cell / std < 2.0**-BITS / 8  # cells are narrower than circles are apart
    if not sharp.any():
        return 0.0
    return float(torch.cos(2 * math.pi * (u[sharp] * 2.0**BITS - 0.5)).mean())


def guesses(cell):
    """Return for every release the right sum, and the attacker's guess or None."""
    totals, decided = sums(), []
    for seed in range(ROUNDS):
        for right, total in enumerate(totals):
            noise = Noise(bytes([seed, right] * 16), {"gradient": SIZE}, torch.device("cpu")).of(3)
            out = Release(noise)("gradient", total, sensitivity=1.0, multiplier=SIGMA, rounding=0.0)
            scores = [on_circles(out, guess, cell) for guess in totals]
            best = scores.index(max(scores))
            decided.append((right, best if scores[best] > DECIDED else None))
    return decided


def coarse_words(self, radius, angle, index, start):
    """Return the values of pairs whose u has few bits and no further ones."""
    del index, start
    u = ((radius >> (64 - BITS)).astype("float64") + 0.5) * 2.0**-BITS
    return box_muller(torch.from_numpy(u), self._tensor(angle))


def fine_cells(total, noise, grid, scale, dtype):
    """Publish on the fine grid, as if it were the coarse one."""
    fine = grid._replace(coarse=2 * grid.fine)
    return published(total, noise[0 : len(total)], fine).mul_(scale).to(dtype)


GRID = Grid.of(1.0, SIGMA, SIZE, 0.0)


@pytest.mark.parametrize("cell", [GRID.coarse, 2 * GRID.fine])
def test_no_release_lies_on_circles(cell):
    assert all(guess is None for _, guess in guesses(cell))


def test_coarse_cells_hide_the_circles(monkeypatch):
    monkeypatch.setattr(NormalStream, "_values", coarse_words)
    assert all(guess is None for _, guess in guesses(GRID.coarse))


def test_extended_words_have_no_circles(monkeypatch):
    monkeypatch.setattr(release, "on_grid", fine_cells)
    assert all(guess is None for _, guess in guesses(2 * GRID.fine))


def test_the_attack_wins_against_a_coarse_u_on_the_fine_grid(monkeypatch):
    monkeypatch.setattr(NormalStream, "_values", coarse_words)
    monkeypatch.setattr(release, "on_grid", fine_cells)
    assert all(guess == right for right, guess in guesses(2 * GRID.fine))
