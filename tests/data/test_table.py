"""Tables: a file with every difficulty, compared with pandas; options; and error messages."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pandas as pd
import pytest
import torch

from evenclip.data.columns import Category, Date, Flag, Number
from evenclip.data.encoder import Encoder
from evenclip.data.rows import split_rows
from evenclip.data.table import read, table
from fresh import fresh

ROWS = 1200


def refusal(error, attempt):
    """Return the message of the error that `attempt` raises."""
    with pytest.raises(error) as caught:
        attempt()
    return str(caught.value)


def people(rows=ROWS, seed=7):
    """Return a table with every difficulty, before it is written to a file."""
    stream = np.random.default_rng(seed)
    pick = stream.choice
    age = stream.integers(18, 90, rows)
    frame = pd.DataFrame(
        {
            "id": np.arange(1, rows + 1),
            "uuid": [f"{value:032x}" for value in stream.integers(0, 2**62, rows)],
            "age": age.astype(float),
            "income": np.round(np.exp(stream.normal(10, 1, rows)), 2),
            "score": [f" {value:.3f}" for value in stream.normal(size=rows)],
            "member": stream.random(rows) < 0.3,
            "smoker": pick(["True", "False", ""], rows),
            "job": pick(["baker", "miller", "Küfer, Weinküfer"], rows, p=[0.5, 0.4, 0.1]),
            "town": [f"town {value}" for value in np.minimum(stream.geometric(0.05, rows), 90)],
            "since": (np.datetime64("2001-01-01") + stream.integers(7000, size=rows)).astype(str),
            "until": [
                f"{day % 28 + 1}.{day % 12 + 1:02d}.{2000 + day % 20}"
                for day in stream.integers(99, size=rows)
            ],
            "unit": "metre",
            "nothing": "",
            "zip": pick(["01067", "10115", "80331"], rows),
            "sex": pick(["Female", "Male"], rows),
            "region": pick(["north", "south", "east"], rows, p=[0.5, 0.48, 0.02]),
            "hired": np.where(stream.random(rows) < 0.3 + 0.4 * (age > 50), "yes", "no"),
        }
    )
    frame.loc[stream.random(rows) < 0.1, "age"] = np.nan
    frame.loc[stream.random(rows) < 0.05, "job"] = "?"
    frame.loc[stream.random(rows) < 0.05, "since"] = ""
    frame.loc[stream.random(rows) < 0.03, "sex"] = ""
    frame.loc[stream.random(rows) < 0.02, "hired"] = ""
    frame.loc[[3, rows - 9], "income"] = [np.inf, -1e300]
    return frame


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "people.csv"
    people().to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def made(file):
    return table(file, target="hired", group="sex", seed=3, keep=["id"])


def raw_rows(made, dataset, frame):
    """Return the rows of the file that a dataset holds, by the identifier among its features."""
    column = next(column for column in made.encoder.columns if column.column == "id")
    at = made.encoder.features.index("id")
    ids = dataset.x[:, at].double() * column.scale + column.centre
    return frame.set_index("id", drop=False).loc[ids.round().long().tolist()]


# --- results ------------------------------------------------------------------------------------


def test_every_kind_is_recognised(made):
    kinds = {column.column: type(column) for column in made.encoder.columns}
    assert kinds == {
        "id": Number,
        "age": Number,
        "income": Number,
        "score": Number,
        "member": Flag,
        "smoker": Flag,
        "job": Category,
        "town": Category,
        "since": Date,
        "until": Date,
        "zip": Number,
        "sex": Category,
        "region": Category,
    }


def test_useless_columns_are_left_out_and_named(made):
    n = len(made.splits.train)
    assert made.notes[1:4] == (
        f"Column 'uuid' looks like an identifier ({n} different values in {n} rows) and is not "
        "used; to use it, keep it.",
        "Column 'unit' has one value only and is not used; to use it, keep it.",
        "Column 'nothing' has no values and is not used; to use it, keep it.",
    )


def test_rows_without_a_target_are_left_out_and_counted(made, file):
    missing = (pd.read_csv(file)["hired"].isna()).sum()
    assert made.notes[0] == f"{missing} of 1200 rows have no 'hired' and are left out."
    lengths = [len(part) for part in made.splits]
    total = 1200 - missing
    assert sum(lengths) == total
    for length, share in zip(lengths, (0.64, 0.2, 0.16), strict=True):
        assert abs(length - share * total) < 5 * (total * share * (1 - share)) ** 0.5
    assert made.splits.train.records == round(0.64 * total)


def test_the_splits_do_not_overlap(made, file):
    frame = pd.read_csv(file)
    ids = [set(raw_rows(made, part, frame)["id"]) for part in made.splits]
    assert sum(map(len, ids)) == len(set.union(*ids))
    assert set.union(*ids) == set(frame["id"][frame["hired"].notna()])


def test_numbers_are_standardised_by_the_training_rows(made, file):
    frame = pd.read_csv(file)
    train = raw_rows(made, made.splits.train, frame)
    for part in made.splits:
        rows = raw_rows(made, part, frame)
        expected = ((rows["age"] - train["age"].mean()) / train["age"].std(ddof=0)).fillna(0)
        got = part.x[:, made.encoder.features.index("age")]
        np.testing.assert_allclose(got, expected, atol=1e-6)
        got = part.x[:, made.encoder.features.index("age=(missing)")]
        np.testing.assert_array_equal(got, rows["age"].isna())
    assert 0 < train["age"].isna().sum() < len(train)


def test_infinite_numbers_are_missing_and_stray_ones_are_held(made):
    at = [made.encoder.features.index(name) for name in ("age", "age=(missing)")]
    frame = pd.DataFrame([{"age": value} for value in (np.inf, -np.inf, 1e308, -1e308, "much")])
    for column in made.encoder.columns:
        if column.column not in frame:
            frame[column.column] = None
    assert made.encoder.encode(frame)[:, at].tolist()[:2] == [[0, 1], [0, 1]]
    assert made.encoder.encode(frame)[:, at].tolist()[4] == [0, 1]
    assert made.encoder.encode(frame)[:, at].abs().max() <= 100


def test_categories_are_indicators_and_rare_ones_share_one(made, file):
    frame = pd.read_csv(file)
    train, test = (raw_rows(made, part, frame) for part in (made.splits.train, made.splits.test))
    counts = train["town"].value_counts()
    common = sorted(counts[counts >= 10].index)
    names = [name for name in made.encoder.features if name.startswith("town=")]
    assert names == [f"town={value}" for value in (*common, "(other)")]
    assert 0 < len(common) < len(counts)
    expected = pd.get_dummies(test["town"].where(test["town"].isin(common), "zz")).reindex(
        columns=[*common, "zz"]
    )
    at = [made.encoder.features.index(name) for name in names]
    np.testing.assert_array_equal(
        made.splits.test.x[:, at], expected.fillna(0).to_numpy(dtype=np.float32)
    )


def test_missing_is_a_category_and_a_question_mark_is_missing(made):
    names = [name for name in made.encoder.features if name.startswith("job=")]
    assert names == ["job=Küfer, Weinküfer", "job=baker", "job=miller", "job=(missing)"]


def test_dates_are_days(made, file):
    frame = pd.read_csv(file)
    train = raw_rows(made, made.splits.train, frame)
    for name, form in (("since", "%Y-%m-%d"), ("until", "%d.%m.%Y")):
        days = pd.to_datetime(train[name], format=form).map(
            lambda day: day.toordinal(), na_action="ignore"
        )
        expected = ((days - days.mean()) / days.std(ddof=0)).fillna(0).astype(float)
        np.testing.assert_allclose(
            made.splits.train.x[:, made.encoder.features.index(name)], expected, atol=1e-5
        )


def test_booleans_are_one_and_zero(made, file):
    rows = raw_rows(made, made.splits.test, pd.read_csv(file))
    np.testing.assert_array_equal(
        made.splits.test.x[:, made.encoder.features.index("member")], rows["member"]
    )
    expected = (
        rows["smoker"]
        .map({True: 1.0, False: 0.0, "True": 1.0, "False": 0.0})
        .fillna(0.5)
        .astype(float)
    )
    np.testing.assert_array_equal(
        made.splits.test.x[:, made.encoder.features.index("smoker")], expected
    )


def test_classes_and_groups(made, file):
    assert made.encoder.classes == ("no", "yes")
    assert made.encoder.groups == ("Female", "Male", "missing")
    for part in made.splits:
        rows = raw_rows(made, part, pd.read_csv(file))
        assert [part.class_names[y] for y in part.y] == list(rows["hired"])
        assert [part.group_names[k] for k in part.group] == list(rows["sex"].fillna("missing"))


def test_the_encoder_gives_the_features_of_the_splits_again(made, file):
    frame = read(file)
    for part in made.splits:
        rows = raw_rows(made, part, frame)
        assert torch.equal(made.encoder.encode(rows), part.x)
        assert torch.equal(made.encoder.target_of(rows), part.y)
        assert torch.equal(made.encoder.group_of(rows), part.group)
        assert part.x.dtype == torch.float32


def test_the_encoder_survives_json(made, file):
    again = Encoder.from_json(json.loads(json.dumps(made.encoder.to_json())))
    assert again == made.encoder
    assert torch.equal(again.encode(read(file)), made.encoder.encode(read(file)))


def test_only_training_rows_shape_the_encoder(made, file, monkeypatch):
    """The rows keep their places, which depend on what they hold."""
    frame = read(file)
    split = split_rows([frame], "hired", None, None, 3)
    monkeypatch.setattr("evenclip.data.table.split_rows", lambda *given: split)
    elsewhere = frame["id"].isin(
        [
            *raw_rows(made, made.splits.test, frame)["id"],
            *raw_rows(made, made.splits.validation, frame)["id"],
        ]
    )
    for name, value in (
        ("age", 1e9),
        ("income", -5.0),
        ("job", "new"),
        ("town", "new"),
        ("since", "1950-01-01"),
    ):
        frame.loc[elsewhere, name] = value
    frame["uuid"] = frame["uuid"].where(~elsewhere, "same")
    changed = table(frame, target="hired", group="sex", seed=3, keep=["id"])
    assert changed.encoder == made.encoder
    assert torch.equal(changed.splits.train.x, made.splits.train.x)
    assert not torch.equal(changed.splits.test.x, made.splits.test.x)


def test_training_rows_do_shape_the_encoder(made, file):
    frame = read(file)
    frame.loc[frame["id"].isin(raw_rows(made, made.splits.train, frame)["id"]), "age"] += 1
    assert table(frame, target="hired", group="sex", seed=3, keep=["id"]).encoder != made.encoder


def test_the_seed_decides(made, file):
    again = table(file, target="hired", group="sex", seed=3, keep=["id"])
    assert again.encoder == made.encoder
    assert again.notes == made.notes
    assert all(torch.equal(a.x, b.x) for a, b in zip(again.splits, made.splits, strict=True))
    other = table(file, target="hired", group="sex", seed=4, keep=["id"])
    assert not torch.equal(other.splits.train.x, made.splits.train.x)


def test_what_epsilon_does_not_cover_is_listed(made):
    assert made.uncovered == (
        "the encoder (columns used, categories, means and deviations), fitted on the training rows",
        "the names of the classes of 'hired', which are those found in the data",
        "the names of the groups of 'sex', which are those found in the data",
        "the number of rows with a target, from which n, q and T are computed",
    )


def test_a_declared_number_of_rows_is_what_n_is_computed_from(file, tmp_path):
    made = table(file, target="hired", group="sex", records=5000)
    assert made.splits.train.records == 3200
    assert not [access for access in made.uncovered if "number of rows" in access]
    more = tmp_path / "more.csv"
    more.write_text("".join(file.read_text().splitlines(keepends=True)[:400]))
    other = table(file, target="hired", group="sex", records=5000, test=more)
    assert (other.splits.train.records, other.splits.test.records) == (4000, None)
    assert (
        refusal(ValueError, lambda: table(file, target="hired", group="sex", records=0))
        == "records is 0; it must be a whole number of at least 1."
    )


def test_too_few_rows_for_all_parts_are_refused():
    frame = pd.DataFrame({"x": np.arange(10), "g": ["a", "b"] * 5, "y": [0, 0, 1, 1, 0] * 2})
    made, messages = [], set()
    for seed in range(20):
        try:
            made.append(table(frame, target="y", group="g", seed=seed))
        except ValueError as error:
            messages.add(str(error))
    assert made
    assert messages == {
        "Each of the 10 rows was put into a part by itself, and a part has none; give more rows, "
        "or another seed."
    }


def test_groups_too_small_to_judge_are_marked(made, file):
    test = made.splits.test
    counts = {name: int((test.group == code).sum()) for code, name in enumerate(test.group_names)}
    assert counts["missing"] < 30 <= min(counts["Female"], counts["Male"])
    assert made.small == ("missing",)
    assert made.notes[-1] == (
        "Too small to judge: 'missing' (fewer than 30 test rows, or none of some class)."
    )


def test_a_group_without_a_class_is_small():
    frame = pd.DataFrame({"x": np.arange(600) % 7, "g": ["a", "b"] * 300, "y": [0, 1, 0, 0] * 150})
    made = table(frame, target="y", group="g")
    assert made.small == ("a",)
    assert made.encoder.classes == ("0", "1")


# --- options ------------------------------------------------------------------------------------


def test_several_groups_intersect(file):
    made = table(file, target="hired", group=["sex", "region"])
    names = read(file).dropna(subset="hired").fillna({"sex": "missing"})
    expected = {
        f"{sex} × {region}" for sex, region in zip(names["sex"], names["region"], strict=True)
    }
    assert set(made.encoder.groups) == expected
    assert len(made.small) > 0
    assert {"Male × east", "missing × east"} & set(made.small)


def test_a_group_may_be_kept_out_of_the_features(file):
    made = table(file, target="hired", group=["sex", "region"], exclude_group=True)
    assert not [name for name in made.encoder.features if name.startswith(("sex", "region"))]


def test_dropping_and_keeping(file):
    made = table(
        file, target="hired", group="sex", keep=["unit", "nothing", "uuid"], drop=["town", "age"]
    )
    used = {column.column for column in made.encoder.columns}
    assert {"unit", "nothing", "uuid"} < used
    assert not {"town", "age", "id"} & used
    assert torch.isfinite(made.splits.train.x).all()


def test_a_numeric_group_is_cut_at_quantiles_of_all_rows_that_have_a_target(file):
    made = table(file, target="hired", group="income", group_bins=3, keep=["id"])
    train = raw_rows(made, made.splits.train, pd.read_csv(file))["income"]
    every = read(file)
    finite = pd.to_numeric(every["income"][every["hired"].notna()], errors="coerce")
    low, high = np.percentile(finite[np.isfinite(finite)], [100 / 3, 200 / 3])
    assert made.encoder.groups == (
        f"< {low:.6g}",
        f"{low:.6g} to < {high:.6g}",
        f"≥ {high:.6g}",
        "missing",
    )
    assert made.encoder.group[0].edges == pytest.approx((low, high), rel=1e-12)
    low, high = made.encoder.group[0].edges  # a value may lie on the edge, to the last bit
    expected = [
        int(income >= low) + int(income >= high) if np.isfinite(income) else 3 for income in train
    ]
    assert made.splits.train.group.tolist() == expected
    assert (
        "the values that cut 'income' into groups, which are quantiles of all rows"
        in made.uncovered
    )


@pytest.mark.parametrize(
    "options",
    [{"group": "v", "group_bins": 3}, {"group": "g", "unit": "person"}],
    ids=["bins", "unit"],
)
def test_groups_and_classes_are_the_same_for_every_seed(options):
    """Results of several seeds share one table."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"person": np.arange(600) // 2, "x": random.normal(size=600), "v": random.normal(size=600)}
    )
    frame["g"], frame["y"] = random.choice(["a", "b"], 600), random.choice(["no", "yes"], 600)
    frame.loc[0, ["g", "y"]] = ["c", "never"]  # in one of the two rows of a person
    made = [table(frame, target="y", seed=seed, **options).encoder for seed in range(6)]
    assert len({(encoder.groups, encoder.classes, encoder.group[0].edges) for encoder in made}) == 1


