"""Drawing: one step, and the costs of its errors in length and direction for each group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from evenclip.audit.decomposition import terms
from evenclip.reproduction import style
from evenclip.reproduction.drawings.marks import (
    CLIPPED,
    INK,
    PLAIN,
    SHORTENED,
    SMALL,
    WIDE_ARROW,
    draw_arrow,
    frame,
    signed,
    write,
)
from evenclip.reproduction.drawings.plane import (
    C0,
    Array,
    Problem,
    angle,
    clipped_gradients,
    norm_ratio,
    problem,
    quadratic_form,
)
from evenclip.rules import DPSGD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Decomposition", "decomposition", "draw_decomposition"]

_THETA = np.array([2.0, 0.0])  # θ before the step


@dataclass(frozen=True)
class Decomposition:
    """One step, and the costs of its two errors for each group.

    Attributes:
        problem: the problem.
        theta: θ before the step.  # [2]
        lr: η.
        plain: g_B.  # [2]
        clipped: ḡ_B.  # [2]
        rho: ρ = ‖ḡ_B‖/‖g_B‖.
        M: the rotation M_B with ḡ_B = M_B(ρ g_B).  # [2, 2]
        degrees: angle of M, positive if anticlockwise.
        mag: R_mag.  # [group]
        dir: R_dir.  # [group]
        clip: R_clip.  # [group]
    """

    problem: Problem
    theta: Array
    lr: float
    plain: Array
    clipped: Array
    rho: float
    M: Array
    degrees: float
    mag: Array
    dir: Array
    clip: Array


def decomposition(lr: float = 0.5) -> Decomposition:
    """Decompose the cost of a step along ḡ_B instead of g_B, by `evenclip.audit.decomposition`."""
    example = problem()
    g = example.gradients(_THETA)
    plain, clipped = g.mean(0), clipped_gradients(DPSGD(C0=C0), g).mean(0)
    rho, turn = norm_ratio(plain, clipped), angle(plain, clipped)
    means = np.stack([g[example.group == k].mean(0) for k in (0, 1)])  # g_a and g_b
    risks = terms(
        means @ plain,
        quadratic_form(example.H, plain),
        means @ clipped,
        quadratic_form(example.H, clipped),
        np.full(2, rho),
        lr,
    )
    return Decomposition(
        problem=example,
        theta=_THETA,
        lr=lr,
        plain=plain,
        clipped=clipped,
        rho=rho,
        M=np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]]),
        degrees=math.degrees(turn),
        mag=risks["mag"],
        dir=risks["dir"],
        clip=risks["clip"],
    )


@style.applied()
def draw_decomposition(values: Decomposition) -> Figure:
    """Draw g_B, ρ g_B and ḡ_B, and the effect of each error on the groups' losses."""
    figure = style.figure(height_mm=68)
    step, costs = figure.subplots(1, 2, width_ratios=[1.05, 1])
    _draw_step(step, values)
    _draw_costs(costs, values)
    return figure


def _draw_step(axes: Axes, values: Decomposition) -> None:
    """Draw the three vectors, the error in length as a bar and the error in direction as an arc."""
    from matplotlib.patches import Arc

    plain, shortened, clipped = values.plain, values.rho * values.plain, values.clipped
    for end, tail, head, colour in (
        (plain, 5, 13, PLAIN), (clipped, 5, 13, CLIPPED), (shortened, 1.4, 7, SHORTENED),
    ):  # fmt: skip
        draw_arrow(
            axes, end, arrowstyle=WIDE_ARROW.format(tail, head), mutation_scale=1, color=colour
        )
    norm, start = float(np.linalg.norm(clipped)), math.degrees(math.atan2(plain[1], plain[0]))
    low, high = sorted((start, start + values.degrees))
    axes.add_patch(
        Arc((0, 0), 2 * norm, 2 * norm, theta1=low, theta2=high, color=INK, linestyle=":")
    )
    # Offset to the side that does not face ḡ_B.
    aside = 0.09 * np.array([plain[1], -plain[0]]) / np.linalg.norm(plain)
    measure = {
        "arrowstyle": "|-|,widthA=0.3,widthB=0.3",
        "linewidth": 0.7,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", tuple(plain + aside), tuple(shortened + aside), arrowprops=measure)
    middle = math.radians((low + high) / 2)
    on_arc = norm * np.array([math.cos(middle), math.sin(middle)])
    write(axes, "$g_B$", plain, (3, -3), va="top")
    write(axes, r"$\rho\,g_B$", shortened / 2, (-6, -4), ha="right", va="top")
    write(axes, r"$\bar g_B = M_B(\rho\,g_B)$", clipped / 2, (0, 7), ha="center")
    error = f"magnitude error\n$\\rho = {values.rho:.2f}$"
    write(axes, error, (plain + shortened) / 2 + aside, (-4, -2), ha="right", va="top")
    write(axes, f"direction error\n{abs(values.degrees):.0f}°", on_arc, (8, -3), va="center")
    axes.set_title("The two errors of one step", loc="left")
    frame(axes, (-0.08, 1.2), (-0.98, 0.22))


def _draw_costs(axes: Axes, values: Decomposition) -> None:
    """Draw bars of R_mag, of R_dir starting where R_mag ends, and of R_clip, their sum."""
    highest = float(np.max(values.clip))
    for k, look in enumerate(style.GROUPS[:2]):
        mag, dir, clip = (float(term[k]) for term in (values.mag, values.dir, values.clip))
        places = 3.6 * k + np.arange(3)
        axes.bar(places, [mag, dir, clip], 0.8, [0, mag, 0], **look.fill)
        for level, first in ((mag, 0), (clip, 1)):  # a line from one bar to the next
            axes.plot(
                [places[first] - 0.4, places[first + 1] + 0.4],
                [level, level],
                color=INK,
                linewidth=0.6,
            )
        for place, cost, top in zip(
            places, (mag, dir, clip), (mag, max(mag, clip), clip), strict=True
        ):
            write(axes, signed(cost), (place, top), (0, 2.5), ha="center", **SMALL)
        total = f"{signed(mag)} {'+' if dir >= 0 else '−'} {signed(abs(dir))} = {signed(clip)}"
        axes.text(places[1], 1.16 * highest, f"{look.label}\n{total}", ha="center", color=look.ink)
    axes.axhline(0, color=INK, linewidth=0.6)
    names = [rf"$R_\mathrm{{{name}}}$" for name in ("mag", "dir", "clip")]
    axes.set_xticks([0, 1, 2, 3.6, 4.6, 5.6], names * 2, fontsize=8)
    axes.set(
        ylim=(0, 1.36 * highest),
        yticks=[0, 0.5, 1, 1.5, 2],
        ylabel=rf"added to $L_k$, $\eta = {values.lr:g}$",
    )
    axes.set_title(f"{names[0]} + {names[1]} = {names[2]} of each group", loc="left")
    axes.tick_params(axis="x", length=0)
    axes.spines.bottom.set_visible(False)
