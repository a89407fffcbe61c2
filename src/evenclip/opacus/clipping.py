"""A rule at work on what Opacus has made of a batch.

A logical batch is what Poisson sampling drew; a piece of it is what passes through the model at
once. `Clipper` has the rule and what it knows of the logical batch; `Formed` and `Ghost` know where
Opacus left the gradients of a piece.
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

__all__ = ["Clipper", "Formed", "Ghost", "joint"]

_BLOCK = 64  # squares that are summed in float32
# A float32 below 2⁻⁶³ has no square. In a norm above this, so many of them are missing as a
# rounding would take away.
_SHORT = 2.0**-24
_GHOSTS = GradSampleModuleFastGradientClipping, GradSampleHooksFastGradientClipping


def joint(rule: Rule) -> float:
    """The multiplier of everything that one step of the rule releases, taken as one.

    >>> from evenclip import DPSGDGlobalAdapt
    >>> joint(DPSGDGlobalAdapt(sigma=3.0, sigma_count=4.0))
    2.4
    """
    return joint_multiplier(Mechanism(rule).multipliers.values())


class Clipper:
    """The mechanism of one logical batch after the other, each in one piece or several.

    Attributes:
        mechanism: the rule, held to its bounds.
        state: the rule's public state, the same for all pieces of a logical batch.
    """

    def __init__(self, rule: Rule) -> None:
        self.mechanism = Mechanism(rule)
        self.state = self.mechanism.start()
        self._bound: tuple[Tensor, float] | None = None  # a state, and S there
        self._count: Tensor | None = None  # Σ statistic_i of the logical batch so far: private

    def look(self, norms: Tensor) -> tuple[Tensor, Tensor]:
        """The weights γ_i of a piece [sample], 0 where the norm is not finite, and its Σ
        statistic_i; float64.
        """
        keep = torch.isfinite(norms)
        norms = torch.where(keep, norms, 0.0)
        state, group = self.state.to(norms.device), torch.zeros_like(norms, dtype=torch.int64)
        weights, _ = self.mechanism.weights(norms, group, state, self.sensitivity, keep)
        return weights, self.mechanism.count(norms, group, state, keep)

    def add(self, count: Tensor) -> None:
        """A piece has been added to the sum of gradients; so is its count."""
        self._count = count if self._count is None else self._count + count.to(self._count.device)

    def release(self, total: Tensor, B: float, draw: Callable[[int], Tensor]) -> Tensor:
        """The logical batch is complete: its count becomes public and moves the state, and so does
        its sum.

        Args:
            total: Σ γ_i g_i.  # [parameter]
            B: what the count is divided by; Opacus divides the gradient itself.
            draw: so many standard normal numbers, float64.
        """
        mechanism, state, S, count = self.mechanism, self.state, self.sensitivity, self._count
        assert count is not None
        sizes = {"count": mechanism.counts, "gradient": total.numel()}
        release = Release({name: draw(size) for name, size in sizes.items() if size})
        now, following = mechanism.observe(count.to(state.device), B, state, release)
        if not torch.equal(now, state):
            raise ValueError(
                f"{mechanism.rule.name} clips with this step's count, which Opacus's loop does "
                "not know before it "
                "clips; train it with evenclip.fit."
            )
        self.state, self._count = following, None
        return mechanism.publish(total, S, 1.0, release)

    @property
    def sensitivity(self) -> float:
        """S at the current state, read from the rule once: what is clipped to is what noise is
        added for.
        """
        if self._bound is None or self._bound[0] is not self.state:
            self._bound = self.state, float(self.mechanism.sensitivity(self.state))
        return self._bound[1]


class Formed:
    """Every sample's gradient in `p.grad_sample`: modes hooks, functorch, ew."""

    def __init__(self, clipper: Clipper) -> None:
        self._clipper = clipper

    def clipped_sums(self, params: list[Any]) -> list[Tensor]:
        """Σ γ_i g_i of what lies there, parameter by parameter; its count goes to the logical
        batch.
        """
        samples = [_samples(p) for p in params]
        norms = _norms(samples)
        weights, counts = self._clipper.look(norms * _rounding_up(params))
        keep = torch.isfinite(norms)
        masked = not bool(keep.all())  # before multiplying: 0 · ∞ is no number
        sums = [_weighted_sum(weights, _kept(g, keep) if masked else g) for g in samples]
        for p in params:
            _mark_as_processed(p.grad_sample)
        self._clipper.add(counts)
        return sums

    def batches(self, params: list[Any]) -> int:
        """How many batches lie there."""
        numbers = {len(p.grad_sample) if isinstance(p.grad_sample, list) else 1 for p in params}
        if len(numbers) != 1:
            raise ValueError(
                "The parameters have gradients of different numbers of batches; call zero_grad() "
                "first."
            )
        return numbers.pop()


