"""Clipping by a rule, on the per-sample gradients that Opacus forms.

A logical batch is one Poisson sample; a physical batch is the part of it that passes through the
model at once. Opacus forms every sample's gradient, so each number of the sum has one term per
sample, and what is measured is what is summed. The sum and the count of a logical batch are in
float64. A record moves them, as computed, by at most S(1 + ρ) and 1 + ρ, with ρ of
`evenclip.mechanism.rounding` for one block: however N records are divided into physical batches,
each term has at most N + 1 roundings.
"""

from __future__ import annotations

import gc
import math
from typing import Any

import torch
from torch import Tensor, nn

from evenclip.gradients.layers import Formed
from evenclip.gradients.layers.layer import square_sums
from evenclip.mechanism import Mechanism, Release

__all__ = ["Clipper", "check_dtype", "modules_with", "refuse_autocast", "take_samples"]


class Clipper:
    """The mechanism of a rule, for logical batches in one or several physical batches.

    Attributes:
        mechanism: the mechanism, which enforces the bounds of the rule.
        state: the rule's public state, constant within a logical batch.
        t: number of releases so far.
        records: number of records in the logical batch so far. Private.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self.mechanism, self.t = mechanism, 0
        self.state = mechanism.start()
        self._bound: tuple[Tensor, float] | None = None  # a state and its S
        self.drop()

    def drop(self) -> None:
        """Start a new logical batch, and delete the private sums of the last one."""
        self.records = 0
        self._total: Tensor | None = None  # Σ γ_i g_i so far  [parameter], float64
        self._count: Tensor | None = None  # Σ statistic_i so far  [m], float64

    def add(self, samples: list[Tensor]) -> None:
        """Add a physical batch to the logical batch.

        A sample whose norm is not finite has the weight 0 and is not counted.

        Args:
            samples: g_i, one tensor for each parameter.  # [sample, *parameter]
        """
        device, n = samples[0].device, len(samples[0])
        self.state = self.state.to(device)
        norms = norms_rounded_up(samples)
        keep = torch.isfinite(norms)
        norms = torch.where(keep, norms, 0.0)
        group = torch.zeros_like(norms, dtype=torch.int64)
        weights, _ = self.mechanism.weights(norms, group, self.state, self.sensitivity, keep)
        count = self.mechanism.count(norms, group, self.state, keep)
        total = _weighted_sum(samples, weights, None if bool(keep.all()) else keep)
        self.records += n
        self._count = count if self._count is None else self._count + count
        self._total = total if self._total is None else self._total.add_(total)

    def release(self, B: float, release: Release) -> Tensor:
        """Release the count, which updates the state, and the sum.  # [parameter], float64

        Args:
            B: divisor of the count; Opacus divides the gradient itself.
            release: releases values with the noise of this step.
        """
        mechanism, S, count, total = self._now, self.sensitivity, self._count, self._total
        assert count is not None
        assert total is not None
        _, following = mechanism.observe(count, B, self.state, release)
        noisy = mechanism.publish(total, S, 1.0, release, torch.float64)
        self.state, self.t = following, self.t + 1
        return noisy

    @property
    def multipliers(self) -> dict[str, float]:
        """Name -> multiplier of each release of this step."""
        return self._now.multipliers

    @property
    def _now(self) -> Mechanism:
        """The mechanism of this step."""
        return self.mechanism.at(self.t)

    @property
    def sensitivity(self) -> float:
        """S at the current state.

        It is read from the rule once per state, so that the enforced bound is the one that the
        noise is scaled to.
        """
        if self._bound is None or self._bound[0] is not self.state:
            self._bound = self.state, float(self.mechanism.sensitivity(self.state))
        return self._bound[1]


def take_samples(params: list[Any]) -> list[Tensor]:
    """Return the per-sample gradients of the parameters, and delete them there.

    Raises:
        ValueError: if they are missing, or are not those of one physical batch.
    """
    samples = [_samples(p) for p in params]
    if len({len(g) for g in samples}) != 1:
        raise ValueError(
            "The parameters have gradients of different numbers of samples; call zero_grad() and "
            "backward() before every step()."
        )
    for p in params:
        p.grad_sample = None
    return samples


def _samples(p: Any) -> Tensor:
    """Return the per-sample gradients of a parameter.  # [sample, ...]"""
    grad_sample = getattr(p, "grad_sample", None)
    if grad_sample is None:
        raise ValueError(
            "A parameter has no per-sample gradients: call backward() before step(), on a loss of "
            "the model that make_private returned, in training mode."
        )
    if isinstance(grad_sample, list):
        raise ValueError(
            "The parameters have gradients of several backward passes, and a Poisson batch has "
            "one; call step() after each, or use Opacus's BatchMemoryManager."
        )
    samples: Tensor = grad_sample
    check_dtype(samples.dtype)
    return samples


