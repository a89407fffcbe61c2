"""ε compared with published numbers, Opacus, quadrature, convolution of the definition, and closed
forms.
"""

import itertools
import logging
import math
import sys
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import norm

from evenclip.mechanism import accountants, accounting
from evenclip.mechanism.accounting import (
    curve,
    epsilon,
    epsilon_without_amplification,
    event,
    rounded_up,
    smallest_delta,
)
from evenclip.mechanism.release import Entry, Ledger
from fresh import fresh

# name: (batches, σ, epochs, RDP, PLD, RDP with a count of σ_count = 10), at δ = 1e-6 with q =
# 1/batches. The RDP column is what the paper prints (3.41, 2.27, 5.90, 2.49), to another digit.
PUBLISHED = {
    "adult": (92, 1.0, 20, 3.408, 3.10, 3.444),
    "dutch": (189, 1.0, 20, 2.269, 2.04, 2.293),
    "mnist": (214, 0.8, 60, 5.903, 5.42, 5.951),
    "celeba": (636, 0.8, 30, 2.493, 2.03, 2.515),
}

# The orders among which RDP takes the best, except four larger ones.
ORDERS = [1 + k / 10 for k in range(1, 100)] + list(range(11, 64))


def ledger_of(q, steps, **multipliers):
    return Ledger([Entry(q, tuple(multipliers.items()), steps)])


# The published numbers


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_epsilons_come_out(name):
    batches, sigma, epochs, rdp, pld, joint_rdp = PUBLISHED[name]
    alone = ledger_of(1 / batches, epochs * batches, gradient=sigma)
    both = ledger_of(1 / batches, epochs * batches, count=10.0, gradient=sigma)
    assert epsilon(alone, 1e-6, "rdp") == pytest.approx(rdp, abs=0.002)
    assert epsilon(alone, 1e-6) == pytest.approx(pld, abs=0.01)
    assert epsilon(both, 1e-6, "rdp") == pytest.approx(joint_rdp, abs=0.002)
    assert epsilon(alone, 1e-6) < epsilon(both, 1e-6) < epsilon(both, 1e-6, "rdp")


# Another library


# Opacus warns about the optimal order while it determines a domain.
@pytest.mark.filterwarnings("ignore:Optimal order is the")
@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(1 / 92, 1.0, 1840), (0.02, 3.0, 500), (0.1, 5.0, 3000)]
)
def test_opacus_agrees(q, sigma, steps):
    ledger = ledger_of(q, steps, gradient=sigma)
    opacus_rdp, opacus_prv = RDPAccountant(), PRVAccountant()
    opacus_rdp.history = opacus_prv.history = [(sigma, q, steps)]
    assert epsilon(ledger, 1e-6, "rdp") == pytest.approx(
        opacus_rdp.get_epsilon(1e-6, alphas=ORDERS), rel=1e-4
    )
    # PRV answers with the upper end of an interval of half-width eps_error.
    prv = opacus_prv.get_epsilon(1e-6, eps_error=0.01)
    assert prv - 0.021 <= epsilon(ledger, 1e-6) <= prv


def test_opacus_agrees_on_a_ledger_whose_noise_changed():
    history = [(1.0, 0.01, 300), (2.0, 0.02, 500), (1.5, 0.01, 200)]
    ledger = Ledger([Entry(q, (("gradient", sigma),), steps) for sigma, q, steps in history])
    prv = PRVAccountant()
    prv.history = history
    upper = prv.get_epsilon(1e-6, eps_error=0.01)
    assert upper - 0.021 <= epsilon(ledger, 1e-6) <= upper


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta"),
    [
        (1 / 92, 1.0, 1840, 1e-6),
        (0.3, 0.5, 100, 1e-5),
        (0.01, 0.4, 50, 1e-9),
        (1.0, 0.3, 10, 1e-2),
        (0.5, 1.0, 2000, 0.1),
        (1e-3, 5.0, 1000, 1e-5),
        (0.02, 20.0, 1, 1e-3),
    ],
)
def test_rdp_takes_the_best_of_all_orders(q, sigma, steps, delta):
    """Of the library's, although not all are tried."""
    ledger = ledger_of(q, steps, gradient=sigma)
    library = dp_accounting.rdp.RdpAccountant().compose(event(ledger))
    assert accountants._rdp_optima(accountants.few_kinds(ledger), (delta,)) == (
        library.get_epsilon_and_optimal_order(delta),
    )


