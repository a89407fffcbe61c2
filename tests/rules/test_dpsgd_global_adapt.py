"""DPSGD-Global-Adapt compared with Algorithm 2 with its red parts, with DPSGD, and with the paper's
statements on Z.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import lognorm, norm

from evenclip.mechanism import Mechanism
from evenclip.mechanism.noise import NormalStream
from evenclip.mechanism.release import Release
from evenclip.rules import DPSGD, Constants, DPSGDGlobalAdapt
from exact import Ideal

NO_GROUPS = torch.zeros(0, dtype=torch.int64)


def algorithm_2(gradients, C0, Z, tau, eta_Z, sigma, sigma_count, B, noise, count_noise):
    """Return g̃_B and the next Z, with the public B where the box has |B|, and γ = C0/max(Z, ‖g‖)
    also for Z < C0.
    """
    total, above = [0.0, 0.0, 0.0], 0
    for gradient in gradients:
        length = math.sqrt(sum(x * x for x in gradient))
        factor = C0 / Z
        if length > Z:
            factor = C0 / length
        if length > tau * Z:
            above += 1
        for j, x in enumerate(gradient):
            total[j] += factor * x
    b = (above + sigma_count * count_noise) / B
    return [(total[j] + sigma * C0 * noise[j]) / B for j in range(3)], Z * math.exp(-eta_Z + b)


BOUNDS = [(1.0, 10.0), (0.5, 50.0), (0.7, 1.3), (3.3, 0.7), (0.1, 1e-3), (1.0, 1e3)]


@pytest.mark.parametrize(("C0", "Z"), BOUNDS)
def test_weights(C0, Z, norms_around):
    norms = norms_around(Z, C0)
    rule = DPSGDGlobalAdapt(C0=C0, Z0=Z)
    weights, held = Mechanism(rule).weights(
        norms, torch.zeros(len(norms)), rule.init(Constants(groups=3)), C0, None
    )
    expected = [C0 / Z if n <= Z else C0 / n for n in norms.tolist()]
    # torch takes a number over a tensor as number · (1/tensor): two roundings where the loop has
    # one.
    torch.testing.assert_close(
        weights, torch.tensor(expected, dtype=torch.float64), rtol=2.0**-51, atol=0
    )
    assert held is None


@pytest.mark.parametrize("tau", [1.0, 0.7])
def test_count_is_strict_at_tau_Z(tau):
    Z = torch.tensor(3.3, dtype=torch.float64)
    edge = tau * 3.3
    norms = torch.tensor(
        [0.0, math.nextafter(edge, 0), edge, math.nextafter(edge, 9), 1e12], dtype=torch.float64
    )
    each = DPSGDGlobalAdapt(tau=tau).statistic(norms, torch.zeros(5), Z)
    assert each.tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("tau", [1.0, 0.7])
@pytest.mark.parametrize(("C0", "Z"), BOUNDS)
def test_steps(C0, Z, tau, take_step, batch):
    gradients, group = batch
    random = np.random.default_rng(0)
    rule = DPSGDGlobalAdapt(C0=C0, sigma=0.8, Z0=Z, tau=tau, eta_Z=0.3, sigma_count=4.0)
    state = rule.init(Constants(groups=3))
    for _ in range(5):
        noise, count_noise = random.normal(size=3), random.normal(size=1)
        given = {"gradient": torch.from_numpy(noise), "count": torch.from_numpy(count_noise)}
        gradient, now, state, multipliers = take_step(rule, gradients, group, state, 38.0, given)
        assert float(now) == pytest.approx(Z, rel=1e-13)
        expected, Z = algorithm_2(
            gradients.tolist(), C0, Z, tau, 0.3, 0.8, 4.0, 38.0, noise, count_noise[0]
        )
        torch.testing.assert_close(
            gradient, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
        )
        assert float(state) == pytest.approx(Z, rel=1e-13)
        assert multipliers == {"count": 4.0, "gradient": 0.8}


def test_it_is_dpsgd_with_bound_Z_and_learning_rate_eta_C0_over_Z(take_step):
    """Both train θ towards the mean of x (g_i = θ − x_i) with the same batches and noise, while Z
    changes.
    """
    random = np.random.default_rng(3)
    x = torch.from_numpy(random.normal(size=(200, 3)) * random.lognormal(0.0, 1.0, (200, 1)))
    C0, eta, B, group = 0.7, 0.9, 32.0, torch.zeros(32, dtype=torch.int64)
    rule = DPSGDGlobalAdapt(C0=C0, sigma=0.6, Z0=20.0)
    theirs = ours = torch.full((3,), 5.0, dtype=torch.float64)
    Z, seen = rule.init(Constants(groups=1)), []
    for _ in range(40):
        rows = x[torch.from_numpy(random.integers(0, 200, 32))]
        noise = {
            name: torch.from_numpy(random.normal(size=n))
            for name, n in (("gradient", 3), ("count", 1))
        }
        g, now, Z, _ = take_step(rule, ours - rows, group, Z, B, noise)
        dpsgd = DPSGD(C0=float(now), sigma=0.6)
        g_dpsgd, *_ = take_step(
            dpsgd, theirs - rows, group, dpsgd.init(Constants(groups=1)), B, noise
        )
        ours, theirs = ours - eta * g, theirs - eta * C0 / float(now) * g_dpsgd
        seen.append(float(now))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert max(seen) > 2 * min(seen)  # Z did move


@pytest.mark.parametrize("tau", [1.0, 0.7])
@pytest.mark.parametrize("Z0", [1e-3, 1e3])
def test_Z_settles_where_a_fraction_eta_Z_of_the_norms_is_above_tau_Z(Z0, tau):
    rule = DPSGDGlobalAdapt(Z0=Z0, tau=tau, eta_Z=0.1, sigma=1.0)
    guard, Z = Mechanism(rule), rule.init(Constants(groups=1))
    noise, random = NormalStream(bytes(32), 1), np.random.default_rng(2)
    above, spread = [], 1.5
    for t in range(700):
        norms = torch.from_numpy(random.lognormal(0.5, spread, random.poisson(256)))
        above.append(lognorm.sf(tau * float(Z), spread, scale=math.exp(0.5)))
        count = guard.count(norms, torch.zeros(len(norms)), Z, None)
        noisy = Release({"count": noise.of(t)})(
            "count", count, sensitivity=1.0, multiplier=rule.sigma_count, rounding=0.0
        )
        _, Z = rule.observe(noisy, 256.0, Z)
    assert 0.085 < np.mean(above[350:]) < 0.115
    quantile = lognorm.isf(0.1, spread, scale=math.exp(0.5)) / tau
    assert 0.6 * quantile < float(Z) < 1.6 * quantile


@pytest.mark.parametrize("excess", [-2.0, 0.0, 1.0, 2.0])
def test_Z_rises_with_probability_Phi_of_the_excess(excess):
    """Section 5: with η_Z·B + 2σ_count norms above τZ, Z rises with probability 0.977 = Φ(2)."""
    B, draws = 1000, 20_000
    rule = DPSGDGlobalAdapt(Z0=1.0, eta_Z=0.1, sigma=1.0)
    many = round(0.1 * B + excess * rule.sigma_count)
    norms = torch.cat([torch.full((many,), 2.0), torch.full((B - many,), 0.5)]).double()
    count = Mechanism(rule).count(norms, torch.zeros(B), rule.init(Constants(groups=1)), None)
    noise = NormalStream(bytes(32), draws).of(0)[:]
    rises = 0
    for z in noise.split(1):
        noisy = Ideal({"count": z})("count", count, sensitivity=1.0, multiplier=rule.sigma_count)
        now, following = rule.observe(noisy, float(B), rule.init(Constants(groups=1)))
        rises += bool(following > now)
    expected = norm.cdf(excess)
    assert abs(rises / draws - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)
    if excess == 2.0:
        assert round(expected, 3) == 0.977


@pytest.mark.parametrize("Z0", [1e-12, 1.0, 1e12, 1e-300, 1e300])
def test_Z_stays_finite_on_batches_of_one_with_huge_noise(Z0):
    rule = DPSGDGlobalAdapt(Z0=Z0, sigma_count=1e6)
    Z, noise = rule.init(Constants(groups=1)), NormalStream(bytes(32), 1)
    for t in range(200):
        noisy = 1e6 * noise.of(t)[:]
        _, Z = rule.observe(noisy, 1.0, Z)
        assert 1e-12 <= float(Z) <= 1e12


def test_an_empty_batch_lowers_Z_by_exactly_eta_Z():
    rule = DPSGDGlobalAdapt(Z0=4.0, eta_Z=0.25)
    count = Mechanism(rule).count(
        torch.zeros(0, dtype=torch.float64), NO_GROUPS, rule.init(Constants(groups=1)), None
    )
    assert count.tolist() == [0.0]
    assert float(rule.observe(count, 256.0, rule.init(Constants(groups=1)))[1]) == pytest.approx(
        4.0 * math.exp(-0.25), rel=1e-15
    )
