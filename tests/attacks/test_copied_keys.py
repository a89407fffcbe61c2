"""A key in two hands.

Two loops draw with one key: a copy of the noise or the batches of a run, or a forked process with
the number of its parent, as in another namespace of process numbers. Both publish a gradient, and
the attacker subtracts them: the noise is gone.

What holds a key must not be copied, and a forked process must draw with a key of its own.
"""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from torch import nn

from evenclip import DPSGD, prepare
from evenclip.mechanism.noise import Noise, NormalStream
from evenclip.mechanism.sampling import Poisson, Shuffled
from evenclip.mechanism.words import Keyed, Words
from evenclip.training import alone

KEY, CPU = bytes(32), torch.device("cpu")
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "old pickle": lambda value: pickle.dumps(value, protocol=0),
}
HOLDERS = {
    "Noise": lambda: Noise(KEY, {"gradient": 4}, CPU),
    "NormalStream": lambda: NormalStream(KEY, 4),
    "_Blocks": lambda: NormalStream(KEY, 2**16).of(0),
    "Poisson": lambda: Poisson(40, 0.1, 4.0, KEY),
    "Shuffled": lambda: Shuffled(40, 4, KEY),
    "Words": lambda: Words(KEY),
    "BatchStream": lambda: prepared().batches,
}


def prepared(seed=None):
    random = torch.Generator().manual_seed(0)
    data = torch.randn(40, 8, generator=random).double(), torch.arange(40) % 3
    settings = {"rule": DPSGD(sigma=2.0), "batch_size": 16, "steps": 5, "delta": 1e-5}
    return prepare(nn.Linear(8, 3).double(), data, **settings, seed=seed)


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("how", COPIES)
def test_what_holds_a_key_is_not_copied(name, how):
    with pytest.raises(TypeError) as caught:
        COPIES[how](HOLDERS[name]())
    assert str(caught.value) == (
        f"{name} holds a secret key, and a copy would draw the same values again; copy or pickle "
        "the run itself, which then gets a key of its own."
    )


def test_the_attack_wins_against_a_copy_of_the_noise(monkeypatch):
    monkeypatch.delattr(Keyed, "__reduce_ex__")
    noise = HOLDERS["Noise"]()
    copied = copy.copy(noise)
    assert torch.equal(copied.of(3)["gradient"][:], noise.of(3)["gradient"][:])


def of_a_child(run) -> tuple[str, str]:
    """Return the runs that a forked process and its own child draw with."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with run.listening():
                run.step()
                os.write(write, run.run_id.encode())
                if os.fork() == 0:
                    run.step()
                    os.write(write, run.run_id.encode())
                    os._exit(0)
                os.wait()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read) as file:
        text = file.read()
    return text[:32], text[32:]


@pytest.mark.parametrize("seed", [None, 3])
def test_a_forked_process_with_the_number_of_its_parent_has_another_key(seed, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    run = prepared(seed)
    before = run.run_id
    child, grandchild = of_a_child(run)
    with run.listening():
        run.step()
    assert run.run_id == before
    assert len(child) == len(grandchild) == 32
    assert len({before, child, grandchild}) == 3


def test_the_attack_wins_against_process_numbers(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(alone.Alone, "mark_fork", lambda self: None)
    run = prepared()
    assert of_a_child(run) == (run.run_id, run.run_id)
