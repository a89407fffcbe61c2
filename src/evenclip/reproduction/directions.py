"""Table 1: steps with only one of the two errors of clipping, in magnitude or in direction.

    magnitude only     ρ g_B            ρ = ‖ḡ_B‖/‖g_B‖, 1 if either is 0
    direction only     ḡ_B/ρ

The runs add no noise and train on MNIST with class 8 undersampled. The steps need ‖g_B‖ in clear
and have no ε, so they are defined here and not in `evenclip.rules`.

The paper does not print the settings. The first two rows use those of its MNIST table (C0 = 1,
batches of 256, 60 epochs) and the learning rate of DPSGD-Global-Adapt, 0.1. Two further rows, of
one seed each, use the learning rates whose results are closest to the printed ones: 2 and 0.01.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from evenclip import check
from evenclip.audit import statistics
from evenclip.gradients import PerSample
from evenclip.reproduction.published import load
from evenclip.reproduction.training import Training
from evenclip.rules import NO_EPSILON, Rule
from evenclip.sweep import Local, Silent, Spec, Store, carry_out
from evenclip.sweep.describe import describe_rule
from evenclip.sweep.store import default_root

__all__ = ["DATASETS", "NAME", "TITLE", "DirectionOnly", "MagnitudeOnly", "draw", "make"]

NAME, TITLE = "directions", "Table 1: magnitude against direction"
DATASETS = ("mnist",)
# The kept error, the learning rate, and whether the row has one seed only.
_ROWS = (
    ("magnitude", 0.1, False),
    ("direction", 0.1, False),
    ("magnitude", 2.0, True),
    ("direction", 0.01, True),
)


@dataclass(frozen=True)
class _OneErrorRule(Rule):
    """The clipping of DPSGD with one of its two errors, without noise and without ε."""

    soundness: ClassVar[str] = NO_EPSILON
    why: ClassVar[str] = "it needs the norm of the whole batch's gradient in clear"
    bounded: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    keeps: ClassVar[str]

    C0: float = 1.0
    sigma = 0.0

    def __post_init__(self) -> None:
        check.positive(C0=self.C0)

    def sensitivity(self, now: Tensor) -> float:
        del now
        return self.C0

    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:
        del group, now
        return (self.C0 / norm).clamp(max=1.0)

    def tape(self, tape: Any) -> Any:
        return _OneErrorTape(tape, self.keeps)


@dataclass(frozen=True)
class MagnitudeOnly(_OneErrorRule):
    """A rule that steps along ρ g_B."""

    name: ClassVar[str] = "magnitude"
    keeps: ClassVar[str] = "magnitude"


@dataclass(frozen=True)
class DirectionOnly(_OneErrorRule):
    """A rule that steps along ḡ_B/ρ."""

    name: ClassVar[str] = "direction"
    keeps: ClassVar[str] = "direction"


class _OneErrorTape:
    """A tape whose weighted sums have one of the two errors of clipping."""

    def __init__(self, tape: Any, keeps: str) -> None:
        self._tape, self._keeps = tape, keeps
        self.model, self.layout = tape.model, tape.layout

    @contextmanager
    def recording(self) -> Iterator[Self]:
        with self._tape.recording():
            yield self

    def __call__(self, x: Any, y: Any, group: Tensor | None = None) -> PerSample:
        return _OneErrorGradients(self._tape(x, y, group), self._keeps)


class _OneErrorGradients(PerSample):
    """Per-sample gradients whose weighted sum has one of the two errors of clipping."""

    def __init__(self, gradients: PerSample, keeps: str) -> None:
        super().__init__(gradients.losses, (), gradients.layout)
        self._gradients, self._keeps = gradients, keeps

    def norms(self, *, quick: bool = False) -> Tensor:
        """Return ‖g_i‖ of the wrapped gradients.  # [sample]"""
        return self._gradients.norms(quick=quick)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ g_i with the length of Σ w_i g_i, or Σ w_i g_i with the length of Σ g_i.

        Σ g_i is over the samples with a weight other than 0.
        """
        clipped = self._gradients.weighted_sum(weights)
        plain = self._gradients.weighted_sum((weights != 0).to(weights.dtype))
        short, long = torch.linalg.vector_norm(clipped), torch.linalg.vector_norm(plain)
        rho = torch.where((short > 0) & (long > 0), short / long, 1.0)
        kept: Tensor = plain * rho if self._keeps == "magnitude" else clipped / rho
        return kept

    def masked(self, keep: Tensor) -> PerSample:
        """Return the gradients of the kept samples."""
        return _OneErrorGradients(self._gradients.masked(keep), self._keeps)


# --- the table ----------------------------------------------------------------------------------


def make(how: Training) -> dict[str, Any]:
    """Train the runs of the table; return its record."""
    from evenclip.comparison.presets import PUBLISHED, SETTINGS
    from evenclip.reproduction.tables import made_with

    (dataset,) = DATASETS
    plan = PUBLISHED[dataset]
    data: dict[str, Any] = {"name": dataset, "options": {}}
    if how.data_dir is not None:
        data["directory"] = str(how.data_dir.resolve())
    assert plan.batches is not None
    q, epochs = 1 / plan.batches, plan.epochs
    if how.quick:
        data["rows"] = SETTINGS[dataset].quick_rows
        q, epochs = plan.batch_size / data["rows"], 1
    rules = {rule.name: describe_rule(rule) for rule in (MagnitudeOnly(), DirectionOnly())}
    rows = [(error, lr, list(range(1 if once else how.seeds))) for error, lr, once in _ROWS]
    specs = [
        Spec(
            data,
            plan.model,
            rules[error],
            lr,
            epochs,
            plan.batch_size,
            q,
            plan.delta,
            seed,
            how.device,
        )
        for error, lr, seeds in rows
        for seed in seeds
    ]
    store = Store(default_root() if how.store is None else how.store)
    results = carry_out(specs, store, how.show or Silent(), how.on or Local())
    remaining = iter(results)
    return {
        "format": 2,
        "table": NAME,
        "quick": how.quick,
        "groups": results[0]["groups"],
        "rows": [
            _row(error, lr, seeds, [next(remaining) for _ in seeds]) for error, lr, seeds in rows
        ],
        "made_with": made_with(how.device),
    }


def _row(
    error: str, lr: float, seeds: Sequence[int], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return one row of the record."""
    return {
        "error": error, "lr": lr, "seeds": list(seeds),
        "accuracy": [result["test"]["groups"]["accuracy"] for result in results],
        "train_loss": [result["train_loss"] for result in results],
    }  # fmt: skip


