"""The paper's figures, drawn from runs that were watched (`evenclip.reproduction.observed`).

| figure | shows, for every method and both groups |
|---|---|
| DATASET-epochs | training loss, and ‖g_B‖ of the group's part of a batch, epoch by epoch |
| DATASET-risk | R_dir and R_mag, at every look |
| DATASET-noise | R_noise, with the 1/B² that the paper leaves out; `published_scale` leaves it out too |
| adult-bounds | the gaps of R_clip and R_dir under DPSGD, and the lower bounds of Tran et al. and of Proposition 3 |
| adult-eigenvalues | λ_max of each group under DPSGD against 1/η, which Proposition 3 asks to be above it |

Each exists as published and, with "-matched" behind its name, at the same largest step. The
explanatory drawings are in `evenclip.reproduction.drawings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from evenclip.audit import bounds
from evenclip.comparison.presets import PUBLISHED, SETTINGS
from evenclip.reproduction import style
from evenclip.rules import NonPrivate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CLOSER", "FIGURES", "PaperFigure", "bound_rows", "draw", "mark"]

Watched = Mapping[str, Mapping[str, Any]]  # rule -> what was seen


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the paper.

    Attributes:
        name: what it is asked for by.
        dataset: what it is of.
        kind: epochs, risk, noise, bounds or eigenvalues.
        match: whether on the matched protocol.
    """

    name: str
    dataset: str
    kind: str
    match: bool

    @property
    def caption(self) -> str:
        """In words."""
        how = "at the same largest step" if self.match else "as published"
        return f"{SETTINGS[self.dataset].title}, {how}: {_CAPTIONS[self.kind]}"


CLOSER = ("bounds", "eigenvalues")
"""Kinds that are drawn from a run with its eigenvalues."""

_CAPTIONS = {
    "epochs": "training loss (top) and norm of the batch gradient (bottom) of each group, by "
    "epoch.",
    "risk": "excessive risk of a step due to direction (top) and magnitude (bottom) of the "
    "clipped gradient.",
    "noise": "excessive risk of a step due to noise.",
    "bounds": "gaps of excessive risk under DPSGD, and lower bounds on them.",
    "eigenvalues": "largest eigenvalue of each group's Hessian against 1/η.",
}

FIGURES: dict[str, PaperFigure] = {
    figure.name: figure
    for match in (False, True)
    for dataset in SETTINGS
    for kind in ("epochs", "risk", "noise", *(CLOSER if SETTINGS[dataset].eigenvalues else ()))
    for figure in [
        PaperFigure(f"{dataset}-{kind}{'-matched' if match else ''}", dataset, kind, match)
    ]
}
"""By name."""


def draw(of: PaperFigure, watched: Watched, *, published_scale: bool = False) -> Figure:
    """The figure, from what was seen of each rule."""
    order = [rule for rule in style.RULES if rule in watched]
    if of.kind != "epochs":
        order = [rule for rule in order if rule != NonPrivate.name]
    makes: dict[str, Callable[[Watched, Sequence[str]], Figure]] = {
        "epochs": _epochs, "risk": _risk, "bounds": _bounds, "eigenvalues": _eigenvalues,
        "noise": lambda found, rules: _noise(found, rules, published_scale=published_scale),
    }  # fmt: skip
    with style.applied():
        figure = makes[of.kind]({rule: watched[rule] for rule in order}, order)
        figure.text(0.005, 0.01, mark(of, watched), fontsize=style.SMALLEST, style="italic")
        return figure


def mark(of: PaperFigure, watched: Watched) -> str:
    """What keeps the figure from being the paper's: a few words, or none."""
    one = next(iter(watched.values()))
    published = PUBLISHED[of.dataset]
    n = published.batch_size * (published.batches or 1)
    if one["watch"].get("epochs") is not None:
        return "a quick look"
    return f"partial: {one['n']:,} training records" if one["n"] < 0.95 * n else ""


# --- panels -------------------------------------------------------------------------------------


