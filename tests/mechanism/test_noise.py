"""Noise: its random words, its distribution, its tail, and that no number is used twice.

An event of probability 2e-9 is too rare to be counted, so the tail is tested with prepared words
instead of those of Philox: u lies in the first 2⁻²⁴ of the unit interval. All numbers beyond √(48
ln 2) = 5.77 standard deviations come from there (24-bit uniforms have only one number in it), so
rare events are 2²⁴ times as frequent as without preparation.
"""

from __future__ import annotations

import itertools
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from evenclip.mechanism import noise as module
from evenclip.mechanism.noise import Noise, StepNoise


def seeded(seed):
    return Noise(np.random.SeedSequence(seed))


def by_numpy(noise, t, size, dtype=torch.float32, steps=1):
    return noise.normal(t, size, dtype, steps)


def in_parts(noise, t, size, dtype=torch.float32, steps=1):
    """Draw in ranges of the numbers, as several ranks do."""
    cut = size // 3
    return torch.stack(
        [
            torch.cat([noise.part(t + s, size, *ends, dtype) for ends in ((0, cut), (cut, size))])
            for s in range(steps)
        ]
    )


over_draws = pytest.mark.parametrize("draw", [by_numpy])
over_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["float32", "float64"]
)
ROUNDING = {
    torch.float32: 3e-6,
    torch.float64: 2e-14,
}  # of a number: that of its angle, times its radius
examples = settings(derandomize=True, deadline=None, database=None)
SIZES = [0, 1, 2, 3, 7, 8, 1001]
SOME_T = [0, 1, 12_345, 2**40]
TAIL, FLAT = (
    2**12,
    2**32 - 2**24,
)  # lower 32 bits of the words whose u is computed in another way in float32: below, and from here


# Words
# --------------------------------------------------------------------------------------------------

KEYS = st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2)


def unsigned(words):
    return np.asarray(words).view(np.uint64)


def philox(key, t, size, blocks, stream):
    """Return the words of step t by numpy, which increments the counter before it draws.  # [4 ·
    blocks], uint64
    """
    counter = np.array([t * blocks, stream, size, 0], dtype=np.uint64)
    return np.random.Philox(key=unsigned(key), counter=counter).random_raw(4 * blocks)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123, kat_vectors, philox4x64 with 10 rounds
        ("0 0 0 0", "0 0", "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
        (
            "ffffffffffffffff ffffffffffffffff ffffffffffffffff ffffffffffffffff",
            "ffffffffffffffff ffffffffffffffff",
            "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0",
        ),
        (
            "243f6a8885a308d3 13198a2e03707344 a4093822299f31d0 082efa98ec4e6c89",
            "452821e638d01377 be5466cf34e90c6c",
            "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
        ),
    ],
)
def test_numpy_has_the_published_philox(counter, key, words):
    counter, key, words = (
        [int(word, 16) for word in text.split()] for text in (counter, key, words)
    )
    before = (sum(word << 64 * i for i, word in enumerate(counter)) - 1) % 2**256
    before = np.array([before >> 64 * i & 2**64 - 1 for i in range(4)], dtype=np.uint64)
    assert (
        np.random.Philox(key=np.array(key, np.uint64), counter=before).random_raw(4).tolist()
        == words
    )


@given(
    KEYS,
    st.lists(
        st.tuples(
            st.integers(0, 2**40) | st.integers(0, 4),
            st.integers(1, 3),
            st.integers(0, 3),
            st.sampled_from([0, 1, 1, 5]),
        ),
        min_size=1,
        max_size=5,
    ),
)
@examples
def test_words_of_a_run_are_those_of_its_key_whatever_was_drawn_before(key, draws):
    noise = seeded(0)
    noise.set_state(torch.tensor(key))
    for t, steps, size, blocks in draws:
        for stream in (0, 1):
            words = noise._words[stream].of(t, steps, size, blocks)
            assert words.shape == (steps, 4 * blocks)
            for s in range(steps):
                assert np.array_equal(words[s], philox(key, t + s, size, blocks, stream))


# Numbers: their distribution
# -----------------------------------------------------------------------------------------

MANY = 1_000_000
CHANCE = 1e-5  # probability of a false alarm, for each of about a hundred tests
DRAWS = [
    (torch.float32, 100_000),
    (torch.float64, 100_000),
    (torch.float32, 1000),
    (torch.float64, 1000),
]
DRAWS += [
    (torch.float32, 1),
    (torch.float64, 2),
    (torch.float64, 3),
    (torch.float32, 7),
    (torch.float32, 8),
]


