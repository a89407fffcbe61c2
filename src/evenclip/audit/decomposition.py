"""The cost of one step to each group, split into clipping magnitude, clipping direction and noise.

To second order in the step, the expected loss of group a after step t is (Tran et al. 2021;
Propositions 1 and 2 of Esipova et al. 2023), with g_a and H^a the gradient and the Hessian of the
group's mean loss over the training set,

    E L(θ_{t+1}; D_a) ≈ L(θ_t; D_a) + non-private + R_clip + R_noise,        R_clip = R_mag + R_dir

    non-private   −η⟨g_a, g_D⟩ + η²/2 E[g_Bᵀ H^a g_B]
    R_mag         η⟨g_a, E[(1−ρ) g_B]⟩ + η²/2 E[(ρ²−1) g_Bᵀ H^a g_B]
    R_dir         η⟨g_a, E[ρ g_B − ḡ_B]⟩ + η²/2 E[ḡ_Bᵀ H^a ḡ_B − ρ² g_Bᵀ H^a g_B]
    R_noise       η²/2 Tr(H^a) v/B²

g_B = Σ g_i / B and ḡ_B = Σ γ_i g_i / B are the directions of plain SGD and of the rule, and ρ =
‖ḡ_B‖/‖g_B‖ (1 if either is 0). R_mag is the effect of going from g_B to ρ g_B, and R_dir that of
going from ρ g_B to ḡ_B. The starred pair changes the direction first and then the length: from g_B
to ḡ_B/ρ to ḡ_B. v is the variance of each number of the released sum: (σS)² for ideal noise.
For the released noise it is slightly larger: `evenclip.mechanism.grid.Grid.variance`.

Differs from the paper: R_noise has the 1/B² of the algorithm, which the paper leaves out (its
figures are 65,000 times too high for a batch of 256); S is the sensitivity that was actually used.
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

from evenclip import check
from evenclip.arguments import check_kinds
from evenclip.audit.curvature import Curvature, Estimate, signs
from evenclip.data.dataset import Dataset, as_dataset
from evenclip.gradients.losses import Loss
from evenclip.mechanism.grid import Grid
from evenclip.training.loss import targets
from evenclip.training.passes import Chunk
from evenclip.training.step import Step, WeightedSums, clip

__all__ = ["NAMES", "BatchGradients", "GroupTerms", "RiskTerms", "terms"]

# The terms of a step's effect on a group's loss.
NAMES = ("non_private", "clip", "mag", "dir", "noise", "mag_star", "dir_star")


@dataclass(frozen=True)
class BatchGradients:
    """Batch gradients of one step, for its own batch and optionally for other drawn batches.

    Attributes:
        plain: g_B.  # [batch, parameter], float64
        clipped: ḡ_B.  # [batch, parameter], float64
    """

    plain: Tensor
    clipped: Tensor

    @property
    def norms(self) -> NDArray[np.float64]:
        """‖g_B‖.  # [batch]"""
        norms: NDArray[np.float64] = self.plain.norm(dim=1).cpu().numpy()
        return norms

    @property
    def clipped_norms(self) -> NDArray[np.float64]:
        """‖ḡ_B‖.  # [batch]"""
        norms: NDArray[np.float64] = self.clipped.norm(dim=1).cpu().numpy()
        return norms

    @property
    def rho(self) -> NDArray[np.float64]:
        """ρ = ‖ḡ_B‖/‖g_B‖, 1 if either is 0.  # [batch]"""
        long, short = self.norms, self.clipped_norms
        known = (long > 0) & (short > 0)
        return np.where(known, short, 1.0) / np.where(known, long, 1.0)