# The definition: P = (1 − q)·N(0, σ²) + q·N(1, σ²) against Q = N(0, σ²)


def log_densities(x, q, sigma):
    log_q = norm.logpdf(x, 0, sigma)
    return np.logaddexp(math.log1p(-q) + log_q, math.log(q) + norm.logpdf(x, 1, sigma)), log_q


def renyi_by_quadrature(q, sigma, alpha):
    """Return the larger of D_α(P‖Q) and D_α(Q‖P), by the trapezoidal rule."""
    x = np.linspace(-alpha - 30 * sigma, alpha + 30 * sigma, 20_001)
    log_p, log_q = log_densities(x, q, sigma)
    directions = [(log_p, log_q), (log_q, log_p)]
    integrals = [
        logsumexp(alpha * a + (1 - alpha) * b) + math.log(x[1] - x[0]) for a, b in directions
    ]
    return max(integrals) / (alpha - 1)


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta"), [(1 / 92, 1.0, 1840, 1e-6), (0.05, 4.0, 200, 1e-5)]
)
def test_rdp_is_the_renyi_divergence_of_the_definition(q, sigma, steps, delta):
    by_order = [
        steps * renyi_by_quadrature(q, sigma, a)
        + math.log1p(-1 / a)
        - math.log(delta * a) / (a - 1)
        for a in ORDERS
    ]
    assert epsilon(ledger_of(q, steps, gradient=sigma), delta, "rdp") == pytest.approx(
        min(by_order), rel=1e-6
    )


def where_loss_is(loss, q, sigma):
    """Return the x at which ln P/Q equals the loss; it increases with the loss."""
    return sigma**2 * math.log1p(math.expm1(loss) / q) + 0.5


def one_step_delta(epsilon, q, sigma):
    """Return the larger hockey-stick divergence of both directions, integrated from the x at which
    the loss is ε.
    """
    x = where_loss_is(epsilon, q, sigma)
    p_above = (1 - q) * norm.sf(x, 0, sigma) + q * norm.sf(x, 1, sigma)
    removed = p_above - math.exp(epsilon) * norm.sf(x, 0, sigma)
    if math.expm1(-epsilon) <= -q:  # ln Q/P never exceeds −ln(1 − q)
        return removed
    x = where_loss_is(-epsilon, q, sigma)
    p_below = (1 - q) * norm.cdf(x, 0, sigma) + q * norm.cdf(x, 1, sigma)
    return max(removed, norm.cdf(x, 0, sigma) - math.exp(epsilon) * p_below)


# Every pair of a rate, a multiplier and a δ once.
ONE_STEP = [
    (q, sigma, (1e-3, 1e-6, 1e-9)[(i + j) % 3])
    for (i, q), (j, sigma) in itertools.product(
        enumerate([0.003, 0.1, 0.9]), enumerate([0.4, 1.0, 5.0])
    )
]


@pytest.mark.parametrize(("q", "sigma", "delta"), ONE_STEP)
def test_pld_of_one_step_is_the_hockey_stick_divergence(q, sigma, delta):
    computed = epsilon(ledger_of(q, 1, gradient=sigma), delta)
    if one_step_delta(1e-9, q, sigma) <= delta:
        assert computed <= 1e-8
        return
    exact = brentq(lambda e: one_step_delta(e, q, sigma) - delta, 1e-9, 200, xtol=1e-13)
    # If ε is nearly 0, the error of the grid is a fraction of the standard deviation of the loss.
    assert exact * (1 - 1e-9) <= computed <= exact * (1 + 2e-4) + 1e-6


