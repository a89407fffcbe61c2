"""The paper's figures, drawn from observed runs (`evenclip.reproduction.observed`).

Figures of every method and both groups:

- DATASET-epochs: training loss, and ‖g_B‖ of the group's samples in a batch, by epoch.
- DATASET-risk: R_dir and R_mag, at each measurement where the expansion holds
  (`evenclip.reproduction.validity`).
- DATASET-noise: R_noise with the factor 1/B², which the paper leaves out; `published_scale` leaves
  it out too. Each rule has its own scale.

Figures of DPSGD and both groups:

- adult-bounds: the gaps of R_clip and R_dir, and their lower bounds: one that we derived from the
  proof of Theorem 3 of Tran et al., and that of Proposition 3.
- adult-eigenvalues: λ_max of each group and 1/η; Proposition 3 assumes λ_max ≤ 1/η.

Each figure exists as published and at the same expected largest step, with "-matched" after its
name.
Curves are means over seeds, and shaded areas their standard errors. The explanatory drawings are in
`evenclip.reproduction.drawings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evenclip.audit import bounds
from evenclip.comparison.presets import PUBLISHED, SETTINGS
from evenclip.reproduction import style, validity
from evenclip.rules import NonPrivate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CLOSER", "FIGURES", "PaperFigure", "bound_rows", "draw", "mark"]

Values = NDArray[np.float64]
Run = Mapping[str, Any]  # measurements of an observed run
Observed = Mapping[str, Sequence[Run]]  # rule -> its runs, by seed


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
        how = "at the same expected largest step" if self.match else "as published"
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
    """Draw a figure from the measurements of each rule's runs."""
    rules = [rule for rule in style.RULES if rule in observed]
    if figure.kind != "epochs":
        rules = [rule for rule in rules if rule != NonPrivate.name]
    runs = {rule: observed[rule] for rule in rules}
    note = mark(figure, observed)
    with style.applied():
        if figure.kind == "noise":
            return _noise(runs, note, published_scale=published_scale)
        draws: dict[str, Callable[[Observed, str], Figure]] = {
            "epochs": _epochs, "risk": _risk, "bounds": _bounds, "eigenvalues": _eigenvalues,
        }  # fmt: skip
        return draws[figure.kind](runs, note)


def mark(figure: PaperFigure, observed: Observed) -> str:
    """Return a note on the runs: whether they are quick or partial, and the number of seeds."""
    runs = next(iter(observed.values()))
    published = PUBLISHED[figure.dataset]
    n = published.batch_size * (published.batches or 1)
    facts = []
    if runs[0]["watch"].get("epochs") is not None:
        facts.append("a quick run")
    elif runs[0]["n"] < 0.95 * n:
        facts.append(f"partial: {runs[0]['n']:,} training records")
    if len(runs) == 1:
        facts.append("one seed, so without errors")
    else:
        facts.append(f"mean and standard error over {len(runs)} seeds")
    return "; ".join(facts)


# --- panels -------------------------------------------------------------------------------------


def _panels(
    rules: Iterable[str], rows: int, height: float, *, shared: bool = True
) -> tuple[Figure, Any]:
    """Return a figure with a column of panels for each rule; a row may share its scale."""
    names = list(rules)
    figure = style.figure(max(70.0, 30.0 * len(names) + 12.0), height)
    axes = figure.subplots(
        rows, len(names), sharex=True, sharey="row" if shared else False, squeeze=False
    )
    for column, rule in enumerate(names):
        axes[0, column].set_title(style.RULES[rule].label, fontsize=style.SMALLEST)
    return figure, axes


