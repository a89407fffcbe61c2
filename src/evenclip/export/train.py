"""Train a private model on a table."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from evenclip import check, models
from evenclip.arguments import check_kinds
from evenclip.audit import metrics
from evenclip.comparison import protocol
from evenclip.data import Dataset
from evenclip.data.table import Tabled, table
from evenclip.mechanism import accounting, statement
from evenclip.mechanism.calibration import calibrate
from evenclip.rules import NO_EPSILON, Rule
from evenclip.sweep.describe import describe_model, named_rule
from evenclip.training.config import TrainConfig
from evenclip.training.fit import fit_config
from evenclip.training.result import Result
from evenclip.training.session import Session

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Trained", "train"]

BATCH_SIZE = 256
# Settings that are those of `TrainConfig` unless the training rows determine them.
_SETTINGS = "delta", "epochs", "seed", "device"


@dataclass(frozen=True)
class Trained:
    """A model trained on a table, with its privacy report and test accuracy.

    Attributes:
        model: name and options, from which the model can be created again.
        result: result of `fit`.
        tabled: the table it was trained on. Private.
        privacy: the privacy report, including the data accesses of preparing the table.
        accuracy: of each group's test rows, in percent; None for a group without test rows. Not
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
    source: str | os.PathLike[str] | pd.DataFrame,
    *,
    target: str,
    group: str | Sequence[str],
    epsilon: float = 3.0,
    rule: Rule | str = "dpsgd-global-adapt",
    model: str = "mlp",
    progress: bool | None = None,
    **settings: Any,
) -> Trained:
    """Train an (ε, δ)-differentially private model on a table's training rows.

    Guarantee: the joint ε of all releases, by PLD, is at most `epsilon`.

    Args:
        source: a file or a DataFrame.
        target: the column to predict.
        group: the protected column or columns.
        epsilon: ε.
        rule: a rule or its name. By name it has C0 = 1 and Z = 10.
        model: "mlp", "mlp:128,64", "linear" or "sigmoid-then-softmax".
        progress: whether to show progress; default: only on a terminal.
        **settings: delta, epochs, batch_size, lr, seed and device as in `TrainConfig`, and the
            options of `evenclip.data.table.TableOptions`, such as `records`, the public number of
            rows. n is 64 % of it, or 80 % with a test set. Defaults: 20 epochs; B = 256, or n if it
            is smaller; the learning rate for which the largest expected step is
            η·E[S] = 0.1; the operating system's seed (with the split and the initialisation of
            seed 0).

    Raises:
        ValueError: the settings do not allow private training; the message says what to do.
    """
    check_kinds(train, locals())
    check.positive(epsilon=epsilon)
    lr, size = settings.pop("lr", None), settings.pop("batch_size", None)
    given = {name: settings.pop(name) for name in _SETTINGS if name in settings}
    config = TrainConfig(epochs=20, device="cpu").but(**given)
    check.natural(epochs=config.epochs)
    described, seed = _described(model), 0 if config.seed is None else config.seed
    tabled = table(source, target=target, group=group, seed=seed, **settings)
    data, encoder = tabled.splits.train, tabled.encoder
    described["options"] |= {"inputs": len(encoder.features), "classes": len(encoder.classes)}
    start = models.TABULAR[described["name"]](**described["options"], seed=seed)
    config = config.but(batch_size=_batch_size(size, data.n))
    config = _private(config, rule, epsilon, data, models.trainable(start))
    if lr is None:
        constants = config.settings(start, data.n, data.K).constants(len(encoder.classes))
        lr = protocol.STEP / protocol.expected_sensitivity(config.rule, constants)
    config = config.but(lr=lr)
    result = fit_config(start, data, config, Session(progress=progress))
    result = dataclasses.replace(result, model=result.model.cpu().eval())
    report = _report(result, tabled, epsilon)
    return Trained(described, result, tabled, report, *_tested(result.model, tabled.splits.test))


def _private(
    config: TrainConfig, rule: Rule | str, epsilon: float, data: Dataset, parameters: int
) -> TrainConfig:
    """Return the configuration with the rule whose noise reaches ε on these training rows."""
    n, B = data.n, config.batch_size
    delta = accounting.default_delta(n) if config.delta is None else config.delta
    accounting.check_delta(delta)
    steps = config.epochs * math.ceil(n / B)
    private = calibrate(
        _rule(rule), epsilon=epsilon, delta=delta, q=B / n, steps=steps, parameters=parameters
    )
    return config.but(rule=private, delta=delta)


def _tested(model: nn.Module, test: Dataset) -> tuple[dict[str, float | None], dict[str, int]]:
    """Return the accuracy and the number of test rows of each group."""
    by_group = metrics.by_group(metrics.scores(model, test), test.y, test.group, test.K)
    accuracy = dict(zip(test.group_names, by_group["accuracy"], strict=True))
    support = {
        name: int(n or 0) for name, n in zip(test.group_names, by_group["support"], strict=True)
    }
    return accuracy, support


def _described(model: str) -> dict[str, Any]:
    """Return name and options of a model that can be loaded without custom code."""
    described = describe_model(model)
    if described.get("name") not in models.TABULAR:
        raise ValueError(
            f"The model is {model!r}, which cannot be exported; choose mlp, mlp:WIDTH,WIDTH, "
            "linear or sigmoid-then-softmax."
        )
    return {"name": described["name"], "options": dict(described["options"])}


def _rule(rule: Rule | str) -> Rule:
    """Return the rule with the defaults for tables; raise if it has no ε."""
    if isinstance(rule, str):
        named = named_rule(rule)
        chosen = (
            protocol.for_table().only([named]).methods[0].rule if isinstance(named, str) else named
        )
    else:
        chosen = rule
    if chosen.soundness == NO_EPSILON:
        raise ValueError(
            f"{chosen.name} has no valid ε and cannot train a private model; choose another rule."
        )
    if chosen.sigma == 0:
        raise ValueError(
            f"{chosen.name} has sigma = 0, so it adds no noise that could be scaled to ε; give it "
            "a sigma above 0, such as 1.0."
        )
    return chosen


def _batch_size(given: int | None, n: int) -> int:
    if given is None:
        return min(BATCH_SIZE, n)
    check.natural(batch_size=given)
    if given > n:
        raise ValueError(
            f"batch_size is {given}, but there are {n} training rows; choose at most {n}."
        )
    return int(given)


def _report(result: Result, tabled: Tabled, target: float) -> dict[str, Any]:
    """Return the privacy report of the run, including the preparation of the table."""
    report = result.privacy
    added: dict[str, Any] = {
        **statement.encoder(tabled.declared),
        "target_epsilon": float(target),
        "not_covered": [*report["not_covered"], *tabled.uncovered],
    }
    if tabled.unit is not None:
        added["unit"] = (
            f"one person, identified by the column {tabled.unit!r}; one row per person was kept"
        )
    return report | added
