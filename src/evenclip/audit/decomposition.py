"""What one step costs each group, and by what: clipping's magnitude, its direction, noise.

To second order in the step, the expected loss of group a after step t is (Tran et al. 2021;
Propositions 1 and 2 of Esipova et al. 2023), with g_a and H^a the gradient and the Hessian of the
group's mean loss over the training set,

    E L(θ_{t+1}; D_a) ≈ L(θ_t; D_a) + non-private + R_clip + R_noise,        R_clip = R_mag + R_dir

    non-private   −η⟨g_a, g_D⟩ + η²/2 E[g_Bᵀ H^a g_B]
    R_mag         η⟨g_a, E[(1−ρ) g_B]⟩ + η²/2 E[(ρ²−1) g_Bᵀ H^a g_B]          from g_B to ρ g_B
    R_dir         η⟨g_a, E[ρ g_B − ḡ_B]⟩ + η²/2 E[ḡ_Bᵀ H^a ḡ_B − ρ² g_Bᵀ H^a g_B]     from ρ g_B on to ḡ_B
    R_noise       η²/2 Tr(H^a) (σS/B)²

g_B = Σ g_i / B and ḡ_B = Σ γ_i g_i / B are what plain SGD and the rule would step along, ρ =
‖ḡ_B‖/‖g_B‖ (1 if either is 0). The starred pair goes the other way round, first turned, then
shortened: from g_B to ḡ_B/ρ to ḡ_B.

Differs from the paper: R_noise has the 1/B² of the algorithm, which the paper leaves out (its
figures are 65,000 times too high for a batch of 256); S is the sensitivity that was really used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from evenclip.audit.curvature import Curvature, Estimate, signs
from evenclip.data.dataset import Dataset, as_dataset
from evenclip.gradients.losses import Loss
from evenclip.training.step import Chunk, Step, WeightedSums, clip

__all__ = ["NAMES", "Batches", "GroupTerms", "RiskTerms", "terms"]

# The parts of a step's effect on a group's loss.
NAMES = ("non_private", "clip", "mag", "dir", "noise", "mag_star", "dir_star")


@dataclass(frozen=True)
class Batches:
    """Batch gradients of one step, of its own batch and perhaps of others drawn alike.

    Attributes:
        plain: g_B.  # [batch, parameter], float64
        clipped: ḡ_B.  # [batch, parameter], float64
    """

    plain: Tensor
    clipped: Tensor

    @property
    def norms(self) -> NDArray[np.float64]:
        """‖g_B‖.  # [batch]"""
        found: NDArray[np.float64] = self.plain.norm(dim=1).cpu().numpy()
        return found

    @property
    def clipped_norms(self) -> NDArray[np.float64]:
        """‖ḡ_B‖.  # [batch]"""
        found: NDArray[np.float64] = self.clipped.norm(dim=1).cpu().numpy()
        return found

    @property
    def rho(self) -> NDArray[np.float64]:
        """ρ = ‖ḡ_B‖/‖g_B‖, 1 if either is 0.  # [batch]"""
        long, short = self.norms, self.clipped_norms
        known = (long > 0) & (short > 0)
        return np.where(known, short, 1.0) / np.where(known, long, 1.0)


@dataclass(frozen=True)
class GroupTerms:
    """What a step does to one group's loss; each number with its standard error over batches (and
    over a sample).

    Attributes:
        group: its number.
        n: samples that were looked at.
        of: samples that the group has.
        loss_gradient_norm: ‖g_a‖.
        slopes: ⟨g_a, g_B⟩.  # [batch]
        clipped_slopes: ⟨g_a, ḡ_B⟩.  # [batch]
        trace: Tr H^a.
        terms: name, of `NAMES` -> its estimate.
        cosine: mean of cos ∠(g_a, g_B); None if one of them is 0.
        clipped_cosine: mean of cos ∠(g_a, ḡ_B).
        extremes: (λ_min, λ_max) of H^a, if they were asked for.
    """

    group: int
    n: int
    of: int
    loss_gradient_norm: float
    slopes: list[float]
    clipped_slopes: list[float]
    trace: Estimate | None
    terms: dict[str, Estimate]
    cosine: float | None
    clipped_cosine: float | None
    extremes: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        found = asdict(self)
        found["terms"] = {name: list(value) for name, value in self.terms.items()}
        found["trace"] = None if self.trace is None else list(self.trace)
        return found


