"""Group metrics as a Fairlearn MetricFrame, for use with Fairlearn's tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evenclip.arguments import check_kinds
from evenclip.audit.arrays import dense
from evenclip.audit.metrics import predictions

if TYPE_CHECKING:
    from fairlearn.metrics import MetricFrame

__all__ = ["metric_frame"]

_Ints = NDArray[np.int64]


def metric_frame(
    scores: Tensor, y: Tensor, group: Tensor, group_names: Sequence[str]
) -> MetricFrame:
    """Return a Fairlearn `MetricFrame` of accuracy, selection_rate, tpr and fpr by group.

    Values are shares from 0 to 1. Fairlearn lists the groups that occur. A rate without samples is
    NaN (Fairlearn's own functions return 0). With more than two classes the frame has accuracy
    only. The frame's `.difference()` and `.ratio()` are fairness metrics; the difference of
    selection_rate is the demographic parity difference.

    Raises:
        ImportError: if Fairlearn is not installed.
        ValueError: if lengths differ or a group has no name.
    """
    check_kinds(metric_frame, locals())
    try:
        from fairlearn.metrics import MetricFrame
    except ImportError as missing:
        raise ImportError(
            "A MetricFrame is Fairlearn's, which is not installed; run `pip install "
            "'evenclip[fairlearn]'`."
        ) from missing
    import pandas as pd

    predicted = predictions(scores, y)
    codes = dense("group", group).numpy()
    if codes.shape != predicted.shape:
        raise ValueError(
            f"group is {list(codes.shape)} and there are {len(predicted)} samples; give one for "
            "each."
        )
    if len(codes) and not 0 <= codes.min() <= codes.max() < len(group_names):
        raise ValueError(
            f"group has codes {codes.min()} to {codes.max()} and group_names has "
            f"{len(group_names)} names; name every group."
        )
    metrics = {"accuracy": _accuracy}
    if scores.shape[1] == 2:
        metrics |= {"selection_rate": _selection_rate, "tpr": _tpr, "fpr": _fpr}
    return MetricFrame(
        metrics=metrics,
        y_true=y.cpu().numpy(),
        y_pred=predicted,
        sensitive_features=pd.Series(np.asarray(group_names, dtype=object)[codes], name="group"),
    )


def _accuracy(y_true: _Ints, y_pred: _Ints) -> float:
    """Return the share of correct predictions."""
    return _share(y_true == y_pred)


def _selection_rate(y_true: _Ints, y_pred: _Ints) -> float:
    """Return the share predicted as class 1."""
    return _share(y_pred == 1)


def _tpr(y_true: _Ints, y_pred: _Ints) -> float:
    """Return the share of class 1 predicted as class 1."""
    return _share(y_pred[y_true == 1] == 1)


def _fpr(y_true: _Ints, y_pred: _Ints) -> float:
    """Return the share of class 0 predicted as class 1."""
    return _share(y_pred[y_true == 0] == 1)


def _share(true: NDArray[np.bool_]) -> float:
    """Return the share of true values; NaN if there are none."""
    return float(np.mean(true)) if len(true) else float("nan")
