"""FairLens: two regularisers that reduce the cost of clipping and of noise to the groups.

They are those of Tran et al. 2021, in the form of the algorithm "FairLens" of Esipova et al. 2023,
for two groups a and b and two classes:

    R1 = |⟨g_Ba − g_Bb, ḡ_B − g_B⟩|              with ḡ_B clipped to C0
    R2 = ½ (f_a(1 − f_a) + f_b(1 − f_b))         f_k: mean prediction of class 1 in group k
    g'_i = g_i + γ1 ∇R1 + γ2 ∇R2,   then clipped to C0, summed and given noise as in DPSGD

The papers do not say how terms of the whole batch enter one sample's gradient. Here their gradient
is added to every sample's gradient. A batch without one of the groups has R1 = R2 = 0.

∇R1 does not need a Hessian of any sample. With p = g_Ba − g_Bb = Σ α_i g_i and
q = ḡ_B − g_B = Σ β_i g_i, where β_i = (min(1, C0/n_i) − 1)/|B| and n_i = ‖g_i‖,

    ∇⟨p, q⟩ = Σ_i H_i v_i,   v_i = α_i q + β_i p − 1[n_i > C0] · C0 ⟨g_i, p⟩/(|B| n_i³) · g_i.

This is the gradient of Σ α_i ⟨g_i, q⟩ + Σ β_i ⟨g_i, p⟩ + ½ Σ w_i n_i² at fixed p, q and w_i, and
takes one double backward pass.

Sensitivity: there is no bound. Clipping bounds what sample i adds, but through the regularisers
every g'_i depends on every record. One record more or less changes all of them, and Σ ḡ'_i by up to
2C0 for each; a test shows a record that changes it by more than C0. So there is no ε for any amount
of noise, and the ledger records a release in clear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenclip import check
from evenclip.arguments import check_fields, shown
from evenclip.gradients import PerSample, Tape
from evenclip.rules.rule import NO_EPSILON, Rule

__all__ = ["FairLens", "Regularised", "regulariser_gradient"]


@dataclass(frozen=True)
class FairLens(Rule):
    """DPSGD on a regularised loss. No ε.

    Attributes:
        C0: clipping bound.
        sigma: noise multiplier.
        gamma1: weight of R1, which reduces the cost of clipping.
        gamma2: weight of R2, which reduces the cost of noise.
    """

    name: ClassVar[str] = "fairlens"
    title: ClassVar[str] = "FairLens"
    summary: ClassVar[str] = (
        "DPSGD with two terms added to the loss that penalise unequal gradients of the groups and "
        "unequal distances to the boundary. Through them every record's gradient depends on the "
        "others, so no ε holds."
    )
    soundness: ClassVar[str] = NO_EPSILON
    why: ClassVar[str] = "its regularisers tie every sample's gradient to every record of the batch"
    bounded: ClassVar[bool] = False
    uses_groups: ClassVar[bool] = True
    reference: ClassVar[str] = (
        "Tran, Dinh, Fioretto 2021, Differentially Private Empirical Risk Minimization under the "
    )
    reference += "Fairness Lens"

    C0: float = 1.0
    sigma: float = 1.0
    gamma1: float = 1.0
    gamma2: float = 1.0

    def __post_init__(self) -> None:
        check_fields(FairLens, self)
        check.positive(C0=self.C0, sigma=self.sigma)
        check.finite(C0=self.C0)
        for name in ("gamma1", "gamma2"):
            if not 0 <= getattr(self, name) <= 1e30:
                raise ValueError(
                    f"{name} is {shown(getattr(self, name))}; it must be a number from 0 to 1e30."
                )

    def sensitivity(self, now: Tensor) -> float:
        """Return C0, which scales the noise; one record may move the sum by more."""
        del now
        return self.C0

    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:  # noqa: D102
        del group, now
        return (self.C0 / norm).clamp(max=1.0)

    def tape(self, tape: Any) -> Regularised:  # noqa: D102
        if not isinstance(tape, Tape):
            raise ValueError(
                "fairlens needs a model of known layers; choose another rule for this model."
            )
        return Regularised(tape, self)

    def unsuited(self, groups: int, classes: int) -> str | None:  # noqa: D102
        if groups == 2 and classes == 2:
            return None
        return f"it is for two groups and two classes, and there are {groups} and {classes}."


class Regularised:
    """A tape that computes gradients of the regularised loss."""

    def __init__(self, tape: Tape, rule: FairLens) -> None:
        self._tape, self._rule = tape, rule
        self.model, self.layout, self.loss = tape.model, tape.layout, tape.loss
        self.rows, self.cancels = None, False

    @contextmanager
    def recording(self) -> Iterator[Self]:
        """Record in this context, as the tape does."""
        with self._tape.recording():
            yield self

    def __call__(self, x: Any, y: Any, group: Tensor | None = None) -> PerSample:
        """Return every sample's loss, and its gradient plus that of the regularisers."""
        gradients = self._tape(x, y)
        if group is None:
            raise ValueError("fairlens needs the group of every sample; give data with groups.")
        norms = gradients.norms()
        finite = torch.isfinite(norms) & torch.isfinite(gradients.losses)
        shift = gradients.layout.blank.new_zeros(gradients.layout.size)
        if bool(finite.all()):
            if len(norms):
                shift = regulariser_gradient(self._tape, gradients, x, y, group, self._rule)
        elif bool(finite.any()):  # a sample without a gradient takes no part in the regularisers
            rows = finite.nonzero()[:, 0]
            x, y, group = x[rows], y[rows], group[rows]
            shift = regulariser_gradient(self._tape, self._tape(x, y), x, y, group, self._rule)
        return _Shifted(gradients, shift)


