"""Measure the wall-clock time of whole comparisons.

    python benchmarks/compare.py [--what demo adult dutch mnist] [--device cpu|cuda] [--seeds 5]
                                 [--rounds 3] [--data-dir FOLDER] [--quick] [--out FILE]

Each is `evenclip compare NAME --seeds N` in a separate process with an empty EVENCLIP_CACHE,
including the start of Python; "demo" is the command of `make demo`. A dataset without its files is
skipped, with the reason. On a CPU the speed of a matrix product on all cores is measured before and
after each command, because other load on the machine can reduce it by a third. Writes
benchmarks/results/compare.json (compare-cuda.json) with the environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import arguments, save, spread

from evenclip.data.catalogue import SOURCES
from evenclip.data.disk import data_directory

# The `evenclip` command; it is not installed when evenclip is used from its source.
_COMMAND = [sys.executable, "-c", "from evenclip.cli import main; main()"]
DEMO_SEEDS = 3  # as in `make demo`
# Products of the size of the MLP's, for one second on one core.
_PRODUCTS = """
import time, torch
torch.set_num_threads(1)
a, done = torch.ones(256, 256), -200
while done < 0 or time.perf_counter() < start + 1:
    a @ a
    done += 1
    if done == 0:
        start = time.perf_counter()
print(done * 2 * 256**3 / (time.perf_counter() - start) / 1e9)
"""


def options(what: str, given: argparse.Namespace) -> list[str]:
    """Return the arguments of `evenclip`."""
    seeds = DEMO_SEEDS if what == "demo" else given.seeds
    words = ["compare", *([] if what == "demo" else [what]), "--seeds", str(seeds)]
    words += ["--epochs", "1"] if given.quick else []
    return words + (["--device", given.device] if given.device != "cpu" else [])


def seconds(words: list[str], data: Path | None) -> float:
    """Time one command with an empty cache.

    Raises:
        RuntimeError: the command failed; the message is the last line of its errors.
    """
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        env = {**os.environ, "EVENCLIP_CACHE": f"{folder}/cache"}
        if data is not None:
            env["EVENCLIP_DATA"] = str(data)
        command = [*_COMMAND, *words, "--out", f"{folder}/out"]
        started = time.perf_counter()
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        took = time.perf_counter() - started
    if done.returncode:
        errors = done.stderr.strip().splitlines()
        raise RuntimeError(errors[-1] if errors else f"exit status {done.returncode}")
    return took


def speed() -> float:
    """Return the mean GFLOP/s per core of products on all cores at once."""
    cores = len(os.sched_getaffinity(0))
    processes = [
        subprocess.Popen([sys.executable, "-c", _PRODUCTS], stdout=subprocess.PIPE)
        for _ in range(cores)
    ]
    speeds = [float(process.communicate()[0]) for process in processes]
    return sum(speeds) / len(speeds)


def measured(what: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure one comparison `given.rounds` times."""
    words, times, speeds = options(what, given), list[float](), list[float]()
    for _ in range(given.rounds):
        before = speed()
        times.append(seconds(words, given.data_dir))
        speeds.append((before + speed()) / 2)
        print(f"  {what}: {times[-1]:.1f} s at {speeds[-1]:.0f} GFLOP/s a core", flush=True)
    return {
        "what": what,
        "command": "evenclip " + " ".join(words),
        "seconds": spread(times)[1],
        "rounds": times,
        "GFLOP/s": speeds,
    }


def lacks(what: str, given: argparse.Namespace) -> str | None:
    """Return which data this comparison lacks, or None."""
    return SOURCES["adult" if what == "demo" else what].lacks(data_directory(given.data_dir))


def table(rows: list[dict[str, Any]], skipped: dict[str, str]) -> str:
    """Format the results at 80 columns."""
    lines = [f"{row['command'][:59]:<60}{row['seconds']:>10.1f}" for row in rows]
    return "\n".join(
        [f"{'':<60}{'s':>10}", *lines, *(f"{what}: {why}"[:80] for what, why in skipped.items())]
    )


def main() -> None:
    """Measure, print and save."""
    parser = arguments(__doc__ or "", rounds=3)
    names = ("demo", "adult", "dutch", "mnist", "celeba")
    parser.add_argument(
        "--what", nargs="+", choices=names, help="comparisons; default: those that suit the device"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--data-dir", type=Path, help="folder with dataset files, instead of EVENCLIP_DATA"
    )
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.seeds = 1, min(given.seeds, 2)
    what = given.what or ["demo", "adult", "dutch", *(["mnist"] if given.device != "cpu" else [])]
    rows, skipped = [], {}
    for name in what:
        why = lacks(name, given)
        if why is None:
            try:
                rows.append(measured(name, given))
                continue
            except RuntimeError as error:
                why = str(error)
        skipped[name] = why
    print("\n" + table(rows, skipped))
    save("compare", given, {"rows": rows, "skipped": skipped})


if __name__ == "__main__":
    main()