def check_dtype(dtype: torch.dtype) -> None:
    """Raise for less than float32.

    Opacus divides every sample's gradient by the number of records in a batch, and multiplies it by
    that number again, in the precision of the model. In bfloat16, one record more changes the
    gradients of all others by up to 2⁻⁸ of their norms.
    """
    if dtype.itemsize < torch.float32.itemsize:
        raise ValueError(
            f"The model has parameters or gradients in {str(dtype).removeprefix('torch.')}. Opacus "
            "divides by the number of records in that precision, so one record changes the "
            "rounding of all gradients, and no ε holds. Use float32 (model.float()), or "
            "evenclip.fit, which trains bfloat16 models."
        )


def modules_with(parameters: list[Tensor]) -> list[nn.Module]:
    """Return every module that has one of these parameters.

    An optimizer does not know its model, so they are found among all objects in memory.
    """
    known = {id(p) for p in parameters}
    modules = [held for held in gc.get_objects() if issubclass(type(held), nn.Module)]
    return [module for module in modules if any(id(p) in known for p in module.parameters())]


def refuse_autocast(modules: list[nn.Module]) -> None:
    """Let modules refuse a training pass under `torch.autocast`.

    Raises:
        ValueError: in a pass of such a module, in training mode and under autocast.
    """
    for module in modules:
        module.register_forward_pre_hook(_check_autocast)


def _check_autocast(module: nn.Module, inputs: Any) -> None:
    """Raise in a training pass under `torch.autocast`."""
    del inputs
    if not module.training or not torch.is_grad_enabled():
        return
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ValueError(
            "torch.autocast is on in a training pass. Opacus divides by the number of records in "
            "its precision, so one record changes the rounding of all gradients, and no ε holds. "
            "Leave autocast for the passes of training, or use evenclip.fit with a bfloat16 model."
        )


def norms_rounded_up(samples: list[Tensor]) -> Tensor:
    """Return an upper bound of ‖g_i‖ over all parameters.  # [sample], float64

    A sum of d squares in float64, in any order, and its root are off by a factor of at most
    1 ± (d + 8)·2⁻⁵⁴ together. Squares that underflow are below 2⁻¹⁰⁰⁰.
    """
    numbers = sum(math.prod(g.shape[1:]) for g in samples)
    squares = torch.stack([square_sums(g).to(samples[0].device) for g in samples])
    return squares.sum(dim=0).sqrt_().mul_(1 + (numbers + 16) * 2.0**-53)


def _weighted_sum(samples: list[Tensor], weights: Tensor, keep: Tensor | None) -> Tensor:
    """Return Σ γ_i g_i over the kept samples; None keeps all.  # [parameter], float64"""
    device, parts = weights.device, list[Tensor]()
    for g in samples:
        if len(g) == 0:
            part = torch.zeros(g.shape[1:], dtype=torch.float64, device=g.device)
        else:
            mask = None if keep is None else keep.to(g.device)
            part = Formed({"": g}, mask).weighted_sum(weights.to(g.device))[""]
        parts.append(part.flatten().to(device))
    return torch.cat(parts)
