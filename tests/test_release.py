"""Releases, the ledger, and noise with a true tail.

A tail of 2e-9 cannot be counted in seconds, so it is reached by another road: the uniforms that make the radius are
drawn from the last 2⁻²⁴ of the unit interval only. Whatever lies beyond √(48 ln 2) = 5.77 standard deviations comes
from there (float32 uniforms have a single number in it), so rare events are 2²⁴ times as frequent as they are without.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from evenclip.release import Entry, Ledger, Noise, Releases, joint_multiplier


def seeded(seed):
    return Noise(np.random.SeedSequence(seed))


# Releases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sensitivity", [0.5, torch.tensor(0.5, dtype=torch.float64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_release_adds_exactly_sensitivity_times_multiplier_times_noise(sensitivity, dtype):
    value, noise = (
        torch.tensor([[3.0, 4.0], [0.0, -1.0]], dtype=dtype),
        torch.tensor([1.0, -2.0, 8.0, 0.25], dtype=dtype),
    )
    release = Releases({"count": torch.zeros(1), "gradient": noise})
    found = release("gradient", value, sensitivity=sensitivity, multiplier=6.0)
    assert found.tolist() == [[6.0, -2.0], [24.0, -0.25]]  # value + 3·noise, in powers of two: no rounding
    assert found.dtype == dtype
    assert release.multipliers == {"gradient": 6.0}


def test_each_name_is_released_once():
    release = Releases({"gradient": torch.ones(2)})
    release("gradient", torch.zeros(2), sensitivity=1.0, multiplier=1.0)
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the whole text is compared
        release("gradient", torch.zeros(2), sensitivity=1.0, multiplier=1.0)
    assert str(refused.value) == "This step has released 'gradient' already; noise is used once."


def test_each_name_is_released_once_even_in_clear():
    release = Releases({})
    release("gradient", torch.zeros(2), sensitivity=1.0, multiplier=0.0)
    with pytest.raises(ValueError, match="released 'gradient' already"):
        release("gradient", torch.zeros(2), sensitivity=1.0, multiplier=0.0)


def test_a_name_without_noise_is_refused():
    with pytest.raises(KeyError):
        Releases({"gradient": torch.ones(2)})("count", torch.zeros(1), sensitivity=1.0, multiplier=1.0)


@pytest.mark.parametrize("size", [1, 3])
def test_one_number_of_noise_for_each_number_released(size):
    with pytest.raises(RuntimeError):  # never spread over several
        Releases({"gradient": torch.ones(size)})("gradient", torch.zeros(2), sensitivity=1.0, multiplier=1.0)


def test_an_empty_value_writes_nothing():
    release = Releases({})
    assert release("count", torch.zeros(0), sensitivity=1.0, multiplier=10.0).shape == (0,)
    assert release.multipliers == {}


def test_multiplier_0_is_in_clear_and_the_ledger_says_so():
    release, value = Releases({"gradient": torch.full((2,), 9.0)}), torch.tensor([1.0, 2.0])
    assert torch.equal(release("gradient", value, sensitivity=math.inf, multiplier=0.0), value)
    assert release.multipliers == {"gradient": 0.0}
    ledger = Ledger()
    ledger.write(0.01, release.multipliers)
    assert ledger.entries == [Entry(0.01, (("gradient", 0.0),), 1)]
    assert not ledger.is_private


def test_released_values_have_the_spread_that_the_ledger_claims():
    """Standard deviation ÷ sensitivity over 200,000 releases of one number is the multiplier in the ledger."""
    noise, n = seeded(0), 200_000
    release = Releases({"gradient": noise.normal(n, torch.float64)})
    found = release("gradient", torch.full((n,), 7.0, dtype=torch.float64), sensitivity=0.3, multiplier=2.5)
    spread = float((found - 7.0).std()) / 0.3
    assert abs(spread / release.multipliers["gradient"] - 1) < 4 / math.sqrt(2 * n)


# The ledger ----------------------------------------------------------------------------------------------------------


def test_equal_steps_in_a_row_are_one_entry():
    ledger = Ledger()
    one, other = {"count": 10.0, "gradient": 1.0}, {"gradient": 1.0}
    for q, step in ((0.1, one), (0.1, one), (0.1, other), (0.1, one), (0.2, one), (0.2, one), (None, one)):
        ledger.write(q, step)
    assert [(e.q, dict(e.multipliers), e.steps) for e in ledger.entries] == [
        (0.1, one, 2),
        (0.1, other, 1),
        (0.1, one, 1),
        (0.2, one, 2),
        (None, one, 1),
    ]
    assert ledger.steps == 7


STEPS = st.tuples(
    st.none() | st.floats(0, 1, exclude_min=True),
    st.dictionaries(st.sampled_from(["count", "gradient", "other"]), st.just(0.0) | st.floats(1e-3, 100)),
)


@given(st.lists(STEPS, max_size=8))
@settings(derandomize=True, deadline=None, database=None)
def test_json_round_trip(steps):
    ledger = Ledger()
    for q, multipliers in [step for step in steps for _ in range(2)]:
        ledger.write(q, multipliers)
    again = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
    assert again == ledger
    assert again.steps == 2 * len(steps)
    assert again.is_private == all(q is not None and 0 not in m.values() for q, m in steps)


@pytest.mark.parametrize("number", [int, np.float32, np.float64, np.int64])
def test_every_number_becomes_a_float_of_python(number):
    """dp-accounting 0.6 silently drops others from composed events."""
    ledger = Ledger()
    ledger.write(number(1), {"count": number(4), "gradient": number(3)})
    read = Ledger.from_json([{"q": number(1), "multipliers": {"count": number(4), "gradient": number(3)}, "steps": 1}])
    for entry in (*ledger.entries, *read.entries):
        assert entry == Entry(1.0, (("count", 4.0), ("gradient", 3.0)), 1)
        assert [type(m) for _, m in entry.multipliers] == [float, float]
        assert type(entry.q) is float
        assert type(entry.joint) is float
        assert entry.joint == pytest.approx(2.4)


@pytest.mark.parametrize(
    ("q", "multipliers", "private"),
    [
        (0.1, {"gradient": 1.0}, True),
        (None, {"gradient": 1.0}, False),
        (0.1, {"gradient": 0.0}, False),
        (0.1, {"count": 10.0, "gradient": 0.0}, False),
        (0.1, {"count": 0.0, "gradient": 10.0}, False),
        (0.1, {"gradient": math.nan}, False),
        (0.1, {}, True),
    ],
)
def test_private_only_with_poisson_batches_and_noise_on_everything(q, multipliers, private):
    ledger = Ledger()
    ledger.write(0.5, {"gradient": 1.0})
    ledger.write(q, multipliers)
    assert ledger.entries[-1].is_private is private
    assert ledger.is_private is private


# The joint multiplier ------------------------------------------------------------------------------------------------

SEVERAL = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6)


@given(SEVERAL, st.randoms(use_true_random=False))
@settings(derandomize=True, deadline=None, database=None)
def test_joint_multiplier_forgets_order_and_nesting(several, random):
    whole = joint_multiplier(several)
    mixed = random.sample(several, len(several))
    assert joint_multiplier(mixed) == pytest.approx(whole, rel=1e-12)
    cut = random.randint(0, len(several))
    nested = joint_multiplier([joint_multiplier(mixed[:cut]), joint_multiplier(mixed[cut:])])
    assert nested == pytest.approx(whole, rel=1e-12)
    assert whole <= min(several) * (1 + 1e-12)


@given(SEVERAL)
@settings(derandomize=True, deadline=None, database=None)
def test_joint_multiplier_is_that_of_the_best_estimate(several):
    """Of all x + m_j·N_j, weighed by their precisions, comes the estimate of x of least variance: the joint m²."""
    variances = np.square(several)
    shares = (1 / variances) / np.sum(1 / variances)
    assert joint_multiplier(several) == pytest.approx(math.sqrt(np.sum(shares**2 * variances)), rel=1e-12)


def test_joint_multiplier_at_the_ends():
    assert joint_multiplier([]) == math.inf
    assert joint_multiplier([math.inf, math.inf]) == math.inf
    assert joint_multiplier([3.0, math.inf]) == pytest.approx(3.0)
    assert joint_multiplier([3.0, 0.0]) == 0.0
    assert joint_multiplier([np.float32(3), 4]) == pytest.approx(2.4)
    assert type(joint_multiplier([np.float32(3)])) is float


# Noise: its distribution ---------------------------------------------------------------------------------------------

MANY = 1_000_000


BIG, LITTLE = 100_000, 1000  # of a draw


def in_draws(noise, total, size, dtype):
    """`total` numbers in draws of `size`.  # [draw, size], float64"""
    return torch.stack([noise.normal(size, dtype) for _ in range(total // size)]).double().numpy()


DRAWS = [(torch.float32, BIG), (torch.float64, BIG), (torch.float32, LITTLE), (torch.float64, LITTLE)]
over_draws = pytest.mark.parametrize(("dtype", "size"), DRAWS, ids=[f"{d}-{s}"[6:] for d, s in DRAWS])


@pytest.fixture(scope="module", params=DRAWS, ids=[f"{d}-{s}"[6:] for d, s in DRAWS])
def draws(request):
    dtype, size = request.param
    return in_draws(seeded(11), MANY, size, dtype)


@pytest.fixture
def many(draws):
    return draws.ravel()


def test_moments(many):
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(np.mean(many**power) - moment) < 4 * math.sqrt(variance / MANY), power


def halves(draws):
    """The first and the second numbers of the pairs that Box–Muller makes."""
    half = draws.shape[1] // 2
    return draws[:, :half].ravel(), draws[:, half:].ravel()


def test_kolmogorov_smirnov(many, draws):
    for numbers in (many, *halves(draws)):
        assert stats.kstest(numbers, "norm").pvalue > 1e-3


def uncorrelated(a, b):
    """No correlation between a and b, their squares, their signs or their sizes, to 4.5 standard errors."""
    for view in (np.asarray, np.square, np.sign, np.abs, lambda v: v**3):
        assert abs(np.corrcoef(view(a), view(b))[0, 1]) < 4.5 / math.sqrt(len(a))
    assert abs(np.corrcoef(a, b**2)[0, 1]) < 4.5 / math.sqrt(len(a))


def test_the_two_numbers_of_a_pair_are_independent(draws):
    uncorrelated(*halves(draws))


@pytest.mark.parametrize("lag", [1, 2, 3, 64])
def test_neighbours_are_independent(many, lag):
    uncorrelated(many[:-lag], many[lag:])


def test_consecutive_draws_are_independent(draws):
    uncorrelated(draws[1:].ravel(), draws[:-1].ravel())


def test_seeds_are_independent():
    parent = np.random.SeedSequence(13)
    a, b, c = (Noise(seed).normal(500_000).double().numpy() for seed in (*parent.spawn(2), parent))
    for one, other in ((a, b), (a, c), (b, c)):
        uncorrelated(one, other)


def test_a_seed_is_a_stream():
    assert torch.equal(seeded(1).normal(100), seeded(1).normal(100))
    assert not torch.equal(seeded(1).normal(100), seeded(2).normal(100))
    noise = seeded(1)
    assert not torch.equal(noise.normal(100), noise.normal(100))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 1001, 5001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sizes(size, dtype):
    found = seeded(1).normal(size, dtype)
    assert found.shape == (size,)
    assert found.dtype == dtype
    assert len(found.unique()) >= 0.999 * size  # float32 repeats a few


def test_one_number_at_a_time_is_normal_too():
    noise = seeded(14)
    found = np.array([float(noise.normal(1)) for _ in range(20_000)])
    assert stats.kstest(found, "norm").pvalue > 1e-3
    uncorrelated(found[:-1], found[1:])


@pytest.mark.parametrize("sizes", [(1, 3, 8), (2, 2), (5,), (1001, 1), (5001, 2)])
def test_resume_is_bit_identical(sizes):
    noise = seeded(3)
    for size in sizes:
        noise.normal(size)
    state = noise.state()
    assert state.dtype == torch.int64
    ahead = [noise.normal(size, dtype) for size in (4, 1, 9, 5001) for dtype in (torch.float32, torch.float64)]
    other = seeded(99)
    other.normal(5)
    other.set_state(state)
    again = [other.normal(size, dtype) for size in (4, 1, 9, 5001) for dtype in (torch.float32, torch.float64)]
    assert all(torch.equal(a, b) for a, b in zip(ahead, again, strict=True))
    assert torch.equal(other.state(), noise.state())


def test_a_state_is_a_copy():
    noise = seeded(3)
    state = noise.state()
    kept = state.clone()
    noise.normal(10)
    assert torch.equal(state, kept)
    other = seeded(4)
    other.set_state(state)
    other.normal(10)
    assert torch.equal(state, kept)


# Noise: its tail -----------------------------------------------------------------------------------------------------

END = 2.0**-24  # of the unit interval: the resolution of float32 uniforms
FIRST = math.sqrt(48 * math.log(2))  # the radius at which the last END begins, 5.768


class Given:
    """In place of a numpy generator: hands out prepared uniforms for the radius, and fractions of a turn as bits."""

    def __init__(self, radius, turns):
        self._radius, self._turns = np.array(radius, dtype=np.float64), np.array(turns, dtype=np.float64)
        self.bit_generator = self

    def random(self, out):
        assert len(out) == len(self._radius)
        out[:] = self._radius

    def random_raw(self, words):
        """Of each fraction the first 64 bits, or the first 32 if only half as many words are asked for."""
        size = 8 if words == len(self._turns) else 4
        signed = (self._turns + 0.5) % 1 - 0.5
        bits = np.floor(signed * 256.0**size).astype(f"i{size}")
        return np.resize(bits, words * 8 // size).view(np.uint64)


class LastOfTheInterval:
    """In place of a numpy generator: radii are made of the last END of [0, 1), angles of all of it.

    Multiples of 2⁻⁵³, like those of the generator, or of 2⁻²⁴ if float32 is asked for.
    """

    def __init__(self, seed):
        self._random, self._radius = np.random.default_rng(seed), False
        self.bit_generator = self._random.bit_generator  # for angles

    def random(self, size=None, dtype=np.float64, out=None):
        if out is not None:
            out[:] = 1 - END + self._random.integers(0, 2**29, len(out)) * 2.0**-53
            return out
        self._radius = not self._radius  # the planted fault asks for its radii and for its angles
        if not self._radius:
            return self._random.random(size, dtype=dtype)
        return np.full(size, 1 - END, dtype)  # the only multiple of 2⁻²⁴ in there


class Float32Noise(Noise):
    """The planted fault: Box–Muller on 24-bit uniforms, as `torch.randn` has it."""

    def normal(self, size, dtype=torch.float32):
        half = (size + 1) // 2
        u, v = (torch.from_numpy(self._uniform.random(half, dtype=np.float32)) for _ in range(2))
        radius, angle = (-2 * torch.log1p(-u)).sqrt(), 2 * math.pi * v
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[:size].to(dtype)


def with_uniforms(noise, uniforms):
    noise._uniform = uniforms
    return noise


def check_tail(noise, dtype, size):
    """The distribution beyond 5.77 standard deviations, given that the radius lies there."""
    pairs = 2_000_000
    z = in_draws(with_uniforms(noise, LastOfTheInterval(1)), 2 * pairs, size, dtype)
    r = np.hypot(*halves(z))
    # r² − FIRST² is exponential with mean 2, as everywhere
    assert stats.kstest((r**2 - FIRST**2)[:200_000], "expon", args=(0, 2)).pvalue > 1e-3
    for rho in (6.0, 6.5, 7.0, 7.5):
        expected = pairs * math.exp(-(rho**2) / 2) / END
        assert abs(np.sum(r > rho) - expected) < 4.5 * math.sqrt(expected), rho
    for x in (6.0, 6.5, 7.0):  # who is beyond 6 has a radius beyond 6, so all of them are here
        expected = 2 * pairs * 2 * stats.norm.sf(x) / END
        assert abs(np.sum(np.abs(z) > x) - expected) < 4.5 * math.sqrt(expected), x
        assert abs(np.sum(z > x) - expected / 2) < 4.5 * math.sqrt(expected / 2), x


@over_draws
def test_beyond_six_standard_deviations_the_rates_are_right(dtype, size):
    check_tail(seeded(0), dtype, size)


def test_float32_uniforms_would_fail():
    assert stats.kstest(Float32Noise(np.random.SeedSequence(0)).normal(MANY).numpy(), "norm").pvalue > 1e-3  # unnoticed
    with pytest.raises(AssertionError):
        check_tail(Float32Noise(np.random.SeedSequence(0)), torch.float32, BIG)
    never = with_uniforms(Float32Noise(np.random.SeedSequence(0)), LastOfTheInterval(1)).normal(100_000)
    assert float(never.abs().max()) < 5.77


def test_more_than_five_standard_deviations_by_plain_counting():
    noise, rounds, size = seeded(21), 100, 1_000_000
    beyond = sum(int((noise.normal(size).abs() > 5).sum()) for _ in range(rounds))
    low, high = stats.binom.interval(1 - 1e-4, rounds * size, 2 * stats.norm.sf(5))  # 57 expected
    assert low <= beyond <= high


@pytest.mark.parametrize("half", [LITTLE, BIG])
def test_the_radius_of_every_last_uniform(half):
    """At u = 1 − k·2⁻⁵³, −ln(1 − u) = 53 ln 2 − ln k: the largest number is 8.57, and its neighbours differ."""
    k = np.arange(1, half + 1)
    z = with_uniforms(seeded(0), Given(1 - k * 2.0**-53, np.zeros(half))).normal(2 * half, torch.float64)
    expected = np.sqrt(2 * (53 * math.log(2) - np.log(k)))
    np.testing.assert_allclose(z[:half].numpy(), expected, rtol=1e-15)
    assert float(z[0]) == pytest.approx(8.5717, abs=1e-4)
    assert len(z[:half].unique()) == half
    assert not z[half:].any()  # sin 0


@pytest.mark.parametrize("at_least", [0, BIG])
@pytest.mark.parametrize("rho", [0.01, 1.0, 3.0, 5.0, 6.0, 7.0, 8.0, 8.5])
def test_the_share_of_uniforms_beyond_a_radius_is_that_of_the_normal(rho, at_least):
    """Of the 2⁵³ uniforms exactly those with 1 − u < exp(−ρ²/2) give r > ρ, so P(r > ρ) is right to 2⁻⁵³."""
    share = math.exp(-(rho**2) / 2)
    edge = share * 2.0**53
    k = np.floor(edge) + (np.array([-2.0, -1.0, 0.0, 1.0, 2.0, 3.0]) * max(1.0, 4e-15 * edge)).round()
    k = k[(k >= 1) & (k <= 2.0**53)]
    uniforms = np.resize(1 - k * 2.0**-53, max(len(k), at_least))
    z = with_uniforms(seeded(0), Given(uniforms, 0 * uniforms)).normal(2 * len(uniforms), torch.float64)
    far = np.abs(k - edge) >= min(1.0, edge) * 0.5
    assert ((z[: len(k)].numpy() > rho) == (k < edge))[far].all()
    assert far.sum() >= 3


@pytest.mark.parametrize("times", [1, BIG])
def test_no_uniform_gives_an_infinite_number(times):
    uniforms = [0.0, 2.0**-53, 0.5, 1 - 2.0**-53] * times
    z = with_uniforms(seeded(0), Given(uniforms, uniforms)).normal(8 * times)
    assert z.isfinite().all()


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 3e-6), (torch.float64, 1e-14)])
def test_little_and_big_draws_are_the_same_function_of_the_uniforms(dtype, atol):
    u, v = np.random.default_rng(0).random((2, BIG))
    big = with_uniforms(seeded(0), Given(u, v)).normal(2 * BIG, dtype)
    little = with_uniforms(seeded(0), Given(u[:LITTLE], v[:LITTLE])).normal(2 * LITTLE, dtype)
    torch.testing.assert_close(little[:LITTLE], big[:LITTLE], rtol=0, atol=atol)
    torch.testing.assert_close(little[LITTLE:], big[BIG : BIG + LITTLE], rtol=0, atol=atol)


def test_randn_of_torch_ends_at_5_77():
    """Why there is a class of our own: torch's float32 normals are Box–Muller on multiples of 2⁻²⁴."""
    uniforms = torch.rand(16_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal((uniforms * 2**24).round() / 2**24, uniforms)
    normals = torch.randn(16_000, generator=torch.Generator().manual_seed(0)).view(-1, 2, 8)
    u, v = uniforms.double().view(-1, 2, 8).unbind(dim=1)  # sixteen at a time: eight radii, eight angles
    radius, angle = (-2 * torch.log1p(-u)).sqrt(), 2 * math.pi * v
    torch.testing.assert_close(normals[:, 0].double(), radius * angle.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(normals[:, 1].double(), radius * angle.sin(), rtol=0, atol=1e-5)
    assert math.sqrt(-2 * math.log1p(-(1 - END))) == pytest.approx(FIRST)
    assert round(FIRST, 2) == 5.77
