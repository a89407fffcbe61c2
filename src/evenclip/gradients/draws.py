"""Where the random numbers of a pass come from.

Every pass draws fresh numbers from torch's generator, whose state is set for it. Numbers from
another generator, or after the pass itself has set a seed, are a function of the place of a sample
in its batch: a record more would give other masks to all samples behind it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evenclip.gradients.trial import generator_states

__all__ = ["foreign_draws"]

_SEEDS = 0, 1


def foreign_draws(compute: Callable[[], Any]) -> str | None:
    """Return which random numbers `compute` draws that are not fresh ones of torch's generator.

    Return None if it draws fresh ones, or none. The generators are left in another state.

    >>> foreign_draws(lambda: torch.rand(2)), foreign_draws(lambda: torch.ones(2))
    (None, None)
    """
    drawn = []
    others = _other_states()
    for seed in _SEEDS:
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(seed)
        seen = _Draws()
        with seen:
            compute()
        drawn.append(seen)
    if any(seen.has_own for seen in drawn):
        return "from a generator of its own"
    pairs = zip(*(seen.states for seen in drawn), strict=False)
    if any(one == other for one, other in pairs):
        return "after setting the seed of torch's generator"
    if _other_states() != others:
        return "from the generator of Python or of numpy"
    return None


def _other_states() -> str:
    """Return the states of the generators of Python and numpy."""
    return repr((random.getstate(), np.random.get_state()))  # noqa: NPY002  # it is not used here


class _Draws(TorchDispatchMode):
    """The state of torch's generators before every random operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class has no types
        self.states: list[list[bytes]] = []
        self.has_own = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Import no compiler for `__torch_dispatch__`; that is slow."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = (*args, *(kwargs or {}).values())
            owned = [value for value in given if isinstance(value, torch.Generator)]
            self.has_own |= any(value is not torch.default_generator for value in owned)
            self.states.append([state.numpy().tobytes() for state in generator_states()])
        return func(*args, **(kwargs or {}))
