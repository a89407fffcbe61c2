"""Compare training on a Parquet file with training from memory, and measure slow items.

    python benchmarks/parquet.py [--rows 5000000] [--batches 256 4096] [--memory MiB ...]
                                 [--rounds 3] [--quick] [--out FILE]

The file has 20 columns of float32, three of text and a class, in row groups of 131,072 rows. It is
written to a temporary folder. Every variant trains one epoch in a separate process, and the
variants take turns:

    open    seconds until the first step: one pass that checks every row of the file, or reading
            and encoding the table
    train   seconds of the epoch; rows/s are the drawn rows divided by these
    cpu     processor seconds of all threads in the epoch; other load changes them little
    peak    highest resident size of the process, including torch, pandas and pyarrow

"Items" is a map-style dataset of 3×64×64 images, decompressed with zlib on access by 0, 1 and 2
readers. Writes benchmarks/results/parquet.json with the environment.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _measure import arguments, in_child, prepare_torch, ratios, save, spread, status
from torch import nn

import evenclip
from evenclip.data import Dataset, MapDataset, parquet

NUMBERS, ROW_GROUP = 20, 2**17
VALUES = {
    "job": ["baker", "clerk", "driver", "farmer", "miller", "nurse", "smith", "teacher"],
    "region": ["north", "east", "south", "west"],
    "sex": ["f", "m"],
    "repaid": ["no", "yes"],
}
MODELS = {
    "linear": lambda features: nn.Linear(features, 2),
    "mlp": lambda features: evenclip.models.mlp(features, 2),
}
SECONDS = 1800.0
FIGURES = ("open", "train", "cpu", "rows/s", "peak")


def schema() -> dict[str, Any]:
    """Return the public schema of the columns."""
    numbers = {
        f"x{i:02d}": {"kind": "number", "range": [-4, 4], "missing": False} for i in range(NUMBERS)
    }
    texts = {
        name: {"kind": "category", "values": values, "missing": False}
        for name, values in VALUES.items()
    }
    return {"evenclip_schema": 1, "columns": {**numbers, **texts}}


def write(path: Path, rows: int) -> None:
    """Write the file, one row group at a time."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    random = np.random.default_rng(0)
    writer = None
    for start in range(0, rows, ROW_GROUP):
        n = min(ROW_GROUP, rows - start)
        columns: dict[str, Any] = {
            f"x{i:02d}": random.standard_normal(n, np.float32) for i in range(NUMBERS)
        }
        codes = {name: random.integers(0, len(values), n) for name, values in VALUES.items()}
        codes["repaid"] = (columns["x00"] + columns["x01"] + random.standard_normal(n) > 0).astype(
            np.int64
        )
        columns |= {name: pa.array(np.array(VALUES[name])[code]) for name, code in codes.items()}
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=ROW_GROUP)
    assert writer is not None
    writer.close()


# --- in a separate process ---


def opened(task: dict[str, Any]) -> Any:
    """Open the data of a variant."""
    if task["way"] == "items":
        return MapDataset(Items(task["rows"]))
    data = parquet(
        task["path"], target="repaid", group="sex", schema=schema(), memory=task["memory"] * 2**20
    )
    if task["way"] == "file":
        return data
    import pandas as pd

    frame, encoder = pd.read_parquet(task["path"]), data.encoder
    x, y, group = encoder.encode(frame), encoder.target_of(frame), encoder.group_of(frame)
    return Dataset(x, y, group, data.group_names, data.class_names)


def epoch(task: dict[str, Any]) -> dict[str, float]:
    """Train one epoch; return its figures."""
    prepare_torch(task["threads"], "cpu", tf32=False)
    began = time.perf_counter()
    data = opened(task)
    torch.manual_seed(0)
    if task["way"] == "items":
        model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2))
    else:
        model = MODELS[task["model"]](
            NUMBERS + sum(len(VALUES[name]) for name in ("job", "region", "sex"))
        )
    run = evenclip.prepare(
        model, data, rule=evenclip.DPSGDGlobalAdapt(), batch_size=task["batch"], lr=0.1, seed=0,
        performance=evenclip.Performance(readers=task.get("readers", 0)),
    )  # fmt: skip
    ready, computed = time.perf_counter(), time.process_time()
    with run.listening():
        while run.t < run.settings.steps:
            run.update(run.step())
    done = time.perf_counter()
    return {
        "open": ready - began,
        "train": done - ready,
        "cpu": time.process_time() - computed,
        "rows/s": run.trace.rows[0]["samples"] / (done - ready),
        "peak": status("VmHWM"),
        "sum": float(run.vector.double().sum()),
    }


