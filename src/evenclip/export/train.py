"""A private model trained on a table, and all that is known about it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from evenclip import check, models
from evenclip.audit import metrics
from evenclip.comparison import protocol
from evenclip.data.table import Tabled, table
from evenclip.mechanism import accounting
from evenclip.rules import NO_EPSILON, Rule
from evenclip.sweep.describe import describe_model, named_rule
from evenclip.training.config import TrainConfig
from evenclip.training.fit import Result, Session, fit_config

__all__ = ["Trained", "train"]

BATCH_SIZE = 256


@dataclass(frozen=True)
class Trained:
    """A model that was trained on a table, and all that is known about it.

    Attributes:
        model: the description that it can be made from again: name and options.
        result: what `fit` returned.
        tabled: the table it was trained on. Private.
        privacy: the privacy report, with the accesses that preparing the table made.
        accuracy: of each group's test rows, in percent; None for a group without any. Not
            differentially private.
        support: number of each group's test rows. Not differentially private.
    """

    model: dict[str, Any]
    result: Result
    tabled: Tabled
    privacy: dict[str, Any]
    accuracy: dict[str, float | None]
    support: dict[str, int]


def train(
    source: Any,
    *,
    target: str,
    group: Any,
    epsilon: float = 3.0,
    rule: Rule | str = "dpsgd-global-adapt",
    model: str = "mlp",
    progress: bool | None = None,
    **settings: Any,
) -> Trained:
    """Train a model on a table's training rows, with the noise that makes it (ε, δ)-differentially
    private.

    Guarantee: the joint ε of all releases, by PLD, is at most `epsilon`.

    Args:
        source: a file or a DataFrame.
        target: the column to predict.
        group: the protected column or columns.
        epsilon: ε.
        rule: a rule or its name. By name it has C0 = 1 and Z = 10.
        model: "mlp", "mlp:128,64", "linear" or "sigmoid-then-softmax".
        progress: whether to show progress; on a terminal unless given.
        **settings: delta, epochs, batch_size, lr, seed and device as in `TrainConfig`, and the
            options of `evenclip.data.table.TableOptions`. Unless given: 20 epochs; B = 256, or n
            where there are fewer training rows; the learning rate that makes the largest expected
            step η·E[S] = 0.1; the operating system's seed (the split and the model's start are then
            those of seed 0).

    Raises:
        ValueError: for anything that cannot be trained privately as given; the message says what to
            do.
    """
    check.positive(epsilon=epsilon)
    lr, size = settings.pop("lr", None), settings.pop("batch_size", None)
    given = {
        name: settings.pop(name)
        for name in ("delta", "epochs", "seed", "device")
        if name in settings
    }
    config = TrainConfig(epochs=20, device="cpu").but(**given)
    check.natural(epochs=config.epochs)
    described, seed = _described(model), 0 if config.seed is None else config.seed
    tabled = table(source, target=target, group=group, seed=seed, **settings)
    data, encoder = tabled.splits.train, tabled.encoder
    n, B = len(data), _batch_size(size, len(data))
    delta = accounting.default_delta(n) if config.delta is None else config.delta
    accounting.check_delta(delta)
    steps = config.epochs * math.ceil(n / B)
    private = accounting.calibrate(
        _rule(rule, data.K), epsilon=epsilon, delta=delta, q=B / n, steps=steps
    )
    described["options"] |= {"inputs": len(encoder.features), "classes": len(encoder.classes)}
    start = models.TABULAR[described["name"]](**described["options"], seed=seed)
    lr = (
        protocol.STEP / protocol.expected_sensitivity(private, data.K, float(B))
        if lr is None
        else lr
    )
    config = config.but(rule=private, batch_size=B, lr=lr, delta=delta)
    result = fit_config(start, data, config, Session(progress=progress))
    result = dataclasses.replace(result, model=result.model.cpu().eval())
    test = tabled.splits.test
    found = metrics.by_group(metrics.scores(result.model, test), test.y, test.group, test.K)
    accuracy = dict(zip(test.group_names, found["accuracy"], strict=True))
    support = {
        name: int(n or 0) for name, n in zip(test.group_names, found["support"], strict=True)
    }
    return Trained(described, result, tabled, _report(result, tabled, epsilon), accuracy, support)


def _described(model: str) -> dict[str, Any]:
    """The model by name and options, if it is one that can be loaded without anybody's code."""
    found = describe_model(model)
    if found.get("name") not in models.TABULAR:
        raise ValueError(
            f"The model is {model!r}; one that is given away must be known by name and take the "
            "columns of a table: "
            "choose mlp, mlp:WIDTH,WIDTH, linear or sigmoid-then-softmax."
        )
    return {"name": found["name"], "options": dict(found["options"])}


def _rule(rule: Rule | str, groups: int) -> Rule:
    """The rule with the defaults for tables; refused where it has no ε."""
    if isinstance(rule, str):
        named = named_rule(rule)
        found = (
            protocol.for_table(groups).only([named]).methods[0].rule
            if isinstance(named, str)
            else named
        )
    else:
        found = rule
    if found.soundness == NO_EPSILON or found.sigma == 0:
        raise ValueError(
            f"{found.name} has no valid ε, so no private model comes out of it; choose another "
            "rule."
        )
    return found


def _batch_size(given: int | None, n: int) -> int:
    if given is None:
        return min(BATCH_SIZE, n)
    check.natural(batch_size=given)
    if given > n:
        raise ValueError(
            f"batch_size is {given} and there are {n} training rows; choose at most {n}."
        )
    return int(given)


def _report(result: Result, tabled: Tabled, target: float) -> dict[str, Any]:
    """The privacy report of the run, with what preparing the table adds to it."""
    counts = (
        "empty_batches",
        "non_finite_samples",
        "clamped_weights",
    )  # of private data, without noise
    report = {name: value for name, value in result.privacy.items() if name not in counts}
    added: dict[str, Any] = {
        "target_epsilon": float(target),
        "not_covered": [*report["not_covered"], *tabled.uncovered],
    }
    if tabled.unit is not None:
        added["unit"] = (
            f"one person, as the column {tabled.unit!r} tells them apart: one row of each was kept"
        )
    return report | added
