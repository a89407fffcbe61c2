"""Parquet files: the same model as from rows in memory, bounded memory, and error messages.

The models are equal to the last bit, for every window size.
"""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from evenclip import (
    DPSGD,
    DPSGDF,
    DPSGDGlobal,
    DPSGDGlobalAdapt,
    NonPrivate,
    Performance,
    audit,
    fit,
    prepare,
)
from evenclip.data import Dataset, Parquet, arrow, as_dataset, parquet
from evenclip.data import schema as schemas
from evenclip.data.dataset import Samples
from evenclip.data.streamed import Bits, Windows
from evenclip.data.table import read

N = 403  # no multiple of a row group
RULES = [
    NonPrivate(),
    DPSGD(sigma=0.8),
    DPSGDF(sigma=0.8),
    DPSGDGlobal(sigma=0.8),
    DPSGDGlobalAdapt(sigma=0.8),
]
SCHEMA = {
    "evenclip_schema": 1,
    "columns": {
        "age": {"kind": "number", "range": [20, 60]},
        "income": {"kind": "number", "range": [0, 100], "missing": False},
        "since": {"kind": "date", "range": ["2000-01-01", "2019-12-31"]},
        "member": {"kind": "boolean"},
        "job": {"kind": "category", "values": ["baker", "miller"], "other": True},
        "id": {"kind": "ignore"},
        "sex": {"kind": "category", "values": ["f", "m"]},
        "hired": {"kind": "category", "values": ["no", "yes"], "missing": False},
    },
}


def people(n: int = N, seed: int = 0) -> pd.DataFrame:
    """Return a table with every kind of column, values out of range, gaps and missing groups."""
    random = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "id": [f"P{i}" for i in range(n)],
            "age": np.where(random.random(n) < 0.1, np.nan, random.integers(15, 70, n)),
            "income": random.random(n) * 100,
            "since": pd.Timestamp("2000-06-01")
            + pd.to_timedelta(random.integers(0, 6000, n), unit="D"),
            "member": random.random(n) < 0.5,
            "job": random.choice(np.array(["baker", "miller", "smith", None], dtype=object), n),
            "sex": random.choice(np.array(["f", "m", None], dtype=object), n, p=[0.5, 0.4, 0.1]),
            "hired": random.choice(["no", "yes"], n),
        }
    )


def numbers(n: int = N, features: int = 4) -> pd.DataFrame:
    random = np.random.default_rng(1)
    frame = pd.DataFrame(
        {f"x{i}": random.standard_normal(n).astype(np.float32) for i in range(features)}
    )
    return frame.assign(y=random.integers(0, 3, n), k=random.integers(0, 2, n))


def written(
    frame: pd.DataFrame, folder: Path, cuts: tuple[int, ...] = (), size: int = 37
) -> list[Path]:
    """Write the rows to files, divided at `cuts`, with small row groups."""
    ends = [0, *cuts, len(frame)]
    paths = [folder / f"part{i}.parquet" for i in range(len(ends) - 1)]
    for path, start, end in zip(paths, ends, ends[1:], strict=False):
        frame.iloc[start:end].to_parquet(path, row_group_size=size, index=False)
    return paths


def in_memory(data: Parquet, frame: pd.DataFrame) -> Dataset:
    """Encode the same rows at once, as a `Dataset`."""
    encoder = data.encoder
    group = encoder.group_of(frame) if encoder.group else None
    return Dataset(
        encoder.encode(frame), encoder.target_of(frame), group, encoder.groups, encoder.classes
    )


def opened(paths, **more) -> Parquet:
    return parquet(paths, **{"target": "hired", "group": "sex", "schema": SCHEMA, **more})


def model(data) -> nn.Module:
    torch.manual_seed(0)
    features = data.take(torch.arange(1)).x.shape[1]
    return nn.Sequential(
        nn.Linear(features, 5),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(5, len(data.class_names)),
    )


def trained(data, rule=None, **more):
    rule = DPSGDGlobalAdapt(sigma=0.8) if rule is None else rule
    return fit(
        model(data),
        data,
        **{"rule": rule, "batch_size": 16, "epochs": 2, "lr": 0.2, "seed": 3, **more},
    )


def assert_identical(left, right) -> None:
    for a, b in zip(left.model.parameters(), right.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert left.trace == right.trace
    assert left.ledger == right.ledger
    assert torch.equal(left.state, right.state)


def no_reader() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "evenclip reader"]


