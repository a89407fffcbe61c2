"""Table 1's steps: the length of one and the direction of the other; no ε; drawn from a record
alone.
"""

import pytest
import torch
from torch.nn.functional import cosine_similarity, cross_entropy

from evenclip.gradients import plan
from evenclip.models import mlp
from evenclip.reproduction import directions
from evenclip.reproduction.directions import DirectionOnly, MagnitudeOnly, draw
from evenclip.rules import DPSGD
from evenclip.sweep.describe import describe_rule, make_rule
from evenclip.training.fit import prepare


def table(n=60):
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 2, (n,), generator=generator)


def stepped(rule):
    run = prepare(
        mlp(4, 2, (5,), seed=0).double(), table(), rule=rule, batch_size=20, steps=1, seed=0
    )
    with run.listening():
        return run.step(), run


def gradients():
    """g_B and ḡ_B of the batch that a run of that seed draws, by DPSGD's own step."""
    x, y = table()
    model = mlp(4, 2, (5,), seed=0).double()
    run = prepare(model, (x, y), rule=MagnitudeOnly(C0=0.3), batch_size=20, steps=1, seed=0)
    batch = run.batches.sampler.batch(0)
    with (tape := plan(model, cross_entropy, x, y)).recording():
        found = tape(x[batch], y[batch])
        weights = DPSGD(C0=0.3).weight(found.norms(), torch.zeros(len(batch)), torch.zeros(0))
        return found.weighted_sum(torch.ones_like(weights)), found.weighted_sum(weights)


def test_magnitude_only_has_the_direction_of_the_true_gradient_and_the_length_of_the_clipped():
    found, run = stepped(MagnitudeOnly(C0=0.3))
    plain, clipped = gradients()
    torch.testing.assert_close(found.clipped_sum, plain * clipped.norm() / plain.norm())
    assert (
        cosine_similarity(plain, clipped, dim=0) < 1 - 1e-4
    )  # there is a direction error to leave out
    assert not run.ledger.is_private


def test_direction_only_has_the_length_of_the_true_gradient_and_the_direction_of_the_clipped():
    run = prepare(
        mlp(4, 2, (5,), seed=0).double(),
        table(),
        rule=DirectionOnly(C0=0.3),
        batch_size=20,
        steps=1,
        seed=0,
    )
    batch = run.batches.sampler.batch(0)
    x, y = table()
    with run.listening():
        found = run.tape(x[batch], y[batch])
        own = found._gradients
        weights = DPSGD(C0=0.3).weight(own.norms(), torch.zeros(len(batch)), torch.zeros(0))
        plain, clipped = own.weighted_sum(torch.ones_like(weights)), own.weighted_sum(weights)
        torch.testing.assert_close(
            found.weighted_sum(weights), clipped * plain.norm() / clipped.norm()
        )


@pytest.mark.parametrize("rule", [MagnitudeOnly(), DirectionOnly()], ids=lambda rule: rule.name)
def test_they_train_have_no_epsilon_and_can_be_sent_to_a_worker(rule):
    x, y = table()
    run = prepare(
        mlp(4, 2, (5,)), (x.float(), y), rule=rule, q=0.05, batch_size=2, steps=20, seed=1
    )
    with run.listening():
        while run.t < 20:
            run.update(run.step())  # empty batches among them
    assert bool(torch.isfinite(torch.nn.utils.parameters_to_vector(run.model.parameters())).all())
    assert not run.ledger.is_private
    again = make_rule(describe_rule(rule))
    assert (again.name, again.C0, again.soundness) == (rule.name, rule.C0, rule.soundness)


def test_the_table_is_drawn_from_its_record():
    rows = [
        {
            "error": error,
            "lr": lr,
            "seeds": list(range(seeds)),
            "accuracy": [[95.0 + s] * 10 for s in range(seeds)],
            "train_loss": [[0.1] * 10] * seeds,
        }
        for error, lr, seeds in (("magnitude", 0.1, 3), ("direction", 0.01, 1))
    ]
    record = {
        "table": "directions",
        "quick": False,
        "groups": [str(d) for d in range(10)],
        "rows": rows,
    }
    text = draw(record)
    assert f"## {directions.TITLE}" in text
    assert (
        "| magnitude | 0.1 | 3 | 96.0 ± 0.6 | 99.0 | 96.0 ± 0.6 | 93.5 | 0.100 ± 0.000 | 0.002 |"
        in text
    )
    assert "| direction | 0.01 | 1 | 95.0 | 96.8 | 95.0 | 84.1 | 0.100 | 0.076 |" in text
    assert "quick run" in draw({**record, "quick": True})
