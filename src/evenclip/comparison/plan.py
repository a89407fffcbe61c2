"""The plan of a comparison: each rule with its settings, noise and learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evenclip import check
from evenclip.comparison import protocol
from evenclip.comparison.presets import PUBLISHED
from evenclip.comparison.protocol import STEP, Method, Protocol
from evenclip.comparison.result import REFERENCE
from evenclip.data import Dataset
from evenclip.mechanism import Mechanism, wanted
from evenclip.mechanism.trial import try_rule
from evenclip.models import trainable
from evenclip.rules import NO_EPSILON, RULES, Constants, Rule
from evenclip.sweep.describe import default_model, describe_model, make_model, named_rule

__all__ = ["Changes", "choose_protocol", "in_words", "make_plan", "paced"]


@dataclass(frozen=True)
class Changes:
    """What the caller of a comparison sets; None: the protocol's.

    Attributes:
        epsilon: ε of every private rule, by calibration.
        delta: δ.
        epochs: passes over the training data.
        batch_size: expected batch size B.
        lr: learning rate of all rules.
        model: the model, in the form of `--model`.
        rows: mean number of training rows to sample.
        tf32: whether a GPU may round the operands of products.
    """

    epsilon: float | None = None
    delta: float | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    model: str | None = None
    rows: int | None = None
    tf32: bool = False


def make_plan(
    described: Mapping[str, Any],
    train: Dataset,
    rules: Sequence[str | Rule] | None,
    match: bool,
    changes: Changes,
) -> tuple[Protocol, list[str]]:
    """Return the plan of a comparison, and remarks about it as sentences.

    Args:
        described: description of the data.
        train: the first seed's training records; n is their public number, if they have one.
        rules: rules to compare; None: all that have an ε.
        match: whether to use the matched protocol instead of published settings.
        changes: what the caller sets.

    Raises:
        ValueError: if the plan cannot be carried out on these data.
    """
    n = train.n
    plan = _changed(choose_protocol(described, train, rules, match), changes, n)
    plan, notes = paced(plan, n, "name" in described)
    _check_steps(plan, changes, n)
    plan, left_out = _suited(plan, train)
    if changes.epsilon is not None:
        check.positive(epsilon=changes.epsilon)
        plan = _calibrated(plan, changes.epsilon, train)
    plan = _tried(plan, train)
    return plan, [*notes, *left_out, *_doubts(plan, n), *_without_epsilon(plan)]


def _check_steps(plan: Protocol, changes: Changes, n: int) -> None:
    """Raise if there are too many steps, or too many for δ."""
    steps = plan.epochs * math.ceil(n / plan.batch_size)
    if steps > check.MOST_STEPS:
        raise ValueError(
            f"epochs is {plan.epochs}, which are {steps} steps; a run has at most "
            f"{check.MOST_STEPS}: give fewer."
        )
    if changes.delta is not None and any(method.rule.bounded for method in plan.methods):
        from evenclip.mechanism.accounting import check_delta_of_steps

        check_delta_of_steps(changes.delta, steps)


def choose_protocol(
    described: Mapping[str, Any], train: Dataset, rules: Sequence[str | Rule] | None, match: bool
) -> Protocol:
    """Return the settings of every rule, the reference first."""
    published = PUBLISHED.get(described.get("name", ""))
    base = protocol.for_table() if published is None else published
    model = default_model(described, train) if published is None else None
    if model is not None:
        base = replace(base, model=model)
    bounded = [method.name for method in base.methods if method.rule.bounded]
    base = base.only(bounded) if rules is None else _with_rules(base, rules)
    return protocol.unmatched(base) if match or published is None else _named(base)


def _named(plan: Protocol) -> Protocol:
    """Return the plan, called "given" if no private rule of it has published settings."""
    private = {method.name for method in plan.methods if method.rule.sigma}
    nothing = plan.custom and private <= set(plan.custom)
    return replace(plan, name="given") if plan.name == "published" and nothing else plan


def _with_rules(base: Protocol, rules: Sequence[str | Rule]) -> Protocol:
    """Return the protocol with the reference and these rules.

    A rule without published settings has no learning rate yet; it gets that of the matched
    protocol.
    """
    methods: dict[str, Method] = {REFERENCE: base.only([REFERENCE]).methods[0]}
    custom = []
    for given in rules:
        rule = named_rule(given) if isinstance(given, str) else given
        if isinstance(rule, str) and any(method.name == rule for method in base.methods):
            (method,) = base.only([rule]).methods
        else:
            method = Method(RULES[rule]() if isinstance(rule, str) else rule, None)
            custom.append(method.name)
        if method.name in methods and method.name != REFERENCE:
            raise ValueError(
                f"The rule {method.name!r} is given twice; rules need different names."
            )
        methods[method.name] = method
    return replace(base, methods=tuple(methods.values()), custom=tuple(custom))


def _changed(plan: Protocol, changes: Changes, n: int) -> Protocol:
    """Return the plan with what the caller sets, except ε."""
    epochs, batch_size, delta, lr = (
        changes.epochs, changes.batch_size, changes.delta, changes.lr
    )  # fmt: skip
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
        methods = tuple(Method(method.rule, lr) for method in plan.methods)
        plan = replace(plan, name="one learning rate", methods=methods)
    if changes.model is not None:
        plan = replace(plan, model=describe_model(changes.model))
    if plan.batch_size > n:
        raise ValueError(
            f"The batch size is {plan.batch_size} and there are {n} training rows; give a "
            f"--batch-size of at most {n}."
        )
    return plan


def paced(plan: Protocol, n: int, named: bool) -> tuple[Protocol, list[str]]:
    """Return the plan with its steps per epoch, and a remark if they are not the published ones.

    The steps of a named dataset are fixed, so that ε is the same for every seed.
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


