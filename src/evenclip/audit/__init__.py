"""Who is served how well, what privacy cost whom, and what a few seeds can show of it."""

from evenclip.audit.cost import excessive_risk, gap, left_out, privacy_cost
from evenclip.audit.fairlearn import metric_frame
from evenclip.audit.metrics import NAMES, by_group, overall, predictions, scores, worst
from evenclip.audit.statistics import (
    Paired,
    bootstrap_interval,
    holm,
    mean_se,
    paired,
    smallest_p,
    t_interval,
    wilcoxon,
)

__all__ = [
    "NAMES",
    "Paired",
    "bootstrap_interval",
    "by_group",
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
    "wilcoxon",
    "worst",
]
