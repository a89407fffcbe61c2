"""A custom rule cannot change its own bound, and its errors have clear messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from evenclip import DPSGD, Performance, Rule, fit, prepare
from evenclip.mechanism import Mechanism

GENERATOR = torch.Generator().manual_seed(0)
X = 100 * torch.randn(80, 4, generator=GENERATOR)
DATA = X, (X[:, 0] > 0).long()


@dataclass(frozen=True)
class Custom(Rule):
    name: ClassVar[str] = "custom"
    sigma: float = 1.0
    sigma_count: float | None = 10.0

    def init(self, constants):
        return torch.tensor(1.0, dtype=torch.float64)

    def statistic(self, norm, group, state):
        return norm > state

    def sensitivity(self, now):
        return now

    def weight(self, norm, group, now):
        return (now / norm).clamp(max=1.0)


def run_of(rule, **settings):
    torch.manual_seed(0)
    return prepare(
        torch.nn.Linear(4, 2), DATA, rule=rule, batch_size=20, seed=0, steps=4, **settings
    )


class Shrinks(Custom):
    counts_first: ClassVar[bool] = True

    def observe(self, noisy, B, state):
        state.mul_(0.01)
        return state, state


class ShrinksLater(Custom):
    def weight(self, norm, group, now):
        weight = (now / norm).clamp(max=1.0)
        now.mul_(0.1)
        return weight


class ShrinksItsBound(Custom):
    def sensitivity(self, now):
        now.mul_(0.1)
        return now


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("kind", [Custom, Shrinks, ShrinksLater, ShrinksItsBound])
def test_noise_is_for_the_bound_that_was_enforced_if_the_rule_changes_its_state_in_place(
    kind, chunk
):
    run = run_of(kind(), performance=Performance(chunk=chunk))
    with run.listening():
        for _ in range(3):
            before = run.state.clone()
            step = run.step()
            S = float(step.public.sensitivity)
            assert float((step.weights * step.norms).max()) <= S * (1 + 1e-9)
            noise = step.public.gradient * step.B - step.clipped_sum
            assert 0.2 * S < float(noise.std()) < 5 * S
            assert torch.equal(run.state, before)  # until the update
            run.update(step)


def test_a_step_outside_of_listening_is_refused_before_it_is_in_the_ledger():
    run = run_of(DPSGD())
    with pytest.raises(
        RuntimeError,
        match=r"^Take steps inside `with run\.listening\(\):`; outside of it no gradients",
    ):
        run.step()
    assert run.ledger.steps == 0
    with run.listening():
        step = run.step()
    with pytest.raises(
        RuntimeError, match=r"^Gradients are recorded only inside `with run\.listening\(\):`\."
    ):
        run_of(DPSGD()).tape(*DATA)
    run.update(step)
    with pytest.raises(
        RuntimeError,
        match=r"^This is step 0, and the run is at step 1; update once for each run\.step",
    ):
        run.update(step)


def test_weighted_sums_take_one_weight_for_each_sample():
    run = run_of(DPSGD())
    with run.listening():
        step = run.step()
        n = len(step.losses)
        for wrong in (torch.ones(n + 3), torch.ones(n - 1), torch.ones(n, 1), torch.tensor(1.0)):
            with pytest.raises(
                ValueError,
                match=rf"^The weights have shape .*; give one for each of the {n} samples\.",
            ):
                step.weighted_sum(wrong)
        torch.testing.assert_close(step.weighted_sum(step.weights), step.clipped_sum)


def test_a_tape_that_hides_in_the_instance_is_not_used():
    class Hides(Custom):
        def __post_init__(self):
            object.__setattr__(self, "tape", lambda tape: 1 / 0)

    run = run_of(Hides())
    with run.listening():
        run.update(run.step())


@pytest.mark.parametrize(
    ("method", "returned", "says"),
    [
        ("weight", lambda *_: 1.0, "weight of custom cannot be mapped over samples"),
        ("weight", lambda *_: None, "weight of custom cannot be mapped over samples"),
        (
            "weight",
            lambda s, norm, *_: norm if norm > 1 else 0 * norm,
            "write torch.where instead of if",
        ),
        (
            "weight",
            lambda s, norm, *_: torch.stack([norm, norm]),
            "weight of custom returned 2 numbers for one sample",
        ),
        ("statistic", lambda *_: 1.0, "statistic of custom cannot be mapped over samples"),
        (
            "statistic",
            lambda s, norm, *_: torch.zeros(3).index_put_(((norm > 1).long(),), torch.ones(())),
            "torch.arange(m) == index instead of h[index] = 1",
        ),
        (
            "sensitivity",
            lambda *_: None,
            "sensitivity of custom returned None; it must return one number",
        ),
        (
            "sensitivity",
            lambda *_: torch.ones(2),
            "returned a tensor of shape [2]; it must return one number",
        ),
        (
            "sensitivity",
            lambda *_: float("nan"),
            "sensitivity of custom returned nan; it must be a finite number",
        ),
        (
            "sensitivity",
            lambda *_: float("inf"),
            "sensitivity of custom returned inf; it must be a finite number",
        ),
        (
            "sensitivity",
            lambda *_: torch.tensor(-1.0),
            "sensitivity of custom returned -1.0; it must be a finite",
        ),
        ("init", lambda *_: [1.0], "init of custom returned list; it must return a tensor"),
        (
            "observe",
            lambda *_: torch.ones(1),
            "observe of custom must return two tensors, (now, next)",
        ),
        (
            "observe",
            lambda *_: (1.0, 1.0),
            "observe of custom must return two tensors, (now, next)",
        ),
    ],
)
def test_mistakes_are_sentences(method, returned, says):
    rule = type("Wrong", (Custom,), {method: returned})()
    with pytest.raises(ValueError, match=re.escape(says)):
        fit(torch.nn.Linear(4, 2), DATA, rule=rule, batch_size=20)


@pytest.mark.parametrize("name", ["sigma", "sigma_count"])
@pytest.mark.parametrize("given", [float("nan"), float("inf"), -1.0, "x"])
def test_a_multiplier_is_a_finite_number_of_at_least_0(name, given):
    with pytest.raises(
        ValueError,
        match=rf"^{name} of custom is {given!r}; it must be a finite number of at least 0\.",
    ):
        run_of(Custom(**{name: given}))


def test_one_weight_in_a_vector_is_one_weight():
    class InAVector(Custom):
        def weight(self, norm, group, now):
            return (now / norm).clamp(max=1.0).reshape(1)

    run = run_of(InAVector())
    with run.listening():
        step = run.step()
        assert torch.equal(step.weights, (1 / step.norms).clamp(max=1.0))


def test_what_an_observer_returns_is_a_dict_or_nothing():
    with pytest.raises(
        TypeError,
        match=r"^An observer returned list; it must return a dict of what it saw, or None\.",
    ):
        fit(torch.nn.Linear(4, 2), DATA, rule=DPSGD(), batch_size=20, observers=[lambda step: [1]])


def test_a_run_resumes_with_the_dtype_that_its_state_had(tmp_path):
    class Widens(Custom):
        def init(self, constants):
            return torch.tensor(1.0)  # float32; the noisy count makes it float64

        def observe(self, noisy, B, state):
            return state, state * torch.exp(0.2 * (noisy[0] / B - 0.5))

    def trained(**settings):
        torch.manual_seed(0)
        given = {"rule": Widens(), "batch_size": 20, "seed": 0, "steps": 10}
        return fit(torch.nn.Linear(4, 2), DATA, **given, **settings)

    def stop(step):
        if step.t == 5:
            raise KeyboardInterrupt

    whole = trained()
    with pytest.raises(KeyboardInterrupt):
        trained(checkpoint=tmp_path, checkpoint_every=3, observers=[stop])
    resumed = trained(checkpoint=tmp_path, resume="exact")
    assert torch.equal(resumed.state, whole.state)
    assert torch.equal(resumed.model.weight, whole.model.weight)


class Disguised(Custom):
    """Claims a module of the package, so that it would receive whole batches."""

    __module__ = "evenclip.rules.disguised"
    elementwise: ClassVar[bool] = True

    def weight(self, norm, group, now):
        assert norm.ndim == 0, "it sees the batch"
        return (now / norm).clamp(max=1.0)


def test_a_rule_in_disguise_does_not_see_the_batch():
    changed = DPSGD()
    object.__setattr__(changed, "weight", Disguised().weight)
    object.__setattr__(changed, "sensitivity", lambda now: 1.0)
    for rule, is_custom in ((Disguised(), True), (changed, True), (DPSGD(), False)):
        assert Mechanism(rule)._is_ours is not is_custom
    run = run_of(Disguised())
    with run.listening():
        run.update(run.step())
