"""Every rule, built-in or custom, is bounded by construction and independent of the batch.

The sensitivity is not read off the formula: one sample is taken out of the batch, everything is
computed again, and the sums are compared.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import math
import pkgutil
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import evenclip.rules
from evenclip.mechanism import Mechanism
from evenclip.rules import (
    DPSGD,
    DPSGDF,
    NO_EPSILON,
    REPAIRED,
    RULES,
    SOUND,
    Constants,
    DPSGDGlobalAdapt,
    Rule,
)

GROUPS = 4
ROUNDING = 1 + Fraction(1, 2**49)  # norms are rounded up by far more

# Custom rules
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SoftClip(Rule):
    """γ = C·tanh(‖g‖/C)/‖g‖, S = C: an honest rule, written for one sample and for nothing else."""

    name: ClassVar[str] = "tanh-with-counts"
    counts_first: ClassVar[bool] = True

    C: float = 0.7
    sigma: float = 1.0
    sigma_count: float = 10.0

    def init(self, constants: Constants) -> Tensor:
        return torch.full((constants.groups,), self.C, dtype=torch.float64)

    def statistic(self, norm: Tensor, group: Tensor, state: Tensor) -> Tensor:
        # stack puts a new axis first: over a batch at once this would be [2, sample]
        return torch.stack(
            [torch.tanh(norm / self.C), 1 / torch.cosh(norm / self.C)]
        )  # tanh² + sech² = 1

    def sensitivity(self, now: Tensor) -> float:
        return self.C

    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:
        return torch.where(norm > 0, self.C * torch.tanh(norm / self.C) / norm, 1.0)


@dataclass(frozen=True)
class Liar(Rule):
    """Claims S = 1; returns, by group, 1e6, NaN, -1e6, 1e300, and statistics of length 100 with NaN
    and ∞ in them.
    """

    name: ClassVar[str] = "liar"
    sigma: float = 1.0
    sigma_count: float = 10.0

    def statistic(self, norm: Tensor, group: Tensor, state: Tensor) -> Tensor:
        lies = [
            [60.0, 80.0, 0.0],
            [math.nan, 60.0, 80.0],
            [math.inf, -math.inf, 0.5],
            [-1e200, 1e200, 0.0],
        ]
        return torch.tensor(lies, dtype=torch.float64)[group]

    def sensitivity(self, now: Tensor) -> float:
        return 1.0

    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:
        return torch.tensor([1e6, math.nan, -1e6, 1e300], dtype=torch.float64)[group]


@dataclass(frozen=True)
class Fibber(Rule):
    """Claims S = 1 and exceeds it by a fifth, in the weights and in the statistics."""

    name: ClassVar[str] = "fibber"
    sigma: float = 1.0
    sigma_count: float = 10.0

    def statistic(self, norm: Tensor, group: Tensor, state: Tensor) -> Tensor:
        return 1.2 * torch.ones_like(norm)

    def sensitivity(self, now: Tensor) -> float:
        return 1.0

    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:
        return 1.2 / norm


@dataclass(frozen=True)
class Mapped(Rule):
    """Another rule, which the mechanism has to map sample by sample."""

    name: ClassVar[str] = "mapped"
    rule: Rule
    sigma: float = 1.0

    def statistic(self, norm: Tensor, group: Tensor, state: Tensor) -> Tensor:
        return self.rule.statistic(norm, group, state)

    def sensitivity(self, now: Tensor) -> float | Tensor:
        return self.rule.sensitivity(now)

    def weight(self, norm: Tensor, group: Tensor, now: Tensor) -> Tensor:
        return self.rule.weight(norm, group, now)


# Values of the rules' fields; a field that is not listed keeps its default.
FIELDS = {"C0": 0.7, "sigma": 1.1, "Z": 3.3, "Z0": 3.3, "tau": 0.7}


def made(kind):
    """A rule of the package, with the values of `FIELDS`."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in FIELDS.items() if name in names})


BUILT_IN = [made(rule) for rule in RULES.values() if rule.bounded]
ELEMENTWISE = [rule for rule in BUILT_IN if rule.elementwise]
PUBLISHED = {"non-private", "dpsgd", "dpsgd-f", "dpsgd-global", "dpsgd-global-adapt"}
HONEST = [*BUILT_IN, SoftClip()]
EVERY = [*HONEST, Liar(), Fibber()]


def case(rule):
    return rule.name


# Batches
# --------------------------------------------------------------------------------------------------

STRANGE = [0.0, -1.0, 1e-200, 1e200, math.inf, -math.inf, math.nan]


