"""Runs that are alike, in bundles: computed together where that is quicker, and each the run it would be alone."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from evenclip.program import NoProgram
from evenclip.runs import Local, Store, carry_out, together, work, worker
from evenclip.runs.together import PLAIN, How, bundles, choose

STACKED, TURNS = How(together=True, compiled=False), How(together=False, compiled=False, turns=3)
RULES = (
    {"name": "dpsgd", "options": {"C0": 1.0, "sigma": 1.0}},
    {"name": "dpsgd-f", "options": {"C0": 1.0, "sigma": 1.0}},
    {"name": "dpsgd-global-adapt", "options": {"C0": 1.0, "sigma": 1.0}},
    {"name": "non-private"},
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of this test's own."""
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- bundles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 100])
def test_every_run_is_in_one_bundle_and_with_its_like(spec, workers):
    """Alike: all but seed, rule and learning rate. The larger batches cannot be computed with the smaller ones."""
    specs = [
        spec(seed, rule, batch_size=size, lr=lr)
        for seed, rule, size, lr in itertools.product(range(3), RULES, (20, 25), (0.1, 0.2))
    ]
    found = bundles(specs, workers)
    assert Counter(one.hash for bundle in found for one in bundle) == Counter(one.hash for one in specs)
    assert all(bundle for bundle in found)
    for bundle in found:
        assert len({one.batch_size for one in bundle}) == 1
    sizes = Counter(bundle[0].batch_size for bundle in found)
    assert sizes == {20: min(workers, 24), 25: min(workers, 24)}
    lengths = {len(bundle) for bundle in found}
    assert max(lengths) - min(lengths) <= 1  # nobody waits for one that has much more to do


@pytest.mark.parametrize(
    "change",
    [{"epochs": 2}, {"batch_size": 25}, {"q": 0.1}, {"delta": 1e-5}, {"device": "cuda"}, {"tf32": True}],
    ids=lambda change: next(iter(change)),
)
def test_runs_that_differ_in_more_are_kept_apart(spec, change):
    found = bundles([spec(0), spec(0, **change), spec(1), spec(1, **change)], 1)
    assert sorted(len(bundle) for bundle in found) == [2, 2]
    assert all(
        len({(one.epochs, one.batch_size, one.q, one.delta, one.device, one.tf32) for one in b}) == 1 for b in found
    )


def test_on_a_gpu_a_bundle_is_of_one_rule(spec):
    """Each is compiled once, whatever the number of workers."""
    specs = [spec(seed, rule, device="cuda") for seed in range(3) for rule in RULES]
    for workers in (1, 2, 16):
        found = bundles(specs, workers)
        assert sorted(len(bundle) for bundle in found) == [3, 3, 3, 3]
        assert all(len({one.rule["name"] for one in bundle}) == 1 for bundle in found)


def test_what_cannot_be_stacked_is_spread_over_the_workers(spec):
    """On a GPU too: it waits for its own process most of the time."""
    for device in ("cpu", "cuda"):
        specs = [spec(seed, {"name": "fairlens"}, device=device) for seed in range(5)]
        assert sorted(len(bundle) for bundle in bundles(specs, 3)) == [1, 2, 2]
        assert len(bundles(specs, 16)) == 5


def test_a_bundle_has_few_rules(spec):
    """Runs of one rule are one call; and neighbours in the list, a plain rule and its adaptive kin, share a bundle."""
    specs = [spec(seed, rule) for seed in range(5) for rule in RULES]
    found = bundles(specs, 2)
    assert [{one.rule["name"] for one in b} for b in found] == [
        {"dpsgd", "dpsgd-f"},
        {"dpsgd-global-adapt", "non-private"},
    ]
    assert all(len({one.rule["name"] for one in bundle}) <= 2 for bundle in bundles(specs, 3))


def test_nothing_to_do_is_no_bundle():
    assert bundles([], 4) == []


# --- which way --------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Says how long steps take, and how often it was asked."""

    class Clock:
        asked, alone, together, call = 0, 1.0, 1.0, 1e-6

    def seconds(name):
        def timed(*_, **__):
            Clock.asked += 1
            return getattr(Clock, name)

        return timed

    monkeypatch.setattr(together, "_time_alone", seconds("alone"))
    monkeypatch.setattr(together, "_time_together", seconds("together"))
    monkeypatch.setattr(together, "_time_call", lambda: Clock.call)
    return Clock


def many(spec, epochs=600):
    """Two runs of every rule, 12000 steps each if not said otherwise."""
    return [spec(seed, rule, epochs=epochs) for rule in RULES for seed in (0, 1)]


def test_a_few_steps_are_taken_alone_and_not_measured(spec, clock):
    assert choose([spec(seed) for seed in range(4)]) == PLAIN
    assert clock.asked == 0


def test_what_is_quicker_is_chosen(spec, clock):
    clock.alone, clock.together = 1e-4, 9e-4  # eight runs: 8e-4 a step alone
    assert not choose(many(spec)).together
    assert clock.asked == 2


