"""Tests of descriptions: they restore what they describe."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types

import pytest
import torch
from torch import nn

from evenclip import models
from evenclip.rules import RULES
from evenclip.sweep import describe

CUSTOM_RULE = """
from dataclasses import dataclass
import evenclip

@dataclass(frozen=True)
class Half(evenclip.Rule):
    name = "half"
    sigma: float = 1.0
    C0: float = 2.0
    def sensitivity(self, now):
        return self.C0
    def weight(self, norm, group, now):
        return 0.5 * self.C0 / norm.clamp(min=1.0)

NOT_A_RULE = 3
"""


@pytest.fixture
def custom_rules(tmp_path):
    path = tmp_path / "my_rules.py"
    path.write_text(CUSTOM_RULE)
    return path


@pytest.mark.parametrize("name", RULES)
def test_built_in_rules(name):
    rule = RULES[name]()
    rule = dataclasses.replace(rule, sigma=0.7) if rule.sigma else rule
    assert describe.make_rule(json.loads(json.dumps(describe.describe_rule(rule)))) == rule


def test_a_custom_rule(custom_rules):
    rule = describe.named_rule(f"{custom_rules}:Half")
    assert (rule.name, rule.C0) == ("half", 2.0)
    changed = dataclasses.replace(rule, sigma=3.0)
    description = json.loads(json.dumps(describe.describe_rule(changed)))
    assert describe.make_rule(description) == changed
    assert description["sha256"] == describe.sha256(custom_rules)
    assert (description["name"], description["class"]) == ("half", "Half")


def test_a_changed_file_is_another_run(custom_rules, spec):
    before = spec(rule=describe.describe_rule(describe.named_rule(f"{custom_rules}:Half")))
    custom_rules.write_text(CUSTOM_RULE.replace("0.5 *", "0.25 *"))
    after = spec(rule=describe.describe_rule(describe.named_rule(f"{custom_rules}:Half")))
    assert before.hash != after.hash


def test_a_file_that_changed_after_it_was_described_is_not_loaded(custom_rules):
    custom_rules.write_text(CUSTOM_RULE.replace("0.5 *", "0.6 *"))  # no other test has loaded this
    description = describe.describe_rule(describe.named_rule(f"{custom_rules}:Half"))
    custom_rules.write_text(CUSTOM_RULE.replace("0.5 *", "0.7 *"))
    sys.modules.pop(f"evenclip_given_{description['sha256']}")  # as in a new process
    with pytest.raises(ValueError, match=r"has changed since the comparison began; start it again"):
        describe.make_rule(description)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "dp-sgd",
            f"There is no rule 'dp-sgd'; choose among {', '.join(RULES)}, or give file.py:Class "
            "for your own.",
        ),
        ("nowhere.py:Half", "nowhere.py does not exist; give the path of a file."),
    ],
)
def test_rules_that_are_not_there(given, says):
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        describe.named_rule(given)
    assert str(raised.value) == says


@pytest.mark.parametrize("name", ["Third", "NOT_A_RULE"])
def test_a_file_without_that_rule(custom_rules, name):
    with pytest.raises(
        ValueError,
        match=f"has no rule '{name}'; give file.py:Class with a subclass of evenclip.Rule.",
    ):
        describe.named_rule(f"{custom_rules}:{name}")


def test_a_rule_without_a_file(monkeypatch):
    notebook = types.ModuleType("notebook_without_file")
    monkeypatch.setitem(sys.modules, notebook.__name__, notebook)
    exec(CUSTOM_RULE, notebook.__dict__)
    with pytest.raises(
        ValueError, match=r"'half' \(Half\) has no file .* put it into its own \.py file\."
    ):
        describe.describe_rule(notebook.Half())


@pytest.mark.parametrize(
    ("given", "widths"),
    [
        ("mlp", [3, 256, 256, 2]),
        ("mlp:7", [3, 7, 2]),
        ("mlp:7,5", [3, 7, 5, 2]),
        ("linear", [3, 2]),
    ],
)
def test_models_by_name(given, widths, splits):
    model = describe.make_model(describe.describe_model(given), splits.train, seed=0)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert [layers[0].in_features, *(layer.out_features for layer in layers)] == widths


def test_a_model_of_ones_own_starts_from_the_seed(tmp_path, splits):
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\ndef make(x, classes):\n    return torch.nn.Linear(x.shape[1], classes)\n"
    )
    description = describe.describe_model(f"{path}:make")
    first, same, other = (
        describe.make_model(description, splits.train, seed) for seed in (0, 0, 1)
    )
    assert torch.equal(first.weight, same.weight)
    assert not torch.equal(first.weight, other.weight)


@pytest.mark.parametrize("given", ["resnet", "mlp:a,b", "cnn:3"])
def test_models_that_are_not_there(given):
    with pytest.raises(ValueError, match=r"There is no model|give the widths as whole numbers"):
        describe.describe_model(given)


BROKEN = {
    "def make(x, classes)": "cannot be loaded: SyntaxError",
    "1 / 0": "cannot be loaded: ZeroDivisionError: division by zero",
    "x = 1": "has no function 'make'; give file.py:function, called as function(x, classes).",
    "def make(x, classes): return 1 / 0": (
        "make of {path} failed: ZeroDivisionError: division by zero"
    ),
    "def make(x, classes): return 3": "make of {path} returned int; it must return an nn.Module.",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_file_of_ones_own_that_is_broken(text, tmp_path, splits):
    path = tmp_path / "net.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(BROKEN[text].format(path=path))):
        describe.make_model(describe.describe_model(f"{path}:make"), splits.train, 0)


def test_a_model_that_does_not_fit_into_memory(splits, monkeypatch):
    with pytest.raises(ValueError, match="would have 599,999,999,996 parameters; at most"):
        describe.make_model(describe.describe_model("mlp:99999999999"), splits.train, 0)
    monkeypatch.setattr(models, "_MOST_PARAMETERS", 10**12)
    with pytest.raises(ValueError, match="The model mlp cannot be created with these options"):
        describe.make_model(describe.describe_model("mlp:99999999999"), splits.train, 0)


def test_splits_come_back(splits, tmp_path):
    loaded = describe.load_data(describe.save_splits(splits, tmp_path), seed=0)
    for name in ("train", "test"):
        given, back = getattr(splits, name), getattr(loaded.splits, name)
        assert all(
            torch.equal(getattr(given, field), getattr(back, field))
            for field in ("x", "y", "group")
        )
        assert (back.group_names, back.class_names, back.name) == (
            ("a", "b"),
            ("no", "yes"),
            "made",
        )
    assert loaded.splits.validation is None


def test_held_out_rows_are_taken_from_the_training_rows(splits, tmp_path):
    description = {**describe.save_splits(splits, tmp_path), "hold_out": 0.2}
    sampled, again, other = (describe.load_data(description, seed).splits for seed in (0, 0, 1))
    assert (len(sampled.train) + len(sampled.validation), len(sampled.test)) == (200, 100)
    assert abs(len(sampled.validation) - 40) < 5 * (200 * 0.16) ** 0.5
    rows = [tuple(row) for data in (sampled.train, sampled.validation) for row in data.x.tolist()]
    assert sorted(rows) == sorted(tuple(row) for row in splits.train.x.tolist())
    assert torch.equal(sampled.validation.x, again.validation.x)
    assert not torch.equal(sampled.validation.x, other.validation.x)


def test_fewer_rows_are_a_sample_of_each_part(splits, tmp_path):
    description = {**describe.save_splits(splits, tmp_path), "rows": 120}
    sampled, again, other = (describe.load_data(description, seed).splits for seed in (0, 0, 1))
    assert (len(sampled.test), sampled.validation) == (100, None)
    assert abs(len(sampled.train) - 120) < 5 * (200 * 0.24) ** 0.5
    whole = [tuple(row) for row in splits.train.x.tolist()]
    rows = [tuple(row) for row in sampled.train.x.tolist()]
    assert len(set(rows)) == len(rows)
    # Rows keep their order and their labels.
    assert [row for row in whole if row in set(rows)] == rows
    place = [whole.index(row) for row in rows]
    assert sampled.train.y.tolist() == splits.train.y[place].tolist()
    assert sampled.train.group.tolist() == splits.train.group[place].tolist()
    assert torch.equal(sampled.train.x, again.train.x)
    assert not torch.equal(sampled.train.x, other.train.x)
    held = describe.load_data({**description, "hold_out": 0.25}, 0).splits
    assert len(held.train) + len(held.validation) == len(sampled.train)
    assert abs(len(held.validation) - 30) < 5 * (120 * 0.1875) ** 0.5


def test_one_split_for_all_seeds():
    shared = {"name": "digits", "options": {}, "split": 3}
    one, other = (describe.load_data(shared, seed).splits for seed in (0, 1))
    own = describe.load_data({"name": "digits", "options": {}}, 3).splits
    assert torch.equal(one.train.x, other.train.x)
    assert torch.equal(one.train.x, own.train.x)


def test_declared_numbers_and_marks_are_saved(splits, tmp_path):
    marks = torch.arange(len(splits.train))
    given = splits._replace(train=dataclasses.replace(splits.train, records=500, marks=marks))
    description = describe.save_splits(given, tmp_path)
    back = describe.load_data(description, 0).splits.train
    assert (back.records, back.marks.tolist()) == (500, marks.tolist())
    held = describe.load_data({**description, "hold_out": 0.2}, 0).splits
    assert (held.train.records, held.validation.records) == (400, None)
    assert torch.equal(torch.cat([held.train.marks, held.validation.marks]).sort()[0], marks)


def test_an_unknown_dataset():
    with pytest.raises(ValueError, match="There is no dataset 'adlut'; choose among adult"):
        describe.load_data({"name": "adlut"}, seed=0)
