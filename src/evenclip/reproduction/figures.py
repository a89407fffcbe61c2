"""The paper's figures, drawn from observed runs (`evenclip.reproduction.observed`).

Figures of every method and both groups:

- DATASET-epochs: training loss, and ‖g_B‖ of the group's samples in a batch, by epoch.
- DATASET-risk: R_dir and R_mag, at each measurement.
- DATASET-noise: R_noise with the factor 1/B², which the paper leaves out; `published_scale` leaves
  it out too.

Figures of DPSGD and both groups:

- adult-bounds: the gaps of R_clip and R_dir, and their lower bounds by Tran et al. and by
  Proposition 3.
- adult-eigenvalues: λ_max of each group and 1/η; Proposition 3 assumes λ_max ≤ 1/η.

Each figure exists as published and at the same largest step, with "-matched" after its name. The
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

Observed = Mapping[str, Mapping[str, Any]]  # rule -> measurements of its run


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the paper.

    Attributes:
        name: name of the figure.
        dataset: name of the dataset.
        kind: epochs, risk, noise, bounds or eigenvalues.
        match: whether the runs use the matched protocol.
    """

    name: str
    dataset: str
    kind: str
    match: bool

    @property
    def caption(self) -> str:
        """The caption below the figure."""
        how = "at the same largest step" if self.match else "as published"
        return f"{SETTINGS[self.dataset].title}, {how}: {_CAPTIONS[self.kind]}"


CLOSER = ("bounds", "eigenvalues")
"""Kinds of figures that need a run with eigenvalues."""

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
"""Name -> figure."""


def draw(figure: PaperFigure, observed: Observed, *, published_scale: bool = False) -> Figure:
    """Draw a figure from the measurements of each rule's run."""
    rules = [rule for rule in style.RULES if rule in observed]
    if figure.kind != "epochs":
        rules = [rule for rule in rules if rule != NonPrivate.name]
    draws: dict[str, Callable[[Observed, Sequence[str]], Figure]] = {
        "epochs": _epochs, "risk": _risk, "bounds": _bounds, "eigenvalues": _eigenvalues,
        "noise": lambda runs, rules: _noise(runs, rules, published_scale=published_scale),
    }  # fmt: skip
    with style.applied():
        drawn = draws[figure.kind]({rule: observed[rule] for rule in rules}, rules)
        drawn.text(0.005, 0.01, mark(figure, observed), fontsize=style.SMALLEST, style="italic")
        return drawn


def mark(figure: PaperFigure, observed: Observed) -> str:
    """Return a few words that mark a quick or partial figure; otherwise an empty string."""
    run = next(iter(observed.values()))
    published = PUBLISHED[figure.dataset]
    n = published.batch_size * (published.batches or 1)
    if run["watch"].get("epochs") is not None:
        return "a quick look"
    return f"partial: {run['n']:,} training records" if run["n"] < 0.95 * n else ""


# --- panels -------------------------------------------------------------------------------------


def _panels(rules: Sequence[str], rows: int, height: float) -> tuple[Figure, Any]:
    """Return a figure with a column of panels for each rule; panels of a row share their scale."""
    figure = style.figure(max(70.0, 30.0 * len(rules) + 12.0), height)
    axes = figure.subplots(rows, len(rules), sharex=True, sharey="row", squeeze=False)
    for column, rule in enumerate(rules):
        axes[0, column].set_title(style.RULES[rule].label, fontsize=style.SMALLEST)
    return figure, axes


