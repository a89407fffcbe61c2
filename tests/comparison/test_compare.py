"""Comparisons are paired, calibrated and matched, and their results are reported unchanged."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch

import evenclip
from evenclip import DPSGD, DPSGDF, DPSGDGlobalAdapt
from evenclip.comparison.plan import Changes, choose_protocol, in_words, make_plan, paced
from evenclip.comparison.presets import PUBLISHED
from evenclip.comparison.protocol import LEARNING_RATES, for_table, with_rates
from evenclip.comparison.trainings import best_rates
from evenclip.data import Dataset, Splits
from evenclip.report.page import page
from evenclip.rules import ENFORCED, NO_EPSILON, REPAIRED, SOUND, Constants
from evenclip.sweep import Store, risk, work


def part(n, seed, K=2):
    random = torch.Generator().manual_seed(seed)
    group = torch.arange(n) % K
    x = torch.randn(n, 4, generator=random)
    y = (x[:, 0] + (0.4 + 0.3 * group) * torch.randn(n, generator=random) > 0).long()
    names = ("a", "b", "c", "d", "e", "f")[:K]
    return Dataset(x, y, group, names, ("no", "yes"), "made")


@pytest.fixture(scope="module")
def splits():
    return Splits(part(600, 0), part(400, 1), part(200, 2))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def found(splits, root, here):
    return evenclip.compare(
        splits,
        seeds=3,
        epochs=2,
        batch_size=60,
        epsilon=3.0,
        delta=1e-4,
        model="mlp:8",
        store=root,
        on=here,
    )


def test_a_comparison_has_no_run_ids(found, root):
    """Its seeds are known, so an id is a function of the data that anyone can compute."""
    ids = {row["run"] for one in results(root) for row in one["result"]["ledger"]}
    text = json.dumps(found.to_json())
    assert ids
    assert not [run for run in ids if run in text or run in page(json.loads(text))]


def results(root, **wanted):
    """The stored results and specifications with those settings."""
    every = [
        json.loads((path.parent / "spec.json").read_text())
        | {"result": json.loads(path.read_text())}
        for path in root.glob("*/result.json")
    ]
    return [one for one in every if all(one.get(name) == value for name, value in wanted.items())]


def test_every_private_rule_has_the_epsilon_asked_for(found):
    for outcome in found.outcomes:
        if outcome.name == "non-private":
            assert outcome.epsilon == {"pld": None, "rdp": None}
        else:
            assert 2.98 < outcome.epsilon["pld"] <= 3.0 < outcome.epsilon["rdp"]


def test_all_rules_of_a_seed_start_from_one_model_and_one_split(found, root):
    """Their noise and batches differ: with lr → 0 the models would be equal, but not the streams
    in the ledgers.
    """
    assert [o.name for o in found.outcomes] == [
        "non-private",
        "dpsgd",
        "dpsgd-f",
        "dpsgd-global",
        "dpsgd-global-adapt",
    ]
    for seed in found.seeds:
        some = [one for one in results(root, seed=seed) if not one["data"].get("hold_out")]
        assert len({json.dumps(one["data"]) for one in some}) == 1
        assert {one["seed"] for one in some} == {seed}


def test_a_rate_that_trains_by_luck_is_not_shared():
    """0.1 is best for one seed and fails for the other; each its own, or one for all."""
    accuracy = dict.fromkeys([(seed, lr) for seed in (0, 1) for lr in LEARNING_RATES], 50.0)
    accuracy |= {(0, 0.1): 99.0, (1, 0.1): 10.0, (0, 0.03): 97.0, (1, 0.03): 97.0}
    assert best_rates(accuracy, [0, 1], shared=False) == {0: 0.1, 1: 0.03}
    assert best_rates(accuracy, [0, 1], shared=True) == {0: 0.03, 1: 0.03}


def test_the_reference_rate_is_chosen_on_validation_rows(found, root):
    for seed, chosen in zip(found.seeds, found.reference.lr, strict=True):
        tried = [one for one in results(root, seed=seed) if one["rule"]["name"] == "non-private"]
        accuracy = {one["lr"]: one["result"]["validation"]["overall"]["accuracy"] for one in tried}
        assert sorted(accuracy) == [0.01, 0.03, 0.1, 0.3, 1.0]
        assert accuracy[chosen] == max(accuracy.values())


def test_costs_are_paired_by_seed(found, root):
    rates = dict(zip(found.seeds, found.reference.lr, strict=True))
    every = [one for one in results(root) if one["rule"]["name"] == "non-private"]
    reference = {one["seed"]: one["result"] for one in every if one["lr"] == rates[one["seed"]]}
    private = {
        one["seed"]: one["result"] for one in results(root) if one["rule"]["name"] == "dpsgd"
    }
    for i, seed in enumerate(found.seeds):
        for k in range(2):
            accuracy = [
                result[seed]["test"]["groups"]["accuracy"][k] for result in (reference, private)
            ]
            loss = [result[seed]["test"]["groups"]["loss"][k] for result in (reference, private)]
            assert found.privacy_cost("dpsgd")[i, k] == pytest.approx(accuracy[0] - accuracy[1])
            assert found.excessive_risk("dpsgd")[i, k] == pytest.approx(loss[1] - loss[0])


def test_json_has_what_was_promised(found):
    plain = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert plain["dataset"] == "made"
    assert plain["groups"] == ["a", "b"]
    assert plain["seeds"] == [0, 1, 2]
    assert plain["protocol"] == "matched"
    assert set(plain["privacy"]["dpsgd"]) >= {"epsilon_pld", "epsilon_rdp", "delta", "sound"}
    for rule, row in plain["table"].items():
        for metric in ("accuracy", "loss", "train_loss", "privacy_cost", "excessive_risk"):
            assert set(row[metric]) == {"a", "b"}
            assert all(set(cell) == {"mean", "se"} for cell in row[metric].values())
        for gap in ("privacy_cost_gap", "excessive_risk_gap"):
            assert row[gap]["mean"] >= 0, rule
    costs = found.privacy_cost("dpsgd-f")
    cell = plain["table"]["dpsgd-f"]["privacy_cost"]["b"]
    assert cell["mean"] == pytest.approx(costs[:, 1].mean())
    assert cell["se"] == pytest.approx(costs[:, 1].std(ddof=1) / math.sqrt(3))
    assert plain["table"]["non-private"]["privacy_cost_gap"] == {"mean": 0.0, "se": 0.0}


def test_dataframe(found):
    frame = found.to_dataframe()
    chosen = frame[(frame.rule == "dpsgd") & (frame.metric == "accuracy") & (frame.group == "b")]
    assert chosen.value.tolist() == found["dpsgd"].metrics["accuracy"][:, 1].tolist()


def test_the_table_reads_at_80_columns(found):
    text = found.table()
    assert max(len(line) for line in text.splitlines()) <= 80
    words = " ".join(text.split())
    said = (
        "accuracy, %",
        "privacy cost, points",
        "none",
        "sound here, unsound as published",
        "Brackets hold 95 % intervals.",
        "differentially private",
    )
    assert [part for part in said if part not in words] == []


def test_no_name_is_broken_at_its_hyphen(found):
    ends = [
        line.rstrip()[-1:] for width in range(60, 100) for line in found.table(width).split("\n")
    ]
    assert "-" not in ends


def test_the_same_comparison_is_not_trained_again(found, splits, root):
    class NoRuns:
        def planned(self, runs):
            assert runs == 0

    again = evenclip.compare(
        splits,
        seeds=3,
        epochs=2,
        batch_size=60,
        epsilon=3.0,
        delta=1e-4,
        model="mlp:8",
        store=root,
        show=NoRuns(),
    )
    assert again.to_json() == found.to_json()


def test_risk_is_looked_at_once_for_each_private_rule(splits, tmp_path, here, monkeypatch):
    given = {
        "on": here,
        "lr": 0.1,
        "seeds": 1,
        "epochs": 2,
        "batch_size": 60,
        "delta": 1e-4,
        "model": "mlp:8",
        "store": tmp_path,
        "risk": True,
    }
    rules = [evenclip.DPSGD(C0=0.05), evenclip.DPSGDGlobal(C0=0.05, Z=1e6)]
    found = evenclip.compare(splits, rules, **given)
    assert list(found.risk) == ["dpsgd", "dpsgd-global"]
    for looks in found.risk.values():
        assert [look["t"] for look in looks] == list(range(20))  # every step of 20
        assert all(len(look[name]) == 2 for look in looks for name in ("dir", "mag"))
    assert all(
        abs(value) < 1e-6 for look in found.risk["dpsgd-global"] for value in look["dir"]
    )  # pure scaling
    assert any(abs(value) > 1e-5 for look in found.risk["dpsgd"] for value in look["dir"])
    assert "Risk by direction" in page(found.to_json())
    monkeypatch.setattr(risk, "_measure", None)  # stored measurements are not taken again
    assert evenclip.compare(splits, rules, **given).risk == found.risk
    assert "risk" not in evenclip.compare(splits, rules, **given | {"risk": False}).to_json()


def test_one_seed_has_no_standard_error(splits, root, here):
    found = evenclip.compare(
        splits,
        ["dpsgd"],
        1,
        epochs=4,
        batch_size=60,
        delta=1e-4,
        model="mlp:8",
        lr=0.1,
        store=root,
        on=here,
    )
    cell = found.to_json()["table"]["dpsgd"]["accuracy"]["a"]
    assert cell["se"] is None
    assert found.protocol == "one learning rate"
    assert found.says.endswith("Given: δ 0.0001, epochs 4, batch size 60, lr 0.1, model mlp:8.")
    assert found.model == "mlp:8"
    assert ", model mlp:8. " in " ".join(found.table().split())
    assert ", model mlp:8.</p>" in page(found.to_json())
    assert [o.name for o in found.outcomes] == ["non-private", "dpsgd"]
    assert found.table()


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
"""


