"""What a step has to compute and to move, counted from the model's shapes, and the time that this
takes at the least.

    python benchmarks/floor.py [--models adult mnist] [--batch 256] [--device cpu|cuda] [--threads
                               2] [--rounds 9] [--quick] [--out FILE]

Each part of a step has a number of floating-point operations and of bytes; its floor is the longer
of the two at the speeds of this machine, measured on the spot: a product of two large matrices, and
a copy as large as what the step works on. A float32 is 4 bytes, every tensor is written once and
read once by each part that uses it, and nothing is assumed to be fused. The noise is counted as
operations like any other, though logarithms and cosines take longer. Writes
benchmarks/results/floor.json (floor-cuda.json) with the environment.
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
# Operations for a number of noise: 80 for a block of Philox (20 products, 40 XORs, 20 sums), which
# makes eight numbers; logarithm, root, sine and cosine of a pair, some 20 each.
_NOISE = 80 / 8 + 4 * 20 / 2
PARTS = ("gather", "forward", "backward", "norms", "weighted sums", "noise", "update")
PLAIN = ("gather", "forward", "backward", "weight gradients", "update")


class Layer(NamedTuple):
    """What a layer does for one sample.

    Attributes:
        module: the layer.
        a: numbers that go in.
        o: numbers that come out.
        products: multiplications and additions of its matrix product, 0 for a layer without
            parameters.
        P: its parameters.
    """

    module: nn.Module
    a: int
    o: int
    products: int
    P: int

    @property
    def is_formed(self) -> bool:
        """Whether every sample's gradient is formed: convolutions that have fewer parameters than
        activations.
        """
        return isinstance(self.module, nn.Conv2d)


@dataclass
class Count:
    """Operations and bytes of one part of a step."""

    flops: float = 0.0
    bytes: float = 0.0

    def add(self, flops: float, numbers: float) -> None:
        """So many operations, and numbers read or written."""
        self.flops += flops
        self.bytes += _FLOAT * numbers


@dataclass
class Counts:
    """The parts of a private step, and of a plain one, by name."""

    private: dict[str, Count] = field(default_factory=lambda: {name: Count() for name in PARTS})
    plain: dict[str, Count] = field(default_factory=lambda: {name: Count() for name in PLAIN})

    def both(self, part: str, flops: float, numbers: float) -> None:
        """Something that both do."""
        self.private[part].add(flops, numbers)
        self.plain[part].add(flops, numbers)


def layers(model: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    """The layers of a model in the order they are called, for one sample of this shape.

    Raises:
        ValueError: a layer that this does not know how to count.
    """
    found: list[Layer] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
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
                f"{module} is not counted here; choose among dutch, adult, mnist and celeba."
            )
        found.append(Layer(module, a, o, products, P))

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(note)
    with torch.no_grad():
        model(torch.zeros(1, *shape))
    return found


def counts(model: nn.Module, shape: tuple[int, ...], B: int) -> Counts:
    """Everything that a step on a batch of B samples does."""
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
    """Seconds of the quickest of some tries: a floor wants the machine at its best."""
    function()
    found = []
    for _ in range(tries):
        wait(device)
        started = time.perf_counter()
        function()
        wait(device)
        found.append(time.perf_counter() - started)
    return min(found)


def matmul_speed(device: str) -> float:
    """Operations a second in a product of matrices."""
    n = 1024 if device == "cpu" else 8192
    a, b, out = (torch.rand(n, n, device=device) for _ in range(3))
    return 2 * n**3 / best(partial(torch.mm, a, b, out=out), device)


def copy_speed(device: str, size: float) -> float:
    """Bytes a second, read and written, in copies of tensors that are so many bytes together."""
    a = torch.rand(max(1, int(size / 2 / _FLOAT)), device=device)
    b, again = torch.empty_like(a), max(1, int(2**24 / size))
    return 2 * a.nbytes * again / best(lambda: [b.copy_(a) for _ in range(again)], device)


def working_set(model: nn.Module, shape: tuple[int, ...], B: int) -> float:
    """Bytes of what a step keeps: activations, and parameters."""
    found = layers(model, shape)
    return _FLOAT * sum(B * layer.o + layer.P for layer in found)


# --- measuring ---


def measured(setup: Setup, rounds: int, turn: float) -> dict[str, Any]:
    """The counts of one model, the floors they imply, and the steps as they are."""
    case = CASES[setup.case]
    total = counts(case.make(0), case.shape, setup.batch)
    flops, moved = (
        matmul_speed(setup.device),
        copy_speed(setup.device, working_set(case.make(0), case.shape, setup.batch)),
    )
    makes = {way: partial(loop, way, setup) for way in ("plain SGD", "evenclip")}
    found = interleaved(makes, rounds=rounds, seconds=turn, device=setup.device)
    floors = {
        way: {
            name: 1e3 * max(part.flops / flops, part.bytes / moved) for name, part in parts.items()
        }
        for way, parts in (("plain SGD", total.plain), ("evenclip", total.private))
    }
    times = {way: spread(each)[1] for way, each in found.seconds.items()}
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
        "ratio": spread(ratios(found.seconds["evenclip"], found.seconds["plain SGD"]))[1]
        if both
        else None,
        "failed": found.failed,
    }


def table(found: dict[str, Any]) -> str:
    """Readable at 80 columns."""
    speeds = f"{found['GFLOP/s']:,.0f} GFLOP/s, {found['GB/s']:,.0f} GB/s"
    lines = [
        f"{found['model']}, batch {found['batch']}, at {speeds}",
        f"{'':<24}{'MFLOP':>10}{'MB':>10}{'floor, ms':>12}",
    ]
    for part, floor in found["floor"].items():
        lines.append(
            f"  {part:<22}{found['MFLOP'][part]:>10.1f}{found['MB'][part]:>10.2f}{floor:>12.3f}"
        )
    for way, floors in (("plain SGD", found["plain floor"]), ("evenclip", found["floor"])):
        floor, ms = sum(floors.values()), found["ms"].get(way)
        took = "not measured" if ms is None else f"took {ms:.3f} ms, {ms / floor:.1f}×"
        lines.append(f"  {way + ', all':<42}{floor:>12.3f}   {took}")
    quotient = sum(found["floor"].values()) / sum(found["plain floor"].values())
    ratio = "-" if found["ratio"] is None else f"{found['ratio']:.2f}"
    return "\n".join(
        [*lines, f"  ratio to plain SGD: {quotient:.2f} by the floors, {ratio} measured"]
    )


def main() -> None:
    """Count, measure, print, keep."""
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
