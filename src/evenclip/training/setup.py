"""What a run is made of: its mechanism, its tape, and the constants that all ranks must share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from evenclip.data import Dataset, Streamed
from evenclip.data.dataset import Samples
from evenclip.gradients import AnyTape, Tape, WholeTape, plan
from evenclip.gradients.losses import Loss, per_sample
from evenclip.gradients.tape import call, count
from evenclip.mechanism import Mechanism, wanted
from evenclip.mechanism.rounding import covered_records, most_records, sum_rounding
from evenclip.mechanism.settings import Settings
from evenclip.mechanism.trial import try_rule
from evenclip.rules import RULES, Rule
from evenclip.training.config import Performance
from evenclip.training.identity import digest
from evenclip.training.loss import RuleLoss, changes_loss, targets

__all__ = ["given", "make_mechanism", "make_tape", "rounding"]


def rounding(tape: AnyTape, settings: Settings, performance: Performance, ranks: int) -> float:
    """Return ρ of the run's sums, a function of public constants other than n.

    Raises:
        ValueError: if there are more records than ρ is for.
    """
    if settings.q is None or not settings.rule.bounded:
        return 0.0
    blocks = [size for size in (performance.chunk, tape.rows) if size is not None]
    covered = covered_records(settings.q, settings.B)
    if settings.n > covered:
        raise ValueError(
            f"At q = {settings.q:g} and batch_size = {settings.B:g}, the bounds on rounding cover "
            f"at most {covered} records, and there are {settings.n}; give the mean size of a batch, "
            f"q·n = {settings.q * settings.n:g}, as batch_size."
        )
    records, block = most_records(settings.q, covered), min(blocks, default=None)
    return sum_rounding(records, block, cancelling=tape.cancels, ranks=ranks)


def given(settings: Settings, model: nn.Module, data: Dataset | Streamed) -> dict[str, Any]:
    """Return the values that must be equal on all processes of a run."""
    names = {"group_names": data.group_names, "class_names": data.class_names}
    return settings.to_json() | names | {"seed": settings.seed, "model": digest(model.state_dict())}


def make_mechanism(
    settings: Settings, model: nn.Module, loss: Loss, data: Dataset | Streamed
) -> Mechanism:
    """Return the rule with its bounds enforced, for the constants of this run.

    A custom rule may depend on the number of classes and on the shapes of outputs and targets. One
    record shows them, in a copy of the model, so that this pass changes nothing.
    """
    rule, classes, like = settings.rule, len(data.class_names), dict[str, Any]()
    uses = wanted(rule)
    custom = type(rule) not in RULES.values()
    if uses or (custom and not classes and type(rule).init is not Rule.init):
        one = _first_rows(data, 1)
        with torch.no_grad():
            output = call(copy.deepcopy(model).eval(), one.x)
        classes = classes or _classes(output, one.y)
        like = {"loss": per_sample(loss)(output, one.y), "output": output, "y": one.y}
    mechanism = Mechanism(rule, settings.constants(classes), like=like if uses else {})
    reads = custom and mechanism.groups > 1 and not rule.uses_groups
    few = _results(model, loss, data) if reads and (uses or changes_loss(rule)) else None
    try_rule(mechanism, few)
    return mechanism


def _results(model: nn.Module, loss: Loss, data: Dataset | Streamed) -> dict[str, Any]:
    """Return loss, output and target of a few records, from a copy of the model."""
    some = _first_rows(data, 64 if isinstance(data, Dataset) else 16)
    with torch.no_grad():
        output = call(copy.deepcopy(model).eval(), some.x)
        return {"loss": per_sample(loss)(output, some.y), "output": output, "y": some.y}


def _classes(output: Any, y: Any) -> int:
    """Return the number of classes that the model has outputs for; 0 if y has no classes."""
    if not (isinstance(output, Tensor) and isinstance(y, Tensor)):
        return 0
    return output.shape[1] if output.ndim == 2 and not y.is_floating_point() else 0


def make_tape(
    model: nn.Module, loss: Loss, data: Dataset | Streamed, rule: Rule, state: Tensor
) -> Tape | WholeTape:
    """Plan the model's gradients, using three samples chosen among the first few."""
    # Fewer of streamed data, which have to be read.
    samples = _first_rows(data, 256 if isinstance(data, Dataset) else 16)
    if not changes_loss(rule):
        return plan(model, loss, samples.x, samples.y)
    group = samples.group
    if group is None:
        group = torch.zeros(count(samples.x), dtype=torch.int64, device=state.device)
    return plan(model, RuleLoss(loss, rule), samples.x, targets(rule, samples.y, group, state))


def _first_rows(data: Dataset | Streamed, rows: int) -> Samples:
    """Return the first rows of the data."""
    device = data.y.device if isinstance(data, Dataset) else None
    return data.take(torch.arange(min(rows, len(data)), device=device))
