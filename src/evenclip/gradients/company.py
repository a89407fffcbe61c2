"""Whether a sample's numbers depend on the other samples of its batch, down to the last bit.

A matrix product may round a row differently when the number of rows, or the place of the row,
changes; another record would then move a ReLU or a count of this one. No bound through a network is
known for that. So samples pass in blocks of one fixed size (`Tape.fix_rows`), and before training
one block is passed in two orders and in other company. Losses, norms and outputs of every sample
must have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from evenclip.gradients.tape import Tape
from evenclip.gradients.trial import undisturbed

__all__ = ["same_in_any_company"]

_SEED = 20_111


def same_in_any_company(tape: Tape, x: Any, y: Any) -> bool:
    """Return whether every sample's loss, norm and output keep their bits in any order and company.

    Args:
        tape: a tape with blocks of a fixed size, not recording.
        x: inputs of one block.
        y: their targets.
    """
    assert tape.rows is not None
    assert tape.pads
    order = torch.randperm(tape.rows, generator=torch.Generator().manual_seed(_SEED))
    half = torch.arange(tape.rows) % ((tape.rows + 1) // 2)  # the second half is not there
    with undisturbed(tape.model, tape.loss), _without_dropout(tape.model), tape.recording():
        expected = _numbers(tape, x, y)
        for rows in (order, half):
            numbers = _numbers(tape, *tree_map(partial(_rows, rows), (x, y)))
            for ours, theirs in zip(expected, numbers, strict=True):
                if not torch.equal(ours[rows], theirs):
                    return False
    return True


def _numbers(tape: Tape, x: Any, y: Any) -> tuple[Tensor, ...]:
    """Return losses, norms and outputs of each sample; NaN becomes 0, which equals itself."""
    gradients = tape(x, y)
    numbers = [gradients.losses, gradients.norms(quick=True), gradients.norms()]
    with torch.no_grad():
        outputs = [leaf for leaf in tree_leaves(tape.outputs(x)) if isinstance(leaf, Tensor)]
    numbers += [leaf for leaf in outputs if leaf.ndim and len(leaf) == len(numbers[0])]
    return tuple(each.detach().nan_to_num(nan=0.0) for each in numbers)


def _rows(rows: Tensor, value: Any) -> Any:
    """Return these samples of a tensor; return other values unchanged."""
    return value[rows.to(value.device)] if isinstance(value, Tensor) else value


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch random layers off; their masks belong to places in a block, not to samples."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
