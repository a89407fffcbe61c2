"""The runs of a comparison: every rule of a plan with every seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenclip.comparison.protocol import LEARNING_RATES, Protocol
from evenclip.comparison.result import REFERENCE
from evenclip.rules import NonPrivate, Rule
from evenclip.sweep import Executor, ProgressDisplay, Spec, Store, carry_out
from evenclip.sweep.describe import Loaded, describe_rule, find_source
from evenclip.sweep.risk import measure_risk

__all__ = ["Trainings", "best_rates"]

# Fraction of the training rows to choose a learning rate with, if there is no validation split.
HELD_OUT = 0.2


@dataclass(frozen=True)
class Trainings:
    """The runs of a comparison.

    Attributes:
        plan: each rule with its settings.
        described: description of the data.
        seeds: the seeds.
        store: store of the results; runs in it are not repeated.
        executor: carries out the runs.
        display: receives progress events.
        device: device to train on.
        tf32: whether a GPU may round the operands of products.
    """

    plan: Protocol
    described: Mapping[str, Any]
    seeds: Sequence[int]
    store: Store
    executor: Executor
    display: ProgressDisplay
    device: str = "cpu"
    tf32: bool = False

    def specs(self, rates: Mapping[int, float]) -> list[Spec]:
        """Return the specifications, seed by seed and then rule by rule.

        Args:
            rates: seed -> learning rate of the rules whose learning rate is chosen.
        """
        return [
            self._spec(method.rule, rates[seed] if method.lr is None else method.lr, seed)
            for seed in self.seeds
            for method in self.plan.methods
        ]

    def results(self, specs: Sequence[Spec]) -> list[dict[str, Any]]:
        """Return the results of these runs, training those that the store does not have."""
        return carry_out(specs, self.store, self.display, self.executor)

    def risk(self, specs: Sequence[Spec]) -> dict[str, Any]:
        """Return rule -> risk measurements of the first seed's private runs."""
        private = {
            method.name: spec
            for method, spec in zip(self.plan.methods, specs, strict=False)
            if method.name != REFERENCE
        }
        measured = measure_risk(list(private.values()), self.store, self.executor)
        return dict(zip(private, measured, strict=True))

    def reference_rates(self, loaded: Loaded) -> dict[int, float]:
        """Return seed -> learning rate of the reference, chosen by validation accuracy.

        Each seed chooses by its own validation rows: they may be test rows of another seed. If all
        seeds have the same test rows, the seeds share the rate with the best mean accuracy, so that
        a rate that sometimes fails to train (MNIST at 0.1) does not win by luck.
        """
        if all(method.lr is not None for method in self.plan.methods):
            return {}
        held = {} if loaded.splits.validation is not None else {"hold_out": HELD_OUT}
        pairs = [(seed, lr) for seed in self.seeds for lr in LEARNING_RATES]
        results = self.results([self._spec(NonPrivate(), lr, seed, **held) for seed, lr in pairs])
        accuracy = {
            pair: result["validation"]["overall"]["accuracy"]
            for pair, result in zip(pairs, results, strict=True)
        }
        source = find_source(self.described)
        fixed = "split" in self.described or (source is not None and source.fixed_test)
        return best_rates(accuracy, self.seeds, shared=fixed)

    def _spec(self, rule: Rule, lr: float, seed: int, **data: Any) -> Spec:
        """Return the specification of one run; `data` adds to the description of the data."""
        plan = self.plan
        q = None if plan.batches is None or not rule.poisson else 1 / plan.batches
        return Spec(
            {**self.described, **data},
            plan.model,
            describe_rule(rule),
            lr,
            plan.epochs,
            plan.batch_size,
            q,
            plan.delta,
            seed,
            self.device,
            self.tf32,
        )


def best_rates(
    accuracy: Mapping[tuple[int, float], float], seeds: Sequence[int], *, shared: bool
) -> dict[int, float]:
    """Return seed -> the learning rate with the best accuracy, of that seed or of all seeds.

    Args:
        accuracy: (seed, learning rate) -> accuracy.
        seeds: the seeds.
        shared: whether all seeds get the same rate.
    """
    if not shared:
        return {seed: max(LEARNING_RATES, key=lambda lr: accuracy[seed, lr]) for seed in seeds}
    best = max(LEARNING_RATES, key=lambda lr: sum(accuracy[seed, lr] for seed in seeds))
    return dict.fromkeys(seeds, best)
