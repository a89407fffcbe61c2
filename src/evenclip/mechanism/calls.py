"""Calls of a rule's methods; an error of a custom rule names the method and the line."""

from __future__ import annotations

import inspect
from typing import Any

from evenclip import check
from evenclip.rules import Rule

__all__ = ["call", "failure", "wanted"]

# What a statistic may have as parameters beside norm, group and state.
_FURTHER = ("loss", "output", "y")


def call(rule: Rule, method: str, *given: Any) -> Any:
    """Return `rule.METHOD(*given)`.

    Raises:
        ValueError: if the method raises anything; the message has the reason and the line.
    """
    try:
        return getattr(rule, method)(*given)
    except Exception as error:  # anything that a custom rule may raise
        raise failure(rule, method, error) from error


def failure(rule: Rule, method: str, error: Exception) -> ValueError:
    """Return the error of a method of a rule as one sentence."""
    code = getattr(getattr(type(rule), method, None), "__code__", None)
    path = "" if code is None else code.co_filename
    return ValueError(f"{method} of {rule.name} failed: {check.reason(error, path)}")


def wanted(rule: Rule) -> tuple[str, ...]:
    """Return which of `loss`, `output` and `y` the rule's statistic has as parameters."""
    parameters = inspect.signature(rule.statistic).parameters
    return tuple(name for name in _FURTHER if name in parameters)