def test_a_public_range_is_cut_however_few_values_there_are():
    frame = pd.DataFrame(
        {"age": np.arange(300) % 15 + 20, "x": np.arange(300.0), "y": np.arange(300) // 7 % 2}
    )
    ranges = {
        "age": {"kind": "number", "range": [0, 90]},
        "x": {"kind": "number", "range": [0, 300]},
    }
    schema = {"evenclip_schema": 1, "columns": ranges}
    made = table(frame, target="y", group="age", group_bins=3, schema=schema)
    assert made.encoder.group[0].edges == (30.0, 60.0)


def test_a_header_that_names_a_column_twice_is_refused(tmp_path):
    (tmp_path / "twice.csv").write_text("x,g,y,y\n1,a,0,1\n")
    with pytest.raises(ValueError, match=r"twice\.csv has two columns 'y'; rename one of them\."):
        read(tmp_path / "twice.csv")


def test_a_date_far_in_the_future_is_a_number_like_any_other():
    days = pd.date_range("2020-01-01", periods=299).strftime("%Y-%m-%d").tolist()
    frame = pd.DataFrame(
        {"until": [*days, "9999-12-31"], "g": ["a", "b"] * 150, "y": np.arange(300) // 7 % 2}
    )
    made = table(frame, target="y", group="g")
    assert torch.isfinite(made.splits.train.x).all()
    new = pd.DataFrame({"until": ["9999-12-31", "2020-02-01"], "g": ["a", "b"]})
    assert torch.isfinite(made.encoder.encode(new)).all()


def test_a_number_with_few_values_is_a_group_as_it_is():
    frame = pd.DataFrame(
        {"x": np.arange(400) % 9, "g": np.arange(400) % 12, "y": np.arange(400) // 7 % 2}
    )
    made = table(frame, target="y", group="g")
    assert made.encoder.groups == tuple(str(value) for value in range(12))


def test_one_row_per_person_is_kept():
    frame = pd.DataFrame(
        {
            "person": np.arange(900) // 3,
            "x": np.arange(900.0),
            "g": ["a", "b"] * 450,
            "y": np.arange(900) // 5 % 2,
        }
    )
    frame.loc[:5, "person"] = None  # removes the first two persons
    made = table(frame, target="y", group="g", unit="person", keep=["x"])
    column = made.encoder.columns[0]
    kept = torch.cat([part.x[:, 0] for part in made.splits]).double() * column.scale + column.centre
    persons = (kept.round() // 3).long()
    assert sorted(persons.tolist()) == list(range(2, 300))
    assert [column.column for column in made.encoder.columns] == ["x", "g"]
    assert made.notes[0] == (
        "One row for each of the 298 persons in 'person' is kept, 602 rows are left out, 6 of "
        "them without a person."
    )
    assert made.uncovered[-1] == "the number of persons, from which n, q and T are computed"
    assert made.splits.train.records == round(0.64 * 298)
    assert made.unit == "person"
    assert len(set((kept.round() % 3).tolist())) == 3  # each of the three rows is kept sometimes
    other = table(frame, target="y", group="g", unit="person", keep=["x"], seed=1)
    assert {
        round(float(v)) for v in other.splits.train.x[:, 0] * other.encoder.columns[0].scale
    } != {round(float(v)) for v in made.splits.train.x[:, 0] * column.scale}


def test_a_given_test_set_is_the_test_set(file, tmp_path):
    other = people(rows=200, seed=8)
    other.loc[0, "sex"] = "Diverse"
    other.to_csv(tmp_path / "test.csv", index=False)
    made = table(file, target="hired", group="sex", test=tmp_path / "test.csv")
    rows = read(tmp_path / "test.csv").dropna(subset="hired")
    assert torch.equal(made.splits.test.x, made.encoder.encode(rows))
    assert made.encoder.groups == ("Diverse", "Female", "Male", "missing")
    n = len(read(file).dropna(subset="hired"))
    assert len(made.splits.train) + len(made.splits.validation) == n
    assert abs(len(made.splits.train) - 0.8 * n) < 5 * (0.16 * n) ** 0.5
    assert made.splits.train.records == round(0.8 * n)


def test_a_frame_and_its_file_give_the_same(file):
    frame = read(file)
    of_frame, of_file = (table(source, target="hired", group="sex") for source in (frame, file))
    assert of_frame.encoder == of_file.encoder
    assert torch.equal(of_frame.splits.train.x, of_file.splits.train.x)


@pytest.mark.parametrize("suffix", [".tsv", ".parquet", ".feather", ".txt"])
def test_other_files_give_the_same(file, tmp_path, suffix):
    frame = read(file)
    path = tmp_path / f"people{suffix}"
    if suffix in (".tsv", ".txt"):
        frame.to_csv(path, index=False, sep="\t" if suffix == ".tsv" else "|")
    else:
        getattr(frame, f"to_{suffix[1:]}")(path)
    made, again = (table(source, target="hired", group="sex") for source in (file, path))
    assert again.encoder == made.encoder
    assert torch.equal(again.splits.train.x, made.splits.train.x)


def test_frames_of_every_dtype():
    stream, n = np.random.default_rng(0), 300
    frame = pd.DataFrame(
        {
            0: pd.array(stream.integers(0, 9, n), dtype="Int64"),
            "nullable": pd.array([True, None, False] * 100, dtype="boolean"),
            "category": pd.Categorical.from_codes(stream.integers(-1, 2, n), ["u", "v"]),
            "moment": pd.date_range("2020-01-01", periods=n, freq="h", tz="Europe/Berlin"),
            "length": pd.to_timedelta(stream.integers(0, 99, n), unit="D"),
            "date": [datetime.date(2020, 1, 1) + datetime.timedelta(i % 31) for i in range(n)],
            "mixed": [1, "1", 1.0, None, "b"] * 60,
            "lists": [[i] for i in range(n)],
            "strays": [*map(str, range(280)), *["unknown"] * 20],
            "g": [True, False] * 150,
            "y": stream.integers(0, 2, n),
        }
    )
    made = table(frame, target="y", group="g")
    kinds = {column.column: column.kind for column in made.encoder.columns}
    assert kinds == {
        "0": "number",
        "nullable": "boolean",
        "category": "category",
        "moment": "date",
        "length": "number",
        "date": "date",
        "mixed": "category",
        "g": "boolean",
        "strays": "number",
    }
    mixed = next(column for column in made.encoder.columns if column.column == "mixed")
    assert (mixed.values, mixed.missing) == (("1", "b"), True)
    assert (
        "Column 'lists' holds values that are not numbers, texts or dates and is not used; to use "
        "it, keep it."
    ) in made.notes
    assert "'strays' holds numbers and 'unknown', which count as missing." in made.notes
    assert made.encoder.groups == ("False", "True")
    assert Encoder.from_json(json.loads(json.dumps(made.encoder.to_json()))) == made.encoder


def test_many_categories_are_limited():
    n = 6000
    frame = pd.DataFrame(
        {
            "c": [f"c{i % 60}" for i in range(n)],
            "g": ["a", "b"] * (n // 2),
            "y": [0, 1, 1] * (n // 3),
        }
    )
    made = table(frame, target="y", group="g")
    names = [name for name in made.encoder.features if name.startswith("c=")]
    assert len(names) == 51
    assert names[-1] == "c=(other)"
    assert made.notes == ("Column 'c' has 60 frequent values; the 50 most frequent are used.",)


# --- new rows -----------------------------------------------------------------------------------


def test_new_rows_may_hold_anything(made, file):
    frame = read(file).drop(columns=["hired", "uuid"]).head(3).astype(object)
    frame["extra"] = "ignored"
    frame.loc[0, ["job", "town", "since", "member", "age"]] = [
        "astronaut",
        "atlantis",
        "soon",
        "perhaps",
        "old",
    ]
    frame.loc[1, :] = None
    x = made.encoder.encode(frame)
    at = {name: made.encoder.features.index(name) for name in made.encoder.features}
    assert torch.isfinite(x).all()
    # The training rows have no rare job, so there is no indicator "other".
    assert sum(x[0, at[name]] for name in at if name.startswith("job=")) == 0
    assert x[0, at["town=(other)"]] == 1
    assert (x[0, at["since"]], x[0, at["since=(missing)"]]) == (0, 1)
    assert (x[0, at["member"]], x[0, at["age"]], x[0, at["age=(missing)"]]) == (0.5, 0, 1)
    assert x[1, at["job=(missing)"]] == 1
    assert torch.equal(x[2], made.encoder.encode(read(file))[2])


def test_missing_columns_are_named(made, file):
    assert refusal(
        ValueError, lambda: made.encoder.encode(read(file).drop(columns=["age", "job"]))
    ) == (
        "The rows lack the columns 'age', 'job', which the model was trained with; add them "
        "(empty where they are unknown)."
    )


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (
            "hired",
            "maybe",
            "Column 'hired' has the value 'maybe' in row 3; the classes of this encoder are 'no', "
            "'yes'.",
        ),
        (
            "hired",
            None,
            "Column 'hired' has no value in row 3; the classes of this encoder are 'no', 'yes'.",
        ),
        (
            "sex",
            "X",
            "Column 'sex' has the value 'X' in row 3; the groups of this encoder are 'Female', "
            "'Male', 'missing'.",
        ),
    ],
)
def test_unknown_labels_are_named(made, column, value, message):
    rows = pd.DataFrame({"hired": ["no"] * 4, "sex": ["Male"] * 4})
    rows.loc[2, column] = value
    assert (
        refusal(ValueError, lambda: (made.encoder.target_of(rows), made.encoder.group_of(rows)))
        == message
    )


# --- reading ------------------------------------------------------------------------------------


def written(tmp_path, content, name="t.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_found(tmp_path, separator):
    text = "a,b,c\n1,x y,2.5\n2,z,3.5\n".replace(",", separator)
    frame = read(written(tmp_path, text))
    assert frame.to_dict("list") == {"a": [1, 2], "b": ["x y", "z"], "c": [2.5, 3.5]}


def test_separators_inside_of_texts_are_text(tmp_path):
    frame = read(written(tmp_path, 'a,b\n"x;y;z",1\n"u;v;w",2\n'))
    assert frame.to_dict("list") == {"a": ["x;y;z", "u;v;w"], "b": [1, 2]}


def test_a_decimal_comma(tmp_path):
    frame = read(written(tmp_path, "a;b\n1,5;x\n-2,25;y\n"))
    assert frame["a"].tolist() == [1.5, -2.25]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    assert list(read(written(tmp_path, b"\xef\xbb\xbfa,b\n1,2\n")).columns) == ["a", "b"]


def test_one_column_is_a_table(tmp_path):
    assert read(written(tmp_path, "a\n1\n2\n"))["a"].tolist() == [1, 2]


def test_columns_may_be_left_as_they_are_written(tmp_path):
    path = written(tmp_path, "zip,n\n01067,1\n,2\n")
    assert read(path)["zip"].tolist()[0] == 1067
    assert read(path, text=["zip", "elsewhere"])["zip"].tolist()[0] == "01067"
    assert read(path, text=["zip"])["zip"].isna().tolist() == [False, True]


FILES = {  # content, name -> the message after the path
    "nothing": (b"", "t.csv", "is empty; it must hold a header and rows."),
    "blank": (b"\n \n", "t.csv", "is empty; it must hold a header and rows."),
    "header": (b"a,b\n", "t.csv", "has a header and no rows; give at least one row."),
    "latin": (
        "name,n\nAnna,1\nJürgen,2\n".encode("latin1"),
        "t.csv",
        "is not UTF-8 (byte 15, in line 3); convert it, for example with `iconv -f LATIN1 -t "
        "UTF-8 t.csv > utf8.csv`, naming the encoding it was saved in.",
    ),
    "latin late": (
        b"name,n\n" + b"Anna,1\n" * 60000 + b"J\xfcrgen,2\n",
        "t.csv",
        "is not UTF-8 (byte 420008, in line 60002); convert it, for example with `iconv -f "
        "LATIN1 -t UTF-8 t.csv > utf8.csv`, naming the encoding it was saved in.",
    ),
    "suffix": (
        b"x",
        "t.xlsx",
        "ends in '.xlsx'; tables are read from .csv, .txt, .tsv, .parquet, .feather: rename or "
        "convert the file.",
    ),
    "ragged": (
        b"a,b\n1,2\n3,4,5\n",
        "t.csv",
        "is not a table (3 fields in line 3, and 2 in the header); every line must have as many "
        "fields as the header, and texts with separators in them must be quoted.",
    ),
    "more fields than names": (
        b"a,b\n1,2,3\n3,4,5\n",
        "t.csv",
        "is not a table (3 fields in line 2, and 2 in the header); every line must have as many "
        "fields as the header, and texts with separators in them must be quoted.",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_refused(tmp_path, case):
    content, name, message = FILES[case]
    path = written(tmp_path, content, name)
    assert refusal(ValueError, lambda: read(path)) == f"{path} {message}"


def test_a_file_of_another_format_is_refused(tmp_path):
    for name in ("Parquet", "Feather"):
        path = written(tmp_path, b"not at all", f"t.{name.lower()}")
        with pytest.raises(ValueError, match=rf"is not a {name} file \(.+\); write it again\.$"):
            read(path)


def test_a_missing_file_is_named(tmp_path):
    assert (
        refusal(FileNotFoundError, lambda: table(tmp_path / "none.csv", target="y", group="g"))
        == f"{tmp_path / 'none.csv'} is not there; give a file."
    )
    assert (
        refusal(FileNotFoundError, lambda: read(tmp_path))
        == f"{tmp_path} is not there (it is a folder); give a file."
    )


# --- what is refused ----------------------------------------------------------------------------


def small(**changes):
    frame = pd.DataFrame(
        {
            "x": np.arange(40) % 5,
            "income": ["lo", "hi"] * 20,
            "g": ["a", "a", "b", "b"] * 10,
            "n": np.arange(40.0) ** 2,
        }
    )
    return frame.assign(**changes)


REFUSED = {
    "no such column": (
        {"target": "Incme"},
        "There is no column 'Incme' in the table; did you mean 'income'? its columns are 'x', "
        "'income', 'g', 'n'.",
    ),
    "nothing like it": (
        {"group": "zzz"},
        "There is no column 'zzz' in the table; its columns are 'x', 'income', 'g', 'n'.",
    ),
    "kept and not there": (
        {"keep": ["q"]},
        "There is no column 'q' in the table; its columns are 'x', 'income', 'g', 'n'.",
    ),
    "target is group": (
        {"group": ["g", "income"]},
        "target and group are both 'income'; predict one column and compare the groups of another.",
    ),
    "no group": ({"group": []}, "group names no column; name the one whose groups are compared."),
    "twice": ({"group": ["g", "g"]}, "group names a column twice, 'g', 'g'; name each once."),
    "drop target": (
        {"drop": ["income"]},
        "The column 'income' is the target; it can neither be dropped nor be the unit.",
    ),
    "keep and drop": (
        {"keep": ["x"], "drop": ["x"]},
        "The column 'x' is to be kept and to be dropped; choose one.",
    ),
    "number as target": (
        {"target": "n"},
        "The target 'n' is a number with 40 different values; this is classification, with at "
        "most 20 numbers as classes: cut it into classes first (for example income > 50000).",
    ),
    "one class": (
        {"source": small(income="lo")},
        "The target 'income' has one class only, 'lo'; there is nothing to learn.",
    ),
    "no target": (
        {"source": small(income=None)},
        "The target 'income' is missing in every row; choose another column.",
    ),
    "one group": (
        {"source": small(g="a")},
        "All rows belong to one group of 'g', 'a'; choose a column with two or more.",
    ),
    "number as group": (
        {"group": "n"},
        "The group column 'n' is a number with 40 different values; give group_bins "
        "(--group-bins), the number of groups to cut it into.",
    ),
    "one bin": (
        {"group": "n", "group_bins": 1},
        "group_bins is 1; it must be a whole number of at least 2.",
    ),
    "seed": ({"seed": -1}, "seed is -1; it must be a whole number of at least 0."),
    "few rows": (
        {"source": small().head(6)},
        "There are 6 rows to learn from and to test on; at least 10 are needed.",
    ),
    "no rows": (
        {"source": small().head(0)},
        "The table has no rows; nothing can be learnt from it.",
    ),
    "same names": (
        {"source": small().rename(columns={"n": "x"})},
        "The table has two columns 'x'; rename one of them.",
    ),
    "no features": (
        {"drop": ["x", "n"], "exclude_group": True},
        "No column is left to learn from; keep some of those that were left out, or add some.",
    ),
    "test without column": (
        {"test": small().drop(columns="g")},
        "There is no column 'g' in the test set; its columns are 'x', 'income', 'n'.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_explained(case):
    changes, message = REFUSED[case]
    arguments = {"source": small(), "target": "income", "group": "g"} | changes
    assert refusal(ValueError, lambda: table(arguments.pop("source"), **arguments)) == message


def test_too_many_labels_are_refused():
    n = 1000
    frame = pd.DataFrame(
        {"x": np.arange(n) % 7, "name": [f"n{i}" for i in range(n)], "y": np.arange(n) % 2}
    )
    assert refusal(ValueError, lambda: table(frame, target="y", group="name")) == (
        "The group 'name' has 1000 different values, more than 200 groups; is it the right column?"
    )
    assert refusal(ValueError, lambda: table(frame, target="name", group="y")) == (
        "The target 'name' has 1000 different values, more than 200 classes; is it the right "
        "column?"
    )


def test_something_else_is_no_table():
    assert (
        refusal(TypeError, lambda: table([1, 2], target="y", group="g"))
        == "source is a list; it must be a text, a path or a DataFrame."
    )


def test_importing_it_imports_no_pandas():
    assert fresh("import sys, evenclip.data.table; print('pandas' in sys.modules)") == "False\n"
