"""The two grids of a release, against integers and fractions of any size."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from evenclip.mechanism.grid import Grid, on_grid, power_below, published
from evenclip.mechanism.mechanism import Mechanism
from evenclip.mechanism.multipliers import LARGEST, SMALLEST
from evenclip.mechanism.noise import BLOCK, C
from evenclip.rules import DPSGD

PROPERTY = settings(derandomize=True, deadline=None, database=None, max_examples=300)

SENSITIVITY = st.floats(2.0**-60, 2.0**60) | st.sampled_from([2.0**-400, 1.0, 0.1, 2.0**400])
MULTIPLIER = st.floats(2.0**-10, 2.0**14) | st.sampled_from([0.125, 1.0, 10.0])
SIZE = st.integers(1, 10**9)
ROUNDING = st.just(0.0) | st.floats(2.0**-45, 0.5)
FORMS = pytest.mark.parametrize("form", ["number", "tensor"])


def grid_of(form, S, multiplier, size, rounding):
    """Return the grids for S as a number or as a tensor."""
    given = S if form == "number" else torch.tensor(S, dtype=torch.float64)
    return Grid.of(given, multiplier, size, rounding)


def exact(x):
    """Return a number, or a tensor of one number, as a fraction."""
    return Fraction(float(x))


def nearest_even(x):
    """Return the integer nearest to a fraction; of two, the even one."""
    return round(x)


# The grids
# --------------------------------------------------------------------------------------------------


@FORMS
@given(SENSITIVITY, MULTIPLIER, SIZE, ROUNDING)
@PROPERTY
def test_the_grids_are_as_documented(form, S, multiplier, size, rounding):
    fine, coarse, std = (exact(x) for x in grid_of(form, S, multiplier, size, rounding))
    S, m, rho = exact(S), exact(multiplier), exact(rounding)
    for power in (fine, coarse):
        assert power.numerator == 1 or power.denominator == 1
        assert (power.numerator * power.denominator).bit_count() == 1
    # h√d ≤ 2⁻¹⁶ S up to the rounding of the square root, h ≤ σS/32, and 2h is too large for one
    slack = 1 + Fraction(1, 2**50)
    assert fine**2 * size <= (S / 2**16 * slack) ** 2
    assert fine <= m * S / 32
    assert (2 * fine) ** 2 * size * slack**2 > (S / 2**16) ** 2 or 2 * fine * slack > m * S / 32
    assert coarse <= std / 8 < 2 * coarse
    assert coarse >= 2 * fine
    # σ' is rounded up, by less than 2⁻⁴⁶
    root_below, root_above = (Fraction(math.isqrt(size * 2**120) + i, 2**60) for i in (0, 1))
    assert std >= m * (S * (1 + rho) + fine * root_above)
    assert std <= m * (S * (1 + rho) + fine * root_below) * (1 + Fraction(1, 2**46))


@given(SENSITIVITY, MULTIPLIER, SIZE, ROUNDING)
@PROPERTY
def test_tensors_and_numbers_have_the_same_grids(S, multiplier, size, rounding):
    numbers, tensors = (
        [float(x) for x in grid_of(form, S, multiplier, size, rounding)]
        for form in ("number", "tensor")
    )
    assert numbers == tensors


@FORMS
@pytest.mark.parametrize("S", [0.0, 5e-324, 2.0**-1000, 2.0**-401])
def test_a_tiny_sensitivity_is_raised(form, S):
    grids = [tuple(map(float, grid_of(form, s, 1.0, 100, 0.0))) for s in (S, 2.0**-400)]
    assert grids[0] == grids[1]


def test_a_sensitivity_in_single_precision_keeps_its_value():
    S = torch.tensor(0.1, dtype=torch.float32)
    assert Grid.of(S, 1.0, 10, 0.0).std == Grid.of(float(S), 1.0, 10, 0.0).std
    assert Grid.of(S, 1.0, 10, 0.0).std.dtype == torch.float64


@given(st.floats(5e-324, 1.7e308))
@example(5e-324)
@example(2.0**-1022)
@example(2.0**1023)
@example(math.nextafter(2.0**-1022, 0))
@example(math.nextafter(1.0, 0))
@PROPERTY
def test_the_largest_power_of_two_below(x):
    """Subnormal numbers and the largest ones included; a tensor's S is at least 2⁻⁴⁰⁰."""
    power = exact(power_below(x))
    assert power <= exact(x) < 2 * power
    assert (power.numerator * power.denominator).bit_count() == 1
    if x >= 2.0**-1022:
        assert exact(power_below(torch.tensor(x, dtype=torch.float64))) == power