def _panels(rules: Sequence[str], rows: int, height: float) -> tuple[Figure, Any]:
    """One column of panels for each rule, with the same scale along a row."""
    figure = style.figure(max(70.0, 30.0 * len(rules) + 12.0), height)
    axes = figure.subplots(rows, len(rules), sharex=True, sharey="row", squeeze=False)
    for column, rule in enumerate(rules):
        axes[0, column].set_title(style.RULES[rule].label, fontsize=style.SMALLEST)
    return figure, axes


def _lines(
    axes: Axes, x: Sequence[float], columns: Sequence[Sequence[float | None]], groups: Sequence[str]
) -> None:
    """A curve for each group, with a few markers."""
    for k, (group, column) in enumerate(zip(groups, columns, strict=True)):
        look = replace(style.GROUPS[k], label=group)
        values = [np.nan if value is None else value for value in column]
        axes.plot(
            x,
            values,
            marker=look.marker,
            markevery=max(1, len(x) // 5),
            markersize=3,
            **look.stroke,
        )


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def _epochs(watched: Watched, rules: Sequence[str]) -> Figure:
    figure, axes = _panels(rules, 2, 80.0)
    for column, rule in enumerate(rules):
        seen = watched[rule]
        epochs = list(range(1, len(seen["loss"]) + 1))
        _lines(axes[0, column], epochs, list(zip(*seen["loss"], strict=True)), seen["groups"])
        _lines(axes[1, column], epochs, list(zip(*seen["norm"], strict=True))[1:], seen["groups"])
        axes[1, column].set_xlabel("epoch")
    axes[1, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel(r"$\Vert g_B\Vert$ by group")
    _legend(figure, axes[0, 0])
    return figure


def _term(seen: Mapping[str, Any], name: str) -> tuple[list[float], list[list[float | None]]]:
    """Steps, and for each group the term at each look."""
    looks = seen["risk"]
    steps = [float(look["t"]) for look in looks]
    groups = range(len(seen["groups"]))
    return steps, [
        [look["risk"][k]["terms"].get(name, [None])[0] for look in looks] for k in groups
    ]


def _risk(watched: Watched, rules: Sequence[str]) -> Figure:
    figure, axes = _panels(rules, 2, 80.0)
    for column, rule in enumerate(rules):
        for row, name in enumerate(("dir", "mag")):
            steps, terms = _term(watched[rule], name)
            axes[row, column].axhline(0.0, color="0.6", linewidth=0.6)
            _lines(axes[row, column], steps, terms, watched[rule]["groups"])
        axes[1, column].set_xlabel("step")
    axes[0, 0].set_ylabel(r"$R^{\mathrm{dir}}$")
    axes[1, 0].set_ylabel(r"$R^{\mathrm{mag}}$")
    _legend(figure, axes[0, 0])
    return figure


def _noise(watched: Watched, rules: Sequence[str], *, published_scale: bool) -> Figure:
    figure, axes = _panels(rules, 1, 52.0)
    found = {rule: _term(watched[rule], "noise") for rule in rules}
    factor = {rule: watched[rule]["B"] ** 2 if published_scale else 1.0 for rule in rules}
    largest = max(
        (
            abs(value) * factor[rule]
            for rule in rules
            for group in found[rule][1]
            for value in group
            if value
        ),
        default=1.0,
    )
    power = math.floor(math.log10(largest))
    for column, rule in enumerate(rules):
        steps, terms = found[rule]
        scale = factor[rule] / 10.0**power
        scaled = [[None if value is None else value * scale for value in group] for group in terms]
        axes[0, column].axhline(0.0, color="0.6", linewidth=0.6)
        _lines(axes[0, column], steps, scaled, watched[rule]["groups"])
        axes[0, column].set_xlabel("step")
    without = r", without $1/B^2$" if published_scale else ""
    axes[0, 0].set_ylabel(rf"$R^{{\mathrm{{noise}}}}$ in $10^{{{power}}}${without}")
    _legend(figure, axes[0, 0])
    return figure


# --- bounds -------------------------------------------------------------------------------------


def bound_rows(seen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """At each look, group a against group b: the gaps of R_clip and R_dir, the bounds, and whether
    they must hold.
    """
    found = []
    for look in seen["risk"]:
        a, b = look["risk"][:2]
        norms, clipped = (np.array(values) for values in look["norms"])
        rho = np.where((norms > 0) & (clipped > 0), clipped / np.where(norms > 0, norms, 1.0), 1.0)
        first, second = ((np.array(g["slopes"]), np.array(g["clipped_slopes"])) for g in (a, b))
        lr, S, (share_a, share_b) = seen["lr"], look["sensitivity"], seen["shares"]
        spread = (1 - (seen["q"] or 0.0)) / seen["B"]
        row = {
            "t": look["t"],
            "clip": a["terms"]["clip"][0] - b["terms"]["clip"][0],
            "dir": a["terms"]["dir"][0] - b["terms"]["dir"][0],
            "clip bound": bounds.clipping_bound(
                a["loss_gradient_norm"],
                b["loss_gradient_norm"],
                share_a,
                share_b,
                S,
                float(np.mean(norms**2)),
                spread,
                lr,
            ),
            "dir bound": bounds.direction_bound(first, second, rho, clipped, lr),
        }
        if a["extremes"] is not None:
            conditions = bounds.Conditions.of([tuple(g["extremes"]) for g in (a, b)], lr)
            row |= {
                "convex": conditions.convex,
                "small_steps": conditions.small_steps,
                "largest": conditions.largest,
            }
        found.append(row)
    return found


def _bounds(watched: Watched, rules: Sequence[str]) -> Figure:
    rows, (a, b) = bound_rows(watched[rules[0]]), watched[rules[0]]["groups"]
    figure = style.figure(style.WIDTH, 62.0)
    axes = figure.subplots(1, 2, squeeze=False)[0]
    steps = [row["t"] for row in rows]
    for panel, name, bound in (
        (axes[0], "clip", "bound of Tran et al."),
        (axes[1], "dir", "bound of Prop. 3"),
    ):
        panel.plot(steps, [row[name] for row in rows], color="black", label="gap")
        panel.plot(
            steps,
            [row[f"{name} bound"] for row in rows],
            color="0.45",
            linestyle=(0, (4, 1.5)),
            label=bound,
        )
        panel.axhline(0.0, color="0.7", linewidth=0.6)
        panel.set_title(rf"$R^{{\mathrm{{{name}}}}}$, {a} less {b}")
        panel.set_xlabel("step")
        panel.legend(loc="best")
    known = [row for row in rows if "convex" in row]
    if known:
        both = sum(row["convex"] and row["small_steps"] for row in known)
        small = sum(row["small_steps"] for row in known)
        short = rf"$\eta \leq 1/\lambda_{{\max}}$ at {small} of {len(known)} looks"
        figure.supxlabel(
            f"{short}; convex as well, as the bounds ask, at {both}", fontsize=style.SMALLEST
        )
    return figure


def _eigenvalues(watched: Watched, rules: Sequence[str]) -> Figure:
    figure, axes = _panels(rules, 1, 55.0)
    for column, rule in enumerate(rules):
        seen = watched[rule]
        looks = [look for look in seen["risk"] if look["risk"][0]["extremes"] is not None]
        columns = [
            [look["risk"][k]["extremes"][1] for look in looks] for k in range(len(seen["groups"]))
        ]
        _lines(axes[0, column], [look["t"] for look in looks], columns, seen["groups"])
        axes[0, column].axhline(
            1 / seen["lr"], color="black", linewidth=0.9, linestyle=":", label="1/η"
        )
        axes[0, column].set_yscale("log")
        axes[0, column].set_xlabel("step")
    axes[0, 0].set_ylabel(r"$\lambda_{\max}$")
    _legend(figure, axes[0, 0])
    return figure
