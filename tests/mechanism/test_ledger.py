"""The ledger: where each step is, what is written, unions, and damaged ledgers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenclip.mechanism.accounting import epsilon
from evenclip.mechanism.ledger import Entry, Ledger

NOISE = (("count", 10.0), ("gradient", 1.0))
SIZES = (("count", 4), ("gradient", 121))
STEPS = Entry(0.125, NOISE, 100, SIZES, tau=2.0**-90, run="a")

# Writing
# --------------------------------------------------------------------------------------------------


def written(*indices, **changes):
    ledger = Ledger()
    for index in indices:
        ledger.write(0.125, dict(NOISE), SIZES, 2.0**-90, "a", index, **changes)
    return ledger


def test_a_step_has_all_that_was_written():
    ledger = written(0, 1, 2, parent=("b", 7))
    assert ledger.entries == [replace(STEPS, steps=3, parent=("b", 7))]
    assert ledger.entries[0].pairs == 3 * (2 + 61)
    assert type(ledger.entries[0].sizes[0][1]) is int


def test_draws_that_were_left_out_begin_a_new_entry():
    assert [(e.first, e.steps) for e in written(0, 1, 5, 6).entries] == [(0, 2), (5, 2)]


def test_without_an_index_it_is_the_next_one():
    assert written(None, None, 7, None).entries == [
        replace(STEPS, steps=2),
        replace(STEPS, steps=2, first=7),
    ]


def test_a_repeated_step_counts_once_and_another_one_at_its_place_is_refused():
    ledger = written(*range(5), 3)
    assert ledger.entries == [replace(STEPS, steps=5)]
    with pytest.raises(ValueError, match=r"^Draw 3 of run a has q = 0\.125 in one ledger and 0\.5"):
        ledger.write(0.5, dict(NOISE), SIZES, 2.0**-90, "a", 3)


def test_a_reserved_step_that_is_taken_counts_once():
    ledger = Ledger([replace(STEPS, steps=3), replace(STEPS, first=3, steps=4, reserved=True)])
    for index, taken in ((3, 4), (4, 5), (5, 6), (6, 7), (7, 8)):
        ledger.write(0.125, dict(NOISE), SIZES, 2.0**-90, "a", index)
        assert ledger.steps == max(7, taken)
        assert ledger.entries[0] == replace(STEPS, steps=taken)
    assert len(ledger.entries) == 1


def test_other_sizes_another_tau_or_run_is_another_entry():
    ledger = written(0)
    ledger.write(0.125, dict(NOISE), (("count", 4), ("gradient", 120)), 2.0**-90, "a", 1)
    ledger.write(0.125, dict(NOISE), SIZES, 2.0**-89, "a", 2)
    ledger.write(0.125, dict(NOISE), SIZES, 2.0**-90, "b", 0)
    assert [(e.run, e.first, e.steps) for e in ledger.entries] == [
        ("a", 0, 1), ("a", 1, 1), ("a", 2, 1), ("b", 0, 1),
    ]  # fmt: skip


# Unions
# --------------------------------------------------------------------------------------------------


@st.composite
def ledgers(draw):
    """Ledgers of a few runs, whose noise depends on the run and changes with the draw."""
    entries = []
    for _ in range(draw(st.integers(0, 6))):
        run, first = draw(st.sampled_from("abc")), draw(st.integers(0, 12))
        for index in range(first, first + draw(st.integers(0, 8))):
            noise = (("gradient", 1.0 + ord(run) + (index // 5)),)
            reserved = draw(st.booleans())
            entries.append(Entry(0.1, noise, 1, run=run, first=index, reserved=reserved))
    merged = []
    for entry in entries:  # some consecutive steps in one entry
        if merged and entry.continues(merged[-1]) and draw(st.booleans()):
            merged[-1] = replace(merged[-1], steps=merged[-1].steps + 1)
        else:
            merged.append(entry)
    return Ledger(merged)


def places(*several):
    """Return {(run, draw): whether it was taken}, one step at a time."""
    taken = {}
    for entry in (entry for ledger in several for entry in ledger.entries):
        for index in range(entry.first, entry.first + entry.steps):
            place = entry.run, index
            taken[place] = taken.get(place, False) or not entry.reserved
    return taken


PROPERTY = settings(derandomize=True, deadline=None, database=None)


@given(st.lists(ledgers(), max_size=4))
@PROPERTY
def test_a_union_is_the_set_of_all_steps(several):
    union = Ledger.union(*several)
    assert places(union) == places(*several)
    assert union.steps == len(places(union))
    for entry in union.entries:
        for index in range(entry.first, entry.end):
            assert entry.multipliers == (("gradient", 1.0 + ord(entry.run) + index // 5),)
    for one, other in zip(union.entries, union.entries[1:], strict=False):
        assert not other.continues(one)


@given(ledgers(), ledgers(), ledgers())
@PROPERTY
def test_a_union_forgets_order_and_repetition(a, b, c):
    union = Ledger.union(a, b, c)
    assert union == Ledger.union(c, Ledger.union(b, a))
    assert union == Ledger.union(Ledger.union(a, b), Ledger.union(b, c))
    assert union == Ledger.union(union, a, union)


def test_branches_of_one_checkpoint():
    """The steps up to the checkpoint count once; all branches and reserved steps count too."""
    prefix, ahead = replace(STEPS, steps=60), replace(STEPS, first=60, steps=10, reserved=True)
    original = Ledger([STEPS])
    branches = [
        Ledger([prefix, ahead, replace(STEPS, run=run, steps=steps, parent=("a", 60))])
        for run, steps in (("b", 40), ("c", 30))
    ]
    assert Ledger.union(*branches).steps == 60 + 10 + 40 + 30
    assert Ledger.union(original, *branches).steps == 100 + 40 + 30
    assert epsilon(Ledger.union(original, branches[0]), 1e-6) > epsilon(original, 1e-6)


def test_a_branch_without_its_beginning_is_refused():
    branch = replace(STEPS, run="b", parent=("a", 60))
    for held in ([], [replace(STEPS, steps=59)], [replace(STEPS, first=1)]):
        with pytest.raises(ValueError, match=r"^Run b was resumed from draw 60 of run a, and .* t"):
            Ledger.union(Ledger([*held, branch]))
    assert Ledger.union(Ledger([replace(STEPS, steps=60), branch])).steps == 160


@pytest.mark.parametrize("length", [1, 2, 3])
def test_runs_that_are_resumed_from_each_other_are_refused(length):
    """Each would have its beginning, and none of them began."""
    names = "abc"[:length]
    entries = [
        replace(STEPS, run=run, parent=(parent, 10))
        for run, parent in zip(names, names[1:] + names[0], strict=True)
    ]
    with pytest.raises(ValueError, match=r"^Run [abc] was resumed from itself, by way of its par"):
        Ledger.union(Ledger(entries))
    grandchild = replace(STEPS, run="z", parent=("y", 10))
    line = [STEPS, replace(STEPS, run="y", parent=("a", 10)), grandchild]
    assert Ledger.union(Ledger(line)).steps == 300


def test_a_whole_ledger_has_every_draw_from_the_first_one_on():
    Ledger([STEPS, replace(STEPS, first=100), Entry(0.01, NOISE, 10)]).check_whole()
    for entries, draw in (
        ([replace(STEPS, first=90, steps=10)], 0),
        ([STEPS, replace(STEPS, first=101)], 100),
        ([STEPS, replace(STEPS, run="b", first=1, parent=("a", 4))], 0),
    ):
        with pytest.raises(ValueError, match=rf"^Draw {draw} of run [ab] is missing, and later "):
            Ledger(entries).check_whole()
        later = Ledger(entries)
        assert Ledger.union(later) == later  # another ledger may hold the draw
    with pytest.raises(ValueError, match="was resumed from draw 200 of run a"):
        Ledger([STEPS, replace(STEPS, run="b", parent=("a", 200))]).check_whole()


def test_joined_ledgers_may_lack_steps_that_are_elsewhere():
    branch = Ledger([replace(STEPS, run="b", parent=("a", 60))])
    assert Ledger.joined(branch, branch) == branch


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": 0.25}, "q = 0.125 in one ledger and 0.25"),
        ({"multipliers": (("count", 10.0), ("gradient", 2.0))}, "multipliers = "),
        ({"sizes": (("count", 4), ("gradient", 120))}, "sizes = "),
        ({"sizes": ()}, "sizes = "),
        ({"tau": 0.0}, "tau = "),
        ({"parent": ("z", 0)}, "parent = "),
        ({"lam": 2.0**-36}, "sampler = "),
        ({"beta": 2.0**-70}, "sampler = "),
    ],
)
def test_two_different_steps_in_one_place_are_refused(change, named):
    other = replace(STEPS, first=99, steps=2, **change)
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the text is compared
        Ledger.union(Ledger([STEPS]), Ledger([other]))
    assert str(refused.value).startswith(f"Draw 99 of run a has {named}")
    assert str(refused.value).endswith("damaged or forged.")
    assert Ledger.union(Ledger([STEPS]), Ledger([replace(other, first=100)])).steps == 102


def test_the_order_of_releases_makes_no_difference():
    turned = replace(STEPS, multipliers=NOISE[::-1], sizes=SIZES[::-1])
    assert Ledger.union(Ledger([STEPS]), Ledger([turned])).steps == 100


def test_ledgers_made_by_hand_always_add_up():
    one = Ledger([Entry(0.01, NOISE, 10)])
    assert Ledger.union(one, one, Ledger([STEPS])).steps == 120
    assert Ledger.union() == Ledger()


# Plain values
# --------------------------------------------------------------------------------------------------


def test_json_holds_every_field():
    ledger = Ledger([
        replace(STEPS, lam=2.0**-36, beta=2.0**-70, parent=("b", 3), first=4),
        replace(STEPS, first=104, reserved=True),
        Entry(None, (("gradient", 0.0),)),
    ])  # fmt: skip
    rows = json.loads(json.dumps(ledger.to_json(), allow_nan=False))
    assert Ledger.from_json(rows) == ledger
    assert rows[2] == {"q": None, "multipliers": {"gradient": 0.0}, "steps": 1}
    assert set(rows[0]) == {
        "q", "multipliers", "steps", "sizes", "tau", "run", "first", "parent", "lam", "beta",
    }  # fmt: skip


DAMAGE = [
    ({"q": 1.5}, "has q = 1.5; it must be a Poisson rate, from 0 to 1, or null."),
    ({"q": -0.1}, "has q = -0.1; it must be a Poisson rate"),
    ({"q": 0}, "has q = 0; it must be a Poisson rate above 0; no run draws empty batches only."),
    ({"steps": 0}, "has steps = 0; it must be a whole number of at least 1."),
    ({"q": math.nan}, "has q = nan; it must be a Poisson rate"),
    ({"q": "0.1"}, "has q = '0.1'; it must be a number."),
    ({"q": True}, "has q = True; it must be a number."),
    ({"multipliers": {"a": -1}}, "has multiplier 'a' = -1.0; it must be a finite number of at le"),
    ({"multipliers": {"a": math.inf}}, "has multiplier 'a' = inf; it must be a finite number"),
    ({"multipliers": {"a": math.nan}}, "has multiplier 'a' = nan; it must be a finite number"),
    ({"multipliers": {"a": None}}, "has multipliers['a'] = None; it must be a number."),
    ({"multipliers": {"a": 10**400}}, "it must be a number."),
    ({"multipliers": {}}, "has multipliers = {}; it must be at least one release's."),
    ({"multipliers": [1.0]}, "has multipliers = [1.0]; it must be an object of names and numbers."),
    ({"steps": -5}, "has steps = -5; it must be a whole number of at least 0."),
    ({"steps": 1.5}, "has steps = 1.5; it must be a whole number"),
    ({"steps": math.inf}, "has steps = inf; it must be a whole number"),
    ({"steps": False}, "has steps = False; it must be a number."),
    ({"sizes": {"a": -2}}, "has sizes = {'a': -2}; it must be from 1 to 9007199254740992 numbers"),
    ({"sizes": {"b": 2}}, "has sizes, but none of the release 'a'; give the size of each."),
    ({"sizes": 3}, "has sizes = 3; it must be an object"),
    ({"tau": 1.0}, "has tau = 1.0; it must be a number of at least 0 and below 1."),
    ({"tau": -1e-30}, "has tau = -1e-30; it must be a number of at least 0"),
    ({"lam": -1.0}, "has lam = -1.0; it must be 7.28e-12 or more, as of every sampler."),
    ({"beta": math.nan}, "has beta = nan; it must be a number of at least 0"),
    ({"run": 3}, "has run = 3; it must be a text."),
    ({"first": -1}, "has first = -1; it must be a whole number"),
    ({"parent": "a"}, "has parent = 'a'; it must be a run id and the index of a draw."),
    ({"parent": ["a", -1]}, "has parent = ['a', -1]; it must be a run id and the index"),
    ({"parent": ["", 1]}, "has parent = ['', 1]; it must be a run id and the index"),
    ({"reserved": 0}, "has reserved = 0; it must be true or false."),
    ({"size": {}}, "has the unknown field 'size'; give a ledger as this version"),
]


@pytest.mark.parametrize(("change", "sentence"), DAMAGE, ids=lambda part: str(part)[:30])
def test_a_damaged_entry_is_named(change, sentence):
    sound = {"q": 0.1, "multipliers": {"a": 1.0}, "steps": 5}
    assert Ledger.from_json([sound, sound]).steps == 10
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the text is compared
        Ledger.from_json([sound, sound | change])
    assert str(refused.value).startswith("Entry 2 of the ledger has ")
    assert sentence in str(refused.value)
    assert str(refused.value).count(". ") == 0


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("[]", "A ledger is a list of entries, and this is '[]'."),
        ({"q": 1}, "A ledger is a list of entries, and this is {'q': 1}."),
        (None, "A ledger is a list of entries, and this is None."),
        ([3], "Entry 1 of the ledger is 3; it must be an object with q and multipliers."),
        ([{"q": 0.1, "steps": 1}], "Entry 1 of the ledger has no 'multipliers'; give"),
    ],
)
def test_what_is_no_ledger_is_refused(rows, sentence):
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the text is compared
        Ledger.from_json(rows)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    "entry",
    [
        Entry(0.1, (("a", -1.0),), 10),
        Entry(0.1, (("a", 1.0),), -5),
        Entry(0.1, (("a", 1.0),), 1, sizes=(("a", -1),)),
        Entry(0.1, (("a", 1.0),), 1, sizes=(("a", 1),), tau=-0.1),
    ],
)
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_ledger_made_by_hand_is_checked_before_it_is_used(entry, accountant):
    with pytest.raises(ValueError, match=r"^Entry 2 of the ledger has .* it must be a"):
        epsilon(Ledger([Entry(0.1, (("a", 1.0),), 10), entry]), 1e-6, accountant)