def public(rule, strange):
    """Any public tensor of the shape of the rule's state, reachable or, if `strange`, not."""
    start = rule.init(Constants(groups=GROUPS))
    values = st.floats(1e-12, 1e12) | st.sampled_from(
        [1e-12, 1.0, 1e12, *(STRANGE if strange else [])]
    )
    if isinstance(rule, DPSGDF) and not strange:
        values = st.floats(rule.C0, (1 + GROUPS) * rule.C0)
    flat = st.lists(values, min_size=start.numel(), max_size=start.numel())
    return flat.map(lambda v: torch.tensor(v, dtype=torch.float64).reshape(start.shape))


def thresholds(rule, *publics):
    """Values at which a rule may branch: its fields, the public values, and τ times those."""
    fields = [v for f in dataclasses.fields(rule) if isinstance(v := getattr(rule, f.name), float)]
    values = [*fields, *(v for p in publics for v in p.flatten().tolist())]
    values += [getattr(rule, "tau", 1.0) * v for v in values]
    return sorted({v for v in values if 0 < v < 1e30})


@dataclass
class Batch:
    state: Tensor
    now: Tensor
    norms: Tensor  # [sample]
    group: Tensor  # [sample]
    gradients: Tensor  # [sample, 3]

    def without(self, i):
        rest = torch.arange(len(self.norms)) != i
        return Batch(self.state, self.now, self.norms[rest], self.group[rest], self.gradients[rest])


@st.composite
def batches(draw, rule, strange=True):
    state, now = draw(public(rule, strange)), draw(public(rule, strange))
    edges = [
        f(v, to)
        for v in thresholds(rule, state, now)
        for f, to in ((min, v), (math.nextafter, 0.0), (math.nextafter, math.inf))
    ]
    lengths = (
        st.sampled_from([0.0, 1e-12, 1e12, 1e-45, 1e38, *edges])
        | st.floats(0.0, 10.0)
        | st.floats(0.0, 1e12)
    )
    n = draw(st.integers(1, 6))
    norms = torch.tensor(draw(st.lists(lengths, min_size=n, max_size=n)), dtype=torch.float64)
    group = torch.tensor(draw(st.lists(st.integers(0, GROUPS - 1), min_size=n, max_size=n)))
    turns = draw(
        st.lists(
            st.tuples(st.floats(0, math.pi), st.floats(0, 2 * math.pi)), min_size=n, max_size=n
        )
    )
    ways = [[math.sin(a) * math.cos(b), math.sin(a) * math.sin(b), math.cos(a)] for a, b in turns]
    return Batch(
        state, now, norms, group, norms.unsqueeze(1) * torch.tensor(ways, dtype=torch.float64)
    )


def over_batches(rules, strange=True, examples=25):
    """Run a test(rule, batch) on many batches of each rule, the same ones every time."""

    def decorate(test):
        @pytest.mark.parametrize("rule", rules, ids=case)
        @settings(max_examples=examples, database=None)
        @given(data=st.data())
        def run(rule, data):
            test(rule, data.draw(batches(rule, strange)))

        run.__name__ = run.__qualname__ = test.__name__
        return run

    return decorate


def bound(rule, now):
    """The most that one sample may add: |S|, as for the noise; ∞ where both are NaN."""
    S = abs(float(rule.sensitivity(now)))
    return S if S == S else math.inf


def weights(rule, b, keep=None):
    """The weights, and for which samples the mechanism reduced the rule's weight to its bound."""
    held, lies = Mechanism(rule).weights(b.norms, b.group, b.now, rule.sensitivity(b.now), keep)
    return held, torch.zeros_like(held, dtype=torch.bool) if lies is None else lies


def statistics(rule, b, keep=None):
    return Mechanism(rule).count(b.norms, b.group, b.state, keep)


# Sensitivity
# --------------------------------------------------------------------------------------------------


@over_batches(EVERY)
def test_leaving_one_sample_out_moves_the_sum_by_at_most_S(rule, b):
    total = weights(rule, b)[0] @ b.gradients
    for i in range(len(b.norms)):
        rest = b.without(i)
        moved = torch.linalg.vector_norm(total - weights(rule, rest)[0] @ rest.gradients)
        assert moved <= bound(rule, b.now) * (1 + 1e-12)


@over_batches(EVERY)
def test_leaving_one_sample_out_moves_the_statistics_by_at_most_1(rule, b):
    total = statistics(rule, b)
    for i in range(len(b.norms)):
        assert torch.linalg.vector_norm(total - statistics(rule, b.without(i))) <= 1 + 1e-12


