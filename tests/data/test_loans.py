"""A table with every difficulty passes through `compare`, `train` and `predict`."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

import evenclip
from evenclip.cli import main

COLUMNS = ["--target", "default", "--group", "sex", "--group", "region"]


def loans(n=900, seed=0):
    """Return a table with every kind of column.

    Numbers with gaps, flags, rare and missing categories, dates, identifiers, a constant, and an
    empty column.
    """
    random = np.random.default_rng(seed)
    sex = random.choice(["f", "m"], n)
    region = random.choice(["north", "south", "west"], n, p=[0.5, 0.48, 0.02])
    income, age = random.lognormal(3, 0.6, n), random.integers(18, 90, n)
    repaid = (
        np.log(income) + 0.02 * (age - 40) + 0.5 * (sex == "m") + random.normal(0, 0.6, n) > 3.2
    )
    days = pd.to_timedelta(random.integers(0, 3000, n), unit="D")
    frame = pd.DataFrame(
        {
            "customer": [f"C{i:06d}" for i in range(n)],
            "person": random.integers(0, n // 2, n),
            "sex": sex,
            "region": region,
            "age": age,
            "income": np.where(random.random(n) < 0.1, np.nan, income),
            "employed": random.random(n) < 0.8,
            "job": random.choice(
                ["clerk", "nurse", "driver", "astronaut"], n, p=[0.4, 0.4, 0.195, 0.005]
            ),
            "since": (pd.Timestamp("2015-01-01") + days).strftime("%Y-%m-%d"),
            "country": "NL",
            "empty": np.nan,
            "default": np.where(repaid, "no", "yes"),
        }
    )
    frame.loc[random.random(n) < 0.05, "job"] = None
    frame.loc[random.random(n) < 0.01, "default"] = None
    frame.loc[random.random(n) < 0.02, "region"] = None
    return frame


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "loans.csv"
    loans().to_csv(path, index=False)
    return path


@pytest.fixture
def typed(capsys, tmp_path, monkeypatch, no_processes):
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "cache"))

    def run(*arguments):
        try:
            main([str(a) for a in arguments])
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def test_compare_train_and_predict(table, typed, tmp_path):
    status, out, err = typed(
        "compare", table, *COLUMNS, "--epsilon", 3, "--seeds", 1, "--epochs", 1, "--batch-size", 64,
        "--model", "linear", "--rules", "dpsgd,dpsgd-f", "--out", tmp_path / "out",
    )  # fmt: skip
    assert status == 0, err
    assert max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 80
    plain = json.loads((tmp_path / "out" / "results.json").read_text())
    assert plain["groups"] == [
        f"{s} × {r}" for s in "fm" for r in ("north", "south", "west", "missing")
    ]
    assert "f × west" in plain["small_groups"]
    notes = " ".join(plain["notes"])
    assert all(f"'{column}'" in notes for column in ("customer", "country", "empty", "default"))
    assert any("encoder" in text for text in plain["not_covered_by_epsilon"])
    row = plain["table"]["dpsgd"]
    judged = [
        row["privacy_cost"][g]["mean"] for g in plain["groups"] if g not in plain["small_groups"]
    ]
    # The mean of gaps is at least the gap of means.
    assert row["privacy_cost_gap"]["mean"] >= max(judged) - min(judged) - 1e-9

    status, out, err = typed(
        "train", table, *COLUMNS, "--epsilon", 3, "--epochs", 2, "--model", "mlp:16",
        "--unit", "person", "--exclude-group", "--out", tmp_path / "model", "--json",
    )  # fmt: skip
    assert status == 0, err
    facts = json.loads(out)
    assert 2.9 < facts["epsilon"] <= 3.0
    assert "person" in facts["unit"]
    report = json.loads((tmp_path / "model" / "privacy.json").read_text())
    assert report["seed"] == "from the operating system, not kept"

    fresh = loans(50, seed=1).drop(columns=["default", "sex", "region"])
    fresh.loc[0, "job"] = "poet"  # never seen
    fresh.to_csv(tmp_path / "new.csv", index=False)
    status, out, err = typed(
        "predict", tmp_path / "model", tmp_path / "new.csv", "--out", tmp_path / "predicted.csv"
    )
    assert status == 0, err
    predicted = pd.read_csv(tmp_path / "predicted.csv")
    assert len(predicted) == 50
    assert set(predicted["default" if "default" in predicted else "prediction"]) <= {"no", "yes"}


def test_a_dataframe_is_compared_as_its_file_would_be(tmp_path, here):
    options = {
        "target": "default",
        "group": "sex",
        "seeds": 1,
        "epochs": 1,
        "batch_size": 64,
        "model": "linear",
    }
    frame = loans(400)
    frame.to_parquet(tmp_path / "loans.parquet")
    of_frame, of_file = (
        evenclip.compare(source, ["dpsgd"], store=tmp_path / store, lr=0.1, on=here, **options)
        for source, store in ((frame, "frame"), (tmp_path / "loans.parquet", "file"))
    )
    assert (
        of_frame.to_json()["table"]["non-private"]["accuracy"]
        == of_file.to_json()["table"]["non-private"]["accuracy"]
    )
    assert of_frame.groups == ("f", "m")


BAD = {
    "no such column": (["--target", "defualt", "--group", "sex"], "'defualt'"),
    "target is group": (["--target", "sex", "--group", "sex"], "sex"),
    "one group": (["--target", "default", "--group", "country"], "country"),
    "one class": (["--target", "country", "--group", "sex"], "country"),
    "no epsilon": (["--target", "default", "--group", "sex", "--epsilon", "-1"], "epsilon is -1.0"),
    "epsilon out of reach": (
        ["--target", "default", "--group", "sex", "--epsilon", "1e-9"],
        "cannot be distinguished from 0",
    ),
    "numeric group": (["--target", "default", "--group", "age"], "--group-bins"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_about_columns(case, table, typed):
    arguments, says = BAD[case]
    status, out, err = typed("compare", table, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("evenclip: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"sex,default\n", "header"),
        ("sex,default\nf\u00fc,1\n".encode("latin-1"), "UTF-8"),
    ],
    ids=["empty", "only a header", "not UTF-8"],
)
def test_mistakes_about_files(content, says, tmp_path, typed):
    path = tmp_path / "loans.csv"
    path.write_bytes(content)
    status, out, err = typed("compare", path, "--target", "default", "--group", "sex")
    assert (status, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_a_schema_that_does_not_fit(table, tmp_path, typed):
    status, out, err = typed(
        "data", "schema", table, "--target", "default", "--out", tmp_path / "schema.json"
    )
    assert status == 0, err
    schema = json.loads((tmp_path / "schema.json").read_text())
    text = json.dumps(schema).replace('"north"', '"nord"')
    (tmp_path / "schema.json").write_text(text)
    status, out, err = typed("compare", table, *COLUMNS, "--schema", tmp_path / "schema.json")
    assert (status, out) == (2, "")
    assert "north" in err
    assert err.count("\n") == 1
