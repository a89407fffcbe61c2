"""The same rows given twice are refused: by name, by link, as a copy, in another order."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils import data as torch_data

import evenclip
from evenclip.data.table import table

N = 200


@pytest.fixture
def frame():
    numbers = np.random.default_rng(0)
    return pd.DataFrame({
        "age": numbers.integers(18, 80, N), "pay": numbers.normal(size=N),
        "sex": numbers.choice(["f", "m"], N), "hired": numbers.choice(["no", "yes"], N),
    })  # fmt: skip


def _link(path, other, frame):
    os.symlink(path, other)


def _hard_link(path, other, frame):
    os.link(path, other)


def _copy(path, other, frame):
    shutil.copy(path, other)


def _compressed(path, other, frame):
    frame.to_parquet(other, compression="gzip")


def _shuffled(path, other, frame):
    frame.sample(frac=1.0, random_state=1).to_parquet(other, row_group_size=50)


@pytest.mark.parametrize("make", [_link, _hard_link, _copy, _compressed, _shuffled])
def test_the_rows_of_a_parquet_file_are_not_counted_twice(tmp_path, frame, make):
    rows = frame.drop(columns="sex")
    path, other = tmp_path / "a.parquet", tmp_path / "b.parquet"
    rows.to_parquet(path)
    make(path, other, rows)
    with pytest.raises(ValueError, match=r"so each record would count as two; give it once\.$"):
        evenclip.fit(
            torch.nn.Linear(2, 2),
            evenclip.data.parquet([path, other], target="hired"),
            batch_size=20,
            lr=0.01,
        )


def test_a_parquet_file_is_named_once(tmp_path, frame):
    path = tmp_path / "a.parquet"
    frame.drop(columns="sex").to_parquet(path)
    again = tmp_path / "." / ".." / tmp_path.name / "a.parquet"
    for source in ([path, path], [path, again], [path, tmp_path], [str(path), f"{tmp_path}/*"]):
        with pytest.raises(ValueError, match=r"a\.parquet are one file, so each record would"):
            evenclip.data.parquet(source, target="hired")


def test_different_files_are_taken(tmp_path, frame):
    rows = frame.drop(columns="sex")
    rows[:100].to_parquet(tmp_path / "a.parquet")
    rows[100:].to_parquet(tmp_path / "b.parquet")
    data = evenclip.data.parquet(tmp_path, target="hired")
    assert len(data) == N
    data.fingerprints()


@pytest.mark.parametrize("name", ["a.csv", "link.csv", "shuffled.csv", "a.tsv", "a.parquet"])
def test_a_table_does_not_test_itself(tmp_path, frame, name):
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    frame.to_parquet(tmp_path / "a.parquet")
    frame.sample(frac=1.0, random_state=1).to_csv(tmp_path / "shuffled.csv", index=False)
    os.symlink(tmp_path / "a.csv", tmp_path / "link.csv")
    with pytest.raises(ValueError, match="so the test figures would be of records that were train"):
        table(tmp_path / "a.csv", target="hired", group="sex", test=tmp_path / name)


def test_a_frame_does_not_test_itself(frame):
    with pytest.raises(ValueError, match=r"^The table and its test set hold the same rows"):
        table(frame, target="hired", group="sex", test=frame.copy())


def test_splits_do_not_test_themselves(tmp_path):
    x, y = torch.randn(60, 3), torch.arange(60) % 2
    part = evenclip.data.Dataset(x, y, y, ("a", "b"))
    with pytest.raises(ValueError, match="the same records for training and for testing"):
        evenclip.compare(evenclip.data.Splits(part, part), seeds=1, store=tmp_path)


def test_torch_datasets_do_not_repeat_records():
    data = torch_data.TensorDataset(torch.randn(9, 3), torch.arange(9) % 2)
    with pytest.raises(ValueError, match=r"^data is a ConcatDataset that holds one dataset twice"):
        evenclip.data.as_dataset(torch_data.ConcatDataset([data, data]))
    with pytest.raises(ValueError, match=r"^data is a Subset that holds one row twice"):
        evenclip.data.as_dataset(torch_data.Subset(data, [0, 1, 1]))
