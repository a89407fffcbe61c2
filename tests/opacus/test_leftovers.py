"""Nothing of the records stays in a module after a step, where `torch.save` would write it out.

The module is saved as a whole, loaded again, and every tensor in it is looked at. Opacus's own
optimizer, which leaves the sum without noise, shows that such a tensor would be seen.
"""

from __future__ import annotations

import io

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from evenclip import DPSGD
from evenclip.opacus import EvenPrivacyEngine, clear

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:Full backward hook is firing when gradients are computed:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:opacus"),
]


def made(mode="hooks", engine=None, head_only=False, **more):
    """Return a network, and what `make_private` made of it."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    rows = TensorDataset(torch.randn(40, 4), torch.arange(40) % 3)
    more = more or {"rule": DPSGD(sigma=1.0)}
    private = (engine or EvenPrivacyEngine()).make_private(
        module=net,
        optimizer=torch.optim.SGD((net[2] if head_only else net).parameters(), lr=0.1),
        data_loader=DataLoader(rows, batch_size=20),
        grad_sample_mode=mode,
        **more,
    )
    return net, *private


def step(model, optimizer, loader):
    """Take the first step of a pass over the loader."""
    x, y = next(iter(loader))
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def held(module):
    """Return the names of the tensors that a saved module holds beside its parameters."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return held_in_memory(torch.load(file, weights_only=False))


def held_in_memory(module):
    """Return the names of the tensors that a module holds beside its parameters."""
    places = [*module.named_modules(), *module.named_parameters()]
    known = {id(p) for p in module.parameters()}
    return [
        f"{name}.{attribute}"
        for name, place in places
        for attribute, value in vars(place).items()
        for tensor in tensors(value)
        if id(tensor) not in known
    ]


def tensors(value):
    """Yield the tensors in a value and in lists, tuples and dicts of it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_a_module_holds_nothing_of_the_records(mode):
    net, *private = made(mode)
    step(*private)
    assert held_in_memory(net) == []
    if mode != "functorch":  # whose layers hold a function that cannot be pickled
        assert held(net) == []


def test_opacus_alone_leaves_the_sum_without_noise():
    net, *private = made(engine=PrivacyEngine(), noise_multiplier=1.0, max_grad_norm=1.0)
    step(*private)
    assert {name.rpartition(".")[2] for name in held(net)} >= {"summed_grad"}


def test_a_part_of_a_batch_leaves_nothing_behind_and_no_gradient_without_noise():
    net, model, optimizer, loader = made()
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    ) as pieces:
        step(model, optimizer, pieces)
    assert optimizer._is_last_step_skipped
    assert held(net) == []
    assert all(p.grad is None for p in net.parameters())


def test_a_parameter_that_is_frozen_before_the_step_leaves_nothing_behind():
    net, model, optimizer, loader = made()
    x, y = next(iter(loader))
    cross_entropy(model(x), y).backward()
    net[0].weight.requires_grad_(False)
    assert held(net)
    optimizer.step()
    assert held(net) == []


@pytest.mark.parametrize("frozen", [[0], [0, 2]], ids=["a layer", "all"])
def test_a_parameter_that_is_frozen_before_the_step_does_not_move(frozen):
    """Its `p.grad` is that of the backward pass, without noise."""
    net, model, optimizer, loader = made()
    x, y = next(iter(loader))
    cross_entropy(model(x), y).backward()
    parameters = [p for layer in frozen for p in net[layer].parameters()]
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.requires_grad_(False)
    optimizer.step()
    assert all(map(torch.equal, before, parameters))
    assert all(p.grad is None for p in parameters)


def test_a_part_that_the_optimizer_does_not_train_holds_nothing_either():
    net, model, optimizer, loader = made(head_only=True)
    for x, y in loader:
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        assert net[0].weight.grad is not None
        optimizer.step()
        assert held(net) == []
        assert all(p.grad is None for p in net[0].parameters())


def test_a_pass_that_failed_leaves_no_size_of_its_batch():
    net, model, _, _ = made()
    model(torch.randn(11, 4))
    net[0].max_batch_len = 11  # as Opacus sets it before the gradients of the layer
    clear(model)
    assert not hasattr(net[0], "max_batch_len")


def test_a_step_that_fails_leaves_nothing_behind(monkeypatch):
    net, model, optimizer, loader = made()
    monkeypatch.setattr(optimizer._batches, "spend", lambda records: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, optimizer, loader)
    assert held(net) == []
    assert all(p.grad is None for p in net.parameters())


def test_a_refused_backward_pass_leaves_nothing_behind_after_the_step():
    net, model, optimizer, loader = made()
    x, y = next(iter(loader))
    cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="not compatible with grad accumulation"):
        cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match=r"several backward passes|different numbers"):
        optimizer.step()
    assert [name for name in held(net) if "activations" not in name] == []
    clear(model)  # Opacus did not come to the inputs of the first layer
    assert held(net) == []


def test_a_forward_pass_alone_keeps_its_records_until_they_are_cleared():
    net, model, optimizer, loader = made()
    step(model, optimizer, loader)
    model(torch.randn(5, 4))
    assert "0.activations" in held(net)
    clear(model)
    assert held(net) == []
    step(model, optimizer, loader)  # the loop goes on
    assert len(optimizer.ledger.entries) > 0


def test_a_backward_pass_without_a_step_is_cleared_too():
    net, model, _, loader = made()
    x, y = next(iter(loader))
    cross_entropy(model(x), y).backward()
    assert held(net)
    clear(model)
    assert held(net) == []
    assert all(p.grad is None for p in net.parameters())
