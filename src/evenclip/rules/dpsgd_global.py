"""DPSGD-Global: all gradients are scaled alike, those above a strict bound Z are dropped (Bu et al.
2021).

    γ_i = C0/Z if ‖g_i‖ ≤ Z, else 0

Scaling all alike keeps the direction of the batch gradient, which clipping each by itself turns.

Sensitivity. γ_i ‖g_i‖ ≤ (C0/Z)·Z = C0 where it is not 0, for every Z > 0.
Accounting. One sampled Gaussian with multiplier σ a step. Group labels are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from evenclip import check
from evenclip.arguments import check_fields
from evenclip.rules.rule import Rule

__all__ = ["DPSGDGlobal"]


@dataclass(frozen=True)
class DPSGDGlobal(Rule):
    """γ = C0/Z if ‖g‖ ≤ Z else 0, S = C0.

    Attributes:
        C0: clipping bound.
        sigma: noise multiplier of the gradient.
        Z: strict bound; a larger gradient is dropped.

    >>> import torch
    >>> rule = DPSGDGlobal(C0=1.0, sigma=1.0, Z=4.0)
    >>> rule.weight(torch.tensor([0.0, 4.0, 4.5]), torch.zeros(3), torch.zeros(0))
    tensor([0.2500, 0.2500, 0.0000])
    """

    name: ClassVar[str] = "dpsgd-global"
    title: ClassVar[str] = "DPSGD-Global"
    summary: ClassVar[str] = (
        "All gradients are shrunk by the same factor C0/Z, so the sum keeps its direction; a "
        "gradient longer than Z is left out. A Z that was chosen too small leaves many out."
    )
    elementwise: ClassVar[bool] = True
    reference: ClassVar[str] = (
        "Bu et al. 2021, On the Convergence and Calibration of Deep Learning with Differential "
        "Privacy; Esipova et al. 2023, Algorithm 2"
    )

    C0: float = 1.0
    sigma: float = 1.0
    Z: float = 10.0

    def __post_init__(self) -> None:
        check_fields(DPSGDGlobal, self)
        check.positive(C0=self.C0, sigma=self.sigma, Z=self.Z)
        check.finite(C0=self.C0)

    def sensitivity(self, now: Tensor) -> float:  # noqa: D102
        del now
        return self.C0

    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:  # noqa: D102
        del group, now
        return (norm <= self.Z).to(norm.dtype) * (self.C0 / self.Z)
