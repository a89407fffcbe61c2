"""The split of all data, when one record decides about others.

The attacker knows a table and one more record, and the key of the split, which is a public seed. It
sees who was trained on, or who tested, and has to say whether the record was there.

If the split permutes all rows, the record moves hundreds of others between training and test, and
with `--unit` it changes which row of other people is kept. An ε for one training record is then
worth little. Each record's place must be a function of that record alone, so that the record
changes nothing but its own presence; of equal records, only how many there are of each place.
"""

from __future__ import annotations

import importlib
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenclip.data import Dataset, Splits
from evenclip.data.content import of_series
from evenclip.data.rows import split_rows
from evenclip.data.sample import Coins, coins
from evenclip.data.table import read, table
from evenclip.data.values import text
from evenclip.sweep.describe import data as described

ADULT = importlib.import_module("evenclip.data.adult")
CELEBA = importlib.import_module("evenclip.data.celeba")
DIGITS = importlib.import_module("evenclip.data.digits")
DUTCH = importlib.import_module("evenclip.data.dutch")
MNIST = importlib.import_module("evenclip.data.mnist")
PARTS = ("train", "validation", "test")


def people(n=900, seed=0):
    """Return a table of people with three rows each, and some equal rows."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "person": np.arange(n) // 3,
            "x": random.normal(size=n).round(2),
            "age": random.integers(18, 40, n),
            "job": random.choice(["smith", "baker", "1,5", "02"], n),
            "g": random.choice(["a", "b"], n),
            "y": random.integers(0, 2, n),
        }
    )
    frame.loc[n - 30 :, ["x", "age", "job", "g", "y"]] = [1.0, 20, "smith", "a", 0]
    return frame.astype({"age": int, "y": int})


def places(frame, unit=None, seed=3):
    """Return how many equal rows are in each part: (row, part) -> number."""
    split = split_rows([frame], "y", unit, None, seed)[0]
    contents = list(zip(*[frame[name].astype(str) for name in frame], strict=True))
    found = [(contents[row], part) for part in PARTS for row in getattr(split, part)]
    return Counter(found)


def moved(with_it, without):
    """Return how many places differ: 1 if the record itself was in a part."""
    return ((with_it - without) + (without - with_it)).total()


def permuted(monkeypatch):
    """Plant the old split: a permutation of all rows, cut at exact shares."""

    def parts(self, *shares):
        order = np.random.default_rng(3).permutation(len(self))
        ends = np.round(np.cumsum(shares) * len(self)).astype(int)
        return [np.sort(part) for part in np.split(order, ends)]

    def first_of_each(self, person):
        order = np.random.default_rng(3).permutation(len(self))
        return np.sort(order[np.unique(person[order], return_index=True)[1]])

    monkeypatch.setattr(Coins, "parts", parts)
    monkeypatch.setattr(Coins, "first_of_each", first_of_each)


# --- tables -------------------------------------------------------------------------------------

NEW = {"person": 7_000, "x": 0.5, "age": 30, "job": "smith", "g": "a", "y": 1}
ADDED = {
    "another": {},
    "a copy": {"x": 1.0, "age": 20, "y": 0},
    "a missing number": {"age": None},
    "a text in a column of numbers": {"x": "unknown"},
    "a text as an age": {"age": "old"},
    "a new category": {"job": "astronaut"},
    "a new class": {"y": 2},
    "a missing group": {"g": None},
}


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("first", [False, True])
def test_a_record_more_moves_nobody_else(name, first):
    frame = people()
    new = pd.DataFrame([NEW | ADDED[name]])
    longer = pd.concat([new, frame] if first else [frame, new], ignore_index=True)
    contents = coins(0, *(of_series(frame[name]) for name in frame)).words
    again = coins(0, *(of_series(longer[name]) for name in longer)).words
    ours = {tuple(row) for row in contents.tolist()}
    theirs = {tuple(row) for row in again.tolist()}
    assert len(theirs - ours) == 1
    assert ours <= theirs


@pytest.mark.parametrize("name", ADDED)
def test_a_line_more_in_a_file_moves_nobody_else(tmp_path, name):
    frame = people()
    longer = pd.concat([frame, pd.DataFrame([NEW | ADDED[name]])], ignore_index=True)
    found = []
    for rows_ in (frame.astype(object), longer.astype(object)):
        rows_.to_csv(tmp_path / "t.csv", index=False)
        split = split_rows([read(tmp_path / "t.csv")], "y", None, None, 3)[0]
        found.append([getattr(split, part)[getattr(split, part) < len(frame)] for part in PARTS])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=25, deadline=None)
@given(
    gone=st.sets(st.integers(0, 899), max_size=5), shuffle=st.integers(0, 9), seed=st.integers(0)
)
def test_rows_less_and_in_another_order_move_nobody_else(gone, shuffle, seed):
    frame = people()
    less = frame.drop(index=list(gone)).sample(frac=1, random_state=shuffle, ignore_index=True)
    assert moved(places(frame, seed=seed), places(less, seed=seed)) == len(gone)


@settings(max_examples=25, deadline=None)
@given(who=st.integers(0, 299), shuffle=st.integers(0, 9))
def test_a_person_less_changes_no_other_persons_row(who, shuffle):
    """Copies are left out: whether an equal row of another person is kept cannot be seen."""
    frame = people().drop_duplicates(ignore_index=True)
    less = frame[frame["person"] != who].sample(frac=1, random_state=shuffle, ignore_index=True)
    assert moved(places(frame, "person"), places(less, "person")) == 1


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from(["01", "1", "a", " b", "", "x,y", "é"]), min_size=1, max_size=9))
def test_the_rows_of_a_person_are_a_matter_of_that_person(values):
    """More rows of one person change at most that person's row, and not the person's part."""
    frame = people()
    own = pd.DataFrame([NEW | {"person": 5, "job": value} for value in values])
    longer = pd.concat([frame, own], ignore_index=True)
    difference = moved(places(frame, "person"), places(longer, "person"))
    assert difference in (0, 2)
    parts = {
        part: {row[0] for row, where in places(longer, "person") if where == part} for part in PARTS
    }
    mine = {part: {r[0] for r, where in places(frame, "person") if where == part} for part in PARTS}
    assert parts == mine


def test_ids_that_look_like_numbers_are_read_as_they_are_written(tmp_path):
    """Another person's id must not decide whether 01 and 1 are two people."""
    found = []
    for last in ("0300", "x300"):
        frame = people().astype({"person": object})
        frame["person"] = [f"{i // 3:04d}" for i in range(900)]
        frame.loc[897:, "person"] = last
        frame.to_csv(tmp_path / "t.csv", index=False)
        made = table(tmp_path / "t.csv", target="y", group="g", unit="person")
        found.append(sum(map(len, made.splits)))
    assert found == [300, 300]