def rounded_loss(q, sigma, h, add):
    """Return (lowest value, masses) of the loss of one step, rounded down to multiples of h; a tail
    of 1e-20 is omitted.
    """
    edges = np.linspace(-10 * sigma, 1 + 10 * sigma, 400_001)
    mass = np.diff(norm.cdf(edges, 0, sigma))
    if not add:
        mass = (1 - q) * mass + q * np.diff(norm.cdf(edges, 1, sigma))
    log_p, log_q = log_densities((edges[1:] + edges[:-1]) / 2, q, sigma)
    index = np.floor((log_q - log_p if add else log_p - log_q) / h).astype(int)
    return index.min(), np.bincount(index - index.min(), weights=mass)


def excess_delta(epsilon, losses, masses, delta):
    return np.sum(masses * -np.expm1(np.minimum(epsilon - losses, 0))) - delta


def epsilon_by_convolution(q, sigma, steps, delta, h):
    """Return ε of the composition with every loss rounded down to a multiple of h; it is too small
    by at most steps·h.
    """
    answers = []
    for add in (False, True):
        lowest, masses = rounded_loss(q, sigma, h, add)
        total = masses
        for _ in range(steps - 1):
            total = np.convolve(total, masses)
        losses = h * (steps * lowest + np.arange(len(total)))
        answers.append(brentq(excess_delta, 0, losses[-1], args=(losses, total, delta)))
    return max(answers)


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta"), [(0.02, 0.7, 3, 1e-6), (0.5, 2.0, 6, 1e-6)]
)
def test_pld_of_some_steps_is_the_convolution_of_the_definition(q, sigma, steps, delta):
    h = 2e-3
    computed = epsilon(ledger_of(q, steps, gradient=sigma), delta)
    too_small = epsilon_by_convolution(q, sigma, steps, delta, h)
    assert too_small <= computed <= (too_small + steps * h) * (1 + 2e-4)


# The plain Gaussian


