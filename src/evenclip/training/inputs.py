"""Check what `fit` is given, before the first step: model, data, loss, rule and optimiser.

The model passes over three records. The check either raises, or leaves everything unchanged.
"""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from evenclip import check
from evenclip.arguments import shown
from evenclip.data import Dataset, Streamed
from evenclip.devices import device_of
from evenclip.gradients.calls import call
from evenclip.gradients.errors import first_line
from evenclip.gradients.losses import Loss, per_sample
from evenclip.gradients.plan import refuse_stateful
from evenclip.gradients.state import states_of
from evenclip.rules import Rule
from evenclip.training.artificial import artificial
from evenclip.training.config import Performance
from evenclip.training.processes import Processes

if TYPE_CHECKING:
    from evenclip.training.step import Step

__all__ = [
    "check_data",
    "check_optimizer",
    "check_scheduler",
    "check_tape",
    "check_thread",
    "copy_to_device",
]


def copy_to_device(
    model: nn.Module, device: str | torch.device | None
) -> tuple[nn.Module, torch.device]:
    """Return a copy of the model in training mode, and the device it is on.

    Args:
        model: the model to copy.
        device: where to put the copy; None: where the model is.
    """
    _check_place("model", model)
    parameter = next(model.parameters(), None)
    if device is None:
        device = "cpu" if parameter is None else parameter.device
    place = device_of(device)
    _check_weights(model)
    return _copied(model).to(place).train(), place


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of the model.

    Raises:
        ValueError: something in it cannot be copied, for example the result of an operation.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:  # anything that a class of an attribute may raise
        where = next((name for name, value in _held(model) if _is_result(value)), None)
        if where is None:
            raise ValueError(
                f"The model cannot be copied ({first_line(error)}), and training leaves the given "
                "one as it is; remove what cannot be copied from its attributes."
            ) from error
        raise ValueError(
            f"The model cannot be copied, because {where} is the result of an operation on "
            "parameters or inputs. Delete it; call torch.nn.utils.prune.remove on a pruned layer; "
            "and use torch.nn.utils.parametrizations.weight_norm instead of "
            "torch.nn.utils.weight_norm."
        ) from error


