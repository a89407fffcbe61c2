"""Three drawings that explain the paper, computed in the plane with the formulas of training.

    convergence     paths of descent along the batch gradient with no, one or both errors
    clipping        per-sample gradients under each rule, and the angle by which their mean turns
    decomposition   one step, and the costs of its errors in length and direction for each group

Each drawing has two functions: one computes its numbers, without matplotlib, and `draw_…` draws
them. In `convergence` and `decomposition` the batch is all samples, so expectations over batches
are exact. The loss is quadratic, so its second-order expansion is exact too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from evenclip.reproduction.drawings.descent import (
    PATHS,
    Convergence,
    convergence,
    draw_convergence,
)
from evenclip.reproduction.drawings.plane import Array, Problem, problem
from evenclip.reproduction.drawings.rules import Clipping, Treatment, clipping, draw_clipping
from evenclip.reproduction.drawings.step import Decomposition, decomposition, draw_decomposition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "DRAWINGS",
    "PATHS",
    "Array",
    "Clipping",
    "Convergence",
    "Decomposition",
    "Problem",
    "Treatment",
    "clipping",
    "convergence",
    "decomposition",
    "draw_clipping",
    "draw_convergence",
    "draw_decomposition",
    "problem",
]

DRAWINGS: dict[str, Callable[[], Figure]] = {
    "convergence": lambda: draw_convergence(convergence()),
    "clipping": lambda: draw_clipping(clipping()),
    "decomposition": lambda: draw_decomposition(decomposition()),
}
"""Name -> function that computes and draws it."""