@pytest.mark.parametrize("exponent", range(-1022, 1024, 93))
def test_a_power_of_two_is_the_one_below_itself(exponent):
    x = 2.0**exponent
    assert power_below(x) == power_below(torch.tensor(x, dtype=torch.float64)) == x


# What is published
# --------------------------------------------------------------------------------------------------

TOTALS = st.one_of(
    st.floats(-(2.0**40), 2.0**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(2**53), 2**53).map(float),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7e308, -1.7e308]),
)
NOISE = st.floats(-13, 13) | st.sampled_from([0.0, 2.0**-60, -(2.0**-60), 12.9, -12.9])


def held(total, fine):
    """Return k, the integer that stands for a total."""
    if math.isnan(total):
        return 0
    bound = 2**51
    if math.isinf(total):
        return bound if total > 0 else -bound
    return nearest_even(min(max(exact(total) / fine, Fraction(-bound)), Fraction(bound)))


def noisy_integers(k, z, grid):
    """Return the integers that k·h + Z may be rounded to, in units of H, and the exact one.

    The noise may be off by c·(r + 2H/σ') in units of σ'; r is at least |z|.
    """
    fine, coarse, std = (exact(x) for x in grid)
    shifted = (k * fine + exact(z) * std) / coarse + Fraction(1, 2)
    off = exact(C) * (abs(exact(z)) * std / coarse + 2)
    return math.floor(shifted - off), math.floor(shifted + off), math.floor(shifted)


@FORMS
@given(
    st.lists(st.tuples(TOTALS, NOISE), min_size=1, max_size=5), SENSITIVITY, MULTIPLIER, ROUNDING
)
@PROPERTY
def test_published_is_the_noisy_integer_rounded_to_the_coarse_grid(
    form, pairs, S, multiplier, rounding
):
    """Only the addition of the noise rounds, and once, because hi and lo are exact."""
    grid = grid_of(form, S, multiplier, len(pairs), rounding)
    totals, noise = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True)
    )
    before = totals.clone(), noise.clone()
    out = published(totals, noise, grid)
    assert torch.equal(totals.nan_to_num(), before[0].nan_to_num())  # nothing is changed in place
    assert torch.equal(noise, before[1])
    for total, z, number in zip(totals.tolist(), noise.tolist(), out.tolist(), strict=True):
        integer = exact(number) / exact(grid.coarse)
        assert integer.denominator == 1
        low, high, _ = noisy_integers(held(total, exact(grid.fine)), z, grid)
        assert low <= integer <= high


@FORMS
@given(st.lists(TOTALS, min_size=1, max_size=5), SENSITIVITY, MULTIPLIER, ROUNDING)
@PROPERTY
def test_without_noise_nothing_rounds_at_all(form, totals, S, multiplier, rounding):
    grid = grid_of(form, S, multiplier, len(totals), rounding)
    out = published(
        torch.tensor(totals, dtype=torch.float64), torch.zeros(len(totals)).double(), grid
    )
    ratio = exact(grid.fine) / exact(grid.coarse)
    for total, number in zip(totals, out.tolist(), strict=True):
        k = held(total, exact(grid.fine))
        assert exact(number) == exact(grid.coarse) * math.floor(k * ratio + Fraction(1, 2))


@given(TOTALS, NOISE, st.integers(-(2**40), 2**40))
@PROPERTY
def test_a_shift_of_the_sum_by_cells_shifts_the_result_and_nothing_else(total, z, cells):
    """The rounding of lo + Z must not depend on hi, where a record could move it."""
    grid = Grid.of(1.0, 1.0, 100, 0.0)
    total = math.fmod(total, 2.0**10) if math.isfinite(total) else 0.0
    total = nearest_even(exact(total) / exact(grid.fine)) * grid.fine
    moved = total + cells * grid.coarse
    assume(abs(moved) / grid.fine < 2**51 and exact(moved) - exact(total) == cells * grid.coarse)
    values = torch.tensor([total, moved], dtype=torch.float64)
    out = published(values, torch.tensor([z, z], dtype=torch.float64), grid)
    assert exact(out[1]) - exact(out[0]) == cells * exact(grid.coarse)