@pytest.fixture(scope="module", params=DRAWS, ids=[f"{d}-{s}"[6:] for d, s in DRAWS])
def draws(request):
    """Return a million numbers of steps of this size, from one call.  # [step, size], float64"""
    dtype, size = request.param
    return seeded(11).normal(5, size, dtype, MANY // size).double().numpy()


@pytest.fixture
def many(draws):
    return draws.ravel()


def halves(draws):
    """Return the first and the second numbers of the Box–Muller pairs; with an odd size, one number
    has no second.
    """
    half = (draws.shape[1] + 1) // 2
    return draws[:, : draws.shape[1] - half].ravel(), draws[:, half:].ravel()


def uncorrelated(a, b):
    """Assert that a and b, their squares, signs and absolute values are uncorrelated, to 4.5
    standard errors.
    """
    for view in (np.asarray, np.square, np.sign, np.abs, lambda v: v * v * v):
        assert abs(np.corrcoef(view(a), view(b))[0, 1]) < 4.5 / math.sqrt(len(a))
    assert abs(np.corrcoef(a, b**2)[0, 1]) < 4.5 / math.sqrt(len(a))


def test_moments(many):
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(np.mean(math.prod([many] * power)) - moment) < 4 * math.sqrt(
            variance / len(many)
        ), power


def test_kolmogorov_smirnov(many, draws):
    for numbers in (many, *halves(draws)):
        assert len(numbers) == 0 or stats.kstest(numbers[:300_000], "norm").pvalue > CHANCE


def test_the_two_numbers_of_a_pair_are_independent(draws):
    first, second = halves(draws)
    if len(first):
        uncorrelated(first, second)
        assert (
            stats.kstest(np.hypot(first, second)[:200_000] ** 2, "expon", args=(0, 2)).pvalue
            > CHANCE
        )
        assert (
            stats.kstest(np.arctan2(second, first)[:200_000] / math.tau + 0.5, "uniform").pvalue
            > CHANCE
        )


@pytest.mark.parametrize("lag", [1, 2, 3, 64])
def test_neighbours_are_independent(many, lag):
    uncorrelated(many[:-lag], many[lag:])


def test_consecutive_steps_are_independent(draws):
    uncorrelated(draws[1:].ravel(), draws[:-1].ravel())


def test_seeds_are_independent():
    parent = np.random.SeedSequence(13)
    a, b, c = (
        Noise(seed).normal(0, 500_000)[0].double().numpy() for seed in (*parent.spawn(2), parent)
    )
    for one, other in ((a, b), (a, c), (b, c)):
        uncorrelated(one, other)


@over_draws
@over_dtypes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("steps", [1, 4])
def test_sizes(draw, dtype, size, steps):
    numbers = draw(seeded(1), 3, size, dtype, steps)
    assert numbers.shape == (steps, size)
    assert numbers.dtype == dtype
    assert len(numbers.unique()) >= 0.999 * steps * size  # float32 repeats a few


@over_draws
def test_half_precision_is_rounded_at_the_end(draw):
    numbers = draw(seeded(1), 3, 9, torch.bfloat16)
    assert numbers.dtype == torch.bfloat16
    assert torch.equal(numbers, draw(seeded(1), 3, 9, torch.float32).bfloat16())


def test_more_than_five_standard_deviations_by_plain_counting():
    noise, rounds, size = seeded(21), 100, 1_000_000
    beyond = sum(int((noise.normal(t, size).abs() > 5).sum()) for t in range(rounds))
    low, high = stats.binom.interval(1 - 1e-4, rounds * size, 2 * stats.norm.sf(5))  # 57 expected
    assert low <= beyond <= high


# Numbers: two ways to compute them
# --------------------------------------------------------------------------------------


def by_hand(word, extra, dtype):
    """Return the pair for a word and 32 further bits of u (in float32 only in the tail), with a
    radius of thirty digits.
    """
    low = word % 2**32
    more = extra + 1 if dtype == torch.float64 or low < TAIL else 2**31 if low >= FLAT else 0
    with localcontext(prec=30):
        u = Decimal((low << 32) + more) / 2**64
        radius = float((-2 * u.ln()).sqrt())
    turn = math.remainder(word >> 32, 2**32) / 2**32
    return radius * math.cos(math.tau * turn), radius * math.sin(math.tau * turn)


@over_draws
@over_dtypes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("t", SOME_T)
def test_every_number_is_that_of_its_bits(draw, dtype, size, t):
    noise, half = seeded(2), (size + 1) // 2
    words, extra = (
        philox(noise.key, t, size, -(-half // each), stream) for each, stream in ((4, 0), (8, 1))
    )
    pairs = [
        by_hand(int(w), int(e), dtype)
        for w, e in zip(words[:half], extra.view("<u4")[:half], strict=True)
    ]
    expected = torch.tensor([z for z, _ in pairs] + [z for _, z in pairs], dtype=torch.float64)[
        :size
    ]
    numbers = draw(noise, t, size, dtype)[0]
    torch.testing.assert_close(numbers.double(), expected, rtol=0, atol=ROUNDING[dtype])


@over_draws
@over_dtypes
def test_where_u_lies_in_the_tail_its_further_bits_count(draw, dtype):
    """Of eight million pairs about seven use further bits; compare them with a hand calculation."""
    noise, pairs = seeded(0), 1024
    words = philox(noise.key, 0, 2 * pairs, 8000 * pairs // 4, 0)
    where = np.nonzero((words & 0xFFFFFFFF) < TAIL)[0]
    assert len(where) >= 4
    for t, j in (divmod(int(i), pairs) for i in where):
        extra = int(philox(noise.key, t, 2 * pairs, pairs // 8, 1).view("<u4")[j])
        word = int(words[t * pairs + j])
        numbers = draw(noise, t, 2 * pairs, dtype)[0].double()[[j, pairs + j]]
        expected = torch.tensor(by_hand(word, extra, dtype), dtype=torch.float64)
        torch.testing.assert_close(numbers, expected, rtol=0, atol=ROUNDING[dtype])
        other = torch.tensor(by_hand(word, extra ^ 2**31, dtype), dtype=torch.float64)
        assert (numbers - other).abs().max() > 3 * ROUNDING[dtype]  # the comparison detects it


# Any step at any time
# --------------------------------------------------------------------------------------------------

T = st.integers(0, 2**40)


@over_dtypes
@given(
    st.integers(0, 2**32),
    T,
    st.integers(0, 70),
    st.integers(1, 6),
    st.lists(st.tuples(T, st.integers(0, 9))),
)
@examples
def test_a_step_has_its_numbers_however_it_is_come_by(dtype, seed, t, size, steps, before):
    noise = seeded(seed)
    for other, some in before:
        noise.normal(other, some, dtype)
    together = noise.normal(t, size, dtype, steps)
    for i in reversed(range(steps)):
        assert torch.equal(together[i], noise.normal(t + i, size, dtype)[0])
        assert torch.equal(together[i], seeded(seed).normal(t + i, size, dtype)[0])


@pytest.mark.parametrize("pairs", [1, 1024])
def test_a_step_in_the_tail_has_its_numbers_however_it_is_come_by(monkeypatch, pairs):
    monkeypatch.setattr(module, "_TAIL", 2**31)  # every other pair takes more bits
    together, alone = seeded(3).normal(6, 2 * pairs, steps=5), seeded(3)
    for i in (3, 0, 4, 1, 2):
        assert torch.equal(together[i], alone.normal(6 + i, 2 * pairs)[0])
        assert torch.equal(together[i], in_parts(alone, 6 + i, 2 * pairs)[0])


def test_a_seed_is_a_stream():
    assert torch.equal(seeded(1).normal(0, 100), seeded(1).normal(0, 100))
    assert not torch.equal(seeded(1).normal(0, 100), seeded(2).normal(0, 100))
    assert not torch.equal(seeded(1).normal(0, 100), seeded(1).normal(1, 100))


@over_dtypes
@pytest.mark.parametrize(
    "sizes", [{"gradient": 9}, {"count": 2, "gradient": 7}, {"gradient": 40_000}, {}]
)
def test_ahead_has_the_numbers_of_every_step_in_any_order(dtype, sizes):
    total = sum(sizes.values())
    ahead, noise = StepNoise(seeded(4), sizes, dtype, torch.device("cpu")), seeded(4)
    assert ahead.size == total
    block = max(1, 2**15 // max(total, 1))
    for t in (
        0,
        1,
        2,
        block - 1,
        block,
        block + 1,
        3 * block,
        1,
        0,
        2**40,
        2**40 - 1,
        5,
    ):  # on, far on, and back
        expected = noise.normal(t, total, dtype)[0]
        parts = ahead.of(t)
        assert {name: part.shape for name, part in parts.items()} == {
            name: (n,) for name, n in sizes.items()
        }
        assert list(parts) == list(sizes)
        assert torch.equal(torch.cat([expected[:0], *parts.values()]), expected)


def test_a_run_that_goes_on_from_its_state_draws_what_it_would_have_drawn():
    first = StepNoise(seeded(5), {"gradient": 3}, torch.float32, torch.device("cpu"))
    whole = [first.of(t)["gradient"] for t in range(100)]
    second = StepNoise(seeded(6), {"gradient": 3}, torch.float32, torch.device("cpu"))
    second.set_state(first.state())
    assert all(torch.equal(second.of(t)["gradient"], whole[t]) for t in range(40, 100))


@over_dtypes
@pytest.mark.parametrize("sizes", [{"gradient": 3}, {"count": 2, "gradient": 40_000}])
def test_ahead_forgets_what_it_has_drawn_when_it_becomes_another(dtype, sizes):
    ahead, other = (StepNoise(seeded(seed), sizes, dtype, torch.device("cpu")) for seed in (5, 6))
    drawn = {t: ahead.of(t)["gradient"].clone() for t in (0, 1, 2)}
    rows = {t: other.of(t)["gradient"].clone() for t in (0, 1, 2, 3)}
    before = ahead.state()
    ahead.set_state(other.state())
    for t in (2, 3, 1, 0):
        assert torch.equal(ahead.of(t)["gradient"], rows[t])
        assert torch.equal(
            torch.cat(list(ahead.of(t).values())), seeded(6).normal(t, ahead.size, dtype)[0]
        )
    assert torch.equal(ahead.state(), other.state())
    ahead.set_state(before)  # and back
    assert all(torch.equal(ahead.of(t)["gradient"], row) for t, row in drawn.items())


@over_draws
def test_state_restores_the_stream(draw):
    noise = seeded(3)
    state = noise.state()
    assert state.dtype == torch.int64
    kept = state.clone()
    expected = [
        draw(noise, t, size, dtype) for t in SOME_T for size in (1, 9) for dtype in ROUNDING
    ]
    other = seeded(99)
    other.normal(2, 5)
    other.set_state(state)
    assert torch.equal(
        by_numpy(other, 3, 5), by_numpy(seeded(3), 3, 5)
    )  # the position of the other one
    numbers = [draw(other, t, size, dtype) for t in SOME_T for size in (1, 9) for dtype in ROUNDING]
    assert all(torch.equal(a, b) for a, b in zip(numbers, expected, strict=True))
    assert torch.equal(other.state(), noise.state())
    assert torch.equal(state, kept)  # drawing changes nothing


@over_draws
@pytest.mark.parametrize(
    "of", [lambda noise: noise, lambda noise: StepNoise(noise, {"all": 9}, torch.float32, "cpu")]
)
def test_a_state_is_a_copy(draw, of):
    """A state cannot change the noise that it was taken from, or that it was given to."""
    fresh, noise, other = seeded(3), seeded(3), seeded(4)
    expected = [draw(fresh, t, 9) for t in range(6)]
    assert torch.equal(draw(noise, 0, 9), expected[0])
    taken = of(noise).state()
    given = taken.clone()
    of(other).set_state(given)
    assert torch.equal(draw(other, 0, 9), expected[0])
    taken.zero_()
    given.zero_()
    for one in (noise, other):
        assert all(
            torch.equal(draw(one, t, 9), expected[t]) for t in (1, 2, 5, 4, 0)
        )  # in order, and out of order
        assert torch.equal(of(one).state(), fresh.key)
        assert fresh.key.all()


# Nothing twice
# --------------------------------------------------------------------------------------------------

FAULTS = {
    "t ignored": lambda key, t, size, blocks, stream: philox(key, 0, size, blocks, stream),
    "t wraps around": lambda key, t, size, blocks, stream: philox(
        key, t % 32, size, blocks, stream
    ),
    "key ignored": lambda key, t, size, blocks, stream: philox([0, 0], t, size, blocks, stream),
    "half of the key ignored": lambda key, t, size, blocks, stream: philox(
        [0, int(key[1]) % 2], t, size, blocks, stream
    ),
    "one stream for both": lambda key, t, size, blocks, stream: philox(key, t, size, blocks, 0),
    "stream beside stream": lambda key, t, size, blocks, stream: philox(
        key, t + stream, size, blocks, 0
    ),
    "steps overlap by a block": lambda key, t, size, blocks, stream: np.concatenate(
        [philox(key, t * max(blocks - 1, 1) + b, size, 1, stream) for b in range(blocks)]
    ),
    "steps a block apart": lambda key, t, size, blocks, stream: np.concatenate(
        [philox(key, t + b, size, 1, stream) for b in range(blocks)]
    ),
}
FAULTS_OF_SIZES = {
    "size ignored": lambda key, t, size, blocks, stream: philox(key, t, 0, blocks, stream),
    "size in pairs": lambda key, t, size, blocks, stream: philox(
        key, t, (size + 1) // 2, blocks, stream
    ),
    "size in blocks": lambda key, t, size, blocks, stream: philox(key, t, blocks, blocks, stream),
    "size beside stream": lambda key, t, size, blocks, stream: philox(
        key, t, 0, blocks, stream + size
    ),
    "size of the first stream only": lambda key, t, size, blocks, stream: philox(
        key, t, 0 if stream else size, blocks, stream
    ),
    "size of the second stream only": lambda key, t, size, blocks, stream: philox(
        key, t, size if stream else 0, blocks, stream
    ),
}


def plant(fault, monkeypatch):
    """Replace the words."""

    def of(self, t, steps, size, blocks):
        return np.stack([fault(self._key, t + s, size, blocks, self._stream) for s in range(steps)])

    monkeypatch.setattr(module._Words, "of", of)


def check_nothing_twice(draw, sizes, monkeypatch):
    """Assert that all words and all numbers differ, over several runs, streams and sizes."""
    seen, of = [], module._Words.of

    def recorded(words):
        seen.append(unsigned(words).ravel())
        return words

    with monkeypatch.context() as patch:
        patch.setattr(module._Words, "of", lambda *given: recorded(of(*given)))
        numbers = [
            draw(noise, t, size, torch.float64, 4).ravel()
            for noise in map(seeded, range(4))
            for t in range(0, 40, 4)
            for size in sizes
        ]
    every = np.concatenate(seen)
    assert len(every) >= 4 * 40 * 1.5 * sum(
        (size + 1) // 2 for size in sizes
    )  # a word and a half for each pair
    assert len(np.unique(every)) == len(every)
    assert len(torch.cat(numbers).unique()) == 4 * 40 * sum(sizes)


@over_draws
@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 16, 17, 65, 1001])
def test_no_word_and_no_number_is_used_twice(draw, size, monkeypatch):
    check_nothing_twice(draw, [size], monkeypatch)


@over_draws
@pytest.mark.parametrize(
    "sizes", [[1, 2, 7, 8, 9, 16, 17], [8, 1001, 1002]], ids=["neighbours", "far apart"]
)
def test_two_sizes_under_one_key_share_nothing(draw, sizes, monkeypatch):
    check_nothing_twice(draw, sizes, monkeypatch)


@over_draws
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_used_twice_is_seen(draw, fault, monkeypatch):
    plant(philox, monkeypatch)
    check_nothing_twice(draw, [65], monkeypatch)
    plant(FAULTS[fault], monkeypatch)
    with pytest.raises(AssertionError):
        check_nothing_twice(draw, [65], monkeypatch)


@over_draws
@pytest.mark.parametrize("fault", FAULTS_OF_SIZES)
def test_what_two_sizes_share_is_seen(draw, fault, monkeypatch):
    plant(FAULTS_OF_SIZES[fault], monkeypatch)
    for size in (64, 65, 66):
        check_nothing_twice(draw, [size], monkeypatch)  # not detected here
    with pytest.raises(AssertionError):
        check_nothing_twice(draw, [64, 65, 66], monkeypatch)


@over_dtypes
def test_sizes_that_take_turns_do_not_go_on_where_the_other_one_stopped(dtype):
    noise = seeded(8)
    for t in range(12):
        for size in ((7,), (8,), (7, 8), (8, 7))[
            t % 4
        ]:  # one block each, so that the counters are consecutive
            assert torch.equal(noise.normal(t, size, dtype), seeded(8).normal(t, size, dtype))


def test_steps_of_any_size_follow_each_other_without_overlap(monkeypatch):
    """Step t has the counters t·b + 1 … (t + 1)·b, and b blocks are enough for its pairs."""
    for size in range(1, 70):
        calls = []
        with monkeypatch.context() as patch:
            patch.setattr(
                module._Words,
                "of",
                lambda self, t, steps, size, blocks, calls=calls: (
                    calls.append((self._stream, t, steps, size, blocks))
                    or np.full((steps, 4 * blocks), 2**40, np.uint64)
                ),
            )
            seeded(0).normal(3, size, torch.float64, 2)
        (zero, one) = calls
        half = (size + 1) // 2
        assert zero == (0, 3, 2, size, -(-half // 4))
        assert one == (1, 3, 2, size, -(-half // 8))


# The tail
# --------------------------------------------------------------------------------------------------

END = 2.0**-24  # of the unit interval: the resolution of float32 uniforms
FIRST = math.sqrt(48 * math.log(2))  # the radius at which the last END begins, 5.768


@pytest.fixture
def feed(monkeypatch):
    """Replace the bits of Philox: for each step and pair, 64 bits of u, where 0 means 2⁻⁶⁴, and 32
    bits of the angle.
    """

    def prepare(u, turns):
        u, turns = (
            np.atleast_2d(np.asarray(u, np.uint64)),
            np.atleast_2d(np.asarray(turns, np.uint64)),
        )
        room = ((0, 0), (0, -u.shape[1] % 8))
        words = np.pad(u >> np.uint64(32) | turns << np.uint64(32), room)
        extra = np.pad(u.astype("<u4"), room).view(np.uint64)  # the lower 32 bits
        extra = np.pad(extra, ((0, 0), (0, -extra.shape[1] % 4)))
        plant(
            lambda key, t, size, blocks, stream: (words, extra)[stream][t, : 4 * blocks],
            monkeypatch,
        )
        monkeypatch.setattr(
            module._Words,
            "of",
            lambda self, t, steps, size, blocks: (words, extra)[self._stream][
                t : t + steps, : 4 * blocks
            ],
        )

    return prepare


class TwentyFourBits(Noise):
    """The planted fault: Box–Muller on 24-bit uniforms, as in `torch.randn`."""

    def normal(self, t, size, dtype=torch.float32, steps=1):
        half = (size + 1) // 2
        words = self._words[0].of(t, steps, size, -(-half // 4))[:, :half]
        u = torch.from_numpy(((words & 0xFFFFFFFF) >> 8).astype(np.float32)) + 1
        angle = torch.from_numpy((words >> 40).astype(np.float32)) * (math.tau * END)
        radius = (-2 * (u * END).log()).sqrt()
        return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :size].to(dtype)


def check_tail(draw, noise, dtype, size, feed):
    """Test the distribution beyond 5.77 standard deviations, given that the radius lies there."""
    pairs, random = 400_000, np.random.default_rng(1)
    shape = (2 * pairs // size, size // 2)
    feed(
        random.integers(0, 2**40, shape, dtype=np.uint64),
        random.integers(0, 2**32, shape, dtype=np.uint64),
    )
    z = draw(noise, 0, size, dtype, shape[0]).double().numpy()
    r = np.hypot(*halves(z))
    # r² − FIRST² is exponential with mean 2, as for every radius
    assert stats.kstest(r**2 - FIRST**2, "expon", args=(0, 2)).pvalue > CHANCE
    for rho in (6.0, 6.5, 7.0, 7.5):
        expected = pairs * math.exp(-(rho**2) / 2) / END
        assert abs(np.sum(r > rho) - expected) < 4.5 * math.sqrt(expected), rho
    for x in (6.0, 6.5, 7.0):  # a number beyond 6 has a radius beyond 6, so this counts all of them
        expected = 2 * pairs * 2 * stats.norm.sf(x) / END
        assert abs(np.sum(np.abs(z) > x) - expected) < 4.5 * math.sqrt(expected), x
        assert abs(np.sum(z > x) - expected / 2) < 4.5 * math.sqrt(expected / 2), x


@over_draws
@over_dtypes
@pytest.mark.parametrize("size", [1000, 100_000])
def test_beyond_six_standard_deviations_the_rates_are_right(draw, dtype, size, feed):
    check_tail(draw, seeded(0), dtype, size, feed)


def test_uniforms_of_24_bits_would_fail(feed):
    noise = TwentyFourBits(np.random.SeedSequence(0))
    assert (
        stats.kstest(noise.normal(0, MANY)[0].numpy(), "norm").pvalue > CHANCE
    )  # not detected here
    with pytest.raises(AssertionError):
        check_tail(by_numpy, noise, torch.float32, 1000, feed)
    assert (
        float(noise.normal(0, 1000, steps=800).abs().max()) < 5.77
    )  # on the words that check_tail has fed


def add_half(self, u, t, size):
    u += 0.5


@pytest.mark.parametrize(
    ("draw", "name", "fault"),
    [
        (by_numpy, "Noise._refine", add_half),  # 32 bits: ends at √(66 ln 2) = 6.76
        (by_numpy, "_TAIL", 1),  # refined too late: 6.66, and a gap before it
        (by_numpy, "Noise._refinement", lambda *_: 0.5),
    ],
)
def test_uniforms_of_32_bits_would_fail(draw, name, fault, feed, monkeypatch):
    owner, _, name = name.rpartition(".")
    monkeypatch.setattr(getattr(module, owner) if owner else module, name, fault)
    assert (
        stats.kstest(draw(seeded(0), 0, MANY)[0].numpy(), "norm").pvalue > CHANCE
    )  # not detected here
    with pytest.raises(AssertionError):
        check_tail(draw, seeded(0), torch.float32, 1000, feed)


def radii(draw, u, dtype, feed):
    """Return the radius for each u, given as 64 bits: the first numbers of pairs at angle 0.  #
    [pair] or [step, pair]
    """
    u = np.asarray(u, np.uint64)
    feed(u, np.zeros_like(u))
    steps, pairs = np.atleast_2d(u).shape
    numbers = draw(seeded(0), 0, 2 * pairs, dtype, steps)
    assert not numbers[:, pairs:].any()  # sin 0
    return numbers[:, :pairs].numpy().reshape(u.shape)


def beyond(draw, rho, dtype, feed):
    """Return how many of the 2⁶⁴ values of u give a radius larger than each rho, by bisection:
    radii decrease with u.
    """
    low, high = [0] * len(rho), [2**64] * len(rho)  # all below `low` do, none from `high` on
    for _ in range(65):
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        larger = radii(draw, [min(m, 2**64 - 1) for m in middle], dtype, feed) > rho
        for i, (m, yes) in enumerate(zip(middle, larger, strict=True)):
            if low[i] < high[i]:
                low[i], high[i] = (m + 1, high[i]) if yes else (low[i], m)
    return low


def share(rho):
    """Return exp(−ρ²/2) in units of 2⁻⁶⁴, to forty digits."""
    with localcontext(prec=40):
        return (-(Decimal(float(rho)) ** 2) / 2).exp() * 2**64


SWITCH = math.sqrt(40 * math.log(2))  # the radius at which u takes more bits, 5.266
SMALL = math.sqrt(
    -2 * math.log1p(-(2.0**-8))
)  # the radius at which it is taken from 1 − u in float32, 0.0885


@over_draws
@over_dtypes
def test_the_share_of_words_beyond_a_radius_is_that_of_the_normal(draw, dtype, feed):
    """P(r > ρ) is correct up to 2⁻⁶⁴ and the rounding of r; below the switch, in float32, up to
    2⁻³² and rounding.
    """
    near = np.array(
        [-1e-1, -1e-2, -1e-3, -1e-4, -2e-5, -1e-5, 0, 1e-5, 2e-5, 1e-4, 1e-3, 1e-2, 1e-1]
    )
    small = [2e-5, 1e-4, 1e-3, 0.01, *(SMALL + near[3:-1])]
    rho = np.array(
        [*small, 1.0, 3.0, 5.0, *(SWITCH + near), 6.0, 7.0, 8.0, 8.5, 9.0, 9.3, 9.4], str(dtype)[6:]
    )
    unit = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}[dtype]
    for radius, numbers in zip(rho.tolist(), beyond(draw, rho, dtype, feed), strict=True):
        expected = share(radius)
        # r to 1.5 units, and u to 1: its logarithm is at least that wrong, unless it is taken from
        # 1 − u
        of_u = 0 if dtype == torch.float32 and radius < SMALL - 1e-6 else 1
        rounding = float(expected) * unit * (1.5 * radius**2 + of_u)
        bits = 2**32 if dtype == torch.float32 and radius < SWITCH else 1
        assert abs(float(numbers - expected)) <= bits + rounding, radius


@over_draws
@over_dtypes
def test_radii_fall_without_a_gap_across_the_switch(draw, dtype, feed):
    switch = 2**44
    u = [
        switch + k
        for k in (-(2**33), -(2**32) - 1, -(2**32), -(2**31), -2, -1, 0, 1, 2**32 - 1, 2**32, 2**33)
    ]
    numbers = radii(draw, u, dtype, feed).astype(float)
    expected = [math.sqrt(2 * (64 * math.log(2) - math.log(k + 1))) for k in u]
    assert (np.diff(numbers) <= 0).all()
    # inside, float32 leaves out the last 32 bits: du = 2⁻³² moves r by du/(u·r) = 2⁻¹²/5.27
    np.testing.assert_allclose(
        numbers[:6], expected[:6], rtol={torch.float32: 2e-7, torch.float64: 4e-16}[dtype]
    )
    np.testing.assert_allclose(
        numbers, expected, rtol=0, atol={torch.float32: 4.7e-5, torch.float64: 2e-15}[dtype]
    )
    assert numbers[5] == pytest.approx(SWITCH, rel=2e-7)


@over_draws
@over_dtypes
def test_the_largest_radii(draw, dtype, feed):
    """At u = k·2⁻⁶⁴, −ln u = 64 ln 2 − ln k: the largest number is 9.42; the next ones differ."""
    k = np.arange(1, 1001)
    numbers = radii(draw, k - 1, dtype, feed)
    expected = np.sqrt(2 * (64 * math.log(2) - np.log(k)))
    np.testing.assert_allclose(
        numbers, expected, rtol={torch.float32: 2e-7, torch.float64: 4e-16}[dtype]
    )
    assert numbers[0] == pytest.approx(math.sqrt(2 * 64 * math.log(2)), rel=2e-7)
    assert round(float(numbers[0]), 2) == 9.42
    assert len(np.unique(numbers)) == 1000


@over_draws
@pytest.mark.parametrize(("dtype", "words"), [(torch.float32, 0), (torch.float64, 2**10 + 1)])
def test_how_often_there_is_no_noise_at_all(draw, dtype, words, feed):
    """If u rounds to 1, both numbers of the pair are 0: never in float32, once in 2⁵⁴ pairs in
    float64.
    """
    (some,) = beyond(draw, np.zeros(1), dtype, feed)
    assert 2**64 - some == words


def check_small_radii(draw, feed):
    """In float32, for all 2²⁴ words whose u is computed from 1 − u: r > 0, decreasing, and exact up
    to rounding.
    """
    last = np.float32(0)
    for first in range(
        2**32 - 2**20, FLAT - 1, -(2**20)
    ):  # from the end on, where u is nearest to 1
        low = np.arange(first, first + 2**20, dtype=np.uint64)
        numbers = radii(draw, low << np.uint64(32), torch.float32, feed)
        assert numbers.min() > 0
        assert numbers[-1] == 2.0**-16 or last  # 1.5e-5, the smallest: u = 1 − 2⁻³³
        falls = -np.diff(numbers, append=last)
        assert (
            (falls >= 0).all() if last else (falls > 0).all()
        )  # the first that float32 distinguishes
        exact = np.sqrt(-2 * np.log1p((low.astype(float) + 0.5 - 2.0**32) * 2.0**-32))
        assert np.abs(numbers / exact - 1).max() < 1.5 * 2.0**-23
        last = numbers[0]


@over_draws
def test_every_small_radius(draw, feed):
    check_small_radii(draw, feed)


@over_draws
@pytest.mark.parametrize("flat", [2**32, 2**32 - 2**16], ids=["never", "too late"])
def test_small_radii_by_the_logarithm_of_u_would_fail(draw, flat, feed, monkeypatch):
    monkeypatch.setattr(module, "_FLAT", flat)
    assert (
        stats.kstest(draw(seeded(0), 0, MANY)[0].numpy(), "norm").pvalue > CHANCE
    )  # not detected here
    with pytest.raises(AssertionError):
        check_small_radii(draw, feed)


@over_draws
def test_radii_fall_without_a_gap_to_where_they_are_small(draw, feed):
    low = np.arange(FLAT - 2**16, FLAT + 2**16, dtype=np.uint64)
    numbers = radii(draw, low << np.uint64(32), torch.float32, feed).astype(float)
    grain = 2.0**-24 / SMALL  # the spacing in r of float32 numbers just below 1
    assert (np.diff(numbers) <= 0).all()
    assert -np.diff(numbers).min() < 1.1 * grain
    exact = np.sqrt(-2 * np.log((low.astype(float) + 0.5) * 2.0**-32))
    assert np.abs(numbers - exact)[: 2**16].max() < 0.55 * grain
    assert np.abs(numbers - exact)[2**16 :].max() < 1.5 * 2.0**-23 * SMALL
    assert numbers[2**16] == pytest.approx(SMALL, rel=2e-7)


@over_draws
@over_dtypes
def test_no_word_gives_an_infinite_number(draw, dtype, feed):
    ends = [
        0,
        1,
        2**32 - 1,
        2**32,
        2**44 - 1,
        2**44,
        2**63 - 1,
        2**63,
        2**64 - 2**32,
        2**64 - 2,
        2**64 - 1,
    ]
    turns = [0, 1, 2**30, 2**31 - 1, 2**31, 2**31 + 1, 3 * 2**30, 2**32 - 1]
    u, angle = np.array(list(itertools.product(ends, turns)), np.uint64).T
    feed(u, angle)
    for size in (2 * len(u), 2 * len(u) - 1):
        numbers = draw(seeded(0), 0, size, dtype)
        assert numbers.isfinite().all()
        assert float(numbers.abs().max()) == pytest.approx(math.sqrt(128 * math.log(2)), rel=2e-7)


def test_randn_of_torch_ends_at_5_77():
    """The reason for our own noise: torch's float32 normals are Box–Muller on multiples of 2⁻²⁴."""
    uniforms = torch.rand(16_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal((uniforms * 2**24).round() / 2**24, uniforms)
    normals = torch.randn(16_000, generator=torch.Generator().manual_seed(0)).view(-1, 2, 8)
    u, v = (
        uniforms.double().view(-1, 2, 8).unbind(dim=1)
    )  # sixteen at a time: eight radii, eight angles
    radius, angle = (-2 * torch.log1p(-u)).sqrt(), 2 * math.pi * v
    torch.testing.assert_close(normals[:, 0].double(), radius * angle.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(normals[:, 1].double(), radius * angle.sin(), rtol=0, atol=1e-5)
    assert math.sqrt(-2 * math.log1p(-(1 - END))) == pytest.approx(FIRST)
    assert round(FIRST, 2) == 5.77
