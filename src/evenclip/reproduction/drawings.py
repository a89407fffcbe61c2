"""Three drawings that explain the paper, each computed in the plane by the formulas that training
uses.

All are of one small problem. A sample pulls the parameter θ towards its point x_i, and the two
groups differ in size, in where their points lie and in curvature:

    ℓ_i(θ) = ½ (θ − x_i)ᵀ H^k (θ − x_i),   g_i = H^k (θ − x_i),   k the group of i

    convergence     where descent ends with the batch gradient as it is, of wrong length, turned, or both
    clipping        what each rule makes of the same per-sample gradients, and by what angle that turns their mean
    decomposition   one step: what its wrong length and its wrong direction cost each group

A drawing is two functions: one computes its numbers, without matplotlib, and `draw_…` draws them.
In paths and in the step the batch is all samples, so expectations over batches are exact; the loss
is quadratic, so the expansion to second order is, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from evenclip.audit.decomposition import terms
from evenclip.reproduction import style
from evenclip.rules import DPSGD, DPSGDGlobal, DPSGDGlobalAdapt, Rule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

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

Array: TypeAlias = NDArray[np.float64]
"""Of the plane mostly: [2] or [sample, 2]."""

PATHS = ("plain", "magnitude", "direction", "clipped")
"""Steps along g_B, ρ g_B (wrong in length only), ḡ_B/ρ (wrong in direction only), ḡ_B (both)."""

# θ at the start of the paths, of the gradients of `clipping` and before the step of
# `decomposition`.
_START, _BATCH, _STEP = np.array([3.9, -1.2]), np.array([3.0, -1.25]), np.array([2.0, 0.0])
_C0 = 1.0  # of the paths and the step
_WIDER, _ENOUGH, _SCARCE = 2.0, 9.0, 6.0  # of `clipping`: C0, Z above every norm, Z below some

_PALE, _GREY, _INK = "#cccccc", "#666666", "#1a1a1a"
_PLAIN, _CLIPPED, _SHORTENED, _TURNED = (
    "#a9cbe8",
    "#d98b4a",
    "#0b2e6b",
    "#4a1203",
)  # g_B, ḡ_B, ρ g_B, ḡ_B/ρ
_BEHIND: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
_SMALL: dict[str, Any] = {"fontsize": style.SMALLEST}


@dataclass(frozen=True)
class Problem:
    """Two groups of points in the plane, and how steeply the loss rises away from them.

    Attributes:
        x: points.  # [sample, 2]
        group: 0 or 1.  # [sample]
        H: Hessian of a sample's loss, the same for all of a group.  # [group, 2, 2]
    """

    x: Array
    group: NDArray[np.int64]
    H: Array

    def gradients(self, theta: Array) -> Array:
        """g_i.  # [sample, 2]"""
        return np.asarray(np.einsum("sij,sj->si", self.H[self.group], theta - self.x))

    def losses(self, theta: Array) -> Array:
        """The mean loss of each group at one θ or at several.  # [..., group]"""
        apart = [theta[..., None, :] - self.x[self.group == k] for k in (0, 1)]
        return np.stack([_form(self.H[k], apart[k]).mean(-1) / 2 for k in (0, 1)], -1)

    def loss(self, theta: Array) -> Array:
        """The mean loss of all samples.  # [...]"""
        return self.losses(theta) @ (np.bincount(self.group) / len(self.group))

    @property
    def minimum(self) -> Array:
        """θ*, where the mean gradient is 0.  # [2]"""
        H = self.H[self.group]
        return np.linalg.solve(H.sum(0), np.einsum("sij,sj->i", H, self.x))


def problem() -> Problem:
    """48 points of group a, and 12 of group b, where the loss is steeper."""
    random = np.random.Generator(np.random.PCG64(3))
    centres, sizes, spread = np.array([[0.0, 0.0], [3.0, 2.2]]), (48, 12), 0.8
    x = np.concatenate(
        [centres[k] + spread * random.standard_normal((sizes[k], 2)) for k in (0, 1)]
    )
    H = np.array([[[0.9, 0.2], [0.2, 0.3]], [[1.2, 0.6], [0.6, 1.9]]])
    return Problem(x, np.repeat(np.arange(2), sizes), H)


