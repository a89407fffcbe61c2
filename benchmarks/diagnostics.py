"""Seconds of one full look at a step's risk (audit/decomposition), beside an epoch of plain SGD.

    python benchmarks/diagnostics.py [--rounds 3] [--probes 100] [--device cpu|cuda] [--quick]
    [--out FILE]

Adult's shape: 23,484 samples in two groups, the MLP, the whole training set, as many random signs
for the trace as the paper takes. "one by one" has the same products a vector at a time by
differentiating twice, on a few vectors and scaled up. All take turns in one process. Writes
benchmarks/results/diagnostics.json with the environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from _cases import CASES, data, grouped
from _measure import arguments, prepare_torch, save, spread, wait
from torch.nn.functional import cross_entropy

import evenclip
from evenclip.audit import curvature
from evenclip.audit.curvature import Curvature, signs
from evenclip.audit.decomposition import RiskTerms

# Vectors that are taken one by one, of which the time of all follows.
_FEW = 4


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def epoch(device: str, samples: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Of plain SGD, batches of 256."""
    x, y = samples
    model = CASES["adult"].make(0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for rows in torch.randperm(len(y), device=x.device).split(256):
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


def look(device: str, samples: tuple[torch.Tensor, ...], probes: int) -> None:
    """One step of training that is looked at."""
    observer = RiskTerms(samples, 0.01, probes=probes, every=1)
    evenclip.fit(
        CASES["adult"].make(0).to(device),
        samples,
        rule=evenclip.DPSGD(C0=0.5),
        batch_size=256,
        steps=1,
        lr=0.01,
        seed=0,
        observers=[observer],
    )


def one_by_one(device: str, samples: tuple[torch.Tensor, torch.Tensor]) -> None:
    """A few products, each of them alone."""
    found = Curvature(CASES["adult"].make(0).to(device), cross_entropy, *samples)
    found._product, found._jets = curvature._reverse_over_reverse, False
    found.forms(signs(_FEW, found.layout.size))


def main() -> None:
    """Measure, print, keep."""
    parser = arguments(__doc__ or "", rounds=3)
    parser.add_argument("--probes", type=int, default=100)
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.probes = 1, 8
    prepare_torch(given.threads, given.device, False)
    samples = data(CASES["adult"], 256, given.device, 0)
    ways = {
        "plain epoch": partial(epoch, given.device, samples),
        "full look": partial(look, given.device, grouped(samples), given.probes),
        "products one by one": partial(one_by_one, given.device, samples),
    }
    scale = {"products one by one": (given.probes + 2) / _FEW}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for work in ways.values():
        work()
    for _ in range(given.rounds):
        for name, work in ways.items():
            found[name].append(timed(work, given.device) * scale.get(name, 1.0))
    seconds = {name: spread(values)[1] for name, values in found.items()}
    print(f"{'Adult, ' + str(given.probes) + ' probes':<28}{'s':>9}{'epochs':>9}")
    for name, value in seconds.items():
        print(f"{name:<28}{value:>9.2f}{value / seconds['plain epoch']:>9.1f}")
    save("diagnostics", given, {"seconds": seconds, "rounds": found})


if __name__ == "__main__":
    main()
