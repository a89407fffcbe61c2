"""Rows in doubt: what is trained both ways, and the table of it."""

import pytest

from evenclip.comparison.presets import PUBLISHED, SETTINGS
from evenclip.reproduction import variants
from evenclip.reproduction.published import load
from evenclip.reproduction.training import Training
from evenclip.reproduction.variants import VARIANTS, draw


def test_every_row_that_sources_disagree_about_is_trained_both_ways():
    """Every learning rate for which the settings name another value in another source."""
    doubts = {
        (name, rule, value)
        for name, dataset in SETTINGS.items()
        for key, rule in (("lr_global", "dpsgd-global"), ("lr_adapt", "dpsgd-global-adapt"))
        for value in (dataset[key], *(other for other, _ in dataset.numbers[key].others))
        if dataset.numbers[key].others
    }
    trained = {(v.dataset, v.row, v.method.lr) for v in VARIANTS if v.row != "fairlens"}
    assert trained == doubts


def test_fairlens_is_trained_with_and_without_the_gradient_of_r1():
    found = {
        (v.dataset, v.method.rule.gamma1, v.method.rule.gamma2)
        for v in VARIANTS
        if v.row == "fairlens"
    }
    assert found == {(name, gamma1, 1.0) for name in ("adult", "dutch") for gamma1 in (0.0, 1.0)}
    for variant in VARIANTS:
        published = PUBLISHED[variant.dataset].only([variant.row]).methods[0]
        assert variant.method.rule.C0 == published.rule.C0
        assert variant.method.rule.sigma == published.rule.sigma


def test_the_table_is_drawn_from_its_record():
    rows = [
        {"dataset": v.dataset, "row": v.row, "says": v.says, "lr": v.method.lr,
         "accuracy": [[70.0, 88.0], [71.0, 89.0]], "loss": [[0.5, 0.3], [0.5, 0.3]]}
        for v in VARIANTS
    ]  # fmt: skip
    text = draw({"table": "variants", "quick": False, "seeds": [0, 1], "rows": rows})
    printed = load("adult").cell("fairlens", "accuracy", "Male")
    assert f"| adult, fairlens | ∇R1 taken to be 0 | 70.5 ± 0.5‡ | {printed} |" in text
    assert "adult: a Male, b Female; dutch: a Male, b Female." in text


def test_training_goes_through_compare(monkeypatch, tmp_path):
    passed = []

    def stop(*given, **more):
        passed.append((given, more))
        raise RuntimeError("enough")

    monkeypatch.setattr(variants, "compare", stop)
    with pytest.raises(RuntimeError, match="enough"):
        variants.make(Training(seeds=3, store=tmp_path))
    (dataset, rules, seeds), more = passed[0]
    assert (dataset, rules[0].name, seeds, more["lr"]) == ("adult", "dpsgd-global", 3, 1.0)
