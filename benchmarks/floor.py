"""Lower bounds on the time of a step, from its operations and bytes.

    python benchmarks/floor.py [--models adult mnist] [--batch 256] [--device cpu|cuda]
                               [--threads 2] [--rounds 9] [--quick] [--out FILE]

Each part of a step has a number of floating-point operations and of bytes, counted from the model's
shapes. Its floor is the longer of the two times at the speeds of this machine. The speeds are
measured with a product of two large matrices, and a copy as large as the working set of the step.
A float32 is 4 bytes, every tensor is written once and read once by each part that uses it, and
nothing is assumed to be fused. The noise counts as ordinary operations, although logarithms and
cosines take longer. Writes benchmarks/results/floor.json (floor-cuda.json) with the environment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from _cases import CASES
from _measure import arguments, interleaved, prepare_torch, ratios, save, spread, wait
from _ways import Setup, loop
from torch import Tensor, nn

_FLOAT = 4
# Operations per noise value: 80 for a block of Philox (20 products, 40 XORs, 20 sums) of eight
# values; and about 20 each for logarithm, root, sine and cosine of a pair.
_NOISE = 80 / 8 + 4 * 20 / 2
PARTS = ("gather", "forward", "backward", "norms", "weighted sums", "noise", "update")
PLAIN = ("gather", "forward", "backward", "weight gradients", "update")


class Layer(NamedTuple):
    """Size and operations of a layer for one sample.

    Attributes:
        module: the layer.
        a: number of inputs.
        o: number of outputs.
        products: multiplications and additions of its matrix product, 0 for a layer without
            parameters.
        P: number of parameters.
    """

    module: nn.Module
    a: int
    o: int
    products: int
    P: int

    @property
    def is_formed(self) -> bool:
        """Whether per-sample gradients are formed: for convolutions with few parameters."""
        return isinstance(self.module, nn.Conv2d)


@dataclass
class Count:
    """Operations and bytes of one part of a step."""

    flops: float = 0.0
    bytes: float = 0.0

    def add(self, flops: float, numbers: float) -> None:
        """Add operations, and numbers read or written."""
        self.flops += flops
        self.bytes += _FLOAT * numbers


@dataclass
class Counts:
    """The parts of a private step, and of a plain one, by name."""

    private: dict[str, Count] = field(default_factory=lambda: {name: Count() for name in PARTS})
    plain: dict[str, Count] = field(default_factory=lambda: {name: Count() for name in PLAIN})

    def both(self, part: str, flops: float, numbers: float) -> None:
        """Add to both the private and the plain step."""
        self.private[part].add(flops, numbers)
        self.plain[part].add(flops, numbers)


def layers(model: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    """Return the layers of a model in call order, for one sample of this shape.

    Raises:
        ValueError: the operations of a layer are not known.
    """
    recorded: list[Layer] = []

    def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        a, o, P = args[0].numel(), output.numel(), sum(p.numel() for p in module.parameters())
        if isinstance(module, nn.Flatten):
            return
        if isinstance(module, nn.Linear) and args[0].ndim == 2:
            products = 2 * module.weight.numel()
        elif isinstance(module, nn.Conv2d) and module.weight.numel() <= a + o:
            products = 2 * module.weight.numel() * math.prod(output.shape[2:])
        elif not P:
            products = 0
        else:
            raise ValueError(
                f"{module} is not supported; choose among dutch, adult, mnist and celeba."
            )
        recorded.append(Layer(module, a, o, products, P))

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(record)
    with torch.no_grad():
        model(torch.zeros(1, *shape))
    return recorded


def counts(model: nn.Module, shape: tuple[int, ...], B: int) -> Counts:
    """Count the operations and bytes of a step on a batch of B samples."""
    total, first = Counts(), True
    total.both("gather", 0, 2 * B * math.prod(shape))
    for layer in layers(model, shape):
        a, o, P = B * layer.a, B * layer.o, layer.P
        if not P:  # element by element
            total.both("forward", o, a + o)
            total.both("backward", 2 * o, a + 2 * o)
            continue
        total.both("forward", B * layer.products, a + P + o)
        if not first:
            total.both("backward", B * layer.products, o + P + a)
        first = False
        total.plain["weight gradients"].add(B * layer.products, a + o + P)
        norms, sums = total.private["norms"], total.private["weighted sums"]
        if layer.is_formed:
            norms.add(B * layer.products + 2 * B * P, a + o + 2 * B * P)  # formed, then squared
            sums.add(2 * B * P, B * P + P)
        else:
            norms.add(2 * (a + o), a + o)  # ‖δ‖² (‖a‖² + 1)
            sums.add(B * layer.products + min(a, o), a + o + 2 * min(a, o) + P)
    P = sum(p.numel() for p in model.parameters())
    total.private["noise"].add((_NOISE + 2) * P, P + 3 * P)  # drawn, then added
    total.both("update", 2 * P, 3 * P)
    return total


# --- the machine ---


def best(function: Callable[[], Any], device: str, tries: int = 7) -> float:
    """Return the seconds of the fastest of some tries."""
    function()
    times = []
    for _ in range(tries):
        wait(device)
        started = time.perf_counter()
        function()
        wait(device)
        times.append(time.perf_counter() - started)
    return min(times)


def matmul_speed(device: str) -> float:
    """Return the operations per second of a matrix product."""
    n = 1024 if device == "cpu" else 8192
    a, b, out = (torch.rand(n, n, device=device) for _ in range(3))
    return 2 * n**3 / best(partial(torch.mm, a, b, out=out), device)


def copy_speed(device: str, size: float) -> float:
    """Return the bytes per second, read and written, of copies with `size` bytes in total."""
    a = torch.rand(max(1, int(size / 2 / _FLOAT)), device=device)
    b, again = torch.empty_like(a), max(1, int(2**24 / size))
    return 2 * a.nbytes * again / best(lambda: [b.copy_(a) for _ in range(again)], device)


def working_set(model: nn.Module, shape: tuple[int, ...], B: int) -> float:
    """Return the bytes that a step keeps: activations and parameters."""
    return _FLOAT * sum(B * layer.o + layer.P for layer in layers(model, shape))


# --- measuring ---


def measured(setup: Setup, rounds: int, turn: float) -> dict[str, Any]:
    """Return the counts of one model, the floors they imply, and measured times."""
    case = CASES[setup.case]
    total = counts(case.make(0), case.shape, setup.batch)
    flops = matmul_speed(setup.device)
    moved = copy_speed(setup.device, working_set(case.make(0), case.shape, setup.batch))
    makes = {way: partial(loop, way, setup) for way in ("plain SGD", "evenclip")}
    timed = interleaved(makes, rounds=rounds, seconds=turn, device=setup.device)
    floors = {
        way: {
            name: 1e3 * max(part.flops / flops, part.bytes / moved) for name, part in parts.items()
        }
        for way, parts in (("plain SGD", total.plain), ("evenclip", total.private))
    }
    times = {way: spread(each)[1] for way, each in timed.seconds.items()}
    both = len(times) == 2
    return {
        "model": setup.case,
        "batch": setup.batch,
        "GFLOP/s": flops / 1e9,
        "GB/s": moved / 1e9,
        "MFLOP": {name: part.flops / 1e6 for name, part in total.private.items()},
        "MB": {name: part.bytes / 1e6 for name, part in total.private.items()},
        "floor": floors["evenclip"],
        "plain floor": floors["plain SGD"],
        "ms": {way: 1e3 * each for way, each in times.items()},
        "ratio": spread(ratios(timed.seconds["evenclip"], timed.seconds["plain SGD"]))[1]
        if both
        else None,
        "failed": timed.failed,
    }


def table(row: dict[str, Any]) -> str:
    """Format the results at 80 columns."""
    speeds = f"{row['GFLOP/s']:,.0f} GFLOP/s, {row['GB/s']:,.0f} GB/s"
    lines = [
        f"{row['model']}, batch {row['batch']}, at {speeds}",
        f"{'':<24}{'MFLOP':>10}{'MB':>10}{'floor, ms':>12}",
    ]
    for part, floor in row["floor"].items():
        lines.append(
            f"  {part:<22}{row['MFLOP'][part]:>10.1f}{row['MB'][part]:>10.2f}{floor:>12.3f}"
        )
    for way, floors in (("plain SGD", row["plain floor"]), ("evenclip", row["floor"])):
        floor, ms = sum(floors.values()), row["ms"].get(way)
        took = "not measured" if ms is None else f"took {ms:.3f} ms, {ms / floor:.1f}×"
        lines.append(f"  {way + ', all':<42}{floor:>12.3f}   {took}")
    quotient = sum(row["floor"].values()) / sum(row["plain floor"].values())
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return "\n".join(
        [*lines, f"  ratio to plain SGD: {quotient:.2f} by the floors, {ratio} measured"]
    )


def main() -> None:
    """Count, measure, print and save."""
    parser = arguments(__doc__ or "", rounds=9)
    parser.add_argument(
        "--models",
        nargs="+",
        default=["adult", "mnist"],
        choices=["dutch", "adult", "mnist", "celeba"],
    )
    parser.add_argument("--batch", type=int, default=256)
    given = parser.parse_args()
    prepare_torch(given.threads, given.device, tf32=False)
    rounds, turn = (min(given.rounds, 3), 0.03) if given.quick else (given.rounds, 0.15)
    rows = []
    for case in given.models:
        rows.append(measured(Setup(case, given.batch, given.device), rounds, turn))
        print(table(rows[-1]) + "\n", flush=True)
    save("floor", given, {"rows": rows})


if __name__ == "__main__":
    main()
