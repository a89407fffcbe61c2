"""torch's own generators, which dropout uses, from a secret key.

A seed would not do: on a CPU, torch keeps 32 bits of it, and an attacker who finds them knows every
mask of a run. So the state of the Mersenne Twister, 624 words of 32 bits, is filled with words of
AES-256. The masks that it makes are not those of a cipher, because an attacker who sees enough of
its output can compute its state. On a GPU the generator has a key of 64 bits, all of which are
filled.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from evenclip.mechanism.words import Words

__all__ = ["fill_generators"]

_WORDS = 624  # of the Mersenne Twister, each stored in 64 bits
_FIRST = 24  # bytes of torch's state before them: a seed, two flags, a position
_SIZE = 5056  # bytes of torch's state


def fill_generators(key: bytes, *, cuda: bool) -> None:
    """Set torch's global generators to a state that is a function of the key.

    Args:
        key: secret key for these draws.
        cuda: whether to set the generator of the current GPU too.
    """
    words = Words(key).span(0, _WORDS // 2 + 1)
    torch.set_rng_state(_state(words[:-1], int(words[-1])))
    if cuda:
        torch.cuda.manual_seed(int(words[-1]))


def _state(words: NDArray[np.uint64], seed: int = 0) -> torch.Tensor:
    """Return the state of a CPU generator with these 312 words, which has drawn nothing yet.

    The seed is what `initial_seed()` returns, so it shows whether another seed was set since.
    """
    state = _unused().copy()
    state[:8].view(np.uint64)[:] = np.uint64(seed)
    state[_FIRST : _FIRST + 8 * _WORDS].view(np.uint64)[:] = words.view(np.uint32)
    return torch.from_numpy(state)


@lru_cache(maxsize=1)
def _unused() -> NDArray[np.uint8]:
    """Return the state of a generator that has drawn nothing.

    Raises:
        RuntimeError: this version of torch has another kind of state.
    """
    state: NDArray[np.uint8] = torch.Generator().manual_seed(0).get_state().numpy()
    if len(state) != _SIZE:
        raise RuntimeError(
            f"The generator of torch {torch.__version__} has a state of {len(state)} bytes and not "
            f"{_SIZE}, so it cannot be filled; use torch 2.13."
        )
    return state
