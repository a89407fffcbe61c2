"""Metrics of a model by group: accuracy, loss, rates, AUC and calibration error.

With s the scores (logits) of a sample, its predicted class is argmax_c s_c (the first one in a
tie), its confidence the softmax probability of that class, its loss the cross-entropy. For each
group:

- support: number of samples.
- accuracy: share of correct predictions, in percent.
- loss: mean cross-entropy, in nats.
- selection_rate: share predicted as class 1, in percent.
- tpr, fpr: share predicted as class 1 among the samples of class 1, of class 0, in percent.
- auc: probability that a sample of class 1 has a larger s_1 − s_0 than a sample of class 0, with
  ties counting one half; 0 to 1.
- calibration_error: Σ_b n_b/n·abs(accuracy_b − mean confidence_b) over 15 equal bins b of the
  confidence; 0 to 1.

selection_rate, tpr, fpr and auc are for two classes; with more they are None for every group,
because no class is the favourable one. Values without samples are None: all but the support of an
empty group, and tpr, fpr or auc of a group without samples of the class.

A sample with a score that is not finite (training diverged) counts as completely wrong in every
metric: it is predicted as another class with confidence 1, it is ranked last in its class, and its
loss is infinite. The mean loss of the group is then infinite too; leaving the sample out would
reward a model for diverging.

Calibration error: Guo, Pleiss, Sun, Weinberger 2017, "On calibration of modern neural networks",
arXiv:1706.04599.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from evenclip import check
from evenclip.arguments import check_kinds
from evenclip.audit.arrays import array_of, dense
from evenclip.data import Dataset, Streamed
from evenclip.devices import device_of
from evenclip.gradients.calls import call, taking

__all__ = ["NAMES", "by_group", "overall", "predictions", "scores", "worst"]

NAMES = ("support", "accuracy", "loss", "selection_rate", "tpr", "fpr", "auc", "calibration_error")
"""Names of the metrics, in the order of the tables."""

_MOST_GROUPS = 10**4
BINS = 15  # as in most published calibration errors

_Floats: TypeAlias = NDArray[np.float64]
_Ints: TypeAlias = NDArray[np.int64]


def scores(
    model: nn.Module,
    data: Dataset | Streamed,
    *,
    device: torch.device | str = "cpu",
    rows: int = 4096,
) -> Tensor:
    """Return the model's scores (logits) in evaluation mode.  # [sample, class], float32

    Args:
        model: on `device`. The mode of each module is restored, also after an error.
        data: read in order, `rows` samples at a time.
        device: device of the model; the scores are on the CPU.
        rows: changes memory and speed, but not the scores (except for the last bit).

    >>> data = Dataset(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1]))
    >>> model = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.constant_(model.weight, 2.0)
    >>> scores(model, data)
    tensor([[2., 2.],
            [6., 6.]])

    Raises:
        ValueError: if the model is on another device, or does not return one row of scores for
            each sample.
    """
    check_kinds(scores, locals())
    check.natural(rows=rows)
    _check_place(model, device_of(device))
    place = data.y.device if isinstance(data, Dataset) else torch.device("cpu")
    answers = []
    with _evaluating(model), torch.no_grad():
        for chunk in torch.split(torch.arange(len(data), device=place), int(rows)):
            with taking("The model", "these rows"):
                answer = call(model, data.take(chunk).to(device).x)
            _check_answer(answer, len(chunk))
            answers.append(answer.to("cpu", torch.float32))
    return torch.cat(answers)


def by_group(
    scores: Tensor, y: Tensor, group: Tensor | None, K: int
) -> dict[str, list[float | None]]:
    """Return every metric of `NAMES` for each of the K groups, {name: [group]}.

    `group` may be None if K is 1.

    >>> s = torch.tensor([[0.0, 1.0], [2.0, 1.0], [0.0, 3.0]])
    >>> table = by_group(s, torch.tensor([1, 1, 0]), torch.tensor([0, 0, 2]), 3)
    >>> table["support"], table["accuracy"], table["fpr"]
    ([2, 0, 1], [50.0, None, 0.0], [None, None, 100.0])

    Raises:
        ValueError: if lengths differ, a class has no score, or a group is not one of 0 to K − 1.
    """
    check_kinds(by_group, locals())
    check.at_most(_MOST_GROUPS, K=K)
    K = int(K)
    judged = _judged(scores, y)
    codes = _codes(group, len(judged.y), K)
    columns = [_metrics(judged.take(np.flatnonzero(codes == k))) for k in range(K)]
    return {name: [column[name] for column in columns] for name in NAMES}


def overall(scores: Tensor, y: Tensor) -> dict[str, float | None]:
    """Return every metric of `NAMES` for all samples as one group.

    >>> overall(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([1, 1]))["accuracy"]
    50.0
    """
    check_kinds(overall, locals())
    return _metrics(_judged(scores, y))


def worst(values: Iterable[float | None], *, highest: bool = False) -> float | None:
    """Return the worst group's value: the lowest, or the `highest` (loss, fpr, calibration error).

    Groups without a value (None or NaN) are left out. Return None if no group has a value.

    >>> worst([93.5, None, 88.0]), worst([0.2, 0.5], highest=True), worst([None]) is None
    (88.0, 0.5, True)
    """
    check_kinds(worst, locals())
    given = array_of("values", list(values))  # [group]
    if given.ndim != 1:
        raise ValueError(f"values is {list(given.shape)}; it must have one number for each group.")
    defined = given[~np.isnan(given)].tolist()
    if not defined:
        return None
    return float(max(defined) if highest else min(defined))


def predictions(scores: Tensor, y: Tensor) -> NDArray[np.int64]:
    """Return the predicted class of each sample.  # [sample]

    If the scores of a sample are not finite, its predicted class is one other than y.

    >>> s = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, torch.nan]])
    >>> predictions(s, torch.tensor([0, 0, 1]))
    array([1, 0, 0])
    """
    check_kinds(predictions, locals())
    return _judged(scores, y).predicted


# --- values of each sample ----------------------------------------------------------------------


class _Judged(NamedTuple):
    """Samples and the values computed from their scores; each field [sample]."""

    y: _Ints
    predicted: _Ints
    confidence: _Floats  # the probability of the predicted class
    loss: _Floats
    margin: _Floats | None  # s_1 − s_0; None with more than two classes

    def take(self, rows: NDArray[np.intp]) -> _Judged:
        """Return the samples in `rows`."""
        margin = None if self.margin is None else self.margin[rows]
        return _Judged(
            self.y[rows], self.predicted[rows], self.confidence[rows], self.loss[rows], margin
        )


def _judged(scores: Tensor, y: Tensor) -> _Judged:
    """Compute the values of each sample in float64, because sums over many samples follow."""
    _check_scores(scores, y)
    s, target = dense("scores", scores, torch.float64), dense("y", y)
    broken = ~s.isfinite().all(dim=1)  # [sample]
    s = s.masked_fill(broken[:, None], 0.0)
    another = (target + 1) % s.shape[1]
    predicted = torch.where(broken, another, s.argmax(dim=1))
    confidence = s.softmax(dim=1).amax(dim=1).masked_fill(broken, 1.0)
    loss = F.cross_entropy(s, target, reduction="none").masked_fill(broken, math.inf)
    margin = None
    if s.shape[1] == 2:
        last = torch.where(target == 1, -math.inf, math.inf)
        margin = torch.where(broken, last, s[:, 1] - s[:, 0]).numpy()
    return _Judged(target.numpy(), predicted.numpy(), confidence.numpy(), loss.numpy(), margin)


def _metrics(some: _Judged) -> dict[str, float | None]:
    """Return the metrics of one group."""
    right = some.predicted == some.y
    line: dict[str, float | None] = dict.fromkeys(NAMES)
    line |= {
        "support": len(some.y),
        "accuracy": _percent(right),
        "loss": float(some.loss.mean()) if len(some.y) else None,
        "calibration_error": _calibration_error(some.confidence, right),
    }
    if some.margin is not None:
        selected = some.predicted == 1
        line |= {
            "selection_rate": _percent(selected),
            "tpr": _percent(selected[some.y == 1]),
            "fpr": _percent(selected[some.y == 0]),
            "auc": _auc(some.margin, some.y == 1),
        }
    return line


def _percent(true: NDArray[np.bool_]) -> float | None:
    """Return the share of true values in percent; None if there are none."""
    return 100.0 * int(np.count_nonzero(true)) / len(true) if len(true) else None


def _auc(margin: _Floats, positive: NDArray[np.bool_]) -> float | None:
    """Return (Σ ranks of the positive − P(P + 1)/2)/(P·N) (Mann, Whitney).

    Equal margins share the mean of their ranks.
    """
    P = int(np.count_nonzero(positive))
    N = len(positive) - P
    if P == 0 or N == 0:
        return None
    _, level, count = np.unique(margin, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[level]
    return float((ranks[positive].sum() - P * (P + 1) / 2) / (P * N))


def _calibration_error(confidence: _Floats, right: NDArray[np.bool_]) -> float | None:
    """Return Σ_b abs(Σ_{i in b} (right_i − confidence_i))/n; None if there are no samples.

    Bin b is (b/15, (b + 1)/15].
    """
    if len(right) == 0:
        return None
    bins = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    sums = np.bincount(bins, weights=right - confidence, minlength=BINS)
    return float(np.abs(sums).sum() / len(right))


# --- checks -------------------------------------------------------------------------------------


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode; on exit restore each module's own mode, as some may be frozen."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check_place(model: nn.Module, device: torch.device) -> None:
    """Raise if the model's parameters are on another kind of device."""
    place = next((parameter.device for parameter in model.parameters()), device)
    if place.type != device.type:
        raise ValueError(
            f"The model is on {place} and device is {device}; give the device that the model is on."
        )


