"""Noise: how far it is from the real Box–Muller transform, its law, and that no word is used twice.

Prepared words take the place of those of AES, so that both tails and the origin can be reached.
"""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from mpmath import mpf
from scipy import stats
from scipy.special import ndtr

from evenclip.mechanism import noise as module
from evenclip.mechanism.grid import Grid, published
from evenclip.mechanism.noise import BETA, BLOCK, LAMBDA, RATIO, C, Noise, NormalStream
from evenclip.mechanism.words import Words, derive

KEY = bytes(range(32))
CPU = torch.device("cpu")
SHORT = 2**52  # a word of 63 bits below this is extended
DIGITS = 240  # bits


class Prepared:
    """A stream of one draw whose pairs have given words."""

    def __init__(self, radius, angle, further=None):
        """Take words.  radius, angle, further: [pair]; `radius` has 63 bits, the others 64."""
        radius, angle = (np.asarray(x, dtype=np.uint64) for x in (radius, angle))
        self._further = np.zeros(len(radius)) if further is None else further
        self._all = np.concatenate([radius << np.uint64(1), angle])

    def span(self, first, count):
        assert (first, count) == (0, len(self._all))
        return self._all

    def at(self, counters):
        assert not counters[:, 0].any()  # draw 0
        return np.asarray(self._further, dtype=np.uint64)[counters[:, 1].astype(np.int64)]


def pairs_of(radius, angle, further=None):
    """Return the pairs that the package computes from these words.  # [pair], [pair]"""
    assert len(radius) <= BLOCK // 2
    stream = NormalStream(KEY, 2 * len(radius))
    stream._words = stream._further = Prepared(radius, angle, further)
    drawn = stream._values(
        *stream._words.span(0, 2 * len(radius)).reshape(2, 1, -1), index=0, start=0
    )[0]
    return drawn[: len(radius)], drawn[len(radius) :]


def real_pair(radius, angle, further, up):
    """Return r, cos θ and sin θ at one end of the cell of real numbers that the words stand for."""
    bits, word = (127, (radius << 64) + further) if radius < SHORT else (63, radius)
    u = mpf(word + up) / mpf(2) ** bits
    signed = angle - 2**64 if angle >= 2**63 else angle
    theta = (mpf(signed) + up) * mpmath.pi / 2**63
    return mpmath.sqrt(-2 * mpmath.log(u)), mpmath.cos(theta), mpmath.sin(theta)


def worst_share(radius, angle, further):
    """Return the largest error of any pair, as a share of its bound c(|cos θ|/r + r)."""
    drawn = zip(*(z.tolist() for z in pairs_of(radius, angle, further)), strict=True)
    worst = 0.0
    with mpmath.workprec(DIGITS):
        for words, pair in zip(zip(radius, angle, further, strict=True), drawn, strict=True):
            for up in (0, 1):
                r, *directions = real_pair(*words, up)
                if r == 0:  # u = 1 itself, where the bound is infinite
                    continue
                for z, direction in zip(pair, directions, strict=True):
                    bound = C * (abs(direction) / r + r)
                    worst = max(worst, float(abs(z - r * direction) / bound))
    return worst


# How far a pair is from the real one
# --------------------------------------------------------------------------------------------------


def random_words(n, *limits):
    """Return n words for each number of bits, from a fixed key; half of them have fewer bits."""
    drawn = Words(derive(KEY, "test")).span(0, 2 * n * len(limits)).reshape(len(limits), 2, n)
    return [
        [
            w >> (64 - bits) >> fewer % bits * (i % 2)
            for i, (w, fewer) in enumerate(zip(*both, strict=True))
        ]
        for bits, both in zip(limits, drawn.tolist(), strict=True)
    ]


def test_a_pair_is_within_c_of_the_real_one_for_random_words():
    """In 240 bits, at both ends of the cell that the words stand for; many words are short."""
    words = [w for w in zip(*random_words(1500, 63, 64, 64), strict=True) if in_event(w[0], w[2])]
    radius, angle, further = (list(column) for column in zip(*words, strict=True))
    assert any(w < SHORT for w in radius)
    assert any(w >= SHORT for w in radius)
    assert worst_share(radius, angle, further) < 0.5  # measured: 0.2