# --- the same as in memory ----------------------------------------------------------------------


def test_rows_by_index_are_those_of_the_table(tmp_path):
    frame = people()
    data = opened(written(frame, tmp_path, (100, 101, 300)))
    assert (len(data), data.K, data.row_groups) == (N, 3, 3 + 1 + 6 + 3)
    assert data.group_names == ("f", "m", "missing")
    same = in_memory(data, frame)
    for indices in (
        range(N),
        [],
        [0],
        [N - 1, 0, 36, 37, 99, 100, 101, 36, 36],
        [*range(36, 39), 299, 300],
    ):
        places = torch.tensor(list(indices), dtype=torch.int64)
        taken, expected = data.take(places), same.take(places)
        assert torch.equal(taken.x, expected.x)
        assert torch.equal(taken.y, expected.y)
        assert torch.equal(taken.group, expected.group)
    with pytest.raises(
        IndexError, match=rf"^Rows 0 to {N} are requested; give rows from 0 to {N - 1}\.$"
    ):
        data.take(torch.tensor([0, N]))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_training_is_that_in_memory_to_the_last_bit(tmp_path, rule):
    frame = people()
    data = opened(written(frame, tmp_path, (150,)), memory=20_000)
    assert_identical(trained(data, rule), trained(in_memory(data, frame), rule))
    assert no_reader()


def test_chunks_of_what_was_read_are_chunks_of_what_is_in_memory(tmp_path):
    frame, performance = people(), Performance(chunk=5)
    data = opened(written(frame, tmp_path), memory=30_000)
    assert_identical(
        trained(data, performance=performance),
        trained(in_memory(data, frame), performance=performance),
    )


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    memory=st.integers(1, 200_000),
    size=st.integers(1, N),
    cut=st.integers(1, N - 1),
    batch=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_neither_windows_nor_row_groups_nor_files_matter(tmp_path, memory, size, cut, batch, seed):
    frame = numbers()
    paths = written(frame, tmp_path, (cut,), size)
    data = parquet(paths, target="y", group="k", memory=memory)
    given = {"rule": DPSGDF(), "batch_size": batch, "steps": 9, "seed": seed}
    assert_identical(trained(data, **given), trained(in_memory(data, frame), **given))


def test_the_tuple_of_arrays_trains_the_same(tmp_path):
    """Numbers are used unscaled, so that a file and its arrays are the same run."""
    frame = numbers()
    data = parquet(written(frame, tmp_path), target="y", group="k", features=["x2", "x0"])
    arrays = (frame[["x2", "x0"]].to_numpy(), frame["y"].to_numpy(), frame["k"].to_numpy())
    torch.manual_seed(0)
    linear = nn.Linear(2, 3)
    given = {"rule": DPSGD(), "batch_size": 20, "seed": 0}
    assert_identical(fit(linear, data, **given), fit(linear, arrays, **given))


def test_a_former_index_is_an_ordinary_column(tmp_path):
    frame, path = numbers(), tmp_path / "indexed.parquet"
    frame.astype({"y": "category", "k": "Int64"}).set_index("x1").to_parquet(
        path, row_group_size=50
    )
    data = parquet(path, target="y", group="k", features=["x0", "x1"])
    assert_identical(trained(data), trained(in_memory(data, frame)))


def test_a_chunk_of_the_file_is_smaller_than_a_row_group(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "CHUNK", 10)
    frame = people()
    data = opened(written(frame, tmp_path, size=1000), memory=20_000)
    assert data.row_groups == 1
    assert_identical(trained(data), trained(in_memory(data, frame)))


def test_a_neighbouring_dataset_is_another_run(tmp_path):
    """Its noise must differ, so that it does not cancel in the difference of the two runs."""
    (first,), frame = written(numbers(), tmp_path), numbers()
    frame.loc[N - 1, "x0"] += 1
    (tmp_path / "other").mkdir()
    (other,) = written(frame, tmp_path / "other")
    runs = [
        prepare(
            nn.Linear(4, 3), parquet(path, target="y", features=["x0", "x1", "x2", "x3"]), seed=0
        )
        for path in (first, other)
    ]
    assert not torch.equal(*[run.noise.of(0)["gradient"][:10] for run in runs])


def test_digests_do_not_depend_on_how_rows_are_divided():
    random = torch.Generator().manual_seed(0)
    for shape in ((7, 3), (8, 3), (5, 1)):
        rows = torch.randn(shape, generator=random)
        digests = set()
        for size in (1, 2, 3, 8):
            bits = Bits()
            for part in torch.split(rows, size):
                bits.add(part)
            digests.add(bits.digest)
        assert len(digests) == 1


