"""The step compiled: `training.step.step`, traced by `make_fx` and compiled by `torch.compile`.

The trace is of the ordinary step on the ordinary tape, with a symbol for the number of samples.
Before it is used, its results are compared with those of the untraced step on three batch sizes,
one of them larger than the traced one. This detects a model that fixes the size in the trace. If a
step has no graph, `NoGraph` gives the reason, and the run uses the untraced step.

torch's guards stay on, so a changed model is compiled again. A batch of fewer than two samples, in
several chunks, or with another B takes the untraced step. docs/performance.md shows how long
compiling takes and when it pays.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from evenclip.gradients import AnyTape, Tape
from evenclip.mechanism import Mechanism, Release
from evenclip.mechanism.grid import Grid
from evenclip.mechanism.noise import Values
from evenclip.training.passes import Chunk
from evenclip.training.step import Part, Public, Seen, step

__all__ = ["Graph", "NoGraph"]

# Numbers of samples for the trace, and for the comparison.
_TRACED, _COMPARED = 37, (2, 37, 101)
# Largest difference between the two steps, relative to the largest number; both round in float32.
_TOLERANCE = 1e-4
_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d

Noise = Mapping[str, Values]  # name of a release -> N(0, I)


class NoGraph(RuntimeError):  # noqa: N818  # not an error: the untraced step is used
    """The step cannot be compiled; the message gives the reason as a clause."""


class Graph:
    """The step of one run as a compiled function of tensors.

    It reads the current parameters of the model.

    Args:
        tape: the model and its loss, recording.
        mechanism: the rule with its bounds enforced.
        state: the rule's public state.
        B: the expected batch size.
        rows: returns n samples to trace and compare with.
        noise: noise of any step, for its sizes.
        mode: mode of `torch.compile`, such as "reduce-overhead"; None: its default.

    Raises:
        NoGraph: if the step cannot be traced or compiled, or the result differs.
    """

    def __init__(
        self,
        tape: AnyTape,
        mechanism: Mechanism,
        state: Tensor,
        B: float,
        rows: Callable[[int], Chunk],
        noise: Noise,
        mode: str | None = None,
    ) -> None:
        _check_worth(tape)
        self._mechanism, self._B, self._mode = mechanism, B, mode
        if mechanism.varies:
            raise NoGraph("the rule's noise depends on the step, and a graph has one multiplier")
        traceable = replace(mechanism, traceable=True)
        traced = _Traced(tape, traceable, B, rows(1), tuple(noise))
        graph = _trace(traced, [*_leaves(rows(_TRACED)), state, *_in_memory(noise)])
        self._fits = _Sizes(graph, at=len(_leaves(rows(1))) - 1)
        self._run = torch.compile(graph, dynamic=True, mode=mode)
        for n in _COMPARED:
            self._compare(tape, mechanism, state, rows(n), noise)

    def takes(self, chunks: Sequence[Chunk], B: float) -> bool:
        """Return whether the graph is valid for this batch."""
        if len(chunks) != 1 or chunks[0].real is not None or self._B != B:
            return False
        n = chunks[0].group.shape[0]
        return n >= 2 and self._fits(n)

    def __call__(self, state: Tensor, chunk: Chunk, noise: Noise) -> tuple[Public, Part]:
        """Return what `step` returns for this batch."""
        with torch.no_grad():
            outputs = self._run(*_leaves(chunk), state, *_in_memory(noise))
        if self._mode is not None:  # a CUDA graph overwrites its outputs in the next call
            outputs = [tensor.clone() for tensor in outputs]
        gradient, now, following, total, count, losses, norms, weights, clamped, finite = outputs
        public = Public(gradient, now, following, self._mechanism.sensitivity(now))
        return public, Part(
            total, count, Seen(losses, norms, weights, chunk.group, clamped, finite)
        )

    def _compare(
        self, tape: AnyTape, mechanism: Mechanism, state: Tensor, chunk: Chunk, noise: Noise
    ) -> None:
        """Raise unless the compiled and the untraced step agree on this batch."""
        sizes = {name: part.shape[0] for name, part in zip(noise, _in_memory(noise), strict=True)}
        fresh: dict[str, Values] = {
            name: torch.linspace(-1, 1, size, dtype=torch.float64, device=state.device)
            for name, size in sizes.items()
        }
        ours = step(tape, mechanism, state, [chunk], self._B, Release(fresh))
        try:
            with _quiet():
                theirs = self(state, chunk, fresh)
        except Exception as error:  # anything that a compiler may raise
            raise NoGraph(f"torch cannot compile it ({_first_line(error)})") from error
        # Where the two sums lie on two sides of a boundary, the published numbers differ by H.
        S, sigma = float(ours[0].sensitivity), mechanism.noise["gradient"]
        slack = 2 * float(Grid.of(S, sigma, 1, 0.01).coarse) / self._B if sigma else 0.0
        for a, b in zip(_numbers(*ours), _numbers(*theirs), strict=True):
            if a.shape != b.shape or not _agree(a, b, slack if a is ours[0].gradient else 0.0):
                raise NoGraph(
                    f"its result differs for {len(chunk.group)} samples, so the trace has baked "
                    "in a size"
                )


class _Traced:
    """The step as a function of tensors only."""

    def __init__(
        self, tape: AnyTape, mechanism: Mechanism, B: float, like: Chunk, names: tuple[str, ...]
    ) -> None:
        self._tape, self._mechanism, self._B, self._names = tape, mechanism, B, names
        self._spec = tree_flatten((like.x, like.y, like.group))[1]

    def __call__(self, *flat: Tensor) -> list[Tensor]:
        given = self._spec.num_leaves
        x, y, group = tree_unflatten(list(flat[:given]), self._spec)
        state = flat[given]
        noise: dict[str, Values] = dict(zip(self._names, flat[given + 1 :], strict=True))
        chunk = Chunk(x, y, group)
        public, part = step(self._tape, self._mechanism, state, [chunk], self._B, Release(noise))
        seen = part.seen
        assert seen.clamped is not None
        assert seen.finite is not None
        return [
            public.gradient, public.now, public.state, part.total, part.counts,
            seen.losses, seen.norms, seen.weights, seen.clamped, seen.finite,
        ]  # fmt: skip


class _Sizes:
    """The numbers of samples that a trace is valid for.

    If a model branches on its batch size, only one branch is in the trace. make_fx stores the
    conditions on sizes under which the trace is valid; calling this object checks them for a number
    of samples.

    Args:
        graph: the trace.
        at: index of an input whose first axis is the samples.

    Raises:
        NoGraph: if the trace is for one number of samples only.
    """

    def __init__(self, graph: torch.fx.GraphModule, at: int) -> None:
        inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        size = inputs[at].shape[0]
        if not (isinstance(size, torch.SymInt) and size.node.expr.free_symbols):
            raise NoGraph(
                "an operation of the model, the loss or the rule fixes the number of samples while "
                "it is traced; in a loss or a rule, use comparisons and torch.where instead of "
                "index_select, F.kl_div or the options of F.cross_entropy"
            )
        self._symbol = size.node.expr
        env = inputs[at].fake_mode.shape_env
        self._conditions = [
            guard.expr for guard in env.guards if self._symbol in guard.expr.free_symbols
        ]
        self._known = dict[int, bool]()

    def __call__(self, n: int) -> bool:
        if n not in self._known:
            # A condition becomes sympy's true or false, or an expression that is neither.
            self._known[n] = all(
                condition.subs(self._symbol, n) == True  # noqa: E712
                for condition in self._conditions
            )
        return self._known[n]


def _check_worth(tape: AnyTape) -> None:
    """Raise for a model that has no graph, or whose graph is slower than the untraced step."""
    if not isinstance(tape, Tape):
        raise NoGraph("the rule or the model takes its gradients in its own way")
    on_cpu = tape.layout.blank.device.type == "cpu"
    if on_cpu and any(isinstance(module, _CONVOLUTIONS) for module in tape.model.modules()):
        raise NoGraph(
            "on a CPU the plain step is faster for convolutions, block by block in the cache"
        )


def _trace(function: Callable[..., list[Tensor]], given: list[Tensor]) -> torch.fx.GraphModule:
    """Trace the function as a graph with symbols for sizes."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

    try:
        with warnings.catch_warnings(), torch.no_grad(), _quiet():
            warnings.simplefilter("ignore")
            tracer = make_fx(
                function, tracing_mode="symbolic", _allow_non_fake_inputs=True
            )  # parameters are real
            graph: torch.fx.GraphModule = tracer(*given)
    except Exception as error:  # anything that tracing may raise
        if _reads_a_value(error):
            raise NoGraph(
                "the rule or the model reads the value of a tensor; use torch.where instead of if, "
                "torch.gather instead of indexing with a tensor, and no float() or .item()"
            ) from error
        raise NoGraph(f"torch cannot trace it ({_first_line(error)})") from error
    random = next((str(node.target) for node in graph.graph.nodes if _is_random(node)), None)
    if random is not None:
        raise NoGraph(f"the model draws random numbers ({random})")
    return graph