def in_event(radius, further):
    """Return whether u ≥ 2⁻⁷⁵."""
    return radius > 0 or further >= 2**52


QUARTERS = [(k * 2**62 + off) % 2**64 for k in range(4) for off in (-(2**9), -1, 0, 1, 2**9, 2**20)]
EIGHTHS = [k * 2**61 + off for k in (1, 3, 5, 7) for off in (-1, 0, 1)]
HALVES = [2**10 + 1, 2**53 + 1, 2**54 + 2, 2**62 + 2**9, 2**62 + 2**9 + 1, 2**62 - 2**8]
EDGE_WORDS = {
    "the smallest u": (range(8), [0, 1, 2**51, 2**52, 2**63, 2**64 - 1]),
    "the switch to short words": (range(SHORT - 3, SHORT + 4), [0, 2**63, 2**64 - 1]),
    "words that do not fit 53 bits": (
        [2**53 - 1, 2**53 + 1, 2**60 + 2**7, *HALVES], [0],
    ),
    "u near 1": (
        [2**63 - 1, 2**63 - 2, *(2**63 - 2**i - j for i in range(1, 60, 3) for j in (0, 1))], [0],
    ),
    "ties": ([2**62 + 2**8 * i + 2**8 - 1 for i in range(9)], [0]),
}  # fmt: skip


@pytest.mark.parametrize("edge", EDGE_WORDS)
def test_a_pair_is_within_c_of_the_real_one_at_the_edges(edge):
    """Also for angles near multiples of π/2 and π/4, where one of the two is near 0."""
    words = list(itertools.product(*EDGE_WORDS[edge], QUARTERS + EIGHTHS + HALVES[:3]))
    words = [(w, f, a) for w, f, a in words if in_event(w, f)]
    radius, further, angle = (list(column) for column in zip(*words, strict=True))
    assert worst_share(radius, angle, further) < 0.5


def test_the_bound_is_not_met_without_the_further_words(monkeypatch):
    """The comparison sees a tail of 63 bits."""
    monkeypatch.setattr(module, "_SHORT", np.uint64(0))
    words = [2**40, 2**45], [2**61] * 2, [2**63] * 2
    assert worst_share(*words) > 1


def test_no_words_give_an_infinite_value_or_none():
    """As u is never 0, and 1 at most; the largest radius is √(256 ln 2) = 13.3."""
    words = list(itertools.product([0, 1, SHORT - 1, SHORT, 2**63 - 1], QUARTERS, [0, 2**64 - 1]))
    radius, angle, further = (list(column) for column in zip(*words, strict=True))
    first, second = pairs_of(radius, angle, further)
    r = torch.hypot(first, second)
    assert r.isfinite().all()
    assert r.max() == pytest.approx(math.sqrt(256 * math.log(2)), rel=1e-12)
    assert r.min() == 0


def test_pairs_outside_of_the_event_have_mass_beta():
    """They have u < 2⁻⁷⁵: the word of 63 bits is 0, and 12 bits of the further one."""
    largest = math.sqrt(150 * math.log(2))  # the radius at u = 2⁻⁷⁵
    within, beyond = pairs_of([0, 0], [0, 0], [2**52 + 2**10, 2**52 - 2**10])[0].tolist()
    assert within < largest < beyond
    assert BETA == 2.0 ** -(63 + 12)


def test_the_constants_of_the_bound():
    assert LAMBDA == 8 * RATIO**2 * C == 2.0**-37
    for std in np.geomspace(1.0, 16.0, 999):
        grid = Grid.of(float(std), 1.0, 1, 0.0)
        assert 8 <= grid.std / grid.coarse < RATIO


# The probability of cells
# --------------------------------------------------------------------------------------------------

