"""Data: what is refused and in which words, rows by index, and Adult against its own file read another way."""

from __future__ import annotations

import hashlib
import io
import lzma
import math
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import data as torch_data

from evenclip.data import Dataset, MapDataset, adult, as_dataset
from evenclip.data.adult import FEATURES

N = 10
X = torch.arange(3.0 * N).reshape(N, 3)  # [sample, 3]
Y = torch.arange(N) % 2  # [sample]
GROUP = torch.arange(N) % 3  # [sample]
NAMES = ("a", "b", "c")


class Rows(torch_data.Dataset):
    """A map-style torch dataset over given rows."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Endless(torch_data.IterableDataset):
    def __iter__(self):
        yield from ()


class NoLength(torch_data.Dataset):
    def __getitem__(self, index):
        return X[index], Y[index]


def with_bad_values():
    """100 rows; three non-finite values in rows 7 and 50."""
    x = torch.zeros(100, 3)
    x[7, 0], x[7, 2], x[50, 1] = math.nan, math.inf, -math.inf
    return x, torch.zeros(100, dtype=torch.int64)


ACCEPTED = (
    "give (x, y) or (x, y, group) as a tuple of tensors or numpy arrays, an evenclip Dataset, "
    "or a map-style torch dataset whose items are (x, y) or (x, y, group)"
)
NO_SAMPLES = "The dataset has 0 samples; training needs at least one: was everything filtered out?"

REFUSED = {  # what is done -> the whole message
    "zero samples": (lambda: Dataset(X[:0], Y[:0]), ValueError, NO_SAMPLES),
    "lengths": (
        lambda: Dataset(X, Y[:9], GROUP, NAMES),
        ValueError,
        "The numbers of rows differ: x has 10, y has 9, group has 10; give one row per sample in each.",
    ),
    "lengths of several inputs": (
        lambda: Dataset({"image": X, "text": X[:4]}, Y),
        ValueError,
        "The numbers of rows differ: x['image'] has 10, x['text'] has 4, y has 10; give one row per sample in each.",
    ),
    "scalar": (
        lambda: Dataset(torch.tensor(1.0), Y),
        ValueError,
        "x is a single number; it must have one row per sample.",
    ),
    "array in the strict core": (
        lambda: Dataset(X.numpy(), Y),
        TypeError,
        "x is a ndarray; Dataset holds tensors: use as_dataset.",
    ),
    "non-finite x": (
        lambda: Dataset(*with_bad_values()),
        ValueError,
        "x has 3 non-finite values in 2 of 100 rows (first: row 7); remove or impute them before training.",
    ),
    "non-finite y": (
        lambda: Dataset(X, torch.full((N,), math.nan)),
        ValueError,
        "y has 10 non-finite values in 10 of 10 rows (first: row 0); remove or impute them before training.",
    ),
    "group not integer": (
        lambda: Dataset(X, Y, GROUP.float(), NAMES),
        TypeError,
        "group has dtype torch.float32; it must hold int64 codes, positions in group_names.",
    ),
    "group not integer, from arrays": (
        lambda: as_dataset((X, Y, GROUP.numpy() + 0.5)),
        TypeError,
        "group has dtype torch.float32; it must hold int64 codes, positions in group_names.",
    ),
    "negative group": (
        lambda: Dataset(X, Y, GROUP - 1, NAMES),
        ValueError,
        "group has codes from -1 to 1 and group_names has 3 names, so codes must lie from 0 to 2; "
        "add the missing names or correct the codes.",
    ),
    "group without a name": (
        lambda: Dataset(X, Y, GROUP, NAMES[:2]),
        ValueError,
        "group has codes from 0 to 2 and group_names has 2 names, so codes must lie from 0 to 1; "
        "add the missing names or correct the codes.",
    ),
    "class without a name": (
        lambda: Dataset(X, Y + 1, class_names=("no", "yes")),
        ValueError,
        "y has codes from 1 to 2 and class_names has 2 names, so codes must lie from 0 to 1; "
        "add the missing names or correct the codes.",
    ),
    "two axes of groups": (
        lambda: Dataset(X, Y, GROUP[:, None], NAMES),
        ValueError,
        "group has shape [10, 1]; it must be [sample], one code for each.",
    ),
    "names alone": (
        lambda: Dataset(X, Y, group_names=NAMES),
        ValueError,
        "group_names is ('a', 'b', 'c') but there is no group; give both or neither.",
    ),
    "groups alone": (
        lambda: Dataset(X, Y, GROUP),
        ValueError,
        "There is a group but no group_names; give the public names of all groups.",
    ),
    "twice the same name": (
        lambda: Dataset(X, Y, GROUP, ("a", "b", "a")),
        ValueError,
        "group_names is ('a', 'b', 'a'); each name may appear only once.",
    ),
    "postcodes": (
        lambda: as_dataset((X, Y, np.array([10115, 90210] * 5))),
        ValueError,
        "group has 2 different codes from 10115 to 90210; without group_names they must be 0 to K−1, "
        "each in use: give group_names, or number the groups from 0.",
    ),
    "unknown group": (
        lambda: as_dataset((X, Y, np.array(["a", "z"] * 5)), group_names=NAMES),
        ValueError,
        "group has the value 'z', which is not one of ('a', 'b', 'c'); add it to them.",
    ),
    "missing group": (
        lambda: as_dataset((X, Y, np.array(["a", None] * 5, dtype=object))),
        TypeError,
        "group has dtype object and values that are not strings, such as missing ones; remove them, "
        "or give integers or strings only.",
    ),
    "strings as features": (
        lambda: as_dataset((np.array([["u"], ["v"]]), Y[:2])),
        TypeError,
        "x has dtype <U1; encode it as numbers before training.",
    ),
    "a frame": (
        lambda: as_dataset(pd.DataFrame({"a": [1]})),
        TypeError,
        f"data is a DataFrame; {ACCEPTED}. Encode the columns of a DataFrame as numbers and pass their .to_numpy().",
    ),
    "a series": (
        lambda: as_dataset((X, pd.Series(Y))),
        TypeError,
        "y is a Series; give a tensor or a numpy array. Pass the .to_numpy() of a Series.",
    ),
    "a list": (
        lambda: as_dataset((X.tolist(), Y)),
        TypeError,
        "x is a list of 10; give a tensor or a numpy array. Pass numpy.array(...) of a list.",
    ),
    "four tensors": (
        lambda: as_dataset(torch_data.TensorDataset(X, Y, GROUP, GROUP)),
        TypeError,
        f"data is a tuple of 4; {ACCEPTED}.",
    ),
    "a loader": (
        lambda: as_dataset(torch_data.DataLoader(Rows([(X[0], 0)]))),
        TypeError,
        f"data is a DataLoader; {ACCEPTED}. Pass the .dataset of a DataLoader.",
    ),
    "a stream": (
        lambda: as_dataset(Endless()),
        TypeError,
        "data is an Endless, an IterableDataset, which is read in its own order; Poisson sampling draws every "
        f"row independently at each step and needs random access: {ACCEPTED}.",
    ),
    "no length": (
        lambda: as_dataset(NoLength()),
        TypeError,
        "NoLength has no length, and the sampling rate is q = B/n; give it a __len__.",
    ),
    "map, zero samples": (lambda: as_dataset(Rows([])), ValueError, NO_SAMPLES),
    "map, other items": (
        lambda: as_dataset(Rows([X[0]])),
        ValueError,
        "An item of the dataset is a Tensor; it must be (x, y) or (x, y, group).",
    ),
    "map, groups alone": (
        lambda: as_dataset(Rows([(X[0], 0, 1)])),
        ValueError,
        "There is a group but no group_names; give the public names of all groups.",
    ),
    "map, names alone": (
        lambda: as_dataset(Rows([(X[0], 0)]), group_names=NAMES),
        ValueError,
        "group_names is ('a', 'b', 'c') but there is no group; give both or neither.",
    ),
    "map, group without a name": (
        lambda: as_dataset(Rows([(X[0], 0, 0), (X[1], 0, 3)]), group_names=NAMES).take(torch.tensor([0, 1])),
        ValueError,
        "group has codes from 0 to 3 and group_names has 3 names, so codes must lie from 0 to 2; "
        "add the missing names or correct the codes.",
    ),
    "map, text as target": (
        lambda: as_dataset(Rows([(X[0], "yes")])),
        TypeError,
        "y is a str; give a tensor or a numpy array.",
    ),
    "negative seed": (lambda: adult(-1), ValueError, "seed is -1; it must be a whole number of at least 0."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_explained(case):
    attempt, error, message = REFUSED[case]
    with pytest.raises(error) as caught:
        attempt()
    assert str(caught.value) == message


def test_an_overflowing_sum_of_finite_values_is_accepted():
    x = torch.full((4, 2), torch.finfo(torch.float32).max)
    assert len(Dataset(x, torch.zeros(4))) == 4


def test_the_data_are_not_printed():
    assert repr(Dataset(X, Y, GROUP, NAMES)) == ("Dataset(group_names=('a', 'b', 'c'), class_names=(), name='data')")


@settings(deadline=None, max_examples=50)
@given(rows=st.lists(st.integers(0, N - 1), max_size=2 * N), form=st.sampled_from(["tensor", "tuple", "dict"]))
def test_take_is_indexing_in_memory_and_row_by_row(rows, form):
    x = {"tensor": X, "tuple": (X, X[:, 0]), "dict": {"u": X, "v": X[:, :2]}}[form]
    parts = {"tensor": [X], "tuple": [X, X[:, 0]], "dict": [X, X[:, :2]]}[form]
    source = Rows([(nth(x, i), int(Y[i]), GROUP[i]) for i in range(N)])
    indices = torch.tensor(rows, dtype=torch.int64)
    for data in (Dataset(x, Y, GROUP, NAMES), as_dataset(source, group_names=NAMES)):
        assert len(data) == N
        assert data.K == 3
        taken = data.take(indices)
        assert type(taken.x) is type(x)
        for got, whole in zip(leaves(taken.x), parts, strict=True):
            assert_same(got, whole[indices])
        assert_same(taken.y, Y[indices])
        assert_same(taken.group, GROUP[indices])


def nth(x, i):
    """Row i of features of any form."""
    if isinstance(x, dict):
        return {key: leaf[i] for key, leaf in x.items()}
    return tuple(leaf[i] for leaf in x) if isinstance(x, tuple) else x[i]


def leaves(x):
    """The tensors in x."""
    return list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, tuple) else [x]


def assert_same(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)  # compares shapes and dtypes too


@pytest.mark.parametrize("source", [Dataset(X, Y), as_dataset(Rows([(X[i], Y[i]) for i in range(N)]))])
def test_without_groups_there_is_one(source):
    assert source.K == 1
    assert source.take(torch.tensor([3])).group is None
    assert source.take(torch.tensor([], dtype=torch.int64)).x.shape == (0, 3)


def test_numpy_rows_and_numpy_arrays_come_out_alike():
    x, y, group = X.double().numpy(), Y.bool().numpy(), GROUP.numpy().astype(np.int8)
    whole = as_dataset((x, y, group))
    by_row = as_dataset(Rows([(x[i], y[i], group[i]) for i in range(N)]), group_names=whole.group_names)
    assert isinstance(by_row, MapDataset)
    for left, right in zip(whole.take(torch.arange(4)), by_row.take(torch.arange(4)), strict=True):
        assert_same(left, right)


def test_conversions():
    reversed_and_frozen = X.double().numpy()[::-1]
    reversed_and_frozen.flags.writeable = False
    data = as_dataset((reversed_and_frozen, Y.numpy().astype(">i4"), GROUP.numpy().astype(np.uint8)))
    assert_same(data.x, X.flip(0))
    assert_same(data.y, Y)
    assert_same(data.group, GROUP)
    assert data.group_names == ("0", "1", "2")
    assert as_dataset((X.double(), Y)).x.dtype == torch.float64  # a tensor stays as it is
    assert as_dataset((Y.numpy(), Y)).x.dtype == torch.int64  # tokens stay tokens
    assert as_dataset((X, X[:, 0].double().numpy())).y.dtype == torch.float32  # a regression


def test_the_default_dtype_is_followed():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert as_dataset((X.numpy(), Y)).x.dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_arrays_are_copied():
    x = X.numpy().copy()
    data = as_dataset((x, Y))
    x[:] = -1
    assert_same(data.x, X)


def test_strings_become_codes():
    y, group = np.array(["yes", "no"]), np.array(["m", "f"], dtype=object)
    data = as_dataset((X[:2], y, group))
    assert (data.class_names, data.group_names) == (("no", "yes"), ("f", "m"))
    assert (data.y.tolist(), data.group.tolist()) == ([1, 0], [1, 0])
    ordered = as_dataset((X[:2], y, group), group_names=("m", "x", "f"))
    assert (ordered.group.tolist(), ordered.K) == ([0, 2], 3)  # a public group may be empty


def test_datasets_pass_and_can_be_renamed():
    data = Dataset(X, Y, GROUP, NAMES)
    assert as_dataset(data) is data
    assert as_dataset(data, group_names="xyz").group_names == ("x", "y", "z")
    assert isinstance(as_dataset(torch_data.TensorDataset(X, Y, GROUP)), Dataset)


@pytest.mark.parametrize("data", [Dataset((X, X), Y, GROUP, NAMES), as_dataset(Rows([(X[0], 0)]))])
def test_to_a_device(data):
    moved = data.to("meta") if isinstance(data, MapDataset) else data.to("cpu")
    taken = moved.take(torch.tensor([0]))
    assert taken.y.device.type == ("meta" if isinstance(data, MapDataset) else "cpu")


def test_importing_the_data_does_not_import_pandas():
    code = "import sys, evenclip.data; evenclip.data.adult(); sys.exit('pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Adult, against the embedded file read by pandas.

CATEGORICAL = ["workclass", "education", "marital-status", "occupation", "relationship", "native-country"]


@pytest.fixture(scope="module")
def table():
    """The rows without missing values, as they are in the file."""
    text = lzma.decompress(resources.files("evenclip.data").joinpath("files", "adult.csv.xz").read_bytes())
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
    train, test = splits
    assert train.x.shape[1] == test.x.shape[1] == 98
    # 0.8·2·14,695 = 23,512 on average; one standard deviation is 0.8·√(30,527·p(1−p)) = 70, p = 14,695/30,527.
    assert 23_512 - 5 * 70 < len(train) < 23_512 + 5 * 70
    assert len(train) == round(0.8 * (len(train) + len(test)))
    group = torch.cat([train.group, test.group])
    assert train.group_names == ("female", "male")
    assert int((group == 0).sum()) == (table["sex"] == "Female").sum()  # no female is dropped
    assert abs(int((group == 1).sum()) - 14_695) < 5 * 88


def test_adult_rates_of_high_income_are_those_of_the_file(splits, table):
    y, group = torch.cat([d.y for d in splits]).double(), torch.cat([d.group for d in splits])
    rate = (table["income"] == ">50K").groupby(table["sex"]).mean()
    assert float(y[group == 0].mean()) == pytest.approx(rate["Female"], abs=1e-12)
    assert float(y[group == 1].mean()) == pytest.approx(rate["Male"], abs=0.02)  # 5 standard errors
    assert splits.train.class_names == ("<=50K", ">50K")


def test_adult_is_scaled_by_its_training_rows_only(splits, table):
    raw = decoded(splits, table)[:, :5].astype(float)  # [row, 5], training rows first
    train = raw[: len(splits.train)]
    expected = (raw - train.mean(0)) / train.std(0)
    got = torch.cat([d.x for d in splits])[:, :5].numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    together = (raw - raw.mean(0)) / raw.std(0)
    assert abs(got - together).max(0).min() > 1e-4  # so that the comparison above can tell


def test_adult_rows_are_those_of_the_file(splits, table):
    """Undo the scaling with numbers found in the file: every row, with features, class and group, is in it."""
    known = set(map(tuple, decoded_file(table)))
    found = decoded(splits, table)
    assert set(map(tuple, found)) <= known
    females = found[found[:, FEATURES.index("sex=Male")] == 0]
    expected = decoded_file(table[table["sex"] == "Female"])
    assert sorted(map(tuple, females)) == sorted(map(tuple, expected))


def decoded(splits, table):
    """All rows in the units of the file: [row, 98 features, class, group], whole numbers."""
    x = torch.cat([d.x for d in splits]).double().numpy()
    for j, column in enumerate(FEATURES[:5]):
        x[:, j] = unscaled(x[:, j], np.unique(table[column]))
    return np.column_stack([x, torch.cat([d.y for d in splits]), torch.cat([d.group for d in splits])]).astype(int)


def unscaled(scaled, values):
    """The values of a standardised column whose smallest and largest are those of the file."""
    low, high = scaled.min(), scaled.max()
    return np.rint(values[0] + (scaled - low) / (high - low) * (values[-1] - values[0]))


def decoded_file(table):
    """The same from the file, by pandas."""
    numbers = table[list(FEATURES[:5])]
    names = {c: [f.split("=")[1] for f in FEATURES if f.startswith(f"{c}=")] for c in CATEGORICAL}
    one_hot = [pd.get_dummies(pd.Categorical(table[c], names[c])) for c in CATEGORICAL]
    male, rich = table["sex"] == "Male", table["income"] == ">50K"
    columns = [numbers, table["race"] == "White", male, *one_hot, rich, male]
    return np.column_stack([np.asarray(column) for column in columns]).astype(int)


def test_adult_is_decided_by_its_seed():
    for left, right in zip(adult(0), adult(0), strict=True):
        for one, two in ((left.x, right.x), (left.y, right.y), (left.group, right.group)):
            assert_same(one, two)
    assert not torch.equal(adult(0).train.x[:100], adult(3).train.x[:100])


def test_adult_leaves_the_global_generators_alone():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    adult(5)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert (numpy_state == np.random.get_state()[1]).all()  # noqa: NPY002


def test_adult_from_original_files(tmp_path):
    """UCI's layout, made from the embedded file: spaces, a comment, full stops and an empty last line."""
    write_original(tmp_path, embedded_lines())
    for left, right in zip(adult(1), adult(1, directory=tmp_path), strict=True):
        assert_same(left.x, right.x)
        assert_same(left.y, right.y)