@pytest.mark.parametrize("unit", [None, "person"])
def test_the_attack_wins_against_a_permutation_of_all_rows(monkeypatch, unit):
    permuted(monkeypatch)
    frame = people()
    longer = pd.concat([frame, pd.DataFrame([NEW])], ignore_index=True)
    assert moved(places(longer, unit), places(frame, unit)) > 100


# --- content ------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.integers(-(2**53), 2**53), st.floats(allow_nan=False), st.text(max_size=5), st.none()
)


@settings(deadline=None)
@given(st.lists(st.lists(VALUES, min_size=3, max_size=3), min_size=1, max_size=12))
def test_coins_are_those_of_each_row_alone(values):
    frame = pd.DataFrame(values, columns=list("abc"), dtype=object)
    drawn = coins(1, *(of_series(frame[name]) for name in frame), copies=False).words
    for i in range(len(frame)):
        alone = frame.iloc[[i]].infer_objects()
        own = coins(1, *(of_series(alone[name]) for name in alone), copies=False).words
        np.testing.assert_array_equal(own[0], drawn[i])


def test_a_date_that_makes_a_column_text_moves_nobody_else(tmp_path):
    """With one date of another time zone, pandas reads a column of dates as texts."""
    frame = people()
    frame["since"] = pd.date_range("2001-01-01", periods=len(frame)).strftime("%Y-%m-%d")
    found = []
    for more in ([], ["2001-01-05T00:00:00+02:00"]):
        rows = pd.concat([frame, pd.DataFrame([NEW | {"since": day} for day in more])])
        rows.to_csv(tmp_path / "t.csv", index=False)
        read_in = pd.read_csv(tmp_path / "t.csv", parse_dates=["since"])
        split = split_rows([read_in], "y", None, None, 3)[0]
        found.append([getattr(split, part)[getattr(split, part) < len(frame)] for part in PARTS])
    assert not pd.api.types.is_datetime64_any_dtype(read_in["since"])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


