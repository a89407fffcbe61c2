"""Wall-clock of whole comparisons as a user runs them, with empty caches and with filled ones.

    python benchmarks/compare.py [--what demo adult dutch mnist] [--device cpu|cuda] [--seeds 5] [--rounds 1]
                                 [--once] [--data-dir FOLDER] [--quick] [--out FILE]

Each is `evenclip compare NAME --seeds N` in a process of its own, start of Python included; "demo" is what `make demo`
runs. "Cold" has an empty EVENCLIP_CACHE and an empty cache of torch's compiler; "warm" finds both as cold left them,
but no finished runs: everything is trained again; --once leaves it out. A dataset whose files are not there is left
out, and said. On a CPU the speed of a matrix product on all cores at once is taken before and after each command: what
else is on a machine can cost a third of it. Writes benchmarks/results/compare.json (compare-cuda.json) with the
environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import arguments, ratios, save, spread

from evenclip.data.catalogue import SOURCES
from evenclip.data.disk import data_directory
from evenclip.processes import cores

# `evenclip` itself: where it is used from its source, there is no command of that name.
_COMMAND = [sys.executable, "-c", "from evenclip.cli import main; main()"]
DEMO_SEEDS = 3  # those of `make demo`
# Products of the size of the MLP's, for a second, on one core.
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
    """What follows `evenclip` on the command line."""
    seeds = DEMO_SEEDS if what == "demo" else given.seeds
    words = ["compare", *([] if what == "demo" else [what]), "--seeds", str(seeds)]
    words += ["--epochs", "1"] if given.quick else []
    return words + (["--device", given.device] if given.device != "cpu" else [])


def seconds(words: list[str], folder: Path, name: str, data: Path | None) -> float:
    """One command from start to end, in caches of this folder and with results of its own.

    Raises:
        RuntimeError: it failed; the message is what it said last.
    """
    caches = {"EVENCLIP_CACHE": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    if data is not None:
        caches["EVENCLIP_DATA"] = str(data)
    started = time.perf_counter()
    done = subprocess.run(
        [*_COMMAND, *words, "--out", str(folder / name)], env={**os.environ, **caches}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    took = time.perf_counter() - started
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(said[-1] if said else f"exit status {done.returncode}")
    return took


def speed() -> float:
    """GFLOP/s of a product on a core, all of them busy with one: the mean."""
    begun = [subprocess.Popen([sys.executable, "-c", _PRODUCTS], stdout=subprocess.PIPE) for _ in range(cores())]
    found = [float(process.communicate()[0]) for process in begun]
    return sum(found) / len(found)


def measured(what: str, given: argparse.Namespace) -> dict[str, Any]:
    """One comparison, cold and then warm, as often as asked."""
    words = options(what, given)
    times: dict[str, list[float]] = {"cold": []} if given.once else {"cold": [], "warm": []}
    speeds: dict[str, list[float]] = {which: [] for which in times if given.device == "cpu"}
    chosen: list[Any] = []
    for _ in range(given.rounds):
        before = speed() if speeds else 0.0
        with tempfile.TemporaryDirectory(prefix="compare-") as folder:
            for which, found in times.items():
                found.append(seconds(words, Path(folder), which, given.data_dir))
                if speeds:
                    after = speed()
                    speeds[which].append((before + after) / 2)
                    before = after
                    print(f"  {what}, {which}: {found[-1]:.1f} s at {speeds[which][-1]:.0f} GFLOP/s a core", flush=True)
            chosen = _measurements(Path(folder) / "cache")
    return {
        "what": what,
        "command": "evenclip " + " ".join(words),
        "seconds": {which: spread(found)[1] for which, found in times.items()},
        "ratio": None if given.once else spread(ratios(times["warm"], times["cold"]))[1],
        "measured": chosen,
        "rounds": times,
        "GFLOP/s": speeds,
    }


def _measurements(cache: Path) -> list[Any]:
    """What the runs measured to choose how they are computed, and kept."""
    return [json.loads(path.read_text()) for path in sorted((cache / "measured").glob("*.json"))]


def lacks(what: str, given: argparse.Namespace) -> str | None:
    """What hinders this comparison; None if nothing does."""
    return SOURCES["adult" if what == "demo" else what].lacks(data_directory(given.data_dir))


def table(found: list[dict[str, Any]], skipped: dict[str, str]) -> str:
    """Readable at 80 columns."""
    lines = [f"{'':<48}{'cold, s':>10}{'warm, s':>10}{'ratio':>10}"]
    for row in found:
        cold, warm = row["seconds"]["cold"], row["seconds"].get("warm")
        again = f"{'-':>10}{'-':>10}" if warm is None else f"{warm:>10.1f}{row['ratio']:>10.2f}"
        lines.append(f"{row['command'][:47]:<48}{cold:>10.1f}{again}")
    return "\n".join(lines + [f"{what}: {why}"[:80] for what, why in skipped.items()])


def main() -> None:
    """Measure, print, keep."""
    parser = arguments(__doc__ or "", rounds=1)
    names = ("demo", "adult", "dutch", "mnist", "celeba")
    parser.add_argument("--what", nargs="+", choices=names, help="which; without it all that suit the device")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="with empty caches only")
    parser.add_argument("--data-dir", type=Path, help="where files of datasets are, instead of EVENCLIP_DATA")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.seeds = 1, min(given.seeds, 2)
    what = given.what or ["demo", "adult", "dutch", *(["mnist"] if given.device != "cpu" else [])]
    found, skipped = [], {}
    for one in what:
        why = lacks(one, given)
        if why is None:
            try:
                found.append(measured(one, given))
                print(table(found[-1:], {}).splitlines()[1], flush=True)
                continue
            except RuntimeError as error:
                why = str(error)
        skipped[one] = why
    print("\n" + table(found, skipped))
    save("compare", given, {"rows": found, "skipped": skipped})


if __name__ == "__main__":
    main()
