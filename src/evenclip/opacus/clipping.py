"""Clipping by a rule, on the gradients that Opacus computes.

A logical batch is one Poisson sample; a physical batch is the part of it that passes through the
model at once. `Clipper` holds the rule and the sums over the logical batch. `GradSamples` and
`Ghost` read the gradients of a physical batch from the places where Opacus stores them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
from torch import Tensor, nn

from evenclip.gradients.layers.linear import operands
from evenclip.mechanism import Mechanism, Release, joint_multiplier
from evenclip.rules import Rule

__all__ = ["Clipper", "Ghost", "GradSamples", "joint"]

_BLOCK = 64  # number of squares that are summed in float32
# Squares of float32 numbers below 2⁻⁶³ underflow. In a norm above _SHORT, the lost squares are
# below the rounding error.
_SHORT = 2.0**-24
_GHOSTS = GradSampleModuleFastGradientClipping, GradSampleHooksFastGradientClipping


def joint(rule: Rule) -> float:
    """Return the joint noise multiplier of all releases of one step.

    >>> from evenclip import DPSGDGlobalAdapt
    >>> joint(DPSGDGlobalAdapt(sigma=3.0, sigma_count=4.0))
    2.4
    """
    return joint_multiplier(Mechanism(rule).multipliers.values())


class Clipper:
    """The mechanism of a rule, for logical batches in one or several physical batches.

    Attributes:
        mechanism: the mechanism, which enforces the bounds of the rule.
        state: the rule's public state, constant within a logical batch.
    """

    def __init__(self, rule: Rule) -> None:
        self.mechanism = Mechanism(rule)
        self.state = self.mechanism.start()
        self._bound: tuple[Tensor, float] | None = None  # a state and its S
        self._count: Tensor | None = None  # Σ statistic_i of the logical batch so far; private

    def weights_and_count(self, norms: Tensor) -> tuple[Tensor, Tensor]:
        """Return γ_i [sample] and Σ statistic_i [m] of a physical batch, in float64.

        Samples with a non-finite norm have the weight 0 and are not counted.
        """
        keep = torch.isfinite(norms)
        norms = torch.where(keep, norms, 0.0)
        state, group = self.state.to(norms.device), torch.zeros_like(norms, dtype=torch.int64)
        weights, _ = self.mechanism.weights(norms, group, state, self.sensitivity, keep)
        return weights, self.mechanism.count(norms, group, state, keep)

    def add(self, count: Tensor) -> None:
        """Add the count of a physical batch to that of the logical batch."""
        self._count = count if self._count is None else self._count + count.to(self._count.device)

    def release(self, total: Tensor, B: float, draw: Callable[[int], Tensor]) -> Tensor:
        """Release the count of a complete logical batch, update the state, and release the sum.

        Args:
            total: Σ γ_i g_i.  # [parameter]
            B: divisor of the count; Opacus divides the gradient itself.
            draw: number n -> n standard normal numbers.  # [n], float64

        Raises:
            ValueError: if the rule clips with the count of the same step.
        """
        mechanism, state, S, count = self.mechanism, self.state, self.sensitivity, self._count
        assert count is not None
        sizes = {**mechanism.statistics, "gradient": total.numel()}
        release = Release({name: draw(size) for name, size in sizes.items() if size})
        now, following = mechanism.observe(count.to(state.device), B, state, release)
        if not torch.equal(now, state):
            raise ValueError(
                f"{mechanism.rule.name} clips with this step's count, which Opacus's loop does not "
                "know before it clips; train it with evenclip.fit."
            )
        self.state, self._count = following, None
        return mechanism.publish(total, S, 1.0, release)

    @property
    def sensitivity(self) -> float:
        """S at the current state.

        It is read from the rule once per state, so that the enforced bound is the one that the
        noise is scaled to.
        """
        if self._bound is None or self._bound[0] is not self.state:
            self._bound = self.state, float(self.mechanism.sensitivity(self.state))
        return self._bound[1]


class GradSamples:
    """Reader of per-sample gradients in `p.grad_sample`: modes hooks, functorch and ew."""

    def __init__(self, clipper: Clipper) -> None:
        self._clipper = clipper

    def clipped_sums(self, params: list[Any]) -> list[Tensor]:
        """Return Σ γ_i g_i of each parameter, and add the count to the logical batch."""
        samples = [_samples(p) for p in params]
        norms = _norms(samples)
        weights, count = self._clipper.weights_and_count(norms * _rounding_up(params))
        keep = torch.isfinite(norms)
        masked = not bool(keep.all())  # 0 · ∞ would be NaN
        sums = [_weighted_sum(weights, _kept(g, keep) if masked else g) for g in samples]
        for p in params:
            _mark_as_processed(p.grad_sample)
        self._clipper.add(count)
        return sums

    def batches(self, params: list[Any]) -> int:
        """Return the number of physical batches in `p.grad_sample`."""
        lengths = {len(p.grad_sample) if isinstance(p.grad_sample, list) else 1 for p in params}
        if len(lengths) != 1:
            raise ValueError(
                "The parameters have gradients of different numbers of batches; call zero_grad() "
                "first."
            )
        return lengths.pop()


class Ghost:
    """Reader of Σ γ_i g_i in `p.grad`, after both passes of `backward`: mode ghost."""

    def __init__(self, clipper: Clipper) -> None:
        self._clipper = clipper
        self._params = list[nn.Parameter]()
        self._module: Any = None
        # The count of the last backward(). The next one replaces it, as it does the gradients.
        self._last_count: Tensor | None = None

    def bind(self, criterion: Any, params: list[nn.Parameter]) -> None:
        """Set the weights that the second pass of the criterion's `backward` uses."""
        module = criterion.module
        if type(module) not in _GHOSTS:
            raise TypeError(
                f"The criterion belongs to a {type(module).__name__}; rules need Opacus's ghost "
                "clipping on one device: use grad_sample_mode='ghost'."
            )
        measured = {id(p) for p in module.trainable_parameters}
        if not all(id(p) in measured for p in params):
            raise ValueError(
                "The optimizer has parameters that are not in the model's norms, so their "
                "gradients would not be bounded; give make_private the model with all trained "
                "parameters."
            )
        self._module, self._params = module, params
        module.get_clipping_coef = self.weights
        criterion.criterion = _PerSampleLoss(criterion.criterion)

    def weights(self) -> Tensor:
        """Return γ_i; Opacus calls this between the two passes of `backward`.  # [sample]"""
        norms = self._norms()
        if not bool(torch.isfinite(norms).all()):
            raise FloatingPointError(
                "A sample's gradient is not finite, and ghost clipping cannot leave it out of its "
                "second pass. Remove such records from the data, or use grad_sample_mode='hooks', "
                "where they contribute nothing."
            )
        norms_up = norms.double() * _rounding_up(self._params)
        weights, self._last_count = self._clipper.weights_and_count(norms_up)
        return _representable(weights, norms.dtype)

    def _norms(self) -> Tensor:
        """Return ‖g_i‖ of the first pass [sample], and delete them: each is used only once."""
        measured = self._module.trainable_parameters
        if any(getattr(p, "_norm_sample", None) is None for p in measured):
            raise ValueError(
                "Ghost clipping has no norm for one of the parameters: its layer was not used, or "
                "Opacus does not support inputs with that many axes. Use grad_sample_mode='hooks'."
            )
        norms: Tensor = self._module.get_norm_sample()
        for p in measured:
            p._norm_sample = None
        return norms

    def clipped_sums(self, params: list[nn.Parameter]) -> list[Tensor]:
        """Return `p.grad` of the second pass, and add the count to the logical batch."""
        if self._last_count is None:
            raise ValueError(
                "There is no gradient to step with: call backward() before every step(), once, on "
                "the loss of the criterion that make_private returned."
            )
        self._clipper.add(self._last_count)
        self._last_count = None
        return [
            p.grad.detach().clone() if p.grad is not None else torch.zeros_like(p) for p in params
        ]

    def batches(self, params: list[Any]) -> int:
        """Return 1, because each `backward` replaces the gradients of the last."""
        del params
        return 1


