"""What a run is made of: its mechanism, its tape, and the constants that all ranks must share."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from evenclip.data import Dataset, Streamed
from evenclip.data.dataset import Samples
from evenclip.gradients import AnyTape, Tape, WholeTape, plan
from evenclip.gradients.calls import call, count
from evenclip.gradients.errors import ModelError
from evenclip.gradients.losses import Loss, per_sample
from evenclip.gradients.plan import check_plan
from evenclip.gradients.tape import Independence
from evenclip.mechanism import Mechanism, wanted
from evenclip.mechanism.rounding import covered_records, most_records, sum_rounding
from evenclip.mechanism.settings import Settings
from evenclip.mechanism.trial import try_rule
from evenclip.rules import RULES, Rule
from evenclip.training.artificial import artificial
from evenclip.training.config import Performance
from evenclip.training.identity import digest
from evenclip.training.loss import RuleLoss, changes_loss, targets

__all__ = [
    "MOST_ROUNDING",
    "check_number",
    "given",
    "make_mechanism",
    "make_tape",
    "rounding",
    "warn_of_rounding",
]

# Above this ρ a run warns, and no step is compiled.
MOST_ROUNDING = 0.01
# Artificial samples that the plan passes together; a model may behave in another way above 64.
_ARTIFICIAL = 66


def rounding(tape: AnyTape, settings: Settings, performance: Performance, ranks: int) -> float:
    """Return ρ of the run's sums, a function of public constants other than n."""
    if settings.q is None or not settings.rule.bounded:
        return 0.0
    blocks = [size for size in (performance.chunk, tape.rows) if size is not None]
    covered = covered_records(settings.q, settings.B)
    records, block = most_records(settings.q, covered), min(blocks, default=None)
    return sum_rounding(records, block, cancelling=tape.cancels, ranks=ranks)


def check_number(settings: Settings, n: int) -> None:
    """Raise if there are more records than `rounding` is for.

    Args:
        settings: constants of the run; their number of records may be a declared one.
        n: the number of records that are there.
    """
    if settings.q is None or not settings.rule.bounded:
        return
    most = covered_records(settings.q, settings.B) + 1
    if n > most and settings.declared:
        raise ValueError(
            f"records is {settings.n}, and the bounds on rounding cover at most {most} records, "
            "twice as many; there are more: declare a number that is nearer to theirs."
        )
    if n > most:
        raise ValueError(
            f"At q = {settings.q:g} and batch_size = {settings.B:g}, the bounds on rounding cover "
            f"at most {most} records, and there are {n}; give the mean size of a batch, q·n = "
            f"{settings.q * n:g}, as batch_size."
        )


def given(settings: Settings, model: nn.Module, data: Dataset | Streamed) -> dict[str, Any]:
    """Return the values that must be equal on all processes of a run."""
    names = {"group_names": data.group_names, "class_names": data.class_names}
    return settings.to_json() | names | {"seed": settings.seed, "model": digest(model.state_dict())}


def make_mechanism(
    settings: Settings, model: nn.Module, loss: Loss, data: Dataset | Streamed
) -> Mechanism:
    """Return the rule with its bounds enforced, for the constants of this run.

    A custom rule may depend on the number of classes and on the shapes of outputs and targets. A
    few samples show them, in a copy of the model, so that this pass changes nothing.
    """
    rule, classes, like = settings.rule, len(data.class_names), dict[str, Any]()
    few: dict[str, Any] | None = None
    uses = wanted(rule)
    custom = type(rule) not in RULES.values()
    if uses or (custom and not classes and type(rule).init is not Rule.init):
        few = _results(model, loss, data)
        classes = classes or _classes(few["output"], few["y"])
        like = tree_map(_first, few)
    mechanism = Mechanism(rule, settings.constants(classes), like=like if uses else {})
    reads = custom and mechanism.groups > 1 and not rule.uses_groups
    if few is None and reads and changes_loss(rule):
        few = _results(model, loss, data)
    try_rule(mechanism, few if reads else None)
    return mechanism


