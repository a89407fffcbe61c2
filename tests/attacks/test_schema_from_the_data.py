"""A schema that was written from private rows is given back, and statements call it public.

The attacker knows all rows but one, and the published files. `evenclip data schema` writes the
largest income into the schema, `encoder.json` publishes it, and the largest income is that of the
record in question: the scale of one column proves that it was there. No ε covers this. A trainer
may still do it, but no statement may claim that nothing was read from the data: the attack wins
where the encoders of two neighbouring tables differ and the statement does not say that the encoder
is not covered.

The old behaviour is planted: a schema with its "warning" counts as public. With --columns-only, the
attacker finds no difference, because no row is read.
"""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

import evenclip
from evenclip import export
from evenclip.cli import main
from evenclip.data import schema as schemas
from evenclip.mechanism.statement import paragraph
from evenclip.report.page import page

CAVEAT = 'still has its "warning": kinds, ranges, categories, classes and groups were read from'
FEW = {"target": "late", "group": "sex", "epsilon": 2.0, "epochs": 1, "model": "linear"}


def rows(record):
    """Return rows with known incomes, and one more whose income is far above them."""
    random, n = np.random.default_rng(0), 400
    frame = pd.DataFrame(
        {
            "income": random.integers(10, 90, n),
            "job": random.choice(["clerk", "nurse"], n),
            "sex": random.choice(["f", "m"], n),
            "late": random.choice(["no", "yes"], n),
        }
    )
    frame.loc[0] = [10, "clerk", "f", "no"]
    frame.loc[1] = [89, "nurse", "m", "yes"]
    if record:
        frame.loc[n] = [4321, "pilot", "f", "no"]
    return frame


@pytest.fixture
def tables(tmp_path):
    """Return the files of two neighbouring tables."""
    paths = [tmp_path / "with.csv", tmp_path / "without.csv"]
    for path, record in zip(paths, (True, False), strict=True):
        rows(record).to_csv(path, index=False)
    return paths


@pytest.fixture
def believed(monkeypatch):
    """Plant the old behaviour: a schema with its warning counts as public."""
    monkeypatch.setattr(schemas, "accesses", lambda schema: [])


def run(capsys, *arguments):
    """Run the command line; return what it printed."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments)])
    assert not stop.value.code
    return capsys.readouterr()


def published(capsys, path):
    """Return the encoder, and every statement, of a model from an unedited schema."""
    schema, folder = path.with_suffix(".json"), path.with_suffix("")
    run(capsys, "data", "schema", path, "--target", "late", "--out", schema)
    ask = ("--target", "late", "--group", "sex", "--schema", schema, "--epochs", 1)
    out, _ = run(capsys, "train", path, *ask, "--model", "linear", "--out", folder)
    report = json.loads((folder / "privacy.json").read_text())
    return (folder / "encoder.json").read_text(), {
        "privacy.json": "; ".join(report["not_covered"]),
        "as text": paragraph(report),
        "card": (folder / "README.md").read_text(),
        "terminal": out,
    }


def flat(text):
    return " ".join(text.split())


def lies(capsys, tables):
    """Return the statements by which the attack wins."""
    (one, statements), (other, _) = (published(capsys, path) for path in tables)
    assert one != other  # the record is in encoder.json
    assert "4321" not in other
    return [name for name, text in statements.items() if CAVEAT not in flat(text)]


def test_every_statement_says_that_the_values_were_read_from_the_data(capsys, tables):
    assert lies(capsys, tables) == []


@pytest.mark.usefixtures("believed")
def test_the_attack_wins_against_statements_that_believe_the_schema(capsys, tables):
    assert lies(capsys, tables) == ["privacy.json", "as text", "card", "terminal"]


def test_the_card_does_not_call_the_values_public(capsys, tables):
    _, statements = published(capsys, tables[0])
    assert "declared public" not in flat(statements["card"])
    assert "Its ranges, categories and names were read from the data" in flat(statements["card"])


def test_the_encoder_of_such_a_model_is_not_declared():
    frame = rows(record=True)
    trained = export.train(frame, schema=schemas.propose(frame), progress=False, **FEW)
    assert trained.privacy["encoder_declared"] is False


def test_the_page_the_table_and_the_json_of_a_comparison_say_so(tmp_path, here):
    frame = rows(record=True)
    made = evenclip.compare(
        frame, ["dpsgd"], 1, options={"schema": schemas.propose(frame)}, store=tmp_path,
        on=here, **FEW,
    )  # fmt: skip
    results = made.to_json()
    assert any(CAVEAT in access for access in results["not_covered_by_epsilon"])
    assert CAVEAT in flat(made.table())
    assert CAVEAT.replace('"', "&quot;") in flat(page(results))


def test_data_that_stay_on_the_disk_say_so(tmp_path):
    frame = rows(record=True)
    frame.to_parquet(tmp_path / "t.parquet")
    proposed = schemas.propose(frame)
    data = evenclip.data.parquet(
        tmp_path / "t.parquet", target="late", group="sex", schema=proposed
    )
    model = evenclip.models.mlp(len(data.encoder.features), 2, (4,))
    result = evenclip.fit(model, data, rule=evenclip.DPSGD(), batch_size=40, epochs=1)
    assert any(CAVEAT in access for access in result.privacy["not_covered"])


def test_the_estimator_says_so():
    pytest.importorskip("sklearn")
    from evenclip.sklearn import PrivateClassifier

    frame = rows(record=True)
    X, y = frame[["income", "job"]], frame["late"]
    classifier = PrivateClassifier(epsilon=2.0, epochs=1, schema=schemas.propose(X))
    with pytest.warns(UserWarning, match='The schema still has its "warning"'):
        classifier.fit(X, y)
    assert any(CAVEAT in access for access in classifier.privacy_report_["not_covered"])


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet", "feather"])
def test_a_skeleton_is_no_function_of_a_record(capsys, tmp_path, suffix):
    writers = {
        "csv": lambda frame, path: frame.to_csv(path, index=False),
        "tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
        "parquet": lambda frame, path: frame.to_parquet(path),
        "feather": lambda frame, path: frame.reset_index(drop=True).to_feather(path),
    }
    written = []
    for record in (True, False):
        frame = rows(record)
        if record:  # and a value that changes the type of its column, which pandas stores
            frame = frame.astype({"income": object})
            frame.loc[400, "income"] = None
            frame["income"] = frame["income"].astype(float)
        path = tmp_path / f"t.{suffix}"
        writers[suffix](frame, path)
        written.append(run(capsys, "data", "schema", path, "--columns-only").out)
    assert written[0] == written[1]
    assert list(json.loads(written[0])["columns"]) == ["income", "job", "sex", "late"]
