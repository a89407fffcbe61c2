"""The whole step of one or several runs as one graph of tensor operations.

`step.blind_step` is traced once: gather, passes, norms, count, weights, weighted sum and releases, mapped over the runs
that share a rule, and runs of several rules side by side. The graph is run as it was traced, or compiled
(`torch.compile`), and on a GPU recorded as a CUDA graph, so that a step is one launch. Noise is drawn inside from the
run's key and the number of the step, or handed in.

What comes out are numbers: which rows were real, what goes into the ledger and the trace, is for the caller. A model
that cannot be traced, or draws random numbers of its own, has no program (`NoProgram`).
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from evenclip import noise
from evenclip.compiler import Axis, Compiled, compiled
from evenclip.data.dataset import Samples
from evenclip.gradients.anylayer import call_with
from evenclip.gradients.functional import FunctionalTape
from evenclip.lowering import lowered
from evenclip.release import Releases
from evenclip.rules import Guarded, Rule
from evenclip.step import Chunk, Columns, blind_step

__all__ = ["Engine", "Inputs", "Kind", "NoProgram", "Program"]

_log = logging.getLogger(__name__)


# Rows that compiled code for any number of them is tried on as well.
_FEW = 6
# Batches are filled up to a multiple of this: on a GPU each size is recorded once, the first time it comes.
_STRIDE = 8


class NoProgram(RuntimeError):  # noqa: N818  # it is no error, there is another road
    """Why a step cannot be made a graph."""


@dataclass(frozen=True)
class Kind:
    """Runs that are computed alike.

    Attributes:
        rule: their rule.
        B: their expected batch size; None: given with every step.
        sizes: name of each release -> how many numbers it needs.
        runs: how many; 0 for one without an axis of runs in front of everything.
    """

    rule: Rule
    B: float | None
    sizes: tuple[tuple[str, int], ...]
    runs: int

    @property
    def is_noisy(self) -> bool:
        """Whether any noise is added at all."""
        return self.rule.sigma != 0 or dict(self.sizes)["count"] > 0


class Inputs(NamedTuple):
    """What a step of a kind starts from, run by run.

    Attributes:
        vector: the trainable parameters.  # [run, parameter]
        state: the rule's public state.  # [run, ...]
        rows: the batch, as places in the data.  # [run, row], int64
        size: how many of the rows are samples, the first ones; the others only fill up. Empty: all are.  # [run, 1]
        B: what sums are divided by, where that is not fixed; else empty.  # [run, 1]
        noise: of this step; empty without any. Or the words to make it of, int64. On a GPU the keys to draw it by.
            # [run, number] or [run, pair] or [run, 2] int64
        more: with words, the bits they lack; else empty.  # [run, pair]
    """

    vector: Tensor
    state: Tensor
    rows: Tensor
    size: Tensor
    B: Tensor
    noise: Tensor
    more: Tensor


class Program:
    """The step of these kinds of runs."""

    def __init__(self, tape: FunctionalTape, kinds: Sequence[Kind]) -> None:
        self.tape, self.kinds = tape, tuple(kinds)
        self.multipliers: list[dict[str, float]] = [{} for _ in kinds]  # of each kind's releases, for the ledger

    def __call__(self, data: Samples, inputs: Sequence[Inputs]) -> list[Columns]:
        """One step, operation by operation.

        Args:
            data: of all runs, one after the other.
            inputs: of every kind.
        """
        return [self._kind(i, data, given) for i, given in enumerate(inputs)]

    def _kind(self, i: int, data: Samples, given: Inputs) -> Columns:
        kind = self.kinds[i]
        if kind.runs == 0:
            x, y, group = data.take(given.rows)
            return self._run(i, given, x, y, torch.zeros_like(given.rows) if group is None else group)
        x, y, group = data.take(given.rows.flatten())
        if group is None:
            group = torch.zeros_like(given.rows)
        x, y = (tree_map(lambda v: v.unflatten(0, given.rows.shape), part) for part in (x, y))
        one = partial(self._run, i)
        arguments = (given, x, y, group.view(given.rows.shape))
        if kind.runs == 1:  # not mapped: a convolution that is mapped over its weights is slower
            alone = tree_map(_first, arguments)
            return Columns(*(column.unsqueeze(0) for column in one(*alone)))
        return torch.func.vmap(one)(*arguments)

    def _run(self, i: int, given: Inputs, x: Any, y: Any, group: Tensor) -> Columns:
        """One run's step."""
        kind = self.kinds[i]
        release = Releases(self._noise(kind, given))
        number = torch.ones_like(given.rows).cumsum(0)  # not arange: the number of rows may be a symbol
        chunk = Chunk(x, y, group, number <= given.size if given.size.numel() else None)
        B = given.B.squeeze(0) if kind.B is None else kind.B
        whole = _Step(self.tape, Guarded(kind.rule, blind=True))
        parameters = {f"model.{name}": p for name, p in self.tape.layout.split(given.vector).items()}
        found: Columns = call_with(whole, parameters, (given.state, chunk, B, release))
        self.multipliers[i] = release.multipliers
        return found

    @staticmethod
    def _noise(kind: Kind, given: Inputs) -> dict[str, Tensor]:
        if not kind.is_noisy:
            return {}
        names, sizes = zip(*kind.sizes, strict=True)
        drawn = given.noise
        if not drawn.is_floating_point():
            drawn = noise.normals(given.noise, given.more, sum(sizes), given.vector.dtype)
        return dict(zip(names, torch.split(drawn, list(sizes)), strict=True))


