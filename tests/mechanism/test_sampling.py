"""Batches have exactly the law that amplification by sampling assumes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from evenclip.mechanism import sampling as module
from evenclip.mechanism.sampling import Poisson, Shuffled, drawn_rate, threshold
from evenclip.mechanism.words import Words, derive

KEY = bytes(range(32))
PROPERTY = settings(derandomize=True, deadline=None, database=None)
RATES = (
    st.floats(0, 1, exclude_min=True)
    | st.integers(1, 70).map(lambda k: 2.0**-k)
    | st.floats(1e-300, 1e-15)
)


def key(seed):
    """Return a different key for every seed."""
    return derive(KEY, str(seed))


def poisson(n, q, seed=0):
    return Poisson(n, q, q * n, key(seed))


def shuffled(n, size, seed=0):
    return Shuffled(n, size, key(seed))


def memberships(sampler, n, draws):
    """Return which records are in which batch.  # [draw, record], 0 or 1"""
    in_batch = np.zeros((draws, n))
    for index, row in enumerate(in_batch):
        row[sampler.batch(index).numpy()] = 1
    return in_batch


# The rate
# --------------------------------------------------------------------------------------------------


@given(RATES)
@example(1.0)
@example(math.nextafter(1.0, 0.0))
@example(5e-324)
@PROPERTY
def test_the_rate_that_is_drawn_is_never_above_the_one_in_the_ledger(q):
    """Q is the smallest integer with Q·2⁻⁶⁴ ≥ q, and the ledger has the float above it."""
    exact = Fraction(threshold(q), 2**64)
    assert Fraction(q) <= exact < Fraction(q) + Fraction(1, 2**64)
    assert exact <= 1
    written = Fraction(drawn_rate(q))
    assert exact <= written <= exact * (1 + Fraction(1, 2**52))
    assert Poisson(10, q, 1.0, KEY).q == drawn_rate(q)


@pytest.mark.parametrize("q", [1.0, 0.5, 0.25, 2.0**-64, 1 - 2.0**-53, 256 / 30_000])
def test_a_rate_of_64_bits_is_drawn_as_it_is(q):
    assert drawn_rate(q) == q


# The coins
# --------------------------------------------------------------------------------------------------


class AllWords:
    """Coins of every byte in turn, and for each of them any further bits."""

    def __init__(self, coins, further):
        self._coins, self._further = coins, further

    def span(self, first, count):
        words = np.resize(np.asarray(self._coins, dtype=np.uint8), 8 * count)
        return words.view(np.uint64)

    def at(self, counters):
        return np.full(len(counters), self._further << 8, dtype=np.uint64)


FURTHER = [0, 1, 2**55 - 1, 2**55, 2**56 - 2, 2**56 - 1]


@given(
    RATES | st.sampled_from([1.0, 0.5, 1 / 256, 255 / 256, 2.0**-64, 1 - 2.0**-53]),
    st.sampled_from(FURTHER) | st.integers(0, 2**56 - 1),
)
@PROPERTY
def test_8_bits_and_56_decide_as_one_word_of_64_does(q, further):
    """For every first byte, and further bits on both sides of the threshold."""
    Q = threshold(q)
    for rest in {further, Q % 2**56, max(Q % 2**56 - 1, 0), min(Q % 2**56 + 1, 2**56 - 1)}:
        sampler = Poisson(256, q, 1.0, KEY)
        sampler._coins = sampler._further = AllWords(range(256), rest)
        expected = [byte for byte in range(256) if (byte << 56) + rest < Q]
        assert sampler.batch(0).tolist() == expected


def test_every_word_of_a_smaller_coin_gives_exactly_the_rate(monkeypatch):
    """Coins of 8 and 4 bits, all 2¹² of them: Q of them are heads, for every Q."""
    monkeypatch.setattr(module, "_FURTHER", 4)
    for Q in (*range(1, 40), *range(250, 270), 2**11, 2**12 - 1, 2**12):
        heads = 0
        for rest in range(16):
            sampler = Poisson(256, Q / 2**12, 1.0, KEY)
            sampler._coins = sampler._further = AllWords(range(256), rest)
            heads += len(sampler.batch(0))
        assert heads == Q


