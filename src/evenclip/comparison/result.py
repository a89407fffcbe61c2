"""What came out of a comparison: every rule over all seeds, the cost of privacy by group, and the
verdicts.

For each group k, on test data:

    π_k = acc_k(θ*) − acc_k(θ̃)     privacy cost, in points
    R_k = L_k(θ̃) − L_k(θ*)         excessive risk

and their gaps between groups. None of these figures is differentially private.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evenclip.audit import cost, statistics
from evenclip.rules import DPSGD, NO_EPSILON, NonPrivate

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["BASELINE", "REFERENCE", "Comparison", "Outcome"]

REFERENCE, BASELINE = NonPrivate.name, DPSGD.name


@dataclass(frozen=True)
class Outcome:
    """One rule over all seeds.

    Attributes:
        name: the rule's.
        rule: how it was set.
        lr: learning rate, by seed.
        soundness: whether its ε can be believed.
        epsilon: ε by accountant ("pld", "rdp"), the largest over the seeds; None: none is valid.
        delta: δ.
        metrics: name -> [seed, group]; NaN where undefined. "accuracy" in percent, "loss" and
            "train_loss" in nats.
        overall: name -> [seed], over everybody.
        seconds: of training, by seed.
        course: what training looked like, epoch by epoch, mean over seeds: "loss" and
            "gradient_norm" by group, each [epoch][group]; "clip_fraction" and "sensitivity"
            [epoch]; "state" [epoch], the rule's public one.
        statement: the privacy statement of the first seed's run, see `evenclip.privacy`.
    """

    name: str
    rule: str
    lr: tuple[float, ...]
    soundness: str
    epsilon: Mapping[str, float | None]
    delta: float
    metrics: Mapping[str, NDArray[np.float64]]
    overall: Mapping[str, NDArray[np.float64]]
    seconds: tuple[float, ...]
    course: Mapping[str, Any]
    statement: Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """The rules side by side. Not differentially private: group figures carry no noise.

    Attributes:
        dataset, groups, seeds: what was compared on.
        protocol: "published", "matched" or "one learning rate"; `says` has it in words.
        outcomes: one per rule, the non-private reference first.
        pair: the two groups whose gaps are reported; None: the largest gap between any two.
        uncovered: accesses to the data that ε does not cover.
        notes: what else should be known, sentences.
        small: groups too small to judge.
        n: training records, by seed.
        risk: rule -> looks at the first seed's run (see `evenclip.runs.risk`), if they were asked
            for.
    """

    dataset: str
    groups: tuple[str, ...]
    seeds: tuple[int, ...]
    protocol: str
    says: str
    outcomes: tuple[Outcome, ...]
    pair: tuple[str, str] | None
    uncovered: tuple[str, ...]
    notes: tuple[str, ...]
    small: tuple[str, ...]
    n: tuple[int, ...]
    risk: Mapping[str, Any] | None = None

    def __getitem__(self, name: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.name == name)

    @property
    def reference(self) -> Outcome | None:
        """The non-private runs."""
        return next((outcome for outcome in self.outcomes if outcome.name == REFERENCE), None)

    def privacy_cost(self, name: str) -> NDArray[np.float64]:
        """π_k in points.  # [seed, group]"""
        assert self.reference is not None
        return cost.privacy_cost(self.reference.metrics["accuracy"], self[name].metrics["accuracy"])

    def excessive_risk(self, name: str) -> NDArray[np.float64]:
        """R_k on test data.  # [seed, group]"""
        assert self.reference is not None
        return cost.excessive_risk(self.reference.metrics["loss"], self[name].metrics["loss"])

    def gap(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Between the pair of groups, or the largest.  [seed, group] -> [seed]

        Groups too small to judge are left out of the largest, if there are two others.
        """
        if self.pair is not None:
            return cost.gap(
                values, (self.groups.index(self.pair[0]), self.groups.index(self.pair[1]))
            )
        judged = [k for k, group in enumerate(self.groups) if group not in self.small]
        return cost.gap(values[:, judged] if len(judged) > 1 else values)

    @cached_property
    def verdicts(self) -> dict[str, statistics.Paired]:
        """Each private rule's privacy-cost gap against DPSGD's, seed by seed; the p-values are
        Holm's.
        """
        names = [outcome.name for outcome in self.outcomes]
        if self.reference is None or BASELINE not in names or len(self.groups) < 2:
            return {}
        baseline = self.gap(self.privacy_cost(BASELINE))
        others = [name for name in names if name not in (REFERENCE, BASELINE)]
        found = {
            name: statistics.paired(self.gap(self.privacy_cost(name)), baseline) for name in others
        }
        adjusted = statistics.holm(
            {name: pair.p for name, pair in found.items() if pair.p is not None}
        )
        return {name: replace(pair, p=adjusted.get(name)) for name, pair in found.items()}

    def table(self, width: int = 80) -> str:
        """The table and the verdict, for a terminal of that width."""
        from evenclip.report.terminal import table

        return table(self, width)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; accuracies and costs in percent and points."""
        return {
            "dataset": self.dataset,
            "groups": list(self.groups),
            "seeds": list(self.seeds),
            "protocol": self.protocol,
            "protocol_in_words": self.says,
            "pair": None if self.pair is None else list(self.pair),
            "n_train": list(self.n),
            "privacy": {outcome.name: self._privacy(outcome) for outcome in self.outcomes},
            "table": {outcome.name: self._row(outcome) for outcome in self.outcomes},
            "verdict": {
                name: _plain(pair) | self._bootstrap(name) for name, pair in self.verdicts.items()
            },
            "settings": {o.name: {"rule": o.rule, "lr": list(o.lr)} for o in self.outcomes},
            "seconds": {o.name: list(o.seconds) for o in self.outcomes},
            "course": {o.name: dict(o.course) for o in self.outcomes},
            "statement": {o.name: dict(o.statement) for o in self.outcomes},
            "not_covered_by_epsilon": list(self.uncovered),
            "small_groups": list(self.small),
            "notes": list(self.notes),
            **({} if self.risk is None else {"risk": dict(self.risk)}),
            "warning": "Group figures are measured on test data and are not differentially "
            "private.",
        }

    def to_dataframe(self) -> pd.DataFrame:
        """One row per rule, seed, group and metric."""
        import pandas as pd

        rows = [
            {
                "rule": o.name,
                "seed": seed,
                "group": group,
                "metric": metric,
                "value": float(values[i, k]),
            }
            for o in self.outcomes
            for metric, values in self._metrics(o).items()
            for i, seed in enumerate(self.seeds)
            for k, group in enumerate(self.groups)
        ]
        return pd.DataFrame(rows, columns=["rule", "seed", "group", "metric", "value"])

    def _privacy(self, outcome: Outcome) -> dict[str, Any]:
        valid = outcome.epsilon["pld"] is not None
        return {
            "epsilon_pld": outcome.epsilon["pld"],
            "epsilon_rdp": outcome.epsilon["rdp"],
            "delta": outcome.delta if valid else None,
            "sound": valid and outcome.soundness != NO_EPSILON,
            "soundness": outcome.soundness,
        }

    def _bootstrap(self, name: str) -> dict[str, Any]:
        """The bootstrap's interval of the same difference."""
        difference = self.gap(self.privacy_cost(name)) - self.gap(self.privacy_cost(BASELINE))
        found = statistics.bootstrap_interval(difference)
        return {"bootstrap": None if found is None else [_finite(end) for end in found]}

    def _metrics(self, outcome: Outcome) -> dict[str, NDArray[np.float64]]:
        """All that is known by seed and group."""
        found = dict(outcome.metrics)
        if self.reference is not None:
            found["privacy_cost"] = self.privacy_cost(outcome.name)
            found["excessive_risk"] = self.excessive_risk(outcome.name)
        return found

    def _row(self, outcome: Outcome) -> dict[str, Any]:
        metrics = self._metrics(outcome)
        row: dict[str, Any] = {
            name: {group: _mean_se(values[:, k]) for k, group in enumerate(self.groups)}
            for name, values in metrics.items()
        }
        for name in ("privacy_cost", "excessive_risk"):
            if name in metrics and len(self.groups) > 1:
                row[f"{name}_gap"] = _mean_se(self.gap(metrics[name]))
        row["overall"] = {name: _mean_se(values) for name, values in outcome.overall.items()}
        return row


def _mean_se(values: NDArray[np.float64]) -> dict[str, float | None]:
    """As JSON has it."""
    if not len(values) or bool(np.isnan(values).any()):
        return {"mean": None, "se": None}
    return {
        name: _finite(value)
        for name, value in zip(("mean", "se"), statistics.mean_se(values), strict=True)
    }


def _plain(pair: statistics.Paired) -> dict[str, Any]:
    """As JSON has it."""
    numbers = {name: _finite(getattr(pair, name)) for name in ("mean", "se", "low", "high", "p")}
    return {"n": pair.n, **numbers, "reads": pair.reads}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: a mean loss is infinite where a score was."""
    return value if value is not None and math.isfinite(value) else None
