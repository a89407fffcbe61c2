"""The noise multipliers that a rule states, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evenclip.rules import Rule

__all__ = ["LARGEST", "SMALLEST", "noise_multipliers"]

# With a multiplier between these, both grids of a release are exact in float64, for sums of up to
# 2²⁵ records (fewer where there are more than 2¹⁸ numbers) and 2³⁶ numbers: |k| ≤ 2⁵¹, H/h ≤ 2⁵².
SMALLEST, LARGEST = 2.0**-20, 2.0**20


def noise_multipliers(rule: Rule, t: int) -> dict[str, float]:
    """Return name of a release -> its noise multiplier in step t, as the rule states it.

    Raises:
        ValueError: unless every multiplier is 0 or from SMALLEST to LARGEST, and the gradient has
            one.
    """
    _check_multiplier(rule, "sigma", rule.sigma)
    counts: Any = rule.sigma_count
    for name, m in (counts if isinstance(counts, Mapping) else {"": counts}).items():
        if m is not None:
            _check_multiplier(rule, f"sigma_count[{name!r}]" if name else "sigma_count", m)
    try:
        given: Any = type(rule).multipliers(rule, t)
    except TypeError as error:
        raise ValueError(
            f"multipliers of {rule.name} cannot be called with the step ({error}); write "
            "def multipliers(self, t)."
        ) from error
    if not (isinstance(given, Mapping) and "gradient" in given):
        raise ValueError(
            f"multipliers of {rule.name} returned {given!r}; it must return a dictionary with the "
            "noise multiplier of 'gradient' and of every statistic."
        )
    for name, m in given.items():
        _check_multiplier(rule, f"the multiplier of {name!r} in step {t}", m)
    return {name: float(m) for name, m in given.items()}


def _check_multiplier(rule: Rule, name: str, given: Any) -> None:
    """Raise unless a noise multiplier of the rule is 0, or one that noise can be drawn for."""
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{name} of {rule.name} is {given!r}; it must be a finite number of at least 0."
        )
    if value and not SMALLEST <= value <= LARGEST:
        raise ValueError(
            f"{name} of {rule.name} is {given!r}; the grids that values are released on hold noise "
            "multipliers from 1e-6 to 1e6. Give one of these, or use NonPrivate() for no noise."
        )