@dataclass(frozen=True)
class GroupTerms:
    """The effect of a step on one group's loss.

    Estimates have a standard error over batches and, if only a sample of the group is measured,
    over samples. With one batch, the errors of the clipping terms are unknown (None).

    Attributes:
        group: number of the group.
        n: number of measured samples.
        of: number of samples in the group.
        loss_gradient_norm: ‖g_a‖.
        slopes: ⟨g_a, g_B⟩.  # [batch]
        clipped_slopes: ⟨g_a, ḡ_B⟩.  # [batch]
        trace: Tr H^a.
        terms: name from `NAMES` -> estimate.
        cosine: mean of cos ∠(g_a, g_B); None if one of them is 0.
        clipped_cosine: mean of cos ∠(g_a, ḡ_B).
        extremes: (λ_min, λ_max) of H^a, if requested.
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
        """Return the terms as a JSON object."""
        record = asdict(self)
        record["terms"] = {name: list(value) for name, value in self.terms.items()}
        record["trace"] = None if self.trace is None else list(self.trace)
        return record


def terms(
    slopes: NDArray[np.float64], forms: NDArray[np.float64], clipped_slopes: NDArray[np.float64],
    clipped_forms: NDArray[np.float64], rho: NDArray[np.float64], lr: float,
) -> dict[str, NDArray[np.float64]]:  # fmt: skip
    """Return the clipping terms and the non-private term of each batch.

    R_mag + R_dir = R_clip = R_mag* + R_dir*.

    Args:
        slopes: ⟨g_a, g_B⟩.  # [..., batch], like all arrays here
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
    """An observer (`fit(observers=[...])`) that measures a step's effect on each group.

    It returns, and `Result.records` collects, {"risk": one `GroupTerms.to_json()` for each group,
    "norms": ‖g_B‖ and ‖ḡ_B‖ of each batch, "sensitivity", "lr"}. These values are private, like
    everything an observer sees. The observer does not change the run, and has its own random
    stream.
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
        """Measure steps 0, every, 2 · every, …

        Args:
            data: the training data, (x, y, group) or a `Dataset`.
            lr: η.
            loss: the training loss.
            every: steps between two measurements.
            groups: numbers of the groups to measure; by default all.
            batches: number of batches for expectations. The first is the step's own batch, the
                others are drawn in the same way.
            probes: number of random sign vectors for the trace; 0 leaves R_noise out.
            sample: maximum number of samples per group, drawn once; by default all.
            eigenvalues: whether to compute λ_min and λ_max, which takes a few dozen products.
            seed: seed for probes, samples and further batches.
        """
        check_kinds(RiskTerms.__init__, locals())
        check.positive(lr=lr)
        check.whole(probes=probes, seed=seed)
        check.natural(every=every, batches=batches)
        data = as_dataset(data)
        if not isinstance(data, Dataset) or data.group is None:
            raise ValueError(
                "Risk is measured by group: give (x, y, group) in memory, as a tuple or a Dataset."
            )
        if sample is not None:
            check.natural(sample=sample)
        if sample is not None and sample < 32:
            raise ValueError(
                f"sample is {sample}; a standard error needs at least 32 samples per group."
            )
        seed = int(seed)
        self._data, self._loss, self._lr, self._every = data, loss, float(lr), int(every)
        self._batches, self._probes = int(batches), int(probes)
        self._eigenvalues, self._seed = eigenvalues, seed
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
        chosen = torch.from_numpy(self._random.permutation(len(rows))[:sample])
        return rows[chosen.to(rows.device)], len(rows)

    def __call__(self, step: Step) -> dict[str, Any] | None:
        """Return the terms of this step, or None if it is not one of the measured steps."""
        if step.t % self._every:
            return None
        if self._data.y.device != step.clipped_sum.device:
            self._data = self._data.to(step.clipped_sum.device)
        batches = self._gradients(step)
        probes = signs(self._probes, batches.plain.shape[1], self._seed)
        S = float(step.public.sensitivity)
        groups = [self._group(k, step, batches, probes, _variance(step)) for k in self._rows]
        return {
            "risk": [group.to_json() for group in groups],
            "norms": [batches.norms.tolist(), batches.clipped_norms.tolist()],
            "sensitivity": S if math.isfinite(S) else None,
            "lr": self._lr,
        }

    def _group(
        self, k: int, step: Step, batches: BatchGradients, probes: Tensor, variance: float
    ) -> GroupTerms:
        rows, of = self._rows[k]
        partial = len(rows) < of
        curvature, gradients = self._curvature(step, rows, partial)
        # A sample without a finite gradient takes no part in training.
        if not bool(torch.isfinite(gradients).all()):
            finite = clip(
                step.tape, step.mechanism, self._chunk(rows, step), step.state, step.public.now
            ).seen.finite
            rows = rows if finite is None else rows[finite.to(rows.device)]
            curvature, gradients = self._curvature(step, rows, partial)
        sizes = curvature.sizes.numpy()
        m = len(batches.plain)
        both = torch.cat([batches.plain, batches.clipped])
        slopes = (gradients @ both.T).cpu().numpy()  # [part, 2 · batch]
        forms = curvature.forms(both).cpu().numpy()
        by_part = terms(
            slopes[:, :m], forms[:, :m], slopes[:, m:], forms[:, m:], batches.rho, self._lr
        )
        estimates = {
            name: _estimate(value, sizes, of if partial else None)
            for name, value in by_part.items()
        }
        trace = curvature.trace(probes, of if partial else None) if len(probes) else None
        if trace is not None:
            scale = self._lr**2 / 2 * variance
            error = None if trace.se is None else scale * trace.se
            estimates["noise"] = Estimate(scale * trace.value, error)
        mean = sizes @ slopes / sizes.sum()
        gradient = torch.from_numpy(sizes).to(gradients) @ gradients / len(rows)
        length = float(gradient.norm())
        return GroupTerms(
            k,
            len(rows),
            of,
            length,
            mean[:m].tolist(),
            mean[m:].tolist(),
            trace,
            estimates,
            _cosine(mean[:m], batches.norms, length),
            _cosine(mean[m:], batches.clipped_norms, length),
            curvature.extremes() if self._eigenvalues else None,
        )

    def _curvature(self, step: Step, rows: Tensor, partial: bool) -> tuple[Curvature, Tensor]:
        """Return the curvature of the samples' loss, and its gradients [part, parameter]."""
        samples = self._data.take(rows.to(self._data.y.device))
        parts = 16 if partial else 1
        curvature = Curvature(step.model, self._loss, samples.x, samples.y, parts=parts)
        return curvature, curvature.gradients()

    def _gradients(self, step: Step) -> BatchGradients:
        """Return g_B and ḡ_B of the step's batch and of other batches drawn in the same way.

        All are clipped with the bounds that were public at this step.
        """
        ones = step.weighted_sum(torch.ones_like(step.weights))
        plain, clipped = [ones.double() / step.B], [step.clipped_sum.double() / step.B]
        for _ in range(self._batches - 1):
            drawn = self._random.random(len(self._data)) < step.B / len(self._data)
            batch = self._chunk(torch.from_numpy(np.flatnonzero(drawn)), step)
            plain.append(
                WeightedSums(step.tape, batch)(torch.ones(int(drawn.sum()))).double() / step.B
            )
            clipped.append(
                clip(step.tape, step.mechanism, batch, step.state, step.public.now).total.double()
                / step.B
            )
        return BatchGradients(torch.stack(plain), torch.stack(clipped))

    def _chunk(self, rows: Tensor, step: Step) -> list[Chunk]:
        """Return these samples as a batch of the step; the batch is empty without samples."""
        x, y, group = self._data.take(rows.to(self._data.y.device))
        assert group is not None
        y = targets(step.mechanism.rule, y, group, step.state)
        return [Chunk(x, y, group)] if len(rows) else []


