"""Several ranks train the same model as one process: the same batches, noise and ledger."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import tasks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tasks import RULES
from team import Team

import evenclip
from evenclip.distributed.ranks import RankError, Ranks
from evenclip.mechanism import Ledger
from evenclip.rules import FairLens
from evenclip.training.checkpoint import latest

# With hardly any noise, a difference between clipped sums is visible.
EVERY = RULES | {"dpsgd-f, hardly any noise": replace(RULES["dpsgd-f"], sigma=1e-6)}


@cache
def alone(name: str, kind: str = "mlp", **given):
    return tasks.train(None, EVERY[name], kind, **given)


def close(a, b) -> bool:
    """Return whether nested values are equal up to rounding."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    if a is None or b is None:
        return a is b
    return a == pytest.approx(b, rel=1e-9, abs=1e-12)


def is_as_alone(result, expected) -> bool:
    """Return whether a result equals that of a single process."""
    same = all(result[name] == expected[name] for name in ("ledger", "settings"))  # and so ε
    return same and all(
        close(result[name], expected[name]) for name in ("vector", "state", "trace", "now")
    )


# --- the same model -----------------------------------------------------------------------------


def check_same_model(team, name, kind):
    results = team(tasks.train, EVERY[name], kind)
    assert is_as_alone(results[0], alone(name, kind))
    assert not torch.equal(results[0]["vector"], tasks.vector(tasks.network(kind)))
    for other in results[1:]:  # to the last bit
        assert torch.equal(other["vector"], results[0]["vector"])
        assert other["now"] == results[0]["now"]
        assert other["state"].equal(results[0]["state"])
        assert other["trace"] == results[0]["trace"]
        assert other["ledger"] == results[0]["ledger"]


@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_train_the_model_that_one_process_trains(two, name):
    check_same_model(two, name, "mlp")


@pytest.mark.parametrize("name", ["non-private", "dpsgd-f", "dpsgd-global-adapt"])
def test_four_ranks_train_the_model_that_one_process_trains(four, name):
    """A rule without noise, one that counts before clipping, and one that counts afterwards."""
    check_same_model(four, name, "cnn")


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_with_chunks_and_any_optimizer(two, optimizer):
    performance = evenclip.Performance(chunk=2)
    expected = tasks.train(None, RULES["dpsgd-f"], optimizer=optimizer, performance=performance)
    assert is_as_alone(
        two(tasks.train, RULES["dpsgd-f"], optimizer=optimizer, performance=performance)[0],
        expected,
    )


def test_epsilon_is_that_of_one_process(two):
    results, expected = (
        two(tasks.epsilon, RULES["dpsgd-global-adapt"]),
        tasks.epsilon(None, RULES["dpsgd-global-adapt"]),
    )
    assert results == [expected, expected]


def test_a_step_that_would_be_compiled_is_taken_plainly(two):
    results = two(tasks.train, RULES["dpsgd"], performance=evenclip.Performance(compile=True))
    assert is_as_alone(results[0], alone("dpsgd"))


def test_every_rank_computes_a_part_of_the_batch(team):
    results = team(tasks.train, RULES["dpsgd"])
    whole = alone("dpsgd")["sizes"]
    assert [sum(sizes) for sizes in zip(*(rank["sizes"] for rank in results), strict=True)] == whole
    assert all(
        max(sizes) - min(sizes) <= 1
        for sizes in zip(*(rank["sizes"] for rank in results), strict=True)
    )


def test_ranks_without_a_sample_take_the_step_all_the_same(team):
    """Batches have 0, 1 or 2 of 6 records."""
    results = team(tasks.train, RULES["dpsgd-global-adapt"], n=6, batch_size=1, epochs=4)
    expected = alone("dpsgd-global-adapt", n=6, batch_size=1, epochs=4)
    assert is_as_alone(results[0], expected)
    assert [len(rank["sizes"]) for rank in results] == [24] * team.world
    sizes = list(zip(*(rank["sizes"] for rank in results), strict=True))
    assert any(sum(each) == 0 for each in sizes)  # an empty batch
    assert any(sum(each) > 0 and 0 in each for each in sizes)  # an empty part
    assert sum(row["empty_batches"] for row in results[0]["trace"]) == sum(
        sum(each) == 0 for each in sizes
    )