def draw(record: Mapping[str, Any]) -> str:
    """Draw a record as Markdown."""
    printed = load(NAME)
    places = [record["groups"].index(group) for group in printed.groups]
    lines = [f"## {TITLE}", ""]
    if record["quick"]:
        lines += [
            "**A quick run: fewer epochs and records than ours. These are not the numbers.**",
            "",
        ]
    lines += [
        "No noise. The paper does not print its learning rates.",
        "",
        "| error kept | learning rate | seeds | "
        + " | ".join(
            f"{metric} {group} | printed"
            for metric in ("accuracy", "loss")
            for group in printed.groups
        )
        + " |",
        "| --- | ---: | ---: |" + " ---: | ---: |" * 4,
    ]
    for values in record["rows"]:
        row, cells = values["error"], [f"{values['lr']:g}", str(len(values["seeds"]))]
        for column, ours, digits in (("accuracy", "accuracy", 1), ("loss", "train_loss", 3)):
            for group, place in zip(printed.groups, places, strict=True):
                mean, se = statistics.mean_se([seed[place] for seed in values[ours]])
                shown = (
                    "–"
                    if mean is None
                    else f"{mean:.{digits}f}" + ("" if se is None else f" ± {se:.{digits}f}")
                )
                cells += [shown, str(printed.cell(row, column, group))]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "Losses are training losses of the last epoch.", ""])
