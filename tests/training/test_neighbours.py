"""Two neighbouring datasets with equal q, B and T differ only in the released values."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from evenclip import fit
from evenclip.gradients import plan
from evenclip.mechanism import Mechanism, Release
from evenclip.rules import Constants
from evenclip.training.passes import Chunk

STEPS, Q, B = 12, 0.2, 8


@pytest.fixture(params=["one less", "one more"])
def neighbours(request, toy):
    """Two datasets that differ in one record."""
    data = toy.data(40)
    return data, tuple(column[:-1] for column in data) if request.param == "one less" else toy.data(
        41
    )


def trained(toy, spy, rule, data):
    """Return the result, the steps, and the releases of each step."""
    spy.releases.clear()
    seen = []
    result = fit(
        toy.mlp(),
        data,
        rule=rule,
        q=Q,
        batch_size=B,
        steps=STEPS,
        lr=0.1,
        seed=1,
        observers=[seen.append],
    )
    each = len(spy.releases) // STEPS
    return result, seen, [spy.releases[each * t : each * (t + 1)] for t in range(STEPS)]


def test_one_record_changes_no_divisor_no_noise_and_no_shape(toy, spy, private_rule, neighbours):
    runs = [trained(toy, spy, private_rule, data) for data in neighbours]
    (one, seen, releases), (other, other_seen, other_releases) = runs
    assert one.settings.n != other.settings.n
    for name in ("q", "B", "steps", "epoch", "groups"):
        assert getattr(one.settings, name) == getattr(other.settings, name)
    assert [entry.release for entry in one.ledger.entries] == [
        entry.release for entry in other.ledger.entries
    ]
    assert one.epsilon("rdp", 1e-5) == other.epsilon("rdp", 1e-5)
    assert one.state.shape == other.state.shape
    for step, other_step in zip(seen, other_seen, strict=True):
        assert step.B == other_step.B == B
        assert step.public.gradient.shape == other_step.public.gradient.shape
    for step_releases, other_step in zip(releases, other_releases, strict=True):
        assert [r.name for r in step_releases] == [r.name for r in other_step]
        for released, other_released in zip(step_releases, other_step, strict=True):
            assert released.out.shape == other_released.out.shape
            assert (
                released.multiplier
                == other_released.multiplier
                == private_rule.multipliers()[released.name]
            )


def test_the_noise_is_scaled_by_what_is_public(toy, spy, private_rule, neighbours):
    """The sensitivity is a constant of the rule, or computed from an earlier release of the same
    step.
    """
    for data in neighbours:
        _, _, releases = trained(toy, spy, private_rule, data)
        for step_releases in releases:
            for released in step_releases:
                known = public_sensitivity(private_rule, released, step_releases)
                assert released.sensitivity == pytest.approx(known, rel=1e-12)


def test_no_record_is_twice_in_a_batch(toy, spy, private_rule, neighbours):
    """A record that is sampled twice would change the sums by twice the sensitivity."""
    for data in neighbours:
        trained(toy, spy, private_rule, data)
    assert len(spy.batches) == 2 * STEPS
    for batch in spy.batches:
        assert len(set(batch.tolist())) == len(batch)


def public_sensitivity(rule, released, step_releases) -> float:
    if released.name == "count":
        return 1.0
    if rule.name != "dpsgd-f":
        return rule.C0
    counts = [max(0, math.floor(number)) for number in step_releases[0].out.tolist()]
    pairs = list(zip(counts[::2], counts[1::2], strict=True))
    shares = [above / (above + below) if above + below else 1.0 for below, above in pairs]
    mean = sum(shares) / len(shares)
    return rule.C0 * (1 + (max(shares) / mean if mean else 0.0))


def test_the_update_is_the_release_over_B_for_any_batch(toy, spy, private_rule, neighbours):
    sizes = set()
    for data in neighbours:
        result, seen, releases = trained(toy, spy, private_rule, data)
        model = toy.mlp()
        for step, (*_, released) in zip(seen, releases, strict=True):
            sizes.add(len(step.losses))
            assert torch.equal(step.public.gradient, released.out)
            assert len(set(((released.out * B) % 2.0**-9).tolist())) == 1  # on a public grid
            moved = toy.vector(model) - 0.1 * released.out
            torch.nn.utils.vector_to_parameters(moved, model.parameters())
        torch.testing.assert_close(
            toy.vector(result.model), toy.vector(model), rtol=1e-12, atol=1e-12
        )
    assert len(sizes) > 3, "batches should differ in size"


def test_one_sample_moves_every_release_by_at_most_its_sensitivity(toy, private_rule):
    """Compare batches with and without each sample: counts change by at most 1, the sum by at most
    S.
    """
    x, y, group = toy.data(12)
    x = x * torch.tensor([0.01, 0.5, 1.0, 30.0]).repeat(3).unsqueeze(1)
    model, state = toy.mlp(), private_rule.init(Constants(groups=3))
    tape, mechanism = plan(model, cross_entropy, x, y), Mechanism(private_rule, Constants(groups=3))
    silence = {"count": torch.zeros(6), "gradient": torch.zeros(len(toy.vector(model)))}
    with tape.recording():
        whole = toy.step(tape, private_rule, state, [Chunk(x, y, group)], 8.0, _Silent(silence))
        for i in range(len(y)):
            rest = torch.arange(len(y)) != i
            gradients = tape(x[rest], y[rest])
            norms = gradients.norms()
            counts = mechanism.count(whole.norms, group, state, None) - mechanism.count(
                norms, group[rest], state, None
            )
            assert torch.linalg.vector_norm(counts) <= 1 + 1e-12
            S = private_rule.sensitivity(whole.public.now)
            weights, _ = mechanism.weights(norms, group[rest], whole.public.now, S, None)
            moved = torch.linalg.vector_norm(whole.clipped_sum - gradients.weighted_sum(weights))
            assert moved <= S * (1 + 1e-9)


class _Silent(Release):
    """Releases without noise, of any length."""

    def __call__(self, name, value, *, sensitivity, multiplier, rounding, scale=1.0, dtype=None):
        return value * scale
