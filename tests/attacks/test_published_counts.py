"""The privacy report has exact counts of what happened in training.

The attacker knows all records but one, and every public setting. It reads privacy.json, the text of
the statement and the privacy section of report.html. The record in question has a gradient that is
not finite, so that it contributes nothing to the model; or it is the only one that breaks the bound
of a custom rule; or it makes batches less often empty. If the report counts such samples, weights
or batches, one number proves which dataset it was, at any ε. One bit is enough: so does a report
that calls a rule sound only if no weight was clamped.

The old report, with counts and with a soundness that depends on them, is planted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import evenclip
from evenclip import DPSGD, Rule, fit
from evenclip.data import Dataset, Splits
from evenclip.mechanism.statement import paragraph
from evenclip.report.page import page
from evenclip.report.statement import statement as section
from evenclip.rules import ENFORCED
from evenclip.training.result import Result

N = 12
# Functions of the key of a run without a seed, which is random; and n, which the report lists as
# not covered.
APART = ("ledger", "remaining", "runs", "n", "delta_times_n", "specification")


@dataclass(frozen=True)
class Breaks(Rule):
    """A custom rule whose formula is wrong for long gradients only."""

    name: ClassVar[str] = "breaks"
    sigma: float = 1.0

    def sensitivity(self, now):
        return 1.0

    def weight(self, norm, group, now):
        return torch.where(norm > 1e3, 1.0, (1.0 / norm).clamp(max=1.0))


def rows(last):
    """Return N short records, and one more if `last` is given.  # x [record, 2], y [record]"""
    x = torch.linspace(-1, 1, 2 * N).view(N, 2)
    x = x if last is None else torch.cat([x, torch.full((1, 2), last)])
    return x, torch.arange(len(x)) % 2


# What the record in question has: its features, and the rule it is trained with.
RECORDS = {
    "a gradient that is not finite": (3e38, DPSGD()),
    "a weight above the bound": (1e6, Breaks()),
}


def model():
    """Return a model whose output overflows for features of 3e38."""
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.weight, 2.0)
    return layer


def reports(case):
    """Return the result of a run with the record in question, and that of one without it."""
    last, rule = RECORDS[case]
    given = {"q": 0.9, "batch_size": N, "steps": 40, "delta": 1e-3, "lr": 1e-3}
    return [fit(model(), rows(present), rule=rule, **given) for present in (last, None)]


def seen(report):
    """Return what the attacker reads and can compare: fields, text, and the section of the page."""
    fields = {name: value for name, value in report.items() if name not in APART}
    drawn = section({"statement": {"rule": fields}, "not_covered_by_epsilon": []})
    return json.dumps(fields, sort_keys=True), paragraph(report), drawn


@pytest.mark.parametrize("case", RECORDS)
def test_one_record_changes_nothing_in_the_report(case):
    with_it, without = reports(case)
    assert with_it.private != without.private  # the run did see it
    assert seen(with_it.privacy) == seen(without.privacy)


def test_no_field_of_the_report_is_a_count_of_batches():
    result = fit(nn.Linear(2, 2), rows(None), rule=DPSGD(), q=0.01, batch_size=1, steps=40)
    assert result.private["empty_batches"] > 20
    assert not set(result.private) & set(result.privacy)
    assert "empty" not in json.dumps(
        {name: value for name, value in result.privacy.items() if name != "not_protected"}
    )


@pytest.mark.parametrize("case", RECORDS)
def test_the_attack_wins_against_a_report_with_counts(case, monkeypatch):
    honest = Result.privacy.func
    monkeypatch.setattr(Result, "privacy", property(lambda run: honest(run) | run.private))
    with_it, without = reports(case)
    assert seen(with_it.privacy) != seen(without.privacy)


def test_the_attack_wins_against_a_soundness_that_depends_on_weights(monkeypatch):
    honest = Result.privacy.func

    def judged(run):
        clamped = run.private["clamped_weights"]
        return honest(run) | {"soundness": ENFORCED if clamped else "sound"}

    monkeypatch.setattr(Result, "privacy", property(judged))
    with_it, without = reports("a weight above the bound")
    assert seen(with_it.privacy) != seen(without.privacy)


# --- a comparison -------------------------------------------------------------------------------

LOUD = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from evenclip import Rule

@dataclass(frozen=True)
class Breaks(Rule):
    name: ClassVar[str] = "breaks"
    sigma: float = 1.0

    def sensitivity(self, now):
        return 1.0

    def weight(self, norm, group, now):
        return torch.where(norm > 1e3, 1.0, (1.0 / norm).clamp(max=1.0))
"""


def comparison(folder, last, executor):
    """Return the results of a comparison whose training rows end with a record."""
    (folder / "breaks.py").write_text(LOUD)
    x, y = rows(last)
    names = {"group_names": ("a", "b"), "class_names": ("0", "1")}
    group = torch.arange(len(y)) // 2 % 2
    train, test = Dataset(x, y, group, **names), Dataset(x[:N], y[:N], group[:N], **names)
    return evenclip.compare(
        Splits(train, test), [f"{folder / 'breaks.py'}:Breaks"], 1, epochs=2, batch_size=N + 1,
        epsilon=2.0, delta=1e-3, lr=0.01, model="linear", store=folder / "runs", on=executor,
    )  # fmt: skip


def test_the_page_and_the_json_of_a_comparison_count_no_clamped_weights(tmp_path, here):
    made = [comparison(tmp_path, last, here) for last in (1e6, 0.5)]
    counts = [outcome.private["breaks"]["clamped_weights"] for outcome in made]
    assert counts[0] > 0 == counts[1]
    results = [outcome.to_json() for outcome in made]
    for name in ("privacy", "notes"):
        assert results[0][name] == results[1][name]
    drop = [name for name in APART if name in results[0]["statement"]["breaks"]]
    for result in results:
        for name in drop:
            del result["statement"]["breaks"][name]
    assert section(results[0]) == section(results[1])
    assert "above its declared sensitivity" not in page(results[0]) + made[0].table()
    (note,) = made[0].private_notes
    assert note.startswith(f"breaks: {counts[0]} weights were above its declared sensitivity")