def test_a_custom_rule_goes_through_all_of_it(splits, root, tmp_path, here):
    path = tmp_path / "my_rules.py"
    path.write_text(CUSTOM_RULE)
    found = evenclip.compare(
        splits,
        ["dpsgd", f"{path}:Half"],
        1,
        epochs=1,
        batch_size=60,
        epsilon=2.0,
        delta=1e-4,
        model="linear",
        store=root,
        on=here,
    )
    assert found["half"].lr == pytest.approx((0.05,))  # 0.1 / S
    assert 1.98 < found["half"].epsilon["pld"] <= 2.0
    table = found.table()
    assert "half" in table
    assert "too few seeds to tell" in table  # with one seed no interval and no t test
    assert "95 %" not in table
    assert "t test" not in table
    assert found.to_json()["table"]["half"]["accuracy"]["a"]["mean"] > 0


def test_settings_as_published_is_not_said_of_a_custom_rule(tmp_path):
    path = tmp_path / "my_rules.py"
    path.write_text(CUSTOM_RULE)
    data = {"name": "adult"}, part(50, 0, K=3)
    plain, mixed, alone = (
        choose_protocol(*data, rules, match=False)
        for rules in (["dpsgd"], ["dpsgd", f"{path}:Half"], [f"{path}:Half"])
    )
    assert [plan.name for plan in (plain, mixed, alone)] == ["published", "published", "given"]
    matched = choose_protocol(*data, [f"{path}:Half"], match=True)
    unknown = choose_protocol({"name": "toy"}, part(50, 0), [f"{path}:Half"], match=False)
    assert (matched.name, unknown.name) == ("matched", "matched")
    assert choose_protocol(*data, ["non-private"], match=False).name == "published"
    assert in_words(plain, Changes()).startswith("Settings as published; ")
    assert "No settings are published for half, which has the expected largest step 0.1." in (
        in_words(mixed, Changes(epochs=3))
    )
    path.write_text(CUSTOM_RULE + CUSTOM_RULE.replace("Half", "Third").replace('"half"', '"third"'))
    two = choose_protocol(*data, ["dpsgd", f"{path}:Half", f"{path}:Third"], match=False)
    assert "for half and third, which have the expected largest step 0.1." in (
        in_words(two, Changes())
    )
    assert in_words(alone, Changes()) == (
        "No private rule here has published settings; each has the expected largest step 0.1."
    )
    mixed = with_rates(mixed, Constants(groups=3))
    assert mixed.only(["half"]).methods[0].lr == pytest.approx(0.05)  # 0.1 / S
    own = choose_protocol(*data, [DPSGDF(C0=2.0)], match=False)
    assert own.custom == ("dpsgd-f",)  # a built-in rule with other settings
    typical = DPSGDF(C0=2.0).typical_sensitivity(Constants(groups=3, B=256.0))
    (_, method) = with_rates(own, Constants(groups=3)).methods
    assert method.lr == pytest.approx(0.1 / typical)  # three groups, not two


