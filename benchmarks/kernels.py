"""Which kernels a step on a GPU is made of, and how long each takes: ours beside plain SGD in a CUDA graph.

    python benchmarks/kernels.py [--models mnist] [--tf32] [--out FILE]

Steps are taken under Nsight Compute (`ncu`), which times every kernel by itself, so that the sum leaves out the pauses
between them: what a step takes beyond it is launches. Writes benchmarks/results/kernels-cuda.json with the environment.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from _measure import arguments, prepare_torch, save
from _ways import Setup, alone, graphed

from evenclip import Performance

WARM, STEPS = 60, 3
WAYS = ("plain", "ours")
# Kernels by what they are for, told by their names; the first that fits. Whatever fits none is arithmetic around them.
KINDS = {
    "weight gradients": r"wgrad|^_weight_gradient",
    "convolutions, forward": r"fprop",
    "convolutions, backward": r"dgrad",
    "layouts": r"nchwToNhwc|nhwcToNchw",
    "matrix products": r"gemm|cutlass",
    "weighted sums": r"_mv_|^_weighted_rows",
    "noise": r"rshift|bitwise_xor_mul|^_normal",
}
UNITS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}


def taken(way: str, model: str, *, tf32: bool) -> None:
    """A few steps that `ncu` looks at, after many that it does not."""
    prepare_torch(2, "cuda", tf32)
    setup = Setup(model, 256, "cuda", tf32)
    steps = graphed(setup) if way == "plain" else alone(setup, Performance(compile=True, tf32=tf32))
    for _ in range(WARM):
        next(steps)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for _ in range(STEPS):
        next(steps)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    os._exit(0)  # taking a GPU's graphs down takes half a minute


def looked_at(way: str, model: str, *, tf32: bool, log: Path) -> None:
    """The same under `ncu`."""
    task = json.dumps({"way": way, "model": model, "tf32": tf32})
    look = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--graph-profiling", "node"]
    look += ["--metrics", "gpu__time_duration.sum", "--csv", "--log-file", str(log)]
    subprocess.run([*look, sys.executable, __file__, task], check=True)


def kernels(log: Path) -> Iterator[tuple[str, float]]:
    """Name and microseconds of every kernel."""
    lines = [line for line in log.read_text().splitlines() if line.startswith('"')]
    for row in csv.DictReader(lines):
        if row["Metric Name"] == "gpu__time_duration.sum":
            yield row["Kernel Name"], float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]


def kind(name: str) -> str:
    """What a kernel is for."""
    return next((kind for kind, marks in KINDS.items() if re.search(marks, name)), "all else")


def summed(log: Path) -> dict[str, Any]:
    """Microseconds and kernels of one step, by what they are for."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in kernels(log):
        found[kind(name)].append(microseconds)
    parts = {kind: {"us": sum(us) / STEPS, "kernels": len(us) / STEPS} for kind, us in sorted(found.items())}
    whole = {what: sum(part[what] for part in parts.values()) for what in ("us", "kernels")}
    return {"parts": parts, **whole}


def main() -> None:
    """As the command line has it."""
    parser = arguments(__doc__ or "", rounds=1)
    parser.add_argument("--models", nargs="+", default=["mnist"])
    parser.add_argument("--tf32", action="store_true")
    parser.set_defaults(device="cuda")
    given = parser.parse_args()
    rows = []
    with TemporaryDirectory() as scratch:
        for model in given.models:
            row: dict[str, Any] = {"model": model}
            for way in WAYS:
                log = Path(scratch) / f"{model}-{way}.csv"
                looked_at(way, model, tf32=given.tf32, log=log)
                row[way] = summed(log)
            rows.append(row)
            print(f"{model}: plain {row['plain']['us']:.0f} µs in {row['plain']['kernels']:.0f} kernels, "
                  f"ours {row['ours']['us']:.0f} µs in {row['ours']['kernels']:.0f}")  # fmt: skip
            for part in [*KINDS, "all else"]:
                line = [row[way]["parts"].get(part, {"us": 0.0, "kernels": 0.0}) for way in WAYS]
                print(f"  {part:24}" + "".join(f"{each['us']:9.1f} µs in {each['kernels']:4.1f}" for each in line))
    save("kernels", given, {"rows": rows})


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        taken(**json.loads(sys.argv[1]))
    else:
        main()