def _results(model: nn.Module, loss: Loss, data: Dataset | Streamed) -> dict[str, Any]:
    """Return loss, output and target of a few samples, from a copy of the model.

    They are artificial, unless the model does not take such samples.
    """
    records = _first_rows(data, 64 if isinstance(data, Dataset) else 16)
    some, plain = artificial(records, count(records.x), len(data.group_names)), _evaluated(model)
    with torch.no_grad():
        try:
            output = call(plain, some.x)
            losses = per_sample(loss)(output, some.y)
        except Exception:  # anything that a model may raise for samples of another kind
            some, output = records, call(plain, records.x)
            losses = per_sample(loss)(output, some.y)
    return {"loss": losses, "output": output, "y": some.y}


def _first(value: Any) -> Any:
    """Return the first sample of a tensor as a batch of one; return other values unchanged."""
    return value[:1] if isinstance(value, Tensor) else value


def _evaluated(model: nn.Module) -> nn.Module:
    """Return a copy of the model without dropout."""
    return copy.deepcopy(model).eval()


def _classes(output: Any, y: Any) -> int:
    """Return the number of classes that the model has outputs for; 0 if y has no classes."""
    if not (isinstance(output, Tensor) and isinstance(y, Tensor)):
        return 0
    return output.shape[1] if output.ndim == 2 and not y.is_floating_point() else 0


def make_tape(
    model: nn.Module,
    loss: Loss,
    data: Dataset | Streamed,
    mechanism: Mechanism,
    state: Tensor,
    independence: str | None,
    *,
    maps: bool,
) -> tuple[Tape | WholeTape, bool]:
    """Plan the model's gradients with artificial samples.

    The plan decides how norms and sums are rounded, and so how much noise is added. So it must not
    depend on a record. Where the independence of samples is only tested, a few records are tried
    too, which can only stop the training.

    Returns:
        The tape, and whether it was planned with records because the model does not take artificial
        samples.
    """
    # Fewer of streamed data, which have to be read.
    records = _first_rows(data, 256 if isinstance(data, Dataset) else 16)
    if not count(records.x):
        raise ModelError("No sample was given to analyse the model with; give at least one.")
    rule = mechanism.rule
    used = RuleLoss(loss, mechanism) if changes_loss(rule) else loss
    places = rule, state
    try:
        made = artificial(records, _ARTIFICIAL, len(data.group_names))
        tape = plan(model, used, *_inputs(made, *places), independence, maps=maps)
    except Exception as error:  # anything that a model may raise for samples of another kind
        if isinstance(error, ModelError) and not error.unverified:
            raise
        return plan(model, used, *_inputs(records, *places), independence, maps=maps), True
    if tape.independence is Independence.TESTED:
        check_plan(tape, used, *_inputs(records, *places))
    return tape, False


def _inputs(samples: Samples, rule: Rule, state: Tensor) -> tuple[Any, Any]:
    """Return inputs, and targets as the rule's loss needs them."""
    group = samples.group
    if group is None:
        group = torch.zeros(count(samples.x), dtype=torch.int64, device=state.device)
    return samples.x, targets(rule, samples.y, group, state)


def warn_of_rounding(rho: float) -> None:
    """Warn if the rounding of sums enlarges the noise by more than 1 %."""
    if rho > MOST_ROUNDING:
        warnings.warn(
            f"The rounding of sums over positions enlarges the noise by {rho:.1%}; a smaller "
            "batch_size makes it smaller.",
            stacklevel=5,
        )


def _first_rows(data: Dataset | Streamed, rows: int) -> Samples:
    """Return the first rows of the data."""
    device = data.y.device if isinstance(data, Dataset) else None
    return data.take(torch.arange(min(rows, len(data)), device=device))