class Items(torch.utils.data.Dataset[Any]):
    """Images that are decompressed on access."""

    def __init__(self, n: int) -> None:
        random = np.random.default_rng(0)
        images = [
            np.repeat(random.integers(0, 255, (3, 64, 16), np.uint8), 4, axis=2) for _ in range(64)
        ]
        self._packed, self._n = [zlib.compress(image.tobytes()) for image in images], n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        content = zlib.decompress(self._packed[i % len(self._packed)])
        image = np.frombuffer(content, np.uint8).reshape(3, 64, 64)
        return torch.from_numpy(image[:, :, :: -1 if i % 2 else 1].copy()), i % 2


# --- in the main process ---


def compared(path: Path, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table: file and memory, for each model and batch size."""
    for model in given.models:
        for batch in given.batches:
            common = {"path": str(path), "model": model, "batch": batch, "threads": given.threads}
            ways = {
                f"file, {mib} MiB": {**common, "way": "file", "memory": mib} for mib in given.memory
            }
            ways["memory"] = {**common, "way": "memory", "memory": 1}
            yield {"model": model, "batch": batch, **taken_in_turn(ways, given.rounds, "memory")}


def items(given: argparse.Namespace) -> dict[str, Any]:
    """Measure the items by number of readers."""
    common = {"way": "items", "rows": given.items, "batch": 256, "threads": given.threads}
    ways = {f"{readers} readers": {**common, "readers": readers} for readers in (0, 1, 2)}
    return {"batch": 256, **taken_in_turn(ways, given.rounds, "0 readers")}


def taken_in_turn(ways: dict[str, dict[str, Any]], rounds: int, to: str) -> dict[str, Any]:
    """Measure every variant in every round.

    Returns medians, and the ratio of the rates to those of the variant `to`, by round.
    """
    by_variant: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, task in ways.items():
            measured = in_child(__file__, task, SECONDS)
            if "error" in measured:
                raise RuntimeError(f"{name}: {measured['error']}")
            by_variant[name].append(measured)
            print(
                f"  {name}: "
                f"{json.dumps({key: round(value, 2) for key, value in measured.items()})}",
                flush=True,
            )
    sums = {measured["sum"] for measurements in by_variant.values() for measured in measurements}
    rates = {
        name: [measured["rows/s"] for measured in measurements]
        for name, measurements in by_variant.items()
    }
    return {
        "same model": len(sums) == 1,
        "ways": {
            name: {
                **{key: spread([measured[key] for measured in measurements])[1] for key in FIGURES},
                "ratio": spread(ratios(rates[name], rates[to]))[1],
            }
            for name, measurements in by_variant.items()
        },
        "rounds": by_variant,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Format the results at 80 columns."""
    lines = [
        f"{'':<34}{'open, s':>8}{'train, s':>9}{'cpu, s':>7}{'rows/s':>9}{'ratio':>6}{'MiB':>6}"
    ]
    for row in rows:
        for name, way in row["ways"].items():
            label = f"{row.get('model', 'items')}, batch {row['batch']}: {name}"
            figures = (
                f"{way['open']:>8.1f}{way['train']:>9.1f}{way['cpu']:>7.1f}{way['rows/s']:>9.0f}"
            )
            lines.append(f"{label:<34}{figures}{way['ratio']:>6.2f}{way['peak']:>6.0f}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and save."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(epoch(json.loads(sys.argv[2]))))
        return
    parser = arguments(__doc__ or "", rounds=3)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--items", type=int, default=50_000)
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 4096])
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["linear"],
        help="with linear, reading dominates",
    )
    parser.add_argument(
        "--memory", type=int, nargs="+", default=[512], help="MiB for the rows of pending batches"
    )
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.rows, given.items = 1, min(given.rows, 300_000), min(given.items, 5000)
    with tempfile.TemporaryDirectory(prefix="parquet-") as folder:
        path = Path(folder) / "rows.parquet"
        write(path, given.rows)
        size = path.stat().st_size
        print(f"{given.rows} rows, {size / 2**20:.0f} MiB")
        rows = list(compared(path, given))
    rows.append(items(given))
    print("\n" + table(rows))
    save(
        "parquet",
        given,
        {"file": {"rows": given.rows, "MiB": size / 2**20, "row group": ROW_GROUP}, "rows": rows},
    )


if __name__ == "__main__":
    main()