@pytest.mark.parametrize("n", [1, 7, 8, 9, 300, 20_000])
@pytest.mark.parametrize("q", [0.3, 2.0**-9, 0.01, 1.0])
def test_a_record_is_in_a_batch_by_its_own_coin(n, q):
    """A function of key, draw and record: first 8 bits in order of the records, 56 at a counter."""
    sampler, Q = Poisson(n, q, 1.0, KEY), threshold(q)
    coins, further = Words(derive(KEY, "coins")), Words(derive(KEY, "further"))
    for index in (0, 1, 70, 2**40):
        words = -(-n // 8)
        first = np.frombuffer(coins.span(index * words, words).astype("<u8").tobytes(), np.uint8)
        counters = np.stack([np.full(n, index), np.arange(n)], axis=1).astype(np.uint64)
        rest = further.at(counters)
        expected = [i for i in range(n) if (int(first[i]) << 56) + (int(rest[i]) >> 8) < Q]
        assert sampler.batch(index).tolist() == expected


@pytest.mark.parametrize("n", [1, 300, 20_000])
def test_a_batch_does_not_depend_on_what_was_drawn_before(n):
    one = poisson(n, 0.1)
    expected = {index: one.batch(index).tolist() for index in (0, 1, 63, 64, 1000, 2**40)}
    for order in ((2**40, 63, 1, 0, 1000, 64), (64, 0, 63, 2**40, 1000, 1)):
        other = poisson(n, 0.1)
        assert all(other.batch(index).tolist() == expected[index] for index in order)


def test_no_coin_is_used_twice(monkeypatch):
    """Neither by two draws nor by two records; undecided coins have their own counters."""
    spans, counters = [], []

    class Counted(Words):
        def span(self, first, count):
            spans.append((first, first + count))
            return super().span(first, count)

        def at(self, given):
            counters.extend(map(tuple, given.tolist()))
            return super().at(given)

    monkeypatch.setattr(module, "Words", Counted)
    sampler = poisson(1001, 1 / 3)
    for index in range(300):
        sampler.batch(index)
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(sorted(spans)))
    assert len(set(counters)) == len(counters) > 300


# Poisson
# --------------------------------------------------------------------------------------------------


def test_every_set_of_records_has_its_own_probability():
    """Each of the 2⁵ subsets of five records has probability q^k (1 − q)^(5 − k)."""
    n, q, draws = 5, 0.3, 40_000
    sampler = poisson(n, q)
    seen = Counter(sum(1 << i for i in sampler.batch(t).tolist()) for t in range(draws))
    observed = [seen[subset] for subset in range(2**n)]
    expected = [
        draws * q ** subset.bit_count() * (1 - q) ** (n - subset.bit_count())
        for subset in range(2**n)
    ]
    assert stats.chisquare(observed, expected).pvalue > 1e-3


# Coins are tossed for many draws at once, or for one.
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
    empty = sum(len(sampler.batch(t)) == 0 for t in range(draws))
    low, high = stats.binom.interval(1 - 1e-4, draws, (1 - q) ** n)  # 0.1285
    assert low <= empty <= high


def test_no_record_twice_and_only_records():
    for n, q in ((1, 0.5), (2, 0.9), (300, 0.9), (20_000, 0.03)):
        sampler = poisson(n, q)
        for index in range(20):
            batch = sampler.batch(index)
            assert batch.dtype == torch.int64
            assert len(batch.unique()) == len(batch)
            assert len(batch) == 0 or (batch.min() >= 0 and batch.max() < n)


def test_q_1_takes_everything():
    sampler = poisson(50, 1.0)
    for index in range(3):
        assert sampler.batch(index).tolist() == list(range(50))


def test_a_seed_is_a_stream():
    one, same, other = (
        poisson(500, 0.1, seed=1),
        poisson(500, 0.1, seed=1),
        poisson(500, 0.1, seed=2),
    )
    a, b, c = ([sampler.batch(t).tolist() for t in range(5)] for sampler in (one, same, other))
    assert a == b
    assert all(x != y for x, y in zip(a, c, strict=True))


def test_streams_of_different_seeds_are_independent():
    n, q, draws = 200, 0.1, 4000
    one, other = (memberships(poisson(n, q, seed), n, draws) for seed in (3, 4))
    product = (one - q) * (other - q) / (q * (1 - q))
    assert abs(product.mean()) * math.sqrt(product.size) < 4


@pytest.mark.parametrize("n", [999, 1000, 1001])
def test_what_is_divided_by_does_not_tell_neighbouring_datasets_apart(n):
    sampler = Poisson(n, 0.1, 100.0, KEY)
    assert sampler.q == drawn_rate(0.1)
    for batch in (
        sampler.batch(0),
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
    for epoch in range(3):
        batches = [sampler.batch(epoch * per_epoch + i) for i in range(per_epoch)]
        assert [len(b) for b in batches] == [min(size, n - i * size) for i in range(per_epoch)]
        assert [sampler.expected_size(b) for b in batches] == [float(len(b)) for b in batches]
        epochs.append(torch.cat(batches).tolist())
        assert sorted(epochs[-1]) == list(range(n))
    assert n < 7 or epochs[0] != epochs[1] != epochs[2]


def test_every_order_is_as_likely():
    sampler, draws = shuffled(4, 4), 12_000
    seen = Counter(tuple(sampler.batch(t).tolist()) for t in range(draws))
    assert len(seen) == 24
    assert stats.chisquare(list(seen.values())).pvalue > 1e-3


def test_shuffled_seed_is_a_stream():
    assert torch.equal(shuffled(50, 10, seed=1).batch(3), shuffled(50, 10, seed=1).batch(3))
    assert not torch.equal(shuffled(50, 10, seed=1).batch(3), shuffled(50, 10, seed=2).batch(3))


def test_a_shuffled_batch_does_not_depend_on_what_was_drawn_before():
    one = shuffled(10, 3, seed=1)  # four batches per epoch
    expected = [one.batch(t).tolist() for t in range(12)]
    other = shuffled(10, 3, seed=1)
    assert [other.batch(t).tolist() for t in reversed(range(12))] == expected[::-1]
