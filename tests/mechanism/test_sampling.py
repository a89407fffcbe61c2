"""Batches have the distribution that amplification by sampling assumes."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from evenclip.mechanism.sampling import Poisson, Shuffled


def poisson(n, q, seed=0):
    return Poisson(n, q, q * n, np.random.SeedSequence(seed))


def shuffled(n, size, seed=0):
    return Shuffled(n, size, np.random.SeedSequence(seed))


def memberships(sampler, n, draws):
    """Return which records are in which batch.  # [draw, record], 0 or 1"""
    in_batch = np.zeros((draws, n))
    for row in in_batch:
        row[sampler.next().numpy()] = 1
    return in_batch


# Poisson
# --------------------------------------------------------------------------------------------------


def test_every_set_of_records_has_its_own_probability():
    """Each of the 2⁵ subsets of five records has probability q^k (1 − q)^(5 − k)."""
    n, q, draws = 5, 0.3, 40_000
    sampler = poisson(n, q)
    seen = Counter(sum(1 << i for i in sampler.next().tolist()) for _ in range(draws))
    observed = [seen[subset] for subset in range(2**n)]
    expected = [
        draws * q ** subset.bit_count() * (1 - q) ** (n - subset.bit_count())
        for subset in range(2**n)
    ]
    assert stats.chisquare(observed, expected).pvalue > 1e-3


# numpy draws geometric gaps in two ways: by inversion below q = 1/3, else by search; a block holds
# many steps or one
REGIMES = {
    "few": (300, 0.05, 6000),
    "many": (300, 0.6, 4000),
    "one step a block": (20_000, 0.8, 500),
}


@pytest.fixture(scope="module", params=REGIMES)
def drawn(request):
    n, q, draws = REGIMES[request.param]
    return n, q, draws, memberships(poisson(n, q, seed=5), n, draws)


def test_each_record_is_in_a_batch_with_probability_q(drawn):
    n, q, draws, in_batch = drawn
    z = (in_batch.sum(axis=0) - draws * q) / math.sqrt(draws * q * (1 - q))
    assert np.abs(z).max() < 5
    assert 1e-3 < stats.chi2.cdf(np.sum(z**2), n) < 1 - 1e-3


def test_records_are_independent_in_pairs(drawn):
    _, q, draws, in_batch = drawn
    centred = (in_batch[:, :250] - q) / math.sqrt(q * (1 - q))
    correlation = (centred.T @ centred / draws)[np.triu_indices(250, 1)] * math.sqrt(draws)
    together = (in_batch[:, :250].T.astype(float) @ in_batch[:, :250])[
        np.triu_indices(250, 1)
    ]  # of 31,125 pairs
    low, high = stats.binom.interval(1 - 1e-3 / len(together), draws, q**2)
    assert low <= together.min()
    assert together.max() <= high
    assert abs(correlation.mean()) * math.sqrt(len(correlation)) < 4
    assert correlation.std() == pytest.approx(1.0, abs=0.03)


def test_batches_are_independent_of_each_other(drawn):
    _, q, draws, in_batch = drawn
    centred = (in_batch - q) / math.sqrt(q * (1 - q))
    assert abs(np.mean(centred[1:] * centred[:-1])) * math.sqrt(centred[1:].size) < 4
    sizes = in_batch.sum(axis=1)
    assert abs(np.corrcoef(sizes[1:], sizes[:-1])[0, 1]) * math.sqrt(draws) < 4


def test_batch_sizes_are_binomial(drawn):
    n, q, draws, in_batch = drawn
    cuts = np.unique(
        stats.binom.ppf(np.linspace(0, 1, 13)[1:-1], n, q)
    )  # bins of about the same probability
    observed = np.bincount(np.searchsorted(cuts, in_batch.sum(axis=1)), minlength=len(cuts) + 1)
    probabilities = np.diff([0.0, *stats.binom.cdf(cuts, n, q), 1.0])
    assert stats.chisquare(observed, draws * probabilities).pvalue > 1e-3


def test_empty_batches_occur_at_their_rate():
    n, q, draws = 40, 0.05, 20_000
    sampler = poisson(n, q)
    empty = sum(len(sampler.next()) == 0 for _ in range(draws))
    low, high = stats.binom.interval(1 - 1e-4, draws, (1 - q) ** n)  # 0.1285
    assert low <= empty <= high