class _PerSampleLoss:
    """A loss with reduction "none" that must return one number per sample.

    The second pass multiplies the losses by the weights. Losses of the shape [sample, 1] would be
    broadcast to [sample, sample], and every gradient would be weighted with the sum of all weights.
    """

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    @property
    def reduction(self) -> str:
        return str(self._loss.reduction)

    @reduction.setter
    def reduction(self, value: str) -> None:
        self._loss.reduction = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loss"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        losses: Tensor = self._loss(*args, **kwargs)
        if losses.ndim != 1:
            raise ValueError(
                f"The loss has the shape {list(losses.shape)} before it is reduced, and ghost "
                "clipping needs one number per sample; flatten outputs and targets to [sample], or "
                "use grad_sample_mode='hooks'."
            )
        return losses


def _samples(p: nn.Parameter) -> Tensor:
    """Return the per-sample gradients of a parameter, in its precision.  # [sample, ...]"""
    grad_sample = getattr(p, "grad_sample", None)
    if grad_sample is None:
        raise ValueError(
            "A parameter has no per-sample gradients: call backward() before step(), on a loss of "
            "the model that make_private returned, in training mode."
        )
    _check_processed_flag(grad_sample)
    joined: Tensor = torch.cat(grad_sample) if isinstance(grad_sample, list) else grad_sample
    return joined.to(p.dtype)


