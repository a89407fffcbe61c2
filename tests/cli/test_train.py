"""End-to-end tests of `evenclip train` and `evenclip predict` on a difficult file."""

from __future__ import annotations

import io
import json

import numpy as np
import pandas as pd
import pytest

from evenclip import export
from evenclip.cli import main

FAST = ["--epochs", "1", "--batch-size", "64", "--model", "mlp:8"]


def run(capsys, *arguments):
    """Run the command line; return (exit status, stdout, stderr)."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments)])
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A CSV with semicolons, decimal commas, umlauts, an unnamed index and a rare group.

    It also has an identifier, dates and missing values.
    """
    stream, n = np.random.default_rng(1), 900
    frame = pd.DataFrame(
        {
            "customer id": [f"K-{i:06d}" for i in range(n)],
            "income": np.round(stream.normal(3000, 800, n), 2),
            "since": (np.datetime64("2005-01-01") + stream.integers(6000, size=n)).astype(str),
            "job": stream.choice(["Bäcker", "Müller", "Schmied; Hufschmied"], n),
            "const": 1,
            "sex": stream.choice(["f", "m", "d"], n, p=[0.5, 0.48, 0.02]),
            "credit": stream.choice(["good", "bad"], n),
        },
        index=np.arange(n) * 3,
    )
    frame.loc[stream.random(n) < 0.1, ["income", "job"]] = None
    frame.loc[frame.index[:7], "credit"] = None
    path = tmp_path_factory.mktemp("train") / "kunden.csv"
    frame.to_csv(path, sep=";", decimal=",")
    return path


ASK = ["--target", "credit", "--group", "sex", "--epsilon", "2"]


