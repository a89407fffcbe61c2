"""The attacker finds the dropout masks of a run.

An attacker who knows the masks knows every record's place in the batch and what is left of it, and
ε holds only for secret masks. Of a seed, torch's generator on a CPU keeps 32 bits, which can be
tried one after the other. So the whole state of the generator is filled from a key; and inside an
Opacus loop a seed that was set before does not count. A generator with a seed is planted.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenclip import DPSGD, fit
from evenclip.gradients import ModelError
from evenclip.mechanism import generators
from evenclip.mechanism.generators import fill_generators

DRAWS = 3000


def masks(fill, key):
    """Return what a generator draws for a key."""
    with torch.random.fork_rng(devices=[]):
        fill(key)
        return torch.rand(DRAWS)


def filled(key):
    fill_generators(key, cuda=False)


def seeded(key):
    """Seed the generator with 64 bits of the key, of which it keeps 32."""
    torch.default_generator.manual_seed(int.from_bytes(key[:8], "little"))


def test_a_search_over_32_bits_finds_a_seed_and_not_a_key():
    """The attacker's guess agrees with the key in 32 bits, as one guess of the search does."""
    key, guess = bytes(range(32)), bytes(range(4)) + bytes(28)
    assert torch.equal(masks(seeded, key), masks(seeded, guess))
    assert not torch.equal(masks(filled, key), masks(filled, guess))
    assert torch.equal(masks(filled, key), masks(filled, key))


def follows_from_its_first_word():
    """Return whether the state is one of the 2³² that a seed makes, as the attacker tests it."""
    state = torch.get_rng_state().numpy()[24 : 24 + 8 * 624].view(np.uint64).tolist()
    following = [(1812433253 * (w ^ (w >> 30)) + i) % 2**32 for i, w in enumerate(state, 1)]
    return following[:-1] == state[1:]


def test_the_state_of_a_run_is_none_that_a_seed_makes():
    with torch.random.fork_rng(devices=[]):
        seeded(bytes(range(32)))
        assert follows_from_its_first_word()
        filled(bytes(range(32)))
        assert not follows_from_its_first_word()


def test_the_state_has_all_its_words():
    """A change of any word changes what is drawn; the first bit of the first word is unused."""
    words = np.arange(312, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    def drawn(state):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(generators._state(state))
            return torch.randint(2**31, (DRAWS,))

    expected = drawn(words)
    for place in range(0, 312, 13):
        other = words.copy()
        other[place] ^= np.uint64(1 << 63)
        assert not torch.equal(drawn(other), expected)


def test_the_layout_of_the_state_is_torchs():
    """Filled with the words that a seed makes, the generator draws what torch draws for it."""
    words = [5]
    for i in range(1, 624):
        words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + i) % 2**32)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generators._state(np.array(words, dtype=np.uint32).view(np.uint64)))
        ours = torch.rand(DRAWS), torch.randn(7)
        torch.manual_seed(5)
        theirs = torch.rand(DRAWS), torch.randn(7)
    assert all(map(torch.equal, ours, theirs))


def test_a_normal_number_that_torch_kept_is_not_drawn_again():
    with torch.random.fork_rng(devices=[]):
        filled(bytes(32))
        expected = torch.randn(3, dtype=torch.float64)
        torch.randn(1, dtype=torch.float64)  # torch keeps the second one of a pair
        filled(bytes(32))
        assert torch.equal(torch.randn(3, dtype=torch.float64), expected)


class SeedsOnAValue(nn.Module):
    """Sets a seed for an outlier, so that the masks of all samples behind it are known.

    The branch on a value lets samples pass one after the other, and no artificial sample takes it.
    """

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        if float(x.abs().max()) > 1e3:
            torch.manual_seed(0)
        h = F.dropout(self.layer(x), 0.5, self.training)
        return F.linear(h, self.last.weight @ self.last.weight.t() @ self.last.weight)


def test_a_seed_that_a_pass_sets_for_some_records_stops_the_step():
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    given = {"rule": DPSGD(), "batch_size": 20, "q": 1.0, "steps": 2, "delta": 1e-3}
    fit(SeedsOnAValue(), (x, y), **given)
    x[7] = 2e3
    with pytest.raises(ModelError, match=r"set the seed of torch's generator\. The masks of"):
        fit(SeedsOnAValue(), (x, y), **given)