def _variance(step: Step) -> float:
    """Return the variance of each number of the noisy gradient, given the batch."""
    sigma = step.mechanism.noise["gradient"]
    if not sigma:  # S may be infinite
        return 0.0
    S, size = float(step.public.sensitivity), step.clipped_sum.numel()
    return float(Grid.of(S, sigma, size, step.mechanism.rounding).variance) / step.B**2


def _estimate(values: NDArray[np.float64], sizes: NDArray[np.float64], of: int | None) -> Estimate:
    """Return the mean of [part, batch] with its standard error.

    The error covers batches and, if the parts are a sample of `of` samples, also parts. With one
    batch it is unknown.
    """
    batch = sizes @ values / sizes.sum()
    if len(batch) == 1:
        return Estimate(float(batch[0]), None)
    square = float(batch.var(ddof=1) / len(batch))
    if of is not None:
        each = values.mean(axis=1)
        square += float(each.var(ddof=1) / len(each)) * (1 - sizes.sum() / of)
    return Estimate(float(batch.mean()), math.sqrt(square))


def _cosine(slopes: NDArray[np.float64], norms: NDArray[np.float64], length: float) -> float | None:
    """Return the mean of ⟨g_a, g⟩/(‖g_a‖‖g‖) over batches with a nonzero gradient."""
    known = norms > 0
    if not known.any() or not length:
        return None
    return float((slopes[known] / norms[known]).mean() / length)