class _Shifted(PerSample):
    """Per-sample gradients g_i + r, with one vector r, the shift, for all samples."""

    def __init__(self, gradients: PerSample, shift: Tensor) -> None:
        super().__init__(gradients.losses, (), gradients.layout)
        self._gradients, self._shift = gradients, shift

    def norms(self, *, quick: bool = False) -> Tensor:
        """Return ‖g_i + r‖ from ‖g_i‖² + 2⟨g_i, r⟩ + ‖r‖².  # [sample], float64

        It is enlarged by the rounding error of terms that cancel.
        """
        own = self._gradients.norms(quick=quick)
        length: Tensor = torch.linalg.vector_norm(self._shift.double())
        square = own.square() + 2 * _inner(self._gradients, self._shift) + length.square()
        return (square.clamp(min=0.0) + _ROUNDING * (own + length).square()).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ w_i g_i + (Σ w_i) r."""
        shift = weights.sum().to(self._shift.dtype) * self._shift
        return self._gradients.weighted_sum(weights) + shift

    def masked(self, keep: Tensor) -> PerSample:
        """Mask samples; their weights must be 0, because the shift is not masked."""
        return _Shifted(self._gradients.masked(keep), self._shift)


# Rounding error of a squared norm in float32 if terms cancel, relative to (‖g_i‖ + ‖r‖)².
_ROUNDING = 2.0**-20


def _inner(gradients: PerSample, vector: Tensor) -> Tensor:
    """Return ⟨g_i, v⟩, the derivative of Σ w_i ⟨g_i, v⟩ with respect to w.  # [sample], float64"""
    weights = torch.zeros_like(gradients.losses, requires_grad=True)
    with torch.enable_grad():
        summed = gradients.weighted_sum(weights)
    (inner,) = torch.autograd.grad(summed, weights, vector)
    return inner.double()


def regulariser_gradient(
    tape: Tape, gradients: PerSample, x: Any, y: Tensor, group: Tensor, rule: FairLens
) -> Tensor:
    """Return γ1 ∇R1 + γ2 ∇R2 on a batch.  # [parameter]

    Args:
        tape: the model and its loss, in its recording context.
        gradients: per-sample gradients on the batch.
        x: inputs of the batch.
        y: targets of the batch.
        group: group labels, 0 or 1.  # [sample]
        rule: C0 and the weights of the regularisers.
    """
    in_a, in_b = group == 0, group == 1
    if not (bool(in_a.any()) and bool(in_b.any())):
        return gradients.layout.blank.new_zeros(gradients.layout.size)
    n, dtype = len(gradients.losses), gradients.losses.dtype
    norms = gradients.norms().to(dtype)
    alpha = in_a.to(dtype) / in_a.sum() - in_b.to(dtype) / in_b.sum()
    beta = ((rule.C0 / norms).clamp(max=1.0) - 1) / n
    whole_p, whole_q = gradients.weighted_sum(alpha), gradients.weighted_sum(beta)  # [parameter]
    sign = float(torch.sign(whole_p.double() @ whole_q.double()))
    parameters = {name: p for name, p in tape.model.named_parameters() if name in tape.layout.names}
    with torch.enable_grad(), _Taps(tape.model) as taps:
        output = tape.model(x)
        losses = tape.loss(output, y)
        share = torch.softmax(output, dim=-1)[:, 1]
        f_a, f_b = share[in_a].mean(), share[in_b].mean()
        objective = rule.gamma2 * 0.5 * (f_a * (1 - f_a) + f_b * (1 - f_b))
        if rule.gamma1 and sign:
            p, q = tape.layout.split(whole_p), tape.layout.split(whole_q)
            terms = taps.terms(losses, parameters, p, q)
            along_p, along_q, squares = _formed_terms(tape, x, y, p, q) if terms is None else terms
            w = torch.where(norms > rule.C0, -rule.C0 * along_p.detach() / (n * norms**3), 0.0)
            surrogate = alpha @ along_q + beta @ along_p + 0.5 * w @ squares
            objective = objective + rule.gamma1 * sign * surrogate
        derivatives = torch.autograd.grad(objective, list(parameters.values()), allow_unused=True)
    parts = zip(parameters.items(), derivatives, strict=True)
    return tape.layout.join(
        {name: torch.zeros_like(p) if g is None else g for (name, p), g in parts}
    ).detach()