SPELT = {
    "categories": ["250.1", "250.10", "0250.1", "401.9"],
    "zeros in front": ["0" * i + "1" for i in range(30)],
    "dates": ["2001-12-31", "2001-12-31T00:00", "2001-12-31 00:00:00"],
    "flags": ["TRUE", "True", "true"],
    "large numbers": [2**60 + i for i in range(20)],
    "mixed": [1, True, "1", 1.0, "01", b"1"],
}


@pytest.mark.parametrize("name", SPELT)
@pytest.mark.parametrize("gone", [0, 7, 399])
def test_a_record_less_moves_no_record_that_is_spelt_differently(name, gone):
    """An encoder tells these spellings apart, so that an exchange of two places is a change."""
    spellings = SPELT[name]
    column = [spellings[i % len(spellings)] for i in range(400)]
    frame = pd.DataFrame({"k": pd.Series(column), "y": [0, 1] * 200})
    less = frame.drop(index=gone).reset_index(drop=True)
    found = []
    for rows_ in (frame, less):
        parts = coins(3, of_series(rows_["k"]), of_series(rows_["y"])).parts(0.5, 0.2)
        held = [
            (text(rows_["k"][row]), rows_["y"][row], part)
            for part, rows_of_part in enumerate(parts)
            for row in rows_of_part
        ]
        found.append(Counter(held))
    assert moved(*found) == 1


def test_a_number_has_one_content_with_any_decimal_mark():
    """One value decides for a whole file whether commas are read as decimal commas."""
    forms = ["1.5", "1,5"], ["1.50e0", "1,50e0"], ["0.5", ",5"], ["5", "5,"], ["-2.25", "-2,25"]
    for pair in forms:
        one, other = (coins(0, np.array([form]), copies=False).words for form in pair)
        np.testing.assert_array_equal(one, other)
    for other in (",", "1,2,3", "1,5x"):
        assert len(coins(0, np.array([other]))) == 1


def test_no_two_lists_of_fields_have_one_content():
    fields = [("a", "bc"), ("ab", "c"), ("", "abc"), ("abc", ""), ("a,b", "c"), ("a", "b,c")]
    columns = [np.array(column) for column in zip(*fields, strict=True)]
    words = coins(0, *columns, copies=False).words
    assert len({tuple(row) for row in words.tolist()}) == len(fields)


