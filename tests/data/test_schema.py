"""Schemas: proposals, error messages, and that a schema leaves nothing to fit on the data."""

from __future__ import annotations

import copy
import json

import numpy as np
import pandas as pd
import pytest
import torch

from evenclip.data import schema as schemas
from evenclip.data.table import read, table


def refusal(error, attempt):
    """Return the message of the error that `attempt` raises."""
    with pytest.raises(error) as caught:
        attempt()
    return str(caught.value)


def rows(n=400, seed=0):
    stream = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "id": np.arange(n),
            "age": stream.integers(20, 70, n),
            "since": [f"20{year:02d}-03-15" for year in stream.integers(10, 20, n)],
            "member": stream.random(n) < 0.5,
            "job": stream.choice(["baker", "miller"], n),
            "sex": stream.choice(["f", "m"], n),
            "hired": stream.choice(["no", "yes"], n),
        }
    )
    frame.loc[:4, "job"] = None
    return frame


SCHEMA = {
    "evenclip_schema": 1,
    "columns": {
        "id": {"kind": "ignore"},
        "age": {"kind": "number", "range": [0, 100], "missing": False},
        "since": {"kind": "date", "range": ["2000-01-01", "2019-12-31"], "missing": False},
        "member": {"kind": "boolean", "missing": False},
        "job": {"kind": "category", "values": ["miller", "baker", "smith"]},
        "sex": {"kind": "category", "values": ["m", "f", "d"], "missing": False},
        "hired": {"kind": "category", "values": ["yes", "no"], "missing": False},
    },
}


def changed(column, **changes):
    schema = copy.deepcopy(SCHEMA)
    schema["columns"].setdefault(column, {}).update(changes)
    return schema


def test_a_proposal_describes_the_rows_and_warns():
    proposed = schemas.propose(rows())
    ages = rows()["age"]
    assert proposed["columns"] == {
        "id": {
            "kind": "ignore",
            "reason": "looks like an identifier (whole numbers, all different)",
        },
        "age": {"kind": "number", "range": [ages.min(), ages.max()], "missing": False},
        "since": {
            "kind": "date",
            "range": ["2010-03-15", "2019-03-15"],
            "format": "ISO8601",
            "missing": False,
        },
        "member": {"kind": "boolean", "missing": False},
        "job": {"kind": "category", "values": ["baker", "miller"], "other": False, "missing": True},
        "sex": {"kind": "category", "values": ["f", "m"], "other": False, "missing": False},
        "hired": {"kind": "category", "values": ["no", "yes"], "other": False, "missing": False},
    }
    assert proposed["warning"].startswith(
        "Every range and value below was read from the data, which ε does not cover."
    )


def test_a_proposal_is_a_schema_that_fits(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schemas.propose(rows())))
    made = table(rows(), target="hired", group="sex", schema=path)
    assert schemas.check(schemas.load(path), rows()) == ()
    assert made.encoder.classes == ("no", "yes")


@pytest.mark.parametrize("warning", [schemas.WARNING, "edited", "", None, False])
def test_while_the_warning_is_there_the_values_count_as_read_from_the_data(warning):
    proposed = schemas.propose(rows()) | {"warning": warning}
    proposed["columns"]["age"]["range"] = [0, 120]  # edited, and the rest is not
    made = table(rows(), target="hired", group="sex", schema=proposed, records=400)
    assert made.uncovered == (schemas.READ, schemas.FITS)
    assert made.notes[0] == schemas.NOTE
    assert not made.declared


def test_removing_the_warning_declares_that_the_values_are_public():
    proposed = schemas.propose(rows())
    assert (
        "by removing it, you declare that every kind, range and value below is public"
        in (proposed["warning"])
    )
    del proposed["warning"]
    made = table(rows(), target="hired", group="sex", schema=proposed, records=400)
    assert made.uncovered == (schemas.FITS,)
    assert made.notes == ()
    assert made.declared


def test_with_a_schema_no_row_shapes_the_encoder():
    made = table(rows(), target="hired", group="sex", schema=SCHEMA, records=400)
    other = table(rows(seed=1).head(150), target="hired", group="sex", schema=SCHEMA, seed=5)
    assert made.encoder == other.encoder
    assert made.encoder.classes == ("yes", "no")
    assert made.encoder.groups == ("m", "f", "d")
    assert made.uncovered == (
        "a check that the rows fit the schema, which only ever stops training",
    )
    assert other.uncovered == (
        *made.uncovered,
        "the number of rows with a target, from which n, q and T are computed",
    )
    assert "d" in made.small


