"""One record changes the last bits of another record's gradient.

A matrix product may round a row differently when the number of rows changes. The attacker looks for
a record whose norm changes in this way when a second one joins it, and sets the public threshold of
DPSGD-Global-Adapt between the two norms. So one more record changes another record's count as well
as its own, and the count moves by 2 where the noise is scaled to 1.

With blocks of one size, padded, no number of rows may change a bit; without them, the attack must
find a record.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from evenclip import DPSGDGlobalAdapt, prepare
from evenclip.gradients.company import same_in_any_company
from evenclip.gradients.tape import Tape

D, ROWS, SEEDS = 96, range(1, 13), 12


def data(seed):
    """Return records whose first one is in every batch."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS[-1], D, generator=random), torch.arange(ROWS[-1]) % 3


def model(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(D, 64), nn.ReLU(), nn.Linear(64, 3))


def prepared(seed, rows, Z0=1.0):
    """Return a run whose batches are the first `rows` records."""
    x, y = data(seed)
    rule = DPSGDGlobalAdapt(C0=1.0, sigma=1.0, Z0=Z0)
    settings = {"rule": rule, "q": 1.0, "batch_size": 4, "steps": 1, "delta": 1e-3}
    return prepare(model(seed), (x[:rows], y[:rows]), **settings)


def norms(seed):
    """Return the first record's norm among 1, 2, ... records of one public size of block."""
    run = prepared(seed, 4)
    x, y = data(seed)
    with run.listening():
        return [float(run.tape(x[:n], y[:n]).norms(quick=True)[0]) for n in ROWS]


def flips():
    """Return (seed, rows, threshold) where one more record turns over the first one's count."""
    return [
        (seed, n, min(one, other))
        for seed in range(SEEDS)
        for n, (one, other) in zip(ROWS, pairwise(norms(seed)), strict=False)
        if one != other
    ]


@pytest.fixture
def unpadded(monkeypatch):
    """Plant a fault: pass batches of any size at once, without padding."""

    def fix_rows(self, q, mean):
        self.rows, self.pads = ROWS[-1], False

    monkeypatch.setattr(Tape, "fix_rows", fix_rows)
    monkeypatch.setattr("evenclip.training.company.same_in_any_company", lambda *block: True)


def test_no_number_of_rows_changes_a_bit():
    assert flips() == []


def test_the_block_of_a_run_is_the_same_in_any_company():
    run = prepared(0, 4)
    x, y = data(0)
    rows = torch.arange(run.tape.rows) % len(y)
    assert same_in_any_company(run.tape, x[rows], y[rows])
    assert "had the same bits" in run.company


def test_the_attack_wins_against_blocks_of_any_size(unpadded):
    found = flips()
    assert found
    seed, n, threshold = found[0]
    x, y = data(seed)
    run = prepared(seed, 4, threshold)
    with run.listening():
        counted = [
            run.tape(x[:rows], y[:rows]).norms(quick=True)[0] > run.state for rows in (n, n + 1)
        ]
    assert counted[0] != counted[1]


# A rule's statistic of the model's output passes in the same blocks.
# --------------------------------------------------------------------------------------------------


def outputs(seed, *, at_once=False):
    """Return the first record's output among 1, 2, ... records."""
    run = prepared(seed, 4)
    x, _ = data(seed)
    passed = run.tape.model if at_once else run.tape.outputs
    with run.listening(), torch.no_grad():
        return [passed(x[:n])[0] for n in ROWS]


@pytest.mark.parametrize("at_once", [False, True])
def test_no_number_of_rows_changes_an_output_unless_they_pass_at_once(at_once):
    changed = [
        not torch.equal(one, other)
        for seed in range(SEEDS)
        for one, other in pairwise(outputs(seed, at_once=at_once))
    ]
    assert any(changed) == at_once
