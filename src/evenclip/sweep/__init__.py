"""Sets of training runs, and the executors that carry them out.

A `Spec` names a run; `describe` turns its data, model and rule into plain values. `work` computes
the result, `store` keeps it, and an executor (`Local`, `Ray` or `Slurm`) distributes the runs.
"""

from evenclip.sweep.executor import Executor, ProgressDisplay, RunsError, Silent, carry_out
from evenclip.sweep.local import Local
from evenclip.sweep.ray import Ray
from evenclip.sweep.slurm import Slurm
from evenclip.sweep.spec import Spec
from evenclip.sweep.store import Store

__all__ = [
    "Executor",
    "Local",
    "ProgressDisplay",
    "Ray",
    "RunsError",
    "Silent",
    "Slurm",
    "Spec",
    "Store",
    "carry_out",
]
