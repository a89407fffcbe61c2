"""Tests of `evenclip data`: its list as text and JSON, its schemas, and its error messages."""

from __future__ import annotations

import json

import pytest

from evenclip.cli import main
from evenclip.data import SOURCES


def run(capsys, *arguments):
    """Run the subcommand; return (exit status, stdout, stderr)."""
    with pytest.raises(SystemExit) as stop:
        main(["data", *map(str, arguments)])
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    monkeypatch.delenv("EVENCLIP_DATA", raising=False)


def test_every_dataset_is_listed_and_fits_the_terminal(capsys):
    status, out, err = run(capsys)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    blocks = out.split("\n\n")
    assert [block.split()[0] for block in blocks[:-1]] == list(SOURCES)
    assert blocks[0].splitlines() == [
        "adult     Adult: income above 50,000 dollars, US census 1994",
        "  rows    45,222",
        "  groups  Female, Male",
        "  licence CC BY 4.0",
        "  here    yes, nothing to download",
    ]
    assert blocks[1].splitlines() == [
        "dutch     Dutch: high-level occupation, census of the Netherlands 2001",
        "  rows    60,420",
        "  groups  Male, Female",
        "  licence none stated (Statistics Netherlands, IPUMS)",
        "  here    no: dutch/dutch_census_2001.arff is missing",
        "  get it  from https://github.com/tailequy/fairness_dataset, folder Dutch_census",
    ]
    assert blocks[-1] == "There is no data directory; name one with --data-dir or EVENCLIP_DATA.\n"


@pytest.mark.parametrize("by", ["option", "environment"])
def test_files_are_looked_for_in_the_data_directory(capsys, tmp_path, monkeypatch, by):
    (tmp_path / "dutch").mkdir()
    (tmp_path / "dutch" / "dutch_census_2001.arff").write_text("")
    monkeypatch.setenv("EVENCLIP_DATA", str(tmp_path) if by == "environment" else "")
    _, out, _ = run(capsys, *(["--data-dir", tmp_path] if by == "option" else []))
    dutch = next(block for block in out.split("\n\n") if block.startswith("dutch"))
    assert dutch.splitlines()[-1] == "  here    yes"
    assert str(tmp_path) in "".join(out.splitlines())


def test_json_has_everything(capsys, tmp_path):
    status, out, _ = run(capsys, "--json", "--data-dir", tmp_path)
    facts = json.loads(out)
    assert status == 0
    assert facts["data_directory"] == str(tmp_path)
    assert [dataset["name"] for dataset in facts["datasets"]] == list(SOURCES)
    here = {dataset["name"]: dataset["here"] for dataset in facts["datasets"]}
    assert here == {name: not source.files for name, source in SOURCES.items()}
    mnist = facts["datasets"][2]
    assert mnist["pair"] == ["2", "8"]
    assert mnist["files"][0] == {
        "path": "mnist/train-images-idx3-ubyte.gz",
        "also": ["mnist/train-images-idx3-ubyte"],
        "here": False,
    }
    assert facts["datasets"][0]["uncovered"] == list(SOURCES["adult"].uncovered)
    assert facts["datasets"][0]["lacks"] is None


def test_a_directory_that_is_none_is_one_sentence(capsys, tmp_path):
    status, out, err = run(capsys, "--data-dir", tmp_path / "absent")
    assert (status, out) == (2, "")
    assert err == (
        f"evenclip: The data directory {tmp_path / 'absent'} (as given) is not a folder; name one "
        "with --data-dir or the environment variable EVENCLIP_DATA.\n"
    )


def test_help_has_an_example(capsys):
    _, out, _ = run(capsys, "--help")
    assert "evenclip data --data-dir ~/datasets" in out
    _, out, _ = run(capsys, "schema", "--help")
    words = " ".join(out.split())
    assert "evenclip data schema loans.csv --columns-only --target default" in words


# --- schema ---


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "loans.csv"
    path.write_text(
        "age,sex,late\n" + "".join(f"{20 + i},{'fm'[i % 2]},{i % 3 % 2}\n" for i in range(30))
    )
    return path


def test_a_schema_is_proposed(capsys, table):
    status, out, err = run(capsys, "schema", table)
    assert (status, err) == (0, "")
    columns = json.loads(out)["columns"]
    assert columns["sex"]["values"] == ["f", "m"]
    assert columns["late"]["kind"] == "number"


def test_the_target_becomes_classes(capsys, table):
    _, out, _ = run(capsys, "schema", table, "--target", "late")
    assert json.loads(out)["columns"]["late"] == {"kind": "category", "values": ["0", "1"]}
    _, out, _ = run(capsys, "schema", table, "--target", "sex")
    assert json.loads(out)["columns"]["sex"]["values"] == ["f", "m"]


def test_a_schema_is_written_and_not_written_over(capsys, table, tmp_path):
    path = tmp_path / "schema.json"
    status, out, _ = run(capsys, "schema", table, "--out", path)
    assert status == 0
    assert out == (
        f"{path}: 3 columns. Their kinds, ranges and values were read from the data: replace them "
        'by public ones, and then remove the "warning".\n'
    )
    assert set(json.loads(path.read_text())["columns"]) == {"age", "sex", "late"}
    path.write_text("edited")
    status, _, err = run(capsys, "schema", table, "--out", path)
    assert (status, path.read_text()) == (2, "edited")
    expected = f"--out is {path}, which already exists; remove it or name another file."
    assert err == f"evenclip: {expected}\n"


def test_a_skeleton_has_the_names_of_the_columns_and_nothing_else(capsys, table, tmp_path):
    status, out, err = run(capsys, "schema", table, "--columns-only", "--target", "late")
    assert (status, err) == (0, "")
    written = json.loads(out)
    assert written["columns"] == {
        "age": {"kind": None}, "sex": {"kind": None}, "late": {"kind": "category", "values": []},
    }  # fmt: skip
    assert "warning" not in written
    path = tmp_path / "schema.json"
    _, out, _ = run(capsys, "schema", table, "--columns-only", "--out", path)
    assert out == (
        f"{path}: 3 columns. Only their names were read: fill in the kind of each, and its range "
        "or its values.\n"
    )
    assert json.loads(path.read_text())["columns"]["late"] == {"kind": None}


def test_a_skeleton_that_is_not_filled_in_is_one_sentence(capsys, table, tmp_path):
    path = tmp_path / "schema.json"
    run(capsys, "schema", table, "--columns-only", "--out", path)
    with pytest.raises(SystemExit) as stop:
        main(
            ["train", str(table), "--target", "late", "--group", "sex", "--schema", str(path),
             "--out", str(tmp_path / "model")]
        )  # fmt: skip
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(
        f"evenclip: {path} is not filled in: 'age', 'sex', 'late' have no kind or no values yet. "
        "Write what is publicly known, such as"
    )
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("only", [(), ("--columns-only",)])
def test_a_target_that_is_no_column_is_one_sentence(capsys, table, only):
    status, _, err = run(capsys, "schema", table, *only, "--target", "lat")
    assert (status, err) == (
        2,
        "evenclip: --target is 'lat'; the columns of the table are 'age', 'sex', 'late'.\n",
    )


@pytest.mark.parametrize("only", [(), ("--columns-only",)])
def test_a_table_that_is_not_there_is_one_sentence(capsys, tmp_path, only):
    status, _, err = run(capsys, "schema", tmp_path / "none.csv", *only)
    assert status == 2
    assert err.startswith(f"evenclip: {tmp_path / 'none.csv'} is not there")
