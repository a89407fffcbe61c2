"""ε of the drawn noise: its formulas in 60 digits, and properties."""

from __future__ import annotations

import math
from functools import partial

import mpmath
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mpmath import mpf
from scipy.stats import norm

from evenclip.mechanism.accountants import pld
from evenclip.mechanism.accounting import (
    curve,
    epsilon,
    epsilon_without_amplification,
    real,
    smallest_delta,
)
from evenclip.mechanism.correction import SamplerError, real_epsilon
from evenclip.mechanism.ledger import BETA, LAMBDA, Entry, Ledger

PROPERTY = settings(derandomize=True, deadline=None, database=None)


def ledger_of(size, steps=1840, q=1 / 92, sigma=1.0, **changes):
    """Return a ledger like Adult's, with this many numbers in the gradient."""
    sizes = (("gradient", size),) if size else ()
    return Ledger([Entry(q, (("gradient", sigma),), steps, sizes, **changes)])


def total_delta(epsilon, ideal_delta, epsilon_s, delta_s, beyond, tau):
    """Return δ of the real mechanism where the ideal one is (ε, δ')-private, in 60 digits."""
    return (
        mpmath.exp(epsilon_s) * ideal_delta
        + (1 + mpmath.exp(epsilon + epsilon_s)) * (delta_s + beyond)
        + (1 + mpmath.exp(epsilon + 2 * epsilon_s)) * tau
    )


ERRORS = st.builds(
    lambda n, lam, beta, tau: SamplerError(n, n * 2.0 ** (2 * lam), n * 2.0**beta, 10.0**tau),
    st.integers(1, 10**13),
    st.integers(-60, -30),
    st.integers(-100, -60),
    st.floats(-40, -8),
)


@given(ERRORS, st.floats(0, 800), st.floats(-12, -0.01))
@PROPERTY
def test_the_terms_keep_delta_in_sixty_digits(error, bound, exponent):
    delta = 10.0**exponent
    terms = error.terms(delta, bound)
    with mpmath.workdps(60):
        n_squares, beyond, tau = mpf(error.squares), mpf(error.outside), mpf(error.tau)
        delta_s = mpf(2) ** -10 * mpf(delta) / (1 + mpmath.exp(bound))
        epsilon_s = n_squares / 2 + mpmath.sqrt(2 * n_squares * mpmath.log(1 / delta_s))
        left = mpf(delta) - (1 + mpmath.exp(bound + 2 * epsilon_s)) * (delta_s + beyond + tau)
        if terms is None:
            assert left <= mpf(delta) * 1e-11
            return
        assert epsilon_s <= terms.epsilon_s <= epsilon_s * (1 + mpf(10) ** -11)
        assert terms.delta_s == pytest.approx(float(delta_s), rel=1e-11)
        assert terms.delta <= left * mpmath.exp(-epsilon_s)
        assert terms.delta >= left * mpmath.exp(-epsilon_s) - mpf(delta) * 1e-11
        whole = total_delta(
            mpf(bound), mpf(terms.delta), mpf(terms.epsilon_s), delta_s, beyond, tau
        )
        assert whole <= mpf(delta)


def test_the_table_of_the_construction():
    """ε_s at δ_s = 1e-9, for Adult, MNIST-sized and large models."""
    for d, steps, expected in (
        (120, 3_780, 2.2e-8), (91_650, 1_840, 4.3e-7), (97_114, 12_840, 1.2e-6),
        (120_722, 19_080, 1.6e-6), (10**8, 10**4, 3.3e-5),
    ):  # fmt: skip
        error = SamplerError.of(ledger_of(d, steps).entries)
        assert error.pairs == steps * d / 2
        terms = error.terms(1e-9 * 2**11, 0.0)  # δ_s = δ/2¹¹ where E = 0
        assert terms.delta_s == pytest.approx(1e-9)
        assert terms.epsilon_s == pytest.approx(expected, rel=0.03)


