"""Skeletons: the names of columns from every kind of file, without a look at a row."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest

from evenclip.data import schema as schemas
from evenclip.data.formats import column_names, read
from evenclip.data.skeleton import skeleton
from evenclip.data.table import table


def frame(n=60):
    return pd.DataFrame(
        {
            "age": range(20, 20 + n),
            "a name, with a comma": ["x", "y"] * (n // 2),
            " padded": 1.5,
            "größe": "m",
            "late": ["no", "yes", "no"] * (n // 3),
        }
    )


WRITERS = {
    "comma.csv": lambda path: frame().to_csv(path, index=False),
    "semicolon.csv": lambda path: frame().to_csv(path, index=False, sep=";", decimal=","),
    "bar.txt": lambda path: frame().to_csv(path, index=False, sep="|"),
    "tab.tsv": lambda path: frame().to_csv(path, index=False, sep="\t"),
    "mark.csv": lambda path: frame().to_csv(path, index=False, encoding="utf-8-sig"),
    "with an index.csv": lambda path: frame().to_csv(path),
    "after blank lines.csv": lambda path: path.write_text("\n\n" + frame().to_csv(index=False)),
    "lines of windows.csv": lambda path: frame().to_csv(path, index=False, lineterminator="\r\n"),
    "plain.parquet": lambda path: frame().to_parquet(path),
    "indexed.parquet": lambda path: frame().set_index("age").to_parquet(path),
    "filtered.parquet": lambda path: frame()[5:].to_parquet(path),
    "plain.feather": lambda path: frame().to_feather(path),
    "one.csv": lambda path: path.write_text("alone\n1\n2\n"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_names_are_those_of_the_table(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    assert list(column_names(path)) == list(read(path).columns)


@pytest.mark.parametrize("name", [name for name in WRITERS if name.endswith(("csv", "txt", "tsv"))])
def test_no_byte_after_the_header_of_a_text_file_matters(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    before, content = column_names(path), path.read_bytes()
    lines = content.splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if line.strip()) + 1
    path.write_bytes(b"".join(lines[:end]) + b'\xff\xfe";;;||\t,,,\n"open')
    assert column_names(path) == before


def test_the_types_that_pandas_inferred_do_not_matter(tmp_path):
    """A missing value makes a column of whole numbers one of floats, and the file stores this."""
    whole, gap, text = pd.DataFrame({"a": [1, 2]}), pd.DataFrame({"a": [1, None]}), ["x", "y"]
    written = set()
    for content in (whole, gap, pd.DataFrame({"a": text})):
        content.to_parquet(tmp_path / "t.parquet")
        written.add(json.dumps(skeleton(column_names(tmp_path / "t.parquet"))))
    assert len(written) == 1


MISTAKES = {
    "twice.csv": (b"a,b,a\n1,2,3\n", "{} has two columns 'a'; rename one of them."),
    "open quote.csv": (
        b'"a,b\n1,secret\n',
        "{} has no header in one line, with every quote closed; write the names of the columns "
        "into its first line.",
    ),
    "two lines.csv": (
        b'"a\nb",c\n1,2\n',
        "{} has no header in one line, with every quote closed; write the names of the columns "
        "into its first line.",
    ),
    "blank.csv": (
        b"\n \n",
        "{} has no header in one line, with every quote closed; write the names of the columns "
        "into its first line.",
    ),
    "latin.csv": (
        b"gr\xf6\xdfe,a\n1,2\n",
        "The header of {} is not UTF-8; save the file as UTF-8.",
    ),
    "empty.csv": (b"", "{} is empty; it must hold a header and rows."),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_header_that_cannot_be_read_is_explained(tmp_path, name):
    content, message = MISTAKES[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(message.format(path))}$") as caught:
        column_names(path)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["parquet", "feather"])
def test_a_file_of_another_format_is_explained(tmp_path, suffix):
    path = tmp_path / f"t.{suffix}"
    path.write_bytes(b"a,b\n1,2\n" * 20)
    with pytest.raises(
        ValueError, match=rf"is not a {suffix.capitalize()} file \(.*write it again"
    ):
        column_names(path)


def test_an_unfilled_skeleton_says_what_to_fill_in(tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps(skeleton(list(frame().columns)[::4], target="late")))
    with pytest.raises(ValueError, match="not filled in") as caught:
        table(frame(), target="late", group="age", schema=path)
    assert str(caught.value) == (
        f"{path} is not filled in: 'age', 'late' have no kind or no values yet. Write what is "
        'publicly known, such as {"kind": "number", "range": [0, 100]}, {"kind": "date", "range": '
        '["1990-01-01", "2030-12-31"]}, {"kind": "category", "values": ["yes", "no"]} or {"kind": '
        '"boolean"}; {"kind": "ignore"} leaves a column out.'
    )


def test_a_skeleton_that_is_filled_in_in_part_names_the_rest():
    schema = skeleton(["age", "late"])
    schema["columns"]["age"] = {"kind": "number", "range": [0, 120]}
    with pytest.raises(ValueError, match="The schema is not filled in: 'late' has no kind"):
        schemas.validated(schema)


def test_a_filled_skeleton_is_a_declared_schema():
    schema = skeleton(["age", "late", "größe"], target="late")
    schema["columns"] |= {
        "age": {"kind": "number", "range": [0, 120]},
        "late": {"kind": "category", "values": ["no", "yes"]},
        "größe": {"kind": "category", "values": ["s", "m", "l"]},
    }
    made = table(frame(), target="late", group="größe", schema=schema, records=400)
    assert made.declared
    assert made.uncovered == (schemas.FITS,)
    assert made.encoder.groups == ("s", "m", "l", "missing")
