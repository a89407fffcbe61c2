"""ρ, against sums in exact arithmetic, and N, against the binomial tail in many digits."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mpf
from torch import nn

from evenclip.gradients import plan
from evenclip.mechanism.rounding import TAU, most_records, sum_rounding, summed_at_once
from evenclip.mechanism.sampling import drawn_rate

PROPERTY = settings(derandomize=True, deadline=None, database=None, max_examples=40)

# N
# --------------------------------------------------------------------------------------------------


def tail(n, q, N):
    """Return P(Bin(n, q) > N), by mpmath."""
    with mpmath.workdps(60):
        q, total = mpf(q), mpf(0)
        term = mpmath.binomial(n, N + 1) * q ** (N + 1) * (1 - q) ** (n - N - 1)
        for k in range(N + 1, n + 1):
            total += term
            if term < total * mpf(10) ** -50:
                break
            term *= mpf(n - k) / (k + 1) * q / (1 - q)
        return total


@pytest.mark.parametrize(
    ("q", "n"),
    [
        (256 / 23_484, 23_484),
        (256 / 200_000, 200_000),
        (4096 / 60_000, 60_000),
        (1e-6, 1000),
        (1e-15, 10**6),
        (2.0**-70, 10),
        (1e-32, 10),
        (0.5, 40),
        (0.5, 400),
        (0.99, 7),
    ],
)
def test_a_batch_exceeds_N_with_probability_tau(q, n):
    """For as many records as the larger of two neighbours has, at the rate that is drawn."""
    N = most_records(q, n)
    assert tail(n + 1, rate(q), N) <= mpf(TAU)
    assert n + 1 >= N


def rate(q):
    """Return the rate at which records are drawn."""
    exact = Fraction(drawn_rate(q))
    return mpf(exact.numerator) / mpf(exact.denominator)


@pytest.mark.parametrize("n", [1, 2, 100])
def test_with_all_records_in_the_batch_N_is_that_of_the_larger_neighbour(n):
    assert most_records(1.0, n) == n + 1


@pytest.mark.parametrize(("q", "n"), [(256 / 23_484, 23_484), (4096 / 60_000, 60_000)])
def test_N_is_not_much_larger_than_needed(q, n):
    """Its bound on the tail costs a few records, compared with the exact tail."""
    N = most_records(q, n)
    assert tail(n + 1, mpf(q), round(0.97 * N)) > mpf(TAU)


# ρ
# --------------------------------------------------------------------------------------------------


def summed(parts, block):
    """Return the sum of rows as a tape's blocks form it, with the weights as a product."""
    total = None
    for some in torch.split(parts, block):
        term = torch.mv(some.T.contiguous(), torch.ones(len(some), dtype=torch.float64))
        total = term if total is None else total + term
    return total


def length(vector):
    """Return the length of a vector of fractions, rounded up."""
    square = sum(x * x for x in vector)
    return Fraction(math.isqrt(int(square * 2**200)) + 1, 2**100)


def exact_sum(rows):
    """Return the exact sum of rows of floats."""
    return [sum(map(Fraction, column)) for column in zip(*rows.tolist(), strict=True)]


def clipped(rows):
    """Return rows of length at most 1, as float64 has them, and slightly below."""
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / (lengths.clamp(min=1.0) * (1 + 2.0**-50))


ROWS = st.tuples(
    st.integers(1, 60), st.integers(1, 4), st.integers(0, 2**31), st.sampled_from([0, 8, 60])
)


@given(ROWS, st.integers(1, 70))
@PROPERTY
def test_a_sum_of_records_is_off_by_less_than_half_of_rho(rows, block):
    """Records of any size, from negligible to 1, in any number of blocks."""
    n, d, seed, spread = rows
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randn(n, d, generator=random, dtype=torch.float64)
    numbers = clipped(numbers * 2.0 ** (-spread * torch.rand(n, 1, generator=random).double()))
    total, exact = summed(numbers, block), exact_sum(numbers)
    off = length([Fraction(x) - y for x, y in zip(total.tolist(), exact, strict=True)])
    assert off <= Fraction(sum_rounding(n, block)) / 2


@given(ROWS, st.integers(1, 70), st.integers(0, 59))
@PROPERTY
def test_neighbours_sums_differ_by_at_most_S_fl(rows, block, gone):
    """One record is taken out, and everyone after it moves to another place and block."""
    n, d, seed, spread = rows
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randn(n + 1, d, generator=random, dtype=torch.float64)
    numbers = clipped(numbers * 2.0 ** (-spread * torch.rand(n + 1, 1, generator=random).double()))
    others = torch.cat([numbers[: gone % (n + 1)], numbers[gone % (n + 1) + 1 :]])
    one, other = (summed(x, block).tolist() for x in (numbers, others))
    moved = length([Fraction(x) - Fraction(y) for x, y in zip(one, other, strict=True)])
    assert moved <= 1 + Fraction(sum_rounding(n + 1, block))