def _curves(axes: Axes, x: Sequence[float], values: Values, groups: Sequence[str]) -> None:
    """Draw the curve of each group; values [seed, group, x]."""
    for k, group in enumerate(groups):
        look = replace(style.GROUPS[k], label=group)
        marks = {"marker": look.marker, "markevery": max(1, len(x) // 5), "markersize": 3}
        _curve(axes, x, values[:, k], {**look.stroke, **marks})


def _curve(axes: Axes, x: Sequence[float], values: Values, stroke: Mapping[str, Any]) -> None:
    """Draw the mean over seeds with its standard error; values [seed, x].

    Nothing is drawn where the value of a seed is NaN.
    """
    mean = values.mean(axis=0)
    if len(values) > 1:
        error = values.std(axis=0, ddof=1) / math.sqrt(len(values))
        axes.fill_between(
            x, mean - error, mean + error, color=stroke["color"], alpha=0.25, linewidth=0
        )
    axes.plot(x, mean, **stroke)


def _legend(figure: Figure, axes: Axes, note: str) -> None:
    """Draw the legend of `axes` below all panels, with a note."""
    handles, labels = axes.get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    legend.set_title(note)
    legend.get_title().set(fontsize=style.SMALLEST, style="italic", multialignment="center")


def _array(rows: Iterable[Any]) -> Values:
    """Return nested lists as an array, with NaN for None."""
    return np.array(list(rows), dtype=np.float64)


def _epochs(observed: Observed, note: str) -> Figure:
    """Draw training loss and ‖g_B‖ by epoch."""
    figure, axes = _panels(observed, 2, 84.0)
    for column, runs in enumerate(observed.values()):
        loss, norm = (_array(run[name] for run in runs) for name in ("loss", "norm"))
        epochs, groups = range(1, loss.shape[1] + 1), runs[0]["groups"]
        _curves(axes[0, column], epochs, loss.transpose(0, 2, 1), groups)
        _curves(axes[1, column], epochs, norm[:, :, 1:].transpose(0, 2, 1), groups)
        axes[1, column].set_xlabel("epoch")
    axes[1, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel(r"$\Vert g_B\Vert$ by group")
    _legend(figure, axes[0, 0], note)
    return figure


def _steps(runs: Sequence[Run]) -> list[float]:
    """Return the steps of the measurements."""
    return [float(measured["t"]) for measured in runs[0]["risk"]]


def _term(runs: Sequence[Run], name: str) -> Values:
    """Return a term of the risk, NaN where it was not measured.  # [seed, group, measurement]"""
    groups = range(len(runs[0]["groups"]))
    return _array(
        [
            [measured["risk"][k]["terms"].get(name, [None])[0] for measured in run["risk"]]
            for k in groups
        ]
        for run in runs
    )


def _valid(runs: Sequence[Run]) -> NDArray[np.bool_]:
    """Return where the expansion holds.  # [seed, group, measurement]"""
    groups = range(len(runs[0]["groups"]))
    return np.array(
        [
            [[validity.holds(run, measured, k) for measured in run["risk"]] for k in groups]
            for run in runs
        ]
    )


def _risk(observed: Observed, note: str) -> Figure:
    """Draw R_dir and R_mag by step, where the expansion holds in every seed."""
    figure, axes = _panels(observed, 2, 84.0)
    left_out, total = 0, 0
    for column, runs in enumerate(observed.values()):
        valid = _valid(runs)
        left_out, total = left_out + int(np.sum(~valid)), total + valid.size
        for row, name in enumerate(("dir", "mag")):
            drawn = np.where(valid, _term(runs, name), np.nan)
            axes[row, column].axhline(0.0, color="0.6", linewidth=0.6)
            _curves(axes[row, column], _steps(runs), drawn, runs[0]["groups"])
            if not valid.all(axis=0).any():
                axes[row, column].text(
                    0.5, 0.6, "not valid", transform=axes[row, column].transAxes,
                    ha="center", fontsize=style.SMALLEST, style="italic",
                )  # fmt: skip
        axes[1, column].set_xlabel("step")
    axes[0, 0].set_ylabel(r"$R^{\mathrm{dir}}$")
    axes[1, 0].set_ylabel(r"$R^{\mathrm{mag}}$")
    if left_out == total:  # automatic ticks of empty axes would mean nothing
        for panel in axes.flat:
            panel.set(xticks=[], yticks=[])
    if left_out:
        note += f"\nnot drawn: {left_out:,} of {total:,} values outside the range of the expansion"
    _legend(figure, axes[0, 0], note)
    return figure


def _noise(observed: Observed, note: str, *, published_scale: bool) -> Figure:
    """Draw R_noise by step, each rule in units of another power of 10."""
    figure, axes = _panels(observed, 1, 56.0, shared=False)
    for column, runs in enumerate(observed.values()):
        terms = _term(runs, "noise") * (runs[0]["B"] ** 2 if published_scale else 1.0)
        largest = np.nanmax(np.abs(terms), initial=0.0)
        power = math.floor(math.log10(largest)) if largest > 0 else 0
        axes[0, column].axhline(0.0, color="0.6", linewidth=0.6)
        _curves(axes[0, column], _steps(runs), terms / 10.0**power, runs[0]["groups"])
        axes[0, column].text(
            0.0, 1.0, rf"$\times 10^{{{power}}}$", transform=axes[0, column].transAxes,
            va="bottom", fontsize=style.SMALLEST,
        )  # fmt: skip
        axes[0, column].set_title(axes[0, column].get_title(), fontsize=style.SMALLEST, pad=12)
        axes[0, column].set_xlabel("step")
    without = r", without $1/B^2$" if published_scale else ""
    axes[0, 0].set_ylabel(rf"$R^{{\mathrm{{noise}}}}${without}")
    _legend(figure, axes[0, 0], note + "; each rule has its own scale")
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


def _bounds(observed: Observed, note: str) -> Figure:
    """Draw the gaps of R_clip and R_dir and their lower bounds, by step."""
    (runs,) = observed.values()
    rows = [bound_rows(run) for run in runs]  # [seed][measurement]
    a, b = runs[0]["groups"]
    figure = style.figure(style.WIDTH, 66.0)
    axes = figure.subplots(1, 2, squeeze=False)[0]
    for panel, name, bound in (
        (axes[0], "clip", "our bound, after Tran et al."),
        (axes[1], "dir", "bound of Prop. 3"),
    ):
        for column, stroke in (
            (name, {"color": "black", "label": "gap"}),
            (f"{name} bound", {"color": "0.45", "linestyle": (0, (4, 1.5)), "label": bound}),
        ):
            values = _array([row[column] for row in seed] for seed in rows)
            _curve(panel, _steps(runs), values, stroke)
        panel.axhline(0.0, color="0.7", linewidth=0.6)
        panel.set_title(rf"$R^{{\mathrm{{{name}}}}}$, {a} less {b}")
        panel.set_xlabel("step")
        panel.legend(loc="best")
    known = [row for seed in rows for row in seed if "convex" in row]
    if known:
        both = sum(row["convex"] and row["small_steps"] for row in known)
        small = sum(row["small_steps"] for row in known)
        note = (
            rf"$\eta \leq 1/\lambda_{{\max}}$ at {small} of {len(known)} measurements; convex as "
            f"well, as the bounds ask, at {both}\n{note}"
        )
    figure.supxlabel(note, fontsize=style.SMALLEST, style="italic")
    return figure


def _eigenvalues(observed: Observed, note: str) -> Figure:
    """Draw λ_max of each group and 1/η, by step."""
    figure, axes = _panels(observed, 1, 60.0)
    for column, runs in enumerate(observed.values()):
        groups = range(len(runs[0]["groups"]))
        largest = _array(
            [[measured["risk"][k]["extremes"][1] for measured in run["risk"]] for k in groups]
            for run in runs
        )
        _curves(axes[0, column], _steps(runs), largest, runs[0]["groups"])
        axes[0, column].axhline(
            1 / runs[0]["lr"], color="black", linewidth=0.9, linestyle=":", label="1/η"
        )
        axes[0, column].set_yscale("log")
        axes[0, column].set_xlabel("step")
    axes[0, 0].set_ylabel(r"$\lambda_{\max}$")
    _legend(figure, axes[0, 0], note)
    return figure
