"""DPSGD: every sample's gradient is clipped to C0 by itself (Abadi et al. 2016; Algorithm 1 of
Esipova et al. 2023).

    γ_i = min(1, C0/‖g_i‖)

Sensitivity. γ_i ‖g_i‖ = min(‖g_i‖, C0) ≤ C0 for every sample, so adding or removing one moves Σ γ_i
g_i by at most C0. Accounting. One sampled Gaussian with multiplier σ a step. Group labels are not
used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from evenclip import check
from evenclip.arguments import check_fields
from evenclip.rules.rule import Rule

__all__ = ["DPSGD"]


@dataclass(frozen=True)
class DPSGD(Rule):
    """γ = min(1, C0/‖g‖), S = C0.

    Attributes:
        C0: clipping bound.
        sigma: noise multiplier of the gradient.

    >>> import torch
    >>> rule = DPSGD(C0=0.5, sigma=1.0)
    >>> # A zero gradient keeps the weight 1.
    >>> rule.weight(torch.tensor([0.0, 0.5, 2.0]), torch.zeros(3), torch.zeros(0))
    tensor([1.0000, 1.0000, 0.2500])
    """

    name: ClassVar[str] = "dpsgd"
    title: ClassVar[str] = "DPSGD"
    summary: ClassVar[str] = (
        "Every record's gradient that is longer than C0 is cut to that length, then noise is "
        "added. Records with long gradients are cut most, and these are more often a minority's: "
        "their pull on the model is weakened, and the sum points elsewhere than it would."
    )
    elementwise: ClassVar[bool] = True
    reference: ClassVar[str] = (
        "Abadi et al. 2016, Deep Learning with Differential Privacy, Algorithm 1"
    )

    C0: float = 1.0
    sigma: float = 1.0

    def __post_init__(self) -> None:
        check_fields(DPSGD, self)
        check.positive(C0=self.C0, sigma=self.sigma)
        check.finite(C0=self.C0)

    def sensitivity(self, now: Tensor) -> float:  # noqa: D102
        del now
        return self.C0

    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:  # noqa: D102
        del group, now
        return (self.C0 / norm).clamp(max=1.0)
