"""The problem that all drawings show: two groups of points in the plane.

Each sample pulls the parameter θ towards its point x_i. The groups differ in size, in the place of
their points and in curvature:

    ℓ_i(θ) = ½ (θ − x_i)ᵀ H^k (θ − x_i),   g_i = H^k (θ − x_i),   k the group of i
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from evenclip.rules import Constants, Rule

__all__ = [
    "C0",
    "Array",
    "Problem",
    "angle",
    "clipped_gradients",
    "norm_ratio",
    "problem",
    "quadratic_form",
]

Array: TypeAlias = NDArray[np.float64]
"""Usually a point or points of the plane.  # [2] or [sample, 2]"""

C0 = 1.0
"""The clipping bound of `convergence` and `decomposition`."""


@dataclass(frozen=True)
class Problem:
    """Two groups of points in the plane, each with a curvature.

    Attributes:
        x: points.  # [sample, 2]
        group: 0 or 1.  # [sample]
        H: Hessian of each sample's loss in a group.  # [group, 2, 2]
    """

    x: Array
    group: NDArray[np.int64]
    H: Array

    def gradients(self, theta: Array) -> Array:
        """Return g_i.  # [sample, 2]"""
        return np.asarray(np.einsum("sij,sj->si", self.H[self.group], theta - self.x))

    def losses(self, theta: Array) -> Array:
        """Return the mean loss of each group at one θ or at several.  # [..., group]"""
        offsets = [theta[..., None, :] - self.x[self.group == k] for k in (0, 1)]
        return np.stack([quadratic_form(self.H[k], offsets[k]).mean(-1) / 2 for k in (0, 1)], -1)

    def loss(self, theta: Array) -> Array:
        """Return the mean loss of all samples.  # [...]"""
        return self.losses(theta) @ (np.bincount(self.group) / len(self.group))

    @property
    def minimum(self) -> Array:
        """θ*, the point where the mean gradient is 0.  # [2]"""
        H = self.H[self.group]
        return np.linalg.solve(H.sum(0), np.einsum("sij,sj->i", H, self.x))


def problem() -> Problem:
    """Return 48 points of group a and 12 of group b, whose loss is steeper."""
    random = np.random.Generator(np.random.PCG64(3))
    centres, sizes, spread = np.array([[0.0, 0.0], [3.0, 2.2]]), (48, 12), 0.8
    x = np.concatenate(
        [centres[k] + spread * random.standard_normal((sizes[k], 2)) for k in (0, 1)]
    )
    H = np.array([[[0.9, 0.2], [0.2, 0.3]], [[1.2, 0.6], [0.6, 1.9]]])
    return Problem(x, np.repeat(np.arange(2), sizes), H)


def clipped_gradients(rule: Rule, g: Array) -> Array:
    """Return γ_i g_i with the weights of a rule.  # [sample, 2]"""
    norms = torch.from_numpy(np.linalg.norm(g, axis=1))
    weights: Array = rule.weight(norms, torch.zeros(len(g)), rule.init(Constants(groups=2))).numpy()
    return weights[:, None] * g


def norm_ratio(plain: Array, clipped: Array) -> float:
    """Return ρ = ‖ḡ_B‖/‖g_B‖, or 1 if either is 0."""
    long, short = float(np.linalg.norm(plain)), float(np.linalg.norm(clipped))
    return short / long if long > 0 and short > 0 else 1.0


def angle(a: Array, b: Array) -> float:
    """Return the angle from a to b, in (−π, π]."""
    return math.atan2(float(a[0] * b[1] - a[1] * b[0]), float(a @ b))


def quadratic_form(H: Array, v: Array) -> Array:
    """Return vᵀ H v.  # [...]"""
    return np.asarray(np.einsum("...i,...ij,...j->...", v, H, v))