def test_what_is_quicker_together_is_done_together(spec, clock):
    clock.alone, clock.together = 1e-4, 2e-4
    assert choose(many(spec)).together


@pytest.mark.parametrize(("alone", "asked"), [(1.4e-3, 2), (1.6e-3, 1)])
def test_a_step_that_is_more_than_calls_is_not_tried_together(spec, clock, alone, asked):
    """Trying takes seconds, and hours where a step takes one; in the end it would be slower."""
    clock.alone, clock.together = alone, 1e-4
    assert choose(many(spec)).together == (asked == 2)
    assert clock.asked == asked


def test_on_a_gpu_it_is_tried_however_long_a_step_takes(spec, clock, monkeypatch):
    """Where little is computed at a time, more of it costs nothing."""
    prepared = together.prepared
    monkeypatch.setattr(together, "prepared", lambda one: prepared(replace(one, device="cpu")))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"none, in place of {device}")
    clock.alone, clock.together = 1.0, 1e-4
    assert choose([replace(one, device="cuda") for one in many(spec)]).together


def test_compiling_has_to_pay_for_itself(spec, clock):
    """At the same time a step: two seconds of computing are not worth it, a quarter of an hour is."""
    clock.alone, clock.together = 1e-3, 2e-3
    assert choose(many(spec, 100)) == How(together=True, compiled=False)
    assert choose(many(spec, 45000)) == How(together=True, compiled=True)


def test_it_is_measured_once(spec, clock, cache):
    clock.alone, clock.together = 1e-4, 2e-4
    first = choose(many(spec))
    asked = clock.asked
    assert asked > 0
    clock.alone, clock.together = 1.0, 1e9  # would be another answer
    assert choose(many(spec)) == first
    assert clock.asked == asked
    assert list(cache.rglob("*.json"))


def test_other_rules_are_measured_for_themselves(spec, clock):
    choose(many(spec))
    asked = clock.asked
    choose(many(spec)[:6])
    assert clock.asked > asked


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"alone": 1}', '{"alone": "x", "together": 1}', "\x00"])
def test_a_spoilt_measurement_is_made_again(spec, clock, cache, content):
    clock.alone, clock.together = 1e-4, 2e-4
    first = choose(many(spec))
    for path in cache.rglob("*.json"):
        path.write_text(content)
    asked = clock.asked
    assert choose(many(spec)) == first
    assert clock.asked > asked


def test_a_cache_that_cannot_be_written_is_no_obstacle(spec, clock, cache):
    clock.alone, clock.together = 1e-4, 2e-4
    cache.mkdir()
    (cache / "measured").write_text("a file where the folder should be")
    assert choose(many(spec)).together


def test_a_real_measurement_is_in_seconds(spec):
    """Nothing is replaced: it answers, and steps of a toy take between a microsecond and a second."""
    specs = many(spec)[:3]
    for seconds in (together._time_alone(specs[0]), together._time_together(specs)):
        assert 1e-6 < seconds < 1.0


def test_what_cannot_be_computed_together_takes_forever(spec, monkeypatch):
    def refuse(*_, **__):
        raise NoProgram("not these")

    monkeypatch.setattr("evenclip.stack.Stack.__init__", refuse)
    assert together._time_together(many(spec)[:3]) == float("inf")


# --- a line for several runs ------------------------------------------------------------------------------------------


def task(specs, store):
    """A line for a worker."""
    return {"specs": [s.to_json() for s in specs], "hashes": [s.hash for s in specs], "root": str(store.root)}


def said(specs, store):
    """What a worker says to them, without how far it is."""
    events = []
    worker.carry_out(json.loads(json.dumps(task(specs, store))), lambda **event: events.append(event))
    return [event for event in events if event["event"] != "step"]


def test_each_run_of_a_line_is_done_failed_or_busy(store, spec):
    done, bad, busy, foreign = spec(0), spec(1, lr=-1.0), spec(2), spec(3)
    line = task([done, bad, busy, foreign], store)
    line["hashes"][3] = "of other code"
    events = []
    with store.claim(busy) as mine:
        assert mine
        worker.carry_out(line, lambda **event: events.append(event))
    found = {event["i"]: event for event in events if event["event"] != "step"}
    assert {i: event["event"] for i, event in found.items()} == {0: "done", 1: "failed", 2: "busy", 3: "failed"}
    assert found[1]["why"] == "lr is -1.0; it must be a finite number above 0."
    assert "Traceback" in found[1]["trace"]
    assert found[3]["why"] == "the package was changed while the command ran; start it again"
    assert store.has(done)
    assert not any(map(store.has, (bad, busy, foreign)))
    assert said([done], store) == [{"event": "done", "i": 0}]  # already there


