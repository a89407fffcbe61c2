"""A checkpoint that is continued twice, and a ledger that shows one branch.

The attacker sees every model that was published: those of the common steps and of both branches.
The owner hands in ledgers, honestly or not. The ε computed from them must hold for everything that
was published, or the ledgers must be refused.

The test states what the attacker can do exactly: without sampling, T releases with the multiplier σ
are one Gaussian with μ = √T/σ, whose smallest δ at ε has a closed form.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import norm

from evenclip import DPSGD, prepare
from evenclip.mechanism import Entry, Ledger, accounting
from evenclip.training.journal import Journal, journaled

DELTA, SIGMA, SPLIT, END = 1e-5, 20.0, 60, 100


def taken(run, first, end, parent=None, **changes):
    """Return a ledger of the steps of a run from one draw up to another."""
    multipliers = (("gradient", changes.pop("sigma", SIGMA)),)
    entry = Entry(1.0, multipliers, end - first, run=run, first=first, parent=parent)
    return Ledger([replace(entry, **changes)])


COMMON = taken("a", 0, SPLIT)
BRANCHES = [
    taken("a", 0, END),  # the run itself went on
    taken("b", 0, END - SPLIT, ("a", SPLIT)),
    taken("c", 0, END - SPLIT, ("a", SPLIT)),
]
PUBLISHED = SPLIT + 3 * (END - SPLIT)


def possible_delta(epsilon, steps):
    """Return the δ that the best attacker reaches at ε with this number of releases."""
    mu = math.sqrt(steps) / SIGMA
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def epsilon(ledger):
    return accounting.epsilon(ledger, DELTA)


def test_the_union_of_all_branches_holds_for_all_that_was_published():
    union = Ledger.union(COMMON, *BRANCHES)
    assert union.steps == PUBLISHED
    assert possible_delta(epsilon(union), PUBLISHED) <= DELTA
    assert possible_delta(epsilon(union) * 0.98, PUBLISHED) > DELTA  # and it is not much too large


@pytest.mark.parametrize("order", [1, -1])
def test_it_does_not_matter_how_often_or_in_which_order_ledgers_are_given(order):
    given = [*BRANCHES, COMMON, *BRANCHES][::order]
    assert Ledger.union(*given) == Ledger.union(COMMON, *BRANCHES)


@pytest.mark.parametrize("missing", [COMMON, taken("a", 1, END), taken("a", 0, SPLIT - 1)])
def test_a_branch_without_its_beginning_is_refused(missing):
    """The beginning is left out, or lacks its first or last step."""
    given = [] if missing is COMMON else [missing]
    with pytest.raises(ValueError, match=f"was resumed from draw {SPLIT} of run a"):
        Ledger.union(BRANCHES[1], *given)


@pytest.mark.parametrize(
    "changes", [{"sigma": 2 * SIGMA}, {"q": 0.5}, {"tau": 1e-9}, {"sizes": (("gradient", 3),)}]
)
def test_a_beginning_that_contradicts_another_ledger_is_refused(changes):
    """One of them states more noise, fewer records or ideal noise."""
    with pytest.raises(ValueError, match="damaged or forged"):
        Ledger.union(taken("a", 0, SPLIT, **changes), *BRANCHES)


def test_a_branch_with_two_parents_is_refused():
    other = taken("b", 0, END - SPLIT, ("c", 1))
    with pytest.raises(ValueError, match="damaged or forged"):
        Ledger.union(*BRANCHES, other)


def test_steps_that_were_written_ahead_count_as_published():
    ahead = taken("b", 0, END - SPLIT, ("a", SPLIT), reserved=True)
    assert Ledger.union(BRANCHES[0], ahead, BRANCHES[2]).steps == PUBLISHED


@pytest.mark.parametrize(
    "hidden",
    [
        [taken("a", SPLIT, END)],
        [taken("a", 0, 1), taken("a", SPLIT, END)],
        [taken("a", 0, END), taken("b", 1, END - SPLIT, ("a", SPLIT))],
    ],
)
def test_a_ledger_that_hides_draws_of_a_run_is_not_whole(hidden):
    """A run draws from 0 on, so what is missing was left out."""
    with pytest.raises(ValueError, match="is missing, and later ones are there"):
        Ledger.union(*hidden).check_whole()


def test_a_short_attempt_does_not_hide_the_longer_one_before_it(tmp_path):
    """Both repeat the draws of one key; the ledger is that of the folder's journal."""
    for end in (END, SPLIT):
        journal = Journal(tmp_path)
        journal.reserve("a", 0, taken("a", 0, 2 * END).entries)
        journal.close("a", end)
    assert journaled(tmp_path).steps == END
    assert possible_delta(epsilon(journaled(tmp_path)), END) <= DELTA


def test_the_draws_of_a_run_are_in_its_ledger_at_their_places():
    """So a forged ledger of a run contradicts the one that the run has written."""
    random = torch.Generator().manual_seed(0)
    data = torch.randn(20, 3, generator=random), torch.arange(20) % 2
    rule = DPSGD(C0=1.0, sigma=SIGMA)
    run = prepare(torch.nn.Linear(3, 2), data, rule=rule, batch_size=5, steps=4, delta=1e-3)
    with run.listening():
        for _ in range(3):
            run.update(run.step())
    (entry,) = [entry for entry in run.ledger.entries if not entry.reserved]
    assert (entry.run, entry.first, entry.steps) == (run.run_id, 0, 3)
    forged = replace(entry, multipliers=(("gradient", 2 * SIGMA),))
    with pytest.raises(ValueError, match="damaged or forged"):
        Ledger.union(run.ledger, Ledger([forged]))


def longest(*ledgers):
    """Return the longest branch as if it were all."""
    return max(ledgers, key=lambda ledger: ledger.steps)


def test_the_attack_wins_against_a_union_that_takes_the_longest_branch(monkeypatch):
    monkeypatch.setattr(Ledger, "union", staticmethod(longest))
    stated = epsilon(Ledger.union(COMMON, *BRANCHES))
    assert possible_delta(stated, END) <= DELTA  # true for one branch
    assert possible_delta(stated, PUBLISHED) > 10 * DELTA
