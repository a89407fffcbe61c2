"""Fixtures of the training tests: small data and models, every rule, and a spy on draws and
releases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from evenclip import DPSGD, DPSGDF, DPSGDGlobal, DPSGDGlobalAdapt, NonPrivate
from evenclip.gradients import AnyTape
from evenclip.mechanism import Mechanism, Release
from evenclip.mechanism.sampling import Poisson, Shuffled
from evenclip.rules import RULES as EVERY_RULE
from evenclip.rules import Constants, Rule
from evenclip.training.passes import Chunk
from evenclip.training.step import Step, WeightedSums, step

RULES = {
    rule.name: rule
    for rule in (
        NonPrivate(),
        DPSGD(C0=0.7, sigma=0.8),
        DPSGDF(C0=0.8, sigma=0.8, sigma_count=3.0),
        DPSGDGlobal(C0=0.7, sigma=0.8, Z=1.6),
        DPSGDGlobalAdapt(C0=0.7, sigma=0.8, Z0=1.2, tau=1.1, eta_Z=0.2, sigma_count=2.0),
    )
}
# `SLOW` in test_step.py has a second formula of each of these.
assert set(RULES) <= {name for name, rule in EVERY_RULE.items() if rule.bounded}


@pytest.fixture(params=RULES)
def rule(request):
    """Every built-in rule, with constants that clip some of the toy's samples."""
    return RULES[request.param]


@pytest.fixture(params=[name for name, rule in RULES.items() if rule.poisson])
def private_rule(request):
    """Every built-in rule that has an ε."""
    return RULES[request.param]


class Toy:
    """Three classes, three groups of different size and difficulty, and models that are small
    enough for loops over single samples.
    """

    d, classes, K = 5, 3, 3

    def data(
        self, n: int = 40, dtype: torch.dtype = torch.float64, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (x, y, group)."""
        random = torch.Generator().manual_seed(seed)
        group = torch.multinomial(
            torch.tensor([0.6, 0.3, 0.1]), n, replacement=True, generator=random
        )
        group[: self.K] = torch.arange(self.K)  # every group has samples
        x = (
            torch.randn(n, self.d, generator=random, dtype=dtype)
            * (1 + group.to(dtype)).unsqueeze(1)
            / 2
        )
        return x, torch.randint(self.classes, (n,), generator=random), group

    def images(
        self, n: int = 40, dtype: torch.dtype = torch.float64, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (x, y, group) with x [n, 1, 7, 7]."""
        _, y, group = self.data(n, dtype, seed)
        return (
            torch.randn(n, 1, 7, 7, generator=torch.Generator().manual_seed(seed + 1), dtype=dtype),
            y,
            group,
        )

    def mlp(
        self, dtype: torch.dtype = torch.float64, dropout: float = 0.0, seed: int = 0
    ) -> nn.Sequential:
        """Return a small network, with dropout only if `dropout` is positive."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            hidden = [nn.Linear(self.d, 6), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else [])]
            return nn.Sequential(*hidden, nn.Linear(6, self.classes)).to(dtype)

    def cnn(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
        """Return two convolutions and a linear layer, for `images`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [
                nn.Conv2d(1, 3, 3),
                nn.Tanh(),
                nn.Conv2d(3, 2, 3, stride=2),
                nn.Tanh(),
                nn.Flatten(),
            ]
            return nn.Sequential(*layers, nn.Linear(8, self.classes)).to(dtype)

    def vector(self, model: nn.Module) -> Tensor:
        """Return all parameters of a model as one vector."""
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    def same(self, a: nn.Module, b: nn.Module) -> bool:
        """Return whether two models are bitwise equal."""
        return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))

    def gradients(
        self, model: nn.Module, x: Any, y: Tensor, loss: Any = cross_entropy
    ) -> tuple[Tensor, Tensor]:
        """Return losses [sample] and gradients [sample, parameter], with one backward pass per
        sample.
        """
        losses, rows = [], []
        for i in range(len(y)):
            value = loss(model(x[i : i + 1]), y[i : i + 1])
            parts = torch.autograd.grad(value, list(model.parameters()))
            losses.append(value.detach())
            rows.append(torch.cat([part.flatten() for part in parts]))
        blank = self.vector(model)
        if not rows:
            return blank.new_zeros(0), blank.new_zeros(0, len(blank))
        return torch.stack(losses), torch.stack(rows)

    def step(
        self, tape: AnyTape, rule: Rule, state: Tensor, chunks: list[Chunk], B: float,
        release: Any,
    ) -> Step:  # fmt: skip
        """Compute one step as a `Step`; `release` is the noise by name, or a release."""
        mechanism = Mechanism(rule, Constants(groups=self.K))
        release = Release(release) if isinstance(release, dict) else release
        public, part = step(tape, mechanism, state, chunks, B, release)
        return Step(
            public, part.seen, part.total, WeightedSums(tape, chunks), B, 0, mechanism, tape, state,
            "", 0,
        )  # fmt: skip


@pytest.fixture
def toy() -> Toy:
    return Toy()


@dataclass
class Released:
    """The arguments and the result of one release."""

    name: str
    value: Tensor
    sensitivity: float
    multiplier: float
    out: Tensor


@dataclass
class Spy:
    """The draws and releases of a training run, step by step."""

    batches: list[Tensor] = field(default_factory=list)
    noise: list[dict[str, Tensor]] = field(default_factory=list)
    releases: list[Released] = field(default_factory=list)


@pytest.fixture
def untried(monkeypatch):
    """Leave out the trial of custom rules, as if the rule had passed it and failed later."""
    monkeypatch.setattr("evenclip.training.setup.try_rule", lambda *_: None)


@pytest.fixture
def spy(monkeypatch) -> Spy:
    """Record draws and releases of all training; clear the lists between two runs."""
    seen = Spy()
    for sampler in (Poisson, Shuffled):
        monkeypatch.setattr(sampler, "batch", _watched_batches(sampler.batch, seen))
    start, call = Release.__init__, Release.__call__

    def watched_start(self, noise, shares=None):
        seen.noise.append({name: numbers[:].clone() for name, numbers in noise.items()})
        start(self, noise, shares)

    def watched_call(self, name, value, *, sensitivity, multiplier, **further):
        out = call(self, name, value, sensitivity=sensitivity, multiplier=multiplier, **further)
        if value.numel():
            seen.releases.append(
                Released(name, value.clone(), float(sensitivity), multiplier, out.clone())
            )
        return out

    monkeypatch.setattr(Release, "__init__", watched_start)
    monkeypatch.setattr(Release, "__call__", watched_call)
    return seen


def _watched_batches(draw, seen):
    def recorded(self, index):
        batch = draw(self, index)
        seen.batches.append(batch.clone())
        return batch

    return recorded