def terms(
    slopes: NDArray[np.float64], forms: NDArray[np.float64], clipped_slopes: NDArray[np.float64],
    clipped_forms: NDArray[np.float64], rho: NDArray[np.float64], lr: float,
) -> dict[str, NDArray[np.float64]]:  # fmt: skip
    """The terms of clipping, and the non-private one, batch by batch; R_mag + R_dir = R_clip =
    R_mag* + R_dir*.

    Args:
        slopes: ⟨g_a, g_B⟩.  # [..., batch], and so are all
        forms: g_Bᵀ H^a g_B.
        clipped_slopes: ⟨g_a, ḡ_B⟩.
        clipped_forms: ḡ_Bᵀ H^a ḡ_B.
        rho: ‖ḡ_B‖/‖g_B‖.
        lr: η.
    """
    half = lr * lr / 2
    return {
        "non_private": -lr * slopes + half * forms,
        "clip": lr * (slopes - clipped_slopes) + half * (clipped_forms - forms),
        "mag": lr * (1 - rho) * slopes + half * (rho**2 - 1) * forms,
        "dir": lr * (rho * slopes - clipped_slopes) + half * (clipped_forms - rho**2 * forms),
        "mag_star": lr * (1 / rho - 1) * clipped_slopes + half * (1 - rho**-2.0) * clipped_forms,
        "dir_star": lr * (slopes - clipped_slopes / rho) + half * (clipped_forms / rho**2 - forms),
    }


