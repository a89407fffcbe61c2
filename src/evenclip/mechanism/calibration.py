"""Calibration: the noise that reaches a target ε.

All noise of a rule is multiplied by one scale s, so that gradient and counts keep their proportion.
ε falls as s grows; a search on the PLD finds the smallest s that costs at most the target. The
target is for the drawn noise, see `evenclip.mechanism.correction`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from evenclip import check
from evenclip.arguments import check_kinds, shown
from evenclip.mechanism.accountants import COARSE, FINE, LEAST_MULTIPLIER, pld
from evenclip.mechanism.accounting import check_delta
from evenclip.mechanism.correction import SamplerError, Terms
from evenclip.mechanism.ledger import BETA, Entry, Ledger, joint_multiplier

if TYPE_CHECKING:
    from evenclip.rules import Rule

AnyRule = TypeVar("AnyRule", bound="Rule")

__all__ = ["calibrate", "gradient_multiplier", "scale_for"]

# Calibration ends with an ε in [1 − 5e-4, 1 − 1e-5] times the target: the upper margin allows
# for different rounding when the multipliers are computed in another order.
_WINDOW, _MARGIN = 5e-4, 1e-5
# Smallest supported target ε. The accountants' arithmetic cannot distinguish smaller ones from 0.
_LEAST_EPSILON = 1e-6
_MOST_ROUNDS = 100
# Parameters of a model that is not known, and numbers in a count: how much noise is drawn at most.
_PARAMETERS, _COUNT = 10**8, 10**4
# Probability per step that a batch has more records than the bound on rounding assumes, at most.
_TAU = BETA


def scale_for(
    multipliers: Mapping[str, float],
    *,
    epsilon: float,
    delta: float,
    q: float,
    steps: int,
    sizes: Mapping[str, int] | None = None,
) -> float:
    """Return the smallest scale s of the multipliers that reaches the target ε at δ, by PLD.

    `steps` steps of rate q with the multipliers {name: s·m} then cost at most ε. Guarantee: the ε
    of that ledger is never above the target, and at most 0.05 % below it. With `sizes`, the numbers
    in each release, this is the ε of the drawn noise; without, of ideal noise.

    >>> from evenclip.mechanism.accounting import epsilon
    >>> unit = {"gradient": 1.0, "count": 10.0}
    >>> s = scale_for(unit, epsilon=3.0, delta=1e-6, q=1 / 92, steps=1840)
    >>> ledger = Ledger([Entry(1 / 92, (("gradient", s), ("count", 10 * s)), 1840)])
    >>> 0.9995 * 3.0 <= epsilon(ledger, 1e-6) <= 3.0
    True

    Raises:
        ValueError: if a value is out of range, or the target holds even without noise, so that no
            multiplier is the smallest (δ is at least the probability that a record is sampled).
    """
    check_kinds(scale_for, locals())
    check.natural(steps=steps)
    plan = [(multipliers, int(steps))]
    return _scale_for(plan, epsilon=epsilon, delta=delta, q=q, sizes=sizes or {})


def _scale_for(
    plan: Sequence[tuple[Mapping[str, float], int]],
    *,
    epsilon: float,
    delta: float,
    q: float,
    sizes: Mapping[str, int],
) -> float:
    """Return `scale_for` for several kinds of steps, each with its number."""
    check.positive(epsilon=epsilon)
    check_delta(delta)
    check.fraction(q=q)
    epsilon, delta, q = float(epsilon), float(delta), float(q)
    for multipliers, _ in plan:
        check.positive(**multipliers)
    if epsilon < _LEAST_EPSILON:
        raise ValueError(
            f"epsilon is {epsilon:g}; below {_LEAST_EPSILON:g} it cannot be distinguished from 0, "
            "and its noise would leave nothing to learn; give a larger epsilon."
        )
    steps = sum(n for _, n in plan)
    precision = sum(n * joint_multiplier(m.values()) ** -2 for m, n in plan) / steps
    if precision == 0:
        raise ValueError("multipliers is empty; give the multiplier of at least one release.")
    sampled = 1.0 if q == 1 else -math.expm1(steps * math.log1p(-q))
    if sampled <= delta:
        raise ValueError(
            f"delta is {delta:g}, and {steps} steps at q = {q:g} sample a record with probability "
            f"{sampled:.3g} only. Any ε holds without noise, so no record is protected; give a "
            "smaller delta."
        )
    terms = _terms(epsilon, delta, steps, sizes)
    unit = precision**-0.5  # of one kind of step that costs about as much as all
    scale: float = _first_guess(epsilon, delta, q, steps) / unit
    for tolerance in (COARSE, FINE):
        cost = partial(_cost, plan, q, (delta, terms), tolerance)
        scale = _solve(cost, epsilon, scale, least=LEAST_MULTIPLIER / unit)
    return scale


def _terms(epsilon: float, delta: float, steps: int, sizes: Mapping[str, int]) -> Terms:
    """Return what the sampler takes from the target ε and from δ."""
    if not sizes:
        return Terms(0.0, 0.0, delta)
    entry = Entry(q=None, multipliers=(), steps=steps, sizes=tuple(sizes.items()), tau=_TAU)
    terms = SamplerError.of([entry]).terms(delta, epsilon)
    if terms is None or 2 * terms.epsilon_s >= epsilon:
        raise ValueError(
            f"epsilon is {epsilon:g} at delta = {delta:g}; the noise of {sum(sizes.values()):.4g} "
            f"numbers in {steps} steps is not drawn exactly enough for it; give "
            f"{'a smaller' if terms is None else 'a larger'} epsilon, a larger delta, or the "
            "model's number of parameters, if it has fewer."
        )
    return terms


def calibrate(
    rule: AnyRule,
    *,
    epsilon: float,
    delta: float,
    q: float,
    steps: int,
    parameters: int = _PARAMETERS,
) -> AnyRule:
    """Return the rule with its noise scaled so that `steps` steps at rate q cost ε at δ.

    The cost includes the rule's counts, and the distance of the drawn noise from ideal noise for
    models of up to `parameters` parameters and statistics of up to 10,000 numbers. Guarantee: by
    PLD, never above the target; and for that number of parameters at most 0.05 % below it.

    >>> from evenclip import DPSGDGlobalAdapt
    >>> rule = calibrate(DPSGDGlobalAdapt(sigma=1.0), epsilon=3.0, delta=1e-6, q=1 / 92, steps=1840)
    >>> round(rule.sigma, 2), round(rule.sigma_count, 1)
    (1.02, 10.2)

    Raises:
        ValueError: if a value is out of range, or the rule adds no noise that could be scaled.
    """
    from evenclip.rules import Rule

    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule is {shown(rule)}; it must be a rule, such as evenclip.DPSGD(sigma=1.0)."
        )
    check_kinds(calibrate, {name: value for name, value in locals().items() if name != "rule"})
    if rule.sigma == 0:
        raise ValueError(
            f"{rule.name} adds no noise, so no ε can be reached with it; choose a private rule."
        )
    if not rule.bounded:
        raise ValueError(
            f"{rule.name} has no valid ε with any noise ({rule.why}); choose a private rule."
        )
    check.natural(steps=steps, parameters=parameters)
    if steps > check.MOST_STEPS:
        raise ValueError(
            f"steps is {steps}; noise is calibrated for at most {check.MOST_STEPS} steps, which "
            "are epochs · records ÷ batch_size: give fewer."
        )
    plan = Counter(tuple(rule.multipliers(t).items()) for t in _kinds_of_steps(rule, steps))
    if len(_kinds_of_steps(rule, steps)) == 1:
        plan = Counter({row: int(steps) for row in plan})
    counts = {name for row in plan for name, _ in row} - {"gradient"}
    scale = _scale_for(
        [(dict(row), n) for row, n in plan.items()],
        epsilon=epsilon,
        delta=delta,
        q=q,
        sizes={"gradient": int(parameters)} | dict.fromkeys(counts, _COUNT),
    )
    return _scaled(rule, scale, steps)


def _kinds_of_steps(rule: Rule, steps: int) -> range:
    """Return the steps whose noise has to be looked at: one, if it does not depend on the step."""
    from evenclip.rules import Rule as Base

    return range(1 if type(rule).multipliers is Base.multipliers else int(steps))


def _scaled(rule: AnyRule, scale: float, steps: int) -> AnyRule:
    """Return the rule with its noise scaled; raise if its noise is not scaled in every step."""
    scaled = rule.scaled(scale)
    for t in _kinds_of_steps(rule, steps):
        expected, given = rule.multipliers(t), scaled.multipliers(t)
        if any(not math.isclose(given[name], scale * expected[name]) for name in expected):
            raise ValueError(
                f"scaled({scale:.3g}) of {rule.name} does not multiply its noise of step {t} by "
                "that factor; compute multipliers(t) from sigma and sigma_count."
            )
    return scaled


def gradient_multiplier(joint: float, count: float, s: float = 1.0) -> float:
    """Return σ_grad = (σ⁻² − s²·σ_count⁻²)^(-1/2), with σ = `joint` and σ_count = `count`.

    With it, gradient and count jointly cost what a single release with multiplier σ costs. `count`
    is the count's noise standard deviation, and s its sensitivity: 1, or ½ for the centred count.

    >>> round(gradient_multiplier(2.4, 4.0), 9)
    3.0

    Raises:
        ValueError: if count ≤ s·joint, so that the count alone costs as much.
    """
    check_kinds(gradient_multiplier, locals())
    check.positive(joint=joint, count=count, s=s)
    joint, count, s = float(joint), float(count), float(s)
    if joint < LEAST_MULTIPLIER:
        raise ValueError(
            f"joint is {joint:g}; a multiplier below {LEAST_MULTIPLIER:g} gives no privacy: give a "
            "larger one."
        )
    if count <= s * joint:
        raise ValueError(
            f"count is {count}; it must be above s·joint = {s * joint:g}, because the count alone "
            "already costs as much as both releases may; give the count more noise."
        )
    return float((joint**-2 - (s / count) ** 2) ** -0.5)


# --- the search ------------------------------------------------------------------------------


_Point = tuple[float, float] | None  # (scale, cost)


def _cost(
    plan: Sequence[tuple[Mapping[str, float], int]],
    q: float,
    allowance: tuple[float, Terms],
    tolerance: float,
    scale: float,
) -> float:
    """Return ε by PLD of the planned steps with all multipliers times `scale`.

    `allowance` is (δ, what the sampler takes of it).
    """
    entries = [
        Entry(float(q), tuple((name, scale * float(m)) for name, m in multipliers.items()), steps)
        for multipliers, steps in plan
    ]
    delta, terms = allowance
    # The grid of δ, so that a ledger of these steps has the same ε to the last digits.
    return pld(Ledger(entries), [terms.delta], tolerance, [delta])[0] + 2 * terms.epsilon_s


def _first_guess(epsilon: float, delta: float, q: float, steps: int) -> float:
    """Estimate the joint multiplier m of T = `steps` steps that cost ε at δ.

    Many steps approach one Gaussian with μ² = T·q²·(e^(m⁻²) − 1). μ solves ε = μ²/2 + μ·√(2 ln
    1/δ), an upper bound of the Gaussian's ε.
    """
    tail = -2 * math.log(delta)
    mu = math.sqrt(tail + 2 * epsilon) - math.sqrt(tail)
    return float(math.log1p((mu / q) ** 2 / steps) ** -0.5)


def _solve(cost: Callable[[float], float], target: float, scale: float, least: float) -> float:
    """Search, starting from `scale`, for a scale ≥ `least` whose cost is just below the target.

    The cost must decrease as the scale grows.
    """
    aim = target * (1 - _WINDOW / 2)
    dear: _Point = None  # closest point above the aim
    cheap: _Point = None  # closest point not above it
    for _ in range(_MOST_ROUNDS):
        if scale < least:
            raise ValueError(
                f"epsilon is {target:g}; it is reached with next to no noise (a multiplier below "
                f"{LEAST_MULTIPLIER:g}), so it gives no privacy; give a smaller epsilon."
            )
        price = cost(scale)
        if target * (1 - _WINDOW) <= price <= target * (1 - _MARGIN):
            return scale
        before = (dear, cheap)
        dear, cheap = ((scale, price), cheap) if price > aim else (dear, (scale, price))
        scale = _next_scale(dear, cheap, aim, halve=_shrank_little(before, (dear, cheap)))
    raise ValueError(
        f"epsilon is {target:g}; the accountant's grid is too coarse for so little noise, so that "
        "no noise multiplier was found: give a smaller epsilon."
    )


def _shrank_little(before: tuple[_Point, _Point], now: tuple[_Point, _Point]) -> bool:
    """Whether this round cut the bracket by less than half of its logarithmic length."""
    if before[0] is None or before[1] is None or now[0] is None or now[1] is None:
        return False
    return (now[1][0] / now[0][0]) ** 2 > before[1][0] / before[0][0]


def _next_scale(dear: _Point, cheap: _Point, aim: float, *, halve: bool) -> float:
    """Return the scale to try next.

    Extrapolate while one side of the bracket is missing; otherwise interpolate in logarithms.
    """
    if cheap is None or dear is None:
        scale, price = dear or cheap or (math.nan, math.nan)
        # ε falls at least like 1/m, so this step reaches the aim or nearly does.
        return scale * min(max(price / aim, 0.25), 4.0)
    share = 0.5
    if not halve and cheap[1] > 0:
        share = math.log(dear[1] / aim) / math.log(dear[1] / cheap[1])
    return float(dear[0] * (cheap[0] / dear[0]) ** share)