def _norms(samples: list[Tensor]) -> Tensor:
    """Return ‖g_i‖ over all parameters, up to the rounding in `_rounding_up`.  # [sample], float64

    Squares are taken in float32, which is faster. Rows whose squares may overflow or underflow are
    computed again in float64; which rows does not depend on the others.
    """
    norms = _joined([_quick_norms(_flat(g)) for g in samples])
    inexact = ~(torch.isfinite(norms) & (norms > _SHORT))
    if bool(inexact.any()):
        rows = [_flat(g)[inexact.to(g.device)] for g in samples]
        norms[inexact] = _joined(
            [torch.linalg.vector_norm(g, dim=1, dtype=torch.float64) for g in rows]
        )
    return norms


def _quick_norms(g: Tensor) -> Tensor:
    """Return the norms of rows: of blocks in float32 or better, combined in float64.  # [sample]"""
    samples, d = g.shape
    g, whole = _wide(g), d - d % _BLOCK
    blocks = torch.linalg.vector_norm(
        g[:, :whole].view(samples, d // _BLOCK, _BLOCK), dim=2
    ).double()
    rest = torch.linalg.vector_norm(g[:, whole:], dim=1).double()
    return torch.hypot(torch.linalg.vector_norm(blocks, dim=1), rest)


def _joined(norms: list[Tensor]) -> Tensor:
    """Return the norms of whole gradients from those of their parts.  # [sample]"""
    whole: Tensor = torch.linalg.vector_norm(
        torch.stack([part.to(norms[0].device) for part in norms]), dim=0
    )
    return whole


def _weighted_sum(weights: Tensor, g: Tensor) -> Tensor:
    """Return Σ w_i g_i, in the shape of one sample's gradient."""
    rows = _wide(_flat(g))
    summed: Tensor = _representable(weights, rows.dtype).to(g.device) @ rows
    return summed.view(g.shape[1:]).to(g.dtype)


def _flat(g: Tensor) -> Tensor:
    """Flatten to [sample, number]; also for an empty batch and a scalar parameter."""
    return g.flatten(1) if g.ndim > 1 else g.unsqueeze(1)


def _wide(g: Tensor) -> Tensor:
    """Return g in float32 or float64, because small weights underflow in float16."""
    return g if g.dtype == torch.float64 else g.float()


def _kept(g: Tensor, keep: Tensor) -> Tensor:
    """Replace the gradients of samples that are not kept by 0."""
    return torch.where(keep.to(g.device).view(-1, *[1] * (g.ndim - 1)), g, 0.0)


def _representable(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights as `dtype`; subnormal ones, whose rounding is coarse, become 0."""
    return torch.where(weights.abs() < torch.finfo(dtype).tiny, 0.0, weights).to(dtype)


def _rounding_up(params: list[nn.Parameter]) -> float:
    """Return the factor that makes a computed norm an upper bound in spite of rounding.

    Summing a block of squares in float32 takes `_BLOCK` roundings, and the square root halves their
    effect. The product with the weight gets a margin of 16 unit roundoffs, those of TF32 if TF32 is
    allowed.
    """
    product = max(max(torch.finfo(p.dtype).eps / 2, operands(p)) for p in params)
    return 1 + _BLOCK * 2.0**-24 + 16 * product
