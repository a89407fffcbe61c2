"""The release in exact arithmetic, written from its definition, for tests to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import floor, frexp, ldexp, sqrt

import torch
from torch import Tensor


def released(total: Iterable[float], S: float, multiplier: float, noise: Iterable[float]) -> Tensor:
    """Return H·⌊(k·h + H/2 + σ'z)/H⌋ for every number, with k = round(total/h).

    h is the largest power of two with h√d ≤ 2⁻¹⁶ S and h ≤ σS/32, σ' = σ(S + h√d), and H the
    largest power of two with H ≤ σ'/8.
    """
    total, noise = [Fraction(float(x)) for x in total], [Fraction(float(z)) for z in noise]
    S, multiplier, root = float(S), float(multiplier), sqrt(len(noise))
    h = _power_below(min(2.0**-16 * S / root, multiplier * S / 32))
    std = Fraction(multiplier) * (Fraction(S) + Fraction(h) * Fraction(root))
    H = Fraction(_power_below(float(std) / 8))
    numbers = [
        H * floor((round(x / Fraction(h)) * Fraction(h) + H / 2 + std * z) / H)
        for x, z in zip(total, noise, strict=True)
    ]
    return torch.tensor([float(number) for number in numbers], dtype=torch.float64)


def _power_below(x: float) -> float:
    """Return the largest power of two that is at most x."""
    return ldexp(1.0, frexp(x)[1] - 1)


class Ideal:
    """A release of real numbers: value + sensitivity · multiplier · noise, not on any grid."""

    def __init__(self, noise: Mapping[str, Tensor]) -> None:
        self._noise = noise

    def __call__(
        self, name: str, value: Tensor, *, sensitivity: float | Tensor, multiplier: float,
        scale: float = 1.0, **further: object,
    ) -> Tensor:  # fmt: skip
        if value.numel() and multiplier:
            value = value + sensitivity * multiplier * self._noise[name]
        return value * scale