def test_adult_refuses_other_files(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        adult(directory=tmp_path)
    assert str(missing.value) == (
        f"{tmp_path / 'adult' / 'adult.data'} is not there; get it from "
        "https://archive.ics.uci.edu/dataset/2/adult, or leave out the directory to use the copy in this package."
    )
    write_original(tmp_path, [line.replace("Cuba", "Atlantis") for line in embedded_lines()])
    with pytest.raises(ValueError, match=r"^native-country has the value 'Atlantis', unknown in Adult; is this"):
        adult(directory=tmp_path)


def test_adult_of_the_data_directory_is_the_embedded_one():
    directory = os.environ.get("EVENCLIP_DATA")
    if directory is None or not (Path(directory) / "adult" / "adult.test").is_file():
        pytest.skip("needs adult/adult.data and adult/adult.test of UCI in the folder EVENCLIP_DATA")
    for left, right in zip(adult(), adult(directory=directory), strict=True):
        assert_same(left.x, right.x)
        assert_same(left.y, right.y)


def embedded_lines():
    """The rows of the embedded file as text."""
    packed = resources.files("evenclip.data").joinpath("files", "adult.csv.xz").read_bytes()
    return lzma.decompress(packed).decode().splitlines()[1:]


def write_original(directory, lines):
    """The two files as UCI has them."""
    folder = directory / "adult"
    folder.mkdir(exist_ok=True)
    spaced = [line.replace(",", ", ") for line in lines]
    (folder / "adult.data").write_text("\n".join(spaced[:32_561]) + "\n\n")
    (folder / "adult.test").write_text("|1x3 Cross validator\n" + ".\n".join(spaced[32_561:]) + ".\n\n")