@over_batches(EVERY)
def test_weight_times_norm_is_at_most_S_and_fits_float32(rule, b):
    held, _ = weights(rule, b)
    S = bound(rule, b.now)
    assert held.dtype == torch.float64
    if S < 1e6:
        assert (
            held.float().isfinite().all()
        )  # an infinite weight would make 0 · ∞ of a zero gradient
    if not math.isinf(S):
        for w, norm in zip(held.tolist(), b.norms.tolist(), strict=True):
            assert (
                abs(Fraction(w)) * Fraction(norm) <= Fraction(S) * ROUNDING
            )  # in exact arithmetic


@over_batches(EVERY)
def test_a_sample_knows_nothing_of_the_others(rule, b):
    together, lies = weights(rule, b)
    for i in range(len(b.norms)):
        rest = torch.arange(len(b.norms)) != i
        alone, lie = weights(rule, b.without(i))
        assert torch.equal(alone, together[rest])
        assert torch.equal(lie, lies[rest])


def test_a_mapped_rule_is_shown_one_sample():
    @dataclass(frozen=True)
    class Spy(Rule):
        name: ClassVar[str] = "spy"
        sigma: float = 1.0

        def sensitivity(self, now):
            return 1.0

        def weight(self, norm, group, now):
            raise LookupError(f"{list(norm.shape)} and {list(group.shape)}")

    with pytest.raises(ValueError, match=r"weight of spy failed: LookupError: \[\] and \[\]"):
        Mechanism(Spy()).weights(
            torch.ones(5, dtype=torch.float64),
            torch.zeros(5, dtype=torch.int64),
            torch.zeros(0),
            1.0,
            None,
        )


# The guard
# --------------------------------------------------------------------------------------------------


@over_batches(HONEST, strange=False)
def test_honest_rules_are_never_held(rule, b):
    assert not weights(rule, b)[1].any()


@over_batches([Liar()])
def test_every_lie_is_counted_and_nothing_else(rule, b):
    held, lies = weights(rule, b)
    for w, lie, norm, group in zip(
        held.tolist(), lies.tolist(), b.norms.tolist(), b.group.tolist(), strict=True
    ):
        said = [1e6, math.nan, -1e6, 1e300][group]
        if math.isnan(said):
            assert (w, lie) == (0.0, True)
        elif said == 1e300 and norm < 2.0**-100:
            assert (w, lie) == (2.0**100, True)  # no more than a float32 can hold
        elif abs(said) * norm > 1 + 1e-9:
            assert (w, lie) == (math.copysign(1 / norm, said), True)
        elif abs(said) * norm < 1:
            assert (w, lie) == (said, False)


@over_batches([Fibber()])
def test_small_lies_are_counted_too(rule, b):
    held, lies = weights(rule, b)
    ordinary = b.norms > 1e-29
    assert torch.equal(held[ordinary], 1 / b.norms[ordinary])
    assert lies[ordinary].all()
    assert statistics(rule, b).tolist() == [len(b.norms)]


def test_lies_about_the_statistics_are_cut_to_length_1():
    group = torch.arange(4)
    each = [
        Mechanism(Liar()).count(torch.ones(1), group[k : k + 1], torch.zeros(0), None)
        for k in range(4)
    ]
    # (60, 80) has length 100; NaN and ±∞ become 0; (-1e200, 1e200) is so long that its length
    # overflows
    assert [e.tolist() for e in each] == [
        [0.6, 0.8, 0.0],
        [0.0, 0.6, 0.8],
        [0.0, 0.0, 0.5],
        [0.0, 0.0, 0.0],
    ]


def test_a_statistic_without_an_axis_is_a_count_of_one_number():
    @dataclass(frozen=True)
    class Scalar(DPSGD):
        elementwise: ClassVar[bool] = False
        sigma_count: float = 10.0

        def statistic(self, norm, group, state):
            return (norm > 1).double()

    guard = Mechanism(Scalar())
    for n, expected in ((0, [0.0]), (1, [0.0]), (4, [2.0])):  # norms 0, 1, 2, 3
        found = guard.count(
            torch.arange(n).double(), torch.zeros(n, dtype=torch.int64), torch.zeros(0), None
        )
        assert found.tolist() == expected


@pytest.mark.parametrize(
    "S", [0.0, torch.tensor(0.0, dtype=torch.float64)], ids=["float", "tensor"]
)
def test_a_sensitivity_of_0_lets_nothing_through(S):
    norms = torch.tensor([0.0, 1e-12, 1.0, 1e12], dtype=torch.float64)
    held, lies = Mechanism(DPSGD()).weights(
        norms, torch.zeros(4, dtype=torch.int64), torch.zeros(0), S, None
    )
    assert held.tolist() == [0.0] * 4  # not 0/0 for the zero gradient
    assert lies.all()


