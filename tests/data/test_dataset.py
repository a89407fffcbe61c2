"""Datasets: error messages, conversions, and rows by index."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import data as torch_data

import evenclip
from evenclip.data import Dataset, MapDataset, Splits, adult, as_dataset
from evenclip.models import cnn
from fresh import fresh

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
    """Return 100 rows with three non-finite values, in rows 7 and 50."""
    x = torch.zeros(100, 3)
    x[7, 0], x[7, 2], x[50, 1] = math.nan, math.inf, -math.inf
    return x, torch.zeros(100, dtype=torch.int64)


ACCEPTED = (
    "give (x, y) or (x, y, group) as a tuple of tensors or numpy arrays, an evenclip Dataset, or "
    "a map-style torch dataset whose items are (x, y) or (x, y, group)"
)
NO_SAMPLES = "The dataset has 0 samples; training needs at least one: was everything filtered out?"

REFUSED = {  # case -> attempt, error, whole message
    "zero samples": (lambda: Dataset(X[:0], Y[:0]), ValueError, NO_SAMPLES),
    "lengths": (
        lambda: Dataset(X, Y[:9], GROUP, NAMES),
        ValueError,
        "The numbers of rows differ: x has 10, y has 9, group has 10; give one row per sample in "
        "each.",
    ),
    "lengths of several inputs": (
        lambda: Dataset({"image": X, "text": X[:4]}, Y),
        ValueError,
        "The numbers of rows differ: x['image'] has 10, x['text'] has 4, y has 10; give one row "
        "per sample in each.",
    ),
    "scalar": (
        lambda: Dataset(torch.tensor(1.0), Y),
        ValueError,
        "x is a single number; it must have one row per sample.",
    ),
    "array in the strict core": (
        lambda: Dataset(X.numpy(), Y),
        TypeError,
        "x is a ndarray; Dataset holds tensors: use torch.as_tensor, or evenclip.data.as_dataset "
        "for all of (x, y, group).",
    ),
    "non-finite x": (
        lambda: Dataset(*with_bad_values()),
        ValueError,
        "x has 3 non-finite values in 2 of 100 rows (first: row 7); remove or impute them before "
        "training.",
    ),
    "non-finite y": (
        lambda: Dataset(X, torch.full((N,), math.nan)),
        ValueError,
        "y has 10 non-finite values in 10 of 10 rows (first: row 0); remove or impute them "
        "before training.",
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
        "group has codes from -1 to 1 and group_names has 3 names, so codes must lie from 0 to "
        "2; add the missing names or correct the codes.",
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
        "y has codes from 1 to 2 and class_names has 2 names, so codes must lie from 0 to 1; add "
        "the missing names or correct the codes.",
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
        "group has 2 different codes from 10115 to 90210; without group_names they must be 0 to "
        "K−1, each in use: give group_names, or number the groups from 0.",
    ),
    "unknown group": (
        lambda: as_dataset((X, Y, np.array(["a", "z"] * 5)), group_names=NAMES),
        ValueError,
        "group has the value 'z', which is not one of ('a', 'b', 'c'); add it to them.",
    ),
    "missing group": (
        lambda: as_dataset((X, Y, np.array(["a", None] * 5, dtype=object))),
        TypeError,
        "group has dtype object and values that are not strings, such as missing ones; remove "
        "them, or give integers or strings only.",
    ),
    "strings as features": (
        lambda: as_dataset((np.array([["u"], ["v"]]), Y[:2])),
        TypeError,
        "x has dtype <U1; encode it as numbers before training.",
    ),
    "a frame": (
        lambda: as_dataset(pd.DataFrame({"a": [1]})),
        TypeError,
        f"data is a DataFrame; {ACCEPTED}. Encode the columns of a DataFrame as numbers and pass "
        "their .to_numpy().",
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
        "data is an Endless, an IterableDataset, which is read in its own order; Poisson "
        f"sampling draws every row independently at each step and needs random access: {ACCEPTED}.",
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
        lambda: as_dataset(Rows([(X[0], 0, 0), (X[1], 0, 3)]), group_names=NAMES).take(
            torch.tensor([0, 1])
        ),
        ValueError,
        "group has codes from 0 to 3 and group_names has 3 names, so codes must lie from 0 to 2; "
        "add the missing names or correct the codes.",
    ),
    "map, text as target": (
        lambda: as_dataset(Rows([(X[0], "yes")])),
        TypeError,
        "y is a str; give a tensor or a numpy array.",
    ),
    "negative seed": (
        lambda: adult(-1),
        ValueError,
        "seed is -1; it must be a whole number of at least 0.",
    ),
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
    assert repr(Dataset(X, Y, GROUP, NAMES)) == (
        "Dataset(group_names=('a', 'b', 'c'), class_names=(), name='data', records=None)"
    )


@settings(deadline=None, max_examples=50)
@given(
    rows=st.lists(st.integers(0, N - 1), max_size=2 * N),
    form=st.sampled_from(["tensor", "tuple", "dict"]),
)
def test_take_is_indexing_in_memory_and_row_by_row(rows, form):
    x = {"tensor": X, "tuple": (X, X[:, 0]), "dict": {"u": X, "v": X[:, :2]}}[form]
    source = Rows([(nth(x, i), int(Y[i]), GROUP[i]) for i in range(N)])
    indices = torch.tensor(rows, dtype=torch.int64)
    for data in (Dataset(x, Y, GROUP, NAMES), as_dataset(source, group_names=NAMES)):
        assert len(data) == N
        assert data.K == 3
        taken = data.take(indices)
        assert type(taken.x) is type(x)
        for got, whole in zip(leaves(taken.x), leaves(x), strict=True):
            assert_same(got, whole[indices])
        assert_same(taken.y, Y[indices])
        assert_same(taken.group, GROUP[indices])


def nth(x, i):
    """Return row i of features of any form."""
    if isinstance(x, dict):
        return {key: leaf[i] for key, leaf in x.items()}
    return tuple(leaf[i] for leaf in x) if isinstance(x, tuple) else x[i]


def leaves(x):
    """Return the tensors in x."""
    return list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, tuple) else [x]


def assert_same(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=0)  # compares shapes and dtypes too


@pytest.mark.parametrize(
    "source", [Dataset(X, Y), as_dataset(Rows([(X[i], Y[i]) for i in range(N)]))]
)
def test_without_groups_there_is_one(source):
    assert source.K == 1
    assert source.take(torch.tensor([3])).group is None
    assert source.take(torch.tensor([], dtype=torch.int64)).x.shape == (0, 3)


def test_numpy_rows_and_numpy_arrays_come_out_alike():
    x, y, group = X.double().numpy(), Y.bool().numpy(), GROUP.numpy().astype(np.int8)
    whole = as_dataset((x, y, group))
    by_row = as_dataset(
        Rows([(x[i], y[i], group[i]) for i in range(N)]), group_names=whole.group_names
    )
    assert isinstance(by_row, MapDataset)
    for left, right in zip(whole.take(torch.arange(4)), by_row.take(torch.arange(4)), strict=True):
        assert_same(left, right)


def test_conversions():
    reversed_and_frozen = X.double().numpy()[::-1]
    reversed_and_frozen.flags.writeable = False
    data = as_dataset(
        (reversed_and_frozen, Y.numpy().astype(">i4"), GROUP.numpy().astype(np.uint8))
    )
    assert_same(data.x, X.flip(0))
    assert_same(data.y, Y)
    assert_same(data.group, GROUP)
    assert data.group_names == ("0", "1", "2")
    assert as_dataset((X.double(), Y)).x.dtype == torch.float64  # a tensor is unchanged
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
    assert as_dataset(data, group_names=["x", "y", "z"]).group_names == ("x", "y", "z")
    assert isinstance(as_dataset(torch_data.TensorDataset(X, Y, GROUP)), Dataset)


@pytest.mark.parametrize("data", [Dataset((X, X), Y, GROUP, NAMES), as_dataset(Rows([(X[0], 0)]))])
def test_to_a_device(data, monkeypatch):
    monkeypatch.setattr("evenclip.data.dataset.device_of", torch.device)  # a device of any machine
    moved = data.to("meta") if isinstance(data, MapDataset) else data.to("cpu")
    taken = moved.take(torch.tensor([0]))
    assert taken.y.device.type == ("meta" if isinstance(data, MapDataset) else "cpu")


def test_importing_the_data_does_not_import_pandas():
    code = "import sys, evenclip.data; evenclip.data.adult(); print('pandas' in sys.modules)"
    assert fresh(code) == "False\n"


IMAGES = (torch.arange(N * 2 * 2) * 6).to(torch.uint8).reshape(N, 1, 2, 2)  # [sample, 1, 2, 2]


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_bytes_are_taken_as_floats_between_0_and_1(form):
    x = {"tensor": IMAGES, "tuple": (IMAGES, X), "dict": {"u": X, "v": IMAGES}}[form]
    source = Rows([(nth(x, i), int(Y[i]), GROUP[i]) for i in range(N)])
    rows = torch.tensor([9, 0, 0, 3])
    for data in (Dataset(x, Y, GROUP, NAMES), as_dataset(source, group_names=NAMES)):
        for got, whole in zip(leaves(data.take(rows).x), leaves(x), strict=True):
            want = (
                X[rows]
                if whole is X
                else torch.tensor(IMAGES[rows].double().numpy() / 255, dtype=torch.float32)
            )
            assert_same(got, want)
        assert leaves(data.take(rows[:0]).x)[0].dtype is torch.float32
    assert int(IMAGES.max()) == 234  # the stored bytes are unchanged


def test_training_on_bytes_is_training_on_floats():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (60, 1, 8, 8), generator=generator).to(torch.uint8)
    y, trained = torch.arange(60) % 2, []
    for kept in (x, x.float() / 255):
        # One batch of all samples: the random streams depend on the bits of the data, so smaller
        # batches would differ.
        result = evenclip.fit(
            cnn(1, 8, 2, seed=0),
            (kept, y, y),
            rule=evenclip.NonPrivate(),
            lr=0.1,
            epochs=2,
            batch_size=60,
            seed=0,
        )
        trained.append(torch.cat([p.detach().flatten() for p in result.model.parameters()]))
    torch.testing.assert_close(trained[0], trained[1], rtol=0, atol=1e-5)
    start = torch.cat([p.detach().flatten() for p in cnn(1, 8, 2, seed=0).parameters()])
    assert float((trained[0] - start).abs().max()) > 1e-3


def test_splits_have_a_validation_part_only_where_there_is_one():
    data = Dataset(X, Y)
    assert Splits(data, data).validation is None
    assert Splits(data, data, data)._fields == ("train", "test", "validation")
