"""The noise multipliers that a rule states, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from evenclip.rules import Rule

__all__ = ["noise_multipliers"]


def noise_multipliers(rule: Rule, t: int) -> dict[str, float]:
    """Return name of a release -> its noise multiplier in step t, as the rule states it.

    Raises:
        ValueError: unless every multiplier is a finite number of at least 0, and the gradient has
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
    """Raise unless a noise multiplier of the rule is a finite number of at least 0."""
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{name} of {rule.name} is {given!r}; it must be a finite number of at least 0."
        )
