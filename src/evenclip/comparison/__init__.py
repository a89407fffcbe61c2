"""Paired runs of many rules on one dataset, and what privacy costs each group."""

from evenclip.comparison.compare import compare
from evenclip.comparison.result import Comparison, Outcome

__all__ = ["Comparison", "Outcome", "compare"]
