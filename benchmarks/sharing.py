"""How runs share a GPU: steps a second by processes and by runs in each; and how long a whole comparison takes so.

    python benchmarks/sharing.py [--models mnist celeba] [--processes 1 5] [--runs 5 1] [--window 10] [--tf32]
                                 [--out FILE]

Runs of one process take turns, each on a stream of its own; processes are given the GPU by its driver, slice by slice.
Data have the shape of MNIST and of all of CelebA (162,770 images) and random contents. Once every process has been at
it for a while, their steps are counted for so many seconds. A whole comparison, five rules with five seeds each, is

    seconds until then, with empty caches and one process  +  all steps ÷ steps a second of one process with five runs

which leaves out reading the data and testing the models. Writes benchmarks/results/sharing-cuda.json
(sharing-cuda-tf32.json) with the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import count, product
from pathlib import Path
from typing import Any

import torch
from _cases import CASES
from _measure import arguments, prepare_torch, save
from _ways import LR, RULES

import evenclip
from evenclip.data import Dataset
from evenclip.stack import Stack

BATCH, SEEDS = 256, 5
# Samples and epochs, as the paper has them.
WHOLE = {"mnist": (60_000, 60), "celeba": (162_770, 30)}
# Steps of each run before its process counts as warmed up.
WARM = 50
# Seconds between two words of a process; and in which all of them have to be warm.
TICK, PATIENCE = 0.25, 300.0


def train(model: str, rule: int, runs: int, *, tf32: bool) -> None:
    """The body of a process: for ever; says how many steps of all its runs are behind it."""
    prepare_torch(1, "cuda", tf32)
    case, (n, _) = CASES[model], WHOLE[model]
    random = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randint(256, (n, *case.shape), dtype=torch.uint8, device="cuda", generator=random)
    y = torch.randint(case.classes, (n,), device="cuda", generator=random)
    data = Dataset(x, y, y % 2, ("even", "odd"), tuple(map(str, range(case.classes))))
    made = [
        evenclip.prepare(
            case.make(seed), data, rule=RULES[rule], epochs=10_000, batch_size=BATCH, lr=LR, seed=seed, device="cuda",
            performance=evenclip.Performance(tf32=tf32),
        )
        for seed in range(runs)
    ]  # fmt: skip
    stacks = [Stack([run], compile=True) for run in made]
    told = 0.0
    with ExitStack() as ears:
        for stack in stacks:
            ears.enter_context(stack.listening())
        for t in count(1):
            for stack in stacks:
                stack.step()
            if t % 10 == 0 and time.monotonic() - told > TICK:
                torch.cuda.synchronize()
                told = time.monotonic()
                print(t * runs, flush=True)


class Process:
    """A process, as it is heard from."""

    def __init__(self, task: dict[str, Any], folder: Path, cache: Path) -> None:
        self._said, self._errors = folder / f"{task['rule']}.steps", folder / f"{task['rule']}.errors"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(task)], stdout=self._said.open("w"),
            stderr=self._errors.open("w"),
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def steps(self) -> int:
        """Of all its runs, until now.

        Raises:
            RuntimeError: it has ended; the message is what it said last.
        """
        if self._process.poll() is not None:
            raise RuntimeError((self._errors.read_text().strip().splitlines() or ["a process has ended"])[-1])
        whole = self._said.read_text().rpartition("\n")[0].splitlines()
        return int(whole[-1]) if whole else 0

    def end(self) -> None:
        """No more."""
        self._process.kill()
        self._process.wait()


def measured(model: str, processes: int, runs: int, window: float, cache: Path, *, tf32: bool) -> dict[str, Any]:
    """Seconds until all are warm, and steps a second from there on."""
    with tempfile.TemporaryDirectory(prefix="sharing-") as folder:
        started = time.monotonic()
        # Those of one process are of the rule whose step is the longest.
        tasks = [{"model": model, "rule": (3 + i) % len(RULES), "runs": runs, "tf32": tf32} for i in range(processes)]
        them = [Process(task, Path(folder), cache) for task in tasks]
        try:
            while min(process.steps() for process in them) < WARM * runs:
                if time.monotonic() - started > PATIENCE:
                    raise RuntimeError(f"not warm after {PATIENCE:.0f} s")
                time.sleep(TICK)
            warm, before = time.monotonic() - started, sum(process.steps() for process in them)
            time.sleep(window)
            took, after = time.monotonic() - started - warm, sum(process.steps() for process in them)
        finally:
            for process in them:
                process.end()
    about = {"model": model, "processes": processes, "runs": runs}
    return {**about, "warm": warm, "steps a second": (after - before) / took, "window": took}


def whole(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Minutes that the comparison on each dataset takes, where that was measured."""
    found = {}
    for row in rows:
        if (row["processes"], row["runs"]) == (1, SEEDS):
            n, epochs = WHOLE[row["model"]]
            steps = len(RULES) * SEEDS * epochs * -(-n // BATCH)
            cold = next(other["warm"] for other in rows if other["model"] == row["model"])
            found[row["model"]] = (cold + steps / row["steps a second"]) / 60
    return found


def main() -> None:
    """Measure, print, keep."""
    parser = arguments(__doc__ or "", rounds=1)
    parser.add_argument("--models", nargs="+", choices=list(WHOLE), default=list(WHOLE))
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 5])
    parser.add_argument("--runs", nargs="+", type=int, default=[SEEDS, 1], help="of each process")
    parser.add_argument("--window", type=float, default=10.0, help="seconds in which steps are counted")
    parser.add_argument("--tf32", action="store_true", help="operands of 11 bits")
    given = parser.parse_args()
    given.device = "cuda"
    rows = []
    print(f"{'':<10}{'processes':>10}{'runs in each':>14}{'steps a second':>16}{'ms a step':>11}{'until warm, s':>15}")
    for model in given.models:
        with tempfile.TemporaryDirectory(prefix="compiled-") as cache:
            for processes, runs in product(given.processes, given.runs):
                rows.append(measured(model, processes, runs, given.window, Path(cache), tf32=given.tf32))
                rate = rows[-1]["steps a second"]
                print(
                    f"{model:<10}{processes:>10}{runs:>14}{rate:>16.0f}{1e3 / rate:>11.2f}{rows[-1]['warm']:>15.0f}",
                    flush=True,
                )
        save("sharing", given, {"rows": rows, "minutes": whole(rows)})
    for model, minutes in whole(rows).items():
        print(f"A comparison on {model}, five rules with five seeds: {minutes:.1f} minutes.")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        train(**json.loads(sys.argv[2]))
    main()