def _check_answer(answer: Any, rows: int) -> None:
    """Raise unless the model returned one row of scores for each sample."""
    shape = list(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
    if (
        not isinstance(answer, Tensor)
        or answer.ndim != 2
        or len(answer) != rows
        or answer.shape[1] < 2
    ):
        raise ValueError(
            f"For {rows} samples the model answered {shape}; expected scores [{rows}, class] with "
            "at least two classes: give a classifier with one output for each class."
        )


def _check_scores(scores: Tensor, y: Tensor) -> None:
    """Raise unless there are scores for each sample and for each class that occurs."""
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise ValueError(
            f"scores is {list(scores.shape)}; expected [sample, class] with at least two classes: "
            "give one score for each class."
        )
    if y.shape != scores.shape[:1]:
        raise ValueError(
            f"y is {list(y.shape)} and scores is {list(scores.shape)}; give one class for each row "
            "of scores."
        )
    if y.is_floating_point() or y.is_complex():
        raise ValueError(
            f"y is of {y.dtype}; expected classes as whole numbers: metrics here are for "
            "classification."
        )
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < scores.shape[1]:
        raise ValueError(
            f"y has classes {int(y.min())} to {int(y.max())} and there are scores for "
            f"{scores.shape[1]}, 0 to {scores.shape[1] - 1}; give the model one output for each "
            "class."
        )


def _codes(group: Tensor | None, n: int, K: int) -> _Ints:
    """Return each sample's group; 0 if there are no groups."""
    if group is None and K > 1:
        raise ValueError(
            f"group is None and K is {K}; give each sample's group, or K = 1 for everybody as one."
        )
    codes: _Ints = np.zeros(n, np.int64) if group is None else dense("group", group).numpy()
    if codes.shape != (n,):
        raise ValueError(
            f"group is {list(codes.shape)} and there are {n} samples; give one group for each "
            "sample."
        )
    if n and not 0 <= codes.min() <= codes.max() < K:
        raise ValueError(
            f"group has codes {codes.min()} to {codes.max()} and K is {K}; expected codes 0 to "
            f"{K - 1}."
        )
    return codes