def test_no_record_twice_and_only_records():
    for n, q in ((1, 0.5), (2, 0.9), (300, 0.9), (20_000, 0.03)):
        sampler = poisson(n, q)
        for _ in range(20):
            batch = sampler.next()
            assert batch.dtype == torch.int64
            assert len(batch.unique()) == len(batch)
            assert len(batch) == 0 or (batch.min() >= 0 and batch.max() < n)


def test_q_1_takes_everything():
    sampler = poisson(50, 1.0)
    for _ in range(3):
        assert sorted(sampler.next().tolist()) == list(range(50))


def test_a_seed_is_a_stream():
    one, same, other = (
        poisson(500, 0.1, seed=1),
        poisson(500, 0.1, seed=1),
        poisson(500, 0.1, seed=2),
    )
    a, b, c = ([sampler.next().tolist() for _ in range(5)] for sampler in (one, same, other))
    assert a == b
    assert all(x != y for x, y in zip(a, c, strict=True))


def test_streams_of_different_seeds_are_independent():
    parent = np.random.SeedSequence(3)
    n, q, draws = 200, 0.1, 4000
    one, other = (memberships(Poisson(n, q, q * n, seed), n, draws) for seed in parent.spawn(2))
    product = (one - q) * (other - q) / (q * (1 - q))
    assert abs(product.mean()) * math.sqrt(product.size) < 4


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_poisson_resumes(steps):
    sampler = poisson(300, 0.1, seed=1)
    for _ in range(steps):
        sampler.next()
    state = json.loads(json.dumps(sampler.state()))  # plain values
    ahead = [sampler.next().tolist() for _ in range(5)]
    other = poisson(300, 0.1, seed=2)
    other.next()
    other.set_state(state)
    assert [other.next().tolist() for _ in range(5)] == ahead


@pytest.mark.parametrize("n", [999, 1000, 1001])
def test_what_is_divided_by_does_not_tell_neighbouring_datasets_apart(n):
    sampler = Poisson(n, 0.1, 100.0, np.random.SeedSequence(0))
    assert sampler.q == 0.1
    for batch in (
        sampler.next(),
        torch.zeros(0, dtype=torch.int64),
        torch.arange(7),
        torch.arange(n),
    ):
        assert sampler.expected_size(batch) == 100.0


# Shuffled
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "size"), [(10, 3), (10, 5), (10, 10), (10, 11), (1, 1), (7, 1)])
def test_each_record_once_an_epoch_and_the_last_smaller_batch_is_kept(n, size):
    sampler = shuffled(n, size)
    assert sampler.q is None
    per_epoch = math.ceil(n / size)
    epochs = []
    for _ in range(3):
        batches = [sampler.next() for _ in range(per_epoch)]
        assert [len(b) for b in batches] == [min(size, n - i * size) for i in range(per_epoch)]
        assert [sampler.expected_size(b) for b in batches] == [float(len(b)) for b in batches]
        epochs.append(torch.cat(batches).tolist())
        assert sorted(epochs[-1]) == list(range(n))
    assert n < 7 or epochs[0] != epochs[1] != epochs[2]


def test_every_order_is_as_likely():
    sampler, draws = shuffled(4, 4), 12_000
    seen = Counter(tuple(sampler.next().tolist()) for _ in range(draws))
    assert len(seen) == 24
    assert stats.chisquare(list(seen.values())).pvalue > 1e-3


def test_shuffled_seed_is_a_stream():
    assert torch.equal(shuffled(50, 10, seed=1).next(), shuffled(50, 10, seed=1).next())
    assert not torch.equal(shuffled(50, 10, seed=1).next(), shuffled(50, 10, seed=2).next())


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5, 9])
def test_shuffled_resumes_in_the_middle_of_an_epoch(steps):
    sampler = shuffled(10, 3, seed=1)  # four batches per epoch
    for _ in range(steps):
        sampler.next()
    state = sampler.state()
    ahead = [sampler.next().tolist() for _ in range(9)]
    other = shuffled(10, 3, seed=2)
    other.next()
    other.set_state(state)
    assert [other.next().tolist() for _ in range(9)] == ahead
    assert "order" in state  # reading the state does not change it