SIGMA = 16 * (1 - 2.0**-30)  # σ'/H just below 16: the smallest cells, and the largest λ
GRID = Grid(fine=2.0**-16, coarse=1.0, std=SIGMA)
RAYS = 150
CELLS = {  # fractions of H by which the sums are off the grid -> the cell's lower corner
    "around the origin": ((0.0, 0.0), (0, 0)),
    "corner at the origin": ((0.5, 0.5), (0, 0)),
    "edge through the origin": ((0.5, 0.0), (0, 0)),
    "other corner at the origin": ((0.5, 0.5), (-1, -1)),
    "near the origin": ((0.25, 0.125), (1, -1)),
    "one standard deviation": ((0.0, 0.3125), (16, 0)),
    "six standard deviations": ((0.1875, 0.0), (-96, 3)),
    "the corner of the tail": ((0.0, 0.25), (100, 100)),
}


def first_change(above, start):
    """Return V for each ray: how many of the 2¹²⁷ words have `above(V) == start`, from 0 on."""
    high, low = (np.zeros(len(start), dtype=np.uint64) for _ in range(2))  # 63 and 64 bits
    unchanged = above(high, low) == start
    for bit in range(126, -1, -1):
        more = [high.copy(), low.copy()]
        more[bit < 64] |= np.uint64(2 ** (bit % 64))
        keep = above(*more) == start
        high, low = (np.where(keep, b, a) for a, b in zip((high, low), more, strict=True))
    counts = [(int(h) << 64) + int(w) + 1 for h, w in zip(high, low, strict=True)]
    return [count if first else 0 for count, first in zip(counts, unchanged, strict=True)]


def real_change(edge, direction):
    """Return the same for the real transform, as a share: where r·direction crosses `edge`."""
    if edge == 0 or (edge > 0) != (direction > 0):
        return mpf(1)
    return mpmath.exp(-((edge / direction) ** 2) / 2)


def bounds(changes, positive):
    """Return the interval of u in which a coordinate lies between two edges, given both changes."""
    lower, upper = changes
    return (upper, lower) if positive else (lower, upper)


@pytest.mark.parametrize("cell", CELLS)
def test_the_probability_of_a_cell_is_within_lambda_of_the_real_one(cell):
    """Along rays of fixed θ, the words at which the published numbers change are found by
    bisection, and compared with the real ones in 240 bits. The sum of all differences, each
    without its sign, over the sum of the real probabilities, bounds |ln p̃/p|.
    """
    shift, corner = CELLS[cell]
    totals = torch.tensor(shift, dtype=torch.float64)
    # edges in units of σ': published is m or more if k·h + Z ≥ (m − 1/2)·H
    edges = [
        [(m + i - 0.5 - s) / mpf(SIGMA) for i in (0, 1)] for s, m in zip(shift, corner, strict=True)
    ]
    angles = angles_of(*([float(e) for e in pair] for pair in edges))
    with mpmath.workprec(DIGITS):
        off, mass = mpf(0), mpf(0)
        thetas = [mpf(a - 2**64 if a >= 2**63 else a) * mpmath.pi / 2**63 for a in angles]
        directions = [(mpmath.cos(t), mpmath.sin(t)) for t in thetas]
        computed = [
            [computed_change(angles, totals, axis, corner[axis] + i, directions) for i in (0, 1)]
            for axis in (0, 1)
        ]
        for ray, pair in enumerate(directions):
            real, ours = ([mpf(BETA)], [mpf(1)]), ([mpf(BETA)], [mpf(1)])
            for axis, direction in enumerate(pair):
                changes = [real_change(e, direction) for e in edges[axis]]
                found = [mpf(computed[axis][i][ray]) / mpf(2) ** 127 for i in (0, 1)]
                for (lows, highs), both in ((real, changes), (ours, found)):
                    low, high = bounds(both, direction > 0)
                    lows.append(low)
                    highs.append(high)
            p, p_ours = (max(min(highs) - max(lows), mpf(0)) for lows, highs in (real, ours))
            off, mass = off + abs(p_ours - p), mass + p
        assert mass > 0
        share = float(off / mass) / LAMBDA
    assert share < 0.02  # measured: 0.008 at most


