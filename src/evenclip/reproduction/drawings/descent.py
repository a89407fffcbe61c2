"""Drawing: paths of gradient descent whose steps have no error, one error or both errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from evenclip.reproduction import style
from evenclip.reproduction.drawings.marks import (
    BOX,
    CLIPPED,
    INK,
    PALE,
    PLAIN,
    SHORTENED,
    SMALL,
    TURNED,
    signed,
    write,
)
from evenclip.reproduction.drawings.plane import (
    C0,
    Array,
    Problem,
    clipped_gradients,
    norm_ratio,
    problem,
)
from evenclip.rules import DPSGD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = ["PATHS", "Convergence", "convergence", "draw_convergence"]

PATHS = ("plain", "magnitude", "direction", "clipped")
"""Steps along g_B, ρ g_B (wrong length), ḡ_B/ρ (wrong direction) and ḡ_B (both)."""

_START = np.array([3.9, -1.2])  # θ_0


@dataclass(frozen=True)
class Convergence:
    """Four paths of gradient descent and their ends.

    Attributes:
        problem: the problem.
        minimum: θ*.  # [2]
        lr: η.
        paths: name of `PATHS` -> θ_0, θ_1, … θ_T.  # [step, 2]
        distances: name -> ‖θ_T − θ*‖.
        risks: name -> L_k(θ_T) − L_k(θ*), the excess loss of each group.  # [group]
    """

    problem: Problem
    minimum: Array
    lr: float
    paths: dict[str, Array]
    distances: dict[str, float]
    risks: dict[str, Array]


def convergence(lr: float = 0.04, steps: int = 1000) -> Convergence:
    """Compute the four paths; clipping is that of DPSGD, without noise.

    g_B and ρ g_B have the same direction, so their paths coincide and differ in speed only. The
    same holds for ḡ_B and ḡ_B/ρ, whose paths end where the clipped gradients cancel. With a
    constant η, the paths of ρ g_B and ḡ_B/ρ end within one step of their limits, because ‖ρ g_B‖ =
    ‖ḡ_B‖ and ‖ḡ_B/ρ‖ = ‖g_B‖ do not vanish there.
    """
    example = problem()
    paths = {name: _descent(example, name, lr, steps) for name in PATHS}
    return Convergence(
        problem=example,
        minimum=example.minimum,
        lr=lr,
        paths=paths,
        distances={
            name: float(np.linalg.norm(path[-1] - example.minimum)) for name, path in paths.items()
        },
        risks={
            name: example.losses(path[-1]) - example.losses(example.minimum)
            for name, path in paths.items()
        },
    )


def _descent(example: Problem, name: str, lr: float, steps: int) -> Array:
    """Return θ_0 … θ_T of one path.  # [steps + 1, 2]"""
    path = np.empty((steps + 1, 2))
    path[0] = _START
    for t in range(steps):
        g = example.gradients(path[t])
        plain, clipped = g.mean(0), clipped_gradients(DPSGD(C0=C0), g).mean(0)
        rho = norm_ratio(plain, clipped)
        direction = {
            "plain": plain,
            "magnitude": rho * plain,
            "direction": clipped / rho,
            "clipped": clipped,
        }[name]
        path[t + 1] = path[t] - lr * direction
    return path


_PATH_NAMES = {
    "plain": ("$g_B$", "no error"),
    "magnitude": (r"$\rho\,g_B$", "wrong length"),
    "direction": (r"$\bar g_B/\rho$", "wrong direction"),
    "clipped": (r"$\bar g_B$", "both"),
}
# In drawing order: thin lines over the wide ones with which they coincide.
_PATH_LOOKS: dict[str, dict[str, Any]] = {
    "plain": {"color": PLAIN, "linewidth": 4.2, "solid_capstyle": "butt"},
    "clipped": {"color": CLIPPED, "linewidth": 4.2, "solid_capstyle": "butt"},
    "magnitude": {"color": SHORTENED, "linewidth": 1.0, "marker": "o"},
    "direction": {"color": TURNED, "linewidth": 1.0, "marker": "s", "linestyle": (0, (4, 1.5))},
}
_FIRST_MARK = 8


