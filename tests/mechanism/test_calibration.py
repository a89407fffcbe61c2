"""Calibration: the computed noise reaches the target ε, and never exceeds it."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenclip import DPSGDGlobalAdapt, Rule
from evenclip.mechanism import calibration
from evenclip.mechanism.accounting import epsilon
from evenclip.mechanism.calibration import calibrate, gradient_multiplier, scale_for
from evenclip.mechanism.release import Entry, Ledger


def check_calibrated(target, q, steps, delta, multipliers):
    scale = scale_for(multipliers, epsilon=target, delta=delta, q=q, steps=steps)
    ledger = Ledger()
    ledger.entries = [Entry(q, tuple((name, scale * m) for name, m in multipliers.items()), steps)]
    assert 0.9995 * target <= epsilon(ledger, delta) <= target


@pytest.mark.parametrize(
    ("target", "q", "steps", "delta"),
    [
        (0.01, 0.01, 1000, 1e-6),
        (0.01, 1.0, 20_000, 1e-6),
        (0.1, 0.3, 1, 1e-8),
        (3.0, 1 / 92, 1840, 1e-6),
        (8.0, 0.1, 50, 1e-3),
        (100.0, 1.0, 1, 1e-6),
        (100.0, 0.3, 20_000, 1e-6),
    ],
)
def test_calibration_never_exceeds_the_target_and_hits_it(target, q, steps, delta):
    check_calibrated(target, q, steps, delta, {"gradient": 1.0, "count": 10.0})


@settings(max_examples=5)
@given(
    target=st.floats(0.05, 30),
    q=st.floats(0.003, 1),
    steps=st.integers(1, 5000),
    exponent=st.integers(-8, -3),
    sigma=st.floats(1e-3, 1e3),
)
def test_calibration_hits_any_target(target, q, steps, exponent, sigma):
    check_calibrated(target, q, steps, 10.0**exponent, {"gradient": sigma})


@pytest.mark.parametrize(
    ("target", "q", "steps", "delta", "size"),
    [
        (0.01, 0.01, 1000, 1e-6, 10**4),
        (0.1, 0.3, 1, 1e-8, 10**11),
        (3.0, 1 / 92, 1840, 1e-6, 91_650),
        (3.0, 1 / 92, 1840, 1e-6, 10**9),
        (8.0, 0.01, 10_000, 1e-6, 10**8),
        (8.0, 0.1, 50, 1e-3, 10**12),
        (0.05, 1.0, 10, 1e-6, 10**12),
    ],
)
def test_calibration_of_drawn_noise_never_exceeds_the_target_and_hits_it(
    target, q, steps, delta, size
):
    sizes = {"gradient": size, "count": 5}
    unit = {"gradient": 1.0, "count": 10.0}
    scale = scale_for(unit, epsilon=target, delta=delta, q=q, steps=steps, sizes=sizes)
    noise = tuple((name, scale * m) for name, m in unit.items())
    ledger = Ledger([Entry(q, noise, steps, tuple(sizes.items()), tau=2.0**-75)])
    assert 0.9995 * target <= epsilon(ledger, delta) <= target
    assert epsilon(Ledger([Entry(q, noise, steps)]), delta) < epsilon(ledger, delta)


def test_a_rule_is_calibrated_for_the_noise_of_its_model():
    target = {"epsilon": 8.0, "delta": 1e-6, "q": 0.01, "steps": 10_000}
    for parameters, known in ((10**8, {}), (120, {"parameters": 120})):
        rule = calibrate(DPSGDGlobalAdapt(), **target, **known)
        sizes = (("count", 1), ("gradient", parameters))
        noise = tuple(rule.multipliers().items())
        ledger = Ledger([Entry(0.01, noise, 10_000, sizes, tau=2.0**-80)])
        assert 0.9995 * 8 <= epsilon(ledger, 1e-6) <= 8


def test_a_target_that_the_sampler_cannot_reach_is_refused():
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the whole text is compared
        calibrate(DPSGDGlobalAdapt(), epsilon=14.0, delta=1e-6, q=0.01, steps=10_000)
    assert str(refused.value) == (
        "epsilon is 14 at delta = 1e-06; the noise of 1e+08 numbers in 10000 steps is not drawn "
        "exactly enough for it; give a smaller epsilon, a larger delta, or the model's number of "
        "parameters, if it has fewer."
    )
    calibrate(DPSGDGlobalAdapt(), epsilon=14.0, delta=1e-6, q=0.01, steps=10_000, parameters=120)
    with pytest.raises(ValueError, match=r"give a larger epsilon"):
        calibrate(DPSGDGlobalAdapt(), epsilon=1e-5, delta=1e-6, q=0.01, steps=10_000)


def test_calibration_scales_only():
    both = scale_for({"gradient": 2.0, "count": 20.0}, epsilon=2.0, delta=1e-5, q=0.02, steps=300)
    half = scale_for({"gradient": 1, "count": 10}, epsilon=2.0, delta=1e-5, q=0.02, steps=300)
    assert 2 * both == pytest.approx(half, rel=1e-3)


def test_calibration_that_makes_no_sense_is_refused():
    with pytest.raises(
        ValueError, match=r"10 steps at q = 1e-08 sample a record with probability 1e-07 only"
    ):
        scale_for({"gradient": 1.0}, epsilon=1.0, delta=1e-6, q=1e-8, steps=10)
    with pytest.raises(ValueError, match=r"epsilon is 1e\+07; it is reached with next to no noise"):
        scale_for({"gradient": 1.0}, epsilon=1e7, delta=1e-6, q=1.0, steps=1)
    with pytest.raises(
        ValueError, match=r"multipliers is empty; give the multiplier of at least one release"
    ):
        scale_for({}, epsilon=1.0, delta=1e-6, q=0.1, steps=1)
    with pytest.raises(ValueError, match=r"count is 0\.0; it must be a finite number above 0"):
        scale_for({"count": 0.0}, epsilon=1.0, delta=1e-6, q=0.1, steps=1)
    with pytest.raises(ValueError, match=r"epsilon is -1\.0; it must be"):
        scale_for({"count": 1.0}, epsilon=-1.0, delta=1e-6, q=0.1, steps=1)
    with pytest.raises(ValueError, match=r"q is 1\.5; it must lie above 0 and at most at 1"):
        scale_for({"count": 1.0}, epsilon=1.0, delta=1e-6, q=1.5, steps=1)


@pytest.mark.parametrize("s", [1.0, 0.5])
def test_gradient_and_count_cost_what_the_joint_costs(s):
    sigma = gradient_multiplier(1.0, 10.0, s)
    assert sigma > 1.0
    both = Ledger([Entry(1 / 92, (("gradient", sigma), ("count", 10.0 / s)), 1840)])
    assert epsilon(both, 1e-6, "rdp") == pytest.approx(3.408, abs=0.002)


def test_a_count_that_costs_too_much_is_refused():
    with pytest.raises(
        ValueError, match=r"^count is 1\.0; it must be above s·joint = 1, .* more noise\.$"
    ):
        gradient_multiplier(1.0, 1.0)
    assert gradient_multiplier(1.0, 1.0, s=0.5) == pytest.approx(0.75**-0.5)


@dataclass(frozen=True)
class Decays(Rule):
    """DPSGD whose noise decreases linearly from 1.5σ to 0.5σ."""

    name: ClassVar[str] = "decays"
    sigma: float = 1.0
    steps: int = 8

    def multipliers(self, t=0):
        return {"gradient": self.sigma * (1.5 - t / self.steps)}

    def sensitivity(self, now):
        return 1.0

    def weight(self, norm, group, now):
        return (1.0 / norm).clamp(max=1.0)


class DecaysBySteps(Decays):
    """Its noise is not proportional to sigma."""

    def multipliers(self, t=0):
        return {"gradient": 1.5 - t / self.steps}


def test_noise_that_depends_on_the_step_is_calibrated_as_it_is_added():
    rule = calibrate(Decays(), epsilon=2.0, delta=1e-5, q=0.05, steps=8)
    ledger = Ledger()
    for t in range(8):
        ledger.write(0.05, rule.multipliers(t))
    assert 0.9995 * 2.0 <= epsilon(ledger, 1e-5) <= 2.0
    with pytest.raises(ValueError, match=r"does not multiply its noise of step 0 by that factor"):
        calibrate(DecaysBySteps(), epsilon=2.0, delta=1e-5, q=0.05, steps=8)


def test_every_public_name_is_documented():
    assert all(getattr(calibration, name).__doc__ for name in calibration.__all__)