def test_the_bound_on_k_is_a_projection():
    """Totals beyond it are no farther apart afterwards, and nothing is not a number."""
    grid = Grid.of(1.0, 1.0, 1, 0.0)
    edge = 2.0**51 * grid.fine
    totals = torch.tensor([edge, edge * 2, 1e300, math.inf, math.nan], dtype=torch.float64)
    out = published(totals, torch.zeros(5).double(), grid)
    assert out.tolist() == [edge] * 4 + [0.0]


def test_the_sum_moves_by_at_most_the_sensitivity_after_rounding():
    """k·h of two neighbours differs by at most S_fl + h√d, which is what σ' covers."""
    for size in (1, 7, 1000):
        random = torch.Generator().manual_seed(size)
        total = torch.randn(size, generator=random, dtype=torch.float64) * 100
        move = torch.randn(size, generator=random, dtype=torch.float64)
        move = move / torch.linalg.vector_norm(move)
        grid = Grid.of(1.0, 0.5, size, 0.0)
        k = [[held(x, exact(grid.fine)) for x in t.tolist()] for t in (total, total + move)]
        distance = sum((a - b) ** 2 for a, b in zip(*k, strict=True)) * exact(grid.fine) ** 2
        assert float(distance) <= (1 + grid.fine * math.sqrt(size)) ** 2 * (1 + 1e-12)


# Any length and form
# --------------------------------------------------------------------------------------------------


class Counted:
    """Noise that is drawn in parts, and which parts."""

    def __init__(self, values):
        self.values, self.parts = values, []

    def __getitem__(self, part):
        self.parts.append((part.start, part.stop))
        return self.values[part]


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_have_the_values_of_the_whole(size, dtype):
    random = torch.Generator().manual_seed(0)
    total, noise = torch.randn(2, size, generator=random, dtype=torch.float64)
    grid, counted = Grid.of(1.0, 1.0, size, 0.0), Counted(noise)
    expected = (published(total, noise, grid) * 0.5).to(dtype)
    assert torch.equal(on_grid(total, noise, grid, 0.5, dtype), expected)
    assert torch.equal(on_grid(total, counted, grid, 0.5, dtype), expected)
    assert max(end - first for first, end in counted.parts) <= BLOCK
    ends = [0, *(end for _, end in counted.parts)]
    assert [first for first, _ in counted.parts] == ends[:-1]
    assert ends[-1] == size


@pytest.mark.parametrize(
    ("form", "size"),
    [(torch.clone, 0), (torch.clone, 1), (torch.clone, 3), (Counted, 0), (Counted, 1)],
)
def test_noise_of_another_length_is_refused(form, size):
    """One number of noise would otherwise be added to every number of the sum."""
    noise, grid = form(torch.zeros(size, dtype=torch.float64)), Grid.of(1.0, 1.0, 2, 0.0)
    with pytest.raises(ValueError, match=f"2 numbers .* {size} numbers of noise"):
        on_grid(torch.zeros(2, dtype=torch.float64), noise, grid, 1.0, torch.float64)


# --------------------------------------------------------------------------------------------------
# The multipliers that the grids hold
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("S", [1e-100, 0.1, 1.0, 1.9999])
@pytest.mark.parametrize("size", [1, 3, 91_650, 2**36])
@pytest.mark.parametrize("multiplier", [SMALLEST, 1.0, LARGEST])
@pytest.mark.parametrize("rounding", [0.0, 0.01])
def test_both_grids_are_exact_with_every_multiplier_that_is_allowed(S, size, multiplier, rounding):
    h, H, _ = Grid.of(S, multiplier, size, rounding)
    assert 2.0 <= H / h <= 2.0**52
    assert S * min(2.0**25, 2.0**34 / math.sqrt(size)) <= 2.0**51 * h  # a sum is never cut off


@pytest.mark.parametrize("sigma", [1e-40, SMALLEST / 2, LARGEST * 2, 1e300])
def test_a_multiplier_that_the_grids_do_not_hold_is_refused(sigma):
    """With σ = 10⁻⁴⁰ every sum would be cut off at nearly 0."""
    with pytest.raises(ValueError, match=r"hold noise multipliers from 1e-6 to 1e6"):
        Mechanism(DPSGD(sigma=sigma))
