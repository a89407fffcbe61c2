"""Rules as plain values: a named rule, or a custom class in a file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from evenclip.rules import RULES, Rule, check_complete
from evenclip.sweep.describe.files import call, describe_file, load_module
from evenclip.training.contents import NoDigest, contents

__all__ = ["describe_rule", "make_rule", "named_rule"]


def named_rule(given: str) -> Rule | str:
    """Return a rule given as on the command line.

    A name is checked and returned; for file.py:Class the custom rule is created with its defaults.
    """
    if ".py:" not in given:
        if given.endswith(".py"):
            raise ValueError(
                f"{given} is a Python file; name the rule in it, as in {given}:MyRule."
            )
        if given not in RULES:
            raise ValueError(
                f"There is no rule {given!r}; choose among {', '.join(RULES)}, or give "
                "file.py:Class for your own."
            )
        return given
    path, _, name = given.rpartition(":")
    return make_rule({"class": name, "options": {}, **describe_file(path)})


def describe_rule(rule: Rule) -> dict[str, Any]:
    """Describe a rule as plain values."""
    check_complete(type(rule))
    options = {field.name: getattr(rule, field.name) for field in fields(rule)}  # type: ignore[arg-type]
    if RULES.get(rule.name) is type(rule):
        return {"name": rule.name, "options": options}
    try:
        path = inspect.getsourcefile(type(rule))
    except TypeError:
        path = None
    if path is None or not Path(path).is_file():
        raise ValueError(
            f"The rule {rule.name!r} ({type(rule).__qualname__}) has no file that other processes "
            "could load it from; put it into its own .py file."
        )
    kind = {"name": rule.name, "class": type(rule).__qualname__}
    description = {**kind, "options": options, **describe_file(path)}
    _check_same(rule, description)
    return description


def _check_same(rule: Rule, description: Mapping[str, Any]) -> None:
    """Raise unless the file defines the rule as it is here.

    Workers execute the file. It may have been edited after it was imported, and the class may have
    been changed in memory.
    """
    if _digest(rule) != _digest(make_rule(description)):
        raise ValueError(
            f"The rule {rule.name!r} is not what {description['path']} defines: the file was "
            "edited after it was imported, or the rule was changed in memory; start Python again, "
            "and change the rule in its file only."
        )


def _digest(rule: Rule) -> str:
    """Return what a rule computes; "" if its code cannot be seen: it then trains with no seed."""
    try:
        return contents(rule)
    except NoDigest:
        return ""


def make_rule(description: Mapping[str, Any]) -> Rule:
    """Create the described rule."""
    options = dict(description.get("options", {}))
    if "class" not in description:
        return RULES[description["name"]](**options)
    kind = getattr(load_module(description), description["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, Rule)):
        raise ValueError(
            f"{description['path']} has no rule {description['class']!r}; give file.py:Class with "
            "a subclass of evenclip.Rule."
        )
    check_complete(kind)
    path, name = description["path"], description["class"]
    rule: Rule = call(lambda: kind(**options), f"{name} of {path}", path)
    return rule