BY_CONSTANTS = CUSTOM_RULE.replace(
    "    def sensitivity(self, now):",
    """    def typical_sensitivity(self, constants):
        c = constants
        return c.parameters**-0.5 + c.classes + c.B * c.q / c.steps

    def sensitivity(self, now):""",
)


def test_the_matched_step_is_for_the_constants_of_the_comparison(tmp_path, splits):
    path = tmp_path / "my_rules.py"
    path.write_text(BY_CONSTANTS)
    changes = Changes(epochs=2, batch_size=50, model="linear")
    plan, _ = make_plan({}, splits.train, [f"{path}:Half"], False, changes)
    n, d = 600, (4 + 1) * 2
    S = d**-0.5 + 2 + 50 * (50 / n) / (2 * math.ceil(n / 50))
    assert plan.methods[1].lr == pytest.approx(0.1 / S)


def test_a_plan_whose_published_rules_are_left_out_is_given(tmp_path):
    path = tmp_path / "my_rules.py"
    path.write_text(CUSTOM_RULE)
    rules = ["fairlens", f"{path}:Half"]  # FairLens is for two groups
    described, train = {"name": "adult"}, part(600, 0, K=3)
    assert choose_protocol(described, train, rules, match=False).name == "published"
    changes = Changes(epochs=1, batch_size=50)
    plan, notes = make_plan(described, train, rules, False, changes)
    assert [method.name for method in plan.methods] == ["non-private", "half"]
    assert any("fairlens is left out" in note for note in notes)
    assert plan.name == "given"
    one_rate, _ = make_plan(described, train, rules, False, dataclasses.replace(changes, lr=0.1))
    assert one_rate.name == "one learning rate"


