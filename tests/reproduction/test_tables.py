"""Tables: ours beside printed, differences marked, claims tested again, all from a record alone."""

import json
import math

import numpy as np
import pytest

from evenclip.audit import statistics
from evenclip.comparison import compare
from evenclip.comparison.presets import PUBLISHED, SETTINGS
from evenclip.reproduction import observed, tables
from evenclip.reproduction.cells import Cell, cells, verdicts
from evenclip.reproduction.markdown import draw
from evenclip.reproduction.published import Printed, load
from evenclip.reproduction.tables import TABLES
from evenclip.reproduction.training import Training


def test_there_are_two_of_every_dataset():
    assert list(TABLES) == [name for d in SETTINGS for name in (d, f"{d}-matched")]
    assert TABLES["celeba"].title == "Table 3, CelebA, as published"


def test_every_number_stands_beside_the_printed_one(kept):
    found = cells(kept())
    cell = found["dpsgd"]["accuracy"][0]
    assert cell.mean == pytest.approx(78.2)
    assert cell.se == pytest.approx(
        np.std([78.0 + 0.1 * s for s in range(5)], ddof=1) / math.sqrt(5)
    )
    assert cell.printed == load("adult").cell("dpsgd", "accuracy", "Male")
    assert cell.difference == pytest.approx(78.2 - 69.9)
    assert found["dpsgd"]["privacy_cost"][1].mean == pytest.approx(2.0)
    assert found["dpsgd"]["excessive_risk"][0].mean == pytest.approx(0.1)
    assert found["dpsgd"]["excessive_risk_gap"][0].mean == pytest.approx(0.05)
    assert "privacy_cost" not in found["non-private"]


def test_groups_are_found_by_name_not_by_place(kept):
    straight, turned = kept(), kept(groups=["Female", "Male"])
    assert cells(straight)["dpsgd"]["accuracy"][0].mean == pytest.approx(
        cells(turned)["dpsgd"]["accuracy"][1].mean
    )


def test_a_gap_is_that_of_the_means(kept):
    """It is not the mean of absolute gaps, and neither are the printed gaps."""
    record = kept()
    record["rules"]["dpsgd"]["accuracy"] = [
        [70.0 + d, 90.0 - d] for d in (-1.0, 1.0, -2.0, 2.0, 0.0)
    ]
    gap = cells(record)["dpsgd"]["privacy_cost_gap"][0].mean
    costs = cells(record)["dpsgd"]["privacy_cost"]
    assert gap == pytest.approx(abs(costs[0].mean - costs[1].mean))


@pytest.mark.parametrize(
    ("mean", "se", "printed", "explained"),
    [
        (70.0, 0.1, Printed(70.0, 0.1, 1), True),
        (70.4, 0.1, Printed(70.0, 0.1, 1), True),  # 0.4 ≤ 2·√(0.1² + 0.15²) + 0.05
        (70.5, 0.1, Printed(70.0, 0.1, 1), False),
        (0.502, 0.0, Printed(0.5, 0.0, 3), False),
        (0.5014, 0.0, Printed(0.5, 0.0, 3), True),  # rounding alone
        (70.0, None, Printed(70.0, 0.1, 1), None),  # one seed
        (70.0, 0.1, None, None),
    ],
)
def test_what_two_standard_errors_and_rounding_explain(mean, se, printed, explained):
    assert Cell(mean, se, printed).explained is explained


def test_matched_tables_have_nothing_printed_beside_them(kept):
    assert all(
        cell.printed is None
        for row in cells(kept("adult-matched")).values()
        for c in row.values()
        for cell in c
    )
    assert "printed |" not in draw(kept("adult-matched")).split("**Privacy**")[0]


def test_claims_are_tested_on_our_seeds(kept):
    record = kept()
    found = {(v.claim.better, v.claim.worse, v.claim.metric): v for v in verdicts(record)}
    assert len(found) == 12
    worse = found[
        "dpsgd-global-adapt", "dpsgd", "accuracy"
    ]  # here later rules are worse by construction
    assert worse.holds is False
    assert worse.p["Male"] == 1.0
    record["rules"]["dpsgd-global-adapt"]["accuracy"] = [[95.0 + s, 99.0] for s in range(5)]
    better = {(v.claim.better, v.claim.worse, v.claim.metric): v for v in verdicts(record)}
    assert better["dpsgd-global-adapt", "dpsgd", "accuracy"].holds is True
    assert better["dpsgd-global-adapt", "dpsgd", "accuracy"].p["Female"] == statistics.smallest_p(5)


