"""Runs: what to run (spec), from which parts (parts), what comes out (work), where it lies (store), who does it
(local).
"""

from evenclip.runs.local import RunsError, carry_out
from evenclip.runs.spec import Spec
from evenclip.runs.store import Store

__all__ = ["RunsError", "Spec", "Store", "carry_out"]
