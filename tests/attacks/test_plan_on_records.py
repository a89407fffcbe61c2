"""One record decides how the gradients of all others are computed.

The attacker adds a record whose gradient cancels over positions, so that the bound on its rounding
is far above its length. If the plan of the run looks at records, this one makes it choose another
way to compute gradients, with another bound on rounding. The attacker sets σ so that the cells of
the public grid are 4 wide with one bound and 8 wide with the other. One odd multiple of 4 then
proves which dataset it was; and the report, which states the bound, tells it without any noise.

With a plan on artificial records, bound, blocks and report are the same; a plan on records is
planted.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenclip import DPSGD, fit, prepare
from evenclip.training import setup

N, T, B, SIGMA = 24, 1000, 16, 63.99881726453939


class Summed(nn.Module):
    """One weight, whose gradient is a sum over positions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x):
        return self.layer(x).sum((1, 2))


def product(output, y):
    return output * y


@pytest.fixture
def neighbours():
    """Return a dataset with the record in question, which is its first, and one without it."""
    x, y = torch.randn(N, T, 1, generator=torch.Generator().manual_seed(0)), torch.ones(N)
    record = torch.ones(1, T, 1)
    record[:, 1::2] = -1
    return {"with": (torch.cat([record, x]), torch.ones(N + 1)), "without": (x, y)}


def settings():
    rule = DPSGD(C0=1.0, sigma=SIGMA)
    given = {"rule": rule, "loss": product, "batch_size": B, "q": 1.0, "steps": 1, "delta": 1e-5}
    return given | {"lr": 1.0}


def choices(data):
    """Return everything that the plan decides and that an attacker may learn."""
    run = prepare(Summed(), data, **settings())
    return type(run.tape).__name__, run.tape.rows, run.mechanism.rounding, run.company


def test_one_record_changes_nothing_that_the_plan_decides(neighbours):
    assert choices(neighbours["with"]) == choices(neighbours["without"])


@pytest.mark.parametrize("independence", [None, "tested"], ids=str)
def test_one_record_changes_no_line_of_the_report(neighbours, independence):
    given = settings() | {"independence": independence}
    one, other = (fit(Summed(), data, **given).privacy for data in neighbours.values())
    assert one["epsilon"] < 0.05
    for name in ("bound_inflation", "independence", "company", "not_covered"):
        assert one[name] == other[name]


def test_the_attack_wins_against_a_plan_on_records(neighbours, monkeypatch):
    monkeypatch.setattr(setup, "artificial", lambda like, n, groups: like)
    assert choices(neighbours["with"]) != choices(neighbours["without"])


def test_a_model_that_takes_no_artificial_records_is_planned_on_records_and_says_so():
    class Coded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            if not bool((x[:, 0] >= 7).all()):
                raise ValueError("The first column is a code of at least 7.")
            return self.layer(x / 10)

    x, y = torch.full((20, 3), 8.0) + torch.arange(20.0)[:, None] / 20, torch.arange(20) % 2
    rule, model = DPSGD(), Coded()
    result = fit(model, (x, y), rule=rule, batch_size=10, steps=2, delta=1e-3)
    assert any("tried on a few records" in text for text in result.privacy["not_covered"])
    assert "was not tested" in result.privacy["company"]


def test_a_record_that_does_not_follow_the_plan_stops_the_training():
    class Routed(nn.Module):
        """Multiplies the gradient's output by a parameter only for large inputs."""

        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(()))

        def forward(self, x):
            large = (x[:, :1] > 50).to(x)
            mean = x.mean(dim=0, keepdim=True)
            return self.layer(x) * self.scale + large.max() * mean[:, :2]

    x, y = torch.randn(20, 3), torch.arange(20) % 2
    given = {"rule": DPSGD(), "batch_size": 10, "steps": 1, "delta": 1e-3}
    fit(Routed(), (x, y), **given, independence="tested")
    with pytest.raises(ValueError, match="The samples of a batch influence each other"):
        fit(Routed(), (x + 100, y), **given, independence="tested")
    fit(Routed(), (x + 100, y), **given)  # each sample passes by itself