class RiskTerms:
    """An observer of training (`fit(observers=[...])`): what a step does to each group, every so
    many steps.

    What it returns, and `Result.records` collects: {"risk": one `GroupTerms.to_json()` for each
    group, "norms": ‖g_B‖ and ‖ḡ_B‖ of each batch, "sensitivity", "lr"}. Private, like everything an
    observer sees; it changes nothing, and draws from its own random numbers.
    """

    def __init__(
        self,
        data: Any,
        lr: float,
        *,
        loss: Loss = cross_entropy,
        every: int = 50,
        groups: Sequence[int] | None = None,
        batches: int = 1,
        probes: int = 100,
        sample: int | None = None,
        eigenvalues: bool = False,
        seed: int = 0,
    ) -> None:
        """Look at steps 0, every, 2 · every, …

        Args:
            data: (x, y, group) or a `Dataset`: what is trained on.
            lr: η.
            loss: what is trained on.
            every: so many steps.
            groups: which; all unless given.
            batches: how many batches stand for all; the first is the step's own, the others are
                drawn like it.
            probes: random signs for the trace; 0 leaves R_noise out.
            sample: of this many samples of a group at the most, drawn once, instead of the whole.
            eigenvalues: whether to look for λ_min and λ_max, which takes a few dozen products.
            seed: of probes, samples and further batches.
        """
        data = as_dataset(data)
        if not isinstance(data, Dataset) or data.group is None:
            raise ValueError(
                "Risk is told apart by group: give (x, y, group) in memory, as a tuple or a "
                "Dataset."
            )
        for name, value, least in (
            ("every", every, 1),
            ("batches", batches, 1),
            ("probes", probes, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}.")
        if sample is not None and sample < 32:
            raise ValueError(
                f"sample is {sample}; a standard error takes at least 32 samples a group."
            )
        self._data, self._loss, self._lr, self._every = data, loss, lr, every
        self._batches, self._probes, self._eigenvalues, self._seed = (
            batches,
            probes,
            eigenvalues,
            seed,
        )
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 1])))
        known = torch.unique(data.group).tolist()
        chosen = known if groups is None else list(groups)
        missing = [k for k in chosen if k not in known]
        if missing:
            raise ValueError(
                f"There is no sample of group {missing[0]} in the data; groups are {known}."
            )
        self._rows = {k: self._some(torch.nonzero(data.group == k)[:, 0], sample) for k in chosen}

    def _some(self, rows: Tensor, sample: int | None) -> tuple[Tensor, int]:
        if sample is None or sample >= len(rows):
            return rows, len(rows)
        return rows[
            torch.from_numpy(self._random.permutation(len(rows))[:sample]).to(rows.device)
        ], len(rows)

    def __call__(self, step: Step) -> dict[str, Any] | None:
        """This step's terms, if it is one of those that are looked at."""
        if step.t % self._every:
            return None
        if self._data.y.device != step.clipped_sum.device:
            self._data = self._data.to(step.clipped_sum.device)
        batches = self._gradients(step)
        probes = signs(self._probes, batches.plain.shape[1], self._seed)
        sigma, S = float(step.mechanism.rule.sigma), float(step.public.sensitivity)
        noise = sigma * S / step.B if sigma else 0.0  # without noise nothing need be bounded
        found = [self._group(k, step, batches, probes, noise) for k in self._rows]
        return {
            "risk": [group.to_json() for group in found],
            "norms": [batches.norms.tolist(), batches.clipped_norms.tolist()],
            "sensitivity": S if math.isfinite(S) else None,
            "lr": self._lr,
        }

    def _group(
        self, k: int, step: Step, batches: Batches, probes: Tensor, noise: float
    ) -> GroupTerms:
        rows, of = self._rows[k]
        partial = len(rows) < of
        curvature, gradients = self._curvature(step, rows, partial)
        # A sample without a finite gradient takes no part in training.
        if not bool(torch.isfinite(gradients).all()):
            finite = clip(step.tape, step.mechanism, self._chunk(rows), step.public.now).seen.finite
            rows = rows if finite is None else rows[finite.to(rows.device)]
            curvature, gradients = self._curvature(step, rows, partial)
        sizes = curvature.sizes.numpy()
        m = len(batches.plain)
        both = torch.cat([batches.plain, batches.clipped])
        slopes = (gradients @ both.T).cpu().numpy()  # [part, 2 · batch]
        forms = curvature.forms(both).cpu().numpy()
        parts = terms(
            slopes[:, :m], forms[:, :m], slopes[:, m:], forms[:, m:], batches.rho, self._lr
        )
        found = {
            name: _estimate(value, sizes, of if partial else None) for name, value in parts.items()
        }
        trace = curvature.trace(probes, of if partial else None) if len(probes) else None
        if trace is not None:
            scale = self._lr**2 / 2 * noise**2
            found["noise"] = Estimate(scale * trace.value, scale * trace.se)
        mean, whole = (
            sizes @ slopes / sizes.sum(),
            torch.from_numpy(sizes).to(gradients) @ gradients / len(rows),
        )
        length = float(whole.norm())
        return GroupTerms(
            k,
            len(rows),
            of,
            length,
            mean[:m].tolist(),
            mean[m:].tolist(),
            trace,
            found,
            _cosine(mean[:m], batches.norms, length),
            _cosine(mean[m:], batches.clipped_norms, length),
            curvature.extremes() if self._eigenvalues else None,
        )

    def _curvature(self, step: Step, rows: Tensor, partial: bool) -> tuple[Curvature, Tensor]:
        """The loss of these samples, and its gradients [part, parameter]."""
        samples = self._data.take(rows.to(self._data.y.device))
        found = Curvature(step.model, self._loss, samples.x, samples.y, parts=16 if partial else 1)
        return found, found.gradients()

    def _gradients(self, step: Step) -> Batches:
        """g_B and ḡ_B of the step's batch, and of others that could have been drawn in its place:
        with the bounds that were public at this step.
        """
        ones = step.weighted_sum(torch.ones_like(step.weights))
        plain, clipped = [ones.double() / step.B], [step.clipped_sum.double() / step.B]
        for _ in range(self._batches - 1):
            drawn = self._random.random(len(self._data)) < step.B / len(self._data)
            batch = self._chunk(torch.from_numpy(np.flatnonzero(drawn)))
            plain.append(
                WeightedSums(step.tape, batch)(torch.ones(int(drawn.sum()))).double() / step.B
            )
            clipped.append(
                clip(step.tape, step.mechanism, batch, step.public.now).total.double() / step.B
            )
        return Batches(torch.stack(plain), torch.stack(clipped))

    def _chunk(self, rows: Tensor) -> list[Chunk]:
        """These samples as a batch; none is an empty one."""
        x, y, group = self._data.take(rows.to(self._data.y.device))
        assert group is not None
        return [Chunk(x, y, group)] if len(rows) else []


def _estimate(values: NDArray[np.float64], sizes: NDArray[np.float64], of: int | None) -> Estimate:
    """The mean of [part, batch], with the errors of batches and, where the parts are a sample of
    `of`, of parts.
    """
    batch = sizes @ values / sizes.sum()
    square = float(batch.var(ddof=1) / len(batch)) if len(batch) > 1 else 0.0
    if of is not None:
        each = values.mean(axis=1)
        square += float(each.var(ddof=1) / len(each)) * (1 - sizes.sum() / of)
    return Estimate(float(batch.mean()), math.sqrt(square))


def _cosine(slopes: NDArray[np.float64], norms: NDArray[np.float64], length: float) -> float | None:
    """Mean of ⟨g_a, g⟩/(‖g_a‖‖g‖) over batches with a gradient."""
    known = norms > 0
    if not known.any() or not length:
        return None
    return float((slopes[known] / norms[known]).mean() / length)
