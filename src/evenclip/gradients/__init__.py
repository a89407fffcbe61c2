"""Per-sample gradient norms and weighted sums of any `nn.Module`.

One forward pass and one backward pass give both.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from evenclip.arguments import check_kinds
from evenclip.gradients.calls import check_samples, taking
from evenclip.gradients.errors import ModelError
from evenclip.gradients.layout import Layout
from evenclip.gradients.losses import Loss
from evenclip.gradients.per_sample import PerSample
from evenclip.gradients.plan import plan
from evenclip.gradients.state import ModelState
from evenclip.gradients.tape import AnyTape, Tape, WholeTape

__all__ = [
    "AnyTape",
    "Layout",
    "ModelError",
    "PerSample",
    "Tape",
    "WholeTape",
    "per_sample_gradients",
    "per_sample_norms",
    "plan",
]


def per_sample_gradients(model: nn.Module, loss: Loss, x: Any, y: Any) -> PerSample:
    """Return each sample's loss and gradient; gradients are read as norms and weighted sums.

    The model is not changed.

    Args:
        model: any module whose samples do not influence each other.
        loss: loss(output, y); it may average, sum or return one value per sample. The loss of a
            sample is the loss of a batch that contains only this sample.
        x: the model's input [sample, ...], or a tuple or a dict of its inputs.
        y: the targets, [sample, ...].

    Raises:
        ModelError: if samples influence each other; the message names the module.
    """
    check_kinds(per_sample_gradients, locals())
    check_samples(x, y)
    with taking("The model or its loss", "these samples"):
        state = ModelState(model)
        tape = plan(model, loss, x, y)
        tape.between = state.put_back
        with tape.recording():
            gradients = tape(x, y)
    state.check()
    return gradients


def per_sample_norms(model: nn.Module, loss: Loss, x: Any, y: Any) -> Tensor:
    """Return ‖g_i‖ over all trainable parameters, never underestimated.  # [sample], float64

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> x, y = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[0.5], [-1.0]])
    >>> per_sample_norms(model, torch.nn.functional.mse_loss, x, y)  # 2·|y|·‖x‖
    tensor([5.0000, 2.0000], dtype=torch.float64)
    """
    return per_sample_gradients(model, loss, x, y).norms()
