"""Passes of a few samples through a model before training, which leave nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from evenclip.gradients.state import states_of

__all__ = [
    "first_sample",
    "first_three",
    "first_two",
    "generator_states",
    "repeated",
    "same_draws",
    "three_samples",
    "undisturbed",
    "varied",
]


@contextmanager
def undisturbed(model: nn.Module, loss: Any) -> Iterator[Callable[[], None]]:
    """Restore torch's generators, the model's buffers, and what model and loss keep on exit.

    The function it gives restores what they keep before: a copy of a model that keeps an output
    fails, for example.

    Raises:
        ModelError: a parameter or an attribute has changed that cannot be restored.
    """
    before = {name: b.clone() for name, b in model.named_buffers()}
    states = states_of(model, loss)

    def put_back() -> None:
        for state in states:
            state.put_back()

    try:
        with torch.random.fork_rng(devices=_gpus()):
            yield put_back
        for state in states:
            state.check()
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
    leaves, rows = [leaf.reshape(len(leaf), -1) for leaf in tree_leaves(value)], _finite(value)
    differences = [(leaf != leaf[rows[0]]).any(dim=1).cpu() for leaf in leaves]
    differ = torch.stack(differences).sum(dim=0)  # [sample]
    second = max(rows, key=differ.tolist().__getitem__)
    rows = [rows[0], second, *(i for i in rows if i not in (rows[0], second)), rows[0]][:3]
    return tree_map(lambda t: t[torch.tensor(rows, device=t.device)], value)


def first_sample(value: Any) -> Any:
    """Return a batch of the first sample; return other values unchanged."""
    return value[:1] if isinstance(value, Tensor) and value.ndim else value


def first_three(value: Any) -> Any:
    """Return the first three samples; return other values unchanged."""
    return value[:3] if isinstance(value, Tensor) and value.ndim else value


def first_two(value: Any) -> Any:
    """Return the first two samples."""
    return value[:2]


def varied(x: Any, y: Any, n: int) -> tuple[Any, Any]:
    """Return n samples that differ: those given, finite ones if there are any, then changed copies.

    Floating-point values of a copy are scaled and shifted. Of whole numbers, which may be tokens,
    every other copy has the smallest of the batch in all places, which is valid everywhere. Targets
    are drawn from those given.
    """
    rows = _finite((x, y))
    copies = torch.tensor([i // len(rows) for i in range(n)])
    chosen = torch.tensor([rows[i % len(rows)] for i in range(n)])
    random = torch.randint(len(rows), (n,), generator=torch.Generator().manual_seed(0))
    return (
        tree_map(partial(_varied, chosen, copies), x),
        tree_map(partial(_chosen, torch.tensor(rows)[random]), y),
    )


def repeated(x: Any, y: Any, n: int) -> tuple[Any, Any]:
    """Return n samples: those given, finite ones if there are any, again and again."""
    rows = _finite((x, y))
    chosen = torch.tensor([rows[i % len(rows)] for i in range(n)])
    return tree_map(partial(_chosen, chosen), x), tree_map(partial(_chosen, chosen), y)


def _chosen(rows: Tensor, value: Tensor) -> Tensor:
    """Return these samples."""
    return value[rows.to(value.device)]


def _varied(chosen: Tensor, copies: Tensor, value: Tensor) -> Tensor:
    """Return these samples of an input, changed where they are copies."""
    chosen, copies = chosen.to(value.device), copies.to(value.device)
    some = value[chosen]
    shape = (-1, *(1 for _ in value.shape[1:]))
    if value.is_floating_point():
        shift = torch.linspace(-2, 2, max(value[0].numel(), 1))[: value[0].numel()]
        factor = copies.reshape(shape).to(value)
        return some * (1 + factor) + shift.reshape(value.shape[1:]).to(value) * factor
    return torch.where((copies % 2 == 1).reshape(shape), value.amin(), some)


def _finite(value: Any) -> list[int]:
    """Return the samples that are finite in all tensors; all samples if there are none."""
    leaves = [leaf.reshape(len(leaf), -1) for leaf in tree_leaves(value)]
    finite = torch.stack([leaf.isfinite().all(dim=1).cpu() for leaf in leaves]).all(dim=0)
    return finite.nonzero().flatten().tolist() or list(range(len(finite)))