@over_batches(EVERY)
def test_what_is_not_kept_contributes_exactly_nothing(rule, b):
    keep = torch.arange(len(b.norms)) % 2 == 0
    junk = torch.tensor([math.nan, math.inf, 1e12], dtype=torch.float64)[
        torch.arange(len(b.norms)) % 3
    ]
    full = Batch(b.state, b.now, torch.where(keep, b.norms, junk), b.group, b.gradients)
    only = Batch(b.state, b.now, b.norms[keep], b.group[keep], b.gradients[keep])
    held, lies = weights(rule, full, keep)
    assert (held[~keep] == 0).all()
    assert not lies[~keep].any()
    assert torch.equal(held[keep], weights(rule, only)[0])
    assert torch.equal(lies[keep], weights(rule, only)[1])
    torch.testing.assert_close(
        statistics(rule, full, keep), statistics(rule, only), rtol=0, atol=1e-14
    )


@over_batches(BUILT_IN)
def test_padded_rows_change_nothing(rule, b):
    n = len(b.norms)
    pad = [torch.cat([column, column[:1].expand(3)]) for column in (b.norms, b.group)]
    padded, real = Batch(b.state, b.now, *pad, torch.zeros(0)), torch.arange(n + 3) < n
    assert torch.equal(
        statistics(rule, padded, real), statistics(rule, b)
    )  # sums of 0 and 1: exact
    assert torch.equal(
        weights(rule, padded, real)[0], torch.cat([weights(rule, b)[0], torch.zeros(3)])
    )


@pytest.mark.parametrize("rule", EVERY, ids=case)
def test_empty_batch(rule):
    state, none, no_groups = (
        rule.init(Constants(groups=GROUPS)),
        torch.zeros(0, dtype=torch.float64),
        torch.zeros(0, dtype=torch.int64),
    )
    one = Mechanism(rule).count(
        torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64), state, None
    )
    found = Mechanism(rule).count(none, no_groups, state, None)
    assert torch.equal(found, torch.zeros_like(one))
    held, lies = Mechanism(rule).weights(none, no_groups, state, rule.sensitivity(state), None)
    assert (held.shape, lies.shape) == ((0,), (0,))


# Vectorised
# --------------------------------------------------------------------------------------------------


def test_the_published_rules_are_elementwise():
    assert {rule.name for rule in ELEMENTWISE} >= PUBLISHED


