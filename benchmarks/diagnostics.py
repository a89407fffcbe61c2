"""Compare the time of one full risk measurement (audit/decomposition) with a plain SGD epoch.

    python benchmarks/diagnostics.py [--rounds 3] [--probes 100] [--device cpu|cuda] [--quick]
                                     [--out FILE]

The data have Adult's shape: 23,484 samples in two groups. The model is the MLP, measured on the
whole training set with as many random signs for the trace as in the paper. "one by one" computes
the same products one vector at a time by differentiating twice, on a few vectors, scaled up. All
take turns in one process. Writes benchmarks/results/diagnostics.json with the environment.
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

# Vectors computed one by one; the time of all is extrapolated.
_FEW = 4


def timed(work: Callable[[], object], device: str) -> float:
    """Return the seconds that `work` takes."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def epoch(device: str, samples: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Train one epoch with plain SGD and batches of 256."""
    x, y = samples
    model = CASES["adult"].make(0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for rows in torch.randperm(len(y), device=x.device).split(256):
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


def risk_terms(device: str, samples: tuple[torch.Tensor, ...], probes: int) -> None:
    """Train one step and measure its risk terms."""
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
    """Compute a few products one by one."""
    hessian = Curvature(CASES["adult"].make(0).to(device), cross_entropy, *samples)
    hessian._product, hessian._taylor = curvature._reverse_over_reverse, False
    hessian.forms(signs(_FEW, hessian.layout.size))


def main() -> None:
    """Measure, print and save."""
    parser = arguments(__doc__ or "", rounds=3)
    parser.add_argument("--probes", type=int, default=100)
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.probes = 1, 8
    prepare_torch(given.threads, given.device, False)
    samples = data(CASES["adult"], 256, given.device, 0)
    ways = {
        "plain epoch": partial(epoch, given.device, samples),
        "full look": partial(risk_terms, given.device, grouped(samples), given.probes),
        "products one by one": partial(one_by_one, given.device, samples),
    }
    scale = {"products one by one": (given.probes + 2) / _FEW}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for work in ways.values():
        work()
    for _ in range(given.rounds):
        for name, work in ways.items():
            times[name].append(timed(work, given.device) * scale.get(name, 1.0))
    seconds = {name: spread(values)[1] for name, values in times.items()}
    print(f"{'Adult, ' + str(given.probes) + ' probes':<28}{'s':>9}{'epochs':>9}")
    for name, value in seconds.items():
        print(f"{name:<28}{value:>9.2f}{value / seconds['plain epoch']:>9.1f}")
    save("diagnostics", given, {"seconds": seconds, "rounds": times})


if __name__ == "__main__":
    main()