LOUD = CUSTOM_RULE.replace("0.5 * self.C0 / norm.clamp(min=1.0)", "0 * norm + 1e3")


def test_a_rule_that_breaks_its_bound_is_not_called_sound(splits, root, tmp_path, here):
    path = tmp_path / "loud.py"
    path.write_text(LOUD)
    loud = evenclip.compare(
        splits, ["dpsgd", f"{path}:Half"], 1, epochs=1, batch_size=60, epsilon=2.0, delta=1e-4,
        model="linear", store=root, on=here,
    )  # fmt: skip
    assert (loud["dpsgd"].soundness, loud["half"].soundness) == (SOUND, ENFORCED)
    assert loud["half"].statement["soundness"] == ENFORCED
    assert loud.private["half"]["clamped_weights"] > 0
    assert loud.private["dpsgd"]["clamped_weights"] == 0
    privacy = loud.to_json()["privacy"]
    assert {name: one["sound"] for name, one in privacy.items()} == {
        "non-private": False, "dpsgd": True, "half": False,
    }  # fmt: skip
    assert privacy["half"]["soundness"] == ENFORCED
    (note,) = loud.private_notes
    assert note.startswith(f"half: {loud.private['half']['clamped_weights']:,} weights were above")
    assert "its declared sensitivity and were reduced to it" in note
    assert ENFORCED in loud.table()
    assert max(map(len, loud.table().splitlines())) <= 80


@pytest.mark.parametrize(
    ("soundness", "epsilon", "sound"),
    [
        (SOUND, 2.0, True), (REPAIRED, 2.0, True), (ENFORCED, 2.0, False), (NO_EPSILON, 2.0, False),
        (SOUND, None, False), ("any other words", 2.0, False),
    ],
)  # fmt: skip
def test_only_a_proved_bound_is_sound_in_json(found, soundness, epsilon, sound):
    changed = dataclasses.replace(
        found["dpsgd"], soundness=soundness, epsilon={"pld": epsilon, "rdp": epsilon}
    )
    outcomes = tuple(changed if o.name == "dpsgd" else o for o in found.outcomes)
    assert (
        dataclasses.replace(found, outcomes=outcomes).to_json()["privacy"]["dpsgd"]["sound"]
        is sound
    )


