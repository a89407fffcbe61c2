"""A sharded model equals that of a single process; the owner of each number adds its noise once."""

from __future__ import annotations

from functools import partial

import pytest
import tasks
import torch
from tasks import RULES
from torch import nn
from torch.optim import SGD, Adam

import evenclip
from evenclip.distributed.sharded import Pieces
from evenclip.gradients import Layout
from evenclip.training.checkpoint import latest


def same(result, expected) -> bool:
    """Return whether two results are equal up to rounding."""
    exact = all(result[name] == expected[name] for name in ("ledger", "settings"))
    return exact and torch.allclose(result["vector"], expected["vector"], rtol=1e-9, atol=1e-12)


def check_same_model(team, name, kind):
    results = team(tasks.train, RULES[name], kind, sharded=True)
    expected = tasks.train(None, RULES[name], kind)
    assert same(results[0], expected)
    for other in results[1:]:
        assert torch.equal(other["vector"], results[0]["vector"])
        assert other["now"] == results[0]["now"]
        assert other["trace"] == results[0]["trace"]
        assert other["ledger"] == results[0]["ledger"]


@pytest.mark.parametrize("name", RULES)
def test_two_pieces_are_the_model_that_one_process_trains(two, name):
    check_same_model(two, name, "mlp")


@pytest.mark.parametrize("name", ["non-private", "dpsgd-f", "dpsgd-global-adapt"])
def test_four_pieces_are_the_model_that_one_process_trains(four, name):
    check_same_model(four, name, "cnn")


@pytest.mark.parametrize("optimizer", [Adam, partial(SGD, momentum=0.9)], ids=["Adam", "momentum"])
def test_it_goes_on_with_another_number_of_ranks_whole_or_in_pieces(two, four, tmp_path, optimizer):
    """Two ranks in pieces, four in pieces, two with the whole model, one."""
    rule = RULES["dpsgd-f"]
    given = {
        "checkpoint": tmp_path,
        "resume": "exact",
        "checkpoint_every": 3,
        "epochs": 4,
        "optimizer": optimizer,
    }
    for team, sharded, at in ((two, True, 4), (four, True, 8), (two, False, 13)):
        stopped = team(tasks.train, rule, trouble=("stop", at), sharded=sharded, **given)
        assert [rank.kind for rank in stopped] == ["Stop"] * team.world
    assert latest(tmp_path).name == "step-00000012"
    results, expected = (
        tasks.train(None, rule, **given),
        tasks.train(None, rule, epochs=4, optimizer=optimizer),
    )
    assert same(results, expected)


def test_ranks_without_a_sample_pass_with_the_others(team):
    given = {"n": 6, "batch_size": 1, "epochs": 4}
    results = team(tasks.train, RULES["dpsgd-global-adapt"], sharded=True, **given)
    assert same(results[0], tasks.train(None, RULES["dpsgd-global-adapt"], **given))
    assert any(
        sum(sizes) > 0 and 0 in sizes
        for sizes in zip(*(rank["sizes"] for rank in results), strict=True)
    )


def test_in_chunks_and_with_records_of_their_own(two):
    given = {"performance": evenclip.Performance(chunk=2)}
    results = two(tasks.train, RULES["dpsgd-f"], local=True, sharded=True, cut=[0, 10, 60], **given)
    assert same(results[0], tasks.train(None, RULES["dpsgd-f"], **given))


# --- noise --------------------------------------------------------------------------------------


def test_every_number_gets_its_noise_from_its_owner(team):
    """The joined pieces are N(0, σ²S²) and equal those of a single process."""
    noise, *_ = team(tasks.sharded_noise, RULES["dpsgd"], sharded=True)
    z, n = noise / (0.7 * 0.8), len(noise)
    assert abs(float((z**2).mean()) - 1) < 5 * (2 / n) ** 0.5
    assert abs(float((z[: n // 4] * z[n // 4 : 2 * (n // 4)]).mean())) < 5 / (n // 4) ** 0.5
    assert torch.allclose(noise, tasks.single_noise(RULES["dpsgd"]), atol=1e-9)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 9])
def test_pieces_cut_a_vector_as_torch_cuts_parameters(world):
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Linear(4, 7), nn.Linear(7, 1))
    layout = Layout.of(model)
    pieces, vector = Pieces(layout, world), torch.arange(float(layout.size))
    cut = [pieces.take(vector, rank) for rank in range(world)]
    assert torch.equal(pieces.join(cut), vector)
    for rank in range(world):
        parts = [torch.chunk(p, world)[rank : rank + 1] for p in layout.split(vector).values()]
        assert torch.equal(
            cut[rank], torch.cat([part[0].reshape(-1) if part else vector[:0] for part in parts])
        )


# --- what cannot be cut -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (
            "recurrent",
            "0 (LSTM) has no formula for its gradients, so it needs its whole parameters",
        ),
        ("tied", "is used more than once, which sharding does not support"),
        (
            "optimizer",
            "The optimiser may use whole parameters, but each rank holds a piece of them",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(two, what, reason):
    results = two(tasks.uncuttable, what, sharded=True)
    assert [rank.kind for rank in results] == ["ValueError"] * 2
    assert all(
        reason in rank.message and "leave sharded out of Ranks()" in rank.message
        for rank in results
    )
