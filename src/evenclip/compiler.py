"""A graph of tensor operations through torch's compiler: tried before it is believed, and called directly.

What comes out of the compiler is compared with the graph itself on the inputs it was compiled for, and with the one
that this was made from on others: a compiler errs, and one that finds code in its cache that was made for another
processor may load it. (Both were seen: wrong numbers, without a word.)

torch checks at every call whether what it compiled still fits, which takes a quarter of a small step. Here nothing
changes from call to call but the sizes it was compiled for any of, so the check is left out where that can be done.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

__all__ = ["Axis", "Compiled", "compiled", "warm"]

Compiled = Callable[..., Sequence[Tensor]]
Axis = tuple[int, int]  # which of the inputs, and which of its axes

# How far from the graph's numbers those of compiled code may be, relative to the largest of each output. Rounding stays
# far below (with operands of eleven bits: 5e-4), wrong code does not.
_CLOSE = 1e-2
_log = logging.getLogger(__name__)


def compiled(
    graph: GraphModule,
    tries: Sequence[Sequence[Tensor]],
    free: Sequence[Axis] = (),
    *,
    like: Callable[..., Sequence[Tensor]] | None = None,
) -> Compiled | None:
    """The graph compiled, without gradients; None where there is no compiler, or it stumbles, or errs.

    Args:
        graph: takes tensors, returns a list of them.
        tries: inputs to try it on, of different sizes if it takes any. It is compiled for the first.
        free: axes that may have any size from two on, in each try another; those of one size are so in every try.
        like: what has to come out of the last try, if not what the graph itself makes; it may need more memory.
    """
    if any(tensor.is_cuda for tensor in tries[0]):
        warm()
    watcher = _Watcher()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # torch's compiler has much to say, to its own authors
            # Not the module, whose call alone costs as much as a small step.
            run: Compiled = torch.compile(graph.forward, backend=watcher)
            for place, axis in free:
                torch._dynamo.maybe_mark_dynamic(tries[0][place], axis)
            expected = [*(graph(*given) for given in tries[:-1]), (like or graph)(*tries[-1])]
            roads = []
            for given, theirs in zip(tries, expected, strict=True):
                found = run(*given)
                _compare(found, theirs)
                roads.append(watcher.road(given, found, free))
            direct = roads[0] if all(road == roads[0] for road in roads) else None
            watcher.close()
            return run if direct is None or not _leads(direct, tries, expected) else direct
    except Exception as error:  # whatever it is, the graph does the same work
        _log.debug("not compiled: %s", error)
        return None


def warm() -> None:
    """Start the processes that make code for a GPU: better before it is needed, as it takes some seconds.

    torch's own backend does so when it is first asked for. Ours goes past it, and until they are there everything is
    made one by one.
    """
    with suppress(Exception):  # without them it is slower
        from torch._inductor import async_compile

        async_compile.maybe_warm_pool()


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise if these are other numbers."""
    for ours, theirs in zip(found, expected, strict=True):
        size = theirs.abs().nan_to_num(0.0, 0.0, 0.0) if theirs.is_floating_point() else theirs[:0]
        most = size.amax().item() if size.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=_CLOSE, atol=_CLOSE * most, equal_nan=True)


def _leads(road: _Road, tries: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> bool:
    """Whether it leads to the same numbers."""
    try:
        for given, theirs in zip(tries, expected, strict=True):
            _compare(road(*given), theirs)
    except Exception as error:  # what torch does around its code was more than to pass tensors on
        _log.debug("not called directly: %s", error)
        return False
    return True


class _Watcher:
    """torch's compiler, and a look at what the code it makes is called with, and returns."""

    def __init__(self) -> None:
        self._last: tuple[Compiled, tuple[Any, ...], Sequence[Any]] | None = None
        self._closed = False

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """A backend for `torch.compile`."""
        from torch._inductor import compile_fx  # it takes a second to import

        run: Any = compile_fx.compile_fx(graph, list(inputs))

        def watched(*given: Any) -> Sequence[Tensor]:
            found: Sequence[Tensor] = run(*given)
            if not self._closed:
                self._last = run, given, found
            return found

        return watched

    def close(self) -> None:
        """Look no longer, and let go of what was seen."""
        self._closed, self._last = True, None

    def road(self, given: Sequence[Tensor], found: Sequence[Tensor], free: Sequence[Axis]) -> _Road | None:
        """How the code was reached from these inputs, and these outputs from it; None where that cannot be told.

        Each tensor it was called with is one of the inputs, each number the size of a free axis. Each output is one of
        its own, or an input that was passed on.
        """
        if self._last is None:
            return None
        run, seen, own = self._last
        sizes = {given[place].shape[axis]: (place, axis) for place, axis in reversed(free)}
        order, results = list[tuple[int, int | None]](), list[tuple[bool, int]]()
        for value in seen:
            place = _only(value, given)
            if place is not None:
                order.append((place, None))
            elif isinstance(value, int) and value in sizes:
                order.append(sizes[value])
            else:
                return None
        for value in found:
            mine, passed = _only(value, own), _only(value, given)
            if mine is not None and passed is None:
                results.append((False, mine))
            elif passed is not None and mine is None:
                results.append((True, passed))
            else:
                return None
        return _Road(run, tuple(order), tuple(results))


def _only(value: Any, among: Sequence[Any]) -> int | None:
    """At which one place it is."""
    places = [place for place, other in enumerate(among) if other is value]
    return places[0] if len(places) == 1 and isinstance(value, Tensor) else None


class _Road:
    """Compiled code; what it takes in which order: inputs, or the size of an axis of one; and what comes of it: outputs
    of its own, or inputs.
    """

    def __init__(
        self, run: Compiled, order: tuple[tuple[int, int | None], ...], results: tuple[tuple[bool, int], ...]
    ) -> None:
        self._run, self._order, self._results = run, order, results
        self._is_whole = results == tuple((False, i) for i in range(len(results)))

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        found = self._run(*[given[place] if axis is None else given[place].shape[axis] for place, axis in self._order])
        if self._is_whole:
            return found
        return [given[place] if passed else found[place] for passed, place in self._results]

    @property
    def _all(self) -> tuple[Any, ...]:
        return self._run, self._order, self._results

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Road) and self._all == other._all

    def __hash__(self) -> int:
        return hash(self._all)
