"""Custom datasets: what counts as one, the defaults, and a sentence for each mistake."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from evenclip.data import Dataset, MapDataset, Source, Splits
from evenclip.data.source import NUMBER, check_splits, source_of

Y, GROUP = torch.arange(8) % 3, torch.arange(8) % 2
DATA = Dataset(torch.zeros(8, 1, 6, 6), Y, GROUP, ("a", "b"))


def faces(seed):
    return Splits(DATA, DATA)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.zeros(2), i % 2, i % 2


def test_a_function_of_the_seed_is_a_dataset():
    source = source_of(faces, "faces", "my_data.py:faces")
    assert source.name == "faces"
    assert source.uncovered == (
        "The function my_data.py:faces may compute values from the data before training, such as "
        "a mean for scaling, a list of categories or a choice of rows.",
        NUMBER,
    )
    assert source.load(3, directory=None).train is DATA
    assert source.lacks(None) is None


def test_a_source_is_one_and_says_itself_what_is_not_covered():
    silent = Source(name="faces", load=lambda seed, directory=None: faces(seed))
    assert source_of(silent, "SOURCE", "f.py:SOURCE").uncovered[-1] == NUMBER
    frank = replace(silent, uncovered=("The mean is that of the rows.",))
    assert source_of(frank, "SOURCE", "f.py:SOURCE") is frank


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            3,
            "f.py:it is an int; it must be a function of the seed that returns Splits, or an "
            "evenclip.data.Source.",
        ),
        (
            lambda: None,
            "f.py:it has the parameters (); it is called as it(seed): add those that are "
            "missing, and give all others default values.",
        ),
        (
            lambda seed, path: None,
            "f.py:it has the parameters (seed, path); it is called as it(seed): add those "
            "that are missing, and give all others default values.",
        ),
        (
            Source(name="it", load=faces),
            "load of f.py:it has the parameters (seed); it is called as load(seed, directory): "
            "add those that are missing, and give all others default values.",
        ),
    ],
)
def test_what_is_no_dataset(value, says):
    with pytest.raises(TypeError) as raised:
        source_of(value, "it", "f.py:it")
    assert str(raised.value) == says


def test_names_that_are_missing_are_filled_in():
    """A class of the test split that no training row has is named as well."""
    test = replace(DATA, y=Y + 1)
    splits = check_splits(Splits(DATA, test), Source("faces", faces), "f.py:faces")
    for data in splits[:2]:
        assert (data.class_names, data.name) == (("0", "1", "2", "3"), "faces")
    assert splits.validation is None
    named = replace(DATA, class_names=("x", "y", "z"), name="mine")
    kept = check_splits(Splits(named, named, named), Source("faces", faces), "f.py:faces")
    assert (kept.validation.class_names, kept.train.name) == (("x", "y", "z"), "mine")


SPLIT = "The train split of f.py:it "
BAD = {
    "f.py:it returned None; it must return Splits(train, test), or Splits(train, test, "
    "validation), from evenclip.data.": None,
    "f.py:it returned a tuple of 2; it must return Splits(train, test), or Splits(train, test, "
    "validation), from evenclip.data.": (DATA, DATA),
    "f.py:it returned no test split; a comparison needs both.": Splits(DATA, None),
    SPLIT + "is a tuple of 2; it must be an evenclip.data.Dataset: as_dataset converts "
    "arrays.": Splits((DATA.x, DATA.y), DATA),
    SPLIT + "is a MapDataset; it must be an evenclip.data.Dataset: as_dataset converts "
    "arrays.": Splits(MapDataset(Rows(), ("a", "b")), DATA),
    SPLIT + "has a tuple of 2 as x; a comparison needs one tensor.": Splits(
        replace(DATA, x=(DATA.x, DATA.x)), DATA
    ),
    SPLIT + "has x with shape [8]; it must be [row, feature] or [row, channel, height, "
    "width].": Splits(replace(DATA, x=DATA.x[:, 0, 0, 0]), DATA),
    SPLIT + "has no groups; give Dataset(x, y, group, group_names), with at least two.": Splits(
        Dataset(DATA.x, DATA.y), DATA
    ),
    SPLIT + "has y with dtype torch.float32 and shape [8]; it must hold one class per row, as "
    "int64 codes from 0.": Splits(replace(DATA, y=Y.float()), DATA),
    SPLIT + "has y with dtype torch.int64 and shape [8, 2]; it must hold one class per row, as "
    "int64 codes from 0.": Splits(replace(DATA, y=torch.stack([Y, Y], 1)), DATA),
    SPLIT + "has the class -1; classes are numbered from 0.": Splits(replace(DATA, y=Y - 1), DATA),
    "The splits of f.py:it differ in the shape of a row: [1, 6, 6] in train and [1, 5, 5] in "
    "test; they must be the same.": Splits(DATA, replace(DATA, x=DATA.x[:, :, 1:, 1:])),
    "The splits of f.py:it differ in the dtype of x: torch.float32 in train and torch.uint8 in "
    "test; they must be the same.": Splits(DATA, replace(DATA, x=DATA.x.byte())),
    "The splits of f.py:it differ in group_names: ('a', 'b') in train and ('b', 'a') in "
    "validation; they must be the same.": Splits(DATA, DATA, replace(DATA, group_names=("b", "a"))),
    "The splits of f.py:it differ in class_names: () in train and ('0', '1', '2') in test; they "
    "must be the same.": Splits(DATA, replace(DATA, class_names=("0", "1", "2"))),
}


@pytest.mark.parametrize("says", BAD)
def test_what_a_comparison_cannot_use(says):
    with pytest.raises((TypeError, ValueError)) as raised:
        check_splits(BAD[says], Source("it", faces), "f.py:it")
    assert str(raised.value) == says


def test_the_names_of_a_source_are_those_of_its_data():
    for source, says in (
        (
            Source("it", faces, groups=("a", "c")),
            "f.py:it has the groups ('a', 'c') and its data ('a', 'b'); they must be the same.",
        ),
        (
            Source("it", faces, pair=("a", "c")),
            "pair of f.py:it is ('a', 'c'); choose two of the groups a, b.",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
            check_splits(Splits(DATA, DATA), source, "f.py:it")
