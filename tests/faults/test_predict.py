"""New rows in every form that training did not see: the same answer, a note, or a refusal."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from evenclip import export, models
from evenclip.data.encoder import Encoder
from evenclip.data.table import table
from evenclip.export import Predictor
from outcomes import NOTED, REFUSED, SAME, Answer, called, commanded, outcome

ROWS, NEW = 900, 40


def people(rows: int, seed: int) -> pd.DataFrame:
    """Return rows with a column of every kind, as they would be in a CSV file."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": random.integers(1000, 90_000, rows),
            "income": random.normal(30_000, 9000, rows).round(2),
            "job": random.choice(["baker", "miller", "North Sea pilot"], rows),
            "code": random.choice(["01", "02", "10", "x"], rows),
            "member": random.random(rows) < 0.4,
            "since": (np.datetime64("2001-01-01") + random.integers(7000, size=rows)).astype(str),
            "until": [f"{1 + i % 28:02d}.{1 + i % 12:02d}.{2000 + i % 20}" for i in range(rows)],
            "month": [f"{2000 + i % 20}-{1 + i % 12:02d}" for i in range(rows)],
            "sex": random.choice(["f", "m"], rows),
        }
    )
    frame["hired"] = np.where(random.random(rows) < 0.5, "yes", "no")
    return frame


@functools.cache
def predictor() -> Predictor:
    """Return a model that every feature matters to; it is not trained."""
    frame = people(ROWS, 0).assign(
        waited=pd.to_timedelta(np.arange(ROWS) % 50, unit="D"),
        moment=pd.date_range("2020-01-01", periods=ROWS, freq="h", tz="Europe/Berlin"),
    )
    return _untrained(frame)


def _untrained(frame: pd.DataFrame) -> Predictor:
    encoder = table(frame, target="hired", group="sex").encoder
    return Predictor(models.mlp(len(encoder.features), 2, (16,), seed=0), encoder, {})


@functools.cache
def folder() -> Path:
    """Return the folder of a trained model of the columns that a CSV file can hold."""
    place = Path(tempfile.mkdtemp(prefix="evenclip-faults-"))
    few = {"epochs": 1, "batch_size": 64, "model": "mlp:8", "progress": False}
    people(ROWS, 0).to_csv(place / "people.csv", index=False)
    trained = export.train(
        place / "people.csv", target="hired", group="sex", epsilon=2.0, seed=0, **few
    )
    export.save(trained, place / "model")
    return place


def new_rows() -> pd.DataFrame:
    """Return undamaged new rows."""
    return people(NEW, 1).assign(
        waited=pd.to_timedelta(np.arange(NEW) % 50, unit="D"),
        moment=pd.date_range("2020-01-05", periods=NEW, freq="h", tz="Europe/Berlin"),
    )


# --- damages of a column --------------------------------------------------------------------------

Damage = Callable[[pd.Series], pd.Series]


def each(function: Callable[[str], object]) -> Damage:
    """Return a damage of every value, as a text."""
    return lambda series: pd.Series([function(str(v)) for v in series], series.index, dtype=object)


def typed(kind: object) -> Damage:
    """Return a conversion to another type."""
    return lambda series: series.astype(kind)


def arrow(kind: Callable[[], pa.DataType]) -> Damage:
    """Return a conversion to an Arrow type."""
    return lambda series: pd.Series(pd.array(series.tolist(), dtype=pd.ArrowDtype(kind())))


def redated(form: str) -> Damage:
    return lambda series: pd.to_datetime(series, dayfirst=False).dt.strftime(form)