def test_measured_as_in_memory(tmp_path):
    frame = people()
    data = opened(written(frame, tmp_path, (77,)))
    linear = model(data)
    assert torch.equal(
        audit.scores(linear, data, rows=50), audit.scores(linear, in_memory(data, frame), rows=50)
    )


# --- resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [NonPrivate(), DPSGDF()], ids=lambda rule: rule.name)
def test_resuming_in_the_middle_of_a_window(tmp_path, rule):
    frame = people()
    data = opened(written(frame, tmp_path), memory=60_000)
    whole = trained(data, rule)
    for after in (1, 7, 26, 30):

        def stop(step, after=after):
            if step.t == after - 1:
                raise RuntimeError("stopped here")

        saved = tmp_path / f"after {after}"
        with pytest.raises(RuntimeError, match="stopped here"):
            trained(data, rule, checkpoint=saved, checkpoint_every=1, observers=[stop])
        assert no_reader()
        if after > 1:
            assert_identical(trained(data, rule, checkpoint=saved, resume="exact"), whole)
    again = trained(in_memory(data, frame), rule, checkpoint=tmp_path / "memory")
    assert_identical(again, whole)


def test_a_checkpoint_of_a_file_goes_on_in_memory(tmp_path):
    """A checkpoint saves the position of training, not how far the reader is ahead."""
    frame = people()
    data = opened(written(frame, tmp_path), memory=10**6)
    given = {"rule": DPSGDF(), "batch_size": 16, "epochs": 2, "lr": 0.2, "seed": 3}
    runs = [prepare(model(data), rows, **given) for rows in (data, in_memory(data, frame))]
    for t in (11, 40):
        for run in runs:
            with run.listening():
                while run.t < t:
                    run.update(run.step())
        assert runs[0].drawn == runs[1].drawn == t
    runs[0].save(tmp_path / "saved")
    (saved,) = (tmp_path / "saved").iterdir()
    fresh = prepare(model(data), in_memory(data, frame), **given)
    fresh.restore(saved, exact=True)
    for run in (fresh, runs[1]):
        with run.listening():
            while run.t < run.settings.steps:
                run.update(run.step())
    assert torch.equal(
        *(nn.utils.parameters_to_vector(run.model.parameters()) for run in (fresh, runs[1]))
    )


def test_beyond_the_last_step_and_back(tmp_path):
    """In a custom loop: further steps, and a checkpoint restored while rows are being read."""
    frame = people()
    data = opened(written(frame, tmp_path))
    runs = [
        prepare(model(data), rows, rule=DPSGDF(), batch_size=16, steps=4, seed=3)
        for rows in (data, in_memory(data, frame))
    ]
    for run in runs:
        with run.listening():
            for _ in range(3):
                run.update(run.step())
            run.save(tmp_path / f"saved{run is runs[0]}")
            for _ in range(4):
                run.update(run.step())
            run.restore(next((tmp_path / f"saved{run is runs[0]}").iterdir()), exact=True)
            for _ in range(5):
                run.update(run.step())
    assert torch.equal(*(nn.utils.parameters_to_vector(run.model.parameters()) for run in runs))
    assert no_reader()


# --- windows ------------------------------------------------------------------------------------


def test_a_row_group_is_decoded_once_for_a_window(tmp_path, monkeypatch):
    """There is one pass per window."""
    (path,) = written(numbers(), tmp_path, size=10)
    # Two windows of 100 rows of 104 bytes.
    data = parquet(path, target="y", group="k", memory=2 * 104 * 100)
    data.fingerprints()
    passes = []
    batches = Parquet._batches
    monkeypatch.setattr(
        Parquet,
        "_batches",
        lambda self, file, groups: passes.append(groups) or batches(self, file, groups),
    )
    run = prepare(model(data), data, rule=DPSGD(), batch_size=20, seed=0, epochs=2)
    passes.clear()
    with run.listening():
        while run.t < run.settings.steps:
            run.update(run.step())
    assert all(len(set(groups)) == len(groups) for groups in passes)
    assert sum(row["samples"] for row in run.trace.rows) / 100 <= len(passes) <= 12


