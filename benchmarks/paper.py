"""Measure the wall-clock time of each of the paper's tables.

    python benchmarks/paper.py [--what adult dutch ...] [--device cpu|cuda] [--tf32] [--seeds 5]
                               [--data-dir FOLDER] [--keep FOLDER] [--out FILE]

Each is `evenclip paper table NAME` in a separate process, in an empty folder (or in --keep, which
keeps the tables), including the start of Python and without diagnostics. Tables whose data is
missing are skipped and reported. The authors report four days on one GPU for all tables. Writes
benchmarks/results/paper.json (paper-cuda.json) with the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import arguments, save

from evenclip.reproduction import observed
from evenclip.reproduction.tables import TABLES

_COMMAND = [sys.executable, "-c", "from evenclip.cli import main; main()"]


def seconds(words: list[str], data: Path | None, keep: Path | None) -> float:
    """Time the command of one table.

    Raises:
        RuntimeError: the command failed; the message is the last line of its errors.
    """
    with tempfile.TemporaryDirectory(prefix="paper-") as folder:
        env = {**os.environ, "EVENCLIP_CACHE": f"{folder}/cache"}
        words = [*words, "--out", f"{folder}/paper" if keep is None else str(keep)]
        words += [] if data is None else ["--data-dir", str(data)]
        started = time.perf_counter()
        done = subprocess.run(
            [*_COMMAND, *words], env=env, capture_output=True, text=True, check=False
        )
        took = time.perf_counter() - started
    if done.returncode:
        errors = done.stderr.strip().splitlines()
        raise RuntimeError(errors[-1] if errors else f"exit status {done.returncode}")
    return took


def main() -> None:
    """Measure, print and save."""
    parser = arguments(__doc__ or "", rounds=1)
    usual = ["adult", "adult-matched", "dutch", "dutch-matched"]
    parser.add_argument("--what", nargs="+", choices=list(TABLES), default=usual)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--data-dir", type=Path, help="folder with dataset files, instead of EVENCLIP_DATA"
    )
    parser.add_argument("--tf32", action="store_true", help="allow TF32 products on a GPU")
    parser.add_argument(
        "--keep", type=Path, help="folder for the tables; its finished runs are not repeated"
    )
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    skipped = {}
    print(f"{'':<60}{'seconds':>10}")
    for name in given.what:
        why = observed.lacks(TABLES[name].dataset, given.data_dir)
        if why is not None:
            skipped[name] = why
            continue
        words = ["paper", "table", name, "--seeds", str(given.seeds)]
        words += ["--device", given.device] if given.device != "cpu" else []
        words += ["--tf32"] if given.tf32 else []
        took = seconds(words, given.data_dir, given.keep)
        rows.append({"table": name, "command": " ".join(["evenclip", *words]), "seconds": took})
        print(f"{rows[-1]['command']:<60}{took:>10.1f}", flush=True)
    print("\n".join(f"{name}: {why}"[:80] for name, why in skipped.items()))
    save("paper", given, {"rows": rows, "skipped": skipped})


if __name__ == "__main__":
    main()