def test_one_group_that_is_not_better_refutes_a_claim(kept):
    record = kept()
    record["rules"]["dpsgd-global-adapt"]["accuracy"] = [[95.0 + s, 1.0] for s in range(5)]
    wanted = ("dpsgd-global-adapt", "dpsgd", "accuracy")
    found = next(
        v for v in verdicts(record) if (v.claim.better, v.claim.worse, v.claim.metric) == wanted
    )
    assert found.p["Male"] < 0.05
    assert found.holds is False


def test_a_drawn_table_says_what_it_must(kept):
    text = draw(kept())
    assert text.startswith("## Table 4, Adult, as published\n")
    assert "5 seeds, 23,000 to 23,004 training records." in text
    assert "| dpsgd | 78.2 ± 0.1 | 69.9 ± 0.4 | +8.3‡ |" in text
    assert "| fairlens | none | none | 3.41 |" in text
    assert "| dpsgd | 3.408 | 3.104 | 3.41 |" in text
    assert "p is never below 0.0312" in text
    assert "A note." in text
    assert "quick run" not in text
    assert "**A quick run" in draw(kept(quick=True))


def test_a_table_of_a_part_of_the_data_says_so(kept):
    assert "Partial" not in draw(kept())
    marked = {**kept(), "partial": "192,599 of 202,599 images are missing"}
    assert "**Partial: 192,599 of 202,599 images are missing." in draw(marked)


@pytest.mark.parametrize(("name", "rows"), [("mnist", 2560), ("celeba", 640), ("adult", None)])
def test_a_quick_look_takes_one_epoch_and_few_images(monkeypatch, tmp_path, name, rows):
    passed = {}

    def stop(*given, **more):
        passed.update(more)
        raise RuntimeError("enough")

    monkeypatch.setattr(tables, "compare", stop)
    with pytest.raises(RuntimeError, match="enough"):
        tables.make(TABLES[name], Training(quick=True, store=tmp_path))
    assert (passed["epochs"], passed["rows"]) == (1, rows)
    assert all(
        w.rows == rows and w.epochs == 1 for w in observed.plan(name, match=False, quick=True)
    )


def test_a_record_survives_json(kept):
    assert draw(json.loads(json.dumps(kept()))) == draw(kept())


def test_the_settings_of_the_paper_are_trained(monkeypatch, tmp_path):
    """`compare` is called with all methods of the table, FairLens included."""
    passed = {}

    def stop(*given, **more):
        passed.update(given=given, **more)
        raise RuntimeError("enough")

    monkeypatch.setattr(tables, "compare", stop)
    with pytest.raises(RuntimeError, match="enough"):
        tables.make(TABLES["dutch-matched"], Training(seeds=3, store=tmp_path))
    assert passed["given"] == (
        "dutch",
        ["dpsgd", "fairlens", "dpsgd-f", "dpsgd-global", "dpsgd-global-adapt"],
        3,
    )
    assert passed["match"] is True
    assert passed["tf32"] is False
    with pytest.raises(RuntimeError, match="enough"):
        tables.make(TABLES["celeba"], Training(device="cuda", tf32=True, store=tmp_path))
    assert (passed["device"], passed["tf32"]) == ("cuda", True)
    assert [m.name for m in PUBLISHED["mnist"].methods].count("fairlens") == 0


def test_a_table_is_made_of_a_comparison(tmp_path, here):
    """From training to the page, on one epoch of the Adult data in the package."""
    found = compare(
        "adult", ["dpsgd"], 2, epochs=1, model="linear", rows=1000, store=tmp_path, on=here
    )
    made = tables.record(TABLES["adult"], found, device="cpu", quick=True)
    assert json.loads(json.dumps(made)) == made
    assert cells(made)["dpsgd"]["accuracy"][0].mean == pytest.approx(
        float(found["dpsgd"].metrics["accuracy"][:, found.groups.index("Male")].mean()), abs=1e-4
    )
    assert "quick run" in draw(made)
