"""Adult, compared with its file as read by pandas."""

from __future__ import annotations

import hashlib
import importlib
import io
import lzma
import os
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from evenclip.data import adult
from evenclip.data.adult import FEATURES

CATEGORICAL = [
    "workclass",
    "education",
    "marital-status",
    "occupation",
    "relationship",
    "native-country",
]


@pytest.fixture(scope="module")
def table():
    """Return the rows of the file that have no missing values."""
    text = lzma.decompress(
        resources.files("evenclip.data").joinpath("files", "adult.csv.xz").read_bytes()
    )
    frame = pd.read_csv(io.BytesIO(text))
    assert len(frame) == 48_842
    return frame[~(frame == "?").any(axis=1)]


@pytest.fixture(scope="module", params=[0, 1, 2])
def splits(request):
    return adult(request.param)


def test_adult_file_is_the_one_described():
    packed = resources.files("evenclip.data").joinpath("files", "adult.csv.xz").read_bytes()
    described = resources.files("evenclip.data").joinpath("files", "README.md").read_text()
    assert hashlib.sha256(packed).hexdigest() in described
    assert hashlib.sha256(lzma.decompress(packed)).hexdigest() in described


def test_adult_file_has_the_known_margins(table):
    assert len(table) == 45_222
    assert table["sex"].value_counts().to_dict() == {"Male": 30_527, "Female": 14_695}
    assert table["income"].value_counts().to_dict() == {"<=50K": 34_014, ">50K": 11_208}


def test_adult_features_are_those_of_one_hot_encoding(table):
    assert len(FEATURES) == 98
    assert list(FEATURES[7:]) == list(pd.get_dummies(table[CATEGORICAL], prefix_sep="=").columns)


def test_adult_is_balanced_and_split(splits, table):
    train, test, validation = splits
    assert validation is None
    assert train.x.shape[1] == test.x.shape[1] == 98
    # 0.8·2·14,695 = 23,512 on average. With p = 14,695/30,527 one standard deviation is
    # 0.8·√(30,527·p(1−p)) = 70.
    assert 23_512 - 5 * 70 < len(train) < 23_512 + 5 * 70
    total = len(train) + len(test)
    assert abs(len(train) - 0.8 * total) < 5 * (0.16 * total) ** 0.5
    assert (train.records, test.records) == (23_512, None)  # public, the same for every seed
    group = torch.cat([train.group, test.group])
    assert train.group_names == ("Female", "Male")
    assert int((group == 0).sum()) == (table["sex"] == "Female").sum()  # no female is dropped
    assert abs(int((group == 1).sum()) - 14_695) < 5 * 88


def test_adult_rates_of_high_income_are_those_of_the_file(splits, table):
    y = torch.cat([d.y for d in splits[:2]]).double()
    group = torch.cat([d.group for d in splits[:2]])
    rate = (table["income"] == ">50K").groupby(table["sex"]).mean()
    assert float(y[group == 0].mean()) == pytest.approx(rate["Female"], abs=1e-12)
    assert float(y[group == 1].mean()) == pytest.approx(rate["Male"], abs=0.02)  # 5 standard errors
    assert splits.train.class_names == ("<=50K", ">50K")


def test_adult_is_scaled_by_its_training_rows_only(splits, table):
    raw = decoded(splits, table)[:, :5].astype(float)  # [row, 5], training rows first
    train = raw[: len(splits.train)]
    expected = (raw - train.mean(0)) / train.std(0)
    got = torch.cat([d.x for d in splits[:2]])[:, :5].numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    by_all_rows = (raw - raw.mean(0)) / raw.std(0)
    assert abs(got - by_all_rows).max(0).min() > 1e-4  # the comparison above can tell them apart


def test_adult_rows_are_those_of_the_file(splits, table):
    """After undoing the scaling, every row with features, class and group is in the file."""
    known = set(map(tuple, decoded_file(table)))
    rows = decoded(splits, table)
    assert set(map(tuple, rows)) <= known
    females = rows[rows[:, FEATURES.index("sex=Female")] == 1]
    expected = decoded_file(table[table["sex"] == "Female"])
    assert sorted(map(tuple, females)) == sorted(map(tuple, expected))


def decoded(splits, table):
    """Return all rows in the units of the file, [row, 98 features + class + group] int."""
    x = torch.cat([d.x for d in splits[:2]]).double().numpy()
    for j, column in enumerate(FEATURES[:5]):
        x[:, j] = unscaled(x[:, j], np.unique(table[column]))
    return np.column_stack(
        [x, torch.cat([d.y for d in splits[:2]]), torch.cat([d.group for d in splits[:2]])]
    ).astype(int)


def unscaled(scaled, values):
    """Undo the standardisation of a column that contains the file's smallest and largest value."""
    low, high = scaled.min(), scaled.max()
    return np.rint(values[0] + (scaled - low) / (high - low) * (values[-1] - values[0]))


def decoded_file(table):
    """Return the same array as `decoded`, computed from the file by pandas."""
    numbers = table[list(FEATURES[:5])]
    names = {c: [f.split("=")[1] for f in FEATURES if f.startswith(f"{c}=")] for c in CATEGORICAL}
    one_hot = [pd.get_dummies(pd.Categorical(table[c], names[c])) for c in CATEGORICAL]
    male, rich = table["sex"] == "Male", table["income"] == ">50K"
    columns = [numbers, table["race"] != "White", ~male, *one_hot, rich, male]
    return np.column_stack([np.asarray(column) for column in columns]).astype(int)


def test_adult_is_decided_by_its_seed():
    for left, right in zip(adult(0)[:2], adult(0)[:2], strict=True):
        assert_same(left.x, right.x)
        assert_same(left.y, right.y)
        assert_same(left.group, right.group)
    assert not torch.equal(adult(0).train.x[:100], adult(3).train.x[:100])