class Ghost:
    """Σ γ_i g_i in `p.grad`, after two passes of the criterion's `backward`: mode ghost."""

    def __init__(self, clipper: Clipper) -> None:
        self._clipper = clipper
        self._params = list[nn.Parameter]()
        self._module: Any = None
        self._counts: Tensor | None = (
            None  # of the last backward(); another one replaces it, as it does the gradients
        )

    def bind(self, criterion: Any, params: list[nn.Parameter]) -> None:
        """Let the second pass of this criterion's `backward` take its weights from here."""
        module = criterion.module
        if type(module) not in _GHOSTS:
            raise TypeError(
                f"The criterion belongs to a {type(module).__name__}; the rules work with "
                "Opacus's ghost clipping on "
                "one device (grad_sample_mode='ghost')."
            )
        measured = {id(p) for p in module.trainable_parameters}
        if not all(id(p) in measured for p in params):
            raise ValueError(
                "The optimizer has parameters that the model's norms leave out, so their "
                "gradients would not be "
                "bounded; give make_private the model with every parameter that is trained."
            )
        self._module, self._params = module, params
        module.get_clipping_coef = self.weights
        criterion.criterion = _PerSample(criterion.criterion)

    def weights(self) -> Tensor:
        """γ_i, between the two passes of `backward`.  # [sample]"""
        norms = self._norms()
        if not bool(torch.isfinite(norms).all()):
            raise FloatingPointError(
                "A sample's gradient is not finite, and ghost clipping cannot leave it out of its "
                "second pass. Take "
                "such records out of the data, or use grad_sample_mode='hooks', where they "
                "contribute nothing."
            )
        weights, self._counts = self._clipper.look(norms.double() * _rounding_up(self._params))
        return _representable(weights, norms.dtype)

    def _norms(self) -> Tensor:
        """‖g_i‖ as the first pass found them: never those of an earlier one.  # [sample]"""
        measured = self._module.trainable_parameters
        if any(getattr(p, "_norm_sample", None) is None for p in measured):
            raise ValueError(
                "Ghost clipping found no norm for one of the parameters: its layer was not used, "
                "or Opacus has no norm "
                "for inputs of that many axes. Use grad_sample_mode='hooks'."
            )
        norms: Tensor = self._module.get_norm_sample()
        for p in measured:
            p._norm_sample = None
        return norms

    def clipped_sums(self, params: list[nn.Parameter]) -> list[Tensor]:
        """What the second pass left; once."""
        if self._counts is None:
            raise ValueError(
                "There is no gradient to step with: call backward() before every step(), once, on "
                "the loss of the "
                "criterion that make_private returned."
            )
        self._clipper.add(self._counts)
        self._counts = None
        return [
            p.grad.detach().clone() if p.grad is not None else torch.zeros_like(p) for p in params
        ]

    def batches(self, params: list[Any]) -> int:
        """One: another `backward` replaces the last."""
        del params
        return 1


