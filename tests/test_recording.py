"""A reel takes the loaded steps in their order, each with its own number, and keeps what was seen of them.

What a GPU records and replays is here done anew each time, after being tried out as often: the reel cannot tell.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenclip.recording import Reel

RUNS = (2, 1)  # of two kinds
OFFSETS = (0, 100, 200)


class Found(NamedTuple):
    now: torch.Tensor
    seen: torch.Tensor
    flags: torch.Tensor


def recorder(tries=3, put_back=True):
    def record(act, moved):
        before = [part.clone() for part in moved]
        for _ in range(tries):
            act()
            if put_back:
                for part, was in zip(moved, before, strict=True):
                    part.copy_(was)
        return act

    return record


class Steps:
    """A computation that notes what it was given, and moves a sum on."""

    def __init__(self, width=8, steps=5, record=recorder):
        clock, self.total = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.float64)
        self.t = clock[0]
        self.reel = Reel(self.act, RUNS, [self.total], clock, steps, width, record())

    def act(self, feeds):
        found, place = [], 0
        for runs, feed in zip(RUNS, feeds, strict=True):
            assert feed.rows.shape[0] == runs
            for part in feed:  # as compiled code has seen them
                assert part.is_contiguous()
                assert runs > 1 or part.storage_offset() % 2 == 0
            real = torch.arange(feed.rows.shape[1]) < feed.size
            self.total[place : place + runs] += (feed.rows * real).sum(1) / feed.B[:, 0] * (1.0 + self.t)
            seen = torch.stack([feed.rows.double(), real.double(), feed.B.expand(feed.rows.shape)], dim=1)
            found.append(Found(self.t.expand(runs, 1).double(), seen, torch.stack([real, ~real], dim=1)))
            place += runs
        return found

    def take(self, t, batches, B, stride=4):
        self.reel.load(t, batches, OFFSETS, B)
        for step in batches:
            self.reel.step(-(-max(1, *map(len, step)) // stride) * stride)
        return self.reel.seen(len(batches))


sizes = st.lists(st.tuples(*[st.integers(0, 11)] * 3), min_size=1, max_size=5)


def made(of):
    """Batches of these sizes, all numbers different, and what their sums are divided by."""
    places = iter(range(10_000))
    batches = [[torch.tensor([next(places) for _ in range(n)], dtype=torch.int64) for n in step] for step in of]
    return batches, [[1.0 + n for n in step] for step in of]


@settings(max_examples=60)
@given(first=sizes, second=sizes, t=st.integers(0, 1000))
def test_every_step_has_its_own_batches_and_number(first, second, t):
    """Blocks of any length; batches that are longer than was expected make room for themselves."""
    steps, expected = Steps(), torch.zeros(3, dtype=torch.float64)
    for at, block in ((t, first), (t + len(first), second)):
        batches, B = made(block)
        kinds = steps.take(at, batches, B)()
        for s, (step, divisors) in enumerate(zip(batches, B, strict=True)):
            for run, (batch, b) in enumerate(zip(step, divisors, strict=True)):
                kind, r = (kinds[0], run) if run < 2 else (kinds[1], 0)
                n = len(batch)
                assert kind.now[s][r].tolist() == [at + s]
                assert kind.seen[s][r, 0, :n].tolist() == (batch + OFFSETS[run]).tolist()
                assert kind.seen[s][r, 1, :n].tolist() == [1.0] * n
                assert kind.seen[s][r, 2, :n].tolist() == [b] * n
                assert kind.flags[s][r, :, :n].tolist() == [[True] * n, [False] * n]
                expected[run] += float((batch + OFFSETS[run]).sum()) / b * (1 + at + s)
    assert steps.t == t + len(first) + len(second)
    torch.testing.assert_close(steps.total, expected)


def test_what_was_seen_may_be_asked_for_after_the_next_block():
    steps = Steps()
    batches, B = made([(3, 2, 1), (1, 1, 1)])
    later = steps.take(0, batches, B)
    steps.take(2, *made([(1, 2, 3)] * 5))
    (first, second) = later()
    assert first.seen[0][0, 0, :3].tolist() == batches[0][0].tolist()
    assert second.now[1].tolist() == [[1.0]]


def test_a_trial_that_is_taken_for_a_step_would_be_seen():
    totals = []
    for put_back in (True, False):
        steps = Steps(record=partial(recorder, put_back=put_back))
        steps.take(0, *made([(3, 2, 1)]))
        assert (int(steps.t) == 1) is put_back
        totals.append(steps.total)
    assert not torch.equal(*totals)


def test_a_step_that_is_recorded_ahead_is_not_taken():
    ahead, plain = Steps(), Steps()
    for rows in (4, 8, 100):  # the last is more than there is room for
        ahead.reel.recorded(rows)
    assert ahead.t == 0
    assert not ahead.total.any()
    block = made([(3, 2, 1), (5, 0, 2), (1, 7, 8)])
    found = [steps.take(0, *block)() for steps in (ahead, plain)]
    assert torch.equal(ahead.total, plain.total)
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one.seen, other.seen))


def test_a_recording_is_made_once_for_each_number_of_rows():
    made_for = []

    def counting():
        def record(act, moved):
            made_for.append(1)
            return recorder()(act, moved)

        return record

    steps = Steps(record=counting)
    for _ in range(3):
        steps.take(0, *made([(3, 2, 1), (5, 1, 1), (4, 0, 0)]))
    assert len(made_for) == 2  # of 4 and of 8 rows
    steps.take(0, *made([(11, 1, 1)]))
    assert len(made_for) == 3  # wider tables, so everything is recorded anew
    steps.take(0, *made([(3, 1, 1)]))
    assert len(made_for) == 4


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_block_that_was_not_finished(taken):
    steps = Steps()
    batches, B = made([(3, 2, 1)] * 4)
    steps.reel.load(7, batches, OFFSETS, B)
    for _ in range(taken):
        steps.reel.step(4)
    if taken:
        assert [now.tolist() for now in steps.reel.seen(taken)()[1].now] == [[[7.0 + s]] for s in range(taken)]
    steps.reel.load(7 + taken, batches[taken:], OFFSETS, B[taken:])
    for _ in range(4 - taken):
        steps.reel.step(4)
    assert steps.t == 11
    again = Steps()
    again.take(7, batches, B)
    torch.testing.assert_close(steps.total, again.total, rtol=0, atol=0)