def test_adult_leaves_the_global_generators_alone():
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()  # noqa: NPY002
    adult(5)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert (numpy_state == np.random.get_state()[1]).all()  # noqa: NPY002


def test_adult_from_original_files(tmp_path):
    """UCI's layout has spaces, a comment, full stops and an empty last line."""
    write_original(tmp_path, embedded_lines())
    for left, right in zip(adult(1)[:2], adult(1, directory=tmp_path)[:2], strict=True):
        assert_same(left.x, right.x)
        assert_same(left.y, right.y)


def test_adult_refuses_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        adult(directory=tmp_path)
    assert str(missing.value) == (
        f"adult/adult.data is not in the data directory {tmp_path}; get it from "
        "https://archive.ics.uci.edu/dataset/2/adult (without a directory, the copy in this "
        "package is used), or name another directory with --data-dir or the environment variable "
        "EVENCLIP_DATA."
    )


def test_adult_refuses_other_files(tmp_path):
    write_original(tmp_path, [line.replace("Cuba", "Atlantis") for line in embedded_lines()])
    with pytest.raises(
        ValueError,
        match=r"adult\.data has the SHA-256 .* and should have 5b00264637db\.\.\.: it is dam",
    ):
        adult(directory=tmp_path)


@pytest.mark.parametrize(
    "value", ["Atlantis", "Cub", "Cubaa", "cuba", "Zembla", "Cuba" + 40 * "x", "Kübä"]
)
def test_adult_refuses_values_that_it_does_not_have(value):
    module = importlib.import_module("evenclip.data.adult")
    message = re.escape(f"native-country has the value '{value[:32]}'")
    with pytest.raises(ValueError, match=rf"^{message}, unknown in Adult; is this UCI's"):
        module._table([line.replace("Cuba", value) for line in embedded_lines()])


# --- other protected attributes ---

GROUPS = {
    "sex": {"Female": 14_695, "Male": 30_527},
    "race": {"non-white": 6_319, "white": 38_903},
    "age": {"17-29": 13_045, "30-44": 17_893, "45-59": 11_038, "60-90": 3_246},
}


@pytest.mark.parametrize("group", GROUPS)
def test_adult_is_balanced_on_the_group_that_is_chosen(group, table):
    by_pandas = {
        "sex": table["sex"],
        "race": table["race"].map(lambda race: "white" if race == "White" else "non-white"),
        "age": pd.cut(table["age"], [16, 29, 44, 59, 90], labels=list(GROUPS["age"])),
    }[group]
    assert by_pandas.value_counts().to_dict() == GROUPS[group]
    train, test, _ = adult(1, group=group)
    assert train.group_names == test.group_names == tuple(GROUPS[group])
    total = len(train) + len(test)
    assert abs(len(train) - 0.8 * total) < 5 * (0.16 * total) ** 0.5
    smallest = min(GROUPS[group].values())
    assert train.records == round(0.8 * len(GROUPS[group]) * smallest)
    sizes = torch.bincount(torch.cat([train.group, test.group])).tolist()
    for kept, size in zip(sizes, GROUPS[group].values(), strict=True):
        p = smallest / size  # 1 for the smallest group, which is kept whole
        assert abs(kept - smallest) <= 5 * (size * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("group", ["race", "age"])
def test_adult_groups_agree_with_the_features(group, table):
    train, test, _ = adult(2, group=group)
    x = torch.cat([train.x, test.x]).double().numpy()
    codes = torch.cat([train.group, test.group]).numpy()
    if group == "race":
        np.testing.assert_array_equal(codes, 1 - x[:, FEATURES.index("race=other")])
    else:
        age = unscaled(x[:, 0], np.unique(table["age"]))
        np.testing.assert_array_equal(codes, (age >= 30).astype(int) + (age >= 45) + (age >= 60))
    assert x.shape[1] == 98


def test_adult_offers_three_protected_attributes():
    with pytest.raises(
        ValueError,
        match=r"^group is 'income'; Adult's protected attributes are 'sex', 'race', 'age'\.$",
    ):
        adult(group="income")


def test_adult_of_seed_0_has_not_changed():
    """The sums are those of the first version with a coin for each row."""
    train, test, _ = adult(0)
    assert (len(train), len(test), int(train.group.sum()), int(train.y.sum())) == (
        23_498,
        5_982,
        11_739,
        5_031,
    )


def test_adult_of_the_data_directory_is_the_embedded_one():
    directory = os.environ.get("EVENCLIP_DATA")
    if directory is None or not (Path(directory) / "adult" / "adult.test").is_file():
        pytest.skip(
            "needs adult/adult.data and adult/adult.test of UCI in the folder EVENCLIP_DATA"
        )
    for left, right in zip(adult()[:2], adult(directory=directory)[:2], strict=True):
        assert_same(left.x, right.x)
        assert_same(left.y, right.y)


def assert_same(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)  # compares shapes and dtypes too


def embedded_lines():
    """Return the rows of the embedded file as text."""
    packed = resources.files("evenclip.data").joinpath("files", "adult.csv.xz").read_bytes()
    return lzma.decompress(packed).decode().splitlines()[1:]


def write_original(directory, lines):
    """Write the two files as UCI publishes them."""
    folder = directory / "adult"
    folder.mkdir(exist_ok=True)
    spaced = [line.replace(",", ", ") for line in lines]
    (folder / "adult.data").write_text("\n".join(spaced[:32_561]) + "\n\n")
    (folder / "adult.test").write_text(
        "|1x3 Cross validator\n" + ".\n".join(spaced[32_561:]) + ".\n\n"
    )