def test_ranges_go_to_minus_one_and_one():
    made = table(rows(), target="hired", group="sex", schema=SCHEMA)
    new = pd.DataFrame(
        {
            "age": [0, 50, 100, 150],
            "since": ["2000-01-01", "2010-01-01", "2020-01-01", None],
            "member": True,
            "job": ["smith", None, "pilot", "baker"],
            "sex": "d",
        }
    )
    x = made.encoder.encode(new)
    assert made.encoder.features == (
        "age",
        "since",
        "member",
        "job=miller",
        "job=baker",
        "job=smith",
        "job=(missing)",
        "sex=m",
        "sex=f",
        "sex=d",
    )
    assert x[:, 0].tolist() == [-1, 0, 1, 1]
    assert x[:, 1].tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-3)
    assert x[:, 3:7].tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]


def test_values_outside_of_the_range_are_counted():
    made = table(rows(), target="hired", group="sex", schema=changed("age", range=[0, 30]))
    outside = int((rows()["age"] > 30).sum())
    assert made.notes[0] == (
        f"{outside} values of 'age' lie outside of the schema's range and count as its nearer end."
    )


def test_a_number_is_cut_evenly_over_its_public_range():
    options = {"schema": SCHEMA, "group_bins": 4, "records": 400}
    made = table(rows(), target="hired", group="age", **options)
    assert made.encoder.groups == ("< 25", "25 to < 50", "50 to < 75", "≥ 75")
    assert len(made.uncovered) == 1


def test_columns_without_an_entry_are_not_used():
    made = table(rows().assign(extra=1), target="hired", group="sex", schema=SCHEMA)
    assert made.notes[0] == "The schema does not name 'extra': not used."
    assert "extra" not in made.encoder.features


def test_labels_without_an_entry_come_from_the_data():
    plain = copy.deepcopy(SCHEMA)
    del plain["columns"]["sex"], plain["columns"]["hired"]
    made = table(rows(), target="hired", group="sex", schema=plain)
    assert made.uncovered[1:-1] == (
        "the names of the classes of 'hired', which are those found in the data",
        "the names of the groups of 'sex', which are those found in the data",
    )
    assert not made.declared


def test_codes_that_look_like_numbers_stay_as_written(tmp_path):
    frame = rows().assign(zip=np.resize(["01067", "10115"], 400))
    frame.to_csv(tmp_path / "t.csv", index=False)
    plain = changed("zip", kind="category", values=["01067", "10115"])
    made = table(tmp_path / "t.csv", target="hired", group="sex", schema=plain)
    at = made.encoder.features.index("zip=01067")
    assert made.encoder.features[at + 1] == "zip=10115"
    assert torch.equal(
        made.splits.train.x[:, at] + made.splits.train.x[:, at + 1],
        torch.ones(len(made.splits.train)),
    )


