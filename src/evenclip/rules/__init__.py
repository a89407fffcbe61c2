"""One rule per file; the only map from names to classes."""

from evenclip.arguments import shown
from evenclip.rules.dpsgd import DPSGD
from evenclip.rules.dpsgd_f import DPSGDF
from evenclip.rules.dpsgd_global import DPSGDGlobal
from evenclip.rules.dpsgd_global_adapt import DPSGDGlobalAdapt
from evenclip.rules.fairlens import FairLens
from evenclip.rules.nonprivate import NonPrivate
from evenclip.rules.rule import (
    ENFORCED,
    NO_EPSILON,
    REPAIRED,
    SOUND,
    Constants,
    Rule,
    check_complete,
)

__all__ = [
    "DPSGD",
    "DPSGDF",
    "ENFORCED",
    "NO_EPSILON",
    "PROVED",
    "REPAIRED",
    "RULES",
    "SOUND",
    "Constants",
    "DPSGDGlobal",
    "DPSGDGlobalAdapt",
    "FairLens",
    "NonPrivate",
    "Rule",
    "check_complete",
    "soundness",
]

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        NonPrivate,
        DPSGD,
        DPSGDF,
        DPSGDGlobal,
        DPSGDGlobalAdapt,
        FairLens,
    )
}
"""Name -> class."""


PROVED = frozenset({SOUND, REPAIRED})
"""Soundness of rules whose bound is proved."""


def soundness(rule: Rule) -> str:
    """Return the soundness to print beside the ε of a rule.

    The bounds of built-in rules are proved by tests. A custom rule is held to the bound that it
    declares, so its ε is valid, but nothing proves that its formula keeps the bound.

    It depends on the class of the rule and on nothing else. Whether a weight had to be clamped in a
    run depends on its records; that is a private figure, see `evenclip.training.trace.events`.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"rule is {shown(rule)}; it must be a rule, such as evenclip.DPSGD().")
    built_in = RULES.get(getattr(rule, "name", "")) is type(rule)
    return rule.soundness if built_in or rule.soundness == NO_EPSILON else ENFORCED
