"""The noise that is added is at least the noise that is claimed, measured by an attacker.

One step of training is run very often on two batches that differ in one worst-case record, and an
attacker tries to tell which it was from everything the step makes public. With true and false
positive rates TPR and FPR of its best test, any (ε, δ)-private step has TPR ≤ e^ε FPR + δ, so

    ε ≥ ln((TPR − δ)/FPR),

here with Clopper–Pearson bounds that hold together with probability 1 − 10⁻⁶, on draws that the
test was not chosen on. The bound must stay below the claim for every rule, come close to it for
DPSGD (so that the attacker is known to be strong), and rise above it for each planted fault (so
that the audit is known to see).

The steps are those of training: the same `step`, rules, guard, releases and noise, mapped over
draws of the noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from scipy import stats
from torch import Tensor

from evenclip.gradients import Layout, PerSample
from evenclip.gradients.per_sample import Whole
from evenclip.mechanism import Mechanism, accounting
from evenclip.mechanism.noise import NormalStream
from evenclip.mechanism.release import Ledger, Release
from evenclip.mechanism.words import derive
from evenclip.rules import DPSGD, DPSGDF, Constants, DPSGDGlobal, DPSGDGlobalAdapt, Rule
from evenclip.training.passes import Chunk
from evenclip.training.step import step

DRAWS, BLOCK = 100_000, 5_000
DELTA = 1e-2
DOUBT = 1e-6
D = 16  # parameters

Transcript = dict[
    str, Tensor
]  # the public values of many draws: "gradient" [draw, D], "now" [draw, ...]
Score = Callable[[Transcript], Tensor]  # [draw]; larger means "the record was in"


class GivenGradients:
    """A tape of a model whose per-sample gradients are its input."""

    def __init__(self) -> None:
        self.model = torch.nn.Identity()
        self.layout = Layout(("weight",), (torch.Size([D]),), torch.zeros(0, dtype=torch.float64))

    def __call__(self, x: Tensor, y: Tensor, group: Tensor) -> PerSample:
        return PerSample(
            torch.zeros(len(x), dtype=torch.float64), [Whole({"weight": x})], self.layout
        )


@dataclass(frozen=True)
class World:
    """The gradients and groups of a batch."""

    gradients: Tensor  # [sample, D]
    group: Tensor  # [sample]


def record(size: float, axis: int = 0) -> Tensor:
    """Return a gradient of this length along an axis."""
    return size * torch.eye(D, dtype=torch.float64)[axis]


def world(*rows: tuple[Tensor, int]) -> World:
    """Return a batch from pairs (gradient, group)."""
    return World(torch.stack([g for g, _ in rows]), torch.tensor([k for _, k in rows]))


@dataclass
class OneStep:
    """One training step; a planted fault replaces one of its parts."""

    rule: Rule
    groups: int = 1
    B: float = 4.0
    divide_by_size: bool = False
    releases: Callable[[dict[str, Tensor], World], Release] = field(
        default=lambda noise, world: Release(noise)
    )

    def __post_init__(self) -> None:
        # Traceable, because the step is mapped over noise.
        self.mechanism = Mechanism(self.rule, Constants(groups=self.groups), traceable=True)
        self.state, self.counts = self.mechanism.start(), self.mechanism.counts
        self.ledger = Ledger()
        self.ledger.write(1.0, self.mechanism.multipliers)

    def __call__(self, world: World, noise: Tensor) -> Transcript:
        """Return the public values of a step for each row of noise [draw, counts + D]."""
        return torch.func.vmap(lambda drawn: self._once(world, drawn))(noise)

    def _once(self, world: World, drawn: Tensor) -> Transcript:
        release = self.releases(
            {"count": drawn[: self.counts], "gradient": drawn[self.counts :]}, world
        )
        B = float(len(world.group)) if self.divide_by_size else self.B
        chunk = Chunk(world.gradients, world.group, world.group)
        public, _ = step(GivenGradients(), self.mechanism, self.state, [chunk], B, release)
        return {"gradient": public.gradient, "now": public.now}

    def draw(self, world: World, seed: int) -> Transcript:
        """Compute many steps with fresh noise."""
        width = self.counts + D
        noise = NormalStream(derive(bytes(32), str(seed)), BLOCK * width)
        blocks = [self(world, noise.of(t)[:].view(BLOCK, width)) for t in range(DRAWS // BLOCK)]
        return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}

    @property
    def claim(self) -> float:
        """Return ε of one step on a whole batch (q = 1), from the ledger."""
        claimed = accounting.epsilon(self.ledger, DELTA)
        assert claimed is not None
        return claimed


def lower_bound(scores_in: Tensor, scores_out: Tensor) -> float:
    """Return a lower bound on ε that holds with probability 1 − 10⁻⁶. The test is chosen on one
    half of the draws and evaluated on the other.
    """
    half = len(scores_in) // 2
    best, chosen = -math.inf, (1.0, 1.0, math.inf)
    # High or low scores may be more frequent, in either world.
    for world, tail in itertools.product((1.0, -1.0), repeat=2):
        a, b = _oriented(scores_in[:half], scores_out[:half], world, tail)
        a, b = a.sort().values, b.sort().values
        values = torch.cat([a, b]).sort().values[half :: half // 500]
        # Just below a value, because on a grid many scores are equal.
        for t in values.nextafter(torch.tensor(-math.inf, dtype=values.dtype)).tolist():
            hits, alarms = (half - int(torch.searchsorted(s, t, right=True)) for s in (a, b))
            bound = _bound(hits, alarms, half)
            if bound > best:
                best, chosen = bound, (world, tail, t)
    world, tail, t = chosen
    a, b = _oriented(scores_in[half:], scores_out[half:], world, tail)
    return _bound(int((a > t).sum()), int((b > t).sum()), half)


def _oriented(
    scores_in: Tensor, scores_out: Tensor, world: float, tail: float
) -> tuple[Tensor, Tensor]:
    """Return the two worlds so that high scores are more frequent in the first one."""
    return (
        (tail * scores_in, tail * scores_out)
        if world > 0
        else (tail * scores_out, tail * scores_in)
    )


def _bound(hits: int, alarms: int, n: int) -> float:
    """Return ln((TPR − δ)/FPR) with Clopper–Pearson bounds, each with half of the error
    probability.
    """
    tpr = stats.beta.ppf(DOUBT / 2, hits, n - hits + 1) if hits else 0.0
    fpr = stats.beta.ppf(1 - DOUBT / 2, alarms + 1, n - alarms) if alarms < n else 1.0
    return math.log((tpr - DELTA) / fpr) if tpr > DELTA else -math.inf


def along_the_record(seen: Transcript) -> Tensor:
    """Return the component of the gradient in the record's direction."""
    return seen["gradient"][:, 0]