def test_at_most_two_windows_are_held_and_batches_come_in_order():
    batches = [torch.arange(i, i + size) for i, size in enumerate([3, 0, 4, 9, 1, 1, 1, 2, 1])]
    window_of = [0, 0, 1, 2, 3, 3, 3, 3, 4]
    sizes: list[int] = []  # of the windows that were read
    read = threading.Condition()

    def read_rows(indices, stopped):
        with read:
            sizes.append(len(indices))
            read.notify()
        return Samples(indices.unsqueeze(1).float(), indices, None)

    feed = Windows(read_rows, iter(batches), rows=5)
    for batch, window in zip(batches, window_of, strict=True):
        assert torch.equal(feed.of(batch).y, batch)
        with read:
            # Wait until the feed has read as far ahead as it may.
            read.wait_for(lambda: len(sizes) >= min(window + 2, 5))  # noqa: B023
            assert len(sizes) <= window + 2
    assert sizes == [3, 4, 9, 5, 1]
    with pytest.raises(IndexError, match="All batches that were to be read ahead are taken"):
        feed.of(batches[0])
    feed.close()
    first = Windows(read_rows, iter(batches), rows=5)
    first.of(batches[0])
    with pytest.raises(AssertionError, match="another, of 0, was read ahead"):
        first.of(batches[0])
    first.close()
    assert no_reader()


def test_an_epoch_of_any_length_is_added_up_in_parts(tmp_path, monkeypatch):
    """The trace holds at most `AT_ONCE` samples, and a checkpoint in between is exact."""
    frame = people()
    data = in_memory(opened(written(frame, tmp_path)), frame)
    whole = trained(data)
    monkeypatch.setattr("evenclip.training.trace.AT_ONCE", 50)
    in_parts = trained(data)
    for left, right in zip(whole.trace, in_parts.trace, strict=True):
        assert left["group_samples"] == right["group_samples"]
        assert left["loss"] == right["loss"]
        assert left["clip_fraction"] == right["clip_fraction"]

    def stop(step):
        if step.t == 17:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        trained(data, checkpoint=tmp_path / "saved", checkpoint_every=1, observers=[stop])
    assert trained(data, checkpoint=tmp_path / "saved", resume="exact").trace == in_parts.trace


# --- classes, groups, public values -------------------------------------------------------------


def test_what_epsilon_does_not_cover(tmp_path):
    (path,) = written(people(), tmp_path)
    checked = "a check that every row can be used, which only ever stops training"
    assert opened(path).uncovered == (checked,)
    data = parquet(path, target="hired", group="sex", features=["income", "member"])
    assert data.uncovered == (
        checked,
        "the names of the classes of 'hired', which are those found in the data",
        "the names of the groups of 'sex', which are those found in the data",
    )
    assert (data.class_names, data.group_names) == (("no", "yes"), ("f", "m", "missing"))
    assert data.encoder.features == ("income", "member")


def test_what_epsilon_does_not_cover_is_in_the_privacy_report(tmp_path):
    written(numbers(), tmp_path)
    data = parquet(tmp_path, target="y")
    assert data.uncovered
    covered = trained(data).privacy["not_covered"]
    assert covered[-len(data.uncovered) :] == list(data.uncovered)


def test_with_a_schema_no_row_is_read_before_training(tmp_path, monkeypatch):
    (path,) = written(people(), tmp_path)
    monkeypatch.setattr(arrow, "batches_of", None)
    assert opened(path).class_names == ("no", "yes")


def test_groups_are_combinations_and_bins(tmp_path):
    frame = people()
    (path,) = written(frame, tmp_path)
    data = opened(path, group=["sex", "member"], exclude_group=True)
    assert len(data.group_names) == 9
    assert not [name for name in data.encoder.features if name.startswith(("sex", "member"))]
    bins = opened(path, group="age", group_bins=2)
    assert bins.group_names == ("< 40", "≥ 40", "missing")
    assert_identical(trained(bins), trained(in_memory(bins, frame)))
    several = parquet(path, target="hired", group=["sex", "member"], features=["income"])
    assert several.group_names == (
        "f × False",
        "f × True",
        "m × False",
        "m × True",
        "missing × False",
        "missing × True",
    )


def test_values_outside_of_the_range_are_noted(tmp_path):
    frame = people()
    data = opened(written(frame, tmp_path, (200,)))
    outside = int(((frame["age"] < 20) | (frame["age"] > 60)).sum())
    assert data.notes == (
        f"{outside} values of 'age' lie outside of the schema's range and count as its nearer end.",
    )
    assert data.notes == schemas.check(SCHEMA, frame)