@dataclass(frozen=True)
class Convergence:
    """Where descent ends.

    Attributes:
        problem: what is descended on.
        minimum: θ*.  # [2]
        lr: η.
        paths: name, of `PATHS` -> θ_0, θ_1, … θ_T.  # [step, 2]
        distances: name -> ‖θ_T − θ*‖.
        risks: name -> L_k(θ_T) − L_k(θ*), what each group pays for ending there.  # [group]
    """

    problem: Problem
    minimum: Array
    lr: float
    paths: dict[str, Array]
    distances: dict[str, float]
    risks: dict[str, Array]


def convergence(lr: float = 0.04, steps: int = 1000) -> Convergence:
    """Descend in four ways, each gradient clipped to C0 where it is (DPSGD without its noise).

    ρ g_B points where g_B does, so it takes the same road at another speed, and so do ḡ_B and
    ḡ_B/ρ, which end where clipped gradients cancel. Near the end ρ g_B is still as long as ḡ_B, and
    ḡ_B/ρ as g_B, so with a constant η these two come as close as one step is long.
    """
    of = problem()
    paths = {name: _descent(of, name, lr, steps) for name in PATHS}
    return Convergence(
        problem=of,
        minimum=of.minimum,
        lr=lr,
        paths=paths,
        distances={
            name: float(np.linalg.norm(path[-1] - of.minimum)) for name, path in paths.items()
        },
        risks={name: of.losses(path[-1]) - of.losses(of.minimum) for name, path in paths.items()},
    )


def _descent(of: Problem, name: str, lr: float, steps: int) -> Array:
    """θ_0 … θ_T.  # [steps + 1, 2]"""
    path = np.empty((steps + 1, 2))
    path[0] = _START
    for t in range(steps):
        g = of.gradients(path[t])
        plain, clipped = g.mean(0), _summed(DPSGD(C0=_C0), g).mean(0)
        rho = _rho(plain, clipped)
        along = {
            "plain": plain,
            "magnitude": rho * plain,
            "direction": clipped / rho,
            "clipped": clipped,
        }[name]
        path[t + 1] = path[t] - lr * along
    return path


_PATH_NAMES = {
    "plain": ("$g_B$", "no error"),
    "magnitude": (r"$\rho\,g_B$", "wrong length"),
    "direction": (r"$\bar g_B/\rho$", "wrong direction"),
    "clipped": (r"$\bar g_B$", "both"),
}
# In the order of drawing: thin ones over the wide ones whose roads they take.
_PATH_LOOKS: dict[str, dict[str, Any]] = {
    "plain": {"color": _PLAIN, "linewidth": 4.2, "solid_capstyle": "butt"},
    "clipped": {"color": _CLIPPED, "linewidth": 4.2, "solid_capstyle": "butt"},
    "magnitude": {"color": _SHORTENED, "linewidth": 1.0, "marker": "o"},
    "direction": {"color": _TURNED, "linewidth": 1.0, "marker": "s", "linestyle": (0, (4, 1.5))},
}
_FIRST_MARK = 8


@style.applied()
def draw_convergence(values: Convergence) -> Figure:
    """Contours of the loss with the four paths, and beside them what each group pays at their ends."""
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
    return len(values.paths["plain"]) - 1


def _draw_plane(axes: Axes, values: Convergence) -> None:
    """The plane of θ, in which the samples lie too."""
    of, star = values.problem, values.minimum
    across, up = np.linspace(-2.5, 4.5, 220), np.linspace(-2.4, 4.5, 220)
    levels = of.loss(star) + 0.1 * np.arange(1, 14) ** 2
    axes.contour(
        across,
        up,
        of.loss(np.stack(np.meshgrid(across, up), -1)),
        levels,
        colors=_PALE,
        linewidths=0.5,
    )
    places, sides = [(-2.4, -2.3), (4.4, 3.7)], ["left", "right"]
    for k, look in enumerate(style.GROUPS[:2]):
        points = of.x[of.group == k]
        axes.plot(*points.T, look.marker, color=look.colour, markersize=3.0, markeredgewidth=0)
        axes.text(
            *places[k],
            f"{look.label}, {len(points)} samples",
            ha=sides[k],
            color=look.ink,
            bbox=_BEHIND,
            **_SMALL,
        )
    axes.set(xlim=(across[0], across[-1]), ylim=(up[0], up[-1]), aspect="equal")
    axes.set(xticks=range(-2, 5), yticks=range(-2, 5), xlabel=r"$\theta_1$", ylabel=r"$\theta_2$")


