"""The paper's settings: a source for each number, a reason where sources disagree, and what they
amount to.
"""

import pytest

from evenclip.comparison.presets import PUBLISHED, SETTINGS
from evenclip.reproduction.published import load


@pytest.mark.parametrize("name", SETTINGS)
def test_every_number_has_a_source_and_every_disagreement_a_reason(name):
    for choice in SETTINGS[name].numbers.values():
        assert choice.source
        assert all(where for _, where in choice.others)
        assert not choice.others or choice.why
        assert choice.value not in [value for value, _ in choice.others]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_methods_are_the_rows_of_the_printed_table(name):
    assert [method.name for method in PUBLISHED[name].methods] == list(load(name).rows)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_numbers_reach_the_rules(name):
    dataset, methods = SETTINGS[name], {method.name: method for method in PUBLISHED[name].methods}
    adapt = methods["dpsgd-global-adapt"]
    assert (adapt.rule.C0, adapt.rule.Z0, adapt.rule.tau, adapt.lr) == tuple(
        dataset[key] for key in ("C0", "Z0", "tau", "lr_adapt")
    )
    assert methods["dpsgd-f"].rule.sigma_count == 10 * dataset["sigma"]
    assert dataset["Z"] == methods["dpsgd-global"].rule.Z
    assert {methods[rule].lr for rule in ("non-private", "dpsgd", "dpsgd-f")} == {dataset["lr"]}