@pytest.mark.parametrize("layers", ["one term per number", "positions"])
@pytest.mark.parametrize("seed", range(4))
def test_the_weighted_sum_of_a_model_is_within_rho_of_the_exact_one(layers, seed):
    """Σ γ_i g_i as the package computes it, against the same sum in fractions.

    With positions, constant inputs and δ of both signs make the terms of a record cancel.
    """
    cancelling = layers == "positions"
    n, T, block = 12, 6, 5
    x, y, model = case(n, T, seed, positions=cancelling)
    tape = plan(model, nn.functional.cross_entropy, x, y)
    tape.rows, tape.pads = block, True
    assert tape.cancels == cancelling
    with tape.recording():
        gradients = tape(x, y)
        weights = 1.0 / gradients.norms()
        total = gradients.weighted_sum(weights)
        exact = exact_weighted_sum(tape, x, y, weights, block)
    off = length([Fraction(a) - b for a, b in zip(total.tolist(), exact, strict=True)])
    assert off <= Fraction(sum_rounding(n, block, cancelling=cancelling)) / 2
    assert float(off) > 0  # otherwise nothing was rounded, and nothing was tested


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("T", [2, 6, 20])
def test_terms_that_cancel_are_at_most_what_rho_assumes(dtype, T):
    """Where a gradient vanishes, its norm still bounds the lengths of its terms: γ·s ≤ 2²⁴·S/T."""
    x, y, model = case(5, T, 0, positions=True)
    x = x.to(dtype)
    tape = plan(model.to(dtype), nn.functional.cross_entropy, x, y)
    with tape.recording():
        gradients = tape(x[:, :1].expand_as(x), y)  # positions are alike, and signs alternate
        weights = 1.0 / gradients.norms()
    (named,) = gradients.gradients
    a, delta = named.gradient._a.double(), named.gradient._delta.double()
    sizes = torch.linalg.vector_norm(a, dim=2) * torch.linalg.vector_norm(delta, dim=2)
    assert float((weights * sizes.sum(dim=1)).max()) <= 2.0**24 / T


def case(n, T, seed, *, positions):
    """Return inputs, targets and a model of one linear layer, over positions or not."""
    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = nn.Linear(3, 2)
    y = torch.randint(2, (n,), generator=random)
    if not positions:
        return torch.randn(n, 3, generator=random), y, layer
    x = 1 + 1e-3 * torch.randn(n, T, 3, generator=random)
    return x, y, nn.Sequential(layer, Alternating())


class Alternating(nn.Module):
    """Sum positions with alternating signs, so that the gradients of a weight cancel."""

    def forward(self, x):
        signs = torch.tensor([1.0, -1.0], dtype=x.dtype).repeat(x.shape[1] // 2)
        return (x * signs.view(1, -1, 1)).sum(dim=1)


def exact_weighted_sum(tape, x, y, weights, block):
    """Return Σ γ_i g_i in fractions, from the inputs and δ that the layer recorded."""
    total = None
    for first in range(0, len(y), block):
        some = slice(first, first + block)
        rows = tape(x[some], y[some])
        (named,) = rows._block.gradients if hasattr(rows, "_block") else rows.gradients
        gradient = named.gradient
        a, delta = (t if t.ndim == 3 else t.unsqueeze(1) for t in (gradient._a, gradient._delta))
        for i, w in enumerate(weights[some].tolist()):
            own = [
                sum(Fraction(d) * Fraction(z) for d, z in zip(ds, zs, strict=True))
                for ds in delta[i].T.tolist()
                for zs in a[i].T.tolist()
            ] + [sum(map(Fraction, ds)) for ds in delta[i].T.tolist()]
            own = [Fraction(w) * g for g in own]
            total = own if total is None else [s + t for s, t in zip(total, own, strict=True)]
    return total


@pytest.mark.parametrize("ranks", [1, 500])
@pytest.mark.parametrize(("records", "block"), [(467, 64), (5000, None), (65_536, 65_536)])
def test_rho_covers_each_rounding_once(records, block, ranks):
    """The formula in fractions: 2Nγ_m, m = b + ⌈N/b⌉ + R + 7 roundings."""
    b = min(block or records, records)
    m, u = b + math.ceil(records / b) + ranks + 7, Fraction(1, 2**53)
    gamma, given = m * u / (1 - m * u), {"block": block, "ranks": ranks}
    assert Fraction(sum_rounding(records, **given)) >= 2 * records * gamma
    assert Fraction(sum_rounding(records, cancelling=True, **given)) >= 2 * records * gamma * 2**24
    assert sum_rounding(records, **given) < 2e-6


@pytest.mark.parametrize("records", [40, 465, 4500, 9000, 34000])
def test_blocks_of_positions_are_the_largest_with_little_rounding(records):
    """Where ρ stays large, blocks of about √N records have the fewest roundings."""

    def rho(block):
        return sum_rounding(records, block, cancelling=True)

    block = summed_at_once(records, records)
    assert rho(block) <= 2.0**-9 or block <= max(64, math.isqrt(records))
    assert block == records or rho(2 * block) > 2.0**-9
    assert rho(block) <= max(2.0**-9, 2 * min(map(rho, range(1, records + 1))))
    assert summed_at_once(records, 7) == 7