@style.applied()
def draw_convergence(values: Convergence) -> Figure:
    """Draw the four paths on contours of the loss, and the groups' excess losses at their ends."""
    figure = style.figure(height_mm=82)
    axes = figure.subplot_mosaic(
        [["plane", "names"], ["plane", "risks"]], width_ratios=[1.6, 1], height_ratios=[1, 1.45]
    )
    _draw_plane(axes["plane"], values)
    curves = dict(zip(_PATH_LOOKS, _draw_paths(axes["plane"], values), strict=True))
    axes["names"].legend(
        [curves[name] for name in PATHS],
        [f"{', '.join(_PATH_NAMES[name])}: {values.distances[name]:.3f}" for name in PATHS],
        title=f"Distance from $\\theta^{{*}}$ after {_steps(values)} steps\n(marks at steps "
        f"{_FIRST_MARK}, "
        f"{2 * _FIRST_MARK}, {4 * _FIRST_MARK}, …)",
        title_fontsize=8,
        loc="upper left",
        alignment="left",
        borderaxespad=0,
        borderpad=0,
    )
    axes["names"].set_axis_off()
    _draw_risks(axes["risks"], values)
    return figure


def _steps(values: Convergence) -> int:
    """Return the number of steps T."""
    return len(values.paths["plain"]) - 1


def _draw_plane(axes: Axes, values: Convergence) -> None:
    """Draw contours of the loss in the plane of θ, and the samples."""
    example, star = values.problem, values.minimum
    across, up = np.linspace(-2.5, 4.5, 220), np.linspace(-2.4, 4.5, 220)
    levels = example.loss(star) + 0.1 * np.arange(1, 14) ** 2
    axes.contour(
        across,
        up,
        example.loss(np.stack(np.meshgrid(across, up), -1)),
        levels,
        colors=PALE,
        linewidths=0.5,
    )
    places, sides = [(-2.4, -2.3), (4.4, 3.7)], ["left", "right"]
    for k, look in enumerate(style.GROUPS[:2]):
        points = example.x[example.group == k]
        axes.plot(*points.T, look.marker, color=look.colour, markersize=3.0, markeredgewidth=0)
        axes.text(
            *places[k],
            f"{look.label}, {len(points)} samples",
            ha=sides[k],
            color=look.ink,
            bbox=BOX,
            **SMALL,
        )
    axes.set(xlim=(across[0], across[-1]), ylim=(up[0], up[-1]), aspect="equal")
    axes.set(xticks=range(-2, 5), yticks=range(-2, 5), xlabel=r"$\theta_1$", ylabel=r"$\theta_2$")


def _draw_paths(axes: Axes, values: Convergence) -> list[Line2D]:
    """Draw the paths, with a marker at every doubling of the number of steps."""
    marked = [_FIRST_MARK * 2**i for i in range((_steps(values) // _FIRST_MARK).bit_length())]
    curves = [
        axes.plot(*values.paths[name].T, markevery=marked, markersize=3.4, **look)[0]
        for name, look in _PATH_LOOKS.items()
    ]
    star, end, start = values.minimum, values.paths["clipped"][-1], values.paths["plain"][0]
    axes.plot(
        *star, "*", color="white", markeredgecolor=INK, markersize=9, markeredgewidth=0.8, zorder=4
    )
    axes.plot(
        *end, "X", color="white", markeredgecolor=INK, markersize=7, markeredgewidth=0.8, zorder=4
    )
    axes.plot(*start, "o", color=INK, markersize=4.5, zorder=4)
    write(axes, r"minimum $\theta^{*}$", star, (0, 8), ha="center", bbox=BOX, **SMALL)
    write(axes, "start", start, (0, -12), ha="center", bbox=BOX, **SMALL)
    leader = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 4}
    write(axes, "clipped gradients\ncancel", end, (-70, 26), arrowprops=leader, bbox=BOX, **SMALL)
    return curves


def _draw_risks(axes: Axes, values: Convergence) -> None:
    """Draw L_k(θ_T) − L_k(θ*) as labelled bars."""
    for k, look in enumerate(style.GROUPS[:2]):
        risks = [float(values.risks[name][k]) for name in PATHS]
        places = np.arange(len(PATHS)) + 0.2 * (2 * k - 1)
        axes.barh(places, risks, 0.36, label=look.label, **look.fill)
        for place, risk in zip(places, risks, strict=True):
            write(axes, signed(risk), (max(risk, 0.0), place), (3, 0), va="center", **SMALL)
    axes.axvline(0, color=INK, linewidth=0.6)
    axes.set_yticks(range(len(PATHS)), [_PATH_NAMES[name][0] for name in PATHS])
    axes.set(
        xlim=(-1.6, 9.2),
        ylim=(3.55, -0.55),
        xticks=range(0, 9, 2),
        xlabel=r"$L_k(\theta_T) - L_k(\theta^{*})$",
    )
    axes.set_title("What the end costs each group", loc="left")
    axes.tick_params(axis="y", length=0)
    axes.spines.left.set_visible(False)
    axes.legend(loc="upper right", handlelength=1.6, borderaxespad=0.2)