def test_a_value_has_one_content_however_it_is_stored():
    forms = [
        pd.Series([3, -0.0, np.nan]),
        pd.Series(["3.0", "0", None]),
        pd.Series([" 03 ", "-0.0", " "], dtype=object),
        pd.Series([np.float32(3), 0, pd.NA], dtype=object),
        pd.Series([3, 0, None], dtype="Int64"),
        pd.Series(["3", "0", None], dtype="category"),
    ]
    words = [coins(0, of_series(form), copies=False).words for form in forms]
    for other in words[1:]:
        np.testing.assert_array_equal(other, words[0])
    flags = [pd.Series([True, False]), pd.Series(["TRUE", "false"]), pd.Series([True, False, None])]
    first, *others = [coins(0, of_series(form), copies=False).words[:2] for form in flags]
    for other in others:
        np.testing.assert_array_equal(other, first)
    days = ["2001-01-31", "2003-05-06 07:08:09", "2003-05-06T07:08:09.12"]
    moments = pd.Series(pd.to_datetime(days, format="ISO8601"))
    dates = [pd.Series(days), moments, moments.astype(object), moments.dt.to_pydatetime()]
    first, *others = [coins(0, of_series(pd.Series(form)), copies=False).words for form in dates]
    for other in others:
        np.testing.assert_array_equal(other, first)
    mixed = [pd.Series([1, True], dtype=object), pd.Series([True, 1], dtype=object)]
    one, other = (coins(0, of_series(form), copies=False).words for form in mixed)
    np.testing.assert_array_equal(one, other[::-1])
    assert (one[0] != one[1]).any()


def test_copies_have_coins_of_their_own_and_a_person_does_not():
    values = np.zeros(2000)
    train, test = coins(0, values).parts(0.8)
    assert abs(len(train) - 1600) < 5 * (2000 * 0.16) ** 0.5
    (train, test) = coins(0, values, copies=False).parts(0.8)
    assert min(len(train), len(test)) == 0


def test_shares_are_right_and_the_choices_independent():
    n = 200_000
    drawn = coins(0, np.arange(n))
    kept = drawn.kept(np.full(n, 0.09))
    cells = {"all": np.ones(n, bool), "kept": kept, "marked": drawn.marks > 0}
    for chosen in cells.values():
        size = chosen.sum()
        for part, share in zip(drawn.parts(0.64, 0.16), (0.64, 0.16, 0.2), strict=True):
            error = 5 * (size * share * (1 - share)) ** 0.5
            assert abs(np.count_nonzero(chosen[part]) - share * size) < error
    assert abs(kept.sum() - 0.09 * n) < 5 * (n * 0.09 * 0.91) ** 0.5
    assert drawn.kept(np.ones(n)).all()
    other = coins(1, np.arange(n))
    assert abs(np.isin(drawn.parts(0.8)[0], other.parts(0.8)[0]).mean() - 0.8) < 0.01


def test_columns_of_different_lengths_and_none_are_refused():
    with pytest.raises(ValueError, match=r"^The columns have \[2, 3\] records; give at least one"):
        coins(0, np.arange(2), np.arange(3))
    with pytest.raises(ValueError, match=r"^The columns have \[\] records; give at least one"):
        coins(0)
    with pytest.raises(
        ValueError, match=r"^seed is -1; it must be a whole number of at least 0\.$"
    ):
        coins(-1, np.arange(2))


# --- the datasets of the package ----------------------------------------------------------------


def contents(data):
    """Return the rows of a dataset as a multiset, without scaled features."""
    x = data.x.reshape(len(data), -1)[:, -90:]
    return Counter((bytes(r.numpy().tobytes()), int(y)) for r, y in zip(x, data.y, strict=True))


def neighbours(load):
    """Return how many rows of training and of test data differ between two calls."""
    one, other = load(False), load(True)
    return [moved(contents(a), contents(b)) for a, b in zip(one[:2], other[:2], strict=True)]


@pytest.mark.parametrize("group", ADULT.GROUPS)
def test_adult(monkeypatch, group):
    whole = ADULT._embedded()

    def load(less):
        cut = whole._replace(
            raw=whole.raw[less:],
            numbers=whole.numbers[less:],
            indicators=whole.indicators[less:],
            income=whole.income[less:],
            groups={name: codes[less:] for name, codes in whole.groups.items()},
        )
        monkeypatch.setattr(ADULT, "_embedded", lambda: cut)
        return ADULT.adult(0, group=group)

    assert sum(neighbours(load)) <= 1