def angles_of(x, y):
    """Return words for angles in the middle of equal parts of those that the cell lies at."""
    (x0, x1), (y0, y1) = x, y
    if x0 <= 0 <= x1 and y0 <= 0 <= y1:  # also where the origin is a corner
        low, high = 0.0, 2.0
    else:
        corners = [math.atan2(y, x) / math.pi for x in (x0, x1) for y in (y0, y1)]
        if max(corners) - min(corners) > 1:
            corners = [c % 2 for c in corners]
        low, high = min(corners), max(corners)
    middles = low + (np.arange(RAYS) + 0.437) / RAYS * (high - low)
    return [int(m * 2**63) % 2**64 for m in middles]


def computed_change(angles, totals, axis, edge, directions):
    """Return for each ray how many words u < V publish a number on the same side of an edge."""
    angle = np.array(angles, dtype=np.uint64)
    start = np.array([direction[axis] > 0 for direction in directions])
    total = totals[axis].expand(len(angles))

    def above(high, low):
        numbers = published(total, pairs_of(high, angle, low)[axis], GRID)
        return (numbers >= edge).numpy()

    return first_change(above, start)


# A sampler with few words, all of them
# --------------------------------------------------------------------------------------------------

BITS, EXTENSION, THRESHOLD, ANGLES = 8, 7, 2**7, 2**9
SCALED_C, SCALED_RATIO = 2.0**-7, 2.0  # errors: half of 2⁻⁷ of u, and π/2⁹
SCALED_LAMBDA = 8 * SCALED_RATIO**2 * SCALED_C


def few_words(threshold):
    """Return every u of a sampler whose words below `threshold` are extended, and its mass."""
    long = np.arange(threshold, 2**BITS) + 0.5
    short = np.arange(threshold * 2**EXTENSION) + 0.5
    u = np.concatenate([long * 2.0**-BITS, short * 2.0 ** -(BITS + EXTENSION)])
    mass = np.repeat([2.0**-BITS, 2.0 ** -(BITS + EXTENSION)], [len(long), len(short)])
    return u, mass


def scaled_shares(shift, threshold):
    """Return |ln p̃/p| ÷ λ of every cell within the event, each at its lower corner.  # [cell]"""
    u, mass = few_words(threshold)
    angle = np.arange(-ANGLES / 2, ANGLES / 2) + 0.5
    us, angles = (torch.from_numpy(x).reshape(-1) for x in np.meshgrid(u, angle * (2**64 / ANGLES)))
    z = module.box_muller(us, angles).reshape(2, -1)
    total, half = torch.tensor(shift, dtype=torch.float64).view(2, 1), 12
    numbers = published(total.expand_as(z), z, Grid(2.0**-16, 1.0, SCALED_RATIO)).long() + half
    size = 2 * half + 1
    masses = np.tile(mass / ANGLES, ANGLES)
    drawn = np.bincount((numbers[0] * size + numbers[1]).numpy(), masses, size**2)
    edges = [(np.arange(-half, half + 2) - 0.5 - s) / SCALED_RATIO for s in shift]
    real = np.outer(*(np.diff(ndtr(edge)) for edge in edges)).ravel()
    corners = [np.maximum(abs(edge[1:]), abs(edge[:-1])) for edge in edges]
    largest = 2.0 ** -(BITS + EXTENSION) * THRESHOLD  # u has its full precision above this
    within = np.hypot.outer(*corners).ravel() ** 2 < -2 * math.log(largest)
    assert within.sum() > 80
    return abs(np.log(drawn[within] / real[within])) / SCALED_LAMBDA


SHIFTS = [(0.0, 0.0), (0.5, 0.5), (0.25, 0.5)]


@pytest.mark.parametrize("shift", SHIFTS)
def test_every_cell_of_a_small_sampler_is_within_its_lambda(shift):
    """Far within, because the errors of many words cancel in a cell and λ adds them up."""
    assert scaled_shares(shift, THRESHOLD).max() < 0.05


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_small_sampler_without_further_words_is_not(shift):
    """With u on a fixed grid: in the tail pairs lie on circles that are wider apart."""
    with np.errstate(divide="ignore"):
        assert scaled_shares(shift, 0).max() > 0.1


# Which words
# --------------------------------------------------------------------------------------------------

SIZES = [1, 2, 7, 4096, 2**13, 2**13 + 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3]
INDICES = [0, 1, 5, 1000, 2**40]


