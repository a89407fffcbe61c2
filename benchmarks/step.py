"""Step time and peak memory of private training beside plain SGD and Opacus, in one interleaved run.

    python benchmarks/step.py [--models dutch adult mnist celeba] [--batch 256] [--rounds 15] [--quick]

What is timed is the whole step as a user runs it: `fit`'s own step (Poisson sampling, gather, passes, noise, ledger,
update) beside a plain PyTorch loop over shuffled batches, and Opacus 1.6 with its own Poisson loader, by hooks and by
ghost clipping. The ways take turns within a round, so that whatever else the machine does hits all alike; a time is
the median over the rounds. Peak memory is the highest resident size of a process of its own that takes a few steps,
less what it had before the first.

Prints a table of ratios to plain SGD and writes benchmarks/results/step.json with the environment.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import evenclip
from evenclip.models import cnn, mlp, sigmoid_then_softmax

RESULTS = Path(__file__).parent / "results"
WAYS = ("plain SGD", "evenclip", "Opacus ghost", "Opacus hooks")

# model, samples, shape of one, classes, steps a round, steps for memory
CASES: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...], int, int, int]] = {
    "dutch": (sigmoid_then_softmax, 48_336, (59,), 2, 300, 50),
    "adult": (mlp, 23_484, (98,), 2, 60, 30),
    "mnist": (cnn, 8_192, (1, 28, 28), 10, 4, 3),
    "celeba": (lambda: cnn(channels=3, side=64, classes=2), 2_048, (3, 64, 64), 2, 1, 2),
}


def data(case: str) -> tuple[Tensor, Tensor]:
    """Synthetic data of the dataset's shape: times do not depend on what the numbers are."""
    _, n, shape, classes, _, _ = CASES[case]
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, *shape, generator=generator), torch.randint(0, classes, (n,), generator=generator)


def plain(case: str, batch: int) -> Iterator[None]:
    """The loop that everybody writes: shuffled batches, loss.backward(), SGD."""
    model, (x, y) = CASES[case][0](), data(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        for indices in torch.randperm(len(y)).split(batch):
            optimizer.zero_grad()
            cross_entropy(model(x[indices]), y[indices]).backward()
            optimizer.step()
            yield


def ours(case: str, batch: int) -> Iterator[None]:
    """`fit` itself, paused after every step."""
    model, (x, y) = CASES[case][0](), data(case)
    rule = evenclip.DPSGDGlobalAdapt(C0=1.0, sigma=1.0)
    run = evenclip.prepare(model, (x, y), rule=rule, epochs=10_000, batch_size=batch, lr=0.01, seed=0)
    with run.listening():
        while True:
            run.update(run.step())
            yield


def opacus(case: str, batch: int, mode: str) -> Iterator[None]:
    """Opacus as its documentation has it, with Poisson batches; an empty batch is not skipped by us either."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    model, (x, y) = CASES[case][0](), data(case)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch)
    ghost = mode == "ghost"
    made = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, grad_sample_mode=mode, **({"criterion": nn.CrossEntropyLoss()} if ghost else {}),
    )  # fmt: skip
    model, optimizer, criterion, loader = made if ghost else (made[0], made[1], nn.CrossEntropyLoss(), made[2])
    while True:
        for xb, yb in loader:
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()
            yield


def loop(way: str, case: str, batch: int) -> Iterator[None]:
    """The training loop of one way, a step at a time."""
    if way == "plain SGD":
        return plain(case, batch)
    if way == "evenclip":
        return ours(case, batch)
    return opacus(case, batch, way.removeprefix("Opacus "))


def times(case: str, batch: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a step, way by way, round by round, interleaved."""
    steps = CASES[case][4]
    loops = {way: loop(way, case, batch) for way in WAYS}
    for running in loops.values():
        for _ in range(min(steps, 5)):
            next(running)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, running in loops.items():
            started = time.perf_counter()
            for _ in range(steps):
                next(running)
            found[way].append((time.perf_counter() - started) / steps)
    return found


def peak_memory(way: str, case: str, batch: int) -> float:
    """MiB that the steps of one way need beyond what the process has with model and data loaded, in a process of its
    own.
    """
    command = [sys.executable, __file__, "--memory", way, "--models", case, "--batch", str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def measure_memory(way: str, case: str, batch: int) -> float:
    """The body of that process."""
    running = loop(way, case, batch)
    next(running)  # everything is imported and allocated by the time we look
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
    before = status("VmRSS")
    for _ in range(CASES[case][5]):
        next(running)
    return status("VmHWM") - before


def status(field: str) -> float:
    """A size from the kernel's account of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def environment() -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "?",
    )
    versions = {name: metadata.version(name) for name in ("evenclip", "torch", "opacus", "numpy")}
    return {"cpu": cpu, "threads": torch.get_num_threads(), "python": platform.python_version(), **versions}


def row(case: str, batch: int, rounds: int) -> dict[str, Any]:
    """Everything measured about one model."""
    seconds = times(case, batch, rounds)
    return {
        "model": case,
        "batch": batch,
        "ms": {way: 1e3 * statistics.median(found) for way, found in seconds.items()},
        # The ratio of medians within rounds: both sides saw the same minute of the machine.
        "ratio": {
            way: statistics.median(a / b for a, b in zip(found, seconds["plain SGD"], strict=True))
            for way, found in seconds.items()
        },
        "MiB": {way: peak_memory(way, case, batch) for way in WAYS},
        "rounds": seconds,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, readable at 80 columns."""
    lines = [f"{'':8}{'batch':>6}" + "".join(f"{way:>16}" for way in WAYS)]
    for found in rows:
        lines.append(f"{found['model']:8}{found['batch']:>6}" + "".join(f"{found['ms'][w]:>13.2f} ms" for w in WAYS))
        lines.append(f"{'':14}" + "".join(f"{found['ratio'][w]:>15.2f}×" for w in WAYS))
        lines.append(f"{'':14}" + "".join(f"{found['MiB'][w]:>12.0f} MiB" for w in WAYS))
    return "\n".join(lines)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="three rounds, nothing written")
    parser.add_argument("--memory", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(given.threads)
    if given.memory:
        print(measure_memory(given.memory, given.models[0], given.batch))
        return
    rows = [row(case, given.batch, 3 if given.quick else given.rounds) for case in given.models]
    print(table(rows))
    print("\nms: median step; ×: ratio to plain SGD, median over rounds; MiB: peak of the steps beyond model and data")
    if not given.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "step.json").write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