@over_batches(ELEMENTWISE)
def test_elementwise_equals_mapped_equals_one_at_a_time(rule, b):
    for mine, theirs in zip(weights(rule, b), weights(Mapped(rule), b), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(statistics(rule, b), statistics(Mapped(rule), b))
    for method, given_to in ((rule.weight, b.now), (rule.statistic, b.state)):
        singly = [
            method(norm, group, given_to) for norm, group in zip(b.norms, b.group, strict=True)
        ]
        torch.testing.assert_close(
            method(b.norms, b.group, given_to), torch.stack(singly), rtol=0, atol=0, equal_nan=True
        )


@over_batches(HONEST)
def test_weights_are_float64(rule, b):
    assert rule.weight(b.norms[0], b.group[0], b.now).dtype == torch.float64


@pytest.mark.parametrize("rule", HONEST, ids=case)
def test_resting_is_the_weight_of_a_zero_gradient(rule):
    nows, zero = (
        torch.stack([rule.init(Constants(groups=GROUPS)), 2 * rule.init(Constants(groups=GROUPS))]),
        torch.tensor(0.0, dtype=torch.float64),
    )
    expected = [[float(rule.weight(zero, k, now)) for k in torch.arange(GROUPS)] for now in nows]
    assert Mechanism(rule, Constants(groups=GROUPS)).zero_gradient_weight(nows).tolist() == expected


# What a rule says of itself
# ------------------------------------------------------------------------------------------


def test_names_are_those_of_the_documentation():
    assert set(RULES) >= PUBLISHED
    assert all(rule.name == name for name, rule in RULES.items())


def test_every_rule_of_the_package_is_in_the_map():
    modules = [
        importlib.import_module(m.name)
        for m in pkgutil.iter_modules(evenclip.rules.__path__, "evenclip.rules.")
    ]
    classes = {
        c
        for module in modules
        for c in vars(module).values()
        if inspect.isclass(c) and issubclass(c, Rule)
    }
    assert {c for c in classes if not inspect.isabstract(c)} == set(RULES.values())


@pytest.mark.parametrize("rule", BUILT_IN, ids=case)
def test_every_rule_states_its_claims(rule):
    assert rule.soundness in {SOUND, REPAIRED, NO_EPSILON}
    assert all((rule.title, rule.summary, rule.reference))
    assert "Sensitivity" in inspect.getmodule(type(rule)).__doc__ or rule.soundness == NO_EPSILON
    assert rule.uses_groups == (rule.name == "dpsgd-f") or rule.name not in PUBLISHED
    assert rule.poisson == (rule.name != "non-private")


def test_soundness():
    assert {r.name: r.soundness for r in BUILT_IN if r.name in PUBLISHED} == {
        "non-private": "no valid ε",
        "dpsgd": "sound",
        "dpsgd-f": "sound here, unsound as published",
        "dpsgd-global": "sound",
        "dpsgd-global-adapt": "sound",
    }


@pytest.mark.parametrize("make", [type(rule) for rule in BUILT_IN], ids=case)
def test_constructors_refuse_what_is_not_above_0(make):
    names = [field.name for field in dataclasses.fields(make)]
    for name, bad in itertools.product(names, [0.0, -1.0, math.nan, math.inf, -math.inf]):
        with pytest.raises(ValueError) as refused:  # noqa: PT011  # the whole text is compared
            make(**{name: bad})
        assert str(refused.value) in {
            f"{name} is {bad}; it must be a finite number above 0.",
            f"{name} is {bad}; it must be a whole number of at least 1.",
        }


@pytest.mark.parametrize("rule", BUILT_IN, ids=case)
def test_rules_are_frozen_values(rule):
    assert rule == dataclasses.replace(rule)
    assert hash(rule) == hash(dataclasses.replace(rule))
    for field in dataclasses.fields(rule):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(rule, field.name, 1.0)


@pytest.mark.parametrize("make", [DPSGDF, DPSGDGlobalAdapt], ids=case)
def test_the_count_gets_ten_times_the_noise_unless_told(make):
    assert make(sigma=0.8).sigma_count == 8.0
    assert make(sigma=0.8, sigma_count=3.0).sigma_count == 3.0


MULTIPLIERS = {
    "non-private": {"gradient": 0.0},
    "dpsgd": {"gradient": 2.0},
    "dpsgd-f": {"count": 20.0, "gradient": 2.0},
    "dpsgd-global": {"gradient": 2.0},
    "dpsgd-global-adapt": {"count": 20.0, "gradient": 2.0},
}


@pytest.mark.parametrize("rule", BUILT_IN, ids=case)
def test_multipliers_are_what_a_step_releases(rule, take_step, batch):
    if rule.sigma:
        rule = dataclasses.replace(
            rule, sigma=2, **({"sigma_count": 20} if rule.sigma_count else {})
        )
    counts = {"count": 20.0} if rule.sigma_count else {}
    assert rule.multipliers() == MULTIPLIERS.get(rule.name, counts | {"gradient": 2.0})
    assert all(type(m) is float for m in rule.multipliers().values())
    noise = {
        "count": torch.zeros(Mechanism(rule, Constants(groups=3)).counts),
        "gradient": torch.zeros(3),
    }  # the batch has 3 groups
    assert (
        take_step(rule, *batch, rule.init(Constants(groups=3)), 40.0, noise)[-1]
        == rule.multipliers()
    )


@pytest.mark.parametrize(
    "rule", [*HONEST, dataclasses.replace(made(RULES["dpsgd-f"]), sigma_count=5.0)], ids=case
)
def test_scaled_multiplies_all_noise_and_nothing_else(rule):
    scaled = rule.scaled(1.5)
    assert type(scaled) is type(rule)
    assert scaled.multipliers() == {
        name: pytest.approx(1.5 * m) for name, m in rule.multipliers().items()
    }
    rest = [f.name for f in dataclasses.fields(rule) if f.name not in ("sigma", "sigma_count")]
    assert all(getattr(scaled, name) == getattr(rule, name) for name in rest)


@pytest.mark.parametrize("rule", BUILT_IN, ids=case)
def test_without_counts_first_the_step_clips_with_the_state_it_began_with(rule):
    mechanism = Mechanism(rule, Constants(groups=GROUPS))
    state = mechanism.start()
    now, _ = rule.observe(torch.arange(mechanism.counts, dtype=torch.float64), 10.0, state)
    assert rule.counts_first or now is state
