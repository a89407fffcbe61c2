"""How long the comparison on all of CelebA takes on one GPU, from a part of it, on random images of its shape.

    python benchmarks/celeba.py [--tf32] [--seeds 5] [--window 25] [--data N] [--out FILE]

162,770 images of 3×64×64, five rules, 30 epochs of 636 steps. As in `evenclip compare celeba --device cuda`, a rule has
a process, all five share the GPU, and within one the seeds take turns. Once every process has been at it for a while,
their steps are counted for so many seconds. The whole is then

    until then, less the steps that were taken meanwhile  +  all steps ÷ steps a second

Reading the images (once, 19 MB of JPEG a thousand) and testing the models are not in it. Writes
benchmarks/results/celeba-cuda.json (celeba-cuda-tf32.json) with the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
from _cases import CASES
from _measure import arguments, save
from _ways import LR, RULES

import evenclip
from evenclip.data import Dataset
from evenclip.stack import Stack

N, EPOCHS, BATCH = 162_770, 30, 256
EPOCH = -(-N // BATCH)
# Steps of each run before its process counts as warmed up: most sizes of batches have come by then, and are recorded.
WARM = 100
# Seconds between two words of a process; and in which all of them have to be warm.
TICK, PATIENCE = 0.25, 300.0


def train(rule: int, seeds: int, n: int, *, tf32: bool) -> None:
    """The body of a rule's process: for ever; says how many steps of all its runs are behind it."""
    case = CASES["celeba"]
    random = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randint(256, (n, *case.shape), dtype=torch.uint8, device="cuda", generator=random)
    y, group = (torch.randint(2, (n,), device="cuda", generator=random) for _ in range(2))
    data = Dataset(x, y, group, ("0", "1"), ("0", "1"))
    runs = [
        evenclip.prepare(
            case.make(seed), data, rule=RULES[rule], epochs=EPOCHS, batch_size=BATCH, lr=LR, seed=seed, device="cuda",
            performance=evenclip.Performance(tf32=tf32),
        )
        for seed in range(seeds)
    ]  # fmt: skip
    stacks = [Stack([run], compile=True) for run in runs]
    told = 0.0
    for stack in stacks:
        stack.listening().__enter__()
    for t in count(1):
        for stack in stacks:
            stack.step()
        if t % 10 == 0 and time.monotonic() - told > TICK:
            torch.cuda.synchronize()
            told = time.monotonic()
            print(t * seeds, flush=True)


class Process:
    """A rule's process, as it is heard from."""

    def __init__(self, task: dict[str, Any], folder: Path) -> None:
        self._said = (folder / str(task["rule"])).open("w+")
        self._errors = (folder / f"{task['rule']}.errors").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(task)], stdout=self._said, stderr=self._errors,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def steps(self) -> int:
        """Of all its runs, until now.

        Raises:
            RuntimeError: it has ended; the message is what it said last.
        """
        if self._process.poll() is not None:
            self._errors.seek(0)
            raise RuntimeError((self._errors.read().strip().splitlines() or ["a process has ended"])[-1])
        self._said.seek(0)
        whole = self._said.read().rpartition("\n")[0].splitlines()
        return int(whole[-1]) if whole else 0

    def end(self) -> None:
        """No more."""
        self._process.kill()
        self._process.wait()


def measured(seeds: int, n: int, window: float, *, tf32: bool) -> dict[str, Any]:
    """Seconds until all are warm, steps until then, steps a second from there on; and the whole."""
    with tempfile.TemporaryDirectory(prefix="celeba-") as folder:
        started = time.monotonic()
        tasks = [{"rule": i, "seeds": seeds, "n": n, "tf32": tf32} for i in range(len(RULES))]
        processes = [Process(task, Path(folder)) for task in tasks]
        try:
            while min(process.steps() for process in processes) < WARM * seeds:
                if time.monotonic() - started > PATIENCE:
                    raise RuntimeError(f"not warm after {PATIENCE:.0f} s")
                time.sleep(TICK)
            warm, before = time.monotonic() - started, sum(process.steps() for process in processes)
            time.sleep(window)
            took, after = time.monotonic() - started - warm, sum(process.steps() for process in processes)
        finally:
            for process in processes:
                process.end()
    rate, steps = (after - before) / took, len(RULES) * seeds * EPOCHS * EPOCH
    return {
        "steps": steps, "warm": warm, "steps until then": before, "steps a second": rate, "window": took,
        "seconds": warm + (steps - before) / rate,
    }  # fmt: skip


def main() -> None:
    """Measure, print, keep."""
    parser = arguments(__doc__ or "", rounds=1)
    parser.add_argument("--tf32", action="store_true", help="operands of 11 bits")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--window", type=float, default=25.0, help="seconds in which steps are counted")
    parser.add_argument("--data", type=int, default=N, help="images, fewer of them for a try")
    given = parser.parse_args()
    given.device = "cuda"
    found = measured(given.seeds, given.data, 5.0 if given.quick else given.window, tf32=given.tf32)
    print(f"{found['warm']:.0f} s until warm, {found['steps a second']:.0f} steps a second")
    print(f"all {found['steps']:,} steps: {found['seconds'] / 60:.1f} minutes")
    save("celeba", given, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        train(**json.loads(sys.argv[2]))
    main()
