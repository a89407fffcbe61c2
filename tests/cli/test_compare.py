"""Tests of the `evenclip compare` command line."""

from __future__ import annotations

import json

import pytest

from evenclip.cli import main
from evenclip.data import SOURCES
from evenclip.report.page import page

QUICK = ("toy", "--epochs", "1", "--model", "linear", "--lr", "0.1", "--workers", "1")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def typed(capsys):
    """Return a function arguments -> (exit status, standard output, error output)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["compare", *map(str, arguments)])
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


def test_results_are_written_and_a_table_printed(typed, tmp_path):
    status, out, err = typed(
        *QUICK, "--seeds", 2, "--rules", "dpsgd,dpsgd-global-adapt", "--out", tmp_path / "out"
    )
    assert status == 0, err
    assert max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 80
    plain = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(plain["table"]) == ["non-private", "dpsgd", "dpsgd-global-adapt"]
    assert plain["seeds"] == [0, 1]
    assert "1/6 " in err
    # The page depends on results.json only.
    assert (tmp_path / "out" / "report.html").read_text() == page(plain)
    again, out_again, err_again = typed(
        *QUICK,
        "--seeds",
        2,
        "--rules",
        "dpsgd,dpsgd-global-adapt",
        "--out",
        tmp_path / "out",
        "--json",
    )
    assert (again, err_again) == (0, "")  # nothing was trained again
    assert json.loads(out_again) == plain


BAD = {
    "evenclip: nowhere.csv is not there; give the path of a CSV, TSV, Parquet or Feather file.": (
        "nowhere.csv",
        "--target",
        "y",
        "--group",
        "g",
    ),
    f"evenclip: There is no dataset 'adlut'; choose among {', '.join(SOURCES)}, or give a table or "
    "your own dataset (my_data.py:name).": ("adlut",),
    "evenclip: epsilon is 0.0; it must be a finite number above 0.": (*QUICK, "--epsilon", "0"),
    "evenclip: seeds is 0; it must be a whole number of at least 1.": (*QUICK, "--seeds", "0"),
    "evenclip: --rules is empty; give names separated by commas, or leave it out for all five.": (
        *QUICK,
        "--rules",
        " ",
    ),
    "evenclip: 'toy' is a dataset with a fixed target; leave --target out.": (
        *QUICK,
        "--target",
        "y",
    ),
    "evenclip: --keep is not for adult; it is for tables.": ("adult", "--keep", "x"),
    "evenclip: --allow-partial is not for toy; it is for celeba.": (*QUICK, "--allow-partial"),
    "evenclip: --group is g; toy has its own groups: leave --group out.": (*QUICK, "--group", "g"),
    "evenclip: --group is ['sex', 'race']; adult has the groups sex, race and age: choose one.": (
        "adult",
        "--group",
        "sex",
        "--group",
        "race",
    ),
    "evenclip: device is 'abacus'; give cpu, cuda or cuda:NUMBER.": (*QUICK, "--device", "abacus"),
    "evenclip: workers is -1; it must be a whole number of at least 1.": (
        *QUICK,
        "--workers",
        "-1",
    ),
}


@pytest.mark.parametrize("says", BAD)
def test_mistakes_are_one_sentence(says, typed):
    assert typed(*BAD[says]) == (2, "", says + "\n")


def test_a_table_needs_target_and_group(typed, tmp_path):
    path = tmp_path / "loans.csv"
    path.write_text("a,b\n1,2\n")
    assert (
        typed(path)[2] == "evenclip: A table needs --target: the name of the column to predict.\n"
    )
    assert typed(path, "--target", "a")[2] == (
        "evenclip: A table needs --group: the name of the column whose groups are compared.\n"
    )


def test_where_results_cannot_be_kept(typed, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = typed(*QUICK, "--out", tmp_path / "file" / "out")
    assert status == 2
    assert err == f"evenclip: {tmp_path}/file is not a folder; choose another place.\n"


def test_runs_that_fail_are_status_1(typed, tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n"
        "        raise ValueError('I am tired')\n"
        "def make(x, classes):\n    return Net(x.shape[1], classes)\n"
    )
    status, out, err = typed(
        "toy",
        "--epochs",
        1,
        "--lr",
        0.1,
        "--seeds",
        1,
        "--workers",
        1,
        "--model",
        f"{tmp_path}/net.py:make",
    )
    assert (status, out) == (1, "")
    assert "Traceback" not in err
    assert "I am tired" in err.splitlines()[-1]
    assert "runs failed" in err.splitlines()[-1]


def test_help_has_an_example(typed):
    status, out, _ = typed("--help")
    assert status == 0
    words = " ".join(out.replace("│", " ").split())
    assert "evenclip compare loans.csv --target default --group sex --epsilon 3" in words