@pytest.mark.parametrize("readers", [0, 1])
@pytest.mark.parametrize("sharded", [False, True])
def test_each_rank_reads_its_part_of_data_that_are_not_in_memory(two, sharded, readers):
    """The second batches are small, so that some parts are empty."""
    for more in ({}, {"n": 6, "batch_size": 1, "epochs": 4}):
        performance = evenclip.Performance(readers=readers)
        results = two(
            tasks.train,
            RULES["dpsgd-global-adapt"],
            streamed=True,
            sharded=sharded,
            performance=performance,
            **more,
        )
        assert is_as_alone(results[0], tasks.train(None, RULES["dpsgd-global-adapt"], **more)), (
            results
        )


def test_without_a_seed_the_ranks_agree_on_one(two):
    first, second = two(tasks.train, RULES["dpsgd"], seed=None)
    again, _ = two(tasks.train, RULES["dpsgd"], seed=None)
    assert torch.equal(first["vector"], second["vector"])
    assert not torch.equal(first["vector"], again["vector"])
    # halves of one batch, not of two: two Poisson samples would differ by more in some step
    assert all(0 <= a - b <= 1 for a, b in zip(first["sizes"], second["sizes"], strict=True))


def test_with_dropout_the_ranks_agree_and_drop_different_units(two):
    first, second = two(tasks.train, RULES["dpsgd"], dropout=0.5)
    assert torch.equal(first["vector"], second["vector"])
    seeds = two(tasks.dropout_keys)
    assert len({seed for rank in seeds for seed in rank}) == sum(len(rank) for rank in seeds) == 4


# --- different records on each rank -------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_ranks_with_records_of_their_own_train_on_the_union(two, name):
    results = two(tasks.train, RULES[name], local=True, cut=[0, 17, 60])
    expected = alone(name)
    assert is_as_alone(results[0], expected)
    assert results[0]["settings"].n == 60
    assert torch.equal(results[0]["vector"], results[1]["vector"])


def test_the_parts_of_a_batch_are_the_batch(team):
    batch = torch.tensor([0, 1, 5, 6, 7, 8, 11, 23, 30, 31])
    for local in (False, True):
        parts = team(tasks.shares, batch, 8, local=local)
        assert torch.cat(parts).equal(batch[batch < 8 * team.world] if local else batch)


def test_equal_local_records_are_refused(two):
    results = two(tasks.train, RULES["dpsgd"], local=True)
    assert [rank.message for rank in results] == [
        "Ranks 0 and 1 were given the same data, and local=True: every record would count twice, "
        "and ε would be wrong. Give each rank different records, or leave local out."
    ] * 2


# --- noise --------------------------------------------------------------------------------------


def is_right(noise: torch.Tensor, std: float) -> bool:
    """Return whether these are independent N(0, std²) numbers, by mean square, mean, and
    correlation of neighbours.
    """
    z, n = noise / std, len(noise)
    square = abs(float((z**2).mean()) - 1) < 5 * (2 / n) ** 0.5
    return (
        square
        and abs(float(z.mean())) < 5 / n**0.5
        and abs(float((z[1:] * z[:-1]).mean())) < 5 / n**0.5
    )


@pytest.mark.parametrize("name", ["dpsgd", "dpsgd-global-adapt"])
def test_every_number_gets_its_noise_once(team, name):
    results = team(tasks.noise, RULES[name])
    assert len(results[0]) == 24_000
    assert all(torch.equal(other, results[0]) for other in results)
    assert is_right(results[0], 0.7 * RULES[name].sigma)
    assert torch.allclose(results[0], tasks.single_noise(RULES[name]), atol=1e-9)


@pytest.mark.parametrize("name", ["dpsgd", "dpsgd-global", "dpsgd-global-adapt"])
def test_one_record_moves_the_sum_by_at_most_its_sensitivity(two, name):
    numbers = st.floats(-1e6, 1e6, allow_subnormal=False)

    @settings(max_examples=15)
    @given(
        rows=st.lists(st.lists(numbers, min_size=5, max_size=5), min_size=2, max_size=7),
        without=st.integers(0, 6),
    )
    def check(rows, without):
        x = torch.tensor(rows, dtype=torch.float64)
        results = two(tasks.clipped_sums, EVERY[name], x, without % len(rows))
        (all_of_them, but_one, S), other = results
        assert torch.equal(all_of_them, other[0])
        assert float((all_of_them - but_one).norm()) <= S * (1 + 1e-9)

    check()


# --- checkpoints and failures --------------------------------------------------------------------


