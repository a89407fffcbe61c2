"""Tests of bundles: how runs are split, and the events of a worker."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

from evenclip.sweep import Local, Store, carry_out, work, worker
from evenclip.sweep.bundle import bundles, make_task

RULES = [{"name": name} for name in ("non-private", "dpsgd", "dpsgd-f")]


@pytest.mark.parametrize("workers", [1, 2, 7, 100])
def test_every_run_is_in_one_bundle_and_with_its_data_and_model(spec, workers):
    models = [{"name": "mlp", "options": {"hidden": [width]}} for width in (4, 5)]
    specs = [
        spec(seed, rule, model=model)
        for rule, model, seed in itertools.product(RULES, models, range(4))
    ]  # 12 of each model
    split = bundles(specs, workers)
    hashes = Counter(run.hash for bundle in split for run in bundle)
    assert hashes == Counter(run.hash for run in specs)
    assert all(len({json.dumps(run.model) for run in bundle}) == 1 for bundle in split)
    assert Counter(json.dumps(bundle[0].model) for bundle in split) == {
        json.dumps(m): min(workers, 12) for m in models
    }
    lengths = [len(bundle) for bundle in split]
    assert max(lengths) - min(lengths) <= 1


def test_the_runs_of_a_seed_are_neighbours(spec):
    """A worker reads the data of a seed once, for all rules and learning rates."""
    specs = [
        spec(seed, rule, lr=lr) for rule, lr, seed in itertools.product(RULES, (0.1, 0.2), range(4))
    ]
    seeds = [[run.seed for run in bundle] for bundle in bundles(specs, 2)]
    assert seeds == [[0] * 6 + [1] * 6, [2] * 6 + [3] * 6]


def test_nothing_to_do_is_no_bundle():
    assert bundles([], 4) == []


# --- a worker -----------------------------------------------------------------------------------


def last_events(task, store):
    """Carry out a task; return the last event of each run by number, without steps."""
    events = []
    task = json.loads(json.dumps(task | {"root": str(store.root)}))
    worker.carry_out(task, lambda **event: events.append(event))
    return {event["i"]: event for event in events if event["event"] != "step"}


def test_each_run_is_done_failed_or_busy(store, spec):
    done, bad, busy, foreign = spec(0), spec(1, lr=-1.0), spec(2), spec(3)
    task = make_task([done, bad, busy, foreign])
    task["hashes"][3] = "of other code"
    with store.claim(busy) as mine:
        assert mine
        events = last_events(task, store)
    ends = {i: event["event"] for i, event in events.items()}
    assert ends == {0: "done", 1: "failed", 2: "busy", 3: "failed"}
    assert events[1]["why"] == "lr is -1.0; it must be a finite number above 0."
    assert "Traceback" in events[1]["trace"]
    expected = "the package changed while the command ran; start the command again"
    assert events[3]["why"] == expected
    assert store.has(done)
    assert not any(map(store.has, (bad, busy, foreign)))


def test_a_run_is_prepared_once_and_not_at_all_if_it_is_stored(store, spec, monkeypatch):
    prepared, prepare = [], work.prepared
    monkeypatch.setattr(work, "prepared", lambda run: (prepared.append(run.seed), prepare(run))[1])
    for _ in range(2):
        assert last_events(make_task([spec(0), spec(1)]), store) == {
            i: {"event": "done", "i": i} for i in (0, 1)
        }
    assert prepared == [0, 1]


def test_a_result_that_cannot_be_written_fails_its_run(store, spec, monkeypatch):
    write, bad = Store.write, spec(1).hash

    def full(self, spec, *rest):
        if spec.hash == bad:
            raise OSError(28, "No space left on device")
        write(self, spec, *rest)

    monkeypatch.setattr(Store, "write", full)
    events = last_events(make_task([spec(0), spec(1), spec(2)]), store)
    assert {i: event["event"] for i, event in events.items()} == {0: "done", 1: "failed", 2: "done"}
    assert "No space left" in events[1]["why"]


def test_a_busy_run_of_a_bundle_is_checked_again(store, spec, progress, monkeypatch):
    """Another command computes one of two runs: its result is read when it is complete."""
    specs = [spec(0), spec(1)]
    result, weights = work.work(specs[0], lambda t: None)
    waits = []

    def later(seconds):
        waits.append(seconds)
        if not store.has(specs[0]):
            store.write(specs[0], result, weights)

    monkeypatch.setattr("evenclip.sweep.local.time.sleep", later)
    with store.claim(specs[0]) as mine:
        assert mine
        results = carry_out(specs, store, progress, Local(1))
    assert waits
    assert results[0]["train_loss"] == result["train_loss"]
    assert sorted(seed for seed, failure in progress.over if failure is None) == [0, 1]
