"""The rules of this package inside Opacus: an existing Opacus loop, one changed line.

    optimizer = even(optimizer, DPSGDGlobalAdapt(C0=1.0, sigma=1.0))             after Opacus's own make_private, or
    engine = EvenPrivacyEngine()                                                 instead of PrivacyEngine()

Opacus (Yousefpour et al. 2021, "Opacus: User-friendly differential privacy library in PyTorch",
arXiv:2109.12298) finds the gradients, draws the batches, owns the generator and keeps the accounts.
What changes is what happens to a batch, which is Algorithm 2 of Esipova et al. 2023 (see
`evenclip.training.step`):

    weights                  γ_i of the rule at its public state Z, held to |γ_i|·‖g_i‖ ≤ S
    count                    Σ statistic_i over the whole logical batch, released with noise σ_count; it moves Z, once
    gradient                 Σ γ_i g_i over the whole logical batch, released with noise σS, divided by B

A logical batch is what Poisson sampling drew. However many physical batches `BatchMemoryManager`
makes of it, it is one release, clipped at one Z. Both releases see the same batch, so the
accountant is told of ONE step with the joint multiplier (Σ m_j⁻²)^(-1/2) (see
`evenclip.mechanism.release`): `engine.get_epsilon(delta)` covers the count.

Modes: "hooks", "functorch" and "ew", which form every sample's gradient, and "ghost", which never
does: one backward pass for the norms, a second one on Σ γ_i ℓ_i (Li et al. 2022, "Large language
models can be strong differentially private learners", arXiv:2110.05679). A sample whose gradient is
not finite contributes nothing; in ghost mode, where it cannot be taken out of the second pass, it
stops the training instead.
"""

try:
    import opacus.optimizers.optimizer_fast_gradient_clipping  # noqa: F401
except ImportError as missing:
    raise ImportError(
        "evenclip.opacus is for Opacus, which is not installed or too old; run `pip install "
        "'evenclip[opacus]'`."
    ) from missing

from evenclip.opacus.engine import EvenPrivacyEngine
from evenclip.opacus.optimizer import EvenOptimizer, even

__all__ = ["EvenOptimizer", "EvenPrivacyEngine", "even"]