def test_a_run_goes_on_with_another_number_of_ranks(two, four, tmp_path):
    """Two, four, one; each stops in the middle of an epoch."""
    name, given = (
        "dpsgd-global-adapt",
        {"checkpoint": tmp_path, "resume": "exact", "checkpoint_every": 3},
    )
    stopped = two(tasks.train, RULES[name], epochs=4, trouble=("stop", 4), **given)
    assert [rank.kind for rank in stopped] == ["Stop", "Stop"]
    assert latest(tmp_path).name == "step-00000003"
    stopped = four(tasks.train, RULES[name], epochs=4, trouble=("stop", 13), **given)
    assert [rank.kind for rank in stopped] == ["Stop"] * 4
    result = tasks.train(None, RULES[name], epochs=4, **given)
    expected = alone(name, epochs=4)
    assert is_as_alone(result | {"now": expected["now"]}, expected)
    assert close(result["now"], expected["now"][12:])


def test_ranks_that_resume_draw_from_one_new_key(two, tmp_path):
    """The leading rank alone writes the journal, before any rank has a released number."""
    given = {"checkpoint": tmp_path, "checkpoint_every": 3, "epochs": 4}
    two(tasks.train, RULES["dpsgd"], trouble=("stop", 4), **given)
    results = two(tasks.train, RULES["dpsgd"], resume=True, **given)
    assert torch.equal(results[0]["vector"], results[1]["vector"])
    assert results[0]["ledger"] == results[1]["ledger"]
    ledger, T = Ledger.from_json(results[0]["ledger"]), 20
    assert [entry.steps for entry in ledger.entries] == [3, 2, T - 3]  # 3 and 4 were drawn
    old, _, new = ledger.entries
    assert new.parent == (old.run, 3)
    assert not torch.equal(results[0]["vector"], alone("dpsgd", epochs=4)["vector"])
    blocks = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert len(blocks) == 3  # one for each run, and the end of the first


def test_the_number_of_ranks_changes_the_key(two, four):
    """Sums in another order may differ in their last bits, and one noise must not hide both."""
    ids = [set(two(tasks.run_id)), set(four(tasks.run_id)), {tasks.run_id(None)}]
    ids.append(set(two(tasks.run_id, sharded=True)))
    assert [len(each) for each in ids] == [1, 1, 1, 1]
    assert all(isinstance(run, str) for each in ids for run in each)
    assert len(set.union(*ids)) == 4


def test_a_run_over_ranks_is_not_copied(two):
    results = two(tasks.copied)
    assert [rank.message for rank in results] == [
        "A run over several ranks cannot be copied or forked, because all ranks draw from one key; "
        "save a checkpoint, and resume it with resume=True."
    ] * 2


def test_a_killed_rank_ends_the_others_with_a_sentence_and_the_run_goes_on(two, tmp_path):
    rule, given = (
        RULES["dpsgd-global-adapt"],
        {"checkpoint": tmp_path, "resume": "exact", "checkpoint_every": 2},
    )
    doomed = Team(2, timeout=3600.0)  # longer than the time limit of the test
    try:
        survivor, dead = doomed(tasks.train, rule, trouble=("kill", 7, 1), **given)
    finally:
        doomed.close()
    assert dead is None
    assert survivor.kind == "RankError"
    assert survivor.message.startswith(
        "Rank 0 cannot reach the others: one has ended (see its error message) or did not answer "
        "for 3600 s. Start the same command again with resume=True to continue from the last "
        "checkpoint; the number of ranks may change. "
    )
    assert survivor.message.count("cannot reach") == 1
    assert latest(tmp_path).name == "step-00000006"  # in the middle of an epoch
    results, expected = two(tasks.train, rule, **given), two(tasks.train, rule)
    assert torch.equal(results[0]["vector"], expected[0]["vector"])
    assert results[0]["ledger"] == expected[0]["ledger"]


def test_a_rank_that_does_not_answer_ends_the_others():
    """On a machine of any speed: rank 1 stays silent, and every wait of rank 0 ends in the same
    error.
    """
    team = Team(2, timeout=1.0)
    try:
        team.send(tasks.train, RULES["dpsgd"], trouble=("silence", 2, 1))
        waiting = team.answer(0)
    finally:
        team.close()
    assert waiting.kind == "RankError", waiting.message
    assert "or did not answer for 1 s" in waiting.message


def test_an_interrupt_of_one_rank_stops_all_after_the_same_step(two, tmp_path):
    results = two(tasks.train, RULES["dpsgd"], trouble=("interrupt", 3, 1), checkpoint=tmp_path)
    assert [rank.kind for rank in results] == ["KeyboardInterrupt"] * 2
    assert latest(tmp_path).name == "step-00000008"
    assert is_as_alone(
        two(tasks.train, RULES["dpsgd"], checkpoint=tmp_path, resume="exact")[0] | {"now": []},
        alone("dpsgd") | {"now": []},
    )


