"""Runs: what to run (spec), from which parts (parts), what comes out (work), where it lies (store),
who does it (an executor: local, ray, slurm).
"""

from evenclip.sweep.executor import Executor, RunsError, Show, Silent, carry_out
from evenclip.sweep.local import Local
from evenclip.sweep.ray import Ray
from evenclip.sweep.slurm import Slurm
from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store

__all__ = [
    "Executor",
    "Local",
    "Ray",
    "RunsError",
    "Show",
    "Silent",
    "Slurm",
    "Spec",
    "Store",
    "carry_out",
]