def test_the_errors_of_several_samplers_add_up():
    entries = [
        Entry(0.1, (("a", 1.0), ("b", 1.0)), 10, (("a", 3), ("b", 8)), tau=1e-20),
        Entry(0.1, (("a", 1.0),), 7, (("a", 5),), lam=2.0**-20, beta=2.0**-40),
        Entry(0.1, (("a", 1.0),), 1000),
    ]
    error = SamplerError.of(entries)
    assert error.pairs == 10 * (2 + 4) + 7 * 3
    assert error.squares == pytest.approx(60 * LAMBDA**2 + 21 * 2.0**-40, rel=1e-11)
    assert error.outside == pytest.approx(60 * BETA + 21 * 2.0**-40, rel=1e-11)
    assert error.tau == pytest.approx(1e-19, rel=1e-11)
    assert error.squares > 60 * LAMBDA**2 + 21 * 2.0**-40


# A mechanism whose ideal ε is known exactly: one Gaussian


def gaussian_epsilon(mu, delta):
    """Solve Balle, Wang 2018, Eq. 6, by bisection in high precision."""
    with mpmath.workdps(40):
        low, high = mpf(0), mpf(4000)
        for _ in range(140):
            middle = (low + high) / 2
            value = mpmath.ncdf(mu / 2 - middle / mu) - mpmath.exp(middle) * mpmath.ncdf(
                -mu / 2 - middle / mu
            )
            low, high = (middle, high) if value > delta else (low, middle)
        return high


def gaussian_delta(epsilon, mu):
    return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(
        -mu / 2 - epsilon / mu
    )


@pytest.mark.parametrize("mu", [0.05, 1.0, 2.0])
@pytest.mark.parametrize(("size", "lam"), [(10**3, LAMBDA), (10**9, LAMBDA), (10**11, 2.0**-30)])
def test_the_stated_epsilon_is_nearly_the_least_that_the_argument_gives(mu, size, lam):
    """δ of the real Gaussian mechanism at the stated ε is at most δ, and at a smaller ε above."""
    ledger = ledger_of(size, steps=1, q=1.0, sigma=1 / mu, tau=1e-18, lam=lam)
    error, delta = SamplerError.of(ledger.entries), 1e-6

    def least(stated):
        """Return the smallest δ that holds at `stated`, over all splits of ε and δ_s = 2⁻¹⁰..."""
        with mpmath.workdps(40):
            ideal = mpf(stated)
            for _ in range(5):  # ε_s depends on E a little
                delta_s = mpf(2) ** -10 * delta / (1 + mpmath.exp(ideal))
                squares = mpf(error.squares)
                epsilon_s = squares / 2 + mpmath.sqrt(2 * squares * mpmath.log(1 / delta_s))
                ideal = max(mpf(stated) - 2 * epsilon_s, mpf(0))
            return total_delta(
                ideal, gaussian_delta(ideal, mu), epsilon_s, delta_s, mpf(error.outside), error.tau
            )

    stated = epsilon_without_amplification(ledger, delta)
    assert least(stated) <= delta * (1 + 1e-6)
    assert least(stated * (1 - 1e-4)) > delta
    assert stated >= gaussian_epsilon(mu, delta)


# Every ε of a ledger


EVERY = [
    partial(epsilon, accountant="pld"),
    partial(epsilon, accountant="rdp"),
    epsilon_without_amplification,
    lambda ledger, delta: curve(ledger, [delta, 1e-4])[0][1],
    lambda ledger, delta: curve(ledger, [1e-4, delta])[1][2],
]


@pytest.mark.parametrize("stated", EVERY)
def test_every_epsilon_holds_the_correction(stated):
    ideal, drawn = stated(ledger_of(0, sigma=40), 1e-6), stated(ledger_of(10**8, sigma=40), 1e-6)
    error = SamplerError.of(ledger_of(10**8).entries)
    assert drawn > ideal + 2 * math.sqrt(2 * error.squares * math.log(2**10 / 1e-6))
    assert drawn < ideal * 1.01
    rare = stated(ledger_of(120, sigma=40, tau=1e-12), 1e-6)
    assert stated(ledger_of(120, sigma=40), 1e-6) < rare


