"""One rule per file; the only map from names to classes."""

from evenclip.rules.dpsgd import DPSGD
from evenclip.rules.dpsgd_f import DPSGDF
from evenclip.rules.dpsgd_global import DPSGDGlobal
from evenclip.rules.dpsgd_global_adapt import DPSGDGlobalAdapt
from evenclip.rules.fairlens import FairLens
from evenclip.rules.nonprivate import NonPrivate
from evenclip.rules.rule import NO_EPSILON, REPAIRED, SOUND, Constants, Rule

__all__ = [
    "DPSGD",
    "DPSGDF",
    "NO_EPSILON",
    "REPAIRED",
    "RULES",
    "SOUND",
    "Constants",
    "DPSGDGlobal",
    "DPSGDGlobalAdapt",
    "FairLens",
    "NonPrivate",
    "Rule",
]

RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (NonPrivate, DPSGD, DPSGDF, DPSGDGlobal, DPSGDGlobalAdapt, FairLens)
}
"""Name -> class."""
