"""Passes of a few samples through a model before training, which leave nothing changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "change_first",
    "change_first_target",
    "first_two",
    "generator_states",
    "same",
    "same_draws",
    "three_samples",
    "undisturbed",
]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore torch's generators and the model's buffers on exit."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    try:
        with torch.random.fork_rng(devices=_gpus()):
            yield
    finally:
        for name, buffer in model.named_buffers():
            if not torch.equal(buffer, before[name]):
                buffer.data.copy_(before[name])


def same_draws() -> None:
    """Reset torch's generators, so that every pass draws the same random numbers.

    `torch.manual_seed` would also initialise GPUs that are not in use.
    """
    torch.default_generator.manual_seed(0)
    if _gpus():
        torch.cuda.manual_seed_all(0)


def generator_states() -> list[Tensor]:
    """Return the states of torch's generators."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in _gpus())]


def _gpus() -> Sequence[int]:
    """Return the indices of the GPUs if CUDA is in use."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]


def three_samples(value: Any) -> Any:
    """Return three samples, finite ones if there are any; repeat samples if there are fewer.

    The second sample differs from the first in as many tensors as possible, so that exchanging the
    two changes the batch.
    """
    leaves = [leaf.reshape(len(leaf), -1) for leaf in tree_leaves(value)]
    finite = torch.stack([leaf.isfinite().all(dim=1).cpu() for leaf in leaves]).all(dim=0)
    rows = finite.nonzero().flatten().tolist() or list(range(len(finite)))
    differences = [(leaf != leaf[rows[0]]).any(dim=1).cpu() for leaf in leaves]
    differ = torch.stack(differences).sum(dim=0)  # [sample]
    second = max(rows, key=differ.tolist().__getitem__)
    rows = [rows[0], second, *(i for i in rows if i not in (rows[0], second)), rows[0]][:3]
    return tree_map(lambda t: t[torch.tensor(rows, device=t.device)], value)


def first_two(value: Any) -> Any:
    """Return the first two samples."""
    return value[:2]


def change_first(value: Tensor) -> Tensor:
    """Return the samples with the first one changed.

    Floating-point values are scaled and shifted. Tokens are replaced by those of the second sample.
    If these are equal, every token becomes the smallest of the batch, which is valid at every
    position.
    """
    changed = value.clone()
    if value.is_floating_point():
        shift = torch.linspace(-2, 2, value[0].numel()).reshape(value[0].shape).to(value)
        changed[0] = 3 * value[0] + shift
    else:
        changed[0] = value.amin() if torch.equal(value[0], value[1]) else value[1]
    return changed


def change_first_target(value: Tensor) -> Tensor:
    """Return the targets with the first one replaced by the second, which is a valid value."""
    changed = value.clone()
    changed[0] = value[1]
    return changed


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether the tensors are equal up to rounding; NaN equals NaN."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = 1e3 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