def _suited(plan: Protocol, train: Dataset) -> tuple[Protocol, list[str]]:
    """Return the plan without rules that do not fit the data, and a sentence about each."""
    classes = len(train.class_names) or int(train.y.max()) + 1
    why = {method.name: method.rule.unsuited(train.K, classes) for method in plan.methods}
    methods = tuple(method for method in plan.methods if why[method.name] is None)
    left_out = [f"{name} is left out: {text}" for name, text in why.items() if text]
    return _named(replace(plan, methods=methods)), left_out


def _calibrated(plan: Protocol, epsilon: float, train: Dataset) -> Protocol:
    """Return the plan with the noise that gives every private rule this ε."""
    from evenclip.mechanism.accounting import default_delta
    from evenclip.mechanism.calibration import calibrate

    n, model = train.n, make_model(plan.model, train, seed=0)
    q, steps = _pace(plan, n)
    delta = default_delta(n) if plan.delta is None else plan.delta
    for method in plan.methods:
        if method.rule.poisson and method.rule.bounded and not method.rule.sigma:
            raise ValueError(
                f"{method.name} has sigma = 0, so it adds no noise that --epsilon could scale; "
                "give it a sigma above 0, such as 1.0."
            )
    reach = partial(
        calibrate, epsilon=epsilon, delta=delta, q=q, steps=steps, parameters=trainable(model)
    )
    methods = tuple(
        replace(method, rule=reach(method.rule)) if method.rule.sigma else method
        for method in plan.methods
    )
    return replace(plan, methods=methods, delta=delta)


def _pace(plan: Protocol, n: int) -> tuple[float, int]:
    """Return the Poisson rate and the number of steps."""
    if plan.batches is None:
        return plan.batch_size / n, plan.epochs * math.ceil(n / plan.batch_size)
    return 1 / plan.batches, plan.epochs * plan.batches


def _tried(plan: Protocol, train: Dataset) -> Protocol:
    """Return the plan with the matched learning rates, after a trial of its custom rules."""
    q, steps = _pace(plan, train.n)
    model = make_model(plan.model, train, seed=0)
    constants = Constants(
        groups=train.K,
        classes=len(train.class_names) or int(train.y.max()) + 1,
        parameters=trainable(model),
        B=float(plan.batch_size),
        q=q,
        steps=steps,
    )
    for method in plan.methods:
        # A statistic of outputs is tried when the run starts, with the model's.
        if not wanted(method.rule):
            try_rule(Mechanism(method.rule, constants))
    return protocol.with_rates(plan, constants)


# --- in words -----------------------------------------------------------------------------------


def _doubts(plan: Protocol, n: int) -> list[str]:
    """Return a sentence if δ is too large to promise anything."""
    if plan.delta is None or plan.delta < 1 / n:
        return []
    return [
        f"δ is {plan.delta:g}, not below 1/n = {1 / n:.1e}: publishing one whole record would "
        "satisfy it."
    ]


def _without_epsilon(plan: Protocol) -> list[str]:
    """Return a sentence about each rule that adds noise and has no ε."""
    rules = [m.rule for m in plan.methods if m.rule.sigma and m.rule.soundness == NO_EPSILON]
    return [f"{rule.name} has no valid ε with any amount of noise: {rule.why}." for rule in rules]


_SAYS = {
    "published": "Settings as published; the largest step of one sample, learning rate times "
    "sensitivity, differs between the rules. --match makes its expected value the same.",
    "given": f"No private rule here has published settings; each has the expected largest step "
    f"{STEP:g}.",
    "matched": f"Matched: every private rule has the expected largest step {STEP:g}; the "
    "reference's learning rate was chosen on validation data.",
    "one learning rate": "One learning rate for all; the largest step of one sample, learning "
    "rate times sensitivity, may differ between the rules.",
}


def in_words(plan: Protocol, changes: Changes) -> str:
    """Return what was held equal, which rules have no published settings, and what was set."""
    says = _SAYS[plan.name]
    if plan.name == "published" and plan.custom:
        *others, last = plan.custom
        named, has = (f"{', '.join(others)} and {last}", "have") if others else (last, "has")
        says += (
            f" No settings are published for {named}, which {has} the expected largest step "
            f"{STEP:g}."
        )
    values = {
        "ε": changes.epsilon, "δ": changes.delta, "epochs": changes.epochs,
        "batch size": changes.batch_size, "lr": changes.lr, "model": changes.model,
        "rows": changes.rows, "products in": "TF32" if changes.tf32 else None,
    }  # fmt: skip
    given = [f"{name} {value}" for name, value in values.items() if value is not None]
    return says + (f" Given: {', '.join(given)}." if given else "")