class _Step(nn.Module):
    """The step as a module around the model, so that its parameters can be put in the model's places."""

    def __init__(self, tape: FunctionalTape, guard: Guarded) -> None:
        super().__init__()
        self.model, self._tape, self._guard = tape.model, tape, guard

    def forward(self, state: Tensor, chunk: Chunk, B: float | Tensor, release: Releases) -> Columns:
        return blind_step(self._tape, self._guard, state, chunk, B, release)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, Tensor) else value


class Engine:
    """A program made fast: traced, and compiled where there is a compiler.

    Attributes:
        compiled: whether a compiler was there.
        clock: number of the step, and a number that counts along with it.  # [2], int64
        t: the first of them: what noise on a GPU is drawn by.  # []
    """

    def __init__(self, program: Program, data: Samples, inputs: Sequence[Inputs], *, compile: bool) -> None:
        """Trace the program: for any number of samples, and of rows unless runs are mapped.

        Args:
            program: the step.
            data: of all runs, one after the other.
            inputs: of some step, for their shapes.
            compile: whether to compile, if that is possible.

        Raises:
            NoProgram: if the step cannot be traced.
        """
        self._program, self._rows = program, inputs[0].rows.shape[-1]
        self._symbolic = all(_is_unmapped(kind) for kind in program.kinds)  # vmap has no symbols for sizes
        self._samples, self._spec = data, tree_flatten(data)[1]
        self._data = [leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor)]
        self._few = _cut(
            self._data, [given.rows[..., : _FEW if self._symbolic else None] for given in inputs], self._rows
        )
        self.clock = torch.zeros(2, dtype=torch.int64, device=self._data[0].device)
        self.t = self.clock[0]
        self._draw = [_Draw(kind, given.vector.dtype) for kind, given in zip(program.kinds, inputs, strict=True)]
        self._run, self.compiled = _known(self, self._drawn(inputs), compile=compile)

    @property
    def multipliers(self) -> list[dict[str, float]]:
        """Of each kind's releases, for the ledger."""
        return self._program.multipliers

    def takes(self, rows: int) -> bool:
        """Whether the graph is for so many rows."""
        return rows >= 2 if self._symbolic else rows == self._rows

    def rows(self, longest: int) -> int:
        """What to fill batches up to of which the longest has so many rows; further ones count for nothing."""
        return max(longest, self._rows) if not self._symbolic else max(1, -(-longest // _STRIDE)) * _STRIDE

    def __call__(self, t: int, inputs: Sequence[Inputs]) -> list[Columns]:
        """One step, of this number."""
        self.t.fill_(t)
        return self.run(inputs)

    def run(self, inputs: Sequence[Inputs]) -> list[Columns]:
        """The step whose number is in `t`: what is recorded on a GPU."""
        inputs, size = self._drawn(inputs), len(Columns._fields)
        if not self.takes(inputs[0].rows.shape[-1]):
            return self._program(self._samples, inputs)
        found = self._run(*self._data, *_flat(inputs))
        return [Columns(*found[i : i + size]) for i in range(0, len(found), size)]

    def _drawn(self, inputs: Sequence[Inputs]) -> Sequence[Inputs]:
        """On a GPU, the step's noise in place of the keys."""
        if not self.t.is_cuda:
            return inputs
        pairs = zip(self._draw, inputs, strict=True)
        return [given._replace(noise=draw(given.noise, self.t)) for draw, given in pairs]

    def traced(self, inputs: Sequence[Inputs]) -> GraphModule:
        """The program as a graph of tensor operations, with symbols for the numbers of samples and of rows."""
        shapes = ShapeEnv()
        fake = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)  # frozen parameters are constants
        free, flat = dict(self._free(inputs)), [*self._data, *_flat(inputs)]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")  # while tracing only
                stand_ins = [_stand_in(fake, tensor, free.get(place)) for place, tensor in enumerate(flat)]
                graph: GraphModule = make_fx(self._of_tensors)(*stand_ins)
        except Exception as error:  # whatever tracing stumbles over, the plain step does the same work
            raise NoProgram(str(error)) from error
        random = next((str(node.target) for node in graph.graph.nodes if _is_random(node)), None)
        if random is not None:
            raise NoProgram(f"the model draws random numbers ({random})")
        if shapes.replacements:
            raise NoProgram("the number of rows or of samples was taken for a constant")
        return graph

    def _of_tensors(self, *flat: Tensor) -> list[Tensor]:
        given = iter(flat)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(self._samples)]
        data, rest, size = tree_unflatten(leaves, self._spec), list(given), len(Inputs._fields)
        inputs = [Inputs(*rest[i : i + size]) for i in range(0, len(rest), size)]
        return [column for columns in self._program(data, inputs) for column in columns]

    def compile(self, graph: GraphModule, inputs: Sequence[Inputs]) -> Compiled | None:
        """The graph compiled, if that can be done; tried out on fewer samples and rows too."""
        free, tries = self._free(inputs), [[*self._data, *_flat(inputs)]]
        if free:
            fewer = [given._replace(rows=_copy(given.rows[..., :_FEW])) for given in inputs]
            data = self._data if self._few is None else self._few
            tries.append([*data, *_flat(fewer if self._symbolic else inputs)])
        # Not the tensors themselves. Data are somebody's, and torch notes on its inputs what may change; and where one
        # tensor is two inputs (empty ones are), torch would make code for that case alone.
        tries = [[tensor.detach() for tensor in given] for given in tries]
        quicker = lowered(graph, exact=_conv_precision() not in ("tf32", "bf16")) if self.t.is_cuda else graph
        return compiled(quicker, tries, free, like=graph)

    def _free(self, inputs: Sequence[Inputs]) -> list[Axis]:
        """Axes of any size: the samples of the data, and the rows of a step."""
        samples = [] if self._few is None else [(place, 0) for place in range(len(self._data))]
        first, size = len(self._data) + Inputs._fields.index("rows"), len(Inputs._fields)
        rows = [(first + i * size, given.rows.ndim - 1) for i, given in enumerate(inputs) if self._symbolic]
        return [*samples, *rows]

    def likeness(self, inputs: Sequence[Inputs]) -> tuple[Any, ...] | None:
        """The same for steps that are the same graph; None where the graph has numbers of its own in it."""
        tape = self._program.tape
        own = [*tape.model.buffers(), *(p for p in tape.model.parameters() if not p.requires_grad)]
        # A class of somebody's own, a layer or a rule, may have numbers in it that do not show.
        if own or not all(type(module).__module__.startswith("torch.nn.") for module in tape.model.modules()):
            return None
        if not all(Guarded(kind.rule).is_ours for kind in self._program.kinds):
            return None
        free = dict(self._free(inputs))
        tensors = [_kind_of(tensor, free.get(i)) for i, tensor in enumerate((*self._data, *_flat(inputs)))]
        precision = torch.backends.cuda.matmul.fp32_precision, _conv_precision()
        return (self._program.kinds, str(tape.model), tape.layout.names, tape.loss, tuple(tensors), precision)


