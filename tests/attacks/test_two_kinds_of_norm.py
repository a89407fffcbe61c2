"""One record changes the way in which the norms of its batch are computed.

A step can compute norms in few operations, which makes them slightly larger, or exactly. In a
compiled run, a batch that the graph does not take passes by the plain step. The attacker sets the
public threshold of DPSGD-Global between the two norms of a record of which there are many. If the
two steps computed norms in two ways, one more record would drop all of them: the sum would move by
many times S.

All norms of a run are computed in one way; two ways are planted.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import evenclip
from evenclip import Performance, prepare
from evenclip.rules import DPSGDGlobal

WIDTH, OTHERS, FITS = 256, 21, 61


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """Replace torch.compile by the identity, so that the traced graph runs without compiling."""
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)


def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = [nn.Linear(20, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 2))


def batch(n):
    """Return n records: some others, and copies of one."""
    random = torch.Generator().manual_seed(0)
    copies = torch.randn(1, 20, generator=random).expand(n - OTHERS, 20)
    x = torch.cat([0.1 * torch.randn(OTHERS, 20, generator=random), copies])
    return x, torch.zeros(n, dtype=torch.int64)


@pytest.fixture(scope="module")
def threshold():
    """Return a threshold between the two norms of the record."""
    x, y = batch(FITS)
    gradients = evenclip.per_sample_gradients(model(), nn.functional.cross_entropy, x[-1:], y[-1:])
    exact, quick = float(gradients.norms()), float(gradients.norms(quick=True))
    assert exact < quick
    return (exact + quick) / 2


def kept(n, Z, *, two_ways=False):
    """Return how many copies a step of a compiled run keeps whose graph takes 61 records."""
    run = prepare(
        model(), batch(n), rule=DPSGDGlobal(C0=1.0, sigma=1.0, Z=Z), q=1.0, batch_size=FITS,
        steps=1, delta=1e-5, performance=Performance(compile=True, chunk=FITS),
    )  # fmt: skip
    with run.listening():
        assert run._graph is not None
        run.tape.may_be_quick |= two_ways
        return int((run.step().weights[OTHERS:] > 0).sum())


def test_one_record_more_drops_no_other(threshold):
    assert kept(FITS, threshold) == FITS - OTHERS
    assert kept(FITS + 1, threshold) == FITS + 1 - OTHERS


def test_the_attack_wins_against_two_kinds_of_norm(threshold):
    assert kept(FITS, threshold, two_ways=True) == FITS - OTHERS
    assert kept(FITS + 1, threshold, two_ways=True) == 0