def test_a_worker_answers_line_by_line(store, spec, cache):
    """The process itself: two lines in, one answer for each run out, and nothing else on its output."""
    lines = [task([spec(0), spec(1)], store), task([spec(2), spec(0)], store)]
    given = "".join(json.dumps(line) + "\n" for line in lines)
    found = subprocess.run(
        [sys.executable, "-m", "evenclip.runs.worker"], input=given, capture_output=True, text=True, check=True
    )
    events = [json.loads(line) for line in found.stdout.splitlines()]
    ends = [(event["event"], event["i"]) for event in events if event["event"] != "step"]
    assert sorted(ends[:2]) == sorted(ends[2:]) == [("done", 0), ("done", 1)]
    assert all(store.has(spec(seed)) for seed in range(3))


@pytest.fixture
def force(monkeypatch):
    """Makes a way the chosen one, and counts stacks."""
    stacks = []
    whole = work.work_together

    def watched(specs, report, **more):
        stacks.append(len(specs))
        return whole(specs, report, **more)

    monkeypatch.setattr(work, "work_together", watched)

    def make(how):
        monkeypatch.setattr(together, "choose", lambda specs: how)
        return stacks

    return make


@pytest.mark.parametrize("together", [STACKED, TURNS], ids=["stacked", "in turns"])
def test_results_of_a_bundle_are_those_of_each_alone(spec, tmp_path, force, together):
    specs = [spec(seed, rule, lr=0.1 + 0.1 * seed, epochs=2) for rule in RULES for seed in (0, 1)]
    stores = {how: Store(tmp_path / f"{how is PLAIN}") for how in (PLAIN, together)}
    for how, store in stores.items():
        stacks = force(how)
        answers = said(specs, store)
        assert sorted((event["event"], event["i"]) for event in answers) == [("done", i) for i in range(8)]
    assert stacks == ([8] if together is STACKED else [3, 3, 2])
    for one in specs:
        alone, bundled = (store.read(one) for store in stores.values())
        assert alone.keys() == bundled.keys()
        for name in alone.keys() - {"seconds"}:
            close(alone[name], bundled[name], name)
        assert bundled["seconds"] > 0


def close(one, other, where):
    """The same values throughout, floats of float32 training to rounding."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            close(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            close(a, b, f"{where}[{i}]")
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5), where
    else:
        assert one == other, where


@pytest.mark.parametrize("at", ["making it", "a step"])
def test_a_stack_that_raises_is_given_up_for_runs_alone(store, spec, force, monkeypatch, at):
    def broken(*_, **__):
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(f"evenclip.stack.Stack.{'__init__' if at == 'making it' else 'step'}", broken)
    stacks = force(STACKED)
    assert said([spec(0), spec(1)], store) == [{"event": "done", "i": 0}, {"event": "done", "i": 1}]
    assert stacks
    assert store.has(spec(0))
    assert store.has(spec(1))


def test_a_choice_that_raises_is_given_up_for_runs_alone(store, spec, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no clock")

    monkeypatch.setattr(together, "choose", broken)
    assert said([spec(0), spec(1)], store) == [{"event": "done", "i": 0}, {"event": "done", "i": 1}]


def test_one_bad_run_in_a_bundle_does_not_cost_the_others(store, spec, force):
    """Its own sentence for the one, results for the others."""
    stacks = force(STACKED)
    specs = [spec(0), spec(1, lr=-1.0), spec(2)]
    found = {event["i"]: event for event in said(specs, store)}
    assert {i: event["event"] for i, event in found.items()} == {0: "done", 1: "failed", 2: "done"}
    assert found[1]["why"] == "lr is -1.0; it must be a finite number above 0."
    assert stacks


def test_a_result_that_cannot_be_written_is_told_of_its_run(store, spec, force, monkeypatch):
    force(STACKED)
    write, bad = Store.write, spec(1).hash

    def full(self, spec, *rest):
        if spec.hash == bad:
            raise OSError(28, "No space left on device")
        write(self, spec, *rest)

    monkeypatch.setattr(Store, "write", full)
    found = {event["i"]: event for event in said([spec(0), spec(1), spec(2)], store)}
    assert {i: event["event"] for i, event in found.items()} == {0: "done", 1: "failed", 2: "done"}
    assert "No space left" in found[1]["why"]


# --- two commands -----------------------------------------------------------------------------------------------------


def test_a_busy_run_of_a_bundle_is_looked_at_again(store, spec, told, monkeypatch):
    """Somebody else computes one of two: the other is done at once, and the one is read when it is there."""
    specs = [spec(0), spec(1)]
    result, weights = work.work(specs[0], lambda t: None)
    sleep = []

    def later(seconds):
        sleep.append(seconds)
        if not store.has(specs[0]):
            store.write(specs[0], result, weights)

    monkeypatch.setattr("evenclip.runs.local.time.sleep", later)
    with store.claim(specs[0]) as mine:
        assert mine
        found = carry_out(specs, store, told, Local(1))
    assert sleep
    assert found[0]["train_loss"] == result["train_loss"]
    assert sorted(seed for seed, failure in told.over if failure is None) == [0, 1]