# Graphs that were made in this process: the runs of several seeds share one.
_GRAPHS: dict[Any, tuple[Compiled, bool, list[dict[str, float]]]] = {}


def _known(engine: Engine, inputs: Sequence[Inputs], *, compile: bool) -> tuple[Compiled, bool]:
    """The engine's graph, compiled or not, and whether it is: made once for all that are alike."""
    like = engine.likeness(inputs)
    key = None if like is None or not _is_hashable(like) else (*like, compile)
    if key in _GRAPHS:
        run, compiled, engine.multipliers[:] = _GRAPHS[key]
        return run, compiled
    graph = engine.traced(inputs)
    made = engine.compile(graph, inputs) if compile else None
    run = graph if made is None else made
    if key is not None:
        _GRAPHS[key] = run, made is not None, list(engine.multipliers)
    return run, made is not None


def _is_unmapped(kind: Kind) -> bool:
    """Whether nothing need be mapped: one run, and in a stack a rule that takes a whole batch."""
    return kind.runs == 0 or (kind.runs == 1 and Guarded(kind.rule).is_ours)


def _is_hashable(value: Any) -> bool:
    """Somebody's own rule may not be."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _flat(inputs: Sequence[Inputs]) -> list[Tensor]:
    return [part for given in inputs for part in given]


def _copy(part: Tensor) -> Tensor:
    """A part that lies in memory as a whole does."""
    return part.clone(memory_format=torch.contiguous_format)


def _cut(data: Sequence[Tensor], places: Sequence[Tensor], rows: int) -> list[Tensor] | None:
    """Fewer samples, those at these places among them; None where their number has to be a constant of the graph."""
    n, few = len(data[0]), 2 + max(int(of.max()) for of in places)
    if few >= n or n == rows or not all(part.is_contiguous() for part in data):
        return None
    return [part[:few] for part in data]


def _kind_of(tensor: Tensor, free: int | None) -> tuple[Any, ...]:
    """The same for tensors that one graph serves. Where an axis is free, code counts in 32 bits if those will do."""
    shape = tuple(-1 if axis == free else size for axis, size in enumerate(tensor.shape))
    place = tensor.stride() if free is None else tensor.numel() >= 2**31
    return (shape, place, tensor.dtype, tensor.device)


def _stand_in(fake: FakeTensorMode, tensor: Tensor, free: int | None) -> Tensor:
    """A tensor without numbers, whose size along the free axis is a symbol, the same for all of equal size."""
    kinds = [DimDynamic.DUCK if axis == free else DimDynamic.STATIC for axis in range(tensor.ndim)]
    return fake.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))


def _own_normals(size: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The kernel, where there is one."""
    if dtype != torch.float32 or importlib.util.find_spec("triton") is None:
        return None
    from evenclip import noise_cuda  # triton comes with torch for CUDA

    return partial(noise_cuda.normal, size=size)