class _Terms(NamedTuple):
    """⟨g_i, p⟩, ⟨g_i, q⟩ and ‖g_i‖², as functions of the parameters.  # each [sample]"""

    along_p: Tensor
    along_q: Tensor
    squares: Tensor


class _Taps:
    """Inputs and outputs of the linear layers of a model, with their autograd graph."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: list[tuple[nn.Linear, Tensor, Tensor]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        layers = [module for module in self._model.modules() if isinstance(module, nn.Linear)]
        self._handles = [layer.register_forward_hook(self._record) for layer in layers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        assert isinstance(layer, nn.Linear)
        self._calls.append((layer, inputs[0], output))

    def terms(
        self,
        losses: Tensor,
        parameters: Mapping[str, Tensor],
        p: Mapping[str, Tensor],
        q: Mapping[str, Tensor],
    ) -> _Terms | None:
        """Return the terms as sums over the linear layers, without forming gradients.

        A layer has g_i = (δ_i a_iᵀ, δ_i). It adds δ_i·(P a_i + p) and ‖δ_i‖² (‖a_i‖² + 1). The
        result is None unless every parameter belongs to a linear layer that is called once, with
        one position per sample.
        """
        names = {id(value): name for name, value in parameters.items()}
        own = [
            value
            for layer, _, _ in self._calls
            for value in (layer.weight, layer.bias)
            if value is not None
        ]
        if {id(value) for value in own} != set(names) or len(own) != len(names):
            return None
        if any(a.ndim != 2 for _, a, _ in self._calls):
            return None
        deltas = torch.autograd.grad(
            losses.sum(), [z for _, _, z in self._calls], create_graph=True
        )
        each = []
        for (layer, a, _), delta in zip(self._calls, deltas, strict=True):
            weight = names[id(layer.weight)]
            bias = None if layer.bias is None else names[id(layer.bias)]
            both = functional.linear(
                a,
                torch.cat([p[weight], q[weight]]),
                None if bias is None else torch.cat([p[bias], q[bias]]),
            )
            along = (delta.unsqueeze(1) * both.view(len(a), 2, -1)).sum(2)
            squares = delta.square().sum(1) * (a.square().sum(1) + (bias is not None))
            each.append(torch.cat([along, squares.unsqueeze(1)], dim=1))
        return _Terms(*torch.stack(each).sum(0).unbind(1))


def _formed_terms(
    tape: Tape, x: Any, y: Tensor, p: Mapping[str, Tensor], q: Mapping[str, Tensor]
) -> _Terms:
    """Return the terms for any model, by forming every gradient."""
    parameters = dict(tape.model.named_parameters())
    chosen: dict[str, Tensor] = {name: parameters[name] for name in tape.layout.names}
    buffers = dict(tape.model.named_buffers())

    def loss(own: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        output = torch.func.functional_call(tape.model, (own, buffers), (one.unsqueeze(0),))
        return tape.loss(output, target.unsqueeze(0))[0]

    formed = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(chosen, x, y)
    each = [
        torch.stack(
            [
                g.flatten(1) @ p[name].flatten(),
                g.flatten(1) @ q[name].flatten(),
                g.flatten(1).square().sum(1),
            ]
        )
        for name, g in formed.items()
    ]
    return _Terms(*torch.stack(each).sum(0))
