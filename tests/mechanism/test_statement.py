"""The privacy report: the ε of stopped and extended runs, the release, and the text."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import evenclip
from evenclip import DPSGD, DPSGDGlobalAdapt, NonPrivate, Rule, models
from evenclip.mechanism import accounting, statement
from evenclip.mechanism.correction import SamplerError
from evenclip.mechanism.ledger import Entry, Ledger
from evenclip.mechanism.rounding import covered_records
from evenclip.mechanism.settings import Settings
from evenclip.mechanism.statement import Facts, paragraph, report
from evenclip.rules import ENFORCED
from evenclip.training.fit import prepare, result

Q, T, DELTA = 0.01, 200, 1e-6
SAME = 20  # steps with the same noise by `Decays`: an ε of 200 kinds of step takes long


def settings_of(rule: Rule, steps: int = T) -> Settings:
    return Settings(
        rule=rule, n=5000, groups=2, q=Q, B=50.0, steps=steps, epoch=20, delta=DELTA, lr=0.1,
        optimizer="SGD", seed=None, parameters=1000,
    )  # fmt: skip


def ledger_of(rule: Rule, steps: int) -> Ledger:
    ledger = Ledger()
    for t in range(steps):
        given = rule.multipliers(t)
        sizes = {name: 1000 if name == "gradient" else 1 for name in given}
        ledger.write(Q, given, sizes, 1e-30, "a" * 32, t)
    return ledger


@dataclass(frozen=True)
class Decays(Rule):
    """DPSGD with less noise every `SAME` steps."""

    name: ClassVar[str] = "decays"
    sigma: float = 1.0

    def multipliers(self, t=0):
        return {"gradient": self.sigma * (1.5 - t // SAME * SAME / T)}

    def sensitivity(self, now):
        return 1.0

    def weight(self, norm, group, now):
        return (1.0 / norm).clamp(max=1.0)


RULES = [DPSGD(), DPSGDGlobalAdapt(), Decays()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("taken", [1, 150, T])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_stopping_early_keeps_the_epsilon_of_the_declared_steps(rule, taken, accountant):
    settings, whole = settings_of(rule), ledger_of(rule, T)
    stopped = statement.epsilon(settings, ledger_of(rule, taken), accountant)
    assert stopped == pytest.approx(accounting.epsilon(whole, DELTA, accountant), rel=1e-9)
    if taken < T:
        assert stopped > accounting.epsilon(ledger_of(rule, taken), DELTA, accountant)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_steps_beyond_the_declared_ones_are_paid(rule):
    """A draw that was repeated is paid in addition to all declared steps."""
    ledger = ledger_of(rule, T)
    ledger.write(Q, rule.multipliers(0), dict(ledger.entries[0].sizes), 1e-30, "a" * 32, T)
    found = statement.epsilon(settings_of(rule), ledger)
    assert found == accounting.epsilon(ledger, DELTA)
    assert found > statement.epsilon(settings_of(rule), ledger_of(rule, T))


def test_a_repeated_draw_does_not_replace_another_kind_of_step():
    """A draw too many of the first kind of step leaves all of the other kinds declared."""
    rule = Decays()
    ledger = Ledger()
    for t in range(SAME + 1):
        ledger.write(Q, rule.multipliers(0), {"gradient": 1000}, 1e-30, "a" * 32, t)
    covered = statement.declared(settings_of(rule), ledger)
    assert covered.steps == T + 1
    planned = Counter(rule.multipliers(t)["gradient"] for t in [0, *range(T)])
    drawn = Counter[float]()
    for entry in covered.entries:
        drawn[dict(entry.multipliers)["gradient"]] += entry.steps
    assert drawn == planned


def test_a_run_without_a_step_has_released_nothing():
    assert statement.epsilon(settings_of(DPSGD()), Ledger()) == 0


@pytest.mark.parametrize(
    ("taken", "words"),
    [
        (50, "200 steps were declared and 50 drawn; ε is that of all declared steps"),
        (T, None),
        (T + 7, "200 steps were declared and 207 drawn: the run was extended"),
    ],
)
def test_the_report_says_which_steps_epsilon_belongs_to(taken, words):
    made = report(settings_of(DPSGD()), ledger_of(DPSGD(), taken))
    assert (made["steps"], made["declared_steps"]) == (taken, T)
    assert made["epsilon"] == statement.epsilon(settings_of(DPSGD()), ledger_of(DPSGD(), taken))
    text = " ".join(paragraph(made).split())
    if words is None:
        assert made["steps_note"] is None
        assert "steps were declared" not in text
    else:
        assert made["steps_note"].startswith(words)
        assert f"{words[0].upper()}{words[1:]}" in text


def test_multipliers_that_depend_on_the_step_are_a_range():
    """From 1.5 in the first step to 0.6 in the last, drawn or declared; not the last one's."""
    for taken in (T, 20):
        made = report(settings_of(Decays()), ledger_of(Decays(), taken))
        assert made["multipliers"] == {"gradient": [0.6, 1.5]}
        assert made["joint_multiplier"] == [0.6, 1.5]
        assert "noise multipliers 0.6 to 1.5 (gradient), jointly 0.6 to 1.5;" in " ".join(
            paragraph(made).split()
        )
        assert json.loads(json.dumps(made)) == made