def spread(seen: Transcript) -> Tensor:
    """Return the size of the noise in directions without gradients."""
    return torch.linalg.vector_norm(seen["gradient"][:, 2:], dim=1)


def spread_for_its_bounds(seen: Transcript) -> Tensor:
    """Return the size of the noise relative to the public bound that it is scaled to."""
    return spread(seen) / seen["now"].amax(dim=1)


TARGET = (record(1e6), 1)
# Group 1 is clipped, group 0 is not, so that DPSGD-F gives group 1 a bound of nearly 3·C0.
OTHERS = [(record(0.01, axis=1), 0)] * 60 + [(record(50.0, axis=1), 1)] * 60
CLIPPED_APART = (world(*OTHERS, TARGET), world(*OTHERS))
FEW = (world((record(0.5, axis=1), 0), TARGET), world((record(0.5, axis=1), 0)))
BELOW_Z = (world((record(0.5, axis=1), 0), (record(9.99), 1)), world((record(0.5, axis=1), 0)))

SOUND = {
    "dpsgd": (DPSGD(C0=1.0, sigma=1.0), FEW),
    "dpsgd-f": (DPSGDF(C0=1.0, sigma=1.0), CLIPPED_APART),
    "dpsgd-global": (DPSGDGlobal(C0=1.0, sigma=1.0, Z=10.0), BELOW_Z),
    "dpsgd-global-adapt": (DPSGDGlobalAdapt(C0=1.0, sigma=1.0, Z0=10.0), FEW),
}


def audit(mechanism: OneStep, worlds: tuple[World, World], score: Score) -> float:
    """Return the attacker's lower bound on the ε of one step."""
    present, absent = worlds
    return lower_bound(
        score(mechanism.draw(present, seed=1)), score(mechanism.draw(absent, seed=2))
    )


