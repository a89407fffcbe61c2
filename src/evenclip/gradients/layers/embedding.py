"""Embeddings: the gradient is nonzero only in the rows of a sample's tokens.

The δ of a token that occurs several times in one sample are added before squaring. With the rows of
sample i collected by token,

    ‖g_i‖² = Σ_tokens ‖Σ_{t: token_t = token} δ_it‖²

`padding_idx` takes no gradient. `plan` refuses `max_norm`, which rewrites the weights during the
forward pass, and `scale_grad_by_freq`, which lets the samples of a batch influence each other.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from evenclip.gradients.layers.layer import LayerGradient, kept, margin

__all__ = ["FORMULAS", "gradient"]


def gradient(
    module: nn.Embedding, a: Tensor, delta: Tensor, names: Collection[str]
) -> LayerGradient:
    """Return the gradients of an Embedding.

    a: tokens [sample, ...], delta: [sample, ..., width]
    """
    del names  # the weight is the only parameter
    tokens = a.reshape(a.shape[0], -1)
    delta = delta.reshape(*tokens.shape, -1)
    if module.padding_idx is not None:
        delta = torch.where((tokens == module.padding_idx).unsqueeze(-1), 0.0, delta)
    return EmbeddingGradient(tokens, delta, module.num_embeddings)


class EmbeddingGradient(LayerGradient):
    """Rows of δ collected by token."""

    cancels = True

    def __init__(self, tokens: Tensor, delta: Tensor, rows: int) -> None:
        self._tokens, self._delta = tokens, delta  # [sample, position], [sample, position, width]
        self._rows = rows

    def square_norms(self) -> Tensor:
        n, T, width = self._delta.shape
        owner = torch.arange(n, device=self._tokens.device).repeat_interleave(T)
        place = owner * self._rows + self._tokens.flatten()
        pairs, where = torch.unique(place, return_inverse=True)  # (sample, token) pairs
        delta = self._delta.reshape(-1, width).double()
        rows = delta.new_zeros(len(pairs), width).index_add_(0, where, delta)
        sizes = delta.new_zeros(len(pairs)).index_add_(0, where, delta.norm(dim=1))  # Σ_t ‖δ_t‖
        # A token that occurs once needs no sum.
        times = torch.bincount(where, minlength=len(pairs))
        slack = torch.where(times > 1, margin(T), 0.0)
        norms = rows.norm(dim=1) + slack * sizes
        return delta.new_zeros(n).index_add_(0, pairs // self._rows, norms.square())

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        weighted = self._delta * weights.view(-1, 1, 1)
        total = weighted.new_zeros(self._rows, weighted.shape[-1])
        return {
            "weight": total.index_add_(
                0, self._tokens.flatten(), weighted.reshape(-1, weighted.shape[-1])
            )
        }

    def masked(self, keep: Tensor) -> EmbeddingGradient:
        return EmbeddingGradient(self._tokens, kept(self._delta, keep), self._rows)

    def per_sample(self) -> dict[str, Tensor]:
        n, T, width = self._delta.shape
        each = self._delta.new_zeros(n, self._rows, width)
        return {
            "weight": each.scatter_add_(
                1, self._tokens.unsqueeze(-1).expand(n, T, width), self._delta
            )
        }


FORMULAS = {nn.Embedding: gradient}
