"""Drawing: the same per-sample gradients under several rules, and the angle of their mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evenclip.reproduction import style
from evenclip.reproduction.drawings.marks import ARROW, GREY, INK, WIDE_ARROW, draw_arrow, frame
from evenclip.reproduction.drawings.plane import Array, angle, clipped_gradients, problem
from evenclip.rules import DPSGD, DPSGDGlobal, DPSGDGlobalAdapt, Rule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Clipping", "Treatment", "clipping", "draw_clipping"]

_THETA = np.array([3.0, -1.25])
_C0 = 2.0
_HIGH_Z, _LOW_Z = 9.0, 6.0  # above every norm, below some


@dataclass(frozen=True)
class Treatment:
    """The gradients after clipping by one rule.

    Attributes:
        rule: name of the rule.
        Z: the bound of global scaling; None for a rule without one.
        summed: γ_i g_i.  # [sample, 2]
        mean: mean of γ_i g_i.  # [2]
        degrees: angle from the mean of g_i to that of γ_i g_i, positive if anticlockwise.
    """

    rule: str
    Z: float | None
    summed: Array
    mean: Array
    degrees: float


@dataclass(frozen=True)
class Clipping:
    """The same per-sample gradients under several rules.

    Attributes:
        gradients: g_i.  # [sample, 2]
        group: 0 or 1.  # [sample]
        C0: clipping bound.
        Z: two bounds of global scaling: one above every norm, one below some.
        mean: mean of g_i.  # [2]
        treatments: name -> clipped gradients: `local`, `scaled` (with the higher Z), `dropped` and
            `capped` (with the lower Z).
    """

    gradients: Array
    group: NDArray[np.int64]
    C0: float
    Z: tuple[float, float]
    mean: Array
    treatments: dict[str, Treatment]


def clipping() -> Clipping:
    """Clip the gradients of every fourth sample by DPSGD, DPSGD-Global and DPSGD-Global-Adapt."""
    example, batch = problem(), slice(None, None, 4)
    g = example.gradients(_THETA)[batch]
    treatments = {
        "local": _treatment(DPSGD(C0=_C0), None, g),
        "scaled": _treatment(DPSGDGlobal(C0=_C0, Z=_HIGH_Z), _HIGH_Z, g),
        "dropped": _treatment(DPSGDGlobal(C0=_C0, Z=_LOW_Z), _LOW_Z, g),
        "capped": _treatment(DPSGDGlobalAdapt(C0=_C0, Z0=_LOW_Z), _LOW_Z, g),
    }
    return Clipping(g, example.group[batch], _C0, (_HIGH_Z, _LOW_Z), g.mean(0), treatments)


def _treatment(rule: Rule, Z: float | None, g: Array) -> Treatment:
    """Clip gradients by a rule."""
    summed = clipped_gradients(rule, g)
    mean = summed.mean(0)
    return Treatment(rule.name, Z, summed, mean, math.degrees(angle(g.mean(0), mean)))


_DESCRIPTIONS = {
    "local": "each cut to $C_0$",
    "scaled": "all times $C_0/Z$",
    "dropped": "above $Z$ dropped",
    "capped": "above $Z$ cut to $C_0$",
}
_GROUP_ARROWS: list[dict[str, Any]] = [
    {"color": look.colour, "linewidth": 0.8 + 0.6 * k, "mutation_scale": 5 + 2 * k}
    for k, look in enumerate(style.GROUPS[:2])
]
_MEAN_ARROWS: list[dict[str, Any]] = [  # of g_i, of γ_i g_i
    {
        "arrowstyle": WIDE_ARROW.format(2.2, 6),
        "mutation_scale": 1,
        "facecolor": fill,
        "edgecolor": INK,
        "linewidth": 0.8,
    }
    for fill in (INK, "white")
]
_POINT: dict[str, Any] = {"color": "none", "markeredgecolor": INK}
_RING = _POINT | {"marker": "o", "markersize": 9, "markeredgewidth": 0.7}
_CROSS = _POINT | {"marker": "x", "markersize": 4.5, "markeredgewidth": 1.0}


@style.applied()
def draw_clipping(values: Clipping) -> Figure:
    """Draw the gradients and their treatments: the higher Z in the top row, the lower below."""
    figure = style.figure(height_mm=113)
    axes = figure.subplot_mosaic([["high Z", "local", "scaled"], ["low Z", "dropped", "capped"]])
    for name, Z in zip(("high Z", "low Z"), values.Z, strict=True):
        _draw_gradients(axes[name], values, Z)
    for name, treatment in values.treatments.items():
        _draw_treatment(axes[name], values, treatment)
        rule, turned = style.RULES[treatment.rule].label, abs(treatment.degrees)
        axes[name].set_title(
            f"{rule}\n{_DESCRIPTIONS[name]}, turned by {turned:.0f}°", fontsize=7.5
        )
    _draw_legend(figure)
    return figure


def _draw_gradients(axes: Axes, values: Clipping, Z: float) -> None:
    """Draw g_i and circles of radius C0 and Z; a ring marks the gradients longer than Z."""
    norms = np.linalg.norm(values.gradients, axis=1)
    above = norms > Z
    _draw_circle(axes, values.C0, "--")
    _draw_circle(axes, Z, ":")
    _draw_arrows(axes, values.gradients, values.group)
    draw_arrow(axes, values.mean, zorder=4, **_MEAN_ARROWS[0])
    axes.plot(*values.gradients[above].T, **_RING)
    axes.set_title(
        f"Gradients, $Z = {Z:g}$\n{above.sum() or 'none'} of {len(norms)} above $Z$", fontsize=7.5
    )
    frame(axes, (-5.5, 5.2), (-9.4, 2.2))


def _draw_treatment(axes: Axes, values: Clipping, treatment: Treatment) -> None:
    """Draw γ_i g_i; dotted lines show C0/Z · g_i of the gradients longer than Z."""
    _draw_circle(axes, values.C0, "--")
    if treatment.Z is not None:
        above = np.linalg.norm(values.gradients, axis=1) > treatment.Z
        for end in values.C0 / treatment.Z * values.gradients[above]:
            axes.plot([0, end[0]], [0, end[1]], ":", color=GREY, linewidth=1.0)
            axes.plot(*end, **_CROSS)
    _draw_arrows(axes, treatment.summed, values.group)
    for mean, look in zip((values.mean, treatment.mean), _MEAN_ARROWS, strict=True):
        draw_arrow(axes, mean, zorder=4, **look)
    frame(axes, (-1.7, 2.3), (-3.1, 1.0))


def _draw_arrows(axes: Axes, vectors: Array, group: NDArray[np.int64]) -> None:
    """Draw vectors from the origin in the look of their group; leave out zero vectors."""
    for k, look in enumerate(_GROUP_ARROWS):
        for end in vectors[(group == k) & vectors.any(axis=1)]:
            draw_arrow(axes, end, **look)


def _draw_circle(axes: Axes, radius: float, line: str) -> None:
    """Draw a circle around the origin."""
    from matplotlib.patches import Circle

    axes.add_patch(
        Circle((0, 0), radius, fill=False, linestyle=line, edgecolor=GREY, linewidth=0.8)
    )


def _draw_legend(figure: Figure) -> None:
    """Draw the legend below all panels."""
    from matplotlib.legend_handler import HandlerPatch
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyArrowPatch

    arrows = [
        FancyArrowPatch((0, 0), (1, 0), **ARROW | look) for look in (*_GROUP_ARROWS, *_MEAN_ARROWS)
    ]
    circles = [Line2D([], [], color=GREY, linestyle=line, linewidth=0.8) for line in ("--", ":")]
    points = [Line2D([], [], linestyle="", **look) for look in (_RING, _CROSS)]
    entries = dict(zip([look.label for look in style.GROUPS[:2]], arrows[:2], strict=True)) | {
        "mean of $g_i$": arrows[2],
        r"mean of $\gamma_i g_i$": arrows[3],
        "norm $C_0$": circles[0],
        "norm $Z$": circles[1],
        "above $Z$": points[0],
        "$g_i C_0/Z$, too long": points[1],
    }
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower center",
        ncols=4,
        columnspacing=2,
        handler_map={FancyArrowPatch: HandlerPatch(patch_func=_legend_arrow)},
    )


def _legend_arrow(
    legend: Any,
    orig_handle: Any,
    xdescent: float,
    ydescent: float,
    width: float,
    height: float,
    fontsize: float,
) -> Any:
    """Return an arrow as wide as a legend handle; matplotlib passes the arguments by name."""
    from matplotlib.patches import FancyArrowPatch

    del legend, fontsize
    y = height / 2 - ydescent
    look = {
        "arrowstyle": orig_handle.get_arrowstyle(),
        "mutation_scale": orig_handle.get_mutation_scale(),
    }
    return FancyArrowPatch((-xdescent, y), (width - xdescent, y), **ARROW | look)
