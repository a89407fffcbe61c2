"""The count of DPSGD-Global-Adapt, from two consecutive Z.

The attacker sees Z after every step, which is public, and computes the noisy count from two of
them. For every possible count it looks for noise that leads to the noisy one. If only one count is
possible, it is the exact private count.

With a float64 count and float32 noise this is so in every step: the difference to the noisy count
has 24 bits for the right count only. On the grid, every count must remain possible.
"""

from __future__ import annotations

import math

import torch

from evenclip import DPSGDGlobalAdapt, prepare
from evenclip.mechanism.grid import Grid

N, B, STEPS, LARGEST = 64, 16, 40, 40
RULE = DPSGDGlobalAdapt(C0=1.0, sigma=1.0, Z0=2.0)


def steps():
    """Return the grid of the counts, and the exact count, Z before and Z after every step."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, 5, generator=random), torch.arange(N) % 3
    model = torch.nn.Linear(5, 3)
    seen = []
    run = prepare(model, (x, y), rule=RULE, batch_size=B, steps=STEPS, lr=0.01, delta=1e-5)
    with run.listening():
        while run.t < STEPS:
            step = run.step()
            seen.append((int((step.norms > run.state).sum()), float(run.state), step.public.state))
            run.update(step)
    return Grid.of(1.0, 10.0, 1, run.mechanism.rounding), seen


def possible_counts(attacker, grid, before, after, single):
    """Return every count that some noise turns into the noisy one."""
    noisy = torch.tensor([B * (math.log(float(after) / before) + RULE.eta_Z)], dtype=torch.float64)
    off = 1e-13 * B  # of the logarithm of two numbers of float64
    double = torch.float64
    return [
        count
        for count in range(LARGEST)
        if attacker.reachable(
            noisy, torch.tensor([count], dtype=double), grid, 1.0, double, single, off
        ).all()
    ]


def test_every_count_is_possible_after_every_step(attacker):
    grid, seen = steps()
    for _, before, after in seen:
        for single in (False, True):
            found = possible_counts(attacker, grid, before, after, single)
            assert found == list(range(LARGEST))


def test_the_attack_wins_against_noise_in_single_precision(attacker, float_noise):
    """In a step, a wrong count is possible too with a probability of about 1e-4."""
    grid, seen = steps()
    exact = [
        possible_counts(attacker, grid, before, after, single=True) == [count]
        for count, before, after in seen
    ]
    assert sum(exact) >= STEPS - 3
