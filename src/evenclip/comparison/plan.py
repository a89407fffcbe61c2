"""How a comparison is run: each rule with its settings, noise and learning rate, as specifications
of runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from evenclip import check
from evenclip.comparison import protocol
from evenclip.comparison.presets import PUBLISHED
from evenclip.comparison.protocol import LEARNING_RATES, Method, Protocol
from evenclip.comparison.result import REFERENCE
from evenclip.data import Dataset
from evenclip.rules import NO_EPSILON, RULES, NonPrivate, Rule
from evenclip.sweep import Executor, ProgressDisplay, Spec, Store, carry_out
from evenclip.sweep.describe import (
    Loaded,
    default_model,
    describe_model,
    describe_rule,
    find_source,
    named_rule,
)

__all__ = [
    "adjusted",
    "best_rates",
    "calibrated",
    "choose_protocol",
    "choose_rates",
    "doubts",
    "in_words",
    "paced",
    "specify",
    "suited",
    "unsound",
]

# Of the training rows, where the learning rate has to be chosen and there is no validation split.
HELD_OUT = 0.2


def choose_protocol(
    described: Mapping[str, Any], train: Dataset, rules: Sequence[str | Rule] | None, match: bool
) -> Protocol:
    """The settings of every rule, reference first."""
    published = PUBLISHED.get(described.get("name", ""))
    base = protocol.for_table(train.K) if published is None else published
    model = default_model(described, train) if published is None else None
    if model is not None:
        base = replace(base, model=model)
    base = (
        base.only([m.name for m in base.methods if m.rule.bounded])
        if rules is None
        else with_rules(base, rules)
    )
    return protocol.matched(base, train.K) if match or published is None else base


def with_rules(base: Protocol, rules: Sequence[str | Rule]) -> Protocol:
    """The reference and those rules; a stranger's rule is matched, since nothing is published for
    it.
    """
    found: dict[str, Method] = {REFERENCE: base.only([REFERENCE]).methods[0]}
    for given in rules:
        rule = named_rule(given) if isinstance(given, str) else given
        if isinstance(rule, str) and any(method.name == rule for method in base.methods):
            (method,) = base.only([rule]).methods
        else:
            made = RULES[rule]() if isinstance(rule, str) else rule
            (method,) = protocol.matched(replace(base, methods=(Method(made, None),)), 2).methods
        if method.name in found and method.name != REFERENCE:
            raise ValueError(
                f"The rule {method.name!r} is given twice; rules need names of their own."
            )
        found[method.name] = method
    return replace(base, methods=tuple(found.values()))


def adjusted(
    plan: Protocol,
    epochs: int | None,
    batch_size: int | None,
    delta: float | None,
    lr: float | None,
    model: str | None,
    n: int,
) -> Protocol:
    """With what the user has set."""
    if epochs is not None:
        check.natural(epochs=epochs)
        plan = replace(plan, epochs=epochs)
    if batch_size is not None:
        check.natural(batch_size=batch_size)
        plan = replace(plan, batch_size=batch_size, batches=None)
    if delta is not None:
        from evenclip.mechanism.accounting import check_delta

        check_delta(delta, "delta")
        plan = replace(plan, delta=delta)
    if lr is not None:
        check.positive(lr=lr)
        plan = replace(
            plan, name="one learning rate", methods=tuple(Method(m.rule, lr) for m in plan.methods)
        )
    if model is not None:
        plan = replace(plan, model=describe_model(model))
    if plan.batch_size > n:
        raise ValueError(
            f"The batch size is {plan.batch_size} and there are {n} training rows; give "
            "--batch-size."
        )
    return plan


def paced(plan: Protocol, n: int, named: bool) -> tuple[Protocol, list[str]]:
    """With the steps of an epoch: pinned for a named dataset, whose n may differ between seeds
    although ε must not.
    """
    if not named:
        return plan, []
    steps = math.ceil(n / plan.batch_size)
    if plan.batches is None:
        return replace(plan, batches=steps), []
    if abs(steps - plan.batches) <= 0.05 * plan.batches:
        return plan, []
    says = (
        f"There are {n:,} training records, so an epoch has {steps} steps and not the "
        f"published {plan.batches}."
    )
    return replace(plan, batches=steps), [says]


def suited(plan: Protocol, notes: Sequence[str], train: Dataset) -> tuple[Protocol, list[str]]:
    """Without the rules that are not for such data, and a sentence about each."""
    classes = len(train.class_names) or int(train.y.max()) + 1
    why = {method.name: method.rule.unsuited(train.K, classes) for method in plan.methods}
    kept = tuple(method for method in plan.methods if why[method.name] is None)
    return replace(plan, methods=kept), [
        *notes,
        *(f"{name} is left out: {text}" for name, text in why.items() if text),
    ]


def _rate(plan: Protocol, n: int) -> tuple[float, int]:
    """q, and the steps of an epoch."""
    return (plan.batch_size / n, math.ceil(n / plan.batch_size)) if plan.batches is None else (
        1 / plan.batches, plan.batches
    )  # fmt: skip


def calibrated(plan: Protocol, epsilon: float, n: int) -> Protocol:
    """Every private rule with the noise for this ε."""
    from evenclip.mechanism.accounting import default_delta
    from evenclip.mechanism.calibration import calibrate

    q, batches = _rate(plan, n)
    delta = default_delta(n) if plan.delta is None else plan.delta
    methods = [
        m
        if m.rule.sigma == 0
        else Method(
            calibrate(m.rule, epsilon=epsilon, delta=delta, q=q, steps=plan.epochs * batches), m.lr
        )
        for m in plan.methods
    ]
    return replace(plan, methods=tuple(methods), delta=delta)


def choose_rates(
    plan: Protocol,
    spec: Callable[..., Spec],
    described: Mapping[str, Any],
    loaded: Loaded,
    seeds: Sequence[int],
    store: Store,
    executor: Executor,
    show: ProgressDisplay,
) -> dict[int, float]:
    """Seed -> the reference's learning rate, chosen by accuracy on that seed's own validation rows.

    One choice for all seeds would see test rows, where what is validation in one split is test in
    another. Where the test rows are the same for all, it is one choice by the mean over seeds,
    which a rate that only sometimes trains (MNIST at 0.1) does not win by luck.
    """
    if all(method.lr is not None for method in plan.methods):
        return {}
    held = {} if loaded.splits.validation is not None else {"hold_out": HELD_OUT}
    pairs = [(seed, lr) for seed in seeds for lr in LEARNING_RATES]
    tries = [spec(NonPrivate(), lr, {**described, **held}, seed) for seed, lr in pairs]
    accuracy = {
        pair: result["validation"]["overall"]["accuracy"]
        for pair, result in zip(pairs, carry_out(tries, store, show, executor), strict=True)
    }
    source = find_source(described)
    return best_rates(accuracy, seeds, shared=source is not None and source.fixed_test)


def best_rates(
    accuracy: Mapping[tuple[int, float], float], seeds: Sequence[int], *, shared: bool
) -> dict[int, float]:
    """Seed -> the learning rate with the best accuracy, of (seed, rate): of that seed's, or shared
    by all.
    """
    if not shared:
        return {seed: max(LEARNING_RATES, key=lambda lr: accuracy[seed, lr]) for seed in seeds}
    return dict.fromkeys(
        seeds, max(LEARNING_RATES, key=lambda lr: sum(accuracy[seed, lr] for seed in seeds))
    )


def specify(
    plan: Protocol,
    rule: Rule,
    lr: float,
    described: Mapping[str, Any],
    seed: int,
    *,
    device: str,
    tf32: bool,
) -> Spec:
    """The specification of one run."""
    q = None if plan.batches is None or not rule.poisson else 1 / plan.batches
    return Spec(
        dict(described),
        plan.model,
        describe_rule(rule),
        lr,
        plan.epochs,
        plan.batch_size,
        q,
        plan.delta,
        seed,
        device,
        tf32,
    )


def doubts(plan: Protocol, n: int) -> list[str]:
    """A sentence where δ promises next to nothing."""
    if plan.delta is None or plan.delta < 1 / n:
        return []
    return [
        f"δ is {plan.delta:g}, not below 1/n = {1 / n:.1e}: publishing one whole record would "
        "satisfy it."
    ]


def unsound(plan: Protocol) -> list[str]:
    """A sentence about each rule that adds noise and has no ε all the same."""
    rules = [m.rule for m in plan.methods if m.rule.sigma and m.rule.soundness == NO_EPSILON]
    return [f"{rule.name} has no valid ε, whatever noise it adds: {rule.why}." for rule in rules]


_SAYS = {
    "published": "Settings as published; the largest step of one sample, learning rate times "
    "sensitivity, differs "
    "between the rules. --match makes it the same.",
    "matched": f"Matched: every private rule has the expected largest step {protocol.STEP:g}; the "
    "reference's learning "
    "rate was chosen on validation data.",
    "one learning rate": "One learning rate for all; the largest step of one sample, learning "
    "rate times sensitivity, "
    "may differ between the rules.",
}


def in_words(plan: Protocol, changed: Sequence[str]) -> str:
    """What was held equal, in words; and what is not as the protocol has it."""
    return _SAYS[plan.name] + (f" Given: {', '.join(changed)}." if changed else "")