def test_ranks_that_drift_apart_are_found(two):
    results = two(tasks.train, RULES["dpsgd"], trouble=("drift", 2, 1))
    assert [rank.message for rank in results] == [
        "After step 5 rank 1 has other parameters than rank 0, so they no longer train one model. "
        "Either the model was changed on one of them, or the machines compute differently. "
        "Continue from the last checkpoint with resume=True, on machines of the same kind."
    ] * 2


def test_only_rank_0_shows_progress(two):
    first, second = two(tasks.progress)
    assert "step 10/10" in first
    assert second == ""


# --- what ranks must agree on -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "difference"),
    [
        ({"own": {"lr": [0.1, 0.2]}}, "lr 0.2 instead of 0.1"),
        ({"own": {"seed": [1, 2]}}, "another seed"),
        ({"own": {"epochs": [1, 2]}}, "steps 10 instead of 5"),
        ({"own_model": True}, "another model, or the same model with other initial parameters"),
    ],
    ids=["learning rate", "seed", "steps", "model"],
)
def test_ranks_with_other_arguments_are_refused(two, given, difference):
    if "seed" in given.get("own", {}):
        results = two(tasks.train_with_seeds, given["own"]["seed"])
    else:
        results = two(tasks.train, RULES["dpsgd"], **given)
    assert [(rank.kind, rank.message) for rank in results] == [
        (
            "ValueError",
            f"Rank 1 was given {difference}: all ranks train one model, so give each the arguments "
            "of rank 0; create the model from the same seed on every rank, or load it from the "
            "same file.",
        )
    ] * 2


def test_ranks_with_other_data_are_refused(two):
    results = two(tasks.train, RULES["dpsgd"], cut=[0, 30, 60])
    assert [rank.message for rank in results] == [
        "Rank 1 was given other data than rank 0; give every rank the same data, or pass "
        "ranks=Ranks(local=True) if the ranks have different records."
    ] * 2


def test_ranks_with_other_threads_draw_the_same_batches(two):
    """Otherwise a record may lie in the parts of both, and count twice."""
    first, second = two(tasks.first_batch, threads=[1, 2])
    assert first == second
    others = [two(tasks.first_batch, threads=threads)[0] for threads in ([1, 1], [2, 1], [2, 2])]
    assert len({name for name, _ in (first, *others)}) == 4


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("loss", [tasks.smooth(0.1), tasks.smooth(0.2)]),
        ("optimizer", [tasks.Faster(1.0), tasks.Faster(2.0)]),
        ("scheduler", [None, partial(torch.optim.lr_scheduler.StepLR, step_size=1)]),
    ],
)
def test_ranks_that_compute_different_things_are_refused(two, name, own):
    results = two(tasks.first_batch, **{name: own})
    assert [(rank.kind, rank.message) for rank in results] == [
        (
            "ValueError",
            f"Rank 1 has another {name} than rank 0, and all ranks train one model; give every "
            "rank the same code and the same values.",
        )
    ] * 2


@pytest.mark.parametrize("seed", [None, 1])
def test_ranks_that_compute_in_other_chunks_are_refused(two, seed):
    """They would round their sums differently, and so release them on two grids."""
    performance = [evenclip.Performance(chunk=2), evenclip.Performance(chunk=3)]
    results = two(tasks.first_batch, seed, performance=performance)
    assert all(rank.message.startswith("Rank 1 was given performance ") for rank in results)


@pytest.mark.parametrize("seed", [None, 1])
def test_ranks_with_different_keys_are_refused(two, seed):
    results = two(tasks.with_keys, seed)
    assert [(rank.kind, rank.message) for rank in results] == [
        (
            "RuntimeError",
            "The ranks have different keys, so they would draw different batches, and a record in "
            "two of them would count twice; start all ranks again with the same arguments.",
        )
    ] * 2


def test_a_rule_that_needs_the_whole_batch_is_refused(two):
    results = two(tasks.train, FairLens())
    assert [rank.message for rank in results] == [
        "fairlens needs the whole batch at once; train it in one process, without ranks."
    ] * 2


def test_what_is_no_team_of_ranks_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RankError) as error:
        Ranks()
    assert str(error.value) == (
        "ranks=Ranks() is for several processes, and this one was not started as one of them (RANK "
        "is not set); start it with `torchrun --nproc-per-node 2 SCRIPT.py`, or leave ranks out."
    )
    with pytest.raises(TypeError) as error:
        tasks.train(True, RULES["dpsgd"])
    assert (
        str(error.value)
        == "ranks is True; it must be evenclip.Ranks(), or be left out for one process."
    )
