"""What the attackers have in common.

An attacker knows everything but one record: the code, all public settings, and both datasets in
question. It sees all that a run publishes, to the last bit, and has to say which dataset it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from evenclip import prepare
from evenclip.mechanism import release
from evenclip.mechanism.grid import Grid

Publish = Callable[[Tensor, Tensor, Grid, float, torch.dtype], Tensor]


@dataclass(frozen=True)
class Attacker:
    """The attacker's view of a release."""

    def release_of(self, model, data, **settings) -> tuple[Tensor, Grid]:
        """Return the clipped sum of the first step on a dataset, and the grid of its release."""
        run = prepare(model, data, **settings)
        with run.listening():
            step = run.step()
        total, S, rule = step.clipped_sum, step.public.sensitivity, run.settings.rule
        return total, Grid.of(S, rule.sigma, len(total), run.mechanism.rounding)

    def reachable(
        self, out: Tensor, total: Tensor, grid: Grid, scale: float, dtype: torch.dtype,
        single: bool, off: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Return which numbers some noise turns into what was published.  # [number], bool

        The release itself is tried with the noise that fits best and with its neighbours.

        Args:
            out: what was published.
            total: the sum, if the attacker is right about the data.
            grid: grids and standard deviation.
            scale: factor of what is published.
            dtype: its dtype.
            single: whether noise is a number of float32.
            off: by how much the attacker knows `out` less exactly.
        """
        published = release.on_grid  # the package's, or what a test planted
        found = torch.zeros(len(out), dtype=torch.bool)
        rounded = total.to(dtype).double()  # as a release in floating-point numbers adds it
        for start, direction in product((total, rounded), (-torch.inf, torch.inf)):
            fits = (out.double() / scale - start) / float(grid.std)
            z = fits.float() if single else fits
            for _ in range(3):
                tried = published(total, z.double(), grid, scale, dtype)
                found |= (tried.double() - out.double()).abs() <= off
                z = torch.nextafter(z, torch.full_like(z, direction))
        return found


@pytest.fixture
def attacker() -> Attacker:
    return Attacker()


@pytest.fixture
def float_noise(monkeypatch) -> None:
    """Plant the release of floating-point numbers: the sum plus noise of 24 bits."""

    def plain(total, noise, grid, scale, dtype):
        fresh = noise[0 : len(total)].float().to(dtype)
        return (total.to(dtype) + float(grid.std) * fresh) * scale

    monkeypatch.setattr(release, "on_grid", plain)
