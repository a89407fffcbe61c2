"""Whether a tape's per-sample gradients are those of autograd, on a few samples.

The norms must not be too small either, because a sample whose norm is too small is clipped too
little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from evenclip.gradients.calls import call
from evenclip.gradients.errors import first_line
from evenclip.gradients.layout import Layout
from evenclip.gradients.losses import Loss
from evenclip.gradients.precision import precision
from evenclip.gradients.tape import Independence, Tape, WholeTape
from evenclip.gradients.trial import generator_states, same_draws, undisturbed

__all__ = ["checkable", "disagreement", "first_right"]


def first_right(
    model: nn.Module, loss: Loss, x: Any, y: Any, tapes: Iterable[Tape | WholeTape]
) -> tuple[Tape | WholeTape | None, str]:
    """Return the first tape whose gradients are those of autograd, and what is wrong with others.

    The tape is None if there is none, and the reason is that of the first one.

    Args:
        model: the model; it is left as it was.
        loss: a loss per sample.
        x: inputs of a few samples.
        y: their targets.
        tapes: tapes of this model and loss.
    """
    reasons = []
    with undisturbed(model, loss):
        for tape in tapes:
            with tape.recording(), checkable(tape, model):
                reasons.append(disagreement(tape, model, loss, x, y))
                if not reasons[-1]:
                    same_draws()
                    tape.cancels = tape(x, y).cancels
                    return tape, reasons[0]
    return None, reasons[0] if reasons else ""


@contextmanager
def checkable(tape: Tape | WholeTape, model: nn.Module) -> Iterator[None]:
    """Switch dropout off while a tape that passes single samples is compared with autograd.

    A model draws different dropout masks for single samples than for a batch. A tape of units
    is compared with dropout on: a unit that went through `torch.func` with other masks than in the
    forward pass has a wrong gradient and must fail here.
    """
    modes = [(module, module.training) for module in model.modules()]
    if isinstance(tape, WholeTape) or tape.independence is Independence.CONSTRUCTION:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@precision(tf32=False)
def disagreement(
    tape: Tape | WholeTape, model: nn.Module, loss: Loss, x: Any, y: Any, longest: float = 1.1
) -> str:
    """Return how the tape's per-sample gradients differ from autograd's on the same forward pass.

    The answer is empty if they are equal. A norm may be `longest` times as long, because it
    includes a bound on its rounding: some percent where thousands of positions are summed, and any
    amount where they cancel. It must never be too small.

    Full float32 precision is needed: with the eleven bits of TF32 a wrong formula could pass.
    """
    expected = _autograd(model, loss, x, y, tape.layout).double()
    try:
        same_draws()
        gradients = tape(x, y)
        before = generator_states()
        each, norms = gradients.per_sample(), gradients.norms()
    except Exception as error:  # torch does not support this tape; the next one may work
        return f"a pass failed ({first_line(error)})"
    if not all(map(torch.equal, before, generator_states())):
        # A second run of a unit drew new random numbers, so its dropout masks differ from those
        # of the forward pass.
        return "its random numbers could not be repeated"
    tolerance = _tolerance(tape.layout.blank.dtype)
    off = float(expected.abs().max()) * tolerance
    sizes: Tensor = torch.linalg.vector_norm(expected, dim=1, dtype=torch.float64)
    if not torch.allclose(each, expected, rtol=0.0, atol=off):
        return "its gradients are not those of autograd"
    too_small = (norms < (1 - 10 * tolerance) * sizes - off).any()
    too_large = (norms > longest * (sizes + off)).any()
    return "its norms are not those of autograd" if bool(too_small | too_large) else ""


def _autograd(model: nn.Module, loss: Loss, x: Any, y: Any, layout: Layout) -> Tensor:
    """Return the gradient of each sample by its own backward pass.  # [sample, parameter]"""
    same_draws()
    parameters = dict(model.named_parameters())
    leaves = [parameters[name] for name in layout.names]
    with torch.enable_grad():
        losses = loss(call(model, x), y)
    if not losses.requires_grad:
        return layout.blank.new_zeros(len(losses), layout.size)
    rows = []
    for sample_loss in losses:
        gradients = torch.autograd.grad(sample_loss, leaves, retain_graph=True, allow_unused=True)
        pairs = zip(layout.names, gradients, strict=True)
        rows.append(layout.join({name: g.to_dense() for name, g in pairs if g is not None}))
    return torch.stack(rows)


def _tolerance(dtype: torch.dtype) -> float:
    """Return how far two orders of the same operations may differ, relative to the maximum."""
    return math.sqrt(torch.finfo(dtype).eps) / 3
