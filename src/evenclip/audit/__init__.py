"""Metrics by group, the cost of privacy to each group, its causes, and statistics over seeds."""

from evenclip.audit.bounds import (
    Conditions,
    clipping_bound,
    direction_bound,
    direction_bound_star,
    unconditional_bound,
)
from evenclip.audit.cost import excessive_risk, gap, left_out, privacy_cost
from evenclip.audit.curvature import Curvature, Estimate
from evenclip.audit.decomposition import RiskTerms
from evenclip.audit.fairlearn import metric_frame
from evenclip.audit.metrics import NAMES, by_group, overall, predictions, scores, worst
from evenclip.audit.statistics import (
    LEAST_SEEDS,
    Paired,
    bootstrap_interval,
    corrected,
    holm,
    mean_se,
    paired,
    smallest_p,
    t_interval,
    wilcoxon,
)

__all__ = [
    "LEAST_SEEDS",
    "NAMES",
    "Conditions",
    "Curvature",
    "Estimate",
    "Paired",
    "RiskTerms",
    "bootstrap_interval",
    "by_group",
    "clipping_bound",
    "corrected",
    "direction_bound",
    "direction_bound_star",
    "excessive_risk",
    "gap",
    "holm",
    "left_out",
    "mean_se",
    "metric_frame",
    "overall",
    "paired",
    "predictions",
    "privacy_cost",
    "scores",
    "smallest_p",
    "t_interval",
    "unconditional_bound",
    "wilcoxon",
    "worst",
]