@pytest.mark.parametrize("name", SOUND)
def test_no_attack_beats_the_claim(name):
    rule, worlds = SOUND[name]
    mechanism = OneStep(rule, groups=2)
    bound = audit(mechanism, worlds, along_the_record)
    assert 0.3 * mechanism.claim < bound < mechanism.claim


def test_the_attack_is_strong():
    rule, worlds = SOUND["dpsgd"]
    mechanism = OneStep(rule, groups=2)
    assert audit(mechanism, worlds, along_the_record) > 0.7 * mechanism.claim


def test_the_claim_of_one_step_is_that_of_the_gaussian_mechanism():
    # δ(ε) = Φ(1/2 − ε) − e^ε Φ(−1/2 − ε) for sensitivity ÷ noise = 1 (Balle & Wang 2018).
    mechanism = OneStep(DPSGD(C0=1.0, sigma=1.0))
    mechanism(FEW[0], torch.zeros(1, D, dtype=torch.float64))
    claim = mechanism.claim
    delta = stats.norm.cdf(0.5 - claim) - math.exp(claim) * stats.norm.cdf(-0.5 - claim)
    assert delta == pytest.approx(DELTA, rel=2e-3)


# --- planted faults: each must be seen ----------------------------------------------------------


class NoiseForC0(Release):
    """The algorithm box of DPSGD-F: noise σC0, although the sensitivity is max C_k."""

    def __call__(self, name, value, *, sensitivity, **further):
        return super().__call__(name, value, sensitivity=1.0, **further)


class NoiseForThosePresent(Release):
    """The published code of DPSGD-F: noise for the largest bound among the groups in the batch."""

    def __init__(self, noise, world):
        super().__init__(noise)
        self.present = world.group.unique()
        self.noisy_counts = None

    def __call__(self, name, value, *, sensitivity, **further):
        if name == "count":
            self.noisy_counts = super().__call__(name, value, sensitivity=sensitivity, **further)
            return self.noisy_counts
        C, _ = DPSGDF(C0=1.0, sigma=1.0).observe(self.noisy_counts, 4.0, torch.ones(2))
        return super().__call__(name, value, sensitivity=C[self.present].max(), **further)


def test_fault_noise_for_C0_is_seen():
    rule, worlds = SOUND["dpsgd-f"]
    mechanism = OneStep(rule, groups=2, releases=lambda noise, world: NoiseForC0(noise))
    assert audit(mechanism, worlds, along_the_record) > mechanism.claim


def test_fault_division_by_the_size_of_the_batch_is_seen():
    rule, worlds = SOUND["dpsgd"]
    mechanism = OneStep(rule, groups=2, divide_by_size=True)
    assert audit(mechanism, worlds, spread) > mechanism.claim


def test_fault_noise_for_the_groups_present_is_seen():
    # Only group 0 without the record; its noisy bound is the smaller one in half of the draws.
    worlds = (world((record(0.5, axis=1), 0), (record(1e-9), 1)), world((record(0.5, axis=1), 0)))
    mechanism = OneStep(SOUND["dpsgd-f"][0], groups=2, releases=NoiseForThosePresent)
    assert audit(mechanism, worlds, spread_for_its_bounds) > mechanism.claim


@pytest.mark.parametrize("reused", [False, True])
def test_fault_noise_drawn_once_and_reused_is_seen(reused):
    # Two steps; the record's gradient points one way in the first and the other way in the second.
    rule = DPSGD(C0=1.0, sigma=1.0)
    other = (record(0.5, axis=1), 0)
    mechanism = OneStep(rule, groups=2)
    present = [world(other, (record(1e6), 1)), world(other, (record(-1e6), 1))]
    absent = [world(other), world(other)]
    scores = []
    for seed, batches in enumerate((present, absent)):
        first = mechanism.draw(batches[0], seed=10 + seed)
        second = mechanism.draw(batches[1], seed=10 + seed if reused else 20 + seed)
        scores.append(along_the_record(first) - along_the_record(second))
    two_steps = Ledger()
    two_steps.write(1.0, rule.multipliers())
    two_steps.write(1.0, rule.multipliers())
    claim = accounting.epsilon(two_steps, DELTA)
    bound = lower_bound(*scores)
    assert bound > claim if reused else 0.6 * claim < bound < claim
