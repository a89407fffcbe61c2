"""The rules of this package in an Opacus training loop, with one changed line.

    optimizer = even(optimizer, DPSGDGlobalAdapt(C0=1.0, sigma=1.0))   # after make_private, or
    engine = EvenPrivacyEngine()                                       # instead of PrivacyEngine()

Opacus (Yousefpour et al. 2021, "Opacus: User-friendly differential privacy library in PyTorch",
arXiv:2109.12298) computes the gradients, draws the batches and the noise, and accounts for privacy.
This package processes each batch by Algorithm 2 of Esipova et al. 2023 (`evenclip.training.step`):

    weights     γ_i of the rule at its public state Z, with |γ_i|·‖g_i‖ ≤ S
    count       Σ statistic_i over the logical batch, released with noise σ_count; it updates Z
    gradient    Σ γ_i g_i over the logical batch, released with noise σS and divided by B

A logical batch is one Poisson sample. `BatchMemoryManager` may split it into several physical
batches; it is still released once and clipped at one Z. Both releases use the same batch, so the
accountant records ONE step with the joint multiplier (Σ m_j⁻²)^(-1/2) of
`evenclip.mechanism.release`, and `engine.get_epsilon(delta)` includes the count.

The modes "hooks", "functorch" and "ew" form every sample's gradient. The mode "ghost" does not: it
makes one backward pass for the norms and a second one on Σ γ_i ℓ_i (Li et al. 2022, "Large language
models can be strong differentially private learners", arXiv:2110.05679). A sample with a non-finite
gradient contributes nothing. In ghost mode it raises an error, because the second pass cannot leave
it out.
"""

try:
    import opacus.optimizers.optimizer_fast_gradient_clipping  # noqa: F401
except ImportError as missing:
    raise ImportError(
        "evenclip.opacus needs Opacus, which is not installed or too old; run `pip install "
        "'evenclip[opacus]'`."
    ) from missing

from evenclip.opacus.engine import EvenPrivacyEngine
from evenclip.opacus.optimizer import EvenOptimizer, even

__all__ = ["EvenOptimizer", "EvenPrivacyEngine", "even"]