def test_files_by_pattern_and_by_folder(tmp_path):
    frame = numbers()
    paths = written(frame, tmp_path, (100, 200))
    by_pattern, by_folder = (
        parquet(where, target="y") for where in (str(tmp_path / "part*.parquet"), tmp_path)
    )
    assert (
        [file.path for file in by_pattern.files] == [file.path for file in by_folder.files] == paths
    )
    assert as_dataset(by_folder) is by_folder


# --- refusals -----------------------------------------------------------------------------------


def refusal(error, call) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


def changed(tmp_path, column, row, value, first=100) -> Parquet:
    """Open two files; the changed value lies in the second, in a later row group."""
    frame = people()
    frame.loc[first + row - 1, column] = value
    return opened(written(frame, tmp_path, (first,)))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (
            "hired",
            None,
            "Column 'hired' has no value in row 90, and the schema says that none is missing; set "
            '"missing": true, or fill it in.',
        ),
        (
            "hired",
            "perhaps",
            "Column 'hired' has the value 'perhaps', which is not among the schema's 'no', 'yes'; "
            'add it to them, or set "other": true.',
        ),
        (
            "income",
            None,
            "Column 'income' has no value in row 90, and the schema says that none is missing; set "
            '"missing": true, or fill it in.',
        ),
        (
            "income",
            np.inf,
            "Column 'income' has the value 'inf' in row 90, and the schema says it is a number; "
            "correct the schema or the value.",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_file_and_row(
    tmp_path, monkeypatch, column, value, message
):
    monkeypatch.setattr(arrow, "CHUNK", 20)
    data = changed(tmp_path, column, 90, value)
    assert refusal(ValueError, lambda: trained(data)) == f"{tmp_path / 'part1.parquet'}: {message}"


def test_rows_without_target_or_numbers_and_no_schema(tmp_path):
    frame = numbers().astype({"y": "Int64"})
    frame.loc[50, "y"] = None
    (path,) = written(frame, tmp_path)
    assert refusal(ValueError, lambda: trained(parquet(path, target="y", group="k"))) == (
        f"{path}: Column 'y' has no value in row 51; the classes of this encoder are '0', '1', '2'."
    )
    frame = numbers()
    frame.loc[52, "x1"] = np.nan
    (path,) = written(frame, tmp_path)
    assert refusal(ValueError, lambda: trained(parquet(path, target="y", group="k"))) == (
        f"{path}: Column 'x1' has no number in row 53 (missing, or infinite); leave such rows out "
        "of the file, or give a schema, which has an indicator for them."
    )
    frame["y"] = None
    (path,) = written(frame, tmp_path)
    assert refusal(ValueError, lambda: parquet(path, target="y", group="k")) == (
        "The target 'y' is missing in every row; choose another column."
    )


def test_names(tmp_path):
    (path,) = written(people(), tmp_path)
    there = "its columns are 'id', 'age', 'income', 'since', 'member', 'job', 'sex', 'hired'."
    assert refusal(ValueError, lambda: opened(path, target="Hire")) == (
        f"There is no column 'Hire' in {path}; did you mean 'hired'? {there}"
    )
    assert (
        refusal(ValueError, lambda: opened(path, features=["zzz"]))
        == f"There is no column 'zzz' in {path}; {there}"
    )
    assert refusal(ValueError, lambda: opened(path, group="hired")) == (
        "target and group are both 'hired'; predict one column and compare the groups of another."
    )
    assert refusal(ValueError, lambda: opened(path, features=["age", "age"])) == (
        "features names a column twice, 'age', 'age'; name each once."
    )
    assert refusal(ValueError, lambda: opened(path, features=["hired"])) == (
        "The target 'hired' is among the features; leave it out of them."
    )
    assert refusal(ValueError, lambda: opened(path, schema=None)) == (
        "Column 'id' has type large_string and is not a number; give a schema that says how to "
        "encode it (`evenclip data schema FILE --columns-only` writes one to fill in), or name "
        "the columns to learn from as features."
    )
    less = {
        **SCHEMA,
        "columns": {name: entry for name, entry in SCHEMA["columns"].items() if name != "age"},
    }
    assert refusal(ValueError, lambda: opened(path, schema=less, features=["age"])) == (
        "The feature 'age' is not in the schema; say there what is public about it."
    )
    more = {
        **SCHEMA,
        "columns": {**SCHEMA["columns"], "height": {"kind": "number", "range": [0, 1]}},
    }
    assert refusal(ValueError, lambda: opened(path, schema=more)) == (
        f"The schema has the column 'height' and {path} does not; {there[:-1]}: add the column, "
        "or take it out of the schema."
    )
    assert refusal(ValueError, lambda: parquet(path, target="income", features=["age"])) == (
        f"The target 'income' is a number with {N} different values; this is classification, with "
        "at most 20 numbers as classes: cut it into classes first (for example income > 50000)."
    )
    assert refusal(
        ValueError,
        lambda: parquet(path, target="hired", group="age", group_bins=3, features=["income"]),
    ).startswith("group_bins cuts 'age' at quantiles of all rows")


def test_invalid_files(tmp_path):
    assert refusal(FileNotFoundError, lambda: opened(tmp_path / "no.parquet")) == (
        f"{tmp_path / 'no.parquet'} is not there; give a file."
    )
    assert refusal(FileNotFoundError, lambda: opened(str(tmp_path / "*.parquet"))) == (
        f"There are no Parquet files at {tmp_path}/*.parquet; name a file, a folder or a pattern."
    )
    text = tmp_path / "text.parquet"
    text.write_text("a,b\n1,2\n")
    assert re.fullmatch(
        rf"{text} is not a Parquet file \(.+\); write it again\.",
        refusal(ValueError, lambda: opened(text)),
    )
    assert refusal(TypeError, lambda: opened(3)) == (
        "source is 3; it must be a text, a path or a list."
    )
    (empty,) = written(people().iloc[:0], tmp_path)
    assert refusal(ValueError, lambda: opened(empty)).startswith("The dataset has 0 samples;")


def test_files_that_differ(tmp_path):
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    people().to_parquet(first)
    people().astype({"income": "float32"}).to_parquet(second)
    assert refusal(ValueError, lambda: opened([first, second])) == (
        f"The files differ: column 'income' is double in {first} and float in {second}; write "
        "them with one schema."
    )
    people().drop(columns="sex").to_parquet(second)
    assert refusal(ValueError, lambda: opened([first, second])).startswith(
        f"There is no column 'sex' in {second};"
    )
    people().drop(columns="age").to_parquet(second)
    assert refusal(ValueError, lambda: opened([first, second])) == (
        f"The files differ: column 'age' is double in {first} and missing in {second}; write them "
        "with one schema."
    )


def test_a_file_that_changes_while_it_is_trained_on(tmp_path):
    (path,) = written(people(), tmp_path)
    data = opened(path, memory=5000)

    def change(step):
        if step.t == 2:
            os.utime(path, (1, 1))

    assert refusal(ValueError, lambda: trained(data, epochs=20, observers=[change])) == (
        f"{path} has changed since it was opened; a run sees one dataset only: open it again and "
        "start again."
    )
    assert no_reader()
    path.unlink()
    assert refusal(FileNotFoundError, lambda: trained(data)) == f"{path} is not there; give a file."


def test_a_damaged_row_group(tmp_path):
    (path,) = written(numbers(20_000), tmp_path, size=5000)
    data = parquet(path, target="y", group="k")
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[4:40] = b"\xff" * 36
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert re.fullmatch(
        rf"{path} cannot be read to its end \(.+\); write it again\.",
        refusal(ValueError, lambda: trained(data)),
    )


def test_a_model_with_too_few_outputs(tmp_path):
    (path,) = written(numbers().sort_values("y"), tmp_path)
    assert refusal(
        ValueError,
        lambda: fit(nn.Linear(4, 2), parquet(path, target="y", group="k"), batch_size=16),
    ) == ("'y' has 3 classes, '0', '1', '2', and the model has 2 outputs; give the model 3.")


def test_a_table_that_does_not_fit_in_memory(tmp_path, monkeypatch):
    """`evenclip compare` and `evenclip train` read tables whole."""
    (path,) = written(people(), tmp_path)
    assert len(read(path)) == N
    monkeypatch.setattr("evenclip.data.stored._available", lambda: 20_000)
    assert refusal(ValueError, lambda: read(path)) == (
        f"{path} has {N} rows, which take about 26 kB of memory as a table, and 20 kB are "
        "available; train on it without reading it whole, with evenclip.data.parquet and "
        "evenclip.fit, or take a sample of its rows."
    )


def test_the_schema_in_a_file(tmp_path):
    (path,) = written(people(), tmp_path)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    assert opened(path, schema=tmp_path / "schema.json").encoder == opened(path).encoder
    assert arrow.CHUNK > N
