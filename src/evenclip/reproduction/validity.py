"""Where the expansion of a step's risk holds, and which of its terms is larger.

R_mag and R_dir expand a group's loss to second order in the step. The expansion means little where
the step is long for the curvature along it:

    c_a = η · g_Bᵀ H^a g_B / ‖g_B‖²        |c_a| ≤ 1 is asked for here

Proposition 3 of the paper asks for more: η ≤ 1/λ_max(H^a), which is c_a ≤ 1 in every direction.
Figures draw the terms only where |c_a| ≤ 1. The table of this module says how often that is so.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from evenclip.comparison.presets import SETTINGS
from evenclip.rules import NonPrivate

__all__ = ["LIMIT", "NAME", "TITLE", "draw", "holds", "ratio"]

NAME, TITLE = "validity", "Where the second-order terms of the risk hold"

LIMIT = 1.0
"""Largest |c_a| at which a figure draws R_mag and R_dir."""

Run = Mapping[str, Any]
"""Measurements of an observed run; see `evenclip.reproduction.observed`."""


def ratio(run: Run, measured: Mapping[str, Any], k: int) -> float | None:
    """Return c_a of the k-th group at one measurement; None if g_B is 0.

    The non-private term is −η⟨g_a, g_B⟩ + η²/2 g_Bᵀ H^a g_B, and the measurement has ⟨g_a, g_B⟩.
    """
    group, norm, lr = measured["risk"][k], measured["norms"][0][0], run["lr"]
    if norm == 0:
        return None
    half_form = group["terms"]["non_private"][0] + lr * group["slopes"][0]
    return float(2 * half_form / (lr * norm**2))


def holds(run: Run, measured: Mapping[str, Any], k: int) -> bool:
    """Return whether the k-th group's terms are within the range of the expansion."""
    value = ratio(run, measured, k)
    return value is None or abs(value) <= LIMIT


def draw(observed: Mapping[tuple[str, bool], Mapping[str, Sequence[Run]]]) -> str:
    """Draw the table as Markdown, from (dataset, matched) -> rule -> runs."""
    lines = [
        f"## {TITLE}", "",
        "The ratio is c = η·gᵀHg/‖g‖²; the expansion is taken to hold where |c| ≤ 1. Means are "
        "over seeds and measurements. \"mag / dir\" divides the mean gap of R_mag between the "
        "groups by that of R_dir, whether or not the expansion holds.", "",
        "| dataset | rule | seeds | median c | holds | R_mag below 0 | lowest R_mag | mag / dir |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for (dataset, match), runs in observed.items():
        title = f"{SETTINGS[dataset].title}, {'matched' if match else 'as published'}"
        lines += [
            _row(title, rule, seeds) for rule, seeds in runs.items() if rule != NonPrivate.name
        ]
    return "\n".join([*lines, ""])


def _row(title: str, rule: str, runs: Sequence[Run]) -> str:
    """Return one line of the table."""
    points = [(run, measured, k) for run in runs for measured in run["risk"] for k in (0, 1)]
    ratios = [c for point in points if (c := ratio(*point)) is not None]
    held = sum(holds(*point) for point in points)
    mag = [measured["risk"][k]["terms"]["mag"][0] for _, measured, k in points]
    gap_mag, gap_dir = (statistics.fmean(_gaps(runs, name)) for name in ("mag", "dir"))
    # Rules that only scale have no direction error, and their gap of R_dir is rounding.
    quotient = f"{gap_mag / gap_dir:.3g}" if gap_dir > 1e-6 * gap_mag else "–"
    cells = [
        title, rule, str(len(runs)), f"{statistics.median(ratios):.2g}",
        f"{held} of {len(points)}", f"{sum(v < 0 for v in mag)} of {len(mag)}",
        f"{min(mag):.3g}".replace("-", "−", 1), quotient,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _gaps(runs: Sequence[Run], name: str) -> list[float]:
    """Return the gap of a term between the two groups at every measurement."""
    return [
        abs(first["terms"][name][0] - second["terms"][name][0])
        for run in runs
        for measured in run["risk"]
        for first, second in [measured["risk"][:2]]
    ]
