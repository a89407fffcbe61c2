"""Two steps before one update.

A custom loop calls `run.step()` twice and publishes both gradients. The attacker subtracts them. At
the same parameters, two batches with one noise differ by the exact difference of their sums, which
shows a single record.

Every call must draw its own batch and noise and be in the ledger, whether or not an update follows.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from evenclip import DPSGD, prepare
from evenclip.mechanism.grid import Grid
from evenclip.mechanism.noise import Noise
from evenclip.training.run import Run

N, D, B = 40, 8, 16
RULE = DPSGD(C0=1.0, sigma=2.0)


def prepared():
    """Return a run with batches and noise from the operating system."""
    random = torch.Generator().manual_seed(0)
    data = torch.randn(N, D, generator=random).double(), torch.arange(N) % 3
    settings = {"rule": RULE, "batch_size": B, "steps": 9, "delta": 1e-5}
    return prepare(nn.Linear(D, 3).double(), data, **settings)


@pytest.fixture
def run():
    return prepared()


def distance(run):
    """Return how far the attacker's guess is from the sums' difference, in units of σ'√d.

    The guess is the difference of two published gradients; the truth is known to the test alone.
    """
    with run.listening():
        one, other = run.step(), run.step()
    assert not torch.equal(one.losses, other.losses)  # two batches
    size = len(one.clipped_sum)
    grid = Grid.of(1.0, RULE.sigma, size, run.mechanism.rounding)
    guess = B * (one.public.gradient - other.public.gradient)
    off = torch.linalg.vector_norm(guess - (one.clipped_sum - other.clipped_sum))
    return float(off) / (grid.std * math.sqrt(size)), grid


def test_the_difference_of_two_gradients_has_the_noise_of_both(run):
    """Of a chi distribution with 27 degrees of freedom: off by half with probability 1e-10."""
    assert distance(run)[0] > math.sqrt(2) / 4


def test_every_call_is_in_the_ledger(run):
    for times in (1, 2, 3):
        with run.listening():
            run.step()
        assert taken(run) == times
    assert run.t == 0


def taken(run):
    """Return the number of draws that the ledger has, without those that are written ahead."""
    return sum(entry.steps for entry in run.ledger.entries if not entry.reserved)


def test_every_call_has_its_own_batch_in_any_step(run):
    with run.listening():
        batches = [run.step().losses.tolist() for _ in range(6)]
    assert len(set(map(tuple, batches))) == 6


def test_the_attack_wins_against_noise_of_the_step(run, monkeypatch):
    """Plant noise that belongs to the step and not to the draw."""
    whole = Noise.of
    monkeypatch.setattr(Run, "_noise", lambda self, index: whole(self.noise, self.t))
    off, grid = distance(run)
    assert off <= grid.coarse / grid.std  # each is within half a cell of its sum plus the noise
