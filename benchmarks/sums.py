"""Compare ways to compute Σ w_i δ_i a_iᵀ, the weighted sum of a linear layer of one position.

    python benchmarks/sums.py [--rounds 15] [--threads 2] [--quick] [--out FILE]

    float32       one product in float32, as in plain SGD; one record may move it by more than S
    float64       one product in float64, as evenclip computes it
    blocks of 64  products of 64 records in float32, added up in float64

Blocks of 64 would make S_fl larger than S by 0.35 % at B = 256 and by 3.5 % at B = 4,096; float64
by less than 10⁻⁷. The ways take turns in one process. Writes benchmarks/results/sums.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from _measure import arguments, interleaved, prepare_torch, ratios, save, spread
from torch import Tensor

# Rows of a block, numbers of outputs, numbers of inputs: Adult's three layers, and wider ones.
SHAPES = (
    (288, 256, 98),
    (288, 256, 256),
    (288, 2, 256),
    (288, 1024, 1024),
    (4096, 256, 256),
    (4096, 1024, 1024),
)
_BLOCK = 64

Sum = Callable[[Tensor, Tensor, Tensor], Tensor]


def single(delta: Tensor, a: Tensor, weights: Tensor) -> Tensor:
    """Compute one product in float32."""
    return (delta * weights.float().unsqueeze(1)).T @ a


def double(delta: Tensor, a: Tensor, weights: Tensor) -> Tensor:
    """Compute one product in float64."""
    return (delta.double() * weights.unsqueeze(1)).T @ a.double()


def blocks(delta: Tensor, a: Tensor, weights: Tensor) -> Tensor:
    """Compute a product in float32 for each block of records; add them up in float64."""
    weighted = delta * weights.float().unsqueeze(1)
    total = torch.zeros(delta.shape[1], a.shape[1], dtype=torch.float64)
    for part, inputs in zip(torch.split(weighted, _BLOCK), torch.split(a, _BLOCK), strict=True):
        total.add_(part.T @ inputs)
    return total


WAYS: dict[str, Sum] = {"float32": single, "float64": double, "blocks of 64": blocks}


def loop(way: Sum, rows: int, outputs: int, inputs: int) -> Iterator[None]:
    """Compute one sum per item."""
    random = torch.Generator().manual_seed(0)
    delta, a = (torch.randn(rows, width, generator=random) for width in (outputs, inputs))
    weights = torch.rand(rows, generator=random, dtype=torch.float64)
    while True:
        way(delta, a, weights)
        yield


def main() -> None:
    """Measure every shape, print a table, and write the file."""
    given = arguments(str(__doc__), rounds=15).parse_args()
    prepare_torch(given.threads, given.device, tf32=False)
    rounds, seconds = (3, 0.05) if given.quick else (given.rounds, 0.2)
    rows = []
    print(f"{'records × outputs × inputs':<28}" + "".join(f"{way:>16}" for way in WAYS))
    for shape in SHAPES:
        makes = {name: (lambda way=way, s=shape: loop(way, *s)) for name, way in WAYS.items()}
        timed = interleaved(makes, rounds=rounds, seconds=seconds, device=given.device)
        row = {"shape": list(shape), "us": {}, "ratio": {}}
        for name, times in timed.seconds.items():
            row["us"][name] = spread(times)[1] * 1e6
            row["ratio"][name] = spread(ratios(times, timed.seconds["float32"]))
        rows.append(row)
        figures = [f"{row['us'][n]:,.0f} ({row['ratio'][n][1]:.2f})" for n in WAYS]
        print(f"{' × '.join(map(str, shape)):<28}" + "".join(f"{text:>16}" for text in figures))
    print("Microseconds, and in brackets the ratio to float32: medians over the rounds.")
    save("sums", given, {"rows": rows})


if __name__ == "__main__":
    main()
