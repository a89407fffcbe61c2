"""DPSGD-Global-Adapt: all gradients are scaled alike, large ones clipped, Z follows the norms
(Esipova et al. 2023).

    γ_i = C0/max(Z, ‖g_i‖)
    Z ← Z · exp(−η_Z + b̃),   b̃ = (|{i : ‖g_i‖ > τZ}| + N(0, σ_count²))/B

Sensitivity. γ_i ‖g_i‖ = C0 · ‖g_i‖/max(Z, ‖g_i‖) ≤ C0 for every Z > 0. Each sample adds 0 or 1 to
the count. Accounting. Count (multiplier σ_count) and gradient (σ) see one batch and are accounted
jointly. Group labels are not used.

What it is. γ = (C0/Z)·min(1, Z/‖g‖): DPSGD with clipping bound Z and learning rate η·C0/Z. The
update of Z is the quantile rule of Andrew et al. 2021 with unit step: Z settles where a fraction
η_Z of the norms exceeds τZ, so η_Z is a target fraction rather than a learning rate.

Differs from the paper: the count is divided by the public expected batch size B, not by the random
|B| (unaccounted, and undefined for an empty batch); the closed form of γ is used for Z < C0 too; Z
is held within [1e-12, 1e12], far outside any norm, so that no stroke of noise on a tiny batch can
make it 0 or infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from evenclip import check
from evenclip.arguments import check_fields
from evenclip.rules.rule import Constants, Rule

__all__ = ["DPSGDGlobalAdapt"]


@dataclass(frozen=True)
class DPSGDGlobalAdapt(Rule):
    """γ = C0/max(Z, ‖g‖), S = C0, with Z following the norms through a noisy count.

    Attributes:
        C0: clipping bound.
        sigma: noise multiplier of the gradient.
        Z0: Z of the first step.
        tau: a norm above τZ is counted.
        eta_Z: the fraction of norms above τZ at which Z settles.
        sigma_count: noise multiplier of the count; 10σ unless given.

    >>> rule = DPSGDGlobalAdapt(C0=1.0, sigma=1.0, Z0=4.0)
    >>> rule.weight(torch.tensor([0.0, 4.0, 8.0]), torch.zeros(3), rule.init(Constants())).tolist()
    [0.25, 0.25, 0.125]
    >>> above = torch.tensor([256 * 0.1])  # a fraction η_Z of the norms: Z stays
    >>> now, next = rule.observe(above, 256.0, rule.init(Constants()))
    >>> now.item(), round(next.item(), 6)
    (4.0, 4.0)
    """

    name: ClassVar[str] = "dpsgd-global-adapt"
    title: ClassVar[str] = "DPSGD-Global-Adapt"
    summary: ClassVar[str] = (
        "As DPSGD-Global, but a gradient longer than Z is cut to C0 instead of left out, and Z "
        "follows the data: it grows while a noisy count says that gradients lie above it, and "
        "shrinks otherwise."
    )
    elementwise: ClassVar[bool] = True
    reference: ClassVar[str] = (
        "Esipova et al. 2023, Disparate Impact in Differential Privacy from Gradient "
        "Misalignment, Algorithm 2"
    )

    C0: float = 1.0
    sigma: float = 1.0
    Z0: float = 10.0
    tau: float = 1.0
    eta_Z: float = 0.1
    sigma_count: float | None = None

    def __post_init__(self) -> None:
        check_fields(DPSGDGlobalAdapt, self)
        check.positive(C0=self.C0, sigma=self.sigma)
        check.finite(C0=self.C0)
        if self.sigma_count is None:
            object.__setattr__(self, "sigma_count", 10.0 * self.sigma)
        assert self.sigma_count is not None
        check.positive(
            C0=self.C0,
            sigma=self.sigma,
            Z0=self.Z0,
            tau=self.tau,
            eta_Z=self.eta_Z,
            sigma_count=self.sigma_count,
        )

    def init(self, constants: Constants) -> Tensor:
        """Return Z0."""
        del constants
        return torch.tensor(self.Z0, dtype=torch.float64)

    def statistic(self, norm: Tensor, group: Tensor, state: Tensor) -> Tensor:
        """Whether the norm is above τZ.  # [], bool"""
        del group
        return norm > self.tau * state

    def observe(self, noisy: Tensor, B: float, state: Tensor) -> tuple[Tensor, Tensor]:
        """Z now, and Z · exp(−η_Z + b̃) for the next step."""
        # −η_Z + b̃ in one operation.
        exponent = torch.rsub(noisy.select(0, 0), -self.eta_Z, alpha=-1 / B)
        return state, exponent.exp().mul(state).clamp(1e-12, 1e12)

    def sensitivity(self, now: Tensor) -> float:  # noqa: D102
        del now
        return self.C0

    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:  # noqa: D102
        del group
        return torch.maximum(norm, now).reciprocal_().mul_(self.C0)