class _PerSample:
    """A loss that ghost clipping calls with reduction "none", seen to return one number a sample.

    The second pass multiplies these with the weights; a column [sample, 1] would be stretched to
    [sample, sample], and every gradient weighted with the sum of all weights.
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
                "clipping needs one "
                "number a sample; flatten outputs and targets to [sample], or use "
                "grad_sample_mode='hooks'."
            )
        return losses


def _samples(p: nn.Parameter) -> Tensor:
    """The gradients of all samples that lie there, in the parameter's own precision.  # [sample,
    ...]
    """
    found = getattr(p, "grad_sample", None)
    if found is None:
        raise ValueError(
            "A parameter has no per-sample gradients: call backward() before step(), on a loss of "
            "the model that "
            "make_private returned, in training mode."
        )
    _check_processed_flag(found)
    gathered: Tensor = torch.cat(found) if isinstance(found, list) else found
    return gathered.to(p.dtype)


def _norms(samples: list[Tensor]) -> Tensor:
    """‖g_i‖ over all parameters, up to the roundings that `_rounding_up` allows for.  # [sample],
    float64

    In float32 where a square is one, which is thirty times quicker; a row that is too long or too
    short for that is measured in float64, whatever the others are like.
    """
    norms = _joined([_quick_norms(_flat(g)) for g in samples])
    unsure = ~(torch.isfinite(norms) & (norms > _SHORT))
    if bool(unsure.any()):
        rows = [_flat(g)[unsure.to(g.device)] for g in samples]
        norms[unsure] = _joined(
            [torch.linalg.vector_norm(g, dim=1, dtype=torch.float64) for g in rows]
        )
    return norms


def _quick_norms(g: Tensor) -> Tensor:
    """The norms of rows: blocks in their own precision (at least float32), then in float64.  #
    [sample]
    """
    samples, d = g.shape
    g, whole = _wide(g), d - d % _BLOCK
    blocks = torch.linalg.vector_norm(
        g[:, :whole].view(samples, d // _BLOCK, _BLOCK), dim=2
    ).double()
    rest = torch.linalg.vector_norm(g[:, whole:], dim=1).double()
    return torch.hypot(torch.linalg.vector_norm(blocks, dim=1), rest)


def _joined(norms: list[Tensor]) -> Tensor:
    """One norm of the parts of a gradient.  # [sample]"""
    found: Tensor = torch.linalg.vector_norm(
        torch.stack([part.to(norms[0].device) for part in norms]), dim=0
    )
    return found


def _weighted_sum(weights: Tensor, g: Tensor) -> Tensor:
    """Σ w_i g_i.  # shape of one sample's"""
    rows = _wide(_flat(g))
    summed: Tensor = _representable(weights, rows.dtype).to(g.device) @ rows
    return summed.view(g.shape[1:]).to(g.dtype)


def _flat(g: Tensor) -> Tensor:
    """[sample, number]; a batch may be empty, and a parameter may be a single number."""
    return g.flatten(1) if g.ndim > 1 else g.unsqueeze(1)


def _wide(g: Tensor) -> Tensor:
    """In float32 at least: a weight of 1e-5 is no number in float16."""
    return g if g.dtype == torch.float64 else g.float()


def _kept(g: Tensor, keep: Tensor) -> Tensor:
    """Exactly nothing from the samples that are not kept."""
    return torch.where(keep.to(g.device).view(-1, *[1] * (g.ndim - 1)), g, 0.0)


def _representable(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights in the gradients' precision; 0 where that has too few digits left to keep the
    bound.
    """
    return torch.where(weights.abs() < torch.finfo(dtype).tiny, 0.0, weights).to(dtype)


def _rounding_up(params: list[nn.Parameter]) -> float:
    """What makes a norm an upper bound on what its gradient, times the weight, adds to a sum.

    A block of squares is summed in float32 with as many roundings as it is long, of which the root
    keeps half; the product with the weight is given sixteen unit roundoffs, of TF32 where somebody
    has allowed that.
    """
    product = max(max(torch.finfo(p.dtype).eps / 2, operands(p)) for p in params)
    return 1 + _BLOCK * 2.0**-24 + 16 * product