class _Draw:
    """Draws the noise of one kind's runs on a GPU, from their keys and the number of the step."""

    def __init__(self, kind: Kind, dtype: torch.dtype) -> None:
        self._size, self._dtype = sum(size for _, size in kind.sizes) if kind.is_noisy else 0, dtype

    def __call__(self, keys: Tensor, t: Tensor) -> Tensor:
        """keys: [run, 2] -> [run, number]; without the axis of runs, if it has none."""
        if not self._size:
            return keys
        with torch.no_grad():
            if keys.ndim == 1:
                return self(keys.unsqueeze(0), t)[0]
            return _normals(self._size, self._dtype, keys.shape[0], keys.device)(keys, t)


@lru_cache(maxsize=32)
def _normals(size: int, dtype: torch.dtype, runs: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """`noise.normal` for so many keys: by our own kernel, or compiled, or as it is."""
    each = torch.func.vmap(partial(noise.normal, size=size, dtype=dtype), in_dims=(0, None))
    keys, t = torch.arange(2 * runs, device=device).view(runs, 2), torch.ones((), dtype=torch.int64, device=device)
    own = _own_normals(size, dtype)
    if own is not None and torch.allclose(own(keys, t), each(keys, t), rtol=1e-4, atol=1e-5):
        return own
    graph: GraphModule = make_fx(lambda *given: [each(*given)])(keys, t)
    made = compiled(graph, [[keys, t]])
    run = graph if made is None else made
    return lambda *given: run(*given)[0]


def _conv_precision() -> str:
    """What operands of convolutions are rounded to on a GPU."""
    found: str = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return found


def _is_random(node: Any) -> bool:
    """Whether an operation draws from torch's generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