def gaussian_delta(epsilon, mu):
    """Balle, Wang 2018, Eq. 6."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def gaussian_epsilon(mu, delta):
    return brentq(lambda epsilon: gaussian_delta(epsilon, mu) - delta, 0, 100, xtol=1e-12)


@pytest.mark.parametrize(
    ("sigma", "steps", "delta"), [(1.0, 1, 1e-5), (50.0, 2000, 1e-6), (5.0, 400, 1e-9)]
)
def test_without_sampling_it_is_the_gaussian_mechanism(sigma, steps, delta):
    mu = math.sqrt(steps) / sigma
    ledger = ledger_of(1.0, steps, gradient=sigma)
    assert gaussian_delta(epsilon_without_amplification(ledger, delta), mu) == pytest.approx(
        delta, rel=1e-6
    )
    exact = gaussian_epsilon(mu, delta)
    assert exact <= epsilon(ledger, delta) <= exact * (1 + 2e-4)
    assert exact < epsilon(ledger, delta, "rdp") < 1.2 * exact


def test_without_amplification_is_the_same_ledger_at_rate_one():
    sampled = Ledger([Entry(0.01, (("a", 20.0), ("b", 30.0)), 50), Entry(0.5, (("a", 7.0),), 3)])
    full = Ledger([Entry(1.0, entry.multipliers, entry.steps) for entry in sampled.entries])
    assert epsilon_without_amplification(sampled, 1e-6) == epsilon_without_amplification(full, 1e-6)
    assert epsilon_without_amplification(sampled, 1e-6) == pytest.approx(
        epsilon(full, 1e-6), rel=3e-4
    )
    assert epsilon(sampled, 1e-6) < epsilon_without_amplification(sampled, 1e-6)


def test_without_amplification_survives_a_huge_and_a_tiny_cost():
    mu = (
        math.sqrt(20_000) / 0.5
    )  # e^ε is far beyond a float; ε = μ²/2 + μ·Φ⁻¹(1 − δ) up to terms in 1/μ
    huge = epsilon_without_amplification(ledger_of(0.01, 20_000, gradient=0.5), 1e-6)
    assert huge == pytest.approx(mu**2 / 2 + mu * norm.isf(1e-6), rel=1e-4)
    assert epsilon_without_amplification(ledger_of(0.01, 1, gradient=1e9), 1e-6) == 0.0


# An upper bound, also in double precision


def test_pld_stays_above_the_exact_value_at_a_tiny_delta():
    # q is 1 up to rounding: the exact ε is the Gaussian's, while the accountant still uses a
    # Fourier transform, whose rounding would take it below the exact ε from about 1e-12 on.
    steps, sigma = 20_000, 500.0
    ledger = ledger_of(1 - 1e-13, steps, gradient=sigma)
    for delta, slack in ((1e-6, 2e-4), (1e-9, 2e-3), (1.1 * smallest_delta(ledger), 0.1)):
        exact = gaussian_epsilon(math.sqrt(steps) / sigma, delta)
        assert exact <= epsilon(ledger, delta) <= exact * (1 + slack)
    # The δ that rounding may lose is subtracted.
    lost = smallest_delta(ledger)
    assert epsilon(ledger, 2 * lost) >= gaussian_epsilon(math.sqrt(steps) / sigma, lost)


def test_a_delta_below_double_precision_is_refused_by_pld_only():
    ledger = ledger_of(0.01, 2**20, gradient=30.0)
    with pytest.raises(
        ValueError, match=r"delta is 1e-10; PLD in double precision is a bound only above 1.9e-09"
    ):
        epsilon(ledger, 1e-10)
    assert epsilon(ledger, 1e-10, "rdp") > epsilon(ledger, 1e-8, "rdp")


# The ledger


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_type_of_a_number_does_not_matter(accountant):
    numbers = [(2, 10), (2.0, 10.0), (np.float32(2), np.float32(10)), (np.float64(2), np.int64(10))]
    answers = set()
    for sigma, sigma_count in numbers:
        ledger = Ledger()
        for _ in range(100):
            ledger.write(np.float32(0.125), {"count": sigma_count, "gradient": sigma})
        answers.add(epsilon(ledger, 1e-6, accountant))
    assert len(answers) == 1
    assert answers.pop() == epsilon(
        ledger_of(0.125, 100, one=(2.0**-2 + 10.0**-2) ** -0.5), 1e-6, accountant
    )


def test_the_trap_our_event_avoids():
    """In dp-accounting 0.6.0 a composed event under sampling ends at the first multiplier that is
    not a float.
    """
    together = [dp_accounting.GaussianDpEvent(10), dp_accounting.GaussianDpEvent(1)]
    trap = dp_accounting.PoissonSampledDpEvent(1 / 92, dp_accounting.ComposedDpEvent(together))
    library = dp_accounting.rdp.RdpAccountant()
    library.compose(dp_accounting.SelfComposedDpEvent(trap, 1840))
    ours = epsilon(ledger_of(1 / 92, 1840, gradient=1, count=10), 1e-6, "rdp")
    assert ours == pytest.approx(3.444, abs=0.002)
    assert library.get_epsilon(1e-6) < ours / 10


def test_the_exported_event_gives_the_same_epsilon_by_hand():
    ledger = Ledger()
    for _ in range(500):
        ledger.write(0.02, {"count": 10.0, "gradient": 1.5})
    exported = event(ledger)
    by_hand = dp_accounting.rdp.RdpAccountant().compose(exported).get_epsilon(1e-5)
    assert epsilon(ledger, 1e-5, "rdp") == by_hand
    by_hand = (
        dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
        .compose(exported)
        .get_epsilon(1e-5)
    )
    assert epsilon(ledger, 1e-5) == pytest.approx(by_hand, rel=2e-4)


def test_order_does_not_matter_and_equal_steps_are_taken_together():
    one, other = {"count": 10.0, "gradient": 1.5}, {"gradient": 2.0}
    mixed, sorted_, swapped = Ledger(), Ledger(), Ledger()
    for k in range(200):
        mixed.write(0.01, other if k % 2 else one)
        sorted_.write(0.01, other if k >= 100 else one)
        swapped.write(0.01, other if k < 100 else dict(reversed(one.items())))
    assert len(event(mixed).events) == 2
    assert (
        epsilon(mixed, 1e-6)
        == epsilon(sorted_, 1e-6)
        == pytest.approx(epsilon(swapped, 1e-6), rel=1e-9)
    )


def test_what_releases_nothing_costs_nothing():
    assert epsilon(Ledger(), 1e-6) == epsilon(Ledger(), 1e-6, "rdp") == 0.0
    assert epsilon_without_amplification(Ledger(), 1e-6) == 0.0
    idle = Ledger([Entry(0.01, (), 1000), Entry(0.0, (("gradient", 1.0),), 1000)])
    assert epsilon(idle, 1e-6) == epsilon(idle, 1e-6, "rdp") == 0.0
    busy = Ledger([*idle.entries, Entry(0.01, (("gradient", 1.0),), 100)])
    assert epsilon(busy, 1e-6) == epsilon(ledger_of(0.01, 100, gradient=1.0), 1e-6)


@pytest.mark.parametrize(
    "entry",
    [
        Entry(0.01, (("gradient", 0.0),), 1),
        Entry(0.01, (("count", 0.0), ("gradient", 1.0)), 1),
        Entry(None, (("gradient", 1.0),), 1),
    ],
)
def test_a_ledger_that_is_not_private_has_no_epsilon(entry):
    ledger = Ledger([Entry(0.01, (("gradient", 1.0),), 10), entry])
    assert epsilon(ledger, 1e-6) is None
    assert epsilon(ledger, 1e-6, "rdp") is None
    assert epsilon_without_amplification(ledger, 1e-6) is None
    assert curve(ledger, [1e-6]) == [(1e-6, None, None)]
    with pytest.raises(ValueError, match=r"^This ledger has no ε: .* sample by Poisson\.$"):
        event(ledger)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_epsilon_falls_with_noise_and_grows_with_steps_and_rate(accountant):
    base = {"q": 0.02, "steps": 300, "gradient": 1.2}
    cost = epsilon(ledger_of(**base), 1e-6, accountant)
    for change in ({"gradient": 1.21}, {"steps": 299}, {"q": 0.0199}):
        assert epsilon(ledger_of(**base | change), 1e-6, accountant) < cost
    assert epsilon(ledger_of(**base, count=10.0), 1e-6, accountant) > cost
    assert epsilon(ledger_of(**base), 1e-5, accountant) < cost


def test_a_release_alone_is_its_own_joint():
    assert event(ledger_of(0.02, 300, gradient=1.25)).events[0].event.event.noise_multiplier == 1.25


def test_the_curve_is_epsilon_at_each_delta():
    ledger, deltas = ledger_of(0.02, 300, gradient=1.2), [1e-8, 1e-5, 1e-3]
    for delta, rdp, pld in curve(ledger, deltas):
        assert rdp == epsilon(ledger, delta, "rdp")
        assert pld == pytest.approx(epsilon(ledger, delta), rel=2e-4)
        assert pld < rdp
    assert [row[0] for row in curve(ledger, deltas)] == deltas


def test_orders_left_out_by_rdp_are_not_worth_a_message(caplog):
    ledger = ledger_of(0.3, 10, gradient=0.5)
    with caplog.at_level(logging.WARNING):
        assert epsilon(ledger, 1e-6) < epsilon(ledger, 1e-6, "rdp")
    assert not caplog.records


# Formatted values


@given(value=st.floats(1e-6, 1e9), digits=st.integers(1, 8))
def test_a_printed_number_is_never_below_its_value(value, digits):
    printed = Fraction(rounded_up(value, digits))
    assert Fraction(value) <= printed <= Fraction(value) * (1 + Fraction(10, 10**digits))


# Errors


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-6, math.nan])
def test_a_delta_out_of_range_is_refused(delta):
    ledger = ledger_of(0.01, 10, gradient=1.0)
    for ask in (epsilon, epsilon_without_amplification):
        with pytest.raises(
            ValueError, match=rf"^delta is {delta}; it must lie above 0 and below 1"
        ):
            ask(ledger, delta)
    with pytest.raises(ValueError, match=rf"^delta is {delta}; it must lie above 0 and below 1"):
        curve(ledger, [1e-6, delta])


def test_an_unknown_accountant_is_refused():
    with pytest.raises(ValueError, match=r"^accountant is 'prv'; it must be one of rdp, pld\.$"):
        epsilon(ledger_of(0.01, 10, gradient=1.0), 1e-6, "prv")


def test_a_ledger_of_many_multipliers_is_bounded_quickly_and_closely(monkeypatch):
    """If the noise changes with every step, multipliers are rounded down to a few values, so that ε
    only grows.
    """
    steps = 40
    ledger = Ledger([Entry(0.02, (("gradient", 1.5 - t / steps),), 1) for t in range(steps)])
    assert len(accountants.few_kinds(ledger)) <= accountants._MOST_KINDS
    assert sum(kind.steps for kind in accountants.few_kinds(ledger)) == steps
    bounds = {name: epsilon(ledger, 1e-5, name) for name in ("rdp", "pld")}
    monkeypatch.setattr(accountants, "_MOST_KINDS", steps)
    for name, bound in bounds.items():
        exact = epsilon(ledger, 1e-5, name)
        assert exact <= bound <= 1.04 * exact
    two_rates = [Entry(0.02, (("gradient", 1.0 + t / 99),), 1) for t in range(40)]
    two_rates += [Entry(0.5, (("gradient", 9.0 + t / 99),), 1) for t in range(40)]
    monkeypatch.setattr(accountants, "_MOST_KINDS", 4)
    kinds = accountants.few_kinds(Ledger(two_rates))
    assert [sum(part.steps for part in kinds if part.q == q) for q in (0.02, 0.5)] == [40, 40]


def test_a_rate_above_one_is_refused():
    with pytest.raises(
        ValueError, match=r"^Entry 1 of the ledger has q = 1\.5; it must be a Poisson rate"
    ):
        epsilon(ledger_of(1.5, 10, gradient=1.0), 1e-6)


def test_without_the_library_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(
        ImportError, match=r"^ε is computed by dp-accounting, .* run `pip install 'dp-accounting"
    ):
        epsilon(ledger_of(0.01, 10, gradient=1.0), 1e-6)


def test_importing_the_module_does_not_import_the_library():
    code = (
        "import evenclip.mechanism.accounting, sys; "
        "print('dp_accounting' in sys.modules, 'scipy' in sys.modules)"
    )
    assert fresh(code) == "False False\n"


def test_every_public_name_is_documented():
    assert all(getattr(accounting, name).__doc__ for name in accounting.__all__)


def test_what_was_asked_before_is_not_computed_again_and_nothing_else_is_answered(monkeypatch):
    """Another number of steps, rate, multiplier, δ or accountant is computed again."""
    composed, accountant = [], dp_accounting.pld.PLDAccountant
    compose = accountant.compose
    monkeypatch.setattr(
        accountant, "compose", lambda self, *event: composed.append(event) or compose(self, *event)
    )
    first = Ledger([Entry(0.01037, (("gradient", 1.1),), 100)])  # no other test uses this rate
    again = Ledger(
        [Entry(0.01037, (("gradient", 1.1),), 60), Entry(0.01037, (("gradient", 1.1),), 40)]
    )
    known = epsilon(first, 1e-5)
    count = len(composed)
    assert epsilon(again, 1e-5) == known
    assert len(composed) == count > 0
    others = [Entry(0.01037, (("gradient", 1.1),), 101), Entry(0.011, (("gradient", 1.1),), 100)]
    others += [
        Entry(0.01037, (("gradient", 1.0),), 100),
        Entry(0.01037, (("gradient", 1.1), ("count", 9.0)), 100),
    ]
    epsilons = [
        known,
        *(epsilon(Ledger([entry]), 1e-5) for entry in others),
        epsilon(first, 1e-6),
        epsilon(first, 1e-5, "rdp"),
    ]
    assert len({*epsilons}) == 7