def _reads_a_value(error: BaseException | None) -> bool:
    """Return whether tracing failed because the computation depends on a tensor's value."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    while error is not None:
        if isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_random(node: Any) -> bool:
    """Return whether a node draws random numbers; attention with a dropout of 0 does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def _leaves(chunk: Chunk) -> list[Tensor]:
    return tree_flatten((chunk.x, chunk.y, chunk.group))[0]


def _numbers(public: Public, part: Part) -> list[Tensor]:
    seen = part.seen
    return [*public[:3], part.total, part.counts, seen.losses, seen.norms, seen.weights]


def _agree(a: Tensor, b: Tensor, slack: float) -> bool:
    """Return whether two results are equal up to rounding, and up to `slack`."""
    scale = float(a.double().abs().nan_to_num().max()) if a.numel() else 0.0
    return torch.allclose(
        a.double(), b.double(), rtol=_TOLERANCE, atol=_TOLERANCE * scale + slack, equal_nan=True
    )


def _in_memory(noise: Noise) -> list[Tensor]:
    """Return the values of all releases as tensors, which a graph needs.

    They are copied, because torch compiles once more for a view of another tensor.
    """
    return [part[:].clone() for part in noise.values()]


def _first_line(error: BaseException) -> str:
    """Return the first line of the error at the root; the compiler wraps it in several others."""
    while (inner := _inner(error)) is not None:
        error = inner
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _inner(error: BaseException) -> BaseException | None:
    """Return the error that this one wraps. Dynamo's errors have theirs as the context."""
    if error.__cause__ is None and type(error).__module__.startswith("torch._dynamo"):
        return error.__context__
    return error.__cause__


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the warnings and errors that torch logs; `NoGraph` has the reason of a failure."""
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    handlers = {handler for name in names for handler in logging.getLogger(name).handlers}
    for handler in handlers:
        handler.addFilter(_below_warning)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_below_warning)


def _below_warning(record: logging.LogRecord) -> bool:
    """Return whether a record is less severe than a warning, as those of TORCH_LOGS are."""
    return record.levelno < logging.WARNING