@pytest.fixture(scope="module")
def model(file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out") / "model"
    with pytest.raises(SystemExit) as stop:
        main(["train", str(file), *ASK, *FAST, "--out", str(folder)])
    assert not stop.value.code
    return folder


def test_training_says_what_was_done(capsys, file, tmp_path):
    status, out, err = run(capsys, "train", file, *ASK, *FAST, "--out", tmp_path / "m")
    assert status == 0
    words = " ".join(out.split())
    assert f"model {tmp_path / 'm'}: mlp, dpsgd-global-adapt (sound), 572 rows" in words
    assert "ε        2 by PLD, " in out
    assert "seed     not kept" in out
    assert "accuracy of test rows (not differentially private)" in out
    assert "d (" in out
    assert ", too few)" in out
    assert (
        "the encoder (columns used, categories, means and deviations), fitted on the training rows"
        in words
    )
    assert max(len(line) for line in out.replace(str(tmp_path), "").splitlines()) <= 80
    assert "note: 7 of 900 rows have no 'credit' and are left out.\n" in err
    assert "note: Column 'customer id' looks like an identifier" in err
    assert "note: Column 'Unnamed: 0' looks like an identifier" in err
    assert "note: Column 'const' has one value only and is not used; to use it, keep it.\n" in err


def test_training_in_json(capsys, file, tmp_path):
    status, out, _ = run(
        capsys,
        "train",
        file,
        *ASK,
        *FAST,
        "--out",
        tmp_path / "m",
        "--seed",
        "4",
        "--json",
        "--exclude-group",
        "--rule",
        "dpsgd",
        "--drop",
        "since",
    )
    facts = json.loads(out)
    assert status == 0
    assert 0.9995 * 2 <= facts["epsilon"] <= 2
    assert (facts["method"], facts["seed_given"], facts["n"]) == ("dpsgd", True, 572)
    assert facts["accuracy"].keys() == {"d", "f", "m"}
    assert facts["small"] == ["d"]
    encoder = export.load(tmp_path / "m").encoder
    assert [column.column for column in encoder.columns] == ["income", "job"]


def test_predicting_raw_rows(capsys, file, model):
    status, out, err = run(capsys, "predict", model, file)
    assert status == 0
    assert err == (  # too few training rows have it for a category of its own
        "evenclip: Not all of the 900 rows are like those of training:\n"
        "  Column 'sex': 15 of 900 values are not among its categories (read as other),\n"
        "    such as 'd'.\n"
    )
    predictions = pd.read_csv(io.StringIO(out))
    assert list(predictions.columns) == ["row", "prediction", "P(bad)", "P(good)"]
    assert list(predictions["row"]) == [3 * i for i in range(900)]  # the file's own, unnamed index
    raw = pd.read_csv(file, sep=";", decimal=",")
    with pytest.warns(UserWarning, match=r"Column 'sex': 15 of 900 values .* such as 'd'\.$"):
        expected = export.load(model).predict(raw)
    np.testing.assert_allclose(predictions["P(good)"], expected["P(good)"], atol=1e-9)
    assert list(predictions["prediction"]) == list(expected["prediction"])


def test_predicting_new_rows_into_a_file(capsys, model, tmp_path):
    rows = tmp_path / "new.csv"
    rows.write_text("name,sex,job,income,since\nA,x,Pilot,,2001-01-01\nB,f,Müller,2500.5,never\n")
    out = tmp_path / "predictions.csv"
    status, printed, said = run(capsys, "predict", model, rows, "--out", out, "--keep", "name")
    assert (status, printed) == (0, "")
    assert said == (
        "evenclip: Not all of the 2 rows are like those of training:\n"
        "  Column 'since': 1 of 2 values are not dates (read as missing), such as\n"
        "    'never'.\n"
        "  Column 'job': 1 of 2 values are not among its categories (read as none), such\n"
        "    as 'Pilot'.\n"
        "  Column 'sex': 1 of 2 values are not among its categories (read as other), such\n"
        "    as 'x'.\n"
    )
    predictions = pd.read_csv(out)
    assert list(predictions.columns) == ["row", "name", "prediction", "P(bad)", "P(good)"]
    assert predictions[["row", "name"]].to_numpy().tolist() == [[1, "A"], [2, "B"]]
    assert np.allclose(predictions["P(bad)"] + predictions["P(good)"], 1)
    _, text, _ = run(capsys, "predict", model, rows, "--json")
    assert [row["row"] for row in json.loads(text)] == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv", "predictions.csv"]


def test_a_model_that_is_there_is_refused_before_training(capsys, file, model):
    status, out, err = run(capsys, "train", file, *ASK, "--out", model)
    assert (status, out) == (2, "")
    expected = f"{model} already holds a model; give another folder, or --force to replace it."
    assert err == f"evenclip: {expected}\n"
    status, _, _ = run(capsys, "train", file, *ASK, *FAST, "--out", model, "--force")
    assert status == 0


def test_a_schema_from_its_file(capsys, file, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(
        json.dumps(
            {
                "evenclip_schema": 1,
                "columns": {
                    "income": {"kind": "number", "range": [0, 10000]},
                    "sex": {"kind": "category", "values": ["d", "f", "m"], "missing": False},
                },
            }
        )
    )
    status, out, _ = run(
        capsys, "train", file, *ASK, *FAST, "--schema", schema, "--out", tmp_path / "m"
    )
    assert status == 0
    assert "  the encoder" not in out
    assert "  a check that the rows fit the schema, which only ever stops training" in out
    assert "ε holds for the encoder as given" in " ".join(out.split())
    assert "accuracy of test rows" in out
    assert "has no figures of test rows" in (tmp_path / "m" / "README.md").read_text()


def test_group_figures_are_in_the_folder_if_asked_for(capsys, file, tmp_path):
    asked = (*FAST, "--with-group-figures", "--out", tmp_path / "m")
    status, out, _ = run(capsys, "train", file, *ASK, *asked)
    assert status == 0
    text = (tmp_path / "m" / "README.md").read_text()
    assert "| sex | test rows | accuracy |" in text
    assert "accuracy of test rows" in out


def test_a_schema_declares_and_the_command_says_so(capsys, file, tmp_path):
    schema = tmp_path / "schema.json"
    category = {"kind": "category", "missing": False}
    columns = {
        "income": {"kind": "number", "range": [0, 10000]},
        "sex": category | {"values": ["d", "f", "m"]},
        "credit": {"kind": "category", "values": ["bad", "good"]},
    }
    schema.write_text(json.dumps({"evenclip_schema": 1, "columns": columns}))
    status, out, _ = run(
        capsys, "train", file, *ASK, *FAST, "--schema", schema, "--out", tmp_path / "m", "--json"
    )
    facts = json.loads(out)
    assert (status, facts["encoder_declared"]) == (0, True)
    assert facts["encoder"].startswith("ε holds for the encoder as given, which is declared")


MISTAKES = {
    "no file": (["train", "none.csv", *ASK], "none.csv is not there; give a file."),
    "a dataset": (
        ["train", "toy", *ASK],
        "toy is a dataset of the package, and `evenclip train` takes a table; give a file, or try "
        "rules on this dataset by `evenclip compare toy`.",
    ),
    "a dataset in Python, without the options": (
        ["train", "mine.py:faces"],
        "mine.py:faces is a dataset in Python, and `evenclip train` takes a table; give a file, or "
        "try rules on this dataset by `evenclip compare mine.py:faces`.",
    ),
    "no column": (
        ["train", "FILE", "--target", "credits", "--group", "sex"],
        "There is no column 'credits' in kunden.csv; did you mean 'credit'? its columns are "
        "'Unnamed: 0', 'customer id', 'income', 'since', 'job', 'const', 'sex', 'credit'.",
    ),
    "target is group": (
        ["train", "FILE", "--target", "sex", "--group", "sex"],
        "target and group are both 'sex'; predict one column and compare the groups of another.",
    ),
    "epsilon": (
        ["train", "FILE", "--target", "credit", "--group", "sex", "--epsilon", "-1"],
        "--epsilon is -1.0; it must be a finite number above 0.",
    ),
    "one group": (
        ["train", "FILE", "--target", "credit", "--group", "const"],
        "All rows belong to one group of 'const', '1'; choose a column with two or more.",
    ),
    "no model": (
        ["predict", "nowhere", "FILE"],
        "nowhere holds no model (model.safetensors is missing); give the folder that `evenclip "
        "train --out` wrote.",
    ),
    "no rows": (["predict", "MODEL", "none.csv"], "none.csv is not there; give a file."),
    "kept": (
        ["predict", "MODEL", "FILE", "--keep", "shoe"],
        "--keep is 'shoe', but FILE has no such column; leave it out.",
    ),
    "onto itself": (
        ["predict", "MODEL", "FILE", "--out", "FILE"],
        "--out is FILE, the input file; give another file.",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_sentence(capsys, case, file, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, sentence = MISTAKES[case]
    places = {"FILE": str(file), "MODEL": str(model)}
    status, out, err = run(capsys, *(places.get(argument, argument) for argument in arguments))
    assert (status, out) == (2, "")
    assert err == f"evenclip: {sentence.replace('FILE', str(file))}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["train", "predict"])
def test_help_has_an_example(capsys, verb):
    status, out, _ = run(capsys, verb, "--help")
    assert status == 0
    assert f"Example: evenclip {verb} " in " ".join(out.split())
