"""Compiled code: believed only where it comes to the graph's numbers, and called directly only where that does too."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from evenclip import compiler
from evenclip.compiler import compiled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler uses what torch deprecates
    pytest.mark.skipif(
        not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), reason="needs a C++ compiler"
    ),
]


@pytest.fixture(autouse=True)
def forgetful():
    torch._dynamo.reset()  # it remembers sizes from one graph to the next


def gathered(table, weight, rows):
    """A little of what a step does: with more than one output, and a look at the number of rows."""
    taken = table.index_select(0, rows)
    return [(taken * weight).sum(dim=1), taken.sum(dim=0) / rows.shape[0]]


def graph_of(function, *given, mode="symbolic"):
    return make_fx(function, tracing_mode=mode)(*given)


def some(rows, seed=0, samples=40):
    random = torch.Generator().manual_seed(seed)
    table, weight = torch.randn(samples, 5, generator=random), torch.randn(5, generator=random)
    return table, weight, torch.randint(samples, (rows,), generator=random)


def test_for_any_number_of_rows_and_directly():
    graph = graph_of(gathered, *some(37))
    run = compiled(graph, [some(37), some(6)], free=[(2, 0)])
    assert isinstance(run, compiler._Road)
    for rows in (2, 3, 7, 16, 64, 251):
        given = some(rows, seed=rows)
        for ours, theirs in zip(run(*given), gathered(*given), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_for_any_number_of_samples_too():
    graph = graph_of(gathered, *some(37))
    run = compiled(graph, [some(37), some(6, samples=9)], free=[(0, 0), (2, 0)])
    assert isinstance(run, compiler._Road)
    for rows, samples in ((2, 3), (7, 500), (64, 41), (9, 9), (300, 12)):
        given = some(rows, seed=rows, samples=samples)
        for ours, theirs in zip(run(*given), gathered(*given), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_size_that_is_taken_from_another_axis_is_seen():
    """Where the first try cannot tell two sizes apart, the second does; then torch's own way is taken."""
    alike = [some(40), some(6, samples=9)]
    run = compiled(graph_of(gathered, *some(37)), alike, free=[(0, 0), (2, 0)])
    assert run is not None
    given = some(12, samples=30)
    for ours, theirs in zip(run(*given), gathered(*given), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_for_one_size_and_directly():
    run = compiled(graph_of(gathered, *some(37), mode="real"), [some(37)])
    assert isinstance(run, compiler._Road)
    for ours, theirs in zip(run(*some(37, seed=1)), gathered(*some(37, seed=1)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_it_is_not_looked_at_any_more(monkeypatch):
    """What a guard would see changes, the code is the same: no compiler is asked again."""
    from torch._inductor import compile_fx

    run = compiled(graph_of(gathered, *some(37)), [some(37), some(6)], free=[(2, 0)])
    monkeypatch.setattr(compile_fx, "compile_fx", lambda *_: pytest.fail("compiled again"))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        run(*some(9))
    finally:
        torch.set_num_threads(before)


def test_where_one_tensor_is_given_twice_it_is_not_called_directly():
    """It cannot be told which of the two places is meant: another time they may be two."""
    graph = graph_of(lambda a, b: [a * 2 + b], torch.ones(3), torch.ones(3), mode="real")
    same = torch.ones(3)
    run = compiled(graph, [(same, same)])
    assert run is not None
    assert not isinstance(run, compiler._Road)
    torch.testing.assert_close(run(torch.ones(3), torch.zeros(3))[0], torch.full((3,), 2.0))


def test_what_is_passed_on_untouched():
    """Torch hands such an output over itself, without a word to the code."""

    def act(a, b):
        return [b, a + 1, a]

    run = compiled(graph_of(act, torch.ones(3), torch.zeros(2), mode="real"), [(torch.ones(3), torch.zeros(2))])
    assert isinstance(run, compiler._Road)
    b, more, a = run(torch.full((3,), 5.0), torch.full((2,), 7.0))
    assert (b.tolist(), more.tolist(), a.tolist()) == ([7.0] * 2, [6.0] * 3, [5.0] * 3)


def test_a_road_that_leads_elsewhere_is_not_taken(monkeypatch):
    def crossed(self, given, found, free):
        return compiler._Road(self._last[0], ((1, None), (0, None)), ((False, 0),))

    monkeypatch.setattr(compiler._Watcher, "road", crossed)
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 7.0])
    run = compiled(graph_of(lambda a, b: [a - b], a, b, mode="real"), [(a, b)])
    assert run is not None
    assert not isinstance(run, compiler._Road)
    torch.testing.assert_close(run(a, b)[0], a - b)


def test_an_error_of_the_compiler_is_seen(monkeypatch):
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs: lambda *given: (given[0] * 1.1,))
    a = torch.tensor([1.0, 2.0])
    assert compiled(graph_of(lambda a: [a * 1.0], a, mode="real"), [(a,)]) is None


def test_what_is_not_finite_is_compared_too():
    a = torch.tensor([1.0, float("nan"), float("inf")])
    assert compiled(graph_of(lambda a: [a * 2.0], a, mode="real"), [(a,)]) is not None
    with pytest.raises(AssertionError):
        compiler._compare([torch.tensor([1.0, 2.0, float("inf")])], [a])


def test_nothing_that_was_tried_is_kept_alive():
    import gc
    import weakref

    given = some(37)
    gone = [weakref.ref(tensor) for tensor in given]
    graph = graph_of(gathered, *some(37))
    run = compiled(graph, [given, some(6)], free=[(2, 0)])
    del given
    gc.collect()
    assert run is not None
    assert [ref() for ref in gone] == [None] * 3


def test_a_graph_that_was_rewritten_wrongly_is_not_taken():
    """It is compared with the one it was made from, not with itself."""
    graph = graph_of(gathered, *some(37))
    wrong = graph_of(lambda table, weight, rows: gathered(table, 1.1 * weight, rows), *some(37))
    assert compiled(wrong, [some(37), some(6)], free=[(2, 0)]) is not None
    assert compiled(wrong, [some(37), some(6)], free=[(2, 0)], like=graph) is None
    assert compiled(graph, [some(37), some(6)], free=[(2, 0)], like=gathered) is not None


def test_what_it_was_rewritten_from_is_asked_about_the_last_try_only():
    """It may need much more memory than the graph that is compiled."""
    asked = []
    like = lambda table, weight, rows: asked.append(len(rows)) or gathered(table, weight, rows)  # noqa: E731
    assert compiled(graph_of(gathered, *some(37)), [some(37), some(6)], free=[(2, 0)], like=like) is not None
    assert asked == [6]