def test_what_is_returned_can_be_checked_by_hand():
    ledger, delta = ledger_of(10**8), 1e-6
    found = real(ledger, delta)
    assert found.epsilon == epsilon(ledger, delta)
    terms = found.terms
    assert found.epsilon == found.ideal + 2 * terms.epsilon_s
    assert found.ideal == pld(ledger, [terms.delta], grid=[delta])[0]
    # The ideal mechanism is (ε, δ')-private by the ordinary accountant too.
    assert found.ideal == pytest.approx(epsilon(ledger_of(0), terms.delta), rel=2e-4)
    n = 1840 * 5 * 10**7
    assert total_delta(found.ideal, terms.delta, terms.epsilon_s, terms.delta_s, n * BETA, 0) <= (
        delta
    )


@pytest.mark.parametrize("stated", EVERY)
def test_a_ledger_with_ideal_noise_has_the_ideal_epsilon(stated):
    plain = ledger_of(0)
    placed = ledger_of(0, run="a", first=7, lam=0.5, beta=0.5)
    assert stated(plain, 1e-6) == stated(placed, 1e-6)
    assert real(plain, 1e-6).terms == (0.0, 0.0, 1e-6)


@given(
    st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 1e-11), st.floats(0, 1e-11),
    st.floats(0.7, 20), st.integers(1, 10**4),
)  # fmt: skip
@settings(PROPERTY, max_examples=25)
def test_epsilon_grows_with_sizes_tau_and_steps(size, more, tau, worse, sigma, steps):
    """By RDP and without amplification, which take a millisecond each."""
    base = {"steps": steps, "sigma": sigma}
    one = ledger_of(size, tau=tau, **base)
    for stated in (partial(epsilon, accountant="rdp"), epsilon_without_amplification):
        cost, ideal = stated(one, 1e-6), stated(ledger_of(0, **base), 1e-6)
        assert cost is None or cost >= ideal
        for worse_one in (
            ledger_of(size + more, tau=tau, **base),
            ledger_of(size, tau=max(tau, worse), **base),
            ledger_of(size, tau=tau, steps=steps + 1, sigma=sigma),
        ):
            more_cost = stated(worse_one, 1e-6)
            if cost is None:
                assert more_cost is None
            else:
                assert more_cost is None or more_cost >= cost * (1 - 1e-8)


@given(ERRORS, st.floats(0.01, 30), st.floats(-9, -2))
@PROPERTY
def test_the_search_finds_a_bound_that_holds(error, mu, exponent):
    delta = 10.0**exponent

    def ideal(small):
        return max(0.0, mu**2 / 2 + mu * float(norm.isf(small)))

    found = real_epsilon(ideal, delta, error)
    assume(found is not None)
    assert found.ideal == ideal(found.terms.delta)
    # The terms hold at the ideal ε itself, which is the E of the argument.
    again = error.terms(delta, found.ideal)
    assert again.delta >= found.terms.delta
    assert again.epsilon_s <= found.terms.epsilon_s
    assert found.epsilon >= ideal(delta)


# No valid ε


def test_an_epsilon_that_the_sampler_cannot_afford_is_none():
    """2·10¹² pairs lie outside of their event with a probability of 5e-11: δ = 1e-6 allows e^ε up
    to 2e4, which is ε = 9.9.
    """
    modest, large = ledger_of(10**9, 4000, 0.02, 1.2), ledger_of(10**9, 4000, 0.1, 0.7)
    assert 5 < epsilon(modest, 1e-6) < 9.9
    assert epsilon(ledger_of(0, 4000, 0.1, 0.7), 1e-6) > 20
    for stated in EVERY:
        assert stated(large, 1e-6) is None
    assert real(large, 1e-6) is None


def test_what_double_precision_loses_comes_off_as_well():
    ledger = ledger_of(120)
    least = smallest_delta(ledger)
    with pytest.raises(ValueError, match=r"PLD in double precision is a bound only above"):
        epsilon(ledger, least)
    assert epsilon(ledger, least * (1 + 1e-4)) is None  # 2⁻¹⁰ of it goes to δ_s
    assert epsilon(ledger, 2 * least) > epsilon(ledger_of(0), 2 * least)
