"""Runs: what to run (spec), from which parts (parts), what comes out (work), where it lies (store), who does it
(an engine: local, ray, slurm).
"""

from evenclip.runs.engine import Engine, RunsError, Show, Silent, carry_out
from evenclip.runs.local import Local
from evenclip.runs.ray import Ray
from evenclip.runs.slurm import Slurm
from evenclip.runs.spec import Spec
from evenclip.runs.store import Store

__all__ = ["Engine", "Local", "Ray", "RunsError", "Show", "Silent", "Slurm", "Spec", "Store", "carry_out"]