def test_dutch(monkeypatch):
    random, n = np.random.default_rng(0), 400
    names = [*DUTCH.CATEGORIES, "sex", "prev_residence_place", "occupation"]
    columns = {name: random.choice(["1", "2", "111"], n) for name in names}

    def load(less):
        monkeypatch.setattr(
            DUTCH, "_columns", lambda text: {k: v[less:] for k, v in columns.items()}
        )
        monkeypatch.setattr(DUTCH.File, "read", lambda *given: b"")
        return DUTCH.dutch(0)

    assert sum(neighbours(load)) == 1


def test_digits(monkeypatch):
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)

    def load(less):
        monkeypatch.setattr(
            datasets, "load_digits", lambda return_X_y: (pixels[less:], labels[less:])
        )
        return DIGITS.digits(0)

    assert sum(neighbours(load)) <= 1


@pytest.mark.parametrize("less", [1, 7])
def test_mnist(monkeypatch, less):
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (300, 1, 28, 28), np.uint8), random.integers(6, 10, 300)

    def load(fewer):
        start = less if fewer else 0
        part = {"train": (x[start:], y[start:]), "t10k": (x[:50], y[:50])}
        monkeypatch.setattr(MNIST, "_part", lambda name, directory: part[name])
        return MNIST.mnist(0)

    ours = load(False)
    eights = int((ours.train.y == 8).sum())
    assert 0 < eights < 30 < int((y == 8).sum())
    gone = moved(contents(load(True).train), contents(ours.train))
    assert int((y[:less] != 8).sum()) <= gone <= less


def test_celeba(tmp_path, monkeypatch):
    """One person's images more or less move no other person."""
    names = np.array([f"{i:06d}.jpg" for i in range(600)])
    parts = []
    for less in (0, 3):
        monkeypatch.setattr(
            CELEBA, "_codes", lambda path, some: np.array([int(n[:6]) // 3 for n in some])
        )
        monkeypatch.setattr(CELEBA.File, "require", lambda *given: tmp_path)
        split = CELEBA._by_identity(names[less:].tolist(), tmp_path, 0)
        parts.append([set(names[less:][rows_].tolist()) for rows_ in split])
    assert sum(len(a ^ b) for a, b in zip(*parts, strict=True)) == 3
    assert all(a >= b for a, b in zip(*parts, strict=True))


# --- rows taken from a split --------------------------------------------------------------------


def some(n, marks):
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 4, generator=random), torch.arange(n) % 2
    word = torch.from_numpy(coins(0, np.arange(n)).marks) if marks else None
    return Dataset(x, y, y, ("a", "b"), ("no", "yes"), records=2000, marks=word)


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("choice", ["rows", "hold_out"])
def test_rows_that_are_sampled_or_held_out(marks, choice):
    """Adult's scaled features change with each record, and its marks do not."""
    whole = some(2000, marks)
    kept = torch.arange(1999)
    less = described._rows(whole, kept.numpy(), 2000)

    def chosen(data):
        splits = Splits(data, whole)
        if choice == "rows":
            return [described._fewer(splits, 500, 0).train]
        held = described._held_out(splits, 0.2, 0)
        return [held.train, held.validation]

    found = [
        moved(contents(a), contents(b)) for a, b in zip(chosen(whole), chosen(less), strict=True)
    ]
    assert sum(found) <= 1
    assert chosen(whole)[0].records == (500 if choice == "rows" else 1600)


def test_the_attack_wins_against_old_samples(monkeypatch):
    permuted(monkeypatch)
    whole = some(2000, marks=True)
    less = described._rows(whole, np.arange(1999), 2000)
    parts = [described._held_out(Splits(data, whole), 0.2, 0).train for data in (whole, less)]
    assert moved(*map(contents, parts)) > 100