def by_hand(key, size, index, i):
    """Return value i of draw `index`, from the words that it is documented to have."""
    b, place = divmod(i, BLOCK)
    pairs = (min(BLOCK, size - b * BLOCK) + 1) // 2
    pair, sine = place % pairs, place >= pairs
    first = 2 * ((size + 1) // 2 * index + b * BLOCK // 2)
    words = Words(derive(key, "words"))
    radius = int(words.span(first + pair, 1)[0]) >> 1
    angle = int(words.span(first + pairs + pair, 1)[0])
    counter = np.array([[index, b * BLOCK // 2 + pair]], dtype=np.uint64)
    further = int(Words(derive(key, "further")).at(counter)[0])
    with mpmath.workprec(DIGITS):
        r, cos, sin = real_pair(radius, angle, further, mpf(1) / 2)
        return float(r * (sin if sine else cos))


def some_places(size, index):
    """Return a few places of a stream, and those of short words in each of its blocks."""
    places = {0, size // 2, size - 1}
    for start in range(0, size, BLOCK):
        pairs = (min(BLOCK, size - start) + 1) // 2
        first = 2 * ((size + 1) // 2) * index + start
        radius = Words(derive(KEY, "words")).span(first, pairs) >> np.uint64(1)
        for j in np.flatnonzero(radius < SHORT)[:3].tolist():
            places |= {start + j, min(start + j + pairs, size - 1)}
    return sorted(places)


@pytest.mark.parametrize("size", SIZES)
def test_a_value_is_a_function_of_its_key_draw_and_place(size):
    stream, shorts = NormalStream(KEY, size), 0
    for index in INDICES:
        drawn = stream.of(index)[0:size]
        assert drawn.shape == (size,)
        assert drawn.dtype == torch.float64
        places = some_places(size, index)
        shorts += len(places) > 3
        for i in places:
            assert float(drawn[i]) == pytest.approx(by_hand(KEY, size, index, i), rel=0, abs=1e-13)
    assert shorts or size < 4096


@pytest.mark.parametrize("size", SIZES)
def test_a_draw_has_its_values_in_any_order_of_draws(size):
    one = NormalStream(KEY, size)
    expected = {index: one.of(index)[0:size].clone() for index in (*INDICES, 2, 3)}
    for order in ((3, 2**40, 2, 5, 0, 1, 1000), (1000, 0, 1, 2, 3, 5, 2**40)):
        other = NormalStream(KEY, size)
        for index in order:
            assert torch.equal(other.of(index)[0:size], expected[index])
    assert len({float(values[0]) for values in expected.values()}) == len(expected)


def test_parts_of_a_draw_are_those_of_the_whole():
    """Of one process or of several, across blocks and within them."""
    size = 2 * BLOCK + 3
    drawn = NormalStream(KEY, size).of(7)
    whole = drawn[0:size]
    for first, end in ((0, 1), (5, 9), (BLOCK - 2, BLOCK + 2), (BLOCK, size), (size - 1, size)):
        assert torch.equal(drawn[first:end], whole[first:end])
    assert drawn[4:4].shape == (0,)


def test_releases_of_other_names_keys_and_sizes_have_other_noise():
    """The radii differ, and each is computed from one word."""
    streams = [
        (KEY, {"gradient": 10}), (KEY, {"count": 10}), (KEY, {"gradient": 8}),
        (derive(KEY, "other"), {"gradient": 10}),
    ]  # fmt: skip
    drawn = [Noise(key, sizes, CPU).of(0).popitem()[1] for key, sizes in streams]
    radii = [torch.hypot(*values[0:10].view(2, -1)).float() for values in drawn]
    assert len(torch.cat(radii).unique()) == 19


def test_every_name_has_its_size():
    sizes = {"count": 2, "gradient": 40_000}
    drawn = Noise(KEY, sizes, CPU).of(0)
    assert {name: len(values[0 : 2**20]) for name, values in drawn.items()} == sizes


class Counted(Words):
    """Words that remember which of them were drawn."""

    spans: list
    counters: list

    def span(self, first, count):
        self.spans.append((first, first + count))
        return super().span(first, count)

    def at(self, counters):
        self.counters.extend(map(tuple, counters.tolist()))
        return super().at(counters)


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(module, "Words", Counted)
    for name in ("spans", "counters"):
        monkeypatch.setattr(Counted, name, [], raising=False)
    return Counted


@pytest.mark.parametrize("size", SIZES)
def test_no_word_is_used_twice(size, counted):
    """As many words as numbers, rounded up to pairs, and each of them once."""
    draws, pairs = 2**13 // size if size <= 2**13 else 9, (size + 1) // 2
    stream = NormalStream(KEY, size)
    for index in range(draws):
        _ = stream.of(index)[0:size]
    spans = sorted(counted.spans)
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(spans))
    assert sum(end - first for first, end in spans) == 2 * pairs * draws
    assert len(set(counted.counters)) == len(counted.counters)
    assert all(draw < draws and pair < pairs for draw, pair in counted.counters)


def test_every_short_word_of_a_draw_has_its_own_further_word(counted):
    """Across blocks: its pair's number in the whole draw, and the number of the draw."""
    size, index = 3 * BLOCK, 5
    _ = NormalStream(KEY, size).of(index)[0:size]
    words = Words(derive(KEY, "words")).span(size * index, size).reshape(3, 2, -1)
    short = np.flatnonzero(words[:, 0].ravel() >> np.uint64(1) < SHORT)
    assert len(short) > 3
    assert sorted(counted.counters) == [(index, pair) for pair in short.tolist()]


# The law
# --------------------------------------------------------------------------------------------------

MANY = 1_000_000
CHANCE = 1e-5  # the key is fixed, so that a test either always fails or never


@pytest.fixture(scope="module", params=[1, 2, 7, 1000, 100_000])
def draws(request):
    """Return a million numbers in draws of this size.  # [draw, size]"""
    size = request.param
    stream = NormalStream(derive(KEY, "law"), size)
    return torch.stack(
        [stream.of(i)[0:size] for i in range(5, 5 + min(MANY // size, 2**17))]
    ).numpy()


def uncorrelated(a, b):
    """Assert that a and b and functions of them are uncorrelated, to 4.5 standard errors."""
    for view in (np.asarray, np.square, np.sign, np.abs, lambda v: v * v * v):
        assert abs(np.corrcoef(view(a), view(b))[0, 1]) < 4.5 / math.sqrt(len(a))


def test_moments(draws):
    many = draws.ravel()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(np.mean(many**power) - moment) < 4 * math.sqrt(variance / len(many)), power


def test_kolmogorov_smirnov(draws):
    assert stats.kstest(draws.ravel()[:300_000], "norm").pvalue > CHANCE


def test_the_two_numbers_of_a_pair_are_independent(draws):
    size = draws.shape[1]
    half = min((size + 1) // 2, BLOCK // 2)
    first, second = (
        draws[:, : size // 2][:, :half].ravel(),
        draws[:, half : half + size // 2].ravel(),
    )
    if size > 2 * half:  # the first block of several
        first, second = draws[:, :half].ravel(), draws[:, half : 2 * half].ravel()
    if size == 1:
        return
    first = first[: len(second)]
    uncorrelated(first, second)
    square = np.hypot(first, second)[:200_000] ** 2
    assert stats.kstest(square, "expon", args=(0, 2)).pvalue > CHANCE


def test_neighbours_and_consecutive_draws_are_independent(draws):
    many = draws.ravel()
    for lag in (1, 2, 64):
        uncorrelated(many[:-lag], many[lag:])
    uncorrelated(draws[1:].ravel(), draws[:-1].ravel())


def test_more_than_five_standard_deviations_by_plain_counting():
    stream, rounds, size = NormalStream(derive(KEY, "far"), 10**6), 20, 10**6
    beyond = sum(int((stream.of(t)[0:size].abs() > 5).sum()) for t in range(rounds))
    low, high = stats.binom.interval(1 - 1e-4, rounds * size, 2 * stats.norm.sf(5))  # 11 expected
    assert low <= beyond <= high