def _lines(
    axes: Axes, x: Sequence[float], columns: Sequence[Sequence[float | None]], groups: Sequence[str]
) -> None:
    """Draw a curve with a few markers for each group."""
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
    """Draw the legend of `axes` below all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def _epochs(observed: Observed, rules: Sequence[str]) -> Figure:
    """Draw training loss and ‖g_B‖ by epoch."""
    figure, axes = _panels(rules, 2, 80.0)
    for column, rule in enumerate(rules):
        run = observed[rule]
        epochs = list(range(1, len(run["loss"]) + 1))
        _lines(axes[0, column], epochs, list(zip(*run["loss"], strict=True)), run["groups"])
        _lines(axes[1, column], epochs, list(zip(*run["norm"], strict=True))[1:], run["groups"])
        axes[1, column].set_xlabel("epoch")
    axes[1, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel(r"$\Vert g_B\Vert$ by group")
    _legend(figure, axes[0, 0])
    return figure


def _term(run: Mapping[str, Any], name: str) -> tuple[list[float], list[list[float | None]]]:
    """Return the steps of the measurements, and for each group its term at these steps."""
    measurements = run["risk"]
    steps = [float(measured["t"]) for measured in measurements]
    groups = range(len(run["groups"]))
    return steps, [
        [measured["risk"][k]["terms"].get(name, [None])[0] for measured in measurements]
        for k in groups
    ]


def _risk(observed: Observed, rules: Sequence[str]) -> Figure:
    """Draw R_dir and R_mag by step."""
    figure, axes = _panels(rules, 2, 80.0)
    for column, rule in enumerate(rules):
        for row, name in enumerate(("dir", "mag")):
            steps, terms = _term(observed[rule], name)
            axes[row, column].axhline(0.0, color="0.6", linewidth=0.6)
            _lines(axes[row, column], steps, terms, observed[rule]["groups"])
        axes[1, column].set_xlabel("step")
    axes[0, 0].set_ylabel(r"$R^{\mathrm{dir}}$")
    axes[1, 0].set_ylabel(r"$R^{\mathrm{mag}}$")
    _legend(figure, axes[0, 0])
    return figure


def _noise(observed: Observed, rules: Sequence[str], *, published_scale: bool) -> Figure:
    """Draw R_noise by step, in units of a common power of 10."""
    figure, axes = _panels(rules, 1, 52.0)
    noise = {rule: _term(observed[rule], "noise") for rule in rules}
    factor = {rule: observed[rule]["B"] ** 2 if published_scale else 1.0 for rule in rules}
    largest = max(
        (
            abs(value) * factor[rule]
            for rule in rules
            for group in noise[rule][1]
            for value in group
            if value
        ),
        default=1.0,
    )
    power = math.floor(math.log10(largest))
    for column, rule in enumerate(rules):
        steps, terms = noise[rule]
        scale = factor[rule] / 10.0**power
        scaled = [[None if value is None else value * scale for value in group] for group in terms]
        axes[0, column].axhline(0.0, color="0.6", linewidth=0.6)
        _lines(axes[0, column], steps, scaled, observed[rule]["groups"])
        axes[0, column].set_xlabel("step")
    without = r", without $1/B^2$" if published_scale else ""
    axes[0, 0].set_ylabel(rf"$R^{{\mathrm{{noise}}}}$ in $10^{{{power}}}${without}")
    _legend(figure, axes[0, 0])
    return figure


# --- bounds -------------------------------------------------------------------------------------


def bound_rows(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the gaps of R_clip and R_dir between groups a and b at each measurement of a run.

    Each row also has the lower bounds and, for a run with eigenvalues, their conditions.
    """
    rows = []
    for measured in run["risk"]:
        a, b = measured["risk"][:2]
        norms, clipped = (np.array(values) for values in measured["norms"])
        rho = np.where((norms > 0) & (clipped > 0), clipped / np.where(norms > 0, norms, 1.0), 1.0)
        first, second = ((np.array(g["slopes"]), np.array(g["clipped_slopes"])) for g in (a, b))
        lr, S, (share_a, share_b) = run["lr"], measured["sensitivity"], run["shares"]
        spread = (1 - (run["q"] or 0.0)) / run["B"]
        row = {
            "t": measured["t"],
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
        rows.append(row)
    return rows


def _bounds(observed: Observed, rules: Sequence[str]) -> Figure:
    """Draw the gaps of R_clip and R_dir and their lower bounds, by step."""
    rows, (a, b) = bound_rows(observed[rules[0]]), observed[rules[0]]["groups"]
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


def _eigenvalues(observed: Observed, rules: Sequence[str]) -> Figure:
    """Draw λ_max of each group and 1/η, by step."""
    figure, axes = _panels(rules, 1, 55.0)
    for column, rule in enumerate(rules):
        run = observed[rule]
        measurements = [m for m in run["risk"] if m["risk"][0]["extremes"] is not None]
        columns = [
            [measured["risk"][k]["extremes"][1] for measured in measurements]
            for k in range(len(run["groups"]))
        ]
        steps = [measured["t"] for measured in measurements]
        _lines(axes[0, column], steps, columns, run["groups"])
        axes[0, column].axhline(
            1 / run["lr"], color="black", linewidth=0.9, linestyle=":", label="1/η"
        )
        axes[0, column].set_yscale("log")
        axes[0, column].set_xlabel("step")
    axes[0, 0].set_ylabel(r"$\lambda_{\max}$")
    _legend(figure, axes[0, 0])
    return figure