def _held(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of all modules, with their names."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            yield f"{path}.{name}" if path else name, value


def _is_result(value: Any) -> bool:
    """Return whether a value is a tensor that has a history."""
    return isinstance(value, Tensor) and value.grad_fn is not None


def _check_place(name: str, module: Any) -> None:
    """Raise if a module has no values yet."""
    if isinstance(module, nn.Module) and any(p.is_meta for p in module.parameters()):
        raise ValueError(
            f"The {name} is on the device 'meta', so it has no values; load them first."
        )


def _check_weights(model: nn.Module) -> None:
    """Raise if a weight is not a finite number."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter) or not parameter.is_floating_point():
            continue
        bad = int((~torch.isfinite(parameter.detach())).sum())
        if bad and (parameter.requires_grad or bool(torch.isnan(parameter.detach()).any())):
            raise ValueError(
                f"The model's {name} has {bad} values that are not finite, so it would learn "
                "nothing; initialise the model again."
            )


def check_data(
    model: nn.Module, loss: Loss, data: Dataset | Streamed, rule: Rule, place: torch.device
) -> Dataset | Streamed:
    """Return the data; raise if this model, loss and rule cannot be trained on them.

    For data that are read on demand, the labels are checked when they are read.
    """
    in_memory = isinstance(data, Dataset)
    rows = torch.arange(min(3, len(data)), device=place if in_memory else "cpu")
    samples = data.take(rows)
    if rule.uses_groups and samples.group is None:
        raise ValueError(
            f"{rule.name} needs every sample's group and the data have none; pass (x, y, group), "
            "or choose a rule that does not use group labels, such as DPSGDGlobalAdapt."
        )
    refuse_stateful(model)
    _check_place("loss", loss)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), torch.no_grad():
        complaint = f"The model does not take this input, of shape {_shapes(samples.x)}"
        if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
            # A lazy layer reads its width from its first input.
            like = artificial(samples, len(rows), 1)
            _attempt(complaint, call, model, like.x)
        states = states_of(model, loss)
        output = _attempt(complaint, call, model, samples.x)
        classes = _classes(output, loss, samples.y)
        if classes is not None:
            _check_labels(data.y if isinstance(data, Dataset) else samples.y, *classes)
        _attempt(
            f"The loss does not take the model's output, of shape {_shapes(output)}, with these "
            f"targets, of shape {_shapes(samples.y)}",
            per_sample(loss), output, samples.y,
        )  # fmt: skip
        for state in states:
            state.check()
    return data if classes is None or isinstance(data, Dataset) else data.labelled(*classes)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise unless it is an optimiser whose `step` requires no argument, such as a closure."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer(parameters, lr=lr) returned {shown(optimizer)}; it must return a "
            "torch.optim.Optimizer."
        )
    needed = _required(optimizer.step)
    if needed is not None:
        raise ValueError(
            f"{type(optimizer).__name__}.step() requires {needed!r}, which would use the batch a "
            "second time; use another optimizer, such as SGD or Adam."
        )


def check_scheduler(scheduler: Any) -> None:
    """Raise if `scheduler.step` requires an argument, such as a metric; None is no scheduler."""
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise TypeError(
            f"scheduler(optimizer) returned {shown(scheduler)}; it must return an object with "
            "step(), such as one of torch.optim.lr_scheduler."
        )
    needed = None if scheduler is None else _required(scheduler.step)
    if needed is not None:
        raise ValueError(
            f"{type(scheduler).__name__}.step() requires {needed!r}, but every measurement of the "
            "training is private; use a scheduler that counts epochs, such as StepLR or "
            "CosineAnnealingLR."
        )


def check_tape(rule: Rule, performance: Performance, ranks: Processes) -> None:
    """Raise if a rule with its own tape claims a bound, or would not get whole batches."""
    if rule.bounded and type(rule).tape is not Rule.tape:
        raise ValueError(
            f"{rule.name} takes its gradients in its own way (tape), so nothing bounds what one "
            "record does; say bounded = False in its class. It will have no ε."
        )
    if not rule.bounded and performance.chunk is not None:
        raise ValueError(f"{rule.name} needs the whole batch at once; leave chunk out.")
    if type(rule).tape is not Rule.tape and ranks.world > 1:
        raise ValueError(
            f"{rule.name} needs the whole batch at once; train it in one process, without ranks."
        )


def check_thread(thread: int) -> None:
    """Raise unless this is the thread that entered `listening()`, without `torch.autocast`."""
    if threading.get_ident() != thread:
        raise RuntimeError(
            "Take steps in the thread that entered `with run.listening():`; two threads would "
            "draw one batch twice. Give each thread a run of its own."
        )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise RuntimeError(
            "torch.autocast is on: its products have fewer bits than the parameters, so norms "
            "would be too small. Leave it for run.step(), or convert the model itself "
            "(model.bfloat16())."
        )


def check_step(step: Step, t: int, unused: tuple[str, int] | None) -> None:
    """Raise unless an update may use this step: it is the last draw of the run, and unused.

    Args:
        step: from `run.step()`.
        t: number of steps that the run has taken.
        unused: run and number of its last draw; None if an update has used it.
    """
    if step.t != t:
        raise RuntimeError(
            f"This is step {step.t}, and the run is at step {t}; update once for each run.step()."
        )
    if (step.run_id, step.draw) != unused:
        raise RuntimeError(
            f"This step is draw {step.draw} of run {step.run_id[:8]}, and not the last unused draw "
            "of this run, so its release may be in no ledger of this run; give run.update() what "
            "the last run.step() of the same run returned, once."
        )


def _attempt(complaint: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments); raise the complaint with torch's message if it fails."""
    try:
        with warnings.catch_warnings():
            # If a loss broadcasts targets [sample] against outputs [sample, 1], samples are mixed;
            # torch only warns.
            warnings.filterwarnings("error", message="Using a target size")
            return function(*arguments)
    except (RuntimeError, TypeError, IndexError, ValueError, UserWarning) as error:
        said = " ".join(str(error).split()).removesuffix(".")
        raise ValueError(f"{complaint}; torch says: {said}.") from error
    except Exception as error:
        raise ValueError(f"{complaint}; it raised {check.reason(error)}") from error


def _classes(output: Any, loss: Loss, y: Any) -> tuple[int, int] | None:
    """Return the model's number of classes and the label that the loss ignores.

    Return None if the targets are not class labels.
    """
    if not (loss is cross_entropy or isinstance(loss, nn.CrossEntropyLoss)):
        return None
    if not isinstance(output, Tensor) or output.ndim < 2 or y.is_floating_point():
        return None
    return output.shape[1], int(getattr(loss, "ignore_index", -100))


def _check_labels(y: Tensor, outputs: int, ignored: int) -> None:
    """Raise for class labels that the model has no output for."""
    labels = y[y != ignored]
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= outputs):
        raise ValueError(
            f"The labels run from {int(labels.min())} to {int(labels.max())} and the model has "
            f"{outputs} outputs, for the labels 0 to {outputs - 1}; number the classes from 0, or "
            "give the model more outputs."
        )


def _shapes(x: Any) -> str:
    """Describe the shapes of inputs, outputs or targets, with the sample axis named."""
    if isinstance(x, Tensor):
        return f"[sample{''.join(f', {size}' for size in x.shape[1:])}] and dtype {x.dtype}"
    if not isinstance(x, dict | tuple | list):
        return f"a {type(x).__name__}"
    items = x.items() if isinstance(x, dict) else enumerate(x)
    return "; ".join(f"{name}: {_shapes(value)}" for name, value in items)


def _required(function: Callable[..., Any]) -> str | None:
    """Return the name of the first argument without a default; None if there is none."""
    named = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    parameters = inspect.signature(function).parameters.values()
    required = (p.name for p in parameters if p.kind in named and p.default is p.empty)
    return next(required, None)