UNFIT = {
    "column": (
        changed("wage", kind="number", range=[0, 1]),
        "The schema has the column 'wage' and the table does not; its columns are 'id', 'age', "
        "'since', 'member', 'job', 'sex', 'hired': add the column, or take it out of the schema.",
    ),
    "category": (
        changed("job", values=["miller", "smith"]),
        "Column 'job' has the value 'baker', which is not among the schema's 'miller', 'smith'; "
        'add it to them, or set "other": true.',
    ),
    "class": (
        changed("hired", values=["yes", "perhaps"]),
        "Column 'hired' has the value 'no', which is not among the schema's 'yes', 'perhaps'; "
        'add it to them, or set "other": true.',
    ),
    "missing": (
        changed("job", missing=False),
        "Column 'job' has no value in row 1, and the schema says that none is missing; set "
        '"missing": true, or fill it in.',
    ),
    "number": (
        changed("sex", kind="number", range=[0, 1], values=None),
        f"Column 'sex' has the value {rows()['sex'][0]!r} in row 1, and the schema says it is a "
        "number; correct the schema or the value.",
    ),
    "date": (
        changed("hired", kind="date", range=["2000-01-01", "2001-01-01"], values=None),
        f"Column 'hired' has the value {rows()['hired'][0]!r} in row 1, and the schema says it is "
        "a date; correct the schema or the value.",
    ),
    "boolean": (
        changed("since", kind="boolean", range=None),
        f"Column 'since' has the value {rows()['since'][0]!r} in row 1, and the schema says it is "
        "a boolean; correct the schema or the value.",
    ),
    "open groups": (
        changed("sex", other=True),
        "The schema gives 'sex' \"other\": true; classes and groups must all be listed.",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_rows_that_do_not_fit_are_explained(case):
    schema, message = UNFIT[case]
    for entry in schema["columns"].values():  # None marks a field to remove
        for field in [field for field, value in entry.items() if value is None]:
            del entry[field]
    assert (
        refusal(ValueError, lambda: table(rows(), target="hired", group="sex", schema=schema))
        == message
    )


KINDS = "number, date, boolean, category, ignore"
WRONG = {
    "no object": (
        [],
        'The schema is not valid; it must be a JSON object with "columns": {name: {"kind": ...}}.',
    ),
    "version": (
        SCHEMA | {"evenclip_schema": 2},
        'The schema has "evenclip_schema": 2; this version of evenclip reads 1.',
    ),
    "kind": (
        changed("age", kind="numeric"),
        f"The schema, column 'age': the kind is 'numeric'; it must be one of {KINDS}.",
    ),
    "no range": (
        changed("w", kind="number"),
        "The schema, column 'w': a number needs \"range\"; add it.",
    ),
    "another field": (
        changed("age", values=["1"]),
        'The schema, column \'age\': a number has no "values"; it has "missing", "range".',
    ),
    "range": (
        changed("age", range=[9, 3]),
        "The schema, column 'age': the range is [9, 3]; it must be a lower and a higher end, "
        "such as [0, 100].",
    ),
    "range of texts": (
        changed("age", range=["a", "b"]),
        'The schema, column \'age\': the range is ["a", "b"]; it must be a lower and a higher '
        "end, such as [0, 100].",
    ),
    "range of dates": (
        changed("since", range=["then", "now"]),
        'The schema, column \'since\': the range is ["then", "now"]; it must be a lower and a '
        'higher end, such as ["1990-01-01", "2030-12-31"].',
    ),
    "values": (
        changed("job", values=[1, 2]),
        "The schema, column 'job': the values are [1, 2]; they must be a list of texts, such as "
        '["yes", "no"].',
    ),
    "value twice": (
        changed("job", values=["a", "a"]),
        "The schema, column 'job': the value 'a' is listed twice; list each once.",
    ),
    "missing": (
        changed("job", missing="no"),
        "The schema, column 'job': missing is 'no'; it must be true or false.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_schema_is_explained(case, tmp_path):
    schema, message = WRONG[case]
    assert refusal(ValueError, lambda: schemas.validated(schema)) == message
    path = tmp_path / "s.json"
    path.write_text(json.dumps(schema))
    assert refusal(ValueError, lambda: schemas.load(path)) == message.replace(
        "The schema", str(path), 1
    )


def test_a_file_that_is_no_schema_is_explained(tmp_path):
    path = tmp_path / "s.json"
    assert (
        refusal(FileNotFoundError, lambda: schemas.load(path))
        == f"{path} is not there; write a first schema with `evenclip data schema TABLE "
        "--columns-only`."
    )
    path.write_text('{"columns":\n oops}')
    assert refusal(ValueError, lambda: schemas.load(path)) == (
        f"{path} is not JSON (line 2: Expecting value); correct it, or write a new schema with "
        "`evenclip data schema TABLE --columns-only`."
    )
    path.write_bytes(b'{"columns": {"\xfc": {}}}')
    assert (
        refusal(ValueError, lambda: schemas.load(path))
        == f"{path} is not UTF-8 (byte 14); save it as UTF-8."
    )


def test_a_proposal_fits_its_own_file_also_where_whole_numbers_have_a_point(tmp_path):
    """A column of 0 and 1 with gaps is written as 0.0 and 1.0."""
    frame = pd.DataFrame({"x": range(60), "g": ["a", "b"] * 30, "y": [0.0, 1.0, None] * 20})
    frame.to_csv(tmp_path / "gaps.csv", index=False)
    proposed = schemas.propose(read(tmp_path / "gaps.csv"))
    proposed["columns"]["y"] = {"kind": "category", "values": ["0", "1"]}
    made = table(tmp_path / "gaps.csv", target="y", group="g", schema=proposed)
    assert made.encoder.classes == ("0", "1")
    assert len(made.splits.train) + len(made.splits.test) + len(made.splits.validation) == 40
