"""The rules of this package in an Opacus training loop, with one changed line.

    engine = EvenPrivacyEngine()                       # instead of PrivacyEngine(), or
    optimizer = even(optimizer, rule, engine, loader)  # after make_private

Opacus (Yousefpour et al. 2021, "Opacus: User-friendly differential privacy library in PyTorch",
arXiv:2109.12298) forms the per-sample gradients, and this package does the rest of Algorithm 2 of
Esipova et al. 2023 (`evenclip.training.step`):

    batch       a Poisson sample with exact coins, for one release
    weights     γ_i of the rule at its public state Z, with |γ_i|·‖g_i‖ ≤ S
    count       Σ statistic_i over the logical batch, released with noise σ_count; it updates Z
    gradient    Σ γ_i g_i over the logical batch in float64, released with noise σS; Opacus divides
                it by B

A logical batch is one Poisson sample. `BatchMemoryManager` may split it into several physical
batches; it is still released once and clipped at one Z. Every release is in the ledger before its
noise is drawn, and `engine.get_epsilon` reads the ledger.

The modes "hooks", "functorch" and "ew" form every sample's gradient. The mode "ghost" is refused:
its norms and sums are float32 over the whole batch, and how far one record moves them cannot be
bounded. A sample with a non-finite gradient contributes nothing.
"""

try:
    from opacus.data_loader import CollateFnWithEmpty  # noqa: F401
except ImportError as missing:
    raise ImportError(
        "evenclip.opacus needs Opacus, which is not installed or too old; run `pip install "
        "'evenclip[opacus]'`."
    ) from missing

from evenclip.opacus.engine import EvenPrivacyEngine
from evenclip.opacus.leftovers import clear
from evenclip.opacus.optimizer import EvenOptimizer, even

__all__ = ["EvenOptimizer", "EvenPrivacyEngine", "clear", "even"]