def _draw_paths(axes: Axes, values: Convergence) -> list[Line2D]:
    """The paths, with a mark at every doubling of the number of steps."""
    marked = [_FIRST_MARK * 2**i for i in range((_steps(values) // _FIRST_MARK).bit_length())]
    curves = [
        axes.plot(*values.paths[name].T, markevery=marked, markersize=3.4, **look)[0]
        for name, look in _PATH_LOOKS.items()
    ]
    star, end, start = values.minimum, values.paths["clipped"][-1], values.paths["plain"][0]
    axes.plot(
        *star, "*", color="white", markeredgecolor=_INK, markersize=9, markeredgewidth=0.8, zorder=4
    )
    axes.plot(
        *end, "X", color="white", markeredgecolor=_INK, markersize=7, markeredgewidth=0.8, zorder=4
    )
    axes.plot(*start, "o", color=_INK, markersize=4.5, zorder=4)
    _write(axes, r"minimum $\theta^{*}$", star, (0, 8), ha="center", bbox=_BEHIND, **_SMALL)
    _write(axes, "start", start, (0, -12), ha="center", bbox=_BEHIND, **_SMALL)
    leader = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 4}
    _write(
        axes, "clipped gradients\ncancel", end, (-70, 26), arrowprops=leader, bbox=_BEHIND, **_SMALL
    )
    return curves


def _draw_risks(axes: Axes, values: Convergence) -> None:
    """L_k(θ_T) − L_k(θ*) as bars, with their numbers."""
    for k, look in enumerate(style.GROUPS[:2]):
        found = [float(values.risks[name][k]) for name in PATHS]
        places = np.arange(len(PATHS)) + 0.2 * (2 * k - 1)
        axes.barh(places, found, 0.36, label=look.label, **look.fill)
        for place, risk in zip(places, found, strict=True):
            _write(axes, _signed(risk), (max(risk, 0.0), place), (3, 0), va="center", **_SMALL)
    axes.axvline(0, color=_INK, linewidth=0.6)
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


@dataclass(frozen=True)
class Treatment:
    """What one rule makes of the gradients.

    Attributes:
        rule: its name.
        Z: the bound of global scaling; None for a rule without one.
        summed: γ_i g_i.  # [sample, 2]
        mean: of γ_i g_i.  # [2]
        degrees: from the mean of g_i to that of γ_i g_i, positive if anticlockwise.
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
        Z: two bounds of global scaling, above every norm and below some.
        mean: of g_i.  # [2]
        treatments: name -> what a rule makes of them: `local`, `scaled` (with the higher Z),
            `dropped` and `capped` (with the lower).
    """

    gradients: Array
    group: NDArray[np.int64]
    C0: float
    Z: tuple[float, float]
    mean: Array
    treatments: dict[str, Treatment]


def clipping() -> Clipping:
    """The gradients of every fourth sample, under DPSGD, DPSGD-Global and DPSGD-Global-Adapt."""
    of, some = problem(), slice(None, None, 4)
    g = of.gradients(_BATCH)[some]
    treatments = {
        "local": _treatment(DPSGD(C0=_WIDER), None, g),
        "scaled": _treatment(DPSGDGlobal(C0=_WIDER, Z=_ENOUGH), _ENOUGH, g),
        "dropped": _treatment(DPSGDGlobal(C0=_WIDER, Z=_SCARCE), _SCARCE, g),
        "capped": _treatment(DPSGDGlobalAdapt(C0=_WIDER, Z0=_SCARCE), _SCARCE, g),
    }
    return Clipping(g, of.group[some], _WIDER, (_ENOUGH, _SCARCE), g.mean(0), treatments)


def _treatment(rule: Rule, Z: float | None, g: Array) -> Treatment:
    summed = _summed(rule, g)
    mean = summed.mean(0)
    return Treatment(rule.name, Z, summed, mean, math.degrees(_turn(g.mean(0), mean)))


_TREATED = {
    "local": "each cut to $C_0$",
    "scaled": "all times $C_0/Z$",
    "dropped": "above $Z$ dropped",
    "capped": "above $Z$ cut to $C_0$",
}
_ARROW: dict[str, Any] = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0}
_WIDE = "simple,tail_width={0},head_width={1},head_length={1}"
_GROUP_ARROWS: list[dict[str, Any]] = [
    {"color": look.colour, "linewidth": 0.8 + 0.6 * k, "mutation_scale": 5 + 2 * k}
    for k, look in enumerate(style.GROUPS[:2])
]
_MEANS: list[dict[str, Any]] = [  # of g_i, of γ_i g_i
    {
        "arrowstyle": _WIDE.format(2.2, 6),
        "mutation_scale": 1,
        "facecolor": fill,
        "edgecolor": _INK,
        "linewidth": 0.8,
    }
    for fill in (_INK, "white")
]
_POINT: dict[str, Any] = {"color": "none", "markeredgecolor": _INK}
_RING = _POINT | {"marker": "o", "markersize": 9, "markeredgewidth": 0.7}
_CROSS = _POINT | {"marker": "x", "markersize": 4.5, "markeredgewidth": 1.0}


@style.applied()
def draw_clipping(values: Clipping) -> Figure:
    """Above: the gradients, clipped one by one, and scaled with Z above all. Below: with Z below
    some.
    """
    figure = style.figure(height_mm=113)
    axes = figure.subplot_mosaic([["enough", "local", "scaled"], ["scarce", "dropped", "capped"]])
    for name, Z in zip(("enough", "scarce"), values.Z, strict=True):
        _draw_gradients(axes[name], values, Z)
    for name, treatment in values.treatments.items():
        _draw_treatment(axes[name], values, treatment)
        rule, turned = style.RULES[treatment.rule].label, abs(treatment.degrees)
        axes[name].set_title(f"{rule}\n{_TREATED[name]}, turned by {turned:.0f}°", fontsize=7.5)
    _draw_legend(figure)
    return figure


def _draw_gradients(axes: Axes, values: Clipping, Z: float) -> None:
    """g_i with the two circles, and a ring around the end of one that is above Z."""
    norms = np.linalg.norm(values.gradients, axis=1)
    above = norms > Z
    _draw_circle(axes, values.C0, "--")
    _draw_circle(axes, Z, ":")
    _draw_arrows(axes, values.gradients, values.group)
    _draw_arrow(axes, values.mean, zorder=4, **_MEANS[0])
    axes.plot(*values.gradients[above].T, **_RING)
    axes.set_title(
        f"Gradients, $Z = {Z:g}$\n{above.sum() or 'none'} of {len(norms)} above $Z$", fontsize=7.5
    )
    _frame(axes, (-5.5, 5.2), (-9.4, 2.2))


def _draw_treatment(axes: Axes, values: Clipping, treatment: Treatment) -> None:
    """γ_i g_i; dotted, where scaling alone would leave a gradient that is above Z."""
    _draw_circle(axes, values.C0, "--")
    if treatment.Z is not None:
        above = np.linalg.norm(values.gradients, axis=1) > treatment.Z
        for end in values.C0 / treatment.Z * values.gradients[above]:
            axes.plot([0, end[0]], [0, end[1]], ":", color=_GREY, linewidth=1.0)
            axes.plot(*end, **_CROSS)
    _draw_arrows(axes, treatment.summed, values.group)
    for mean, look in zip((values.mean, treatment.mean), _MEANS, strict=True):
        _draw_arrow(axes, mean, zorder=4, **look)
    _frame(axes, (-1.7, 2.3), (-3.1, 1.0))


def _draw_arrows(axes: Axes, vectors: Array, group: NDArray[np.int64]) -> None:
    """From the origin, in the look of their group; those that are 0 are not there."""
    for k, look in enumerate(_GROUP_ARROWS):
        for end in vectors[(group == k) & vectors.any(axis=1)]:
            _draw_arrow(axes, end, **look)


def _draw_arrow(axes: Axes, end: Array, **look: Any) -> None:
    from matplotlib.patches import FancyArrowPatch

    axes.add_patch(FancyArrowPatch((0, 0), (float(end[0]), float(end[1])), **_ARROW | look))


def _draw_circle(axes: Axes, radius: float, line: str) -> None:
    from matplotlib.patches import Circle

    axes.add_patch(
        Circle((0, 0), radius, fill=False, linestyle=line, edgecolor=_GREY, linewidth=0.8)
    )


def _frame(axes: Axes, across: tuple[float, float], up: tuple[float, float]) -> None:
    """Equal scales and no numbers: the circles are the measure."""
    axes.set(xlim=across, ylim=up, aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color=_PALE)


def _draw_legend(figure: Figure) -> None:
    """Below all panels."""
    from matplotlib.legend_handler import HandlerPatch
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyArrowPatch

    arrows = [
        FancyArrowPatch((0, 0), (1, 0), **_ARROW | look) for look in (*_GROUP_ARROWS, *_MEANS)
    ]
    circles = [Line2D([], [], color=_GREY, linestyle=line, linewidth=0.8) for line in ("--", ":")]
    points = [Line2D([], [], linestyle="", **look) for look in (_RING, _CROSS)]
    named = dict(zip([look.label for look in style.GROUPS[:2]], arrows[:2], strict=True)) | {
        "mean of $g_i$": arrows[2],
        r"mean of $\gamma_i g_i$": arrows[3],
        "norm $C_0$": circles[0],
        "norm $Z$": circles[1],
        "above $Z$": points[0],
        "$g_i C_0/Z$, too long": points[1],
    }
    figure.legend(
        named.values(),
        named.keys(),
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
    """An arrow as wide as a legend's handle; matplotlib passes all by name."""
    from matplotlib.patches import FancyArrowPatch

    del legend, fontsize
    y = height / 2 - ydescent
    look = {
        "arrowstyle": orig_handle.get_arrowstyle(),
        "mutation_scale": orig_handle.get_mutation_scale(),
    }
    return FancyArrowPatch((-xdescent, y), (width - xdescent, y), **_ARROW | look)


@dataclass(frozen=True)
class Decomposition:
    """One step, and what its two errors cost each group.

    Attributes:
        problem: of which the step is.
        theta: θ before it.  # [2]
        lr: η.
        plain: g_B.  # [2]
        clipped: ḡ_B.  # [2]
        rho: ρ = ‖ḡ_B‖/‖g_B‖.
        M: the rotation M_B with ḡ_B = M_B(ρ g_B).  # [2, 2]
        degrees: its angle, positive if anticlockwise.
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
    """A step along ḡ_B instead of g_B; the terms are those of `evenclip.audit.decomposition`."""
    of = problem()
    g = of.gradients(_STEP)
    plain, clipped = g.mean(0), _summed(DPSGD(C0=_C0), g).mean(0)
    rho, turn = _rho(plain, clipped), _turn(plain, clipped)
    means = np.stack([g[of.group == k].mean(0) for k in (0, 1)])  # g_a and g_b
    found = terms(
        means @ plain,
        _form(of.H, plain),
        means @ clipped,
        _form(of.H, clipped),
        np.full(2, rho),
        lr,
    )
    return Decomposition(
        problem=of,
        theta=_STEP,
        lr=lr,
        plain=plain,
        clipped=clipped,
        rho=rho,
        M=np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]]),
        degrees=math.degrees(turn),
        mag=found["mag"],
        dir=found["dir"],
        clip=found["clip"],
    )


@style.applied()
def draw_decomposition(values: Decomposition) -> Figure:
    """From g_B to ρ g_B to ḡ_B, and beside it what each of the two does to the groups' losses."""
    figure = style.figure(height_mm=68)
    step, costs = figure.subplots(1, 2, width_ratios=[1.05, 1])
    _draw_step(step, values)
    _draw_costs(costs, values)
    return figure


def _draw_step(axes: Axes, values: Decomposition) -> None:
    """The three vectors, a measure from the first to the second, and the arc from the second to the
    third.
    """
    from matplotlib.patches import Arc

    plain, shortened, clipped = values.plain, values.rho * values.plain, values.clipped
    for end, tail, head, colour in (
        (plain, 5, 13, _PLAIN), (clipped, 5, 13, _CLIPPED), (shortened, 1.4, 7, _SHORTENED),
    ):  # fmt: skip
        _draw_arrow(axes, end, arrowstyle=_WIDE.format(tail, head), mutation_scale=1, color=colour)
    norm, angle = float(np.linalg.norm(clipped)), math.degrees(math.atan2(plain[1], plain[0]))
    low, high = sorted((angle, angle + values.degrees))
    axes.add_patch(
        Arc((0, 0), 2 * norm, 2 * norm, theta1=low, theta2=high, color=_INK, linestyle=":")
    )
    aside = (
        0.09 * np.array([plain[1], -plain[0]]) / np.linalg.norm(plain)
    )  # to the side away from ḡ_B
    measure = {
        "arrowstyle": "|-|,widthA=0.3,widthB=0.3",
        "linewidth": 0.7,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", tuple(plain + aside), tuple(shortened + aside), arrowprops=measure)
    middle = math.radians((low + high) / 2)
    on_arc = norm * np.array([math.cos(middle), math.sin(middle)])
    _write(axes, "$g_B$", plain, (3, -3), va="top")
    _write(axes, r"$\rho\,g_B$", shortened / 2, (-6, -4), ha="right", va="top")
    _write(axes, r"$\bar g_B = M_B(\rho\,g_B)$", clipped / 2, (0, 7), ha="center")
    error = f"magnitude error\n$\\rho = {values.rho:.2f}$"
    _write(axes, error, (plain + shortened) / 2 + aside, (-4, -2), ha="right", va="top")
    _write(axes, f"direction error\n{abs(values.degrees):.0f}°", on_arc, (8, -3), va="center")
    axes.set_title("The two errors of one step", loc="left")
    _frame(axes, (-0.08, 1.2), (-0.98, 0.22))


def _draw_costs(axes: Axes, values: Decomposition) -> None:
    """R_mag, on from there R_dir, and R_clip, which is as high as the two together."""
    highest = float(np.max(values.clip))
    for k, look in enumerate(style.GROUPS[:2]):
        mag, dir, clip = (float(part[k]) for part in (values.mag, values.dir, values.clip))
        places = 3.6 * k + np.arange(3)
        axes.bar(places, [mag, dir, clip], 0.8, [0, mag, 0], **look.fill)
        for level, first in ((mag, 0), (clip, 1)):  # from the end of one to the start of the next
            axes.plot(
                [places[first] - 0.4, places[first + 1] + 0.4],
                [level, level],
                color=_INK,
                linewidth=0.6,
            )
        for place, part, top in zip(
            places, (mag, dir, clip), (mag, max(mag, clip), clip), strict=True
        ):
            _write(axes, _signed(part), (place, top), (0, 2.5), ha="center", **_SMALL)
        total = f"{_signed(mag)} {'+' if dir >= 0 else '−'} {_signed(abs(dir))} = {_signed(clip)}"
        axes.text(places[1], 1.16 * highest, f"{look.label}\n{total}", ha="center", color=look.ink)
    axes.axhline(0, color=_INK, linewidth=0.6)
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


def _summed(rule: Rule, g: Array) -> Array:
    """γ_i g_i, by the rule itself.  # [sample, 2]"""
    norms = torch.from_numpy(np.linalg.norm(g, axis=1))
    weights: Array = rule.weight(norms, torch.zeros(len(g)), rule.init(2)).numpy()
    return weights[:, None] * g


def _rho(plain: Array, clipped: Array) -> float:
    """ρ = ‖ḡ_B‖/‖g_B‖, 1 if either is 0."""
    long, short = float(np.linalg.norm(plain)), float(np.linalg.norm(clipped))
    return short / long if long > 0 and short > 0 else 1.0


def _turn(a: Array, b: Array) -> float:
    """The angle from a to b, in (−π, π]."""
    return math.atan2(float(a[0] * b[1] - a[1] * b[0]), float(a @ b))


def _form(H: Array, v: Array) -> Array:
    """vᵀ H v.  # [...]"""
    return np.asarray(np.einsum("...i,...ij,...j->...", v, H, v))


def _write(
    axes: Axes, text: str, at: Array | tuple[float, float], offset: tuple[float, float], **look: Any
) -> None:
    """So many points away from a place of the data."""
    axes.annotate(text, (float(at[0]), float(at[1])), offset, textcoords="offset points", **look)


def _signed(value: float, decimals: int = 2) -> str:
    """Rounded, with a real minus sign, and none before 0.

    >>> _signed(-0.196), _signed(1.3, 1), _signed(-0.001)
    ('−0.20', '1.3', '0.00')
    """
    rounded = round(value, decimals) + 0.0  # −0 is 0
    return f"{rounded:.{decimals}f}".replace("-", "−")


DRAWINGS: dict[str, Callable[[], Figure]] = {
    "convergence": lambda: draw_convergence(convergence()),
    "clipping": lambda: draw_clipping(clipping()),
    "decomposition": lambda: draw_decomposition(decomposition()),
}
"""Name -> what computes and draws it."""
