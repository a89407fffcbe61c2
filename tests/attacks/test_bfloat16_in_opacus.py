"""An Opacus loop in bfloat16.

Opacus divides the loss by the number n of records in a batch, and multiplies every sample's
gradient by n again. In bfloat16, n(1/n) is off by up to 2⁻⁸, so a record that comes or goes changes
the gradients of all others. Where they are below the bound, nothing clips the change. The attacker
has two batches that differ in one record, and compares the sums before the noise.

Such a loop must be refused: a model in bfloat16, and a float32 model in a pass under autocast.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from evenclip.opacus import EvenPrivacyEngine, checks, clipping, optimizer

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:Full backward hook is firing when gradients are computed:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:opacus"),
]

D, N = 20, 1100
SIZES = range(960, 1030)


def private(dtype=torch.float32, mode="hooks"):
    """Return a private model whose gradients are equal, and a little below C0 = 1."""
    model = nn.Linear(D, 1)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(2.0)
    model = model.to(dtype)
    data = torch.ones(N, D, dtype=dtype), torch.ones(N, 1, dtype=dtype)
    made = EvenPrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*data), batch_size=1000),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="dpsgd",
        grad_sample_mode=mode,
    )
    return *made[:2], data


def moved(run, autocast=False):
    """Return by how many S one record moves the sum, at most."""
    model, optimizer, (x, y) = run
    sums = []
    for n in SIZES:
        optimizer.zero_grad()
        optimizer._clipper.drop()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x[:n])
        loss = binary_cross_entropy_with_logits(output, y[:n].to(output.dtype))
        loss.backward()
        optimizer.clip_and_accumulate()
        sums.append(optimizer._clipper._total.clone())
    return max(float((a - b).norm()) for a, b in itertools.pairwise(sums))


def test_in_float32_one_record_moves_the_sum_by_S():
    run = private()
    assert moved(run) <= 1 + run[1]._clipper.mechanism.rounding


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_a_model_in_bfloat16_is_refused(mode):
    with pytest.raises(ValueError, match="The model has parameters or gradients in bfloat16"):
        private(torch.bfloat16, mode)


def test_a_model_that_becomes_bfloat16_is_refused():
    run = private()
    run[0].bfloat16()
    with pytest.raises(ValueError, match="The model has parameters or gradients in bfloat16"):
        moved((*run[:2], [column.bfloat16() for column in run[2]]))


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_a_pass_under_autocast_is_refused(mode):
    with pytest.raises(ValueError, match=r"torch\.autocast is on in a training pass"):
        moved(private(mode=mode), autocast=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_attack_wins_where_they_are_not_refused(dtype, monkeypatch):
    for place in (clipping, checks):
        monkeypatch.setattr(place, "check_dtype", lambda dtype: None)
    monkeypatch.setattr(optimizer, "refuse_autocast", lambda parameters: None)
    most = moved(private(dtype), autocast=dtype == torch.float32)
    assert most > 1.5
    assert math.isfinite(most)
