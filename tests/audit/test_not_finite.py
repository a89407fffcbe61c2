"""Samples with gradients that are not finite are left out of training and of its audit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from evenclip import DPSGD, DPSGDF, DPSGDGlobalAdapt, NonPrivate, fit
from evenclip.audit import RiskTerms


def data(bad: bool):
    """Two groups; with `bad`, one record of each overflows float32."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=random), torch.randint(0, 2, (60,), generator=random)
    group = torch.arange(60) % 2
    if bad:
        x[3] = x[8] = 3e38
    return x, y, group


def numbers(value):
    """Yield all numbers in a record."""
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers(part)]
    if isinstance(value, list | tuple):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, float) else []


def records(bad: bool, rule, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Softplus(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.abs_().add_(0.5)  # so that four times 3e38 overflows
    observer = RiskTerms(data(bad), 0.1, every=1, batches=4, probes=4, **more)
    result = fit(
        model,
        data(bad),
        rule=rule,
        batch_size=40,
        q=0.7,
        steps=5,
        lr=0.1,
        seed=0,
        observers=[observer],
    )
    assert all(torch.isfinite(p).all() for p in result.model.parameters())
    return [record for record in result.records if "risk" in record]


@pytest.mark.parametrize(
    "rule", [NonPrivate(), DPSGD(), DPSGDF(), DPSGDGlobalAdapt()], ids=lambda rule: rule.name
)
def test_the_audit_is_finite_where_training_is(rule):
    observed = records(bad=True, rule=rule)
    assert len(observed) == 5
    assert all(math.isfinite(number) for number in numbers(observed))
    for record in observed:
        assert [group["n"] for group in record["risk"]] == [29, 29]  # the finite samples
        assert [group["of"] for group in record["risk"]] == [30, 30]


def test_a_sample_of_a_group_is_finite_too():
    observed = records(bad=True, rule=DPSGD(), sample=32)
    assert all(math.isfinite(number) for number in numbers(observed))


def test_everybody_takes_part_where_all_are_finite():
    (first, *_) = records(bad=False, rule=DPSGD())
    assert [group["n"] for group in first["risk"]] == [30, 30]