def test_a_custom_rule_that_keeps_its_bound_is_not_sound_in_json(splits, root, tmp_path, here):
    path = tmp_path / "quiet.py"
    path.write_text(CUSTOM_RULE)
    quiet = evenclip.compare(
        splits, [f"{path}:Half"], 1, epochs=1, batch_size=60, epsilon=2.0, delta=1e-4,
        model="linear", store=root, on=here,
    )  # fmt: skip
    assert quiet.private["half"]["clamped_weights"] == 0
    assert quiet.private_notes == ()
    assert quiet.to_json()["privacy"]["half"]["sound"] is False


def test_rules_with_settings_of_ones_own(splits, root, here):
    rules = [DPSGD(C0=0.5, sigma=2.0), DPSGDGlobalAdapt(C0=0.5, sigma=2.0)]
    found = evenclip.compare(
        splits, rules, 1, epochs=1, batch_size=60, delta=1e-4, model="linear", store=root, on=here
    )
    assert found["dpsgd"].lr == pytest.approx((0.2,))
    assert "sigma=2.0" in found["dpsgd"].rule
    with pytest.raises(ValueError, match="The rule 'dpsgd' is given twice"):
        evenclip.compare(splits, [DPSGD(), "dpsgd"], 1, store=root)


class Elsewhere:
    """An executor with a GPU, which is a CPU."""

    def __init__(self):
        self.specs = []

    def check_device(self, device):
        assert device == "cuda"

    def carry_out(self, specs, store, show):
        self.specs += specs
        for spec in specs:
            store.write(spec, *work.work(dataclasses.replace(spec, device="cpu"), lambda t: None))
        return []


@pytest.mark.parametrize("tf32", [False, True])
def test_products_are_rounded_where_that_is_allowed_and_it_is_said(tf32, splits, tmp_path):
    given = {
        "epochs": 1,
        "batch_size": 60,
        "delta": 1e-4,
        "model": "linear",
        "device": "cuda",
        "store": tmp_path,
    }
    found = evenclip.compare(splits, ["dpsgd"], 1, **given, tf32=tf32, on=(executor := Elsewhere()))
    assert len(executor.specs) > 2  # those that choose the learning rate too
    assert {spec.tf32 for spec in executor.specs} == {tf32}
    assert ("products in TF32" in found.table()) is tf32
    _, run = work.prepared(dataclasses.replace(executor.specs[0], device="cpu"))
    assert run.performance.tf32 is tf32


class Planned(Exception):  # noqa: N818
    """Raised with the requested runs, so that none is trained."""


class Plans:
    """An executor that raises `Planned` instead of training."""

    def check_device(self, device):
        pass

    def carry_out(self, specs, store, show):
        raise Planned(specs)


@pytest.mark.parametrize(
    ("data", "model", "rules"),
    [
        ("adult", "mlp", ["non-private", "dpsgd", "dpsgd-f", "dpsgd-global", "dpsgd-global-adapt"]),
        (
            "digits",
            "cnn",
            ["non-private", "dpsgd", "dpsgd-f", "dpsgd-global", "dpsgd-global-adapt"],
        ),
    ],
)
def test_a_dataset_brings_its_model_and_every_bounded_rule_is_compared(
    data, model, rules, tmp_path
):
    """FairLens has published settings on Adult, no bound, and is trained only if it is named."""
    with pytest.raises(Planned) as planned:
        evenclip.compare(data, seeds=1, lr=0.1, store=tmp_path, on=Plans())
    (specs,) = planned.value.args
    assert [spec.rule["name"] for spec in specs] == rules
    assert {spec.model["name"] for spec in specs} == {model}


def test_many_groups_go_below_each_other(tmp_path, here):
    data = Splits(part(600, 0, 6), part(300, 1, 6))
    found = evenclip.compare(
        data,
        ["dpsgd"],
        2,
        epochs=1,
        batch_size=60,
        delta=1e-4,
        model="linear",
        lr=0.1,
        store=tmp_path,
        on=here,
    )
    assert max(len(line) for line in found.table().splitlines()) <= 80
    costs = found.privacy_cost("dpsgd")
    assert np.allclose(found.gap(costs), costs.max(axis=1) - costs.min(axis=1))


