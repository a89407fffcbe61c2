"""The result of a comparison: every rule over all seeds, the cost of privacy, and the verdicts.

For each group k, on test data:

    π_k = acc_k(θ*) − acc_k(θ̃)     privacy cost, in points
    R_k = L_k(θ̃) − L_k(θ*)         excessive risk

and their gaps between groups. None of these figures is differentially private.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evenclip.audit import cost, statistics
from evenclip.rules import DPSGD, PROVED, NonPrivate

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["BASELINE", "REFERENCE", "Comparison", "Outcome"]

REFERENCE, BASELINE = NonPrivate.name, DPSGD.name


@dataclass(frozen=True)
class Outcome:
    """One rule over all seeds.

    Attributes:
        name: name of the rule.
        rule: the rule with its settings, as text.
        lr: learning rate, by seed.
        soundness: soundness of the rule.
        epsilon: accountant ("pld", "rdp") -> largest ε over the seeds; None if none is valid.
        delta: δ.
        metrics: name -> [seed, group]; NaN where undefined. "accuracy" in percent, "loss" and
            "train_loss" in nats.
        overall: name -> [seed], over all test records.
        seconds: duration of training, by seed.
        course: values by epoch, averaged over seeds: "loss" and "gradient_norm" by group,
            [epoch][group]; "clip_fraction" and "sensitivity", [epoch]; "state", [epoch], the public
            state of the rule.
        statement: the privacy statement of the first seed's run, see
            `evenclip.mechanism.statement`.
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
        dataset: name of the dataset.
        groups: names of the groups.
        seeds: the seeds.
        protocol: "published", "matched", "one learning rate" or "given"; see
            `evenclip.comparison.protocol.Protocol`.
        says: the protocol in words.
        outcomes: one per rule, the non-private reference first.
        pair: the two groups whose gaps are reported; None: the largest gap between any two.
        uncovered: accesses to the data that ε does not cover.
        notes: further remarks, as sentences.
        small: groups that are too small to judge.
        n: number of training records, by seed.
        model: the model, in the form of `--model`.
        risk: rule -> measurements of the first seed's run (see `evenclip.sweep.risk`), if
            requested.
        private: rule -> what happened in training, summed over the seeds; see
            `evenclip.training.trace.events`. Private: neither results.json nor the page has it.
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
    model: str = ""
    risk: Mapping[str, Any] | None = None
    private: Mapping[str, Mapping[str, int]] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.name == name)

    @property
    def reference(self) -> Outcome | None:
        """The non-private runs."""
        return next((outcome for outcome in self.outcomes if outcome.name == REFERENCE), None)

    def privacy_cost(self, name: str) -> NDArray[np.float64]:
        """Return π_k in points.  # [seed, group]"""
        assert self.reference is not None
        return cost.privacy_cost(self.reference.metrics["accuracy"], self[name].metrics["accuracy"])

    def excessive_risk(self, name: str) -> NDArray[np.float64]:
        """Return R_k on test data.  # [seed, group]"""
        assert self.reference is not None
        return cost.excessive_risk(self.reference.metrics["loss"], self[name].metrics["loss"])

    def gap(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the gap of the pair, or the largest gap.  [seed, group] -> [seed]

        The largest gap leaves out groups that are too small to judge, if there are two others.
        """
        if self.pair is not None:
            return cost.gap(
                values, (self.groups.index(self.pair[0]), self.groups.index(self.pair[1]))
            )
        judged = [k for k, group in enumerate(self.groups) if group not in self.small]
        return cost.gap(values[:, judged] if len(judged) > 1 else values)

    @cached_property
    def verdicts(self) -> dict[str, statistics.Paired]:
        """Each private rule's gap of privacy cost against DPSGD's, seed by seed.

        The p-values and the verdicts are corrected for the number of rules.
        """
        names = [outcome.name for outcome in self.outcomes]
        if self.reference is None or BASELINE not in names or len(self.groups) < 2:
            return {}
        baseline = self.gap(self.privacy_cost(BASELINE))
        return statistics.corrected(
            {
                name: statistics.paired(self.gap(self.privacy_cost(name)), baseline)
                for name in names
                if name not in (REFERENCE, BASELINE)
            }
        )

    @property
    def private_notes(self) -> tuple[str, ...]:
        """A sentence for each rule whose weights were reduced to its declared bound. Private."""
        return tuple(
            f"{name}: {counts['clamped_weights']:,} weights were above its declared sensitivity "
            "and were reduced to it, so it did not run as its formula says. This count is private."
            for name, counts in self.private.items()
            if counts["clamped_weights"]
        )

    def table(self, width: int = 80) -> str:
        """Format the table and the verdicts for a terminal of this width.

        `private_notes` are not in it.
        """
        from evenclip.report.terminal import table

        return table(self.to_json(), width)

    def to_json(self) -> dict[str, Any]:
        """Return all results as plain values; accuracies in percent, costs in points."""
        return {
            "dataset": self.dataset,
            "groups": list(self.groups),
            "seeds": list(self.seeds),
            "protocol": self.protocol,
            "protocol_in_words": self.says,
            "model": self.model,
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
        """Return one row per rule, seed, group and metric."""
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
            "sound": valid and outcome.soundness in PROVED,
            "soundness": outcome.soundness,
        }

    def _bootstrap(self, name: str) -> dict[str, Any]:
        """Return the bootstrap interval of the same difference."""
        difference = self.gap(self.privacy_cost(name)) - self.gap(self.privacy_cost(BASELINE))
        interval = statistics.bootstrap_interval(difference)
        return {"bootstrap": None if interval is None else [_finite(end) for end in interval]}

    def _metrics(self, outcome: Outcome) -> dict[str, NDArray[np.float64]]:
        """Return name -> values of all metrics, cost and risk included.  # [seed, group]"""
        metrics = dict(outcome.metrics)
        if self.reference is not None:
            metrics["privacy_cost"] = self.privacy_cost(outcome.name)
            metrics["excessive_risk"] = self.excessive_risk(outcome.name)
        return metrics

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
    """Return mean and standard error for JSON; None where a value is undefined."""
    if not len(values) or bool(np.isnan(values).any()):
        return {"mean": None, "se": None}
    return {
        name: _finite(value)
        for name, value in zip(("mean", "se"), statistics.mean_se(values), strict=True)
    }


def _plain(pair: statistics.Paired) -> dict[str, Any]:
    """Return a comparison for JSON."""
    names = ("mean", "se", "low", "high", "p", "p_rank")
    numbers = {name: _finite(getattr(pair, name)) for name in names}
    return {"n": pair.n, **numbers, "reads": pair.reads}


def _finite(value: float | None) -> float | None:
    """Replace NaN and ±∞, which JSON does not have, by None."""
    return value if value is not None and math.isfinite(value) else None
