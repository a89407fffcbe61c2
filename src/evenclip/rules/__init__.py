"""One rule per file; the only map from names to classes."""

from evenclip.rules.dpsgd import DPSGD
from evenclip.rules.dpsgd_f import DPSGDF
from evenclip.rules.dpsgd_global import DPSGDGlobal
from evenclip.rules.dpsgd_global_adapt import DPSGDGlobalAdapt
from evenclip.rules.nonprivate import NonPrivate
from evenclip.rules.rule import NO_EPSILON, REPAIRED, SOUND, Rule

__all__ = [
    "BY_NAME",
    "DPSGD",
    "DPSGDF",
    "NO_EPSILON",
    "REPAIRED",
    "SOUND",
    "DPSGDGlobal",
    "DPSGDGlobalAdapt",
    "NonPrivate",
    "Rule",
]

BY_NAME: dict[str, type[Rule]] = {
    rule.name: rule for rule in (NonPrivate, DPSGD, DPSGDF, DPSGDGlobal, DPSGDGlobalAdapt)
}