BAD = {
    "seeds is 0; it must be a whole number of at least 1.": {"seeds": 0},
    "epsilon is -1.0; it must be a finite number above 0.": {"epsilon": -1.0},
    "There is no model 'resnet'": {"model": "resnet"},
    "The batch size is 5000 and there are 600 training rows; give a --batch-size of at most 600.": {
        "batch_size": 5000
    },
    "There is no rule 'dp'": {"rules": ["dp"]},
    "tf32 is for a GPU; give cuda as the device with it, or leave it out.": {"tf32": True},
}


@pytest.mark.parametrize("says", BAD)
def test_bad_values(says, splits, root):
    with pytest.raises(ValueError, match=re.escape(says)):
        evenclip.compare(splits, **({"seeds": 1} | BAD[says]), store=root)


def test_one_group_or_one_class_is_nothing_to_compare(splits, root):
    alone = Dataset(splits.train.x, splits.train.y, None, (), ("no", "yes"), "made")
    with pytest.raises(
        ValueError, match="The data have one group only; a comparison needs at least two"
    ):
        evenclip.compare(Splits(alone, alone), store=root)
    same = Dataset(
        splits.train.x,
        torch.zeros_like(splits.train.y),
        splits.train.group,
        ("a", "b"),
        ("no", "yes"),
        "made",
    )
    with pytest.raises(ValueError, match="The training rows have one class only"):
        evenclip.compare(Splits(same, same), store=root)


def test_a_store_given_as_a_path_is_one(root):
    assert Store(root).root.is_dir()


def test_the_published_steps_are_kept_unless_the_data_are_others(root):
    kept, said = paced(PUBLISHED["adult"], 23_650, named=True)  # 93 batches: within 5 %
    assert (kept.batches, said) == (92, [])
    other, said = paced(PUBLISHED["celeba"], 8_000, named=True)
    assert other.batches == 32
    assert said == [
        "There are 8,000 training records, so an epoch has 32 steps and not the published 636."
    ]
    assert paced(for_table(), 5_000, named=False)[0].batches is None
    assert paced(for_table(), 5_000, named=True)[0].batches == 20


def test_a_rule_that_does_not_apply_is_left_out_with_a_sentence(splits, root, tmp_path, here):
    path = tmp_path / "picky.py"
    path.write_text(
        CUSTOM_RULE.replace('"half"', '"picky"')
        + "    def unsuited(self, groups, classes):\n        return f'it needs three groups, and "
        "there are {groups}.'\n"
    )
    found = evenclip.compare(
        splits,
        ["dpsgd", f"{path}:Half"],
        1,
        epochs=1,
        batch_size=60,
        delta=1e-4,
        model="linear",
        lr=0.1,
        store=root,
        on=here,
    )
    assert [o.name for o in found.outcomes] == ["non-private", "dpsgd"]
    assert "picky is left out: it needs three groups, and there are 2." in found.notes
    assert "picky is left out" in found.table()


def test_a_delta_that_promises_nothing_is_said(splits, root, here):
    found = evenclip.compare(
        splits,
        ["dpsgd"],
        1,
        epochs=1,
        batch_size=60,
        delta=0.5,
        model="linear",
        lr=0.1,
        store=root,
        on=here,
    )
    assert (
        "δ is 0.5, not below 1/n = 1.7e-03: publishing one whole record would satisfy it."
        in found.notes
    )


def test_a_group_too_small_to_judge_is_left_out_of_gaps_if_two_others_remain(found):
    three = dataclasses.replace(found, groups=("a", "b", "c"), small=("c",))
    values = np.array([[1.0, 3.0, 90.0], [2.0, 2.5, -90.0]])
    assert three.gap(values).tolist() == [2.0, 0.5]
    assert dataclasses.replace(three, small=()).gap(values).tolist() == [89.0, 92.5]
    assert dataclasses.replace(three, small=("b", "c")).gap(values).tolist() == [
        89.0,
        92.5,
    ]  # there is no other gap
    assert dataclasses.replace(three, pair=("a", "c")).gap(values).tolist() == [89.0, 92.0]