DAMAGES: dict[str, Damage] = {
    "texts": each(str),
    "blanks around": each(lambda value: f"  {value}\t"),
    "no-break spaces around": each(lambda value: f" {value} "),
    "thousands": each(lambda v: f"{float(v):,.0f}" if v.replace(".", "").isdigit() else v),
    "points for thousands": each(
        lambda v: (
            f"{float(v):,.2f}".replace(",", " ").replace(".", ",").replace(" ", ".")
            if v.replace(".", "").isdigit()
            else v
        )
    ),
    "apostrophes": each(lambda v: f"{float(v):,.0f}".replace(",", "’") if v.isdigit() else v),
    "decimal comma": each(lambda value: value.replace(".", ",")),
    "currency": each(lambda value: f"{value} €"),
    "dollar": each(lambda value: f"${value}"),
    "percent": each(lambda value: f"{value}%"),
    "unit": each(lambda value: f"{value} kg"),
    "underscores": each(lambda value: f"{value[:-3]}_{value[-3:]}"),
    "Arabic digits": each(lambda v: v.translate(str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩"))),
    "full-width digits": each(
        lambda v: v.translate(str.maketrans("0123456789", "０１２３４５６７８９"))
    ),
    "minus sign": each(lambda value: f"−{value}"),
    "hexadecimal": each(lambda v: hex(int(v)) if v.isdigit() else v),
    "exponents": each(lambda v: f"{float(v):.10e}" if v.replace(".", "").isdigit() else v),
    "quoted": each(lambda value: f"'{value}'"),
    "upper case": each(str.upper),
    "title case": each(str.title),
    "inner blanks": each(lambda value: value.replace(" ", "  ")),
    "empty": each(lambda value: ""),
    "dashes": each(lambda value: "-"),
    "none": each(lambda value: "none"),
    "unknown": each(lambda value: "unknown"),
    "None": each(lambda value: None),
    "NaN": each(lambda value: math.nan),
    "infinite": each(lambda value: math.inf),
    "huge": each(lambda value: 1e300),
    "huge whole": each(lambda value: 10**400),
    "yes and no": each(lambda value: "yes" if value == "True" else "no"),
    "Y and N": each(lambda value: "Y" if value == "True" else "N"),
    "one and zero": each(lambda value: int(value == "True")),
    "T and F": each(lambda value: value[0]),
    "ja und nein": each(lambda value: "ja" if value == "True" else "nein"),
    "two": each(lambda value: 2),
    "truth values": each(lambda value: len(value) % 2 == 0),
    "complex": each(lambda value: complex(len(value), 1)),
    "lists": each(lambda value: [value]),
    "tuples": each(lambda value: (value,)),
    "dicts": each(lambda value: {"value": value}),
    "arrays": each(lambda value: np.array([1, 2])),
    "bytes": each(str.encode),
    "not UTF-8": each(lambda value: b"\xff" + value.encode()),
    "today": each(lambda value: "today"),
    "now": each(lambda value: "now"),
    "years": each(lambda value: value[:4]),
    "months": each(lambda value: value[:7]),
    "long texts": each(lambda value: value + "x" * 200_000),
    "control characters": each(lambda value: f"\x1b[31m{value}\x07"),
    "mixed": lambda s: pd.Series([v if i % 2 else str(v) for i, v in enumerate(s)], dtype=object),
    "object": typed(object),
    "category": typed("category"),
    "str": typed("str"),
    "float": lambda s: pd.to_numeric(s).astype(float),
    "float32": lambda s: pd.to_numeric(s).astype("float32"),
    "Int64": lambda s: pd.to_numeric(s).astype(int).astype("Int64"),
    "boolean": typed("boolean"),
    "datetime": lambda s: pd.to_datetime(s),
    "datetime in seconds": lambda s: pd.to_datetime(s).astype("datetime64[s]"),
    "in Tokyo": lambda s: pd.to_datetime(s).dt.tz_localize("Asia/Tokyo"),
    "from Berlin to Tokyo": lambda s: s.dt.tz_convert("Asia/Tokyo"),
    "without its zone": lambda s: s.dt.tz_localize(None),
    "epoch seconds": lambda s: pd.to_datetime(s).astype("datetime64[s]").astype("int64"),
    "epoch milliseconds": lambda s: pd.to_datetime(s).astype("datetime64[ms]").astype("int64"),
    "dates": lambda s: pd.to_datetime(s).dt.date.astype(object),
    "periods": lambda s: pd.to_datetime(s).dt.to_period("D"),
    "monthly periods": lambda s: pd.to_datetime(s).dt.to_period("M"),
    "day first": redated("%d/%m/%Y"),
    "month first": redated("%m/%d/%Y"),
    "month names": redated("%d %b %Y"),
    "year week": redated("%G-W%V"),
    "compact": redated("%Y%m%d"),
    "with time and zone": redated("%Y-%m-%dT00:00:00+09:00"),
    "two-digit years": redated("%d.%m.%y"),
    "seconds": lambda s: s.dt.total_seconds(),
    "hours": lambda s: s.dt.total_seconds() / 3600,
    "durations": lambda s: pd.to_timedelta(pd.to_numeric(s).astype(int), unit="s"),
    "Arrow ints": arrow(pa.int32),
    "Arrow doubles": arrow(pa.float64),
    "Arrow strings": arrow(pa.large_string),
    "Arrow dictionary": arrow(lambda: pa.dictionary(pa.int8(), pa.string())),
    "Arrow decimals": lambda s: arrow(lambda: pa.decimal128(20, 4))(
        s.map(lambda v: __import__("decimal").Decimal(str(v)))
    ),
    "Arrow booleans": arrow(pa.bool_),
    "Arrow binary": lambda s: arrow(pa.binary)(s.map(lambda v: str(v).encode())),
    "Arrow lists": lambda s: arrow(lambda: pa.list_(pa.string()))(s.map(lambda v: [str(v)])),
    "Arrow structs": lambda s: arrow(lambda: pa.struct([("a", pa.string())]))(
        s.map(lambda v: {"a": str(v)})
    ),
    "Arrow date32": lambda s: arrow(pa.date32)(pd.to_datetime(s).dt.date),
    "Arrow timestamps": lambda s: arrow(lambda: pa.timestamp("us"))(pd.to_datetime(s)),
    "Arrow durations": lambda s: arrow(lambda: pa.duration("s"))(s.dt.to_pytimedelta()),
}
DATES = ("since", "until", "month", "moment")
# What gives a column other values of its own kind is no damage that can be seen.
ONLY = dict.fromkeys(
    ("two", "years", "months", "one and zero", "T and F"), ("job", "code", "member", *DATES)
) | dict.fromkeys(
    (
        *("datetime", "datetime in seconds", "in Tokyo", "epoch seconds", "epoch milliseconds"),
        *("dates", "periods", "monthly periods", "day first", "month first", "month names"),
        *("year week", "compact", "with time and zone", "two-digit years", "Arrow date32"),
        *("Arrow timestamps",),
    ),
    DATES,
)
COLUMNS = [name for name in new_rows().columns if name not in ("hired",)]
FEW = {"age": 1, "job": 1, "member": 1, "since": 1}  # columns of the short campaign


def damaged(column: str, damage: Damage, part: str) -> pd.DataFrame | None:
    """Return new rows with a damaged column, or None if it cannot be damaged so."""
    frame = new_rows()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            series = damage(frame[column])
    except Exception:  # numbers have no zone, texts no seconds
        return None
    series = pd.Series(series.array, frame.index)
    if part == "half":
        mixed = [
            v if i % 2 else old
            for i, (v, old) in enumerate(zip(series, frame[column], strict=True))
        ]
        series = pd.Series(mixed, frame.index, dtype=object)
    return frame.drop(columns=column).assign(**{column: series})


def same(one: pd.DataFrame, two: pd.DataFrame) -> bool:
    """Return whether predictions are equal up to float32's rounding of a feature."""
    columns = ["P(no)", "P(yes)"]
    return one["prediction"].equals(two["prediction"]) and np.allclose(
        one[columns], two[columns], rtol=0, atol=1e-6
    )


@functools.cache
def clean() -> pd.DataFrame:
    """Return the predictions of undamaged rows."""
    return predictor().predict(new_rows())


def judged(column: str, frame: pd.DataFrame) -> str:
    """Return the outcome of predicting on these rows."""
    return outcome(clean(), called(lambda: predictor().predict(frame)), repr(column), same=same)


# --- damages of a file ----------------------------------------------------------------------------


def written(rows: list[list[str]], **how: object) -> bytes:
    """Return rows as a CSV file."""
    out = io.StringIO()
    csv.writer(out, **{"lineterminator": "\n"} | how).writerows(rows)
    return out.getvalue().encode()


def cells() -> list[list[str]]:
    """Return the undamaged rows as texts, with a header."""
    frame = people(NEW, 1)
    return [list(frame.columns), *([str(value) for value in row] for row in frame.to_numpy())]


def with_cells(column: str, change: Callable[[str], str], **how: object) -> Callable[[], bytes]:
    """Return a file in which every cell of a column is changed."""

    def content() -> bytes:
        header, *rows = cells()
        place = header.index(column)
        for row in rows:
            row[place] = change(row[place])
        return written([header, *rows], **how)

    return content


def fewer(text: str) -> str:
    return f"{float(text):,.2f}"


FILES: dict[str, Callable[[], bytes]] = {
    "semicolons": lambda: written(cells(), delimiter=";"),
    "tabs": lambda: written(cells(), delimiter="\t"),
    "Windows line ends": lambda: written(cells(), lineterminator="\r\n"),
    "Macintosh line ends": lambda: written(cells(), lineterminator="\r"),
    "mixed line ends": lambda: written(cells()).replace(b"\n", b"\r\n", 5),
    "all quoted": lambda: written(cells(), quoting=csv.QUOTE_ALL),
    "byte order mark": lambda: b"\xef\xbb\xbf" + written(cells()),
    "columns in another order": lambda: written([row[::-1] for row in cells()]),
    "another column": lambda: written([[*row, "x"] for row in cells()]),
    "decimal commas": lambda: written(
        [[cell.replace(".", ",") if i == 1 else cell for i, cell in enumerate(r)] for r in cells()],
        delimiter=";",
    ),
    "thousands": with_cells("income", fewer),
    "thousands after semicolons": with_cells("age", lambda v: f"{int(v):,}", delimiter=";"),
    "yes and no": with_cells("member", lambda v: "yes" if v == "True" else "no"),
    "one and zero": with_cells("member", lambda v: "1" if v == "True" else "0"),
    "lower case": with_cells("member", str.lower),
    "other dates": with_cells("since", lambda v: "/".join(v.split("-")[::-1])),
    "ISO for dots": with_cells("until", lambda v: "-".join(v.split(".")[::-1])),
    "codes as numbers": with_cells("code", lambda v: v.lstrip("0")),
    "codes as floats": with_cells("code", lambda v: f"{v}.0"),
    "question marks": with_cells("age", lambda v: "?"),
    "long text": with_cells("job", lambda v: v + "x" * 150_000),
    "formulas": with_cells("job", lambda v: f"=cmd|' /C calc'!{v}"),
}


def same_text(one: str, two: str) -> bool:
    """Return whether two printed predictions are equal up to rounding."""
    first, second = (pd.read_csv(io.StringIO(text)) for text in (one, two))
    return len(first) == len(second) and same(first, second)


@functools.cache
def clean_text() -> str:
    path = folder() / "clean.csv"
    path.write_bytes(written(cells()))
    answer = commanded("predict", folder() / "model", path)
    assert answer.notes == ""
    return str(answer.value)


def judged_file(content: bytes, *names: str) -> str:
    """Return the outcome of `evenclip predict` on a file."""
    path = folder() / "new.csv"
    path.write_bytes(content)
    answer = commanded("predict", folder() / "model", path)
    assert max(map(len, answer.notes.splitlines()), default=0) <= 80, answer.notes
    return outcome(clean_text(), answer, *names, same=same_text)


def cases(long: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield names and checks; a check raises AssertionError for a silent change or a traceback."""
    for column in COLUMNS if long else FEW:
        for name, damage in DAMAGES.items():
            for part in ("all", "half") if long else ("all",):
                frame = damaged(column, damage, part)
                if frame is not None and column in ONLY.get(name, COLUMNS):
                    yield f"{column}: {name} ({part})", functools.partial(judged, column, frame)
    for name, content in FILES.items():
        yield f"file: {name}", functools.partial(judged_file, content())


# --- tests ----------------------------------------------------------------------------------------


def test_the_short_campaign():
    wrong, outcomes = [], []
    for name, check in cases(long=False):
        try:
            outcomes.append(check())
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)
    assert min(outcomes.count(kind) for kind in (SAME, NOTED, REFUSED)) >= 10


@pytest.mark.parametrize("name", FILES)
def test_files_in_other_forms(name):
    expected = {
        SAME: ("semicolons", "tabs", "Windows line ends", "Macintosh line ends", "all quoted",
               "mixed line ends", "byte order mark", "columns in another order", "another column",
               "decimal commas", "one and zero", "lower case"),
        REFUSED: ("thousands", "thousands after semicolons", "yes and no", "other dates",
                  "ISO for dots"),
    }  # fmt: skip
    got = judged_file(FILES[name]())
    assert got == next((kind for kind, names in expected.items() if name in names), NOTED)


def test_what_the_notes_say():
    frame = new_rows().astype({"age": object, "job": object})
    frame.loc[:2, "age"] = ["1,234", "old", None]
    frame.loc[3:5, "job"] = ["BAKER", "pilot", " miller "]
    answer = called(lambda: predictor().predict(frame))
    assert answer.notes == (
        "Column 'age': 2 of 40 values are not numbers (read as missing), such as '1,234'; 1 of 40 "
        "values are missing, and in training none was. Column 'job': 2 of 40 values are not among "
        "its categories (read as none), such as 'BAKER' (training: 'baker')."
    )


def test_a_column_that_cannot_be_read_is_refused():
    frame = new_rows()
    frame["since"] = pd.to_datetime(frame["since"]).dt.strftime("%d/%m/%Y")
    answer = called(lambda: predictor().predict(frame))
    assert answer.refusal == (
        f"Column 'since' cannot be read: its values, such as '{frame['since'][0]}', are not dates; "
        "write them as 2001-12-31, as in the table that the model was trained with."
    )
    frame["age"] = "old"
    assert (
        "Column 'age' cannot be read (nor can 'since')"
        in called(lambda: predictor().predict(frame)).refusal
    )


def test_a_reading_is_a_value():
    frame = new_rows()
    features, reading = predictor().read(frame.assign(age="old"))
    assert torch.equal(features[:, 0], torch.zeros(NEW))
    (age,) = [column for column in reading.columns if column.column == "age"]
    assert (age.rows, age.unreadable, age.missing, age.example) == (NEW, NEW, 0, "'old'")
    assert age.refused
    assert predictor().read(frame)[1].notes == ()


def test_rows_are_counted_over_all_chunks(monkeypatch):
    frame = new_rows().astype({"age": object})
    frame.loc[:7, "age"] = "old"
    whole = predictor().predict_and_read(frame)[1]
    monkeypatch.setattr("evenclip.export.predict.CHUNK", 7)
    assert predictor().predict_and_read(frame)[1] == whole


def test_at_most_a_dozen_columns_are_described():
    frame = pd.DataFrame({f"c{i}": ["a", "b"] * 400 for i in range(20)})
    made = _untrained(frame.assign(hired=["yes", "no", "no", "yes"] * 200, sex=["f", "m"] * 400))
    new = pd.DataFrame({f"c{i}": ["a", "z"] for i in range(20)} | {"sex": ["f", "m"]})
    _, reading = made.read(new)
    assert len(reading.notes) == 13
    assert reading.notes[-1] == (
        "And 8 more columns: 0 values are unreadable, 8 are categories that training did not have, "
        "0 are missing."
    )
    assert max(map(len, reading.text().splitlines())) <= 80


def test_a_category_that_is_spelt_as_a_missing_value_is_none(tmp_path):
    """Namibia is NA."""
    countries = ["NA", "DE", "FR"] * 300
    frame = pd.DataFrame({"country": countries, "sex": ["f", "m"] * 450, "n": range(900)})
    made = _untrained(frame.assign(hired=["yes", "no", "no", "yes", "yes"] * 180))
    from evenclip.data.formats import read_noted

    path = tmp_path / "new.csv"
    frame.head(9).to_csv(path, index=False)
    rows, _ = read_noted(path, text=made.encoder.texts, values=made.encoder.listed)
    assert same(made.predict(rows), made.predict(frame.head(9)))


NUMBERS = {"centre": math.nan, "scale": 0.0, "bound": math.inf}


@pytest.mark.parametrize("field", NUMBERS)
def test_an_encoder_with_numbers_that_are_none_is_refused(field):
    plain = predictor().encoder.to_json()
    plain["columns"][0][field] = NUMBERS[field]
    with pytest.raises(ValueError, match=f"the {field} of 'age' is .*, and not a finite number"):
        Encoder.from_json(json.loads(json.dumps(plain)))


def test_a_model_with_weights_that_are_no_numbers_is_refused():
    made = predictor()
    for value in (math.nan, math.inf):
        model = models.mlp(len(made.encoder.features), 2, (16,), seed=0)
        model[0].bias.data[3] = value
        with pytest.raises(ValueError, match=r"parameter '0.bias' has 1 values that are NaN or"):
            Predictor(model, made.encoder, {})


def test_scores_that_are_no_numbers_are_refused():
    made = predictor()
    model = models.mlp(len(made.encoder.features), 2, (16,), seed=0)
    model[2].weight.data[:] = 3e38
    model[2].weight.data[1] *= -1
    broken = Predictor(model, made.encoder, {})
    refusal = called(lambda: broken.predict(new_rows())).refusal
    assert refusal is not None
    assert refusal.startswith("The model gives row ")


@pytest.mark.parametrize("names", [("no",), ("no", "no"), ("no", "yes", "perhaps")])
def test_class_names_match_the_outputs(names):
    plain = predictor().encoder.to_json()
    plain["target"]["names"] = list(names)
    encoder = Encoder.from_json(plain)
    refusal = called(lambda: Predictor(predictor().model, encoder, {})).refusal
    assert refusal is not None
    assert refusal.endswith("train the model again, or take an undamaged copy.")


# --- where predictions are written ----------------------------------------------------------------


def test_predictions_never_replace_the_model_or_the_input(tmp_path, monkeypatch):
    place = tmp_path / "given"
    shutil.copytree(folder() / "model", place / "model")
    rows = place / "rows.csv"
    rows.write_bytes(written(cells()))
    weights = place / "model" / "model.safetensors"
    (tmp_path / "link").symlink_to(place / "model")
    (tmp_path / "soft.csv").symlink_to(rows)
    os.link(weights, tmp_path / "hard")
    os.link(rows, tmp_path / "hard.csv")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    monkeypatch.chdir(place / "model")
    targets = [
        *before, tmp_path / "link" / "README.md", tmp_path / "hard", tmp_path / "hard.csv",
        tmp_path / "soft.csv", Path("model.json"), Path("../model/new.csv"), Path("../rows.csv"),
        tmp_path / "link" / "new.csv", place / "model",
    ]  # fmt: skip
    for out in targets:
        answer = commanded("predict", place / "model", rows, "--out", out)
        assert answer.refusal is not None, out
        assert "--out is" in answer.refusal, answer.refusal
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_formulas_are_texts_for_spreadsheets(tmp_path):
    bad = ["=1+1", "+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", " =1", "＝1", 'a;=1"', "fine", "-5"]
    frame = people(len(bad), 1).assign(job=bad)
    path, out = tmp_path / "new.parquet", tmp_path / "out.csv"
    frame.assign(**{"=head": 1}).to_parquet(path)
    keep = ["--keep", "job", "--keep", "income", "--keep", "=head"]
    commanded("predict", folder() / "model", path, *keep, "--out", out)
    with out.open(newline="") as file:
        assert [row[1] for row in list(csv.reader(file))[1:]] == bad
    commanded("predict", folder() / "model", path, *keep, "--out", out, "--for-spreadsheets")
    with out.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0][:4] == ["row", "job", "income", "'=head"]
    for value, (_, job, income, *_) in zip(bad, rows[1:], strict=True):
        harmless = value in ("fine", 'a;=1"')
        assert job.strip("'").strip() == value.strip() if not harmless else job == value
        assert harmless or job.startswith("'")
        assert float(income)
    both = commanded("predict", folder() / "model", path, "--json", "--for-spreadsheets")
    assert both == Answer(
        None, "", "--for-spreadsheets is for CSV, and --json is given; leave out one."
    )