def test_multipliers_that_are_equal_in_all_steps_are_one_number():
    made = report(settings_of(DPSGDGlobalAdapt()), ledger_of(DPSGDGlobalAdapt(), 3))
    assert made["multipliers"] == {"count": 10.0, "gradient": 1.0}
    assert made["joint_multiplier"] == pytest.approx(1.01**-0.5)
    assert "noise multipliers 10 (count), 1 (gradient), jointly 0.995;" in " ".join(
        paragraph(made).split()
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_bound_is_enforced_and_how_often_is_not_said(rule):
    """Soundness is a property of the rule's class; whether weights were clamped is private."""
    made = report(settings_of(rule), ledger_of(rule, 5))
    assert made["soundness"] == (ENFORCED if type(rule) is Decays else rule.soundness)
    assert made["bound_enforced"].startswith("on every weight")
    assert "clamped_weights" not in made
    assert "The rule's bound is enforced on every weight, before the sum; how often that was" in (
        " ".join(paragraph(made).split())
    )


def test_epsilon_is_that_of_the_encoder_as_given():
    made = report(settings_of(DPSGD()), ledger_of(DPSGD(), T))
    assert made["encoder_declared"] is None
    text = " ".join(paragraph(made).split())
    assert "Encoder: ε holds for the encoder as given. Scaling, vocabularies and names" in text
    assert "need an encoder that is declared or fitted privately." in text
    declared = " ".join(paragraph(made | statement.encoder(True)).split())
    assert "Encoder: ε holds for the encoder as given, which is declared: the trainer" in declared
    fitted = statement.encoder(False)
    assert (fitted["encoder"], fitted["encoder_declared"]) == (made["encoder"], False)


def test_without_a_step_there_are_no_multipliers():
    made = report(settings_of(DPSGD()), Ledger())
    assert (made["multipliers"], made["joint_multiplier"]) == ({}, None)


def test_what_the_sampler_takes_is_in_the_report_and_in_epsilon():
    rule = DPSGDGlobalAdapt()
    settings, ledger = settings_of(rule), ledger_of(rule, T)
    made = report(settings, ledger)
    sampler = made["sampler"]
    assert sampler["pairs"] == T * (500 + 1)
    assert (sampler["lambda"], sampler["beta"], sampler["c"]) == (2.0**-37, 2.0**-75, 2.0**-48)
    assert sampler["tau"] == pytest.approx(T * 1e-30)
    n, lam = sampler["pairs"], sampler["lambda"]
    by_hand = n * lam**2 / 2 + lam * math.sqrt(2 * n * math.log(1 / sampler["delta_s"]))
    assert sampler["epsilon_s"] == pytest.approx(by_hand, rel=1e-9)
    ideal = Ledger([replace(entry, sizes=(), tau=0.0) for entry in ledger.entries])
    above = made["epsilon"] - accounting.epsilon(ideal, DELTA)
    assert above >= 2 * sampler["epsilon_s"] * 0.99
    assert json.loads(json.dumps(made, allow_nan=False)) == made


def test_what_the_sampler_takes_is_of_all_declared_steps():
    made = report(settings_of(DPSGD()), ledger_of(DPSGD(), 10))
    assert made["sampler"]["pairs"] == SamplerError.of(ledger_of(DPSGD(), T).entries).pairs


def test_the_facts_of_the_run_are_in_the_text():
    facts = Facts(
        independence="tested: no test saw it",
        company="samples pass in blocks of 64",
        rounding=1e-4,
        durable=True,
    )
    made = report(settings_of(DPSGD()), ledger_of(DPSGD(), T), facts)
    assert made["bound_inflation"] == pytest.approx(1e-4 + 2.0**-16)
    text = " ".join(paragraph(made).split())
    assert "The noise is enlarged by at most 0.012 % for the rounding of sums." in text
    assert "Tested: no test saw it. Samples pass in blocks of 64." in text
    assert "The ledger covers all attempts: every step was on disk" in text
    assert "AES-256 in counter mode" in text
    assert "computational: against anyone who does not know the key" in text
    alone = report(settings_of(DPSGD()), ledger_of(DPSGD(), T))
    assert alone["ledger_covers"].startswith("this attempt only")


def test_runs_and_their_parents_are_named():
    first = Entry(Q, (("gradient", 1.0),), 100, (("gradient", 10),), run="a")
    branch = replace(first, run="b", parent=("a", 100))
    waiting = replace(branch, first=100, steps=3, reserved=True)
    made = report(settings_of(DPSGD()), Ledger([first, branch, waiting]))
    assert made["runs"] == ["a", "b"]
    assert made["parents"] == ["draw 100 of run a"]
    assert made["reserved_steps"] == 3


def test_without_an_epsilon_nothing_is_claimed():
    made = report(
        replace(settings_of(NonPrivate()), q=None),
        Ledger([Entry(None, (("gradient", 0.0),), T)]),
        Facts(rounding=0.0),
    )
    names = ("epsilon", "epsilon_rdp", "sampler", "bound_inflation", "steps_note")
    assert [made[name] for name in names] == [None] * 5
    assert "PCG64" in made["random_generator"]
    assert "computational" not in paragraph(made)


def test_neighbours_are_those_that_the_bound_on_rounding_covers():
    """`covered_records` leaves room for one record more, and the stated relation says so."""
    made = report(settings_of(DPSGD()), ledger_of(DPSGD(), T))
    assert "neither dataset has more than 2B/q records" in made["neighbouring_relation"]
    for q, B in ((1.0, 100.0), (256 / 23484, 256.0), (1e-4, 0.5)):
        assert covered_records(q, B) + 1 <= 2 * B / q


# --- whole runs ---------------------------------------------------------------------------------


def test_a_loop_that_stops_early_states_the_declared_steps():
    data = (torch.randn(60, 3), torch.arange(60) % 2)
    options = {"rule": DPSGD(), "batch_size": 12, "epochs": 2, "delta": 1e-4, "seed": 3}
    run = prepare(nn.Linear(3, 2), data, **options)
    with run.listening():
        for _ in range(4):
            run.update(run.step())
    stopped = result(run)
    whole = evenclip.fit(nn.Linear(3, 2), data, **options)
    assert (stopped.ledger.steps, whole.ledger.steps) == (4, 10)
    assert stopped.epsilon() == pytest.approx(whole.epsilon(), rel=1e-12)
    assert "4 drawn" in stopped.privacy["steps_note"]
    assert whole.privacy["steps_note"] is None


def stopped_after_two_draws_for_each_update(rule, updates, more=0):
    data = (torch.randn(60, 3), torch.arange(60) % 2)
    run = prepare(nn.Linear(3, 2), data, rule=rule, batch_size=12, epochs=4, delta=1e-4)
    with run.listening():
        for _ in range(updates):
            run.step()
            run.update(run.step())
        for _ in range(more):
            run.update(run.step())
    return result(run)


@pytest.mark.parametrize("rule", [DPSGD(), Decays()], ids=lambda rule: rule.name)
def test_repeated_draws_do_not_stand_for_declared_steps(rule):
    """A run that went on would have cost more, so stopping it costs as much."""
    stopped = stopped_after_two_draws_for_each_update(rule, 10)
    whole = stopped_after_two_draws_for_each_update(rule, 10, more=10)
    assert (stopped.ledger.steps, whole.ledger.steps) == (20, 30)
    assert stopped.epsilon() == pytest.approx(whole.epsilon(), rel=1e-12)
    assert stopped.privacy["epsilon"] == stopped.epsilon()
    assert stopped.privacy["steps_note"] == (
        "20 steps were declared, 20 drawn (some were repeated or interrupted), and 10 not taken; ε "
        "is that of all 30, because stopping early may depend on the results"
    )
    assert sum(row["steps"] for row in stopped.privacy["remaining"]) == 10
    assert whole.privacy["remaining"] == []


@pytest.mark.parametrize("kept", [True, False])
def test_only_a_ledger_on_disk_covers_all_attempts(kept, tmp_path):
    data = (torch.randn(60, 3), torch.arange(60) % 2)
    folder = {"checkpoint": tmp_path / "kept"} if kept else {}
    whole = evenclip.fit(nn.Linear(3, 2), data, rule=DPSGD(), batch_size=12, **folder)
    covers = whole.privacy["ledger_covers"]
    assert covers.startswith("all attempts" if kept else "this attempt only")
    assert whole.privacy["runs"] == [whole.ledger.entries[0].run]


def test_steps_that_an_attempt_may_have_taken_are_in_the_report(tmp_path):
    """A run that is stopped after its checkpoint, and resumed, costs the steps in between too."""
    data = (torch.randn(60, 3), torch.arange(60) % 2)
    options = {"rule": DPSGD(), "batch_size": 12, "epochs": 4, "delta": 1e-4}
    kept = {"checkpoint": tmp_path, "checkpoint_every": 6}

    def stop(step):
        if step.t == 8:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        evenclip.fit(nn.Linear(3, 2), data, **options, **kept, observers=[stop])
    made = evenclip.fit(nn.Linear(3, 2), data, **options, **kept, resume=True)
    report = made.privacy
    assert (report["declared_steps"], report["steps"]) == (20, 23)  # draws 6, 7 and 8 twice
    assert len(report["runs"]) == 2
    assert report["parents"] == [f"draw 6 of run {report['runs'][0]}"]
    assert "20 steps were declared and 23 drawn" in report["steps_note"]
    assert report["epsilon"] > evenclip.fit(nn.Linear(3, 2), data, **options).epsilon()


NETWORKS = {  # of the paper: model, shape of a sample, classes, expected batch size
    "adult": (lambda: models.mlp(98, 2), (98,), 2),
    "dutch": (lambda: models.sigmoid_then_softmax(59, 2), (59,), 2),
    "mnist": (lambda: models.cnn(channels=1, side=28, classes=10), (1, 28, 28), 10),
    "celeba": (lambda: models.cnn(channels=3, side=64, classes=2), (3, 64, 64), 2),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_the_noise_of_the_papers_networks_grows_by_less_than_one_per_cent(network):
    """The bound depends on the expected batch size q·n = 256, not on n, so few samples do."""
    make, shape, classes = NETWORKS[network]
    data = (torch.zeros(512, *shape), torch.arange(512) % classes)
    run = prepare(make(), data, rule=DPSGDGlobalAdapt(), batch_size=256, epochs=1, seed=0)
    with run.listening():
        run.update(run.step())
    made = result(run).privacy
    assert 2.0**-16 <= made["bound_inflation"] < 0.01
